"""A policy and a value as stacks of layers, evaluated and differentiated in portable arithmetic.

Three stacks make a network: what both share, the policy's rest and the value's rest, each with its head as its last
layer. Separate networks share an empty stack.

Shape legend: P parameters, n samples, D numbers of an observation, M outputs of the policy's head, W parameters of the
distribution.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.compiling import kernel
from lockstep.kernels.dense import OUTPUTS, activations, backward, forward

LOG_STD_LOW, LOG_STD_HIGH = np.float32(-20), np.float32(2)
"""Bounds of log standard deviations: see lockstep.models.distributions."""


@kernel
def _width(layers: np.ndarray) -> int:
    """The outputs of all layers of a stack."""
    width = 0
    for layer in range(len(layers)):
        width += layers[layer, OUTPUTS]
    return width


@kernel
def normalize(x: np.ndarray, mean: np.ndarray, std: np.ndarray, clip: np.float32, out: np.ndarray) -> None:
    """Standardize observations: x [n, D], mean and std [D] -> out [n, D], within -clip and clip."""
    for i in range(len(x)):
        for d in range(x.shape[1]):
            out[i, d] = min(max((x[i, d] - mean[d]) / std[d], -clip), clip)


@kernel
def evaluate(
    network: tuple[np.ndarray, np.ndarray, np.ndarray],
    free_std: int,
    log_stds: int,
    parameters: np.ndarray,
    turned: np.ndarray,
    x: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Evaluate policy and value.

    Args:
        network: the three stacks, int64 [L, 5] each.
        free_std: where the log standard deviations begin among the parameters, if they do not depend on the
            observation; else -1.
        log_stds: how many of the policy's last parameters are log standard deviations.
        parameters: float32 [P].
        turned: what lockstep.kernels.dense.turn wrote for all stacks, [P].
        x: normalized observations, float32 [n, D].

    Returns:
        The policy's parameters [n, W], values [n], and what differentiate needs.
    """
    shared, policy_layers, value_layers = network
    n = len(x)
    of_shared = np.empty(n * _width(shared), np.float32)
    of_policy, of_value = (
        np.empty(n * _width(policy_layers), np.float32),
        np.empty(n * _width(value_layers), np.float32),
    )
    features = x
    if len(shared):
        forward(parameters, turned, shared, x, of_shared)
        features = activations(of_shared, shared, n, len(shared) - 1)
    forward(parameters, turned, policy_layers, features, of_policy)
    forward(parameters, turned, value_layers, features, of_value)
    head = activations(of_policy, policy_layers, n, len(policy_layers) - 1)
    emitted = head.shape[1]
    size = emitted if free_std < 0 else emitted + log_stds
    policy = np.empty((n, size), np.float32)
    for i in range(n):
        for j in range(emitted):
            policy[i, j] = head[i, j]
        for j in range(size - log_stds, size):
            log_std = head[i, j] if free_std < 0 else parameters[free_std + j - emitted]
            policy[i, j] = min(max(log_std, LOG_STD_LOW), LOG_STD_HIGH)
    value = activations(of_value, value_layers, n, len(value_layers) - 1)[:, 0].copy()
    return policy, value, (of_shared, of_policy, of_value)


@kernel
def differentiate(
    network: tuple[np.ndarray, np.ndarray, np.ndarray],
    free_std: int,
    log_stds: int,
    parameters: np.ndarray,
    x: np.ndarray,
    memory: tuple[np.ndarray, np.ndarray, np.ndarray],
    by_policy: np.ndarray,
    by_value: np.ndarray,
    gradient: np.ndarray,
) -> None:
    """Add the gradient by all parameters to gradient [P], given those by the policy's parameters [n, W] and by values
    [n]. Other arguments are those of evaluate, and what it returned.

    A log standard deviation outside its bounds has only the gradient that leads back.
    """
    shared, policy_layers, value_layers = network
    of_shared, of_policy, of_value = memory
    n, size = by_policy.shape
    to_policy, to_value = np.empty_like(of_policy), np.empty_like(of_value)
    head = activations(of_policy, policy_layers, n, len(policy_layers) - 1)
    to_head = activations(to_policy, policy_layers, n, len(policy_layers) - 1)
    emitted = head.shape[1]
    for i in range(n):
        for j in range(emitted):
            to_head[i, j] = by_policy[i, j]
            if j >= size - log_stds:
                to_head[i, j] = _led_back(head[i, j], by_policy[i, j])
        if free_std >= 0:
            for j in range(log_stds):
                gradient[free_std + j] += by_policy[i, emitted + j]
    if free_std >= 0:
        for j in range(log_stds):
            gradient[free_std + j] = _led_back(parameters[free_std + j], gradient[free_std + j])
    activations(to_value, value_layers, n, len(value_layers) - 1)[:, 0] = by_value
    features = x
    to_shared = np.empty_like(of_shared)
    to_features = to_shared.reshape((1, to_shared.size))
    if len(shared):
        features = activations(of_shared, shared, n, len(shared) - 1)
        to_features = activations(to_shared, shared, n, len(shared) - 1)
        to_features[:] = 0
    any_shared = len(shared) > 0
    backward(parameters, policy_layers, features, of_policy, to_policy, gradient, any_shared, to_features)
    backward(parameters, value_layers, features, of_value, to_value, gradient, any_shared, to_features)
    if any_shared:
        backward(parameters, shared, x, of_shared, to_shared, gradient, False, to_features)


@kernel
def _led_back(log_std: np.float32, gradient: np.float32) -> np.float32:
    """The gradient by a log standard deviation, or 0 if it leads further out of the bounds."""
    outwards = (log_std > LOG_STD_HIGH and gradient < 0) or (log_std < LOG_STD_LOW and gradient > 0)
    return np.float32(0) if outwards else gradient
