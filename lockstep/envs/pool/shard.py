"""A shard whose environments are stepped by the processes of a pool."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.envs.base import Observation, ShardEnv, StepResult, load_adapter
from lockstep.envs.episodes import ActionLog, Seeds, episode_state
from lockstep.envs.pool.exchange import exchange_of
from lockstep.envs.pool.pool import Stepper, SteppingPool
from lockstep.envs.settings import EnvConfig
from lockstep.system.output import print_line

_PATIENCE = 20.0
"""Seconds that steps may last after an environment has raised an error."""


class PooledShard(ShardEnv):
    """A shard whose environments are stepped by the processes of a pool. Its bits and its states equal a GymShard's."""

    def __init__(
        self, config: EnvConfig, *, seed: int, purpose: str, first_index: int, num_envs: int, pool: SteppingPool
    ) -> None:
        self.num_envs = num_envs
        self._pool = pool
        self._number, self._blocks = pool.enroll(num_envs, load_adapter(config.adapter).group_size(config))
        self._open: list[Stepper] = []
        """Those that have not answered the last request."""
        self._closed = False
        begin = pool.used
        self._ask("make", lambda rows: (begin, config, Seeds(seed, purpose, first_index + rows.start), num_envs, rows))
        self.observation_space, self.action_space, self.frames_per_step, self.emulator = self._answers()[0]
        self._exchange, pool.used = exchange_of(
            pool.memory, begin, self.observation_space, self.action_space, num_envs, len(config.metrics)
        )
        self._log = ActionLog()
        # The processes have these, too, but their logs begin at different steps.
        self._episode = np.zeros(num_envs, np.int64)
        self._steps = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)

    def _ask(self, name: str, arguments: Callable[[slice], tuple[Any, ...]] = lambda rows: ()) -> None:
        assert not self._open, f"{name} before the previous request was answered"
        self._open = [stepper for stepper, _ in self._blocks]
        for stepper, rows in self._blocks:
            self._pool.request(stepper, self._number, name, *arguments(rows))

    def _answers(self, waiting: Callable[[], bool] = lambda: False) -> list[Any]:
        """The answer of each process to the last request. After an error, the others' answers remain to be taken."""
        values = []
        while self._open:
            try:
                values.append(self._pool.answer(self._open[0], self._number, waiting))
            except (RuntimeError, SettingsError):  # an answer, too, unlike a KeyboardInterrupt
                self._open.pop(0)
                raise
            self._open.pop(0)
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
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
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
                heartbeat()
            return seen > before

        self._answers(waiting)
        waiting()
        self._copy_observations(out)
        return int(self._steps.sum())

    def close(self) -> None:
        if self._pool.erred and not self._pool.failed:
            self._finish()  # the error of one environment ends the run, and the others may close
        if self._closed or self._open or self._pool.failed:
            return  # busy or broken processes end with the pool
        self._closed = True
        try:
            self._ask("close")
            self._answers()
        except RuntimeError as error:  # the run's results are complete by then
            print_line(f"Environments could not be closed: {error}", sys.stderr)
        for stepper, rows in self._blocks:
            stepper.num_envs -= rows.stop - rows.start

    def _finish(self) -> None:
        """Wait for open answers, but not forever: then the pool has failed."""
        begin = time.monotonic()

        def waiting() -> bool:
            if time.monotonic() - begin > _PATIENCE:
                self._pool.failed = True
                raise TimeoutError
            return False

        with contextlib.suppress(TimeoutError):
            while self._open:
                with contextlib.suppress(RuntimeError, SettingsError):
                    self._answers(waiting)


def _columns(state: dict[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    """The part of a shard's state for some of its environments."""
    return {name: a[:, rows] if name.startswith("actions.") else a[rows] for name, a in state.items()}
