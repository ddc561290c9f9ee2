"""Networks of dense layers, forwards and backwards, in float32 arithmetic that is the same on every CPU.

Every sum is written in one order: a layer's output begins with its bias and adds the inputs one by one; a gradient adds
the samples one by one. Products are rounded before they are added.

Shape legend: P parameters, L layers, n samples, K inputs and M outputs of a layer.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.math import expm1, tanh
from lockstep.kernels.products import address, product

WEIGHT, BIAS, INPUTS, OUTPUTS, ACTIVATION, SOURCE, TURNED = range(7)
"""Columns of a table of layers, int64 [L, 7]: where weights and biases [M] begin among the parameters, the layer's
size, which activation follows it, the earlier layer whose output it takes, -1 for x, and how its weights lie: 0 as
[M, K], 1 as [K, M]."""
NONE, TANH, RELU, ELU = range(4)
"""Activations."""


@compiled
def weights(parameters: np.ndarray, layers: np.ndarray, layer: int) -> tuple[int, int, int]:
    """A layer's weights as a matrix [K, M]: its address among parameters or what has their places [P], the stride
    between inputs, and that between outputs."""
    begin, turned = layers[layer, WEIGHT], layers[layer, TURNED]
    between = layers[layer, OUTPUTS] if turned else layers[layer, INPUTS]
    return address(parameters) + 4 * begin, (between if turned else 1), (1 if turned else between)


@compiled
def activate(y: np.ndarray, activation: int) -> None:
    """Apply an activation to y, in place."""
    flat = y.reshape(y.size)
    if activation == TANH:
        for i in range(flat.size):
            flat[i] = tanh(flat[i])
    elif activation == RELU:
        for i in range(flat.size):
            flat[i] = max(flat[i], np.float32(0))
    elif activation == ELU:
        for i in range(flat.size):
            flat[i] = flat[i] if flat[i] > 0 else expm1(flat[i])


@compiled
def deactivate(grad: np.ndarray, y: np.ndarray, activation: int) -> None:
    """Turn the gradient by an activation's output y into that by its input, in place."""
    g, h = grad.reshape(grad.size), y.reshape(y.size)
    if activation == TANH:
        for i in range(g.size):
            g[i] *= np.float32(1) - h[i] * h[i]
    elif activation == RELU:
        for i in range(g.size):
            g[i] = g[i] if h[i] > 0 else np.float32(0)
    elif activation == ELU:
        for i in range(g.size):
            g[i] *= np.float32(1) if h[i] > 0 else h[i] + np.float32(1)


@compiled
def activations(scratch: np.ndarray, layers: np.ndarray, samples: int, layer: int) -> np.ndarray:
    """A layer's outputs [n, M], as a view of scratch, float32 with n numbers for each output of all layers."""
    before = 0
    for earlier in range(layer):
        before += layers[earlier, OUTPUTS]
    outputs = layers[layer, OUTPUTS]
    return scratch[samples * before : samples * (before + outputs)].reshape((samples, outputs))


@compiled
def forward(parameters: np.ndarray, layers: np.ndarray, x: np.ndarray, scratch: np.ndarray) -> None:
    """Evaluate all layers; activations returns their outputs.

    Args:
        parameters: float32 [P].
        layers: the table, int64 [L, 7].
        x: observations, float32 [n, K].
        scratch: see activations.
    """
    for layer in range(len(layers)):
        source, begin = layers[layer, SOURCE], layers[layer, BIAS]
        below = x if source < 0 else activations(scratch, layers, len(x), source)
        y = activations(scratch, layers, len(x), layer)
        for i in range(len(y)):
            for j in range(y.shape[1]):
                y[i, j] = parameters[begin + j]
        n, k, m = len(x), below.shape[1], y.shape[1]
        weight, between_inputs, between_outputs = weights(parameters, layers, layer)
        product(address(below), k, 1, weight, between_inputs, between_outputs, address(y), m, n, k, m)
        activate(y, layers[layer, ACTIVATION])


@compiled
def backward(
    parameters: np.ndarray,
    layers: np.ndarray,
    x: np.ndarray,
    scratch: np.ndarray,
    gradients: np.ndarray,
    gradient: np.ndarray,
    by_x: np.ndarray,
) -> None:
    """Add the gradients by the parameters of all layers and by x, the last layer first.

    Args:
        parameters: float32 [P].
        layers: the table, int64 [L, 7].
        x: observations, float32 [n, K].
        scratch: what forward wrote.
        gradients: as scratch: the gradient by the outputs that the loss depends on, and 0 elsewhere. It is overwritten.
        gradient: float32 [P], to which gradients by weights and biases are added; [0] to leave them out.
        by_x: float32 [n, K], to which the gradient by x is added; [0, K] to leave it out.
    """
    samples = len(x)
    for layer in range(len(layers) - 1, -1, -1):
        source, begin = layers[layer, SOURCE], layers[layer, BIAS]
        y, grad = activations(scratch, layers, samples, layer), activations(gradients, layers, samples, layer)
        deactivate(grad, y, layers[layer, ACTIVATION])
        below = x if source < 0 else activations(scratch, layers, samples, source)
        k, m = below.shape[1], grad.shape[1]
        if len(gradient):
            for i in range(samples):
                for j in range(m):
                    gradient[begin + j] += grad[i, j]
            to_weights = weights(gradient, layers, layer)[0]
            if layers[layer, TURNED]:
                product(address(below), 1, k, address(grad), m, 1, to_weights, m, k, samples, m)
            else:
                product(address(grad), 1, m, address(below), k, 1, to_weights, k, m, samples, k)
        of_below = activations(gradients, layers, samples, source) if source >= 0 else by_x
        if len(of_below):
            weight, between_inputs, between_outputs = weights(parameters, layers, layer)
            product(address(grad), m, 1, weight, between_outputs, between_inputs, address(of_below), k, samples, m, k)
