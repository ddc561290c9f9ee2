"""Converts models to tables of layers for kernels (lockstep.kernels.dense), and observations to rows of numbers.

Shape legend: T time, B environments, L layers, D numbers of an observation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from lockstep.kernels import network as networks
from lockstep.kernels.dense import BRIGHTEST, COLUMNS, ELU, KERNEL, NO_IMAGE, NONE, NORM, RELU, SOURCE, TANH
from lockstep.kernels.patches import places as places_of
from lockstep.kernels.q_networks import QNetwork
from lockstep.kernels.recurrent import GRU, LSTM
from lockstep.models import core as recurrent
from lockstep.models.actor_critic import ActorCritic
from lockstep.models.base import PolicyModel
from lockstep.models.encoders import ConvNet, ObservationEncoder
from lockstep.models.layers import ChannelNorm, LayerNorm, PixelConv2d
from lockstep.models.mlps import EPS, MLPs
from lockstep.models.observations import entry
from lockstep.models.parameters import FlatParameters, Places
from lockstep.models.policy import StandardModel
from lockstep.models.q import ImplicitQHead, NoisyLinear, QModel, midpoints

ACTIVATIONS = {"tanh": TANH, "relu": RELU, "elu": ELU}
"""Numbers of activations, by name."""


def encoder_of(model: PolicyModel) -> ObservationEncoder:
    """The encoder that sees everything that the model sees: that of a policy, a value or a Q-network."""
    if isinstance(model, StandardModel):
        encoder = model.trunks[-1].encoder
    else:
        assert isinstance(model, (QModel, ActorCritic))
        part = (
            model.trunk if isinstance(model, QModel) else getattr(model, "critics", model.actor)
        )  # a copy for acting has no critics
        encoder = part.encoder
    assert isinstance(encoder, ObservationEncoder)
    return encoder


def encoder_layers(model: nn.Module, path: str) -> Iterator[tuple[str, int]]:
    """The names of an encoder's layers among the model's modules, with their activations."""
    modules = dict(model.named_modules())
    image = modules.get(f"{path}.images.0")
    if isinstance(image, ConvNet):
        names = [f"{path}.images.0.convolutions.{place}" for place in range(len(image.convolutions))]
        names += [f"{path}.images.0.dense"] if image.dense is not None else []
        activation, norms = ACTIVATIONS[image.activation_name], f"{path}.images.0.norms"
    else:
        names = [name for name in modules if name.startswith(f"{path}.vectors.layers.")]
        activation = ACTIVATIONS[modules[f"{path}.vectors"].activation_name]  # type: ignore[index]
        norms = f"{path}.vectors.norms"
    for place, name in enumerate(names):
        if norms in modules:
            yield name, NONE
            yield f"{norms}.{place}", activation
        else:
            yield name, activation


def layer_row(modules: Mapping[str, nn.Module], name: str, activation: int, source: int, flat: Places) -> list[int]:
    """A layer's row in the table of lockstep.kernels.dense."""
    module, places = modules[name], [flat.offset(f"{name}.weight"), flat.offset(f"{name}.bias")]
    if isinstance(module, LayerNorm):
        size = module.weight.shape[0]
        outputs = math.prod(_image_before(modules, _after(name))) if isinstance(module, ChannelNorm) else size
        return [*places, size, outputs, activation, source, NORM, *_of_norm(module.eps)]
    if not isinstance(module, nn.Conv2d):
        assert isinstance(module, (nn.Linear, NoisyLinear))
        outputs, inputs = module.weight.shape
        return [*places, inputs, outputs, activation, source, 0, *NO_IMAGE]
    channels, height, width = _image_before(modules, name)
    kernel, stride = module.kernel_size[0], module.stride[0]
    patch = channels * kernel * kernel
    outputs = module.out_channels * places_of(height, width, kernel, stride)
    block = module.blocks_of(height, width) if isinstance(module, PixelConv2d) else 1
    return [*places, patch, outputs, activation, source, 0, kernel, stride, channels, height, width, block, 1]


def _of_norm(eps: float) -> tuple[int, ...]:
    """The last columns of a row for a normalization layer."""
    return (*NO_IMAGE[:-1], round(1 / eps))


def _after(norm: str) -> str:
    """The name that the convolution after a normalized convolution would have."""
    path, _, place = norm.rpartition(".norms.")
    return f"{path}.convolutions.{int(place) + 1}"


def _image_before(modules: Mapping[str, nn.Module], name: str) -> tuple[int, int, int]:
    """The shape [C, H, W] of the input of a convolution."""
    (path, _, last), encoder = name.rpartition("."), modules[name.partition(".images.")[0]]
    assert isinstance(encoder, ObservationEncoder)
    (_, (channels, height, width)), *_ = encoder.layout.images
    for place in range(int(last)):
        before = modules[f"{path}.{place}"]
        assert isinstance(before, nn.Conv2d)
        kernel, stride = before.kernel_size[0], before.stride[0]
        channels, height, width = before.out_channels, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return channels, height, width


def _rows(model: nn.Module, layers: Iterable[tuple[str, int]], flat: Places) -> np.ndarray:
    """The table of consecutive layers, given by name and activation: int64 [L, 14]."""
    modules, rows = dict(model.named_modules()), list[list[int]]()
    for name, activation in layers:
        rows.append(layer_row(modules, name, activation, len(rows) - 1, flat))
    return np.array(rows, np.int64)


def core_layers(modules: Mapping[str, nn.Module], ends: list[int], first: int, flat: Places) -> list[list[int]]:
    """The rows of each trunk's core in the form of lockstep.kernels.recurrent_network: first the rows of all
    projections, then those of the cores.

    Args:
        ends: the rows of the encoders' last layers.
        first: the number of rows before these.
    """
    found = [_rows_of_core(modules, f"trunks.{trunk}.core", end, first + trunk, flat) for trunk, end in enumerate(ends)]
    return [projection for projection, _ in found] + [core for _, core in found]


def _rows_of_core(
    modules: Mapping[str, nn.Module], name: str, end: int, projection: int, flat: Places
) -> tuple[list[int], list[int]]:
    """The rows of a core's projection, whose input is row `end`, and of the core, whose input is row `projection`."""
    core = modules[name]
    assert isinstance(core, recurrent.RecurrentCore)
    outputs, inputs = core.weight_input.shape
    size, kind = core.out_features, LSTM if isinstance(core, recurrent.LSTM) else GRU
    into = [flat.offset(f"{name}.weight_input"), flat.offset(f"{name}.bias_input")]
    hidden = [flat.offset(f"{name}.weight_hidden"), flat.offset(f"{name}.bias_hidden")]
    return [*into, inputs, outputs, NONE, end, 0, *NO_IMAGE], [*hidden, size, size, kind, projection, 0, *NO_IMAGE]


def q_layers(model: QModel, flat: FlatParameters) -> np.ndarray:
    """The table of a Q-network with one linear layer after its encoder, int64 [L, 14]."""
    return _rows(model, (*encoder_layers(model, "trunk.encoder"), ("head.advantage", NONE)), flat)


def q_network(model: QModel, flat: FlatParameters) -> QNetwork:
    """The layout of a Q-network's parameters."""
    modules, head = dict(model.named_modules()), model.head
    implicit = isinstance(head, ImplicitQHead)
    path, fractions = "head.head" if implicit else "head", np.zeros(0, np.float32)
    if model.quantiles:
        fractions = head.midpoints.numpy() if implicit else midpoints(head.numbers).numpy()

    def stream(name: str) -> list[tuple[str, int]]:
        if not isinstance(modules.get(name), nn.Sequential):
            return [(name, NONE)] if name in modules else []
        return [(f"{name}.0", RELU), (f"{name}.2", NONE)]

    noisy = []
    for name, module in modules.items():
        if isinstance(module, NoisyLinear):
            places = [flat.offset(f"{name}.{part}") for part in ("weight", "bias", "weight_sigma", "bias_sigma")]
            noisy.append([*places, module.weight.shape[1], module.weight.shape[0]])
    return QNetwork(
        of_whole_pixels(_rows(model, encoder_layers(model, "trunk.encoder"), flat), encoder_of(model)),
        _rows(model, stream(f"{path}.advantage"), flat),
        _rows(model, stream(f"{path}.value"), flat).reshape(-1, COLUMNS),
        np.array(noisy, np.int64).reshape(-1, 6),
        _rows(model, [("head.embedding", RELU)] if implicit else [], flat).reshape(-1, COLUMNS),
        head.multiples.numpy() if implicit else np.zeros(0, np.float32),
        np.zeros(0, np.float32) if model.atoms is None else model.atoms.numpy(),
        fractions,
    )


def core_of_q(model: QModel, flat: FlatParameters) -> np.ndarray:
    """The table of a Q-network's core, int64 [2, 14]: its projection and the core (lockstep.kernels.recurrent_q)."""
    return np.array(_rows_of_core(dict(model.named_modules()), "trunk.core", -1, 0, flat), np.int64)


def mlp_layers(layers: nn.Module, name: str, flat: FlatParameters, first: int = 0) -> np.ndarray:
    """The table of perceptrons' layers (MLPs), one perceptron after the other: see lockstep.kernels.dense.

    Args:
        first: the first column of x that they read.
    """
    assert isinstance(layers, MLPs)
    rows: list[list[int]] = []
    last = len(layers.weights) - 1
    for network in range(len(layers.weights[0])):

        def place(part: str, size: int, network: int = network) -> int:
            return flat.offset(f"{name}.{part}") + network * size

        for layer, weight in enumerate(layers.weights):
            _, into, out = weight.shape
            places = [place(f"weights.{layer}", into * out), place(f"biases.{layer}", out)]
            normalized = layers.layer_norm and layer == 0
            activation = NONE if normalized or layer == last else ACTIVATIONS[layers.activation]
            rows.append([*places, into, out, activation, len(rows) - 1 if layer else -1 - first, 1, *NO_IMAGE])
            if normalized:
                places = [place("gain", out), place("shift", out)]
                rows.append([*places, out, out, TANH, len(rows) - 1, NORM, *_of_norm(EPS)])
    return np.array(rows, np.int64)


def normalizes(encoder: ObservationEncoder) -> bool:
    """Whether observations are normalized. Images never are."""
    return encoder.normalize and not encoder.layout.images


def brightness(encoder: ObservationEncoder, *, whole: bool = False) -> int:
    """The divisor of observations.

    Args:
        whole: whether convolutions divide their weights instead: see of_whole_pixels.
    """
    divided = encoder.layout.images and not (whole and encoder.images is not None)
    return encoder.layout.brightest[0] if divided else 1


def of_whole_pixels(layers: np.ndarray, encoder: ObservationEncoder) -> np.ndarray:
    """A table, int64 [L, 14], whose convolutions of x divide their weights instead of the pixels."""
    layers[(layers[:, KERNEL] > 0) & (layers[:, SOURCE] < 0), BRIGHTEST] = brightness(encoder)
    return layers


def inputs_of(encoder: ObservationEncoder) -> int:
    """D: the numbers that an encoder's layers see of an observation."""
    images = encoder.layout.images
    return math.prod(images[0][1]) if images else sum(size for _, size in encoder.layout.vectors)


def observed(
    encoder: ObservationEncoder, obs: Any, *, whole: bool = False, out: np.ndarray | None = None
) -> np.ndarray:
    """The inputs of an encoder's layers for observations [T, B, ...]: float32 [T * B, D].

    Args:
        whole: whether pixels are left undivided, since weights are divided: see of_whole_pixels.
        out: where to write them, float32 [..., D].
    """
    if encoder.layout.images:
        pixels = rows_of(entry(obs, encoder.layout.images[0][0]).flatten(2))
        out = np.empty(pixels.shape, np.float32) if out is None else out
        np.copyto(out, pixels.reshape(out.shape))
        if (brightest := brightness(encoder, whole=whole)) != 1:
            out /= np.float32(brightest)
        return out
    x = rows_of(encoder.layout.vector(obs))
    if encoder.normalize:
        given, x = x, np.empty_like(x)
        networks.normalize(given, encoder.mean.numpy(), encoder.std.numpy(), np.float32(encoder.clip), x)
    if out is None:
        return x
    np.copyto(out, x.reshape(out.shape))
    return out


def rows_of(x: Tensor) -> np.ndarray:
    """[..., D] -> a contiguous array [N, D]"""
    return np.ascontiguousarray(x.detach().numpy()).reshape(-1, x.shape[-1])
