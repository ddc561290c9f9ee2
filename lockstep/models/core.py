"""Recurrent cores, reset at the start of every episode.

Shape legend: T time, B environments, F input features, H hidden size, G gates, K state size.

A sequence is one node of the autograd graph, differentiated by hand. Everything that does not depend on the next step
is computed for all steps at once, and the gradient of the hidden weights is one matrix product over time instead of a
sum of T small ones, which would be rounded T times.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.models.layers import Linear, cast


class Core(nn.Module):
    """Memory over time, between encoder and heads."""

    state_size: int
    """K: numbers of state per environment."""

    def __init__(self, size: int):
        super().__init__()
        self.out_features = size
        """H"""

    @abstractmethod
    def forward(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run over T steps.

        Args:
            x: [T, B, F]
            start: bool [T, B], True where the state is zeroed before the step.
            state: fp32 [B, K], before the first step. No gradient flows into it.

        Returns:
            fp32 outputs [T, B, H], and the state [B, K] after the last step.
        """

    @abstractmethod
    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step in plain operations that other runtimes support, for export. It equals forward up to rounding.

        Args:
            x: [B, F]
            state: fp32 [B, K], zeroed where an episode starts.

        Returns:
            Outputs [B, H], and the state [B, K] after the step.
        """


class RecurrentCore(Core):
    """A core with gates that depend on the previous output, in the precision of its input. State and gates are
    fp32."""

    gates: int

    def __init__(self, in_features: int, size: int):
        super().__init__(size)
        self.weight_input = nn.Parameter(torch.empty(self.gates * size, in_features))
        self.weight_hidden = nn.Parameter(torch.empty(self.gates * size, size))
        self.bias_input = nn.Parameter(torch.zeros(self.gates * size))
        self.bias_hidden = nn.Parameter(torch.zeros(self.gates * size))
        nn.init.orthogonal_(self.weight_input)
        nn.init.orthogonal_(self.weight_hidden)

    def forward(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        projected = F.linear(x, cast(self.weight_input, x.dtype), self.bias_input.to(x.dtype))
        keep = (~start).unsqueeze(-1).to(state.dtype)
        return self._run(projected, keep, state, cast(self.weight_hidden, x.dtype), self.bias_hidden.to(x.dtype))

    @abstractmethod
    def _run(
        self, projected: Tensor, keep: Tensor, state: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Projected input [T, B, G * H], keep [T, B, 1] that is 0 at starts, state [B, K], weight [G * H, H] and bias
        [G * H] -> outputs [T, B, H], state [B, K]"""


class LSTM(RecurrentCore):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with a forget gate); gates i, f, o, g.

    The state is [h, c].
    """

    gates = 4

    def __init__(self, in_features: int, size: int):
        super().__init__(in_features, size)
        self.state_size = 2 * size

    def _run(
        self, projected: Tensor, keep: Tensor, state: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        h_t, c_t = _LSTMSequence.apply(projected + bias, keep, state, weight)  # type: ignore[misc]
        return h_t, torch.cat([h_t[-1], c_t[-1]], -1)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state.chunk(2, -1)
        gates = F.linear(x, self.weight_input, self.bias_input) + F.linear(h, self.weight_hidden, self.bias_hidden)
        i, f, o, g = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, torch.cat([h, c], -1)


class GRU(RecurrentCore):
    """Gated recurrent unit (Cho et al. 2014, reset gate after the matrix product); gates r, z, n."""

    gates = 3

    def __init__(self, in_features: int, size: int):
        super().__init__(in_features, size)
        self.state_size = size

    def _run(
        self, projected: Tensor, keep: Tensor, state: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        h_t: Tensor = _GRUSequence.apply(projected, keep, state, weight, bias)  # type: ignore[assignment]
        return h_t, h_t[-1]

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        r, z, n = F.linear(x, self.weight_input, self.bias_input).chunk(3, -1)
        hidden_r, hidden_z, hidden_n = F.linear(state, self.weight_hidden, self.bias_hidden).chunk(3, -1)
        r, z = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
        n = (n + r * hidden_n).tanh()
        h = (1 - z) * n + z * state
        return h, h


class MinGRU(Core):
    """A minimal gated recurrent unit (Feng et al. 2024, "Were RNNs all we needed?", https://arxiv.org/abs/2410.01201):
    h_t = (1 - z_t) * h_tm1 + z_t * c_t. The gate z_t = sigmoid(W x_t + b) and the candidate c_t = V x_t + d depend on
    the input alone. So all products of a sequence are computed at once, and only a sum runs over time.
    """

    def __init__(self, in_features: int, size: int):
        super().__init__(size)
        self.state_size = size
        self.linear = Linear(in_features, 2 * size)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate = self.linear(x).float().chunk(2, -1)
        z = gate.sigmoid()
        h_t: Tensor = _Scan.apply((1 - z) * ~start.unsqueeze(-1), z * candidate, state)  # type: ignore[assignment]
        return h_t, h_t[-1]

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate = self.linear(x).chunk(2, -1)
        z = gate.sigmoid()
        h = (1 - z) * state + z * candidate
        return h, h


class _Scan(torch.autograd.Function):
    """h_t = keep_t * h_tm1 + new_t: keep and new [T, B, H], the first h_tm1 [B, H] -> [T, B, H]."""

    @staticmethod
    def forward(ctx: Any, keep: Tensor, new: Tensor, state: Tensor) -> Tensor:
        h_t = torch.empty_like(new)
        h = state
        for t in range(len(new)):
            h = torch.addcmul(new[t], keep[t], h, out=h_t[t])
        ctx.save_for_backward(keep, h_t, state)
        return h_t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        keep, h_t, state = ctx.saved_tensors
        grad_new = grads[0].clone()
        for t in reversed(range(len(keep) - 1)):
            grad_new[t].addcmul_(keep[t + 1], grad_new[t + 1])
        h_tm1 = torch.cat([state.unsqueeze(0), h_t[:-1]])
        return grad_new * h_tm1, grad_new, None


class _LSTMSequence(torch.autograd.Function):
    """(i, f, o, g) = activations of projected + h_tm1 @ weight.T; c_t = f * c_tm1 + i * g; h_t = o * tanh(c_t)."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, keep: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        steps, batch, size = *projected.shape[:2], weight.shape[1]
        gate_t = state.new_empty(steps, batch, 4, size)
        h_t, c_tm1, c_t, tanh_c_t = (state.new_empty(steps, batch, size) for _ in range(4))
        h_tm1 = projected.new_empty(steps, batch, size)
        h, c = state.split(size, -1)
        resets = _resets(keep)
        for t in range(steps):
            _carry(h, h_tm1[t], keep[t] if resets[t] else None)
            _carry(c, c_tm1[t], keep[t] if resets[t] else None)
            gate_t[t] = torch.addmm(projected[t], h_tm1[t], weight.t()).view(batch, 4, size)
            gate_t[t, :, 3] *= 2  # tanh(x) = 2 sigmoid(2x) - 1, which is five times as fast as torch's tanh
            gate_t[t].sigmoid_()
            gate_t[t, :, 3].mul_(2).sub_(1)
            i, f, o, g = gate_t[t].unbind(1)
            torch.mul(f, c_tm1[t], out=c_t[t]).addcmul_(i, g)
            torch.mul(c_t[t], 2, out=tanh_c_t[t]).sigmoid_().mul_(2).sub_(1)
            h, c = torch.mul(o, tanh_c_t[t], out=h_t[t]), c_t[t]
        ctx.resets = resets
        ctx.save_for_backward(keep, weight, gate_t, h_tm1, c_tm1, tanh_c_t)
        return h_t, c_t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor]:  # type: ignore[override]
        keep, weight, gate_t, h_tm1, c_tm1, tanh_c_t = ctx.saved_tensors
        grad_h, grad_c = grads
        delta_t = h_tm1.new_empty(gate_t.shape)
        dh, dc = torch.zeros_like(c_tm1[0]), torch.zeros_like(c_tm1[0])
        slope, by_c = torch.empty_like(gate_t[0]), torch.empty_like(dc)
        for t in reversed(range(len(gate_t))):
            i, f, o, g = gate_t[t].unbind(1)
            torch.addcmul(o, o * tanh_c_t[t], tanh_c_t[t], value=-1, out=by_c)  # of h_t by c_t
            dh = grad_h[t] + dh
            dc = (dc + grad_c[t]).addcmul_(dh, by_c)
            # First the derivatives of sigmoids by their inputs; then of c_t by i, f and g, and of h_t by o.
            torch.addcmul(gate_t[t], gate_t[t], gate_t[t], value=-1, out=slope)
            slope[:, 0].mul_(g).mul_(dc)
            slope[:, 1].mul_(c_tm1[t]).mul_(dc)
            slope[:, 2].mul_(tanh_c_t[t]).mul_(dh)
            torch.addcmul(i, i * g, g, value=-1, out=slope[:, 3]).mul_(dc)
            delta_t[t] = slope
            dh = delta_t[t].flatten(1).mm(weight).to(dh.dtype)
            dc = dc.mul_(f)
            if ctx.resets[t]:
                dh, dc = dh.mul_(keep[t]), dc.mul_(keep[t])
        delta_t = delta_t.flatten(2)
        return delta_t, None, None, _weight_gradient(delta_t, h_tm1)


class _GRUSequence(torch.autograd.Function):
    """(r, z) = sigmoid(projected + hidden), n = tanh(projected + r * hidden), with hidden = h_tm1 @ weight.T + bias;
    h_t = (1 - z) * n + z * h_tm1."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, keep: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        steps, batch, size = *projected.shape[:2], weight.shape[1]
        gate_t = state.new_empty(steps, batch, 3, size)
        hidden_n, h_tm1, h_t = (state.new_empty(steps, batch, size) for _ in range(3))
        inputs = projected.view(steps, batch, 3, size)
        h = state
        resets = _resets(keep)
        for t in range(steps):
            _carry(h, h_tm1[t], keep[t] if resets[t] else None)
            hidden = torch.addmm(bias, h_tm1[t].to(weight.dtype), weight.t()).view(batch, 3, size)
            hidden_n[t] = hidden[:, 2]
            gate_t[t] = inputs[t]
            gate_t[t, :, :2] += hidden[:, :2]
            gate_t[t, :, :2].sigmoid_()
            r, z, n = gate_t[t].unbind(1)
            n.addcmul_(r, hidden_n[t]).mul_(2).sigmoid_().mul_(2).sub_(1)  # tanh, as above
            h = torch.lerp(n, h_tm1[t], z, out=h_t[t])
        ctx.resets = resets
        ctx.save_for_backward(keep, weight, gate_t, hidden_n, h_tm1)
        return h_t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor]:  # type: ignore[override]
        keep, weight, gate_t, hidden_n, h_tm1 = ctx.saved_tensors
        (grad_h,) = grads
        delta_t = gate_t.new_empty(gate_t.shape, dtype=weight.dtype)
        grad_projected = torch.empty_like(delta_t)
        dh, slope = torch.zeros_like(h_tm1[0]), torch.empty_like(gate_t[0])
        for t in reversed(range(len(gate_t))):
            r, z, n = gate_t[t].unbind(1)
            dh = grad_h[t] + dh
            # First the derivatives of sigmoids and tanh by their inputs; then of h_t by r, z and n.
            torch.addcmul(gate_t[t, :, :2], gate_t[t, :, :2], gate_t[t, :, :2], value=-1, out=slope[:, :2])
            torch.mul(n, n, out=slope[:, 2]).neg_().add_(1).mul_(1 - z).mul_(dh)
            slope[:, 0].mul_(hidden_n[t]).mul_(slope[:, 2])
            slope[:, 1].mul_(h_tm1[t] - n).mul_(dh)
            grad_projected[t] = slope
            slope[:, 2].mul_(r)
            delta_t[t] = slope
            dh = delta_t[t].flatten(1).mm(weight).to(dh.dtype).addcmul_(dh, z)
            if ctx.resets[t]:
                dh = dh.mul_(keep[t])
        hidden = delta_t.flatten(2)
        grad_weight = _weight_gradient(hidden, h_tm1.to(weight.dtype))
        return grad_projected.flatten(2), None, None, grad_weight, hidden.flatten(0, 1).sum(0)


def _resets(keep: Tensor) -> list[bool]:
    """For each step, whether any environment may start an episode. Not checked when acting, with one step."""
    return [True] if len(keep) == 1 else (keep == 0).flatten(1).any(1).tolist()


def _carry(before: Tensor, now: Tensor, keep_t: Tensor | None) -> None:
    """Store the state before a step, zeroed where an episode starts."""
    now.copy_(before if keep_t is None else before * keep_t)


def _weight_gradient(delta_t: Tensor, h_tm1: Tensor) -> Tensor:
    """[T, B, G * H], [T, B, H] -> [G * H, H], summed over steps and environments"""
    return delta_t.flatten(0, 1).t().mm(h_tm1.flatten(0, 1))
