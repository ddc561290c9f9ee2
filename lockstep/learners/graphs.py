"""Gradients of slices as CUDA graphs: one launch cuts a slice out of its slot's rollout, and runs its loss and its
backward pass.

A graph reads fixed memory, so each slot has its own, which an iteration's rollout is copied into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.base import Batch
from lockstep.buffers.on_policy import Cuts, FreshBatches
from lockstep.system.graphs import Capture

Differentiate = Callable[[Batch, dict[str, Any]], Tensor]
"""Computes a slice's gradient, with the numbers that are reduced with it, from hyperparameters by name."""


class GraphedSlices:
    """The gradients of a learner's slices.

    Args:
        batches: cuts the slices.
        differentiate: it must run the same kernels for every slice.
        capture: makes the graphs.
        device: where they run.
    """

    def __init__(
        self, batches: FreshBatches, differentiate: Differentiate, capture: Capture, device: torch.device
    ) -> None:
        self._batches, self._differentiate, self._capture, self._device = batches, differentiate, capture, device
        self._slots: dict[int, _Slot] = {}
        self._loaded: set[int] = set()
        """Slots whose memory holds the present iteration."""
        self._hyper = torch.empty(0)
        """float64 [H]: the hyperparameters that graphs read, which would keep plain numbers as constants."""
        self._given: list[float] = []

    def begin(self) -> None:
        """Begin an iteration, whose rollouts the batches have taken."""
        self._loaded.clear()

    def gradient(self, slot: int, step: int, hyper: dict[str, float]) -> Tensor | None:
        """The gradient of a slot's slice of a gradient step. None: no graph can serve slices of unequal sizes."""
        cuts = self._batches.cuts(slot)
        if cuts is None:
            return None
        self._set(list(hyper.values()))
        graph = self._slots.get(slot)
        if graph is None or not graph.fits(cuts):
            graph = self._slots[slot] = _Slot(cuts, lambda batch: self._differentiate(batch, self._named(hyper)))
            graph.capture(self._batches, self._capture)
            self._loaded.add(slot)
        elif slot not in self._loaded:
            graph.load(cuts)
            self._loaded.add(slot)
        return graph.run(step)

    def _named(self, hyper: dict[str, float]) -> dict[str, Tensor]:
        return dict(zip(hyper, self._hyper.unbind(), strict=True))

    def _set(self, numbers: list[float]) -> None:
        if numbers == self._given:
            return
        # Fresh pinned memory each time, since a copy may still read what was there before.
        given = torch.tensor(numbers, dtype=torch.float64, pin_memory=self._device.type != "cpu")
        if not self._given:
            self._hyper = torch.empty_like(given, device=self._device)
        self._hyper.copy_(given, non_blocking=True)
        self._given = numbers


class _Slot:
    """One slot's memory, and the graph over it."""

    def __init__(self, cuts: Cuts, differentiate: Callable[[Batch], Tensor]) -> None:
        device, form = cuts.whole.reward.device, torch.contiguous_format
        self._held = cuts.map(lambda x: torch.empty_like(x, device=device, memory_format=form))
        self._differentiate = differentiate
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._next = 0
        """The value of step when the queued graphs have run."""
        self._result = torch.empty(0)
        self._repeat: Callable[[], None] = lambda: None
        self.load(cuts)

    def fits(self, cuts: Cuts) -> bool:
        """Whether cuts have the shapes of those that this was made with."""
        return _shapes(self._held) == _shapes(cuts)

    def load(self, cuts: Cuts) -> None:
        """Take an iteration's rollout."""
        for to, x in zip(self._held.leaves(), cuts.leaves(), strict=True):
            to.copy_(x, non_blocking=True)

    def capture(self, batches: FreshBatches, capture: Capture) -> None:
        """Make the graph."""

        def run() -> None:
            held = self._held
            items = None if held.items is None else held.items.index_select(0, self._step)[0]
            moments = None if held.moments is None else held.moments.index_select(0, self._step)[0].unbind()
            self._result = self._differentiate(batches.cut(held.whole, items, moments))
            if held.steps > 1:
                self._step.add_(1).remainder_(held.steps)

        self._repeat = capture(run)
        self._next = -1  # since capturing may have run it

    def run(self, step: int) -> Tensor:
        """The gradient of a step's slice, as a new tensor."""
        step %= self._held.steps
        if step != self._next:
            self._step.fill_(step)
        self._repeat()
        self._next = (step + 1) % self._held.steps
        return self._result.clone()


def _shapes(cuts: Cuts) -> list[Any]:
    return [(x.shape, x.dtype) for x in cuts.leaves()]
