from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces
from linear_actor import make_batch, make_model
from tiny import EXPERIMENTS, collected, cut
from torch import Tensor

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms import A2CConfig, APPOConfig, IMPALAConfig, OnPolicyConfig, PPOConfig
from lockstep.algorithms.base import ParameterGroup
from lockstep.algorithms.onpolicy import Intrinsic
from lockstep.algorithms.ppo import PPO
from lockstep.algorithms.rnd import RND, curiosity_of, intrinsic_targets, with_curiosity
from lockstep.buffers.intrinsic import CuriousBatches
from lockstep.buffers.on_policy import FreshBatches
from lockstep.buffers.sources import batches_for
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.distributed.groups import Group
from lockstep.distributed.tree import TreeSum
from lockstep.models.base import PolicyModel
from lockstep.models.rnd import Curiosity, RNDConfig

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def curious(config: OnPolicyConfig, **rnd: float) -> RND:
    settings = RNDConfig(**{"coef": 0.5, "features": 8, **rnd})  # type: ignore[arg-type]
    algorithm = with_curiosity(dataclasses.replace(config, rnd=settings).build())
    assert isinstance(algorithm, RND)
    return algorithm


def test_only_a_coefficient_above_zero_switches_it_on() -> None:
    algorithm = PPOConfig().build()
    assert with_curiosity(algorithm) is algorithm
    assert Agent(EXPERIMENTS["ppo"]()).state().keys() == Agent(recipes.ppo_atari()).state().keys()


class OwnPPO(PPO):
    """An algorithm of one's own, with something learned beside the model, at another rate."""

    def variables(self, model: PolicyModel) -> dict[str, Tensor]:
        return {"temperature": torch.zeros(1)}

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        return (ParameterGroup("policy", 1e-3), ParameterGroup("variables.", 1e-2))

    def updates_before(self, iteration: int, samples_per_iteration: int) -> int:
        return 7 * iteration


def test_it_keeps_what_an_algorithm_learns_beside_the_model() -> None:
    config = dataclasses.replace(PPOConfig(), rnd=RNDConfig(coef=0.5))
    algorithm = with_curiosity(OwnPPO(config))
    assert isinstance(algorithm, RND)
    assert algorithm.variables(make_model()).keys() == {"temperature"}
    rates = {group.prefix: group.learning_rate for group in algorithm.groups(1, {"learning_rate": 3e-4})}
    assert rates == {"policy": 1e-3, "variables.": 1e-2, "companion.": 3e-4}
    assert algorithm.updates_before(3, 128) == 21
    assert curious(PPOConfig()).groups(1, {"learning_rate": 3e-4}) == (ParameterGroup("", 3e-4),)


def test_intrinsic_targets_by_hand() -> None:
    reward, value = torch.tensor([[1.0], [0.0], [2.0]]), torch.tensor([[1.0], [2.0], [0.0], [4.0]])
    targets = intrinsic_targets(reward, value, RNDConfig(discount=0.5, gae_lambda=0.5))
    # δ = (1 + 1 - 1, 0 + 0 - 2, 2 + 2 - 0), and each advantage is δ + ¼ of the next, whatever ended in between
    assert targets.advantage[:, 0].tolist() == [1 + 0.25 * (-2 + 0.25 * 4), -2 + 0.25 * 4, 4.0]
    assert torch.equal(targets.value_target, targets.advantage + value[:3])


@pytest.mark.parametrize("config", [PPOConfig(), A2CConfig(), IMPALAConfig(), APPOConfig()], ids=lambda c: c.name)
def test_loss_is_the_algorithms_and_two_terms_over_every_step(config: OnPolicyConfig) -> None:
    algorithm = curious(config, value_coef=0.25)
    model = make_model()
    batch = make_batch(algorithm.inner)
    batch = batch.map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf)
    batch = batch.replace(valid=torch.zeros_like(batch.valid))  # what is left are the two terms
    curiosity = model.companion = Curiosity(OBSERVATIONS, 8, seed=3)
    model.float()
    weight, target = torch.rand_like(batch.reward), torch.rand_like(batch.reward)
    batch = batch.replace(intrinsic=Intrinsic(predicted=weight, value_target=target))
    hyper = algorithm.hyperparameters(0.0)
    loss = algorithm.loss(model, batch, hyper)

    expected = torch.zeros(())
    for t, row in enumerate(batch.obs[: len(batch.reward)]):
        for b, x in enumerate(row.clamp(-5, 5)):
            error = (curiosity.predictor(x[None, None]) - curiosity.random(x[None, None])).square().mean()
            value = curiosity.critic(x[None, None]).squeeze()
            expected = expected + weight[t, b] * error + 0.25 * 0.5 * (value - target[t, b]) ** 2
    torch.testing.assert_close(loss.total, expected)
    assert tuple(loss.metrics) == algorithm.metric_names
    loss.total.backward()
    assert all(parameter.grad is None for parameter in curiosity.random.parameters())
    for network in (curiosity.predictor, curiosity.critic):
        assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("config", [IMPALAConfig(), APPOConfig(entropy_coef=0.0)], ids=lambda c: c.name)
def test_vtrace_losses_take_advantages_from_outside(config: OnPolicyConfig) -> None:
    algorithm = config.build()
    assert not algorithm.needs_targets
    batch = make_batch(algorithm)
    gradients = []
    for advantage in (None, torch.zeros_like(batch.reward), torch.full_like(batch.reward, 0.5)):
        model = make_model()
        loss = algorithm.loss(model, batch.replace(advantage=advantage), algorithm.hyperparameters(0.0))
        loss.total.backward()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0][:-1], gradients[2][:-1]), "the policy learns from it"
    assert torch.equal(gradients[0][-1], gradients[2][-1]), "the task's value does not"


def test_what_was_learned_from_is_no_longer_new() -> None:
    curiosity = Curiosity(OBSERVATIONS, 16, seed=1)
    draw = torch.Generator().manual_seed(0)
    known, new = (torch.randn(1, 64, 3, generator=draw) for _ in range(2))
    known[..., 0], new[..., 0] = 2.0, -2.0
    optimizer = torch.optim.Adam(curiosity.predictor.parameters(), 1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        curiosity(known)[0].mean().backward()
        optimizer.step()
    assert curiosity(new)[0].mean() > 5 * curiosity(known)[0].mean()


def test_observations_of_all_kinds_are_normalised_and_bounded() -> None:
    space = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (3, 40, 36), np.uint8),
            "grid": spaces.Box(0, 9, (1, 2, 2), np.uint8),
            "speed": spaces.Box(-1, 1, (2,), np.float32),
        }
    )
    curiosity = Curiosity(space, 4, seed=1)
    obs = {
        "picture": torch.full((2, 3, 3, 40, 36), 200, dtype=torch.uint8),
        "grid": torch.tensor([1, 2, 3, 4], dtype=torch.uint8).view(1, 2, 2).expand(2, 3, 1, 2, 2),
        "speed": torch.ones(2, 3, 2),
    }
    assert curiosity.size == 3 * 40 * 36 + 4 + 2
    vector = curiosity.vector(obs)
    assert vector[0, 0, :4].tolist() == [1, 2, 3, 4] and vector[0, 0, -2:].tolist() == [1, 1]
    curiosity.normalize_with(torch.full((curiosity.size,), 1000.0), torch.ones(curiosity.size))
    error, value = curiosity(obs)
    darker = curiosity({**obs, "picture": obs["picture"] // 2})
    assert error.shape == value.shape == (2, 3)
    assert torch.equal(error, darker[0]), "all lie beyond the bound"
    curiosity.normalize_with(torch.zeros(curiosity.size), torch.full((curiosity.size,), 255.0))
    assert not torch.equal(curiosity(obs)[0], curiosity({**obs, "picture": obs["picture"] // 2})[0])


def rollout_of(agent: Agent, seed: int) -> Rollout:
    """Sixteen steps of two environments, an episode ending in one."""
    draw = torch.Generator().manual_seed(seed)
    none = torch.zeros(16, 2, dtype=torch.bool)
    terminated, valid = none.clone(), ~none
    terminated[3, 0], valid[4, 0] = True, False
    return Rollout(
        obs=torch.randn(17, 2, 4, generator=draw) * 3 + 1,
        start=torch.zeros(17, 2, dtype=torch.bool),
        action=torch.zeros(16, 2, dtype=agent.model.distribution.action_dtype),
        reward=torch.ones(16, 2),
        log_prob=torch.zeros(16, 2),
        value=torch.zeros(17, 2),
        terminated=terminated,
        truncated=none,
        valid=valid,
        core_state=torch.zeros(2, 0),
        prev_action=None,
        prev_reward=None,
    )


def places_of(rows: Tensor, among: Tensor) -> Tensor:
    """Where each of some rows is among others."""
    return (rows[:, None] == among[None]).all(-1).nonzero()[:, 1]


def test_statistics_and_rewards_agree_with_an_independent_computation() -> None:
    agent = Agent(EXPERIMENTS["ppo-rnd"]())
    shards, config = agent.experiment.scheme.shards, agent.experiment.algorithm
    assert isinstance(config, PPOConfig)
    slots = range(shards)
    batches = batches_for(agent, slots, TreeSum(shards, Group()))
    assert isinstance(batches, CuriousBatches)
    curiosity, hyper = curiosity_of(agent.model), agent.algorithm.hyperparameters(0.0)
    seen: list[Tensor] = []
    carry = {slot: torch.zeros(2, dtype=torch.float64) for slot in slots}
    returns: list[Tensor] = []
    for iteration in range(2):
        rollouts = {slot: rollout_of(agent, 10 * iteration + slot) for slot in slots}
        filled = {slot: [collected(rollout, agent.normalizers)] for slot, rollout in rollouts.items()}
        assert batches.begin(iteration, filled, hyper) == config.epochs * config.minibatches

        seen += [rollout.obs[1:].reshape(-1, 4) for rollout in rollouts.values()]
        observations = torch.cat(seen).double()
        torch.testing.assert_close(curiosity.mean, observations.mean(0).float())
        torch.testing.assert_close(curiosity.std, observations.std(0, correction=0).float())
        raw = {}
        for slot, rollout in rollouts.items():
            x = ((rollout.obs - curiosity.mean) / curiosity.std).clamp(-5, 5)
            with torch.no_grad():
                raw[slot] = (
                    (curiosity.predictor(x) - curiosity.random(x)).square().mean(-1),
                    curiosity.critic(x)[..., 0],
                )
            for reward_t in raw[slot][0][1:]:
                carry[slot] = config.rnd.discount * carry[slot] + reward_t
                returns.append(carry[slot])
        deviation = torch.stack(returns).std(correction=0).float()
        intrinsic, advantages = {}, {}
        for slot in slots:
            error, value = raw[slot]
            intrinsic[slot] = intrinsic_targets(error[1:] / deviation, value, config.rnd)
            task = agent.algorithm.targets(rollouts[slot], rollouts[slot].reward, hyper)  # type: ignore[attr-defined]
            advantages[slot] = (task.advantage + config.rnd.coef * intrinsic[slot].advantage).flatten()
        taken: dict[int, list[int]] = {slot: [] for slot in slots}
        for step in range(config.minibatches):
            parts = {slot: batches.slice(slot, step).batch for slot in slots}
            # Items have no numbers, but no two observations are equal.
            items = {
                slot: places_of(part.obs[0], rollouts[slot].obs[:-1].flatten(0, 1)) for slot, part in parts.items()
            }
            wanted = {slot: advantages[slot][items[slot]] for slot in slots}
            valid = torch.cat([wanted[slot][part.valid[0]] for slot, part in parts.items()])
            for slot, part in parts.items():
                taken[slot] += items[slot].tolist()
                torch.testing.assert_close(part.advantage[0], (wanted[slot] - valid.mean()) / valid.std())
                value_target = intrinsic[slot].value_target.flatten()[items[slot]]
                torch.testing.assert_close(part.intrinsic.value_target[0], value_target)
                assert set(part.intrinsic.predicted.unique().tolist()) <= {0.0, 1 / config.rnd.share}
        assert all(sorted(found) == list(range(len(advantages[slot]))) for slot, found in taken.items())


@pytest.mark.parametrize(
    "wrong", [{"coef": -1.0}, {"share": 0.0}, {"discount": 1.5}, {"features": 0}, {"value_coef": -0.5}]
)
def test_settings_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=f"algorithm.rnd.{next(iter(wrong))}"):
        PPOConfig(rnd=RNDConfig(**wrong)).validate(8, recurrent=False)  # type: ignore[arg-type]


def test_curiosity_keeps_the_algorithms_own_ways() -> None:
    ppo = curious(PPOConfig(target_kl=0.02))
    assert ppo.stop_early({"policy/approx_kl": 0.03}) and not ppo.stop_early({"policy/approx_kl": 0.01})
    assert ppo.normalize_advantages and ppo.mean_loss and not curious(IMPALAConfig()).mean_loss


def test_advantages_of_every_global_minibatch_are_standardized() -> None:
    agent = Agent(cut(recipes.ppo_cartpole, rollout=16, env={"adapter": "gymnasium"}))
    shards = agent.experiment.scheme.shards
    batches = batches_for(agent, range(shards), TreeSum(shards, Group()))
    assert isinstance(batches, FreshBatches)
    filled = {slot: [collected(rollout_of(agent, slot), agent.normalizers)] for slot in range(shards)}
    steps = batches.begin(0, filled, agent.algorithm.hyperparameters(0.0))
    for step in range(steps):
        parts = [batches.slice(slot, step).batch for slot in range(shards)]
        advantage = torch.cat([part.advantage[part.valid] for part in parts])
        assert float(advantage.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(advantage.std()) == pytest.approx(1.0, abs=1e-4)
