"""CUDA graphs: the kernels of a function of fixed shapes, launched together instead of one by one from Python.

A graph repeats the very kernels that it was captured from, on the same memory, so the bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Repeat = Callable[[], None]
Capture = Callable[[Repeat], Repeat]
"""Runs a function of fixed memory, and returns what runs its kernels again."""

_WARM_UP = 3
"""Runs before the capture, as torch's documentation asks for: libraries choose and load their kernels in them."""


def cuda_graph(function: Repeat) -> Repeat:
    """A Capture. The function may not wait for the GPU, nor read a number from it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class Graph:
    """A function of tensors, captured with those that it is made with. Every call must have tensors of their shapes.

    Args:
        function: whatever else it reads must stay where it is in memory.
    """

    def __init__(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], capture: Capture = cuda_graph
    ) -> None:
        self._inputs = [x.clone() for x in inputs]
        self._results: Sequence[Tensor] = ()

        def run() -> None:
            self._results = function(*self._inputs)

        self._repeat = capture(run)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results, in memory of their own: the graph's is written anew by the next call."""
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        self._repeat()
        return tuple(result.clone() for result in self._results)
