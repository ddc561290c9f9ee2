"""Explains torch's errors of operations that have no deterministic kernel on a GPU, or that change tensors in place."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from lockstep.config.settings import SettingsError

_WITHOUT = re.compile(r"(\S+) does not have a deterministic implementation")
_IN_PLACE = re.compile(r"modified by an inplace operation: (.*?expected version \d+)")
_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn torch's errors into advice: about operations without deterministic kernels, and about changes in place.

    Raises:
        SettingsError: torch raised such an error.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if found := _WITHOUT.search(text):
            raise SettingsError(
                f"{found[1]} has no deterministic kernel on a GPU{_place(error)}: equal inputs would give different "
                "bits each time, so the run could be neither verified nor resumed exactly. Compute it with other "
                "operations (a sum under a mask instead of scattering, a product with a triangular matrix instead of "
                "cumsum), compute it on the CPU, or use --allow-nondeterministic, which gives up equality on GPUs."
            ) from error
        if "CUBLAS_WORKSPACE_CONFIG" in text:
            raise SettingsError(
                "CUBLAS_WORKSPACE_CONFIG has a value with which cuBLAS is not deterministic. Unset it, or set it to "
                ":4096:8, or use --allow-nondeterministic, which gives up identical bits on GPUs."
            ) from error
        if found := _IN_PLACE.search(text):
            raise SettingsError(
                "A loss or a model's forward changed a tensor in place that the backward pass needs (torch: "
                f"{found[1]}). Make a new tensor: y = x * 2 in place of x.mul_(2), x *= 2 or x[i] = 2, and nn.ReLU() "
                "in place of nn.ReLU(inplace=True)."
            ) from error
        raise


def _place(error: BaseException) -> str:
    """The last line outside torch that led to an error. For an error in a backward pass, this is the call of
    backward()."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_TORCH)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
