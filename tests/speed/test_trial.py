"""Trials: halted they stand still, let go on they train, and nothing of them outlives whoever started them."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from children import Child, until
from tiny import EXPERIMENTS

from lockstep import Experiment, Layout, SettingsError, envs
from lockstep.cli.main import main
from lockstep.speed.parts import PartsWorkers
from lockstep.speed.trial import OutOfTime, Slot, Trial
from lockstep.system.supervision import WorkerError
from lockstep.training.prepare import prepare


def cartpole() -> Experiment:
    experiment = EXPERIMENTS["cartpole-8-shards"]()
    return prepare(experiment, Layout())


def hanging(folder: Path) -> Experiment:
    """Whose environments stop at their third step."""
    file = folder / "hanging.py"
    file.write_text(
        "import time\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Hanging(CartPoleEnv):\n"
        "    steps = 0\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        time.sleep(3600 * (self.steps == 3))\n"
        "        return super().step(action)\n"
    )
    return cartpole().replace(env=envs.EnvConfig(id=f"{file}:Hanging", num_envs=16))


def is_still(metrics: Path) -> bool:
    """Whether nothing is written for a while. On a busy machine, a line may come late."""
    written = metrics.stat().st_size
    time.sleep(0.5)
    return metrics.stat().st_size == written


def test_a_halted_trial_stands_still_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    experiment, others = cartpole(), multiprocessing.active_children()
    trial = Trial(experiment, Layout.parse("processes:2"))
    (process,) = set(multiprocessing.active_children()) - set(others)
    try:
        first = trial.run(0.0, iterations=2)
        assert len(first.lines) >= 2 and first.samples == len(first.lines) * experiment.samples_per_iteration
        (metrics,) = tmp_path.rglob("metrics.jsonl")
        until(lambda: is_still(metrics), "it to stand still, for it was halted")
        second = trial.run(0.2, iterations=3)
        assert second.seconds >= 0.2 and second.rate == second.samples / second.seconds
        numbers = [line["iteration"] for _, line in (*first.lines, *second.lines)]
        assert numbers == sorted(set(numbers)) and numbers[0] == 1
        shares = second.shares()
        assert set(shares) == {"env", "inference", "learning", "waiting", "other", "recording"}
        assert sum(shares.values()) == pytest.approx(1.0)
        with pytest.raises(OutOfTime):
            trial.run(60.0, deadline=time.perf_counter())
    finally:
        trial.close()
    assert not process.is_alive() and not list(tmp_path.iterdir())


def test_shares_leave_out_the_iteration_in_which_the_trial_was_halted() -> None:
    def line(seconds: float, env: float) -> dict[str, float]:
        return {"seconds": seconds, "time/env": env, "time/learning": 1 - env, "samples": 0.0}

    halted = (10.0, line(100.0, 0.9))
    slot = Slot(30, 3.0, [halted, (11.0, line(100.8, 0.25)), (12.0, line(101.6, 0.75))])
    assert slot.shares() == pytest.approx({"env": 0.4, "learning": 0.4, "recording": 0.2})
    assert Slot(10, 1.0, [halted]).shares() == {}


def test_what_ends_a_trial_is_said(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def make(render_mode=None):\n    raise FileNotFoundError('no ROM here')\n")
    experiment = cartpole()
    env = envs.EnvConfig(id=f"{file}:make", num_envs=16)
    trial = Trial(experiment.replace(env=env), Layout())
    with pytest.raises((SettingsError, RuntimeError), match="no ROM here"):
        trial.run(0.0)
    trial.close()


def test_a_standstill_ends_a_trial(tmp_path: Path) -> None:
    trial = Trial(hanging(tmp_path), Layout.parse("inline,stall_timeout=5"))
    with pytest.raises(WorkerError, match=r"progress for 5 seconds[\s\S]*in step\n    time.sleep"):
        trial.run(0.0)
    trial.close()


def test_a_standstill_ends_the_measuring_of_parts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    workers = PartsWorkers(hanging(tmp_path), Layout.parse("inline,stall_timeout=5"), cores=1)
    try:
        workers.ready()
        with pytest.raises(WorkerError, match="progress for 5 seconds"):
            workers.measure("env", 60.0)
    finally:
        workers.close()
    assert "in step" in capfd.readouterr().err


def test_no_process_outlives_a_tuner_that_is_killed_while_its_trials_are_halted(start: Callable[..., Child]) -> None:
    flags = ["--env.num-envs", "8", "--algorithm.rollout", "8", "--env.adapter", "gymnasium"]
    child = start("tune", "ppo-cartpole", *flags, "--budget", "1000")
    child.until(lambda: "samples/s" in child.output(), "a trial to have run")
    assert len(child.members()) >= 2
    child.process.kill()
    until(lambda: not child.members(), "no process is left")


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize(
    ("recipe", "flags", "told"),
    [("ppo-cartpole", ("--env.options", "length=3"), "length"), ("dqn-cartpole", (), "memory")],
)
def test_a_mistake_is_told_before_anything_is_started(
    command: str,
    recipe: str,
    flags: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.buffers.replay_placement.available_bytes", lambda: 1_000)
    monkeypatch.setattr("lockstep.speed.trial.Trial.__init__", lambda *_: pytest.fail("a trial was started"))
    assert main([command, recipe, "--env.adapter", "gymnasium", *flags]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error and "--budget" not in error


def test_a_bench_that_is_told_to_end_leaves_nothing(start: Callable[..., Child]) -> None:
    flags = ["--env.num-envs", "8", "--algorithm.rollout", "8", "--env.adapter", "gymnasium", "--seconds", "100"]
    child = start("bench", "ppo-cartpole", *flags)
    child.until(lambda: "rounds of about" in child.output(), "its first round")
    child.signal(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM
