"""Acting where a policy computes: what comes back lies in one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lockstep.collectors.on_device import _allocate


@dataclass(frozen=True)
class Actions:
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_actions_of_every_type_lie_beside_the_other_results(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for rows in (1, 3, 4):
        memory, acted = _allocate(Actions(shape, dtype), rows, torch.device("cpu"))  # type: ignore[arg-type]
        acted.action.fill_(1)
        acted.log_prob.fill_(2.5)
        acted.value.fill_(3.5)
        assert acted.action.shape == (rows, *shape) and acted.action.dtype == dtype
        assert bool((acted.action == 1).all()) and acted.log_prob.tolist() == [2.5] * rows
        copy, other = _allocate(Actions(shape, dtype), rows, torch.device("cpu"))  # type: ignore[arg-type]
        copy.copy_(memory)
        assert all(torch.equal(a, b) for a, b in zip(acted, other, strict=True))
