"""What a sample costs at least: environment, inference and training, each measured alone and without the library
around it, in the shapes that an experiment uses; and the limit that follows for a layout.

Shape legend: T time, B environments of a shard, A rows of an acting batch, n items of a slice of a minibatch.
"""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lockstep import envs
from lockstep.agent import Agent
from lockstep.algorithms.base import Batch, Intrinsic, OnPolicy, OnPolicyConfig
from lockstep.arrays import map_structure
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.learn import UpdateRule
from lockstep.runtime import children
from lockstep.runtime.group import Group
from lockstep.runtime.memory import keep_freed_memory
from lockstep.runtime.shared import PrivateArena
from lockstep.runtime.supervisor import WorkerError
from lockstep.settings import SettingsError
from lockstep.shard import block
from lockstep.storage.rollout import Rollout
from lockstep.storage.slabs import Slabs, acting_groups
from lockstep.tree import TreeSum

PARTS = ("env", "inference", "training")
"""What the limit counts."""
OVERHEAD = ("optimizer", "reduction")
"""What learning needs beside it, once a gradient step."""


@dataclass(frozen=True)
class Costs:
    """Seconds a sample on one core (or GPU), while other processes of the layout do the same."""

    env: float
    """One environment step, on one core."""
    inference: float
    """One action: a forward pass and drawing the action."""
    training: float
    """The loss, forwards and backwards, in all epochs together."""
    optimizer: float
    """A process's share of the optimizer's steps."""
    reduction: float
    """Adding up the gradients of a process's own shards."""


@dataclass(frozen=True)
class Limit:
    """What a layout cannot exceed on a machine, in samples a second."""

    cores: float
    """If every core that computes were always busy with the parts, and with nothing else."""
    roles: float
    """If no process ever waited for more than it has to: the slowest role, or the sum of those that take turns."""

    @property
    def rate(self) -> float:
        return min(self.cores, self.roles)


def limit(experiment: Experiment, layout: Layout, costs: Costs, cores: int) -> Limit:
    """What follows from the parts' costs.

    Colocated processes do one part after the other, except that environments with threads or processes of their own
    step while the policy runs for another acting batch. Split ones overlap from lag 1 on.
    """
    collectors = len(layout.collectors) or layout.workers
    learners = len(layout.learners) or layout.workers
    collecting = _collecting(experiment, layout, costs, collectors)
    learning = costs.training / learners
    overlap = layout.backend == "split" and experiment.scheme.slabs > 1
    seconds = max(collecting, learning) if overlap else collecting + learning
    on_cpu = costs.env
    if layout.device_of("collector", 0) == "cpu":
        on_cpu += costs.inference * experiment.torch_threads
    if layout.device_of("learner", 0) == "cpu":
        on_cpu += costs.training * experiment.torch_threads
    return Limit(cores / on_cpu, 1.0 / seconds)


def _collecting(experiment: Experiment, layout: Layout, costs: Costs, collectors: int) -> float:
    """Seconds a sample of all collectors together."""
    groups = acting_groups(experiment, block(experiment.scheme.shards, collectors, 0))
    native = experiment.env.adapter != "gymnasium"
    if not native and not layout.env_processes:
        return (costs.env + costs.inference) / collectors
    stepping = groups if len(groups) > 1 else groups[:1]
    at_once = layout.env_processes or layout.env_threads * sum(len(group.shards) for group in stepping)
    env = costs.env / at_once
    return (max(env, costs.inference) if len(groups) > 1 else env + costs.inference) / collectors


def on_policy(experiment: Experiment) -> OnPolicyConfig:
    """The experiment's algorithm.

    Raises:
        SettingsError: it learns from replay, whose parts cannot be measured yet.
    """
    if not isinstance(experiment.algorithm, OnPolicyConfig):
        raise SettingsError(
            f"bench and tune cannot measure algorithms that learn from replay yet: {experiment.algorithm.name}. "
            "Train a few iterations with --display plain, which shows samples/s and where the time goes."
        )
    return experiment.algorithm


def processes_to_load(experiment: Experiment, layout: Layout, cores: int) -> int:
    """Processes that measure at once, so that each has a core as slow as training's cores are."""
    helpers = layout.env_processes > 0 or (experiment.env.adapter != "gymnasium" and layout.env_threads > 1)
    return max(1, min(cores, cores if helpers else layout.processes))


class _Parts:
    """One process's environments, model and batch, ready to be timed."""

    def __init__(self, experiment: Experiment, layout: Layout, index: int) -> None:
        learners = len(layout.learners) or layout.workers
        collectors = len(layout.collectors) or layout.workers
        self._experiment = experiment
        shards = block(experiment.scheme.shards, collectors, index % collectors)
        acting = Agent(experiment, layout.device_of("collector", index % collectors))
        learning = Agent(experiment, layout.device_of("learner", index % learners))
        self._synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
        group, size = acting_groups(experiment, shards)[0], experiment.envs_per_shard
        (self._group, (slab,)) = Slabs(acting, range(group.shards[0], group.shards[-1] + 1), 1, PrivateArena()).groups[
            0
        ]
        self._whole = slab.whole
        self._envs = [
            envs.make(experiment.env, seed=1, first_index=shard * size, num_envs=size) for shard in self._group.shards
        ]
        self._acting = len(self._envs) * size
        slots = len(block(experiment.scheme.shards, learners, index % learners))
        config = on_policy(experiment)
        updates = config.epochs * config.minibatches
        collected = slots * size * experiment.algorithm.rollout
        for env, rows in zip(self._envs, self._rows(), strict=True):
            env.reset(rows)
        self.calls: dict[str, tuple[Callable[[], object], float]] = {
            "env": (self._env(acting), self._acting),
            "inference": (self._inference(acting), self._acting),
            "training": self._training(learning, slab.shards[self._group.shards[0]]),
            "optimizer": (self._optimizer(learning), collected / updates),
            "reduction": (self._reduction(learning, slots), collected / updates),
        }
        """By part: what to time, and how many samples of training one call counts for."""

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _rows(self) -> list[Any]:
        """Each shard's first observations."""
        rows = [self._group.rows(shard) for shard in self._group.shards]
        return [map_structure(lambda leaf, r=each: leaf[0, r].numpy(), self._whole.obs) for each in rows]

    def _env(self, agent: Agent) -> Callable[[], object]:
        distribution, size = agent.model.distribution, self._experiment.envs_per_shard
        shape, dtype = (size, *distribution.action_shape), distribution.action_dtype
        action = distribution.to_env(torch.zeros(shape, dtype=dtype).numpy())
        rows = self._rows()

        def step() -> None:
            for env, out in zip(self._envs, rows, strict=True):
                env.send(action)
                env.recv(out)

        return step

    def _inference(self, agent: Agent) -> Callable[[], object]:
        actor, distribution, device = agent.model.for_acting(), agent.model.distribution, agent.device
        inputs = [self._whole.obs, self._whole.start, self._whole.prev_action, self._whole.prev_reward]
        obs, start, action, reward = (
            map_structure(lambda leaf: None if leaf is None else leaf[:1].to(device), entry) for entry in inputs
        )
        state = self._whole.core_state.to(device)
        noise = torch.rand(self._group.size, distribution.noise_size, device=device)

        @torch.inference_mode()
        def act() -> None:
            out, _ = actor(obs, start, state, action, reward)
            distribution.sample(out.policy[0], noise)
            self._synchronize()

        return act

    def _training(self, agent: Agent, rollout: Rollout) -> tuple[Callable[[], object], float]:
        config, model, algorithm = on_policy(self._experiment), agent.model, agent.algorithm
        assert isinstance(algorithm, OnPolicy)
        batch = slice_of(self._experiment, rollout.map(lambda leaf: leaf.to(agent.device)), algorithm)
        hyper = algorithm.hyperparameters(0.0)

        def learn() -> None:
            algorithm.loss(model, batch, hyper).total.backward()
            self._synchronize()

        return learn, batch.reward.numel() / config.epochs

    def _optimizer(self, agent: Agent) -> Callable[[], object]:
        rule = UpdateRule(self._experiment, agent.flat)
        gradient = torch.full_like(agent.flat.vector.data, 1e-9)
        groups = agent.algorithm.groups(1, {**agent.algorithm.hyperparameters(0.0), "learning_rate": 1e-9})
        return lambda: (rule.apply(gradient, groups), self._synchronize())

    def _reduction(self, agent: Agent, slots: int) -> Callable[[], object]:
        tree = TreeSum(1 << (slots.bit_length() - 1), Group())
        gradients = [torch.zeros_like(agent.flat.vector.data) for _ in range(slots)]

        def add_up() -> None:
            for slot in range(1 << (slots.bit_length() - 1)):
                tree.push(slot, gradients[slot])
            tree.finish()

        return add_up


def slice_of(experiment: Experiment, rollout: Rollout, algorithm: OnPolicy[Any]) -> Batch:
    """A shard's slice of a minibatch as learners make it, its numbers without meaning."""
    config, (steps, size) = on_policy(experiment), rollout.reward.shape
    inputs = steps + algorithm.bootstrap_inputs
    ones = torch.ones_like(rollout.reward)
    targets = ones if algorithm.needs_targets else None
    batch = Batch(
        obs=map_structure(lambda leaf: leaf[:inputs], rollout.obs),
        start=rollout.start[:inputs],
        prev_action=None if rollout.prev_action is None else rollout.prev_action[:inputs],
        prev_reward=None if rollout.prev_reward is None else rollout.prev_reward[:inputs],
        state=None,  # type: ignore[arg-type]
        action=rollout.action,
        reward=rollout.reward,
        log_prob=rollout.log_prob,
        value=rollout.value[:steps],
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        valid=torch.ones_like(rollout.valid),
        advantage=targets,
        value_target=targets,
        intrinsic=Intrinsic(value_target=ones, predicted=ones) if algorithm.curious else None,
    )
    if config.minibatches > 1:
        if experiment.model.recurrent or config.sequences:
            batch = batch.map(lambda leaf: leaf[:, : size // config.minibatches].clone())
        else:
            samples = steps * size // config.minibatches
            batch = batch.map(lambda leaf: leaf[:steps].flatten(0, 1)[:samples].clone()[None])
    return batch.replace(state=rollout.core_state.new_zeros(batch.reward.shape[1], rollout.core_state.shape[1]))


class PartsWorkers:
    """Processes that measure the parts whenever they are asked, all at once; idle in between.

    Args:
        cores: of this machine, which are loaded as the layout loads them.
    """

    def __init__(self, experiment: Experiment, layout: Layout, cores: int) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for index in range(processes_to_load(experiment, layout, cores)):
            ours, theirs = get_context("spawn").Pipe()
            arguments = (experiment, layout, index, theirs)
            self._processes.append(children.start(_serve, arguments, f"lockstep-parts-{index}"))
            theirs.close()
            self._pipes.append(ours)

    def __len__(self) -> int:
        return len(self._processes)

    def ready(self) -> None:
        """Wait until they have made their environments and models."""
        self._answers()

    def measure(self, part: str, seconds: float) -> float:
        """Seconds a sample, mean over the processes, measured for so many seconds."""
        for pipe in self._pipes:
            pipe.send((part, seconds))
        return statistics.fmean(self._answers())

    def costs(self, seconds: float) -> Costs:
        """All parts, one after the other; what is needed once a gradient step takes a tenth of the time."""
        main = {part: self.measure(part, seconds) for part in PARTS}
        return Costs(**main, **{part: self.measure(part, seconds / 10) for part in OVERHEAD})

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self) -> list[float]:
        answers: dict[int, float] = {}
        while len(answers) < len(self._pipes):
            missing = [index for index in range(len(self._pipes)) if index not in answers]
            wait([self._pipes[index] for index in missing] + [self._processes[index].sentinel for index in missing])
            for index in missing:
                gone = not self._processes[index].is_alive()  # asked first: what it sent before it went still counts
                try:
                    if self._pipes[index].poll():
                        value = self._pipes[index].recv()
                        if isinstance(value, str):
                            raise WorkerError(f"Measuring process {index} failed:\n{value}")
                        answers[index] = value
                    elif gone:
                        raise EOFError
                except EOFError:
                    self._processes[index].join()
                    obituary = children.obituary(self._processes[index])
                    raise WorkerError(f"Measuring process {index} {obituary}") from None
        return [answers[index] for index in range(len(self._pipes))]


def _serve(experiment: Experiment, layout: Layout, index: int, pipe: Connection) -> None:
    """What a measuring process does."""
    keep_freed_memory()
    torch.set_num_threads(experiment.torch_threads)
    try:
        calls = _Parts(experiment, layout, index).calls
        pipe.send(0.0)
        while True:
            part, seconds = pipe.recv()
            call, samples = calls[part]
            pipe.send(seconds_a_call(call, seconds) / samples)
    except EOFError:
        pass
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)  # environments' threads need no goodbye


def seconds_a_call(call: Callable[[], object], seconds: float) -> float:
    """The mean over repetitions, at least three, after one that warms up. Not the median: where other programs take
    turns on this core, they slow training too."""
    call()
    begin, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds or calls < 3:
        call()
        calls += 1
    return passed / calls
