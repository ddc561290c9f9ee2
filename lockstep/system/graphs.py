"""CUDA graphs, which launch all kernels of a function with fixed shapes together instead of one by one from Python.

A graph repeats the kernels that it has captured on the same memory, so it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lockstep.config.settings import SettingsError

T = TypeVar("T")
Repeat = Callable[[], None]
Capture = Callable[[Repeat], Repeat]
"""Runs a function on fixed memory, and returns a function that runs its kernels again."""

_WARM_UP = 3
"""Runs before the capture, which torch's documentation requires. In these runs, libraries choose and load kernels."""


def cuda_graph(function: Repeat) -> Repeat:
    """Capture a function as a CUDA graph (a Capture). The function must not wait for the GPU, and must not copy numbers
    to or from it.

    Raises:
        SettingsError: the function cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        cause = error.__context__ or error  # the end of a failed capture raises an error, too
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        said = str(cause).strip().splitlines()[0]
        raise SettingsError(
            f"graphs=1: the model, the loss or the environment cannot be captured as a CUDA graph ({said}). It waits "
            "for the GPU, reads numbers from it (item, tolist, if), or copies numbers to it (torch.tensor). Leave "
            "graphs=1 out of --layout, or compute only with tensors on the GPU."
        ) from error
    return graph.replay


def captured(step: Repeat, capture: Capture, changed: Sequence[torch.Tensor]) -> Repeat:
    """A graph of a step. Capturing runs the step, so the tensors that it changes (`changed`) are restored."""
    before = [x.clone() for x in changed]
    graph = capture(step)
    for x, value in zip(changed, before, strict=True):
        x.copy_(value)
    return graph


class Branches:
    """Lets functions run side by side on a GPU, so that small kernels fill it.

    Args:
        device: the GPU.
        count: how many functions at most.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        # Reused by all calls, since libraries reserve memory for every stream.
        self._streams = [torch.cuda.Stream(device) for _ in range(count - 1)]

    def call(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions that do not write memory that another one reads or writes. Later kernels of the current stream
        wait for all of them."""
        current = torch.cuda.current_stream()
        streams = self._streams[: len(functions) - 1]
        for stream in streams:
            stream.wait_stream(current)
        results = [functions[0]()]
        for stream, function in zip(streams, functions[1:], strict=True):
            with torch.cuda.stream(stream):
                results.append(function())
        for stream in streams:
            current.wait_stream(stream)
        return results
