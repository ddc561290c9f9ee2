"""Layers that compute in the precision of their input, and their initialization.

Weights are stored in fp32 and cast explicitly at each use. An acting copy stores them in bf16, so that the same forward
casts nothing. While learning, large weights are rounded once per gradient step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_LARGE = 750_000
"""Matrix products with at least this many multiplications use oneDNN."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types as wide as a row of a pixel block, by block size."""
Initialization = Literal["orthogonal", "impala", "pytorch", "glorot"]
"""The initial weights of networks for images: see model.initialization."""


class Rounded:
    """A copy of a parameter in a lower precision for one gradient step, and the memory for its gradient.

    Args:
        parameter: fp32. `cast` finds this copy through it.
        dtype: the type of the copy.
    """

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self._parameter = parameter
        self.value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self.place: Tensor | None = None
        """fp32: the memory into which the next backward pass writes its gradient, which saves a copy."""
        parameter.rounded = self  # type: ignore[attr-defined]

    def renew(self) -> None:
        """Round the current parameter."""
        self.value.copy_(self._parameter.detach())


class _Round(torch.autograd.Function):
    """The cast of a parameter that is already rounded. Its backward pass is that of an ordinary cast."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, rounded: Rounded) -> Tensor:
        ctx.rounded = rounded
        return rounded.value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (gradient,) = gradients
        place, ctx.rounded.place = ctx.rounded.place, None  # another use of the parameter adds to it
        return gradient.float() if place is None else place.copy_(gradient), None


def cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A layer's parameter in the precision of the layer's computation."""
    rounded: Rounded | None = getattr(parameter, "rounded", None)
    if rounded is None or rounded.value.dtype != dtype:
        return parameter.to(dtype)
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return rounded.value
    return _Round.apply(parameter, rounded)  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """nn.Linear in the precision of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, cast(self.weight, input.dtype), self.bias.to(input.dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I], [O, I], [O] -> [..., O], all in one precision."""
    if not onednn(x, x.numel() * len(weight)):
        return F.linear(x, weight, bias)
    return _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)  # type: ignore[union-attr]


def onednn(x: Tensor, multiplications: int) -> bool:
    """Whether oneDNN computes a product with x that has this many multiplications. For fp32 on CPUs, torch chooses MKL,
    which is half as fast on AMD CPUs, but a call of oneDNN has more overhead."""
    if multiplications.__class__ is not int or multiplications < _LARGE:  # exported models take any number of items
        return False
    if x.dtype != torch.float32 or x.device.type != "cpu" or not _AVAILABLE:
        return False
    return not (torch.compiler.is_compiling() or torch._C._is_tracing())  # exported models must also run without oneDNN


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[n, k], [m, k], [m] -> a @ b.T + bias [n, m], by oneDNN"""
    # oneDNN's fused relu saves no time, and turns NaN into 0.
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """x [n, I], weight [O, I], bias [O] -> x @ weight.T + bias [n, O], with oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, weight), grad = ctx.saved_tensors, gradients[0].contiguous()
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()) if of_x else None,
            product(grad.t(), x.t()) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


class Conv2d(nn.Conv2d):
    """nn.Conv2d in the precision of its input, channels last."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.bias is not None
        weight = self.weight.to(input.dtype, memory_format=torch.channels_last)
        return F.conv2d(input, weight, self.bias.to(input.dtype), self.stride, self.padding)


class PixelConv2d(nn.Conv2d):
    """The first convolution over pixels, which reads uint8 [N, C, H, W] and returns `dtype`, channels last.

    Pixels are whole numbers from 0 to 255, which bf16 represents exactly; the weights are divided by `brightest`
    instead. A kernel of 2s x 2s pixels with stride s becomes an equivalent 2 x 2 kernel with stride 1, over images
    whose s x s blocks of pixels are folded into channels (space-to-depth). This is much faster on CPUs and GPUs.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding)
        self.brightest = 255
        """The pixel value that becomes 1."""
        self.block = stride if stride in _WORDS and padding == 0 and kernel_size % stride == 0 else 1

    def blocks_of(self, height: int, width: int) -> int:
        """The side of the blocks of pixels that are folded in images of this size; 1 without folding."""
        return self.block if height % self.block == width % self.block == 0 else 1

    def forward(self, input: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        assert self.bias is not None
        image, block = input, self.blocks_of(*input.shape[-2:])
        # Compute in fp32 and round afterwards, also in an acting copy: both must use the same rounded weights.
        weight = self.weight / self.brightest
        stride, padding = self.stride, self.padding
        if block > 1:
            image, weight, stride = fold_pixels(image, block), fold_kernel(weight, block), 1
        else:
            image = channels_last(image)
        image = image.to(dtype, memory_format=torch.channels_last)
        weight = weight.to(dtype, memory_format=torch.channels_last)
        return F.conv2d(image, weight, self.bias.to(dtype), stride, padding)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm of the last dimension in the precision of its input, with Flax's ε."""

    def __init__(self, features: int) -> None:
        super().__init__(features, eps=1e-6)

    def forward(self, input: Tensor) -> Tensor:
        gain, shift = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, gain, shift, self.eps)


class ChannelNorm(LayerNorm):
    """LayerNorm over the channels of images [N, C, H, W] at each place. It is fastest with channels last."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def channels_last(image: Tensor) -> Tensor:
    """uint8 [N, C, H, W] in the memory format channels_last. Interleaving bytes first and converting them afterwards
    takes half as long as both at once."""
    return torch.stack(image.unbind(1), -1).permute(0, 3, 1, 2)


def flatten_places(x: Tensor) -> Tensor:
    """[N, C, H, W] -> [N, H * W * C], without a copy where channels are last already."""
    return x.permute(0, 2, 3, 1).flatten(1)


def fold_pixels(image: Tensor, block: int) -> Tensor:
    """uint8 [N, C, H, W] -> [N, C * block * block, H / block, W / block], channels last."""
    n, c, h, w = image.shape
    rows = image.reshape(n, c, h // block, block, w).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    # Copying whole rows, and then transposing each row of a block as one word, is 6 to 20 times as fast as copying
    # pixel by pixel.
    words = rows.view(n * (h // block), c * block, w).view(_WORDS[block])
    folded = words.transpose(1, 2).contiguous().view(torch.uint8)
    return folded.view(n, h // block, w // block, c * block * block).permute(0, 3, 1, 2)


def fold_kernel(weight: Tensor, block: int) -> Tensor:
    """[O, C, kh, kw] -> [O, C * block * block, kh / block, kw / block], matching fold_pixels."""
    o, c, kh, kw = weight.shape
    blocks = weight.reshape(o, c, kh // block, block, kw // block, block)
    return blocks.permute(0, 1, 3, 5, 2, 4).reshape(o, c * block * block, kh // block, kw // block)


@contextmanager
def reproducible_initialization(seed: int) -> Iterator[None]:
    """Draw initial weights from a seed alone, without changing torch's global generator.

    It uses one thread, because the QR decomposition of orthogonal weights gives different bits on more threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def initialize_orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Orthogonal weights and zero biases (Saxe et al. 2014). Gains follow Engstrom et al. 2020 and Andrychowicz et al.
    2021: sqrt(2) for hidden layers, 0.01 for the policy head, 1 for the value head."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def initialize_lecun_normal(layer: nn.Linear | nn.Conv2d) -> None:
    """Truncated normal weights of variance 1 / fan_in and zero biases (LeCun et al. 1998), the default
    initialization of Flax, which Cleanba's convolutions use."""
    fan_in = layer.weight[0].numel()
    # Truncating a unit normal at 2 deviations leaves a deviation of 0.8796…, which this corrects.
    std = 1 / math.sqrt(fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def initialize_he(layer: nn.Linear | nn.Conv2d, scale: float = 1.0) -> None:
    """Normal weights of variance 2 / fan_in (He et al. 2015), times scale, and zero biases."""
    nn.init.normal_(layer.weight, std=scale * math.sqrt(2 / layer.weight[0].numel()))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def initialize_glorot(layer: nn.Linear | nn.Conv2d) -> None:
    """Uniform weights of variance 2 / (fan_in + fan_out) and zero biases (Glorot and Bengio 2010), as in Dopamine."""
    nn.init.xavier_uniform_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def initialize(network: nn.Module, initialization: Initialization) -> None:
    """Initialize the layers of a network for images."""
    if initialization == "pytorch":
        return  # layers are made with these weights
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and initialization == "impala":
            initialize_lecun_normal(layer)
        elif isinstance(layer, (nn.Conv2d, nn.Linear)) and initialization == "glorot":
            initialize_glorot(layer)
        elif isinstance(layer, (nn.Conv2d, nn.Linear)):
            initialize_orthogonal(layer, math.sqrt(2))
