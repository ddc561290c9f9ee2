"""SPR's loss against loops over items and steps, and its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from lockstep.algorithms import DQNConfig, SPRConfig
from lockstep.algorithms.augmentation import NUMBERS, brightened, shifted
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Future, Transitions
from lockstep.models import QModelConfig
from lockstep.models.base import Networks
from lockstep.models.encoders import Trunk
from lockstep.models.q import NoisyLinear
from lockstep.models.spr import SPRModel, SPRModelConfig, TransitionModel, scaled
from lockstep.recipes import spr_atari100k

ITEMS, ACTIONS, STEPS, SIDE = 4, 3, 3, 45
SPACE = spaces.Box(0, 255, (2, SIDE, SIDE), np.uint8)


def model_of(seed: int, **settings: Any) -> SPRModel:
    config = SPRModelConfig(**{"encoder": "der", "stream_size": 8, "numbers": 5, **settings})
    model = config.build(SPACE, spaces.Discrete(ACTIONS), precision="fp32", normalize_observations=False, seed=seed)
    assert isinstance(model, SPRModel)
    return model


def minibatch(algorithm: Any, model: SPRModel) -> Transitions:
    generator = torch.Generator().manual_seed(3)

    def images(steps: int) -> Tensor:
        return torch.randint(0, 256, (steps, ITEMS, 2, SIDE, SIDE), dtype=torch.uint8, generator=generator)

    return Transitions(
        obs=images(1),
        action=torch.tensor([[0, 2, 1, 2]]),
        reward=torch.tensor([[0.5, -1.0, 2.0, 0.0]]),
        discount=torch.tensor([[0.9, 0.0, 0.81, 0.9]]),
        next_obs=images(1),
        weight=torch.tensor([1.0, 0.5, 2.0, 0.25]),
        valid=torch.ones(1, ITEMS, dtype=torch.bool),
        noise=torch.rand(algorithm.noise_numbers(model, ITEMS), generator=generator),
        future=Future(
            obs=images(STEPS),
            action=torch.randint(0, ACTIONS, (STEPS, ITEMS), generator=generator),
            valid=torch.tensor([[True] * 4, [True, False, True, True], [True, False, False, True]]),
        ),
    )


def slow_features(model: SPRModel, image: Tensor) -> Tensor:
    """uint8 [C, H, W] -> [c, h, w]: two convolutions, scaled."""
    encoder: Any = model.trunk.encoder
    x = image.unsqueeze(0) / 255
    for layer in encoder.images[0].convolutions:
        x = F.conv2d(x, layer.weight, layer.bias, layer.stride).relu()
    return (x[0] - x.min()) / (x.max() - x.min() + 1e-5)


def slow_projection(model: SPRModel, features: Tensor) -> Tensor:
    """[c, h, w] -> [P], by the average weights of the streams' first layers: the value's, then the advantage's."""
    row = features.permute(1, 2, 0).flatten()
    firsts: list[Any] = [model.head.value[0], model.head.advantage[0]]  # type: ignore[index, union-attr]
    return torch.cat([layer.weight @ row + layer.bias for layer in firsts])


def slow_step(model: SPRModel, features: Tensor, action: int) -> Tensor:
    """[c, h, w] -> [c, h, w]"""
    channels, height, width = features.shape
    planes = torch.zeros(ACTIONS, height, width)
    planes[action] = 1
    hidden, out = model.transition.hidden, model.transition.out
    x = F.conv2d(torch.cat([features, planes])[None], hidden.weight, hidden.bias, padding=1).relu()
    x = F.conv2d(x, out.weight, out.bias, padding=1).relu()[0]
    assert x.shape == (channels, height, width)
    return (x - x.min()) / (x.max() - x.min() + 1e-5)


def slow_augment(image: Tensor, draws: Tensor) -> Tensor:
    return brightened(shifted(image[None], draws[None, :2], 2), draws[None, 2], 0.1)[0]


@pytest.mark.parametrize("dueling", [True, False])
def test_the_loss_is_dqns_and_what_loops_give(dueling: bool) -> None:
    config = SPRConfig(predicted_steps=STEPS, n_step=STEPS, pad=2, intensity=0.1, prediction_coef=3.0, target_period=2)
    algorithm, settings = config.build(), {"dueling": dueling}
    online, target = model_of(1, **settings), model_of(2, **settings)
    batch = minibatch(algorithm, online)
    assert batch.noise is not None and batch.future is not None and online.noise_numbers > 0
    out = algorithm.loss(Networks(online, target), batch, {})

    draws = batch.noise[2 * online.noise_numbers :].view(2 + STEPS, ITEMS, NUMBERS)
    images = torch.cat([batch.obs, batch.next_obs, batch.future.obs])
    augmented = torch.stack(
        [torch.stack([slow_augment(images[k, i], draws[k, i]) for i in range(ITEMS)]) for k in range(2 + STEPS)]
    )
    predicted = 0.0
    for i in range(ITEMS):
        features, distances = slow_features(online, augmented[0, i]), []
        for k in range(STEPS):
            features = slow_step(online, features, int(batch.future.action[k, i]))
            projection = slow_projection(online, features) if dueling else single(online, features)
            followed = slow_features(target, augmented[2 + k, i])
            wanted = slow_projection(target, followed) if dueling else single(target, followed)
            guess = online.predictor.weight @ projection + online.predictor.bias
            cosine = float(F.cosine_similarity(guess, wanted, dim=0).detach())
            distances.append((2 - 2 * cosine) * bool(batch.future.valid[k, i]))
        predicted += float(batch.weight[i]) * sum(distances) / STEPS

    plain = DQNConfig(double=True, n_step=STEPS, target_period=2).build()
    changed = batch.replace(obs=augmented[:1], next_obs=augmented[1:2], future=None)
    of_values = plain.loss(Networks(online, target), changed, {})
    assert float(out.metrics["loss/prediction"]) == pytest.approx(predicted, rel=1e-3)
    assert predicted > 0.01
    expected = float(of_values.total.detach()) + 3.0 * predicted
    assert float(out.total.detach()) == pytest.approx(expected, rel=1e-4)
    assert out.priorities is not None and of_values.priorities is not None
    assert torch.equal(out.priorities, of_values.priorities)
    assert {*out.metrics} == {*algorithm.metric_names}


def single(model: SPRModel, features: Tensor) -> Tensor:
    layer: Any = model.head.advantage[0]  # type: ignore[index]
    return layer.weight @ features.permute(1, 2, 0).flatten() + layer.bias


def test_features_of_a_copied_target_are_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = SPRConfig(predicted_steps=STEPS, n_step=STEPS).build()
    online, target = model_of(1), model_of(1)
    batch, seen = minibatch(algorithm, online), []
    monkeypatch.setattr(online.trunk, "forward", lambda *args: seen.append(1) or Trunk.forward(online.trunk, *args))
    once = algorithm.loss(Networks(online, target), batch, {})
    assert len(seen) == 1
    online.noisy_trunk = True
    twice = algorithm.loss(Networks(online, target), batch, {})
    assert len(seen) == 3
    assert torch.equal(once.total, twice.total) and algorithm.config.compares(online)


def test_no_gradient_flows_into_what_is_predicted() -> None:
    algorithm = SPRConfig(predicted_steps=STEPS, n_step=STEPS).build()
    online, target = model_of(1), model_of(2)
    algorithm.loss(Networks(online, target), minibatch(algorithm, online), {}).total.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    found = {name for name, parameter in online.named_parameters() if parameter.grad is not None}
    assert found == {name for name, _ in online.named_parameters()}


def test_predictions_change_the_encoder_and_the_streams_but_noise_does_not_change_predictions() -> None:
    model = model_of(1)
    obs = minibatch(SPRConfig(predicted_steps=STEPS, n_step=STEPS).build(), model).obs
    start, state, action = torch.ones(1, ITEMS, dtype=torch.bool), torch.zeros(ITEMS, 0), torch.zeros(2, ITEMS).long()
    model.set_noise(None)
    features, _ = model.features(obs, start, state)
    quiet = model.predict(features[0], action)
    model.set_noise(torch.rand(model.noise_numbers))
    assert torch.equal(model.predict(features[0], action), quiet)
    quiet.square().sum().backward()
    changed = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert "trunk.encoder.images.0.convolutions.0.weight" in changed
    assert {"head.value.0.weight", "head.advantage.0.weight", "predictor.weight", "transition.out.weight"} <= changed
    assert not {"head.value.2.weight", "head.value.0.weight_sigma"} & changed


def test_features_are_scaled_to_0_and_1() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0]])
    assert torch.allclose(scaled(x), torch.tensor([[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]]), atol=1e-4)
    assert scaled(x.bfloat16()).dtype == torch.bfloat16


def test_the_network_is_that_of_the_paper() -> None:
    model = spr_atari100k().build_model(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6))
    assert isinstance(model, SPRModel) and model.transition.places == (64, 7, 7)
    noisy = [layer for layer in model.modules() if isinstance(layer, NoisyLinear)]
    assert [(layer.weight.shape[1], layer.weight.shape[0]) for layer in noisy] == [
        (3136, 256), (256, 6 * 51), (3136, 256), (256, 51),
    ]  # fmt: skip
    assert model.predictor.weight.shape == (512, 512)
    shapes = [tuple(layer.weight.shape) for layer in (model.transition.hidden, model.transition.out)]
    assert shapes == [(64, 64 + 6, 3, 3), (64, 64, 3, 3)]


def test_a_transition_sees_the_action_at_every_place() -> None:
    transition = TransitionModel((2, 4, 4), 3)
    features = torch.rand(1, 32)
    with torch.no_grad():
        for parameter in transition.parameters():
            parameter.zero_()
        transition.hidden.weight[0, 2 + 1] = 1.0  # counts the places around each place where action 1 is 1
        transition.out.weight[:, 0, 1, 1] = 1.0
        away, taken = (transition(features, torch.tensor([action])).view(4, 4, 2) for action in (0, 1))
    assert not away.any()
    counts = torch.tensor([[4, 6, 6, 4], [6, 9, 9, 6], [6, 9, 9, 6], [4, 6, 6, 4]])
    assert torch.allclose(taken[..., 0], (counts - 4) / 5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm.predicted_steps": 0}, "algorithm.predicted_steps=0 must be between 1 and algorithm.n_step=10"),
        ({"algorithm.predicted_steps": 11}, "algorithm.predicted_steps=11 must be between"),
        ({"algorithm.prediction_coef": -1.0}, "algorithm.prediction_coef=-1.0 must be at least 0"),
        ({"model": QModelConfig()}, "needs a model that predicts its features, but the model is QModelConfig"),
        ({"model.stream_size": 0}, "model.stream_size=0 leaves out the streams' hidden layers"),
        ({"model.returns": "implicit"}, "model.returns=implicit"),
        ({"model.previous_action_reward": True}, "neither a core nor the previous action"),
        ({"model.dense_size": 0}, "must end with a convolution"),
        ({"model.encoder": "impala", "model.dense_size": 0}, "model.encoder=impala"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    experiment = spr_atari100k().replace(**change)
    with pytest.raises(SettingsError, match=message):
        experiment.validate()
        experiment.build_model(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6))


def test_replay_must_have_the_next_steps() -> None:
    class Long(SPRConfig):
        future_steps = 12  # type: ignore[assignment]

    experiment = spr_atari100k()
    with pytest.raises(SettingsError, match=r"12 next steps .* algorithm.n_step=10 .*--algorithm.n-step 12"):
        experiment.replace(algorithm=Long(warmup=2_000)).validate()
    with pytest.raises(SettingsError, match=r"--algorithm.replay.hindsight 0"):
        experiment.replace(**{"algorithm.replay.hindsight": 4}).validate()


def test_vectors_beside_the_image_are_refused() -> None:
    both = spaces.Dict({"image": SPACE, "speed": spaces.Box(-1.0, 1.0, (2,))})
    with pytest.raises(SettingsError, match="observations must be one image"):
        spr_atari100k().replace(**{"model.encoder": "der"}).build_model(both, spaces.Discrete(2))
