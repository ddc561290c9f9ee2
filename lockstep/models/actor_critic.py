"""Models with a policy and action-value critics, for DDPG, TD3, SAC and MPO.

Shape legend: T time, B environments, F features, D dimensions of an action, A discrete actions, C critics,
P distribution parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError
from lockstep.models.asymmetric import AsymmetricConfig
from lockstep.models.base import ModelOutput, PolicyModel
from lockstep.models.continuous import Deterministic, DiagonalGaussian, Scaled, SquashedGaussian
from lockstep.models.core import Core
from lockstep.models.distributions import Categorical
from lockstep.models.encoders import features_of, take_observation_statistics
from lockstep.models.gaussian import check_initial_std
from lockstep.models.layers import reproducible_initialization
from lockstep.models.mlps import MLPs
from lockstep.models.observations import ObservationLayout, allowed_actions
from lockstep.models.renorm import RenormMLPs
from lockstep.models.trunk import PRECISIONS, TrunkConfig, acting_copy, previous_features


class Unchanged(nn.Module):
    """An encoder that returns vectors unchanged."""

    def __init__(self, size: int):
        super().__init__()
        self.out_features = size

    def forward(self, x: Tensor) -> Tensor:
        return x


class Recalled(NamedTuple):
    """The outputs of cores for observations [T, B], which replace the observations when sequences are learned from."""

    policy: Tensor
    """[T, B, F]: the inputs of the policy's layers."""
    critics: Tensor
    """[T, B, F]: the inputs of the critics' layers, without the action."""
    allowed: Tensor | None
    """bool [T, B, A]: the action mask, if there is one."""


def mask_of(obs: Any) -> Tensor:
    """The action mask of observations, or of Recalled: bool [T, B, A]."""
    if not isinstance(obs, Recalled):
        return allowed_actions(obs)
    assert obs.allowed is not None
    return obs.allowed


class Remembering(nn.Module):
    """An encoder, a core if there is one, and layers. The layers also see the core's input, as in the code of Ni et al.
    2022 (https://arxiv.org/abs/2110.05038)."""

    def __init__(self, encoder: nn.Module, core: Core | None, layers: MLPs | RenormMLPs):
        super().__init__()
        self.encoder, self.core, self.layers = encoder, core, layers
        self.state_size = 0 if core is None else core.state_size
        """K"""

    def features(self, obs: Any, start: Tensor, state: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Observations [T, B, ...], starts [T, B], the core's state [B, K], further inputs [T, B, E] -> inputs of the
        layers [T, B, F], state after the last step [B, K]"""
        x = self.encoder(obs)
        if extra is not None:
            x = torch.cat([x, extra.to(x.dtype)], -1)
        if self.core is None:
            return x, state
        y, state = self.core(x, start, state)
        return torch.cat([y.to(x.dtype), x], -1), state


class Actor(Remembering):
    """Maps observations to the parameters of the action distribution.

    Args:
        masked: whether observations have an action mask.
    """

    def __init__(
        self,
        encoder: nn.Module,
        core: Core | None,
        layers: MLPs | RenormMLPs,
        distribution: Scaled | Categorical,
        *,
        masked: bool = False,
    ):
        super().__init__(encoder, core, layers)
        self.bound = distribution.bound if isinstance(distribution, Scaled) else None
        self.mask = distribution.mask if masked else None

    def forward(self, obs: Any) -> Tensor:
        """[T, B, ...], or with a core Recalled -> fp32 [T, B, P]"""
        if isinstance(obs, Recalled):
            return self.parameters_of(obs.policy, obs)
        assert self.core is None, "a core needs what came before"
        return self.parameters_of(self.encoder(obs), obs)

    def parameters_of(self, features: Tensor, obs: Any) -> Tensor:
        """Results of features [T, B, F], and observations or Recalled with the action mask -> fp32 [T, B, P]"""
        outputs = self.layers(features.flatten(0, 1))[0].unflatten(0, features.shape[:2])
        if self.mask is not None:
            return self.mask(outputs, mask_of(obs))
        return outputs if self.bound is None else self.bound(outputs)


class Critics(Remembering):
    """C estimates of the return of an action or, if actions are discrete, of every action. They share only the encoder
    of images and the core, if these exist."""

    def forward(self, obs: Any, action: Tensor | None, *, frozen: bool = False) -> Tensor:
        """Args:
            obs: [T, B, ...], or with a core Recalled.
            action: the output of distribution.encode, [T, B, D]; with T = 1 also [N, B, D] for N actions in each state.
                None evaluates every action.
            frozen: whether gradients flow only to the action and not to the critics' parameters.

        Returns:
            fp32 [C, T, B], or [C, T, B, A].
        """
        if isinstance(obs, Recalled):
            features = obs.critics.detach() if frozen else obs.critics
        else:
            assert self.core is None, "a core needs what came before"
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                features = self.encoder(obs)
        if action is not None:
            features = torch.cat([features.expand(*action.shape[:2], -1), action.to(features.dtype)], -1)
        values = self.layers(features.flatten(0, 1), frozen=frozen).unflatten(1, features.shape[:2])
        return values if action is None else values.squeeze(-1)


class ActorCritic(PolicyModel):
    """A policy and critics, in separate networks.

    Args:
        policy_columns: indices of the numbers in vectors that the policy observes, if the critics observe more.
        uses_previous: whether policy and critics see the previous action and reward.
    """

    has_value = False

    def __init__(
        self,
        actor: Actor,
        critics: Critics,
        distribution: Scaled | Categorical,
        policy_columns: list[int] | None = None,
        *,
        uses_previous: bool = False,
    ):
        super().__init__()
        self.actor, self.critics, self.distribution = actor, critics, distribution
        self.policy_columns, self.uses_previous = policy_columns, uses_previous
        if isinstance(actor.layers, RenormMLPs) and isinstance(critics.layers, RenormMLPs):
            of_parts = {"actor": actor.layers.statistics, "critics": critics.layers.statistics}
            self.statistics = nn.ModuleDict({name: nn.ParameterList(each) for name, each in of_parts.items()})
        self._encode = distribution.encode
        self.state_size = actor.state_size

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        """The policy's parameters, and the state of its core. The value, which is not used, is 0."""
        features, state = self.actor.features(obs, start, state, self.previous(start, prev_action, prev_reward))
        params = self.actor.parameters_of(features, obs)
        return ModelOutput(params, params.new_zeros(params.shape[:2])), state

    def previous(self, start: Tensor, prev_action: Tensor | None, prev_reward: Tensor | None) -> Tensor | None:
        """The inputs of policy and critics in addition to observations, [T, B, E]; None if there are none."""
        return previous_features(self._encode, prev_action, prev_reward, start) if self.uses_previous else None

    def q(self, obs: Any, action: Tensor, *, frozen: bool = False) -> Tensor:
        """Values of actions of the distribution: see Critics.forward."""
        return self.critics(obs, self._encode(action), frozen=frozen)

    def q_all(self, obs: Any) -> Tensor:
        """Values of every discrete action: fp32 [C, T, B, A]."""
        return self.critics(obs, None)

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        take_observation_statistics(self.actor, mean, std, self.policy_columns)
        if hasattr(self, "critics"):
            take_observation_statistics(self.critics, mean, std)

    def for_acting(self) -> ActorCritic:
        acting = acting_copy(self)
        del acting.critics
        return acting


@dataclass(frozen=True)
class ActorCriticConfig(AsymmetricConfig, TrunkConfig):
    """A policy and critics, each a separate MLP over vectors (and features of images)."""

    has_policy_and_value: ClassVar[bool] = False

    hidden_sizes: tuple[int, ...] = (256, 256)
    """Hidden layers of the policy and of each critic. More or wider layers fit harder functions and cost time."""
    activation: Literal["tanh", "relu", "elu"] = "relu"
    """Nonlinearity of hidden layers."""
    policy: Literal["squashed", "deterministic", "gaussian"] = "squashed"
    """The policy's distribution. squashed is tanh of a normal distribution (SAC), or for discrete actions a categorical
    distribution; deterministic is a single action (DDPG, TD3); gaussian is a normal distribution (MPO)."""
    initial_std: float = 1.0
    """Initial standard deviation of a gaussian policy's actions, where the bounds are -1 and 1; 0.01 to 5. Higher
    explores more. If it is too high, learning begins late, since MPO's trust region only lets it fall slowly. Other
    policies do not use it."""
    critics: int = 2
    """Number of critics. Targets use the smallest of their estimates, which counteracts overestimation. More
    underestimate more and cost time."""
    layer_norm: bool = False
    """Normalize the first hidden layer of policy and critics. On is more stable with large inputs."""
    batch_renorm: bool = False
    """Normalize the inputs of all layers of policy and critics by batch renormalization, which CrossQ needs."""
    critic_sizes: tuple[int, ...] = ()
    """Hidden layers of each critic, if they differ from hidden_sizes. Wider layers fit harder values and cost time."""

    later: ClassVar[frozenset[str]] = AsymmetricConfig.later | TrunkConfig.later | {"batch_renorm", "critic_sizes"}
    needs: ClassVar[tuple[Need, ...]] = (Need(("initial_std",), ("model.policy",), ("gaussian",)),)

    def build_vector_encoder(self, size: int) -> nn.Module:
        return Unchanged(size)

    def build(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        precision: Literal["bf16", "fp32"],
        normalize_observations: bool,
        seed: int,
        observation_clip: float = 10.0,
    ) -> ActorCritic:
        self.validate()
        distribution = self._distribution(action_space)
        layout = ObservationLayout.of(observation_space)
        layout.check_mask(action_space, distribution.num_logits)
        discrete = isinstance(distribution, Categorical)

        def encoder(seen: gymnasium.Space[Any]) -> nn.Module:
            return self.build_encoder(
                seen, dtype=PRECISIONS[precision], normalize=normalize_observations, clip=observation_clip
            )

        def layers(count: int, into: int, hidden: tuple[int, ...], out: int) -> MLPs | RenormMLPs:
            if self.batch_renorm:
                return RenormMLPs(count, (into, *hidden, out), self.activation)
            return MLPs(count, (into, *hidden, out), self.activation, self.layer_norm)

        more = distribution.encoded_size + 1 if self.previous_action_reward else 0

        def remembers(encoder: nn.Module) -> tuple[Core | None, int]:
            """A core, and the number of inputs of the layers after it."""
            size = features_of(encoder) + more
            core = self.build_core(size)
            return core, size + (core.out_features if core else 0)

        with reproducible_initialization(seed):
            of_actor, of_critics = encoder(self.policy_space(observation_space)), encoder(observation_space)
            core, seen = remembers(of_actor)
            of_policy = layers(1, seen, self.hidden_sizes, distribution.num_params)
            actor = Actor(of_actor, core, of_policy, distribution, masked=layout.mask_size > 0)
            if isinstance(of_policy, MLPs) and self.policy == "gaussian":
                of_policy.scale_outputs(0.01)  # otherwise deviations begin between half and twice initial_std
            core, features = remembers(of_critics)
            into, out = (features, distribution.n) if discrete else (features + distribution.encoded_size, 1)
            of_values = layers(self.critics, into, self.critic_sizes or self.hidden_sizes, out)
            critics = Critics(of_critics, core, of_values)
            columns = self.policy_columns(observation_space)
            return ActorCritic(actor, critics, distribution, columns, uses_previous=self.previous_action_reward)

    def _distribution(self, space: gymnasium.Space[Any]) -> Scaled | Categorical:
        if isinstance(space, spaces.Box):
            if self.policy == "gaussian":
                return DiagonalGaussian(space, self.initial_std)
            return SquashedGaussian(space) if self.policy == "squashed" else Deterministic(space)
        if isinstance(space, spaces.Discrete) and self.policy == "squashed":
            return Categorical(space)
        one = isinstance(space, spaces.Discrete)
        remedy = "another environment or another recipe" if one else "PPO, which supports others"
        raise SettingsError(
            f"The action space is {space}, but the model's policy is {self.policy!r}. All policies support Box "
            f"spaces, only squashed (SAC) supports Discrete ones, and none supports others. Use {remedy}."
        )

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        super().validate()
        if self.critics < 1:
            raise SettingsError(f"model.critics={self.critics} must be at least 1.")
        check_initial_std(self.initial_std)
        if self.critic_sizes and min(self.critic_sizes) < 1:
            raise SettingsError(f"model.critic_sizes={self.critic_sizes} needs numbers of at least 1.")
        if self.batch_renorm and (self.layer_norm or self.policy != "squashed"):
            raise SettingsError(
                f"model.batch_renorm normalizes all layers of a squashed policy and its critics, but "
                f"model.layer_norm={self.layer_norm} and model.policy={self.policy}. Use --model.no-layer-norm and "
                "--model.policy squashed."
            )
