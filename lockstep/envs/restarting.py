"""Shards whose environments all restart from new seeds at once.

Shape legend: B environments.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from lockstep.envs.base import Observation, ShardEnv
from lockstep.envs.episodes import ActionLog


class RestartingShard(ShardEnv):
    """B environments that restart from new seeds every `reseed_every` steps. Until then their random streams continue
    from episode to episode."""

    def __init__(self, reseed_every: int, num_envs: int) -> None:
        self.num_envs = num_envs
        self._reseed_every = reseed_every
        self._log = ActionLog()
        self._count = self._since = 0
        """The number of restarts, and the number of steps since the last restart."""
        self._ended = np.zeros(num_envs, np.bool_)
        """bool [B]: whether the episodes have ended."""

    @abstractmethod
    def _restart(self) -> Any:
        """Restart from the seeds of the current count; return the observations. Must call _begin."""

    @abstractmethod
    def _write(self, obs: Any, out: Observation) -> None:
        """Write the observations of _restart into out."""

    def _begin(self) -> None:
        self._since = 0
        self._log.clear()
        self._ended = np.zeros(self.num_envs, np.bool_)

    def reset(self, out: Observation) -> None:
        self._count = 0
        self._write(self._restart(), out)

    def reseed_due(self) -> bool:
        return self._since >= self._reseed_every

    def reseed(self, out: Observation) -> None:
        self._count += 1
        self._write(self._restart(), out)

    def state_dict(self) -> dict[str, np.ndarray]:
        counts = {"count": np.array(self._count), "since": np.array(self._since)}
        return {**counts, "ended": self._ended.copy(), **self._log.last(self._since)}
