"""CUDA graphs: the kernels of a function with fixed shapes, launched together instead of one by one from Python.

A graph repeats the kernels that it captured, on the same memory, so its bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
