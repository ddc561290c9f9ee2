"""Gradients of DQN's extensions in portable arithmetic: noisy layers, dueling streams and categorical returns, with the
bits of torch's replaced operations. The loss is that of lockstep.algorithms.dqn.

Shape legend: P parameters, S slices, N items of all slices, n of one slice, D numbers of an observation, A actions, K
numbers that describe an action's return, Z numbers of a network's noise.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.math import log
from lockstep.kernels.policies import exponentials, exponentiate, log_softmax
from lockstep.kernels.q_learning import DQN_SUMS, best, huber
from lockstep.kernels.q_networks import (
    QNetwork,
    describe,
    differentiate,
    disturb,
    expected,
    mean_returns,
    scale_noise,
)
from lockstep.kernels.sums import add_up, row_sums

_ZERO, _ONE = map(np.float32, (0, 1))


@compiled
def _log_probabilities(numbers: np.ndarray, action: np.ndarray) -> np.ndarray:
    """The log-probabilities of the chosen actions' atoms: logits [n, A, K] and actions [n] -> [n, K]"""
    n, _, kinds = numbers.shape
    chosen = np.empty((n, kinds), np.float32)
    for i in range(n):
        for k in range(kinds):
            chosen[i, k] = numbers[i, action[i], k]
    out = np.empty_like(chosen)
    log_softmax(chosen, out)
    return out


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
    log_p: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    atoms: np.ndarray,
    by_numbers: np.ndarray,
    terms: np.ndarray,
    priority: np.ndarray,
) -> None:
    """Learn by the cross-entropy minus the target's entropy: log-probabilities and the target's probabilities [n, K] ->
    the gradient by logits [n, K], each item's part in the metrics [DQN_SUMS, n], and priorities [n]."""
    n, kinds = log_p.shape
    p, terms_of_atoms, cross = np.empty_like(log_p), np.empty_like(log_p), np.empty(n, np.float32)
    exponentials(log_p, p)
    for i in range(n):
        for k in range(kinds):
            terms_of_atoms[i, k] = target[i, k] * log_p[i, k]
    row_sums(terms_of_atoms, cross)
    for i in range(n):
        for k in range(kinds):
            x = target[i, k]
            terms_of_atoms[i, k] = x * log(x) if x != _ZERO else _ZERO
    row_sums(terms_of_atoms, priority)
    mean_returns(p, atoms, terms[1])
    mean_returns(target, atoms, terms[2])
    for i in range(n):
        priority[i] = -cross[i] + priority[i]
        terms[0, i] = weight[i] * priority[i]
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
    by_numbers: np.ndarray,
    terms: np.ndarray,
    priority: np.ndarray,
) -> None:
    """Learn by the Huber loss: values and targets [n] -> as for _learn_distributions, with one number per action."""
    for i in range(len(value)):
        error = value[i] - target[i]
        loss, slope = huber(error)
        by_numbers[i, 0] = slope * weight[i]
        priority[i] = abs(error)
        terms[0, i] = weight[i] * loss
        terms[1, i], terms[2, i], terms[3, i] = value[i], target[i], priority[i]


@compiled
def returns_gradients(
    network: QNetwork,
    parameters: np.ndarray,
    target: np.ndarray,
    double: bool,
    obs: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    next_obs: np.ndarray,
    weight: np.ndarray,
    noise: np.ndarray,
    joined: bool,
    used: np.ndarray,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradients of the loss of the chosen actions' returns.

    Args:
        network: where the model's parts lie.
        noise: uniform numbers, float32 [2ZS]: by slice, those of the model and of the target network.
        used: float32 [2, P], overwritten.
        parameters, target, double, obs, action, reward, discount, next_obs, weight, joined, out, priority: as for
            lockstep.kernels.q_learning.dqn_gradients.
    """
    slices, size, atoms = len(out), len(parameters), network.atoms
    each, drawn = len(obs) // slices, len(noise) // slices
    several = 1 if drawn else slices  # pass through the networks together
    n, scaled = several * each, np.empty(drawn, np.float32)
    by_numbers, following = np.empty((n, max(1, len(atoms))), np.float32), np.empty(n, np.int64)
    wanted, terms = np.empty_like(by_numbers), np.empty((DQN_SUMS, each), np.float32)
    for first in range(0, slices, several):
        begin, end = first * each, first * each + n
        x, then, chosen = obs[begin:end], next_obs[begin:end], action[begin:end]
        scale_noise(noise[first * drawn : (first + 1) * drawn], scaled)
        online_noise, target_noise = scaled[: drawn // 2], scaled[drawn // 2 :]
        online = disturb(network, parameters, online_noise, used[0])
        numbers_t, _, _, _ = describe(network, disturb(network, target, target_noise, used[1]), then, False)
        selected = expected(atoms, describe(network, online, then, False)[0] if double else numbers_t)
        for i in range(n):
            following[i] = best(selected[i])
        computed = describe(network, online, x, False)
        log_p = np.empty((0, 0), np.float32)
        if len(atoms):
            p_t = _log_probabilities(numbers_t, following)
            exponentiate(p_t)
            project(p_t, reward[begin:end], discount[begin:end], atoms, wanted)
            log_p = _log_probabilities(computed[0], chosen)
        else:
            for i in range(n):
                wanted[i, 0] = reward[begin + i] + discount[begin + i] * numbers_t[i, following[i], 0]
        for s in range(several):
            one, last = s * each, (s + 1) * each
            of_slice, to_priority = weight[begin + one : begin + last], priority[begin + one : begin + last]
            goal, by = wanted[one:last], by_numbers[one:last]
            if len(atoms):
                _learn_distributions(log_p[one:last], goal, of_slice, atoms, by, terms, to_priority)
            else:
                value = np.empty(each, np.float32)
                for i in range(each):
                    value[i] = computed[0][one + i, chosen[one + i], 0]
                _learn_means(value, goal[:, 0], of_slice, by, terms, to_priority)
            out[first + s, size] = np.float32(each)
            row_sums(terms, out[first + s, size + 1 : size + 1 + DQN_SUMS])
        to, at_once = out[first : first + several], joined and several == slices
        differentiate(network, online, online_noise, x, computed, chosen, by_numbers, to, at_once)
    if joined:
        add_up(out, 0 if drawn else size, size + 1 + DQN_SUMS)
