"""The losses of distributions of returns against loops over their numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tiny import EXPERIMENTS, options
from torch import Tensor

from lockstep import train
from lockstep.algorithms.dqn import DQN, DQNConfig, distribution_of, project, quantile_huber
from lockstep.core.transitions import Transitions
from lockstep.models.base import Networks
from lockstep.models.q import ImplicitQHead, NoisyLinear, QModel, QModelConfig
from lockstep.recipes import RECIPES

ITEMS, ACTIONS = 5, 3


def transitions(noise_numbers: int = 0) -> Transitions:
    return Transitions(
        obs=torch.randn(1, ITEMS, 2),
        action=torch.randint(0, ACTIONS, (1, ITEMS)),
        reward=torch.randn(1, ITEMS),
        discount=torch.tensor([[0.9, 0.0, 0.9, 0.9, 0.81]]),
        next_obs=torch.randn(1, ITEMS, 2),
        weight=torch.rand(ITEMS),
        valid=torch.ones(1, ITEMS, dtype=torch.bool),
        noise=torch.rand(noise_numbers) if noise_numbers else None,
    )


def slow_huber(error: float, delta: float = 1.0) -> float:
    return 0.5 * error**2 if abs(error) <= delta else delta * (abs(error) - 0.5 * delta)


def slow_projection(probability: list[float], values: list[float], atoms: int) -> np.ndarray:
    """Onto atoms from -2 to 2, by the paper's algorithm 1."""
    wanted = np.zeros(atoms)
    for p, value in zip(probability, values, strict=True):
        place = (min(max(value, -2.0), 2.0) + 2.0) * (atoms - 1) / 4
        low, high = math.floor(place), math.ceil(place)
        if low == high:
            wanted[low] += p
        else:
            wanted[low] += p * (high - place)
            wanted[high] += p * (place - low)
    return wanted


def slow_quantile_huber(quantiles: list[float], wanted: list[float], fractions: list[float]) -> float:
    total = 0.0
    for tau, quantile in zip(fractions, quantiles, strict=True):
        for sample in wanted:
            error = sample - quantile
            total += abs(tau - (1.0 if error < 0 else 0.0)) * slow_huber(error) / len(wanted)
    return total


def test_quantile_huber_by_hand() -> None:
    # Errors 2 and -0.5: 0.25 * 1.5 + 0.75 * 0.125, over two samples.
    loss = quantile_huber(torch.tensor([0.0]), torch.tensor([2.0, -0.5]), torch.tensor([0.25]))
    assert float(loss) == pytest.approx((0.25 * 1.5 + 0.75 * 0.125) / 2)


@pytest.mark.parametrize(("count", "samples", "drawn"), [(7, 7, False), (4, 9, True), (1, 3, True)])
def test_quantile_huber_is_what_loops_give(count: int, samples: int, drawn: bool) -> None:
    torch.manual_seed(1)
    quantiles, wanted = 2 * torch.randn(ITEMS, count), 2 * torch.randn(ITEMS, samples)
    midpoints = [(k + 0.5) / count for k in range(count)]
    tau = torch.rand(ITEMS, count) if drawn else None
    fractions = tau.tolist() if tau is not None else [midpoints] * ITEMS
    losses = [
        slow_quantile_huber(q, w, f) for q, w, f in zip(quantiles.tolist(), wanted.tolist(), fractions, strict=True)
    ]
    assert quantile_huber(quantiles, wanted, tau).tolist() == pytest.approx(losses, rel=1e-5)


def test_projection_is_what_the_paper_s_algorithm_gives() -> None:
    torch.manual_seed(2)
    atoms = torch.linspace(-2, 2, 9)
    probability, values = torch.rand(ITEMS, 9).softmax(-1), 3 * torch.randn(ITEMS, 9)
    wanted = [slow_projection(p, v, 9) for p, v in zip(probability.tolist(), values.tolist(), strict=True)]
    assert np.allclose(project(probability, values, atoms).numpy(), wanted, atol=1e-5)


def implicit(seed: int, *, noisy: bool = False) -> QModel:
    config = QModelConfig(
        encoder="mlp", hidden_sizes=(8,), returns="implicit", numbers=6, cosines=5, stream_size=7, noisy=noisy
    )
    space = spaces.Box(-1, 1, (2,), np.float32)
    return config.build(space, spaces.Discrete(ACTIONS), precision="fp32", normalize_observations=False, seed=seed)


def features_of(model: QModel, obs: Tensor) -> Tensor:
    return model.features(obs, torch.ones(obs.shape[:2], dtype=torch.bool), torch.zeros(obs.shape[1], 0))[0]


def slow_quantile(model: QModel, features: Tensor, tau: float) -> Tensor:
    """Features [F] -> the quantile of every action's return [A], by the paper's section 3.1."""
    head = model.head
    assert isinstance(head, ImplicitQHead)
    cosines = torch.tensor([math.cos(math.pi * i * tau) for i in range(5)])
    embedded = (head.embedding.weight @ cosines + head.embedding.bias).clamp(min=0)
    return head.head((features * embedded)[None, None])[0, 0, :, 0]


def test_quantiles_at_drawn_fractions_are_the_papers() -> None:
    model, obs = implicit(1), torch.randn(1, ITEMS, 2)
    features, tau = features_of(model, obs), torch.rand(1, ITEMS, 4)
    numbers = model.head(features, tau)
    assert numbers.shape == (1, ITEMS, ACTIONS, 4)
    for i in range(ITEMS):
        for k in range(4):
            wanted = slow_quantile(model, features[0, i], float(tau[0, i, k]))
            assert torch.allclose(numbers[0, i, :, k], wanted, atol=1e-6)


def test_acting_takes_the_mean_of_fixed_midpoints() -> None:
    model, obs = implicit(1), torch.randn(1, ITEMS, 2)
    features = features_of(model, obs)
    out, _ = model(obs, torch.ones(1, ITEMS, dtype=torch.bool), torch.zeros(ITEMS, 0))
    for i in range(ITEMS):
        each = [slow_quantile(model, features[0, i], (k + 0.5) / 6) for k in range(6)]
        assert torch.allclose(out.policy[0, i], torch.stack(each).mean(0), atol=1e-6)


@pytest.mark.parametrize("double", [True, False])
def test_implicit_loss_is_what_loops_give(double: bool) -> None:
    torch.manual_seed(4)
    algorithm = DQN(DQNConfig(double=double, target_period=2, samples=3, target_samples=4))
    online, target = implicit(1), implicit(2)
    numbers = algorithm.noise_numbers(online, ITEMS)
    assert numbers == ITEMS * (3 + 4)
    batch = transitions(numbers)
    out = algorithm.loss(Networks(online, target), batch, {})
    assert batch.noise is not None
    tau, target_tau = batch.noise[: ITEMS * 3].view(ITEMS, 3), batch.noise[ITEMS * 3 :].view(ITEMS, 4)
    now, then = features_of(online, batch.obs)[0], features_of(target, batch.next_obs)[0]
    chooser = online if double else target
    choosing = features_of(chooser, batch.next_obs)[0]
    total, priorities = 0.0, []
    for i in range(ITEMS):
        mean = torch.stack([slow_quantile(chooser, choosing[i], (k + 0.5) / 6) for k in range(6)]).mean(0)
        best, action = int(mean.argmax()), int(batch.action[0, i])
        reward, discount = float(batch.reward[0, i]), float(batch.discount[0, i])
        wanted = [
            reward + discount * float(slow_quantile(target, then[i], t)[best].detach()) for t in target_tau[i].tolist()
        ]
        quantiles = [float(slow_quantile(online, now[i], t)[action].detach()) for t in tau[i].tolist()]
        total += float(batch.weight[i]) * slow_quantile_huber(quantiles, wanted, tau[i].tolist())
        priorities.append(abs(float(np.mean(wanted)) - float(np.mean(quantiles))))
    assert float(out.total.detach()) == pytest.approx(total, rel=1e-4)
    assert out.priorities is not None
    assert out.priorities.tolist() == pytest.approx(priorities, rel=1e-3, abs=1e-5)
    out.total.backward()
    assert all(parameter.grad is not None for parameter in online.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_noisy_layers_and_fractions_share_a_slices_noise() -> None:
    algorithm, online, target = (
        DQN(DQNConfig(samples=2, target_samples=3)),
        implicit(1, noisy=True),
        implicit(2, noisy=True),
    )
    numbers = algorithm.noise_numbers(online, ITEMS)
    assert numbers == 2 * online.noise_numbers + ITEMS * 5
    batch = Transitions(
        obs=torch.randn(1, ITEMS, 2),
        action=torch.zeros(1, ITEMS, dtype=torch.int64),
        reward=torch.zeros(1, ITEMS),
        discount=torch.ones(1, ITEMS),
        next_obs=torch.randn(1, ITEMS, 2),
        weight=torch.ones(ITEMS),
        valid=torch.ones(1, ITEMS, dtype=torch.bool),
        noise=torch.rand(numbers),
    )
    losses = []
    for changed in (0, online.noise_numbers, 2 * online.noise_numbers, numbers - 1):
        assert batch.noise is not None
        noise = batch.noise.clone()
        noise[changed] = 1 - noise[changed]
        losses.append(float(algorithm.loss(Networks(online, target), batch.replace(noise=noise), {}).total.detach()))
    assert len(set(losses)) == 4, "every part of the noise is used, each for something else"


@pytest.mark.parametrize(("rows", "into", "out"), [(3, 4, 5), (40, 160, 128)])
def test_a_noisy_layer_is_a_linear_one_with_disturbed_weights(rows: int, into: int, out: int) -> None:
    torch.manual_seed(0)
    layer, x, noise = NoisyLinear(into, out), torch.randn(2, rows, into, requires_grad=True), torch.randn(into + out)
    layer.disturb(noise)
    y, back = layer(x), torch.randn(2, rows, out)
    found = [y, *torch.autograd.grad(y, [x, *layer.parameters()], back)]
    exact = layer.double()
    exact_x, (of_input, of_output) = x.detach().double().requires_grad_(), noise.double().split((into, out))
    weight = exact.weight + exact.weight_sigma * of_output.outer(of_input)
    expected = exact_x @ weight.T + exact.bias + exact.bias_sigma * of_output
    wanted = [expected, *torch.autograd.grad(expected, [exact_x, *exact.parameters()], back.double())]
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).detach().abs().max() / b.detach().abs().max()) < 1e-5


def test_the_table_for_atari_shows_the_recipes_settings() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms" / "dqn.md").read_text(encoding="utf-8")
    lines = text.partition("## Recipes for Atari")[2].partition("## ")[0].splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    names = rows[0][1:]
    assert names == ["dqn-atari", "c51-atari", "qrdqn-atari", "iqn-atari", "rainbow-atari"]
    for label, *shown in rows[3:]:
        for name, text in zip(names, shown, strict=True):
            experiment = RECIPES[name]()
            where: Any = {"Adam's `eps": experiment.algorithm.optimizer, "model.numbers": experiment.model}
            value = getattr(where.get(label, experiment.algorithm), label.rpartition("`")[2].rpartition(".")[2])
            if text or label != "model.numbers":
                assert float(text) == pytest.approx(value), f"{label} of {name}"


def test_noisy_layers_are_disturbed_anew_at_every_step_of_acting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed: list[Tensor] = []
    set_noise = QModel.set_noise

    def spy(self: QModel, uniform: Tensor | None) -> None:
        if uniform is not None:
            disturbed.append(uniform.clone())
        set_noise(self, uniform)

    monkeypatch.setattr(QModel, "set_noise", spy)
    experiment = EXPERIMENTS["rainbow-lag-1"]()
    train(
        experiment, options=options(tmp_path / "run"), stop_after=1
    )  # an iteration of the warm-up, which only collects
    assert len(disturbed) == experiment.algorithm.rollout
    assert len({noise.numpy().tobytes() for noise in disturbed}) == len(disturbed)


@pytest.mark.slow
def test_importance_weights_only_shrink_the_loss_that_is_shown(tmp_path: Path) -> None:
    """Huber's loss of an error is below the error's size, and each weight is at most the minibatch's largest."""
    train(EXPERIMENTS["dqn-prioritized-frames"](), options=options(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    learned = [line for line in lines if "loss/value" in line]
    assert learned and all(0 < line["loss/value"] <= line["value/error"] for line in learned)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(
    ("returns", "delta"),
    [("expected", 1.0), ("expected", 0.3), ("expected", 1e9), ("categorical", 1.0), ("quantiles", 1.0)],
)
def test_losses_of_all_returns_are_what_loops_give(returns: Any, delta: float, double: bool) -> None:
    torch.manual_seed(5)
    config = QModelConfig(encoder="mlp", hidden_sizes=(8,), returns=returns, numbers=5, v_min=-2.0, v_max=2.0)
    space = spaces.Box(-1, 1, (2,), np.float32)
    online, target = (
        config.build(space, spaces.Discrete(ACTIONS), precision="fp32", normalize_observations=False, seed=s)
        for s in (1, 2)
    )
    batch = transitions()
    out = DQN(DQNConfig(double=double, target_period=2, huber_delta=delta)).loss(Networks(online, target), batch, {})
    now, then = distribution_of(online, batch.obs)[0].detach(), distribution_of(target, batch.next_obs)[0].detach()
    choosing = distribution_of(online, batch.next_obs)[0].detach() if double else then
    total, priorities = 0.0, []
    for i in range(ITEMS):
        best, action = int(online.expected(choosing[i]).argmax()), int(batch.action[0, i])
        mine, after = now[i, action].double().numpy(), then[i, best].double().numpy()
        reward, discount = float(batch.reward[0, i]), float(batch.discount[0, i])
        if returns == "categorical":
            moved = reward + discount * np.linspace(-2, 2, 5)
            wanted = slow_projection((np.exp(after) / np.exp(after).sum()).tolist(), moved.tolist(), 5)
            log_q = mine - np.log(np.exp(mine).sum())
            error = sum(w * (math.log(w) - lq) for w, lq in zip(wanted, log_q, strict=True) if w > 0)
            priorities.append(-sum(w * lq for w, lq in zip(wanted, log_q, strict=True)))
        elif returns == "quantiles":
            moved = reward + discount * after
            error = slow_quantile_huber(mine.tolist(), moved.tolist(), [(k + 0.5) / 5 for k in range(5)])
            priorities.append(abs(moved.mean() - mine.mean()))
        else:
            away = reward + discount * after[0] - mine[0]
            error = slow_huber(away, delta)
            priorities.append(abs(away))
        total += float(batch.weight[i]) * error
    assert float(out.total.detach()) == pytest.approx(total, rel=1e-4)
    assert out.priorities is not None and out.priorities.tolist() == pytest.approx(priorities, rel=1e-3, abs=1e-5)


def test_epsilon_falls_linearly_and_the_warm_up_is_random() -> None:
    algorithm = DQNConfig(epsilon_start=1.0, epsilon_end=0.2, epsilon_fraction=0.5, warmup=100).build()
    found = [algorithm.hyperparameters(progress)["epsilon"] for progress in (0.0, 0.25, 0.5, 0.9)]
    assert found == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert algorithm.exploration(0.0, 99, range(2), 4).random
    how = algorithm.exploration(0.25, 100, range(2), 4)
    assert not how.random and how.numbers[:, 0].tolist() == pytest.approx([0.6, 0.6])
