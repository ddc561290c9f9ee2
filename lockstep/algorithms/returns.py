"""Returns and advantages: pure functions of one rollout.

Shapes are [T, B]; `v_t` has T+1 rows, the last being the value of the observation after the last step. Slots follow
next-step autoreset (lockstep/core/rollout.py): after an episode ended at t, slot t+1 contains its final observation,
so a truncated episode bootstraps from v_{t+1}. A terminated episode does not bootstrap. In both cases the backward
sums stop at t, so an invalid slot never affects a valid one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """V-trace's targets, each [T, B], without gradient."""

    vs: Tensor
    """Value targets."""
    advantage: Tensor
    """r_t + γ q_{t+1} - v_t, not yet weighted by ρ_t."""
    rho: Tensor
    """min(ρ̄, π/μ): the clipped importance weights."""

    @property
    def pg_advantage(self) -> Tensor:
        """ρ_t (r_t + γ q_{t+1} - v_t): the factor of ∇ log π in the policy gradient."""
        return self.rho * self.advantage


def gae(
    r_t: Tensor, v_t: Tensor, terminated: Tensor, truncated: Tensor, discount: float, lambda_: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16).

    δ_t = r_t + γ v_{t+1} - v_t and A_t = δ_t + γ λ A_{t+1}, with v_{t+1} = 0 after a termination and A_{t+1} = 0
    after either kind of end and after the last step.

    Args:
        r_t: rewards [T, B].
        v_t: values [T+1, B].
        terminated: bool [T, B].
        truncated: bool [T, B].
        discount: γ.
        lambda_: 0 trusts the values (low variance), 1 the rewards (low bias).

    Returns:
        Advantages and value targets A_t + v_t, each [T, B].
    """
    discount_t = discount * (~terminated).to(r_t.dtype)
    delta_t = r_t + discount_t * v_t[1:] - v_t[:-1]
    advantage_t = _backward_trace(delta_t, discount * lambda_ * _continues(terminated, truncated, r_t))
    return advantage_t, advantage_t + v_t[:-1]


def n_step_returns(r_t: Tensor, v_t: Tensor, terminated: Tensor, truncated: Tensor, discount: float) -> Tensor:
    """Rewards to the end of the rollout or episode, then the value: A3C's targets (Mnih et al. 2016, algorithm S3).

    G_t = r_t + γ G_{t+1}, with G_{t+1} = 0 after a termination and v_{t+1} after a truncation or the last step.

    Args:
        r_t: rewards [T, B].
        v_t: values [T+1, B].
        terminated: bool [T, B].
        truncated: bool [T, B].
        discount: γ.

    Returns:
        Value targets [T, B].
    """
    bootstrap = truncated.clone()
    bootstrap[-1] = True
    bootstrap &= ~terminated
    bootstrapped_t = r_t + torch.where(bootstrap, discount * v_t[1:], 0.0)
    return _backward_trace(bootstrapped_t, discount * _continues(terminated, truncated, r_t))


def vtrace(
    log_ratio_t: Tensor,
    r_t: Tensor,
    v_t: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    discount: float,
    *,
    lambda_: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, section 4.1 and remarks 1 and 2).

    With ρ_t = min(ρ̄, π/μ) and c_t = λ min(c̄, π/μ):
    vs_t = v_t + ρ_t (r_t + γ v_{t+1} - v_t) + γ c_t (vs_{t+1} - v_{t+1}), and the advantage is
    r_t + γ q_{t+1} - v_t with q_{t+1} = λ vs_{t+1} + (1 - λ) v_{t+1}. After a termination the terms in γ
    vanish; after a truncation and after the last step vs_{t+1} = v_{t+1}.

    Args:
        log_ratio_t: log π(a_t|x_t) - log μ(a_t|x_t), of the learning over the collecting policy [T, B].
        r_t: rewards [T, B].
        v_t: values under the learning version [T+1, B].
        terminated: bool [T, B].
        truncated: bool [T, B].
        discount: γ.
        lambda_: lower trusts the values more.
        rho_clip: ρ̄ decides which policy's value function is learned: lower is closer to μ's, with less variance.
        c_clip: c̄ decides how fast corrections travel back in time: lower has less variance.

    Returns:
        VTrace; no gradient flows through it.
    """
    with torch.no_grad():
        ratio_t = log_ratio_t.exp()
        rho_t = ratio_t.clamp(max=rho_clip)
        c_t = lambda_ * ratio_t.clamp(max=c_clip)
        discount_t = discount * (~terminated).to(r_t.dtype)
        delta_t = rho_t * (r_t + discount_t * v_t[1:] - v_t[:-1])
        correction_t = _backward_trace(delta_t, discount * c_t * _continues(terminated, truncated, r_t))
        vs_t = v_t[:-1] + correction_t

        # q_{t+1} - v_{t+1} = λ (vs_{t+1} - v_{t+1}), which is zero wherever the episode or the rollout was cut.
        later_correction = torch.cat([correction_t[1:], torch.zeros_like(correction_t[:1])])
        later_correction = torch.where(truncated, 0.0, later_correction)
        q_tp1 = v_t[1:] + lambda_ * later_correction
        return VTrace(vs_t, advantage=r_t + discount_t * q_tp1 - v_t[:-1], rho=rho_t)


def _continues(terminated: Tensor, truncated: Tensor, like: Tensor) -> Tensor:
    """1 where the episode continues after t, else 0."""
    return (~(terminated | truncated)).to(like.dtype)


def _backward_trace(x_t: Tensor, decay_t: Tensor) -> Tensor:
    """y_t = x_t + decay_t y_{t+1}, with y_T = 0."""
    if x_t.device.type != "cpu":
        return backward_scan(x_t, decay_t)
    y_t = torch.empty_like(x_t)
    y_tp1 = torch.zeros_like(x_t[0])
    for t in reversed(range(len(x_t))):
        y_tp1 = x_t[t] + decay_t[t] * y_tp1
        y_t[t] = y_tp1
    return y_t


def backward_scan(x_t: Tensor, decay_t: Tensor) -> Tensor:
    """_backward_trace in log T rounds, each of which doubles how many steps a sum covers (Hillis and Steele 1986, "Data
    parallel algorithms"). A GPU takes as long for a round as for one step. The rounding differs from the loop's."""
    reach, steps = 1, len(x_t)
    while reach < steps:
        x_t = torch.cat([torch.addcmul(x_t[:-reach], decay_t[: steps - reach], x_t[reach:]), x_t[-reach:]])
        decay_t = decay_t[:-reach] * decay_t[reach:]  # over as many steps as a sum covers now
        reach *= 2
    return x_t
