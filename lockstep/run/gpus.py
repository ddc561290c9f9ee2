"""The entries of a platform about GPUs: their models, driver and libraries, which the bits of a run depend on."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.config.layout import Layout
from lockstep.system.numerics import CUBLAS_WORKSPACE

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DRIVER = Path("/proc/driver/nvidia/version")


def used_gpus(layout: Layout) -> dict[str, Any]:
    """The entries of a platform about the GPUs that a layout uses: their names, the roles that compute on them, and
    their libraries. The numbers of GPUs and processes do not matter. Empty if the layout uses no GPUs."""
    if not layout.uses_gpus:
        return {}
    collecting, learning = (_of(layout, "collector", layout.collecting), _of(layout, "learner", layout.learning))
    return {
        "gpu": sorted({properties.name for properties in (*collecting, *learning)}),
        "cudnn": torch.backends.cudnn.version(),
        "devices": {"collecting": _names(collecting), "learning": _names(learning)},
        "cuda": {
            "runtime": torch.version.cuda,
            "driver": _driver_version(),
            "cublas": _cublas_version(),
            _WORKSPACE: os.environ.get(_WORKSPACE, CUBLAS_WORKSPACE),
            "models": {each.name: _model(each) for each in (*collecting, *learning)},
        },
    }


def _of(layout: Layout, role: Literal["collector", "learner"], count: int) -> list[Any]:
    """Properties of the GPUs that a role computes on."""
    devices = dict.fromkeys(layout.device_of(role, index) for index in range(count))
    return [torch.cuda.get_device_properties(device) for device in devices if device != "cpu"]


def _names(gpus: list[Any]) -> str:
    return ", ".join(sorted({each.name for each in gpus})) or "CPU"


def _model(gpu: Any) -> dict[str, Any]:
    """The properties by which libraries choose kernels. A slice of a GPU (MIG) has fewer multiprocessors."""
    return {
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "mig": " MIG " in gpu.name,
    }


def _driver_version() -> str | None:
    """The version of NVIDIA's driver; None if the system hides it."""
    try:
        words = _DRIVER.read_text().split()
        return next(word for word in words if word.replace(".", "").isdecimal() and "." in word)
    except (OSError, StopIteration):
        return _driver_version_by_nvml()


def _driver_version_by_nvml() -> str | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        found = nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
    except (OSError, AttributeError):
        return None
    return text.value.decode() if found else None


def _cublas_version() -> str | None:
    """The version of the cuBLAS that torch has loaded; None if it is unknown."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split(maxsplit=5)[-1] for line in maps if "/libcublas.so" in line)
        ask = ctypes.CDLL(path).cublasGetProperty
    except (OSError, StopIteration, AttributeError):
        return None
    parts = []
    for kind in range(3):  # major, minor, patch level
        value = ctypes.c_int()
        if ask(kind, ctypes.byref(value)):
            return None
        parts.append(str(value.value))
    return ".".join(parts)
