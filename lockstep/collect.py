"""Collectors: environments and policy, filling one rollout for each shard.

Shape legend: T time, B environments of a shard, A rows of an acting batch (one or more shards), K core state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import envs
from lockstep.arrays import map_structure, overlap
from lockstep.envs.base import ShardEnv
from lockstep.experiment import Experiment
from lockstep.models.base import PolicyModel
from lockstep.normalize import Normalizers
from lockstep.parameters import FlatParameters
from lockstep.rng import stream
from lockstep.storage.rollout import Rollout


@dataclass(frozen=True)
class Version:
    """What acts: the state after some number of iterations."""

    number: int
    parameters: Tensor
    """fp32 [N], flat."""
    normalizers: Normalizers
    """What observations and rewards of its rollouts are normalised with."""


class ShardSeat:
    """One shard's place in a collector: its environments, its rows of an acting batch, its running scores."""

    def __init__(self, shard: int, env: ShardEnv, rows: slice) -> None:
        self.shard, self.env, self.rows = shard, env, rows
        self.score = np.zeros(env.num_envs)
        """Raw reward so far of each episode in flight."""
        self.length = np.zeros(env.num_envs, np.int64)
        self.return_carry = torch.zeros(env.num_envs)
        """Discounted return in flight, for return normalisation."""
        self.episodes: list[tuple[float, int]] = []
        """(raw score, length in steps) of the episodes that ended in the last rollout."""


class ActingBatch:
    """The rows that one inference call serves, in preallocated memory [T+1, A] that environments write into.

    Rows of shards that this collector does not hold stay zero: each row's bits depend on the call's shape and on
    that row alone, so padding replaces them.
    """

    def __init__(self, experiment: Experiment, shards: list[int], env_threads: int, model: PolicyModel) -> None:
        steps, per_shard = experiment.algorithm.rollout, experiment.envs_per_shard
        size = experiment.scheme.acting_batch or per_shard
        first = shards[0] - shards[0] % (size // per_shard)
        self._experiment = experiment
        self._distribution = model.distribution
        self._previous = experiment.model.uses_previous
        self.seats: list[ShardSeat] = []
        for shard in shards:
            env = envs.make(
                experiment.env,
                seed=experiment.seed,
                first_index=shard * per_shard,
                num_envs=per_shard,
                threads=env_threads,
            )
            start = (shard - first) * per_shard
            self.seats.append(ShardSeat(shard, env, slice(start, start + per_shard)))
        action_shape, dtype = self._distribution.action_shape, self._distribution.action_dtype
        self._actions = torch.zeros(steps + 1, size, *action_shape, dtype=dtype)
        self._rewards = torch.zeros(steps + 1, size)
        self._noise = torch.zeros(steps, size, self._distribution.noise_size)
        self._policy = torch.zeros(steps, size, self._distribution.num_params)
        self._raw_rewards = np.zeros((steps, size), np.float32)
        self._ended = np.zeros((steps, size), bool)
        """Episodes over for the score: a lost life does not count."""
        self._state = torch.zeros(size, model.state_size)
        action, reward = overlap(self._actions), overlap(self._rewards)
        space = self.seats[0].env.observation_space
        self.rollout = Rollout(
            obs=envs.allocate_observation(space, (steps + 1, size)),
            start=torch.zeros(steps + 1, size, dtype=torch.bool),
            action=action.current,
            reward=reward.current,
            prev_action=action.previous if self._previous else None,
            prev_reward=reward.previous if self._previous else None,
            log_prob=torch.zeros(steps, size),
            value=torch.zeros(steps + 1, size),
            terminated=torch.zeros(steps, size, dtype=torch.bool),
            truncated=torch.zeros(steps, size, dtype=torch.bool),
            valid=torch.zeros(steps, size, dtype=torch.bool),
            core_state=torch.zeros(size, model.state_size),
        )
        whole = self.rollout
        self.shard_rollouts = {
            seat.shard: whole.replace(core_state=None)[:, seat.rows].replace(core_state=whole.core_state[seat.rows])
            for seat in self.seats
        }
        """Each shard's rows, as views."""
        self._numpy = {
            name: getattr(self.rollout, name).numpy()
            for name in ("start", "reward", "terminated", "truncated", "valid")
        }
        self._obs = map_structure(lambda leaf: leaf.numpy(), self.rollout.obs)

    def reset(self) -> None:
        """Start all environments from their first seeds."""
        for seat in self.seats:
            seat.env.reset(self._rows(-1, seat))
        self.rollout.start[-1] = True

    def begin(self, number: int) -> None:
        """Carry the last step of the rollout before over to the first of this one, and draw its randomness."""
        self._carry_over()
        for seat in self.seats:
            if seat.env.reseed_due():
                seat.env.reseed(self._rows(0, seat))
                self.rollout.start[0, seat.rows] = True
                seat.score[:], seat.length[:] = 0, 0
                seat.return_carry.zero_()
            draw = stream(self._experiment.seed, "action", seat.shard, number)
            noise = self._noise[:, seat.rows]
            noise.copy_(torch.from_numpy(draw.random(noise.shape, np.float32)))
        self.rollout.core_state.copy_(self._state)

    def act(self, t: int, actor: PolicyModel) -> None:
        """Choose a_t for all rows and send it to the environments."""
        rollout, now = self.rollout, slice(t, t + 1)
        out, self._state = actor(
            map_structure(lambda leaf: leaf[now], rollout.obs),
            rollout.start[now],
            self._state,
            self._actions[now] if self._previous else None,
            self._rewards[now] if self._previous else None,
        )
        policy = out.policy[0]
        action = self._distribution.sample(policy, self._noise[t])
        self._policy[t], rollout.action[t], rollout.value[t] = policy, action, out.value[0]
        action_np = rollout.action[t].numpy()
        for seat in self.seats:
            seat.env.send(self._distribution.to_env(action_np[seat.rows]))

    def receive(self, t: int) -> None:
        """Take what the environments answered to a_{t-1}: reward_{t-1} and obs_t."""
        fields, clip = self._numpy, self._experiment.env.reward_clip
        for seat in self.seats:
            rows = seat.rows
            step = seat.env.recv(self._rows(t, seat))
            self._raw_rewards[t - 1, rows] = step.reward
            fields["reward"][t - 1, rows] = np.clip(step.reward, -1.0, 1.0) if clip else step.reward
            np.logical_or(step.terminated, step.life_lost, out=fields["terminated"][t - 1, rows])
            fields["truncated"][t - 1, rows] = step.truncated
            np.logical_or(step.terminated, step.truncated, out=self._ended[t - 1, rows])
            np.logical_not(step.first, out=fields["valid"][t - 1, rows])
            np.logical_or(step.first, step.life_lost, out=fields["start"][t, rows])

    def finish(self, actor: PolicyModel, *, bootstrap: bool) -> None:
        """Complete the rollout after its last step: bootstrap value, log-probabilities, scores."""
        rollout = self.rollout
        if bootstrap:
            out, _ = actor(
                map_structure(lambda leaf: leaf[-1:], rollout.obs),
                rollout.start[-1:],
                self._state,
                self._actions[-1:] if self._previous else None,
                self._rewards[-1:] if self._previous else None,
            )
            rollout.value[-1] = out.value[0]
        rollout.log_prob.copy_(self._distribution.log_prob(self._policy, rollout.action))
        for seat in self.seats:
            self._score(seat)

    def state(self, seat: ShardSeat) -> dict[str, Tensor]:
        """All of a shard that outlives a rollout."""
        rows = seat.rows
        tensors = {f"env.{name}": torch.from_numpy(np.asarray(a)) for name, a in seat.env.state_dict().items()}
        tensors |= {
            "start": self.rollout.start[-1, rows].clone(),
            "core_state": self._state[rows].clone(),
            "last_action": self._actions[-1, rows].clone(),
            "last_reward": self._rewards[-1, rows].clone(),
            "score": torch.from_numpy(seat.score.copy()),
            "length": torch.from_numpy(seat.length.copy()),
            "return_carry": seat.return_carry.clone(),
        }
        return tensors

    @torch.inference_mode()
    def load(self, seat: ShardSeat, tensors: dict[str, Tensor], alive: Callable[[], None] = lambda: None) -> int:
        """Restore what state returned, replaying the environments' actions; returns the steps replayed."""
        rows = seat.rows
        env_state = {name[4:]: t.numpy() for name, t in tensors.items() if name.startswith("env.")}
        replayed = seat.env.load_state_dict(env_state, self._rows(-1, seat), alive)
        self.rollout.start[-1, rows] = tensors["start"]
        self._state[rows] = tensors["core_state"]
        self._actions[-1, rows] = tensors["last_action"]
        self._rewards[-1, rows] = tensors["last_reward"]
        seat.score[:], seat.length[:] = tensors["score"].numpy(), tensors["length"].numpy()
        seat.return_carry.copy_(tensors["return_carry"])
        return replayed

    def _rows(self, t: int, seat: ShardSeat) -> Any:
        return map_structure(lambda leaf: leaf[t, seat.rows], self._obs)

    def _carry_over(self) -> None:
        def carry(leaf: Tensor) -> None:
            leaf[0] = leaf[-1]

        map_structure(carry, self.rollout.obs)
        for leaf in (self.rollout.start, self._actions, self._rewards):
            carry(leaf)

    def _score(self, seat: ShardSeat) -> None:
        """Add up raw rewards into episode scores; Python runs once an episode, not once a step."""
        rewards = self._raw_rewards[:, seat.rows].astype(np.float64)
        steps = self._numpy["valid"][:, seat.rows].astype(np.int64)
        total, count = np.cumsum(rewards, 0), np.cumsum(steps, 0)
        seat.episodes = []
        for t, env in zip(*np.nonzero(self._ended[:, seat.rows]), strict=True):
            seat.episodes.append((float(seat.score[env] + total[t, env]), int(seat.length[env] + count[t, env])))
            seat.score[env], seat.length[env] = -total[t, env], -count[t, env]
        seat.score += total[-1]
        seat.length += count[-1]


class Collector:
    """Collects for a block of shards. With two or more acting batches, the environments of one step while the
    policy runs for another (alternating sampling)."""

    def __init__(
        self,
        experiment: Experiment,
        shards: range,
        model: PolicyModel,
        flat: FlatParameters,
        *,
        env_threads: int = 1,
        bootstrap: bool = True,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._experiment = experiment
        self._actor = model.for_acting()
        self._flat = flat
        self._bootstrap = bootstrap
        """Whether rollouts need the value of their last observation."""
        self._alive = alive
        """Called at every step: tells whoever watches this process that it makes progress."""
        self._loaded: int | None = None
        groups: dict[int, list[int]] = {}
        for shard in shards:
            span = max(1, experiment.scheme.acting_batch // experiment.envs_per_shard)
            groups.setdefault(shard // span, []).append(shard)
        self._batches = [ActingBatch(experiment, group, env_threads, model) for group in groups.values()]
        self.times = {"env": 0.0, "inference": 0.0}
        """Seconds since they were last set to 0."""

    def reset(self) -> None:
        """Start all environments from their first seeds; not needed when a checkpoint is loaded."""
        for batch in self._batches:
            batch.reset()

    @property
    def frames_per_step(self) -> int:
        return self._batches[0].seats[0].env.frames_per_step

    @torch.inference_mode()
    def collect(self, number: int, version: Version) -> dict[int, Rollout]:
        """Fill rollout `number` of every shard, acting with `version`. The memory is reused by the next call."""
        self._load(version)
        for batch in self._batches:
            batch.begin(number)
        for t in range(self._experiment.algorithm.rollout):
            for batch in self._batches:
                begin = time.perf_counter()
                if t:
                    batch.receive(t)
                received = time.perf_counter()
                batch.act(t, self._actor)
                self.times["env"] += received - begin
                self.times["inference"] += time.perf_counter() - received
            self._alive()
        rollouts: dict[int, Rollout] = {}
        for batch in self._batches:
            begin = time.perf_counter()
            batch.receive(self._experiment.algorithm.rollout)
            received = time.perf_counter()
            batch.finish(self._actor, bootstrap=self._bootstrap)
            rollouts |= batch.shard_rollouts
            self.times["env"] += received - begin
            self.times["inference"] += time.perf_counter() - received
        return rollouts

    def episodes(self) -> dict[int, list[tuple[float, int]]]:
        """Scores and lengths of the episodes that ended in the last rollout, by shard."""
        return {seat.shard: seat.episodes for batch in self._batches for seat in batch.seats}

    def seats(self) -> dict[int, tuple[ActingBatch, ShardSeat]]:
        """Every shard with the acting batch that it sits in."""
        return {seat.shard: (batch, seat) for batch in self._batches for seat in batch.seats}

    def close(self) -> None:
        for _, seat in self.seats().values():
            seat.env.close()

    def _load(self, version: Version) -> None:
        if self._loaded == version.number:
            return
        named = self._flat.named(version.parameters)
        for name, parameter in self._actor.named_parameters():
            parameter.copy_(named[name])
        version.normalizers.apply(self._actor)
        self._loaded = version.number
