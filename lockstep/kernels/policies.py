"""Action distributions in portable arithmetic, as lockstep.models.distributions defines them.

A policy's output is a row of float32 parameters: logits of a categorical distribution, or D means followed by D log
standard deviations within their bounds.

Shape legend: n samples, A actions, D dimensions of an action.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.math import exp, log, ndtri, scalar

CATEGORICAL, GAUSSIAN = range(2)
"""Kinds of distributions."""
_TINY = np.float32(1e-7)
_HALF_LOG_TAU = np.float32(0.5 * math.log(2 * math.pi))
_HALF = np.float32(0.5)
_ONE = np.float32(1)


@scalar
def _within(noise):
    """Uniform noise, kept away from 0 and 1."""
    return min(max(noise, _TINY), _ONE - _TINY)


@compiled
def log_normalizer(logits: np.ndarray) -> np.float32:
    """log(sum(exp(logits))) of logits [A]."""
    largest = logits[0]
    for a in range(1, len(logits)):
        largest = max(largest, logits[a])
    total = np.float32(0)
    for a in range(len(logits)):
        total += exp(logits[a] - largest)
    return largest + log(total)


@compiled
def sample_categorical(logits: np.ndarray, noise: np.ndarray, action: np.ndarray) -> None:
    """Draw an action for each row by the Gumbel-max trick: logits and noise [n, A] -> int64 [n]."""
    for i in range(len(logits)):
        best = 0
        highest = np.float32(-np.inf)
        for a in range(logits.shape[1]):
            x = logits[i, a] - log(-log(_within(noise[i, a])))
            if x > highest:
                best, highest = a, x
        action[i] = best


@compiled
def sample_gaussian(policy: np.ndarray, noise: np.ndarray, action: np.ndarray) -> None:
    """Draw an action for each row: policy [n, 2D], noise [n, D] -> [n, D]."""
    size = noise.shape[1]
    for i in range(len(policy)):
        for d in range(size):
            action[i, d] = policy[i, d] + exp(policy[i, size + d]) * ndtri(_within(noise[i, d]))


@compiled
def log_prob_categorical(logits: np.ndarray, action: np.ndarray, out: np.ndarray) -> None:
    """Log-probabilities of actions: [n, A], int64 [n] -> [n]"""
    for i in range(len(logits)):
        out[i] = logits[i, action[i]] - log_normalizer(logits[i])


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
def entropy_categorical(logits: np.ndarray, out: np.ndarray) -> None:
    """[n, A] -> [n]"""
    for i in range(len(logits)):
        normalizer = log_normalizer(logits[i])
        total = np.float32(0)
        for a in range(logits.shape[1]):
            log_p = logits[i, a] - normalizer
            total -= exp(log_p) * log_p
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
