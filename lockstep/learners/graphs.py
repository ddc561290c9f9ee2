"""Gradients of slices as CUDA graphs. For on-policy algorithms, one launch cuts a slice out of its slot's rollout, and
runs its loss and its backward pass (GraphedSlices). For algorithms that replay, each slice is copied to where a graph
reads it (GraphedReplay).

A graph reads fixed memory, so each slot has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.onpolicy import Batch
from lockstep.buffers.on_policy import Cuts, FreshBatches
from lockstep.core.arrays import named_leaves
from lockstep.system.graphs import Capture

Differentiate = Callable[[int, Any, dict[str, Any]], tuple[Tensor, Tensor | None]]
"""Computes the gradient of a slot's slice, with the numbers that are reduced with it, and the items' priorities, from a
batch and hyperparameters by name. It must run the same kernels for every slice."""


class HyperTensors:
    """Hyperparameters as tensors where losses compute: a graph would keep plain numbers as constants, and a GPU divides
    by a number by multiplying with its reciprocal, but by a tensor exactly."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._given = device, list[float]()
        self._numbers = torch.empty(0)
        """float64 [H], always at the same place"""

    def of(self, hyper: dict[str, float]) -> dict[str, Any]:
        """Each by its name. Tensors of earlier calls have the new numbers, too."""
        numbers = list(hyper.values())
        if numbers != self._given:
            # Fresh pinned memory each time, since a copy may still read what was there before.
            given = torch.tensor(numbers, dtype=torch.float64, pin_memory=self._device.type != "cpu")
            if not self._given:
                self._numbers = torch.empty_like(given, device=self._device)
            self._numbers.copy_(given, non_blocking=True)
            self._given = numbers
        return dict(zip(hyper, self._numbers.unbind(), strict=True))


class GraphedSlices:
    """The gradients of the slices of fresh rollouts.

    Args:
        batches: cuts the slices.
        differentiate: for slices of these batches.
        capture: makes the graphs.
    """

    def __init__(self, batches: FreshBatches, differentiate: Differentiate, capture: Capture) -> None:
        self.batches, self._differentiate, self._capture = batches, differentiate, capture
        self._slots: dict[int, _Slot] = {}
        self._loaded: set[int] = set()
        """Slots whose memory holds the present iteration."""

    def begin(self) -> None:
        """Begin an iteration, whose rollouts no graph has yet."""
        self._loaded.clear()

    def gradient(self, slot: int, step: int, hyper: dict[str, Any]) -> Tensor | None:
        """The gradient of a slot's slice of a gradient step. None: no graph can serve slices of unequal sizes.

        Args:
            hyper: of HyperTensors.
        """
        if slot not in self._loaded:
            cuts = self.batches.cuts(slot)
            if cuts is None:
                return None
            graph = self._slots.get(slot)
            if graph is None or not graph.fits(cuts):
                graph = self._slots[slot] = _Slot(cuts, lambda batch: self._differentiate(slot, batch, hyper)[0])
                graph.capture(self.batches, self._capture)
            else:
                graph.load(cuts)
            self._loaded.add(slot)
        return self._slots[slot].run(step)


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
        return _shapes(_leaves(self._held)) == _shapes(_leaves(cuts))

    def load(self, cuts: Cuts) -> None:
        """Take an iteration's rollout."""
        _copy(_leaves(cuts), _leaves(self._held))

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


class GraphedReplay:
    """The gradients of slices of replayed items.

    Args:
        period: losses of updates whose numbers agree modulo this run the same kernels (Algorithm.update_period).
        differentiate, capture: as for GraphedSlices.
    """

    def __init__(self, period: int, differentiate: Differentiate, capture: Capture) -> None:
        self._period, self._differentiate, self._capture = period, differentiate, capture
        self._graphs: dict[Any, _Replayed] = {}
        """By slot, the update's place in the period, and the shapes of items."""

    def gradient(self, slot: int, batch: Any, hyper: dict[str, Any], update: int) -> tuple[Tensor, Tensor | None]:
        """The gradient of a slice, as a new tensor, and the priorities of its items, until the next slice.

        Args:
            hyper: of HyperTensors.
            update: the number of the gradient step.
        """
        place = update % self._period
        key = slot, place, _shapes(_leaves(batch))
        graph = self._graphs.get(key)
        if graph is None:
            if self._period > 1:  # the loss branches on it, so it must be a number of Python's
                hyper = {**hyper, "update": place or self._period, "number": hyper["update"]}
            graph = _Replayed(batch, lambda held: self._differentiate(slot, held, hyper), self._capture)
            self._graphs[key] = graph
        return graph.run(batch)


class _Replayed:
    """The memory of one slot's slices, and the graph over it."""

    def __init__(
        self, batch: Any, differentiate: Callable[[Any], tuple[Tensor, Tensor | None]], capture: Capture
    ) -> None:
        held = batch.map(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
        self._leaves = _leaves(held)
        _copy(_leaves(batch), self._leaves)
        self._result: tuple[Tensor, Tensor | None] = (torch.empty(0), None)

        def run() -> None:
            self._result = differentiate(held)

        self._repeat = capture(run)

    def run(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        _copy(_leaves(batch), self._leaves)
        self._repeat()
        gradient, priorities = self._result
        return gradient.clone(), priorities


def _leaves(batch: Any) -> list[Tensor]:
    return [leaf for _, leaf in named_leaves(batch)]


def _shapes(leaves: list[Tensor]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype) for x in leaves)


def _copy(leaves: list[Tensor], held: list[Tensor]) -> None:
    for to, x in zip(held, leaves, strict=True):
        to.copy_(x, non_blocking=True)
