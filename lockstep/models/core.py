"""Recurrent cores, reset at the start of every episode.

Shape legend: T time, B environments, F input features, H hidden size, G gates, K state size.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RecurrentCore(nn.Module):
    """Memory over time, in the precision of its input; the state itself, and the gates, are fp32."""

    gates: int
    state_size: int
    """K: numbers of state per environment."""

    def __init__(self, in_features: int, size: int):
        super().__init__()
        self.out_features = size
        self.weight_input = nn.Parameter(torch.empty(self.gates * size, in_features))
        self.weight_hidden = nn.Parameter(torch.empty(self.gates * size, size))
        self.bias_input = nn.Parameter(torch.zeros(self.gates * size))
        self.bias_hidden = nn.Parameter(torch.zeros(self.gates * size))
        nn.init.orthogonal_(self.weight_input)
        nn.init.orthogonal_(self.weight_hidden)

    def forward(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run over T steps.

        Args:
            x: [T, B, F]
            start: bool [T, B], True where the state is zeroed before the step.
            state: fp32 [B, K], before the first step.

        Returns:
            fp32 outputs [T, B, H], and the state [B, K] after the last step.
        """
        projected = F.linear(x, self.weight_input.to(x.dtype), self.bias_input.to(x.dtype))
        weight = self.weight_hidden.to(x.dtype).t()
        bias = self.bias_hidden.to(x.dtype)
        keep = (~start).unsqueeze(-1).to(state.dtype)
        outputs = []
        for projected_t, keep_t in zip(projected.unbind(), keep.unbind(), strict=True):
            state = self._step(projected_t, state * keep_t, weight, bias)
            outputs.append(state[:, : self.out_features])
        return torch.stack(outputs), state

    @abstractmethod
    def _step(self, projected: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """[B, G * H], [B, K] -> the next state [B, K], which begins with the output [B, H]."""


class GRU(RecurrentCore):
    """Gated recurrent unit (Cho et al. 2014, reset gate after the matrix product); gates r, z, n."""

    gates = 3

    def __init__(self, in_features: int, size: int):
        super().__init__(in_features, size)
        self.state_size = size

    def _step(self, projected: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        size = self.out_features
        hidden = torch.addmm(bias, state.to(weight.dtype), weight).to(state.dtype)
        projected = projected.to(state.dtype)
        r, z = torch.sigmoid(projected[:, : 2 * size] + hidden[:, : 2 * size]).split(size, -1)
        n = torch.tanh(projected[:, 2 * size :] + r * hidden[:, 2 * size :])
        return torch.lerp(n, state, z)


class LSTM(RecurrentCore):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with a forget gate); gates i, f, o, g.

    The state is [h, c].
    """

    gates = 4

    def __init__(self, in_features: int, size: int):
        super().__init__(in_features, size)
        self.state_size = 2 * size

    def _step(self, projected: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        size = self.out_features
        h, c = state.split(size, -1)
        gates = (projected + torch.addmm(bias, h.to(weight.dtype), weight)).to(state.dtype)
        i, f, o = torch.sigmoid(gates[:, : 3 * size]).split(size, -1)
        c = f * c + i * torch.tanh(gates[:, 3 * size :])
        return torch.cat([o * torch.tanh(c), c], -1)
