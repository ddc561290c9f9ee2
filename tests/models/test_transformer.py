"""The transformer core beside a slow version that looks at each step by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.settings import SettingsError
from lockstep.models import StandardModelConfig, Transformer

STEPS, ENVS, FEATURES, SIZE, MEMORY, HEADS = 9, 3, 4, 8, 3, 2


def transformer(layers: int = 1) -> Transformer:
    torch.manual_seed(3)
    core = Transformer(FEATURES, SIZE, memory=MEMORY, layers=layers, heads=HEADS)
    for parameter in core.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    return core


def begun(core: Transformer) -> Tensor:
    return torch.zeros(ENVS, core.state_size)


def starts() -> Tensor:
    start = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    start[0], start[4, 1], start[5, 1], start[8, 2] = True, True, True, True
    return start


def turned(x: Tensor, position: int) -> Tensor:
    """The numbers of one head as complex ones, multiplied by exp(i * position * frequency)."""
    half = len(x) // 2
    frequency = torch.tensor([10_000.0 ** (-2 * i / len(x)) for i in range(half)])
    whole = torch.complex(x[:half], x[half:]) * torch.exp(1j * position * frequency)
    return torch.cat([whole.real, whole.imag])


def gated(gate: Any, x: Tensor, y: Tensor) -> Tensor:
    """A GRU cell from y to the state x, with separate matrices."""
    r, z, new = gate.of_output(y).chunk(3)
    reset, update = gate.of_input(x).chunk(2)
    r, z = torch.sigmoid(r + reset), torch.sigmoid(z + update)
    return (1 - z) * x + z * torch.tanh(new + gate.candidate(r * x))


def slow(core: Transformer, x: Tensor, start: Tensor) -> Tensor:
    """[T, B, H] of a core whose episodes begin in this sequence, step by step."""
    outputs = torch.zeros(STEPS, ENVS, SIZE)
    for b in range(ENVS):
        hidden = [core.embed(x[t, b]) for t in range(STEPS)]
        layers: Any = core.layers
        for layer in layers:
            parts = [layer.query_key_value(layer.before_attention(h)).chunk(3) for h in hidden]
            after = []
            for t, h in enumerate(hidden):
                begin = max(s for s in range(t + 1) if start[s, b])
                seen = range(max(begin, t - MEMORY), t + 1)
                heads = []
                for n in range(HEADS):
                    mine = slice(n * SIZE // HEADS, (n + 1) * SIZE // HEADS)
                    q = turned(parts[t][0][mine], t)
                    scores = torch.stack([q @ turned(parts[s][1][mine], s) for s in seen]) / math.sqrt(SIZE / HEADS)
                    values = torch.stack([parts[s][2][mine] for s in seen])
                    heads.append((torch.softmax(scores, 0).unsqueeze(1) * values).sum(0))
                h = gated(layer.after_attention, h, F.relu(layer.attended(torch.cat(heads))))
                x_t = layer.narrow(F.relu(layer.widen(layer.before_mlp(h))))
                after.append(gated(layer.after_mlp, h, F.relu(x_t)))
            hidden = after
        outputs[:, b] = torch.stack(hidden)
    return outputs


@pytest.mark.parametrize("layers", [1, 2])
def test_each_step_attends_to_those_before_it_in_its_episode(layers: int) -> None:
    core, x = transformer(layers), torch.randn(STEPS, ENVS, FEATURES)
    with torch.no_grad():
        outputs, state = core(x, starts(), begun(core))
        torch.testing.assert_close(outputs, slow(core, x, starts()), rtol=1e-4, atol=1e-5)
    assert state[:, -1].tolist() == [3.0, 3.0, 1.0], "steps of the present episodes, at most those of the memory"


def test_attention_by_hand() -> None:
    core = Transformer(1, 2, memory=1, layers=1, heads=1)
    for parameter in core.parameters():
        nn.init.zeros_(parameter)
    layers: Any = core.layers
    (layer,) = layers
    layer.before_attention.bias.data = torch.tensor([1.0, 0.0])
    layer.query_key_value.weight.data[:4] = torch.eye(2).repeat(2, 1)  # queries and keys are [1, 0], at any step
    kept = torch.tensor([[[1.0, 0.0, 5.0, 0.0]]])
    query, key = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    value = torch.tensor([[[5.0, 0.0]], [[3.0, 1.0]]])
    visible = torch.tensor([[[[True, True]]]])
    found = layer._attend(query, key, value, visible)[0, 0]
    # One step apart, the product of query and key is cos(1); at the same step it is 1. Scores are divided by sqrt(2).
    weight = 1 / (1 + math.exp((1 - math.cos(1)) / math.sqrt(2)))
    assert found.tolist() == pytest.approx([5 * weight + 3 * (1 - weight), 1 - weight], abs=1e-6)
    _, state = core(torch.zeros(1, 1, 1), torch.tensor([[False]]), torch.cat([kept.flatten(), torch.ones(1)])[None])
    assert state.tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]], "the key [1, 0] and value [0, 0] of this step, and the count"


@pytest.mark.parametrize("layers", [1, 2])
def test_a_sequence_equals_its_single_steps(layers: int) -> None:
    core, x, start = transformer(layers), torch.randn(STEPS, ENVS, FEATURES), starts()
    start[0] = False
    state = torch.randn(ENVS, core.state_size)
    state[:, -1] = torch.tensor([0.0, 2.0, 3.0])
    with torch.no_grad():
        outputs, final = core(x, start, state)
        exported = state
        for t in range(STEPS):
            stepped, exported = core.step(x[t], exported.masked_fill(start[t].unsqueeze(1), 0.0))
            output_t, state = core(x[t : t + 1], start[t : t + 1], state)
            torch.testing.assert_close(output_t[0], outputs[t], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(stepped, outputs[t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)


def test_gradients_reach_earlier_steps_of_the_rollout_alone() -> None:
    core, x = transformer(), torch.randn(STEPS, ENVS, FEATURES, requires_grad=True)
    outputs, _ = core(x, starts(), begun(core))
    (gradient,) = torch.autograd.grad(outputs[6, 1].sum(), x)
    reached = gradient.abs().sum(-1).nonzero().tolist()
    assert reached == [[5, 1], [6, 1]], "the episode began in step 5"
    assert all(p.grad is None or p.grad.isfinite().all() for p in core.parameters())


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"core_size": 12, "core_heads": 4}, "core_heads=4"), ({"core_memory": 0}, "core_memory=0")],
)
def test_sizes_that_do_not_fit_are_refused(settings: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        StandardModelConfig(core="transformer", **settings).validate()
