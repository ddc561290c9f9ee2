"""Gradients of SAC, TD3 and DDPG in portable arithmetic: the losses of lockstep.algorithms for several shards' slices.

The policy and the critics are tables of layers (lockstep.kernels.dense). The critics' table holds C networks of equal
shape, one after the other. Networks are evaluated for all slices at once, since every product copies its weights.

Shape legend: P parameters, L layers of a network, C critics, S slices, N items of all slices, one slice after the
other, n of them in each, D numbers of an observation, A of an action.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import SOURCE, activations, backward, clear, evaluate
from lockstep.kernels.math import exp, ndtri, softplus, tanh
from lockstep.kernels.sums import add_up, first_sums, write_sums

_LOG_STD_LOW, _LOG_STD_HIGH = np.float32(-20), np.float32(2)
_TINY, _ZERO, _HALF, _ONE, _TWO = map(np.float32, (1e-7, 0, 0.5, 1, 2))
_LOG_2, _LOG_TAU = np.float32(math.log(2)), np.float32(math.log(2 * math.pi))
SAC_SUMS, TD3_SUMS = 8, 5
"""Metrics of lockstep.algorithms.sac.SAC and lockstep.algorithms.ddpg.DDPG."""
Networks = tuple[np.ndarray, np.ndarray, int, np.ndarray, np.ndarray]
"""The policy's table, int64 [L, 14]; the critics' table, int64 [C * L, 14]; C; and the parameters of the model and of
the target model, float32 [P] each."""


@compiled
def normals(noise: np.ndarray) -> np.ndarray:
    """The normal quantiles of Z numbers of uniform noise: [...] -> [Z]"""
    flat = noise.reshape(noise.size)
    out = np.empty(flat.size, np.float32)
    for i in range(flat.size):
        out[i] = ndtri(min(max(flat[i], _TINY), _ONE - _TINY))
    return out


@compiled
def with_actions(obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    """What critics see: [N, D] and [N, A] -> [N, D + A]; actions are cut to their bounds."""
    (n, size), more = obs.shape, action.shape[1]
    x = np.empty((n, size + more), np.float32)
    for i in range(n):
        for j in range(size):
            x[i, j] = obs[i, j]
        for j in range(more):
            x[i, size + j] = min(max(action[i, j], -_ONE), _ONE)
    return x


@compiled
def _squashed(output: np.ndarray) -> np.ndarray:
    """tanh of each number, [N, A]"""
    flat = output.reshape(output.size)
    action = np.empty(flat.size, np.float32)
    for i in range(flat.size):
        action[i] = tanh(flat[i])
    return action.reshape(output.shape)


@compiled
def _sample(
    output: np.ndarray, normal: np.ndarray, action: np.ndarray, scaled: np.ndarray, log_prob: np.ndarray
) -> None:
    """Actions of a squashed normal distribution, [N, A], and their log-probabilities [N].

    Args:
        output: of the policy: means and log deviations, [N, 2A].
        normal: noise, [N, A].
        scaled: is set to deviation times noise, [N, A].
    """
    n, size = action.shape
    log_std, term = np.empty((n, size), np.float32), np.empty(n * size, np.float32)
    for i in range(n):
        for d in range(size):
            log_std[i, d] = min(max(output[i, size + d], _LOG_STD_LOW), _LOG_STD_HIGH)
            action[i, d] = output[i, d]
    z, log, shift, u = normal.reshape(-1), log_std.reshape(-1), scaled.reshape(-1), action.reshape(-1)
    for i in range(n * size):  # these loops are vectorized
        shift[i] = exp(log[i]) * z[i]
        u[i] = u[i] + shift[i]
    for i in range(n * size):
        slope = _TWO * (_LOG_2 - u[i] - softplus(-_TWO * u[i]))
        term[i] = -_HALF * (z[i] * z[i] + _LOG_TAU) - log[i] - slope
    for i in range(n * size):
        u[i] = tanh(u[i])
    for i in range(n):
        total = _ZERO
        for d in range(size):
            total += term[i * size + d]
        log_prob[i] = total


@compiled
def of_critic(layers: np.ndarray, critics: int, critic: int) -> np.ndarray:
    """The table of one critic's layers."""
    size = len(layers) // critics
    table = layers[critic * size : (critic + 1) * size].copy()
    for layer in range(1, size):
        table[layer, SOURCE] -= critic * size
    return table


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
    gradient: np.ndarray,
    priority: np.ndarray,
    sums: np.ndarray,
    place: int,
) -> None:
    """Write the gradients of the critics' squared errors, [S, P or more], or their sum if joined, set priorities [N],
    and add up each slice's losses in the first column of sums [S, ...], and its values, targets and errors from column
    `place` on."""
    n, last, size = len(obs), len(layers) // critics - 1, len(obs) // len(gradient)
    x = with_actions(obs, action)
    priority[:] = 0
    for c in range(critics):  # one after the other, so that what they remember stays in the cache
        table = of_critic(layers, critics, c)
        scratch = evaluate(table, parameters, x)
        gradients = np.empty_like(scratch)
        q, by_q = activations(scratch, table, n, last), activations(gradients, table, n, last)
        for i in range(n):
            error = q[i, 0] - target[i]
            by_q[i, 0] = _TWO * weight[i] * error
            priority[i] += abs(error) / np.float32(critics)
            sums[i // size, 0] += weight[i] * (error * error)
            sums[i // size, place] += q[i, 0] / np.float32(critics)
        backward(parameters, table, x, scratch, gradients, gradient, True, joined, x[:0])
    for i in range(n):
        sums[i // size, place + 1] += target[i]
        sums[i // size, place + 2] += priority[i]


@compiled
def smallest_values(layers: np.ndarray, critics: int, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The smallest of the critics' values, [N]."""
    n, last = len(x), len(layers) // critics - 1
    smallest = np.empty(n, np.float32)
    for c in range(critics):
        table = of_critic(layers, critics, c)
        q = activations(evaluate(table, parameters, x), table, n, last)
        for i in range(n):
            smallest[i] = min(smallest[i], q[i, 0]) if c else q[i, 0]
    return smallest


@compiled
def _take(rows: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """Copy the rows [N, M] at index [n] to out [n, M]."""
    for i in range(len(index)):
        of, to = rows[index[i]], out[i]
        for j in range(len(of)):
            to[j] = of[j]


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
    """The smallest of the critics' values of actions [N, A], and the gradient of its negative, weighted, by actions.
    Each item is differentiated through its smallest critic alone."""
    n, size, last = len(obs), obs.shape[1], len(layers) // critics
    x = with_actions(obs, action)
    scratch = evaluate(layers, parameters, x)
    best = np.zeros(n, np.int64)
    for c in range(critics):
        q = activations(scratch, layers, n, (c + 1) * last - 1)
        for i in range(n):
            if c == 0 or q[i, 0] < values[i]:
                best[i], values[i] = c, q[i, 0]
    for c in range(critics):
        chosen, table = np.flatnonzero(best == c), of_critic(layers, critics, c)
        part = len(scratch) // critics
        numbers, seen = scratch[c * part : (c + 1) * part], x
        if len(chosen) < n:
            numbers = np.empty(len(chosen) * (part // n), np.float32)
            for layer in range(last):
                every = activations(scratch, layers, n, c * last + layer)
                _take(every, chosen, activations(numbers, table, len(chosen), layer))
            seen = np.empty((len(chosen), x.shape[1]), np.float32)
            _take(x, chosen, seen)
        gradients, by_x = np.empty_like(numbers), np.empty_like(seen)
        by_q = activations(gradients, table, len(chosen), last - 1)
        for i in range(len(chosen)):
            by_q[i, 0] = -weight[chosen[i]]
        backward(parameters, table, seen, numbers, gradients, x[:0], False, False, by_x)
        for i in range(len(chosen)):
            for d in range(by_action.shape[1]):
                by_action[chosen[i], d] = by_x[i, size + d]


@compiled
def critics_terms(
    values: np.ndarray,
    squares: np.ndarray,
    sizes: np.ndarray,
    weight: np.ndarray,
    target: np.ndarray,
    first: int,
    terms: np.ndarray,
    priority: np.ndarray,
) -> None:
    """Write each item's part in the critics' metrics, as torch adds up several critics, and priorities [N].

    Args:
        values, squares, sizes: of the critics, their squared errors and the errors' sizes, [C, N] each.
        first: where the mean value stands among the metrics, which the target and the mean error follow. The loss is
            metric 0.
        terms: float32 [S, M, n], for M metrics.
    """
    (slices, _, each), critics = terms.shape, len(values)
    for s in range(slices):
        begin, end = s * each, (s + 1) * each
        of_slice = terms[s]
        first_sums(squares[:, begin:end].copy(), of_slice[0])
        first_sums(values[:, begin:end].copy(), of_slice[first])
        first_sums(sizes[:, begin:end].copy(), of_slice[first + 2])
        for i in range(each):
            of_slice[0, i] *= weight[begin + i]
            of_slice[first, i] /= np.float32(critics)
            of_slice[first + 1, i] = target[begin + i]
            of_slice[first + 2, i] /= np.float32(critics)
            priority[begin + i] = of_slice[first + 2, i]


@compiled
def sac_gradients(
    networks: Networks,
    log_temperature: int,
    target_entropy: np.float32,
    items: tuple[np.ndarray, ...],
    joined: bool,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradients of SAC's losses.

    Args:
        networks: the policy and the critics.
        log_temperature: the place of log α among the parameters.
        target_entropy: in nats.
        items: see lockstep.kernels.replayed. Their noise is for the actions of obs, then for those of next_obs,
            [S, 2, n, A].
        joined: write the tree's sum over all slices to out[0]. The rest of the numbers named below is overwritten.
        out: float32 [S, P + 1 + SAC_SUMS or more]: each slice's gradient by what the tables name and by log α, n, and
            the sums of metrics. The rest of it stays as it is.
        priority: is set to the mean error of each item, float32 [N].
    """
    policy, layers, critics, parameters, target = networks
    obs, action, reward, discount, next_obs, weight, noise = items
    (n, size), slices = action.shape, len(out)
    last, each = len(policy) - 1, n // slices
    sums = np.zeros((slices, SAC_SUMS))
    alpha = exp(parameters[log_temperature])
    normal = normals(noise).reshape((slices, 2, each, size))
    now, later = normal[:, 0].copy().reshape((n, size)), normal[:, 1].copy().reshape((n, size))
    chosen, scaled, log_prob = np.empty((n, size), np.float32), np.empty((n, size), np.float32), np.empty(n, np.float32)

    scratch = evaluate(policy, parameters, next_obs)
    _sample(activations(scratch, policy, n, last), later, chosen, scaled, log_prob)
    wanted = smallest_values(layers, critics, target, with_actions(next_obs, chosen))
    for i in range(n):
        wanted[i] = reward[i] + discount[i] * (wanted[i] - alpha * log_prob[i])

    scratch = evaluate(policy, parameters, obs)
    output = activations(scratch, policy, n, last)
    _sample(output, now, chosen, scaled, log_prob)
    by_action, values = np.empty((n, size), np.float32), np.empty(n, np.float32)
    _climb(layers, critics, parameters, obs, chosen, weight, by_action, values)
    gradients = np.empty_like(scratch)
    by_output = activations(gradients, policy, n, last)
    for s in range(slices):
        of_temperature = _ZERO
        for i in range(s * each, (s + 1) * each):
            by_log_prob = alpha * weight[i]
            entropy = -log_prob[i]
            for d in range(size):
                a = chosen[i, d]
                by_mean = by_action[i, d] * (_ONE - a * a) + _TWO * (a * by_log_prob)
                inside = _LOG_STD_LOW <= output[i, size + d] <= _LOG_STD_HIGH
                by_output[i, d] = by_mean
                by_output[i, size + d] = by_mean * scaled[i, d] - by_log_prob if inside else _ZERO
            of_temperature += weight[i] * (entropy - target_entropy)
            sums[s, 1] += weight[i] * (alpha * log_prob[i] - values[i])
            sums[s, 6] += entropy
        out[s, log_temperature] = alpha * of_temperature
        sums[s, 2] = alpha * of_temperature
        sums[s, 7] = alpha * np.float32(each)
    backward(parameters, policy, obs, scratch, gradients, out, True, joined, obs[:0])

    _learn_critics(layers, critics, parameters, obs, action, wanted, weight, joined, out, priority, sums, 3)
    write_sums(each, sums, out, len(parameters))
    if joined:
        add_up(out, log_temperature, log_temperature + 1)
        add_up(out, len(parameters), len(parameters) + 1 + SAC_SUMS)


@compiled
def td3_gradients(
    networks: Networks,
    smoothing_std: np.float32,
    smoothing_clip: np.float32,
    period: int,
    moves: bool,
    items: tuple[np.ndarray, ...],
    joined: bool,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradients of TD3's losses, or of DDPG's if there is no noise. Other arguments are those of sac_gradients.

    Args:
        smoothing_std, smoothing_clip: of the noise on the target policy's actions.
        period: gradient steps of the critics per step of the policy.
        moves: whether the policy moves in this step.
        items: as for sac_gradients. Their noise is for the actions of next_obs, [N, A], if there is any.
        out: float32 [S, P + 1 + TD3_SUMS or more], as for sac_gradients.
    """
    policy, layers, critics, parameters, target = networks
    obs, action, reward, discount, next_obs, weight, noise = items
    (n, size), slices = action.shape, len(out)
    last, each = len(policy) - 1, n // slices
    sums = np.zeros((slices, TD3_SUMS))

    output = activations(evaluate(policy, target, next_obs), policy, n, last)
    chosen, rows = _squashed(output), len(noise) // size
    normal = normals(noise).reshape((rows, size))
    for i in range(rows):
        for d in range(size):
            shift = smoothing_std * normal[i, d]
            chosen[i, d] = chosen[i, d] + min(max(shift, -smoothing_clip), smoothing_clip)
    wanted = smallest_values(layers, critics, target, with_actions(next_obs, chosen))
    for i in range(n):
        wanted[i] = reward[i] + discount[i] * wanted[i]
    if moves:
        scratch = evaluate(policy, parameters, obs)
        chosen = _squashed(activations(scratch, policy, n, last))
        by_action, values = np.empty((n, size), np.float32), np.empty(n, np.float32)
        _climb(layers[: len(layers) // critics], 1, parameters, obs, chosen, weight, by_action, values)
        gradients = np.empty_like(scratch)
        by_output = activations(gradients, policy, n, last)
        for i in range(n):
            for d in range(size):
                by_output[i, d] = by_action[i, d] * (_ONE - chosen[i, d] * chosen[i, d])
            sums[i // each, 1] -= np.float32(period) * (weight[i] * values[i])
        backward(parameters, policy, obs, scratch, gradients, out, True, joined, obs[:0])
    else:
        for s in range(1 if joined else slices):
            clear(policy, out[s])

    _learn_critics(layers, critics, parameters, obs, action, wanted, weight, joined, out, priority, sums, 2)
    write_sums(each, sums, out, len(parameters))
    if joined:
        add_up(out, len(parameters), len(parameters) + 1 + TD3_SUMS)
