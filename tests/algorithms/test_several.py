"""Several policies in one run: each takes the gradient steps that it would take if it were alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import talk
import torch

from lockstep.agent import Agent
from lockstep.algorithms import A2CConfig, APPOConfig, IMPALAConfig, OnPolicyConfig, PPOConfig
from lockstep.algorithms.base import OptimizerConfig
from lockstep.algorithms.ppo import PPO
from lockstep.algorithms.several import with_policies
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.collectors.collectors import Collector
from lockstep.core.rollout import Rollout
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.distributed.tree import TreeSum
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.learners.learner import Learner
from lockstep.models import StandardModelConfig
from lockstep.models.base import PolicyModel
from lockstep.models.normalize import NormalizeConfig
from lockstep.models.policies import PoliciesSpace
from lockstep.scheme import Scheme

TALK = Path(talk.__file__)
LINEAR: dict[str, Any] = {
    "rollout": 12,
    "minibatches": 1,
    "learning_rate": 0.1,
    "anneal_learning_rate": False,
    "optimizer": OptimizerConfig(eps=1.0),
}
"""Steps nearly proportional to gradients, which Adam's would not be."""
ALGORITHMS: dict[str, OnPolicyConfig] = {
    "ppo": PPOConfig(epochs=2, max_grad_norm=0.05, **LINEAR),
    "ppo-unclipped": PPOConfig(max_grad_norm=1e9, **LINEAR),
    "a2c": A2CConfig(max_grad_norm=0.05, **LINEAR),
    "impala": IMPALAConfig(max_grad_norm=0.05, **LINEAR),
    "appo": APPOConfig(epochs=2, max_grad_norm=1e9, **LINEAR),
}


@dataclasses.dataclass
class Spaces:
    """What an agent of a single policy takes instead of an environment."""

    observation_space: Any
    action_space: Any


def experiment(algorithm: OnPolicyConfig, core: str) -> Experiment:
    env = EnvConfig(
        id=f"pettingzoo/{TALK}:Talk",
        num_envs=12,
        policies=f"{TALK}:roles",
        central_state="observations",
    )
    return Experiment(
        env=env,
        model=StandardModelConfig(core=cast(Any, core), core_size=4, hidden_sizes=(8,), critic_only=("state",)),
        algorithm=algorithm,
        scheme=Scheme(shards=2, acting_batch=12),
        normalize=NormalizeConfig(observations=True, returns=True),
        total_steps=10_000,
        precision="fp32",
    )


def test_a_slice_may_have_no_rows_of_a_policy() -> None:
    """Slices of two columns, one guide among six: the others' metrics and gradients count all the same."""
    algorithm = dataclasses.replace(ALGORITHMS["ppo"], minibatches=3)
    together = experiment(algorithm, "lstm")
    agent = Agent(together)
    collector = Collector(agent, RolloutBuffers(agent, range(2), 1, PrivateArena()))
    collector.reset()
    learner = Learner(agent, range(2), TreeSum(2, Group()))
    before = agent.flat.vector.detach().clone()
    rollouts = {each.info.shard: [each] for each in collector.collect(0, lambda _: agent.version(0))}
    empty = [
        (name, slot, step)
        for step in range(learner.batches.begin(0, rollouts, agent.algorithm.hyperparameters(0.0)))
        for slot in range(2)
        for name in ("guide", "walker")
        if not len(cast(PoliciesSpace, agent.observation_space).rows(name, learner.batches.slice(slot, step).batch.obs))
    ]
    assert empty, "otherwise this tests nothing"
    metrics = learner.learn(0, rollouts).metrics
    assert metrics["policy/entropy/guide"] == pytest.approx(math.log(4), abs=0.05)
    assert metrics["policy/entropy/walker"] == pytest.approx(math.log(2), abs=0.05)
    assert agent.flat.vector.isfinite().all() and not torch.equal(agent.flat.vector, before)
    collector.close()


def test_each_policy_sees_its_own_gradient_before_a_step() -> None:
    class Seeing(PPO):
        def before_step(self, model: PolicyModel, gradient: Mapping[str, torch.Tensor]) -> None:
            assert gradient.keys() == dict(model.named_parameters()).keys()
            for x in gradient.values():
                x.zero_()

    together = experiment(ALGORITHMS["ppo"], "none")
    agent = Agent(together)
    several = with_policies(Seeing(PPOConfig()), agent.observation_space)
    assert several.sees_gradients and not agent.sees_gradients
    gradient = agent.flat.named(torch.ones_like(agent.flat.vector))
    several.before_step(agent.model, gradient)
    assert not any(x.any() for x in gradient.values())


def own(space: PoliciesSpace, name: str, rollout: Rollout, state_size: int) -> Rollout:
    """A policy's rows of a rollout, in its own spaces."""
    rows = space.rows(name, rollout.obs)
    cut = rollout.replace(core_state=None)[:, rows]
    return cut.replace(obs=space.own(name, cut.obs), core_state=rollout.core_state[rows][:, :state_size])


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_policies_of_one_run_learn_as_each_would_alone(name: str, core: str) -> None:
    """Losses, clipped norms, standardized advantages and normalizers of 4 guides and of 8 walkers, who earn 30 times as
    much, do not depend on each other."""
    together = experiment(ALGORITHMS[name], core)
    agent = Agent(together)
    space, shards = agent.observation_space, range(2)
    assert isinstance(space, PoliciesSpace) and list(space.parts) == ["guide", "walker"]
    collector = Collector(agent, RolloutBuffers(agent, shards, 1, PrivateArena()))
    collector.reset()
    learner = Learner(agent, shards, TreeSum(2, Group()))

    alone: dict[str, tuple[Agent, Learner]] = {}
    carries = {(policy, shard): torch.zeros(envs) for policy, envs in (("guide", 2), ("walker", 4)) for shard in shards}
    for policy in space.parts:
        single = together.replace(env=EnvConfig(num_envs=2 * len(carries[policy, 0])))
        solo = Agent(single, like=cast(Agent, Spaces(*space.parts[policy])))
        solo.flat.load({key.split(".", 2)[2]: x for key, x in agent.flat.named().items() if f".{policy}." in key})
        alone[policy] = solo, Learner(solo, shards, TreeSum(2, Group()))

    start = {policy: solo.flat.vector.detach().clone() for policy, (solo, _) in alone.items()}
    for iteration in range(2):  # the second with statistics of the first
        collected = collector.collect(iteration, lambda _: agent.version(0))
        report = learner.learn(iteration, {each.info.shard: [each] for each in collected})
        agent.normalizers = agent.normalizers.merged(
            torch.from_numpy(np.sum([each.info.moments for each in collected], 0))
        )
        for policy, (solo, of_solo) in alone.items():
            rollouts = {each.info.shard: own(space, policy, each.rollout, solo.model.state_size) for each in collected}
            held = {
                each.info.shard: [CollectedRollout(each.info, rollouts[each.info.shard], solo.normalizers)]
                for each in collected
            }
            found = of_solo.learn(iteration, held).metrics
            for key, value in solo.flat.named().items():
                mine = agent.flat.named()[f"policies.{policy}.{key}"]
                torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)
            losses = {
                metric: value for metric, value in found.items() if metric.startswith(("loss/", "policy/", "value/"))
            }
            assert len(losses) >= 4
            assert {metric: report.metrics[f"{metric}/{policy}"] for metric in losses} == pytest.approx(
                losses, rel=1e-4
            )
            sums = [solo.normalizers.rollout_sums(x, carries[policy, shard]) for shard, x in rollouts.items()]
            solo.normalizers = solo.normalizers.merged(sums[0] + sums[1])
            for key, value in solo.normalizers.state().items():
                torch.testing.assert_close(agent.normalizers.state()[f"{policy}.{key}"], value)
    for policy, (solo, _) in alone.items():
        assert float((solo.flat.vector.detach() - start[policy]).norm()) > 1e-3, "there is something to compare"
    collector.close()
