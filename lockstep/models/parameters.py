"""A model's parameters as one flat vector, which is reduced, optimized and published as one tensor."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.config.settings import SettingsError
from lockstep.core.digests import Digests
from lockstep.models.core import RecurrentCore
from lockstep.models.layers import Linear, Rounded

_ALIGNMENT = 16
"""Each parameter starts at a multiple of 64 bytes. A kernel's code path, and so its bits, may depend on alignment;
besides, aligned memory is faster."""
_LARGE = 1 << 15
"""The size from which casting a parameter and copying its gradient takes noticeable time."""


class Places(Protocol):
    """The layout of parameters in a vector."""

    def offset(self, name: str) -> int:
        """The index at which a parameter begins."""
        ...


class Part:
    """The parameters whose names begin with a prefix, as a separate vector with names that lack the prefix.

    Args:
        flat: all parameters.
        prefix: the prefix.
    """

    def __init__(self, flat: FlatParameters, prefix: str) -> None:
        self._flat, self._prefix = flat, prefix
        self.span = flat.span(prefix)
        """The slice of all parameters that it covers."""

    def offset(self, name: str) -> int:
        """As Places."""
        return self._flat.offset(self._prefix + name) - self.span.start


class FlatParameters:
    """Moves a module's parameters into one contiguous fp32 vector; the module keeps views of it.

    Args:
        module: all its parameters must be fp32, on one device.
        tail: the number of values after the gradient that are reduced together with it (counts and metric sums).
        dtype: the precision of the module's layers. If it is lower than fp32, call round after changing the vector.
    """

    def __init__(self, module: nn.Module, tail: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self._slices: dict[str, tuple[int, torch.Size]] = {}
        self._spans: dict[str, slice] = {}
        self._pieces: list[int] = []
        """The sizes of each parameter and of the gap after it, in which vectors are 0; last the size of the tail."""
        self._gaps: list[int] = []
        """The indices of pieces that are non-empty gaps."""
        size = 0
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            assert parameter.dtype == torch.float32, name
            self._slices[name] = (size, parameter.shape)
            gap = -parameter.numel() % _ALIGNMENT
            self._gaps += [len(self._pieces) + 1] if gap else []
            self._pieces += [parameter.numel(), gap]
            size += parameter.numel() + gap
        self.vector = nn.Parameter(torch.zeros(size, device=next(iter(named.values())).device))
        self._parameters = named
        self.tail = tail
        self._pieces.append(tail)
        for name, parameter in named.items():
            self._view(self.vector.data, name).copy_(parameter.data)
            parameter.data = self._view(self.vector.data, name)
        self._gathered: Tensor | None = None
        """Where the next gradient is gathered."""
        self._digests: Digests | None = None
        self._rounded = {} if dtype == torch.float32 else _rounded(module, dtype)
        self.round()

    def _view(self, vector: Tensor, name: str) -> Tensor:
        start, shape = self._slices[name]
        return vector[start : start + shape.numel()].view(shape)

    def lies_like(self, other: FlatParameters) -> bool:
        """Whether another module's vector has the same layout."""
        return self._slices == other._slices

    def offset(self, name: str) -> int:
        """The index at which a parameter begins in the vector."""
        return self._slices[name][0]

    def span(self, prefix: str) -> slice:
        """The slice of the parameters whose names begin with a prefix.

        Raises:
            SettingsError: there are none, or they are not adjacent.
        """
        if prefix not in self._spans:
            names = list(self._slices)
            within = [index for index, name in enumerate(names) if name.startswith(prefix)]
            if not within or within[-1] - within[0] >= len(within):
                fault = "which are not adjacent" if within else "but no parameter has such a name"
                raise SettingsError(
                    f"The algorithm names the parameters that begin with {prefix!r}, {fault}. The model's parameters "
                    f"are, in order: {', '.join(names)}."
                )
            after = names[within[-1] + 1 :]
            end = self._slices[after[0]][0] if after else self.vector.numel()
            self._spans[prefix] = slice(self._slices[names[within[0]]][0], end)
        return self._spans[prefix]

    def of_networks(self) -> Tensor:
        """bool [N]: whether each number is a parameter of a network that learns. Variables of algorithms, such as a
        temperature, running statistics and fixed networks are not."""
        chosen = torch.zeros_like(self.vector, dtype=torch.bool)
        for name, parameter in self._parameters.items():
            self._view(chosen, name).fill_(
                parameter.requires_grad and not name.startswith(("variables.", "statistics."))
            )
        return chosen

    def round(self) -> None:
        """Update the rounded copies of parameters that some layers keep."""
        for rounded in self._rounded.values():
            rounded.renew()

    def forget_gradient(self) -> None:
        """Discard the last gradient. Call this before a backward pass, so that it does not add to that gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._gathered = torch.empty(self.vector.numel() + self.tail, device=self.vector.device)
        for name, rounded in self._rounded.items():
            rounded.place = self._view(self._gathered, name)

    def gather_gradient(self, tail: list[Tensor]) -> Tensor:
        """A new vector with the gradient of the backward pass since forget_gradient, followed by the tail's numbers."""
        gathered, self._gathered = self._gathered, None
        assert gathered is not None, "forget_gradient was not called"
        *pieces, end = gathered.split(self._pieces)
        for (name, parameter), piece in zip(self._parameters.items(), pieces[::2], strict=True):
            gradient = parameter.grad
            if gradient is None:
                piece.zero_()
            elif name not in self._rounded or gradient.data_ptr() != piece.data_ptr():  # else it was put there
                piece.view(gradient.shape).copy_(gradient)
        for gap in self._gaps:
            pieces[gap].zero_()
        torch.stack(tail, out=end)
        return gathered

    def named(self, vector: Tensor | None = None) -> dict[str, Tensor]:
        """Views of a flat vector (default: the parameters) by the parameters' names."""
        vector = self.vector.data if vector is None else vector
        return {name: self._view(vector, name) for name in self._slices}

    def digests(self) -> dict[str, str]:
        """The digest of each parameter, by name."""
        if self._digests is None or not self.vector.is_cpu:
            array = self.vector.detach().cpu().numpy()
            self._digests = Digests(
                {
                    name: array[start : start + shape.numel()].reshape(shape)
                    for name, (start, shape) in self._slices.items()
                }
            )
        return self._digests()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy named tensors into the parameters."""
        for name, view in self.named().items():
            view.copy_(tensors[name])
        self.round()


def _rounded(module: nn.Module, dtype: torch.dtype) -> dict[str, Rounded]:
    """The large parameters of layers that cast them, by name."""
    casting = [layer for layer in module.modules() if isinstance(layer, (Linear, RecurrentCore))]
    cast = {id(parameter) for layer in casting for parameter in layer.parameters(recurse=False)}
    large = {name: parameter for name, parameter in module.named_parameters() if parameter.numel() >= _LARGE}
    return {name: Rounded(parameter, dtype) for name, parameter in large.items() if id(parameter) in cast}
