"""A model's parameters as one flat vector: one tensor to reduce, to optimise, to version and to publish."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ALIGNMENT = 16
"""Each parameter starts at a multiple of 64 bytes: kernels may choose their code path, and so their bits, by
alignment, and aligned ones are faster."""


class FlatParameters:
    """Moves a module's parameters and gradients into two contiguous fp32 vectors; the module keeps views of them.

    Args:
        module: all its parameters must be fp32, on one device.
        tail: numbers behind the gradient, reduced together with it (counts and metric sums).
    """

    def __init__(self, module: nn.Module, tail: int = 0) -> None:
        self._slices: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            assert parameter.dtype == torch.float32, name
            self._slices[name] = (size, parameter.shape)
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self.vector = nn.Parameter(torch.zeros(size, device=next(iter(named.values())).device))
        self._parameters = named
        self._tail = tail
        for name, parameter in named.items():
            self._view(self.vector.data, name).copy_(parameter.data)
            parameter.data = self._view(self.vector.data, name)
        self.zero()

    def _view(self, vector: Tensor, name: str) -> Tensor:
        start, shape = self._slices[name]
        return vector[start : start + shape.numel()].view(shape)

    def zero(self) -> None:
        """Start a new gradient and tail at zero; one that was taken is left as it is."""
        size = self.vector.numel()
        self._gradient_and_tail = torch.zeros(size + self._tail, device=self.vector.device)
        self.gradient = self._gradient_and_tail[:size]
        self.tail = self._gradient_and_tail[size:]
        for name, parameter in self._parameters.items():
            parameter.grad = self._view(self.gradient, name)

    def take(self) -> Tensor:
        """Gradient and tail in one vector, to give to the reduction; call zero before the next backward pass."""
        return self._gradient_and_tail

    def split(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and tail out of a reduced vector."""
        size = self.gradient.numel()
        return total[:size], total[size:]

    def named(self, vector: Tensor | None = None) -> dict[str, Tensor]:
        """Views of a flat vector (default: the parameters) by the parameters' names."""
        vector = self.vector.data if vector is None else vector
        return {name: self._view(vector, name) for name in self._slices}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy named tensors into the parameters."""
        for name, view in self.named().items():
            view.copy_(tensors[name])
