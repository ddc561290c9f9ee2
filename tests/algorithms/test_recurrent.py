"""SAC, TD3 and DDPG with cores: their losses of sequences against a walk through each, one plain step at a time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms import LossOutput
from lockstep.algorithms.ddpg import DDPGConfig
from lockstep.algorithms.losses import mixed_priority
from lockstep.algorithms.qpg import QPGConfig
from lockstep.algorithms.sac import SACConfig
from lockstep.algorithms.td3 import TD3Config
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Sequences
from lockstep.models import ActorCritic, ActorCriticConfig
from lockstep.models.actor_critic import Remembering
from lockstep.models.base import Networks
from lockstep.models.gaussian import standard_normal
from lockstep.models.mlps import MLPs

BURN_IN, UNROLL, N_STEP, ITEMS, SIZE, DIMENSIONS = 3, 5, 2, 4, 6, 2
LENGTH = BURN_IN + UNROLL + N_STEP
SEEN = spaces.Dict({"action_mask": spaces.MultiBinary(3), "seen": spaces.Box(-1, 1, (2,))})
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
LENGTHS: dict[str, Any] = {"burn_in": BURN_IN, "unroll": UNROLL, "n_step": N_STEP}
KINDS = {"sac": SACConfig, "sac-discrete": SACConfig, "td3": TD3Config, "ddpg": DDPGConfig}
CORES = [
    ("sac", "gru"),
    ("sac", "none"),
    ("sac-discrete", "mingru"),
    ("td3", "lstm"),
    ("ddpg", "gru"),
    ("ddpg", "transformer"),
]


class Case:
    """A model, a different target, and sequences with episodes that begin and end anywhere."""

    def __init__(self, kind: str, core: Any = "gru") -> None:
        torch.manual_seed(3)
        config = KINDS[kind](**LENGTHS)
        self.config: Any = config
        self.algorithm = config.build()
        self.discrete = kind == "sac-discrete"
        self.online, self.target = (self._model(core, seed) for seed in (1, 2))
        for model in (self.online, self.target):
            model.variables = torch.nn.ParameterDict(self.algorithm.variables(model))
        self.target.requires_grad_(False)
        numbers = self.algorithm.noise_numbers(self.online, ITEMS)
        allowed = torch.rand(LENGTH, ITEMS, 3) < 0.6
        allowed[..., 1] = True
        obs = torch.randn(LENGTH, ITEMS, 2)

        def actions(*shape: int) -> Tensor:
            return torch.ones(shape, dtype=torch.int64) if self.discrete else torch.rand(*shape, DIMENSIONS) * 2 - 1

        self.batch = Sequences(
            obs={"action_mask": allowed.to(torch.int8), "seen": obs} if self.discrete else obs,
            start=torch.rand(LENGTH, ITEMS) < 0.2,
            prev_action=torch.randint(0, 3, (LENGTH, ITEMS)) if self.discrete else actions(LENGTH, ITEMS),
            prev_reward=torch.randn(LENGTH, ITEMS),
            state=torch.randn(ITEMS, self.online.state_size),
            action=actions(UNROLL, ITEMS),
            reward=3 * torch.randn(UNROLL, ITEMS),
            discount=torch.where(torch.rand(UNROLL, ITEMS) < 0.2, 0.0, 0.9),
            ahead=torch.randint(1, N_STEP + 1, (UNROLL, ITEMS)),
            weight=torch.tensor([0.5, 1.0, 2.0, 0.1]),
            valid=torch.rand(UNROLL, ITEMS) < 0.8,
            noise=torch.rand(numbers) if numbers else None,
        )
        if core == "transformer":  # how many earlier steps its state knows
            self.batch.state[:, -1] = torch.arange(ITEMS)
        assert self.batch.start[BURN_IN + 1 :].any() and not self.batch.valid.all()

    def _model(self, core: Any, seed: int) -> ActorCritic:
        config = ActorCriticConfig(
            policy=self.config.policies[0],
            hidden_sizes=(8, 7),
            core=core,
            core_size=8 if core == "transformer" else SIZE,  # two numbers for each of its heads
            core_memory=4,
            previous_action_reward=True,
        )
        seen: gymnasium.Space[Any] = SEEN if self.discrete else spaces.Box(-1, 1, (2,))
        space = spaces.Discrete(3) if self.discrete else BOX
        return config.build(seen, space, precision="fp32", normalize_observations=False, seed=seed)

    def loss(self, batch: Sequences | None = None) -> LossOutput:
        hyper = {**self.algorithm.hyperparameters(0.0), "update": 2}
        return self.algorithm.loss(Networks(self.online, self.target), batch or self.batch, hyper)

    def inputs(self, part: Remembering, item: int, state: Tensor) -> list[Tensor]:
        """By step after the burn-in: the inputs of the layers [F], by the core's plain steps."""
        batch, found = self.batch, []
        assert batch.prev_action is not None and batch.prev_reward is not None
        for t in range(LENGTH):
            x = (batch.obs["seen"] if self.discrete else batch.obs)[t, item]
            last = batch.prev_action[t, item]
            last = F.one_hot(last, 3).float() if self.discrete else last
            before = torch.cat([last, batch.prev_reward[t, item].view(1)])
            if batch.start[t, item]:
                before, state = torch.zeros_like(before), torch.zeros_like(state)
            x = torch.cat([x, before])
            if part.core is not None:
                h, state = part.core.step(x.unsqueeze(0), state.unsqueeze(0))
                h, state = h[0], state[0]
                x = torch.cat([h, x])
            if t < BURN_IN:
                state = state.detach()
            else:
                found.append(x)
        return found


def run(layers: Any, member: int, x: Tensor) -> Tensor:
    assert isinstance(layers, MLPs) and layers.activation == "relu"
    for index, (weight, bias) in enumerate(zip(layers.weights, layers.biases, strict=True)):
        x = x @ weight[member] + bias[member, 0]
        x = torch.relu(x) if index < len(layers.weights) - 1 else x
    return x


class Walk:
    """One sequence, step by step."""

    def __init__(self, case: Case, item: int) -> None:
        self.case, self.item, batch = case, item, case.batch
        zeros = torch.zeros(case.online.critics.state_size)
        self.policy = case.inputs(case.online.actor, item, batch.state[item])
        self.target_policy = case.inputs(case.target.actor, item, batch.state[item])
        self.values = case.inputs(case.online.critics, item, zeros)
        self.target_values = case.inputs(case.target.critics, item, zeros)

    def q(self, model: ActorCritic, inputs: Tensor, action: Tensor) -> Tensor:
        """[C]"""
        x = torch.cat([inputs, action])
        return torch.stack([run(model.critics.layers, c, x)[0] for c in range(2)])

    def distribution(self, inputs: Tensor, t: int) -> Tensor:
        """Log-probabilities of discrete actions, of which a mask forbids some."""
        allowed = self.case.batch.obs["action_mask"][BURN_IN + t, self.item].bool()
        return run(self.case.online.actor.layers, 0, inputs).masked_fill(~allowed, -1e9).log_softmax(-1)

    def squashed(self, inputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = run(self.case.online.actor.layers, 0, inputs).chunk(2)
        u = mean + log_std.clamp(-20, 2).exp() * standard_normal(noise)
        normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        return torch.tanh(u), (normal.log_prob(u) - (1 - torch.tanh(u) ** 2).log()).sum()

    def losses(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of step t after the burn-in: errors of the critics [C], loss of the policy, gap of entropy."""
        case, batch, item = self.case, self.case.batch, self.item
        then, alpha = t + int(batch.ahead[t, item]), 1.0
        action, online, target = batch.action[t, item], case.online, case.target
        gap = torch.zeros(())
        frozen = self.values[t].detach()
        if case.discrete:
            log_p, next_log_p = self.distribution(self.policy[t], t), self.distribution(self.policy[then], then)
            after = [run(target.critics.layers, c, self.target_values[then]) for c in range(2)]
            v_t = (next_log_p.exp() * (torch.stack(after).amin(0) - alpha * next_log_p)).sum()
            here = torch.stack([run(online.critics.layers, c, self.values[t]) for c in range(2)])
            climb = (log_p.exp() * (alpha * log_p - here.amin(0).detach())).sum()
            allowed = batch.obs["action_mask"][BURN_IN + t, item].sum()
            gap = -(log_p.exp() * log_p).sum() - 0.98 * allowed.float().log()
            values = here[:, action]
        elif isinstance(case.config, SACConfig):
            assert batch.noise is not None
            noise = batch.noise.view(2, UNROLL, ITEMS, DIMENSIONS)[:, t, item]
            next_action, next_log_p = self.squashed(self.policy[then], noise[1])
            v_t = self.q(target, self.target_values[then], next_action).amin() - alpha * next_log_p
            sampled, log_p = self.squashed(self.policy[t], noise[0])
            climb = alpha * log_p - self.q(online, frozen, sampled).amin()
            gap, values = -log_p + DIMENSIONS, self.q(online, self.values[t], action)
        else:
            next_action = torch.tanh(run(target.actor.layers, 0, self.target_policy[then]))
            if isinstance(case.config, TD3Config):
                assert batch.noise is not None
                smooth = 0.2 * standard_normal(batch.noise.view(UNROLL, ITEMS, DIMENSIONS)[t, item])
                next_action = (next_action + smooth.clamp(-0.5, 0.5)).clamp(-1, 1)
            v_t = self.q(target, self.target_values[then], next_action).amin()
            climb = -self.q(online, frozen, torch.tanh(run(online.actor.layers, 0, self.policy[t])))[0]
            values = self.q(online, self.values[t], action)
        goal = batch.reward[t, item] + batch.discount[t, item] * v_t.detach()
        return goal - values, climb, gap.detach(), goal


@pytest.mark.parametrize(("kind", "core"), CORES)
def test_loss_and_gradients_are_what_a_walk_through_the_sequences_gives(kind: str, core: str) -> None:
    case = Case(kind, core)
    out = case.loss()
    out.total.backward()
    gradients = {name: p.grad.clone() for name, p in case.online.named_parameters() if p.grad is not None}
    case.online.zero_grad()
    critic = actor = temperature = entropy_gap = torch.zeros(())
    targets, priorities = [], []
    for item in range(ITEMS):
        walk, sizes = Walk(case, item), torch.zeros(UNROLL, 1)
        weight, valid = case.batch.weight[item], case.batch.valid[:, item]
        for t in valid.nonzero()[:, 0].tolist():
            errors, climb, gap, goal = walk.losses(t)
            critic, actor = critic + weight * (errors**2).sum(), actor + weight * climb
            entropy_gap = entropy_gap + weight * gap
            sizes[t] = errors.detach().abs().mean()
            targets.append(float(goal))
        priorities.append(float(mixed_priority(sizes, valid.unsqueeze(1), 0.9)))
    layers = [*case.online.critics.layers.parameters()]
    if "log_temperature" in case.online.variables:
        temperature = case.online.variables["log_temperature"].exp() * entropy_gap
    total = critic + actor + temperature
    assert float(out.total.detach()) == pytest.approx(float(total.detach()), rel=1e-4)
    assert float(out.metrics["value/target"]) == pytest.approx(sum(targets), rel=1e-4)
    assert out.priorities is not None and out.priorities.tolist() == pytest.approx(priorities, rel=1e-4)
    if "policy/temperature" in out.metrics:
        assert float(out.metrics["policy/temperature"]) == len(targets)
    # The policy's loss does not move the critics, so that the walk's gradient of them is taken out.
    taken = torch.autograd.grad(actor, layers, retain_graph=True, allow_unused=True)
    total.backward()
    for parameter, too_much in zip(layers, taken, strict=True):
        if too_much is not None:
            assert parameter.grad is not None
            parameter.grad -= too_much
    assert any(name.startswith("actor.core") for name in gradients) == (core != "none")
    assert any(name.startswith("critics.core") for name in gradients) == (core != "none")
    for name, parameter in case.online.named_parameters():
        assert parameter.grad is not None, name
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4), name
    assert all(parameter.grad is None for parameter in case.target.parameters())


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_no_gradient_flows_through_the_burn_in_but_it_counts_until_an_episode_begins(kind: str) -> None:
    case = Case(kind)
    batch = case.batch.replace(start=torch.zeros_like(case.batch.start), obs=case.batch.obs.requires_grad_())
    case.loss(batch).total.backward()
    assert not batch.obs.grad[:BURN_IN].any() and batch.obs.grad[BURN_IN : BURN_IN + UNROLL].any()
    changed = batch.obs.detach().clone()
    changed[:BURN_IN] += 1
    batch = batch.replace(obs=batch.obs.detach())
    assert not torch.equal(case.loss(batch.replace(obs=changed)).total, case.loss(batch).total)
    begun = batch.start.clone()
    begun[BURN_IN] = True
    losses = [case.loss(batch.replace(obs=obs, start=begun)).total for obs in (changed, batch.obs)]
    assert torch.equal(*losses)


def test_steps_that_are_not_valid_change_nothing() -> None:
    case = Case("sac")
    valid = case.batch.valid
    other = case.batch.replace(
        reward=torch.where(valid, case.batch.reward, 100.0),
        action=torch.where(valid.unsqueeze(-1), case.batch.action, 0.5),
    )
    one, same = case.loss(), case.loss(other)
    assert torch.equal(one.total, same.total)
    assert {name: float(x) for name, x in one.metrics.items()} == {name: float(x) for name, x in same.metrics.items()}


@pytest.mark.parametrize("core", ["gru", "lstm", "mingru"])
def test_acting_step_by_step_is_what_the_loss_sees(core: str) -> None:
    """What a collector computes with the state that it carries equals the unrolled policy."""
    case = Case("sac", core)
    batch, acting = case.batch, case.online.for_acting()
    assert acting.state_size == batch.state.shape[1] > 0 and not hasattr(acting, "critics")
    whole, after = case.online(batch.obs, batch.start, batch.state, batch.prev_action, batch.prev_reward)
    state, found = batch.state, []
    assert batch.prev_action is not None and batch.prev_reward is not None
    for t in range(LENGTH):
        at = slice(t, t + 1)
        out, state = acting(batch.obs[at], batch.start[at], state, batch.prev_action[at], batch.prev_reward[at])
        found.append(out.policy)
    assert torch.allclose(torch.cat(found), whole.policy, atol=1e-6) and torch.allclose(state, after, atol=1e-6)


def test_a_sequence_of_one_step_that_is_not_valid_has_no_priority() -> None:
    case = Case("td3", "none")
    algorithm = TD3Config(**{**LENGTHS, "unroll": 1, "burn_in": BURN_IN + UNROLL - 1}).build()
    last = {name: getattr(case.batch, name)[-1:] for name in ("action", "reward", "discount", "ahead")}
    batch = case.batch.replace(**last, valid=torch.tensor([[True, False, True, False]]), noise=torch.rand(ITEMS * 2))
    networks = Networks(case.online, case.target)
    found = algorithm.loss(networks, batch, {**algorithm.hyperparameters(0.0), "update": 2}).priorities
    assert found is not None and (found > 0).tolist() == [True, False, True, False]


REFUSED = [
    ("sac-mujoco", {"model.core": "gru"}, r"algorithm.unroll=0.*--algorithm.unroll 32 .*sac-hidden"),
    ("td3-mujoco", {"model.previous_action_reward": True}, "previous_action_reward needs sequences"),
    ("mpo-mujoco", {"model.core": "gru"}, "algorithm=mpo learns from single steps"),
    ("crossq-mujoco", {"algorithm.unroll": 8}, "algorithm=crossq learns from single steps"),
    ("ddpg-mujoco", {"algorithm.burn_in": -1}, "burn_in=-1"),
    ("sac-mujoco", {"algorithm.burn_in": 4}, "burn_in=4 is the beginning of sequences, but algorithm.unroll=0"),
    ("crossq-mujoco", {"algorithm.burn_in": 4}, "algorithm=crossq learns from single steps"),
    ("sac-hidden", {"algorithm.replay.recency": 0.99}, "sequences"),
]


@pytest.mark.parametrize(("recipe", "changes", "message"), REFUSED)
def test_settings_that_do_not_fit_are_refused(recipe: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        recipes.RECIPES[recipe]().replace(**changes).validate()


@pytest.mark.parametrize("recipe", ["sac-hidden", "r2d2-memory"])
def test_steps_that_no_sequence_learns_from_cause_a_warning(recipe: str) -> None:
    experiment = recipes.RECIPES[recipe]()
    assert not list(experiment.algorithm.warnings(experiment.setup))
    short = experiment.replace(**{"algorithm.unroll": 4})
    (told,) = short.algorithm.warnings(short.setup)
    assert "12 of every 16 steps are never learned from. Use --algorithm.rollout 4, or --algorithm.unroll 16." in told


@pytest.mark.parametrize("recipe", ["sac-mujoco", "td3-mujoco", "ddpg-mujoco"])
def test_flags_make_any_recipe_recurrent(recipe: str) -> None:
    changes = {"model.core": "gru", "algorithm.unroll": 32, "algorithm.burn_in": 16, "algorithm.batch_size": 32}
    experiment = recipes.RECIPES[recipe]().replace(**changes)
    experiment.validate()
    assert experiment.gradient_steps == (64, 32 * 32) and not Agent(experiment).kernels
    assert isinstance(experiment.algorithm, QPGConfig) and experiment.algorithm.item_steps == 48
