"""The settings of encoder and core, which models share, and other common parts of models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import gymnasium
import torch
from torch import Tensor, nn

from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError
from lockstep.models.base import ModelConfig
from lockstep.models.core import GRU, LSTM, Core, MinGRU, RecurrentCore
from lockstep.models.encoders import (
    IMAGE_ENCODERS,
    MLP,
    ObservationEncoder,
    SymbolNet,
    Trunk,
)
from lockstep.models.layers import Conv2d, Initialization, Linear
from lockstep.models.observations import ObservationLayout, observed_by_policies
from lockstep.models.popart import unused_task
from lockstep.models.resnet import ImpalaResNet
from lockstep.models.transformer import Transformer

_NO_DENSE = -1
"""The dense_size of encoders without a dense layer."""
_SYMBOLS = 11
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32, "portable": torch.float32}


def previous_features(
    encode: Callable[[Tensor], Tensor], prev_action: Tensor | None, prev_reward: Tensor | None, start: Tensor
) -> Tensor:
    """Extra features of the previous step: the encoded action and the reward, [T, B, E + 1], 0 at starts."""
    assert prev_action is not None and prev_reward is not None
    extra = torch.cat([encode(prev_action), prev_reward.unsqueeze(-1)], -1)
    return extra.masked_fill(start.unsqueeze(-1), 0.0)


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


EncoderName = Literal["auto", "mlp", "nature", "dopamine", "convnet_simple", "der", "impala", "minatar", "symbols"]


@dataclass(frozen=True)
class TrunkConfig(ModelConfig):
    """Encoder and core, chosen by name. Subclass a model's config to replace its encoder, or ModelConfig to replace the
    whole model."""

    encoder: EncoderName = "auto"
    """Network for images: nature is small and fast. dopamine is nature with padded convolutions, which keep more places
    and cost more. convnet_simple, Sample Factory's, has wider and coarser last features for larger images. der, of
    data-efficient Rainbow, has two coarse convolutions for few samples, and costs a fifth of nature. impala is a deep
    residual network that learns more from each sample and costs about eight times as much. minatar has one convolution,
    for grids of 10x10 cells. mlp flattens images. symbols is for grids of symbols from 0 to 10, such as MiniGrid's, and
    turns each symbol into a separate input. auto takes nature, or impala below 36x36 pixels. Vectors always pass
    through an MLP."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Layers of the MLP. More or wider layers fit harder functions, learn less stably and cost time."""
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    """Nonlinearity of the MLP. tanh is safer for on-policy control; relu and elu suit wide layers."""
    core_size: int = 256
    """Hidden units of the core. More remember more and cost time at every step."""
    core_memory: int = 32
    """Earlier steps to which each step of a transformer attends. More remember longer and cost time at every step;
    fewer learn faster if only recent steps matter."""
    core_layers: int = 1
    """Layers of a transformer. More reach further back and combine more, but are harder to train."""
    core_heads: int = 4
    """Attention heads of each layer of a transformer. More attend to more steps separately, with fewer numbers for
    each."""
    previous_action_reward: bool = False
    """Show the model the previous action and reward. On helps if the agent must remember or sees only a part of the
    state."""
    initialization: Literal["auto", Initialization, "fixup"] = "auto"
    """Initial weights. orthogonal applies to all layers. impala draws convolutions from LeCun's normal distribution,
    like Cleanba. fixup, for the impala encoder only, begins every residual block as the identity, so that deep networks
    train without normalization. pytorch draws the weights and biases of an image's layers uniformly up to 1/√inputs,
    and glorot the weights up to √(6 / (inputs + outputs)), also in a Q-network's head. Features begin several times
    smaller with both than with orthogonal. auto takes impala for the impala encoder and orthogonal otherwise."""
    channels: tuple[int, ...] = (16, 32, 32)
    """Channels of the impala encoder's sections. Wider learns more per sample, at quadratic cost."""
    dense_size: int = 0
    """Number of features of an encoded image; 0 means 128 for minatar, 256 for impala, no dense layer for der, and 512
    for the others. More fit harder functions and cost time. -1 leaves out the dense layer, so that the features are the
    last convolution's output, as in Rainbow, whose streams follow it."""

    later: ClassVar[frozenset[str]] = frozenset({"core_memory", "core_layers", "core_heads"})
    needs: ClassVar[tuple[Need, ...]] = (
        Need(("core_size",), ("model.core",), ("gru", "lstm", "mingru", "transformer")),
        Need(("core_memory", "core_layers", "core_heads"), ("model.core",), ("transformer",)),
        Need(("channels",), ("model.encoder",), ("auto", "impala")),
        Need(("dense_size", "initialization"), ("model.encoder",), ("auto", "impala", *IMAGE_ENCODERS)),
    )

    @property
    def uses_previous(self) -> bool:
        return self.previous_action_reward

    def policy_space(self, observation_space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
        """The space of the policy's observations: all entries except PopArt's task."""
        return observed_by_policies(super().policy_space(observation_space))

    @property
    def normalizes_layers(self) -> bool:
        """Whether every layer of the encoder is normalized before its activation."""
        return False

    @property
    def own_encoder(self) -> bool:
        """Whether a subclass builds the encoder, so that the settings of encoders say nothing about it."""
        return type(self).build_encoder is not TrunkConfig.build_encoder

    def build_encoder(
        self, observation_space: gymnasium.Space[Any], *, dtype: torch.dtype, normalize: bool, clip: float
    ) -> nn.Module:
        """The encoder, a module that maps observations [T, B, ...] to features [T, B, out_features]. Override this to
        use your own. It is called twice for separate networks."""

        def image_encoder(shape: tuple[int, int, int]) -> nn.Module:
            name: EncoderName = self.encoder
            if name == "auto":
                name = "nature" if min(shape[1:]) >= IMAGE_ENCODERS["nature"].smallest else "impala"
            initialization = self.initialization
            if initialization == "auto":
                initialization = "impala" if name == "impala" else "orthogonal"
            if name == "impala":
                if self.normalizes_layers:
                    raise SettingsError(
                        f"model.encoder={self.encoder} is the residual network impala for images of {shape[1]}x"
                        f"{shape[2]} pixels, which model.layer_norm cannot normalize. Use another encoder, such as "
                        "--model.encoder minatar, or --model.no-layer-norm."
                    )
                if self.dense_size == _NO_DENSE:
                    raise SettingsError(
                        f"model.dense_size={self.dense_size} leaves out the dense layer, but images of {shape[1]}x"
                        f"{shape[2]} pixels take the encoder impala, which has one. Use --model.dense-size 0, or "
                        "another encoder."
                    )
                return ImpalaResNet(shape, self.channels, self.dense_size or 256, initialization)
            if initialization == "fixup":
                raise _no_fixup(f"images of {shape[1]}x{shape[2]} pixels take the encoder {name}")
            if name == "symbols":
                return SymbolNet(shape, _SYMBOLS, self._mlp)
            dense_size = 0 if self.dense_size == _NO_DENSE else self.dense_size or None
            return IMAGE_ENCODERS[name](shape, dense_size, initialization, self.normalizes_layers)

        return ObservationEncoder(
            ObservationLayout.of(observation_space),
            None if self.encoder == "mlp" else image_encoder,
            self.build_vector_encoder,
            dtype=dtype,
            normalize=normalize,
            clip=clip,
        )

    def check(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Raise SettingsError for an image encoder, or its initialization, without images."""
        images = ObservationLayout.of(observation_space).images
        if not images and self.initialization == "fixup":
            raise _no_fixup(f"{observation_space} has no images")
        if not images and self.encoder not in ("auto", "mlp"):
            raise SettingsError(
                f"model.encoder={self.encoder} needs images, which are uint8 with three dimensions [C, H, W], but "
                f"{observation_space} has none. Use --model.encoder auto, or add images."
            )

    def warnings(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> list[str]:
        layout, found = ObservationLayout.of(observation_space), []
        images = [(key, shape, "") for key, shape in layout.images if self.encoder == "mlp"]
        remedy = "Turn it into uint8 (gymnasium.wrappers.TransformObservation) and "
        flattened = [*images, *((key, shape, remedy) for key, shape in layout.flattened)]
        for key, shape, turned in () if self.own_encoder else flattened:
            advice = f"{turned}use --model.encoder auto for a convolutional network."
            found.append(
                f"The observation{f' {key!r}' if key else ''} is shaped like an image, {list(shape)}, but "
                f"{'is not uint8' if turned else 'the encoder is mlp'}: it is flattened and passes through an MLP. "
                f"{advice[0].upper()}{advice[1:]}"
            )
        if warning := unused_task(observation_space, self.value_normalization):
            found.append(warning)
        return found + self._unused_layers(layout)

    def _unused_layers(self, layout: ObservationLayout) -> list[str]:
        """Sentences about settings that differ from the default, for layers that these observations do not need."""
        if self.own_encoder:
            return []  # it may use them all
        idle, why = (), "images alone"
        if not layout.images and self.encoder == "auto":
            idle, why = ("dense_size", "initialization", "channels"), "not images"
        elif not layout.vectors and self.encoder not in ("mlp", "symbols"):
            idle = ("hidden_sizes", "activation")
        return [
            f"--model.{name.replace('_', '-')} has no effect, because the observations are {why}."
            for name in idle
            if getattr(self, name) != getattr(TrunkConfig, name)
        ]

    def build_core(self, in_features: int) -> Core | None:
        """The core after the encoder; None without one. Override this to use your own, with any `core` except none, and
        set its size by core_size."""
        if self.core == "transformer":
            sizes = {"memory": self.core_memory, "layers": self.core_layers, "heads": self.core_heads}
            return Transformer(in_features, self.core_size, **sizes)
        cores = {"gru": GRU, "lstm": LSTM, "mingru": MinGRU}
        return None if self.core == "none" else cores[self.core](in_features, self.core_size)

    def build_vector_encoder(self, size: int) -> nn.Module:
        """The encoder of all vectors, concatenated: fp32 [T, B, size] -> [T, B, out_features]."""
        return self._mlp(size)

    def _mlp(self, size: int) -> MLP:
        return MLP(size, self.hidden_sizes, self.activation, self.normalizes_layers)

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        sizes = {"hidden_sizes": self.hidden_sizes, "channels": self.channels}
        sizes |= {name: (getattr(self, name),) for name in ("core_size", "core_memory", "core_layers", "core_heads")}
        for name, values in sizes.items():
            if not values or min(values) < 1:
                raise SettingsError(f"model.{name}={getattr(self, name)} needs numbers of at least 1.")
        if self.initialization == "fixup" and self.encoder not in ("auto", "impala"):
            raise _no_fixup(f"model.encoder={self.encoder}")
        if self.dense_size < _NO_DENSE:
            raise SettingsError(
                f"model.dense_size={self.dense_size} must be {_NO_DENSE} (no dense layer), 0 (the encoder's own size) "
                "or more."
            )
        if self.core == "transformer" and self.core_size % (2 * self.core_heads):
            raise SettingsError(
                f"model.core_size={self.core_size} must be a multiple of twice model.core_heads={self.core_heads}, "
                "since each head of a transformer takes an even share of it."
            )


def _no_fixup(why: str) -> SettingsError:
    return SettingsError(
        f"model.initialization=fixup is for the residual network impala, but {why}. Use --model.encoder impala with "
        "images, or --model.initialization auto."
    )
