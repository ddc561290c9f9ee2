"""Environments stepped by child processes of a collector, so that Python environments use several cores.

Each process makes a shard of its block of the environments. Observations, actions, rewards and flags travel through
shared memory; pipes carry only short requests, their answers, and errors.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.core.arrays import ArrayTuple
from lockstep.distributed.shared_memory import Arena, SharedMemory
from lockstep.envs.base import EnvConfig, Observation, ShardEnv, StepResult, allocate_observation, load_adapter
from lockstep.envs.episodes import ActionLog, Seeds, episode_state
from lockstep.models.action_spaces import action_parts
from lockstep.system import children
from lockstep.system.machine import cores
from lockstep.system.numerics import settle
from lockstep.system.output import tell
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
        self._steppers: list[_Stepper] = []
        # This must run before multiprocessing joins its children at exit, which would wait forever.
        self._finalize = Finalize(self, _end, (self._steppers,), exitpriority=10)
        context = multiprocessing.get_context("spawn")
        for index in range(processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, self.memory, jitter, torch.get_num_threads())
            process = children.start(_serve, arguments, f"lockstep-env-{index}")
            theirs.close()
            self._steppers.append(_Stepper(process, ours))
        pool = weakref.ref(self)
        children.watch([stepper.process for stepper in self._steppers], _WHAT, lambda: getattr(pool(), "failed", True))

    def enroll(self, num_envs: int, together: int = 1) -> tuple[int, list[tuple[_Stepper, slice]]]:
        """Number a new shard, and divide its environments into contiguous blocks, one for each process that steps some.
        Processes with the fewest environments get the larger blocks. A block holds whole groups of `together`."""
        self._shards += 1
        base, extra = divmod(num_envs // together, len(self._steppers))
        blocks: list[tuple[_Stepper, slice]] = []
        begin = 0
        for i, stepper in enumerate(sorted(self._steppers, key=lambda stepper: stepper.num_envs)):
            size = (base + (i < extra)) * together
            if size:
                blocks.append((stepper, slice(begin, begin + size)))
                stepper.num_envs += size
                begin += size
        return self._shards, blocks

    def request(self, stepper: _Stepper, shard: int, name: str, *arguments: Any) -> None:
        """Send a request; each shard has at most one open request."""
        stepper.started |= name == "step"
        try:
            stepper.pipe.send((shard, name, *arguments))
        except OSError:
            self._report_death(stepper)

    def answer(self, stepper: _Stepper, shard: int, waiting: Callable[[], bool]) -> Any:
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

    def _wait(self, stepper: _Stepper, waiting: Callable[[], bool]) -> None:
        deadline = time.perf_counter() + self._spin
        while not stepper.poll.poll(0) and time.perf_counter() < deadline:
            os.sched_yield()
        standstill = StallDetector(self._stall_timeout)
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

    def _report_death(self, stepper: _Stepper) -> NoReturn:
        self.failed = True
        stepper.process.join(_GRACE)  # a pipe closes a moment before the exit code is known
        raise RuntimeError(f"{_WHAT} {children.death_report(stepper.process)}") from None

    def close(self) -> None:
        """Close all environments and end the processes."""
        self.failed = True
        self._finalize()
        self.memory.close()


class _Stepper:
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


def _end(steppers: list[_Stepper]) -> None:
    for stepper in steppers:
        stepper.pipe.close()
    deadline = time.monotonic() + _GRACE
    for stepper in steppers:
        stepper.process.join(max(0.0, deadline - time.monotonic()))
    for stepper in steppers:
        stepper.process.kill()
        stepper.process.join()


class _Exchange(ArrayTuple):
    """Shared numpy arrays through which the collector and the processes exchange a step of B environments."""

    obs: Any
    """As the buffers of ShardEnv."""
    action: dict[str, Any]
    """[B, ...], by component."""
    reward: Any
    """float32 [B]; the next three bool [B]: see StepResult."""
    terminated: Any
    truncated: Any
    first: Any
    replayed: Any
    """int64 [B]: steps replayed so far, counted in the first row of each block."""
    metrics: Any
    """float64 [B, M]; None without metrics."""


def _exchange(
    memory: SharedMemory,
    begin: int,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    num_envs: int,
    metrics: int,
) -> tuple[_Exchange, int]:
    """The arrays of one shard, which begin at byte `begin`, and the byte after them; metrics: how many."""

    def allocate(arena: Arena) -> tuple[_Exchange, int]:
        arena.zeros((begin,), torch.uint8)
        exchange = _Exchange(
            obs=allocate_observation(observation_space, (num_envs,), arena),
            action={
                str(i): allocate_observation(part, (num_envs,), arena)
                for i, part in enumerate(action_parts(action_space))
            },
            reward=arena.zeros((num_envs,)),
            terminated=arena.zeros((num_envs,), torch.bool),
            truncated=arena.zeros((num_envs,), torch.bool),
            first=arena.zeros((num_envs,), torch.bool),
            replayed=arena.zeros((num_envs,), torch.int64),
            metrics=arena.zeros((num_envs, metrics), torch.float64) if metrics else None,
        )
        return exchange, arena.size

    exchange, end = memory.map(allocate)
    return exchange.to_numpy(), end


class PooledShard(ShardEnv):
    """A shard stepped by the processes of a pool. Its bits and its states equal those of a GymShard."""

    def __init__(
        self, config: EnvConfig, *, seed: int, purpose: str, first_index: int, num_envs: int, pool: SteppingPool
    ) -> None:
        self.num_envs = num_envs
        self._pool = pool
        self._number, self._blocks = pool.enroll(num_envs, load_adapter(config.adapter).group_size(config))
        self._asked = False
        """Whether a request is still unanswered."""
        begin = pool.used
        self._ask("make", lambda rows: (begin, config, Seeds(seed, purpose, first_index + rows.start), num_envs, rows))
        self.observation_space, self.action_space, self.frames_per_step, self.emulator = self._answers()[0]
        self._exchange, pool.used = _exchange(
            pool.memory, begin, self.observation_space, self.action_space, num_envs, len(config.metrics)
        )
        self._log = ActionLog()
        # The processes keep these, too, but their logs reach back to different steps.
        self._episode = np.zeros(num_envs, np.int64)
        self._steps = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)

    def _ask(self, name: str, arguments: Callable[[slice], tuple[Any, ...]] = lambda rows: ()) -> None:
        assert not self._asked, f"{name} before the previous request was answered"
        self._asked = True
        for stepper, rows in self._blocks:
            self._pool.request(stepper, self._number, name, *arguments(rows))

    def _answers(self, waiting: Callable[[], bool] = lambda: False) -> list[Any]:
        """The answer of each process to the last request."""
        values = [self._pool.answer(stepper, self._number, waiting) for stepper, _ in self._blocks]
        self._asked = False
        return values

    def reset(self, out: Observation) -> None:
        self._ask("reset")
        self._log.clear()
        for count in (self._episode, self._steps, self._ended):
            count[:] = 0
        self._answers()
        self._copy_observations(out)

    def send(self, action: np.ndarray | tuple[np.ndarray, ...]) -> None:
        parts = action if isinstance(action, tuple) else (action,)
        self._log.append(tuple(np.asarray(part) for part in parts), self._steps)
        for shared, part in zip(self._exchange.action.values(), parts, strict=True):
            np.copyto(shared, np.reshape(part, shared.shape), casting="unsafe")
        self._ask("step")

    def recv(self, out: Observation) -> StepResult:
        self._answers()
        self._copy_observations(out)
        x = self._exchange
        lost = np.zeros(self.num_envs, np.bool_)
        metrics = None if x.metrics is None else x.metrics.copy()
        step = StepResult(x.reward.copy(), x.terminated.copy(), x.truncated.copy(), x.first.copy(), lost, metrics)
        self._episode += step.first
        self._steps = np.where(step.first, 0, self._steps + 1)
        self._ended = step.terminated | step.truncated
        return step

    def _copy_observations(self, out: Observation) -> None:
        obs = self._exchange.obs
        if isinstance(obs, dict):
            for key, value in obs.items():
                np.copyto(out[key], value)
        else:
            np.copyto(out, obs)

    def state_dict(self) -> dict[str, np.ndarray]:
        return episode_state(self._episode, self._steps, self._ended, self._log)

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, alive: Callable[[], None] = lambda: None
    ) -> int:
        self._exchange.replayed[:] = 0
        self._ask("load", lambda rows: (_columns(state, rows),))
        self._log.load(state)
        self._episode = state["episode"].astype(np.int64)
        self._steps = state["steps"].astype(np.int64)
        self._ended = state["ended"].astype(np.bool_)
        seen = 0

        def waiting() -> bool:
            nonlocal seen
            before, seen = seen, int(self._exchange.replayed.sum())
            for _ in range(seen - before):
                alive()
            return seen > before

        self._answers(waiting)
        waiting()
        self._copy_observations(out)
        return int(self._steps.sum())

    def close(self) -> None:
        if self._asked or self._pool.failed:
            return  # processes that are busy or broken end with the pool
        try:
            self._ask("close")
            self._answers()
        except RuntimeError as error:  # the run's results are complete by then
            tell(f"Environments could not be closed: {error}", sys.stderr)
        for stepper, rows in self._blocks:
            stepper.num_envs -= rows.stop - rows.start
        self._asked = True


def _columns(state: dict[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    """The part of a shard's state for some of its environments."""
    return {name: a[:, rows] if name.startswith("actions.") else a[rows] for name, a in state.items()}


class _Slice:
    """A process's block of one shard's environments, and its part of the shared arrays."""

    def __init__(
        self, memory: SharedMemory, begin: int, config: EnvConfig, seeds: Seeds, num_envs: int, rows: slice
    ) -> None:
        self._shard = load_adapter(config.adapter).make(config, seeds=seeds, num_envs=rows.stop - rows.start)
        shard = self._shard
        self.facts = shard.observation_space, shard.action_space, shard.frames_per_step, shard.emulator
        spaces_of = shard.observation_space, shard.action_space
        whole, _ = _exchange(memory, begin, *spaces_of, num_envs, len(config.metrics))
        self._exchange = whole[rows]
        self._action = tuple(self._exchange.action.values())

    def reset(self) -> None:
        self._shard.reset(self._exchange.obs)

    def step(self) -> None:
        x = self._exchange
        self._shard.send(self._action)
        step = self._shard.recv(x.obs)
        x.reward[:], x.terminated[:], x.truncated[:], x.first[:] = step[:4]
        if x.metrics is not None:
            x.metrics[:] = step.metrics

    def load(self, state: dict[str, np.ndarray]) -> None:
        def count() -> None:
            self._exchange.replayed[0] += 1

        self._shard.load_state_dict(state, self._exchange.obs, count)

    def close(self) -> None:
        self._shard.close()


def _serve(pipe: Connection, memory: SharedMemory, jitter: float, threads: int) -> None:
    """Serve requests in a process of the pool until the other end of the pipe closes."""
    settle(threads)  # as in inline runs, so that environments find the same settings
    pause = np.random.default_rng()
    slices: dict[int, _Slice] = {}
    while True:
        try:
            shard, name, *arguments = pipe.recv()
        except (EOFError, OSError):
            break
        value = None
        try:
            if name == "make":
                slices[shard] = _Slice(memory, *arguments)
                value = slices[shard].facts
            elif name == "close":
                slices.pop(shard).close()
            else:
                if jitter and name == "step":
                    time.sleep(pause.uniform(0.0, jitter))
                getattr(slices[shard], name)(*arguments)
            kind = "done"
        except BaseException as error:
            kind, value = "error", traceback.format_exc()
            if isinstance(error, SettingsError):
                kind, value = "mistake", str(error)
        try:
            pipe.send((shard, kind, value))
        except OSError:
            break
    for block in slices.values():
        block.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # shutting down the interpreter would be the slowest part
