"""CUDA graphs: the kernels of a function with fixed shapes, launched together instead of one by one from Python.

A graph repeats the kernels that it captured, on the same memory, so its bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Repeat = Callable[[], None]
Capture = Callable[[Repeat], Repeat]
"""Runs a function on fixed memory, and returns a function that runs its kernels again."""

_WARM_UP = 3
"""Runs before the capture, as torch's documentation requires: libraries choose and load their kernels in them."""


def cuda_graph(function: Repeat) -> Repeat:
    """A Capture. The function must not wait for the GPU or read a number from it."""
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
    """A function of tensors, captured with the given ones. Every call needs tensors of the same shapes.

    Args:
        function: everything else that it reads must keep its address.
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
        """The results, copied out of the graph's memory, which the next call overwrites."""
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        self._repeat()
        return tuple(result.clone() for result in self._results)
