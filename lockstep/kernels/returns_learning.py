"""Gradients of DQN's extensions in portable arithmetic: noisy layers, dueling streams, categorical returns and
quantiles, with the bits of torch's replaced operations. The loss is that of lockstep.algorithms.dqn.

Shape legend: P parameters, S slices, N items of all slices, n of one slice, D numbers of an observation, A actions, K
numbers that describe an action's return, J those of a target, Z numbers of a slice's noise.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import select
from lockstep.kernels.math import log
from lockstep.kernels.policies import exponentials, exponentiate, log_softmax
from lockstep.kernels.q_learning import DQN_SUMS, best, huber
from lockstep.kernels.q_networks import (
    QNetwork,
    describe,
    describe_at,
    differentiate,
    disturb,
    encode,
    expected,
    mean_returns,
    means,
    scale_noise,
)
from lockstep.kernels.sums import add_up, row_sums

_ZERO, _ONE = map(np.float32, (0, 1))


@compiled
def _of_actions(numbers: np.ndarray, action: np.ndarray) -> np.ndarray:
    """The numbers of the chosen actions: [n, A, K] and [n] -> [n, K]"""
    n, _, kinds = numbers.shape
    chosen = np.empty((n, kinds), np.float32)
    for i in range(n):
        for k in range(kinds):
            chosen[i, k] = numbers[i, action[i], k]
    return chosen


@compiled
def _following(
    network: QNetwork, online: np.ndarray, frozen: np.ndarray, double: bool, next_obs: np.ndarray, tau: np.ndarray
) -> np.ndarray:
    """The target network's numbers for the returns of the best next actions, [n, J].

    Args:
        online, frozen: float32 [P], what disturb returned of the model and of the target network.
        tau: fractions of implicit quantiles, float32 [n, J].
    """
    n, midpoints = len(next_obs), network.fractions.reshape((1, len(network.fractions)))
    of_encoder = encode(network, frozen, next_obs, False)
    numbers = describe_at(network, frozen, of_encoder, n, tau).numbers
    selecting = numbers
    if double:
        selecting = describe(network, online, next_obs, False).numbers
    elif len(network.embedding):
        selecting = describe_at(network, frozen, of_encoder, n, midpoints).numbers
    q, action = expected(network, selecting), np.empty(n, np.int64)
    for i in range(n):
        action[i] = best(q[i])
    return _of_actions(numbers, action)


@compiled
def project(p: np.ndarray, reward: np.ndarray, discount: np.ndarray, atoms: np.ndarray, out: np.ndarray) -> None:
    """Write the projection of distributions over reward + discount * atoms onto the atoms (Bellemare et al. 2017,
    arXiv:1707.06887, algorithm 1), as lockstep.algorithms.dqn does: p [n, K], reward and discount [n] -> [n, K]"""
    kinds = len(atoms)
    step = (atoms[kinds - 1] - atoms[0]) / np.float32(kinds - 1)
    places = np.empty(kinds, np.float32)
    for k in range(kinds):
        places[k] = np.float32(k)
    out[:] = _ZERO
    for i in range(len(p)):
        to = out[i]
        for j in range(kinds):
            value = min(max(reward[i] + discount[i] * atoms[j], atoms[0]), atoms[kinds - 1])
            place = (value - atoms[0]) / step
            for k in range(kinds):
                to[k] += p[i, j] * max(_ONE - abs(place - places[k]), _ZERO)


@compiled
def _learn_distributions(
    logits: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    atoms: np.ndarray,
    by_numbers: np.ndarray,
    terms: np.ndarray,
    priority: np.ndarray,
) -> None:
    """Learn by the cross-entropy minus the target's entropy: logits and the target's probabilities [n, K] -> the
    gradient by logits [n, K], each item's part in the metrics [DQN_SUMS, n], and the cross-entropy as priorities
    [n]."""
    log_p = np.empty_like(logits)
    log_softmax(logits, log_p)
    n, kinds = log_p.shape
    p, terms_of_atoms, negentropy = np.empty_like(log_p), np.empty_like(log_p), np.empty(n, np.float32)
    exponentials(log_p, p)
    for i in range(n):
        for k in range(kinds):
            terms_of_atoms[i, k] = target[i, k] * log_p[i, k]
    row_sums(terms_of_atoms, priority)
    for i in range(n):
        for k in range(kinds):
            x = target[i, k]
            terms_of_atoms[i, k] = x * log(x) if x != _ZERO else _ZERO
    row_sums(terms_of_atoms, negentropy)
    mean_returns(p, atoms, terms[1])
    mean_returns(target, atoms, terms[2])
    for i in range(n):
        priority[i] = -priority[i]
        terms[0, i] = weight[i] * (priority[i] + negentropy[i])
        terms[3, i] = abs(terms[2, i] - terms[1, i])
        total = _ZERO
        for k in range(kinds):
            by_numbers[i, k] = -weight[i] * target[i, k]
            total += by_numbers[i, k]
        for k in range(kinds):
            by_numbers[i, k] = by_numbers[i, k] - p[i, k] * total


@compiled
def _learn_means(
    value: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    delta: np.float32,
    by_numbers: np.ndarray,
    terms: np.ndarray,
    priority: np.ndarray,
) -> None:
    """Learn by the Huber loss: values and targets [n, 1] -> as for _learn_distributions, with one number per action."""
    for i in range(len(value)):
        error = value[i, 0] - target[i, 0]
        loss, slope = huber(error, delta)
        by_numbers[i, 0] = slope * weight[i]
        priority[i] = abs(error)
        terms[0, i] = weight[i] * loss
        terms[1, i], terms[2, i], terms[3, i] = value[i, 0], target[i, 0], priority[i]


@compiled
def _regress(
    value: np.float32, target: np.ndarray, tau: np.float32, by_loss: np.float32, loss: np.ndarray, by_value: np.ndarray
) -> None:
    """Compare a quantile with each sample of its target [J]: write losses, and the gradients by the quantile.

    Args:
        tau: the quantile's fraction.
        by_loss: the gradient by each loss.
    """
    for j in range(len(target)):
        error = target[j] - value
        size, slope = huber(error, _ONE)
        share = abs(tau - select(error < _ZERO, _ONE, _ZERO))
        loss[j] = share * size
        by_value[j] = -(slope * (by_loss * share))


@compiled
def learn_quantiles(
    value: np.ndarray,
    target: np.ndarray,
    tau: np.ndarray,
    weight: np.ndarray,
    by_numbers: np.ndarray,
    terms: np.ndarray,
    priority: np.ndarray,
) -> None:
    """Learn by quantile regression (lockstep.algorithms.dqn.quantile_huber): quantiles [n, K] and targets [n, J] -> as
    for _learn_distributions.

    Args:
        tau: the quantiles' fractions, float32 [n, K], or [1, K] for all items.
    """
    (n, kinds), samples = value.shape, target.shape[1]
    loss, by_value = np.empty((kinds, samples), np.float32), np.empty((kinds, samples), np.float32)
    of_quantiles, total = np.empty((1, kinds), np.float32), np.empty(1, np.float32)
    for i in range(n):
        by_loss = weight[i] / np.float32(samples)
        for k in range(kinds):
            _regress(value[i, k], target[i], tau[i % len(tau), k], by_loss, loss[k], by_value[k])
        means(loss, of_quantiles[0])
        row_sums(of_quantiles, total)
        row_sums(by_value, by_numbers[i])
        terms[0, i] = weight[i] * total[0]
    means(value, terms[1])
    means(target, terms[2])
    for i in range(n):
        priority[i] = abs(terms[2, i] - terms[1, i])
        terms[3, i] = priority[i]


@compiled
def returns_gradients(
    network: QNetwork,
    parameters: np.ndarray,
    target: np.ndarray,
    double: bool,
    delta: np.float32,
    samples: tuple[int, int],
    items: tuple[np.ndarray, ...],
    joined: bool,
    used: np.ndarray,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradients of the loss of the chosen actions' returns.

    Args:
        network: where the model's parts lie.
        samples: how many implicit quantiles of each item move, and how many its target has; else 0.
        items: see lockstep.kernels.replayed. Their noise is, by slice, that of noisy layers of the model and of the
            target network, then the fractions of implicit quantiles, and those of their targets.
        used: float32 [2, P], overwritten.
        parameters, target, double, delta, joined, out, priority: as for lockstep.kernels.q_learning.dqn_gradients.
    """
    obs, action, reward, discount, next_obs, weight, noise = items
    slices, size = len(out), len(parameters)
    each, drawn = len(obs) // slices, len(noise) // slices
    several = 1 if drawn else slices  # pass through the networks together
    disturbing, moved, n = drawn - each * (samples[0] + samples[1]), each * samples[0], several * each
    scaled, midpoints = np.empty(disturbing, np.float32), network.fractions.reshape((1, len(network.fractions)))
    terms = np.empty((DQN_SUMS, each), np.float32)
    for first in range(0, slices, several):
        begin, end, of_noise = first * each, first * each + n, noise[first * drawn :]
        x, then, chosen = obs[begin:end], next_obs[begin:end], action[begin:end]
        scale_noise(of_noise[:disturbing], scaled)
        online_noise, target_noise = scaled[: disturbing // 2], scaled[disturbing // 2 :]
        online = disturb(network, parameters, online_noise, used[0])
        frozen = disturb(network, target, target_noise, used[1])
        tau = of_noise[disturbing : disturbing + moved].reshape((each, samples[0]))
        of_target = of_noise[disturbing + moved : drawn].reshape((each, samples[1]))
        following = _following(network, online, frozen, double, then, of_target)
        computed = describe_at(network, online, encode(network, online, x, False), n, tau)
        value = _of_actions(computed.numbers, chosen)
        by_numbers, wanted = np.empty_like(value), np.empty_like(following)
        if len(network.atoms):
            p_t = np.empty_like(following)
            log_softmax(following, p_t)
            exponentiate(p_t)
            project(p_t, reward[begin:end], discount[begin:end], network.atoms, wanted)
        else:
            for i in range(n):
                for j in range(following.shape[1]):
                    wanted[i, j] = reward[begin + i] + discount[begin + i] * following[i, j]
        for s in range(several):
            one, last = s * each, (s + 1) * each
            of_slice, to_priority = weight[begin + one : begin + last], priority[begin + one : begin + last]
            of_value, goal, by = value[one:last], wanted[one:last], by_numbers[one:last]
            if len(network.atoms):
                _learn_distributions(of_value, goal, of_slice, network.atoms, by, terms, to_priority)
            elif len(network.fractions):
                at = tau if len(network.embedding) else midpoints
                learn_quantiles(of_value, goal, at, of_slice, by, terms, to_priority)
            else:
                _learn_means(of_value, goal, of_slice, delta, by, terms, to_priority)
            out[first + s, size] = np.float32(each)
            row_sums(terms, out[first + s, size + 1 : size + 1 + DQN_SUMS])
        to, at_once = out[first : first + several], joined and several == slices
        differentiate(network, online, online_noise, x, computed, chosen, by_numbers, to, at_once)
    if joined:
        add_up(out, 0 if drawn else size, size + 1 + DQN_SUMS)
