"""Action distributions in portable arithmetic, as lockstep.models.distributions defines them.

A policy's output is a row of float32 parameters: logits of a categorical distribution, or D means followed by D log
standard deviations within their bounds.

Shape legend: n samples, A actions, D dimensions of an action.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import scalar
from lockstep.kernels.math import exp, log, ndtri

CATEGORICAL, GAUSSIAN = range(2)
"""Kinds of distributions."""
_TOGETHER = 16
"""Rows whose numbers are compared or added up together."""
_TINY = np.float32(1e-7)
_HALF_LOG_TAU = np.float32(0.5 * math.log(2 * math.pi))
_HALF = np.float32(0.5)
_ONE = np.float32(1)


@scalar
def within(noise):
    """Uniform noise, kept away from 0 and 1."""
    return min(max(noise, _TINY), _ONE - _TINY)


@compiled
def exponentials(x: np.ndarray, out: np.ndarray) -> None:
    """Write e**x of each number: [n, A] -> [n, A]. This loop is separate so that it can be vectorized."""
    flat, result = x.reshape(x.size), out.reshape(x.size)
    for i in range(flat.size):
        result[i] = exp(flat[i])


@compiled
def exponentiate(x: np.ndarray) -> None:
    """Replace each number by e**x, in place. With one array as both arguments, exponentials is not vectorized."""
    flat = x.reshape(x.size)
    for i in range(flat.size):
        flat[i] = exp(flat[i])


@compiled
def _largest(x: np.ndarray, out: np.ndarray) -> None:
    """Write the largest number of each row: [n, A] -> [n]. Rows advance together, since comparing waits."""
    n, size = x.shape
    for begin in range(0, n, _TOGETHER):
        rows = min(_TOGETHER, n - begin)
        of, to = x[begin : begin + rows], out[begin : begin + rows]
        for i in range(rows):
            to[i] = of[i, 0]
        for a in range(1, size):
            for i in range(rows):
                to[i] = max(to[i], of[i, a])


@compiled
def _sums(x: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of each row, number by number, likewise: [n, A] -> [n]"""
    n, size = x.shape
    for begin in range(0, n, _TOGETHER):
        rows = min(_TOGETHER, n - begin)
        of, to = x[begin : begin + rows], out[begin : begin + rows]
        to[:] = np.float32(0)
        for a in range(size):
            for i in range(rows):
                to[i] += of[i, a]


@compiled
def log_softmax(logits: np.ndarray, out: np.ndarray) -> None:
    """Log-probabilities of all actions: logits [n, A] -> [n, A]"""
    n, size = logits.shape
    largest, total = np.empty(n, np.float32), np.empty(n, np.float32)
    _largest(logits, largest)
    for i in range(n):
        of, to, most = logits[i], out[i], largest[i]
        for a in range(size):
            to[a] = of[a] - most
    exponentiate(out)
    _sums(out, total)
    for i in range(n):
        total[i] = largest[i] + log(total[i])
    for i in range(n):
        of, to, less = logits[i], out[i], total[i]
        for a in range(size):
            to[a] = of[a] - less


@compiled
def sample_categorical(logits: np.ndarray, noise: np.ndarray, action: np.ndarray) -> None:
    """Draw an action for each row by the Gumbel-max trick: logits and noise [n, A] -> int64 [n]."""
    n, size = logits.shape
    given, subtracted = noise.reshape(n * size), np.empty(n * size, np.float32)
    for i in range(n * size):
        subtracted[i] = log(-log(within(given[i])))
    for i in range(n):
        best = 0
        highest = np.float32(-np.inf)
        for a in range(size):
            x = logits[i, a] - subtracted[i * size + a]
            if x > highest:
                best, highest = a, x
        action[i] = best


@compiled
def sample_gaussian(policy: np.ndarray, noise: np.ndarray, action: np.ndarray) -> None:
    """Draw an action for each row: policy [n, 2D], noise [n, D] -> [n, D]."""
    size = noise.shape[1]
    for i in range(len(policy)):
        for d in range(size):
            action[i, d] = policy[i, d] + exp(policy[i, size + d]) * ndtri(within(noise[i, d]))


@compiled
def log_prob_categorical(logits: np.ndarray, action: np.ndarray, out: np.ndarray) -> None:
    """Log-probabilities of actions: [n, A], int64 [n] -> [n]"""
    log_p = np.empty_like(logits)
    log_softmax(logits, log_p)
    for i in range(len(logits)):
        out[i] = log_p[i, action[i]]


@compiled
def log_prob_gaussian(policy: np.ndarray, action: np.ndarray, out: np.ndarray) -> None:
    """Log-probabilities of actions: [n, 2D], [n, D] -> [n]"""
    size = action.shape[1]
    for i in range(len(policy)):
        total = np.float32(0)
        for d in range(size):
            log_std = policy[i, size + d]
            z = (action[i, d] - policy[i, d]) * exp(-log_std)
            total += -_HALF * z * z - log_std - _HALF_LOG_TAU
        out[i] = total


@compiled
def encode_categorical(action: np.ndarray, out: np.ndarray) -> None:
    """Mark actions with a 1 among zeros: int64 [n], out [n, A or more]."""
    for i in range(len(action)):
        out[i, action[i]] = _ONE


@compiled
def encode_gaussian(action: np.ndarray, out: np.ndarray) -> None:
    """Copy actions [n, D] to out [n, D or more]."""
    for i in range(len(action)):
        for d in range(action.shape[1]):
            out[i, d] = action[i, d]


@compiled
def send_categorical(action: np.ndarray, limits: np.ndarray, sent: np.ndarray) -> None:
    """Number actions as environments do: int64 [n] -> [n]. The only number in limits [1] is that of the first."""
    for i in range(len(action)):
        sent[i] = action[i] + limits[0]


@compiled
def send_gaussian(action: np.ndarray, limits: np.ndarray, sent: np.ndarray) -> None:
    """Clip actions as numpy.clip does: float32 [n, D], limits [2, D] -> [n, ...] with D numbers each."""
    size = action.shape[1]
    out = sent.reshape((len(sent), size))
    for i in range(len(action)):
        for d in range(size):
            x, low, high = action[i, d], limits[0, d], limits[1, d]
            held = x if x > low or x != x else low  # NaN stays
            out[i, d] = held if held < high or held != held else high


@compiled
def entropy_categorical(log_p: np.ndarray, p: np.ndarray, out: np.ndarray) -> None:
    """Of log-probabilities and probabilities [n, A] -> [n]"""
    for i in range(len(log_p)):
        total = np.float32(0)
        for a in range(log_p.shape[1]):
            total -= p[i, a] * log_p[i, a]
        out[i] = total


@compiled
def entropy_gaussian(policy: np.ndarray, out: np.ndarray) -> None:
    """[n, 2D] -> [n]"""
    size = policy.shape[1] // 2
    for i in range(len(policy)):
        total = np.float32(0)
        for d in range(size):
            total += policy[i, size + d] + _HALF + _HALF_LOG_TAU
        out[i] = total
