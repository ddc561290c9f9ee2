"""The timed calls: an experiment's environments, model, replay and minibatches, each part alone, in the shapes it uses.

Shape legend: T time, B environments of a shard, A rows of an acting batch, n items of a slice of a minibatch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.agent import Agent
from lockstep.algorithms.offpolicy import off_policy
from lockstep.buffers.batches import Batches, CollectedRollout
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.buffers.rollout_buffers import RolloutBuffers, acting_groups
from lockstep.collectors.acting import OpenRollout
from lockstep.collectors.collectors import Collector
from lockstep.collectors.compiled_actor import CompiledPolicy
from lockstep.collectors.device_actor import DevicePolicy
from lockstep.collectors.stepping import BatchEnvs, Stepping
from lockstep.config.layout import Layout
from lockstep.core.arrays import map_structure
from lockstep.core.rollout import RolloutInfo
from lockstep.core.shards import block
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.learners.kernel_learner import KernelLearner
from lockstep.learners.learner import Learner
from lockstep.learners.optimizer import optimizer_for
from lockstep.learners.process import learner_of
from lockstep.models.arithmetic import arithmetic
from lockstep.models.capture import Inputs, inference_of
from lockstep.system.graphs import Capture, cuda_graph

_REMEMBERED = 100_000
"""Maximum number of steps in the memory while replay is measured: more would cost memory, not time."""
_EXAMPLES = 128
"""Steps that are collected once and inserted again and again. Fewer would cut more episodes than frames allow."""


class Calls:
    """One process's environments, model and batch, ready for timing.

    Args:
        experiment: the one to measure.
        layout: chooses the device, and whether CUDA graphs act.
        index: of this process.
    """

    def __init__(self, experiment: Experiment, layout: Layout, index: int) -> None:
        learners = layout.learning
        collectors = layout.collecting
        experiment = self._experiment = _with_less_memory(experiment)
        shards = block(experiment.scheme.shards, collectors, index % collectors)
        acting = Agent(experiment, layout.device_of("collector", index % collectors))
        learning = Agent(experiment, layout.device_of("learner", index % learners))
        self._gpus = {agent.device for agent in (acting, learning) if agent.device.type == "cuda"}
        group, size = acting_groups(experiment, shards)[0], experiment.envs_per_shard
        buffers = RolloutBuffers(
            acting, range(group.shards[0], group.shards[-1] + 1), 1, PrivateArena(pinned=acting.device.type != "cpu")
        )
        (self._group, (buffer,)) = buffers.groups[0]
        self._buffer, self._whole = buffer, buffer.whole
        self._envs = BatchEnvs(experiment, self._group, Stepping())
        for each in self._envs.stepped:
            each.env.reset(self._obs(each.rows))
        slots = len(block(experiment.scheme.shards, learners, index % learners))
        collected = size * experiment.algorithm.rollout
        updates, _ = experiment.algorithm.gradient_steps(experiment.samples_per_iteration)
        self.calls: dict[str, tuple[Callable[[], object], float]] = {}
        """For each part, the call to time and the number of training samples that it covers."""
        together = 1 if learning.kernels is None else slots
        """Slots whose gradients one call computes."""
        learner = learner_of(learning, range(together), TreeSum(together, Group()))
        batches = self._batches = learner.batches
        if experiment.algorithm.replays:
            rollouts = self._played(acting, buffers)
            insert, sample = self._inserting(learning, learner, rollouts, together), self._sampling(batches, updates)
            for _ in range(1 - (-off_policy(experiment.algorithm).item_steps // experiment.algorithm.rollout)):
                insert()
            self.calls |= {"inserting": (insert, together * collected), "sampling": (sample, collected / updates)}
        else:
            rollout = buffer.shards[self._group.shards[0]].map(torch.clone)
            rollout.valid.fill_(True)  # its numbers are arbitrary
            nothing = RolloutInfo(self._group.shards[0], 0, 0, ((0, 0),), np.zeros(0), {}, [])
            collected_now = [CollectedRollout(nothing, rollout, learning.normalizers)]
            self._inserting(learning, learner, collected_now, together)()
        stepped = len(self._group.shards) * size
        self.calls |= {
            "env": (self._env(acting), stepped),
            "inference": (self._inference(acting, cuda_graph if layout.graphs else None), stepped),
            "training": (self._training(learning, learner, together), together * collected / updates),
            "optimizer": (self._optimizer(learning), slots * collected / updates),
            "reduction": (self._reduction(learning, slots // together), slots * collected / updates),
        }

    def close(self) -> None:
        self._envs.close()
        if isinstance(self._batches, ReplayBatches):
            self._batches.close()

    def _obs(self, rows: slice) -> Any:
        """The first observations of some rows, to write into."""
        return map_structure(lambda leaf: leaf[0, rows].numpy(), self._whole.obs)

    def _env(self, agent: Agent) -> Callable[[], object]:
        distribution = agent.model.distribution
        shape, dtype = (self._group.size, *distribution.action_shape), distribution.action_dtype
        actions = distribution.to_env(torch.zeros(shape, dtype=dtype).numpy())
        places = [
            (each, each.of(actions) if isinstance(actions, tuple) else actions[each.rows], self._obs(each.rows))
            for each in self._envs.stepped
        ]

        def step() -> None:
            for each, action, out in places:
                each.env.send(action)
                each.env.recv(out)

        return step

    def _inference(self, agent: Agent, capture: Capture | None) -> Callable[[], object]:
        """Choose actions as collectors do: by compiled functions, by recorded calls, or on a GPU with its copies."""
        model, distribution, size = agent.model.for_acting(), agent.model.distribution, self._group.size
        whole, noise = self._whole, torch.rand(1, size, distribution.noise_size)
        if (kernels := model.kernels()) is not None:
            compiled = [CompiledPolicy(kernels, each.env, each.rows) for each in self._envs.stepped]
            model.weights_changed()
            rollout = OpenRollout(self._buffer)
            fields = rollout.of_kernels(torch.zeros(size, model.state_size))
            obs = rollout.joined(0) if rollout.has_entries else rollout.obs
            arguments = kernels.arguments(noise.numpy(), obs, fields)
            return lambda: [each.act(0, arguments) for each in compiled]
        inference = inference_of(agent.kernels, model, fixed=capture is not None)
        state = torch.zeros(size, model.state_size, device=agent.device)
        obs, start, action, reward = (
            map_structure(lambda leaf: None if leaf is None else leaf[:1], entry)
            for entry in (whole.obs, whole.start, whole.prev_action, whole.prev_reward)
        )
        inputs = Inputs(obs, start, state, action, reward)
        on_device = None
        if agent.device.type != "cpu":
            on_device = DevicePolicy(distribution, noise, state, capture)
            on_device.begin()

        @torch.inference_mode()
        def act() -> None:
            with inference.arithmetic():
                if on_device is not None:
                    on_device.act(inference, inputs, distribution.sample)  # waits until it is done
                else:
                    out, _ = inference.evaluate(inputs)
                    distribution.sample(out.policy[0], noise[0])

        return act

    def _played(self, agent: Agent, buffers: RolloutBuffers) -> list[CollectedRollout]:
        """A shard's rollouts, one after the other, as collectors make them."""
        collector, version = Collector(agent, buffers), agent.version(0)
        collector.reset()
        rollouts = []
        for lap in range(max(2, -(-_EXAMPLES // self._experiment.algorithm.rollout))):
            first = collector.collect(lap, lambda t: version)[0]
            rollouts.append(dataclasses.replace(first, rollout=first.rollout.map(torch.clone)))
        collector.close()
        return rollouts

    def _inserting(
        self, agent: Agent, learner: Learner, rollouts: list[CollectedRollout], slots: int
    ) -> Callable[[], object]:
        """Begin an iteration with a rollout for each slot."""
        numbers, hyper = itertools.count(), agent.algorithm.hyperparameters(0.0)

        def insert() -> None:
            number = next(numbers)
            new = [rollouts[number % len(rollouts)]]
            learner.begin(number, dict.fromkeys(range(slots), new), hyper)

        return insert

    def _sampling(self, batches: Batches, updates: int) -> Callable[[], object]:
        """Draw a slice and, if its priorities change, update them."""
        steps = itertools.cycle(range(updates))
        priorities = torch.rand(self._experiment.algorithm.gradient_steps(1)[1])

        def sample() -> None:
            batch = batches.slice(0, next(steps)).batch
            batches.learned(0, priorities[: len(batch.weight)])
            self._synchronize()

        return sample

    def _training(self, agent: Agent, learner: Learner, slots: int) -> Callable[[], object]:
        """Compute the gradients of all these slots by their kernels, or that of one by torch's operations."""
        algorithm, hyper, updates = agent.algorithm, agent.algorithm.hyperparameters(0.0), itertools.count(1)
        if isinstance(learner, KernelLearner):
            out = np.zeros((slots, agent.flat.vector.numel() + agent.flat.tail), np.float32)
            return learner.repeated(0, {**hyper, "update": next(updates)}, out)
        batch = learner.batches.slice(0, 0).batch

        def learn() -> None:
            with arithmetic(agent.model):
                agent.flat.forget_gradient()
                algorithm.loss(agent.networks, batch, {**hyper, "update": next(updates)}).total.backward()
            self._synchronize()

        return learn

    def _synchronize(self) -> None:
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def _optimizer(self, agent: Agent) -> Callable[[], object]:
        optimizer = optimizer_for(self._experiment, agent.flat)
        gradient = torch.full_like(agent.flat.vector.data, 1e-9)
        hyper = agent.algorithm.hyperparameters(0.0)
        hyper = {name: 1e-9 if name.endswith("learning_rate") else value for name, value in hyper.items()}
        groups = agent.algorithm.groups(1, hyper)
        return lambda: (optimizer.step(gradient, groups), self._synchronize())

    def _reduction(self, agent: Agent, slots: int) -> Callable[[], object]:
        tree = TreeSum(1 << (slots.bit_length() - 1), Group())
        gradients = [torch.zeros_like(agent.flat.vector.data) for _ in range(slots)]

        def add_up() -> None:
            for slot in range(1 << (slots.bit_length() - 1)):
                tree.push(slot, gradients[slot])
            tree.finish()

        return add_up


def _with_less_memory(experiment: Experiment) -> Experiment:
    """The experiment with a smaller replay memory, if it has a large one, and without warm-up, as in a trial. In the
    warm-up, iterations have no gradient steps."""
    if not experiment.algorithm.replays:
        return experiment
    algorithm = off_policy(experiment.algorithm)
    least = 2 * experiment.env.num_envs * (algorithm.rollout + algorithm.item_steps + 8)
    capacity = min(algorithm.replay.capacity, max(least, _REMEMBERED))
    replay = dataclasses.replace(algorithm.replay, capacity=capacity)
    return experiment.replace(algorithm=dataclasses.replace(algorithm, replay=replay, warmup=0))
