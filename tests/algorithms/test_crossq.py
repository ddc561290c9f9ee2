"""CrossQ against its formulas, and batch renormalization against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep import recipes
from lockstep.algorithms.crossq import CrossQ, CrossQConfig
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.learners.optimizer import Optimizer, PortableOptimizer
from lockstep.models import ActorCritic, ActorCriticConfig
from lockstep.models.gaussian import standard_normal
from lockstep.models.parameters import FlatParameters
from lockstep.models.renorm import RenormMLPs

ITEMS, SIZE = 6, 2
EPS = 1e-3


def layers(mean: float, variance: float) -> RenormMLPs:
    """y = 2 (3 x̂ + 1) + 0.5, where x̂ is the normalized x."""
    made = RenormMLPs(1, (1, 1), "relu")
    with torch.no_grad():
        made.gains[0].fill_(3.0)
        made.shifts[0].fill_(1.0)
        made.weights[0].fill_(2.0)
        made.biases[0].fill_(0.5)
        made.statistics[0][0].fill_(mean)
        made.statistics[0][1].fill_(variance)
    return made


def outputs(*normalized: float) -> list[Any]:
    return [pytest.approx(2 * (3 * x + 1) + 0.5, rel=1e-5) for x in normalized]


def test_batch_renormalization_by_hand() -> None:
    """The batch 1, 3 has the mean 2 and the variance 1."""
    x, s = torch.tensor([[1.0], [3.0]]), math.sqrt(1 + EPS)
    plain, (seen,) = layers(0.0, 1.0).learn(x, renormalize=False)
    assert plain.flatten().tolist() == outputs(-1 / s, 1 / s) and seen.flatten().tolist() == [2.0, 1.0]
    # r = 1 and d = 2 / s, so that the batch's statistics cancel: as in acting
    corrected, _ = layers(0.0, 1.0).learn(x, renormalize=True)
    assert corrected.flatten().tolist() == outputs(1 / s, 3 / s)
    assert layers(0.0, 1.0)(x).flatten().tolist() == outputs(1 / s, 3 / s)
    # d = 12 / s is bounded by 5
    far, _ = layers(-10.0, 1.0).learn(x, renormalize=True)
    assert far.flatten().tolist() == outputs(-1 / s + 5, 1 / s + 5)
    # r = s / sqrt(0.001 + 0.001) is bounded by 3, and d = 0
    narrow, _ = layers(2.0, 0.001).learn(x, renormalize=True)
    assert narrow.flatten().tolist() == outputs(-3 / s, 3 / s)


def test_corrections_have_no_gradient() -> None:
    made = layers(0.0, 1.0)
    y, _ = made.learn(torch.tensor([[1.0], [3.0]]), renormalize=True)
    y.sum().backward()
    assert made.statistics[0].grad is None and made.weights[0].grad is not None
    x = torch.tensor([[1.0], [3.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(made(x, frozen=True).sum(), x)
    assert gradient.flatten().tolist() == pytest.approx([6 / math.sqrt(1 + EPS)] * 2)


class Case:
    """A small model with unlike running statistics, and a minibatch."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.config = CrossQConfig(**settings)
        self.algorithm = self.config.build()
        config = ActorCriticConfig(batch_renorm=True, hidden_sizes=(5,), critic_sizes=(7, 4))
        box = spaces.Box(-1, 1, (SIZE,))
        built = config.build(spaces.Box(-1, 1, (3,)), box, precision="fp32", normalize_observations=False, seed=1)
        assert isinstance(built, ActorCritic)
        self.model = built
        built.variables = torch.nn.ParameterDict(self.algorithm.variables(built))
        with torch.no_grad():
            for each in built.get_submodule("statistics").parameters():
                each[0].normal_()
                each[1].uniform_(0.5, 2.0)
        self.batch = Transitions(
            obs=torch.randn(1, ITEMS, 3),
            action=torch.rand(1, ITEMS, SIZE) * 2 - 1,
            reward=torch.randn(1, ITEMS),
            discount=torch.tensor([[0.9, 0.0, 0.9, 0.9, 0.9, 0.9]]),
            next_obs=torch.randn(1, ITEMS, 3),
            weight=torch.ones(ITEMS),
            valid=torch.ones(1, ITEMS, dtype=torch.bool),
            noise=torch.rand(2 * ITEMS * SIZE),
        )

    def loss(self, update: int) -> Any:
        return self.algorithm.loss(self.model, self.batch, {**self.algorithm.hyperparameters(0.0), "update": update})


def slow(mlps: RenormMLPs, member: int, x: Tensor, *, batch: bool) -> Tensor:
    """One perceptron, by batch normalization or by running statistics."""
    for layer, statistics in enumerate(mlps.statistics):
        mean, variance = (
            (x.mean(0), x.var(0, unbiased=False)) if batch else (statistics[0, member], statistics[1, member])
        )
        x = (x - mean) / (variance + EPS).sqrt() * mlps.gains[layer][member, 0] + mlps.shifts[layer][member, 0]
        x = x @ mlps.weights[layer][member] + mlps.biases[layer][member, 0]
        x = torch.relu(x) if layer < len(mlps.statistics) - 1 else x
    return x


@torch.no_grad()
def test_losses_by_hand() -> None:
    case = Case()
    model, batch = case.model, case.batch
    with torch.enable_grad():
        loss = case.loss(update=3)
    assert batch.noise is not None
    noise, next_noise = batch.noise.view(2, ITEMS, SIZE)
    actor: Any = model.actor.layers
    critics: Any = model.critics.layers

    def drawn(out: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = out.chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = mean + log_std.exp() * standard_normal(uniform)
        return torch.tanh(u), (normal.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2 + 1e-9)).sum(-1)

    next_action, next_log_prob = drawn(slow(actor, 0, batch.next_obs[0], batch=False), next_noise)
    joint = torch.cat([torch.cat([batch.obs[0], batch.action[0]], -1), torch.cat([batch.next_obs[0], next_action], -1)])
    values = torch.stack([slow(critics, c, joint, batch=True)[:, 0] for c in range(2)])
    q, q_next = values[:, :ITEMS], values[:, ITEMS:]
    target = batch.reward[0] + batch.discount[0] * (q_next.amin(0) - next_log_prob)  # α = 1
    torch.testing.assert_close(loss.metrics["loss/critic"], (q - target).square().sum(), rtol=1e-4, atol=1e-4)

    action, log_prob = drawn(slow(actor, 0, batch.obs[0], batch=True), noise)
    at = torch.cat([batch.obs[0], action], -1)
    smallest = torch.stack([slow(critics, c, at, batch=False)[:, 0] for c in range(2)]).amin(0)
    torch.testing.assert_close(loss.metrics["loss/actor"] / 3, (log_prob - smallest).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.metrics["loss/temperature"] / 3, (-log_prob + SIZE).sum(), rtol=1e-4, atol=1e-4)


def test_gradients_reach_what_they_should() -> None:
    case = Case()
    for update in (1, 3):
        case.model.zero_grad()
        case.loss(update).total.backward()
        reached = {name for name, p in case.model.named_parameters() if p.grad is not None and p.grad.any()}
        moves = update % 3 == 0
        assert any(name.startswith("critics.") for name in reached)
        assert any(name.startswith("actor.") for name in reached) == moves
        assert any(name.startswith("statistics.actor.") for name in reached) == moves
        assert ("variables.log_temperature" in reached) == moves
    prefixes = [[group.prefix for group in case.algorithm.groups(update, HYPER)] for update in (1, 3)]
    assert prefixes[0] == ["critics.", "statistics.critics."]
    assert prefixes[1] == ["actor.", "critics.", "statistics.critics.", "statistics.actor.", "variables."]


HYPER = CrossQConfig().build().hyperparameters(0.0)


@pytest.mark.parametrize("kind", [Optimizer, PortableOptimizer])
def test_running_statistics_move_a_share_of_the_way_to_the_mean_over_shards(kind: Any) -> None:
    case = Case(statistics_rate=0.25)
    flat = FlatParameters(case.model, 1 + len(CrossQ.metric_names))
    seen, total, numbers = [], torch.zeros(flat.vector.numel()), flat.named()
    first = numbers["statistics.critics.0"].clone()
    for obs in (case.batch.obs, case.batch.obs + 1.0):  # two shards
        case.batch = case.batch.replace(obs=obs)
        flat.forget_gradient()
        loss = case.loss(update=1)
        loss.total.backward()
        total += flat.gather_gradient([loss.total.detach()] * flat.tail)[: len(total)]
        mean = torch.cat([obs[0], case.batch.next_obs[0]]).mean(0)
        seen.append(mean)
    experiment = recipes.crossq_mujoco()
    kind(experiment, flat).step(total / (2 * ITEMS), case.algorithm.groups(1, HYPER))
    wanted = first[0, :, 0, :3] + 0.25 * (torch.stack(seen).mean(0) - first[0, :, 0, :3])
    torch.testing.assert_close(numbers["statistics.critics.0"][0, :, 0, :3], wanted)


def test_acting_depends_on_each_row_alone() -> None:
    model = Case().model.for_acting()
    obs = torch.randn(1, 4, 3)
    whole, alone = model.actor(obs), model.actor(obs[:, :1])
    torch.testing.assert_close(whole[:, :1], alone)
    assert not hasattr(model, "critics")


def test_what_does_not_fit_is_refused() -> None:
    recipe = recipes.crossq_mujoco()
    recipe.validate()
    for experiment, changes, words in (
        (recipe, {"model.batch_renorm": False}, r"crossq needs model\.batch_renorm on"),
        (recipes.sac_mujoco(), {"model.batch_renorm": True}, r"sac needs model\.batch_renorm off"),
        (recipe, {"algorithm.replay.prioritized": True}, "prioritized"),
        (recipe, {"algorithm.batch_size": 4}, r"batch_size=4.*at least 8"),
        (recipe, {"algorithm.statistics_rate": 0.0}, "statistics_rate=0.0"),
        (recipe, {"algorithm.policy_period": 0}, "policy_period=0"),
        (recipe, {"algorithm.target_period": 2}, "target_period has no effect"),
        (recipe, {"algorithm.target_rate": 1.0}, "target_rate has no effect"),
        (recipe, {"model.layer_norm": True}, "layer_norm"),
    ):
        with pytest.raises(SettingsError, match=words):
            experiment.replace(**changes).validate()
