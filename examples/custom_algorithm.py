"""Your own algorithm: PPO with a penalty on the KL divergence in place of clipping.

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, section 4 (fixed β).

lockstep train examples/custom_algorithm.py:recipe --layout processes:2
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep import recipes
from lockstep.algorithms.base import LossOutput
from lockstep.algorithms.losses import approximate_kl, log_ratio, masked_sum
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig, Targets
from lockstep.algorithms.returns import gae
from lockstep.core.rollout import Rollout
from lockstep.experiment import Experiment
from lockstep.models import PolicyModel


@dataclass(frozen=True)
class PenaltyConfig(OnPolicyConfig):
    """Every field becomes a flag, such as --algorithm.penalty 3, with its docstring as help."""

    name = "ppo-penalty"

    epochs: int = 4
    minibatches: int = 4
    gae_lambda: float = 0.95
    """λ of generalized advantage estimation. Higher trusts rewards, lower the values."""
    penalty: float = 1.0
    """β: weight of the KL divergence from the collecting policy. Higher takes smaller policy steps."""

    def build(self) -> Penalty:
        return Penalty(self)


class Penalty(OnPolicy[PenaltyConfig]):
    """Everything here is a sum over valid samples of one shard's slice. The learner adds the shards' sums up, and
    divides by the number of valid samples in the global minibatch: so the result cannot depend on the layout."""

    metric_names = ("loss/policy", "loss/value", "policy/entropy", "policy/approx_kl")
    needs_targets = True
    normalize_advantages = True

    def targets(self, rollout: Rollout, reward: Tensor, hyper: dict[str, float]) -> Targets:
        advantage, value_target = gae(
            reward,
            rollout.value,
            rollout.terminated,
            rollout.truncated,
            hyper["discount"],
            self.config.gae_lambda,
        )
        return Targets(advantage, value_target)

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        assert batch.advantage is not None and batch.value_target is not None
        output, _ = model(batch.obs, batch.start, batch.state, batch.prev_action, batch.prev_reward)
        log_prob_t = model.distribution.log_prob(output.policy, batch.action)
        log_ratio_t = log_ratio(log_prob_t, batch.log_prob, batch.valid)

        policy_loss = -masked_sum(log_ratio_t.exp() * batch.advantage, batch.valid)
        value_loss = 0.5 * masked_sum((output.value - batch.value_target).square(), batch.valid)
        entropy = masked_sum(model.distribution.entropy(output.policy), batch.valid)
        kl = approximate_kl(log_ratio_t, batch.valid)
        loss = (
            policy_loss + self.config.penalty * kl + hyper["value_coef"] * value_loss - hyper["entropy_coef"] * entropy
        )
        metrics = {
            "loss/policy": policy_loss.detach(),
            "loss/value": value_loss.detach(),
            "policy/entropy": entropy.detach(),
            "policy/approx_kl": kl.detach(),
        }
        return LossOutput(loss, metrics)


def recipe() -> Experiment:
    """PPO with a KL penalty on CartPole."""
    algorithm = PenaltyConfig(rollout=128, learning_rate=1e-3, entropy_coef=0.0)
    return recipes.ppo_cartpole().replace(algorithm=algorithm)
