"""Settings of models whose critic observes more than their policy: asymmetric actor-critics (Pinto et al. 2017,
https://arxiv.org/abs/1710.06542)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from lockstep.config.settings import Names, SettingsError
from lockstep.models.base import ModelConfig
from lockstep.models.observations import ACTION_MASK, VALUE_TASK, ObservationLayout


@dataclass(frozen=True)
class AsymmetricConfig(ModelConfig):
    """A model with a policy and a separate critic, which estimates a value or several action values."""

    critic_only: Names = ()
    """Keys of a Dict observation whose entries only the critic observes, such as a simulator's full state. More let the
    critic estimate returns better. The policy never reads them and does not need them after training. A value network
    gets its own encoder and core, as with separate_value_network."""

    later: ClassVar[frozenset[str]] = frozenset({"critic_only"})

    @property
    def hidden_entries(self) -> tuple[str, ...]:
        return self.critic_only

    def policy_space(self, observation_space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
        """The space of the policy's observations.

        Raises:
            SettingsError: the critic's entries do not exist, or leave nothing for the policy.
        """
        if not self.critic_only:
            return super().policy_space(observation_space)
        asked = f"model.critic_only={' '.join(self.critic_only)}"
        if not isinstance(observation_space, spaces.Dict):
            raise SettingsError(
                f"{asked} names entries of a Dict observation, but the observation space is {observation_space}, which "
                "has no entries. Leave it out, or let the environment return a Dict."
            )
        keys = list(observation_space.spaces)
        if unknown := [key for key in self.critic_only if key not in keys]:
            raise SettingsError(
                f"{asked}: the observation has no entry {', '.join(map(repr, unknown))}. Its entries are "
                f"{', '.join(keys)}."
            )
        if ACTION_MASK in self.critic_only:
            raise SettingsError(
                f"{asked} hides the mask of allowed actions from the policy, which needs it. Leave {ACTION_MASK} out."
            )
        left = {key: space for key, space in observation_space.spaces.items() if key not in self.critic_only}
        if not left.keys() - {ACTION_MASK, VALUE_TASK}:
            raise SettingsError(
                f"{asked} leaves the policy nothing to observe: of {', '.join(keys)}, name only those that the policy "
                "must do without."
            )
        return super().policy_space(spaces.Dict(left))

    def policy_columns(self, observation_space: gymnasium.Space[Any]) -> list[int] | None:
        """The indices of the numbers that the policy observes among those of all vectors; None if it observes all."""
        if not self.critic_only:
            return None
        seen = ObservationLayout.of(self.policy_space(observation_space))
        return ObservationLayout.of(observation_space).columns({key for key, _ in seen.vectors})
