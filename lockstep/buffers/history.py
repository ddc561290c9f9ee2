"""Replay in checkpoints: each step is written once, and checkpoints share the files that they have in common.

A shard's steps are cut into segments of equal length. Each is a separate part, such as `replay-000-00000007`. A
complete segment never changes again: later checkpoints link to its file, which takes no time or space, and the file
system deletes it with the last checkpoint that needs it. A checkpoint writes only the segments that the last one did
not contain as complete, and, in `replay-000`, the state that is not per step, such as priorities.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lockstep.run.checkpoint import Checkpoint, checkpoint_path, link_part, write_part

_SEGMENTS = 64
"""The least number of segments in a full replay."""
_LEAST = 16
"""The least number of steps of a segment."""


class Remembering(Protocol):
    """A storage whose state is mostly a ring of steps."""

    steps: int
    """Steps of the ring."""
    count: int
    """Steps inserted so far. A step no longer changes once two others follow it."""

    def state(self) -> dict[str, Tensor]:
        """All state that is not per step, by name."""
        ...

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of `state`. The steps must have been restored before."""
        ...

    def between(self, first: int, end: int) -> dict[str, Tensor]:
        """The steps first to end - 1, by name."""
        ...

    def put_back(self, first: int, tensors: dict[str, Tensor]) -> None:
        """Restore the result of between."""
        ...


class History:
    """The replay memory of one batch slot in checkpoints.

    Args:
        heartbeat: called at every segment, since reading or writing many from or to a slow disk is no stall.
    """

    def __init__(self, slot: int, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._name, self._heartbeat = f"replay-{slot:03d}", heartbeat
        self._final: dict[int, dict[str, Any]] = {}
        """The record of each complete segment, for lockstep.run.checkpoint.finish."""
        self._origin = Path()
        """The checkpoint that holds them."""

    def save(self, directory: Path, iteration: int, memory: Remembering) -> list[dict[str, Any]]:
        """Write a checkpoint's parts. Returns a record of each for lockstep.run.checkpoint.finish."""
        length, count = _length(memory), memory.count
        oldest = max(0, count - memory.steps + 1)
        if not self._origin.is_dir():  # somebody has deleted the last checkpoint
            self._final = {}
        parts = [write_part(directory, iteration, self._name, memory.state(), {"count": count})]
        final = {}
        for segment in range(oldest // length, count // length + 1):
            self._heartbeat()
            if segment in self._final:
                part = link_part(directory, iteration, self._final[segment], self._origin)
            else:
                first, end = max(oldest, segment * length), min(count, (segment + 1) * length - 1) + 1
                name = f"{self._name}-{segment:08d}"
                part = write_part(directory, iteration, name, memory.between(first, end), {"first": first})
            if (segment + 1) * length < count:
                final[segment] = part
            parts.append(part)
        self._final, self._origin = final, checkpoint_path(directory, iteration)
        return parts

    def link(self, directory: Path, iteration: int, saved: Checkpoint) -> list[dict[str, Any]]:
        """Reuse all parts of a checkpoint whose memory has not been restored yet. Returns what `save` returns."""
        parts = []
        for name in saved.names():
            if name == self._name or name.startswith(f"{self._name}-"):
                self._heartbeat()
                parts.append(link_part(directory, iteration, saved.parts[name], saved.path))
        return parts

    def restore(self, saved: Checkpoint, memory: Remembering) -> bool:
        """Restore the result of `save` under any layout. Returns whether the checkpoint contains it."""
        if self._name not in saved.parts:
            return False
        tensors, meta = saved.part(self._name)
        self._origin = saved.path
        for name in saved.names():
            if name.startswith(f"{self._name}-"):
                self._heartbeat()
                steps, about = saved.part(name)
                memory.put_back(about["first"], steps)
                segment = int(name.removeprefix(f"{self._name}-"))
                if (segment + 1) * _length(memory) < meta["count"]:
                    self._final[segment] = saved.parts[name]
        memory.load(tensors)
        return True


def _length(memory: Remembering) -> int:
    """Steps of a segment."""
    return max(_LEAST, memory.steps // _SEGMENTS)
