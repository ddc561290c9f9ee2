"""Minibatches of algorithms that replay, with an equal share from every shard.

The host draws items and keeps their priorities. If the host has the replay memory, it reads the minibatch and sends it
to a GPU that learns. If that GPU has the replay memory, the host only sends the numbers of steps and environments,
weights and noise.

Shape legend: n items of a slice, Z numbers of noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.algorithms.offpolicy import OffPolicy, off_policy
from lockstep.buffers.batches import CollectedRollout, Slice
from lockstep.buffers.data import Data, fill, load
from lockstep.buffers.hindsight import Hindsight
from lockstep.buffers.history import History
from lockstep.buffers.replay import Replay
from lockstep.buffers.replay_placement import Placing, on_gpu, require
from lockstep.buffers.slabs import sent_together
from lockstep.buffers.storage import storage_for
from lockstep.core.rng import stream
from lockstep.core.rollout import Rollout
from lockstep.core.transitions import Drawn
from lockstep.envs.goals import Goals
from lockstep.models.normalize import Normalizers
from lockstep.portable.numbers import power
from lockstep.run.checkpoint import Checkpoint

_AT_ONCE = 16 << 20
"""Bytes of observations to read at once, for several gradient steps. This costs less per item."""
_AT_ONCE_FOR_GPU = 4 << 20
"""Fewer bytes for a GPU, which learns from some items while the host reads others."""
_DRAWN_AT_ONCE = 8
"""Gradient steps to draw for at once if the GPU reads the items. One copy serves these steps while the GPU learns from
earlier items."""


class Prefetched(NamedTuple):
    """Items that were read together, for one or several gradient steps. If the replay memory is on a GPU, they have
    only been drawn, and are read later."""

    batch: Any
    drawn: list[tuple[np.ndarray, np.ndarray]]
    """By gradient step: the numbers of steps and the environments, [n] each."""
    memory: Tensor | None = None
    """uint8: on a GPU, the memory that holds the batch."""
    moves: int = 0
    """Replay.moves of the memory that the items are read from."""


class ReplayBatches:
    """Draws from the replay of every slot's shard, an equal share of each minibatch."""

    in_graphs: ClassVar[bool] = True
    """Whether CUDA graphs may read its items. It is not inherited: a subclass that changes how slices are
    made gets no graphs, which gives the same bits, unless it declares this, too."""

    def __init__(self, agent: Agent, slots: range) -> None:
        config, algorithm = off_policy(agent.experiment.algorithm), agent.algorithm
        assert isinstance(algorithm, OffPolicy)
        self._agent, self._config, self._algorithm, self._slots = agent, config, algorithm, slots
        self._replays: dict[int, Replay] = {}
        self.heartbeat: Callable[[], None] = lambda: None
        """Called while replay is filled, written or restored, to tell the supervisor that this process makes
        progress."""
        self._histories = {slot: History(slot, lambda: self.heartbeat()) for slot in slots}
        self._saved: dict[int, Checkpoint] = {}
        self._draws: dict[int, np.random.Generator] = {}
        self._goals = Goals(agent.experiment.env) if config.replay.hindsight else None
        self._hindsight: dict[int, Hindsight] = {}
        self._beta, self._recency = 1.0, 1.0
        self._items = config.batch_size // agent.experiment.scheme.shards
        self._steps = 0
        """Gradient steps of the iteration."""
        self._began = 0 if config.replay.checkpoint else None
        """The iteration at which the replay memory began. None: not known yet, since checkpoints do not contain
        replay."""
        self._prefetched: dict[int, Prefetched] = {}
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.placing = Placing()
        """Where replay memory should be."""
        self._on_gpu = False
        """Whether the GPU has the replay memory."""
        self._coming: dict[int, tuple[tuple[np.ndarray, np.ndarray], Tensor]] = {}
        """By slot: items, and their new priorities, which are being copied from the GPU."""
        self._arrival = None if agent.device.type == "cpu" else torch.cuda.Event()
        """The end of these copies."""

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        """Store an iteration's rollouts, and return the number of its gradient steps. The first call needs at least one
        rollout for every slot."""
        experiment = self._agent.experiment
        self._set_priorities()
        data: Data | None = None
        for slot in self._slots:
            new = rollouts[slot]
            if not self._replays:
                self._place(new[0].rollout)
            if slot not in self._replays:
                self._replays[slot] = storage_for(self._algorithm, experiment, new[0].rollout)
                if self._on_gpu:
                    self._replays[slot].move_to(self._agent.device)
                if self._goals is not None:
                    self._hindsight[slot] = Hindsight(
                        self._replays[slot], self._goals, self._config.replay.hindsight, self._config.discount
                    )
                saved = self._saved.pop(slot, None)
                restored = saved is not None and self._histories[slot].restore(saved, self._replays[slot])
                if self._config.replay.data and not restored:
                    agent = self._agent
                    if data is None:
                        data = load(experiment, agent.observation_space, agent.action_space)
                    example, distribution = new[0].rollout, agent.model.distribution
                    fill(self._replays[slot], experiment, slot, data, example, distribution, self.heartbeat)
            for each in new:
                if self._on_gpu:
                    self._replays[slot].insert(each.rollout, each.on_device)
                else:
                    self._replays[slot].insert(each.rollout)
            if slot in self._hindsight:
                self._hindsight[slot].record_ends()
            self._draws[slot] = stream(experiment.seed, "replay", slot, iteration)
        self._beta, self._recency = hyper.get("beta", 1.0), hyper.get("recency", 1.0)
        self._began = iteration if self._began is None else self._began
        self._steps = self._algorithm.updates_in(iteration - self._began, experiment.samples_per_iteration)
        return self._steps

    def _place(self, example: Rollout) -> None:
        """Decide which device has the replay memory."""
        experiment, slots = self._agent.experiment, len(self._slots)
        self._on_gpu = on_gpu(experiment, slots, example, self._agent.device, self.placing)
        if not self._on_gpu:
            require(experiment, max(slots, self.placing.shards), self.placing.learners, example)

    def slice(self, slot: int, step: int) -> Slice:
        """A slot's part of one gradient step's minibatch."""
        items, index = self.prefetched(slot, step)
        batch = items.batch if len(items.drawn) == 1 else items.batch.part(index, len(items.drawn))
        return Slice(self.read(slot, batch), self.normalizers(slot))

    def read(self, slot: int, batch: Any) -> Any:
        """A minibatch. batch: the minibatch itself, or drawn items, which the GPU reads while the host goes on."""
        if not isinstance(batch, Drawn):
            return batch
        items = self._replays[slot].items(batch)
        return items.replace(reward=self._agent.normalizers.scale_rewards(items.reward, deviation=batch.deviation))

    def normalizers(self, slot: int) -> Normalizers:
        """The newest statistics, since items may be old."""
        return self._agent.normalizers

    def prefetched(self, slot: int, step: int) -> tuple[Prefetched, int]:
        """The items that were read together with those of a gradient step, and the index of this step's equal part."""
        several = (self._on_gpu or self._replays[slot].single_steps) and not self._algorithm.weighted
        at_once = self._at_once(self._items * self._replays[slot].item_bytes) if several else 1  # priorities change
        index = step % at_once
        if index == 0:
            self._prefetched[slot] = self._prefetch(slot, range(step, max(step + 1, min(step + at_once, self._steps))))
        items = self._prefetched[slot]
        self._drawn[slot] = items.drawn[index]
        return items, index

    def _at_once(self, size: int) -> int:
        """For how many gradient steps items are read together. size: the bytes of one step's items."""
        if self._agent.device.type == "cpu":
            return max(1, _AT_ONCE // size)
        steps, most = max(1, self._steps), _DRAWN_AT_ONCE if self._on_gpu else max(1, _AT_ONCE_FOR_GPU // size)
        return -(-steps // -(-steps // most))  # groups of equal size if possible, since each size needs its own graph

    def _prefetch(self, slot: int, steps: range) -> Prefetched:
        """A slot's parts of several minibatches, concatenated. Random numbers are drawn step by step."""
        if slot in self._coming:
            self._set_priorities()
        draw, replay, items = self._draws[slot], self._replays[slot], self._items
        numbers, hindsight = self._algorithm.noise_numbers(self._agent.model, items), self._hindsight.get(slot)
        drawn, chances, noise = [], [], []
        for step in steps:
            drawn.append(replay.draw(items, draw, self._newest_steps(step) if self._recency < 1 else None))
            if hindsight is not None:
                chances.append(draw.random((2, items)))
            if numbers:
                noise.append(draw.random(numbers, np.float32))
        times, environments, probability = (np.concatenate(each) for each in zip(*drawn, strict=True))
        shards = self._agent.experiment.scheme.shards
        weight = power(probability / shards, -self._beta) if self._algorithm.weighted else np.ones(len(times))
        places = [each[:2] for each in drawn]
        if self._on_gpu:
            given = replay.to_read(times, environments, weight)
            if numbers:
                given = given.replace(noise=torch.from_numpy(np.concatenate(noise)))
            if (returns := self._agent.normalizers.returns) is not None:
                given = given.replace(deviation=returns.std.float().view(1))
            memory, given = sent_together(given, self._agent.device)
            return Prefetched(given, places, memory, replay.moves)
        batch = replay.batch(times, environments, weight)
        if hindsight is not None:
            batch = hindsight.relabel(batch, times, environments, *np.concatenate(chances, -1))
        if numbers:
            batch = batch.replace(noise=torch.from_numpy(np.concatenate(noise)))
        batch = batch.replace(reward=self._agent.normalizers.scale_rewards(batch.reward))
        if self._agent.device.type == "cpu":
            return Prefetched(batch, places)
        memory, batch = sent_together(batch, self._agent.device)
        return Prefetched(batch, places, memory)

    def _newest_steps(self, step: int) -> int:
        """From how many of each environment's newest steps a gradient step draws (Wang and Ross 2019, equation 3)."""
        replay = self._config.replay
        wanted = replay.capacity * self._recency ** (1000 * (step + 1) / self._config.updates)
        return math.ceil(max(wanted, replay.recency_least) / self._agent.experiment.env.num_envs)

    def save(self, slot: int, directory: Path, iteration: int) -> list[dict[str, Any]]:
        """Write a slot's replay into a checkpoint if algorithm.replay.checkpoint is set."""
        if not self._config.replay.checkpoint:
            return []
        if slot in self._saved:  # the run was resumed at this iteration, and no rollout has shown the shapes
            return self._histories[slot].link(directory, iteration, self._saved[slot])
        self._set_priorities()
        return self._histories[slot].save(directory, iteration, self._replays[slot])

    def restore(self, slot: int, saved: Checkpoint) -> None:
        """Restore a slot's replay when the first rollout has shown its shapes."""
        self._saved[slot] = saved

    def close(self) -> None:
        """Release the environment that computes rewards in hindsight."""
        if self._goals is not None:
            self._goals.close()

    def learned(self, slot: int, priorities: Tensor | None) -> None:
        """Take the priorities of the items that were drawn last from a slot's replay. Priorities on a GPU are set
        before the next use of the replay. Only then the host waits for them."""
        if not self._algorithm.weighted:
            return
        assert priorities is not None
        if self._arrival is None:
            self._replays[slot].prioritize(*self._drawn[slot], priorities.numpy())
            return
        on_host = torch.empty(priorities.shape, dtype=priorities.dtype, pin_memory=True)
        self._coming[slot] = self._drawn[slot], on_host.copy_(priorities, non_blocking=True)
        self._arrival.record()

    def _set_priorities(self) -> None:
        """Set the priorities that come from the GPU."""
        if self._coming:
            assert self._arrival is not None
            self._arrival.synchronize()
        for slot, (drawn, priorities) in self._coming.items():
            self._replays[slot].prioritize(*drawn, priorities.numpy())
        self._coming.clear()
