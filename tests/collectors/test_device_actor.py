"""Acting where a policy computes: what comes back lies in one piece of memory, and so do small inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import simulated_gpu
import torch
from gymnasium import spaces
from simulated_books import BACK, LAUNCH, PINNED, SYNC

from lockstep.collectors.device_actor import Acted, DevicePolicy, _acted
from lockstep.core.pieces import room, side_by_side
from lockstep.models import StandardModelConfig
from lockstep.models.capture import Inference, Inputs
from lockstep.system.graphs import cuda_graph


@dataclass(frozen=True)
class Actions:
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_actions_of_every_type_lie_beside_the_other_results(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for rows in (1, 3, 4):
        parts = _acted(Actions(shape, dtype), rows, kept=0)  # type: ignore[arg-type]
        memory = room(parts, torch.device("cpu"))
        acted = Acted(*side_by_side(parts, memory))
        acted.action.fill_(1)
        acted.log_prob.fill_(2.5)
        acted.value.fill_(3.5)
        assert acted.action.shape == (rows, *shape) and acted.action.dtype == dtype
        assert bool((acted.action == 1).all()) and acted.log_prob.tolist() == [2.5] * rows
        other = side_by_side(parts, memory.clone())
        assert all(torch.equal(a, b) for a, b in zip(acted, other, strict=True))


@pytest.mark.parametrize(("pixels", "copies"), [(36, 1), (84, 2)])  # 4 images of 36 * 36 * 4 bytes are small
def test_one_copy_brings_all_small_inputs(pixels: int, copies: int) -> None:
    rows, space = 4, spaces.Box(0, 255, (4, pixels, pixels), np.uint8)
    settings = StandardModelConfig(encoder="nature", core="lstm", core_size=8, previous_action_reward=True)
    model = settings.build(space, spaces.Discrete(3), precision="fp32", normalize_observations=False, seed=1)
    with simulated_gpu.simulated(), torch.no_grad():
        model = model.for_acting().to("cuda:0")
        noise = torch.rand(3, rows, model.distribution.noise_size, pin_memory=True)
        state = torch.zeros(rows, model.state_size, device="cuda:0")
        acting = DevicePolicy(model.distribution, noise, state, cuda_graph)
        inference, expected_state, counted = Inference(model, fixed=True), state.clone(), simulated_gpu.counts()
        acting.begin()
        for t in range(3):
            inputs = Inputs(
                torch.randint(0, 255, (1, rows, 4, pixels, pixels), dtype=torch.uint8).pin_memory(),
                torch.tensor([[t == 0, t == 1, True, False]]).pin_memory(),
                state,
                torch.randint(0, 3, (1, rows)).pin_memory(),
                torch.rand(1, rows).pin_memory(),
            )
            before = simulated_gpu.counts()
            value = acting.act(inference, inputs, model.distribution.sample).value.clone()
            counted = simulated_gpu.counts() - before
            there = inputs.map(lambda x: x.to("cuda:0"))._replace(state=expected_state)
            output, expected_state = model(*there)
            assert torch.equal(value, output.value[0].cpu())
        assert not simulated_gpu.faults()
    assert {kind: counted[kind] for kind in counted.kinds()} == {LAUNCH: 1, PINNED: copies, BACK: 1, SYNC: 1}
