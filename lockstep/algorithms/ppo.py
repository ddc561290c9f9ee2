"""Proximal policy optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.algorithms.base import LossOutput, Setup
from lockstep.algorithms.losses import (
    VALUE_METRICS,
    approximate_kl,
    clipped_value_loss,
    log_ratio,
    masked_sum,
    value_metrics,
)
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig, Targets
from lockstep.algorithms.returns import gae
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.models.base import Diverging, PolicyModel

_FACTOR = 1.5
"""The factor by which desired_kl changes the learning rate in a step."""
_RATES = (1e-5, 1e-2)
"""The bounds of this learning rate."""


@dataclass(frozen=True)
class PPOConfig(OnPolicyConfig):
    """PPO with a clipped surrogate. The defaults are for Atari."""

    name = "ppo"

    epochs: int = 4
    minibatches: int = 4
    gae_lambda: float = 0.95
    """λ of generalized advantage estimation. Higher trusts rewards (less bias), lower the values (less variance)."""
    clip: float = 0.1
    """ε: how far the probability ratio π/μ may move from 1 before the sample's gradient becomes 0. Higher allows larger
    policy steps."""
    anneal_clip: bool = False
    """Lower ε linearly to zero over total_steps."""
    value_clip: float = 0.0
    """How far a value may move from the collected one before its gradient becomes 0, in units of return; 0 switches it
    off. Lower slows the value function."""
    target_kl: float = 0.0
    """Skip an iteration's remaining gradient steps once a minibatch's approximate KL exceeds this; 0 switches it off.
    Lower keeps the policy closer to its data (typical: 0.01 to 0.05)."""
    normalize_advantages: bool = True
    """Standardize advantages over each global minibatch, which makes the step size independent of the reward scale. If
    off, small advantages move the policy little."""
    desired_kl: float = 0.0
    """Adapt the learning rate to the KL divergence of the policy from the collecting policy. Before each gradient step,
    divide the rate by 1.5 if the minibatch's divergence is above twice this value, and multiply it by 1.5 if the
    divergence is below half of it. The rate stays within 1e-5 and 1e-2. Higher allows larger steps (rsl_rl: 0.01); 0
    switches it off. It replaces anneal_learning_rate."""

    later: ClassVar[frozenset[str]] = OnPolicyConfig.later | {"desired_kl"}
    schedules: ClassVar[tuple[str, ...]] = ("anneal_clip", "desired_kl")

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if self.clip <= 0:
            raise SettingsError(f"algorithm.clip={self.clip} must be positive, for example 0.1 or 0.2.")
        if not 0 <= self.gae_lambda <= 1:
            raise SettingsError(f"algorithm.gae_lambda={self.gae_lambda} must be between 0 and 1.")
        for setting in ("value_clip", "target_kl", "desired_kl"):
            if getattr(self, setting) < 0:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be positive, or 0 for off.")
        low, high = _RATES
        if self.desired_kl and not low <= self.learning_rate <= high:
            raise SettingsError(
                f"algorithm.learning_rate={self.learning_rate} is where the rate begins that algorithm.desired_kl="
                f"{self.desired_kl} keeps between {low:g} and {high:g}. Choose a rate within these bounds, for example "
                "1e-3, or leave desired_kl out."
            )

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        if setup.several_policies and (self.target_kl or self.desired_kl):
            name = "target_kl" if self.target_kl else "desired_kl"
            raise SettingsError(
                f"algorithm.{name}={getattr(self, name)} would let the divergence of one policy decide about the "
                "gradient steps of all, since env.policies makes several. Leave one of them out."
            )
        if self.desired_kl and "learning_rate" in self.anneal:
            raise SettingsError(
                f"algorithm.desired_kl={self.desired_kl} and algorithm.anneal learning_rate="
                f"{self.anneal['learning_rate']} both set the learning rate. Leave one of them out."
            )
        if self.desired_kl and setup.gradient_lag != 0:
            raise SettingsError(
                f"algorithm.desired_kl={self.desired_kl} changes the learning rate by the gradient that is applied, "
                f"but with scheme.gradient_lag={setup.gradient_lag} an older one is applied. Leave one of them out."
            )

    @property
    def keeps_policy(self) -> bool:
        return self.desired_kl > 0

    def build(self) -> PPO:
        return PPO(self)


class PPO(OnPolicy[PPOConfig]):
    """Several epochs of minibatch gradient steps on each rollout. Clipping keeps the policy near the collecting one."""

    metric_names = (
        "loss/policy",
        "loss/value",
        "policy/entropy",
        "policy/approx_kl",
        "policy/clip_fraction",
        *VALUE_METRICS,
    )
    needs_targets = True

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.normalize_advantages = config.normalize_advantages
        if config.desired_kl:
            self.metric_names = (*self.metric_names, "policy/kl")

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The base class's hyperparameters, and `clip`, annealed if the config says so."""
        clip = self.config.clip * (1.0 - progress if self.config.anneal_clip else 1.0)
        return {**super().hyperparameters(progress), "clip": clip}

    def targets(self, rollout: Rollout, reward: Tensor, hyper: dict[str, float]) -> Targets:
        """GAE with the collecting version's values."""
        return Targets(
            *gae(
                reward,
                rollout.value,
                rollout.terminated,
                rollout.truncated,
                hyper["discount"],
                self.config.gae_lambda,
            )
        )

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """Clipped surrogate, squared value error and entropy bonus, summed over valid samples."""
        assert batch.advantage is not None and batch.value_target is not None
        valid = batch.valid
        output, _ = model(batch.obs, batch.start, batch.state, batch.prev_action, batch.prev_reward)

        log_prob_t = model.distribution.log_prob(output.policy, batch.action)
        log_ratio_t = log_ratio(log_prob_t, batch.log_prob, valid)
        ratio_t = log_ratio_t.exp()
        clipped_ratio_t = ratio_t.clamp(1.0 - hyper["clip"], 1.0 + hyper["clip"])
        surrogate_t = torch.minimum(ratio_t * batch.advantage, clipped_ratio_t * batch.advantage)
        policy_loss = -masked_sum(surrogate_t, valid)

        value_loss = clipped_value_loss(output.value, batch.value, batch.value_target, valid, self.config.value_clip)

        entropy = masked_sum(model.distribution.entropy(output.policy), valid)
        total = policy_loss + hyper["value_coef"] * value_loss - hyper["entropy_coef"] * entropy
        with torch.no_grad():
            clipped_t = ((ratio_t - 1.0).abs() > hyper["clip"]).to(ratio_t.dtype)
            metrics = {
                "loss/policy": policy_loss.detach(),
                "loss/value": value_loss.detach(),
                "policy/entropy": entropy.detach(),
                "policy/approx_kl": approximate_kl(log_ratio_t, valid),
                "policy/clip_fraction": masked_sum(clipped_t, valid),
                **value_metrics(output.value, batch.value_target, valid),
            }
            if batch.policy is not None:
                assert isinstance(model.distribution, Diverging)
                metrics["policy/kl"] = masked_sum(model.distribution.kl(batch.policy, output.policy), valid)
        loss = LossOutput(total, metrics)
        return self.with_auxiliary(loss, model, output, batch) if self.has_auxiliary else loss

    def variables(self, model: PolicyModel) -> dict[str, Tensor]:
        """None.

        Raises:
            SettingsError: desired_kl needs a divergence that the model's distribution does not have.
        """
        if self.config.desired_kl and not isinstance(model.distribution, Diverging):
            raise SettingsError(
                f"algorithm.desired_kl={self.config.desired_kl} needs the KL divergence of policies, but "
                f"{type(model.distribution).__name__} has no method kl(params, other). Write one, or leave desired_kl "
                "out."
            )
        return super().variables(model)

    @property
    def reads_steps(self) -> bool:
        return self._decides_unlike(PPO) or self.config.desired_kl > 0 or self.config.target_kl > 0

    def adapt(self, hyper: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        """The learning rate for the next step, if desired_kl is on, by the rule of rsl_rl (Schwarke et al. 2025,
        https://arxiv.org/abs/2509.10771)."""
        rate, desired = hyper["learning_rate"], self.config.desired_kl
        if not desired:
            return {}
        if metrics["policy/kl"] > 2 * desired:
            rate = max(_RATES[0], rate / _FACTOR)
        elif 0 < metrics["policy/kl"] < desired / 2:
            rate = min(_RATES[1], rate * _FACTOR)
        return {"learning_rate": rate}

    def stop_early(self, metrics: dict[str, float]) -> bool:
        """Whether the last minibatch's approximate KL exceeds target_kl."""
        return 0.0 < self.config.target_kl < metrics["policy/approx_kl"]
