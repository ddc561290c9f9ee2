"""Sweeps on a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from children import Child
from sentences import says
from tiny import options

from lockstep.cli.main import main
from lockstep.config.extras import install_command
from lockstep.config.layout import Layout
from lockstep.config.serialization import from_json
from lockstep.config.settings import SettingsError
from lockstep.launchers.launch import resume, train
from lockstep.run import checkpoint
from lockstep.sweep.child import LOST, STOPPED
from lockstep.sweep.queue import Queue
from lockstep.sweep.ray import Bundle, RayCluster, RayProcess, SweepRun
from lockstep.sweep.slots import Needs

pytestmark = pytest.mark.usefixtures("own_folder")

SMALL = (
    *("--env.adapter", "gymnasium", "--env.num-envs", "8", "--env.reseed-every", "20", "--scheme.acting-batch", "0"),
    *("--algorithm.rollout", "8", "--algorithm.epochs", "1", "--algorithm.minibatches", "1"),
    *("--checkpoint-every", "2", "--no-tensorboard", "--layout", "inline,learner_delay=0.05"),
)
STEPS = 8 * 8 * 100
"""Five seconds at least, with the delay."""


class Nodes:
    """What RayCluster asks Ray."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]

    def cluster_resources(self) -> dict[str, float]:
        return {name: sum(node.get(name, 0) for node in self._nodes) for name in ("CPU", "GPU")}


def test_a_cluster_is_shared_out() -> None:
    cluster = RayCluster(Nodes({"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}), runs_per_gpu=2)
    first = cluster.take(Needs(2, 1))
    assert first is not None and (first.cpus, first.gpus, str(first)) == (2, 0.5, "Ray, 2 CPUs, 0.5 GPU")
    largest = cluster.take(Needs(16))
    assert largest is not None and largest.cpus == 4, "all of the largest node"
    assert cluster.take(Needs(1)) is None and not cluster.has_room(Needs(1))
    cluster.give_back(largest)
    assert cluster.take(Needs(1, 1)) is not None
    assert not cluster.has_room(Needs(1, 1)), "two share the GPU already"
    assert cluster.has_room(Needs(3)) and not cluster.has_room(Needs(4))
    for count in (3, 5, 6, 9):
        shared = RayCluster(Nodes({"CPU": 16.0, "GPU": 1.0}), runs_per_gpu=count)
        assert [shared.take(Needs(1, 1)) is not None for _ in range(count + 1)] == [True] * count + [False]
    with pytest.raises(SettingsError, match=r"\b2 GPUs.*node.*\b1\b"):
        cluster.check(Needs(1, 2))
    assert not RayCluster(Nodes()).has_room(Needs(1)), "all nodes are gone"


def test_a_folder_that_a_node_does_not_have() -> None:
    with pytest.raises(SettingsError, match=r"/nowhere/set .* /SHARED/"):
        SweepRun().run("/nowhere/set", "run")


def test_why_a_run_was_lost_is_in_its_log() -> None:
    class Lost(Exception):
        """As Ray's, of an actor that could not even be made."""

    queue, ray = Queue.make(Path("set")), MagicMock()
    ray.remote().return_value.remote.return_value = SimpleNamespace(run=MagicMock(), __ray_ready__=MagicMock())
    ray.exceptions.RayActorError, ray.exceptions.RayError = Lost, Exception
    ray.wait.return_value, ray.get.side_effect = ([1], []), Lost("No module named lockstep")
    process = RayProcess(ray, queue, "run", Bundle(1, 0.0))
    assert process.poll() == LOST
    assert queue.log("run").read_text() == "No module named lockstep\n"


@pytest.mark.parametrize("code", STOPPED)
@pytest.mark.parametrize("told", [False, True])
def test_a_run_that_its_node_stopped_goes_on_elsewhere(
    code: int, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = SweepRun()

    class Ended:
        def wait(self) -> int:
            if told:
                actor.stop()
            return code

        def terminate(self) -> None:
            pass

    monkeypatch.setattr("lockstep.sweep.child.start", lambda *_: Ended())
    Queue.make(tmp_path / "set")
    assert actor.run(str(tmp_path / "set"), "name") == (code if told else LOST)


def test_a_run_that_ray_has_no_place_for_yet() -> None:
    ray = MagicMock()
    ray.remote().return_value.remote.return_value = SimpleNamespace(run=MagicMock(), __ray_ready__=MagicMock())
    ray.wait.return_value = ([], [1])
    cluster = RayCluster(ray)
    process = cluster.start(Queue.make(Path("set")), "run", Bundle(1, 0.0))
    assert cluster.pending(process) and process.poll() is None
    ray.wait.return_value = ([1], [])
    assert not cluster.pending(process)


def test_runs_that_would_need_ray_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    assert main(["sweep", "set", "ppo-cartpole", "--layout", "ray:2", "--ray"]) == 2
    assert says(capsys.readouterr().err, "--layout ray:2", "--ray")


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else found(name))
    assert main(["sweep", "set", "ppo-cartpole", "--ray"]) == 2
    assert install_command("ray") in capsys.readouterr().err


def test_slurm_and_ray(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "set", "ppo-cartpole", "--ray", "--slurm"]) == 2
    assert "--slurm and --ray" in capsys.readouterr().err


def actors(child: Child) -> list[int]:
    """Ray puts the class into their names."""
    found = []
    for process in child.members():
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::SweepRun"):
                found.append(process)
    return found


@pytest.mark.timeout(400)  # starting Ray and runs takes seconds, and a busy machine many more
def test_a_run_that_is_lost_goes_on_elsewhere(start: Callable[..., Child]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    flags = (*SMALL, "--total-steps", str(STEPS), "--slots", "1", "--overview", "plain")
    child = start("sweep", "set", "ppo-cartpole", *flags, "--ray")
    ledger = "set/runs/*/ledger.jsonl"
    child.until(lambda: any(path.read_bytes().count(b"\n") > 8 for path in Path().glob(ledger)), "iterations")
    (actor,) = actors(child)
    (metrics,) = Path().glob("set/runs/*/metrics.jsonl")
    os.kill(actor, signal.SIGKILL)
    child.until(lambda: "continues elsewhere" in child.output(), "the loss to be noticed")
    before = metrics.stat().st_mtime_ns
    child.until(lambda: metrics.stat().st_mtime_ns != before, "another actor to go on")
    child.interrupt()
    assert child.wait() == 130, child.output()
    assert re.search(r": lockstep sweep \S+ --ray$", child.output(), re.M)
    assert re.search(r"continue ppo-cartpole-CartPole-v1-s1-\w+ on Ray, 1 CPU", child.output())

    queue = Queue.open(Path("set"))
    (entry,) = queue.entries()
    assert queue.state(entry.name) == "waiting"
    folder = queue.run(entry.name)
    newest = checkpoint.latest(folder / "checkpoints").name
    assert int(newest) == metrics.read_bytes().count(b"\n"), "it was told, not killed"
    undisturbed = train(from_json(entry.experiment), options=options(Path("undisturbed")))
    assert resume(folder, Layout()).digest == undisturbed.digest, "here, without Ray"


def test_memory_of_a_cluster_is_shared_out_too() -> None:
    node = {"CPU": 8.0, "memory": 20e9}

    class Nodes:
        def nodes(self) -> list[Any]:
            return [{"Alive": True, "Resources": node}]

        def cluster_resources(self) -> dict[str, float]:
            return node

    cluster = RayCluster(Nodes())
    assert [cluster.take(Needs(1, memory=8_000_000_000)) is not None for _ in range(3)] == [True, True, False]
    assert cluster.take(Needs(1)) is not None


def test_nodes_that_are_gone_are_no_place_for_a_run() -> None:
    nodes = [{"Alive": alive, "Resources": {"CPU": count}} for alive, count in ((True, 2.0), (False, 64.0))]
    cluster = RayCluster(SimpleNamespace(nodes=lambda: nodes, cluster_resources=lambda: {"CPU": 2.0}))
    assert cluster.take(Needs(16)) == Bundle(2, 0.0)


def test_a_run_too_large_for_every_node_s_memory_asks_for_all_of_one() -> None:
    node = {"CPU": 8.0, "memory": 20e9}
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node}], cluster_resources=lambda: node)
    assert RayCluster(ray).take(Needs(1, memory=40_000_000_000)) == Bundle(1, 0.0, 20_000_000_000)


@pytest.mark.parametrize("placed", [False, True])
def test_a_run_is_told_to_stop_or_ended_where_it_has_not_begun(placed: bool) -> None:
    ray, actor = MagicMock(), SimpleNamespace(run=MagicMock(), stop=MagicMock(), __ray_ready__=MagicMock())
    ray.remote().return_value.remote.return_value = actor
    ray.wait.return_value = ([1], []) if placed else ([], [1])
    process = RayProcess(ray, Queue.make(Path("set")), "run", Bundle(2, 0.5))
    process.terminate()
    assert (actor.stop.remote.called, ray.kill.called) == (placed, not placed)
    wanted = {"num_cpus": 2, "num_gpus": 0.5, "memory": None}
    ray.remote.assert_called_with(**wanted, max_restarts=0, max_concurrency=2)


def test_a_run_that_is_told_to_stop_before_it_begins_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, process = SweepRun(), MagicMock()
    process.wait.return_value = STOPPED[0]
    monkeypatch.setattr("lockstep.sweep.child.start", lambda *_: process)
    Queue.make(tmp_path / "set")
    actor.stop()
    assert actor.run(str(tmp_path / "set"), "name") == STOPPED[0] and process.terminate.called
