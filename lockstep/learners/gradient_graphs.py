"""Gradients of slices as CUDA graphs. One launch cuts every slot's slice out of fixed memory, and computes its loss and
its gradient. This memory holds a slot's rollout (GraphedSlices) or, for algorithms that replay, its items of several
gradient steps (GraphedReplay).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.onpolicy import Batch
from lockstep.buffers.batches import Batches
from lockstep.buffers.on_policy import FreshBatches, Minibatches
from lockstep.buffers.replay_batches import Prefetched, ReplayBatches
from lockstep.buffers.slabs import laid_out
from lockstep.core.arrays import named_leaves
from lockstep.models.normalize import Normalizers
from lockstep.system.graphs import Branches, Capture

Found = tuple[Tensor, Tensor | None]
"""The gradient of a slice, with the numbers that are reduced with it, and the items' priorities."""
Differentiate = Callable[[int, Any, dict[str, Any]], Found]
"""Computes the gradient of a slot's slice from a batch and from hyperparameters by name. It must run the same kernels
for every slice."""


class HyperTensors:
    """Hyperparameters as tensors where losses compute: a graph would keep plain numbers as constants, and a GPU divides
    by a number by multiplying with its reciprocal, but by a tensor exactly."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._given = device, list[float]()
        self._numbers = torch.empty(0)
        """float64 [H], always at the same place"""

    def of(self, hyper: dict[str, float]) -> dict[str, Any]:
        """The hyperparameters by name. Tensors that earlier calls returned change to the new numbers, too."""
        numbers = list(hyper.values())
        if numbers != self._given:
            # Fresh pinned memory each time, since a copy may still read what was there before.
            given = torch.tensor(numbers, dtype=torch.float64, pin_memory=self._device.type != "cpu")
            if not self._given:
                self._numbers = torch.empty_like(given, device=self._device)
            self._numbers.copy_(given, non_blocking=True)
            self._given = numbers
        return dict(zip(hyper, self._numbers.unbind(), strict=True))


class GradientGraphs(ABC):
    """The gradients of slots' slices as CUDA graphs. The arguments are those of graphs_of."""

    def __init__(
        self,
        batches: FreshBatches | ReplayBatches,
        differentiate: Differentiate,
        capture: Capture,
        branches: Branches | None,
    ) -> None:
        self._source, self._differentiate, self._capture, self._branches = batches, differentiate, capture, branches
        self._graphs: dict[Any, _Graph] = {}
        """By slots and everything else that their kernels depend on."""

    def begin(self) -> None:  # noqa: B027
        """Begin an iteration. No graph has its rollouts yet."""

    @abstractmethod
    def gradients(self, slots: tuple[int, ...], step: int, hyper: dict[str, Any], update: int) -> list[Found] | None:
        """What Differentiate computes of each slot's slice of a gradient step, by one launch: the gradients as new
        tensors, the priorities until the next call. None: no graph can serve slices of unequal sizes.

        Args:
            hyper: of HyperTensors.
            update: the number of the gradient step.
        """

    def normalizers(self, slot: int) -> Normalizers:
        """The statistics that the model normalizes a slot's slices with."""
        return self._source.normalizers(slot)

    def _capture_slices(self, slots: tuple[int, ...], held: Sequence[_Held], hyper: dict[str, Any]) -> _Graph:
        def differentiate(slot: int, memory: _Held) -> Found:
            return self._differentiate(slot, memory.slice(), hyper)

        calls = [functools.partial(differentiate, *each) for each in zip(slots, held, strict=True)]
        return _Graph(calls, self._capture, self._branches)


def graphs_of(
    batches: Batches, period: int, differentiate: Differentiate, capture: Capture, branches: Branches | None
) -> GradientGraphs | None:
    """Graphs over these batches; None if their class does not declare that graphs may cut their slices (in_graphs).

    Args:
        period: losses of updates whose numbers agree modulo this run the same kernels (Algorithm.update_period).
        differentiate: for slices of these batches.
        capture: makes the graphs.
        branches: runs the slots' slices side by side. None: one after the other, since they write the same memory.
    """
    if not vars(type(batches)).get("in_graphs", False):
        return None
    if isinstance(batches, FreshBatches):
        return GraphedSlices(batches, differentiate, capture, branches)
    if isinstance(batches, ReplayBatches):
        return GraphedReplay(batches, period, differentiate, capture, branches)
    return None


class GraphedSlices(GradientGraphs):
    """The gradients of the slices of fresh rollouts."""

    def __init__(
        self, batches: FreshBatches, differentiate: Differentiate, capture: Capture, branches: Branches | None
    ) -> None:
        super().__init__(batches, differentiate, capture, branches)
        self._batches = batches
        self._held: dict[int, _Rollout] = {}
        """By slot."""
        self._loaded: set[int] = set()
        """Slots whose memory holds the present iteration."""

    def begin(self) -> None:
        self._loaded.clear()

    def gradients(self, slots: tuple[int, ...], step: int, hyper: dict[str, Any], update: int) -> list[Found] | None:
        for slot in slots:
            if slot not in self._loaded and not self._load(slot):
                return None
        held = [self._held[slot] for slot in slots]
        if slots not in self._graphs:
            self._graphs[slots] = self._capture_slices(slots, held, hyper)
        for each in held:
            each.seek(step)
        return self._graphs[slots].run()

    def _load(self, slot: int) -> bool:
        """Copy a slot's iteration to where graphs read it. Returns whether they can."""
        minibatches = self._batches.minibatches(slot)
        if minibatches is None:
            return False
        held = self._held.get(slot)
        if held is None or not held.fits(minibatches):
            self._held[slot] = _Rollout(minibatches, self._batches)
            self._graphs = {slots: graph for slots, graph in self._graphs.items() if slot not in slots}
        self._held[slot].load(minibatches)
        self._loaded.add(slot)
        return True


class GraphedReplay(GradientGraphs):
    """The gradients of slices of replayed items."""

    def __init__(
        self,
        batches: ReplayBatches,
        period: int,
        differentiate: Differentiate,
        capture: Capture,
        branches: Branches | None,
    ) -> None:
        super().__init__(batches, differentiate, capture, branches)
        self._batches, self._period = batches, period
        self._held: dict[Any, _Items] = {}
        """By slot, and the shapes of what is read together."""

    def gradients(self, slots: tuple[int, ...], step: int, hyper: dict[str, Any], update: int) -> list[Found]:
        items = [self._batches.prefetched(slot, step) for slot in slots]
        held = [self._load(slot, read) for slot, (read, _) in zip(slots, items, strict=True)]
        place = update % self._period
        key = slots, place, tuple(each.form for each in held)
        if key not in self._graphs:
            if self._period > 1:  # the loss branches on it, so it must be a number of Python's
                hyper = {**hyper, "update": place or self._period, "number": hyper["update"]}
            self._graphs[key] = self._capture_slices(slots, held, hyper)
        for each, (_, index) in zip(held, items, strict=True):
            each.seek(index)
        return self._graphs[key].run()

    def _load(self, slot: int, items: Prefetched) -> _Items:
        """The memory that holds a slot's items."""
        key = slot, len(items.drawn), items.moves, _shapes(_leaves(items.batch))
        if key not in self._held:
            if moved := [other for other in self._held if other[0] == slot and other[2] != items.moves]:
                self._held = {each: held for each, held in self._held.items() if each not in moved}
                self._graphs = {each: graph for each, graph in self._graphs.items() if slot not in each[0]}
            self._held[key] = _Items(key[1:], items, functools.partial(self._batches.read, slot))
        self._held[key].load(items)
        return self._held[key]


class _Held(ABC):
    """Memory that graphs read, with a counter that tells which slice is next.

    Args:
        slices: how many it has.
    """

    def __init__(self, slices: int, device: torch.device) -> None:
        self.slices = slices
        self._index = torch.zeros(1, dtype=torch.int64, device=device)
        self._next = 0
        """The value of the counter after the queued graphs have run; -1 if unknown."""

    def seek(self, index: int) -> None:
        """Make this slice the next."""
        index %= self.slices
        if index != self._next:
            self._index.fill_(index)
        self._next = (index + 1) % self.slices

    @abstractmethod
    def slice(self) -> Any:
        """The slice of the next gradient step, in a graph."""

    def _advance(self) -> None:
        """Advance to the next slice, in a graph."""
        self._next = -1  # since capturing may run it
        if self.slices > 1:
            self._index.add_(1).remainder_(self.slices)


class _Rollout(_Held):
    """A slot's rollout, with its minibatches."""

    def __init__(self, minibatches: Minibatches, batches: FreshBatches) -> None:
        super().__init__(minibatches.steps, minibatches.whole.reward.device)
        self._batches = batches
        self._minibatches = minibatches.map(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))

    def fits(self, minibatches: Minibatches) -> bool:
        """Whether minibatches have the shapes of those that this was made with."""
        return _shapes(_leaves(self._minibatches)) == _shapes(_leaves(minibatches))

    def load(self, minibatches: Minibatches) -> None:
        """Copy an iteration's rollout into this memory."""
        for to, x in zip(_leaves(self._minibatches), _leaves(minibatches), strict=True):
            to.copy_(x, non_blocking=True)

    def slice(self) -> Batch:
        minibatches, index = self._minibatches, self._index
        items = None if minibatches.items is None else minibatches.items.index_select(0, index)[0]
        moments = None if minibatches.moments is None else minibatches.moments.index_select(0, index)[0].unbind()
        batch = self._batches.select(minibatches.whole, items, moments)
        self._advance()
        return batch


class _Items(_Held):
    """A slot's items of one or several gradient steps.

    Args:
        form: what graphs over them depend on.
        items: an example.
        read: makes a minibatch of what was prefetched for it.
    """

    def __init__(self, form: tuple[Any, ...], items: Prefetched, read: Callable[[Any], Any]) -> None:
        assert items.memory is not None
        super().__init__(len(items.drawn), items.memory.device)
        self.form, self._read = form, read
        self._memory = torch.empty_like(items.memory)
        self._batch = laid_out(items.batch, self._memory)
        self._present: Prefetched | None = None

    def load(self, items: Prefetched) -> None:
        """Copy prefetched items into this memory."""
        if items is not self._present:
            assert items.memory is not None
            self._memory.copy_(items.memory)
            self._present = items

    def slice(self) -> Any:
        batch = self._batch if self.slices == 1 else self._batch.part(self._index, self.slices)
        self._advance()
        return self._read(batch)


class _Graph:
    """One graph of several slots' slices."""

    def __init__(self, calls: list[Callable[[], Found]], capture: Capture, branches: Branches | None) -> None:
        self._found: list[Found] = []

        def run() -> None:
            self._found = [call() for call in calls] if branches is None else branches.call(calls)

        self._repeat = capture(run)

    def run(self) -> list[Found]:
        self._repeat()
        return [(gradient.clone(), priorities) for gradient, priorities in self._found]


def _leaves(batch: Any) -> list[Tensor]:
    return [leaf for _, leaf in named_leaves(batch)]


def _shapes(leaves: list[Tensor]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype) for x in leaves)
