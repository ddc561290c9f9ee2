"""The residual network of IMPALA, for images of any size.

Shape legend: N samples, C H W channels, height and width of an image, F features.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.models.layers import (
    Conv2d,
    Initialization,
    Linear,
    PixelConv2d,
    flatten_places,
    initialize,
    initialize_he,
)
from lockstep.models.pooling import max_pool

_BLOCKS = 2
"""Residual blocks of each section."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = Conv2d(channels, channels, 3, padding=1)
        self.second = Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x)), inplace=True))


class FixupBlock(nn.Module):
    """A residual block with Fixup (Zhang et al. 2019, https://arxiv.org/abs/1901.09321, section 3).

    The second convolution begins with zeros, so that the block begins as the identity. The first begins with He's
    initialization divided by the root of the number of blocks. A scalar is added after each activation, and another
    multiplies the branch. The scalar that the paper adds before each activation is the convolution's bias here, which
    has one number per channel.

    Args:
        channels: C.
        blocks: residual blocks in the whole network.
    """

    def __init__(self, channels: int, blocks: int):
        super().__init__()
        self.first = Conv2d(channels, channels, 3, padding=1)
        self.second = Conv2d(channels, channels, 3, padding=1)
        self.shift_first, self.shift_second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))
        initialize_he(self.first, 1 / math.sqrt(blocks))
        assert self.second.bias is not None
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.first(F.relu(x) + self.shift_first.to(x.dtype))
        branch = self.second(F.relu(branch) + self.shift_second.to(x.dtype))
        return x + self.scale.to(x.dtype) * branch


class ImpalaResNet(nn.Module):
    """The deep residual network of Espeholt et al. 2018 (Figure 3, right, without its LSTM).

    Args:
        shape: [C, H, W] of an image.
        channels: the channels of each section.
        dense_size: F.
        initialization: fixup uses FixupBlock, and He's initialization for all other layers. The others are as for
            other encoders.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        channels: tuple[int, ...] = (16, 32, 32),
        dense_size: int = 256,
        initialization: Literal[Initialization, "fixup"] = "impala",
    ):
        super().__init__()
        in_channels, height, width = shape
        fixup, blocks = initialization == "fixup", _BLOCKS * len(channels)
        self.convolutions, self.blocks = nn.ModuleList(), nn.ModuleList()
        for index, out_channels in enumerate(channels):
            convolution = PixelConv2d if index == 0 else Conv2d
            self.convolutions.append(convolution(in_channels, out_channels, 3, padding=1))
            section = (
                FixupBlock(out_channels, blocks) if fixup else ResidualBlock(out_channels) for _ in range(_BLOCKS)
            )
            self.blocks.append(nn.Sequential(*section))
            in_channels, height, width = out_channels, (height + 1) // 2, (width + 1) // 2
        self.dense = Linear(in_channels * height * width, dense_size)
        self.out_features = dense_size
        if initialization == "fixup":
            for layer in (*self.convolutions, self.dense):
                initialize_he(layer)  # type: ignore[arg-type]
        else:
            initialize(self, initialization)

    def forward(self, image: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, C, H, W] -> [N, F] in dtype"""
        x = image
        for index, (convolution, blocks) in enumerate(zip(self.convolutions, self.blocks, strict=True)):
            x = convolution(x, dtype) if index == 0 else convolution(x)
            x = blocks(max_pool(x))
        return F.relu(self.dense(flatten_places(F.relu(x, inplace=True))), inplace=True)
