"""What one more step costs: Python calls and torch operations, which are the same on every machine, fast or slow.

Counts are differences between a longer and a shorter run, so that only what is done at every step is left: of
collecting, an environment step of one acting batch around environments that do nothing; of learning, a gradient step on
one shard. They may only fall: after an improvement, lower the bounds. Calls have a tenth of room, since they depend on
Python's version.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from tiny import collected
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import Experiment, Layout, recipes
from lockstep.agent import Agent
from lockstep.collectors.collectors import Collector
from lockstep.collectors.torch_actor import TorchActor
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.distributed.tree import TreeSum
from lockstep.envs import ShardEnv, StepResult
from lockstep.learners.learner import Learner
from lockstep.training.prepare import prepare
from lockstep.transport.rollouts import buffers_of


class NoEnvironment(ShardEnv):
    """Answers at once, always the same."""

    frames_per_step = 1

    def __init__(self, observation: gymnasium.Space[Any], action: gymnasium.Space[Any], num_envs: int) -> None:
        self.observation_space, self.action_space, self.num_envs = observation, action, num_envs
        no = np.zeros(num_envs, np.bool_)
        self._step = StepResult(np.ones(num_envs, np.float32), no, no, no, no)

    def reset(self, out: Any) -> None: ...
    def send(self, action: Any) -> None: ...
    def recv(self, out: Any) -> StepResult:
        return self._step

    def state_dict(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def load_state_dict(self, state: Any, out: Any, heartbeat: Callable[[], None] = lambda: None) -> int:
        raise NotImplementedError

    def close(self) -> None: ...


class Operations(TorchDispatchMode):
    """Counts what reaches torch's kernels, and those of it that return memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        self.allocations += all(not r.alias_info for r in func._schema.returns)
        return result


@dataclasses.dataclass(frozen=True)
class Cost:
    calls: float
    """Of functions, Python's and C's."""
    operations: float
    """Of torch, views included."""
    allocations: float
    """Operations of torch that return a new tensor."""

    def per_step(self, shorter: Cost, steps: int) -> Cost:
        """What each of the steps added that the longer run has."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(shorter), strict=True)
        return Cost(*((longer - less) / steps for longer, less in pairs))


def cost(work: Callable[[], object]) -> Cost:
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    with Operations() as operations:
        work()
    return Cost(calls, operations.count, operations.allocations)


def small(experiment: Experiment, **algorithm: Any) -> Experiment:
    env = dataclasses.replace(experiment.env, id="CartPole-v1", adapter="gymnasium", protocol="none", num_envs=4)
    scheme = dataclasses.replace(experiment.scheme, shards=1, acting_batch=0, lag=0)
    settings = {"rollout": 8, "minibatches": 2, "epochs": 1, **algorithm}
    changed = dataclasses.replace(experiment.algorithm, **settings)
    return prepare(experiment.replace(env=env, scheme=scheme, algorithm=changed), Layout())


def mlp(**algorithm: Any) -> Experiment:
    return small(recipes.ppo_cartpole().replace(precision="fp32"), **algorithm)


def lstm(**algorithm: Any) -> Experiment:
    return small(recipes.ppo_memory().replace(precision="fp32"), **algorithm)


def vtrace(**algorithm: Any) -> Experiment:
    impala = recipes.impala_atari()
    return small(impala.replace(model=recipes.ppo_cartpole().model, precision="fp32"), **algorithm)


def collector(experiment: Experiment) -> tuple[Agent, Collector]:
    agent = Agent(experiment)
    spaces = agent.observation_space, agent.action_space

    def make(*args: Any, num_envs: int, **kwargs: Any) -> ShardEnv:
        return NoEnvironment(*spaces, num_envs)

    with mock.patch("lockstep.envs.make", make):
        (buffers,) = buffers_of(agent, range(1), experiment.schedule(), PrivateArena(), ahead=False)
        return agent, Collector(agent, buffers)


def cost_of_collecting(experiment: Callable[..., Experiment]) -> Cost:
    def of(rollout: int) -> Cost:
        agent, collecting = collector(experiment(rollout=rollout))
        version = agent.version(0)
        collecting.reset()
        collecting.collect(0, lambda t: version)
        return cost(lambda: collecting.collect(1, lambda t: version))

    return of(24).per_step(of(8), 16)


def cost_of_learning(experiment: Callable[..., Experiment]) -> Cost:
    def of(epochs: int) -> Cost:
        agent, collecting = collector(experiment(epochs=epochs))
        version = agent.version(0)
        collecting.reset()
        rollout = collecting.collect(0, lambda t: version)[0].rollout
        learner = Learner(agent, range(1), TreeSum(1, Group()))
        filled = {0: [collected(rollout, version.normalizers)]}
        learner.learn(0, filled)
        return cost(lambda: learner.learn(1, filled))

    return of(3).per_step(of(1), 4)


@pytest.mark.parametrize(("experiment", "most"), [(mlp, Cost(56, 35, 16)), (lstm, Cost(100, 87, 25))])
def test_a_step_of_collecting_costs_no_more_than_before(experiment: Callable[..., Experiment], most: Cost) -> None:
    found = cost_of_collecting(experiment)
    assert 0 < found.calls <= most.calls and 0 < found.operations <= most.operations, found
    assert 0 < found.allocations <= most.allocations, found


@pytest.mark.parametrize(
    ("experiment", "most"),
    [(mlp, Cost(590, 370, 190)), (lstm, Cost(850, 950, 232)), (vtrace, Cost(520, 382, 181))],
)
def test_a_gradient_costs_no_more_than_before(experiment: Callable[..., Experiment], most: Cost) -> None:
    found = cost_of_learning(experiment)
    assert 0 < found.calls <= most.calls and 0 < found.operations <= most.operations, found
    assert 0 < found.allocations <= most.allocations, found


def test_one_more_operation_a_step_is_noticed() -> None:
    plain = cost_of_collecting(mlp)
    sign = torch.zeros(1)
    act = TorchActor.act

    def slower(self: Any, t: int, inference: Any) -> None:
        act(self, t, inference)
        sign.add(1)

    with mock.patch.object(TorchActor, "act", slower):
        found = cost_of_collecting(mlp)
    assert found.operations == plain.operations + 1 and found.allocations == plain.allocations + 1
    assert plain.calls < found.calls <= plain.calls + 3
