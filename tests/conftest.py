"""Settings that every test shares."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in worker processes

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = pytest.mark.skip(reason="no CUDA device on this machine")
    if importlib.util.find_spec("envpool") is None:
        missing["envpool"] = pytest.mark.skip(reason="EnvPool is not installed (it has no release for Python 3.10)")
    for item in items:
        for name, skip in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)
