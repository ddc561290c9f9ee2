"""A policy and a value, evaluated and differentiated in portable arithmetic.

Both are in one table of layers (lockstep.kernels.dense), which ends with the heads of the policy and of the value.

Shape legend: P parameters, L layers, n samples, S slices of them, D numbers of an observation, M outputs of the
policy's head, W parameters of the distribution.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int64

from lockstep.kernels import dense
from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.dense import (
    ACTIVATION,
    BIAS,
    ELU,
    INPUTS,
    KERNEL,
    OUTPUTS,
    SOURCE,
    WEIGHT,
    activations,
    backward,
    rows_of_weights,
)
from lockstep.kernels.sums import add_up, column_sums

LOG_STD_LOW, LOG_STD_HIGH = np.float32(-20), np.float32(2)
"""Bounds of log standard deviations: see lockstep.models.gaussian."""
Network = tuple[np.ndarray, int, int, np.ndarray]
"""What evaluates a policy and a value:

- layers: the table, int64 [L, 14].
- free_std: where the log standard deviations begin among the parameters, if they do not depend on the observation;
  else -1.
- log_stds: how many of the policy's last parameters are log standard deviations.
- parameters: float32 [P].
"""


@compiled
def normalize(x: np.ndarray, mean: np.ndarray, std: np.ndarray, clip: np.float32, out: np.ndarray) -> None:
    """Standardize observations: x [n, D], mean and std [D] -> out [n, D], within -clip and clip."""
    for i in range(len(x)):
        for d in range(x.shape[1]):
            out[i, d] = min(max((x[i, d] - mean[d]) / std[d], -clip), clip)


@compiled
def outputs(network: Network, n: int, scratch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The policy's parameters [n, W] and values [n], given the outputs of the layers for n samples."""
    layers, free_std, log_stds, parameters = network
    last = len(layers) - 1
    head = activations(scratch, layers, n, last - 1)
    emitted = head.shape[1]
    size = emitted if free_std < 0 else emitted + log_stds
    policy, value = np.empty((n, size), np.float32), np.empty(n, np.float32)
    of_value = activations(scratch, layers, n, last)
    for i in range(n):
        value[i] = of_value[i, 0]
        for j in range(emitted):
            policy[i, j] = head[i, j]
        for j in range(size - log_stds, size):
            log_std = head[i, j] if free_std < 0 else parameters[free_std + j - emitted]
            policy[i, j] = min(max(log_std, LOG_STD_LOW), LOG_STD_HIGH)
    return policy, value


@compiled
def evaluate(network: Network, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Evaluate policy and value.

    Args:
        x: normalized observations, float32 [n, D].

    Returns:
        The policy's parameters [n, W], values [n], and what differentiate needs.
    """
    layers, _, _, parameters = network
    scratch = dense.evaluate(layers, parameters, x)
    policy, value = outputs(network, len(x), scratch)
    return policy, value, scratch


@compiled
def biases_last(layers: np.ndarray, parameters: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table, parameters and observations with which the dense layers of x add their bias after the inputs instead of
    before them. This is torch's order for observations that are not adjacent in memory.

    The bias is the weight of one more input, which is always 1: its product is exact, so the sum is rounded as ever.
    """
    size, samples, features = len(parameters), x.shape[0], x.shape[1]
    more = 0
    for layer in range(len(layers)):
        if layers[layer, SOURCE] < 0:
            more += (features + 2) * layers[layer, OUTPUTS]
    longer, moved, place = np.zeros(size + more, np.float32), layers.copy(), size
    longer[:size] = parameters
    for layer in range(len(layers)):
        if layers[layer, SOURCE] < 0:
            weight, bias, outputs = layers[layer, WEIGHT], layers[layer, BIAS], layers[layer, OUTPUTS]
            moved[layer, WEIGHT], moved[layer, INPUTS] = place, features + 1
            for j in range(outputs):
                for i in range(features):
                    longer[place + i] = parameters[weight + j * features + i]
                longer[place + features] = parameters[bias + j]
                place += features + 1
            moved[layer, BIAS] = place  # zeros
            place += outputs
    wider = np.ones((samples, features + 1), np.float32)
    for i in range(samples):
        for j in range(features):
            wider[i, j] = x[i, j]
    return moved, longer, wider


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
    """As evaluate, but if x is strided, its dense layers add their bias last. The last arguments and the last result
    are for cores: see lockstep.kernels.recurrent_network.evaluate_as_torch."""
    layers, free_std, log_stds, parameters = network
    if strided:
        layers, parameters, x = biases_last(layers, parameters, x)
    policy, value, scratch = evaluate((layers, free_std, log_stds, parameters), x)
    return policy, value, scratch, np.empty((0, 0, 0, 0), np.float32)


@compiled
def led_back(log_std: np.float32, gradient: np.float32) -> np.float32:
    """The gradient by a log standard deviation, or 0 if it leads further out of the bounds."""
    outwards = (log_std > LOG_STD_HIGH and gradient < 0) or (log_std < LOG_STD_LOW and gradient > 0)
    return np.float32(0) if outwards else gradient


@compiled
def differentiate(
    network: Network,
    x: np.ndarray,
    scratch: np.ndarray,
    by_policy: np.ndarray,
    by_value: np.ndarray,
    gradient: np.ndarray,
    fresh: bool,
    joined: bool,
) -> None:
    """Add the gradient of each of S equal slices of the samples by all parameters to gradient [S, P or more], given
    those by the policy's parameters [n, W] and by values [n], and what evaluate took and returned.

    The gradients by layers may be fresh and joined: see lockstep.kernels.dense.backward. Those by log standard
    deviations that do not depend on the observation are always added, slice by slice.

    A log standard deviation outside its bounds has only the gradient that leads back. If it does not depend on the
    observation, call lead_back after the last samples.
    """
    layers, free_std, log_stds, parameters = network
    n, last = len(x), len(layers) - 1
    gradients = np.empty_like(scratch)
    head, to_head = activations(scratch, layers, n, last - 1), activations(gradients, layers, n, last - 1)
    to_value = activations(gradients, layers, n, last)
    emitted, size, each = head.shape[1], by_policy.shape[1], n // len(gradient)
    for i in range(n):
        to_value[i, 0] = by_value[i]
        for j in range(emitted):
            bounded = j >= size - log_stds
            to_head[i, j] = led_back(head[i, j], by_policy[i, j]) if bounded else by_policy[i, j]
        for j in range(emitted, size):
            gradient[i // each, free_std + j - emitted] += by_policy[i, j]
    backward(parameters, layers, x, scratch, gradients, gradient, fresh, joined, x[:0])


@compiled
def lead_back(free_std: int, log_stds: int, parameters: np.ndarray, gradient: np.ndarray) -> None:
    """Remove the part of a complete gradient [P] that leads log standard deviations further out of their bounds. Other
    arguments are those of a Network."""
    if free_std >= 0:
        for j in range(free_std, free_std + log_stds):
            gradient[j] = led_back(parameters[j], gradient[j])


@compiled
def biases_in_parts(layers: np.ndarray, n: int, gradients: np.ndarray, gradient: np.ndarray, joined: bool) -> None:
    """Write gradients by biases that have one output, or that a convolution's places share. Arguments are those of
    differentiate_as_torch, which has written the gradients by outputs before the activation."""
    slices = len(gradient)
    for layer in range(len(layers)):
        outputs, kernel, bias = layers[layer, OUTPUTS], layers[layer, KERNEL], layers[layer, BIAS]
        if (outputs > 1 and not kernel) or layers[layer, ACTIVATION] > ELU:  # cores add up theirs themselves
            continue
        biases = rows_of_weights(layers, layer)
        rows = activations(gradients, layers, n, layer).reshape((slices, n // slices * (outputs // biases), biases))
        for s in range(slices):
            column_sums(rows[s], gradient[s, bias : bias + biases])
        if joined:
            add_up(gradient, bias, bias + biases)


@compiled
def by_free_std(
    first: int, emitted: int, parameters: np.ndarray, by_policy: np.ndarray, gradient: np.ndarray, joined: bool
) -> None:
    """Write the gradients by log standard deviations that do not depend on the observation, if there are any: the first
    of them is at `first` among the parameters. Those of each sample follow emitted numbers in by_policy [n, W]."""
    if first < 0:
        return
    slices, size = len(gradient), by_policy.shape[1] - emitted
    each = len(by_policy) // slices
    by_log_std = by_policy[:, emitted:].copy().reshape((slices, each, size))
    for s in range(slices):
        to = gradient[s, first : first + size]
        if size == 1:
            column_sums(by_log_std[s], to)
        else:
            to[:] = 0
            for i in range(each):
                for j in range(size):
                    to[j] += by_log_std[s, i, j]
        lead_back(first, size, parameters, gradient[s])
    if joined:
        add_up(gradient, first, first + size)


@apart(
    int64[:, :],
    float32[:],
    int64,
    float32[::1],
    float32[:, ::1],
    float32[::1],
    float32[::1],
    float32[:, ::1],
    boolean,
)
def heads_as_torch(
    layers: np.ndarray,
    parameters: np.ndarray,
    n: int,
    scratch: np.ndarray,
    by_policy: np.ndarray,
    by_value: np.ndarray,
    gradients: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
) -> None:
    """Write each slice's gradient by the heads' parameters, and to gradients, which is as scratch, those by what the
    heads take. Arguments are those of differentiate_as_torch."""
    policy, value = len(layers) - 2, len(layers) - 1
    to_policy, to_value = activations(gradients, layers, n, policy), activations(gradients, layers, n, value)
    emitted = to_policy.shape[1]
    for i in range(n):
        to_value[i, 0] = by_value[i]
        for j in range(emitted):
            to_policy[i, j] = by_policy[i, j]
    begin = n * layers[:policy, OUTPUTS].sum()  # where the policy's outputs lie in scratch, which the value's follow
    end = begin + n * emitted
    for head, first, last in ((value, end, end + n), (policy, begin, end)):
        source = layers[head, SOURCE]
        alone = layers[head : head + 1].copy()
        alone[0, SOURCE] = -1
        below, to = activations(scratch, layers, n, source), activations(gradients, layers, n, source)
        by_below, own = np.empty_like(below), gradients[first:last]
        backward(parameters, alone, below, scratch[first:last], own, gradient, True, joined, by_below)
        added = head == policy and source == layers[value, SOURCE]
        for i in range(n):
            for j in range(to.shape[1]):
                to[i, j] = to[i, j] + by_below[i, j] if added else by_below[i, j]


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
    """Write the gradient of each of S equal slices, with the bits of torch's replaced operations (lockstep.portable):
    each head's gradient by its features is one sum, and some biases are added up in parts.

    Args:
        extra, kept, columns, start: for cores: see lockstep.kernels.recurrent_network.
        by_policy: as for differentiate. Where a head emits log standard deviations, bounds have been applied.
        joined: write the tree's sum over all slices to gradient[0]. The rest is overwritten.
    """
    layers, free_std, _, parameters = network
    n, heads, gradients = len(x), len(layers) - 2, np.empty_like(scratch)
    heads_as_torch(layers, parameters, n, scratch, by_policy, by_value, gradients, gradient, joined)
    size = n * layers[:heads, OUTPUTS].sum()
    backward(parameters, layers[:heads], x, scratch[:size], gradients[:size], gradient, True, joined, x[:0])
    biases_in_parts(layers, n, gradients, gradient, joined)
    by_free_std(free_std, layers[heads, OUTPUTS], parameters, by_policy, gradient, joined)
