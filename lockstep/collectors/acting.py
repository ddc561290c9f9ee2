"""Acting batches: the environments of one or more shards, and the buffers that they and their actor fill.

An actor (lockstep.collectors.actors) chooses actions in one of several ways. This module contains what all of them
share.

Shape legend: T time, A rows of an acting batch (one or more shards), K core state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent, below
from lockstep.buffers.rollout_buffers import ActingGroup, RolloutBuffer
from lockstep.collectors.between_rollouts import restore, saved
from lockstep.collectors.checking import Played, RolloutCheck
from lockstep.collectors.explorer import Explorer
from lockstep.collectors.preemption import Preemption
from lockstep.collectors.scores import ended_episodes
from lockstep.collectors.stepping import ActingShard, BatchEnvs
from lockstep.core.arrays import join_entries, map_structure, named_leaves, split_entries
from lockstep.core.digests import Digests
from lockstep.core.rollout import Rollout
from lockstep.core.schedule import RolloutId
from lockstep.envs.base import StepResult
from lockstep.envs.finite import FiniteCheck, floats
from lockstep.models.action_spaces import composite
from lockstep.models.arithmetic import arithmetic
from lockstep.models.capture import Inputs

_FIELDS = ("start", "action", "reward", "log_prob", "value", "terminated", "truncated", "valid")


class OpenRollout:
    """A rollout buffer with its fields as numpy arrays, which environments write into."""

    def __init__(self, buffer: RolloutBuffer) -> None:
        self.buffer, self.whole = buffer, buffer.whole
        self.fields = {name: getattr(buffer.whole, name).numpy() for name in _FIELDS}
        self.obs = map_structure(lambda leaf: leaf.numpy(), buffer.whole.obs)
        self.floats = floats(self.obs)
        self.digests = {shard: Digests.of(rollout) for shard, rollout in buffer.shards.items()}
        self._joined: np.ndarray | None = None
        self._actions, self._rewards = buffer.actions.numpy(), buffer.rewards.numpy()
        self._carried = [x for _, x in named_leaves(self.obs)] + [self.fields["start"], self._actions, self._rewards]

    def of_kernels(self, core_state: Tensor) -> dict[str, np.ndarray]:
        """The arrays that compiled functions read and write when they act: see CompiledRollout.play.

        Args:
            core_state: [A, K]
        """
        return {**self.fields, "actions": self._actions, "rewards": self._rewards, "state": core_state.numpy()}

    @property
    def has_entries(self) -> bool:
        """Whether observations are a Dict. Then compiled functions take the result of `joined` instead of obs."""
        return isinstance(self.obs, dict)

    def joined(self, at: int | slice) -> np.ndarray:
        """The entries of all observations side by side, float32 [T+1, A, D]. This call copies those of the given steps
        from obs."""
        if self._joined is None:
            size = sum(math.prod(x.shape[2:]) for x in self.obs.values())
            self._joined = np.zeros((*self.fields["start"].shape, size), np.float32)
        join_entries(self.at(at, slice(None)), self._joined[at])
        return self._joined

    def split(self, at: int | slice) -> None:
        """Copy the observations that compiled functions wrote to these steps of `joined` to obs."""
        assert self._joined is not None
        split_entries(self._joined[at], self.at(at, slice(None)))

    def continue_from(self, before: OpenRollout, member: ActingShard) -> None:
        """Begin a shard's rows with the last step of its rollout in another buffer, or in this one."""
        for to, origin in zip(self._carried, before._carried, strict=True):
            to[0, member.rows] = origin[member.last, member.rows]

    def at(self, t: int | slice, rows: slice) -> Any:
        """Views of the observations of some rows at one or more steps, to write into."""
        return map_structure(lambda leaf: leaf[t, rows], self.obs)


class ActingBatch:
    """The rows that one inference call serves, in buffers that environments write into.

    Rows of shards that this collector does not hold stay zero. A row's bits depend only on the shape of the call and on
    that row, so this padding does not change the other rows.
    """

    def __init__(
        self,
        agent: Agent,
        group: ActingGroup,
        buffers: list[RolloutBuffer],
        environments: BatchEnvs,
        finite_check: FiniteCheck,
    ) -> None:
        steps, size, on_gpu = agent.experiment.algorithm.rollout, group.size, agent.device.type != "cpu"
        self.group, self.steps = group, steps
        self.envs, self.members = environments, environments.members
        self.explorer = Explorer(agent, self.members, size)
        self.bootstraps = agent.algorithm.bootstraps
        """Whether rollouts need the bootstrap value, which is the value of their last observation."""
        self.buffers = [OpenRollout(buffer) for buffer in buffers]
        self.open = self.buffers[0]
        """The rollout that is being written or was written last."""
        self.on_device: Mapping[int, Rollout] = {}
        """By shard: the same rollout on the GPU that played it, if the GPU keeps it as long as the host does."""
        self.core_state = torch.zeros(size, agent.model.state_size, device=agent.device)
        """fp32 [A, K], on the policy's device."""
        self.raw_reward = torch.zeros(steps, size, pin_memory=on_gpu)
        """fp32 [T, A]: rewards before clipping."""
        self.ended = np.zeros((steps, size), bool)
        """bool [T, A]: where episodes ended, for the score. A lost life does not end one."""
        self.received = 0
        """Steps of the current rollout that environments have completed."""
        self._raw_reward = self.raw_reward.numpy()
        self._reported = np.full((steps, size, len(agent.experiment.env.metrics)), np.nan)
        """float64 [T, A, M]: the metrics that environments reported where episodes ended."""
        self._check = RolloutCheck(finite_check, steps, environments.stepped[0].env.action_space)
        self._model, self._distribution = agent.model, agent.model.distribution
        self._clip, self._previous = agent.experiment.env.reward_clip, agent.experiment.model.uses_previous
        self._composite = composite(environments.stepped[0].env.action_space)
        self._going = environments.stepped
        """Environments whose rollouts have not been preempted."""

    def reset(self) -> None:
        """Start all environments from their first seeds."""
        for each in self.envs.stepped:
            each.env.reset(self.open.at(-1, each.rows))
            for member in each.members:
                self._check_start(-1, member, "at the start of its first episode")
        self.open.whole.start[-1] = True

    def begin(self, lap: int) -> None:
        """Copy the last step of the previous rollout into the first of this one, and draw this rollout's random
        numbers."""
        before, self.open, self.received = self.open, self.buffers[lap % len(self.buffers)], 0
        self._going = self.envs.stepped
        for member in self.members:
            self.open.continue_from(before, member)
            member.last = -1
        self._reseed(lap)
        for member in self.members:
            self.explorer.begin(member, lap + member.offset)

    def _reseed(self, lap: int) -> None:
        """Reseed the environments that are due."""
        for each in self.envs.stepped:
            if each.env.reseed_due():
                with arithmetic(self._model):  # the environment may compute with torch
                    each.env.reseed(self.open.at(0, each.rows))
                for member in each.members:
                    self._check_start(0, member, f"when it was reseeded in rollout {lap + member.offset}")
                    self.open.whole.start[0, member.rows] = True
                    member.score[:], member.length[:] = 0, 0
                    member.return_carry.zero_()

    def inputs(self, at: slice) -> Inputs:
        """The model's inputs at one step."""
        buffer = self.open.buffer
        return Inputs(
            map_structure(lambda leaf: leaf[at], buffer.whole.obs),
            buffer.whole.start[at],
            self.core_state,
            buffer.actions[at] if self._previous else None,
            buffer.rewards[at] if self._previous else None,
        )

    def send(self, action: Tensor) -> None:
        """Send actions [A, *action_shape] to the environments whose rollouts were not preempted."""
        sent = self._distribution.to_env(action.numpy())
        for each in self._going:
            each.env.send(each.of(sent) if self._composite else sent[each.rows])

    def receive(self, t: int) -> None:
        """Receive what the environments return for a_{t-1}: reward_{t-1} and obs_t."""
        for each in self._going:
            self.take(t - 1, t, each.rows, each.env.recv(self.open.at(t, each.rows)))
        self.received = t

    def take(self, at: int | slice, after: int | slice, rows: slice, step: StepResult) -> None:
        """Write the results of one or more steps, and where episodes start after them."""
        fields = self.open.fields
        self._raw_reward[at, rows] = step.reward
        fields["reward"][at, rows] = np.clip(step.reward, -1.0, 1.0) if self._clip else step.reward
        np.logical_or(step.terminated, step.life_lost, out=fields["terminated"][at, rows])
        fields["truncated"][at, rows] = step.truncated
        np.logical_or(step.terminated, step.truncated, out=self.ended[at, rows])
        np.logical_not(step.first, out=fields["valid"][at, rows])
        np.logical_or(step.first, step.life_lost, out=fields["start"][after, rows])
        if step.metrics is not None:
            self._reported[at, rows] = step.metrics

    def preempt(self, t: int, lap: int, preemption: Preemption) -> None:
        """Preempt rollouts after t steps, before a_t is chosen. a_t is still computed, for the value of obs_t, but it
        is not sent to environments."""
        for member in self.members:
            if member.last < 0 and preemption.preempts(RolloutId(member.shard, lap + member.offset), t):
                member.last, member.core_state = t, self.core_state[member.rows].clone()
        self._going = [each for each in self.envs.stepped if each.going]

    @property
    def going(self) -> bool:
        """Whether any rollout has not been preempted."""
        return any(member.last < 0 for member in self.members)

    @property
    def preempted(self) -> bool:
        """Whether any rollout has been preempted."""
        return any(member.last >= 0 for member in self.members)

    def pad(self, *of_policy: Tensor | None) -> None:
        """Pad rollouts that were preempted, so that their bits do not depend on what the buffer held before: repeat the
        last observation and action, and mark the padding invalid.

        Args:
            of_policy: [T, A, ...], the policy's outputs, which are repeated, too. None is ignored.
        """
        for member in self.members:
            if member.last >= 0:
                self._pad(member, [self.open.whole.action, *(x for x in of_policy if x is not None)])

    def _pad(self, member: ActingShard, repeated: list[Tensor]) -> None:
        rollout, last, rows = self.open.whole, member.last, member.rows

        def repeat(leaf: Tensor) -> None:
            leaf[last + 1 :, rows] = leaf[last, rows]

        map_structure(repeat, rollout.obs)
        for leaf in repeated:
            repeat(leaf)
        rollout.start[last + 1 :, rows] = False
        rollout.value[last + 1 :, rows] = 0
        for field in (rollout.reward, rollout.terminated, rollout.truncated, rollout.valid):
            field[last:, rows] = 0
        self._raw_reward[last:, rows], self.ended[last:, rows] = 0, False
        self.core_state[rows] = member.core_state

    def _check_start(self, t: int, member: ActingShard, when: str) -> None:
        """Check that the observations after a reset are finite."""
        self._check.start({name: x[t, member.rows] for name, x in self.open.floats.items()}, member, when)

    def check_finite(self, steps: int, lap: int) -> None:
        """Check that environments returned finite numbers in the first `steps` steps of a rollout."""
        fields = {name: self.open.fields[name][:steps] for name in ("action", "valid")}
        obs = {name: x[: steps + 1] for name, x in self.open.floats.items()}
        played = Played(obs=obs, reward=self._raw_reward[:steps], ended=self.ended[:steps], **fields)
        self._check.rollout(played, self.members, lap)

    def score(self) -> None:
        """Add up raw rewards into episode scores, and list the episodes that ended."""
        for member in self.members:
            rewards, ended, reported = (x[:, member.rows] for x in (self._raw_reward, self.ended, self._reported))
            valid = self.open.fields["valid"][:, member.rows]
            member.episodes = ended_episodes(member, rewards, valid, ended, reported)

    def digests(self, shard: int) -> dict[str, str]:
        """The digest of each field of a shard's rollout."""
        return self.open.digests[shard]()

    def state(self, member: ActingShard) -> dict[str, Tensor]:
        """A shard's state between two rollouts."""
        of_envs = {f"env.{name}": torch.from_numpy(np.asarray(a)) for name, a in self.envs.state(member).items()}
        return of_envs | saved(member, self.open.buffer, self.core_state)

    @torch.inference_mode()
    def load(self, states: Mapping[int, dict[str, Tensor]], heartbeat: Callable[[], None] = lambda: None) -> int:
        """Restore the result of `state` of each shard, if necessary by replaying the environments' actions. Returns the
        number of replayed steps."""
        of_envs = {
            member.shard: {name: x.numpy() for name, x in below("env.", states[member.shard]).items()}
            for member in self.members
        }
        replayed = self.envs.load(of_envs, lambda rows: self.open.at(-1, rows), heartbeat)
        for member in self.members:
            restore(member, states[member.shard], self.open.buffer, self.core_state)
        return replayed


class SteppingActor:
    """The base class of actors whose environments the host steps: see lockstep.collectors.actors.Actor."""

    steps = 1

    def __init__(self, batch: ActingBatch) -> None:
        self.batch = batch

    def begin(self) -> None:
        self.batch.open.whole.core_state.copy_(self.batch.core_state)

    def receive(self, t: int) -> None:
        self.batch.receive(t)
