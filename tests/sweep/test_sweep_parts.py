"""Queue, slots, early stopping and overview, without processes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_runs import Instant
from rich.console import Console
from sentences import says

from lockstep import recipes
from lockstep.buffers.replay_placement import replay_bytes
from lockstep.cli.main import main
from lockstep.cli.sweep_status import _gist
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import from_json
from lockstep.config.settings import SettingsError
from lockstep.run.folder import RunFolder
from lockstep.sweep import Run, grid
from lockstep.sweep.child import ELSEWHERE, FULL, INTERRUPTED, LOST, run_entry
from lockstep.sweep.core_locks import CoreLocks
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.overview import Picture, PlainOverview, Row, fitting, panel, plain_line
from lockstep.sweep.queue import Outcome, Queue
from lockstep.sweep.runner import Runner, needs_of
from lockstep.sweep.search import measured, reached
from lockstep.sweep.slots import Machine, Needs, Process, Share, needs
from lockstep.sweep.stopping import Curve, StopRule
from lockstep.system import children
from lockstep.system.machine import cores


def seeds(*numbers: int) -> list[Run]:
    return grid(recipes.ppo_cartpole(), {"seed": numbers})


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue.make(tmp_path / "set")


def test_only_new_experiments_are_added(queue: Queue) -> None:
    queue.add(seeds(1, 2))
    queue.add(seeds(5, 2, 1, 3))
    entries = queue.entries()
    assert [entry.experiment["seed"] for entry in entries] == [1, 2, 5, 3]
    assert [from_json(entry.experiment) for entry in entries] == [run.experiment for run in seeds(1, 2, 5, 3)]
    assert len(list((queue.folder / "queue").iterdir())) == 4


def test_layout_and_options_of_what_has_not_ended_follow_the_last_start(queue: Queue) -> None:
    queue.add(seeds(1, 2))
    first, second = queue.entries()
    queue.end(first.name, Outcome("done", "ab" * 32, 10, 1.0))
    changed = {"layout": "processes:2", "options": RunOptions(checkpoint_every=7), "label": "another name"}
    queue.add([dataclasses.replace(run, **changed) for run in seeds(1, 2)])
    assert queue.entries()[0] == first
    after = queue.entries()[1]
    assert (after.layout, after.options["checkpoint_every"]) == ("processes:2", 7)
    assert (after.name, after.order) == (second.name, second.order)


def test_states(queue: Queue) -> None:
    queue.add(seeds(1, 2, 3, 4))
    done, failed, running, waiting = (entry.name for entry in queue.entries())
    queue.end(done, Outcome("done", "ab" * 32, 10, 1.0))
    queue.end(failed, Outcome("failed", reason="a traceback"))
    with queue.claimed(running) as mine:
        assert mine
        states = [queue.state(name) for name in (done, failed, running, waiting)]
        assert states == ["done", "failed", "running", "waiting"]
    assert queue.state(running) == "waiting", "the lock goes with its holder"
    assert queue.outcome(failed) == Outcome("failed", reason="a traceback")
    assert queue.retry("failed") == 1
    assert queue.state(failed) == "waiting" and queue.state(done) == "done"


def test_what_waits_can_be_taken_out_again(queue: Queue) -> None:
    queue.add(seeds(1, 2, 3))
    first, second, third = (entry.name for entry in queue.entries())
    queue.end(first, Outcome("done", "ab" * 32, 10, 1.0))
    queue.end(third, Outcome("failed"))
    queue.run(second).mkdir()
    assert queue.drop("*-s[12]*") == [second]
    assert [entry.name for entry in queue.entries()] == [first, third] and queue.run(second).is_dir()
    assert run_entry(queue, second) == 0 and queue.outcome(second) is None, "as when Slurm begins its job"
    assert queue.drop("*") == [third] and queue.outcome(third) is None
    with pytest.raises(SettingsError, match=rf"--drop {re.escape(first)}: .*\b1 runs"):
        queue.drop(first)
    with pytest.raises(SettingsError, match="--drop nobody: "):
        queue.drop("nobody")


def test_a_run_is_claimed_by_one(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.sweep.queue._DYING", 0.1)
    with queue.claimed("run") as first, queue.claimed("run") as second:
        assert first and not second
    with queue.claimed("run") as again:
        assert again


def test_a_run_that_is_resumed_by_hand_is_left_to_it(queue: Queue, capfd: pytest.CaptureFixture[str]) -> None:
    queue.add(seeds(1))
    (entry,) = queue.entries()
    options = RunOptions(run=str(queue.run(entry.name)))
    with RunFolder.create(from_json(entry.experiment), Layout(), options).locked():
        assert queue.state(entry.name) == "running"
        assert run_entry(queue, entry.name) == ELSEWHERE
    assert queue.state(entry.name) == "waiting" and queue.outcome(entry.name) is None
    assert says(capfd.readouterr().err, entry.name, "another process")


def test_a_run_with_checkpoints_is_not_taken_for_unfinished(queue: Queue) -> None:
    (queue.run("a") / "checkpoints").mkdir(parents=True)
    queue.discard_unfinished_folder("a")
    assert not queue.run("a").exists()
    (queue.run("a") / "checkpoints" / "00000010").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"\ba has checkpoints.*experiment\.json"):
        queue.discard_unfinished_folder("a")
    assert queue.run("a").exists()


def test_folders_that_a_copy_lacks_are_made_and_other_versions_fields_left_out(queue: Queue) -> None:
    queue.add(seeds(1))
    (path,) = (queue.folder / "queue").iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "priority": 3}))
    (queue.folder / "logs").rmdir()
    again = Queue.open(queue.folder)
    assert len(again.entries()) == 1 and again.log("x").parent.is_dir()
    path.write_text("{}")
    with pytest.raises(SettingsError, match=re.escape(str(path))):
        again.entries()


def test_a_file_system_without_locks(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    queue.add(seeds(1))
    with queue.locked(), queue.claimed(queue.entries()[0].name) as mine:
        assert mine
    assert queue.state(queue.entries()[0].name) == "waiting"


def test_a_folder_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SettingsError, match=re.escape(str(tmp_path))):
        Queue.make(tmp_path)
    assert main(["sweep", str(tmp_path), "ppo-cartpole", "--dry-run"]) == 2
    with pytest.raises(SettingsError, match=f"{re.escape(str(tmp_path))} .*lockstep sweep"):
        Queue.open(tmp_path)
    with pytest.raises(SettingsError, match=r"/nothing .*lockstep sweep"):
        Queue.open(tmp_path / "nothing")


def test_a_folder_that_cannot_be_written(queue: Queue) -> None:
    (queue.folder / ".lock").mkdir()
    with (
        pytest.raises(SettingsError, match="set: Is a directory"),
        queue.locked(),
    ):
        pass


def test_a_damaged_file_is_named(queue: Queue) -> None:
    queue.add(seeds(1))
    (path,) = (queue.folder / "queue").iterdir()
    path.write_text(path.read_text()[:100])
    with pytest.raises(SettingsError, match=re.escape(str(path))):
        queue.entries()


def test_a_write_that_was_cut_off_is_no_entry(queue: Queue) -> None:
    queue.add(seeds(1))
    (path,) = (queue.folder / "queue").iterdir()
    path.with_name("other.json.partial").write_text(path.read_text()[:100])
    assert len(queue.entries()) == 1


@pytest.mark.parametrize(
    ("layout", "torch_threads", "wanted"),
    [
        ("inline", 1, Needs(1)),
        ("inline", 4, Needs(4)),
        ("inline,env_threads=3", 1, Needs(3)),
        ("processes:2", 1, Needs(2)),
        ("processes:2,env_processes=2", 1, Needs(4)),
        ("cpu:a3-l1", 1, Needs(4)),
        ("cpu:a2-l1,env_processes=2", 2, Needs(6)),
        ("cpu:a2-l1,env_processes=3", 2, Needs(8)),
        ("cpu:a2-l1", 3, Needs(9)),
        ("inline,device=0", 1, Needs(1, 1)),
        ("a0-l1,2", 1, Needs(3, 3)),
        ("a3-l0", 1, Needs(2, 4)),
        ("acpu,cpu-l0", 1, Needs(3, 1)),
    ],
)
def test_needs_of_layouts(layout: str, torch_threads: int, wanted: Needs) -> None:
    assert needs(Layout.parse(layout), torch_threads) == wanted


def test_a_launcher_in_a_users_file_is_found_from_another_folder(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_USER_FILES", "")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "only_there.py").write_text(
        "from lockstep.config.launchers import Launcher\nfrom lockstep.launchers.inline import run_inline\n"
        "HERE = Launcher(run_inline)\n"
    )
    monkeypatch.chdir(tmp_path / "there")
    queue.add([dataclasses.replace(seeds(1)[0], layout="only_there.py:HERE")])
    monkeypatch.chdir(tmp_path)
    (entry,) = queue.entries()
    assert needs_of(entry) == Needs(1)


def test_runs_never_share_a_core_and_all_are_given_back() -> None:
    machine, draw = Machine(range(8)), random.Random(1)
    shares: list[Share] = []
    for _ in range(300):
        wanted = Needs(draw.randint(1, 4))
        share = machine.take(wanted)
        taken = [core for held in shares for core in held.cores]
        assert (share is None) == (8 - len(taken) < wanted.cores)
        if share is None:
            machine.give_back(shares.pop(draw.randrange(len(shares))))
        else:
            assert len(share.cores) == wanted.cores and not set(share.cores) & set(taken)
            shares.append(share)
    for share in shares:
        machine.give_back(share)
    assert machine.take(Needs(8)) == Share(tuple(range(8)))


def test_cores_are_neighbors_and_too_many_are_all_there_are() -> None:
    machine = Machine([0, 1, 2, 3, 8, 9])
    first = machine.take(Needs(1))
    assert first is not None and first == Share((0,))
    assert machine.take(Needs(2)) == Share((1, 2))
    assert machine.take(Needs(2)) == Share((8, 9))
    machine.give_back(first)
    assert machine.take(Needs(2)) == Share((0, 3))
    assert Machine([4, 5]).take(Needs(16)) == Share((4, 5))
    assert str(Share((0, 1, 2, 5), ("0", "1"))) == "cores 0-2,5, GPU 0,1"


def test_gpus_are_shared_evenly() -> None:
    machine = Machine(range(8), ["2", "5"], runs_per_gpu=2)
    shares = [machine.take(Needs(1, 1)) for _ in range(5)]
    assert [share and share.gpus for share in shares] == [("2",), ("5",), ("2",), ("5",), None]
    assert machine.take(Needs(1)) is not None, "a run without a GPU needs no room on one"
    assert Machine(range(8), ["2", "5"]).take(Needs(1, 2)) == Share((0,), ("2", "5"))
    with pytest.raises(SettingsError, match=r"\b3 GPUs.*\b2\b"):
        machine.check(Needs(1, 3))


@pytest.fixture
def sweeps() -> Iterator[Callable[..., Machine]]:
    """Makes machines, of equal cores, of sweeps that see each other."""
    with contextlib.ExitStack() as stack:
        name = f"lockstep-test-{os.getpid()}"
        yield lambda cores: Machine(range(cores), core_locks=stack.enter_context(CoreLocks(name)))


def test_sweeps_leave_each_other_cores(sweeps: Callable[..., Machine]) -> None:
    one, other = sweeps(4), sweeps(4)
    shares = [machine.take(Needs(1)) for machine in (one, other, one)]
    assert shares == [Share((0,)), Share((1,)), Share((2,))]
    crowded = other.take(Needs(2))
    assert crowded == Share((2, 3), shared=True) and str(crowded).endswith("(shared with another sweep)")
    for machine, share in zip((one, other, one, other), (*shares, crowded), strict=True):
        assert share is not None
        machine.give_back(share)
    assert one.take(Needs(4)) == Share((0, 1, 2, 3))


def test_a_sweep_shares_as_few_cores_as_it_can_and_is_seen(sweeps: Callable[..., Machine]) -> None:
    first, second, third = sweeps(8), sweeps(8), sweeps(8)
    mine = first.take(Needs(4))
    assert mine is not None and mine == Share((0, 1, 2, 3))
    assert second.take(Needs(5)) == Share((3, 4, 5, 6, 7), shared=True)
    first.give_back(mine)
    assert first.take(Needs(2)) == Share((0, 1)), "neither is core 3 alone any more"
    assert third.take(Needs(1)) == Share((2,))
    assert third.take(Needs(1)) == Share((0,), shared=True)


def test_claims_go_with_their_process_and_no_two_choose_at_once() -> None:
    machine, cores = f"lockstep-test-together-{os.getpid()}", 6
    program = (
        "import sys, time; from lockstep.sweep.core_locks import CoreLocks; "
        "from lockstep.sweep.slots import Machine, Needs; "
        "machine = Machine(range(int(sys.argv[2])), core_locks=CoreLocks(sys.argv[1])); sys.stdin.readline(); "
        "print([machine.take(Needs(1)) for _ in range(3)], flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, machine, str(cores)]
    with contextlib.ExitStack() as stack:
        sweeps = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        for sweep in sweeps:
            stack.callback(sweep.kill)
            assert sweep.stdin is not None
            sweep.stdin.write("go\n")
            sweep.stdin.flush()
        shown = "".join(sweep.stdout.readline() for sweep in sweeps if sweep.stdout is not None)
        assert sorted(map(int, re.findall(r"cores=\((\d),\)", shown))) == [*range(cores)] and "shared=True" not in shown
        for sweep in sweeps:
            sweep.kill()
            sweep.wait()
        with CoreLocks(machine) as core_locks:
            assert Machine(range(cores), core_locks=core_locks).take(Needs(cores)) == Share(tuple(range(cores)))


def test_replay_counts_as_if_it_were_full() -> None:
    machine = Machine(range(8), memory=20e9)
    shares = [machine.take(Needs(1, memory=8_000_000_000)) for _ in range(3)]
    assert [share is not None for share in shares] == [True, True, False]
    assert machine.take(Needs(1)) is not None, "one that remembers nothing"
    assert shares[0] is not None
    machine.give_back(shares[0])
    assert machine.has_room(Needs(1, memory=8_000_000_000))
    alone = Machine(range(8), memory=1e9)
    assert alone.take(Needs(1, memory=8_000_000_000)) is not None, "it finds out by itself"
    assert alone.take(Needs(1, memory=1)) is None and alone.take(Needs(1)) is not None


def test_a_run_knows_what_its_replay_takes(queue: Queue) -> None:
    experiment = recipes.dqn_cartpole()
    queue.add([Run(experiment), Run(experiment.replace(seed=2)), Run(recipes.ppo_cartpole())])
    first, second, third = (needs_of(entry).memory for entry in queue.entries())
    assert first == second == experiment.scheme.shards * replay_bytes(experiment) > 0 == third


class Later(Instant):
    """Has no room at first."""

    turns = 0

    def take(self, wanted: Needs) -> Share | None:
        self.turns += 1
        return super().take(wanted) if self.turns > 3 else None


def test_waiting_for_room_is_said_once(queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    queue.add(seeds(1, 2))
    assert Runner(queue, Later([0]), SweepOptions(overview="plain")).run()
    assert capsys.readouterr().out.count("waiting: ") == 1


class Full(Machine):
    """A place whose second run finds no space, while the first goes on until it is told to stop."""

    started = 0

    def start(self, queue: Queue, name: str, share: Share) -> Process:
        self.started += 1
        wait = f"trap 'exit {INTERRUPTED}' TERM; while true; do sleep 0.05; done"
        return subprocess.Popen(["sh", "-c", wait if self.started == 1 else f"exit {FULL}"])


def test_whatever_ends_a_sweep_others_are_told_to_checkpoint(queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    queue.add(seeds(1, 2, 3))
    place = Full([0, 1])
    with pytest.raises(SettingsError, match=f"{queue.entries()[1].name} .*logs/"):
        Runner(queue, place, SweepOptions(overview="plain")).run()
    assert place.started == 2 and [queue.state(entry.name) for entry in queue.entries()] == ["waiting"] * 3
    assert f"interrupted {queue.entries()[0].name}" in capsys.readouterr().out


class Broken(Full):
    """A place that raises what nobody foresaw while a run goes on."""

    def start(self, queue: Queue, name: str, share: Share) -> Process:
        if self.started:
            raise ValueError("unforeseen")
        return super().start(queue, name, share)


def test_what_nobody_foresaw_has_runs_checkpoint_and_is_shown_as_it_is(
    queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.add(seeds(1, 2))
    with pytest.raises(ValueError, match="unforeseen"):
        Runner(queue, Broken([0, 1]), SweepOptions(overview="plain")).run()
    assert f"interrupted {queue.entries()[0].name}" in capsys.readouterr().out


def test_two_ctrl_cs_before_the_sweep_looks_are_an_end_and_no_failure(queue: Queue) -> None:
    """It tells the runs first, and then ends them."""
    queue.add(seeds(1))

    class Hurried(Machine):
        def start(self, queue: Queue, name: str, share: Share) -> Process:
            signal.raise_signal(signal.SIGINT)
            time.sleep(2 * children._CTRL_C_ECHO)
            signal.raise_signal(signal.SIGINT)
            return subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 100"])

    assert not Runner(queue, Hurried([0]), SweepOptions(overview="plain")).run()
    assert queue.state(queue.entries()[0].name) == "waiting"


class Scripted(Machine):
    """A place whose runs last three seconds of a clock that the sweep's pauses move on. They measure `lines` once they
    have begun, checkpoint and end when they are told to, and may send this process signals."""

    def __init__(self, patch: pytest.MonkeyPatch, lines: str = "", signals: Sequence[tuple[float, int]] = ()) -> None:
        super().__init__([0])
        self.lines, self.signals = lines, list(signals)
        self.now, self.begun, self.calls = 0.0, 0.0, list[str]()
        self.returncode: int | None = None
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.pass_by)
        for module in ("sweep.runner", "system.children"):
            patch.setattr(f"lockstep.{module}.time", clock)

    def start(self, queue: Queue, name: str, share: Share) -> Process:
        queue.run(name).mkdir(exist_ok=True)
        with queue.metrics(name).open("a") as file:
            file.write(self.lines)
        self.begun = self.now
        return self

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        while self.signals and self.signals[0][0] <= self.now - self.begun:
            signal.raise_signal(self.signals.pop(0)[1])

    def poll(self) -> int | None:
        if self.calls or self.now > self.begun + 3:
            self.returncode = INTERRUPTED
        return self.returncode

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")

    def wait(self) -> int:
        return INTERRUPTED


class Held(Instant):
    """A place whose first process finds its run held by another one, which dies later."""

    def __init__(self, cores: list[int], queue: Queue) -> None:
        super().__init__(cores)
        self.names: list[str] = []
        self.holder = queue.log(queue.entries()[0].name)
        self.holder.touch()
        self.file = self.holder.open("rb")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def start(self, queue: Queue, name: str, share: Share) -> Process:
        self.names.append(name)
        if len(self.names) == 1:
            return subprocess.Popen(["sh", "-c", f"exit {ELSEWHERE}"])
        if len(self.names) == 2:
            self.file.close()
            queue.end(name, Outcome("done", "ab" * 32, 10, 1.0))
            return subprocess.Popen(["sleep", "3"])  # during which the sweep looks again
        return super().start(queue, name, share)


def test_a_run_that_another_process_left_is_taken_up_again(queue: Queue) -> None:
    queue.add(seeds(1, 2))
    first, second = (entry.name for entry in queue.entries())
    place = Held([0], queue)
    assert Runner(queue, place, SweepOptions(overview="plain")).run()
    assert place.names == [first, second, first]


@pytest.mark.parametrize(
    ("options", "begin", "stopped"), [({}, 0, True), ({}, 3000, False), ({"max_episode_steps": 7}, 0, False)]
)
def test_a_run_is_judged_once_it_moves_and_by_runs_of_its_own_task(
    options: dict[str, int], begin: int, stopped: bool, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = recipes.ppo_cartpole()
    other = base.replace(env=dataclasses.replace(base.env, options=options), seed=4)
    queue.add([*seeds(1, 2, 3), Run(other)])
    *good, entry = queue.entries()
    for each in good:
        queue.run(each.name).mkdir()
        queue.metrics(each.name).write_text("".join(line(samples, 100.0) for samples in (1000, 2000, 3000)))
        queue.end(each.name, Outcome("done", "ab" * 32, 10, 100.0))
    poor = [line(samples, 1.0) for samples in (1000, 2000, 3000)]
    queue.run(entry.name).mkdir()
    queue.metrics(entry.name).write_text("".join(poor[: begin // 1000]))
    place = Scripted(monkeypatch, "".join(poor[begin // 1000 :]))
    Runner(queue, place, SweepOptions(overview="none", stop_early="median@1k")).run()
    assert (place.calls == ["terminate"], queue.outcome(entry.name) is not None) == (stopped, stopped)


def test_runs_that_a_mistaken_rule_stopped_can_go_on(queue: Queue) -> None:
    queue.add(seeds(1, 2))
    first, second = (entry.name for entry in queue.entries())
    queue.end(first, Outcome("stopped"))
    queue.end(second, Outcome("failed"))
    assert queue.retry("stopped") == 1
    assert (queue.state(first), queue.state(second)) == ("waiting", "failed")


def test_this_machine_is_what_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    share = Machine.here(gpus=False).take(Needs(len(allowed)))
    assert share is not None and set(share.cores) <= allowed and len(share.cores) == cores()


def test_a_quota_limits_how_many_cores_are_busy_and_not_which() -> None:
    used = set()
    for _ in range(50):
        machine = Machine(range(64), quota=2)
        first, second = machine.take(Needs(1)), machine.take(Needs(1))
        assert first is not None and second is not None and machine.take(Needs(1)) is None
        used |= {*first.cores, *second.cores}
        machine.give_back(first)
        machine.give_back(second)
        everything = machine.take(Needs(16))
        assert everything is not None and len(everything.cores) == 2
    assert len(used) > 10


def line(samples: int, score: float | None = None) -> str:
    known = {} if score is None else {"score/mean": score}
    return json.dumps({"samples": samples, "speed/samples_per_second": 50.0, **known}) + "\n"


def test_a_curve_is_read_as_it_grows(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    curve = Curve(metrics, every=100)
    curve.read()
    assert (curve.samples, curve.score, curve.marks) == (0, None, [])
    metrics.write_text(line(60) + line(120, 1.0) + line(350, 2.0)[:10])
    curve.read()
    assert (curve.samples, curve.score, curve.rate, curve.marks) == (120, 1.0, 50.0, [1.0])
    metrics.write_text(line(60) + line(120, 1.0) + line(350, 2.0))
    curve.read()
    assert (curve.samples, curve.score, curve.marks) == (350, 2.0, [1.0, 2.0, 2.0])


def test_a_damaged_line_of_a_curve_is_passed_over(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(line(100, 1.0).encode() + b"\0\r\0\n[]\n\xff\n{}\n" + line(200, 2.0).encode())
    curve = Curve(metrics, every=100)
    curve.read()
    assert (curve.samples, curve.score, curve.marks) == (200, 2.0, [1.0, 2.0])
    assert reached(measured(metrics), "score/mean") == (2.0, 200)


@pytest.mark.parametrize("same_file", [False, True])
def test_a_curve_follows_a_run_that_was_resumed(tmp_path: Path, same_file: bool) -> None:
    """A new file may have the number of the one before, which was deleted."""
    metrics = tmp_path / "metrics.jsonl"
    other = metrics if same_file else tmp_path / "other"
    metrics.write_text(line(100, 1.0) + line(200, 2.0))
    curve = Curve(metrics, every=100)
    curve.read()
    other.write_text(line(100, 1.0) + line(150, 5.0) + line(200, 6.0))  # longer than what was read
    other.replace(metrics)
    curve.read()
    assert (curve.samples, curve.marks) == (200, [1.0, 6.0])


def test_the_end_of_a_long_curve_is_enough_for_what_was_reached(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(line(samples, samples / 10) for samples in range(1, 5000)))
    curve = Curve(metrics)
    curve.read(end=True)
    assert (curve.samples, curve.score) == (4999, 499.9)


@pytest.mark.parametrize(
    ("text", "score", "others", "stops"),
    [
        ("median@200k", 1.0, [2.0, 3.0, 0.0], True),
        ("median@200k", 2.0, [2.0, 3.0, 0.0], False),
        ("median@200k", 1.0, [2.0, 3.0], False),
        ("20@1M", 19.9, [], True),
        ("20@1M", 20.0, [90.0] * 5, False),
        ("-5.5@1e3", -6.0, [], True),
    ],
)
def test_stop_rules(text: str, score: float, others: list[float], stops: bool) -> None:
    assert bool(StopRule.parse(text).objection(score, others)) == stops


@pytest.mark.parametrize("text", ["median", "@200k", "mean@200k", "20@", "20@-5", "nan@5", "20@0"])
def test_stop_rules_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--stop-early .*median@SAMPLES .*SCORE@SAMPLES"):
        StopRule.parse(text)


PICTURE = Picture(
    {"done": 3, "running": 3, "waiting": 10, "failed": 1},
    [
        Row("pong-s1", "core 0", 500, 1000, 12.5, 100.0),
        Row("pong-s2", "cores 1-2", 0, 1000, None, 0.0),
        Row("pong-s3", "Ray, 2 CPUs", 0, 1000, None, 0.0, pending=True),
        Row("pong-s4", "core 3", 1000, 1000, 19.0, 100.0),
    ],
    61.0,
)


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_table_shows_what_runs(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, record=True, color_system=None)
    console.print(panel(PICTURE, "sweep set"))
    text = console.export_text()
    for part in (
        "sweep set",
        "pong-s1",
        "core 0",
        "12.5",
        "00:05",
        "pong-s2",
        "cores 1-2",
        "starting",
        "pending",
        "finishing",
        "01:01",
    ):
        assert part in text
    assert says(text, "3 done", "1 failed", "3 running", "10 waiting")
    assert all(len(shown) <= width for shown in text.splitlines())


def test_names_have_the_width_that_they_need() -> None:
    console = Console(file=io.StringIO(), width=80, height=24, record=True, color_system=None)
    names = [f"ppo-cartpole-CartPole-v1-s{seed}-6df88527" for seed in (1, 2)]
    wheres = [str(Share((core,), shared=core > 0)) for core in (0, 1)]
    rows = [Row(name, where, 500, 1000, 112.5, 0.1) for name, where in zip(names, wheres, strict=True)]
    console.print(fitting(console, Picture({"running": 2}, rows), "sweep set"))
    shown = console.export_text()
    assert all(f"{name}  {where} " in shown for name, where in zip(names, (" core 0", "core 1*"), strict=True))
    assert shown.count("* (shared with another sweep)") == 1 and shown.count("━") > 4, "bars have what is left"

    wide = [Row(names[0] * 3, "cores 0-3,8-11, GPU 0,1", 500, 1000, 112.5, 0.1), *[rows[0]] * 63, rows[1]]
    console.print(fitting(console, Picture({"running": 65}, wide), "sweep set"))
    shown = console.export_text()
    assert shown.count("━") > 4 and "*" not in shown, "what is shared is not among those shown"


@pytest.mark.parametrize("name", ["pong", "ppo-cartpole-CartPole-v1-hidden-sizes=64+64-8c812eeb"])
def test_a_table_that_is_too_long_still_shows_the_counts(name: str) -> None:
    rows = [Row(f"{name}-s{number}", "core 0", 500, 1000, 12.5, 100.0) for number in range(64)]
    console = Console(file=io.StringIO(), width=80, height=24, record=True, color_system=None)
    console.print(fitting(console, Picture({"done": 900, "running": 64}, rows), "sweep set"))
    shown = console.export_text().splitlines()
    assert 10 < len(shown) < 24 and says(shown[-2], "900 done", "64 running") and "… and " in shown[-3]
    listed = sum(row.where in line for row in rows[:1] for line in shown)
    assert listed >= 3 and f"… and {64 - listed} more" in shown[-3]


def test_the_plain_line_shows_the_same() -> None:
    assert plain_line(PICTURE) == (
        "3 done · 1 failed · 3 running · 10 waiting | pong-s1 50% score 12.5 left 00:05 | "
        "pong-s2 0% score – left starting | pong-s3 0% score – left pending | pong-s4 100% score 19 left finishing"
    )


class Losing(Machine):
    """Whose runs are lost with their machine again and again."""

    started = 0

    def start(self, queue: Queue, name: str, share: object) -> subprocess.Popen[bytes]:  # type: ignore[override]
        self.started += 1
        queue.log(name).touch()
        return subprocess.Popen(["sh", "-c", f"exit {LOST if self.started < 9 else 0}"])


def test_a_run_is_not_lost_for_ever(tmp_path: Path) -> None:
    queue = Queue.make(tmp_path / "set")
    queue.add(seeds(1))
    place = Losing([0])
    assert not Runner(queue, place, SweepOptions(overview="none")).run()
    outcome = queue.outcome(queue.entries()[0].name)
    assert place.started == 4 and outcome is not None and says(outcome.reason, "lost", "4 times")


def test_a_run_is_recorded_with_the_folder_and_the_command_that_are_given(queue: Queue) -> None:
    queue.add(seeds(1), "/there", ["lockstep", "it"])
    (entry,) = queue.entries()
    assert (entry.directory, entry.command) == ("/there", ["lockstep", "it"])


def test_what_would_wait_again_has_the_layout_of_now(queue: Queue) -> None:
    queue.add(seeds(1))
    queue.end(queue.entries()[0].name, Outcome("failed"))
    now = [dataclasses.replace(run, layout="processes:2") for run in seeds(1)]
    assert [entry.layout for entry in queue.with_runs(now, again=("stopped",))] == ["inline"]
    assert [entry.layout for entry in queue.with_runs(now, again=("failed",))] == ["processes:2"]


def test_what_is_running_is_not_taken_out(queue: Queue) -> None:
    queue.add(seeds(1, 2))
    first, second = (entry.name for entry in queue.entries())
    with queue.claimed(first):
        assert queue.drop("*") == [second] and queue.has(first)


def test_more_environments_are_no_other_task(queue: Queue) -> None:
    base = recipes.ppo_cartpole()
    queue.add([Run(base), Run(base.replace(env=dataclasses.replace(base.env, num_envs=2 * base.env.num_envs)))])
    one, other = queue.entries()
    assert one.env_settings == other.env_settings and one.env_settings["id"] == "CartPole-v1"


def test_gpus_are_given_back() -> None:
    machine = Machine(range(2), ["2"])
    share = machine.take(Needs(1, 1))
    assert share is not None and machine.take(Needs(1, 1)) is None
    machine.give_back(share)
    assert machine.take(Needs(1, 1)) == Share((0,), ("2",))


def test_runs_that_are_too_large_for_memory_follow_each_other() -> None:
    machine = Machine(range(8), memory=1e9)
    for _ in range(2):
        share = machine.take(Needs(1, memory=8_000_000_000))
        assert share is not None
        machine.give_back(share)


def test_a_run_sees_the_gpus_of_its_share_alone(queue: Queue) -> None:
    given: list[Any] = []
    machine = Machine(range(3), ["2", "5"], start=lambda *arguments: given.append(arguments))  # type: ignore[arg-type]
    machine.start(queue, "a", Share((0, 1), ("5", "2")))
    machine.start(queue, "b", Share((2,)))
    (_, *first, environment), second = given
    assert first == ["a", (0, 1)] and environment["CUDA_VISIBLE_DEVICES"] == "5,2" and environment["PATH"]
    assert second == (queue, "b", (2,), None)


def test_the_gpus_of_this_machine_are_those_that_the_user_lets_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for visible, names in (("3, 5,7", ("3", "5")), (None, ("0", "1"))):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine = Machine.here(2, replay=False)
        share = machine.take(Needs(1, 2))
        assert share is not None and share.gpus == names
        assert machine.has_room(Needs(0, 2)), "two runs share a GPU"


@pytest.mark.parametrize(
    ("signals", "killed"),
    [
        ([(0.1, signal.SIGTERM), (0.5, signal.SIGTERM)], False),
        ([(0.1, signal.SIGTERM), (0.5, signal.SIGINT)], True),
        ([(0.1, signal.SIGTERM), (2.0, signal.SIGTERM)], True),
        ([(0.1, signal.SIGTERM), (2.0, signal.SIGHUP)], False),
        ([(0.1, signal.SIGHUP), (0.5, signal.SIGTERM)], False),
    ],
)
def test_a_machine_that_repeats_itself_is_not_impatient(
    signals: list[tuple[float, int]], killed: bool, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy(Scripted):
        """Does not end before it is killed, or its time is over."""

        def poll(self) -> int | None:
            if "kill" in self.calls or self.now > self.begun + 3:
                self.returncode = INTERRUPTED
            return self.returncode

    queue.add(seeds(1))
    place = Busy(monkeypatch, signals=signals)
    runner = Runner(queue, place, SweepOptions(overview="none"))
    assert not runner.run() and runner.interrupted
    assert place.calls[0] == "terminate" and ("kill" in place.calls) == killed


@pytest.mark.parametrize(
    ("others", "stopped"),
    [
        ([[100.0]] * 3, True),
        ([[100.0]] * 2, False),
        ([[1.0, 100.0]] * 3, False),
        ([[100.0, 1.0]] * 3, True),
        ([[]] * 3, False),
    ],
    ids=["worse", "too-few-others", "worse-than-later", "better-than-later", "nobody-came-so-far"],
)
def test_a_run_is_compared_with_what_others_had_after_as_many_samples(
    others: list[list[float]], stopped: bool, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.add(seeds(*range(len(others) + 1)))
    *known, judged = queue.entries()
    for entry, scores in zip(known, others, strict=True):
        queue.run(entry.name).mkdir()
        queue.metrics(entry.name).write_text("".join(line(1000 * n, score) for n, score in enumerate(scores, 1)))
        queue.end(entry.name, Outcome("done"))
    place = Scripted(monkeypatch, line(1000, 2.0))
    Runner(queue, place, SweepOptions(overview="none", stop_early="median@1k")).run()
    assert (place.calls == ["terminate"], queue.outcome(judged.name) is not None) == (stopped, stopped)


@pytest.mark.parametrize("held", [False, True])
def test_a_hopeless_run_has_ended_unless_another_process_goes_on_with_it(
    held: bool, queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.add(seeds(1))
    (entry,) = queue.entries()
    place = Scripted(monkeypatch, line(1000, 7.0))
    with queue.claimed(entry.name) if held else contextlib.nullcontext():
        Runner(queue, place, SweepOptions(overview="plain", stop_early="9@1k")).run()
    assert place.calls == ["terminate"]
    ended = Outcome("stopped", score=7.0, reason="score 7 is below 9 after 1,000 samples")
    assert queue.outcome(entry.name) == (None if held else ended)
    assert says(capsys.readouterr().out, entry.name, "another process") == held


def test_a_line_of_an_evaluation_says_nothing_of_speed(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line(100, 1.0) + json.dumps({"samples": 100, "eval/score": 3.0}) + "\n")
    curve = Curve(metrics)
    curve.read()
    assert (curve.samples, curve.score, curve.rate) == (100, 1.0, 50.0)


def test_a_whole_last_iteration_is_no_more_than_all() -> None:
    row = Row("a", "core 0", 1100, 1000, None, 100.0)
    assert (row.share, row.left) == (1.0, "finishing")


def test_what_runs_is_printed_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("lockstep.sweep.overview.time", SimpleNamespace(monotonic=lambda: clock.now))
    overview, printed = PlainOverview(lambda: PICTURE), []
    for seconds in (29.0, 30.0, 31.0, 59.0, 60.0):
        clock.now = seconds
        overview.update()
        printed.append(capsys.readouterr().out.count("3 done"))
    assert printed == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("options", [SweepOptions(slots=-1), SweepOptions(runs_per_gpu=0)])
def test_numbers_of_runs_that_mean_nothing(options: SweepOptions) -> None:
    SweepOptions(slots=0, runs_per_gpu=1).validate()
    with pytest.raises(SettingsError, match=r"--slots -?\d .*--runs-per-gpu \d"):
        options.validate()


def test_the_line_that_says_most_of_why_a_run_failed() -> None:
    assert _gist("Traceback (most recent call last):\n  a line\nOSError: no licence") == "OSError: no licence"
    assert _gist("The run's process was ended by SIGKILL. It had printed last:\nstep 3") == (
        "The run's process was ended by SIGKILL. It had printed last:"
    )
