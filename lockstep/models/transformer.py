"""A transformer as a core. Each step attends to itself and to recent steps of its episode.

Shape legend: T time, B environments, F input features, H size, N heads, M steps of memory, L layers, K state size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.models.core import Core
from lockstep.models.layers import Linear, initialize_orthogonal

_GATE_BIAS = 2.0
"""Nearly closes the gates of new layers, so that they pass their input on (the paper's value)."""
_LONGEST_WAVE = 10_000.0


class Transformer(Core):
    """Gated transformer layers (Parisotto et al. 2020, "Stabilizing transformers for reinforcement learning",
    https://arxiv.org/abs/1910.06764): layers are normalized at their input, and a GRU's gates replace residual sums.
    Positions are relative, by rotation (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    The state contains the keys and values of the last M steps, as they were computed then, and the number of these
    steps that belong to the current episode. So acting computes only one step. In learning, gradients flow to the steps
    of the rollout, but not to earlier ones.

    Args:
        in_features: F.
        size: H.
        memory: M, the number of earlier steps that a step attends to in each layer.
        layers: L. With several, a step sees up to L * M steps back.
        heads: N, a divisor of H / 2.
    """

    def __init__(self, in_features: int, size: int, *, memory: int, layers: int, heads: int):
        super().__init__(size)
        self.memory = memory
        self.state_size = layers * memory * 2 * size + 1
        self.embed = Linear(in_features, size)
        self.layers = nn.ModuleList(_Layer(size, heads) for _ in range(layers))
        initialize_orthogonal(self.embed, 1.0)

    def forward(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, after = self._attend(x, start, state)
        return outputs, after.detach()

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        start = torch.zeros(1, x.shape[0], dtype=torch.bool, device=x.device)
        outputs, after = self._attend(x.unsqueeze(0), start, state)
        return outputs[0], after

    def _attend(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """As forward, but gradients flow into the state."""
        count = state[:, -1]
        kept = state[:, :-1].unflatten(1, (len(self.layers), self.memory, -1)).transpose(0, 2)  # [M, L, B, 2 H]
        visible, count = _visible(start, count, self.memory)
        h, cached = self.embed(x).float(), []
        for number, layer in enumerate(self.layers):
            h, keys_values = layer(h, kept[:, number], visible, x.dtype)
            cached.append(keys_values[-self.memory :])
        after = torch.stack(cached, 1).transpose(0, 2).flatten(1)
        return h, torch.cat([after, count.unsqueeze(-1)], -1)


class _Layer(nn.Module):
    """Attention and an MLP, each with a normalization before it and a gate after it."""

    def __init__(self, size: int, heads: int):
        super().__init__()
        self._heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query_key_value, self.attended = Linear(size, 3 * size), Linear(size, size)
        self.widen, self.narrow = Linear(size, 4 * size), Linear(4 * size, size)
        self.after_attention, self.after_mlp = _Gate(size), _Gate(size)
        for linear, gain in (
            (self.query_key_value, 1.0),
            (self.attended, math.sqrt(2)),
            (self.widen, math.sqrt(2)),
            (self.narrow, math.sqrt(2)),
        ):
            initialize_orthogonal(linear, gain)

    def forward(self, h: Tensor, kept: Tensor, visible: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """fp32 inputs [T, B, H], earlier keys and values [M, B, 2 H], and bool [B, 1, T, M + T], whether a step sees
        each key -> fp32 outputs [T, B, H], and all keys and values [M + T, B, 2 H]. Products are in dtype."""
        size = h.shape[-1]
        query, new = self.query_key_value(self.before_attention(h).to(dtype)).float().split([size, 2 * size], -1)
        keys_values = torch.cat([kept, new])
        key, value = keys_values.chunk(2, -1)
        attended = self._attend(query, key, value, visible)
        h = self.after_attention(h, F.relu(self.attended(attended.to(dtype))), dtype)
        x = F.relu(self.widen(self.before_mlp(h).to(dtype)))
        return self.after_mlp(h, F.relu(self.narrow(x)), dtype), keys_values

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """[T, B, H], [M + T, B, H] twice, bool [B, 1, T, M + T] -> fp32 [T, B, H]"""
        cos, sin = _waves(len(key), key.shape[-1] // self._heads, key.device)
        q = _rotated(self._by_head(query), cos[-len(query) :], sin[-len(query) :])
        k = _rotated(self._by_head(key), cos, sin)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return (weights @ self._by_head(value)).permute(2, 0, 1, 3).flatten(2)

    def _by_head(self, x: Tensor) -> Tensor:
        """[S, B, H] -> [B, N, S, H / N]"""
        return x.unflatten(-1, (self._heads, -1)).permute(1, 2, 0, 3)


class _Gate(nn.Module):
    """The gates of a GRU, between a layer's input x and its output y: (1 - z) * x + z * candidate."""

    def __init__(self, size: int):
        super().__init__()
        self.of_output, self.of_input = Linear(size, 3 * size), Linear(size, 2 * size)
        self.candidate = Linear(size, size)
        for linear in (self.of_output, self.of_input, self.candidate):
            initialize_orthogonal(linear, 1.0)
        with torch.no_grad():
            self.of_output.bias[size : 2 * size] = -_GATE_BIAS

    def forward(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """fp32 [..., H], [..., H] -> fp32 [..., H]"""
        r, z, candidate = self.of_output(y).float().chunk(3, -1)
        reset, update = self.of_input(x.to(dtype)).float().chunk(2, -1)
        r, z = (r + reset).sigmoid(), (z + update).sigmoid()
        candidate = (candidate + self.candidate((r * x).to(dtype)).float()).tanh()
        return x + z * (candidate - x)


def _visible(start: Tensor, count: Tensor, memory: int) -> tuple[Tensor, Tensor]:
    """Which keys each step sees: itself, and up to M steps before it in its episode.

    Args:
        start: bool [T, B].
        count: fp32 [B], the number of the M steps before the first that belong to the continuing episode.

    Returns:
        bool [B, 1, T, M + T], and the count [B] after the last step.
    """
    steps = len(start)
    episode = start.long().cumsum(0)  # [T, B], 0 for the continuing one
    place = torch.arange(memory + steps, device=start.device)
    distance = place[memory:].unsqueeze(1) - place  # [T, M + T]
    earlier = torch.where(place[:memory].unsqueeze(1) >= memory - count, 0, -1)  # [M, B], -1 for steps outside it
    of_key = torch.cat([earlier, episode])  # [M + T, B]
    same = of_key.t().unsqueeze(1) == episode.t().unsqueeze(2)  # [B, T, M + T]
    visible = same & (distance >= 0) & (distance <= memory)
    of_last = (of_key[-memory:] == episode[-1]).sum(0)
    return visible.unsqueeze(1), of_last.to(count.dtype)


def _waves(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, size / 2] that rotate pairs of numbers by position."""
    frequency = _LONGEST_WAVE ** (-torch.arange(0, size, 2, device=device) / size)
    angle = torch.arange(length, device=device).unsqueeze(1) * frequency
    return angle.cos(), angle.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., S, D] with each pair of numbers (first half, second half) rotated by its position's angle."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
