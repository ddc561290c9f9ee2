"""Multilayer perceptrons with batch renormalization (Ioffe 2017, https://arxiv.org/abs/1702.03275).

Shape legend: C perceptrons, n items, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

_EPSILON = 1e-3
_LARGEST_R, _LARGEST_D = 3.0, 5.0
"""Added to variances, and the bounds of the corrections r and d: those of CrossQ's authors."""
_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "elu": nn.functional.elu}


class RenormMLPs(nn.Module):
    """C multilayer perceptrons of equal shape, which normalize the input of every layer, in fp32.

    Acting uses running statistics, so each row depends only on itself. Learning uses the statistics of the batch,
    corrected towards the running ones. The model that contains this module registers `statistics`, separately from
    parameters that an optimizer changes.

    Args:
        count: C.
        sizes: the sizes of the input, the hidden layers and the output.
        activation: the activation after hidden layers.
    """

    def __init__(self, count: int, sizes: tuple[int, ...], activation: Literal["tanh", "relu", "elu"]) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for into, out in pairwise(sizes):
            bound = 1 / math.sqrt(into)
            self.weights.append(nn.Parameter(torch.empty(count, into, out).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(count, 1, out).uniform_(-bound, bound)))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(count, 1, size)) for size in sizes[:-1])
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(count, 1, size)) for size in sizes[:-1])
        first = (torch.stack([torch.zeros(count, 1, size), torch.ones(count, 1, size)]) for size in sizes[:-1])
        self.statistics = [nn.Parameter(each) for each in first]
        """Running means and variances, fp32 [2, C, 1, I] for each layer."""

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """[n, I] or [C, n, I] -> fp32 [C, n, O], with running statistics.

        frozen: whether gradients flow only to x and not to the parameters.
        """

        def of(parameter: Tensor) -> Tensor:
            return parameter.detach() if frozen else parameter

        x = x.float().expand(len(self.weights[0]), -1, -1)
        for layer, statistics in enumerate(self.statistics):
            mean, variance = statistics.detach()
            scale = of(self.gains[layer]) * (variance + _EPSILON).rsqrt()
            x = (x - mean) * scale + of(self.shifts[layer])
            x = x @ of(self.weights[layer]) + of(self.biases[layer])
            if layer < len(self.statistics) - 1:
                x = self.activation(x)
        return x

    def learn(self, x: Tensor, renormalize: bool | Tensor) -> tuple[Tensor, list[Tensor]]:
        """As forward, with the statistics of the batch.

        Args:
            x: [n, I].
            renormalize: whether they are corrected towards the running ones. Otherwise this is batch normalization.

        Returns:
            fp32 [C, n, O], and the batch's means and variances, as in `statistics`.
        """
        x, seen = x.float().expand(len(self.weights[0]), -1, -1), []
        for layer, statistics in enumerate(self.statistics):
            mean = x.mean(-2, keepdim=True)
            centered = x - mean
            variance = centered.square().mean(-2, keepdim=True)
            deviation = (variance + _EPSILON).sqrt()
            with torch.no_grad():
                running_mean, running_variance = statistics
                running = (running_variance + _EPSILON).sqrt()
                r = (deviation / running).clamp(1 / _LARGEST_R, _LARGEST_R)
                d = ((mean - running_mean) / running).clamp(-_LARGEST_D, _LARGEST_D)
                if isinstance(renormalize, Tensor):
                    r, d = torch.where(renormalize, r, 1.0), torch.where(renormalize, d, 0.0)
                elif not renormalize:
                    r, d = torch.ones_like(r), torch.zeros_like(d)
                seen.append(torch.stack([mean, variance]))
            x = (centered / deviation * r + d) * self.gains[layer] + self.shifts[layer]
            x = x @ self.weights[layer] + self.biases[layer]
            if layer < len(self.statistics) - 1:
                x = self.activation(x)
        return x, seen
