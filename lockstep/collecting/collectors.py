"""Collectors: environments and policy, filling one rollout for each shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep import envs
from lockstep.agent import Agent, Version
from lockstep.clock import Acting, Fill
from lockstep.collecting.acting import ActingBatch, ShardSeat
from lockstep.collecting.preemption import Preemption
from lockstep.digests import structure_digests
from lockstep.envs.base import ShardEnv
from lockstep.envs.finite import FiniteCheck
from lockstep.envs.subprocess import SteppingPool
from lockstep.layout import Layout
from lockstep.models.capture import Inference
from lockstep.rng import stream
from lockstep.runtime.graphs import Capture, cuda_graph
from lockstep.storage.rollout import Rollout
from lockstep.storage.slabs import Slabs


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
    cut: int | None = None
    """The steps that it has if it was cut, fewer than rollouts have."""
    noise: int | None = None
    """The number by which the model's noise was drawn, where that is not this rollout's: shards that act together share
    it, and after a free-running run was resumed their rollouts need not have one number."""
    not_finite: str = ""
    """The first number of environments, since the process began, that was NaN or infinite: whose, and when."""

    @property
    def first_version(self) -> int:
        """The number of the version that began to collect it."""
        return self.versions[0][1]


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
        preemption: decides which rollouts are cut; by default none is.
        finite_check: what becomes of numbers of environments that are not finite; by default, an error.
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
        preemption: Preemption | None = None,
        finite_check: FiniteCheck | None = None,
    ) -> None:
        experiment = self._experiment = agent.experiment
        self._finite_check = finite_check = finite_check or FiniteCheck(experiment.env.id)
        self._preemption = preemption
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

        self._batches = [ActingBatch(agent, group, of_group, make, finite_check) for group, of_group in slabs.groups]
        self.times = {"env": 0.0, "inference": 0.0}
        """Seconds since they were last set to 0."""

    def reset(self) -> None:
        """Start all environments from their first seeds; not needed when a checkpoint is loaded."""
        for batch in self._batches:
            batch.reset()

    @property
    def frames_per_step(self) -> int:
        return self._batches[0].seats[0].env.frames_per_step

    def collect(self, lap: int, version_at: Callable[[int], Version], noise: int | None = None) -> list[Delivery]:
        """Fill one rollout of every shard, step t acting with version_at(t). The rollouts themselves are overwritten
        when their slab's turn comes again.

        Args:
            noise: the number by which the model's noise is drawn. None: that of the first shard's rollout.
        """
        noise = lap + self._batches[0].seats[0].offset if noise is None else noise
        try:
            acted, version = self._play(lap, version_at, noise)
        except Exception:  # which may follow from numbers that the policy, and then an environment, could not take
            for batch in self._batches:
                batch.check_finite(batch.received, lap)
            raise
        return [self._delivery(shard, lap, acted, version, noise) for shard in self.seats()]

    @torch.inference_mode()
    def _play(self, lap: int, version_at: Callable[[int], Version], drawn_by: int) -> tuple[Acting, Version]:
        """Returns (step, version) for each version that acted, and the last of them."""
        version = version_at(0)  # may be waited for, and with it for the slab to be free
        version.normalizers.apply(self._model)  # a rollout has one set of statistics, the one it is learned with
        if version.normalizers.observations is not None:
            self._actor.refresh()
        acted = [(0, version.number)]
        steps = self._experiment.algorithm.rollout
        noise = self._noise(drawn_by, steps)
        for batch in self._batches:
            batch.begin(lap)
        playing = self._batches
        for t in range(steps):
            if t < len(noise):
                self._model.set_noise(noise[t])
                self._actor.refresh()
            version = version_at(t) if t else version
            if version.number != acted[-1][1]:
                acted.append((t, version.number))
            self._load(version)
            for batch in playing:
                begin = time.perf_counter()
                if t:
                    batch.receive(t)
                    if self._preemption is not None:
                        batch.preempt(t, lap, self._preemption)
                received = time.perf_counter()
                batch.act(t, self._actor)
                self.times["env"] += received - begin
                self.times["inference"] += time.perf_counter() - received
            self._alive()
            if self._preemption is not None:
                playing = [batch for batch in playing if batch.going]
                if not playing:
                    break
        for batch in self._batches:
            begin = time.perf_counter()
            batch.receive(steps)
            batch.check_finite(steps, lap)
            received = time.perf_counter()
            batch.finish(self._actor, bootstrap=self._bootstrap)
            self.times["env"] += received - begin
            self.times["inference"] += time.perf_counter() - received
        if self._preemption is not None:
            for shard, (_, seat) in self.seats().items():
                self._preemption.collected(Fill(shard, lap + seat.offset))
        return tuple(acted), version

    def _noise(self, number: int, steps: int) -> Tensor:
        """fp32 [steps, Z]: what disturbs the model at each step; one row for the whole rollout, or none, is less."""
        model = self._model
        rows = (steps if model.noise_at_every_step else 1) if model.noise_numbers else 0
        draw = stream(self._experiment.seed, "noisy", number)
        return torch.from_numpy(draw.random((rows, model.noise_numbers), np.float32))

    def _delivery(self, shard: int, lap: int, acted: Acting, version: Version, drawn_by: int) -> Delivery:
        _, seat = self.seats()[shard]
        number = lap + seat.offset
        noise = drawn_by if self._model.noise_numbers and drawn_by != number else None
        rollout, cut = self._slabs.rollout(shard, lap), None
        if seat.last < 0:
            moments = version.normalizers.rollout_sums(rollout, seat.return_carry)
        else:
            cut = seat.last
            moments = version.normalizers.rollout_sums(rollout[:cut], seat.return_carry)
            # Only now: the return in flight goes on, but what learns must bootstrap from the last observation.
            rollout.truncated[cut - 1] |= ~rollout.terminated[cut - 1]
        digests = structure_digests(rollout)
        return Delivery(
            shard, number, lap, acted, moments.numpy(), digests, seat.episodes, cut, noise, self._finite_check.found
        )

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
        preemption: as for Collector.
        stop: whether numbers of environments that are not finite are an error, rather than warned of once.
    """

    def __init__(
        self,
        agent: Agent,
        slabs: list[Slabs],
        layout: Layout,
        alive: Callable[[], None] = lambda: None,
        preemption: Preemption | None = None,
        *,
        stop: bool = True,
    ) -> None:
        finite_check = FiniteCheck(agent.experiment.env.id, stop=stop)
        self._slabs = {shard: each for each in slabs for shard in each.shards}
        self._pool = None
        if layout.env_processes:
            self._pool = SteppingPool(layout.env_processes, layout.jitter, layout.stall_timeout)
        capture = cuda_graph if layout.graphs else None
        self._all = [
            Collector(
                agent,
                each,
                env_threads=layout.env_threads,
                pool=self._pool,
                alive=alive,
                capture=capture,
                preemption=preemption,
                finite_check=finite_check,
            )
            for each in slabs
        ]
        self._by_shard = {shard: collector for collector in self._all for shard in collector.seats()}
        self.shards = list(self._by_shard)
        self.frames_per_step = self._all[0].frames_per_step

    def collect(self, fill: Fill, version_at: Callable[[int], Version], noise: int | None = None) -> list[Delivery]:
        """Collect a rollout, by its lap, and those of all shards that act together with it; noise: as for Collector."""
        return self._by_shard[fill.shard].collect(fill.number, version_at, noise)

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
