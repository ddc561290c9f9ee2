"""Gradients of SAC with discrete actions in portable arithmetic, with the bits of torch's replaced operations.

Policy and critics are tables of layers, as in lockstep.kernels.actor_critic. A critic estimates the values of all
actions, so losses take expectations over actions instead of samples.

Shape legend: P parameters, L layers of a network, C critics, S slices, N items of all slices, one slice after the
other, n of them in each, D numbers of an observation, A actions.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.actor_critic import SAC_SUMS, Networks, critics_terms
from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import activations, backward, evaluate
from lockstep.kernels.math import exp
from lockstep.kernels.network import biases_in_parts
from lockstep.kernels.policies import exponentials, log_softmax
from lockstep.kernels.sums import add_up, row_sums

_ZERO, _TWO = map(np.float32, (0, 2))


@compiled
def _judge(table: np.ndarray, scratch: np.ndarray, log_p: np.ndarray, p: np.ndarray) -> None:
    """Write the log-probabilities and probabilities [N, A] of a policy's outputs."""
    log_softmax(activations(scratch, table, len(p), len(table) - 1), log_p)
    exponentials(log_p, p)


@compiled
def _advantages(
    layers: np.ndarray, critics: int, scratch: np.ndarray, log_p: np.ndarray, alpha: np.float32, sign: np.float32
) -> np.ndarray:
    """The smallest of the critics' values, which they have emitted, minus alpha times log-probabilities [N, A]; times
    the sign."""
    n, each = len(log_p), len(layers) // critics
    found = activations(scratch, layers, n, each - 1).copy()
    for c in range(1, critics):
        values = activations(scratch, layers, n, (c + 1) * each - 1)
        for i in range(n):
            for a in range(found.shape[1]):
                found[i, a] = min(found[i, a], values[i, a])
    for i in range(n):
        for a in range(found.shape[1]):
            found[i, a] = sign * (found[i, a] - alpha * log_p[i, a])
    return found


@compiled
def _learn_critics(
    layers: np.ndarray,
    critics: int,
    scratch: np.ndarray,
    gradients: np.ndarray,
    action: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    priority: np.ndarray,
    terms: np.ndarray,
) -> None:
    """Write the gradients of the critics' squared errors by what they have emitted, priorities [N], and each item's
    part in the metrics to terms [S, SAC_SUMS, n]. Other arguments are those of discrete_sac_gradients."""
    n, size = len(action), len(layers) // critics
    found = np.empty((3, critics, n), np.float32)
    values, squares, sizes = found[0], found[1], found[2]
    for c in range(critics):
        last = (c + 1) * size - 1
        q, by_q = activations(scratch, layers, n, last), activations(gradients, layers, n, last)
        by_q[:] = _ZERO
        for i in range(n):
            value = q[i, action[i]]
            error = target[i] - value
            by_q[i, action[i]] = -(weight[i] * (_TWO * error))
            values[c, i], squares[c, i], sizes[c, i] = value, error * error, abs(error)
    critics_terms(values, squares, sizes, weight, target, 3, terms, priority)


@compiled
def _climb(
    log_p: np.ndarray, p: np.ndarray, loss: np.ndarray, weight: np.ndarray, by_output: np.ndarray, alpha: np.float32
) -> None:
    """Write the gradient of the policy's loss by logits [N, A].

    Args:
        loss: of each action, [N, A]: alpha times its log-probability, minus its value.
    """
    for i in range(len(p)):
        total = _ZERO
        for a in range(p.shape[1]):
            by_log_p = (weight[i] * loss[i, a]) * p[i, a] + (weight[i] * p[i, a]) * alpha
            by_output[i, a] = by_log_p
            total += by_log_p
        for a in range(p.shape[1]):
            by_output[i, a] = by_output[i, a] - p[i, a] * total


@compiled
def discrete_sac_gradients(
    networks: Networks,
    log_temperature: int,
    target_entropy: np.float32,
    items: tuple[np.ndarray, ...],
    joined: bool,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradients of SAC's losses. Other arguments are those of lockstep.kernels.actor_critic.sac_gradients.

    Args:
        items: as for that, with actions int64 [N] and no noise.
    """
    policy, layers, critics, parameters, target = networks
    obs, action, reward, discount, next_obs, weight, _ = items
    n, slices, behind = len(obs), len(out), len(parameters)
    each, last, alpha = n // slices, len(policy) - 1, exp(parameters[log_temperature])
    scratch = evaluate(policy, parameters, next_obs)
    log_p = np.empty_like(activations(scratch, policy, n, last))
    p, wanted = np.empty_like(log_p), np.empty(n, np.float32)
    climbed, entropy = np.empty(n, np.float32), np.empty(n, np.float32)
    _judge(policy, scratch, log_p, p)
    values = _advantages(layers, critics, evaluate(layers, target, next_obs), log_p, alpha, np.float32(1))
    row_sums(p * values, wanted)
    for i in range(n):
        wanted[i] = reward[i] + discount[i] * wanted[i]

    scratch, valued = evaluate(policy, parameters, obs), evaluate(layers, parameters, obs)
    _judge(policy, scratch, log_p, p)
    loss = _advantages(layers, critics, valued, log_p, alpha, np.float32(-1))
    row_sums(p * loss, climbed)
    row_sums(p * log_p, entropy)
    gradients = np.empty_like(scratch)
    _climb(log_p, p, loss, weight, activations(gradients, policy, n, last), alpha)
    backward(parameters, policy, obs, scratch, gradients, out, True, joined, obs[:0])
    biases_in_parts(policy, n, gradients, out, joined)

    by_values, terms = np.empty_like(valued), np.empty((slices, SAC_SUMS, each), np.float32)
    _learn_critics(layers, critics, valued, by_values, action, wanted, weight, priority, terms)
    backward(parameters, layers, obs, valued, by_values, out, True, joined, obs[:0])
    biases_in_parts(layers, n, by_values, out, joined)
    for s in range(slices):
        for i in range(each):
            at = s * each + i
            terms[s, 1, i] = weight[at] * climbed[at]
            terms[s, 2, i] = weight[at] * (-entropy[at] - target_entropy)
            terms[s, 6, i] = -entropy[at]
            terms[s, 7, i] = _ZERO
        out[s, behind] = np.float32(each)
        row_sums(terms[s], out[s, behind + 1 : behind + 1 + SAC_SUMS])
        out[s, behind + 3] *= alpha
        out[s, log_temperature] = out[s, behind + 3]
        out[s, behind + 8] = alpha * np.float32(each)
    if joined:
        add_up(out, log_temperature, log_temperature + 1)
        add_up(out, behind, behind + 1 + SAC_SUMS)
