"""The recipes of Atari 100k against their page and their papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lockstep.models.encoders import ConvNet
from lockstep.models.q import NoisyLinear, QModel
from lockstep.recipes import RECIPES

NAMES = ("der-atari100k", "drq-atari100k", "spr-atari100k")


def test_the_table_of_the_page_shows_the_recipes_settings() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms" / "atari100k.md").read_text()
    lines = [line for line in text.partition("## Settings")[2].partition("**Sources")[0].splitlines() if "|" in line]
    rows = {row[0].strip("`"): row[1:] for row in ([c.strip() for c in line.strip("|").split("|")] for line in lines)}
    rows.pop("---")
    assert tuple(name.strip("`") for name in rows.pop("setting")) == NAMES
    for setting, shown in rows.items():
        for name, text in zip(NAMES, shown, strict=True):
            experiment = RECIPES[name]()
            found: Any = experiment if setting.startswith(("model", "precision")) else experiment.algorithm
            for part in ("optimizer.eps" if setting == "Adam's `eps" else setting).split("."):
                found = getattr(found, part)
            assert (found == float(text)) if isinstance(found, float) else (str(found) == text), (setting, name)


@pytest.mark.parametrize(("name", "warmup", "updates"), [(NAMES[0], 1600, 1), (NAMES[1], 1600, 1), (NAMES[2], 2000, 2)])
def test_updates_follow_every_step_of_one_environment_after_the_warmup(name: str, warmup: int, updates: int) -> None:
    experiment = RECIPES[name]()
    algorithm: Any = experiment.algorithm.build()
    steps = [algorithm.updates_in(iteration, experiment.samples_per_iteration) for iteration in range(100_000)]
    assert experiment.samples_per_iteration == 1 and experiment.iterations == 100_000
    assert set(steps[:warmup]) == {0} and set(steps[warmup:]) == {updates} and algorithm.config.batch_size == 32


def test_the_network_is_that_of_the_paper() -> None:
    experiment = RECIPES["der-atari100k"]()
    model = experiment.build_model(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6))
    assert isinstance(model, QModel)
    encoder: Any = model.trunk.encoder
    network = encoder.images[0]
    assert isinstance(network, ConvNet) and network.dense is None and network.out_features == 64 * 3 * 3
    image = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x = image / 255
    for convolution, channels in zip(network.convolutions, (32, 64), strict=True):
        layer: Any = convolution
        assert layer.weight.shape[0] == channels and layer.kernel_size == layer.stride == (5, 5)
        x = torch.conv2d(x, layer.weight, layer.bias, 5).relu()
    expected = x.permute(0, 2, 3, 1).flatten(1)
    assert torch.allclose(network(image, torch.float32), expected, atol=1e-5)
    noisy = [layer for layer in model.modules() if isinstance(layer, NoisyLinear)]
    assert [(layer.weight.shape[1], layer.weight.shape[0]) for layer in noisy] == [
        (576, 256), (256, 6 * 51), (576, 256), (256, 51),
    ]  # fmt: skip
    assert all(
        float(layer.weight_sigma.detach()[0, 0]) == pytest.approx(0.1 / layer.weight.shape[1] ** 0.5) for layer in noisy
    )
