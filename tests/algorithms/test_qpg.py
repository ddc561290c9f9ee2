"""DDPG, TD3, SAC and MPO against their formulas, item by item, and what their gradients reach."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tiny import options
from torch import Tensor
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.kl import kl_divergence
from torch.distributions.transforms import TanhTransform

from lockstep import recipes
from lockstep.algorithms import LossOutput, ParameterGroup
from lockstep.algorithms.ddpg import DDPGConfig
from lockstep.algorithms.mpo import divergences, inverse_softplus, weigh
from lockstep.algorithms.offpolicy import OffPolicy, OffPolicyConfig
from lockstep.algorithms.sac import SACConfig
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.launchers.launch import train
from lockstep.learners.optimizer import Optimizer
from lockstep.models import ActorCritic, ActorCriticConfig
from lockstep.models.base import Networks
from lockstep.models.gaussian import standard_normal
from lockstep.models.mlps import MLPs
from lockstep.models.parameters import FlatParameters

OBSERVATIONS = spaces.Dict({"goal": spaces.Box(-1, 1, (2,)), "observation": spaces.Box(-1, 1, (3,))})
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
ITEMS, SIZE = 5, 2
CONTINUOUS = ("ddpg-mujoco", "td3-mujoco", "sac-mujoco", "mpo-mujoco")
KINDS = (*CONTINUOUS, "sac-discrete")
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


class Case:
    """A small model, a different target, and a minibatch of ITEMS transitions."""

    def __init__(self, kind: str, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.discrete = kind == "sac-discrete"
        self.experiment = recipes.RECIPES["sac-mujoco" if self.discrete else kind]()
        config = dataclasses.replace(self.experiment.algorithm, **settings)
        assert isinstance(config, OffPolicyConfig) and isinstance(self.experiment.model, ActorCriticConfig)
        self.network = self.experiment.model
        self.algorithm: OffPolicy[Any] = config.build()
        self.config: Any = config
        space = spaces.Discrete(3) if self.discrete else BOX
        self.online, self.target = (self._model(space, s) for s in (1, 2))
        for model in (self.online, self.target):
            model.variables = torch.nn.ParameterDict(self.algorithm.variables(model))
        self.target.requires_grad_(False)
        numbers = self.algorithm.noise_numbers(self.online, ITEMS)
        obs, next_obs = ({"goal": torch.randn(1, ITEMS, 2), "observation": torch.randn(1, ITEMS, 3)} for _ in range(2))
        action = torch.randint(3, (1, ITEMS)) if self.discrete else torch.rand(1, ITEMS, SIZE) * 2 - 1
        self.batch = Transitions(
            obs=obs,
            action=action,
            reward=torch.randn(1, ITEMS),
            discount=torch.tensor([[0.9, 0.0, 0.81, 0.9, 0.9]]),
            next_obs=next_obs,
            weight=torch.rand(ITEMS) + 0.5,
            valid=torch.ones(1, ITEMS, dtype=torch.bool),
            noise=torch.rand(numbers) if numbers else None,
        )

    def _model(self, space: gymnasium.Space[Any], seed: int) -> ActorCritic:
        config = dataclasses.replace(self.network, hidden_sizes=(8, 7))
        model: Any = config.build(OBSERVATIONS, space, precision="fp32", normalize_observations=False, seed=seed)
        if config.policy == "gaussian":
            model.actor.layers.scale_outputs(100.0)  # as after some learning, when policies are not nearly equal
        return model

    def loss(self, update: int = 2) -> LossOutput:
        hyper = {**self.algorithm.hyperparameters(0.0), "update": update}
        return self.algorithm.loss(Networks(self.online, self.target), self.batch, hyper)

    def noise(self, *shape: int) -> Tensor:
        assert self.batch.noise is not None
        return self.batch.noise.view(*shape, ITEMS, SIZE)


def vector(obs: dict[str, Tensor], item: int) -> Tensor:
    return torch.cat([obs["goal"][0, item], obs["observation"][0, item]])


def run(layers: MLPs, member: int, x: Tensor) -> Tensor:
    """One member for one input, a layer at a time."""
    for index, (weight, bias) in enumerate(zip(layers.weights, layers.biases, strict=True)):
        x = x @ weight[member] + bias[member, 0]
        if index == 0 and layers.layer_norm:
            x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
            x = torch.tanh(x * layers.gain[member, 0] + layers.shift[member, 0])
        elif index < len(layers.weights) - 1:
            x = {"relu": torch.relu, "elu": torch.nn.functional.elu}[layers.activation](x)
    return x


def plain(layers: object) -> MLPs:
    assert isinstance(layers, MLPs)
    return layers


def policy(model: ActorCritic, obs: dict[str, Tensor], item: int) -> Tensor:
    """What the actor's last layer gives out."""
    return run(plain(model.actor.layers), 0, vector(obs, item))


def squashed(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A sample of tanh of a normal distribution, and its log-probability, by torch's own."""
    base = Normal(outputs[:SIZE], outputs[SIZE:].clamp(-20, 2).exp())
    u = base.mean + base.stddev * standard_normal(noise)
    density = Independent(TransformedDistribution(base, [TanhTransform(cache_size=1)]), 1)
    action = torch.tanh(u)
    return action, density.log_prob(action)


def q(model: ActorCritic, obs: dict[str, Tensor], item: int, action: Tensor) -> list[Tensor]:
    x = torch.cat([vector(obs, item), action])
    return [run(plain(model.critics.layers), c, x)[0] for c in range(len(plain(model.critics.layers).weights[0]))]


def q_all(model: ActorCritic, obs: dict[str, Tensor], item: int) -> list[Tensor]:
    return [run(plain(model.critics.layers), c, vector(obs, item)) for c in range(2)]


Parts = tuple[Tensor, Tensor, Tensor]
"""An item's losses: of the critics, of the policy, and of what is learned beside them."""
ZERO = torch.zeros(())


def reference(case: Case, item: int) -> Parts:
    """An item's losses by the papers' formulas, before its weight."""
    kind = type(case.algorithm).__name__
    batch, online, target = case.batch, case.online, case.target
    reward, discount = batch.reward[0, item], batch.discount[0, item]
    action = batch.action[0, item]

    def squares(values: list[Tensor], after: Tensor) -> Tensor:
        return sum(((reward + discount * after.detach() - v) ** 2 for v in values), ZERO)

    if kind in ("DDPG", "TD3"):
        then = torch.tanh(policy(target, batch.next_obs, item))
        if kind == "TD3":
            then = (then + (0.2 * standard_normal(case.noise(1)[0, item])).clamp(-0.5, 0.5)).clamp(-1, 1)
        after = torch.stack(q(target, batch.next_obs, item, then)).min()
        climbed = q(online, batch.obs, item, torch.tanh(policy(online, batch.obs, item)))[0]
        return squares(q(online, batch.obs, item, action), after), -climbed, ZERO
    if kind == "SAC":
        alpha, entropy_target = online.variables["log_temperature"].exp(), 0.98 * math.log(3)
        if case.discrete:
            log_p = policy(online, batch.obs, item).log_softmax(-1)
            next_log_p = policy(online, batch.next_obs, item).log_softmax(-1)
            least = torch.stack(q_all(target, batch.next_obs, item)).min(0).values
            after = (next_log_p.exp() * (least - alpha * next_log_p)).sum()
            mine = torch.stack(q_all(online, batch.obs, item)).min(0).values.detach()
            climb = (log_p.exp() * (alpha.detach() * log_p - mine)).sum()
            entropy = -(log_p.exp() * log_p).sum()
            values = [each[action] for each in q_all(online, batch.obs, item)]
        else:
            noise, next_noise = case.noise(2)[:, item]
            entropy_target = -SIZE
            next_action, next_log_prob = squashed(policy(online, batch.next_obs, item), next_noise)
            after = torch.stack(q(target, batch.next_obs, item, next_action)).min() - alpha * next_log_prob
            sampled, log_prob = squashed(policy(online, batch.obs, item), noise)
            climb = alpha.detach() * log_prob - torch.stack(q(online, batch.obs, item, sampled)).min()
            entropy, values = -log_prob, q(online, batch.obs, item, action)
        return squares(values, after), climb, alpha * (entropy.detach() - entropy_target)
    return _mpo(case, item, squares)


def _mpo(case: Case, item: int, squares: Any) -> Parts:
    config, batch, online, target = case.config, case.batch, case.online, case.target
    std = case.network.initial_std

    def normal(model: ActorCritic) -> Normal:
        out = policy(model, batch.next_obs, item)
        return Normal(torch.tanh(out[:SIZE]), std * out[SIZE:].exp())

    older, newer = normal(target), normal(online)
    actions = [older.mean + older.stddev * standard_normal(n) for n in case.noise(config.actions)[:, item]]
    values = torch.stack([q(target, batch.next_obs, item, a.clamp(-1, 1))[0] for a in actions])
    soft = {name: torch.nn.functional.softplus(x) for name, x in online.variables.items()}
    eta = soft["temperature"]
    dual = eta * (config.epsilon + (values / eta).exp().mean().log())
    exponent = (values / eta.detach()).exp()
    with_mean, with_std = Normal(newer.mean, older.stddev), Normal(older.mean, newer.stddev)
    fit = -sum(
        (
            weight * (with_mean.log_prob(a).sum() + with_std.log_prob(a).sum())
            for weight, a in zip(exponent / exponent.sum(), actions, strict=True)
        ),
        ZERO,
    )
    for other, name, bound in ((with_mean, "mean", config.epsilon_mean), (with_std, "std", config.epsilon_std)):
        kl, multiplier = kl_divergence(older, other), soft[f"multiplier_{name}"]
        fit = fit + (multiplier.detach() * kl).sum()
        dual = dual + (multiplier * (bound - kl.detach())).sum()
    return squares(q(online, batch.obs, item, batch.action[0, item]), values.mean()), fit, dual


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_papers(kind: str) -> None:
    """Item by item, and the gradient of each group of parameters is that of its own loss alone."""
    case = Case(kind)
    parts = [
        sum((w * p for w, p in zip(case.batch.weight, column, strict=True)), ZERO)
        for column in zip(*(reference(case, item) for item in range(ITEMS)), strict=True)
    ]
    loss = case.loss()
    torch.testing.assert_close(loss.total, sum(parts, ZERO), **CLOSE)
    torch.testing.assert_close(loss.metrics["loss/critic"], parts[0].detach(), **CLOSE)
    loss.total.backward()
    for prefix, part in zip(("critics.", "actor.", "variables."), parts, strict=True):
        of = {name: p for name, p in case.online.named_parameters() if name.startswith(prefix)}
        if not of:
            continue
        for (name, parameter), expected in zip(of.items(), torch.autograd.grad(part, list(of.values())), strict=True):
            assert parameter.grad is not None and expected.abs().sum() > 0, name
            torch.testing.assert_close(parameter.grad, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
    assert all(p.grad is None for p in case.target.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_and_priorities(kind: str) -> None:
    case = Case(kind)
    loss = case.loss()
    assert tuple(loss.metrics) == case.algorithm.metric_names
    assert loss.priorities is not None and loss.priorities.shape == (ITEMS,) and not loss.priorities.requires_grad
    torch.testing.assert_close(loss.metrics["value/error"], loss.priorities.sum())
    case.batch = case.batch.replace(discount=torch.zeros(1, ITEMS))  # all terminated
    torch.testing.assert_close(case.loss().metrics["value/target"], case.batch.reward.sum())


def test_the_delayed_policy_stands_still_between_its_turns() -> None:
    case = Case("td3-mujoco")
    flat = FlatParameters(case.online)
    optimizer, names = Optimizer(case.experiment, flat), list(flat.named())
    moved = []
    for update in (1, 2, 3, 4):
        before = {name: x.clone() for name, x in flat.named().items()}
        remembered = {name: x.clone() for name, x in optimizer.state().items()}
        optimizer.step(torch.ones_like(flat.vector), case.algorithm.groups(update, case.algorithm.hyperparameters(0.0)))
        moved.append({name.split(".")[0] for name in names if not torch.equal(before[name], flat.named()[name])})
        if update == 3:
            span = flat.span("actor.")
            assert torch.equal(remembered["exp_avg"][span], optimizer.state()["exp_avg"][span])
            assert torch.equal(remembered["step.actor"], optimizer.state()["step.actor"])
    assert moved == [{"critics"}, {"critics", "actor"}] * 2
    assert {name: float(x) for name, x in optimizer.state().items() if not x.ndim} == {
        "step.actor": 2,
        "step.critics": 4,
    }


def test_where_the_delayed_policy_stands_still_its_loss_costs_nothing() -> None:
    case = Case("td3-mujoco")
    whole, critics = case.loss(update=2), case.loss(update=3)
    torch.testing.assert_close(whole.metrics["loss/critic"], critics.total.detach())
    # Reported for the steps that move it: as a mean over all of them, it is counted as often as it was left out.
    actor = (whole.total - critics.total).detach()
    torch.testing.assert_close(whole.metrics["loss/actor"], 2 * actor, rtol=1e-4, atol=1e-6)
    assert critics.metrics["loss/actor"] == 0
    critics.total.backward()
    assert all(p.grad is None for name, p in case.online.named_parameters() if name.startswith("actor."))
    assert all(p.grad is not None for name, p in case.online.named_parameters() if name.startswith("critics."))


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_groups_are_optimizers_of_their_own(name: str) -> None:
    """As torch's, one for each group with its learning rate; the norm of each is clipped by itself."""
    case = Case("sac-mujoco")
    algorithm = dataclasses.replace(
        case.experiment.algorithm,
        max_grad_norm=1.0,
        optimizer=dataclasses.replace(case.experiment.algorithm.optimizer, name=name),
    )
    groups = tuple(ParameterGroup(p, r) for p, r in (("actor.", 1e-2), ("critics.", 1e-3), ("variables.", 1e-4)))
    expected = {
        p: [x.detach().clone().requires_grad_() for n, x in case.online.named_parameters() if n.startswith(p)]
        for p, _ in groups
    }
    make: Any = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[name]
    extra = {} if name == "adam" else {"alpha": algorithm.optimizer.decay}
    optimizers = [make(expected[p], lr=rate, eps=algorithm.optimizer.eps, **extra) for p, rate in groups]
    flat = FlatParameters(case.online, tail=1)
    optimizer = Optimizer(case.experiment.replace(algorithm=algorithm), flat)
    for step in range(3):
        for scale, parameters in zip((10.0, 0.01, 0.1), expected.values(), strict=True):
            for x in parameters:
                x.grad = scale * torch.randn(x.shape, generator=torch.Generator().manual_seed(step))
        flat.forget_gradient()
        for parameter, x in zip(case.online.parameters(), (x for xs in expected.values() for x in xs), strict=True):
            parameter.grad = None if x.grad is None else x.grad.clone()
        gradient = flat.gather_gradient([torch.zeros(())])[:-1]
        norms = [torch.nn.utils.clip_grad_norm_(xs, 1.0) for xs in expected.values()]
        assert optimizer.step(gradient, groups) == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)
        for each in optimizers:
            each.step()
    for mine, x in zip(case.online.parameters(), (x for xs in expected.values() for x in xs), strict=True):
        torch.testing.assert_close(mine, x, rtol=1e-6, atol=1e-7)
    other = Optimizer(case.experiment.replace(algorithm=algorithm), flat)
    other.load(optimizer.state())
    again = torch.randn_like(flat.vector)
    start = flat.vector.detach().clone()
    optimizer.step(again.clone(), groups)
    end = flat.vector.detach().clone()
    flat.vector.data.copy_(start)
    other.step(again.clone(), groups)
    assert torch.equal(flat.vector, end), "what was loaded goes on exactly"


def test_frozen_critics_pass_gradients_on_to_the_action_alone() -> None:
    case = Case("sac-mujoco")
    action = torch.rand(1, ITEMS, SIZE, requires_grad=True)
    case.online.q(case.batch.obs, action, frozen=True).sum().backward()
    assert action.grad is not None and action.grad.abs().sum() > 0
    assert all(p.grad is None for p in case.online.parameters())
    frozen = case.online.q(case.batch.obs, action, frozen=True)
    assert torch.equal(frozen, case.online.q(case.batch.obs, action))


def test_weights_of_actions_minimise_the_dual() -> None:
    """The temperature at the dual's minimum makes weights whose KL divergence from equal ones is the bound."""
    values, epsilon = torch.randn(50, 4, dtype=torch.float64) * 3, 0.3
    grid = torch.linspace(0.2, 20, 4000, dtype=torch.float64)
    eta = grid[torch.stack([weigh(values, eta, epsilon)[1].mean() for eta in grid]).argmin()]
    weights, _ = weigh(values, eta, epsilon)
    torch.testing.assert_close(weights.sum(0), torch.ones(4, dtype=torch.float64))
    assert float((weights * (weights * 50).log()).sum(0).mean()) == pytest.approx(epsilon, abs=0.005)


def test_divergences_are_torchs() -> None:
    means, log_stds = torch.randn(2, 7, SIZE), torch.randn(2, 7, SIZE)
    of_mean, of_std = divergences(means[0], log_stds[0], means[1], log_stds[1])
    older = Normal(means[0], log_stds[0].exp())
    torch.testing.assert_close(of_mean, kl_divergence(older, Normal(means[1], log_stds[0].exp())), **CLOSE)
    torch.testing.assert_close(of_std, kl_divergence(older, Normal(means[0], log_stds[1].exp())), **CLOSE)
    for x in (0.01, 1.0, 1000.0):
        assert float(torch.nn.functional.softplus(torch.tensor(inverse_softplus(x)))) == pytest.approx(x, rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "change", "hint"),
    [
        ("ddpg-mujoco", {"noise_theta": 0.0}, "noise_theta"),
        ("ddpg-mujoco", {"noise_std": -1.0}, "noise_std"),
        ("td3-mujoco", {"policy_period": 0}, "policy_period"),
        ("td3-mujoco", {"smoothing_clip": -1.0}, "smoothing_clip"),
        ("sac-mujoco", {"initial_temperature": 0.0}, "initial_temperature"),
        ("sac-mujoco", {"actor_learning_rate": 0.0}, "actor_learning_rate"),
        ("mpo-mujoco", {"actions": 1}, "actions"),
        ("mpo-mujoco", {"epsilon_std": 0.0}, "epsilon_std"),
    ],
)
def test_settings_out_of_range(recipe: str, change: dict[str, Any], hint: str) -> None:
    experiment = recipes.RECIPES[recipe]()
    wrong = experiment.replace(algorithm=dataclasses.replace(experiment.algorithm, **change))
    with pytest.raises(SettingsError, match=hint):
        wrong.validate()


@pytest.mark.parametrize(("recipe", "rate"), [("sac-mujoco", "temperature"), ("mpo-mujoco", "dual")])
def test_annealing_lowers_all_learning_rates(recipe: str, rate: str) -> None:
    config = dataclasses.replace(recipes.RECIPES[recipe]().algorithm, anneal_learning_rate=True)  # type: ignore[call-arg]
    begin, late = (config.build().hyperparameters(progress) for progress in (0.0, 0.75))
    for name in ("learning_rate", "actor_learning_rate", f"{rate}_learning_rate"):
        assert late[name] == pytest.approx(begin[name] / 4) and begin[name] == getattr(config, name)


@pytest.mark.parametrize(("env", "most"), [("CartPole-v1", math.log(2)), ("Pendulum-v1", math.log(2))])
def test_an_entropy_that_no_policy_has_is_refused(env: str, most: float, tmp_path: Path) -> None:
    base = recipes.RECIPES["sac-mujoco"]()
    assert isinstance(base.algorithm, SACConfig)
    for entropy, refused in ((most - 0.01, False), (most + 0.01, True)):
        algorithm = dataclasses.replace(base.algorithm, target_entropy=entropy, warmup=64, updates=1)
        settings = base.replace(env=dataclasses.replace(base.env, id=env, adapter="gymnasium"), algorithm=algorithm)
        with pytest.raises(SettingsError, match="target_entropy=") if refused else contextlib.nullcontext():
            train(settings.replace(total_steps=192, precision="fp32"), options=options(tmp_path / str(refused)))


@pytest.mark.parametrize("kind", CONTINUOUS)
def test_models_of_others_are_refused(kind: str) -> None:
    experiment = recipes.RECIPES[kind]()
    other = recipes.RECIPES["td3-mujoco" if kind.startswith(("sac", "mpo")) else "sac-mujoco"]()
    needed = rf"algorithm={kind.partition('-')[0]} .*lockstep\.models\.ActorCriticConfig"
    with pytest.raises(SettingsError, match=needed):
        experiment.replace(model=other.model).validate()
    with pytest.raises(SettingsError, match=needed):
        experiment.replace(model=recipes.RECIPES["dqn-cartpole"]().model).validate()


def test_noise_of_actions_is_as_wide_as_set() -> None:
    algorithm = DDPGConfig(noise_std=0.3, warmup=100).build()
    assert algorithm.exploration(0.0, 99, range(2), 4).random
    how = algorithm.exploration(0.5, 100, range(2), 4)
    assert not how.random and how.numbers[:, 0].tolist() == pytest.approx([0.3, 0.3])


def test_the_temperature_begins_and_stays_as_set() -> None:
    case = Case("sac-mujoco", initial_temperature=0.2, learn_temperature=False)
    assert float(case.online.variables["log_temperature"].detach().exp()) == pytest.approx(0.2)
    groups = case.algorithm.groups(1, case.algorithm.hyperparameters(0.0))
    assert [group.prefix for group in groups] == ["actor.", "critics."]
    Case("sac-mujoco", target_entropy=2 * math.log(2) - 0.01)  # two dimensions have twice the entropy of one
    with pytest.raises(SettingsError, match=r"algorithm\.target_entropy=\d"):
        Case("sac-mujoco", target_entropy=2 * math.log(2) + 0.01)


def test_equal_weights_diverge_from_nothing() -> None:
    loss = Case("mpo-mujoco", initial_temperature=1e6).loss()
    assert float(loss.metrics["policy/kl_weights"]) == pytest.approx(0.0, abs=1e-4)


def test_a_target_follows_by_its_rate_and_in_its_turn() -> None:
    algorithm = SACConfig(target_rate=0.25, target_period=2).build()
    online, target = torch.full((3,), 4.0), torch.zeros(3)
    algorithm.follow(online, target, 1)
    assert not target.any()
    algorithm.follow(online, target, 2)
    assert target.tolist() == [1.0] * 3
