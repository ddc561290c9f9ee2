"""Recurrent cores, reset at the start of every episode.

Shape legend: T time, B environments, F input features, H hidden size, G gates, K state size.

A sequence is one node of the autograd graph, differentiated by hand. Everything that does not depend on the next step
is computed for all steps at once. The gradient of the hidden weights is one matrix product over time instead of a sum
of T small ones, which would be rounded T times. States are multiplied by 0 where they are reset and by 1 elsewhere, so
the kernels do not depend on where episodes begin.
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
            fp32 outputs [T, B, H], and the state [B, K] after the last step, which has no gradient in a transformer.
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
        h_t, c = _LSTMSequence.apply(projected + bias, keep, state, weight)  # type: ignore[misc]
        return h_t, torch.cat([h_t[-1], c], -1)

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
    """(i, f, o, g) = activations of projected + h_tm1 @ weight.T; c_t = f * c_tm1 + i * g; h_t = o * tanh(c_t).

    Returns h_t [T, B, H] and the last c_t [B, H].
    """

    @staticmethod
    def forward(ctx: Any, projected: Tensor, keep: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        steps, batch, size = *projected.shape[:2], weight.shape[1]
        gate_t = state.new_empty(steps, batch, 4, size)
        before_t, after_t = (state.new_empty(steps, 2, batch, size) for _ in range(2))  # h and c
        tanh_c_t = state.new_empty(steps, batch, size)
        carried = state.unflatten(1, (2, size)).transpose(0, 1)
        for t in range(steps):
            h_tm1, c_tm1 = torch.mul(carried, keep[t], out=before_t[t]).unbind()
            _product(projected[t], h_tm1.to(weight.dtype), weight, out=gate_t[t].flatten(1))
            i, f, o, g = _activated(gate_t[t]).unbind(1)
            carried = after_t[t]
            c = torch.mul(f, c_tm1, out=carried[1]).addcmul_(i, g)
            torch.mul(o, _tanh(c, out=tanh_c_t[t]), out=carried[0])
        ctx.save_for_backward(keep, weight, gate_t, before_t, tanh_c_t)
        return after_t[:, 0].contiguous(), after_t[-1, 1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor]:  # type: ignore[override]
        keep, weight, gate_t, before_t, tanh_c_t = ctx.saved_tensors
        grad_h, grad_c = grads
        (h_tm1, c_tm1), (i, f, o, g) = before_t.unbind(1), gate_t.unbind(2)
        # First the derivatives of sigmoids by their inputs. Then of c_t by the inputs of i, f and g, and of h_t by o's.
        slope = torch.addcmul(gate_t, gate_t, gate_t, value=-1)
        for place, factor in enumerate((g, c_tm1, tanh_c_t)):
            slope[:, :, place].mul_(factor)
        torch.addcmul(i, i * g, g, value=-1, out=slope[:, :, 3])
        by_c = torch.addcmul(o, o * tanh_c_t, tanh_c_t, value=-1)  # of h_t by c_t
        by_c_tm1 = f * keep  # of c_t
        delta_t = weight.new_empty(gate_t.shape)
        both = torch.stack([grad_h[-1], grad_c])
        dh, dc = both.unbind()
        for t in reversed(range(len(gate_t))):
            dc.addcmul_(dh, by_c[t])
            torch.mul(slope[t, :, :2], dc.unsqueeze(1), out=delta_t[t, :, :2])
            torch.mul(slope[t, :, 2:], both.transpose(0, 1), out=delta_t[t, :, 2:])
            if t:
                torch.addcmul(grad_h[t - 1], delta_t[t].flatten(1).mm(weight), keep[t], out=dh)
                dc.mul_(by_c_tm1[t])
        delta_t = delta_t.flatten(2)
        return delta_t, None, None, _weight_gradient(delta_t, h_tm1.to(weight.dtype))


class _GRUSequence(torch.autograd.Function):
    """(r, z) = sigmoid(projected + hidden), n = tanh(projected + r * hidden), with hidden = h_tm1 @ weight.T + bias;
    h_t = (1 - z) * n + z * h_tm1."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, keep: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        steps, batch, size = *projected.shape[:2], weight.shape[1]
        gate_t = state.new_empty(steps, batch, 3, size)
        hidden_t = state.new_empty(steps, batch, 3, size, dtype=weight.dtype)
        h_tm1, h_t = (state.new_empty(steps, batch, size) for _ in range(2))
        inputs = projected.to(state.dtype).view(steps, batch, 3, size)
        h = state
        for t in range(steps):
            torch.mul(h, keep[t], out=h_tm1[t])
            _product(bias, h_tm1[t].to(weight.dtype), weight, out=hidden_t[t].flatten(1))
            torch.add(inputs[t, :, :2], hidden_t[t, :, :2], out=gate_t[t, :, :2]).sigmoid_()
            r, z, n = gate_t[t].unbind(1)
            _tanh(torch.addcmul(inputs[t, :, 2], r, hidden_t[t, :, 2], out=n), out=n)
            h = torch.lerp(n, h_tm1[t], z, out=h_t[t])
        ctx.save_for_backward(keep, weight, gate_t, hidden_t[:, :, 2], h_tm1)
        return h_t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor]:  # type: ignore[override]
        keep, weight, gate_t, hidden_n, h_tm1 = ctx.saved_tensors
        (grad_h,) = grads
        r, z, n = gate_t.unbind(2)
        # First the derivatives of sigmoids and tanh by their inputs; then of h_t by those of z and n, and of n's input
        # by that of r.
        slope = torch.empty_like(gate_t)
        torch.addcmul(gate_t[:, :, :2], gate_t[:, :, :2], gate_t[:, :, :2], value=-1, out=slope[:, :, :2])
        slope[:, :, 0].mul_(hidden_n)
        slope[:, :, 1].mul_(h_tm1 - n)
        torch.mul(n, n, out=slope[:, :, 2]).neg_().add_(1).mul_(1 - z)
        grad_projected = torch.empty_like(gate_t)
        delta_t = weight.new_empty(gate_t.shape)
        dh = grad_h[-1]
        for t in reversed(range(len(gate_t))):
            torch.mul(slope[t, :, 1:], dh.unsqueeze(1), out=grad_projected[t, :, 1:])
            torch.mul(slope[t, :, 0], grad_projected[t, :, 2], out=grad_projected[t, :, 0])
            delta_t[t, :, :2] = grad_projected[t, :, :2]
            torch.mul(grad_projected[t, :, 2], r[t], out=delta_t[t, :, 2])
            if t:
                dh = torch.addcmul(delta_t[t].flatten(1).mm(weight), dh, z[t])
                dh = torch.addcmul(grad_h[t - 1], dh, keep[t])
        hidden = delta_t.flatten(2)
        grad_weight = _weight_gradient(hidden, h_tm1.to(weight.dtype))
        return grad_projected.flatten(2).to(weight.dtype), None, None, grad_weight, hidden.flatten(0, 1).sum(0)


def _product(x: Tensor, h: Tensor, weight: Tensor, out: Tensor) -> None:
    """x + h @ weight.T, written into `out`, which may have another type."""
    if x.dtype == out.dtype:
        torch.addmm(x, h, weight.t(), out=out)
    else:
        out.copy_(torch.addmm(x, h, weight.t()))


def _activated(gates: Tensor) -> Tensor:
    """Apply the activations of an LSTM's gates [B, 4, H], in place."""
    if gates.device.type == "cpu":
        gates[:, 3].mul_(2)  # as in _tanh
        gates.sigmoid_()
        gates[:, 3].mul_(2).sub_(1)
    else:
        gates[:, :3].sigmoid_()
        gates[:, 3].tanh_()
    return gates


def _tanh(x: Tensor, out: Tensor) -> Tensor:
    """tanh. On a CPU it is computed as 2 sigmoid(2x) - 1, which is five times as fast as torch's tanh there."""
    if x.device.type == "cpu":
        return torch.mul(x, 2, out=out).sigmoid_().mul_(2).sub_(1)
    return torch.tanh(x, out=out)


def _weight_gradient(delta_t: Tensor, h_tm1: Tensor) -> Tensor:
    """[T, B, G * H], [T, B, H] -> [G * H, H], summed over steps and environments"""
    return delta_t.flatten(0, 1).t().mm(h_tm1.flatten(0, 1))
