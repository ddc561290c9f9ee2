"""Random network distillation (Burda et al. 2018, https://arxiv.org/abs/1810.12894) for any on-policy algorithm.

A network predicts features of observations. It does so badly for unfamiliar ones, so its error measures novelty. This
error is a second reward with its own value and discount. Its advantage is added to the task's.

Shape legend: T time, B environments of a shard.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from lockstep.algorithms.base import Algorithm, LossOutput, ParameterGroup
from lockstep.algorithms.onpolicy import Batch, OnPolicy, Targets
from lockstep.algorithms.returns import gae
from lockstep.algorithms.wrapper import Wrapper
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.models.base import PolicyModel
from lockstep.models.rnd import Curiosity, RNDConfig


def with_curiosity(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """The algorithm, wrapped in random network distillation if rnd.coef is above 0."""
    if not isinstance(algorithm, OnPolicy) or not algorithm.config.rnd.coef:
        return algorithm
    if type(algorithm).companion is not Algorithm.companion:
        raise SettingsError(
            f"algorithm.rnd.coef={algorithm.config.rnd.coef:g} needs the model's companion for its own networks, but "
            f"{type(algorithm).__name__} has one already. Use --algorithm.rnd.coef 0."
        )
    if hasattr(algorithm, "batches"):
        raise SettingsError(
            f"algorithm.rnd.coef={algorithm.config.rnd.coef:g} adds novelty to lockstep's minibatches, but "
            f"{type(algorithm).__name__} brings its own minibatches (batches). Use --algorithm.rnd.coef 0."
        )
    return RND(algorithm)


class RND(Wrapper):
    """An on-policy algorithm with a reward for novelty. The networks for it are the model's `companion`.

    Args:
        inner: the algorithm.
    """

    def __init__(self, inner: OnPolicy[Any]) -> None:
        super().__init__(inner)
        self.metric_names = (*inner.metric_names, "rnd/error", "rnd/value", "rnd/value_loss")

    def companion(self, observation_space: gymnasium.Space[Any], seed: int) -> nn.Module:
        return Curiosity(observation_space, self.config.rnd.features, seed)

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """The algorithm's groups, and one for the companion unless they contain it."""
        groups = self.inner.groups(updates, hyper)
        if any("companion.".startswith(group.prefix) for group in groups):
            return groups
        return (*groups, ParameterGroup("companion.", hyper["learning_rate"]))

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """The algorithm's loss, the predictor's loss, and half the squared error of the intrinsic value.

        The last two include all steps, even resets, since only the reset step has an episode's last observation.
        """
        assert batch.intrinsic is not None
        learned = self.inner.loss(model, batch, hyper)
        curiosity = curiosity_of(model)
        steps = len(batch.reward)
        error_t, value_t = curiosity(map_structure(lambda leaf: leaf[:steps], batch.obs))
        error = (batch.intrinsic.predicted * error_t).sum()
        value_loss = 0.5 * (value_t - batch.intrinsic.value_target).square().sum()
        metrics = {
            **learned.metrics,
            "rnd/error": error.detach(),
            "rnd/value": value_t.detach().sum(),
            "rnd/value_loss": value_loss.detach(),
        }
        return LossOutput(learned.total + error + self.config.rnd.value_coef * value_loss, metrics)

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The algorithm's hyperparameters, and `rnd_coef`."""
        return {**self.inner.hyperparameters(progress), "rnd_coef": self.config.rnd.coef}


def curiosity_of(model: PolicyModel) -> Curiosity:
    """The networks for intrinsic rewards, which learn in addition to the model's."""
    companion = model.get_submodule("companion")
    assert isinstance(companion, Curiosity)
    return companion


def intrinsic_targets(reward: Tensor, value: Tensor, config: RNDConfig) -> Targets:
    """Advantages and value targets [T, B] of intrinsic rewards [T, B] with values [T+1, B], by GAE that ignores the
    ends of episodes (Burda et al. 2018, section 2.3). So dying does not end returns, and risks stay worthwhile."""
    never = torch.zeros_like(reward, dtype=torch.bool)
    return Targets(*gae(reward, value, never, never, config.discount, config.gae_lambda))
