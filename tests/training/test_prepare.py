"""What a user is warned about before a run starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import EXPERIMENTS, options

from lockstep import train
from lockstep.config.layout import Layout
from lockstep.system import machine
from lockstep.training.prepare import warn_before_run


@pytest.mark.parametrize(
    ("flags", "precision", "warned"),
    [
        ("fpu avx2 fma", "bf16", True),
        ("fpu avx2 fma", "fp32", False),
        ("fpu avx2 avx512f avx512_bf16", "bf16", False),
        ("fp asimd bf16", "bf16", False),
        ("", "bf16", False),
    ],
)
def test_bf16_is_warned_about_where_the_cpu_emulates_it(
    flags: str,
    precision: str,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("", frozenset(flags.split())))
    experiment = dataclasses.replace(EXPERIMENTS["cartpole-lag-1"](), precision=precision)
    train(experiment, "inline", options(tmp_path / "run"), stop_after=1)
    assert ("no instructions for bf16" in capsys.readouterr().err) is warned


@pytest.mark.parametrize(
    ("name", "precision", "warned"),
    [
        ("portable-pendulum", "portable", False),
        ("ppo-lstm", "portable", True),
        ("ppo-lstm", "fp32", False),
        ("rainbow-lag-1", "portable", True),
    ],
)
def test_portable_arithmetic_without_kernels_is_warned_about(
    name: str, precision: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = dataclasses.replace(EXPERIMENTS[name](), precision=precision)
    warn_before_run(experiment, Layout(), options(tmp_path / "run"))
    assert ("no kernels compute this algorithm" in capsys.readouterr().err) is warned
