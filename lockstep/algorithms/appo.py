"""APPO: PPO's clipped surrogate on V-trace targets (Petrenko et al. 2020, https://arxiv.org/abs/2006.11751)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lockstep.algorithms.base import LossOutput
from lockstep.algorithms.impala import validate_vtrace
from lockstep.algorithms.losses import (
    VALUE_METRICS,
    approximate_kl,
    clipped_value_loss,
    log_ratio,
    masked_sum,
    standardized,
    value_metrics,
)
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig
from lockstep.algorithms.returns import vtrace
from lockstep.config.settings import SettingsError
from lockstep.models.base import PolicyModel


@dataclass(frozen=True)
class APPOConfig(OnPolicyConfig):
    """PPO with targets that are recomputed at every gradient step, so that it tolerates stale data."""

    name = "appo"
    sequences = True
    later: ClassVar[frozenset[str]] = OnPolicyConfig.later | {"standardize_advantages"}

    rollout: int = 32
    """Steps per environment and iteration. Longer lets V-trace correct further back; shorter updates more often."""
    minibatches: int = 4
    """Gradient steps per epoch, each on whole sequences from some of the environments. More take more, noisier
    steps."""
    vtrace_lambda: float = 1.0
    """λ of V-trace. Lower trusts the values more (less variance, more bias)."""
    rho_clip: float = 1.0
    """ρ̄: bound on the importance weight of a single step. Lower evaluates a policy closer to the collecting one."""
    c_clip: float = 1.0
    """c̄: bound on the weights that carry corrections back in time. Lower has less variance and learns slower."""
    clip: float = 0.1
    """ε: π/μ is clipped to [1/(1+ε), 1+ε]. Higher allows larger policy steps."""
    value_clip: float = 0.0
    """How far a value may move from the collected one before its gradient becomes 0, in units of return; 0 switches it
    off. Lower slows the value function."""
    standardize_advantages: bool = False
    """Standardize advantages over each shard's slice of a minibatch. On makes the effect of entropy_coef independent of
    the reward scale. Off makes the entropy bonus count more where rewards are small."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        validate_vtrace(self.vtrace_lambda, self.rho_clip, self.c_clip)
        if self.clip <= 0:
            raise SettingsError(f"algorithm.clip={self.clip} must be positive, for example 0.1 or 0.2.")
        if self.value_clip < 0:
            raise SettingsError(f"algorithm.value_clip={self.value_clip} must be positive, or 0 for off.")
        if self.standardize_advantages and envs_per_shard // self.minibatches * self.rollout < 2:
            raise SettingsError(
                f"algorithm.standardize_advantages with algorithm.rollout={self.rollout} and algorithm.minibatches="
                f"{self.minibatches} gives each shard's slice of a minibatch one sample, whose standardized advantage "
                "is always 0. Raise the rollout, lower the minibatches, or switch standardizing off."
            )

    def build(self) -> APPO:
        return APPO(self)


class APPO(OnPolicy[APPOConfig]):
    """Clipping bounds the policy's step. V-trace corrects advantages for the learning version."""

    metric_names = (
        "loss/policy",
        "loss/value",
        "policy/entropy",
        "policy/approx_kl",
        "policy/clip_fraction",
        "policy/rho",
        *VALUE_METRICS,
    )
    bootstrap_inputs = True

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """Clipped surrogate, squared value error and entropy bonus, summed over valid samples."""
        config, valid = self.config, batch.valid
        output, _ = model(batch.obs, batch.start, batch.state, batch.prev_action, batch.prev_reward)
        policy_t, value_t = output.policy[:-1], output.value[:-1]

        log_prob_t = model.distribution.log_prob(policy_t, batch.action)
        log_ratio_t = log_ratio(log_prob_t, batch.log_prob, valid)
        trace = vtrace(
            log_ratio_t.detach(),
            batch.reward,
            output.value.detach(),
            batch.terminated,
            batch.truncated,
            hyper["discount"],
            lambda_=config.vtrace_lambda,
            rho_clip=config.rho_clip,
            c_clip=config.c_clip,
        )
        # The surrogate's ratio is the importance weight. Multiplying the advantage by ρ would count it twice.
        ratio_t = log_ratio_t.exp()
        highest = 1.0 + hyper["clip"]
        clipped_ratio_t = ratio_t.clamp(1.0 / highest, highest)
        advantage_t = trace.advantage if batch.advantage is None else trace.advantage + batch.advantage
        if config.standardize_advantages:
            advantage_t = standardized(advantage_t, valid)
        surrogate_t = torch.minimum(ratio_t * advantage_t, clipped_ratio_t * advantage_t)
        policy_loss = -masked_sum(surrogate_t, valid)

        value_loss = clipped_value_loss(value_t, batch.value, trace.vs, valid, config.value_clip)

        entropy = masked_sum(model.distribution.entropy(policy_t), valid)
        total = policy_loss + hyper["value_coef"] * value_loss - hyper["entropy_coef"] * entropy
        with torch.no_grad():
            metrics = {
                "loss/policy": policy_loss.detach(),
                "loss/value": value_loss.detach(),
                "policy/entropy": entropy.detach(),
                "policy/approx_kl": approximate_kl(log_ratio_t, valid),
                "policy/clip_fraction": masked_sum((ratio_t != clipped_ratio_t).to(ratio_t.dtype), valid),
                "policy/rho": masked_sum(trace.rho, valid),
                **value_metrics(value_t, trace.vs, valid),
            }
        loss = LossOutput(total, metrics, value_target=trace.vs)
        return self.with_auxiliary(loss, model, output, batch) if self.has_auxiliary else loss

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The base class's hyperparameters, and `clip`."""
        return {**super().hyperparameters(progress), "clip": self.config.clip}
