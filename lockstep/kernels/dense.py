"""Networks of layers in float32, forwards and backwards, with identical bits on every CPU.

Every sum has a fixed order: a layer's output begins with its bias and adds the inputs one by one, and a gradient adds
the samples one by one. Layers are dense or convolutional.

Shape legend: P parameters, L layers, n samples, S equal slices of them, K inputs and M outputs of a layer.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int64

from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.convolution import convolve, convolve_back
from lockstep.kernels.math import expm1, tanh
from lockstep.kernels.norms import normalize_rows, normalize_rows_back
from lockstep.kernels.patches import convolve_patches, convolve_patches_back, paste_patches, places
from lockstep.kernels.products import product
from lockstep.kernels.sums import add_up
from lockstep.kernels.vectors import address

WEIGHT, BIAS, INPUTS, OUTPUTS, ACTIVATION, SOURCE, TURNED = range(7)
KERNEL, STRIDE, CHANNELS, HEIGHT, WIDTH, BLOCK, BRIGHTEST = range(7, 14)
INVERSE_EPS = 13
"""Columns of a table of layers, int64 [L, 14]: where weights and biases [M] begin among the parameters, the layer's
size, which activation follows it, the earlier layer whose output it takes, and how its weights lie: 0 as [M, K], 1 as
[K, M]. A layer of x has -1 - c for the earlier one, and takes the K numbers of x from column c on.

With NORM for how its weights lie, the layer normalizes every K of the M numbers of an earlier layer, which no other one
takes, and has K weights and K biases (lockstep.kernels.norms). Its last column is 1 / what is added to variances.

Of a convolution, K are the numbers of a patch, M those of all places, and the last seven columns are the shape that
lockstep.kernels.patches takes. With a stride of 1, a layer of x is computed by lockstep.kernels.convolution. The last
seven columns of other layers are 0, but for the one of norms."""
COLUMNS = 14
"""How many columns a table of layers has."""
NO_IMAGE = (0, 0, 0, 0, 0, 0, 0)
"""The last columns of a dense layer."""
NORM = 2
"""The mark of a layer that normalizes, in place of the order of its weights."""
NONE, TANH, RELU, ELU = range(4)
"""Activations."""


@compiled
def weights(parameters: np.ndarray, layers: np.ndarray, layer: int) -> tuple[int, int, int]:
    """A layer's weights as a matrix [K, M]: its address among parameters, or in an array [P] of the same order, the
    stride between inputs, and that between outputs."""
    begin, turned = layers[layer, WEIGHT], layers[layer, TURNED]
    between = layers[layer, OUTPUTS] if turned else layers[layer, INPUTS]
    return address(parameters) + 4 * begin, (between if turned else 1), (1 if turned else between)


@compiled
def _shared_by(layers: np.ndarray, layer: int) -> int:
    """How many outputs of a layer share a weight."""
    kernel, stride, _, height, width, _, _ = layers[layer, KERNEL:]
    return places(height, width, kernel, stride) if kernel else 1


@compiled
def _of_grid(layers: np.ndarray, layer: int) -> bool:
    """Whether lockstep.kernels.convolution computes a convolution."""
    return layers[layer, STRIDE] == 1 and layers[layer, SOURCE] < 0


@compiled
def rows_of_weights(layers: np.ndarray, layer: int) -> int:
    """How many rows of weights, with a bias each, a layer has. The places of a convolution share them."""
    return layers[layer, OUTPUTS] // _shared_by(layers, layer)


@compiled
def sizes(layers: np.ndarray, layer: int) -> tuple[int, int]:
    """How many weights and biases a layer has."""
    rows, inputs = rows_of_weights(layers, layer), layers[layer, INPUTS]
    return (inputs, inputs) if layers[layer, TURNED] == NORM else (rows * inputs, rows)


@compiled
def _eps(layers: np.ndarray, layer: int) -> np.float32:
    """The number that a layer that normalizes adds to variances."""
    return np.float32(1) / np.float32(layers[layer, INVERSE_EPS])


@compiled
def _gather(rows: np.ndarray, by_bias: np.ndarray) -> None:
    """Add all rows [M] to by_bias [M]."""
    for i in range(len(rows)):
        row = rows[i]
        for j in range(len(row)):
            by_bias[j] += row[j]


@compiled
def activate(y: np.ndarray, activation: int) -> None:
    """Apply an activation other than ReLU to y, in place."""
    flat = y.reshape(y.size)
    if activation == TANH:
        for i in range(flat.size):
            flat[i] = tanh(flat[i])
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
def _outputs_before(layers: np.ndarray, layer: int) -> int:
    """How many outputs all earlier layers have."""
    before = 0
    for earlier in range(layer):
        before += layers[earlier, OUTPUTS]
    return before


@compiled
def activations(scratch: np.ndarray, layers: np.ndarray, samples: int, layer: int) -> np.ndarray:
    """A layer's outputs [n, M], as a view of scratch, float32 with n numbers for each output of all layers."""
    before, outputs = _outputs_before(layers, layer), layers[layer, OUTPUTS]
    return scratch[samples * before : samples * (before + outputs)].reshape((samples, outputs))


@apart(float32[:], int64[:, :], float32[:, :], float32[::1], int64)
def forward(parameters: np.ndarray, layers: np.ndarray, x: np.ndarray, scratch: np.ndarray, first: int) -> None:
    """Evaluate all layers from a first one on; activations returns their outputs.

    Args:
        parameters: float32 [P].
        layers: the table, int64 [L, 14].
        x: observations, float32 [n, K].
        scratch: see activations.
    """
    n = len(x)
    for layer in range(first, len(layers)):
        source, outputs = layers[layer, SOURCE], layers[layer, OUTPUTS]
        begin = n * _outputs_before(layers, layer)
        bias = address(parameters) + 4 * layers[layer, BIAS]
        weight, between_inputs, between_outputs = weights(parameters, layers, layer)
        shape = layers[layer, KERNEL:]
        rectify = layers[layer, ACTIVATION] == RELU
        if layers[layer, TURNED] == NORM:
            size, first, shifts = layers[layer, INPUTS], layers[layer, WEIGHT], layers[layer, BIAS]
            scale, shift = parameters[first : first + size].copy(), parameters[shifts : shifts + size].copy()
            given, y = activations(scratch, layers, n, source), activations(scratch, layers, n, layer)
            normalize_rows(given.reshape((-1, size)), _eps(layers, layer), scale, shift, rectify, y.reshape((-1, size)))
        elif layers[layer, KERNEL]:
            below = x if source < 0 else activations(scratch, layers, n, source)
            y = activations(scratch, layers, n, layer)
            if _of_grid(layers, layer):
                convolve(below, shape, weight, bias, rectify, y)
            else:
                convolve_patches(below, shape, source < 0, weight, bias, rectify, y)
        else:  # by addresses, since views take time in small networks
            k, row, inputs = layers[layer, INPUTS], x.shape[1], address(x) + 4 * (-1 - source)
            if source >= 0:
                # A core's projection has more inputs, which lockstep.kernels.recurrent_network adds.
                k = row = layers[source, OUTPUTS]
                inputs = address(scratch) + 4 * n * _outputs_before(layers, source)
            of_weights, to = (weight, between_inputs, between_outputs), (address(scratch) + 4 * begin, outputs)
            product(1, (inputs, row, 1), of_weights, (bias, 0), to, (n, k, outputs), rectify)
        if not rectify:
            activate(scratch[begin : begin + n * outputs], layers[layer, ACTIVATION])


@apart(int64[:, :], float32[:], float32[:, :])
def evaluate(layers: np.ndarray, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Evaluate all layers for x, in new memory, from which `activations` reads outputs. Arguments as for forward."""
    scratch = np.empty(len(x) * _outputs_before(layers, len(layers)), np.float32)
    forward(parameters, layers, x, scratch, 0)
    return scratch


@compiled
def _by_parameters(
    layers: np.ndarray, layer: int, below: np.ndarray, grad: np.ndarray, zeros: np.ndarray, gradient: np.ndarray
) -> None:
    """Add a layer's gradients by weights and bias to gradient [1, P or more]; or, over several slices of the samples,
    write the tree's sum to gradient[0], [S, P or more]. That needs zeros and a dense layer.

    Args:
        below, grad: the layer's inputs [n, K], perhaps with other numbers between the rows, and the gradient by its
            outputs before the activation [n, M].
        zeros: at least K and M of them, to write the gradients instead of adding them; else none.
    """
    (samples, k), m, slices, fresh = below.shape, grad.shape[1], len(gradient), len(zeros) > 0
    n, begin, to = samples // slices, layers[layer, BIAS], weights(gradient, layers, layer)[0]
    shape, is_image = layers[layer, KERNEL:], layers[layer, KERNEL] > 0
    shared, outputs = _shared_by(layers, layer), rows_of_weights(layers, layer)
    if is_image and _of_grid(layers, layer):
        by_bias = address(gradient) + 4 * begin
        convolve_back(below, shape, grad, fresh, to, by_bias)
        return
    for s in range(slices):
        by_bias = gradient[s, begin : begin + outputs]
        if fresh:
            by_bias[:] = 0
        _gather(grad[s * n : (s + 1) * n].reshape((n * shared, outputs)), by_bias)
    add_up(gradient, begin, begin + outputs)
    start, row = address(zeros) if fresh else to, below.strides[0] // 4
    if is_image:
        convolve_patches_back(below, shape, layers[layer, SOURCE] < 0, grad, fresh, to)
    elif layers[layer, TURNED]:
        a, b = (address(below), 1, row), (address(grad), m, 1)
        product(slices, a, b, (start, 0 if fresh else m), (to, m), (k, n, m), False)
    else:
        a, b = (address(grad), 1, m), (address(below), row, 1)
        product(slices, a, b, (start, 0 if fresh else k), (to, k), (m, n, k), False)


@compiled
def _back(grad: np.ndarray, weights: tuple[int, int, int], zeros: np.ndarray, by_inputs: np.ndarray) -> None:
    """Add the gradient by a layer's inputs to by_inputs [n, K] or, if there are zeros [K], write it: given that by its
    outputs, [n, M], and its weights as their transpose [M, K]."""
    (n, m), k = grad.shape, by_inputs.shape[1]
    to = address(by_inputs), k
    product(1, (address(grad), m, 1), weights, (address(zeros), 0) if len(zeros) else to, to, (n, m, k), False)


@compiled
def clear(layers: np.ndarray, gradient: np.ndarray) -> None:
    """Set the gradients by all weights and biases to 0 in gradient [P or more]."""
    for layer in range(len(layers)):
        weight, bias = layers[layer, WEIGHT], layers[layer, BIAS]
        weights, biases = sizes(layers, layer)
        gradient[weight : weight + weights] = 0
        gradient[bias : bias + biases] = 0


@compiled
def _norm_back(
    parameters: np.ndarray,
    layers: np.ndarray,
    layer: int,
    below: np.ndarray,
    grad: np.ndarray,
    gradient: np.ndarray,
    fresh: bool,
    joined: bool,
    by_below: np.ndarray,
) -> None:
    """Write the gradient by what a layer normalizes to by_below [n, M], given that by its outputs before the
    activation, and each slice's gradients by its weights and biases. Arguments are those of backward."""
    size, weight, bias = layers[layer, INPUTS], layers[layer, WEIGHT], layers[layer, BIAS]
    each = len(grad) // max(1, len(gradient))
    unused, scale = np.zeros((2, size), np.float32), parameters[weight : weight + size].copy()
    for s in range(max(1, len(gradient))):
        by_scale, by_shift = unused[0], unused[1]
        if len(gradient):
            by_scale, by_shift = gradient[s, weight : weight + size], gradient[s, bias : bias + size]
        if fresh:
            by_scale[:] = 0
            by_shift[:] = 0
        begin, end = s * each, (s + 1) * each
        x, to = below[begin:end].reshape((-1, size)), by_below[begin:end].reshape((-1, size))
        normalize_rows_back(x, _eps(layers, layer), scale, grad[begin:end].reshape((-1, size)), by_scale, by_shift, to)
    if joined:
        add_up(gradient, weight, weight + size)
        add_up(gradient, bias, bias + size)


@apart(
    float32[:],
    int64[:, :],
    float32[:, :],
    float32[::1],
    float32[::1],
    float32[:, ::1],
    boolean,
    boolean,
    float32[:, :],
)
def backward(
    parameters: np.ndarray,
    layers: np.ndarray,
    x: np.ndarray,
    scratch: np.ndarray,
    gradients: np.ndarray,
    gradient: np.ndarray,
    fresh: bool,
    joined: bool,
    by_x: np.ndarray,
) -> None:
    """Compute the gradients by the parameters of all layers and by x, the last layer first.

    Args:
        parameters: float32 [P].
        layers: the table, int64 [L, 14].
        x: observations, float32 [n, K].
        scratch: what forward wrote.
        gradients: as scratch: the gradient by the outputs of layers that no other layer takes. The rest is overwritten.
        gradient: float32 [S, P or more], to which each slice's gradients by weights and biases are added; [0, …] to
            leave them out.
        fresh: write these gradients instead of adding them.
        joined: write the tree's sum over all slices to gradient[0], which takes less time. The rest is overwritten. It
            needs fresh.
        by_x: float32 [n, K], to which the gradient by x is written, if every layer of x takes all of it; [0, K] to
            leave it out.
    """
    samples, widest = len(x), 0
    for layer in range(len(layers)):
        widest = max(widest, layers[layer, INPUTS], layers[layer, OUTPUTS])
    zeros = np.zeros(widest, np.float32)
    none = zeros if fresh else zeros[:0]
    for layer in range(len(layers) - 1, -1, -1):
        source = layers[layer, SOURCE]
        y, grad = activations(scratch, layers, samples, layer), activations(gradients, layers, samples, layer)
        deactivate(grad, y, layers[layer, ACTIVATION])
        below = x if source < 0 else activations(scratch, layers, samples, source)
        if source < 0 and not layers[layer, KERNEL]:
            below = x[:, -1 - source : -1 - source + layers[layer, INPUTS]]
        if layers[layer, TURNED] == NORM:
            given, to = activations(scratch, layers, samples, source), activations(gradients, layers, samples, source)
            _norm_back(parameters, layers, layer, given, grad, gradient, fresh, joined, to)
            continue
        at_once = len(gradient) if joined and not layers[layer, KERNEL] else 1
        for s in range(0, len(gradient), at_once):
            begin, end = s * samples // len(gradient), (s + at_once) * samples // len(gradient)
            _by_parameters(layers, layer, below[begin:end], grad[begin:end], none, gradient[s : s + at_once])
        if joined and layers[layer, KERNEL]:
            weight, bias, outputs = layers[layer, WEIGHT], layers[layer, BIAS], rows_of_weights(layers, layer)
            add_up(gradient, weight, weight + layers[layer, INPUTS] * outputs)
            add_up(gradient, bias, bias + outputs)
        of_below = activations(gradients, layers, samples, source) if source >= 0 else by_x
        if len(of_below):
            weight, between_inputs, between_outputs = weights(parameters, layers, layer)
            added = False  # whether a later layer has added to it
            for later in range(layer + 1, len(layers)):
                added = added or layers[later, SOURCE] == source
            if layers[layer, KERNEL]:
                assert not added and source >= 0
                paste_patches(grad, layers[layer, KERNEL:], weight, of_below)
                continue
            transposed = weight, between_outputs, between_inputs
            _back(grad, transposed, zeros[: 0 if added else below.shape[1]], of_below)
