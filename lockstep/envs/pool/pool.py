"""The processes of a pool, as their collector sees them."""

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
"""Seconds of polling for an answer before the wait blocks, if there are spare cores; waking up takes about as long.
Without spare cores polling takes a core from the processes that step (measured: steps took up to five times as
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
        processes: how many.
        jitter: tests set it to show that timing does not affect results: each step begins with a pause of random
            length up to this many seconds.
        stall_timeout: seconds to wait for an answer while no progress is seen.
    """

    def __init__(self, processes: int, jitter: float = 0.0, stall_timeout: float = float("inf")) -> None:
        self.failed = False
        """Whether a process has died, so that the pool can serve no more requests."""
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
        """Number a new shard, and divide its environments into contiguous blocks, one for each process that steps some.
        Processes with the fewest environments get the larger blocks. A block holds whole groups of `together`."""
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
        """Send a request; each shard has at most one open request."""
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
            RuntimeError: an environment raised an error, which ends the use of the shard (the text holds the
                traceback), or a process died, which ends the use of the pool (the text holds the signal).
            SettingsError: an environment raised it.
        """
        while shard not in stepper.answers:
            self._wait(stepper, waiting)
            try:
                answered, kind, value = stepper.pipe.recv()
            except (EOFError, OSError):
                self._report_death(stepper)
            stepper.answers[answered] = kind, value
        kind, value = stepper.answers.pop(shard)
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
        """(kind, value) by shard: answers that arrived during a wait for another shard."""
        self.num_envs = 0
        self.started = False
        """Whether steps were requested. Until then environments are being made, which may take longer."""


def _end(steppers: list[Stepper]) -> None:
    for stepper in steppers:
        stepper.pipe.close()
    deadline = time.monotonic() + _GRACE
    for stepper in steppers:
        stepper.process.join(max(0.0, deadline - time.monotonic()))
    for stepper in steppers:
        stepper.process.kill()
        stepper.process.join()
