"""Gradient steps alone, without environments: two learners of one experiment take turns on the same random rollouts.
Replay on the CPU against replay on the GPU, and slots one after the other against slots side by side.

Shape legend: T steps of a rollout, B environments of a shard.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_steps.small import SHAPES, experiment, on_gpu
from gpu_steps.step import Context, Outcome, last_lines
from lockstep import recipes
from lockstep.agent import Agent
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.buffers.replay_placement import Placing
from lockstep.buffers.rollout_buffers import allocate
from lockstep.core.arrays import map_structure
from lockstep.core.digests import state_digest
from lockstep.core.rollout import Rollout, RolloutInfo
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.learners.gradient_graphs import GradientGraphs, graphs_of
from lockstep.learners.learner import Learner
from lockstep.system.graphs import Capture, cuda_graph
from lockstep.system.numerics import torch_configured

GPU = "cuda:0"
NAMES = ("sac-mujoco", "rainbow-atari", "dqn-atari")
REHEARSED = ("td3", "rainbow-lag-1")
_ROUNDS = 3
_FILLED = 40_000
"""Steps in a replay memory before its learner is timed."""
_ENDLESS = 10**12


class OneAfterTheOther(Learner):
    """Its graphs compute the slots' gradients in order."""

    def _capture_gradients(self, capture: Capture) -> GradientGraphs | None:
        return graphs_of(self.batches, 1, self._differentiate, capture, None)


class Rollouts:
    """Random rollouts of each shard, in which images are stacks of frames that continue."""

    def __init__(self, agent: Agent, seed: int) -> None:
        self._agent, self._draw = agent, np.random.default_rng(seed)
        self._last: dict[int, Any] = {}

    def next(self, steps: int, *, pinned: bool) -> dict[int, list[CollectedRollout]]:
        """One rollout of this many steps for each slot."""
        agent, settings = self._agent, self._agent.experiment
        longer = settings.replace(algorithm=dataclasses.replace(settings.algorithm, rollout=steps))
        found = {}
        for slot in range(settings.scheme.shards):
            model, arena = agent.model, PrivateArena(pinned=pinned)
            size = settings.envs_per_shard
            rollout, _, _ = allocate(longer, agent.observation_space, model.distribution, model.state_size, size, arena)
            self._fill(slot, rollout)
            info = RolloutInfo(slot, 0, 0, ((0, 0),), np.zeros(0), {}, [])
            found[slot] = [CollectedRollout(info, rollout, agent.normalizers)]
        return found

    def _fill(self, slot: int, rollout: Rollout) -> None:
        before = self._last.get(slot)
        map_structure(lambda leaf: self._observe(leaf, before), rollout.obs)
        self._last[slot] = map_structure(lambda leaf: leaf[-1].clone(), rollout.obs)
        choices = getattr(self._agent.model.distribution, "num_logits", 2)
        for leaf, low, high in ((rollout.action, -1.0, 1.0), (rollout.reward, -1.0, 1.0), (rollout.value, 0.0, 1.0)):
            drawn = self._draw.integers(choices, size=leaf.shape) if leaf.dtype == torch.int64 else None
            leaf.copy_(torch.from_numpy(self._draw.uniform(low, high, leaf.shape) if drawn is None else drawn))
        rollout.log_prob.fill_(-1.0)
        rollout.valid.fill_(True)

    def _observe(self, leaf: Tensor, before: Tensor | None) -> None:
        """Random numbers. Images uint8 [T+1, B, K, H, W] are the last K of a row of frames."""
        if leaf.dtype != torch.uint8 or leaf.ndim != 5:
            leaf.copy_(torch.from_numpy(self._draw.standard_normal(leaf.shape)).to(leaf.dtype))
            if before is not None:
                leaf[0] = before
            return
        frames = self._draw.integers(0, 256, (len(leaf), *leaf.shape[1:2], *leaf.shape[3:]), np.uint8)
        leaf[0] = torch.from_numpy(frames[0]).unsqueeze(1) if before is None else before
        for t in range(1, len(leaf)):
            leaf[t, :, :-1], leaf[t, :, -1] = leaf[t - 1, :, 1:], torch.from_numpy(frames[t])


@dataclass
class Case:
    """One of two learners that take turns."""

    learner: Learner
    agent: Agent
    rollouts: Rollouts
    iteration: int = 0
    rates: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Of learning, since it was last set to 0."""
    given: dict[int, list[CollectedRollout]] = field(default_factory=dict)
    """The newest rollouts; those of learners without replay are always the same."""

    def iterate(self) -> int:
        """Learn from one more rollout. Returns the gradient steps."""
        settings = self.agent.experiment.algorithm
        if settings.replays or not self.given:
            self.given = self.rollouts.next(settings.rollout, pinned=True)
        begin = time.perf_counter()
        report = self.learner.learn(self.iteration, self.given)
        torch.cuda.synchronize()
        self.iteration += 1
        self.seconds += time.perf_counter() - begin
        return report.updates

    def time(self, seconds: float, iterations: int) -> None:
        """Learn for at least so long and so many iterations."""
        self.seconds, updates, done = 0.0, 0, 0
        while self.seconds < seconds or done < iterations:
            updates, done = updates + self.iterate(), done + 1
        self.rates.append(updates / self.seconds)


def replaying(setting: Experiment, where: Any) -> Case:
    """A learner whose replay memory lies on the CPU or on the GPU, with some steps in it."""
    algorithm: Any = dataclasses.replace(setting.algorithm, warmup=0)  # type: ignore[call-arg]
    setting = setting.replace(algorithm=algorithm, total_steps=_ENDLESS)
    agent = Agent(setting, GPU)
    learner = Learner(agent, range(setting.scheme.shards), TreeSum(setting.scheme.shards, Group()), capture=cuda_graph)
    assert isinstance(learner.batches, ReplayBatches)
    learner.batches.placing = Placing(where)
    case = Case(learner, agent, Rollouts(agent, 1))
    steps = min(128, algorithm.replay.capacity // setting.env.num_envs // 4)
    for _ in range(-(-min(_FILLED, algorithm.replay.capacity) // (steps * setting.env.num_envs))):
        learner.batches.begin(0, case.rollouts.next(steps, pinned=False), agent.algorithm.hyperparameters(0.0))
    case.iteration = algorithm.build().warm_iterations(setting.samples_per_iteration)
    return case


def fresh(setting: Experiment, kind: type[Learner]) -> Case:
    """A learner of whole rollouts."""
    setting = setting.replace(total_steps=_ENDLESS)
    agent = Agent(setting, GPU)
    learner = kind(agent, range(setting.scheme.shards), TreeSum(setting.scheme.shards, Group()), capture=cuda_graph)
    return Case(learner, agent, Rollouts(agent, 1))


def gradients(context: Context) -> Outcome:
    """Gradient steps a second of each pair of learners, measured in turn, and whether their digests are equal."""
    names = REHEARSED if context.rehearse else NAMES
    pairs: dict[str, Callable[[], dict[str, Case]]] = {}
    for name in names:
        setting = experiment(name) if context.rehearse else on_gpu(recipes.RECIPES[name]())

        def replays(setting: Experiment = setting) -> dict[str, Case]:
            return {where: replaying(setting, where) for where in ("cpu", "gpu")}

        pairs[f"{name}, replay"] = replays

    def ppo() -> dict[str, Case]:
        setting = experiment("cartpole-lag-1") if context.rehearse else SHAPES["ppo-atari"]()
        kinds = {"one after the other": OneAfterTheOther, "side by side": Learner}
        return {text: fresh(setting, kind) for text, kind in kinds.items()}

    pairs["ppo-atari, slots"] = ppo
    data: dict[str, Any] = {}
    for number, (name, make) in enumerate(pairs.items()):
        seconds = context.left / (len(pairs) - number)
        try:
            data[name] = _compared(make, seconds, context.rehearse)
        except Exception as error:
            data[name] = {"error": last_lines(error)}
        print(f"{name}: {data[name]}", flush=True)
        gc.collect()  # so that the next pair has the whole GPU
        torch.cuda.empty_cache()
        context.save(Outcome(True, "stopped early", data))
    return Outcome(all(each.get("equal") for each in data.values()), "; ".join(_told(data)), data)


def _compared(make: Callable[[], dict[str, Case]], seconds: float, rehearse: bool) -> dict[str, Any]:
    """Two learners in turn, as many iterations of each."""
    whole = time.perf_counter() + seconds
    with torch_configured(1, GPU):
        cases = make()
        for case in cases.values():  # libraries load, and graphs are captured
            for _ in range(4):
                case.iterate()
        counts = list[int]()
        for number in range(_ROUNDS):
            left = (whole - time.perf_counter()) / (2 * (_ROUNDS - number))
            if left < 0.3 and number:
                break
            first, second = cases.values()
            before = first.iteration
            first.time(0.0 if rehearse else min(4.0, 0.6 * left), 2)
            counts.append(first.iteration - before)
            second.time(0.0, counts[-1])
        digests = {text: state_digest({**case.agent.state(), **case.learner.state()}) for text, case in cases.items()}
        rates = {text: statistics.median(case.rates) for text, case in cases.items()}
        spread = {text: [min(case.rates), max(case.rates)] for text, case in cases.items()}
        memory = {} if rehearse else {"gpu_memory_gb": torch.cuda.memory_allocated() / 1e9}
    first, second = rates.values()
    equal = len(set(digests.values())) == 1
    return {"updates": rates, "spread": spread, "faster": second / first, "equal": equal, **memory}


def _told(data: dict[str, Any]) -> Iterator[str]:
    for name, each in data.items():
        if "error" in each:
            yield f"{name}: {each['error'][-200:]}"
        else:
            rates = ", ".join(f"{text} {rate:,.0f}" for text, rate in each["updates"].items())
            yield f"{name}: {rates} updates/s{'' if each['equal'] else ', DIGESTS DIFFER'}"
