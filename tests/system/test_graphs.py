"""CUDA graphs without a GPU: what stands in for them repeats the recorded kernels on the memory of the first run, so
whatever a graph would miss is missed here too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tiny import EXPERIMENTS, options
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.collectors.device_actor import DevicePolicy
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.launchers.launch import train
from lockstep.models import StandardModelConfig
from lockstep.models.capture import Inference, Inputs


class Tape(TorchDispatchMode):
    """Keeps every kernel that is called, with the very tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors(y)


def taped(function: Callable[[], Any]) -> Callable[[], None]:
    function()
    with Tape() as tape:
        function()

    @torch.no_grad()
    def repeat() -> None:
        for func, args, kwargs, result in tape.calls:
            for held, new in zip(tensors(result), tensors(func(*args, **kwargs)), strict=True):
                if held is not new:
                    held.copy_(new)

    return repeat


def test_the_stand_in_misses_what_a_graph_would_miss() -> None:
    scale, x, held = 2.0, torch.ones(1), torch.zeros(1)
    repeat = taped(lambda: held.copy_(x * scale))
    x.fill_(5.0)
    repeat()
    assert held.item() == 10.0
    scale = 3.0
    repeat()
    assert held.item() == 10.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [{"encoder": "nature"}, {"encoder": "nature", "core": "lstm", "core_size": 8}])
def test_acting_has_the_same_bits(settings: dict[str, Any], precision: Any) -> None:
    steps, rows = 4, 3
    config = StandardModelConfig(**settings)
    model = config.build(
        spaces.Box(0, 255, (4, 84, 84), np.uint8),
        spaces.Discrete(4),
        precision=precision,
        normalize_observations=False,
        seed=1,
    ).for_acting()
    inference, distribution = Inference(model, fixed=True), model.distribution
    noise, state = torch.zeros(steps, rows, distribution.noise_size), torch.zeros(rows, model.state_size)
    acting = DevicePolicy(distribution, noise, state.clone(), taped)
    with torch.inference_mode():
        for rollout in range(2):
            draw = torch.Generator().manual_seed(rollout)
            noise.copy_(torch.rand(noise.shape, generator=draw))
            acting.begin()
            for t in range(steps):
                obs = torch.randint(0, 256, (1, rows, 4, 84, 84), generator=draw, dtype=torch.uint8)
                start = torch.rand(1, rows, generator=draw) < 0.3
                expected, state = model(obs, start, state, None, None)
                inputs = Inputs(obs, start, acting.state, None, None)
                found = acting.act(inference, inputs, distribution.sample)
                action = distribution.sample(expected.policy[0], noise[t])
                assert torch.equal(found.action, action) and torch.equal(found.value, expected.value[0])
                assert torch.equal(found.log_prob, distribution.log_prob(expected.policy[0], action))
                assert torch.equal(acting.state, state)
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn(parameter.shape, generator=draw))
                inference.refresh()
                value = model(obs, start, state, None, None)[0].value[0]
                assert torch.equal(acting.value(inference, inputs), value)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in ("ppo", "impala-bf16")),  # as ppo-bf16
        *("ppo-bf16", "mujoco-normalized"),
    ],
)
def test_learning_has_the_same_bits(name: str, tmp_path: Path) -> None:
    plain = train(EXPERIMENTS[name](), Layout(), options(tmp_path / "plain"))
    used: list[str] = []

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        used.append(function.__qualname__)
        return taped(function)

    with (
        mock.patch("lockstep.training.start.cuda_graph", capture),
        mock.patch("lockstep.collectors.collectors.cuda_graph", capture),
        mock.patch.object(Layout, "validate", lambda self: None),
    ):
        graphed = train(EXPERIMENTS[name](), replace(Layout(), graphs=1), options(tmp_path / "graphed"))
    assert len(used) > 1
    assert graphed.digest == plain.digest


@pytest.mark.parametrize(
    "text", ["inline,graphs=1", "cpu:a1-l1,graphs=1", "acpu-l0,graphs=1", "inline,device=0,graphs=2"]
)
def test_graphs_need_gpus(text: str) -> None:
    with pytest.raises(SettingsError, match=r"graphs .*0 or 1, .*GPUs"):
        Layout.parse(text)


def test_a_layout_names_its_graphs() -> None:
    assert str(Layout.parse("a0-l0,graphs=1")) == "a0-l0,graphs=1"
