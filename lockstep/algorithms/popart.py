"""PopArt for any on-policy algorithm. lockstep.models.popart contains the value head and its statistics.

Rewards and values are divided by the deviation of their task, and all targets and losses are in these units. So value
losses are those of normalized values, and advantages are scaled by their task's deviation (Hessel et al. 2019, section
4). The algorithm needs no change.

Shape legend: T time, B environments of a shard, K tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.base import Algorithm, LossOutput
from lockstep.algorithms.onpolicy import Batch, OnPolicy, Targets
from lockstep.algorithms.wrapper import Wrapper
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.rollout import Rollout
from lockstep.models.base import PolicyModel
from lockstep.models.popart import PopArtHead

_STATISTICS = "statistics.value"
"""The name of the parameter that holds the statistics."""


def with_popart(algorithm: Algorithm[Any], model: PolicyModel) -> Algorithm[Any]:
    """The algorithm, wrapped so that it learns normalized values if the model has them."""
    head = model.popart_head()
    return PopArt(algorithm, head) if head is not None and isinstance(algorithm, OnPolicy) else algorithm


class PopArt(Wrapper):
    """An on-policy algorithm with the value head of a model in normalized units.

    Args:
        inner: the algorithm.
        head: the value head of the model that learns.
    """

    def __init__(self, inner: OnPolicy[Any], head: PopArtHead) -> None:
        super().__init__(inner)
        self.head = head
        self._names = [f"popart/{what}_{task}" for what in ("mean", "deviation") for task in range(head.tasks)]
        self.metric_names = (*inner.metric_names, *self._names)

    def targets(self, rollout: Rollout, reward: Tensor, hyper: dict[str, float]) -> Targets:
        """The algorithm's targets. Advantages are in units of their task, so that they can be standardized over all
        tasks. Value targets are not, since the units change with the next gradient step."""
        found = self.inner.targets(rollout, reward, hyper)
        obs = map_structure(lambda leaf: leaf[: len(reward)], rollout.obs)
        return found._replace(advantage=found.advantage / self.head.of_task(self.head.moments()[1], obs))

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """The algorithm's loss in units of each task. The gradient of the statistics consists of sums over targets, the
        argument of the head's `follow`."""
        head, valid = self.head, batch.valid
        mean, deviation = head.moments()
        obs = map_structure(lambda leaf: leaf[: len(valid)], batch.obs)
        unit_t, middle_t = head.of_task(deviation, obs), head.of_task(mean / deviation, obs)
        scaled = batch.replace(
            reward=batch.reward / unit_t,
            value=batch.value / unit_t,
            value_target=None if batch.value_target is None else batch.value_target / unit_t,
        )
        with head.in_deviations():
            loss = self.inner.loss(model, scaled, hyper)
        target_t = scaled.value_target if loss.value_target is None else loss.value_target
        if target_t is None:
            raise SettingsError(
                f"model.popart.rate={head.config.rate:g} needs value targets, but {type(self.inner).__name__} has "
                "none: let its loss return them as LossOutput.value_target, or set needs_targets."
            )
        with torch.no_grad():
            target_t = torch.where(valid, target_t - middle_t, 0.0)
            task_t = head.one_hot(obs, target_t) * valid.to(target_t.dtype).unsqueeze(-1)
            terms = [target_t, target_t.square(), torch.ones_like(target_t)]
            sums = torch.stack([(task_t * each.unsqueeze(-1)).sum((0, 1)) for each in terms])
            numbers = torch.cat([mean, deviation]) * valid.sum(dtype=torch.float32)
        led = (head.statistics[0] * sums).sum()
        metrics = loss.metrics | dict(zip(self._names, numbers.unbind(), strict=True))
        return loss._replace(total=loss.total + (led - led.detach()), metrics=metrics)

    @property
    def sees_gradients(self) -> bool:
        return True

    def before_step(self, model: PolicyModel, gradient: Mapping[str, Tensor]) -> None:
        """Update the statistics. Their gradient becomes 0, so that the optimizer does not change them."""
        self.inner.before_step(model, gradient)
        self.head.follow(gradient[_STATISTICS])
        gradient[_STATISTICS].zero_()
