"""Action masks: forbidden actions are never taken, neither at random nor by value, and never valued in a target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tiny import options

from lockstep import recipes, train
from lockstep.algorithms import DQNConfig
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.algorithms.sac import SAC, SACConfig
from lockstep.collectors.checking import Played, RolloutCheck
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Sequences, Transitions
from lockstep.envs.finite import FiniteCheck
from lockstep.envs.settings import EnvConfig
from lockstep.evaluation.scores import evaluate
from lockstep.experiment import Experiment
from lockstep.models import QModelConfig
from lockstep.models.action_spaces import choices_of
from lockstep.models.actor_critic import ActorCriticConfig
from lockstep.models.base import Networks
from lockstep.models.distributions import Categorical, EpsilonGreedy

FORBIDDEN = -1e9


class Doors(gymnasium.Env[Any, int]):
    """Four doors, of which two are open at a time, never twice the same two. A closed one may not be tried. Door d pays
    d; an episode has 8 steps."""

    observation_space: spaces.Space[Any] = spaces.Dict(last=spaces.MultiBinary(4), action_mask=spaces.MultiBinary(4))
    action_space: spaces.Space[Any] = spaces.Discrete(4)

    def _observe(self) -> dict[str, np.ndarray]:
        last, self._open = self._open, np.zeros(4, np.int8)
        self._open[self.np_random.choice(4, 2, replace=False)] = 1
        return {"last": last, "action_mask": self._open.copy()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._time, self._open = 0, np.zeros(4, np.int8)
        return self._observe(), {}

    def step(self, action: int) -> Any:
        assert self._open[action], f"door {action} is closed"
        self._time += 1
        return self._observe(), float(action), False, self._time == 8, {}


def doors(recipe: Callable[[], Experiment], **algorithm: Any) -> Experiment:
    """A recipe that learns from doors, in three iterations of which the first is a warm-up."""
    full = recipe()
    assert isinstance(full.algorithm, OffPolicyConfig)
    settings: dict[str, Any] = {"rollout": 8, "batch_size": 8, "updates": 2, "warmup": 32, **algorithm}
    core = {"core_size": 8} if full.model.recurrent else {}
    return full.replace(
        env=EnvConfig(id=f"{__file__}:Doors", num_envs=4),
        model=dataclasses.replace(full.model, encoder="mlp", hidden_sizes=(8,), **core),
        algorithm=dataclasses.replace(
            full.algorithm, **settings, replay=dataclasses.replace(full.algorithm.replay, capacity=400)
        ),
        scheme=dataclasses.replace(full.scheme, shards=2, acting_batch=0),
        total_steps=96,
        precision="fp32",
    )


def pqn() -> Experiment:
    """A recipe without replay, in as many iterations."""
    full = recipes.pqn_cartpole()
    return full.replace(
        env=EnvConfig(id=f"{__file__}:Doors", num_envs=4),
        model=dataclasses.replace(full.model, hidden_sizes=(8,)),
        algorithm=dataclasses.replace(full.algorithm, rollout=8, epochs=2, minibatches=2),
        scheme=dataclasses.replace(full.scheme, shards=2, acting_batch=0),
        total_steps=96,
    )


def sac() -> Experiment:
    return recipes.sac_mujoco().replace(model=ActorCriticConfig(hidden_sizes=(8,)))


CASES: dict[str, Experiment] = {
    "dqn": doors(recipes.dqn_cartpole),
    "rainbow": doors(recipes.rainbow_atari),
    "iqn": doors(recipes.iqn_atari, samples=4, target_samples=4),
    "r2d2": doors(recipes.r2d2_memory, burn_in=2, unroll=4, n_step=2),
    "sac": doors(sac),
    "pqn": pqn(),
}


@pytest.mark.parametrize("name", CASES)
def test_forbidden_actions_are_never_taken(name: str, tmp_path: Path) -> None:
    digest = train(CASES[name], options=options(tmp_path / "inline")).digest
    assert all(0 < score <= 24 for score in evaluate(tmp_path / "inline", episodes=20).scores)
    if name == "rainbow":  # one layout of several processes: actors and learners mask alike
        assert train(CASES[name], "cpu:a1-l1", options(tmp_path / "split")).digest == digest


@pytest.mark.parametrize("mask", [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0]])
def test_random_actions_are_even_among_allowed_ones(mask: list[int]) -> None:
    allowed = torch.tensor(mask, dtype=torch.bool)
    distribution = EpsilonGreedy(spaces.Discrete(4), masked=True)
    noise = torch.stack([torch.zeros(1200), (torch.arange(1200) + 0.5) / 1200], -1)
    params = distribution.mask(torch.randn(1200, 4), allowed.expand(1200, 4))
    found = torch.bincount(distribution.explore(params, noise, torch.ones(1200, 1)), minlength=4)
    assert found.tolist() == [1200 // sum(mask) * each for each in mask]
    if all(mask):
        assert torch.equal(
            distribution.uniform(params, noise), EpsilonGreedy(spaces.Discrete(4)).uniform(params, noise)
        )
    drawn = Categorical(spaces.Discrete(4)).uniform(params, torch.rand(1200, 4))
    assert allowed[drawn].all() and drawn.unique().tolist() == allowed.nonzero().flatten().tolist()


def observations(masks: list[list[int]]) -> dict[str, torch.Tensor]:
    items = len(masks)
    return {"last": torch.randint(0, 2, (1, items, 4)), "action_mask": torch.tensor([masks])}


def built(model: Any, seed: int, space: spaces.Space[Any] = Doors.observation_space) -> Any:
    return model.build(space, Doors.action_space, precision="fp32", normalize_observations=False, seed=seed)


def transitions() -> Transitions:
    return Transitions(
        obs=observations([[1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]]),
        action=torch.tensor([[0, 3, 2]]),
        reward=torch.tensor([[1.0, 2.0, 3.0]]),
        discount=torch.tensor([[0.9, 0.9, 0.0]]),
        next_obs=observations([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]),
        weight=torch.ones(3),
        valid=torch.ones(1, 3, dtype=torch.bool),
        noise=None,
    )


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("returns", ["expected", "quantiles"])
def test_targets_choose_among_allowed_actions(returns: Any, double: bool) -> None:
    config = QModelConfig(encoder="mlp", hidden_sizes=(8,), returns=returns, numbers=3)
    online, target = (built(config, seed) for seed in (1, 2))
    batch = transitions()
    found = DQNConfig(double=double, target_period=2).build().loss(Networks(online, target), batch, {})
    chosen_by, start, state = online if double else target, torch.ones(1, 3, dtype=torch.bool), torch.zeros(3, 0)
    values = target.expected(target.describe(batch.next_obs, start, state)[0])[0].detach()
    choice = chosen_by.expected(chosen_by.describe(batch.next_obs, start, state)[0])[0].detach()
    best = [max(actions, key=lambda a: float(choice[i, a])) for i, actions in enumerate(([1, 3], [0, 1]))]
    wanted = [1 + 0.9 * float(values[0, best[0]]), 2 + 0.9 * float(values[1, best[1]]), 3.0]
    assert float(found.metrics["value/target"]) == pytest.approx(sum(wanted), rel=1e-5)
    acted = online(batch.obs, start, state)[0]
    assert (acted.policy[0] == FORBIDDEN).tolist() == [
        [False, False, True, True],
        [True, True, True, False],
        [False] * 4,
    ]
    assert acted.value[0].tolist() == acted.policy[0].amax(-1).tolist()


def test_where_nothing_is_allowed_r2d2_bootstraps_from_a_value() -> None:
    """An environment may forbid everything in the last observation of an episode that a time limit ends."""
    case = CASES["r2d2"]
    online, target = (built(case.model, seed) for seed in (1, 2))
    losses = []
    for last in ([0, 0, 0, 0], [1, 1, 1, 1]):
        torch.manual_seed(3)
        masks = torch.ones(5, 1, 4, dtype=torch.int64)
        masks[-1, 0] = torch.tensor(last)
        batch = Sequences(
            obs={"last": torch.randint(0, 2, (5, 1, 4)), "action_mask": masks},
            start=torch.zeros(5, 1, dtype=torch.bool),
            state=torch.zeros(1, online.state_size),
            prev_action=torch.zeros(5, 1, dtype=torch.int64),
            prev_reward=torch.zeros(5, 1),
            action=torch.tensor([[0], [1]]),
            reward=torch.ones(2, 1),
            discount=torch.full((2, 1), 0.9),
            ahead=torch.tensor([[1], [1]]),
            valid=torch.ones(2, 1, dtype=torch.bool),
            weight=torch.ones(1),
            noise=None,
        )
        found = case.algorithm.build().loss(Networks(online, target), batch, {})
        losses.append(float(found.total.detach()))
    assert all(0 <= loss < 10 for loss in losses)


def test_the_target_entropy_counts_allowed_actions() -> None:
    algorithm = SACConfig().build()
    assert isinstance(algorithm, SAC)
    online, target = (built(ActorCriticConfig(hidden_sizes=(8,)), seed) for seed in (1, 2))
    for each in (online, target):
        each.variables = torch.nn.ParameterDict(algorithm.variables(each))
    batch = transitions()
    found = algorithm.loss(Networks(online, target), batch, {})
    probabilities = online.actor(batch.obs)[0].softmax(-1)
    assert (probabilities[0, 2:] == 0).all() and (probabilities[1, :3] == 0).all()
    entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1)
    wanted = sum(entropy.tolist()) - 0.98 * (math.log(2) + math.log(1) + math.log(4))
    assert float(found.metrics["loss/temperature"]) == pytest.approx(wanted, abs=1e-6)
    found.total.backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in online.parameters())


@pytest.mark.parametrize("recipe", [recipes.dqn_cartpole, sac])
def test_a_mask_of_another_size_is_refused(recipe: Callable[[], Experiment]) -> None:
    space = spaces.Dict(last=spaces.MultiBinary(4), action_mask=spaces.MultiBinary(3))
    with pytest.raises(SettingsError, match=r"action_mask has 3 entries, .* 4 discrete choices"):
        built(recipe().model, 1, space)


class Closing(Doors):
    """All doors close after some steps of each episode."""

    def __init__(self, after: int = 8) -> None:
        self.after = after

    def _observe(self) -> dict[str, np.ndarray]:
        obs = super()._observe()
        if self._time == self.after:
            self._open[:] = 0
            obs["action_mask"] = self._open.copy()
        return obs

    def step(self, action: int) -> Any:
        if not self._open.any():  # lockstep finds it after the rollout
            self._open[action] = 1
        return super().step(action)


@pytest.mark.parametrize("recipe", [recipes.ppo_cartpole, pqn])
@pytest.mark.parametrize("after", [0, 3])
def test_a_mask_that_forbids_all_actions_ends_the_run(
    recipe: Callable[[], Experiment], after: int, tmp_path: Path
) -> None:
    env = EnvConfig(f"{__file__}:Closing", 4, options={"after": after})
    settings = recipe().replace(env=env, total_steps=512, precision="fp32")
    place = "step 3 of its episode" if after else "at the start of an episode"
    with pytest.raises(SettingsError, match=rf"action_mask of environment 0 of .* allowed no action .*{place}.*Allow"):
        train(settings, options=options(tmp_path))


def test_a_part_of_an_action_needs_a_choice_too() -> None:
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (3,)), c=spaces.MultiDiscrete([3, 2]))
    assert choices_of(space) == (2, 3, 2) and choices_of(spaces.MultiBinary(2)) == (2, 2)
    shard = SimpleNamespace(rows=slice(0, 2), last=-1, length=np.array([4, 0]), shard=3, num_envs=2, offset=0)
    check = RolloutCheck(FiniteCheck("Own-v0"), 2, space)

    def played(*masks: list[int], valid: bool = True) -> Played:
        mask = np.ones((3, 2, 7), np.float32)
        mask[1] = masks
        still = np.zeros((2, 2), np.float32)
        return Played({"action_mask": mask}, still, still, np.array([[True, True], [True, valid]]), still > 0)

    fine, dead = [1, 0, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1, 0]
    check.rollout(played(fine, fine), [shard], 5)  # type: ignore[list-item]
    check.rollout(played(fine, dead, valid=False), [shard], 5)  # type: ignore[list-item]
    with pytest.raises(SettingsError, match=r"environment 7 of .*in step 1 of its episode.*step 11 of the run"):
        check.rollout(played(fine, dead), [shard], 5)  # type: ignore[list-item]
    with pytest.raises(SettingsError, match=r"environment 6 of .*in step 5 of its episode"):
        check.rollout(played(dead, fine), [shard], 5)  # type: ignore[list-item]


def test_the_last_observation_of_an_episode_may_forbid_all_actions(tmp_path: Path) -> None:
    learned = train(pqn().replace(env=EnvConfig(f"{__file__}:Closing", 4)), options=options(tmp_path))
    assert max(learned.metrics()["loss/value"]) < 1000, "nothing is bootstrapped from -1e9"
    model = built(QModelConfig(encoder="mlp", hidden_sizes=(8,)), 1)
    q = torch.tensor([1.0, 4.0, 2.0, 3.0]).expand(1, 2, 4).unsqueeze(-1)
    found = model.choices(q, {"action_mask": torch.tensor([[[0, 0, 0, 0], [1, 0, 1, 0]]])})
    assert found.tolist() == [[[1.0, 4.0, 2.0, 3.0], [1.0, FORBIDDEN, 2.0, FORBIDDEN]]]
