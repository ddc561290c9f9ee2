"""The same experiments on a GPU: `pytest -m gpu`, on a simulated one with `--simulated-gpu`. Bits of a GPU are its own,
and equal on any layout of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import EXPERIMENTS, options

from lockstep.config.layout import Layout
from lockstep.launchers.launch import resume, train
from lockstep.reports.runs import Run
from lockstep.reproducibility.replay import replay
from lockstep.reproducibility.verify import verify

pytestmark = pytest.mark.gpu
NAMES = ("ppo-bf16", "impala-lstm-lag-2", "mujoco-normalized", "tuple-dict-mask")


@pytest.mark.parametrize("name", NAMES)
def test_layouts_agree(name: str, tmp_path: Path) -> None:
    alone = train(EXPERIMENTS[name](), Layout.parse("inline,device=0"), options(tmp_path / "inline"))
    for text in ("inline,device=0,graphs=1", "processes:2,device=0", "a0-l0", "a0-l0,graphs=1", "a0,0-l0,0"):
        result = train(EXPERIMENTS[name](), Layout.parse(text), options(tmp_path / text))
        assert result.digest == alone.digest, text


@pytest.mark.parametrize("name", ["mujoco-normalized", "td3"])
def test_an_evaluation_during_training(name: str, tmp_path: Path) -> None:
    evaluated = dataclasses.replace(options(tmp_path / "run"), eval_every=1, eval_episodes=1)
    train(EXPERIMENTS[name](), Layout.parse("inline,device=0"), evaluated)
    assert Run.read(tmp_path / "run").has("eval/score")


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    layout = Layout.parse("inline,device=0")
    whole = train(EXPERIMENTS["ppo-bf16"](), layout, options(tmp_path / "whole"))
    train(EXPERIMENTS["ppo-bf16"](), layout, options(tmp_path / "part"), stop_after=1)
    assert resume(tmp_path / "part", layout).digest == whole.digest


def test_a_free_running_run_is_replayed(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["impala-bf16"]()
    experiment = experiment.replace(scheme=experiment.scheme.__class__(shards=4, lag="async", refresh="step"))
    train(experiment, Layout.parse("a0-l0"), options(tmp_path / "run"))
    found = replay(tmp_path / "run", Layout.parse("inline,device=0"), options(tmp_path / "again"))
    assert found.ok, found.difference


def test_asynchronous_gradients_are_replayed(tmp_path: Path) -> None:
    for name, layout in (("ppo-bf16", "processes:2,device=0"), ("td3", "a0-l0,0")):
        experiment = EXPERIMENTS[name]()
        experiment = experiment.replace(scheme=experiment.scheme.__class__(shards=4, gradient_lag="async"))
        train(experiment, Layout.parse(layout), options(tmp_path / name))
        found = replay(tmp_path / name, Layout.parse("inline,device=0"), options(tmp_path / f"{name}-again"))
        assert found.ok, found.difference


def test_verify_on_another_layout(tmp_path: Path) -> None:
    result = train(EXPERIMENTS["ppo"](), Layout.parse("a0-l0"), options(tmp_path / "run"))
    assert verify(result.run, Layout.parse("inline,device=0"), "all").ok
