"""IMPALA: actor-critic on stale data, corrected by V-trace (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lockstep.algorithms.base import LossOutput, OptimizerConfig
from lockstep.algorithms.losses import (
    VALUE_METRICS,
    approximate_kl,
    log_ratio,
    masked_sum,
    value_metrics,
)
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig
from lockstep.algorithms.returns import vtrace
from lockstep.config.settings import SettingsError
from lockstep.models.base import PolicyModel


@dataclass(frozen=True)
class IMPALAConfig(OnPolicyConfig):
    """V-trace actor-critic with a summed loss. The defaults are Cleanba's for Atari."""

    name = "impala"
    sequences = True

    rollout: int = 20
    """Steps per environment and iteration. Longer lets V-trace correct further back; shorter updates more often."""
    minibatches: int = 4
    """Gradient steps per epoch, each on whole sequences from some of the environments. The loss is a sum, so fewer
    minibatches take larger steps."""
    learning_rate: float = 6e-4
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig("rmsprop", eps=0.01, decay=0.99))
    max_grad_norm: float = 40.0
    """Scale gradients whose global norm exceeds this. Lower is safer and slower. The loss is a sum, so the norm grows
    with the minibatch."""
    vtrace_lambda: float = 1.0
    """λ of V-trace. Lower trusts the values more (less variance, more bias)."""
    rho_clip: float = 1.0
    """ρ̄: bound on the importance weight of a single step. Lower evaluates a policy closer to the collecting one."""
    c_clip: float = 1.0
    """c̄: bound on the weights that carry corrections back in time. Lower has less variance and learns slower."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        validate_vtrace(self.vtrace_lambda, self.rho_clip, self.c_clip)

    def build(self) -> IMPALA:
        return IMPALA(self)


def validate_vtrace(lambda_: float, rho_clip: float, c_clip: float) -> None:
    """Raise SettingsError unless V-trace is a contraction (Espeholt et al. 2018, theorem 1)."""
    if not 0 <= lambda_ <= 1:
        raise SettingsError(f"algorithm.vtrace_lambda={lambda_} must be between 0 and 1.")
    if not 0 < c_clip <= rho_clip:
        raise SettingsError(
            f"algorithm.rho_clip={rho_clip} and algorithm.c_clip={c_clip}: V-trace only converges for "
            "rho_clip >= c_clip > 0. The usual choice is 1 and 1."
        )


class IMPALA(OnPolicy[IMPALAConfig]):
    """One pass over each rollout. Every gradient step recomputes targets with the learning version's values and
    policy."""

    metric_names = (
        "loss/policy",
        "loss/value",
        "policy/entropy",
        "policy/approx_kl",
        "policy/rho",
        *VALUE_METRICS,
    )
    bootstrap_inputs = True
    mean_loss = False

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """V-trace policy gradient, squared value error and entropy bonus, summed over valid samples."""
        config, valid = self.config, batch.valid
        output, _ = model(batch.obs, batch.start, batch.state, batch.prev_action, batch.prev_reward)
        policy_t, value_t = output.policy[:-1], output.value[:-1]

        log_prob_t = model.distribution.log_prob(policy_t, batch.action)
        log_ratio_t = log_ratio(log_prob_t, batch.log_prob, valid).detach()
        trace = vtrace(
            log_ratio_t,
            batch.reward,
            output.value.detach(),
            batch.terminated,
            batch.truncated,
            hyper["discount"],
            lambda_=config.vtrace_lambda,
            rho_clip=config.rho_clip,
            c_clip=config.c_clip,
        )
        advantage_t = trace.pg_advantage
        if batch.advantage is not None:
            advantage_t = advantage_t + trace.rho * batch.advantage
        policy_loss = -masked_sum(log_prob_t * advantage_t, valid)
        value_loss = 0.5 * masked_sum((value_t - trace.vs).square(), valid)
        entropy = masked_sum(model.distribution.entropy(policy_t), valid)

        total = policy_loss + hyper["value_coef"] * value_loss - hyper["entropy_coef"] * entropy
        with torch.no_grad():
            metrics = {
                "loss/policy": policy_loss.detach(),
                "loss/value": value_loss.detach(),
                "policy/entropy": entropy.detach(),
                "policy/approx_kl": approximate_kl(log_ratio_t, valid),
                "policy/rho": masked_sum(trace.rho, valid),
                **value_metrics(value_t, trace.vs, valid),
            }
        loss = LossOutput(total, metrics, value_target=trace.vs)
        return self.with_auxiliary(loss, model, output, batch) if self.has_auxiliary else loss
