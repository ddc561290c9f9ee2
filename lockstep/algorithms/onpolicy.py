"""The common parts of algorithms that learn from each rollout once: settings, batches, and the base class.

Shape legend: T time, B environments; a minibatch is always time-major [T, B] (single samples have T = 1).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep.algorithms.base import Algorithm, AlgorithmConfig, LossOutput, Setup
from lockstep.algorithms.losses import VALUE_METRICS, explained_variance
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import ArrayTuple
from lockstep.core.rollout import Rollout
from lockstep.models.base import ModelOutput, PolicyModel
from lockstep.models.rnd import RNDConfig

_AUXILIARY = "loss/auxiliary"


@dataclass(frozen=True)
class OnPolicyConfig(AlgorithmConfig):
    """Settings of algorithms that learn from each rollout once and then discard it."""

    epochs: int = 1
    """Passes over each rollout. More learn faster per sample, until the policy moves too far from its data."""
    minibatches: int = 1
    """Gradient steps per epoch. More take more, noisier steps."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus. Higher explores more."""
    value_coef: float = 0.5
    """Weight of the value loss against the policy loss. Higher learns values sooner but, with shared networks, the
    policy more slowly."""
    rnd: RNDConfig = field(default_factory=RNDConfig)
    """Random network distillation: a reward for novelty. Off unless its coef is above 0."""

    needs_policy_and_value: ClassVar[bool] = True
    """Whether the model must have a policy and a value. Users' algorithms may not need them."""
    sequences: ClassVar[bool] = False
    """Whether minibatches must be whole sequences even without a recurrent core (V-trace)."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range, and for minibatches that cannot contain equally many samples of
        every shard."""
        super().validate(envs_per_shard, recurrent=recurrent)
        for setting in ("epochs", "minibatches"):
            if getattr(self, setting) < 1:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be at least 1.")
        for setting in ("entropy_coef", "value_coef"):
            if not getattr(self, setting) >= 0:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be at least 0.")
        self.rnd.validate()
        sequences = recurrent or self.sequences
        items = envs_per_shard if sequences else envs_per_shard * self.rollout
        if items % self.minibatches:
            what = "environments (minibatches hold whole sequences here)" if sequences else "samples"
            raise SettingsError(
                f"algorithm.minibatches={self.minibatches} does not divide a shard's {items} {what}. Choose a "
                f"divisor of {items}, or change env.num_envs, scheme.shards or algorithm.rollout."
            )

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        if self.needs_policy_and_value and not setup.model.has_policy_and_value:
            raise SettingsError(
                f"algorithm={self.name} needs a policy and a value, but the model is "
                f"{type(setup.model).__name__}: use lockstep.models.StandardModelConfig, as in ppo-atari."
            )
        if setup.several_policies and self.rnd.coef:
            raise SettingsError(
                f"algorithm.rnd.coef={self.rnd.coef:g} rewards what is new to one predictor, but env.policies makes "
                "several policies, which observe different things. Leave one of them out."
            )
        self._validate_popart(setup)
        if self.gradient_steps(setup.samples_per_iteration)[1] < 2 and self.build().normalize_advantages:
            raise SettingsError(
                "Standardized advantages of a one-sample minibatch are always 0: lower algorithm.minibatches="
                f"{self.minibatches}, or raise algorithm.rollout or env.num_envs."
            )
        if setup.preempt < 1 and self.rnd.coef:
            raise SettingsError(
                f"scheme.preempt={setup.preempt:g} cuts rollouts, but algorithm.rnd.coef={self.rnd.coef:g} "
                "rewards every step of a rollout, even after a cut. Leave one of them out."
            )

    def _validate_popart(self, setup: Setup) -> None:
        """Raise SettingsError for settings that PopArt's values, which are in units of tasks, do not allow."""
        popart = setup.model.value_normalization
        if popart is None or not popart.rate:
            return
        given = f"model.popart.rate={popart.rate:g}"
        if not self.needs_policy_and_value:
            raise SettingsError(f"{given} normalizes values, but algorithm={self.name} has none. Leave it out.")
        if setup.several_policies:
            raise SettingsError(
                f"{given} is for one policy with many tasks, but env.policies makes several policies. Leave one of "
                "them out."
            )
        if self.rnd.coef:
            raise SettingsError(
                f"{given} scales advantages by tasks, but algorithm.rnd.coef={self.rnd.coef:g} adds advantages of "
                "novelty, which have no task. Leave one of them out."
            )
        if setup.gradient_lag != 0:
            raise SettingsError(
                f"{given} changes the units of values with every gradient step, but with scheme.gradient_lag="
                f"{setup.gradient_lag}, gradients in earlier units are applied. Leave one of them out."
            )

    def gradient_steps(self, samples: int) -> tuple[int, int]:
        return self.epochs * self.minibatches, samples // self.minibatches

    @abstractmethod
    def build(self) -> OnPolicy[Any]:
        """The algorithm with these settings."""


class Intrinsic(ArrayTuple):
    """The part of a batch that intrinsic rewards add."""

    value_target: Tensor
    """fp32 [T, B]"""
    predicted: Tensor
    """fp32 [T, B]: each sample's weight in the predictor's loss, 0 if it does not learn from the sample."""


class Batch(ArrayTuple):
    """A shard's slice of one minibatch. With bootstrap inputs the first four fields have T+1 steps, else T."""

    obs: Any
    start: Tensor
    prev_action: Tensor | None
    prev_reward: Tensor | None
    state: Tensor
    """fp32 [B, K]: core state before the first step."""
    action: Tensor
    reward: Tensor
    log_prob: Tensor
    value: Tensor
    """fp32 [T, B]: values from the collecting version."""
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    advantage: Tensor | None
    """fp32 [T, B], from targets, and standardized if normalize_advantages is on. If the loss computes advantages itself
    (V-trace), this is the intrinsic advantage to add, or None."""
    value_target: Tensor | None
    intrinsic: Intrinsic | None = None
    policy: Tensor | None = None
    """fp32 [T, B, P]: parameters of the collecting policy's distributions, if the algorithm keeps them."""

    def columns(self, index: Tensor) -> Batch:
        """Some of the B environments, at all steps."""
        return self.replace(state=None)[:, index].replace(state=self.state[index])


class Targets(NamedTuple):
    """Advantages and value targets [T, B], computed once for each rollout, before the first epoch."""

    advantage: Tensor
    value_target: Tensor


OnPolicyConfigT = TypeVar("OnPolicyConfigT", bound=OnPolicyConfig)


class OnPolicy(Algorithm[OnPolicyConfigT]):
    """Learns from each rollout once and then discards it."""

    normalize_advantages: bool = False
    """Whether advantages are standardized over the global minibatch."""
    policies: int = 1
    """The number of policies that it trains. Advantages are standardized over the samples of each policy."""
    bootstrap_inputs: bool = False
    """Whether loss evaluates the model on T+1 observations (V-trace)."""

    def __init__(self, config: OnPolicyConfigT) -> None:
        super().__init__(config)
        self.has_auxiliary = type(self).auxiliary_loss is not OnPolicy.auxiliary_loss
        """Whether auxiliary_loss is overridden."""
        if self.has_auxiliary:
            self.metric_names = (*self.metric_names, _AUXILIARY)

    @abstractmethod
    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """The loss of one shard's slice of a minibatch."""

    def auxiliary_loss(self, model: PolicyModel, output: ModelOutput, batch: Batch) -> Tensor | None:
        """A loss that is added to that of PPO, A2C, IMPALA or APPO without a second forward pass. Override it in a
        subclass of one of these; metrics show it as loss/auxiliary.

        Args:
            model: the model, including the networks of companion, if any.
            output: the model's output for the batch's observations, including features.
            batch: the slice. With bootstrap_inputs, it and output have T+1 observations.

        Returns:
            A scalar with gradients, summed over valid samples and multiplied by its weight. None adds nothing.
        """
        return None

    def with_auxiliary(self, loss: LossOutput, model: PolicyModel, output: ModelOutput, batch: Batch) -> LossOutput:
        """A loss with auxiliary_loss added."""
        auxiliary = self.auxiliary_loss(model, output, batch)
        if auxiliary is None:
            auxiliary = torch.zeros_like(loss.total)
        if not isinstance(auxiliary, Tensor) or auxiliary.numel() != 1:
            shape = f" of shape {list(auxiliary.shape)}" if isinstance(auxiliary, Tensor) else ""
            raise SettingsError(
                f"{type(self).__name__}.auxiliary_loss returned a {type(auxiliary).__name__}{shape}. It "
                "must return a scalar tensor, summed over valid samples: (loss * batch.valid).sum(). None adds nothing."
            )
        return loss._replace(total=loss.total + auxiliary, metrics={**loss.metrics, _AUXILIARY: auxiliary.detach()})

    def targets(self, rollout: Rollout, reward: Tensor, hyper: dict[str, float]) -> Targets:
        """Advantages and value targets [T, B] of one shard. The reward is normalized if normalize.returns is on."""
        raise NotImplementedError(f"{type(self).__name__} sets needs_targets but does not compute them")

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The base class's hyperparameters, and the weights of the entropy bonus and the value loss."""
        config = self.config
        weights = {"entropy_coef": config.entropy_coef, "value_coef": config.value_coef}
        return {**super().hyperparameters(progress), **weights}

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Replace the moments VALUE_METRICS by the explained variance, if the loss reports them."""
        return explained_variance(metrics) if metrics.keys() >= set(VALUE_METRICS) else metrics
