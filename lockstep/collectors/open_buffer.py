"""A rollout buffer with its fields as numpy arrays, which environments write into."""

from __future__ import annotations

from typing import Any

from lockstep.buffers.rollout_buffers import RolloutBuffer
from lockstep.core.arrays import map_structure
from lockstep.envs.finite import floats

_FIELDS = ("start", "action", "reward", "log_prob", "value", "terminated", "truncated", "valid")


class OpenBuffer:
    """The arrays of a rollout buffer [T or T+1, A, ...], which share its memory."""

    def __init__(self, buffer: RolloutBuffer) -> None:
        self.buffer = buffer
        self.fields = {name: getattr(buffer.whole, name).numpy() for name in _FIELDS}
        self.obs = map_structure(lambda leaf: leaf.numpy(), buffer.whole.obs)
        self.floats = floats(self.obs)
        """The entries of observations that may be not finite, by name."""

    def at(self, t: int, rows: slice) -> Any:
        """The observations of some rows at one step, to write into."""
        return map_structure(lambda leaf: leaf[t, rows], self.obs)
