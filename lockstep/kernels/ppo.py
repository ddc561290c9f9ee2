"""PPO in portable arithmetic: the gradient of the loss that lockstep.algorithms.ppo defines, for all shards at once.

Shape legend: P parameters, S shards of this process, C of them that are computed together, N items of a rollout, n of
them in a slice of a minibatch, D numbers of an observation, A numbers of an action, W parameters of a policy.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import OUTPUTS
from lockstep.kernels.math import exp
from lockstep.kernels.network import Network, differentiate, evaluate, lead_back
from lockstep.kernels.policies import (
    CATEGORICAL,
    entropy_categorical,
    entropy_gaussian,
    exponentials,
    log_prob_gaussian,
    log_softmax,
)
from lockstep.kernels.sums import add_up
from lockstep.kernels.vectors import move_row

_LARGEST_LOG_RATIO = np.float32(80)
_ONE, _HALF, _ZERO = np.float32(1), np.float32(0.5), np.float32(0)
_TOGETHER = 65_536
"""Activations of samples that pass through the network together, so that they stay in the cache. It changes no bit:
sums add sample by sample."""
_LEAST = 128
"""The least number of these samples, since each product reads all of a layer's weights."""
_WHOLE = 64
"""Their number is a multiple of this, which fills tiles and rarely leaves a small rest of a minibatch."""
Samples = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Actions float32 [n, A], of a Gaussian, and choices int64 [n], of a categorical distribution; old log-probabilities,
old values, standardized advantages and value targets, float32 [n]; which are valid, bool [n]."""
SUMS = 9
"""Numbers that a slice adds up besides its gradient: lockstep.algorithms.ppo.PPO.metric_names, after the count."""


@compiled
def _excess(log_ratio: np.float32, ratio: np.float32) -> np.float32:
    """exp(x) - 1 - x, without cancellation where x is small."""
    x = log_ratio
    near = x * x * (_HALF + x * (np.float32(1 / 6) + x * np.float32(1 / 24)))
    return near if abs(x) < np.float32(0.03) else (ratio - _ONE) - x


@compiled
def _judge(
    kind: int, policy: np.ndarray, action: np.ndarray, choice: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities of actions [n] and entropies [n]; of a categorical distribution also all log-probabilities and
    probabilities [n, W]."""
    n = len(policy)
    log_prob, entropy = np.empty(n, np.float32), np.empty(n, np.float32)
    log_p, p = np.empty_like(policy), np.empty_like(policy)
    if kind == CATEGORICAL:
        log_softmax(policy, log_p)
        exponentials(log_p, p)
        entropy_categorical(log_p, p, entropy)
        for i in range(n):
            log_prob[i] = log_p[i, choice[i]]
    else:
        log_prob_gaussian(policy, action, log_prob)
        entropy_gaussian(policy, entropy)
    return log_prob, entropy, log_p, p


@compiled
def _value_loss(
    value: np.float32, old_value: np.float32, target: np.float32, value_clip: np.float32
) -> tuple[np.float32, np.float32]:
    """The squared error of a value, clipped if value_clip is above 0, and half its gradient by the value."""
    error = value - target
    squared, by_value = error * error, error
    if value_clip > 0:
        move = value - old_value
        kept = min(max(move, -value_clip), value_clip)
        other = old_value + kept - target
        if other * other > squared:
            squared = other * other
            by_value = other if abs(move) <= value_clip else _ZERO
    return squared, by_value


@compiled
def _add_loss(
    kind: int,
    policy: np.ndarray,
    value: np.ndarray,
    samples: Samples,
    hyper: tuple[np.float32, np.float32, np.float32, np.float32],
    of_policy: np.ndarray,
    of_value: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Write the gradient of the loss by policy and value, and add to the sums over valid samples.

    Args:
        kind: of the distribution.
        policy, value: the model's outputs, float32 [n, W] and [n].
        hyper: clip, value_clip, value_coef and entropy_coef; a value_clip of 0 switches clipping of values off.
        of_policy, of_value: the gradients, float32 [n, W] and [n].
        sums: float64 [1 + SUMS]: valid samples, then the sum of each metric.
    """
    clip, value_clip, value_coef, entropy_coef = hyper
    action, choice, old_log_prob, old_value, advantage, target, valid = samples
    (n, size), ratio = policy.shape, np.empty(len(policy), np.float32)
    log_prob, entropy, log_p, p = _judge(kind, policy, action, choice)
    for i in range(n):
        ratio[i] = exp(min(log_prob[i] - old_log_prob[i], _LARGEST_LOG_RATIO))
    low, high = _ONE - clip, _ONE + clip
    for i in range(n):
        of_value[i] = 0
        for j in range(size):
            of_policy[i, j] = 0
        if not valid[i]:
            continue
        difference = log_prob[i] - old_log_prob[i]
        log_ratio = min(difference, _LARGEST_LOG_RATIO)
        free = ratio[i] * advantage[i]
        held = min(max(ratio[i], low), high) * advantage[i]
        # The gradient by the log-probability: none where clipping decides, or where the ratio was cut.
        slope = -free if free <= held and difference <= _LARGEST_LOG_RATIO else _ZERO

        squared, by_value = _value_loss(value[i], old_value[i], target[i], value_clip)
        of_value[i] = value_coef * by_value

        if kind == CATEGORICAL:
            for a in range(size):
                chosen = _ONE if a == choice[i] else _ZERO
                by_entropy = p[i, a] * (log_p[i, a] + entropy[i])
                of_policy[i, a] = slope * (chosen - p[i, a]) + entropy_coef * by_entropy
        else:
            half = size // 2
            for d in range(half):
                inverse = exp(-policy[i, half + d])
                z = (action[i, d] - policy[i, d]) * inverse
                of_policy[i, d] = slope * (z * inverse)
                of_policy[i, half + d] = slope * (z * z - _ONE) - entropy_coef

        gap = target[i] - value[i]
        sums[0] += 1
        sums[1] -= min(free, held)
        sums[2] += _HALF * squared
        sums[3] += entropy[i]
        sums[4] += _excess(log_ratio, ratio[i])
        sums[5] += 1 if abs(ratio[i] - _ONE) > clip else 0
        sums[6] += target[i]
        sums[7] += target[i] * target[i]
        sums[8] += gap
        sums[9] += gap * gap


@compiled
def _gather(
    items: tuple[np.ndarray, ...], shard: int, index: np.ndarray, scale: tuple[np.float32, np.float32]
) -> Samples:
    """Some items of a shard's rollout, index [n]."""
    _, actions, choices, old_log_probs, old_values, advantages, targets, valids = items
    n, (mean, std) = len(index), scale
    action, choice = np.empty((n, actions.shape[2]), np.float32), np.empty(n, np.int64)
    numbers, valid = np.empty((4, n), np.float32), np.empty(n, np.bool_)
    old_log_prob, old_value, advantage, target = numbers[0], numbers[1], numbers[2], numbers[3]
    for i in range(n):
        item = index[i]
        move_row(actions[shard, item], action[i])
        choice[i] = choices[shard, item]
        old_log_prob[i] = old_log_probs[shard, item]
        old_value[i] = old_values[shard, item]
        advantage[i] = (advantages[shard, item] - mean) / std
        target[i] = targets[shard, item]
        valid[i] = valids[shard, item]
    return action, choice, old_log_prob, old_value, advantage, target, valid


@compiled
def _add_gradient(
    network: Network,
    kind: int,
    items: tuple[np.ndarray, ...],
    first: int,
    index: np.ndarray,
    scale: tuple[np.float32, np.float32],
    hyper: tuple[np.float32, np.float32, np.float32, np.float32],
    fresh: bool,
    joined: bool,
    gradient: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add the gradients [C, P or more] and the sums [C, 1 + SUMS] of some items of the slices of C shards, from a first
    one on: index [C, n]. See lockstep.kernels.network.differentiate."""
    (shards, each), observations = index.shape, items[0]
    x = np.empty((shards * each, observations.shape[2]), np.float32)
    for c in range(shards):
        for j in range(each):
            move_row(observations[first + c, index[c, j]], x[c * each + j])
    policy, value, memory = evaluate(network, x)
    of_policy, of_value = np.empty_like(policy), np.empty_like(value)
    for c in range(shards):
        begin, end = c * each, (c + 1) * each
        samples, to = _gather(items, first + c, index[c], scale), (of_policy[begin:end], of_value[begin:end], sums[c])
        _add_loss(kind, policy[begin:end], value[begin:end], samples, hyper, *to)
    differentiate(network, x, memory, of_policy, of_value, gradient, fresh, joined)


@compiled
def ppo_gradients(
    network: Network,
    kind: int,
    items: tuple[np.ndarray, ...],
    index: np.ndarray,
    scale: tuple[np.float32, np.float32],
    hyper: tuple[np.float32, np.float32, np.float32, np.float32],
    joined: bool,
    out: np.ndarray,
) -> None:
    """The gradients of all shards' slices of a minibatch.

    Args:
        kind: of the distribution: see lockstep.kernels.policies.
        items: of all shards' rollouts: normalized observations float32 [S, N, D]; actions float32 [S, N, A] and
            int64 [S, N], of which one is not used; log-probabilities, values, advantages and value targets, each
            float32 [S, N]; which are valid, bool [S, N].
        index: int64 [S, n]: the items of each slice.
        scale: the mean and deviation that standardize advantages; 0 and 1 leave them unchanged.
        hyper: clip, value_clip, value_coef and entropy_coef, as for _add_loss.
        joined: write the tree's sum over all shards to out[0]. The rest is overwritten.
        out: float32 [S, P + 1 + SUMS]: each shard's gradient, the number of its valid samples, its sums of metrics.
            What belongs to no layer and no free deviation stays as it is.
    """
    (shards, each), (layers, free_std, log_stds, parameters) = index.shape, network
    size, sums = len(parameters), np.zeros((shards, 1 + SUMS))
    fit = _TOGETHER // layers[:, OUTPUTS].sum()
    together = max(_LEAST, (fit + _WHOLE - 1) // _WHOLE * _WHOLE)  # one slice's items, or several slices
    several = max(1, together // each)
    at_once = joined and several >= shards and together >= each
    if free_std >= 0:
        out[:, free_std : free_std + log_stds] = 0
    for first in range(0, shards, several):
        last = min(first + several, shards)
        for begin in range(0, each, together):
            part = index[first:last, begin : begin + together]
            to, fresh = (out[first:last], sums[first:last]), begin == 0
            _add_gradient(network, kind, items, first, part, scale, hyper, fresh, at_once, *to)
    for shard in range(shards):
        lead_back(free_std, log_stds, parameters, out[shard])
        for j in range(1 + SUMS):
            out[shard, size + j] = np.float32(sums[shard, j])
    if at_once:
        add_up(out, size, size + 1 + SUMS)
        if free_std >= 0:
            add_up(out, free_std, free_std + log_stds)
    elif joined:
        add_up(out, 0, size + 1 + SUMS)
