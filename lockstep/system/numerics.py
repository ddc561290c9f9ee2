"""Process-wide settings of torch and NumPy that change bits."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.system import blas

CUBLAS_WORKSPACE = ":4096:8"
"""CUBLAS_WORKSPACE_CONFIG of runs that do not set it. Without it, cuBLAS's sums may differ between calls."""


class _Setting(NamedTuple):
    """One of torch's process-wide settings, and the value that runs need."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    wanted: Any


def configure_torch(threads: int, device: str = "cpu", *, strict: bool = True) -> None:
    """Set the number of threads of torch and of NumPy's products, and reset torch's other settings to the defaults. On
    a GPU, use deterministic kernels with the full precision of fp32.

    Args:
        threads: the number of threads of an operation.
        device: the device that this process computes on.
        strict: on a GPU, raise an error if an operation has no deterministic kernel. Otherwise torch only warns.
    """
    torch.set_num_threads(threads)
    blas.set_threads(threads)
    for setting in _settings(device):
        setting.write(setting.wanted)
    torch.set_grad_enabled(True)
    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # for users' models that torch compiles
        _be_deterministic(True, not strict)
        torch.cuda.set_device(device)


@contextlib.contextmanager
def torch_configured(threads: int, device: str = "cpu", *, strict: bool = True) -> Iterator[None]:
    """As configure_torch, but temporarily and without autocast. The current GPU is not restored."""
    before = [(setting, setting.read()) for setting in _settings(device)]
    had = torch.get_num_threads()
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    where, errors = torch.get_default_device(), np.errstate(all="warn", under="ignore")
    try:
        with (
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            blas.threads_restored(),
        ):
            configure_torch(threads, device, strict=strict)
            with errors:
                yield
    finally:
        torch.set_num_threads(had)
        for setting, value in before:
            setting.write(value)
        if where.type != "cpu":
            torch.set_default_device(where)
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (was, warned):
            _be_deterministic(was, warned)


@contextlib.contextmanager
def each_written_once() -> Iterator[None]:
    """Allow nondeterministic kernels for calls that write every number once, so that all kernels give the same bits.
    Torch's deterministic kernels for these calls sort the indices first, and wait for the GPU to check them."""
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not was:
        yield
        return
    _be_deterministic(False, warns)
    try:
        yield
    finally:
        _be_deterministic(was, warns)


def _be_deterministic(on: bool, warns: bool) -> None:
    """As torch.use_deterministic_algorithms(on, warn_only=warns), but without importing torch's compiler, which takes
    each process two seconds. The compiler is configured only if it has been imported."""
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(on, warn_only=warns)
    else:
        torch.set_deterministic_debug_mode((1 if warns else 2) if on else 0)


def _settings(device: str) -> list[_Setting]:
    """The settings that matter on a device and are plain values."""
    everywhere = [
        _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        _Setting(_flushes_denormal_numbers, torch.set_flush_denormal, False),
    ]
    if device == "cpu":
        return everywhere
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    # Convolutions and recurrent cores use TF32 by default, which keeps 10 of fp32's 23 bits.
    # torch 2.9 and later also have a setting for each of them, and refuse to read allow_tf32 if it contradicts these.
    kinds = [cudnn.conv, cudnn.rnn] if hasattr(cudnn, "conv") else []
    return [
        *everywhere,
        _of(cudnn, "allow_tf32", False),
        *(_of(kind, "fp32_precision", "ieee") for kind in kinds),
        _of(matmul, "allow_bf16_reduced_precision_reduction", False),
        _of(matmul, "allow_fp16_reduced_precision_reduction", False),
        _of(cudnn, "benchmark", False),  # it would choose kernels by timing them
        # Deterministic mode would fill every new tensor with NaN, which costs a kernel for each tensor.
        _of(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ]


def _of(owner: Any, name: str, wanted: Any) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), wanted)


def _flushes_denormal_numbers() -> bool:
    return bool(torch.tensor(1e-310, dtype=torch.float64) * 1 == 0)
