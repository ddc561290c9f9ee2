"""Sweeps with real runs: killed, stopped, failing and continued."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Child
from sentences import says
from tiny import options

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.cli.sweep_flags import runs_of
from lockstep.config.serialization import from_json
from lockstep.launchers.launch import train
from lockstep.run import checkpoint
from lockstep.sweep import grid
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.queue import Outcome, Queue
from lockstep.system import children

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "2"))
"""Random moments at which a sweep is killed."""
ITERATIONS = 60
"""Of runs to be killed; DELAY makes each last at least three seconds."""
DELAY = "inline,learner_delay=0.05"
SMALL = (
    *("--env.adapter", "gymnasium", "--env.num-envs", "8", "--env.reseed-every", "20", "--scheme.acting-batch", "0"),
    *("--algorithm.rollout", "8", "--algorithm.epochs", "1", "--algorithm.minibatches", "1"),
    *("--checkpoint-every", "2", "--no-tensorboard"),
)
SHORT, LONG = (("--total-steps", str(8 * 8 * iterations)) for iterations in (3, ITERATIONS))
pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.timeout(400),  # starting a run takes seconds, and a busy machine many more
]
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one core only")


def outcomes() -> dict[int, tuple[str, str | None]]:
    """State and digest of the runs of the sweep `set`, by seed."""
    queue = Queue.open(Path("set"))
    ended = {entry.experiment["seed"]: queue.outcome(entry.name) for entry in queue.entries()}
    return {seed: (outcome.state, outcome.digest) for seed, outcome in ended.items() if outcome}


def expected() -> dict[int, tuple[str, str | None]]:
    """The same, had nothing interfered."""
    entries = Queue.open(Path("set")).entries()
    return {
        entry.experiment["seed"]: ("done", train(from_json(entry.experiment), options=options(Path(entry.name))).digest)
        for entry in entries
    }


def lines(name: str = "metrics.jsonl") -> int:
    """Iterations that all runs have recorded."""
    return sum(path.read_bytes().count(b"\n") for path in Path("set/runs").glob(f"*/{name}"))


def test_a_killed_sweep_loses_no_run(start: Callable[..., Child]) -> None:
    child = start("sweep", "set", "ppo-cartpole", *SMALL, *LONG, "--seed", "1..2", "--layout", DELAY)
    draw = random.Random(os.urandom(8))
    for _ in range(KILLS):
        begun = lines()
        child.until(lambda begun=begun: lines() > begun, "a new iteration")
        time.sleep(draw.uniform(0.0, 0.5))
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "its runs end with it"
        child = start("sweep", "set")
    assert child.wait() == 0, child.output()
    assert outcomes() == expected()


@two_cores
def test_runs_have_cores_of_their_own_and_end_with_checkpoints(
    start: Callable[..., Child], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--layout", DELAY, "--total-steps", "10M")
    child = start("sweep", "set", "ppo-cartpole", *SMALL, "--seed", "1..3", "--slots", "2", *flags)
    saved = Path("set/runs").glob
    child.until(lambda: len({path.parent for path in saved("*/checkpoints/0*")}) == 2, "both runs to learn")
    running = {name: os.sched_getaffinity(process) for name, process in processes(child).items()}
    assert len(running) == 2, "as many as there are slots"
    first, second = running.values()
    assert len(first) == len(second) == 1 and not first & second

    assert main(["sweep", "set"]) == 2
    assert says(capsys.readouterr().err, "set ", "another process")
    assert main(["sweep", "set", "--status", "--json"]) == 0
    states = {run["name"]: run["state"] for run in json.loads(capsys.readouterr().out)["runs"]}
    assert {name for name, state in states.items() if state == "running"} == set(running)
    assert list(states.values()).count("waiting") == 1

    child.interrupt()
    assert child.wait() == 130
    assert "checkpoint and stop" in child.output() and "to continue: lockstep sweep" in child.output()
    assert outcomes() == {}
    for name in running:
        folder = Path("set/runs") / name
        newest = checkpoint.latest(folder / "checkpoints").name
        assert int(newest) == (folder / "metrics.jsonl").read_bytes().count(b"\n"), "nothing was lost"


def processes(child: Child) -> dict[str, int]:
    """The process of each of a sweep's runs, by name."""
    found = {}
    for process in child.members():
        with contextlib.suppress(OSError):  # it has ended
            output = Path(f"/proc/{process}/fd/1").resolve()
            if os.getsid(process) == process and output.parent.name == "logs":  # otherwise it is a run's worker
                found[output.stem] = process
    return found


def test_a_second_ctrl_c_stops_at_once(start: Callable[..., Child]) -> None:
    child = start("sweep", "set", "ppo-cartpole", *SMALL, "--layout", "inline,learner_delay=100")
    child.until(lambda: any(Path("set/runs").glob("*/ledger.jsonl")), "a run to begin")
    child.interrupt()
    child.until(lambda: "a further Ctrl-C stops at once" in child.output(), "the answer to the first Ctrl-C")
    time.sleep(2 * children._CTRL_C_ECHO)
    child.interrupt()
    assert child.wait() == 130
    assert outcomes() == {}


ENV = """
import gymnasium

def make():
    {body}
    return gymnasium.make("CartPole-v1")
"""


def test_a_failing_run_is_shown_and_can_be_retried_and_one_that_diverged_is_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = "return gymnasium.wrappers.TransformReward(gymnasium.make('CartPole-v1'), lambda x: float('nan'))"
    Path("good.py").write_text(ENV.format(body=lost))
    Path("bad.py").write_text(ENV.format(body="raise OSError('the simulator has no licence')"))
    command = ["sweep", "set", "ppo-cartpole", *SMALL, *SHORT, "--on-nonfinite", "continue"]
    assert main([*command, "--env.id", "bad.py:make,good.py:make"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"failed ppo-cartpole-bad.*:\n    Traceback(.|\n)*bad.py(.|\n)*OSError: the simulator", shown)
    assert re.search(r"done ppo-cartpole-good.*diverged .*loss/", shown) and "--retry-failed" in shown

    assert main(["sweep", "set"]) == 1
    assert capsys.readouterr().out.startswith("1 done · 1 failed"), "what failed does not run again by itself"
    Path("bad.py").write_text(ENV.format(body=""))
    assert main(["sweep", "set", "--retry-failed", "--json"]) == 0
    captured = capsys.readouterr()
    assert says(captured.err, "1 failed")
    assert [run["state"] for run in json.loads(captured.out)["runs"]] == ["done", "done"]


def test_what_failed_goes_on_with_the_layout_and_options_of_the_retry(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "set", "ppo-cartpole", *SMALL, *SHORT]
    queue = Queue.make(Path("set"))
    queue.add(runs_of({"ppo-cartpole": recipes.ppo_cartpole()}, [*SMALL, *SHORT], "set", SweepOptions())[0])
    (entry,) = queue.entries()
    queue.end(entry.name, Outcome("failed", reason="The run's process was ended by SIGKILL: memory.\nit printed this"))
    assert main(["sweep", "set", "--status"]) == 0
    assert "ended by SIGKILL: memory.\n" in capsys.readouterr().out
    assert main([*command, "--layout", "inline,stall_timeout=900", "--checkpoint-every", "7", "--retry-failed"]) == 0
    (entry,) = queue.entries()
    assert (entry.layout, entry.options["checkpoint_every"]) == ("inline,stall_timeout=900", 7)
    assert json.loads((queue.run(entry.name) / "run.json").read_text())["layout"] == "inline,stall_timeout=900"


def test_a_run_that_hangs_is_ended_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    body = """import time
    class Hanging(gymnasium.Wrapper):
        steps = 0
        def step(self, action):
            self.steps += 1
            if self.steps == 20:
                time.sleep(1000)
            return self.env.step(action)
    return Hanging(gymnasium.make("CartPole-v1"))"""
    Path("bad.py").write_text(ENV.format(body=body))
    command = ["sweep", "set", "ppo-cartpole", *SMALL, *LONG, "--env.id", "bad.py:make"]
    assert main([*command, "--layout", "inline,stall_timeout=10"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"10 seconds\b.* \d+ steps(.|\n)*bad.py.*, in step\n *time.sleep", shown)
    assert outcomes() == {1: ("failed", None)}


# In two processes the error is the same; that both tell of it, test_output.py finds.
@pytest.mark.parametrize("layout", ["inline", pytest.param("processes:2", marks=pytest.mark.full)])
def test_a_full_disk_ends_the_sweep_and_fails_no_run(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("full.py").write_text(ENV.format(body="raise OSError(28, 'No space left on device')"))
    flags = ("--env.id", "full.py:make", "--seed", "1..2", "--layout", layout)
    command = ["sweep", "set", "ppo-cartpole", *SMALL, *SHORT, *flags]
    assert main([*command, "--slots", "1"]) == 2
    captured = capsys.readouterr()
    assert re.search(r"disk is full for ppo-.*: lockstep sweep", captured.err)
    assert "No space left on device" in next(Path("set/logs").glob("*-s1-*")).read_text()
    assert outcomes() == {} and captured.out.count("start ") == 1, "the other would have found none either"
    Path("full.py").write_text(ENV.format(body=""))
    assert main(["sweep", "set"]) == 0
    assert {state for state, _ in outcomes().values()} == {"done"}


@pytest.mark.real_processes
def test_modules_in_the_current_folder_are_not_taken_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("statistics", "json", "sys"):
        Path(f"{name}.py").write_text("raise ImportError('not this one')")
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, *SHORT]) == 0, capsys.readouterr().out


def test_a_damaged_line_of_metrics_costs_nothing(start: Callable[..., Child]) -> None:
    child = start("sweep", "set", "ppo-cartpole", *SMALL, *LONG, "--layout", DELAY)
    child.until(lambda: lines() > 5, "some iterations")
    child.interrupt()
    assert child.wait() == 130
    (metrics,) = Path("set/runs").glob("*/metrics.jsonl")
    metrics.write_bytes(metrics.read_bytes() + 300 * b"\0" + b"\n")
    assert main(["sweep", "set", "--status"]) == 0
    assert main(["sweep", "set"]) == 0
    assert outcomes() == expected() and lines() == ITERATIONS


def test_more_seeds_run_only_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "set", "ppo-cartpole", *SMALL, *SHORT]
    assert main([*command, "--seed", "1"]) == 0
    written = {path: path.stat().st_mtime_ns for path in Path("set/runs").glob("*/*.json*")}
    assert main([*command, "--seed", "1..2"]) == 0
    assert "start ppo-cartpole-CartPole-v1-s2-" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert outcomes() == expected()


def test_a_change_of_mind(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "set", "ppo-cartpole", *SMALL, *SHORT]
    Queue.make(Path("set")).add(grid(recipes.ppo_cartpole(), {"seed": [1, 2]}))
    assert main([*command, "--seed", "3", "--drop", "nobody-*"]) == 2
    assert main([*command, "--seed", "3", "--drop", "*-s[12]-*", "--status"]) == 2
    assert says(capsys.readouterr().err, "--drop nobody-*", "no run") and not Path("set/sweep.json").exists()
    assert main([*command, "--seed", "3", "--drop", "*-s[12]-*"]) == 0
    assert capsys.readouterr().out.startswith("dropped CartPole-v1-ppo-s1")
    assert set(outcomes()) == {3}


def test_a_run_that_was_killed_says_so(start: Callable[..., Child]) -> None:
    child = start("sweep", "set", "ppo-cartpole", *SMALL, *LONG, "--layout", DELAY)
    child.until(lambda: lines() > 0, "an iteration")
    (victim,) = processes(child).values()
    os.kill(victim, signal.SIGKILL)
    assert child.wait() == 1
    assert says(child.output(), "SIGKILL", "memory")


# A run that is only starting ends in the same way.
@pytest.mark.parametrize("moment", [pytest.param("starting", marks=pytest.mark.full), "learning"])
def test_a_machine_that_shuts_down_loses_nothing(moment: str, start: Callable[..., Child]) -> None:
    child = start("sweep", "set", "ppo-cartpole", *SMALL, *LONG, "--layout", DELAY, "--checkpoint-every", "1000")
    child.until(lambda: bool(processes(child) if moment == "starting" else lines() > 2), "a run")
    for process in child.members():
        with contextlib.suppress(ProcessLookupError):  # the resource tracker has gone with its owner
            os.kill(process, signal.SIGTERM)
    assert child.wait() == 130
    assert outcomes() == {}, "it did not fail"
    for folder in Path("set/runs").glob("*") if moment == "learning" else ():
        newest = checkpoint.latest(folder / "checkpoints").name
        assert int(newest) == lines(), "it was not taken for impatience"
    assert main(["sweep", "set"]) == 0
    assert outcomes() == expected()
    (facts,) = (json.loads(path.read_text()) for path in Path("set/runs").glob("*/run.json"))
    assert "sweep set ppo-cartpole --env.adapter" in facts["command"], "what gave it to the sweep"


def test_a_hopeless_run_is_stopped_early(capsys: pytest.CaptureFixture[str]) -> None:
    command: list[Any] = ["sweep", "set", "ppo-cartpole", *SMALL, "--total-steps", "10M", "--stop-early", "1000@640"]
    assert main([*command, "--layout", DELAY]) == 0
    assert re.search(r"stopped .*: score \d+\.?\d* .*\b1000\b.* [\d,]+ samples", capsys.readouterr().out)
    assert outcomes() == {1: ("stopped", None)}
    assert list(Path("set/runs").glob("*/checkpoints/0*")), "it can be resumed"
    assert main(["sweep", "set", "--status"]) == 0, "and is not run again by itself"
    assert capsys.readouterr().out.startswith("stopped ")
