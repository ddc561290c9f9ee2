"""Collectors: environments and a policy that fill a rollout for each shard."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.collectors.acting import ActingBatch
from lockstep.collectors.actors import Actor, actors_of
from lockstep.collectors.preemption import Preemption
from lockstep.collectors.stepping import ActingShard, BatchEnvs, Stepping
from lockstep.config.layout import Layout
from lockstep.core.rng import stream
from lockstep.core.rollout import Rollout, RolloutInfo
from lockstep.core.schedule import Acting, LapId, RolloutId
from lockstep.envs.curriculum import unpack
from lockstep.envs.finite import FiniteCheck
from lockstep.envs.pool.pool import SteppingPool
from lockstep.models.arithmetic import arithmetic
from lockstep.models.capture import inference_of
from lockstep.models.versions import Version
from lockstep.system.graphs import Capture, cuda_graph


class Collector:
    """Collects the rollouts of a block of shards. With two or more acting batches, the environments of one batch step
    while the policy runs for another (alternating sampling).

    Args:
        agent: the agent; a copy of its model acts.
        buffers: the buffers of the collector's shards.
        env_threads: threads that step a shard's environments (native adapters).
        pool: processes that step the environments (gymnasium); by default this process steps them.
        heartbeat: called at every step, to tell the supervisor that this process makes progress.
        capture: makes CUDA graphs of acting.
        preemption: decides which rollouts end early; by default none do.
        finite_check: handles numbers of environments that are not finite; by default it raises NotFinite.
    """

    def __init__(
        self,
        agent: Agent,
        buffers: RolloutBuffers,
        *,
        env_threads: int = 1,
        pool: SteppingPool | None = None,
        heartbeat: Callable[[], None] = lambda: None,
        capture: Capture | None = None,
        preemption: Preemption | None = None,
        finite_check: FiniteCheck | None = None,
    ) -> None:
        experiment = self._experiment = agent.experiment
        self._finite_check = finite_check = finite_check or FiniteCheck(experiment.env.id)
        self._preemption = preemption
        self._model = agent.model.for_acting()
        self._parameters = dict(self._model.named_parameters())
        self._inference = inference_of(agent.kernels, self._model, fixed=capture is not None)
        self._flat, self._device = agent.flat, agent.device
        own = self._model.flat_parameters
        self._vector = own.vector.detach() if own is not None and own.lies_like(agent.flat) else None
        """The acting copy's parameters, if their memory layout is the learner's."""
        self._heartbeat = heartbeat
        self._hashing = ThreadPoolExecutor(env_threads, "lockstep-hashing") if env_threads > 1 else None
        """Hashes on the cores of the environments' threads, which are idle meanwhile."""
        self._map = self._hashing.map if self._hashing else map
        self._loaded: int | None = None
        stepping = Stepping(env_threads, pool, apart=preemption is not None, device=str(agent.device))
        self._batches = [
            ActingBatch(agent, group, of_group, BatchEnvs(experiment, group, stepping), finite_check)
            for group, of_group in buffers.groups
        ]
        self._make_actors = functools.partial(
            actors_of,
            self._batches,
            agent,
            self._model,
            capture=capture,
            preempted=preemption is not None,
            heartbeat=heartbeat,
        )
        self._actors: list[Actor] = []
        """One for each acting batch, made when its environments start or are loaded."""
        self.times = {"env": 0.0, "inference": 0.0}
        """Seconds since they were last set to 0."""

    def reset(self) -> None:
        """Start all environments from their first seeds. Not needed before loading a checkpoint."""
        for batch in self._batches:
            batch.reset()
        self._actors = self._make_actors()

    @property
    def frames_per_step(self) -> int:
        """The environments' frames per step."""
        return self._batches[0].envs.stepped[0].env.frames_per_step

    def collect(
        self, lap: int, version_at: Callable[[int], Version], noise: int | None = None
    ) -> list[CollectedRollout]:
        """Collect a rollout of every shard into the buffers of a lap. A later lap reuses the buffers.

        Args:
            lap: chooses the buffers; see LapId.
            version_at: returns the version that acts at a step.
            noise: the number that seeds the model's noise. None: the number of the first shard's rollout.
        """
        noise = lap + self._batches[0].members[0].offset if noise is None else noise
        try:
            first = self._begin(lap, version_at)
            with self._inference.arithmetic():
                acted, last = self._play(lap, first, version_at, noise)
        except Exception:  # perhaps caused by numbers that are not finite
            for batch in self._batches:
                batch.check_finite(batch.received, lap)
            raise
        members = [(batch, member, batch.open.buffer.shards[member.shard]) for batch, member in self.members().values()]
        moments = [self._moments(member, rollout, last) for _, member, rollout in members]
        digests = self._map(lambda each: each[0].digests(each[1].shard), members)
        return [
            CollectedRollout(
                self._info(member, lap, acted, noise, sums, hashed),
                rollout,
                first.normalizers,
                batch.on_device.get(member.shard),
            )
            for (batch, member, rollout), sums, hashed in zip(members, moments, digests, strict=True)
        ]

    @torch.inference_mode()
    def _begin(self, lap: int, version_at: Callable[[int], Version]) -> Version:
        """Prepare all batches for a rollout. Returns the version that acts first."""
        version = version_at(0)  # may wait, also until the buffer is free
        if version.normalizers.normalizes_observations:
            with arithmetic(self._model):
                version.normalizers.apply(self._model)  # for the whole rollout: it is learned from with these, too
            self._inference.refresh()
        for actor in self._actors:
            if len(version.options):
                actor.batch.envs.offer(unpack(self._experiment.env, version.options))
            actor.batch.begin(lap)
            actor.begin()
        return version

    @torch.inference_mode()
    def _play(
        self, lap: int, version: Version, version_at: Callable[[int], Version], drawn_by: int
    ) -> tuple[Acting, Version]:
        """Play all steps. Returns (step, version) for each version that acted, and the last version."""
        acted = [(0, version.number)]
        steps = self._experiment.algorithm.rollout
        noise = self._noise(drawn_by, steps)
        noisy, playing = noise.shape[0], self._actors
        for t in range(0, steps, playing[0].steps):
            if t < noisy:
                self._inference.set_noise(noise[t])
            version = version_at(t) if t else version
            if version.number != acted[-1][1]:
                acted.append((t, version.number))
            self._load(version)
            for actor in playing:
                begin = time.perf_counter()
                if t:
                    actor.receive(t)
                    if self._preemption is not None:
                        actor.batch.preempt(t, lap, self._preemption)
                received = time.perf_counter()
                actor.act(t, self._inference)
                self.times["env"] += received - begin
                self.times["inference"] += time.perf_counter() - received
            self._heartbeat()
            if self._preemption is not None:
                playing = [actor for actor in playing if actor.batch.going]
                if not playing:
                    break
        for actor in self._actors:
            begin = time.perf_counter()
            actor.receive(steps)
            received = time.perf_counter()
            actor.finish(self._inference)
            actor.batch.check_finite(steps, lap)
            actor.batch.score()
            self.times["env"] += received - begin
            self.times["inference"] += time.perf_counter() - received
        if self._preemption is not None:
            for shard, (_, member) in self.members().items():
                self._preemption.collected(RolloutId(shard, lap + member.offset))
        return tuple(acted), version

    def _noise(self, number: int, steps: int) -> Tensor:
        """fp32 [steps, Z]: the model's noise at each step; [1, Z] for the whole rollout; [0, Z] without noise."""
        model = self._model
        if not model.noise_numbers:
            return torch.zeros(0, 0)
        rows = steps if model.noise_at_every_step else 1
        draw = stream(self._experiment.seed, "noisy", number)
        return torch.from_numpy(draw.random((rows, model.noise_numbers), np.float32)).to(self._device)

    def _moments(self, member: ActingShard, rollout: Rollout, version: Version) -> np.ndarray:
        """The sums of a rollout for the normalizers. Also marks the end of a preempted rollout."""
        end = member.last
        if end < 0:
            return version.normalizers.rollout_sums(rollout, member.return_carry).numpy()
        moments = version.normalizers.rollout_sums(rollout[:end], member.return_carry)
        # Only now, since returns continue in rollout_sums. The learner must bootstrap from the last observation.
        rollout.truncated[end - 1] |= ~rollout.terminated[end - 1]
        return moments.numpy()

    def _info(
        self, member: ActingShard, lap: int, acted: Acting, drawn_by: int, moments: np.ndarray, digests: dict[str, str]
    ) -> RolloutInfo:
        number = lap + member.offset
        return RolloutInfo(
            shard=member.shard,
            number=number,
            lap=lap,
            versions=acted,
            moments=moments,
            digests=digests,
            episodes=member.episodes,
            preempted_after=None if member.last < 0 else member.last,
            noise=drawn_by if self._model.noise_numbers and drawn_by != number else None,
            not_finite=self._finite_check.found,
        )

    def members(self) -> dict[int, tuple[ActingBatch, ActingShard]]:
        """By shard: its acting batch, and its rows and state there."""
        return {member.shard: (batch, member) for batch in self._batches for member in batch.members}

    def state(self, shard: int) -> dict[str, Tensor]:
        """A shard's state between two rollouts."""
        batch, member = self.members()[shard]
        return batch.state(member)

    def load(self, states: Mapping[int, dict[str, Tensor]], offsets: Mapping[int, int]) -> int:
        """Restore the result of `state` of each shard. Returns the number of environment steps that were replayed.

        Args:
            states: by shard.
            offsets: by shard, the number of the rollout that lap 0 collects.
        """
        for shard, (_, member) in self.members().items():
            member.offset = offsets[shard]
        replayed = sum(batch.load(states, self._heartbeat) for batch in self._batches)
        self._actors = self._make_actors()
        return replayed

    def close(self) -> None:
        """Release all environments and threads."""
        for batch in self._batches:
            batch.envs.close()
        if self._hashing:
            self._hashing.shutdown()

    def _load(self, version: Version) -> None:
        if self._loaded == version.number:
            return
        if not self._inference.load(version.parameters, lasts=version.lasts):
            if self._vector is not None:
                self._vector.copy_(version.parameters)
            else:
                named = self._flat.named(version.parameters)
                for name, parameter in self._parameters.items():
                    parameter.copy_(named[name])
        self._inference.refresh()
        self._model.weights_changed()  # for compiled functions, which do not use inference
        self._loaded = version.number


class Collectors:
    """The collectors of one process: one for all of its shards, or one for each if shards act with different versions.

    Args:
        buffers: the buffers of each collector.
        layout: how environments are stepped.
        preemption: as for Collector.
        stop: whether numbers of environments that are not finite raise an error; otherwise one warning is printed.
    """

    def __init__(
        self,
        agent: Agent,
        buffers: list[RolloutBuffers],
        layout: Layout,
        heartbeat: Callable[[], None] = lambda: None,
        preemption: Preemption | None = None,
        *,
        stop: bool = True,
    ) -> None:
        finite_check = FiniteCheck(agent.experiment.env.id, stop=stop)
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
                heartbeat=heartbeat,
                capture=capture,
                preemption=preemption,
                finite_check=finite_check,
            )
            for each in buffers
        ]
        self._by_shard = {shard: collector for collector in self._all for shard in collector.members()}
        self.shards = list(self._by_shard)
        self.frames_per_step = self._all[0].frames_per_step

    def collect(
        self, lap_id: LapId, version_at: Callable[[int], Version], noise: int | None = None
    ) -> list[CollectedRollout]:
        """Collect a lap of a shard and of all shards that act together with it, as Collector.collect does."""
        return self._by_shard[lap_id.shard].collect(lap_id.lap, version_at, noise)

    def take_times(self) -> dict[str, float]:
        """Seconds that each kind of work took since the last call, by its name."""
        total = {name: sum(collector.times[name] for collector in self._all) for name in self._all[0].times}
        for collector in self._all:
            collector.times.update(env=0.0, inference=0.0)
        return total

    def reset(self) -> None:
        """Start all environments from their first seeds."""
        for collector in self._all:
            collector.reset()

    def state(self, shards: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """By shard: its state between two rollouts."""
        return {shard: self._by_shard[shard].state(shard) for shard in shards}

    def offset(self, shard: int) -> int:
        """The number of the rollout that a shard collected in lap 0."""
        return self._by_shard[shard].members()[shard][1].offset

    def load(self, states: Mapping[int, dict[str, Tensor]], offsets: Mapping[int, int]) -> int:
        """As Collector.load."""
        return sum(collector.load(states, offsets) for collector in self._all)

    def close(self) -> None:
        """Release all environments, threads and processes."""
        for collector in self._all:
            collector.close()
        if self._pool is not None:
            self._pool.close()
