"""Gradients of R2D2 in portable arithmetic: the loss of lockstep.algorithms.r2d2 for several shards' slices, with the
bits of torch's replaced operations.

Shape legend: P parameters, S slices, L steps of burn-in, M steps that are learned from, T = L + M + N steps of a
sequence, n sequences of a slice, D numbers of an observation, E extra features, K numbers of a core's state, A actions,
Z numbers of a network's noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.q_learning import DQN_SUMS, best, huber
from lockstep.kernels.q_networks import QNetwork, describe_features, disturb, expected, scale_noise
from lockstep.kernels.recurrent_q import RecurrentQNetwork, Steps, differentiate, panels_of_core, unroll
from lockstep.kernels.sums import add_up, row_sums

_ZERO, _ONE = map(np.float32, (0, 1))


class Settings(NamedTuple):
    """Settings of lockstep.algorithms.r2d2."""

    double: bool
    """Whether the model chooses the action that the target network values."""
    burn_in: int
    """L."""
    rescaling: float
    """ε of the values' rescaling."""
    priority_max: float
    """η of priorities."""
    huber_delta: float
    """The error from which on the loss is linear."""


class Sequences(NamedTuple):
    """The slices of a minibatch, as lockstep.core.transitions has them."""

    obs: np.ndarray
    """As the encoder's layers see them: float32 [S, T * n, D]."""
    extra: np.ndarray
    """Further inputs of the core: float32 [S, T * n, E]."""
    start: np.ndarray
    """bool [S, T * n]"""
    state: np.ndarray
    """float32 [S, n, K]"""
    action: np.ndarray
    """int64 [S, M * n]"""
    reward: np.ndarray
    """float32 [S, M * n]"""
    discount: np.ndarray
    """float32 [S, M * n]"""
    ahead: np.ndarray
    """int64 [S, M * n]"""
    valid: np.ndarray
    """bool [S, M * n]"""
    weight: np.ndarray
    """float32 [S * n]"""
    noise: np.ndarray
    """Uniform numbers, float32 [2ZS]: by slice, those of the model and of the target network."""


@compiled
def rescale(x: np.float32, epsilon: float) -> np.float32:
    """h of lockstep.algorithms.r2d2."""
    return x / (np.sqrt(abs(x) + _ONE) + _ONE) + np.float32(epsilon) * x


@compiled
def unscale(y: np.float32, epsilon: float) -> np.float32:
    """The inverse of h."""
    size = abs(np.float64(y))
    root = np.sqrt(1.0 + 4.0 * epsilon * (size + 1.0 + epsilon))
    part = (root - 1.0) / (2.0 * epsilon)
    sign = 1.0 if y > _ZERO else (-1.0 if y < _ZERO else 0.0)
    return np.float32(sign * (part * part - 1.0))


@compiled
def _over_steps(x: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of each sequence's numbers: float32 [M, n] -> [n]. The numbers of a single sequence are
    adjacent."""
    steps, sequences = x.shape
    if sequences == 1:
        row_sums(x.reshape((1, steps)), out)
        return
    out[:] = _ZERO
    for t in range(steps):
        for j in range(sequences):
            out[j] += x[t, j]


@compiled
def _learn(
    value: np.ndarray,
    target: np.ndarray,
    valid: np.ndarray,
    weight: np.ndarray,
    share: float,
    delta: np.float32,
    by_value: np.ndarray,
    sums: np.ndarray,
    priority: np.ndarray,
) -> None:
    """Learn by the Huber loss: values and targets float32 and bool [M * n], weights [n] -> the gradient by values
    [M * n], the sums of metrics [DQN_SUMS], and priorities [n] (lockstep.algorithms.losses.mixed_priority)."""
    sequences = len(weight)
    steps = len(value) // sequences
    losses, terms = np.empty((steps, sequences), np.float32), np.empty((3, len(value)), np.float32)
    for i in range(len(value)):
        j, keep = i % sequences, _ONE if valid[i] else _ZERO
        error = value[i] - target[i]
        loss, slope = huber(error, delta)
        losses[i // sequences, j] = loss * keep
        by_value[i] = slope * (weight[j] * keep)
        terms[0, i], terms[1, i], terms[2, i] = value[i] * keep, target[i] * keep, abs(error) * keep
    row_sums(terms, sums[1:])
    size, total = terms[2].reshape((steps, sequences)), np.empty((1, sequences), np.float32)
    _over_steps(losses, total[0])
    for j in range(sequences):
        total[0, j] *= weight[j]
    row_sums(total, sums[:1])
    _over_steps(size, total[0])
    for j in range(sequences):
        largest, count = size[0, j], 0
        for t in range(steps):
            largest, count = max(largest, size[t, j]), count + valid[t * sequences + j]
        mean = np.float32(1.0 - share) * total[0, j] / np.float32(max(count, 1))
        priority[j] = np.float32(share) * largest + mean


@compiled
def _between(items: Sequences, s: int, begin: int, end: int) -> Steps:
    """Some steps of a slice."""
    return Steps(items.obs[s, begin:end], items.extra[s, begin:end], items.start[s, begin:end])


@compiled
def sequence_gradients(
    network: QNetwork,
    core: np.ndarray,
    parameters: np.ndarray,
    target: np.ndarray,
    settings: Settings,
    items: Sequences,
    joined: bool,
    used: np.ndarray,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradients of the loss of the chosen actions' rescaled values.

    Args:
        network, core: where the model's parts lie.
        items: the minibatch.
        used: float32 [2, P], overwritten.
        priority: float32 [S * n], written.
        parameters, target, joined, out: as for lockstep.kernels.q_learning.dqn_gradients.
    """
    slices, size, (sequences, _) = len(out), len(parameters), items.state.shape[1:]
    begin, learned, total = settings.burn_in * sequences, items.action.shape[1], items.start.shape[1]
    end, drawn, epsilon = begin + learned, len(items.noise) // slices, settings.rescaling
    panels, target_panels = panels_of_core(core, parameters), panels_of_core(core, target)
    noise = np.empty(drawn, np.float32)
    online_noise, target_noise = noise[: drawn // 2], noise[drawn // 2 :]
    value, wanted = np.empty(learned, np.float32), np.empty(learned, np.float32)
    by_value = np.empty((learned, 1), np.float32)
    for s in range(slices):
        scale_noise(items.noise[s * drawn : (s + 1) * drawn], noise)
        online = disturb(network, parameters, online_noise, used[0])
        following = disturb(network, target, target_noise, used[1])
        model = RecurrentQNetwork(network, core, online, parameters, panels)
        frozen = RecurrentQNetwork(network, core, following, target, target_panels)
        h_t = unroll(frozen, _between(items, s, 0, total), items.state[s].copy()).h
        q_t = describe_features(network, following, h_t[begin:])[0]
        state, action, steps = items.state[s].copy(), items.action[s], _between(items, s, begin, end)
        if begin:
            unroll(model, _between(items, s, 0, begin), state)
        unrolled = unroll(model, steps, state)
        computed = describe_features(network, online, unrolled.h)
        selector = expected(network, q_t)
        if settings.double:
            after = unroll(model, _between(items, s, end, total), state)
            selector[:learned] = expected(network, computed[0])
            selector[learned:] = expected(network, describe_features(network, online, after.h)[0])
        for i in range(learned):
            then = i + items.ahead[s, i] * sequences
            found = unscale(q_t[then, best(selector[then]), 0], epsilon)
            wanted[i] = rescale(items.reward[s, i] + items.discount[s, i] * found, epsilon)
            value[i] = computed[0][i, action[i], 0]
        first, last = s * sequences, (s + 1) * sequences
        weight, to_priority, sums = items.weight[first:last], priority[first:last], out[s, size + 1 :]
        of_loss = settings.priority_max, np.float32(settings.huber_delta)
        _learn(value, wanted, items.valid[s], weight, *of_loss, by_value[:, 0], sums, to_priority)
        out[s, size] = np.float32(items.valid[s].sum())
        differentiate(model, online_noise, steps, sequences, unrolled, computed, action, by_value, out[s : s + 1])
    if joined:
        add_up(out, 0, size + 1 + DQN_SUMS)
