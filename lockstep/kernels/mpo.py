"""Gradients of MPO in portable arithmetic: the losses of lockstep.algorithms.mpo for several slices, with the bits of
torch's replaced operations.

Networks are evaluated for all slices at once. Losses are computed slice by slice (lockstep.kernels.mpo_loss), since
torch adds up a single number of each action, or of each item, in another order than several.

Shape legend: P parameters, L layers of a network, C critics, S slices, N items of all slices, n of one slice, K sampled
actions of an item, D numbers of an observation, A of an action.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.actor_critic import Networks, critics_terms, normals, of_critic, smallest_values, with_actions
from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import activations, backward, evaluate
from lockstep.kernels.math import tanh
from lockstep.kernels.mpo_loss import MPO_SUMS, Variables, learn_policy, positive
from lockstep.kernels.network import biases_in_parts
from lockstep.kernels.policies import exponentiate
from lockstep.kernels.sums import add_up, first_sums, row_sums

_LOG_STD_LOW, _LOG_STD_HIGH = np.float32(-20), np.float32(2)
_ZERO, _ONE, _TWO = map(np.float32, (0, 1, 2))
_ROWS = 256
"""Sampled actions that the critics evaluate together, if whole minibatches have that many: their layers fit in the
cache."""


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
def _variables(vector: np.ndarray, places: np.ndarray, size: int) -> Variables:
    """Views of variables, or of the gradients by them, among numbers [P or more]."""
    temperature, mean, std = places
    return vector[temperature : temperature + 1], vector[mean : mean + size], vector[std : std + size]


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
    n, last = len(obs), len(layers) // critics - 1
    x = with_actions(obs, action)
    found = np.empty((3, critics, n), np.float32)
    values, squares, sizes = found[0], found[1], found[2]
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
    critics_terms(values, squares, sizes, weight, target, 2, terms, priority)


@compiled
def mpo_gradients(
    networks: Networks,
    first_log_std: np.float32,
    places: np.ndarray,
    bounds: np.ndarray,
    items: tuple[np.ndarray, ...],
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
        items: as for that. Their noise is for the sampled actions of next_obs, [S, K, n, A].
        out: float32 [S, P + 1 + MPO_SUMS or more], as for sac_gradients.
    """
    policy, layers, critics, parameters, target = networks
    obs, action, reward, discount, next_obs, weight, noise = items
    (n, size), slices = action.shape, len(out)
    each, count = n // slices, len(noise) // (n * size)
    last, behind = len(policy) - 1, len(parameters)
    old_mean, old_log_std = np.empty((n, size), np.float32), np.empty((n, size), np.float32)
    _bounded(activations(evaluate(policy, target, next_obs), policy, n, last), first_log_std, old_mean, old_log_std)
    sampled = _sample(old_mean, old_log_std, noise.reshape((slices, count, each, size)))
    values = _values(layers, critics, target, next_obs, sampled)

    scratch = evaluate(policy, parameters, next_obs)
    output = activations(scratch, policy, n, last)
    mean, log_std = np.empty((n, size), np.float32), np.empty((n, size), np.float32)
    _bounded(output, first_log_std, mean, log_std)
    by_mean, by_log_std = np.empty((n, size), np.float32), np.empty((n, size), np.float32)
    wanted, terms = np.empty(n, np.float32), np.empty((slices, MPO_SUMS, each), np.float32)
    for s in range(slices):
        begin, end = s * each, (s + 1) * each
        first_sums(values[s], wanted[begin:end])
        policies = old_mean[begin:end], old_log_std[begin:end], mean[begin:end], log_std[begin:end]
        variables, by_variables = _variables(parameters, places, size), _variables(out[s], places, size)
        learned = by_mean[begin:end], by_log_std[begin:end], by_variables, terms[s]
        learn_policy(sampled[s], values[s], *policies, weight[begin:end], bounds, variables, *learned)
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
        out[s, behind + 7] = positive(parameters[places[0]]) * np.float32(each)
    if joined:
        for group in range(3):
            add_up(out, places[group], places[group] + (size if group else 1))
        add_up(out, behind, behind + 1 + MPO_SUMS)
