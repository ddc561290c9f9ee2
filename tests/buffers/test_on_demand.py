from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lockstep.buffers.frames import Ring, StackedFrames
from lockstep.buffers.on_demand import zeros_on_demand

_STATISTICS = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(_STATISTICS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64, torch.bool])
def test_they_are_zeros_of_any_type_that_can_be_written(dtype: torch.dtype) -> None:
    x = zeros_on_demand(3, 2, dtype=dtype)
    assert torch.equal(x, torch.zeros(3, 2, dtype=dtype))
    x[1] = 1
    assert x.sum() == 2


def test_without_entries_and_on_other_devices_they_are_those_of_torch() -> None:
    assert zeros_on_demand(0, 4, dtype=torch.uint8).shape == (0, 4)
    with torch.device("meta"):
        assert zeros_on_demand(5, dtype=torch.uint8).device.type == "meta"
    assert zeros_on_demand(5, dtype=torch.uint8, device=torch.device("meta")).device.type == "meta"


@pytest.mark.skipif(not _STATISTICS.exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", [Ring, StackedFrames])
def test_steps_that_are_not_stored_yet_take_no_memory(kind: type[Ring]) -> None:
    before = resident()
    ring = kind(50_000, torch.zeros(1, 4, 84, 84, dtype=torch.uint8))
    assert ring.nbytes > 350e6
    assert resident() - before < 50e6
