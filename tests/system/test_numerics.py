"""What the calling process has set in torch and NumPy changes no bit of a run inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EXPERIMENTS, options

from lockstep import train
from lockstep.system import blas
from lockstep.system.numerics import torch_configured

GRID = torch.linspace(-3, 3, 64 * 64).view(64, 64)


@contextlib.contextmanager
def changed(change: Callable[[Any], Any], value: object, usual: object) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(usual)


def coarse() -> Any:
    return changed(torch.set_float32_matmul_precision, "medium", "highest")


def wide() -> Any:
    return changed(torch.set_default_dtype, torch.float64, torch.float32)


def flushing() -> Any:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor keeps denormal numbers")
    return changed(torch.set_flush_denormal, True, False)


def autocasting() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def parallel() -> Any:
    return changed(blas.set_threads, 2, 1)


def product() -> torch.Tensor:
    return GRID @ GRID


def product_of_numpy() -> torch.Tensor:
    large = np.random.default_rng(1).standard_normal((128, 128)).astype(np.float32)
    return torch.from_numpy(large @ large)


def ones() -> torch.Tensor:
    return torch.ones(3)


def denormal() -> torch.Tensor:
    return torch.tensor(1e-310, dtype=torch.float64) * 1


@pytest.mark.parametrize(
    ("setting", "compute"),
    [(coarse, product), (wide, ones), (flushing, denormal), (autocasting, product), (parallel, product_of_numpy)],
)
def test_numbers_are_computed_as_torch_does_by_itself_and_the_callers_setting_comes_back(
    setting: Any, compute: Any
) -> None:
    expected = compute()
    with setting():
        other = compute()
        with torch_configured(torch.get_num_threads()):
            found = compute()
            assert found.dtype == expected.dtype and torch.equal(found, expected)
        after = compute()
        assert after.dtype == other.dtype and torch.equal(after, other)
    if setting not in (coarse, parallel):  # which change bits only on some processors
        assert other.dtype != expected.dtype or not torch.equal(other, expected)


def test_a_run_has_the_same_bits_whatever_its_process_has_set(tmp_path: Path) -> None:
    expected = train(EXPERIMENTS["ppo"](), options=options(tmp_path / "plain")).digest
    with coarse(), wide(), autocasting():
        assert train(EXPERIMENTS["ppo"](), options=options(tmp_path / "set")).digest == expected


def test_on_a_gpu_fp32_is_exact_and_the_libraries_settings_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", True)
    before = cudnn.allow_tf32, cudnn.benchmark
    with torch_configured(1, "cuda:0"):
        assert not cudnn.allow_tf32 and not cudnn.benchmark
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        with cudnn.flags(enabled=True):  # torch refuses settings that contradict each other
            pass
    assert (cudnn.allow_tf32, cudnn.benchmark) == before
