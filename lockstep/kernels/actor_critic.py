"""Gradients of SAC, TD3 and DDPG in portable arithmetic: the losses of lockstep.algorithms for one shard's slice.

The policy and the critics are tables of layers (lockstep.kernels.dense). The critics' table holds C networks of equal
shape, one after the other.

Shape legend: P parameters, L layers of a network, C critics, n items, D numbers of an observation, A of an action.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import SOURCE, activations, backward, evaluate
from lockstep.kernels.math import exp, ndtri, softplus, tanh

_LOG_STD_LOW, _LOG_STD_HIGH = np.float32(-20), np.float32(2)
_TINY, _ZERO, _HALF, _ONE, _TWO = map(np.float32, (1e-7, 0, 0.5, 1, 2))
_LOG_2, _LOG_TAU = np.float32(math.log(2)), np.float32(math.log(2 * math.pi))
SAC_SUMS, TD3_SUMS = 8, 5
"""Metrics of lockstep.algorithms.sac.SAC and lockstep.algorithms.ddpg.DDPG."""


@compiled
def _normal(noise: np.float32) -> np.float32:
    """The normal quantile of uniform noise."""
    return ndtri(min(max(noise, _TINY), _ONE - _TINY))


@compiled
def _joined(obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    """What critics see: [n, D] and [n, A] -> [n, D + A]; actions are cut to their bounds."""
    (n, size), more = obs.shape, action.shape[1]
    x = np.empty((n, size + more), np.float32)
    for i in range(n):
        for j in range(size):
            x[i, j] = obs[i, j]
        for j in range(more):
            x[i, size + j] = min(max(action[i, j], -_ONE), _ONE)
    return x


@compiled
def _sample(
    output: np.ndarray, noise: np.ndarray, action: np.ndarray, scaled: np.ndarray, log_prob: np.ndarray
) -> None:
    """Actions of a squashed normal distribution, [n, A], and their log-probabilities [n].

    Args:
        output: of the policy: means and log deviations, [n, 2A].
        noise: uniform, [n, A].
        scaled: is set to deviation times normal noise, [n, A].
    """
    n, size = action.shape
    for i in range(n):
        total = _ZERO
        for d in range(size):
            log_std = min(max(output[i, size + d], _LOG_STD_LOW), _LOG_STD_HIGH)
            normal = _normal(noise[i, d])
            scaled[i, d] = exp(log_std) * normal
            u = output[i, d] + scaled[i, d]
            action[i, d] = tanh(u)
            slope = _TWO * (_LOG_2 - u - softplus(-_TWO * u))
            total += -_HALF * (normal * normal + _LOG_TAU) - log_std - slope
        log_prob[i] = total


@compiled
def _learn_critics(
    layers: np.ndarray,
    critics: int,
    parameters: np.ndarray,
    obs: np.ndarray,
    action: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    gradient: np.ndarray,
    priority: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add the gradient of the critics' squared errors, and set priorities and the sums of loss, value, target and
    error."""
    n, last = len(obs), len(layers) // critics
    x = _joined(obs, action)
    scratch = evaluate(layers, parameters, x)
    gradients = np.zeros_like(scratch)
    priority[:] = 0
    for c in range(critics):
        q = activations(scratch, layers, n, (c + 1) * last - 1)
        by_q = activations(gradients, layers, n, (c + 1) * last - 1)
        for i in range(n):
            error = q[i, 0] - target[i]
            by_q[i, 0] = _TWO * weight[i] * error
            priority[i] += abs(error) / np.float32(critics)
            sums[0] += weight[i] * (error * error)
            sums[1] += q[i, 0] / np.float32(critics)
    for i in range(n):
        sums[2] += target[i]
        sums[3] += priority[i]
    backward(parameters, layers, x, scratch, gradients, gradient, x[:0])


@compiled
def _smallest(layers: np.ndarray, critics: int, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The smallest of the critics' values, [n]."""
    n, last = len(x), len(layers) // critics
    scratch = evaluate(layers, parameters, x)
    smallest = activations(scratch, layers, n, last - 1)[:, 0].copy()
    for c in range(1, critics):
        q = activations(scratch, layers, n, (c + 1) * last - 1)
        for i in range(n):
            smallest[i] = min(smallest[i], q[i, 0])
    return smallest


@compiled
def _of_critic(layers: np.ndarray, critics: int, critic: int) -> np.ndarray:
    """The table of one critic's layers."""
    size = len(layers) // critics
    table = layers[critic * size : (critic + 1) * size].copy()
    table[1:, SOURCE] -= critic * size
    return table


@compiled
def _climb(
    layers: np.ndarray,
    critics: int,
    parameters: np.ndarray,
    obs: np.ndarray,
    action: np.ndarray,
    weight: np.ndarray,
    by_action: np.ndarray,
    values: np.ndarray,
) -> None:
    """The smallest of the critics' values of actions [n, A], and the gradient of its negative, weighted, by actions.
    Each item is differentiated through its smallest critic alone."""
    n, size, last = len(obs), obs.shape[1], len(layers) // critics
    x = _joined(obs, action)
    scratch = evaluate(layers, parameters, x)
    best = np.zeros(n, np.int64)
    values[:] = activations(scratch, layers, n, last - 1)[:, 0]
    for c in range(1, critics):
        q = activations(scratch, layers, n, (c + 1) * last - 1)
        for i in range(n):
            if q[i, 0] < values[i]:
                best[i], values[i] = c, q[i, 0]
    for c in range(critics):
        chosen, table = np.flatnonzero(best == c), _of_critic(layers, critics, c)
        numbers = np.empty(len(chosen) * (len(scratch) // n // critics), np.float32)
        for layer in range(last):
            every = activations(scratch, layers, n, c * last + layer)
            activations(numbers, table, len(chosen), layer)[:] = every[chosen]
        gradients = np.zeros_like(numbers)
        activations(gradients, table, len(chosen), last - 1)[:, 0] = -weight[chosen]
        by_x = np.zeros((len(chosen), x.shape[1]), np.float32)
        backward(parameters, table, x[chosen], numbers, gradients, parameters[:0], by_x)
        for i in range(len(chosen)):
            by_action[chosen[i]] = by_x[i, size:]


@compiled
def sac_gradient(
    policy: np.ndarray,
    layers: np.ndarray,
    critics: int,
    parameters: np.ndarray,
    target: np.ndarray,
    log_temperature: int,
    target_entropy: np.float32,
    obs: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    next_obs: np.ndarray,
    weight: np.ndarray,
    noise: np.ndarray,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradient of SAC's losses.

    Args:
        policy: the policy's table, int64 [L, 11].
        layers: the critics' table, int64 [C * L, 11].
        critics: C.
        parameters, target: of the model and of the target model, float32 [P].
        log_temperature: the place of log α among the parameters.
        target_entropy: in nats.
        obs, action, reward, discount, next_obs, weight: the items, float32 [n, D], [n, A], [n], [n], [n, D], [n].
        noise: uniform, float32 [2, n, A].
        out: float32 [P + 1 + SAC_SUMS]: the gradient, n, and the sums of metrics.
        priority: is set to the mean error of each item, float32 [n].
    """
    n, size = action.shape
    last = len(policy) - 1
    gradient, sums = out[: len(parameters)], np.zeros(SAC_SUMS)
    gradient[:] = 0
    alpha = exp(parameters[log_temperature])
    chosen, scaled, log_prob = np.empty((n, size), np.float32), np.empty((n, size), np.float32), np.empty(n, np.float32)

    scratch = evaluate(policy, parameters, next_obs)
    _sample(activations(scratch, policy, n, last), noise[1], chosen, scaled, log_prob)
    wanted = _smallest(layers, critics, target, _joined(next_obs, chosen))
    for i in range(n):
        wanted[i] = reward[i] + discount[i] * (wanted[i] - alpha * log_prob[i])

    scratch = evaluate(policy, parameters, obs)
    output = activations(scratch, policy, n, last)
    _sample(output, noise[0], chosen, scaled, log_prob)
    by_action, values = np.empty((n, size), np.float32), np.empty(n, np.float32)
    _climb(layers, critics, parameters, obs, chosen, weight, by_action, values)
    gradients = np.zeros_like(scratch)
    by_output = activations(gradients, policy, n, last)
    of_temperature = _ZERO
    for i in range(n):
        by_log_prob = alpha * weight[i]
        entropy = -log_prob[i]
        for d in range(size):
            a = chosen[i, d]
            by_mean = by_action[i, d] * (_ONE - a * a) + _TWO * (a * by_log_prob)
            inside = _LOG_STD_LOW <= output[i, size + d] <= _LOG_STD_HIGH
            by_output[i, d] = by_mean
            by_output[i, size + d] = by_mean * scaled[i, d] - by_log_prob if inside else _ZERO
        of_temperature += weight[i] * (entropy - target_entropy)
        sums[1] += weight[i] * (alpha * log_prob[i] - values[i])
        sums[6] += entropy
    backward(parameters, policy, obs, scratch, gradients, gradient, obs[:0])
    gradient[log_temperature] = alpha * of_temperature
    sums[2] = alpha * of_temperature
    sums[7] = alpha * np.float32(n)

    of_critics = np.zeros(4)
    _learn_critics(layers, critics, parameters, obs, action, wanted, weight, gradient, priority, of_critics)
    sums[0], sums[3], sums[4], sums[5] = of_critics[0], of_critics[1], of_critics[2], of_critics[3]
    out[len(parameters)] = np.float32(n)
    for j in range(SAC_SUMS):
        out[len(parameters) + 1 + j] = np.float32(sums[j])


@compiled
def td3_gradient(
    policy: np.ndarray,
    layers: np.ndarray,
    critics: int,
    parameters: np.ndarray,
    target: np.ndarray,
    smoothing_std: np.float32,
    smoothing_clip: np.float32,
    period: int,
    moves: bool,
    obs: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    next_obs: np.ndarray,
    weight: np.ndarray,
    noise: np.ndarray,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradient of TD3's losses, or of DDPG's if there is no noise. Other arguments are those of sac_gradient.

    Args:
        smoothing_std, smoothing_clip: of the noise on the target policy's actions.
        period: gradient steps of the critics per step of the policy.
        moves: whether the policy moves in this step.
        noise: uniform, float32 [n, A], or [0, A].
        out: float32 [P + 1 + TD3_SUMS].
    """
    n, size = action.shape
    last = len(policy) - 1
    gradient, sums = out[: len(parameters)], np.zeros(TD3_SUMS)
    gradient[:] = 0
    chosen = np.empty((n, size), np.float32)

    output = activations(evaluate(policy, target, next_obs), policy, n, last)
    for i in range(n):
        for d in range(size):
            chosen[i, d] = tanh(output[i, d])
            if len(noise):
                shift = smoothing_std * _normal(noise[i, d])
                chosen[i, d] = chosen[i, d] + min(max(shift, -smoothing_clip), smoothing_clip)
    wanted = _smallest(layers, critics, target, _joined(next_obs, chosen))
    for i in range(n):
        wanted[i] = reward[i] + discount[i] * wanted[i]
    if moves:
        scratch = evaluate(policy, parameters, obs)
        output = activations(scratch, policy, n, last)
        for i in range(n):
            for d in range(size):
                chosen[i, d] = tanh(output[i, d])
        by_action, values = np.empty((n, size), np.float32), np.empty(n, np.float32)
        _climb(layers[: len(layers) // critics], 1, parameters, obs, chosen, weight, by_action, values)
        gradients = np.zeros_like(scratch)
        by_output = activations(gradients, policy, n, last)
        for i in range(n):
            for d in range(size):
                by_output[i, d] = by_action[i, d] * (_ONE - chosen[i, d] * chosen[i, d])
            sums[1] -= np.float32(period) * (weight[i] * values[i])
        backward(parameters, policy, obs, scratch, gradients, gradient, obs[:0])

    of_critics = np.zeros(4)
    _learn_critics(layers, critics, parameters, obs, action, wanted, weight, gradient, priority, of_critics)
    sums[0], sums[2], sums[3], sums[4] = of_critics[0], of_critics[1], of_critics[2], of_critics[3]
    out[len(parameters)] = np.float32(n)
    for j in range(TD3_SUMS):
        out[len(parameters) + 1 + j] = np.float32(sums[j])
