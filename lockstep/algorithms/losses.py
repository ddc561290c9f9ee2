"""Terms shared by all actor-critic losses. All of them are sums over valid samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_LARGEST_LOG_RATIO = 80.0
VALUE_METRICS = ("value/target", "value/target_squared", "value/error", "value/error_squared")
"""The metrics from which explained_variance is computed. They are first averaged over shards and minibatches."""


def masked_sum(x_t: Tensor, valid_t: Tensor) -> Tensor:
    """Sum of [T, B] over valid samples; invalid ones contribute neither value nor gradient."""
    return torch.where(valid_t, x_t, 0.0).sum()


def standardized(x_t: Tensor, valid_t: Tensor) -> Tensor:
    """[T, B] minus its mean, divided by its sample deviation, or by 1e-7 if that is larger; both over valid samples."""
    count = valid_t.sum().clamp(min=1)
    from_mean_t = x_t - masked_sum(x_t, valid_t) / count
    deviation = (masked_sum(from_mean_t.square(), valid_t) / (count - 1).clamp(min=1)).sqrt()
    return from_mean_t / deviation.clamp(min=1e-7)


def log_ratio(log_prob_t: Tensor, behavior_log_prob_t: Tensor, valid_t: Tensor) -> Tensor:
    """log π/μ [T, B], at most 80, so that its exp is finite: clipped losses have NaN gradients at infinite ratios. It
    is 0 in invalid slots, whose actions are meaningless."""
    return torch.where(valid_t, log_prob_t - behavior_log_prob_t, 0.0).clamp(max=_LARGEST_LOG_RATIO)


def approximate_kl(log_ratio_t: Tensor, valid_t: Tensor) -> Tensor:
    """Sum of the estimator k3 = (π/μ - 1) - log π/μ of KL(μ ‖ π): unbiased, never negative.

    Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html
    """
    return masked_sum(torch.expm1(log_ratio_t) - log_ratio_t, valid_t)


def clipped_value_loss(value_t: Tensor, old_value_t: Tensor, target_t: Tensor, valid_t: Tensor, clip: float) -> Tensor:
    """Half the sum of squared errors of values [T, B]. A value that has moved towards its target by more than `clip`
    counts as if it had moved by `clip`, and has no gradient. clip=0 switches this off."""
    error_t = (value_t - target_t).square()
    if clip:
        move_t = (value_t - old_value_t).clamp(-clip, clip)
        error_t = torch.maximum(error_t, (old_value_t + move_t - target_t).square())
    return 0.5 * masked_sum(error_t, valid_t)


def value_metrics(value_t: Tensor, value_target_t: Tensor, valid_t: Tensor) -> dict[str, Tensor]:
    """The sums VALUE_METRICS of predicted and target values [T, B]."""
    error_t = value_target_t - value_t
    terms = (value_target_t, value_target_t.square(), error_t, error_t.square())
    return {name: masked_sum(term, valid_t) for name, term in zip(VALUE_METRICS, terms, strict=True)}


def explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    """Replace the means VALUE_METRICS by `value/target` and `value/explained_variance`.

    1 - Var[target - value] / Var[target]: 1 is perfect, 0 no better than a constant, negative worse than one. It is 0
    if all targets are equal.
    """
    rest = {name: mean for name, mean in metrics.items() if name not in VALUE_METRICS}
    target, target_squared, error, error_squared = (metrics[name] for name in VALUE_METRICS)
    variance = target_squared - target**2
    explained = 1.0 - (error_squared - error**2) / variance if variance > 1e-6 * target_squared else 0.0
    return {**rest, "value/target": target, "value/explained_variance": explained}


def huber(value: Tensor, target: Tensor, delta: float) -> Tensor:
    """The Huber loss of each value: half the squared error up to an error of delta, and linear beyond."""
    if delta == 1:
        return F.smooth_l1_loss(value, target, reduction="none")
    distance = (value - target).abs()
    near = distance.clamp(max=delta)
    return near * (distance - 0.5 * near)


def mixed_priority(error: Tensor, valid: Tensor, share: float) -> Tensor:
    """Priorities of sequences (Kapturowski et al. 2019, section 2.3): share times the largest error plus 1 - share
    times the mean error, over valid steps.

    Args:
        error: [M, n], not negative, 0 for invalid steps.
        valid: bool [M, n].
        share: η.

    Returns:
        [n]
    """
    return share * error.amax(0) + (1 - share) * error.sum(0) / valid.sum(0).clamp(min=1)
