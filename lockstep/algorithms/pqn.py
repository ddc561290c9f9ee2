"""Parallelised Q-network (Gallici et al. 2024, https://arxiv.org/abs/2407.04811): Q-learning on the rollouts of many
environments, without replay and without a target network. Layer normalization keeps it stable instead.

Shape legend: T time, B environments, A actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.algorithms.base import Exploration, LossOutput, OptimizerConfig, Setup
from lockstep.algorithms.epsilon import acting_epsilon, check_epsilon, falling_epsilon
from lockstep.algorithms.losses import VALUE_METRICS, masked_sum, value_metrics
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig, Targets
from lockstep.algorithms.returns import gae
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.models.base import PolicyModel
from lockstep.models.q import QModelConfig
from lockstep.models.selection import of_action


@dataclass(frozen=True)
class PQNConfig(OnPolicyConfig):
    """Q-learning from fresh rollouts. The defaults are for Atari."""

    name = "pqn"
    needs_policy_and_value = False

    rollout: int = 32
    """Steps per environment and iteration. Longer lowers the overhead and the bias of bootstrapping; shorter updates
    more often."""
    anneal_learning_rate: bool = False
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig("radam", eps=1e-8))
    max_grad_norm: float = 10.0
    epochs: int = 2
    minibatches: int = 32
    entropy_coef: float = 0.0
    """Must be 0, since PQN has no stochastic policy."""
    value_coef: float = 1.0
    """Must be 1, since the value loss is the only loss."""
    return_lambda: float = 0.65
    """λ of the returns. Higher trusts rewards (less bias), lower the values (less variance)."""
    reward_scale: float = 1.0
    """Factor of rewards in learning. Lower makes values smaller, so that fewer steps learn them; higher, larger."""
    epsilon_start: float = 1.0
    """Initial ε: the share of random actions. Higher explores more."""
    epsilon_end: float = 0.001
    """Final ε. Higher keeps exploring more."""
    epsilon_fraction: float = 0.1
    """Share of total_steps over which ε falls. Longer explores more."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range, and for settings that only other on-policy algorithms use."""
        super().validate(envs_per_shard, recurrent=recurrent)
        check_epsilon(self)
        if not 0 <= self.return_lambda <= 1:
            raise SettingsError(f"algorithm.return_lambda={self.return_lambda} must be between 0 and 1.")
        if not self.reward_scale > 0:
            raise SettingsError(f"algorithm.reward_scale={self.reward_scale} must be positive, for example 1.")
        for setting, only, instead in (
            ("entropy_coef", 0.0, "--algorithm.epsilon-end sets how much it explores"),
            ("value_coef", 1.0, "--algorithm.learning-rate scales its steps"),
        ):
            if getattr(self, setting) != only:
                raise SettingsError(
                    f"algorithm.{setting}={getattr(self, setting)} has no meaning for pqn, which learns values alone. "
                    f"Leave it at {only:g}; {instead}."
                )

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        model = setup.model
        if not isinstance(model, QModelConfig):
            raise SettingsError(
                f"algorithm=pqn needs a Q-network, but the model is {type(model).__name__}: use "
                "lockstep.models.QModelConfig, as in the recipe pqn-atari."
            )
        if model.returns != "expected" or model.noisy:
            given, flags = (
                ("model.noisy=True", "--model.no-noisy")
                if model.noisy
                else (f"model.returns={model.returns}", "--model.returns expected")
            )
            raise SettingsError(
                f"{given} is for algorithms with replay: pqn learns expected returns, and explores by ε. Use {flags}, "
                "or a recipe such as dqn-atari."
            )
        if self.rnd.coef:
            raise SettingsError(
                f"algorithm.rnd.coef={self.rnd.coef:g} needs separate values of intrinsic rewards, which a Q-network "
                "does not have. Leave it out, or use a recipe such as ppo-rnd-minigrid."
            )
        if setup.several_policies:
            raise SettingsError(
                "algorithm=pqn trains one Q-network, but env.policies makes several policies. Use PPO, A2C, IMPALA or "
                "APPO, or --env.policies shared."
            )

    def warnings(self, setup: Setup) -> Iterator[str]:
        """Also warns if no layer normalization keeps values from diverging."""
        yield from super().warnings(setup)
        if isinstance(setup.model, QModelConfig) and not setup.model.layer_norm:
            yield (
                "PQN has no target network, so its values can diverge without layer normalization. Use "
                "--model.layer-norm."
            )

    def build(self) -> PQN:
        return PQN(self)


class PQN(OnPolicy[PQNConfig]):
    """Moves the value of each action of a rollout towards the λ-return that followed it."""

    metric_names = ("loss/value", "value/mean", *VALUE_METRICS)
    needs_targets = True

    def targets(self, rollout: Rollout, reward: Tensor, hyper: dict[str, float]) -> Targets:
        """λ-returns that bootstrap from the collecting version's highest value of an allowed action (section 3.3; Peng
        and Williams 1996): G_t = r_t + γ ((1 - λ) max_a q_{t+1} + λ G_{t+1})."""
        value_t = rollout.value
        return Targets(
            *gae(
                self.config.reward_scale * reward,
                value_t,
                rollout.terminated,
                rollout.truncated,
                hyper["discount"],
                self.config.return_lambda,
            )
        )

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """Half the squared error of the taken actions' values, summed over valid samples."""
        assert batch.value_target is not None
        output, _ = model(batch.obs, batch.start, batch.state, batch.prev_action, batch.prev_reward)
        q_t = of_action(output.policy, batch.action)
        loss = 0.5 * masked_sum((q_t - batch.value_target).square(), batch.valid)
        with torch.no_grad():
            metrics = {
                "loss/value": loss.detach(),
                "value/mean": masked_sum(q_t, batch.valid),
                **value_metrics(q_t, batch.value_target, batch.valid),
            }
        return LossOutput(loss, metrics)

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        epsilon = acting_epsilon(self.config, self.annealings, progress, samples)
        return Exploration(False, torch.full((len(environments), 1), epsilon))

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The learning rate, the discount, and `epsilon`, which acting uses."""
        kept = super().hyperparameters(progress)
        chosen = {name: kept[name] for name in ("learning_rate", "discount")}
        return {**chosen, "epsilon": falling_epsilon(self.config, progress)}
