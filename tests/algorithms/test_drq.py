"""Augmented images, and DrQ's loss against loops over images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep.algorithms.augmentation import augment, brightened, shifted
from lockstep.algorithms.drq import DrQConfig
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.kernels import images as kernels
from lockstep.models.base import Networks
from lockstep.models.q import QModel, QModelConfig
from lockstep.recipes import drq_atari100k

ITEMS, ACTIONS, SIZE = 3, 4, 25  # the smallest image of this encoder


def test_images_are_padded_with_their_border_and_cropped() -> None:
    image = torch.arange(9, dtype=torch.uint8).view(1, 1, 3, 3)
    # Of three rows and three columns that a crop may begin at, 0.1 is the first, 0.5 the middle and 0.9 the last one.
    draws = torch.tensor([[0.1, 0.1], [0.5, 0.5], [0.9, 0.5], [0.5, 0.9], [0.99999994, 0.0]])
    moved = shifted(image.repeat(5, 1, 1, 1), draws, 1).flatten(1).tolist()
    assert moved == [
        [0, 0, 1, 0, 0, 1, 3, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [3, 4, 5, 6, 7, 8, 6, 7, 8],
        [1, 2, 2, 4, 5, 5, 7, 8, 8],
        [3, 3, 4, 6, 6, 7, 6, 6, 7],
    ]


def test_shifts_beyond_the_border_show_only_the_border() -> None:
    image = torch.arange(6, dtype=torch.uint8).view(1, 1, 2, 3)
    # Of 11 columns that a crop may begin at, 0 is 5 columns to the left and 0.99 is 5 to the right. 0.2 and 0.75 are 3
    # to either side, which is the width of the image.
    draws = torch.tensor([[0.5, 0.0, 0.5], [0.5, 0.99, 0.5], [0.5, 0.2, 0.5], [0.0, 0.75, 0.5]])
    images, found = image.repeat(4, 1, 1, 1), np.zeros((4, 1, 2, 3), np.float32)
    kernels.augment(images.numpy(), draws.numpy(), 5, np.float32(0), found)
    expected = [[0, 0, 0, 3, 3, 3], [2, 2, 2, 5, 5, 5], [0, 0, 0, 3, 3, 3], [2, 2, 2, 2, 2, 2]]
    assert found.reshape(4, 6).tolist() == expected
    assert shifted(images, draws[:, :2], 5).flatten(1).tolist() == expected


def test_brightness_changes_by_a_clipped_normal_factor() -> None:
    image = torch.tensor([0, 100, 240], dtype=torch.uint8).view(1, 1, 1, 3).repeat(4, 1, 1, 1)
    # Normal quantiles 0, 1, far above 2 and far below -2: factors 1, 1.05, 1.1 and 0.9.
    draws = torch.tensor([0.5, 0.8413447, 0.9999, 0.0])
    found = brightened(image, draws, 0.05).flatten(1).tolist()
    assert found == [[0, 100, 240], [0, 105, 252], [0, 110, 255], [0, 90, 216]]


def test_copies_differ_and_vectors_are_repeated() -> None:
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (1, ITEMS, 2, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    vector = torch.randn(1, ITEMS, 2, generator=generator)
    draws = torch.rand(2, ITEMS, 3, generator=generator)
    out = augment({"image": image, "vector": vector}, draws, 4, 0.05)
    assert torch.equal(out["vector"], torch.cat([vector, vector], 1))
    copies = out["image"].view(2, ITEMS, 2, SIZE, SIZE)
    assert not torch.equal(copies[0], copies[1])
    assert torch.equal(augment(image, draws, 0, 0.0), torch.cat([image, image], 1)), "0 must switch it off"
    with pytest.raises(SettingsError, match=r"algorithm=drq .*Box\(-1\.0, 1\.0, \(4,\)"):
        DrQConfig().build().check(spaces.Box(-1.0, 1.0, (4,)))


def slow_augment(image: np.ndarray, draws: Tensor, pad: int, intensity: float) -> np.ndarray:
    """[C, H, W] by numpy's padding and a crop."""
    y, x = (int(float(number) * (2 * pad + 1)) for number in draws[:2])
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="edge")
    cropped = padded[:, y : y + image.shape[1], x : x + image.shape[2]].astype(np.float64)
    normal = math.sqrt(2) * float(torch.erfinv(2 * draws[2].double() - 1))
    return np.clip(np.rint(cropped * (1 + intensity * max(-2.0, min(2.0, normal)))), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(("double", "noisy"), [(True, False), (False, True)])
def test_the_loss_is_what_loops_give(double: bool, noisy: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    config = DrQConfig(double=double, copies=2, target_copies=3, pad=2, intensity=0.1, target_period=2)
    model = QModelConfig(encoder="der", dueling=True, noisy=noisy)
    space = spaces.Box(0, 255, (2, SIZE, SIZE), np.uint8)
    online, target = (
        model.build(space, spaces.Discrete(ACTIONS), precision="fp32", normalize_observations=False, seed=seed)
        for seed in (1, 2)
    )
    algorithm = config.build()
    images = torch.randint(0, 256, (2, 1, ITEMS, 2, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    noise = torch.rand(algorithm.noise_numbers(online, ITEMS), generator=generator)
    batch = Transitions(
        obs=images[0],
        action=torch.tensor([[0, 3, 2]]),
        reward=torch.tensor([[0.5, -1.0, 2.0]]),
        discount=torch.tensor([[0.9, 0.0, 0.81]]),
        next_obs=images[1],
        weight=torch.tensor([1.0, 0.5, 2.0]),
        valid=torch.ones(1, ITEMS, dtype=torch.bool),
        noise=noise,
    )
    out = algorithm.loss(Networks(online, target), batch, {})

    def values(network: QModel, image: np.ndarray) -> np.ndarray:
        start, state = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 0)
        with torch.no_grad():
            return network(torch.from_numpy(image)[None, None], start, state)[0].policy[0, 0].numpy()

    draws = noise[2 * online.noise_numbers :].view(5, ITEMS, 3)
    assert (online.noise_numbers > 0) == noisy
    total, away = 0.0, []
    for i in range(ITEMS):
        now, then = images[0, 0, i].numpy(), images[1, 0, i].numpy()
        followed = []
        for k in range(3):
            image = slow_augment(then, draws[2 + k, i], 2, 0.1)
            chosen = int(values(online if double else target, image).argmax())
            followed.append(values(target, image)[chosen])
        wanted = float(batch.reward[0, i]) + float(batch.discount[0, i]) * sum(followed) / 3
        action = int(batch.action[0, i])
        errors = [wanted - values(online, slow_augment(now, draws[m, i], 2, 0.1))[action] for m in range(2)]
        total += float(batch.weight[i]) * sum(huber(error) for error in errors) / 2
        away.append(abs(sum(errors) / 2))
    assert float(out.total.detach()) == pytest.approx(total, rel=1e-4)
    assert out.priorities is not None and out.priorities.tolist() == pytest.approx(away, rel=1e-4, abs=1e-5)


def huber(error: float) -> float:
    return 0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5


@pytest.mark.parametrize(
    "change", [{"algorithm.pad": -1}, {"algorithm.target_copies": 0}, {"model.returns": "categorical"}]
)
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(change))):
        drq_atari100k().replace(**change).validate()
