from __future__ import annotations

import math
from typing import TypeVar

import pytest
import simulated_gpu
import torch
from simulated_books import KERNEL, SYNC, Counts
from torch import nn

from lockstep.models import GRU, LSTM, Core, MinGRU, RecurrentCore

CORES = [GRU, LSTM]
STEPS, ENVS, FEATURES, SIZE = 7, 3, 4, 5

CoreT = TypeVar("CoreT", bound=Core)


def core_and_input(kind: type[CoreT]) -> tuple[CoreT, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    core = kind(FEATURES, SIZE).double()  # type: ignore[call-arg]
    for parameter in core.parameters():
        nn.init.normal_(parameter)
    return core, torch.randn(STEPS, ENVS, FEATURES).double(), torch.randn(ENVS, core.state_size).double()


@pytest.mark.parametrize("kind", CORES)
def test_equals_torch(kind: type[RecurrentCore]) -> None:
    core, x, state = core_and_input(kind)
    reference = (nn.GRU if kind is GRU else nn.LSTM)(FEATURES, SIZE).double()
    # Torch orders an LSTM's gates i, f, g, o.
    order = [0, 1, 2] if kind is GRU else [0, 1, 3, 2]
    names = {"weight_ih_l0": "weight_input", "weight_hh_l0": "weight_hidden", "bias_ih_l0": "bias_input"}
    names["bias_hh_l0"] = "bias_hidden"
    for theirs, ours in names.items():
        chunks = getattr(core, ours).detach().chunk(core.gates)
        getattr(reference, theirs).data = torch.cat([chunks[gate] for gate in order])
    first = state[None] if kind is GRU else (state[None, :, :SIZE].contiguous(), state[None, :, SIZE:].contiguous())
    expected, last = reference(x, first)
    last = last[0] if kind is GRU else torch.cat([last[0][0], last[1][0]], -1)
    outputs, final = core(x, torch.zeros(STEPS, ENVS, dtype=torch.bool), state)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(final, last)


@pytest.mark.parametrize("kind", CORES)
def test_gradients_equal_those_of_torch_cells(kind: type[RecurrentCore]) -> None:
    core, x, state = core_and_input(kind)
    start = torch.rand(STEPS, ENVS) < 0.3
    weight, last_weight = torch.randn(STEPS, ENVS, SIZE).double(), torch.randn_like(state)
    x.requires_grad_()
    outputs, final = core(x, start, state)
    ((outputs * weight).sum() + (final * last_weight).sum()).backward()
    parameters = [core.weight_input, core.weight_hidden, core.bias_input, core.bias_hidden]
    gradients = [x.grad, *(parameter.grad for parameter in parameters)]

    order = [0, 1, 2] if kind is GRU else [0, 1, 3, 2]  # torch's i, f, g, o
    ordered = [torch.cat([parameter.chunk(core.gates)[gate] for gate in order]) for parameter in parameters]
    total, carried = torch.zeros(()).double(), state
    for t in range(STEPS):
        carried = carried * (~start[t]).unsqueeze(-1)
        if kind is GRU:
            carried = h = torch.gru_cell(x[t], carried, *ordered)
        else:
            h, c = torch.lstm_cell(x[t], carried.split(SIZE, -1), *ordered)
            carried = torch.cat([h, c], -1)
        total = total + (h * weight[t]).sum()
    expected = torch.autograd.grad(total + (carried * last_weight).sum(), [x, *parameters])
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_min_gru_gradients_equal_those_of_a_loop() -> None:
    torch.manual_seed(3)
    core, x = MinGRU(FEATURES, SIZE).double(), torch.randn(STEPS, ENVS, FEATURES).double().requires_grad_()
    state, weight = torch.randn(ENVS, SIZE).double(), torch.randn(STEPS, ENVS, SIZE).double()
    start = torch.rand(STEPS, ENVS) < 0.3
    inputs = [x, *core.parameters()]
    outputs, final = core(x, start, state)
    gradients = torch.autograd.grad((outputs * weight).sum() + final.sin().sum(), inputs)
    h, total = state, torch.zeros(()).double()
    for t in range(STEPS):
        gate, candidate = nn.functional.linear(x[t], core.linear.weight, core.linear.bias).chunk(2, -1)
        h = (1 - gate.sigmoid()) * h * (~start[t]).unsqueeze(-1) + gate.sigmoid() * candidate
        torch.testing.assert_close(outputs[t], h.float(), rtol=1e-5, atol=1e-6)
        total = total + (h * weight[t]).sum()
    wanted = torch.autograd.grad(total + h.sin().sum(), inputs)
    for gradient, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_min_gru_by_hand() -> None:
    core = MinGRU(1, 1)
    with torch.no_grad():
        core.linear.weight.zero_()
        core.linear.bias.copy_(torch.tensor([math.log(3), 2.0]))
    outputs, state = core(torch.zeros(2, 1, 1), torch.tensor([[False], [True]]), torch.tensor([[4.0]]))
    # z = 3/4: first 1/4 * 4 + 3/4 * 2, then, from zero, 3/4 * 2
    assert outputs.flatten().tolist() == pytest.approx([2.5, 1.5])
    assert state.item() == pytest.approx(1.5)


def test_lstm_by_hand() -> None:
    core = LSTM(1, 1)
    for parameter in core.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        core.bias_input.copy_(torch.tensor([0.0, math.log(3), 0.0, 1.0]))
    outputs, state = core(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.bool), torch.tensor([[0.0, 2.0]]))
    # c = sigmoid(log 3) * 2 + sigmoid(0) * tanh(1) = 1.5 + 0.380797; h = sigmoid(0) * tanh(c)
    assert state[0, 1].item() == pytest.approx(1.880797, abs=1e-6)
    assert outputs.item() == state[0, 0].item() == pytest.approx(0.477281, abs=1e-6)


def test_gru_by_hand() -> None:
    core = GRU(1, 1)
    for parameter in core.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        core.bias_input.copy_(torch.tensor([0.0, math.log(3), 1.0]))
        core.bias_hidden.copy_(torch.tensor([0.0, 0.0, 2.0]))
    outputs, _ = core(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.bool), torch.tensor([[2.0]]))
    # z = 3/4, r = 1/2, n = tanh(1 + 1/2 * 2) = tanh(2); h = 1/4 n + 3/4 * 2
    assert outputs.item() == pytest.approx(1.741007, abs=1e-6)


@pytest.mark.parametrize("kind", [*CORES, MinGRU])
def test_a_sequence_equals_its_single_steps(kind: type[Core]) -> None:
    core, x, state = core_and_input(kind)
    core, x, state = core.float(), x.float(), state.float()
    start = torch.rand(STEPS, ENVS) < 0.3
    outputs, final = core(x, start, state)
    for t in range(STEPS):
        output_t, state = core(x[t : t + 1], start[t : t + 1], state)
        torch.testing.assert_close(output_t[0], outputs[t], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, final, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [*CORES, MinGRU])
def test_a_reset_separates_what_was_before(kind: type[Core]) -> None:
    core, x, state = core_and_input(kind)
    core, x, state = core.float(), x.float(), state.float()
    start = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    start[3, 1] = True
    outputs, final = core(x, start, state)
    never = torch.zeros_like(start)
    unbroken, _ = core(x, never, state)
    fresh, fresh_final = core(x[3:], never[3:], torch.zeros_like(state))
    torch.testing.assert_close(outputs[3:, 1], fresh[:, 1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final[1], fresh_final[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outputs[:, [0, 2]], unbroken[:, [0, 2]], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(outputs[3:, 1], unbroken[3:, 1])


@pytest.mark.parametrize("kind", [*CORES, MinGRU])
def test_no_gradient_passes_a_reset(kind: type[Core]) -> None:
    core, x, state = core_and_input(kind)
    start = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    start[4, 0] = True
    x.requires_grad_()
    outputs, _ = core(x, start, state)
    outputs[-1].square().sum().backward()
    assert x.grad is not None
    assert not x.grad[:4, 0].any() and x.grad[4:, 0].all() and x.grad[:, 1].all()


@pytest.mark.parametrize("kind", [*CORES, MinGRU])
def test_state_and_outputs_stay_fp32_in_bf16(kind: type[Core]) -> None:
    core, x, state = core_and_input(kind)
    core, x, state = core.float(), 0.3 * x.float(), state.float()
    start = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    exact, _ = core(x, start, state)
    outputs, final = core(x.bfloat16(), start, state)
    assert outputs.dtype == final.dtype == torch.float32
    torch.testing.assert_close(outputs, exact, rtol=0.1, atol=0.1)
    assert not torch.equal(outputs, exact)


@pytest.mark.parametrize("kind", [*CORES, MinGRU])
def test_single_steps_for_export_are_those_of_the_sequence(kind: type[Core]) -> None:
    core, x, state = core_and_input(kind)
    core, x, state = core.float(), x.float(), state.float()
    with torch.no_grad():
        outputs, final = core(x, torch.zeros(STEPS, ENVS, dtype=torch.bool), state)
        for t in range(STEPS):
            h, state = core.step(x[t], state)
            torch.testing.assert_close(h, outputs[t], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-6)


def on(device: str, kind: type[Core], start: torch.Tensor, dtype: torch.dtype) -> tuple[list[torch.Tensor], Counts]:
    """Outputs, last state and gradients of a sequence, on the CPU, and what happened on a GPU."""
    core, x, state = core_and_input(kind)
    core, state = core.float().to(device), state.float().to(device)
    x, start = x[: len(start)].to(device, dtype).requires_grad_(), start.to(device)
    before = simulated_gpu.counts()
    outputs, final = core(x, start, state)
    (outputs.square().sum() + final.sin().sum()).backward()
    counted = simulated_gpu.counts() - before
    gradients = [x.grad, *(parameter.grad for parameter in core.parameters())]
    return [each.detach().float().cpu() for each in (outputs, final, *gradients) if each is not None], counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "most"), [(LSTM, 15), (GRU, 15), (MinGRU, 2)])
def test_kernels_on_a_gpu_do_not_depend_on_where_episodes_start(
    kind: type[Core], most: int, dtype: torch.dtype
) -> None:
    start = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    start[0, 0] = start[3, 1] = start[-1, 2] = True
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (0.05, 0.02)
    with simulated_gpu.simulated():
        expected, _ = on("cpu", kind, start, dtype)
        found, counted = on("cuda:0", kind, start, dtype)
        _, never = on("cuda:0", kind, torch.zeros_like(start), dtype)
        _, shorter = on("cuda:0", kind, start[:-1], dtype)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=rtol, atol=atol)
    assert {kind: never[kind] for kind in never.kinds()} == {kind: counted[kind] for kind in counted.kinds()}
    assert counted[SYNC] == 0 and (counted - shorter)[KERNEL] <= most
