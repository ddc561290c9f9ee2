"""Advantage actor-critic: A3C (Mnih et al. 2016, https://arxiv.org/abs/1602.01783) with synchronized actors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.algorithms.base import LossOutput, OptimizerConfig
from lockstep.algorithms.losses import VALUE_METRICS, masked_sum, value_metrics
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig, Targets
from lockstep.algorithms.returns import n_step_returns
from lockstep.core.rollout import Rollout
from lockstep.models.base import PolicyModel


@dataclass(frozen=True)
class A2CConfig(OnPolicyConfig):
    """One gradient step on each short rollout. The defaults are for Atari."""

    name = "a2c"

    rollout: int = 5
    """Steps per environment and iteration, and so the n of n-step returns. Longer lowers the bias of bootstrapping;
    shorter updates more often."""
    learning_rate: float = 7e-4
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig("rmsprop_tf", eps=1e-5, decay=0.99))
    """TensorFlow's RMSProp, as in OpenAI Baselines."""
    value_coef: float = 1.0
    """Weight of the value loss, which is half a squared error. Higher fits values faster and makes the encoder serve
    them more."""
    normalize_advantages: bool = False
    """Standardize advantages over the global batch, which makes the step size independent of the reward scale. If off,
    small advantages move the policy little."""

    def build(self) -> A2C:
        return A2C(self)


class A2C(OnPolicy[A2CConfig]):
    """The policy gradient with n-step advantages, a value loss and an entropy bonus."""

    metric_names = ("loss/policy", "loss/value", "policy/entropy", *VALUE_METRICS)
    needs_targets = True

    def __init__(self, config: A2CConfig) -> None:
        super().__init__(config)
        self.normalize_advantages = config.normalize_advantages

    def targets(self, rollout: Rollout, reward: Tensor, hyper: dict[str, float]) -> Targets:
        """n-step returns with the collecting version's values."""
        value_target_t = n_step_returns(reward, rollout.value, rollout.terminated, rollout.truncated, hyper["discount"])
        return Targets(value_target_t - rollout.value[:-1], value_target_t)

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """Policy gradient, squared value error and entropy bonus, summed over valid samples."""
        assert batch.advantage is not None and batch.value_target is not None
        valid = batch.valid
        output, _ = model(batch.obs, batch.start, batch.state, batch.prev_action, batch.prev_reward)

        log_prob_t = model.distribution.log_prob(output.policy, batch.action)
        policy_loss = -masked_sum(log_prob_t * batch.advantage, valid)
        value_loss = 0.5 * masked_sum((output.value - batch.value_target).square(), valid)
        entropy = masked_sum(model.distribution.entropy(output.policy), valid)

        total = policy_loss + hyper["value_coef"] * value_loss - hyper["entropy_coef"] * entropy
        with torch.no_grad():
            metrics = {
                "loss/policy": policy_loss.detach(),
                "loss/value": value_loss.detach(),
                "policy/entropy": entropy.detach(),
                **value_metrics(output.value, batch.value_target, valid),
            }
        loss = LossOutput(total, metrics)
        return self.with_auxiliary(loss, model, output, batch) if self.has_auxiliary else loss
