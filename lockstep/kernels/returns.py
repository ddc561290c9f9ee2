"""Advantages and the statistics of rollouts in portable arithmetic.

Shape legend: T time, B environments, N samples, D numbers of a sample.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled


@compiled
def gae(
    r_t: np.ndarray,
    v_t: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    discount: float,
    lambda_: float,
    advantage_t: np.ndarray,
    target_t: np.ndarray,
) -> None:
    """Generalized advantage estimation, as lockstep.algorithms.returns.gae.

    Args:
        r_t, terminated, truncated: [T, B].
        v_t: [T+1, B].
        discount, lambda_: hyperparameters.
        advantage_t, target_t: the results, float32 [T, B].
    """
    gamma, decay = np.float32(discount), np.float32(discount * lambda_)
    steps, environments = r_t.shape
    for b in range(environments):
        later = np.float32(0)
        for t in range(steps - 1, -1, -1):
            value = v_t[t, b]
            bootstrapped = np.float32(0) if terminated[t, b] else gamma * v_t[t + 1, b]
            delta = r_t[t, b] + bootstrapped - value
            later = delta if terminated[t, b] or truncated[t, b] else delta + decay * later
            advantage_t[t, b] = later
            target_t[t, b] = later + value


@compiled
def vtrace(
    ratio_t: np.ndarray,
    r_t: np.ndarray,
    v_t: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    discount: np.float32,
    lambda_: np.float32,
    rho_clip: np.float32,
    c_clip: np.float32,
    vs_t: np.ndarray,
    advantage_t: np.ndarray,
    rho_t: np.ndarray,
) -> None:
    """V-trace, with the bits of lockstep.algorithms.returns.vtrace.

    Args:
        ratio_t: π/μ, float32 [T, B].
        r_t, terminated, truncated: [T, B].
        v_t: [T+1, B].
        discount, lambda_, rho_clip, c_clip: hyperparameters.
        vs_t, advantage_t, rho_t: the results, float32 [T, B].
    """
    steps, environments = r_t.shape
    for b in range(environments):
        later = np.float32(0)  # vs_{t+1} - v_{t+1}
        for t in range(steps - 1, -1, -1):
            value, next_value = v_t[t, b], v_t[t + 1, b]
            gamma = discount * np.float32(not terminated[t, b])
            c = lambda_ * min(ratio_t[t, b], c_clip)
            decay = discount * c * np.float32(not (terminated[t, b] or truncated[t, b]))
            rho_t[t, b] = min(ratio_t[t, b], rho_clip)
            ahead = next_value + lambda_ * (np.float32(0) if truncated[t, b] else later)
            advantage_t[t, b] = r_t[t, b] + gamma * ahead - value
            later = rho_t[t, b] * (r_t[t, b] + gamma * next_value - value) + decay * later
            vs_t[t, b] = value + later


@compiled
def discounted_returns(
    reward: np.ndarray, done: np.ndarray, carry: np.ndarray, discount: float, returns: np.ndarray
) -> None:
    """As lockstep.models.normalize.discounted_returns. carry [B] is updated; returns [T, B] is written."""
    gamma = np.float32(discount)
    for b in range(reward.shape[1]):
        sofar = carry[b]
        for t in range(len(reward)):
            sofar = reward[t, b] + gamma * sofar
            returns[t, b] = sofar
            if done[t, b]:
                sofar = np.float32(0)
        carry[b] = sofar


@compiled
def batch_sums(x: np.ndarray, valid: np.ndarray, sums: np.ndarray) -> None:
    """As lockstep.models.normalize.batch_sums: samples [T, B, D] and bool [T, B] -> float64 [1 + 2D]."""
    steps, environments, size = x.shape
    sums[:] = 0
    for t in range(steps):
        for b in range(environments):
            if valid[t, b]:
                sums[0] += 1
                for d in range(size):
                    number = np.float64(x[t, b, d])
                    sums[1 + d] += number
                    sums[1 + size + d] += number * number


@compiled
def slice_sums(advantages: np.ndarray, valid: np.ndarray, index: np.ndarray, sums: np.ndarray) -> None:
    """The number, sum and sum of squares of valid advantages in each slice of a rollout.

    Args:
        advantages: float32 [N].
        valid: bool [N].
        index: int64 [G, n]: the items of each gradient step.
        sums: the result, float64 [G, 3].
    """
    for step in range(len(index)):
        count, total, squares = 0.0, 0.0, 0.0
        for i in range(index.shape[1]):
            item = index[step, i]
            if valid[item]:
                x = np.float64(advantages[item])
                count += 1
                total += x
                squares += x * x
        sums[step, 0], sums[step, 1], sums[step, 2] = count, total, squares
