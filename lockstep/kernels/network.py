"""A policy and a value, evaluated and differentiated in portable arithmetic.

They are a table of layers (lockstep.kernels.dense) whose last two are the heads: of the policy, and of the value.

Shape legend: P parameters, L layers, n samples, S slices of them, D numbers of an observation, M outputs of the
policy's head, W parameters of the distribution.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels import dense
from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import activations, backward

LOG_STD_LOW, LOG_STD_HIGH = np.float32(-20), np.float32(2)
"""Bounds of log standard deviations: see lockstep.models.gaussian."""


@compiled
def normalize(x: np.ndarray, mean: np.ndarray, std: np.ndarray, clip: np.float32, out: np.ndarray) -> None:
    """Standardize observations: x [n, D], mean and std [D] -> out [n, D], within -clip and clip."""
    for i in range(len(x)):
        for d in range(x.shape[1]):
            out[i, d] = min(max((x[i, d] - mean[d]) / std[d], -clip), clip)


@compiled
def evaluate(
    layers: np.ndarray, free_std: int, log_stds: int, parameters: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Evaluate policy and value.

    Args:
        layers: the table, int64 [L, 11].
        free_std: where the log standard deviations begin among the parameters, if they do not depend on the
            observation; else -1.
        log_stds: how many of the policy's last parameters are log standard deviations.
        parameters: float32 [P].
        x: normalized observations, float32 [n, D].

    Returns:
        The policy's parameters [n, W], values [n], and what differentiate needs.
    """
    n, last = len(x), len(layers) - 1
    scratch = dense.evaluate(layers, parameters, x)
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
    return policy, value, scratch


@compiled
def _led_back(log_std: np.float32, gradient: np.float32) -> np.float32:
    """The gradient by a log standard deviation, or 0 if it leads further out of the bounds."""
    outwards = (log_std > LOG_STD_HIGH and gradient < 0) or (log_std < LOG_STD_LOW and gradient > 0)
    return np.float32(0) if outwards else gradient


@compiled
def differentiate(
    layers: np.ndarray,
    free_std: int,
    log_stds: int,
    parameters: np.ndarray,
    x: np.ndarray,
    scratch: np.ndarray,
    by_policy: np.ndarray,
    by_value: np.ndarray,
    gradient: np.ndarray,
    fresh: bool,
    joined: bool,
) -> None:
    """Add the gradient of each of S equal slices of the samples by all parameters to gradient [S, P or more], given
    those by the policy's parameters [n, W] and by values [n]. Other arguments are those of evaluate, and what it
    returned.

    The gradients by layers may be fresh and joined: see lockstep.kernels.dense.backward. Those by log standard
    deviations that do not depend on the observation are always added, slice by slice.

    A log standard deviation outside its bounds has only the gradient that leads back. If it does not depend on the
    observation, call lead_back after the last samples.
    """
    n, last = len(x), len(layers) - 1
    gradients = np.empty_like(scratch)
    head, to_head = activations(scratch, layers, n, last - 1), activations(gradients, layers, n, last - 1)
    to_value = activations(gradients, layers, n, last)
    emitted, size, each = head.shape[1], by_policy.shape[1], n // len(gradient)
    for i in range(n):
        to_value[i, 0] = by_value[i]
        for j in range(emitted):
            led_back = j >= size - log_stds
            to_head[i, j] = _led_back(head[i, j], by_policy[i, j]) if led_back else by_policy[i, j]
        for j in range(emitted, size):
            gradient[i // each, free_std + j - emitted] += by_policy[i, j]
    backward(parameters, layers, x, scratch, gradients, gradient, fresh, joined, x[:0])


@compiled
def lead_back(free_std: int, log_stds: int, parameters: np.ndarray, gradient: np.ndarray) -> None:
    """Remove the part of a complete gradient [P] that leads log standard deviations further out of their bounds.
    Arguments are those of evaluate."""
    if free_std >= 0:
        for j in range(free_std, free_std + log_stds):
            gradient[j] = _led_back(parameters[j], gradient[j])
