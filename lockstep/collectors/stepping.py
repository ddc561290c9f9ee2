"""The shards of an acting batch, and which of their environments one call steps.

If the adapter allows it, one ShardEnv steps the environments of all shards, so that a step is one call of the library.
This does not change what an environment returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import envs
from lockstep.buffers.rollout_buffers import ActingGroup
from lockstep.core.rollout import Episode
from lockstep.envs.base import ShardEnv
from lockstep.envs.curriculum import first_options
from lockstep.envs.device_steps import DeviceSteps
from lockstep.envs.episodes import joined, part
from lockstep.envs.pool.pool import SteppingPool
from lockstep.experiment import Experiment


class ActingShard:
    """One shard of a collector: its rows of an acting batch, and its state between rollouts."""

    def __init__(self, shard: int, num_envs: int, rows: slice, *, decorrelated: bool = False) -> None:
        self.shard, self.num_envs, self.rows = shard, num_envs, rows
        self.score = np.zeros(num_envs)
        """float64 [B]: the raw reward of each unfinished episode so far."""
        self.length = np.zeros(num_envs, np.int64)
        """int64 [B]: the steps of each unfinished episode so far."""
        self.counts = np.full(num_envs, not decorrelated)
        """bool [B]: whether scores have the unfinished episode. env.decorrelate cuts first episodes, so they do not
        count. Those that end before would not be representative: they are short."""
        self.return_carry = torch.zeros(num_envs)
        """fp32 [B]: the discounted return so far, for normalizing returns."""
        self.episodes: list[Episode] = []
        """The episodes that ended in the last rollout."""
        self.drift: Tensor | None = None
        """fp32 [B, N]: the current state of drifting noise."""
        self.offset = 0
        """The number of the rollout that lap 0 collects."""
        self.last = -1
        """The row of the rollout's last observation: -1, the last row, unless the rollout was preempted."""
        self.core_state = torch.zeros(0)
        """fp32 [B, K]: the core state before the last observation of a preempted rollout."""


class Stepped:
    """Environments that one call steps: those of one shard or of several consecutive shards."""

    def __init__(self, env: ShardEnv, members: list[ActingShard]) -> None:
        self.env, self.members = env, members
        self.rows = slice(members[0].rows.start, members[-1].rows.stop)
        """Their rows of the acting batch."""

    @property
    def going(self) -> bool:
        """Whether the rollout has not been preempted. If one call steps several shards, their rollouts never are."""
        return self.members[0].last < 0

    def of(self, sent: tuple[Any, ...]) -> tuple[Any, ...]:
        """Their actions, from those of the whole acting batch."""
        return tuple(x[self.rows] for x in sent)


@dataclass(frozen=True)
class Stepping:
    """How a collector's environments are stepped.

    Args:
        threads: threads that step a shard's environments (native adapters).
        pool: processes that step the environments (gymnasium); by default this process steps them.
        apart: whether each shard needs its own call, because its rollouts may be preempted.
        device: the policy's device.
    """

    threads: int = 1
    pool: SteppingPool | None = None
    apart: bool = False
    device: str = "cpu"


class BatchEnvs:
    """The environments of an acting batch's shards."""

    def __init__(self, experiment: Experiment, group: ActingGroup, stepping: Stepping) -> None:
        self._experiment, self._stepping = experiment, stepping
        cut = experiment.env.decorrelate > 0
        self.members = [ActingShard(n, group.per_shard, group.rows(n), decorrelated=cut) for n in group.shards]
        joins = len(group.shards) > 1 and not stepping.apart and envs.adapter_of(experiment.env).joins
        self.stepped = [self._made(self.members)] if joins else self._apart()

    def _made(self, members: list[ActingShard]) -> Stepped:
        first, size = members[0], sum(member.num_envs for member in members)
        env = envs.make(
            self._experiment.env,
            seed=self._experiment.seed,
            first_index=first.shard * first.num_envs,
            num_envs=size,
            threads=self._stepping.threads * len(members),
            pool=self._stepping.pool,
            device=self._stepping.device,
        )
        if self._experiment.curriculum:
            env.offer(first_options(self._experiment.env))
        return Stepped(env, members)

    def offer(self, options: dict[str, Any]) -> None:
        """Give these options to episodes that begin from now on."""
        for each in self.stepped:
            each.env.offer(options)

    def on_device(self) -> list[tuple[slice, DeviceSteps]] | None:
        """For each call: its rows of the acting batch, and the object that steps its environments on a GPU. None if the
        host steps some environments, or if rollouts may be preempted."""
        found = [(each.rows, steps) for each in self.stepped if (steps := each.env.on_device()) is not None]
        return found if len(found) == len(self.stepped) and not self._stepping.apart else None

    def _apart(self) -> list[Stepped]:
        return [self._made([member]) for member in self.members]

    def state(self, member: ActingShard) -> dict[str, np.ndarray]:
        """ShardEnv.state_dict of one shard."""
        (each,) = (each for each in self.stepped if member in each.members)
        state = each.env.state_dict()
        if len(each.members) == 1:
            return state
        first = member.rows.start - each.rows.start
        return part(state, slice(first, first + member.num_envs))

    def load(
        self, states: Mapping[int, dict[str, np.ndarray]], out: Callable[[slice], Any], heartbeat: Callable[[], None]
    ) -> int:
        """ShardEnv.load_state_dict of all shards.

        Args:
            states: by shard. They may come from several processes, in which the shards did not act together.
            out: returns the memory for the current observations of some rows of the acting batch.
            heartbeat: called at every replayed step.

        Returns:
            The number of environment steps that were replayed.
        """
        found = [joined([states[member.shard] for member in each.members]) for each in self.stepped]
        if None in found:
            self.close()
            self.stepped, found = self._apart(), [states[member.shard] for member in self.members]
        replayed = 0
        for each, state in zip(self.stepped, found, strict=True):
            assert state is not None
            replayed += each.env.load_state_dict(state, out(each.rows), heartbeat)
        return replayed

    def close(self) -> None:
        """Release all environments."""
        for each in self.stepped:
            each.env.close()
