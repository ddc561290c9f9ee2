"""Gradients of PQN in portable arithmetic: the loss of lockstep.algorithms.pqn for several shards' slices, with the
bits of torch's replaced operations.

Shape legend: P parameters, S shards of this process, R columns of a rollout, n of them in a slice, N items of several
slices, D numbers of an observation, A actions.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.q_networks import QNetwork, describe, differentiate, disturb
from lockstep.kernels.sums import add_up, row_sums
from lockstep.kernels.vectors import move_row

_ZERO, _HALF, _ONE, _TWO = map(np.float32, (0, 0.5, 1, 2))
PQN_SUMS = 6
"""Metrics of lockstep.algorithms.pqn.PQN."""
_TOGETHER = 128
"""Samples that pass through the network together, at least one slice, so that they stay in the cache."""


@compiled
def _learn(value: np.ndarray, target: np.ndarray, valid: np.ndarray, by_value: np.ndarray, terms: np.ndarray) -> None:
    """Write the gradient of the loss by values [n], and each sample's part in the count and the metrics, float32 [1 +
    PQN_SUMS, n]. Those of the loss are not halved yet."""
    for i in range(len(value)):
        error, gap = value[i] - target[i], target[i] - value[i]
        by_value[i] = (_HALF if valid[i] else _ZERO) * (_TWO * error)
        terms[0, i], terms[1, i], terms[2, i] = _ONE, error * error, value[i]
        terms[3, i], terms[4, i] = target[i], target[i] * target[i]
        terms[5, i], terms[6, i] = gap, gap * gap
        if not valid[i]:
            terms[:, i] = _ZERO


@compiled
def value_gradients(
    network: QNetwork,
    parameters: np.ndarray,
    observations: np.ndarray,
    choices: np.ndarray,
    target: np.ndarray,
    valid: np.ndarray,
    strided: np.ndarray,
    index: np.ndarray,
    joined: bool,
    used: np.ndarray,
    out: np.ndarray,
) -> None:
    """The gradients of half the squared error of the chosen actions' values.

    Args:
        network: where the model's parts lie. It has no noise and no atoms.
        parameters: float32 [P].
        observations: of all shards' rollouts, normalized, or whole pixels: float32 [S, R, D].
        choices, target, valid: actions, value targets, and which samples count: int64, float32 and bool [S, R].
        strided: bool [S]: whose observations torch would read from between others': see
            lockstep.kernels.network.biases_last.
        index: int64 [S, n]: the columns of each slice.
        joined: write the tree's sum over all shards to out[0]. The rest is overwritten.
        used: float32 [P], overwritten.
        out: float32 [S, P + 1 + PQN_SUMS]: each shard's gradient, the number of its valid samples, its sums of metrics.
            What belongs to no layer stays as it is.
    """
    (shards, each), size = index.shape, len(parameters)
    uniform = strided.all() or not strided.any()
    several = max(1, _TOGETHER // each) if uniform else 1
    at_once = joined and several >= shards
    noise, terms = np.empty(0, np.float32), np.empty((1 + PQN_SUMS, each), np.float32)
    used = disturb(network, parameters, noise, used)
    for first in range(0, shards, several):
        last = min(first + several, shards)
        n = (last - first) * each
        x, action = np.empty((n, observations.shape[2]), np.float32), np.empty(n, np.int64)
        wanted, counts = np.empty(n, np.float32), np.empty(n, np.bool_)
        for i in range(n):
            shard = first + i // each
            column = index[shard, i % each]
            move_row(observations[shard, column], x[i])
            action[i], wanted[i], counts[i] = choices[shard, column], target[shard, column], valid[shard, column]
        computed = describe(network, used, x, strided[first])
        value, by_value = np.empty(n, np.float32), np.empty((n, 1), np.float32)
        for i in range(n):
            value[i] = computed.numbers[i, action[i], 0]
        for shard in range(first, last):
            begin, end = (shard - first) * each, (shard - first + 1) * each
            _learn(value[begin:end], wanted[begin:end], counts[begin:end], by_value[begin:end, 0], terms)
            row_sums(terms, out[shard, size : size + 1 + PQN_SUMS])
            out[shard, size + 1] *= _HALF
        differentiate(network, used, noise, x, computed, action, by_value, out[first:last], at_once)
    if at_once:
        add_up(out, size, size + 1 + PQN_SUMS)
    elif joined:
        add_up(out, 0, size + 1 + PQN_SUMS)
