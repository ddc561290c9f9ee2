"""The standard model: encoder, core and heads, for every supported space."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import gymnasium
import torch
from torch import Tensor, nn

from lockstep.config.settings import SettingsError
from lockstep.models.action_spaces import make_distribution
from lockstep.models.asymmetric import AsymmetricConfig
from lockstep.models.base import ModelConfig, ModelOutput, PolicyModel
from lockstep.models.core import GRU, LSTM, RecurrentCore
from lockstep.models.distributions import Distribution
from lockstep.models.encoders import (
    _NATURE_MINIMUM,
    MLP,
    DataEfficientCNN,
    ImpalaResNet,
    Initialization,
    MinAtarCNN,
    NatureCNN,
    ObservationEncoder,
    SimpleConvNet,
    SymbolNet,
    take_observation_statistics,
)
from lockstep.models.gaussian import bounded_log_std, check_initial_std
from lockstep.models.layers import Conv2d, Linear, initialize_orthogonal, reproducible_initialization
from lockstep.models.observations import ObservationLayout, allowed_actions

_SYMBOLS = 11
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32, "portable": torch.float32}


class PolicyHead(nn.Module):
    """One linear layer that maps features to the parameters of the action distribution, in fp32.

    With std "free" the log standard deviations are separate parameters, the same in every state.
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


class Trunk(nn.Module):
    """An encoder and an optional core that computes in dtype."""

    def __init__(
        self,
        encoder: nn.Module,
        core: type[RecurrentCore] | None = None,
        core_size: int = 256,
        *,
        extra_features: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.encoder, self.dtype = encoder, dtype
        self.out_features = int(encoder.out_features) + extra_features  # type: ignore[arg-type]
        self.core = core(self.out_features, core_size) if core else None
        if self.core:
            self.out_features = core_size
        self.state_size = self.core.state_size if self.core else 0

    def forward(self, obs: Any, start: Tensor, state: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Observations [T, B, ...], extra features [T, B, E] -> features [T, B, F], state [B, K]"""
        features = self.encoder(obs).to(self.dtype)
        if extra is not None:
            features = torch.cat([features, extra.to(self.dtype)], -1)
        return (features, state) if self.core is None else self.core(features, start, state)


def previous_features(
    encode: Callable[[Tensor], Tensor], prev_action: Tensor | None, prev_reward: Tensor | None, start: Tensor
) -> Tensor:
    """Extra features of the previous step: the encoded action and the reward, [T, B, E + 1], 0 at starts."""
    assert prev_action is not None and prev_reward is not None
    extra = torch.cat([encode(prev_action), prev_reward.unsqueeze(-1)], -1)
    return extra.masked_fill(start.unsqueeze(-1), 0.0)


class StandardModel(PolicyModel):
    """One trunk for policy and value, or one for each, followed by the heads.

    Args:
        policy_trunk: features of the policy, and of the value if value_trunk is None.
        value_trunk: features of the value, if separate.
        distribution: of the actions.
        std, initial_std: see PolicyHead.
        uses_previous: whether the trunks take the previous action and reward as extra features.
        masked: whether observations have an action mask.
        policy_columns: which numbers of vectors the policy observes, if the value observes more.
    """

    policy_columns: list[int] | None = None

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
    ):
        super().__init__()
        self.distribution, self.policy_columns = distribution, policy_columns
        self._encode = distribution.encode
        self.uses_previous, self.masked = uses_previous, masked
        self.trunks = nn.ModuleList([policy_trunk] if value_trunk is None else [policy_trunk, value_trunk])
        self.state_sizes = [trunk.state_size for trunk in (policy_trunk, value_trunk) if trunk]
        self.state_size = sum(self.state_sizes)
        self.policy_head = PolicyHead(policy_trunk.out_features, distribution, std, initial_std)
        self.value_head: ValueHead | None = ValueHead((value_trunk or policy_trunk).out_features)

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        extra = previous_features(self._encode, prev_action, prev_reward, start) if self.uses_previous else None
        allowed = allowed_actions(obs) if self.masked else None
        states = state.split(self.state_sizes, -1)
        results = [trunk(obs, start, s, extra) for trunk, s in zip(self.trunks, states, strict=True)]
        params, head = self.policy_head(results[0][0], allowed), self.value_head
        value = params.new_zeros(params.shape[:2]) if head is None else head(results[-1][0])
        if self.state_size:
            state = torch.cat([s for _, s in results], -1) if len(results) > 1 else results[0][1]
        return ModelOutput(params, value), state

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        take_observation_statistics(self.trunks[0], mean, std, self.policy_columns)
        take_observation_statistics(self.trunks[1:], mean, std)

    def for_acting(self) -> StandardModel:
        return acting_copy(self)

    def for_playing(self) -> StandardModel:
        """Without the value if that observes more than the policy."""
        playing = self.for_acting()
        if self.policy_columns is not None:
            playing.trunks, playing.value_head, playing.has_value = playing.trunks[:1], None, False
            playing.state_sizes = playing.state_sizes[:1]
            playing.state_size = sum(playing.state_sizes)
        return playing


ModelT = TypeVar("ModelT", bound=nn.Module)


def acting_copy(model: ModelT) -> ModelT:
    """A copy for inference only. Layers that cast their weights to bf16 at each use store them in bf16."""
    acting = copy.deepcopy(model).requires_grad_(False)
    acting.zero_grad(set_to_none=True)
    for trunk in acting.modules():
        for module in trunk.modules() if isinstance(trunk, Trunk) else ():
            if isinstance(module, (Linear, Conv2d, RecurrentCore)):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(trunk.dtype)  # type: ignore[arg-type]
    return acting


EncoderName = Literal["auto", "mlp", "nature", "convnet_simple", "der", "impala", "minatar", "symbols"]
KERNEL_ENCODERS = ("auto", "mlp", "minatar")
"""Encoders that kernels compute: auto, if there are no images."""


@dataclass(frozen=True)
class TrunkConfig(ModelConfig):
    """Encoder and core, chosen by name. Subclass a model's config to replace its encoder, or ModelConfig to replace the
    whole model."""

    encoder: EncoderName = "auto"
    """Network for images: nature is small and fast; convnet_simple, Sample Factory's, has wider and coarser last
    features for larger images; der, of data-efficient Rainbow, has two coarse convolutions, for few samples, and costs
    a fifth of nature; impala is a deep residual network that learns more from each sample and costs about eight times
    as much; minatar has one convolution, for grids of 10x10 cells. mlp flattens images; symbols does it with grids of
    symbols from 0 to 10, such as MiniGrid's, each of which becomes a separate input. auto takes nature, or impala below
    36x36 pixels. Vectors always pass through an MLP."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Layers of the MLP. More or wider ones fit harder functions, learn less stably, and cost time."""
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    """Nonlinearity of the MLP. tanh is safer for on-policy control; relu and elu suit wide layers."""
    core_size: int = 256
    """Hidden units of the core. More remember more, and cost more per step."""
    previous_action_reward: bool = False
    """Show the model the previous action and reward. Helps with memory and partial observation."""
    initialization: Literal["auto", "orthogonal", "impala"] = "auto"
    """orthogonal for all layers; impala draws convolutions from LeCun's normal distribution, like Cleanba; auto
    takes impala for the impala encoder and orthogonal otherwise."""
    channels: tuple[int, ...] = (16, 32, 32)
    """Channels of the impala encoder's sections. Wider learns more per sample, at quadratic cost."""
    dense_size: int = 0
    """Number of features of an encoded image; 0 takes 128 for minatar, 256 for impala, no dense layer for
    der, and 512 for the others. More fit more, and cost more."""

    @property
    def uses_previous(self) -> bool:
        return self.previous_action_reward

    def build_encoder(
        self, observation_space: gymnasium.Space[Any], *, dtype: torch.dtype, normalize: bool, clip: float
    ) -> nn.Module:
        """The encoder: a module from observations [T, B, ...] to features [T, B, out_features]. Override to use your
        own. It is called twice for separate networks."""

        def image_encoder(shape: tuple[int, int, int]) -> nn.Module:
            auto: Literal["nature", "impala"] = "nature" if min(shape[1:]) >= _NATURE_MINIMUM else "impala"
            name = auto if self.encoder == "auto" else self.encoder
            initialization: Initialization
            if self.initialization == "auto":
                initialization = "impala" if name == "impala" else "orthogonal"
            else:
                initialization = self.initialization
            if name == "symbols":
                return SymbolNet(shape, _SYMBOLS, lambda size: MLP(size, self.hidden_sizes, self.activation))
            if name == "minatar":
                return MinAtarCNN(shape, self.dense_size or 128, initialization)
            if name == "nature":
                return NatureCNN(shape, self.dense_size or 512, initialization)
            if name == "der":
                return DataEfficientCNN(shape, self.dense_size, initialization)
            if name == "convnet_simple":
                return SimpleConvNet(shape, self.dense_size or 512, initialization)
            return ImpalaResNet(shape, self.channels, self.dense_size or 256, initialization)

        return ObservationEncoder(
            ObservationLayout.of(observation_space),
            None if self.encoder == "mlp" else image_encoder,
            self.build_vector_encoder,
            dtype=dtype,
            normalize=normalize,
            clip=clip,
        )

    def check(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Raise SettingsError for an image encoder without images."""
        if not ObservationLayout.of(observation_space).images and self.encoder not in ("auto", "mlp"):
            raise SettingsError(
                f"model.encoder={self.encoder} needs images, which are uint8 with three dimensions [C, H, W], but "
                f"{observation_space} has none. Use --model.encoder auto, or add images."
            )

    def warnings(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> list[str]:
        layout, found = ObservationLayout.of(observation_space), []
        images = [(key, shape, "") for key, shape in layout.images if self.encoder == "mlp"]
        remedy = "Turn it into uint8 (gymnasium.wrappers.TransformObservation) and "
        for key, shape, turned in [*images, *((key, shape, remedy) for key, shape in layout.flattened)]:
            advice = f"{turned}use --model.encoder auto for a convolutional network."
            found.append(
                f"The observation{f' {key!r}' if key else ''} is shaped like an image, {list(shape)}, but "
                f"{'is not uint8' if turned else 'the encoder is mlp'}: it is flattened and passes through an MLP. "
                f"{advice[0].upper()}{advice[1:]}"
            )
        return found

    def build_vector_encoder(self, size: int) -> nn.Module:
        """The encoder of all vectors, concatenated: fp32 [T, B, size] -> [T, B, out_features]."""
        return MLP(size, self.hidden_sizes, self.activation)

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        sizes = {"hidden_sizes": self.hidden_sizes, "channels": self.channels, "core_size": (self.core_size,)}
        for name, values in sizes.items():
            if not values or min(values) < 1:
                raise SettingsError(f"model.{name}={getattr(self, name)} needs numbers of at least 1.")
        if self.dense_size < 0:
            raise SettingsError(f"model.dense_size={self.dense_size} must be 0 (the encoder's own size) or more.")


@dataclass(frozen=True)
class StandardModelConfig(AsymmetricConfig, TrunkConfig):
    """A policy and a value: encoder and core chosen by name, and heads for the action space."""

    separate_value_network: bool = False
    """Give the value its own encoder and core. On keeps the value loss from disturbing the policy, off shares
    features, which images need."""
    std: Literal["free", "state"] = "free"
    """Deviation of continuous actions: free is one number per dimension, state a function of the observation."""
    squash: bool = False
    """Squash continuous actions into their bounds by tanh. Off clips them, as most PPO implementations do."""
    initial_std: float = 1.0
    """Deviation of continuous actions before learning, in their own units (with squash: before it); 0.01 to 5. Higher
    explores more. At 1, where the bounds are -1 and 1, they clip a third of all actions, so that larger ones seem as
    good."""

    later: ClassVar[frozenset[str]] = AsymmetricConfig.later | {"initial_std"}

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        super().validate()
        check_initial_std(self.initial_std)

    @property
    def has_kernels(self) -> bool:
        plain = self.core == "none" and not self.previous_action_reward and not self.squash
        plain = plain and not self.critic_only
        return type(self) is StandardModelConfig and plain and self.encoder in KERNEL_ENCODERS

    def check(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Raise SettingsError for an encoder of images where there are none, and for actions out of reach."""
        super().check(observation_space, action_space)
        make_distribution(action_space, squash=self.squash).check_start(self.initial_std)

    def warnings(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> list[str]:
        warning = make_distribution(action_space, squash=self.squash).warning_at_start(self.initial_std)
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
        core = {"none": None, "gru": GRU, "lstm": LSTM}[self.core]

        dtype = PRECISIONS[precision]

        def trunk(seen: gymnasium.Space[Any]) -> Trunk:
            encoder = self.build_encoder(seen, dtype=dtype, normalize=normalize_observations, clip=observation_clip)
            return Trunk(encoder, core, self.core_size, extra_features=extra, dtype=dtype)

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
            )
