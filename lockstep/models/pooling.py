"""Max pooling whose gradient has the same bits in every run on a GPU.

On a GPU, the backward pass of torch's max pooling can use atomic additions, whose order differs from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def max_pool(x: Tensor) -> Tensor:
    """Windows of 3 x 3 pixels with a stride of 2 and padding of 1: [N, C, H, W] -> [N, C, ceil(H / 2), ceil(W / 2)]"""
    if x.is_cuda and torch.is_grad_enabled():
        return DeterministicMaxPool.apply(x)  # type: ignore[no-any-return]
    return F.max_pool2d(x, 3, stride=2, padding=1)


class DeterministicMaxPool(torch.autograd.Function):
    """max_pool with a backward pass that adds the gradients of overlapping windows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pooled, index = F.max_pool2d(x, 3, stride=2, padding=1, return_indices=True)
        ctx.save_for_backward(index)
        ctx.size = x.shape[-2:]
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        (index,), (gradient,), (height, width) = ctx.saved_tensors, gradients, ctx.size
        rows, columns = gradient.shape[-2:]
        # The place of each maximum in its window. Windows begin one pixel before the image.
        y = index // width - (2 * torch.arange(rows, device=index.device).view(-1, 1) - 1)
        x = index % width - (2 * torch.arange(columns, device=index.device) - 1)
        place = 3 * y + x
        padded = gradient.new_zeros(*gradient.shape[:-2], 2 * rows + 1, 2 * columns + 1)
        for i in range(3):
            for j in range(3):
                window = padded[..., i : i + 2 * rows : 2, j : j + 2 * columns : 2]
                window += torch.where(place == 3 * i + j, gradient, 0.0)
        return padded[..., 1 : height + 1, 1 : width + 1]
