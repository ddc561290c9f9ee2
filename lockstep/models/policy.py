"""The standard model: encoder, core and heads, for every supported space."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import gymnasium
import torch
from torch import Tensor, nn

from lockstep.config.settings import SettingsError
from lockstep.models.action_spaces import make_distribution
from lockstep.models.asymmetric import AsymmetricConfig
from lockstep.models.base import ModelOutput, PolicyModel
from lockstep.models.distributions import Distribution
from lockstep.models.encoders import Trunk, take_observation_statistics
from lockstep.models.gaussian import bounded_log_std, check_initial_std
from lockstep.models.layers import initialize_orthogonal, reproducible_initialization
from lockstep.models.observations import ObservationLayout, allowed_actions
from lockstep.models.popart import PopArtConfig, PopArtHead, tasks_in
from lockstep.models.trunk import PRECISIONS, TrunkConfig, acting_copy, previous_features


class PolicyHead(nn.Module):
    """One linear layer that maps features to the parameters of the action distribution, in fp32.

    With std "free", the log standard deviations are separate parameters that are the same in every state.
    """

    def __init__(
        self,
        in_features: int,
        distribution: Distribution,
        std: Literal["free", "state"] = "free",
        initial_std: float = 1.0,
    ):
        super().__init__()
        self.distribution = distribution
        free = distribution.log_std_columns if std == "free" else ()
        emitted = [column for column in range(distribution.num_params) if column not in free]
        self.linear = nn.Linear(in_features, len(emitted))
        self.log_std = nn.Parameter(torch.full((len(free),), math.log(initial_std))) if free else None
        self.order: Tensor | None
        order = torch.tensor([*emitted, *free]).argsort()
        in_order = bool((order == torch.arange(len(order))).all())
        self.register_buffer("order", None if in_order else order, persistent=False)
        initialize_orthogonal(self.linear, 0.01)
        if not free:
            self.linear.bias.data[list(distribution.log_std_columns)] = math.log(initial_std)

    def forward(self, features: Tensor, allowed: Tensor | None = None) -> Tensor:
        """[T, B, F], action mask bool [T, B, num_logits] -> [T, B, P]"""
        params = self.linear(features.float())
        if self.log_std is not None:
            # Bounded here, after the gradients of all samples and terms of the loss have been added up.
            log_std = bounded_log_std(self.log_std)
            params = torch.cat([params, log_std.expand(*params.shape[:-1], -1)], -1)
        if self.order is not None:
            params = params[..., self.order]
        return params if allowed is None else self.distribution.mask(params, allowed)


class ValueHead(nn.Module):
    """One linear layer to the state value, in fp32."""

    def __init__(self, in_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, 1)
        initialize_orthogonal(self.linear, 1.0)

    def forward(self, features: Tensor) -> Tensor:
        """[T, B, F] -> [T, B]"""
        return self.linear(features.float()).squeeze(-1)


class StandardModel(PolicyModel):
    """One trunk for policy and value, or one for each, followed by the heads.

    Args:
        policy_trunk: features of the policy, and of the value if value_trunk is None.
        value_trunk: features of the value, if separate.
        distribution: the distribution of actions.
        std, initial_std: see PolicyHead.
        uses_previous: whether the trunks take the previous action and reward as extra features.
        masked: whether observations have an action mask.
        policy_columns: indices of the numbers in vectors that the policy observes, if the value observes more.
        popart: the number of tasks and the settings of PopArt, which has a value for each task. None means one value.
    """

    policy_columns: list[int] | None = None
    _has_popart = False
    """Whether the value head is a PopArtHead, which takes the observations, too."""

    def __init__(
        self,
        policy_trunk: Trunk,
        value_trunk: Trunk | None,
        distribution: Distribution,
        *,
        std: Literal["free", "state"] = "free",
        initial_std: float = 1.0,
        uses_previous: bool = False,
        masked: bool = False,
        policy_columns: list[int] | None = None,
        popart: tuple[int, PopArtConfig] | None = None,
    ):
        super().__init__()
        self.distribution, self.policy_columns = distribution, policy_columns
        self._encode = distribution.encode
        self.uses_previous, self.masked = uses_previous, masked
        self.extra_features = distribution.encoded_size + 1 if uses_previous else 0
        """E: the number of features that `extra` returns."""
        self.trunks = nn.ModuleList([policy_trunk] if value_trunk is None else [policy_trunk, value_trunk])
        self.state_sizes = [trunk.state_size for trunk in (policy_trunk, value_trunk) if trunk]
        self.state_size = sum(self.state_sizes)
        self.policy_head = PolicyHead(policy_trunk.out_features, distribution, std, initial_std)
        features = (value_trunk or policy_trunk).out_features
        self.value_head: ValueHead | PopArtHead | None
        self.value_head = ValueHead(features) if popart is None else PopArtHead(features, *popart)
        if isinstance(self.value_head, PopArtHead):
            self._has_popart = True
            self.statistics = nn.ParameterDict({"value": self.value_head.statistics[0]})

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        extra = self.extra(start, prev_action, prev_reward)
        allowed = allowed_actions(obs) if self.masked else None
        states = state.split(self.state_sizes, -1)
        results = [trunk(obs, start, s, extra) for trunk, s in zip(self.trunks, states, strict=True)]
        params, head = self.policy_head(results[0][0], allowed), self.value_head
        if head is None:
            value = params.new_zeros(params.shape[:2])
        else:
            value = head(results[-1][0], obs) if self._has_popart else head(results[-1][0])
        if self.state_size:
            state = torch.cat([s for _, s in results], -1) if len(results) > 1 else results[0][1]
        return ModelOutput(params, value, results[0][0]), state

    def extra(self, start: Tensor, prev_action: Tensor | None, prev_reward: Tensor | None) -> Tensor | None:
        """Further inputs of the trunks, [T, B, E], if they take the previous action and reward."""
        return previous_features(self._encode, prev_action, prev_reward, start) if self.uses_previous else None

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        take_observation_statistics(self.trunks[0], mean, std, self.policy_columns)
        take_observation_statistics(self.trunks[1:], mean, std)

    def popart_head(self) -> PopArtHead | None:
        return self.value_head if isinstance(self.value_head, PopArtHead) else None

    def for_acting(self) -> StandardModel:
        return acting_copy(self)

    def for_playing(self) -> StandardModel:
        """A copy for acting, without the value if it observes more than the policy (even if only the task)."""
        playing = self.for_acting()
        playing.drop_value()
        return playing

    def drop_value(self) -> None:
        """Remove the value if it observes more than the policy (even if only the task)."""
        head = self.popart_head()
        if self.policy_columns is not None or (head is not None and head.tasks > 1):
            self.trunks, self.value_head, self.has_value = self.trunks[:1], None, False
            self.state_sizes = self.state_sizes[:1]
            self.state_size = sum(self.state_sizes)


@dataclass(frozen=True)
class StandardModelConfig(AsymmetricConfig, TrunkConfig):
    """A policy and a value, with encoder and core chosen by name, and heads for the action space."""

    separate_value_network: bool = False
    """Give the value its own encoder and core. On keeps the value loss from disturbing the policy. Off shares features,
    which images need."""
    std: Literal["free", "state"] = "free"
    """Standard deviation of continuous actions. free is one number per dimension; state is a function of the
    observation."""
    squash: bool = False
    """Squash continuous actions into their bounds by tanh. Off clips them, as most PPO implementations do."""
    initial_std: float = 1.0
    """Initial standard deviation of continuous actions, in units of the action space (with squash, before it); 0.01 to
    5. Higher explores more. At 1, bounds of -1 and 1 clip a third of all actions, and all clipped actions have the same
    effect."""

    popart: PopArtConfig = field(default_factory=PopArtConfig)
    """PopArt, which has a value for each task in units of its returns. Off unless its rate is above 0."""

    later: ClassVar[frozenset[str]] = AsymmetricConfig.later | TrunkConfig.later | {"initial_std", "popart"}

    @property
    def value_normalization(self) -> PopArtConfig:
        return self.popart

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        super().validate()
        self.popart.validate()
        check_initial_std(self.initial_std)

    def check(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Raise SettingsError for an image encoder without images, and for actions that are out of reach."""
        super().check(observation_space, action_space)
        make_distribution(action_space, squash=self.squash).check_start(self.initial_std)

    def warnings(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> list[str]:
        distribution = make_distribution(action_space, squash=self.squash)
        warning = distribution.warning_at_start(self.initial_std)
        if not distribution.log_std_columns and self.initial_std != StandardModelConfig.initial_std:
            warning = (
                f"--model.initial-std {self.initial_std:g} has no effect, since the actions of {action_space} are "
                "discrete."
            )
        return [*super().warnings(observation_space, action_space), *([warning] if warning else [])]

    def build(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        precision: Literal["bf16", "fp32"],
        normalize_observations: bool,
        seed: int,
        observation_clip: float = 10.0,
    ) -> StandardModel:
        self.validate()
        distribution = make_distribution(action_space, squash=self.squash)
        if not distribution.log_std_columns and (self.squash or self.std != "free"):
            raise SettingsError(
                f"model.squash={self.squash} and model.std={self.std} shape continuous actions, but those of "
                f"{action_space} are discrete. Use --model.no-squash and --model.std free."
            )
        layout = ObservationLayout.of(observation_space)
        layout.check_mask(action_space, distribution.num_logits)
        extra = distribution.encoded_size + 1 if self.previous_action_reward else 0
        dtype = PRECISIONS[precision]

        def trunk(seen: gymnasium.Space[Any]) -> Trunk:
            encoder = self.build_encoder(seen, dtype=dtype, normalize=normalize_observations, clip=observation_clip)
            return Trunk(encoder, self.build_core, extra_features=extra, dtype=dtype)

        with reproducible_initialization(seed):
            return StandardModel(
                trunk(self.policy_space(observation_space)),
                trunk(observation_space) if self.separate_value_network or self.critic_only else None,
                distribution,
                std=self.std,
                initial_std=self.initial_std,
                uses_previous=self.previous_action_reward,
                masked=layout.mask_size > 0,
                policy_columns=self.policy_columns(observation_space),
                popart=(tasks_in(observation_space), self.popart) if self.popart.rate else None,
            )
