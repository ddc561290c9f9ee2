"""Several policies in one run. Each has a separate model, which plays and learns from the rows of its agents.

Shape legend: T time, B environments (agents of matches), P distribution parameters, K core state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.kernels.bound import PolicyKernels
from lockstep.models.action_spaces import make_distribution
from lockstep.models.base import ActionDistribution, ModelOutput, PolicyModel
from lockstep.models.distributions import FORBIDDEN
from lockstep.models.normalize import NormalizeConfig, Normalizers

POLICY = "policy"
"""The entry of an observation with the number of the policy that plays it. Models do not observe it."""


class Part(NamedTuple):
    """The observation and action space of one policy."""

    observation_space: spaces.Dict
    action_space: gymnasium.Space[Any]


class PoliciesSpace(spaces.Dict):
    """The common observation space of several policies. A policy's own vectors may be shorter.

    Args:
        entries: the entries of the common space, including POLICY.
        parts: spaces by the policies' names, in the order of their numbers.
    """

    def __init__(self, entries: Mapping[str, spaces.Space[Any]], parts: Mapping[str, Part]) -> None:
        super().__init__(dict(entries))
        self.parts = dict(parts)

    def own(self, name: str, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of observations [T, B, ...] that a policy sees. It is meaningless in rows of other policies. Entries
        for critics alone may be missing."""
        found = {}
        for key, space in self.parts[name].observation_space.items():
            if key in obs:
                whole = self.spaces[key].shape == space.shape
                found[key] = obs[key] if whole else obs[key][..., : (space.shape or (1,))[0]]
        return found

    def columns(self, name: str) -> np.ndarray:
        """int64: the indices of the numbers that a policy sees among those of all entries side by side
        (lockstep.core.arrays.join_entries). All entries are vectors."""
        seen, found, begin = self.parts[name].observation_space.spaces, [], 0
        for key in sorted(self.spaces):
            if key in seen:
                found.append(np.arange(begin, begin + _size(seen[key])))
            begin += _size(self.spaces[key])
        return np.concatenate(found)

    def rows(self, name: str, obs: Mapping[str, Tensor]) -> Tensor:
        """int64: the columns of observations [T, B, ...] that a policy plays, at all T steps."""
        return (obs[POLICY][0, :, 0] == list(self.parts).index(name)).nonzero().squeeze(1)


def _size(space: spaces.Space[Any]) -> int:
    return math.prod(space.shape or ())


class Policies(PolicyModel):
    """The models of all policies. Each computes all rows, and the rows of its agents are selected, so that the calls do
    not depend on which policy plays a row.

    Args:
        space: the common observation space.
        models: models by the policies' names.
        action_space: the common action space. Discrete actions may have more choices than a policy has.
        distribution: the distribution of its actions, if not the usual one.
    """

    def __init__(
        self,
        space: PoliciesSpace,
        models: Mapping[str, PolicyModel],
        action_space: gymnasium.Space[Any],
        distribution: ActionDistribution | None = None,
    ) -> None:
        super().__init__()
        self._space, self._action_space = space, action_space
        self.policies = nn.ModuleDict(dict(models))
        first = next(iter(models.values()))
        same_space = all(part.action_space == action_space for part in space.parts.values())
        usual = first.distribution if same_space else make_distribution(action_space)
        self.distribution: ActionDistribution = distribution or usual
        self.state_size = max(model.state_size for model in models.values())
        self.has_value = all(model.has_value for model in models.values())
        assert not any(model.noise_numbers for model in models.values()), "no noisy layers learn from rollouts"

    @property
    def portable_operations(self) -> bool:
        """Whether torch's operations are replaced for these models, each of which may act alone."""
        return any(model.portable_operations for model in self._models())

    @portable_operations.setter
    def portable_operations(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, replaced: bool
    ) -> None:
        for model in self._models():
            model.portable_operations = replaced

    def _models(self) -> list[PolicyModel]:
        return [self[name] for name in self.policies]

    def __getitem__(self, name: str) -> PolicyModel:
        model = self.policies[name]
        assert isinstance(model, PolicyModel)
        return model

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        """Policies with fewer choices than the common action space forbid the others."""
        number = obs[POLICY][..., 0]
        results = [self._of(name, obs, start, state, prev_action, prev_reward) for name in self._space.parts]
        params, value, after = results[0]
        for place, (found, own_value, kept) in enumerate(results[1:], start=1):
            mine = number == place
            params = torch.where(mine.unsqueeze(-1), found, params)
            value = torch.where(mine, own_value, value)
            if self.state_size:
                after = torch.where(mine[0].unsqueeze(-1), kept, after)
        return ModelOutput(params, value), after

    def _of(
        self, name: str, obs: Any, start: Tensor, state: Tensor, action: Tensor | None, reward: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One policy's outputs for all rows, in the common form: parameters [T, B, P], values and the core state."""
        model = self[name]
        if action is not None and model.distribution.num_params < self.distribution.num_params:
            action = action.clamp(max=model.distribution.num_params - 1)  # in the rows of other policies
        out, kept = model(self._space.own(name, obs), start, state[:, : model.state_size], action, reward)
        params = F.pad(out.policy, (0, self.distribution.num_params - out.policy.shape[-1]), value=FORBIDDEN)
        return params, out.value, F.pad(kept, (0, self.state_size - kept.shape[-1])) if self.state_size else state

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        raise AssertionError("each policy has its own statistics: see PolicyNormalizers")

    def weights_changed(self) -> None:
        for name in self._space.parts:
            self[name].weights_changed()

    def kernels(self) -> PolicyKernels | None:
        found = [kernels for name in self._space.parts if (kernels := self[name].kernels()) is not None]
        if len(found) < len(self._space.parts):
            return None
        from lockstep.kernels.several import policies_kernels  # which needs Numba

        player = sum(_size(entry) for key, entry in self._space.spaces.items() if key < POLICY)
        columns = [self._space.columns(name) for name in self._space.parts]
        return policies_kernels(found, columns, player, self.distribution.num_params, FORBIDDEN)

    def playing(self, space: PoliciesSpace, action_space: gymnasium.Space[Any]) -> Policies:
        """The policies that play in environments with these spaces.

        Raises:
            SettingsError: a policy of the environments is missing.
        """
        if missing := [name for name in space.parts if name not in self.policies]:
            raise SettingsError(
                f"The run has the policies {', '.join(self._space.parts)}, but here agents of {', '.join(missing)} are "
                f"left to play. Name opponents for them: {' '.join(f'{name}=random' for name in missing)}, for example."
            )
        if list(space.parts) == list(self._space.parts):
            return self
        return Policies(space, {name: self[name] for name in space.parts}, action_space)

    def for_acting(self) -> Policies:
        return self._copied({name: self[name].for_acting() for name in self._space.parts})

    def for_playing(self) -> Policies:
        return self._copied({name: self[name].for_playing() for name in self._space.parts})

    def changed(
        self,
        change: Callable[[PolicyModel, gymnasium.Space[Any], int], PolicyModel],
        seed: int,
        distribution: ActionDistribution,
    ) -> Policies:
        """A copy with another distribution and other models. A function makes them from the models, their action spaces
        and a seed."""
        models = {name: change(self[name], part.action_space, seed) for name, part in self._space.parts.items()}
        return Policies(self._space, models, self._action_space, distribution)

    def _copied(self, models: dict[str, PolicyModel]) -> Policies:
        return Policies(self._space, models, self._action_space, self.distribution)


@dataclass(frozen=True)
class PolicyNormalizers(Normalizers):
    """A normalizer for each policy, over the samples of its agents."""

    space: PoliciesSpace = field(kw_only=True)
    each: dict[str, Normalizers] = field(kw_only=True)

    @property
    def normalizes_observations(self) -> bool:
        return any(part.normalizes_observations for part in self.each.values())

    def apply(self, model: PolicyModel) -> None:
        assert isinstance(model, Policies)
        for name, part in self.each.items():
            part.apply(model[name])

    def scale_rewards(self, reward: Tensor, obs: Any = None, deviation: Tensor | None = None) -> Tensor:
        assert deviation is None, "several policies do not replay"
        scaled = reward.clone()
        for name, part in self.each.items():
            rows = self.space.rows(name, obs)
            scaled[:, rows] = part.scale_rewards(reward[:, rows])
        return scaled

    def rollout_sums(self, rollout: Rollout, return_carry: Tensor) -> Tensor:
        sums = []
        whole = rollout.replace(core_state=None)
        for name, part in self.each.items():
            rows = self.space.rows(name, rollout.obs)
            own, carry = whole[:, rows], return_carry[rows]
            sums.append(part.rollout_sums(own.replace(obs=self.space.own(name, own.obs)), carry))
            return_carry[rows] = carry
        return torch.cat(sums)

    def merged(self, sums: Tensor) -> PolicyNormalizers:
        sizes = [sum(state.numel() for state in part.state().values()) for part in self.each.values()]
        parts = zip(self.each.items(), sums.split(sizes), strict=True)
        return replace(self, each={name: part.merged(own) for (name, part), own in parts})

    def state(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": x for name, part in self.each.items() for key, x in part.state().items()}

    def loaded(self, state: dict[str, Tensor]) -> PolicyNormalizers:
        def of(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{name}."): x for key, x in state.items() if key.startswith(f"{name}.")}

        return replace(self, each={name: part.loaded(of(name)) for name, part in self.each.items()})


def first_normalizers(
    config: NormalizeConfig, discount: float, observation_space: gymnasium.Space[Any], *, portable: bool = False
) -> Normalizers:
    """Statistics before the first sample: one set, or one for each policy."""
    if not isinstance(observation_space, PoliciesSpace):
        return Normalizers.initial(config, discount, observation_space, portable=portable)
    each = {
        name: Normalizers.initial(config, discount, part.observation_space, portable=portable)
        for name, part in observation_space.parts.items()
    }
    return PolicyNormalizers(config, discount, None, None, None, portable, space=observation_space, each=each)


def parts_of(
    observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> Sequence[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
    """The spaces of each policy; with a single policy, the given spaces."""
    if isinstance(observation_space, PoliciesSpace):
        return list(observation_space.parts.values())
    return [(observation_space, action_space)]
