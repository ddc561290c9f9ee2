"""auto: the layout that it chooses for an experiment and a machine, what tune keeps for it, and what a run records."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep import Experiment, Layout, SettingsError, recipes, resume, train, verify
from lockstep.agent import Agent
from lockstep.cli.main import main
from lockstep.config import launchers
from lockstep.config.launchers import Launcher
from lockstep.config.options import RunOptions
from lockstep.launchers import auto
from lockstep.launchers.auto import choose, chosen, remember, remembered, seconds
from lockstep.run.folder import RunFolder
from lockstep.sweep.spec import Run

QUIET: dict[str, Any] = {"display": "none", "tensorboard": False}


def scheme(**changes: Any) -> Experiment:
    experiment = recipes.ppo_atari()
    return experiment.replace(scheme=dataclasses.replace(experiment.scheme, **changes))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tune has kept on this machine is not for tests."""
    monkeypatch.setattr(auto, "user_cache", lambda: tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "cores", "layout"),
    [
        ({"shards": 4}, 1, "inline"),
        ({"shards": 1}, 16, "inline"),
        ({"shards": 4}, 2, "processes:2"),
        ({"shards": 4}, 3, "processes:2"),  # a third process would have the other two wait for two shards all the same
        ({"shards": 4}, 64, "processes:4"),
        ({"shards": 8}, 6, "processes:4"),
        ({"shards": 4, "lag": 1}, 2, "processes:2"),
        ({"shards": 4, "gradient_lag": "async"}, 2, "processes:2"),
        ({"shards": 4, "preempt": 0.8}, 2, "processes:2"),
        ({"shards": 4, "lag": "async"}, 1, "cpu:a1-l1"),
        ({"shards": 4, "lag": "async"}, 2, "cpu:a1-l1"),
        ({"shards": 8, "lag": "async"}, 8, "cpu:a6-l2"),
        ({"shards": 1, "lag": "async"}, 8, "cpu:a1-l1"),
    ],
)
def test_the_choice_follows_from_cores_shards_and_scheme(changes: dict[str, Any], cores: int, layout: str) -> None:
    assert str(choose(scheme(**changes), cores).layout) == layout


def test_processes_share_the_cores_with_their_torch_threads() -> None:
    experiment = dataclasses.replace(scheme(shards=8), torch_threads=4)
    assert str(choose(experiment, 8).layout) == "processes:2"
    assert str(choose(experiment, 4).layout) == "inline"


def test_a_short_run_is_not_worth_the_start_of_processes() -> None:
    experiment = recipes.ppo_mujoco().replace(precision="fp32")
    assert choose(experiment, 2).layout.processes == 2
    assert choose(experiment, 2, iterations=3).layout == Layout()
    assert choose(dataclasses.replace(experiment, total_steps=10_000), 2).layout == Layout()
    assert seconds(experiment, 2) == pytest.approx(2 * seconds(experiment, 1))
    assert seconds(experiment, 10**9) == seconds(experiment), "no more than there are"


def test_gradient_steps_of_kernels_are_shared_if_they_are_large() -> None:
    small, large = recipes.ppo_mujoco(), recipes.sac_mujoco()
    assert choose(small, 2).layout == Layout()
    assert choose(small, 2, tuned=Layout.parse("processes:2")).layout.processes == 2
    assert choose(large, 2).layout.processes == 2
    recurrent = small.replace(**{"model.core": "lstm", "algorithm.minibatches": 2})  # 4 × 256 × (64 + 256) products
    assert Agent(recurrent).kernels
    assert choose(recurrent, 2).layout.processes == 2
    tiny_core = recurrent.replace(**{"model.core_size": 4, "algorithm.minibatches": 1})
    assert choose(tiny_core.replace(**{"model.hidden_sizes": (8, 8)}), 2).layout == Layout()
    in_python = small.replace(env=dataclasses.replace(small.env, adapter="gymnasium"))
    assert choose(in_python, 2).layout.processes == 2, "Python steps the environments"
    assert choose(small.replace(precision="fp32"), 2).layout.processes == 2, "torch computes for much longer"


@pytest.mark.parametrize("changes", [{"lag": "async"}, {"gradient_lag": "async"}, {"preempt": 0.8}])
def test_one_process_repeats_what_timing_decided(changes: dict[str, Any]) -> None:
    assert choose(scheme(**changes), 16, repeats=True).layout == Layout()
    assert choose(scheme(), 16, repeats=True).layout.processes > 1, "here it decided nothing"


def test_a_user_s_launcher_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Launcher(lambda work, job: None, starts_processes=True)
    monkeypatch.setattr(launchers, "LAUNCHERS", {"mine": own, **launchers.LAUNCHERS})
    for changes in ({}, {"lag": 1}, {"lag": "async"}, {"shards": 1}):
        names = {choose(scheme(**changes), cores).layout.launcher_name for cores in range(1, 17)}
        assert names <= {"inline", "processes"}


def test_what_tune_found_is_chosen_on_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, found = recipes.ppo_atari(), Layout.parse("processes:2,env_threads=2")
    assert remembered(experiment) is None
    assert remember(experiment, found)
    assert remembered(dataclasses.replace(experiment, seed=7, total_steps=123)) == found
    assert remembered(scheme(shards=2)) is None, "another experiment"
    monkeypatch.setattr(auto, "cores", lambda: 2)
    assert chosen(Layout.of(None), experiment) == found
    monkeypatch.setattr(auto, "cores", lambda: 64)
    assert chosen(Layout.of(None), experiment) == Layout("processes", 8), "with other cores, another machine"
    assert remember(experiment, Layout.parse("inline,device=0,graphs=1"))
    assert remembered(experiment) is None, "a GPU gives different bits, so it must be asked for"
    auto._file().write_text("no JSON")
    assert remembered(experiment) is None


def test_the_choice_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(auto, "cores", lambda: 2)
    chosen(Layout.parse("auto"), scheme(shards=4))
    assert capsys.readouterr().err == "layout: processes:2 (auto: 2 cores, 4 shards)\n"
    chosen(Layout.parse("processes:2"), scheme(shards=4))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("program", "starts"), [("train()", False), ('if __name__ == "__main__":\n    train()', True)])
def test_a_script_without_a_guard_stays_one_process(
    program: str, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    Path(script.__file__).write_text(program)
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(auto, "cores", lambda: 2)
    assert (chosen(Layout.of(None), scheme()).processes == 2) is starts


def test_a_callback_that_no_other_process_can_load_stays_in_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "cores", lambda: 2)
    assert chosen(Layout.of(None), scheme(), on_iteration=lambda _: None).processes == 1
    assert "auto: other processes cannot load on_iteration" in capsys.readouterr().err
    assert chosen(Layout.of(None), scheme(), on_iteration=print).processes == 2


def test_options_of_auto_go_to_the_chosen_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "cores", lambda: 2)
    given = Layout.parse("auto,env_threads=2,stall_timeout=60")
    assert str(given) == "auto,env_threads=2,stall_timeout=60"
    assert str(chosen(given, scheme())) == "processes:2,env_threads=2,stall_timeout=60"
    for text in ("auto,device=0", "auto,pin=1", "auto,restarts=1"):
        with pytest.raises(SettingsError, match="auto chooses among layouts of this machine's CPU"):
            Layout.parse(text)
    with pytest.raises(SettingsError, match="depends on the machine that will run it"):
        _ = given.launcher


def test_a_run_of_a_sweep_has_one_core() -> None:
    assert Run(scheme()).layout == "inline"
    assert Run(scheme(), "auto,env_threads=2").layout == "inline,env_threads=2"
    assert Run(scheme(lag="async")).layout == "cpu:a1-l1"
    assert Run(scheme(), "processes:2").layout == "processes:2"


def test_a_run_records_what_was_chosen_and_resume_chooses_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = dataclasses.replace(recipes.ppo_cartpole(), total_steps=1_500)
    path = tmp_path / "run"
    train(experiment, options=RunOptions(str(path), **QUIET), stop_after=1)
    folder = RunFolder.open(path)
    assert (str(folder.layout()), str(folder.asked_layout())) == ("inline", "auto")
    asked: list[Layout] = []
    before = auto.chosen

    def noting(layout: Layout, *given: Any, **named: Any) -> Layout:
        asked.append(layout)
        return before(layout, *given, **named)

    monkeypatch.setattr("lockstep.launchers.launch.chosen", noting)
    resume(path)
    assert [str(layout) for layout in asked] == ["auto"]
    assert folder.facts()["resumed"][0]["layout"] == "inline"
    assert verify(path).ok


def test_a_given_layout_stays_that_of_the_run(tmp_path: Path) -> None:
    experiment = dataclasses.replace(recipes.ppo_cartpole(), total_steps=600)
    train(experiment, "inline", RunOptions(str(tmp_path / "run"), **QUIET), stop_after=1)
    folder = RunFolder.open(tmp_path / "run")
    assert "auto" not in folder.facts()
    assert str(folder.asked_layout()) == "inline"


def test_a_dry_run_says_what_would_be_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "cores", lambda: 2)
    assert main(["train", "sac-mujoco", "--dry-run"]) == 0
    assert "processes:2" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("layout"))
