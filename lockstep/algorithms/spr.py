"""Self-predictive representations (SPR, Schwarzer et al. 2021, https://arxiv.org/abs/2007.05929): deep Q-learning from
images that are shifted and brightened or darkened at random. The network also predicts its features after each of the
next steps.

Shape legend: n items, J predicted steps, F features, P numbers of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algorithms.augmentation import NUMBERS, Augmenting, AugmentingConfig, augment
from lockstep.algorithms.base import LossOutput, Setup
from lockstep.algorithms.dqn import disturb, features_of
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.transitions import Transitions
from lockstep.models.base import Networks, PolicyModel
from lockstep.models.spr import SPRModel, SPRModelConfig

_SMALLEST = 1e-6
"""Added to the squared length of a projection, which may be 0."""


@dataclass(frozen=True)
class SPRConfig(AugmentingConfig):
    """Q-learning with self-predictive representations. The defaults are those of Schwarzer et al. 2021 for Atari
    100k."""

    name = "spr"

    rollout: int = 1
    updates: int = 2
    n_step: int = 10
    double: bool = True
    target_period: int = 1
    predicted_steps: int = 5
    """J: steps over which features are predicted, at most n_step. More learn longer dynamics and cost time."""
    prediction_coef: float = 5.0
    """Weight of the loss of predictions. Higher shapes features by predictions rather than by returns; 0 leaves
    predictions without effect."""

    @property
    def future_steps(self) -> int:
        return self.predicted_steps

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if not 1 <= self.predicted_steps <= self.n_step:
            raise SettingsError(
                f"algorithm.predicted_steps={self.predicted_steps} must be between 1 and algorithm.n_step="
                f"{self.n_step}, since an item has the steps of its return."
            )
        if not self.prediction_coef >= 0:
            raise SettingsError(f"algorithm.prediction_coef={self.prediction_coef} must be at least 0.")

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        if not isinstance(setup.model, SPRModelConfig):
            raise SettingsError(
                f"algorithm=spr needs a model that predicts its features, but the model is "
                f"{type(setup.model).__name__}: use lockstep.models.SPRModelConfig, as in the recipe spr-atari100k."
            )

    def build(self) -> SPR:
        return SPR(self)


class SPR(Augmenting[SPRConfig]):
    """Moves the value of a replayed action as DQN does, and predicted projections towards those of the observations
    that followed."""

    metric_names = (*Augmenting.metric_names, "loss/prediction")

    def loss(self, model: Networks, batch: Transitions, hyper: dict[str, float]) -> LossOutput:
        """DQN's loss plus prediction_coef times the loss of predictions, summed over items."""
        online, target = model
        assert isinstance(online, SPRModel) and isinstance(target, SPRModel)
        assert batch.noise is not None and batch.future is not None
        disturb(online, target, batch.noise)
        batch = self._augmented(batch, batch.noise[2 * online.noise_numbers :])
        assert batch.future is not None
        features = features_of(online, batch.obs)
        output = self.loss_of_features(online, target, features, batch)
        predicted = online.predict(features[0], batch.future.action)
        with torch.no_grad():
            followed = target.project(features_of(target, batch.future.obs))
        distance = (_direction(predicted) - _direction(followed)).square().sum(-1)  # [J, n]
        loss = (batch.weight * (distance * batch.future.valid).mean(0)).sum()
        metrics = {**output.metrics, "loss/prediction": loss.detach()}
        return LossOutput(output.total + self.config.prediction_coef * loss, metrics, output.priorities)

    def noise_numbers(self, model: PolicyModel, items: int) -> int:
        images = (2 + self.config.predicted_steps) * items
        return super().noise_numbers(model, items) + images * NUMBERS

    def _augmented(self, batch: Transitions, draws: Tensor) -> Transitions:
        """The minibatch, whose images are augmented independently by uniform numbers [(2 + J) n * 3]. Shapes stay."""
        config, future = self.config, batch.future
        assert future is not None
        steps, items = future.valid.shape
        of_obs, of_next, of_future = draws.view(-1, NUMBERS).split([items, items, steps * items])

        def changed(obs: object, numbers: Tensor) -> object:
            return augment(obs, numbers.unsqueeze(0), config.pad, config.intensity)

        flat = map_structure(lambda x: x.flatten(0, 1).unsqueeze(0), future.obs)  # [1, J n, ...]
        followed = map_structure(lambda x: x.view(steps, items, *x.shape[2:]), changed(flat, of_future))
        return batch.replace(
            obs=changed(batch.obs, of_obs),
            next_obs=changed(batch.next_obs, of_next),
            future=future.replace(obs=followed),
        )


def _direction(x: Tensor) -> Tensor:
    """[..., P] -> [..., P], of length 1"""
    return x / (x.square().sum(-1, keepdim=True) + _SMALLEST).sqrt()
