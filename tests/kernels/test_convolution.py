"""Convolutions have the bits of torch's replaced operations, whether most cells of an image are 0 or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.kernels.cells import FRACTIONS, MANY, list_cells
from lockstep.kernels.convolution import convolve, convolve_back
from lockstep.portable.matrices import convolution, convolution_backward

N, CHANNELS, HEIGHT, WIDTH = 5, 3, 7, 6
PLAIN = [1, 1], [0, 0], [1, 1]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def images(kind: str) -> Tensor:
    x = torch.zeros(N, CHANNELS, HEIGHT, WIDTH)
    filled = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    if kind == "dense":
        return (filled * 5).floor()
    if kind == "mixed":  # each image has its own way
        x[0] = images("dense")[0]
        x[1, 0, 3, 2] = 0.25
        x[2, :, ::3, 5] = 7
        x[3, 2, 6, 5] = -1
        return x
    return torch.where(filled < 0.1, 1.0, 0.0) if kind == "sparse" else x


def assert_same_bits(found: np.ndarray, expected: Tensor) -> None:
    assert np.array_equal(found.view(np.int32), expected.contiguous().numpy().view(np.int32))


def check(x: Tensor, weight: Tensor, bias: Tensor, by_y: Tensor, *, rectify: bool = True) -> None:
    """Compare outputs, and gradients that are written and then added to."""
    m, kernel = len(weight), weight.shape[2]
    expected = convolution(x, weight, bias, *PLAIN, False, [0, 0], 1)
    _, by_weight, by_bias = convolution_backward(by_y, x, weight, [m], *PLAIN, False, [0, 0], 1, [False, True, False])
    shape = np.array([kernel, 1, CHANNELS, HEIGHT, WIDTH, 1, 1])
    y = np.empty((N, by_y[0].numel()), np.float32)
    convolve(x.flatten(1).numpy(), shape, weight.data_ptr(), bias.data_ptr(), rectify, y)
    expected = expected.relu() + 0 if rectify else expected
    assert_same_bits(y, expected.permute(0, 2, 3, 1).flatten(1))
    given = by_y.permute(0, 2, 3, 1).flatten(1).contiguous().numpy()
    of_weight, of_bias = torch.full_like(weight, 3), torch.full_like(bias, 3)
    places = of_weight.data_ptr(), of_bias.data_ptr()
    convolve_back(x.flatten(1).numpy(), shape, given, True, *places)
    assert by_weight is not None and by_bias is None
    assert_same_bits(of_weight.numpy(), by_weight)
    total = torch.zeros(m)
    for row in torch.from_numpy(given).view(-1, m):
        total += row
    assert_same_bits(of_bias.numpy(), total)
    for part in range(N):
        convolve_back(x[part : part + 1].flatten(1).numpy(), shape, given[part : part + 1], part == 0, *places)
    assert_same_bits(of_weight.numpy(), by_weight)
    assert_same_bits(of_bias.numpy(), total)


@pytest.mark.parametrize("kind", ["sparse", "dense", "mixed", "empty"])
@pytest.mark.parametrize(("m", "kernel"), [(16, 3), (20, 2), (5, 3), (32, 1)])
def test_convolutions_are_those_of_torch_bit_by_bit(kind: str, m: int, kernel: int) -> None:
    by_y = drawn(N, m, HEIGHT - kernel + 1, WIDTH - kernel + 1).relu()
    check(images(kind), drawn(m, CHANNELS, kernel, kernel), drawn(m), by_y)
    check(images(kind), drawn(m, CHANNELS, kernel, kernel), drawn(m), by_y, rectify=False)


def test_a_zero_keeps_its_sign() -> None:
    """Where a sum begins with -0, a product with an empty cell makes it 0, unless all products are -0."""
    weight, by_y = drawn(16, CHANNELS, 3, 3), drawn(N, 16, HEIGHT - 2, WIDTH - 2)
    weight[:2] = -weight[:2].abs()
    check(images("sparse"), weight, torch.full((16,), -0.0), by_y, rectify=False)


def test_what_is_too_small_is_rounded_to_zero() -> None:
    """A product of a fraction can be -0, to which a product with an empty cell adds 0."""
    x = images("sparse") * 0.25
    x[-1] = images("sparse")[-1]
    by_y = torch.full((N, 16, HEIGHT - 2, WIDTH - 2), -(2.0**-149))
    by_y[1:] = 1e-3 * drawn(N, 16, HEIGHT - 2, WIDTH - 2)[1:].abs()
    check(x, drawn(16, CHANNELS, 3, 3), drawn(16), by_y)


def test_infinities_spoil_sums_over_empty_cells() -> None:
    x, weight = images("sparse"), drawn(16, CHANNELS, 3, 3)
    weight[3, 1, 2, 0] = torch.inf
    y = np.empty((N, (HEIGHT - 2) * (WIDTH - 2) * 16), np.float32)
    shape = np.array([3, 1, CHANNELS, HEIGHT, WIDTH, 1, 1])
    convolve(x.flatten(1).numpy(), shape, weight.data_ptr(), drawn(16).data_ptr(), True, y)
    assert not np.isfinite(y.reshape(N, -1, 16)[:, :, 3]).any()
    assert np.isfinite(y.reshape(N, -1, 16)[:, :, 4:]).all()
    given, of_weight, of_bias = np.ones_like(y), torch.zeros(16, CHANNELS, 3, 3), torch.zeros(16)
    given[2, 5] = np.nan
    convolve_back(x.flatten(1).numpy(), shape, given, True, of_weight.data_ptr(), of_bias.data_ptr())
    assert of_weight[5].isnan().all() and of_bias[5].isnan()
    assert of_weight[6:].isfinite().all()


def test_cells_are_listed_in_order() -> None:
    image, cells = np.zeros(40, np.float32), np.empty(41, np.int64)
    image[[0, 17, 38, 39]] = 1, -2, np.inf, np.nan
    image[5] = -0.0
    assert list_cells(image.ctypes.data, 40, cells) == 4
    assert cells[:4].tolist() == [0, 17, 38, 39]
    image[20] = -0.5
    assert list_cells(image.ctypes.data, 40, cells) == FRACTIONS
    image[18:33] = 1
    assert list_cells(image.ctypes.data, 40, cells) == MANY
