"""A launcher of a user's file: chosen by a layout's text, and asked what it can do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import cut, options

from lockstep import recipes
from lockstep.config import launchers
from lockstep.config.launchers import Launcher
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.launchers.launch import resume, train
from lockstep.training.prepare import prepare

LAUNCHER = """
from pathlib import Path

from lockstep.config.launchers import Launcher
from lockstep.launchers.inline import run_inline
from lockstep.launchers.processes import run_processes

def run(work, job):
    with Path("started").open("a") as file:
        file.write(f"{job.layout}\\n")
    return run_inline(work, job)

HERE = Launcher(run)
FAR = Launcher(run_processes, starts_processes=True, one_machine=False, shares_memory=False, options=("pin",))
TOLD = Launcher(run, starts_processes=True, shares_memory=False, decides_by_messages=True)
NONE = 1
"""


@pytest.fixture(autouse=True)
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LAUNCHER)


@pytest.mark.slow
def test_a_run_starts_and_goes_on_with_it() -> None:
    experiment = cut(recipes.ppo_cartpole)
    expected = train(experiment, Layout(), options(Path("inline"))).digest
    train(experiment, "mine.py:HERE", options(Path("run")), stop_after=1)
    assert resume("run").digest == expected, "run.json names it"
    assert Path("started").read_text() == "mine.py:HERE\n" * 2


@pytest.mark.parametrize("text", ["mine.py:HERE", "mine.py:HERE,env_threads=2", "mine.py:FAR:2", "mine.py:FAR:a2-l1"])
def test_it_has_a_text(text: str) -> None:
    layout = Layout.parse(text)
    assert str(layout) == text and Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("mine.py:HERE:2", "mine.py:HERE takes no number"),
        ("mine.py:HERE:a1-l1", "mine.py:HERE takes no number"),
        ("mine.py:FAR", "as in mine.py:FAR:2 or mine.py:FAR:a2-l1"),
        ("mine.py:FAR:a0-l1", "numbers of processes"),
        ("mine.py:FAR:2,device=0", "leave device= out"),
        ("mine.py:HERE,pin=1", "processes that lockstep starts"),
        ("mine.py:NONE", "must be a lockstep.config.launchers.Launcher"),
        ("mine.py:MISSING", "has no MISSING"),
        ("other.py:HERE", "no Python file"),
    ],
)
def test_mistakes_are_explained(text: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        Layout.parse(text)


def test_what_it_cannot_do_is_refused() -> None:
    experiment = cut(recipes.ppo_cartpole)
    free = dataclasses.replace(experiment.scheme, lag="async")
    with pytest.raises(SettingsError, match=r"--layout mine\.py:FAR:a1-l1.*Use --layout auto, cpu:aC-lL or ray:aC-lL "):
        prepare(dataclasses.replace(experiment, scheme=free), Layout.parse("mine.py:FAR:a1-l1"))
    preempted = dataclasses.replace(experiment.scheme, preempt=0.5)
    with pytest.raises(
        SettingsError,
        match=r"--layout mine\.py:FAR:2.* processes:N, cpu:aC-lL, ray:N or ray:aC-lL, or",
    ):
        prepare(dataclasses.replace(experiment, scheme=preempted), Layout.parse("mine.py:FAR:2"))


def test_advice_names_it_where_it_can_do_what_is_asked() -> None:
    free = dataclasses.replace(cut(recipes.ppo_cartpole).scheme, lag="async")
    with pytest.raises(SettingsError, match=r"Use --layout auto, cpu:aC-lL, ray:aC-lL or mine\.py:TOLD:aC-lL "):
        prepare(dataclasses.replace(cut(recipes.ppo_cartpole), scheme=free), Layout.parse("mine.py:TOLD:2"))


def test_advice_names_the_launchers_that_support_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Launcher(lambda work, job: None, starts_processes=True, options=("restarts",))
    monkeypatch.setitem(launchers.LAUNCHERS, "mine", own)
    with pytest.raises(SettingsError, match="restarts is for ray:N, ray:aC-lL, mine:N or mine:aC-lL, which replace"):
        Layout.parse("processes:2,restarts=1")
    with pytest.raises(SettingsError, match="compress is for ray:N or ray:aC-lL, which send"):
        Layout.parse("mine:2,compress=1")
