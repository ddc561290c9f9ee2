"""A policy and a value with cores between encoders and heads, with the bits of torch's replaced operations.

Their table (lockstep.kernels.dense) has the encoders first, then a projection of each core's input, then the cores, and
then the heads. A projection takes the features of its encoder, which extra features may follow. A core's row says where
its hidden weights [G * H, H] and biases [G * H] begin. Its inputs and outputs are H, its activation is the core's kind,
and its source is its projection.

Samples, states and the letters S, T, n, N, R, H, G, K are those of lockstep.kernels.recurrent. Other letters: P
parameters, L layers, C cores, D numbers of an observation, E extra features, W parameters of the distribution.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import ACTIVATION, INPUTS, OUTPUTS, SOURCE, WEIGHT, activations, backward, forward
from lockstep.kernels.network import Network, biases_in_parts, biases_last, by_free_std, heads_as_torch, outputs
from lockstep.kernels.products import product
from lockstep.kernels.recurrent import KEPT, LSTM, core_back, core_forward, core_panels, with_extra, without_extra
from lockstep.kernels.vectors import address


@compiled
def first_core(layers: np.ndarray) -> int:
    """The row of the first core, or of the policy's head if there is no core."""
    core = len(layers) - 2
    while core > 0 and layers[core - 1, ACTIVATION] >= LSTM:
        core -= 1
    return core


@compiled
def hidden_panels(layers: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """The hidden weights of each core as [H, G * H], in the order of lockstep.kernels.products.panels_of: float32
    [C, panels, H, columns of a tile]. All cores have the same kind and size."""
    core = first_core(layers)
    wide = layers[layers[core, SOURCE], OUTPUTS]
    first = core_panels(layers[core], wide, parameters)
    count, size, width = first.shape
    panels = np.empty((len(layers) - 2 - core, count, size, width), np.float32)
    panels[0] = first
    for place in range(1, len(panels)):
        panels[place] = core_panels(layers[core + place], wide, parameters)
    return panels


@compiled
def _add_extra(layers: np.ndarray, row: int, parameters: np.ndarray, extra: np.ndarray, projected: np.ndarray) -> None:
    """Add the products of extra features [N, E] to a projection [N, G * H] of the features before them. The sum has
    the order of one product of all features."""
    (n, more), wide, inputs = extra.shape, projected.shape[1], layers[row, INPUTS]
    if more:
        weight, to = address(parameters) + 4 * (layers[row, WEIGHT] + inputs - more), (address(projected), wide)
        product(1, (address(extra), more, 1), (weight, 1, inputs), to, to, (n, more, wide), False)


@compiled
def evaluate(
    network: Network,
    panels: np.ndarray,
    x: np.ndarray,
    extra: np.ndarray,
    columns: int,
    start: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Evaluate policy and value.

    Args:
        panels: what hidden_panels returns.
        x: normalized observations, float32 [N, D].
        extra: further inputs of the cores, float32 [N, E].
        columns: n.
        start: bool [N]: where states are zeroed before the step.
        state: float32 [R, K of all cores], before the first step. It is replaced by that after the last step.

    Returns:
        The policy's parameters [N, W], values [N], and what differentiate needs: scratch and kept.
    """
    layers, _, _, parameters = network
    samples, heads, core = len(x), len(layers) - 2, first_core(layers)
    size = layers[core, OUTPUTS]
    scratch = np.empty(samples * layers[:, OUTPUTS].sum(), np.float32)
    kept = np.empty((heads - core, KEPT, samples, size), np.float32)
    forward(parameters, layers[:core], x, scratch, 0)
    numbers = state.shape[1] // (heads - core)
    for row in range(core, heads):
        place, source = row - core, layers[row, SOURCE]
        own = state[:, place * numbers : (place + 1) * numbers]
        gates, h = activations(scratch, layers, samples, source), activations(scratch, layers, samples, row)
        _add_extra(layers, source, parameters, extra, gates)
        core_forward(layers[row], parameters, panels[place], columns, start, own, gates, h, kept[place])
    forward(parameters, layers, x, scratch, heads)
    policy, value = outputs(network, samples, scratch)
    return policy, value, scratch, kept


@compiled
def evaluate_as_torch(
    network: Network,
    x: np.ndarray,
    strided: bool,
    extra: np.ndarray,
    columns: int,
    start: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """As evaluate, but if x is strided, its dense layers add their bias last."""
    layers, free_std, log_stds, parameters = network
    if strided:
        layers, parameters, x = biases_last(layers, parameters, x)
    network, panels = (layers, free_std, log_stds, parameters), hidden_panels(layers, parameters)
    return evaluate(network, panels, x, extra, columns, start, state)


@compiled
def _differentiate_projection(
    layers: np.ndarray,
    row: int,
    parameters: np.ndarray,
    extra: np.ndarray,
    scratch: np.ndarray,
    gradients: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
) -> None:
    """Write each slice's gradient by a projection's weights and biases. Of gradients, take the gradient by the
    projection, and write that by its encoder's features."""
    samples, source = len(extra), layers[row, SOURCE]
    below = with_extra(activations(scratch, layers, samples, source), extra)
    alone = layers[row : row + 1].copy()
    alone[0, SOURCE] = -1
    y, grad = activations(scratch, layers, samples, row), activations(gradients, layers, samples, row)
    by_below = np.empty_like(below)
    backward(parameters, alone, below, y.reshape(y.size), grad.reshape(y.size), gradient, True, joined, by_below)
    without_extra(by_below, activations(gradients, layers, samples, source))


@compiled
def differentiate_as_torch(
    network: Network,
    x: np.ndarray,
    extra: np.ndarray,
    scratch: np.ndarray,
    kept: np.ndarray,
    columns: int,
    start: np.ndarray,
    by_policy: np.ndarray,
    by_value: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
) -> None:
    """As lockstep.kernels.network.differentiate_as_torch, which says what is written. Arguments are also those of
    evaluate, and what it returned."""
    layers, free_std, _, parameters = network
    samples, heads, core, gradients = len(x), len(layers) - 2, first_core(layers), np.empty_like(scratch)
    steps = samples // (columns * len(gradient))
    heads_as_torch(layers, parameters, samples, scratch, by_policy, by_value, gradients, gradient, joined)
    for row in range(core, heads):
        source = layers[row, SOURCE]
        gates = activations(scratch, layers, samples, source)
        by_h, by_gates = activations(gradients, layers, samples, row), activations(gradients, layers, samples, source)
        of_core = columns, start, gates, kept[row - core], by_h, by_gates
        core_back(layers[row], parameters, steps, *of_core, gradient, joined)
        _differentiate_projection(layers, source, parameters, extra, scratch, gradients, gradient, joined)
    first = 2 * core - heads  # each core has a projection
    size = samples * layers[:first, OUTPUTS].sum()
    backward(parameters, layers[:first], x, scratch[:size], gradients[:size], gradient, True, joined, x[:0])
    biases_in_parts(layers, samples, gradients, gradient, joined)
    by_free_std(free_std, layers[heads, OUTPUTS], parameters, by_policy, gradient, joined)
