"""What a user is warned about before a run starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import EXPERIMENTS, options

from lockstep import train
from lockstep.agent import NO_KERNELS, Agent
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
        ("rainbow-lag-1", "portable", False),
        ("iqn", "portable", True),
        ("portable-cartpole-a2c", "portable", False),
    ],
)
def test_portable_arithmetic_without_kernels_is_warned_about(
    name: str, precision: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = dataclasses.replace(EXPERIMENTS[name](), precision=precision)
    warn_before_run(experiment, Layout(), options(tmp_path / "run"))
    assert ("no kernels compute this algorithm" in capsys.readouterr().err) is warned


def test_kernels_that_do_not_know_a_space_or_an_activation_are_missed() -> None:
    experiment = EXPERIMENTS["portable-cartpole-a2c"]()
    assert Agent(experiment).has_kernels and NO_KERNELS not in Agent(experiment).warnings()
    assert not experiment.replace(**{"model.activation": "elu"}).has_kernels
    several = experiment.replace(**{"env.id": "lockstep/TupleBandit-v0", "env.adapter": "gymnasium"})
    assert several.has_kernels and NO_KERNELS in Agent(several).warnings()
