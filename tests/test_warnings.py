"""What a new run says before it starts: of its settings, its environment, and memory that is too small for it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import cut, options

from lockstep import recipes
from lockstep.buffers import replay_placement
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.recipes import RECIPES
from lockstep.reproducibility.verify import verify
from lockstep.system.forked import call_in_fork
from lockstep.system.memory import available_bytes
from lockstep.training import prepare
from lockstep.training.prepare import check_memory

pytestmark = pytest.mark.usefixtures("own_folder")

ENVIRONMENTS = """
import time
import gymnasium, numpy as np

class Good(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 100, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    best = 0
    shared = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.floor, self.t = self.begin(), 0
        return self.seen(), {}

    def begin(self):
        return 0

    def seen(self):
        return np.array([self.floor, self.t], np.float32)

    def step(self, action):
        self.t, self.floor = self.t + 1, min(90, self.floor + int(action))
        self.best = max(self.best, self.floor)
        return self.seen(), float(action), False, self.t >= 5, {}

class Floors(Good):
    def begin(self):
        return self.best  # begins where an earlier episode got to

class Chance(Good):
    def begin(self):
        return int(np.random.randint(90))

class Crowd(Good):
    def begin(self):
        self.shared.append(1)
        return len(self.shared) % 90

class Gaps(Good):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float("nan"), *rest

class Raises(Good):
    def __init__(self):
        print("made")

    def step(self, action):
        raise OverflowError("it fell off")

class Slow(Good):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)
"""


def of_mine(name: str) -> Experiment:
    Path("mine.py").write_text(ENVIRONMENTS)
    return cut(recipes.ppo_cartpole, env={"id": f"mine.py:{name}", "adapter": "auto", "num_envs": 4})


def checked(run: str) -> Any:
    return dataclasses.replace(options(Path(run)), check_env=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [("Floors", "stopped and resumed"), ("Chance", "neither verified nor resumed"), ("Crowd", "verified")],
)
def test_an_environment_that_cannot_be_repeated_is_warned_of_once(
    name: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_QUICK_SECONDS", 60.0)  # on a busy machine, the check might not be over
    monkeypatch.setattr(prepare, "_QUICK_LIMIT", 100.0)
    train(of_mine(name), "inline", checked("run"), stop_after=1)
    told = capsys.readouterr().err
    assert told.count("warning:") == 1 and words in told and f"mine.py:{name}" in told and "--no-check-env" in told


def test_nothing_is_said_where_all_holds_or_nothing_is_asked_and_no_bit_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = of_mine("Good")
    first, second = (train(good, "inline", given, stop_after=1) for given in (checked("a"), options(Path("b"))))
    assert first.digest == second.digest
    verify("a", iterations=1)
    train(of_mine("Chance"), "inline", options(Path("c")), stop_after=1)
    train(of_mine("Slow").replace(total_steps=8), "inline", checked("d"))
    with pytest.raises(OverflowError, match="it fell off"):
        train(of_mine("Raises"), "inline", checked("e"), stop_after=1)
    assert "warning" not in capsys.readouterr().err


def test_nan_that_comes_again_is_no_reason_to_doubt_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    goes_on = dataclasses.replace(checked("run"), on_nonfinite="continue")
    train(of_mine("Gaps"), "inline", goes_on, stop_after=1)
    told = capsys.readouterr().err
    assert told.count("warning:") == 1 and "reward nan" in told and "check-env" not in told


def test_environments_of_libraries_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.prepare.call_in_fork", lambda *_: pytest.fail("checked"))
    train(cut(recipes.ppo_cartpole), "inline", checked("run"), stop_after=1)


def test_a_function_aside_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    found: list[int] = []

    def changes() -> list[int]:
        found.append(1)
        os.environ["CHANGED"] = "1"
        print("printed")
        os.write(1, b"written")
        return found

    assert call_in_fork(changes, 60) == (True, [1])
    assert not found and "CHANGED" not in os.environ and capfd.readouterr() == ("", "")
    assert call_in_fork(lambda: None, 60) == (True, None)
    for fails in (lambda: 1 / 0, lambda: sys.exit(0), lambda: os._exit(0), lambda: os.kill(os.getpid(), 9)):
        assert call_in_fork(fails, 60) == (False, None)
    assert call_in_fork(lambda: time.sleep(1000), 0.05) == (False, None)


def test_a_function_aside_that_takes_too_long_ends_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "program"

    def owns_a_program() -> None:
        program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        try:
            time.sleep(1000)
        finally:
            program.kill()
            program.wait()
            note.write_text(str(program.pid))

    assert call_in_fork(owns_a_program, 2.0) == (False, None)
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_a_fall_of_epsilon_that_the_warm_up_swallows_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    short = RECIPES["dqn-atari"]().replace(total_steps=200_000)
    (told,) = short.algorithm.warnings(short.setup)
    assert "20,000" in told and "80,000" in told and "algorithm.epsilon_fraction=0.1" in told
    advised = re.search(r"--algorithm.epsilon-fraction ([0-9.]+)", told)
    assert advised
    better: Any = dataclasses.replace(short.algorithm, epsilon_fraction=float(advised[1]))  # type: ignore[call-arg]
    assert not list(better.warnings(short.replace(algorithm=better).setup))
    annealed = dataclasses.replace(short.algorithm, anneal={"epsilon": "linear:0.01"})
    assert not list(annealed.warnings(short.setup)), "epsilon_fraction has no effect then"
    for recipe in RECIPES.values():
        assert not list(recipe().algorithm.warnings(recipe().setup))


def test_the_warning_is_told_when_the_run_starts(capsys: pytest.CaptureFixture[str]) -> None:
    full = recipes.dqn_cartpole()
    algorithm = dataclasses.replace(full.algorithm, warmup=512)  # type: ignore[call-arg]
    experiment = full.replace(algorithm=algorithm, total_steps=1024)
    train(experiment, "inline", options(Path("run")), stop_after=1)
    assert "warning: ε falls" in capsys.readouterr().err
    assert main(["train", "dqn-cartpole", "--total-steps", "1024", "--algorithm.warmup", "512", "--dry-run"]) == 0
    assert capsys.readouterr().err.count("warning: ε falls") == 1


LARGE: dict[str, Any] = {"env": {"num_envs": 64}, "rollout": 512}


@pytest.mark.parametrize(
    ("layout", "lag", "held"), [("inline", 0, 1), ("processes:2", 2, 1), ("cpu:a1-l1", 2, 3), ("ray:a1-l1", 0, 1)]
)
def test_rollouts_that_do_not_fit_are_refused_with_what_to_lower(
    layout: str, lag: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = cut(recipes.ppo_atari, scheme={"lag": lag}, **LARGE)
    step = 4 * 84 * 84
    needed = held * 64 * 512 * step
    monkeypatch.setattr(replay_placement, "available_bytes", lambda: needed)
    with pytest.raises(SettingsError) as caught:
        check_memory(experiment, Layout.parse(layout))
    told = str(caught.value)
    assert f"{needed / 1e9:.1f} GB" in told and "algorithm.rollout=512" in told and "env.num_envs=64" in told
    assert ("scheme.lag" in told.partition("for example")[2]) == (held > 1)
    rollout, num_envs = (re.search(rf"{flag} (\d+)", told) for flag in ("rollout", "num-envs"))
    assert rollout and num_envs
    for settings in ({"rollout": int(rollout[1])}, {"env": {"num_envs": int(num_envs[1])}}):
        check_memory(cut(recipes.ppo_atari, scheme={"lag": lag}, **{**LARGE, **settings}), Layout.parse(layout))


def test_a_run_whose_rollouts_do_not_fit_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_placement, "available_bytes", lambda: 1_000_000)
    with pytest.raises(SettingsError, match="Rollouts of"):
        train(cut(recipes.ppo_cartpole, rollout=4096, env={"num_envs": 64}), "inline", options(Path("run")))
    assert not Path("run").exists()


def test_a_job_s_own_limit_of_memory_counts(tmp_path: Path) -> None:
    """As Slurm sets it: not at the root of the cgroups, but above this process's own."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/slurm/job_7/step_0\n")
    (tmp_path / "meminfo").write_text("MemAvailable: 64000000 kB\n")
    job = tmp_path / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    for folder, most in ((job, "5000"), (job / "step_0", "max")):
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text("3000")
    assert available_bytes(tmp_path, tmp_path) == 2000
