"""Gradients of MPO in portable arithmetic: the loss of lockstep.algorithms.mpo for several slices, with the bits of
torch's replaced operations.

Networks are evaluated for all slices at once. What follows is computed slice by slice, since torch adds up a single
number of each action, or of each item, in another order than several.

Shape legend: P parameters, L layers of a network, C critics, S slices, N items of all slices, n of one slice, K sampled
actions of an item, D numbers of an observation, A of an action.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.kernels.actor_critic import normals, of_critic, smallest_values, with_actions
from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import activations, backward, evaluate
from lockstep.kernels.math import log, sigmoid, softplus, tanh
from lockstep.kernels.network import biases_in_parts
from lockstep.kernels.policies import exponentiate
from lockstep.kernels.sums import add_up, middle_sums, row_sums

MPO_SUMS = 10
"""Metrics of lockstep.algorithms.mpo.MPO."""
_LOG_STD_LOW, _LOG_STD_HIGH = np.float32(-20), np.float32(2)
_ZERO, _HALF, _ONE, _TWO = map(np.float32, (0, 0.5, 1, 2))
_LEAST, _LEAST_WEIGHT = np.float32(1e-8), np.float32(1e-30)
_LOG_TAU, _ENTROPY = np.float32(math.log(2 * math.pi)), np.float32(0.5 * (1 + math.log(2 * math.pi)))
_Variables = tuple[np.ndarray, np.ndarray, np.ndarray]
_ROWS = 256
"""Sampled actions that are valued together, if that many belong to whole minibatches: their layers fit in the cache."""


@compiled
def _bounded(output: np.ndarray, shift: np.float32, mean: np.ndarray, log_std: np.ndarray) -> None:
    """Write the means and log deviations of a policy's outputs: [N, 2A] -> [N, A] each."""
    n, size = mean.shape
    for i in range(n):
        for d in range(size):
            mean[i, d] = tanh(output[i, d])
            log_std[i, d] = min(max(output[i, size + d] + shift, _LOG_STD_LOW), _LOG_STD_HIGH)


@compiled
def _sample(mean: np.ndarray, log_std: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Actions of a normal distribution: means and log deviations [N, A], and uniform noise [S, K, n, A] in the order of
    the result."""
    slices, count, each, size = noise.shape
    action = normals(noise).reshape((slices, count, each * size))
    deviation = log_std.copy()
    exponentiate(deviation)
    centers, scales = mean.reshape((slices, each * size)), deviation.reshape((slices, each * size))
    for s in range(slices):
        for k in range(count):
            to, center, scale = action[s, k], centers[s], scales[s]
            for i in range(len(to)):
                to[i] = center[i] + scale[i] * to[i]
    return action.reshape((slices, count, each, size))


@compiled
def _values(
    layers: np.ndarray, critics: int, parameters: np.ndarray, obs: np.ndarray, action: np.ndarray
) -> np.ndarray:
    """The smallest of the critics' values of each sampled action: [N, D] and [S, K, n, A] -> [S, K, n]"""
    (slices, count, each, size), of_obs = action.shape, obs.shape[1]
    values = np.empty((slices, count, each), np.float32)
    together = max(1, _ROWS // len(obs))
    for first in range(0, count, together):
        kinds = min(together, count - first)
        x = np.empty((slices * kinds * each, of_obs + size), np.float32)
        row = 0
        for s in range(slices):
            for k in range(first, first + kinds):
                for i in range(each):
                    to, of = x[row], obs[s * each + i]
                    for j in range(of_obs):
                        to[j] = of[j]
                    for d in range(size):
                        to[of_obs + d] = min(max(action[s, k, i, d], -_ONE), _ONE)
                    row += 1
        found = smallest_values(layers, critics, parameters, x).reshape((slices, kinds, each))
        for s in range(slices):
            for k in range(kinds):
                for i in range(each):
                    values[s, first + k, i] = found[s, k, i]
    return values


@compiled
def _sum_over(x: np.ndarray, out: np.ndarray) -> None:
    """Write sums over the first axis: [K, M] -> [M]"""
    middle_sums(x.reshape((1, x.shape[0], x.shape[1])), out.reshape((1, len(out))))


@compiled
def _sum(x: np.ndarray) -> np.float32:
    """The sum of all numbers."""
    out = np.empty(1, np.float32)
    row_sums(x.reshape((1, x.size)), out)
    return out[0]


@compiled
def _positive(x: np.float32) -> np.float32:
    """What a dual variable stands for."""
    return softplus(x) + _LEAST


@compiled
def _variables(vector: np.ndarray, places: np.ndarray, size: int) -> _Variables:
    """Views of the variables behind the temperature [1] and behind both multipliers [A], among numbers [P or more]."""
    temperature, mean, std = places
    return vector[temperature : temperature + 1], vector[mean : mean + size], vector[std : std + size]


@compiled
def _weigh(
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
        bounds: as for mpo_gradients.
        weight: importance weights of items, float32 [n].
    """
    count, n = values.shape
    temperature = _positive(variable)
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
    _sum_over(power, of_dual)  # has another order than a softmax, if n is 1
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
    _sum_over(terms, by_log_std)
    for k in range(count):
        for j in range(total):
            terms[k, j] = -(slope[k, j] * scale[j])
            slope[k, j] = slope[k, j] * far[k, j]
    _sum_over(terms, by_center)
    _sum_over(slope, by_scale)


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
    """Add what a trust region costs to held [n], and write its gradients.

    Args:
        variables: behind the multipliers, float32 [A].
        kl: divergences, float32 [n, A].
        weight: importance weights of items, float32 [n].
        by_kl, by_variables: the gradients by these, float32 [n, A] and [A].
    """
    n, size = kl.shape
    terms, sums, by_multiplier = np.empty_like(kl), np.empty(n, np.float32), np.empty_like(kl)
    for d in range(size):
        multiplier = _positive(variables[d])
        for i in range(n):
            terms[i, d] = multiplier * kl[i, d] + multiplier * (bound - kl[i, d])
            by_kl[i, d] = weight[i] * multiplier
            by_multiplier[i, d] = weight[i] * (bound - kl[i, d])
    row_sums(terms, sums)
    for i in range(n):
        held[i] += sums[i]
    _sum_over(by_multiplier, by_variables)
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
    _sum_over(gain, terms[7])
    row_sums(kl_mean, terms[8])
    row_sums(kl_std, terms[9])
    row_sums(log_std + _ENTROPY, terms[5])
    for i in range(n):
        terms[8, i] /= np.float32(size)
        terms[9, i] /= np.float32(size)


@compiled
def _learn_policy(
    action: np.ndarray,
    values: np.ndarray,
    old_mean: np.ndarray,
    old_log_std: np.ndarray,
    mean: np.ndarray,
    log_std: np.ndarray,
    weight: np.ndarray,
    bounds: np.ndarray,
    variables: _Variables,
    by_mean: np.ndarray,
    by_log_std: np.ndarray,
    by_variables: _Variables,
    terms: np.ndarray,
) -> None:
    """Write the gradients of a slice's losses but the critics', and each item's part in their metrics.

    Args:
        action, values: those sampled, float32 [K, n, A] and [K, n].
        old_mean, old_log_std, mean, log_std: of the target policy and of the policy, float32 [n, A].
        weight: importance weights of items, float32 [n].
        bounds: as for mpo_gradients.
        variables: as _variables returns them.
        by_mean, by_log_std, by_variables: the gradients by these.
        terms: float32 [MPO_SUMS, n], in the order of metric_names.
    """
    (count, n), size = values.shape, action.shape[2]
    weights, log_prob = np.empty_like(values), np.zeros_like(values)
    fit, dual, held = np.empty(n, np.float32), np.empty(n, np.float32), np.zeros(n, np.float32)
    of_temperature, of_mean, of_std = variables
    by_temperature, by_mean_region, by_std_region = by_variables
    by_temperature[0] = _weigh(values, of_temperature[0], bounds, weight, weights, dual)

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
    _sum_over(log_prob, fit)

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


@compiled
def _learn_critics(
    layers: np.ndarray,
    critics: int,
    parameters: np.ndarray,
    obs: np.ndarray,
    action: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    joined: bool,
    out: np.ndarray,
    priority: np.ndarray,
    terms: np.ndarray,
) -> None:
    """Write the gradients of the critics' squared errors, priorities [N], and each item's part in the metrics to terms
    [S, MPO_SUMS, n]. Other arguments are those of mpo_gradients."""
    (slices, _, each), n, last = terms.shape, len(obs), len(layers) // critics - 1
    x = with_actions(obs, action)
    values, errors = np.empty((critics, n), np.float32), np.empty((critics, n), np.float32)
    squares, sizes = np.empty_like(errors), np.empty_like(errors)
    for c in range(critics):
        table = of_critic(layers, critics, c)
        scratch = evaluate(table, parameters, x)
        gradients = np.empty_like(scratch)
        q, by_q = activations(scratch, table, n, last), activations(gradients, table, n, last)
        for i in range(n):
            error = target[i] - q[i, 0]
            by_q[i, 0] = -(weight[i] * (_TWO * error))
            values[c, i], squares[c, i], sizes[c, i] = q[i, 0], error * error, abs(error)
        backward(parameters, table, x, scratch, gradients, out, True, joined, x[:0])
        biases_in_parts(table, n, gradients, out, joined)
    for s in range(slices):
        begin, end = s * each, (s + 1) * each
        of_slice = terms[s]
        _sum_over(squares[:, begin:end].copy(), of_slice[0])
        _sum_over(values[:, begin:end].copy(), of_slice[2])
        _sum_over(sizes[:, begin:end].copy(), of_slice[4])
        for i in range(each):
            of_slice[0, i] *= weight[begin + i]
            of_slice[2, i] /= np.float32(critics)
            of_slice[3, i] = target[begin + i]
            of_slice[4, i] /= np.float32(critics)
            priority[begin + i] = of_slice[4, i]


@compiled
def mpo_gradients(
    policy: np.ndarray,
    layers: np.ndarray,
    critics: int,
    parameters: np.ndarray,
    target: np.ndarray,
    first_log_std: np.float32,
    places: np.ndarray,
    bounds: np.ndarray,
    obs: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    next_obs: np.ndarray,
    weight: np.ndarray,
    noise: np.ndarray,
    joined: bool,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradients of MPO's losses. Other arguments are those of lockstep.kernels.actor_critic.sac_gradients.

    Args:
        first_log_std: the log deviation for an output of 0.
        places: where the variables behind the temperature and behind the multipliers of mean and deviation begin among
            the parameters, int64 [3].
        bounds: epsilon, epsilon_mean, epsilon_std and log K, float32 [4].
        noise: uniform, float32 [S, K, n, A].
        out: float32 [S, P + 1 + MPO_SUMS or more], as for sac_gradients.
    """
    (slices, count, each, size), n = noise.shape, len(obs)
    last, behind = len(policy) - 1, len(parameters)
    old_mean, old_log_std = np.empty((n, size), np.float32), np.empty((n, size), np.float32)
    _bounded(activations(evaluate(policy, target, next_obs), policy, n, last), first_log_std, old_mean, old_log_std)
    sampled = _sample(old_mean, old_log_std, noise)
    values = _values(layers, critics, target, next_obs, sampled)

    scratch = evaluate(policy, parameters, next_obs)
    output = activations(scratch, policy, n, last)
    mean, log_std = np.empty((n, size), np.float32), np.empty((n, size), np.float32)
    _bounded(output, first_log_std, mean, log_std)
    by_mean, by_log_std = np.empty((n, size), np.float32), np.empty((n, size), np.float32)
    wanted, terms = np.empty(n, np.float32), np.empty((slices, MPO_SUMS, each), np.float32)
    for s in range(slices):
        begin, end = s * each, (s + 1) * each
        _sum_over(values[s], wanted[begin:end])
        policies = old_mean[begin:end], old_log_std[begin:end], mean[begin:end], log_std[begin:end]
        variables, by_variables = _variables(parameters, places, size), _variables(out[s], places, size)
        learned = by_mean[begin:end], by_log_std[begin:end], by_variables, terms[s]
        _learn_policy(sampled[s], values[s], *policies, weight[begin:end], bounds, variables, *learned)
    gradients = np.empty_like(scratch)
    by_output = activations(gradients, policy, n, last)
    for i in range(n):
        wanted[i] = reward[i] + discount[i] * (wanted[i] / np.float32(count))
        for d in range(size):
            by_output[i, d] = by_mean[i, d] * (_ONE - mean[i, d] * mean[i, d])
            inside = _LOG_STD_LOW <= output[i, size + d] + first_log_std <= _LOG_STD_HIGH
            by_output[i, size + d] = by_log_std[i, d] if inside else _ZERO
    backward(parameters, policy, next_obs, scratch, gradients, out, True, joined, obs[:0])
    biases_in_parts(policy, n, gradients, out, joined)

    _learn_critics(layers, critics, parameters, obs, action, wanted, weight, joined, out, priority, terms)
    for s in range(slices):
        terms[s, 6] = _ZERO
        out[s, behind] = np.float32(each)
        row_sums(terms[s], out[s, behind + 1 : behind + 1 + MPO_SUMS])
        out[s, behind + 7] = _positive(parameters[places[0]]) * np.float32(each)
    if joined:
        for group in range(3):
            add_up(out, places[group], places[group] + (size if group else 1))
        add_up(out, behind, behind + 1 + MPO_SUMS)
