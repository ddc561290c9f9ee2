"""Several policies. Each learns by an on-policy algorithm from the rows of its agents, as if it were alone.

Shape legend: T time, B environments of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from torch import Tensor

from lockstep.algorithms.base import Algorithm, LossOutput, ParameterGroup
from lockstep.algorithms.onpolicy import Batch, OnPolicy
from lockstep.algorithms.ppo import PPO
from lockstep.algorithms.wrapper import Wrapper
from lockstep.config.settings import SettingsError
from lockstep.models.base import PolicyModel
from lockstep.models.policies import Policies, PoliciesSpace


def with_policies(algorithm: Algorithm[Any], observation_space: gymnasium.Space[Any]) -> Algorithm[Any]:
    """The algorithm, wrapped so that each policy learns by it, if there are several policies."""
    if not isinstance(observation_space, PoliciesSpace):
        return algorithm
    assert isinstance(algorithm, OnPolicy), "settings were checked: see OffPolicyConfig.validate_with"
    if type(algorithm).companion is not Algorithm.companion:
        raise SettingsError(
            f"{type(algorithm).__name__} has networks besides the model (companion), but env.policies makes several "
            "models. Use --env.policies shared."
        )
    for name in ("stop_early", "adapt"):
        if getattr(type(algorithm), name) not in (getattr(Algorithm, name), getattr(PPO, name)):
            raise SettingsError(
                f"{type(algorithm).__name__}.{name} would let one policy decide about the gradient steps of all, since "
                "env.policies makes several. Use --env.policies shared."
            )
    return Several(algorithm, observation_space)


class Several(Wrapper):
    """The sum of all policies' losses. Each is over the policy's own samples, so its gradient, norm and metrics are
    those that the policy would have alone.

    Args:
        inner: the algorithm.
        space: the observation space of all policies.
    """

    def __init__(self, inner: OnPolicy[Any], space: PoliciesSpace) -> None:
        super().__init__(inner)
        self.space, self.policies = space, len(space.parts)
        names = list(space.parts)
        self.metric_names = tuple(f"{metric}/{name}" for name in names for metric in (*inner.metric_names, _SAMPLES))
        if inner.mean_loss:
            self.counted = tuple((prefix_of(name), f"{_SAMPLES}/{name}") for name in names)

    def check(self, observation_space: gymnasium.Space[Any]) -> None:
        """Check what each policy observes."""
        for part in self.space.parts.values():
            self.inner.check(part.observation_space)

    def variables(self, model: PolicyModel) -> dict[str, Tensor]:
        """None.

        Raises:
            SettingsError: the algorithm has variables, which would be common to all policies.
        """
        assert isinstance(model, Policies)
        for name in self.space.parts:
            if variables := self.inner.variables(model[name]):
                raise SettingsError(
                    f"algorithm={self.config.name} learns {', '.join(variables)} besides the model, which would be the "
                    "same for all policies of env.policies. Use another algorithm, or --env.policies shared."
                )
        return {}

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """The algorithm's groups, for each policy."""
        groups = self.inner.groups(updates, hyper)
        return tuple(
            group._replace(prefix=prefix_of(name) + group.prefix) for name in self.space.parts for group in groups
        )

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        """The sum of the policies' losses. A policy without rows has none."""
        assert isinstance(model, Policies)
        total, metrics = batch.reward.new_zeros(()), {}
        for name in self.space.parts:
            rows = self.space.rows(name, batch.obs)
            if not len(rows):  # a small slice may have none
                nothing = batch.reward.new_zeros(())
                metrics |= dict.fromkeys(
                    (f"{metric}/{name}" for metric in (*self.inner.metric_names, _SAMPLES)), nothing
                )
                continue
            own = batch.columns(rows)
            own = own.replace(obs=self.space.own(name, own.obs), state=own.state[:, : model[name].state_size])
            learned = self.inner.loss(model[name], own, hyper)
            total = total + learned.total
            metrics |= {f"{metric}/{name}": x for metric, x in learned.metrics.items()}
            metrics[f"{_SAMPLES}/{name}"] = own.valid.sum(dtype=torch.float32)
        return LossOutput(total, metrics)

    def before_step(self, model: PolicyModel, gradient: Mapping[str, Tensor]) -> None:
        """Call the algorithm's before_step for each policy, with the gradient of its parameters."""
        assert isinstance(model, Policies)
        for name in self.space.parts:
            prefix = prefix_of(name)
            own = {key.removeprefix(prefix): x for key, x in gradient.items() if key.startswith(prefix)}
            self.inner.before_step(model[name], own)

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """The algorithm's metrics over all samples, and over those of each policy, as in `loss/policy/NAME`."""
        inner, names = self.inner, list(self.space.parts)
        share = {name: metrics[f"{_SAMPLES}/{name}"] for name in names}
        found = inner.summarize({each: sum(metrics[f"{each}/{name}"] for name in names) for each in inner.metric_names})
        for name in names:
            if share[name]:
                own = inner.summarize({each: metrics[f"{each}/{name}"] / share[name] for each in inner.metric_names})
                found |= {f"{each}/{name}": mean for each, mean in own.items()}
        return found


_SAMPLES = "samples"
"""The metric that counts a policy's valid samples."""


def prefix_of(name: str) -> str:
    """The prefix of the names of a policy's parameters."""
    return f"policies.{name}."
