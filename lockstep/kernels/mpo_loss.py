"""The losses of MPO (lockstep.algorithms.mpo) except the critics', for one slice of a minibatch, with the bits of
torch's replaced operations.

Shape legend: n items, K sampled actions of an item, A numbers of an action.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.math import log, sigmoid, softplus
from lockstep.kernels.policies import exponentiate
from lockstep.kernels.sums import first_sums, row_sums

MPO_SUMS = 10
"""Metrics of lockstep.algorithms.mpo.MPO."""
Variables = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What is behind the temperature [1] and behind the multipliers of mean and deviation, [A] each; or their gradients."""
_HALF, _ONE, _TWO = map(np.float32, (0.5, 1, 2))
_LEAST, _LEAST_WEIGHT = np.float32(1e-8), np.float32(1e-30)
_LOG_TAU, _ENTROPY = np.float32(math.log(2 * math.pi)), np.float32(0.5 * (1 + math.log(2 * math.pi)))


@compiled
def _sum(x: np.ndarray) -> np.float32:
    """The sum of all numbers."""
    out = np.empty(1, np.float32)
    row_sums(x.reshape((1, x.size)), out)
    return out[0]


@compiled
def positive(x: np.float32) -> np.float32:
    """What a dual variable stands for."""
    return softplus(x) + _LEAST


@compiled
def weigh(
    values: np.ndarray,
    variable: np.float32,
    bounds: np.ndarray,
    weight: np.ndarray,
    weights: np.ndarray,
    dual: np.ndarray,
) -> np.float32:
    """Write the weights of sampled actions [K, n] and the temperature's dual [n], and return the dual's gradient by the
    variable behind the temperature: see lockstep.algorithms.mpo.weigh.

    Args:
        values: of sampled actions, float32 [K, n].
        bounds: as for lockstep.kernels.mpo.mpo_gradients.
        weight: importance weights of items, float32 [n].
    """
    count, n = values.shape
    temperature = positive(variable)
    scaled, power, slope = np.empty_like(values), np.empty_like(values), np.empty_like(values)
    largest, total, of_dual = np.empty(n, np.float32), np.zeros(n, np.float32), np.empty(n, np.float32)
    for k in range(count):
        for i in range(n):
            scaled[k, i] = values[k, i] / temperature
            largest[i] = scaled[k, i] if k == 0 else max(largest[i], scaled[k, i])
    for k in range(count):
        for i in range(n):
            power[k, i] = scaled[k, i] - largest[i]
    exponentiate(power)
    for k in range(count):
        for i in range(n):
            total[i] += power[k, i]
    first_sums(power, of_dual)  # has another order than a softmax, if n is 1
    for i in range(n):
        total[i], of_dual[i] = largest[i] + log(total[i]), log(of_dual[i]) + largest[i]
    for k in range(count):
        for i in range(n):
            weights[k, i], slope[k, i] = scaled[k, i] - total[i], scaled[k, i] - of_dual[i]
    exponentiate(weights)
    exponentiate(slope)
    for k in range(count):
        for i in range(n):
            slope[k, i] = -(weight[i] * temperature * slope[k, i]) * (scaled[k, i] / temperature)
    for i in range(n):
        inner = bounds[0] + of_dual[i] - bounds[3]
        dual[i] = temperature * inner
        of_dual[i] = weight[i] * inner
    return (_sum(of_dual) + _sum(slope)) * sigmoid(variable)


@compiled
def _fit(
    action: np.ndarray,
    weights: np.ndarray,
    weight: np.ndarray,
    center: np.ndarray,
    scale: np.ndarray,
    log_std: np.ndarray,
    log_prob: np.ndarray,
    by_center: np.ndarray,
    by_scale: np.ndarray,
    by_log_std: np.ndarray,
) -> None:
    """Add the log-probabilities of actions to log_prob [K, n], and write the gradients of minus their weighted sum.

    Args:
        action: float32 [K, n * A].
        weights: of actions, float32 [K, n].
        weight: importance weights of items, float32 [n].
        center, scale, log_std: means, and deviations as e**-log_std and their logarithms, float32 [n * A].
        by_center, by_scale, by_log_std: the gradients by these, float32 [n * A].
    """
    (count, n), total = weights.shape, action.shape[1]
    size = total // n
    terms, far, slope = np.empty_like(action), np.empty_like(action), np.empty_like(action)
    for k in range(count):
        for i in range(n):
            by_log_prob = -weight[i] * weights[k, i]
            for j in range(i * size, (i + 1) * size):
                far[k, j] = action[k, j] - center[j]
                u = far[k, j] * scale[j]
                terms[k, j] = -_HALF * (u * u + _LOG_TAU) - log_std[j]
                slope[k, j] = by_log_prob * -_HALF * (_TWO * u)
    sums = np.empty((count * n), np.float32)
    row_sums(terms.reshape((count * n, size)), sums)
    for k in range(count):
        for i in range(n):
            log_prob[k, i] += sums[k * n + i]
            for j in range(i * size, (i + 1) * size):
                terms[k, j] = weight[i] * weights[k, i]
    first_sums(terms, by_log_std)
    for k in range(count):
        for j in range(total):
            terms[k, j] = -(slope[k, j] * scale[j])
            slope[k, j] = slope[k, j] * far[k, j]
    first_sums(terms, by_center)
    first_sums(slope, by_scale)


@compiled
def _hold(
    variables: np.ndarray,
    kl: np.ndarray,
    bound: np.float32,
    weight: np.ndarray,
    held: np.ndarray,
    by_kl: np.ndarray,
    by_variables: np.ndarray,
) -> None:
    """Add the loss of a trust region to held [n], and write its gradients.

    Args:
        variables: behind the multipliers, float32 [A].
        kl: divergences, float32 [n, A].
        weight: importance weights of items, float32 [n].
        by_kl, by_variables: the gradients by these, float32 [n, A] and [A].
    """
    n, size = kl.shape
    terms, sums, by_multiplier = np.empty_like(kl), np.empty(n, np.float32), np.empty_like(kl)
    for d in range(size):
        multiplier = positive(variables[d])
        for i in range(n):
            terms[i, d] = multiplier * kl[i, d] + multiplier * (bound - kl[i, d])
            by_kl[i, d] = weight[i] * multiplier
            by_multiplier[i, d] = weight[i] * (bound - kl[i, d])
    row_sums(terms, sums)
    for i in range(n):
        held[i] += sums[i]
    first_sums(by_multiplier, by_variables)
    for d in range(size):
        by_variables[d] *= sigmoid(variables[d])


@compiled
def _describe(
    weights: np.ndarray, kl_mean: np.ndarray, kl_std: np.ndarray, log_std: np.ndarray, terms: np.ndarray
) -> None:
    """Write each item's entropy and divergences to terms [MPO_SUMS, n]: weights [K, n], the others [n, A]."""
    (count, n), size = weights.shape, log_std.shape[1]
    gain = np.empty_like(weights)
    for k in range(count):
        for i in range(n):
            gain[k, i] = weights[k, i] * log(max(weights[k, i] * np.float32(count), _LEAST_WEIGHT))
    first_sums(gain, terms[7])
    row_sums(kl_mean, terms[8])
    row_sums(kl_std, terms[9])
    row_sums(log_std + _ENTROPY, terms[5])
    for i in range(n):
        terms[8, i] /= np.float32(size)
        terms[9, i] /= np.float32(size)


@compiled
def learn_policy(
    action: np.ndarray,
    values: np.ndarray,
    old_mean: np.ndarray,
    old_log_std: np.ndarray,
    mean: np.ndarray,
    log_std: np.ndarray,
    weight: np.ndarray,
    bounds: np.ndarray,
    variables: Variables,
    by_mean: np.ndarray,
    by_log_std: np.ndarray,
    by_variables: Variables,
    terms: np.ndarray,
) -> None:
    """Write the gradients of a slice's losses except the critics', and each item's part in their metrics.

    Args:
        action, values: those sampled, float32 [K, n, A] and [K, n].
        old_mean, old_log_std, mean, log_std: of the target policy and of the policy, float32 [n, A].
        weight: importance weights of items, float32 [n].
        bounds: as for lockstep.kernels.mpo.mpo_gradients.
        variables: see Variables.
        by_mean, by_log_std, by_variables: the gradients by these.
        terms: float32 [MPO_SUMS, n], in the order of metric_names.
    """
    (count, n), size = values.shape, action.shape[2]
    weights, log_prob = np.empty_like(values), np.zeros_like(values)
    fit, dual, held = np.empty(n, np.float32), np.empty(n, np.float32), np.zeros(n, np.float32)
    of_temperature, of_mean, of_std = variables
    by_temperature, by_mean_region, by_std_region = by_variables
    by_temperature[0] = weigh(values, of_temperature[0], bounds, weight, weights, dual)

    flat, total = action.reshape((count, n * size)), n * size
    center, older = mean.reshape(total), old_mean.reshape(total)
    logs, old_logs = log_std.reshape(total), old_log_std.reshape(total)
    scale, old_scale = -logs, -old_logs
    exponentiate(scale)
    exponentiate(old_scale)
    found = np.empty((4, total), np.float32)
    unused, by_center, by_scale, by_logs = found[0], found[1], found[2], found[3]
    _fit(flat, weights, weight, center, old_scale, old_logs, log_prob, by_center, unused, unused)
    _fit(flat, weights, weight, older, scale, logs, log_prob, unused, by_scale, by_logs)
    for k in range(count):
        for i in range(n):
            log_prob[k, i] *= weights[k, i]
    first_sums(log_prob, fit)

    kl_mean, kl_std = np.empty((n, size), np.float32), np.empty((n, size), np.float32)
    moved, spread, ratios = kl_mean.reshape(total), kl_std.reshape(total), _TWO * (old_logs - logs)
    exponentiate(ratios)
    for j in range(total):
        u = (center[j] - older[j]) * old_scale[j]
        moved[j] = _HALF * (u * u)
        spread[j] = logs[j] - old_logs[j] + _HALF * (ratios[j] - _ONE)
    by_kl_mean, by_kl_std = np.empty((n, size), np.float32), np.empty((n, size), np.float32)
    _hold(of_mean, kl_mean, bounds[1], weight, held, by_kl_mean, by_mean_region)
    _hold(of_std, kl_std, bounds[2], weight, held, by_kl_std, by_std_region)

    to_mean, to_logs = by_mean.reshape(total), by_log_std.reshape(total)
    by_moved, by_spread = by_kl_mean.reshape(total), by_kl_std.reshape(total)
    for j in range(total):  # in autograd's order
        u = (center[j] - older[j]) * old_scale[j]
        to_mean[j] = by_moved[j] * _HALF * (_TWO * u) * old_scale[j] + by_center[j]
        by_log_ratio = by_spread[j] * _HALF * ratios[j] * _TWO
        to_logs[j] = -by_log_ratio + by_spread[j] + by_logs[j] - by_scale[j] * scale[j]
    for i in range(n):
        terms[1, i] = weight[i] * (-fit[i] + dual[i] + held[i])
    _describe(weights, kl_mean, kl_std, log_std, terms)
