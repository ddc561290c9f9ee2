"""PQN: its targets and its loss by hand, how it explores, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from linear_actor import LinearActor
from tiny import EXPERIMENTS, options

from lockstep import recipes, train
from lockstep.algorithms import Batch, PQNConfig
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.evaluation.scores import evaluate
from lockstep.models import QModelConfig
from lockstep.run.folder import RunFolder


def rollout(value: list[float], terminated: list[int], truncated: list[int]) -> Rollout:
    """Of one environment, with the highest value of each observation."""
    steps = len(terminated)
    return Rollout(
        obs=torch.zeros(steps + 1, 1, 3),
        start=torch.zeros(steps + 1, 1, dtype=torch.bool),
        action=torch.zeros(steps, 1, dtype=torch.int64),
        reward=torch.full((steps, 1), 1000.0),
        log_prob=torch.zeros(steps, 1),
        value=torch.tensor(value).unsqueeze(-1),
        terminated=torch.tensor(terminated, dtype=torch.bool).unsqueeze(-1),
        truncated=torch.tensor(truncated, dtype=torch.bool).unsqueeze(-1),
        valid=torch.ones(steps, 1, dtype=torch.bool),
        core_state=torch.zeros(1, 0),
        prev_action=None,
        prev_reward=None,
    )


def targets(config: PQNConfig, reward: list[float], of: Rollout, discount: float = 0.5) -> list[float]:
    given = torch.tensor(reward).unsqueeze(-1)
    return config.build().targets(of, given, {"discount": discount}).value_target[:, 0].tolist()


def test_targets_are_lambda_returns() -> None:
    """γ = 1/2 and λ = 1/2. Rewards are 1, 2 and 4, and the best values after them 8, 16 and 32.

    G_2 = 4 + 32/2 = 20, G_1 = 2 + (16/2 + G_2/2)/2 = 11, G_0 = 1 + (8/2 + G_1/2)/2 = 5.75. The first value, 99, is in
    none of them.
    """
    best = [99.0, 8.0, 16.0, 32.0]
    config = PQNConfig(return_lambda=0.5)
    assert targets(config, [1, 2, 4], rollout(best, [0, 0, 0], [0, 0, 0])) == [5.75, 11.0, 20.0]
    # After a termination nothing follows: G_1 = 2, G_0 = 1 + (8/2 + 2/2)/2 = 3.5.
    assert targets(config, [1, 2, 4], rollout(best, [0, 1, 0], [0, 0, 0])) == [3.5, 2.0, 20.0]
    # After a time limit the value of the last observation does: G_1 = 2 + 16/2 = 10, G_0 = 1 + (4 + 5)/2 = 5.5.
    assert targets(config, [1, 2, 4], rollout(best, [0, 0, 0], [0, 1, 0])) == [5.5, 10.0, 20.0]
    # λ = 0 bootstraps at once, λ = 1 at the end of the rollout.
    assert targets(PQNConfig(return_lambda=0), [1, 2, 4], rollout(best, [0] * 3, [0] * 3)) == [5.0, 10.0, 20.0]
    assert targets(PQNConfig(return_lambda=1), [1, 2, 4], rollout(best, [0] * 3, [0] * 3)) == [7.0, 12.0, 20.0]
    scaled = PQNConfig(return_lambda=0, reward_scale=0.25)
    assert targets(scaled, [1, 2, 4], rollout(best, [0, 0, 1], [0, 0, 0])) == [4.25, 8.5, 1.0]


def test_targets_are_those_of_the_recursion_of_the_paper() -> None:
    """An independent slow version, forwards: Σ_n (1 - λ) λ^(n-1) G^(n), and λ^(N-1) of the last n-step return."""
    torch.manual_seed(3)
    reward, best, discount, lambda_ = torch.randn(6), torch.randn(7), 0.9, 0.65
    found = targets(
        PQNConfig(return_lambda=lambda_), reward.tolist(), rollout(best.tolist(), [0] * 6, [0] * 6), discount
    )
    for t in range(6):
        n_step = [
            sum(discount**k * reward[t + k] for k in range(n)) + discount**n * best[t + n] for n in range(1, 7 - t)
        ]
        mixed = sum((1 - lambda_) * lambda_**n * each for n, each in enumerate(n_step[:-1]))
        assert found[t] == pytest.approx(float(mixed + lambda_ ** (len(n_step) - 1) * n_step[-1]), rel=1e-5)


def test_loss_by_hand() -> None:
    """Action values are the rows of a linear model; only those of the taken actions learn."""
    weight = torch.tensor([[1.0, 0, 0], [0, 2.0, 0], [0, 0, 3.0], [1, 1, 1], [9, 9, 9]], dtype=torch.float64)
    model = LinearActor(weight)
    never = torch.zeros(1, 3, dtype=torch.bool)
    batch = Batch(
        obs=torch.ones(1, 3, 3, dtype=torch.float64),
        start=never,
        prev_action=None,
        prev_reward=None,
        state=torch.zeros(3, 0),
        action=torch.tensor([[1, 3, 0]]),
        reward=torch.zeros(1, 3),
        log_prob=torch.zeros(1, 3),
        value=torch.zeros(1, 3),
        terminated=never,
        truncated=never,
        valid=torch.tensor([[True, True, False]]),
        advantage=None,
        value_target=torch.tensor([[5.0, 1.0, 100.0]]),
    )
    loss = PQNConfig().build().loss(model, batch, {"discount": 0.9})
    loss.total.backward()
    assert float(loss.total.detach()) == float(loss.metrics["loss/value"]) == 0.5 * ((2 - 5) ** 2 + (3 - 1) ** 2)
    assert float(loss.metrics["value/mean"]) == 2 + 3
    assert model.weight.grad is not None
    assert model.weight.grad[:, 0].tolist() == [0, -3, 0, 2, 0]


def test_epsilon_falls_linearly_and_is_the_same_everywhere() -> None:
    algorithm = PQNConfig(epsilon_start=1.0, epsilon_end=0.2, epsilon_fraction=0.4).build()
    for progress, epsilon in ((0.0, 1.0), (0.1, 0.8), (0.2, 0.6), (0.4, 0.2), (1.0, 0.2)):
        how = algorithm.exploration(progress, 0, range(4, 6), 8)
        assert not how.random and how.numbers.flatten().tolist() == pytest.approx([epsilon] * 2)
        assert algorithm.hyperparameters(progress)["epsilon"] == pytest.approx(epsilon)
    assert set(algorithm.hyperparameters(0)) == {"learning_rate", "discount", "epsilon"}


class Chosen(gymnasium.Env[Any, Any]):
    """Eight choices of two actions, all alike; the score counts those of action 1."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.zeros(1, np.float32), float(action), self.t == 8, False, {}


@pytest.mark.parametrize(("epsilon", "means"), [(0.0, [0, 8]), (1.0, [pytest.approx(4, abs=0.5)])])
def test_epsilon_is_the_share_of_random_actions(epsilon: float, means: list[Any], tmp_path: Path) -> None:
    changes = {"env.id": f"{__file__}:Chosen", "env.adapter": "gymnasium", "total_steps": 2048}
    exploring = {"algorithm.epsilon_start": epsilon, "algorithm.epsilon_end": epsilon}
    ran = train(recipes.pqn_cartpole().replace(**changes, **exploring), options=options(tmp_path / "run"))
    (line,) = RunFolder(ran.run).records()
    assert line["score/mean"] in means, "of 100 episodes"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm.return_lambda": 1.5}, "return_lambda=1.5"),
        ({"algorithm.reward_scale": 0.0}, "reward_scale=0"),
        ({"algorithm.epsilon_end": 2.0}, "epsilon_end=2"),
        ({"algorithm.entropy_coef": 0.01}, r"entropy_coef=0\.01.*epsilon-end"),
        ({"algorithm.value_coef": 0.5}, r"value_coef=0\.5.*learning-rate"),
        ({"algorithm.rnd.coef": 0.5}, r"rnd\.coef=0\.5.*ppo-rnd-minigrid"),
        ({"model.returns": "quantiles"}, r"returns=quantiles.*--model.returns expected"),
        ({"model.noisy": True}, r"noisy=True.*--model.no-noisy"),
        ({"algorithm.minibatches": 7}, "minibatches=7"),
        ({"model": recipes.ppo_cartpole().model}, "StandardModelConfig.*QModelConfig"),
        ({"env.id": "pettingzoo/talk:Talk", "env.policies": "separate"}, "env.policies"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        recipes.pqn_cartpole().replace(**changes).validate()


def test_it_warns_of_layers_without_normalization() -> None:
    kept, bare = recipes.pqn_cartpole(), recipes.pqn_cartpole().replace(**{"model.layer_norm": False})
    assert not list(kept.algorithm.warnings(kept.setup))
    assert any("--model.layer-norm" in each for each in bare.algorithm.warnings(bare.setup))


def test_the_residual_network_is_refused() -> None:
    config = QModelConfig(encoder="impala", layer_norm=True)
    with pytest.raises(SettingsError, match=r"impala.*--model\.no-layer-norm"):
        config.build(
            spaces.Box(0, 255, (3, 64, 64), np.uint8),
            spaces.Discrete(2),
            precision="fp32",
            normalize_observations=False,
            seed=1,
        )


def test_a_trained_policy_plays(tmp_path: Path) -> None:
    """After training, with one random action in a thousand, and the same episodes each time."""
    run = train(EXPERIMENTS["pqn-gru-lag-1"](), options=options(tmp_path / "run")).run
    first = evaluate(run, episodes=4)
    assert first.scores == evaluate(run, episodes=4).scores and all(score >= 8 for score in first.scores)
