"""Gradients of on-policy losses in portable arithmetic, with the bits of torch's replaced operations.

A loss (lockstep.kernels.losses) is a function of log-probabilities and values. This module evaluates policies and
values for it, and computes the gradients of their parameters.

Shape legend: P parameters, S shards of this process, T steps, R rows of observations: T, or T+1 if a loss needs the
value after the last step. C columns of a rollout, n of them in a slice, D numbers of an observation, E extra features,
K numbers of a core's state, A numbers of an action, W parameters of a policy, M metrics.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from lockstep.kernels import network as networks
from lockstep.kernels import recurrent_network
from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import OUTPUTS, activations
from lockstep.kernels.math import exp
from lockstep.kernels.network import led_back
from lockstep.kernels.policies import (
    CATEGORICAL,
    entropy_gaussian,
    exponentials,
    log_prob_gaussian,
    log_softmax,
)
from lockstep.kernels.sums import add_up, row_sums
from lockstep.kernels.vectors import move_row

_ONE, _HALF, _TWO, _ZERO = map(np.float32, (1, 0.5, 2, 0))
_TOGETHER = 65_536
"""Activations of slices that pass through the network together, so that they stay in the cache. It changes no bit."""
_ROWS = 16
"""The least number of sequences that advance together, since each step reads all of a core's weights."""


class Rollouts(NamedTuple):
    """The rollouts of all slots. Without sequences, a rollout is one step of T * B columns. Kernels take them as a
    plain tuple, whose type Numba finds faster than that of a named one."""

    observations: np.ndarray
    """Normalized, or whole pixels: float32 [S, R, C, D]."""
    actions: np.ndarray
    """float32 [S, T, C, A]; A is 0 if actions are discrete."""
    choices: np.ndarray
    """Discrete actions: int64 [S, T, C]."""
    numbers: np.ndarray
    """The numbers that the loss reads: float32 [S, K, T, C]."""
    flags: np.ndarray
    """The flags that the loss reads; the last says which samples are valid: bool [S, F, T, C]."""
    strided: np.ndarray
    """bool [S]: shards whose vectors lie between those of other shards in memory. It decides how torch adds up the
    first layer (see lockstep.kernels.network.biases_last)."""
    extras: np.ndarray
    """The previous actions and rewards as a core sees them: float32 [S, R, C, E]."""
    starts: np.ndarray
    """Where episodes start: bool [S, R, C]."""
    states: np.ndarray
    """States of cores before the first step: float32 [S, C, K]."""


@compiled
def _judge(
    kind: int,
    policy: np.ndarray,
    action: np.ndarray,
    choice: np.ndarray,
    log_p: np.ndarray,
    p: np.ndarray,
    log_prob: np.ndarray,
    entropy: np.ndarray,
) -> None:
    """Write log-probabilities of actions [N] and entropies [N] of policies [N, W]; of a categorical distribution also
    all log-probabilities and probabilities [N, W]."""
    if kind != CATEGORICAL:
        log_prob_gaussian(policy, action, log_prob)
        entropy_gaussian(policy, entropy)
        return
    log_softmax(policy, log_p)
    exponentials(log_p, p)
    row_sums(p * log_p, entropy)
    for i in range(len(policy)):
        entropy[i] = -entropy[i]
        log_prob[i] = log_p[i, choice[i]]


@compiled
def _by_choice(
    choice: np.ndarray,
    log_p: np.ndarray,
    p: np.ndarray,
    by_log_prob: np.ndarray,
    by_entropy: np.ndarray,
    of_policy: np.ndarray,
) -> None:
    """Write the gradients by logits [N, W], given those by log-probabilities and entropies [N]."""
    for i in range(len(log_p)):
        slope, total = -by_entropy[i], _ZERO
        for a in range(log_p.shape[1]):
            of_policy[i, a] = slope * p[i, a] + slope * log_p[i, a] * p[i, a]
            total += of_policy[i, a]
        chosen = _ZERO + by_log_prob[i]
        for a in range(log_p.shape[1]):
            given = by_log_prob[i] if a == choice[i] else _ZERO
            of_policy[i, a] = (given - p[i, a] * chosen) + (of_policy[i, a] - p[i, a] * total)


@compiled
def _by_point(
    policy: np.ndarray,
    unbounded: np.ndarray,
    action: np.ndarray,
    by_log_prob: np.ndarray,
    by_entropy: np.ndarray,
    of_policy: np.ndarray,
) -> None:
    """The same by means and log standard deviations [N, W] of a Gaussian. unbounded has the head's outputs before
    bounds are applied."""
    size = action.shape[1]
    for i in range(len(policy)):
        for d in range(size):
            inverse, far = exp(-policy[i, size + d]), action[i, d] - policy[i, d]
            by_z = -_HALF * by_log_prob[i] * (_TWO * (far * inverse))
            by_log_std = -by_log_prob[i] - by_z * far * inverse
            log_std = unbounded[i, size + d]
            of_policy[i, d] = -(by_z * inverse) + _ZERO
            of_policy[i, size + d] = led_back(log_std, by_log_std) + led_back(log_std, by_entropy[i])


@compiled
def _observations(observations: np.ndarray, first: int, last: int, index: np.ndarray) -> np.ndarray:
    """The observations of the slices of some shards, row by row: float32 [shards * R * n, D]."""
    (_, rows, _, features), each = observations.shape, index.shape[1]
    x = np.empty(((last - first) * rows * each, features), np.float32)
    place = 0
    for shard in range(first, last):
        for row in range(rows):
            for j in range(each):
                move_row(observations[shard, row, index[shard, j]], x[place])
                place += 1
    return x


@compiled
def _slice(
    actions: np.ndarray, choices: np.ndarray, numbers: np.ndarray, flags: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A shard's slice of the same arrays without their first axis: some columns [n] of each. Actions are [T * n, A] and
    [T * n]."""
    (steps, _, size), each = actions.shape, len(columns)
    action, choice = np.empty((steps * each, size), np.float32), np.empty(steps * each, np.int64)
    number = np.empty((len(numbers), steps, each), np.float32)
    flag = np.empty((len(flags), steps, each), np.bool_)
    for t in range(steps):
        for j in range(each):
            column = columns[j]
            action[t * each + j] = actions[t, column]
            choice[t * each + j] = choices[t, column]
            for k in range(len(numbers)):
                number[k, t, j] = numbers[k, t, column]
            for k in range(len(flags)):
                flag[k, t, j] = flags[k, t, column]
    return action, choice, number, flag


@compiled
def _add_up_terms(terms: np.ndarray, valid: np.ndarray, sums: np.ndarray) -> None:
    """Write the number of valid samples and the sums of metrics: [1 + M, N], valid [N] -> [1 + M]. Those of the
    policy's and the value's loss come first: see lockstep.kernels.losses."""
    for i in range(len(valid)):
        terms[0, i] = _ONE
        if not valid[i]:
            for k in range(len(terms)):
                terms[k, i] = _ZERO
    row_sums(terms, sums)
    sums[1] = -sums[1]
    sums[2] = _HALF * sums[2]


@compiled
def _remembered(
    extras: np.ndarray, starts: np.ndarray, states: np.ndarray, first: int, last: int, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the slices of some shards, extra features float32 [shards * R * n, E], where episodes start, bool
    [shards * R * n], and the states at their beginning, float32 [shards * n, K]."""
    (_, rows, _, more), each, place = extras.shape, index.shape[1], 0
    extra = np.empty(((last - first) * rows * each, more), np.float32)
    start = np.empty((last - first) * rows * each, np.bool_)
    state = np.empty(((last - first) * each, states.shape[2]), np.float32)
    for shard in range(first, last):
        for j in range(each):
            state[(shard - first) * each + j] = states[shard, index[shard, j]]
        for row in range(rows):
            for j in range(each):
                start[place] = starts[shard, row, index[shard, j]]
                for k in range(more):
                    extra[place, k] = extras[shard, row, index[shard, j], k]
                place += 1
    return extra, start, state


def _missing(*_: Any) -> Any:
    raise NotImplementedError("gradients_of puts a compiled function here")


loss = evaluate = differentiate = _missing


def _gradients(network, kind, rollouts, index, hyper, entropy_coef, joined, out):
    """The gradients of all shards' slices of a minibatch.

    Args:
        network: a lockstep.kernels.network.Network.
        kind: of the distribution: see lockstep.kernels.policies.
        rollouts: Rollouts of all shards.
        index: int64 [S, n]: the columns of each slice.
        hyper: float32 [H]: the loss's hyperparameters.
        entropy_coef: weight of the entropy bonus.
        joined: write the tree's sum over all shards to out[0]. The rest is overwritten.
        out: float32 [S, P + 1 + M]: each shard's gradient, the number of its valid samples, its sums of metrics. What
            belongs to no layer and no free deviation stays as it is.
    """
    layers, free_std, _, parameters = network
    observations, actions, choices, numbers, flags, strided, extras, starts, states = rollouts
    shards, each = index.shape
    rows, steps, size = observations.shape[1], numbers.shape[2], len(parameters)
    before, taken, sums = rows * each, steps * each, out.shape[1] - size
    uniform = strided.all() or not strided.any()
    several = max(1, _TOGETHER // (before * layers[:, OUTPUTS].sum())) if uniform else 1
    if states.shape[2] and uniform:
        several = max(several, _ROWS // each)
    at_once = joined and several >= shards
    for first in range(0, shards, several):
        last = min(first + several, shards)
        x = _observations(observations, first, last, index)
        extra, start, state = _remembered(extras, starts, states, first, last, index)
        inputs = x, strided[first], extra, each, start, state
        policy, value, scratch, kept = evaluate(network, *inputs)
        emitted = activations(scratch, layers, len(x), len(layers) - 2)
        of_policy, of_value = np.zeros_like(policy), np.zeros_like(value)
        for shard in range(first, last):
            begin = (shard - first) * before
            end = begin + taken
            action, choice, number, flag = _slice(
                actions[shard], choices[shard], numbers[shard], flags[shard], index[shard]
            )
            acted, valid = policy[begin:end], flag[len(flag) - 1].reshape(taken)
            log_p, p = np.empty_like(acted), np.empty_like(acted)
            log_prob, entropy = np.empty(taken, np.float32), np.empty(taken, np.float32)
            _judge(kind, acted, action, choice, log_p, p, log_prob, entropy)
            by_log_prob, by_entropy = np.empty(taken, np.float32), np.empty(taken, np.float32)
            terms = np.empty((sums, taken), np.float32)
            loss(
                log_prob.reshape((steps, each)),
                value[begin : begin + before].reshape((rows, each)),
                number,
                flag,
                hyper,
                by_log_prob.reshape((steps, each)),
                of_value[begin:end].reshape((steps, each)),
                terms.reshape((sums, steps, each)),
            )
            for i in range(taken):
                by_entropy[i] = -entropy_coef if valid[i] else _ZERO
                terms[3, i] = entropy[i]
            _add_up_terms(terms, valid, out[shard, size:])
            if kind == CATEGORICAL:
                _by_choice(choice, log_p, p, by_log_prob, by_entropy, of_policy[begin:end])
            else:
                unbounded = emitted[begin:end] if free_std < 0 else acted
                _by_point(acted, unbounded, action, by_log_prob, by_entropy, of_policy[begin:end])
        found = scratch, kept, each, start
        differentiate(network, x, extra, *found, of_policy, of_value, out[first:last], at_once)
    if at_once:
        add_up(out, size, size + sums)
    elif joined:
        add_up(out, 0, size + sums)


@functools.cache
def gradients_of(loss: Any, recurrent: bool = False) -> Any:
    """_gradients with a loss of lockstep.kernels.losses, for a network with cores or without."""
    passes = recurrent_network if recurrent else networks
    return compiled(
        _gradients, loss=loss, evaluate=passes.evaluate_as_torch, differentiate=passes.differentiate_as_torch
    )
