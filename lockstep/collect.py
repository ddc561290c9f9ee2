"""Collectors: environments and policy, filling one rollout for each shard.

Shape legend: T time, B environments of a shard, A rows of an acting batch (one or more shards), K core state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import envs
from lockstep.agent import Agent, Version
from lockstep.algorithms.offpolicy import OffPolicy, drifting
from lockstep.arrays import map_structure
from lockstep.clock import Acting, Fill
from lockstep.envs.base import ShardEnv
from lockstep.envs.subprocess import SteppingPool
from lockstep.graphs import Capture, cuda_graph
from lockstep.layout import Layout
from lockstep.ledger import structure_digests
from lockstep.models.base import Exploring, ModelOutput
from lockstep.models.capture import Inference
from lockstep.rng import stream
from lockstep.storage.rollout import Rollout
from lockstep.storage.slabs import ActingGroup, Slab, Slabs


@dataclass(frozen=True)
class Delivery:
    """A shard's rollout that was collected: all that is known of it beside the slab that holds it."""

    shard: int
    number: int
    """Which of the shard's rollouts this is, counted from 0."""
    lap: int
    """The same, counted from where slabs are: differs after a free-running run was resumed."""
    versions: Acting
    moments: np.ndarray
    """float64: what it adds to the normalizers. No tensor, which torch would send through files and sockets."""
    digests: dict[str, str]
    """Of each field."""
    episodes: list[tuple[float, int]]
    """(raw score, length in steps) of the episodes that ended in it."""


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
        self.drift: Tensor | None = None
        """fp32 [B, N]: where noise that drifts has got to."""
        self.offset = 0
        """Number of the rollout that is collected in lap 0."""


class _Open:
    """A slab with its fields as numpy arrays, which environments write into."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.fields = {
            name: getattr(slab.whole, name).numpy() for name in ("start", "reward", "terminated", "truncated", "valid")
        }
        self.obs = map_structure(lambda leaf: leaf.numpy(), slab.whole.obs)

    def rows(self, t: int, seat: ShardSeat) -> Any:
        """A shard's observations at one step, to write into."""
        return map_structure(lambda leaf: leaf[t, seat.rows], self.obs)


class ActingBatch:
    """The rows that one inference call serves, in slabs that environments write into.

    Rows of shards that this collector does not hold stay zero: each row's bits depend on the call's shape and on
    that row alone, so padding replaces them.
    """

    def __init__(self, agent: Agent, group: ActingGroup, slabs: list[Slab], make: Callable[[int], ShardEnv]) -> None:
        steps, size = agent.experiment.algorithm.rollout, group.size
        self._experiment = agent.experiment
        self._distribution = agent.model.distribution
        self._previous = agent.experiment.model.uses_previous
        self.seats = [ShardSeat(shard, make(shard), group.rows(shard)) for shard in group.shards]
        self._slabs = [_Open(slab) for slab in slabs]
        self._open = self._slabs[0]
        """The one that was written last, or is being written."""
        self._device = agent.device
        self._noise = torch.zeros(steps, size, self._distribution.noise_size)
        self._policy = torch.zeros(steps, size, self._distribution.num_params, device=self._device)
        self._state = torch.zeros(size, agent.model.state_size, device=self._device)
        self._raw_rewards = np.zeros((steps, size), np.float32)
        self._ended = np.zeros((steps, size), bool)
        """Episodes over for the score: a lost life does not count."""
        self._off_policy = agent.algorithm if isinstance(agent.algorithm, OffPolicy) else None
        self._random = False
        """Whether actions are drawn uniformly."""
        self._theta = 1.0 if self._off_policy is None else self._off_policy.noise_theta
        if self._theta < 1:
            for seat in self.seats:
                begin = stream(agent.experiment.seed, "drift", seat.shard)
                drift = begin.standard_normal((seat.env.num_envs, self._distribution.noise_size), np.float32)
                seat.drift = torch.from_numpy(drift)
        self._exploring: Tensor | None = None
        """fp32 [A, X]: how each environment explores."""

    def reset(self) -> None:
        """Start all environments from their first seeds."""
        for seat in self.seats:
            seat.env.reset(self._open.rows(-1, seat))
        self._open.slab.whole.start[-1] = True

    def begin(self, lap: int) -> None:
        """Carry the last step of the rollout before over to the first of this one, and draw its randomness."""
        before, self._open = self._open, self._slabs[lap % len(self._slabs)]
        slab = self._open.slab
        _carry_over(before.slab, slab)
        for seat in self.seats:
            if seat.env.reseed_due():
                seat.env.reseed(self._open.rows(0, seat))
                slab.whole.start[0, seat.rows] = True
                seat.score[:], seat.length[:] = 0, 0
                seat.return_carry.zero_()
            self._explore(seat, lap + seat.offset)
            draw = stream(self._experiment.seed, "action", seat.shard, lap + seat.offset)
            noise = self._noise[:, seat.rows]
            drawn = torch.from_numpy(draw.random(noise.shape, np.float32))
            if seat.drift is not None and not self._random:
                drawn, seat.drift = drifting(drawn, seat.drift, self._theta)
            noise.copy_(drawn)
        slab.whole.core_state.copy_(self._state)

    def _explore(self, seat: ShardSeat, rollout: int) -> None:
        """Say how a shard's environments explore in a rollout."""
        if self._off_policy is None:
            return
        experiment, size = self._experiment, seat.env.num_envs
        samples = rollout * experiment.samples_per_iteration
        environments = range(seat.shard * size, (seat.shard + 1) * size)
        progress = min(1.0, samples / experiment.total_steps)
        how = self._off_policy.exploration(progress, samples, environments, experiment.env.num_envs)
        self._random = how.random
        if self._exploring is None:
            self._exploring = torch.zeros(self._noise.shape[1], how.numbers.shape[1], device=self._device)
        self._exploring[seat.rows] = how.numbers.to(self._device)

    def act(self, t: int, actor: Inference) -> None:
        """Choose a_t for all rows and send it to the environments."""
        slab, now = self._open.slab, slice(t, t + 1)
        rollout = slab.whole
        out, self._state = self._evaluate(slab, now, actor)
        policy = out.policy[0]
        noise = self._to_device(self._noise[t])
        if self._exploring is None:
            action = self._distribution.sample(policy, noise)
        else:
            assert isinstance(self._distribution, Exploring)
            uniform, explore = self._distribution.uniform, self._distribution.explore
            action = uniform(noise) if self._random else explore(policy, noise, self._exploring)
        self._policy[t], rollout.action[t], rollout.value[t] = policy, action, out.value[0]
        action_np = rollout.action[t].numpy()
        for seat in self.seats:
            seat.env.send(self._distribution.to_env(action_np[seat.rows]))

    def receive(self, t: int) -> None:
        """Take what the environments answered to a_{t-1}: reward_{t-1} and obs_t."""
        fields, clip = self._open.fields, self._experiment.env.reward_clip
        for seat in self.seats:
            rows = seat.rows
            step = seat.env.recv(self._open.rows(t, seat))
            self._raw_rewards[t - 1, rows] = step.reward
            fields["reward"][t - 1, rows] = np.clip(step.reward, -1.0, 1.0) if clip else step.reward
            np.logical_or(step.terminated, step.life_lost, out=fields["terminated"][t - 1, rows])
            fields["truncated"][t - 1, rows] = step.truncated
            np.logical_or(step.terminated, step.truncated, out=self._ended[t - 1, rows])
            np.logical_not(step.first, out=fields["valid"][t - 1, rows])
            np.logical_or(step.first, step.life_lost, out=fields["start"][t, rows])

    def finish(self, actor: Inference, *, bootstrap: bool) -> None:
        """Complete the rollout after its last step: bootstrap value, log-probabilities, scores."""
        slab = self._open.slab
        rollout = slab.whole
        if bootstrap:
            out, _ = self._evaluate(slab, slice(-1, None), actor)
            rollout.value[-1] = out.value[0]
        rollout.log_prob.copy_(self._distribution.log_prob(self._policy, self._to_device(rollout.action)))
        for seat in self.seats:
            self._score(seat)

    def _evaluate(self, slab: Slab, at: slice, actor: Inference) -> tuple[ModelOutput, Tensor]:
        """What the policy makes of the observations of one step, and its next state."""
        return actor(
            map_structure(lambda leaf: self._to_device(leaf[at]), slab.whole.obs),
            self._to_device(slab.whole.start[at]),
            self._state,
            self._to_device(slab.actions[at]) if self._previous else None,
            self._to_device(slab.rewards[at]) if self._previous else None,
        )

    def _to_device(self, x: Tensor) -> Tensor:
        return x if self._device.type == "cpu" else x.to(self._device, non_blocking=True)

    def state(self, seat: ShardSeat) -> dict[str, Tensor]:
        """All of a shard that outlives a rollout."""
        slab, rows = self._open.slab, seat.rows
        tensors = {f"env.{name}": torch.from_numpy(np.asarray(a)) for name, a in seat.env.state_dict().items()}
        tensors |= {
            "start": slab.whole.start[-1, rows].clone(),
            "core_state": self._state[rows].clone(),
            "last_action": slab.actions[-1, rows].clone(),
            "last_reward": slab.rewards[-1, rows].clone(),
            "score": torch.from_numpy(seat.score.copy()),
            "length": torch.from_numpy(seat.length.copy()),
            "return_carry": seat.return_carry.clone(),
        }
        if seat.drift is not None:
            tensors["drift"] = seat.drift.clone()
        return tensors

    @torch.inference_mode()
    def load(self, seat: ShardSeat, tensors: dict[str, Tensor], alive: Callable[[], None] = lambda: None) -> int:
        """Restore what state returned, replaying the environments' actions; returns the steps replayed."""
        slab, rows = self._open.slab, seat.rows
        env_state = {name[4:]: t.numpy() for name, t in tensors.items() if name.startswith("env.")}
        replayed = seat.env.load_state_dict(env_state, self._open.rows(-1, seat), alive)
        slab.whole.start[-1, rows] = tensors["start"]
        self._state[rows] = tensors["core_state"]
        slab.actions[-1, rows] = tensors["last_action"]
        slab.rewards[-1, rows] = tensors["last_reward"]
        seat.score[:], seat.length[:] = tensors["score"].numpy(), tensors["length"].numpy()
        seat.return_carry.copy_(tensors["return_carry"])
        if seat.drift is not None:
            seat.drift = tensors["drift"].clone()
        return replayed

    def _score(self, seat: ShardSeat) -> None:
        """Add up raw rewards into episode scores; Python runs once an episode, not once a step."""
        rewards = self._raw_rewards[:, seat.rows].astype(np.float64)
        steps = self._open.fields["valid"][:, seat.rows].astype(np.int64)
        total, count = np.cumsum(rewards, 0), np.cumsum(steps, 0)
        seat.episodes = []
        for t, env in zip(*np.nonzero(self._ended[:, seat.rows]), strict=True):
            seat.episodes.append((float(seat.score[env] + total[t, env]), int(seat.length[env] + count[t, env])))
            seat.score[env], seat.length[env] = -total[t, env], -count[t, env]
        seat.score += total[-1]
        seat.length += count[-1]


def _carry_over(before: Slab, slab: Slab) -> None:
    def carry(to: Tensor, origin: Tensor) -> None:
        to[0] = origin[-1]

    map_structure(carry, slab.whole.obs, before.whole.obs)
    carry(slab.whole.start, before.whole.start)
    carry(slab.actions, before.actions)
    carry(slab.rewards, before.rewards)


class Collector:
    """Collects for a block of shards. With two or more acting batches, the environments of one step while the
    policy runs for another (alternating sampling).

    Args:
        agent: whose model acts; the collector has a copy of its own for that.
        slabs: of the shards that it collects for.
        env_threads: threads that step a shard's environments (native adapters).
        pool: processes that step the environments (gymnasium); by default they are stepped here.
        alive: called at every step: tells whoever watches this process that it makes progress.
        capture: makes CUDA graphs of acting.
    """

    def __init__(
        self,
        agent: Agent,
        slabs: Slabs,
        *,
        env_threads: int = 1,
        pool: SteppingPool | None = None,
        alive: Callable[[], None] = lambda: None,
        capture: Capture | None = None,
    ) -> None:
        experiment = self._experiment = agent.experiment
        self._model = agent.model.for_acting()
        self._actor = Inference(self._model, capture)
        self._flat = agent.flat
        self._bootstrap = agent.algorithm.needs_targets
        """Whether rollouts need the value of their last observation."""
        self._alive = alive
        self._loaded: int | None = None
        self._slabs = slabs

        def make(shard: int) -> ShardEnv:
            first, count = shard * experiment.envs_per_shard, experiment.envs_per_shard
            return envs.make(
                experiment.env,
                seed=experiment.seed,
                first_index=first,
                num_envs=count,
                threads=env_threads,
                pool=pool,
            )

        self._batches = [ActingBatch(agent, group, of_group, make) for group, of_group in slabs.groups]
        self.times = {"env": 0.0, "inference": 0.0}
        """Seconds since they were last set to 0."""

    def reset(self) -> None:
        """Start all environments from their first seeds; not needed when a checkpoint is loaded."""
        for batch in self._batches:
            batch.reset()

    @property
    def frames_per_step(self) -> int:
        return self._batches[0].seats[0].env.frames_per_step

    def collect(self, lap: int, version_at: Callable[[int], Version]) -> list[Delivery]:
        """Fill one rollout of every shard, step t acting with version_at(t). The rollouts themselves are overwritten
        when their slab's turn comes again."""
        acted, version = self._play(lap, version_at)
        return [self._delivery(shard, lap, acted, version) for shard in self.seats()]

    @torch.inference_mode()
    def _play(self, lap: int, version_at: Callable[[int], Version]) -> tuple[Acting, Version]:
        """Returns (step, version) for each version that acted, and the last of them."""
        version = version_at(0)  # may be waited for, and with it for the slab to be free
        version.normalizers.apply(self._model)  # a rollout has one set of statistics, the one it is learned with
        if version.normalizers.observations is not None:
            self._actor.refresh()
        acted = [(0, version.number)]
        steps = self._experiment.algorithm.rollout
        noise = self._noise(lap, steps)
        for batch in self._batches:
            batch.begin(lap)
        for t in range(steps):
            if t < len(noise):
                self._model.set_noise(noise[t])
                self._actor.refresh()
            version = version_at(t) if t else version
            if version.number != acted[-1][1]:
                acted.append((t, version.number))
            self._load(version)
            for batch in self._batches:
                begin = time.perf_counter()
                if t:
                    batch.receive(t)
                received = time.perf_counter()
                batch.act(t, self._actor)
                self.times["env"] += received - begin
                self.times["inference"] += time.perf_counter() - received
            self._alive()
        for batch in self._batches:
            begin = time.perf_counter()
            batch.receive(steps)
            received = time.perf_counter()
            batch.finish(self._actor, bootstrap=self._bootstrap)
            self.times["env"] += received - begin
            self.times["inference"] += time.perf_counter() - received
        return tuple(acted), version

    def _noise(self, lap: int, steps: int) -> Tensor:
        """fp32 [steps, Z]: what disturbs the model at each step; one row for the whole rollout, or none, is less."""
        model, rollout = self._model, lap + self._batches[0].seats[0].offset
        rows = (steps if model.noise_at_every_step else 1) if model.noise_numbers else 0
        draw = stream(self._experiment.seed, "noisy", rollout)
        return torch.from_numpy(draw.random((rows, model.noise_numbers), np.float32))

    def _delivery(self, shard: int, lap: int, acted: Acting, version: Version) -> Delivery:
        _, seat = self.seats()[shard]
        rollout = self._slabs.rollout(shard, lap)
        moments = version.normalizers.rollout_sums(rollout, seat)
        digests = structure_digests(rollout)
        return Delivery(shard, lap + seat.offset, lap, acted, moments.numpy(), digests, seat.episodes)

    def seats(self) -> dict[int, tuple[ActingBatch, ShardSeat]]:
        """Every shard with the acting batch that it sits in."""
        return {seat.shard: (batch, seat) for batch in self._batches for seat in batch.seats}

    def state(self, shard: int) -> dict[str, Tensor]:
        """All of a shard that outlives a rollout."""
        batch, seat = self.seats()[shard]
        return batch.state(seat)

    def load(self, shard: int, tensors: dict[str, Tensor], offset: int = 0) -> int:
        """Restore a shard from what state returned, to go on with lap 0 as its rollout `offset`; returns the
        environment steps that were replayed for it."""
        batch, seat = self.seats()[shard]
        seat.offset = offset
        return batch.load(seat, tensors, self._alive)

    def close(self) -> None:
        for _, seat in self.seats().values():
            seat.env.close()

    def _load(self, version: Version) -> None:
        if self._loaded == version.number:
            return
        named = self._flat.named(version.parameters)
        for name, parameter in self._model.named_parameters():
            parameter.copy_(named[name])
        self._actor.refresh()
        self._loaded = version.number


class Collectors:
    """All that one process collects with: one collector for all of its shards or, where each shard acts with versions
    of its own, one for each.

    Args:
        slabs: of each collector.
        layout: how environments are stepped.
    """

    def __init__(
        self, agent: Agent, slabs: list[Slabs], layout: Layout, alive: Callable[[], None] = lambda: None
    ) -> None:
        self._slabs = {shard: each for each in slabs for shard in each.shards}
        self._pool = None
        if layout.env_processes:
            self._pool = SteppingPool(layout.env_processes, layout.jitter, layout.stall_timeout)
        capture = cuda_graph if layout.graphs else None
        self._all = [
            Collector(agent, each, env_threads=layout.env_threads, pool=self._pool, alive=alive, capture=capture)
            for each in slabs
        ]
        self._by_shard = {shard: collector for collector in self._all for shard in collector.seats()}
        self.shards = list(self._by_shard)
        self.frames_per_step = self._all[0].frames_per_step

    def collect(self, fill: Fill, version_at: Callable[[int], Version]) -> list[Delivery]:
        """Collect a rollout, by its lap, and those of all shards that act together with it."""
        return self._by_shard[fill.shard].collect(fill.number, version_at)

    def rollout(self, delivery: Delivery) -> Rollout:
        """What was delivered, while its slab is not used again."""
        return self._slabs[delivery.shard].rollout(delivery.shard, delivery.lap)

    def take_times(self) -> dict[str, float]:
        """Seconds spent since this was last asked, by what on."""
        total = {name: sum(collector.times[name] for collector in self._all) for name in self._all[0].times}
        for collector in self._all:
            collector.times.update(env=0.0, inference=0.0)
        return total

    def reset(self) -> None:
        """Start all environments from their first seeds."""
        for collector in self._all:
            collector.reset()

    def state(self, shards: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """By shard: all that outlives a rollout."""
        return {shard: self._by_shard[shard].state(shard) for shard in shards}

    def offset(self, shard: int) -> int:
        """Number of the shard's rollout in lap 0."""
        return self._by_shard[shard].seats()[shard][1].offset

    def load(self, shard: int, tensors: dict[str, Tensor], offset: int) -> int:
        """As Collector.load."""
        return self._by_shard[shard].load(shard, tensors, offset)

    def close(self) -> None:
        for collector in self._all:
            collector.close()
        if self._pool is not None:
            self._pool.close()
