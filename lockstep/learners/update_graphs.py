"""CUDA graphs for what follows a global gradient: division, clipping, the optimizer, and the target network. Each of
these launches dozens of kernels, which are short if the networks are small."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.system.graphs import Capture, Repeat, captured

Outcome = tuple[Tensor, Any]
"""Counts and sums of metrics, and the norm of the gradient."""
_MOST = 8
"""The most graphs at a time. The periods of a policy and of a target network lead to several kinds of updates, and each
kind has a graph. An iteration with more kinds has no graphs."""
_REMEMBERED = 1000
"""Kinds of updates."""


class UpdateGraphs:
    """Applies gradients by graphs. The rates of an update are constants in its graph, so there is one for each kind of
    update that an earlier iteration had, too.

    Args:
        capture: makes the graphs.
        changed: the tensors that updates change.
        restored: called after a capture, when these tensors have their earlier values again.
    """

    def __init__(self, capture: Capture, changed: Callable[[], Sequence[Tensor]], restored: Callable[[], None]) -> None:
        self._capture, self._changed, self._restored = capture, changed, restored
        self._total: Tensor | None = None
        """What graphs divide and apply."""
        self._graphs: dict[Hashable, tuple[Repeat, list[Outcome]]] = {}
        self._before, self._latest, self._now = set[Hashable](), set[Hashable](), set[Hashable]()
        """The kinds of updates of earlier iterations, of the last one and of this one."""

    def begin(self) -> None:
        """Begin an iteration."""
        self._latest, self._now = self._now, set()
        self._before |= self._latest
        if len(self._before) > _REMEMBERED:  # rates that change in every iteration
            self._before.clear()

    def run(self, total: Tensor, kind: Hashable, apply: Callable[[Tensor], Outcome]) -> Outcome | None:
        """Apply a global gradient by one launch. The results are valid until the next call. None: it has no graph.

        Args:
            total: the sum over slices, with the numbers behind it.
            kind: all that the kernels depend on.
            apply: launches them.
        """
        self._now.add(kind)
        if kind not in self._graphs:
            if kind not in self._before or len(self._latest) > _MOST:
                return None
            if len(self._graphs) == _MOST:
                self._graphs.clear()
            self._graphs[kind] = self._captured(total, apply)
        assert self._total is not None
        self._total.copy_(total)
        repeat, (found,) = self._graphs[kind]
        repeat()
        return found

    def _captured(self, total: Tensor, apply: Callable[[Tensor], Outcome]) -> tuple[Repeat, list[Outcome]]:
        place = self._total = torch.empty_like(total) if self._total is None else self._total
        place.copy_(total)
        found: list[Outcome] = []

        def run() -> None:
            found[:] = [apply(place)]

        repeat = captured(run, self._capture, self._changed())
        self._restored()
        return repeat, found
