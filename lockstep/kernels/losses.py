"""Losses of on-policy algorithms as functions of log-probabilities and values, with the bits of torch's replaced
operations. Entropy bonuses are added by lockstep.kernels.on_policy, which calls these functions.

Each takes, of one shard's slice:
    log_prob: of the actions under the learning version, float32 [T, n].
    value: float32 [T, n], or [T+1, n] with the value after the last step.
    numbers, flags: what the algorithm learns from, float32 [K, T, n] and bool [F, T, n]; the last flags are `valid`.
    hyper: float32 [H]
    by_log_prob, by_value: the gradients of the loss, float32 [T, n]; they are written, 0 where samples are not valid.
    terms: each sample's part of each metric, float32 [1 + M, T, n], written behind the count in the order of the
        algorithm's metric_names, without those of the entropy. The first two do not contain the factors -1 and 1/2 of
        their sums.

Shape legend: T steps, n columns, M metrics.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.math import exp, expm1
from lockstep.kernels.returns import vtrace
from lockstep.kernels.sums import row_sums

_HALF, _ZERO, _ONE, _TWO = map(np.float32, (0.5, 0, 1, 2))
_LARGEST_LOG_RATIO = np.float32(80)
_LEAST_DEVIATION = np.float32(1e-7)


@compiled
def _value_terms(terms: np.ndarray, first: int, t: int, j: int, value: np.float32, target: np.float32) -> None:
    """Those of lockstep.algorithms.losses.VALUE_METRICS."""
    error = target - value
    terms[first, t, j] = target
    terms[first + 1, t, j] = target * target
    terms[first + 2, t, j] = error
    terms[first + 3, t, j] = error * error


@compiled
def a2c_loss(
    log_prob: np.ndarray,
    value: np.ndarray,
    numbers: np.ndarray,
    flags: np.ndarray,
    hyper: np.ndarray,
    by_log_prob: np.ndarray,
    by_value: np.ndarray,
    terms: np.ndarray,
) -> None:
    """That of lockstep.algorithms.a2c. numbers: advantages and value targets. hyper: value_coef, and the mean and
    deviation that standardize advantages; 0 and 1 leave them unchanged."""
    advantages, targets, valid = numbers[0], numbers[1], flags[0]
    value_coef, mean, deviation = hyper
    steps, columns = log_prob.shape
    for t in range(steps):
        for j in range(columns):
            counts = valid[t, j]
            advantage = (advantages[t, j] - mean) / deviation
            error = value[t, j] - targets[t, j]
            by_log_prob[t, j] = (-_ONE if counts else _ZERO) * advantage
            by_value[t, j] = (_HALF * value_coef if counts else _ZERO) * (_TWO * error)
            terms[1, t, j] = log_prob[t, j] * advantage
            terms[2, t, j] = error * error
            _value_terms(terms, 4, t, j, value[t, j], targets[t, j])


@compiled
def _traced(
    log_prob: np.ndarray,
    value: np.ndarray,
    numbers: np.ndarray,
    flags: np.ndarray,
    hyper: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """V-trace's targets, advantages and ρ, float32 [3, T, n], log π/μ and π/μ [T, n]."""
    reward, old_log_prob = numbers[0], numbers[1]
    terminated, truncated, valid = flags[0], flags[1], flags[2]
    steps, columns = log_prob.shape
    log_ratio, ratio = np.empty_like(log_prob), np.empty_like(log_prob)
    for t in range(steps):
        for j in range(columns):
            difference = log_prob[t, j] - old_log_prob[t, j] if valid[t, j] else _ZERO
            log_ratio[t, j] = min(difference, _LARGEST_LOG_RATIO)
            ratio[t, j] = exp(log_ratio[t, j])
    trace = np.empty((3, steps, columns), np.float32)
    vs, advantage, rho = trace[0], trace[1], trace[2]
    vtrace(ratio, reward, value, terminated, truncated, hyper[1], hyper[2], hyper[3], hyper[4], vs, advantage, rho)
    return trace, log_ratio, ratio


@compiled
def _masked_sum(x: np.ndarray, valid: np.ndarray) -> np.float32:
    """That of lockstep.algorithms.losses: float32 [T, n], bool [T, n]"""
    of_valid, total = np.where(valid, x, _ZERO).reshape(1, x.size), np.empty(1, np.float32)
    row_sums(of_valid, total)
    return total[0]


@compiled
def _standardize(x: np.ndarray, valid: np.ndarray) -> None:
    """lockstep.algorithms.losses.standardized, in place."""
    count = np.sum(valid)
    x -= _masked_sum(x, valid) / np.float32(max(count, 1))
    variance = _masked_sum(x * x, valid) / np.float32(max(count - 1, 1))
    x /= max(np.sqrt(variance), _LEAST_DEVIATION)


@compiled
def impala_loss(
    log_prob: np.ndarray,
    value: np.ndarray,
    numbers: np.ndarray,
    flags: np.ndarray,
    hyper: np.ndarray,
    by_log_prob: np.ndarray,
    by_value: np.ndarray,
    terms: np.ndarray,
) -> None:
    """That of lockstep.algorithms.impala. numbers: rewards and the collecting version's log-probabilities. flags:
    terminated, truncated, valid. hyper: value_coef, discount, vtrace_lambda, rho_clip, c_clip."""
    valid, value_coef = flags[2], hyper[0]
    trace, log_ratio, _ = _traced(log_prob, value, numbers, flags, hyper)
    steps, columns = log_prob.shape
    for t in range(steps):
        for j in range(columns):
            counts, vs, rho = valid[t, j], trace[0, t, j], trace[2, t, j]
            advantage = rho * trace[1, t, j]
            error = value[t, j] - vs
            by_log_prob[t, j] = (-_ONE if counts else _ZERO) * advantage
            by_value[t, j] = (_HALF * value_coef if counts else _ZERO) * (_TWO * error)
            terms[1, t, j] = log_prob[t, j] * advantage
            terms[2, t, j] = error * error
            terms[4, t, j] = expm1(log_ratio[t, j]) - log_ratio[t, j]
            terms[5, t, j] = rho
            _value_terms(terms, 6, t, j, value[t, j], vs)


@compiled
def _clipped(
    advantage: np.float32, ratio: np.float32, low: np.float32, high: np.float32, counts: bool
) -> tuple[np.float32, np.float32]:
    """The clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7), and the gradient of the loss by the
    ratio."""
    held_ratio = min(max(ratio, low), high)
    free, held = ratio * advantage, held_ratio * advantage
    # Where both are equal, torch gives each half of the gradient.
    by_surrogate = -_ONE if counts else _ZERO
    share = _HALF if free == held else _ONE
    by_free = _ZERO if free > held else share * by_surrogate
    by_held = _ZERO if free < held else share * by_surrogate
    moved = low <= ratio and ratio <= high
    return min(free, held), by_free * advantage + (by_held * advantage if moved else _ZERO)


@compiled
def _value_loss(
    value: np.float32, old_value: np.float32, target: np.float32, value_clip: np.float32, by_sum: np.float32
) -> tuple[np.float32, np.float32]:
    """A squared error, clipped as lockstep.algorithms.losses.clipped_value_loss says, and its gradient by the value.

    Args:
        value_clip: 0 for off.
        by_sum: the gradient by the squared error.
    """
    error = value - target
    squared = error * error
    if not value_clip > 0:
        return squared, by_sum * (_TWO * error)
    move = value - old_value
    other = old_value + min(max(move, -value_clip), value_clip) - target
    further = other * other
    share = _HALF if squared == further else _ONE
    by_own = _ZERO if squared < further else share * by_sum
    by_other = _ZERO if squared > further else share * by_sum
    within = -value_clip <= move and move <= value_clip
    by_value = by_own * (_TWO * error) + (by_other * (_TWO * other) if within else _ZERO)
    return max(squared, further), by_value


@compiled
def appo_loss(
    log_prob: np.ndarray,
    value: np.ndarray,
    numbers: np.ndarray,
    flags: np.ndarray,
    hyper: np.ndarray,
    by_log_prob: np.ndarray,
    by_value: np.ndarray,
    terms: np.ndarray,
) -> None:
    """That of lockstep.algorithms.appo. numbers: rewards, the collecting version's log-probabilities, and its values.
    flags: as for impala_loss. hyper: the same, then the lowest and highest ratio, value_clip, 0 for off, and 1 if
    advantages are standardized, else 0."""
    old_log_prob, old_value, valid, value_coef = numbers[1], numbers[2], flags[2], hyper[0]
    low, high, value_clip = hyper[5], hyper[6], hyper[7]
    trace, log_ratio, ratio = _traced(log_prob, value, numbers, flags, hyper)
    if hyper[8]:
        _standardize(trace[1], valid)
    steps, columns = log_prob.shape
    for t in range(steps):
        for j in range(columns):
            counts, vs = valid[t, j], trace[0, t, j]
            surrogate, by_ratio = _clipped(trace[1, t, j], ratio[t, j], low, high, counts)
            uncut = counts and log_prob[t, j] - old_log_prob[t, j] <= _LARGEST_LOG_RATIO
            by_log_prob[t, j] = by_ratio * ratio[t, j] if uncut else _ZERO
            by_sum = _HALF * value_coef if counts else _ZERO
            squared, by_value[t, j] = _value_loss(value[t, j], old_value[t, j], vs, value_clip, by_sum)

            terms[1, t, j] = surrogate
            terms[2, t, j] = squared
            terms[4, t, j] = expm1(log_ratio[t, j]) - log_ratio[t, j]
            terms[5, t, j] = _ONE if ratio[t, j] != min(max(ratio[t, j], low), high) else _ZERO
            terms[6, t, j] = trace[2, t, j]
            _value_terms(terms, 7, t, j, value[t, j], vs)


@compiled
def ppo_loss(
    log_prob: np.ndarray,
    value: np.ndarray,
    numbers: np.ndarray,
    flags: np.ndarray,
    hyper: np.ndarray,
    by_log_prob: np.ndarray,
    by_value: np.ndarray,
    terms: np.ndarray,
) -> None:
    """That of lockstep.algorithms.ppo. numbers: advantages, value targets, and the collecting version's
    log-probabilities and values. hyper: value_coef, the lowest and highest ratio, their distance from 1, value_clip, 0
    for off, and the last two of a2c_loss."""
    advantages, targets, old_log_prob, old_value, valid = numbers[0], numbers[1], numbers[2], numbers[3], flags[0]
    value_coef, low, high, clip, value_clip, mean, deviation = hyper
    steps, columns = log_prob.shape
    log_ratio, ratio = np.empty_like(log_prob), np.empty_like(log_prob)
    for t in range(steps):
        for j in range(columns):
            difference = log_prob[t, j] - old_log_prob[t, j] if valid[t, j] else _ZERO
            log_ratio[t, j] = min(difference, _LARGEST_LOG_RATIO)
            ratio[t, j] = exp(log_ratio[t, j])
    for t in range(steps):
        for j in range(columns):
            counts, advantage = valid[t, j], (advantages[t, j] - mean) / deviation
            surrogate, by_ratio = _clipped(advantage, ratio[t, j], low, high, counts)
            uncut = counts and log_prob[t, j] - old_log_prob[t, j] <= _LARGEST_LOG_RATIO
            by_log_prob[t, j] = by_ratio * ratio[t, j] if uncut else _ZERO
            by_sum = _HALF * value_coef if counts else _ZERO
            squared, by_value[t, j] = _value_loss(value[t, j], old_value[t, j], targets[t, j], value_clip, by_sum)
            terms[1, t, j] = surrogate
            terms[2, t, j] = squared
            terms[4, t, j] = expm1(log_ratio[t, j]) - log_ratio[t, j]
            terms[5, t, j] = _ONE if abs(ratio[t, j] - _ONE) > clip else _ZERO
            _value_terms(terms, 6, t, j, value[t, j], targets[t, j])
