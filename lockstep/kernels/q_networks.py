"""Networks of action values with noisy layers, dueling streams, atoms and quantiles (lockstep.models.q), with the bits
of torch's replaced operations (lockstep.portable).

Shape legend: P parameters, L layers, N noisy layers, Z numbers of noise, n samples, D numbers of an observation, F
features, A actions, K numbers by which a head describes an action's return: atoms, quantiles, or one. R rows that the
streams take: n, or, with implicit quantiles, nK.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import BIAS, WEIGHT, activations, backward, evaluate, sizes
from lockstep.kernels.fractions import cosines, embed, embed_back
from lockstep.kernels.math import ndtri
from lockstep.kernels.network import biases_in_parts, biases_last
from lockstep.kernels.policies import exponentiate, log_softmax, within
from lockstep.kernels.sums import middle_sums, row_sums
from lockstep.kernels.vectors import move_row

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
    embedding: np.ndarray
    """The table of the layer that embeds an implicit quantile's fraction. It has no rows for other returns."""
    multiples: np.ndarray
    """Factors of a fraction before the cosines that this layer takes: float32 [E]."""
    atoms: np.ndarray
    """float32 [K]; [0] unless returns are categorical."""
    fractions: np.ndarray
    """float32 [K]: those of quantiles, or those of the implicit ones whose mean chooses actions; [0] for other
    returns."""


class Computed(NamedTuple):
    """The results of a network for n samples, which differentiate needs. Outputs of layers are as
    lockstep.kernels.dense.evaluate returns them."""

    numbers: np.ndarray
    """The numbers that describe every action's return, [n, A, K]."""
    encoder: np.ndarray
    """The outputs of the encoder's layers."""
    cosines: np.ndarray
    """The cosines of fractions, float32 [R, E]; no rows unless quantiles are implicit."""
    embedding: np.ndarray
    """The outputs of the layer that takes the cosines."""
    inputs: np.ndarray
    """What the streams take, float32 [R, F]."""
    advantage: np.ndarray
    """The outputs of the layers of the stream of advantages."""
    value: np.ndarray
    """The outputs of the layers of the stream of the state's value."""


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
    _copy_layers(network.embedding, parameters, used)
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
    mean = np.empty((n, kinds), np.float32)
    middle_sums(numbers, mean)
    for i in range(n):
        for k in range(kinds):
            mean[i, k] /= np.float32(actions)
        for a in range(actions):
            for k in range(kinds):
                numbers[i, a, k] = (value[i, k] + numbers[i, a, k]) - mean[i, k]


@compiled
def encode(network: QNetwork, used: np.ndarray, x: np.ndarray, strided: bool) -> np.ndarray:
    """Evaluate the encoder: observations [n, D] -> the outputs of its layers.

    Args:
        used: what disturb returned.
        strided: whether dense layers of x add their bias last: see lockstep.kernels.network.biases_last.
    """
    if strided:
        return evaluate(*biases_last(network.encoder, used, x))
    return evaluate(network.encoder, used, x)


@compiled
def _by_action(rows: np.ndarray, n: int) -> np.ndarray:
    """One number for each action and row [nK, A, 1] -> [n, A, K]"""
    actions, kinds = rows.shape[1], len(rows) // n
    out = np.empty((n, actions, kinds), np.float32)
    for i in range(n):
        for k in range(kinds):
            for a in range(actions):
                out[i, a, k] = rows[i * kinds + k, a, 0]
    return out


@compiled
def describe_features(
    network: QNetwork, used: np.ndarray, features: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Evaluate the streams: what they take [R, F] -> numbers that describe each action's return [R, A, K], or [R, A, 1]
    of a quantile for each row; and what the streams of advantages and of the value have computed."""
    kinds = 1 if len(network.embedding) else max(1, len(network.atoms), len(network.fractions))
    of_advantage, rows = evaluate(network.advantage, used, features), len(features)
    advantage = activations(of_advantage, network.advantage, rows, len(network.advantage) - 1)
    numbers = advantage.copy().reshape((rows, advantage.shape[1] // kinds, kinds))
    of_value = of_advantage[:0]
    if len(network.value):
        of_value = evaluate(network.value, used, features)
        _join_streams(activations(of_value, network.value, rows, len(network.value) - 1), numbers)
    return numbers, of_advantage, of_value


@compiled
def describe_at(network: QNetwork, used: np.ndarray, of_encoder: np.ndarray, n: int, tau: np.ndarray) -> Computed:
    """Describe every action's return by K numbers, given what encode returned of n observations.

    Args:
        used: what disturb returned.
        tau: fractions of implicit quantiles, float32 [n, K], or [1, K] for all observations. Other returns ignore them.
    """
    inputs, implicit = activations(of_encoder, network.encoder, n, len(network.encoder) - 1), len(network.embedding) > 0
    of_fractions, of_embedding = np.empty((0, len(network.multiples)), np.float32), of_encoder[:0]
    if implicit:
        of_fractions = cosines(tau, network.multiples)
        of_embedding = evaluate(network.embedding, used, of_fractions)
        inputs = embed(inputs, of_embedding.reshape((len(of_fractions), inputs.shape[1])), tau.shape[1])
    numbers, of_advantage, of_value = describe_features(network, used, inputs)
    if implicit:
        numbers = _by_action(numbers, n)
    return Computed(numbers, of_encoder, of_fractions, of_embedding, inputs, of_advantage, of_value)


@compiled
def describe(network: QNetwork, used: np.ndarray, x: np.ndarray, strided: bool) -> Computed:
    """As describe_at, for observations [n, D]; implicit quantiles are those at the network's fractions. Arguments are
    those of encode."""
    tau = network.fractions.reshape((1, len(network.fractions)))
    return describe_at(network, used, encode(network, used, x, strided), len(x), tau)


@compiled
def mean_returns(p: np.ndarray, atoms: np.ndarray, out: np.ndarray) -> None:
    """Write the mean of each distribution over the atoms [K]: probabilities [n, K] -> [n]"""
    weighted = np.empty_like(p)
    for i in range(len(p)):
        for k in range(len(atoms)):
            weighted[i, k] = p[i, k] * atoms[k]
    row_sums(weighted, out)


@compiled
def means(rows: np.ndarray, out: np.ndarray) -> None:
    """Write the mean of each row: [n, K] -> [n]"""
    row_sums(rows, out)
    for i in range(len(out)):
        out[i] /= np.float32(rows.shape[1])


@compiled
def expected(network: QNetwork, numbers: np.ndarray) -> np.ndarray:
    """The expected returns [n, A] of what describe returned [n, A, K]."""
    n, actions, kinds = numbers.shape
    rows, out = numbers.reshape((n * actions, kinds)), np.empty((n, actions), np.float32)
    if len(network.atoms):
        p = np.empty_like(rows)
        log_softmax(rows, p)
        exponentiate(p)
        mean_returns(p, network.atoms, out.reshape(n * actions))
    elif len(network.fractions):
        means(rows, out.reshape(n * actions))
    else:
        out.reshape(n * actions)[:] = rows[:, 0]
    return out


@compiled
def act(network: QNetwork, used: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The expected returns of all actions, [n, D] -> [n, A]. used: what disturb returned."""
    return expected(network, describe(network, used, x, False).numbers)


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
def differentiate_streams(
    network: QNetwork,
    used: np.ndarray,
    features: np.ndarray,
    computed: tuple[np.ndarray, np.ndarray, np.ndarray],
    action: np.ndarray,
    by_numbers: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
) -> np.ndarray:
    """Write each slice's gradients by the streams' parameters, and return those by what the streams take [R, F].

    Args:
        computed: what describe_features returned of it; implicit quantiles may be grouped by action.
        used, action, by_numbers, gradient, joined: as for differentiate.
    """
    numbers, of_advantage, of_value = computed
    rows, actions = len(features), numbers.shape[1]
    each, kinds = rows // len(action), by_numbers.size // rows
    by_value, by_advantage = by_numbers.reshape((rows, kinds)), np.zeros((rows, actions * kinds), np.float32)
    for r in range(rows):
        begin = action[r // each] * kinds
        for k in range(kinds):
            by_advantage[r, begin + k] += by_value[r, k]
    dueling = len(network.value) > 0
    if dueling:
        for r in range(rows):
            for k in range(kinds):
                by_mean = (_ZERO - by_value[r, k]) / np.float32(actions)
                for a in range(actions):
                    by_advantage[r, a * kinds + k] += by_mean
    by_features = np.empty(features.shape, np.float32)
    _back_through(network.advantage, used, features, of_advantage, by_advantage, gradient, joined, by_features)
    if dueling:
        more = np.empty(features.shape, np.float32)
        _back_through(network.value, used, features, of_value, by_value, gradient, joined, more)
        for r in range(rows):
            for j in range(features.shape[1]):
                by_features[r, j] += more[r, j]
    return by_features


@compiled
def differentiate_encoder(
    network: QNetwork,
    used: np.ndarray,
    noise: np.ndarray,
    x: np.ndarray,
    of_encoder: np.ndarray,
    by_features: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
) -> None:
    """Write each slice's gradients by the encoder's parameters, given that by its features [n, F]; and, last of all,
    those by the sizes of noise. Other arguments are those of differentiate."""
    _back_through(network.encoder, used, x, of_encoder, by_features, gradient, joined, x[:0])
    for s in range(len(gradient)):
        _by_sigmas(network, noise, gradient[s])


@compiled
def differentiate(
    network: QNetwork,
    used: np.ndarray,
    noise: np.ndarray,
    x: np.ndarray,
    computed: Computed,
    action: np.ndarray,
    by_numbers: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
) -> None:
    """Write each slice's gradients by all parameters.

    Args:
        used, noise: what disturb returned, and what it was given.
        x: observations [n, D].
        computed: what describe returned of them. Implicit quantiles are at fractions of each observation.
        action: int64 [n].
        by_numbers: the gradient by the chosen actions' numbers, float32 [n, K].
        gradient: float32 [S, P or more].
        joined: write the tree's sum over all slices to gradient[0]. It needs no noise, and overwrites the other rows.
    """
    of_streams = computed.numbers, computed.advantage, computed.value
    by_features = differentiate_streams(
        network, used, computed.inputs, of_streams, action, by_numbers, gradient, joined
    )
    if len(network.embedding):
        features = activations(computed.encoder, network.encoder, len(x), len(network.encoder) - 1)
        given, embedded = computed.cosines, computed.embedding.reshape(by_features.shape)
        by_features, by_embedded = embed_back(features, embedded, by_features)
        _back_through(network.embedding, used, given, computed.embedding, by_embedded, gradient, joined, given[:0])
    differentiate_encoder(network, used, noise, x, computed.encoder, by_features, gradient, joined)
