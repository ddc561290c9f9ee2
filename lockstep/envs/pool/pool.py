"""The collector's side of a pool of processes."""

from __future__ import annotations

import multiprocessing
import os
import select
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import torch

from lockstep.config.settings import SettingsError
from lockstep.distributed.shared_memory import SharedMemory
from lockstep.envs.pool.process import serve
from lockstep.system import children
from lockstep.system.machine import cores
from lockstep.system.supervision import StallDetector

_SPIN = 50e-6
"""Seconds of polling for an answer before the wait blocks, if there are spare cores. Waking up takes about as long.
Without spare cores, polling would take a core from the processes that step (measured: steps took up to five times as
long)."""
_LOOK = 0.1
"""Seconds after which a blocked wait checks that all processes are alive."""
_GRACE = 1.0
"""Seconds that processes have to close their environments at the end."""
_WHAT = "An environment process"


class SteppingPool:
    """Processes that step the environments of one collector's shards, several shards at once.

    A process serves requests in the order in which they were sent. All processes end with this one, however it ends.

    Args:
        processes: the number of processes.
        jitter: each step begins with a random pause of up to this many seconds. Tests use it to show that timing does
            not affect results.
        stall_timeout: seconds to wait for an answer without any progress.
    """

    def __init__(self, processes: int, jitter: float = 0.0, stall_timeout: float = float("inf")) -> None:
        self.failed = False
        """Whether the pool cannot serve any more requests, because a process has died or the pool was closed."""
        self.erred = False
        """Whether an environment has raised an error."""
        self.memory = SharedMemory()
        self.used = 0
        """Bytes of `memory` that shards occupy."""
        self._shards = 0
        self._stall_timeout = stall_timeout
        self._spin = _SPIN if processes + 1 < cores() else 0.0
        self._steppers: list[Stepper] = []
        # This must run before multiprocessing joins its children at exit, which would wait forever.
        self._finalize = Finalize(self, _end, (self._steppers,), exitpriority=10)
        context = multiprocessing.get_context("spawn")
        for index in range(processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, self.memory, jitter, torch.get_num_threads())
            process = children.start(serve, arguments, f"lockstep-env-{index}")
            theirs.close()
            self._steppers.append(Stepper(process, ours))
        pool = weakref.ref(self)
        children.watch([stepper.process for stepper in self._steppers], _WHAT, lambda: getattr(pool(), "failed", True))

    def enroll(self, num_envs: int, together: int = 1) -> tuple[int, list[tuple[Stepper, slice]]]:
        """Assign a number to a new shard, and divide its environments into contiguous blocks, one for each process that
        steps some. Processes with the fewest environments get the larger blocks. A block contains whole groups of
        `together` environments."""
        self._shards += 1
        base, extra = divmod(num_envs // together, len(self._steppers))
        blocks: list[tuple[Stepper, slice]] = []
        begin = 0
        for i, stepper in enumerate(sorted(self._steppers, key=lambda stepper: stepper.num_envs)):
            size = (base + (i < extra)) * together
            if size:
                blocks.append((stepper, slice(begin, begin + size)))
                stepper.num_envs += size
                begin += size
        return self._shards, blocks

    def request(self, stepper: Stepper, shard: int, name: str, *arguments: Any) -> None:
        """Send a request. Each shard has at most one open request."""
        stepper.started |= name == "step"
        try:
            stepper.pipe.send((shard, name, *arguments))
        except OSError:
            self._report_death(stepper)

    def answer(self, stepper: Stepper, shard: int, waiting: Callable[[], bool]) -> Any:
        """Wait for a process's answer to a shard's request.

        Args:
            waiting: called about every 0.1 seconds meanwhile; returns whether there was progress.

        Raises:
            RuntimeError: an environment raised an error, after which the shard is unusable (the text contains the
                traceback), or a process died, after which the pool is unusable (the text contains the signal).
            SettingsError: an environment raised this error.
        """
        while shard not in stepper.answers:
            self._wait(stepper, waiting)
            try:
                answered, kind, value = stepper.pipe.recv()
            except (EOFError, OSError):
                self._report_death(stepper)
            stepper.answers[answered] = kind, value
        kind, value = stepper.answers.pop(shard)
        self.erred |= kind != "done"
        if kind == "mistake":
            raise SettingsError(value)
        if kind == "error":
            raise RuntimeError(f"{_WHAT} failed:\n{value}")
        return value

    def _wait(self, stepper: Stepper, waiting: Callable[[], bool]) -> None:
        deadline = time.perf_counter() + self._spin
        while not stepper.poll.poll(0) and time.perf_counter() < deadline:
            os.sched_yield()
        standstill = StallDetector(self._stall_timeout, stepper.num_envs)
        while not stepper.poll.poll(1000 * _LOOK):
            if waiting():
                standstill.moved()
            patience = standstill.too_long(started=stepper.started)
            if patience is not None:
                self.failed = True
                children.show_stack(stepper.process, _WHAT)
                raise RuntimeError(
                    f"{_WHAT} has not answered for {patience:g} seconds (Layout.stall_timeout). Its stack is printed "
                    "above. To allow longer, use stall_timeout=SECONDS in the layout."
                )
            for other in self._steppers:
                if not other.process.is_alive():
                    self._report_death(other)

    def _report_death(self, stepper: Stepper) -> NoReturn:
        self.failed = True
        stepper.process.join(_GRACE)  # a pipe closes a moment before the exit code is known
        raise RuntimeError(f"{_WHAT} {children.death_report(stepper.process)}") from None

    def close(self) -> None:
        """Close all environments and end the processes."""
        self.failed = True
        self._finalize()
        self.memory.close()


class Stepper:
    """The parent's side of one process."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe
        self.poll = select.poll()
        self.poll.register(pipe.fileno(), select.POLLIN)
        self.answers: dict[int, tuple[str, Any]] = {}
        """(kind, value) by shard: answers that arrived while another shard's was awaited."""
        self.num_envs = 0
        self.started = False
        """Whether steps have been requested. Before that, environments are being made, which may take longer."""


def _end(steppers: list[Stepper]) -> None:
    for stepper in steppers:
        stepper.pipe.close()
    deadline = time.monotonic() + _GRACE
    for stepper in steppers:
        stepper.process.join(max(0.0, deadline - time.monotonic()))
    for stepper in steppers:
        stepper.process.kill()
        stepper.process.join()
