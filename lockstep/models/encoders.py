"""Encoders, which map observations to feature vectors, and the trunk, which is an encoder and an optional core.

Shape legend: N = T * B samples, C H W channels, height and width of an image, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.settings import SettingsError
from lockstep.models.core import Core
from lockstep.models.layers import (
    ChannelNorm,
    Conv2d,
    Initialization,
    LayerNorm,
    Linear,
    PixelConv2d,
    flatten_places,
    initialize,
    initialize_orthogonal,
)
from lockstep.models.observations import ObservationLayout, entry, flatten_entry

Activation = Literal["relu", "elu"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": partial(F.relu, inplace=True),
    "elu": partial(F.elu, inplace=True),
}


class MLP(nn.Module):
    """Fully connected layers, each followed by the activation. With layer_norm, normalization precedes the
    activation."""

    def __init__(
        self,
        in_features: int,
        hidden_sizes: tuple[int, ...],
        activation: Literal["tanh", "relu", "elu"],
        layer_norm: bool = False,
    ):
        super().__init__()
        sizes = (in_features, *hidden_sizes)
        self.layers = nn.ModuleList(Linear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(map(LayerNorm, hidden_sizes)) if layer_norm else None
        self.activation_name = activation
        self.activation: Callable[[Tensor], Tensor] = {
            "tanh": torch.tanh,
            "relu": torch.relu,
            "elu": F.elu,
        }[activation]
        self.out_features = sizes[-1]
        for layer in self.layers:
            initialize_orthogonal(layer, math.sqrt(2))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., F]"""
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = self.activation(x if self.norms is None else self.norms[index](x))
        return x


def _smallest_image(layers: tuple[tuple[int, int, int], ...], padded: bool) -> int:
    size = 1
    for _, kernel, stride in () if padded else reversed(layers):
        size = (size - 1) * stride + kernel
    return size


def _padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """The zeros before and after a side of an image with which a convolution returns ⌈size / stride⌉ places, as with
    TensorFlow's padding SAME."""
    zeros = max(0, (math.ceil(size / stride) - 1) * stride + kernel - size)
    return zeros // 2, zeros - zeros // 2


class ConvNet(nn.Module):
    """Convolutions and a dense layer, each followed by the activation.

    Args:
        shape: [C, H, W] of an image.
        layers: channels, kernel size and stride of each convolution.
        dense_size: number of features. 0 leaves out the dense layer, so that the features are the last convolution's
            output.
        activation: the activation after every layer, as a name or a function, which may overwrite its argument.
        initialization: the initialization of all layers.
        layer_norm: whether every layer is normalized before its activation; convolutions over channels at each place.
        padded: whether images are padded with zeros, so that only strides make them smaller.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        layers: tuple[tuple[int, int, int], ...],
        dense_size: int,
        activation: Activation | Callable[[Tensor], Tensor],
        initialization: Initialization = "orthogonal",
        layer_norm: bool = False,
        padded: bool = False,
    ):
        super().__init__()
        channels, height, width = shape
        smallest = _smallest_image(layers, padded)
        if min(height, width) < smallest:
            raise SettingsError(
                f"This network does not accept images of {height}x{width} pixels: it needs at least "
                f"{smallest}x{smallest}. Use --model.encoder impala, which accepts any size."
            )
        self.convolutions = nn.ModuleList()
        self.paddings: list[tuple[int, ...]] = []
        """Zeros before and after each row, and above and below the image, of every convolution; () for none."""
        for index, (out_channels, kernel, stride) in enumerate(layers):
            convolution = PixelConv2d if index == 0 else Conv2d
            self.convolutions.append(convolution(channels, out_channels, kernel, stride=stride))
            padding = (*_padding(width, kernel, stride), *_padding(height, kernel, stride)) if padded else ()
            self.paddings.append(padding if any(padding) else ())
            height, width = height + sum(padding[2:]), width + sum(padding[:2])
            channels, height, width = out_channels, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.places = channels, height, width
        """The shape of the last convolution's output."""
        self.dense = Linear(channels * height * width, dense_size) if dense_size else None
        self.out_features = dense_size or channels * height * width
        self.activation_name = activation if isinstance(activation, str) else ""
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        norms: list[nn.Module] = [ChannelNorm(channels) for channels, _, _ in layers]
        norms += [LayerNorm(dense_size)] if dense_size else []
        self.norms = nn.ModuleList(norms) if layer_norm else None
        initialize(self, initialization)

    def forward(self, image: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, C, H, W] -> [N, F] in dtype"""
        first, *rest = self.convolutions
        x = self._activate(0, first(self._pad(0, image), dtype))
        for index, convolution in enumerate(rest, start=1):
            x = self._activate(index, convolution(self._pad(index, x)))
        return flatten_places(x) if self.dense is None else self._activate(-1, self.dense(flatten_places(x)))

    def _pad(self, layer: int, x: Tensor) -> Tensor:
        """Add a convolution's zeros, if any."""
        return F.pad(x, self.paddings[layer]) if self.paddings[layer] else x

    def _activate(self, layer: int, x: Tensor) -> Tensor:
        """Apply a layer's normalization, if any, and the activation."""
        return self.activation(x if self.norms is None else self.norms[layer](x))


@dataclass(frozen=True)
class ImageEncoder:
    """The settings of an image network. A call makes the network for the shape of an image."""

    layers: tuple[tuple[int, int, int], ...]
    """Channels, kernel size and stride of each convolution."""
    dense_size: int = 512
    """The default number of features; 0 for no dense layer."""
    activation: Activation = "relu"
    kernels: bool = False
    """Whether lockstep.kernels can compute the network in portable arithmetic."""
    costly: bool = True
    """Whether learning takes about a millisecond per sample."""
    padded: bool = False
    """Whether convolutions pad images with zeros, so that only strides make them smaller."""

    @property
    def smallest(self) -> int:
        """The smallest side of an image that the network accepts."""
        return _smallest_image(self.layers, self.padded)

    @property
    def strides(self) -> bool:
        """Whether the first convolution has a stride above 1."""
        return self.layers[0][2] > 1

    def __call__(
        self,
        shape: tuple[int, int, int],
        dense_size: int | None = None,
        initialization: Initialization = "orthogonal",
        layer_norm: bool = False,
    ) -> ConvNet:
        """The network for images [C, H, W]. The other arguments are those of ConvNet."""
        features = self.dense_size if dense_size is None else dense_size
        return ConvNet(shape, self.layers, features, self.activation, initialization, layer_norm, self.padded)


NatureCNN = ImageEncoder(((32, 8, 4), (64, 4, 2), (64, 3, 1)), kernels=True)
"""The network of Mnih et al. 2015: three convolutions and a dense layer."""
DopamineCNN = ImageEncoder(NatureCNN.layers, padded=True)
"""The network of Dopamine's JAX agents: that of Mnih et al. 2015 with padded convolutions."""
SimpleConvNet = ImageEncoder(((32, 8, 4), (64, 4, 2), (128, 3, 2)), activation="elu")
"""The image network of Petrenko et al. 2020 (arXiv:2006.11751), which Sample Factory calls convnet_simple."""
MinAtarCNN = ImageEncoder(((16, 3, 1),), 128, kernels=True, costly=False)
"""The network of Young and Tian 2019 (arXiv:1903.03176) for grids of 10x10 cells: a convolution, a dense layer."""
DataEfficientCNN = ImageEncoder(((32, 5, 5), (64, 5, 5)), 0, kernels=True, costly=False)
"""The network of van Hasselt et al. 2019 (arXiv:1906.05243, appendix) for few samples: two convolutions, which the
streams of the head follow directly."""
IMAGE_ENCODERS = {
    "nature": NatureCNN,
    "dopamine": DopamineCNN,
    "convnet_simple": SimpleConvNet,
    "minatar": MinAtarCNN,
    "der": DataEfficientCNN,
}
"""Networks by the names of lockstep.models.trunk.EncoderName. A new network needs a row here and its name there."""


class SymbolNet(nn.Module):
    """A network for grids whose numbers are symbols, such as MiniGrid's: each number becomes a one-hot vector of K
    inputs to an MLP.

    Args:
        shape: [C, H, W] of a grid.
        symbols: K. Larger numbers are treated as K - 1.
        dense: a function that makes the MLP for a given number of inputs.
    """

    def __init__(self, shape: tuple[int, int, int], symbols: int, dense: Callable[[int], MLP]):
        super().__init__()
        self.symbols = symbols
        self.dense = dense(math.prod(shape) * symbols)
        self.out_features = self.dense.out_features

    def forward(self, image: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, C, H, W] -> [N, F] in dtype"""
        number = image.clamp(max=self.symbols - 1).flatten(1).unsqueeze(-1)
        return self.dense((number == torch.arange(self.symbols, device=image.device)).flatten(1).to(dtype))


class ObservationEncoder(nn.Module):
    """Each image passes through its own CNN, and all vectors, concatenated, through one MLP. The features are
    concatenated.

    Images may instead be flattened into the MLP (image_encoder "mlp").
    """

    def __init__(
        self,
        layout: ObservationLayout,
        image_encoder: Callable[[tuple[int, int, int]], nn.Module] | None,
        vector_encoder: Callable[[int], nn.Module],
        *,
        dtype: torch.dtype = torch.float32,
        normalize: bool = False,
        clip: float = 10.0,
    ):
        super().__init__()
        self.layout, self.dtype, self.normalize, self.clip = layout, dtype, normalize, clip
        self.images = nn.ModuleList(image_encoder(shape) for _, shape in layout.images) if image_encoder else None
        for image, brightest in zip(self.images or (), layout.brightest, strict=False):
            for module in image.modules():
                if isinstance(module, PixelConv2d):
                    module.brightest = brightest
        pixels = 0 if image_encoder else sum(math.prod(shape) for _, shape in layout.images)
        size = layout.vector_size + pixels
        self.vectors = vector_encoder(size) if size else None
        parts = [*(self.images or ()), *([self.vectors] if self.vectors else [])]
        self.out_features = sum(int(part.out_features) for part in parts)  # type: ignore[arg-type]
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.zeros(layout.vector_size), persistent=False)
        self.register_buffer("std", torch.ones(layout.vector_size), persistent=False)

    def forward(self, obs: Any) -> Tensor:
        """[T, B, ...] -> [T, B, F] in dtype"""
        features = []
        for (key, _), encoder in zip(self.layout.images, self.images or (), strict=False):
            image = entry(obs, key)
            features.append(encoder(image.flatten(0, 1), self.dtype).view(*image.shape[:2], -1))
        if self.vectors is not None:
            features.append(self.vectors(self._vector(obs)))
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Use these statistics for normalization from now on."""
        self.mean.copy_(mean)
        self.std.copy_(std)

    def _vector(self, obs: Any) -> Tensor:
        parts = []
        if self.layout.vectors:
            vector = self.layout.vector(obs)
            if self.normalize:
                vector = ((vector - self.mean) / self.std).clamp(-self.clip, self.clip)
            parts.append(vector)
        if self.images is None:
            scaled = zip(self.layout.images, self.layout.brightest, strict=True)
            parts += [flatten_entry(entry(obs, key) / brightest) for (key, _), brightest in scaled]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(self.dtype)


def features_of(encoder: nn.Module) -> int:
    """The number F of an encoder's features, which users' encoders declare, too."""
    features = getattr(encoder, "out_features", None)
    if not isinstance(features, Integral):
        raise SettingsError(
            f"The encoder {type(encoder).__name__}, which build_encoder returned, needs an attribute out_features, the "
            f"number F of its features [T, B, F], but has {'none' if features is None else repr(features)}."
        )
    return int(features)


class Trunk(nn.Module):
    """An encoder and an optional core that computes in dtype.

    Args:
        encoder: the encoder, which has an attribute out_features.
        core: a function that makes the core for a given number of inputs, or returns None for no core.
        extra_features: the number of further inputs of the core.
    """

    def __init__(
        self,
        encoder: nn.Module,
        core: Callable[[int], Core | None] = lambda _: None,
        *,
        extra_features: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.encoder, self.dtype = encoder, dtype
        self._declared = features_of(encoder)
        self.out_features = self._declared + extra_features
        self.core = core(self.out_features)
        if self.core:
            self.out_features = self.core.out_features
        self.state_size = self.core.state_size if self.core else 0

    def forward(self, obs: Any, start: Tensor, state: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Observations [T, B, ...], extra features [T, B, E] -> features [T, B, F], state [B, K]"""
        features = self.encoder(obs).to(self.dtype)
        if features.shape[-1] != self._declared:
            raise SettingsError(
                f"The encoder {type(self.encoder).__name__} returned features {list(features.shape)}, but its "
                f"attribute out_features is {self._declared}. Features must be [T, B, out_features]."
            )
        if extra is not None:
            features = torch.cat([features, extra.to(self.dtype)], -1)
        return (features, state) if self.core is None else self.core(features, start, state)


def take_observation_statistics(model: nn.Module, mean: Tensor, std: Tensor, columns: list[int] | None = None) -> None:
    """Set the observation statistics of every encoder in a model: see PolicyModel.set_observation_statistics. If
    encoders only observe some of the numbers, columns are the indices of these."""
    if columns is not None:
        mean, std = mean[columns], std[columns]
    for module in model.modules():
        if module is not model and hasattr(module, "set_observation_statistics"):
            module.set_observation_statistics(mean, std)  # type: ignore[operator]
