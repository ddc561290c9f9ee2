"""Networks of action values with noisy layers, dueling streams and atoms (lockstep.models.q), with the bits of torch's
replaced operations (lockstep.portable).

Shape legend: P parameters, L layers, N noisy layers, Z numbers of noise, n samples, D numbers of an observation, F
features, A actions, K numbers by which a head describes an action's return: atoms, or one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import BIAS, WEIGHT, activations, backward, evaluate, sizes
from lockstep.kernels.math import ndtri
from lockstep.kernels.network import biases_in_parts, biases_last
from lockstep.kernels.policies import exponentiate, log_softmax, within
from lockstep.kernels.sums import row_sums
from lockstep.kernels.tiles import move_row

_ZERO, _ONE = np.float32(0), np.float32(1)


class QNetwork(NamedTuple):
    """Where the parts of a model lie among its parameters. Tables are those of lockstep.kernels.dense."""

    encoder: np.ndarray
    """Its table, int64 [L, 14]."""
    advantage: np.ndarray
    """The table of the stream of advantages, or of all values if there are no dueling streams. It takes features."""
    value: np.ndarray
    """The table of the stream of the state's value. It has no rows if there are no dueling streams."""
    noisy: np.ndarray
    """int64 [N, 6]: where the weights, biases, and the sizes of their noise begin, and how many inputs and outputs a
    layer has."""
    atoms: np.ndarray
    """float32 [K]; [0] for expected returns."""


@compiled
def scale_noise(uniform: np.ndarray, out: np.ndarray) -> None:
    """Given uniform numbers [Z], write the noise of noisy layers' inputs and outputs (Fortunato et al. 2018,
    arXiv:1706.10295, section 3: f)."""
    for i in range(len(uniform)):
        normal = ndtri(within(uniform[i]))
        root = np.sqrt(abs(normal))
        out[i] = root if normal > 0 else (-root if normal < 0 else _ZERO)


@compiled
def _copy_layers(layers: np.ndarray, parameters: np.ndarray, used: np.ndarray) -> None:
    """Copy the layers' weights and biases [P]."""
    for layer in range(len(layers)):
        weight, bias = layers[layer, WEIGHT], layers[layer, BIAS]
        weights, biases = sizes(layers, layer)
        move_row(parameters[weight : weight + weights], used[weight : weight + weights])
        move_row(parameters[bias : bias + biases], used[bias : bias + biases])


@compiled
def disturb(network: QNetwork, parameters: np.ndarray, noise: np.ndarray, used: np.ndarray) -> np.ndarray:
    """The parameters with which a network computes: those given if no layer is noisy.

    Args:
        parameters: float32 [P].
        noise: what scale_noise wrote, float32 [Z].
        used: float32 [P], where the disturbed weights and biases are written.
    """
    if len(network.noisy) == 0:
        return parameters
    _copy_layers(network.encoder, parameters, used)
    begin = 0
    for layer in range(len(network.noisy)):
        weight, bias, weight_sigma, bias_sigma, inputs, outputs = network.noisy[layer]
        into, out = noise[begin : begin + inputs], noise[begin + inputs : begin + inputs + outputs]
        begin += inputs + outputs
        for j in range(outputs):
            first, second = weight + j * inputs, weight_sigma + j * inputs
            to, mean = used[first : first + inputs], parameters[first : first + inputs]
            sigma, factor = parameters[second : second + inputs], out[j]
            for i in range(inputs):
                to[i] = mean[i] + sigma[i] * (factor * into[i])
            used[bias + j] = parameters[bias + j] + parameters[bias_sigma + j] * factor
    return used


@compiled
def _by_sigmas(network: QNetwork, noise: np.ndarray, gradient: np.ndarray) -> None:
    """Write the gradients by the sizes of noise, given those by the disturbed weights and biases, [P or more]."""
    begin = 0
    for layer in range(len(network.noisy)):
        weight, bias, weight_sigma, bias_sigma, inputs, outputs = network.noisy[layer]
        into, out = noise[begin : begin + inputs], noise[begin + inputs : begin + inputs + outputs]
        begin += inputs + outputs
        for j in range(outputs):
            first, second = weight + j * inputs, weight_sigma + j * inputs
            of, to, factor = gradient[first : first + inputs], gradient[second : second + inputs], out[j]
            for i in range(inputs):
                to[i] = of[i] * (factor * into[i])
            gradient[bias_sigma + j] = gradient[bias + j] * factor


@compiled
def _join_streams(value: np.ndarray, numbers: np.ndarray) -> None:
    """Turn advantages [n, A, K] into values of actions, given the values of states [n, K] (Wang et al. 2016,
    arXiv:1511.06581, equation 9)."""
    n, actions, kinds = numbers.shape
    mean = np.zeros((n, kinds), np.float32)
    if kinds == 1:
        row_sums(numbers.reshape((n, actions)), mean.reshape(n))
    for i in range(n):
        if kinds > 1:
            for a in range(actions):
                for k in range(kinds):
                    mean[i, k] += numbers[i, a, k]
        for k in range(kinds):
            mean[i, k] /= np.float32(actions)
        for a in range(actions):
            for k in range(kinds):
                numbers[i, a, k] = (value[i, k] + numbers[i, a, k]) - mean[i, k]


@compiled
def describe(
    network: QNetwork, used: np.ndarray, x: np.ndarray, strided: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Describe every action's return by K numbers: observations [n, D] -> [n, A, K]. The other results are what the
    encoder and the streams of advantages and of the value have computed.

    Args:
        used: what disturb returned.
        strided: whether dense layers of x add their bias last: see lockstep.kernels.network.biases_last.
    """
    n, kinds = len(x), max(1, len(network.atoms))
    if strided:
        of_encoder = evaluate(*biases_last(network.encoder, used, x))
    else:
        of_encoder = evaluate(network.encoder, used, x)
    features = activations(of_encoder, network.encoder, n, len(network.encoder) - 1)
    of_advantage = evaluate(network.advantage, used, features)
    advantage = activations(of_advantage, network.advantage, n, len(network.advantage) - 1)
    numbers = advantage.copy().reshape((n, advantage.shape[1] // kinds, kinds))
    of_value = of_encoder[:0]
    if len(network.value):
        of_value = evaluate(network.value, used, features)
        _join_streams(activations(of_value, network.value, n, len(network.value) - 1), numbers)
    return numbers, of_encoder, of_advantage, of_value


@compiled
def mean_returns(p: np.ndarray, atoms: np.ndarray, out: np.ndarray) -> None:
    """Write the mean of each distribution over the atoms [K]: probabilities [n, K] -> [n]"""
    weighted = np.empty_like(p)
    for i in range(len(p)):
        for k in range(len(atoms)):
            weighted[i, k] = p[i, k] * atoms[k]
    row_sums(weighted, out)


@compiled
def expected(atoms: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The expected returns [n, A] of what describe returned [n, A, K]."""
    n, actions, kinds = numbers.shape
    rows, out = numbers.reshape((n * actions, kinds)), np.empty((n, actions), np.float32)
    if len(atoms) == 0:
        for i in range(n * actions):
            out[i // actions, i % actions] = rows[i, 0]
        return out
    p = np.empty_like(rows)
    log_softmax(rows, p)
    exponentiate(p)
    mean_returns(p, atoms, out.reshape(n * actions))
    return out


@compiled
def act(network: QNetwork, used: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The expected returns of all actions, [n, D] -> [n, A]. used: what disturb returned."""
    return expected(network.atoms, describe(network, used, x, False)[0])


@compiled
def _back_through(
    layers: np.ndarray,
    used: np.ndarray,
    x: np.ndarray,
    scratch: np.ndarray,
    by_y: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
    by_x: np.ndarray,
) -> None:
    """Given the gradients by the last layer's outputs [n, M], write those by the layers' parameters to gradient
    [S, P or more], and those by x to by_x [n, F] unless it is empty. joined: see lockstep.kernels.dense.backward."""
    n, gradients = len(x), np.empty_like(scratch)
    to = activations(gradients, layers, n, len(layers) - 1)
    for i in range(n):
        for j in range(to.shape[1]):
            to[i, j] = by_y[i, j]
    backward(used, layers, x, scratch, gradients, gradient, True, joined, by_x)
    biases_in_parts(layers, n, gradients, gradient, joined)


@compiled
def differentiate(
    network: QNetwork,
    used: np.ndarray,
    noise: np.ndarray,
    x: np.ndarray,
    computed: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    action: np.ndarray,
    by_numbers: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
) -> None:
    """Write each slice's gradients by all parameters.

    Args:
        used, noise: what disturb returned, and what it was given.
        x: observations [n, D].
        computed: what describe returned of them.
        action: int64 [n].
        by_numbers: the gradient by the chosen actions' numbers, float32 [n, K].
        gradient: float32 [S, P or more].
        joined: write the tree's sum over all slices to gradient[0]. It needs no noise, and overwrites the other rows.
    """
    numbers, of_encoder, of_advantage, of_value = computed
    n, actions, kinds = numbers.shape
    by_advantage = np.zeros((n, actions * kinds), np.float32)
    for i in range(n):
        begin = action[i] * kinds
        for k in range(kinds):
            by_advantage[i, begin + k] += by_numbers[i, k]
    dueling = len(network.value) > 0
    if dueling:
        for i in range(n):
            for k in range(kinds):
                by_mean = (_ZERO - by_numbers[i, k]) / np.float32(actions)
                for a in range(actions):
                    by_advantage[i, a * kinds + k] += by_mean
    features = activations(of_encoder, network.encoder, n, len(network.encoder) - 1)
    by_features = np.empty(features.shape, np.float32)
    _back_through(network.advantage, used, features, of_advantage, by_advantage, gradient, joined, by_features)
    if dueling:
        more = np.empty(features.shape, np.float32)
        _back_through(network.value, used, features, of_value, by_numbers, gradient, joined, more)
        for i in range(n):
            for j in range(features.shape[1]):
                by_features[i, j] += more[i, j]
    _back_through(network.encoder, used, x, of_encoder, by_features, gradient, joined, x[:0])
    for s in range(len(gradient)):
        _by_sigmas(network, noise, gradient[s])
