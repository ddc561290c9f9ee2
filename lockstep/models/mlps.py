"""Multilayer perceptrons of equal shape, for policies, critics and dynamics models.

Shape legend: C perceptrons, n items, I inputs and O outputs of a layer.

All layers together are one node of the autograd graph, differentiated by hand. At the sizes of continuous control, a
graph of single operations takes as much time as the matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.models.layers import onednn, product

_aten: Any = torch.ops.aten
EPS = 1e-5
"""The number that a normalized layer adds to variances."""


class _Activation(NamedTuple):
    """A nonlinearity whose derivative can be computed from its result."""

    function: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]
    """Maps the gradient with respect to the result, and the result, to the gradient with respect to the argument, in
    place."""


_ACTIVATIONS = {
    "tanh": _Activation(torch.tanh, lambda dy, y: _aten.tanh_backward.grad_input(dy, y, grad_input=dy)),
    "relu": _Activation(F.relu, lambda dy, y: _aten.threshold_backward.grad_input(dy, y, 0, grad_input=dy)),
    "elu": _Activation(F.elu, lambda dy, y: _aten.elu_backward.grad_input(dy, 1, 1, 1, True, y, grad_input=dy)),
}


class MLPs(nn.Module):
    """C multilayer perceptrons of equal shape.

    Weights and biases are initially uniform within ±1 / sqrt(fan_in), as in torch's linear layers. The last layer, in
    fp32, has no activation.

    Args:
        count: C.
        sizes: the sizes of the input, the hidden layers and the output.
        activation: the activation after hidden layers.
        layer_norm: whether the first hidden layer is normalized and followed by tanh (Acme's LayerNormMLP).
    """

    def __init__(
        self, count: int, sizes: tuple[int, ...], activation: Literal["tanh", "relu", "elu"], layer_norm: bool
    ):
        super().__init__()
        self.activation, self.layer_norm = activation, layer_norm
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for into, out in pairwise(sizes):
            bound = 1 / math.sqrt(into)
            self.weights.append(nn.Parameter(torch.empty(count, into, out).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(count, 1, out).uniform_(-bound, bound)))
        if layer_norm:
            self.gain = nn.Parameter(torch.ones(count, 1, sizes[1]))
            self.shift = nn.Parameter(torch.zeros(count, 1, sizes[1]))

    def scale_outputs(self, factor: float) -> None:
        """Multiply the last layer's parameters."""
        with torch.no_grad():
            self.weights[-1].mul_(factor)
            self.biases[-1].mul_(factor)

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """[n, I] or [C, n, I] -> fp32 [C, n, O]. Hidden layers compute in the precision of x, a normalized layer in
        fp32.

        frozen: whether gradients flow only to x and not to the parameters.
        """

        def of(parameter: Tensor) -> Tensor:
            return parameter.detach() if frozen else parameter

        weights, biases, dtype = list(map(of, self.weights)), list(map(of, self.biases)), x.dtype
        x = x.expand(len(weights[0]), -1, -1)
        if self.layer_norm:
            x = perceptrons(x, weights[:1], biases[:1], self.activation)
            x = F.layer_norm(x, x.shape[-1:], eps=EPS)
            x = torch.tanh(x * of(self.gain) + of(self.shift)).to(dtype)
            weights, biases = weights[1:], biases[1:]
        return perceptrons(x, weights, biases, self.activation)


def perceptrons(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str) -> Tensor:
    """C multilayer perceptrons.

    Args:
        x: [C, n, I]. Hidden layers compute in its precision, the last layer in fp32.
        weights: fp32 [C, I, O] of each layer.
        biases: fp32 [C, 1, O] of each layer.
        activation: the activation after hidden layers.

    Returns:
        fp32 [C, n, O]
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights, *biases)):
        return _Perceptrons.apply(x, activation, *weights, *biases)  # type: ignore[no-any-return]
    return _join([part.climb(activation)[-1] for part in _parts(x, weights, biases)])


class _Perceptrons(torch.autograd.Function):
    """See perceptrons. The gradient of x is computed only if needed; those of the parameters if any of them is
    needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, *parameters: Tensor) -> Tensor:
        layers = len(parameters) // 2
        ctx.activation, ctx.parts = activation, _parts(x, parameters[:layers], parameters[layers:])
        ctx.inputs = [part.climb(activation) for part in ctx.parts]
        return _join([inputs.pop() for inputs in ctx.inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_x, _, *of_parameters = ctx.needs_input_grad
        together = len(ctx.parts) == 1 and ctx.parts[0].x.dim() == 3
        given = gradients if together else gradients[0].unbind()
        found = [
            part.descend(inputs, gradient, ctx.activation, of_x, any(of_parameters))
            for part, inputs, gradient in zip(ctx.parts, ctx.inputs, given, strict=True)
        ]
        joined: list[Tensor | None] = [_join(list(each)) for each in zip(*found, strict=True)]
        grad_x = joined.pop(0) if of_x else None
        return grad_x, None, *(joined or [None] * len(of_parameters))


class _Part(NamedTuple):
    """One perceptron, or all of them with a leading axis C, computed together."""

    x: Tensor
    """[n, I]"""
    weights: list[Tensor]
    """[I, O] of each layer."""
    biases: list[Tensor]
    """[1, O] of each layer."""

    def climb(self, activation: str) -> list[Tensor]:
        """The input of every layer, and the output of the last one."""
        values, last = [self.x], len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values[layer] = x = values[layer].to(weight.dtype)
            if x.dim() == 3:
                y = torch.baddbmm(bias, x, weight)
            elif onednn(x, x.numel() * weight.shape[1]):
                y = product(x, weight.t(), bias[0])
            else:
                y = torch.addmm(bias, x, weight)
            values.append(_ACTIVATIONS[activation].function(y) if layer < last else y)
        return values

    def descend(
        self, inputs: list[Tensor], gradient: Tensor, activation: str, of_x: bool, of_parameters: bool
    ) -> list[Tensor]:
        """The gradient of the output -> the gradients of x, weights and biases, if needed."""
        of_weights, of_biases = [], []
        for layer in reversed(range(len(inputs))):
            x, weight = inputs[layer], self.weights[layer]
            gradient = gradient.to(weight.dtype)
            if of_parameters:
                of_weights.append(_times(x.mT, gradient).to(inputs[-1].dtype))
                of_biases.append(gradient.sum(-2, keepdim=True).to(inputs[-1].dtype))
            if layer:
                gradient = _ACTIVATIONS[activation].back(_times(gradient, weight.mT), x)
        of_inputs = [_times(gradient, self.weights[0].mT)] if of_x else []
        return [*of_inputs, *reversed(of_weights), *reversed(of_biases)]


def _parts(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[_Part]:
    """Single perceptrons if their products are large or there is only one; otherwise all together."""
    dtypes = [*[x.dtype] * (len(weights) - 1), torch.promote_types(x.dtype, torch.float32)]
    weights, biases = ([p.to(dtype) for p, dtype in zip(each, dtypes, strict=True)] for each in (weights, biases))
    if len(x) > 1 and not onednn(x, x.shape[1] * max(w[0].numel() for w in weights)):
        return [_Part(x, weights, biases)]
    return [_Part(x[c], [w[c] for w in weights], [b[c] for b in biases]) for c in range(len(x))]


def _times(a: Tensor, b: Tensor) -> Tensor:
    """[..., n, k] @ [..., k, m]"""
    return product(a, b.t()) if a.dim() == 2 and onednn(a, a.numel() * b.shape[1]) else a @ b


def _join(parts: list[Tensor]) -> Tensor:
    """Join the parts' tensors into those of all perceptrons."""
    if len(parts) > 1:
        return torch.stack(parts)
    return parts[0] if parts[0].dim() == 3 else parts[0].unsqueeze(0)
