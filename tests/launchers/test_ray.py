"""Ray: digests are those of every other layout, lost processes are replaced, whatever fails ends the run clearly."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from children import Child, until
from free_running import free, remembering, repeated, updates, with_async
from ray_forks import forked_workers
from sentences import says
from tiny import EXPERIMENTS, cut, options
from workers import Ran, ran_of

from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.launchers.launch import resume, train
from lockstep.launchers.ray.driver import RayDriver
from lockstep.launchers.ray.launcher import _answering, temporary_folder
from lockstep.launchers.ray.places import require_places
from lockstep.launchers.ray.requests import Delivery
from lockstep.run.folder import RunFolder
from lockstep.system.supervision import WorkerError

ray = pytest.importorskip("ray", reason="Ray is not installed")

CPUS = 4
"""Of the cluster, and of the largest layout here."""
FAILING = """
import gymnasium

class Env(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 13:
            raise OverflowError("it fell off")
        return super().step(action)

def make():
    return Env(gymnasium.make("CartPole-v1"))
"""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """One for all runs, since starting one takes seconds."""
    niceness = {"worker_niceness": 0}
    there = {"num_cpus": CPUS, "num_gpus": 1, "resources": {"desk": 2}}  # the GPU is in its books alone
    with forked_workers(bool(request.config.getoption("--real-processes"))):
        ray.init("local", **there, include_dashboard=False, log_to_driver=False, _system_config=niceness)
        yield
        ray.shutdown()


pytestmark = pytest.mark.usefixtures("own_folder")


def actors(kind: str = "") -> list[int]:
    """Process ids of this test's actors, oldest first. Ray puts the class into their names, and they are in its
    folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                name = (entry / "cmdline").read_bytes()
                if name.startswith(f"ray::Ray{kind}".encode()) and (entry / "cwd").readlink() == Path.cwd():
                    found.append(int(entry.name))
    return sorted(found)


def long_run(iterations: int = 60, **scheme: Any) -> Experiment:
    """Sixty iterations, of which jitter makes seconds."""
    env = {"adapter": "gymnasium", "reseed_every": 20}
    short = cut(recipes.ppo_cartpole, epochs=1, env=env, scheme={"lag": 1, **scheme})
    return short.replace(total_steps=iterations * 8 * 8)


def on_ray(experiment: Experiment, layout: str, run: str = "run", every: int = 1000) -> Ran:
    return ran_of(train(experiment, Layout.parse(layout), options(Path(run), checkpoint_every=every)))


def inline(experiment: Experiment) -> Ran:
    return ran_of(train(experiment, Layout(), options(Path("inline"))))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mujoco-normalized", "ray:2"),
        ("memory-gru-lag-2", "ray:a2-l2,compress=1"),
        ("sac-prioritized-lag-1", "ray:a1-l1,jitter=0.002"),
    ],
)
def test_the_digest_of_every_other_layout(name: str, layout: str, cluster: None) -> None:
    assert on_ray(EXPERIMENTS[name](), layout) == inline(EXPERIMENTS[name]())
    until(lambda: not actors(), "all actors to end")


@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        pytest.param(free(9), "ray:a2-l1,jitter=0.003", marks=pytest.mark.full),  # the last one has these parts, too
        (free(9, appo=True, lstm=True, normalize=True), "ray:a2-l2,compress=1,jitter=0.003"),
        (with_async(remembering(9)), "ray:a2-l2"),
        (free(9, max_lag=0), "ray:a2-l1"),
        (free(9), "ray:a2-l1,learner_delay=0.05"),
    ],
)
def test_what_timing_decided_can_be_repeated(experiment: Experiment, layout: str, cluster: None) -> None:
    lines = repeated(on_ray(experiment, layout))
    until(lambda: not actors(), "all actors to end")
    if "learner_delay" in layout:  # then collectors begin rollouts with versions that become old
        begun = [{event["versions"][0][1] for event in line["events"]} for line in lines]
        assert any(min(versions) < iteration for iteration, versions in enumerate(begun))


@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        (with_async(cut(recipes.ppo_cartpole, precision="portable")), "ray:4,jitter=0.003"),
        (with_async(free(5, lstm=True, normalize=True), max_gradient_lag=1), "ray:a1-l3,jitter=0.003"),
    ],
)
def test_gradients_of_several_machines_are_asynchronous(experiment: Experiment, layout: str, cluster: None) -> None:
    ran = on_ray(experiment, layout)
    repeated(ran)
    behind = [behind for decided in updates(ran.run) for _, behind in decided]
    assert max(behind) > 0, "no gradient waited for another one"
    lines = [json.loads(line) for line in RunFolder(ran.run).metrics.read_text().splitlines()]
    assert max(line["lag/gradient_asynchrony_max"] for line in lines) == max(behind)


def test_a_run_with_asynchronous_gradients_moves(cluster: None) -> None:
    experiment = with_async(long_run(9))
    train(experiment, Layout.parse("ray:3,jitter=0.003"), options(Path("run")), stop_after=3)
    resume("run", Layout.parse("processes:2,jitter=0.003"), stop_after=6)
    repeated(ran_of(resume("run", Layout.parse("ray:a1-l2,jitter=0.003"))), "ray:a1-l1")


@pytest.mark.parametrize(
    ("experiment", "layout", "again"),
    [
        (long_run(12, preempt=0.5, lag=0), "ray:4,jitter=0.02", "ray:a2-l1"),
        (with_async(long_run(12, preempt=0.5)), "ray:a2-l2,jitter=0.02", "inline"),
    ],
)
def test_stragglers_are_cut(experiment: Experiment, layout: str, again: str, cluster: None) -> None:
    ran = on_ray(experiment, layout)
    cuts = [line["cuts"] for line in repeated(ran, again)]
    assert any(cuts), "no rollout was cut"
    lines = [json.loads(line) for line in RunFolder(ran.run).metrics.read_text().splitlines()]
    kept = [1 - sum(8 - steps for _, steps in of_iteration) / (4 * 8) for of_iteration in cuts]
    assert [line["lag/kept"] for line in lines] == pytest.approx(kept)


@pytest.mark.parametrize(
    ("experiment", "stop_after", "then"),
    [
        (free(9), 4, "ray:a2-l2"),
        (remembering(9), 4, "cpu:a1-l1"),
        (free(9, max_lag=4), 1, "ray:a2-l1"),  # perhaps before a shard's first rollout was learned from
    ],
)
def test_a_free_running_run_is_resumed(experiment: Experiment, stop_after: int, then: str, cluster: None) -> None:
    train(experiment, Layout.parse("ray:a2-l1,jitter=0.003"), options(Path("run")), stop_after=stop_after)
    repeated(ran_of(resume("run", Layout.parse(then), options(Path("run")))))


class Killer(threading.Thread):
    """Kills an actor once the ledger has some lines.

    Args:
        delay: seconds that it waits after that.
        newest: whether it kills the newest actor of this kind, and not the oldest.
    """

    def __init__(self, kind: str, lines: int, delay: float = 0.0, *, newest: bool = True) -> None:
        super().__init__(daemon=True)
        self._kind, self._lines, self._delay, self._newest = kind, lines, delay, newest
        self.start()

    def run(self) -> None:
        ledger = Path("run/ledger.jsonl").absolute()
        until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > self._lines, "iterations", 0.02)
        time.sleep(self._delay)
        os.kill(actors(self._kind)[-1 if self._newest else 0], signal.SIGKILL)


REPLACED = r"Collector \d of 2 was lost .*A new one continues \(1 of res"
RESTARTED = r"restart from the newest checkpoint \(1 of restarts=3"


@pytest.mark.parametrize(
    ("experiment", "layout", "kind", "said"),
    [
        (free(60), "ray:a2-l1,jitter=0.005", "Collector", REPLACED),
        # The others have the parts of these two.
        pytest.param(free(60), "ray:a2-l1,jitter=0.005", "Learner", RESTARTED, marks=pytest.mark.full),
        pytest.param(with_async(free(60)), "ray:a2-l2,jitter=0.005", "Collector", REPLACED, marks=pytest.mark.full),
        (with_async(long_run()), "ray:a2-l2,jitter=0.005", "Learner", RESTARTED),
        (long_run(preempt=0.5), "ray:a2-l1,jitter=0.01", "Collector", RESTARTED),
    ],
)
def test_a_process_that_is_lost_where_timing_decides(
    experiment: Experiment, layout: str, kind: str, said: str, cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    moment = random.randint(6, 30), random.random() / 4, random.random() < 0.5
    print(moment)
    killer = Killer(kind, moment[0], moment[1], newest=moment[2])
    ran = on_ray(experiment, layout, every=5)
    killer.join()
    assert re.search(said, capfd.readouterr().err)
    repeated(ran)


@pytest.mark.parametrize(
    ("kind", "layout", "said"),
    [
        ("Collector", "ray:a2-l1,jitter=0.005", REPLACED),
        ("Learner", "ray:2,jitter=0.01", rf"Worker \d of 2 .*{RESTARTED}"),
    ],
)
def test_a_process_that_is_lost(
    kind: str, layout: str, said: str, cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    killer = Killer(kind, 13)
    disturbed = on_ray(long_run(), layout, every=5)
    killer.join()
    assert re.search(said, capfd.readouterr().err)
    assert disturbed == inline(long_run())


class Nobody:
    def nothing(self) -> None: ...


def test_a_start_that_did_not_come_through_is_repeated(monkeypatch: pytest.MonkeyPatch, cluster: None) -> None:
    """The call by which a collector takes over ends like one to a process that cannot be reached."""
    call, asked = RayDriver._call, []

    def failing_once(self: RayDriver, actor: Any, method: str, *args: Any) -> Any:
        asked.append(method)
        if method != "take_over" or asked.count(method) > 1:
            return call(self, actor, method, *args)
        nobody = ray.remote(Nobody).remote()
        ray.kill(nobody)
        return nobody.nothing.remote()

    monkeypatch.setattr(RayDriver, "_call", failing_once)
    repeated(on_ray(free(5), "ray:a2-l1"))
    assert asked.count("take_over") == 3


@pytest.mark.parametrize("experiment", [free(9), long_run(9)])
def test_a_rollout_that_is_lost_on_its_way(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answers of a lap end like those of a process that cannot be reached, but the collector lives. It collects the
    lap and later ones again, and each is learned from once."""
    deliver, lost = RayDriver._deliver, list[int]()

    def losing_one(self: RayDriver, delivery: Delivery) -> None:
        if delivery.number == 3 and not lost:
            nobody = ray.remote(Nobody).remote()
            ray.kill(nobody)
            delivery.collector.last = nobody.nothing.remote()
            delivery = dataclasses.replace(delivery, answers=dict.fromkeys(delivery.answers, delivery.collector.last))
            lost.append(delivery.collector.index)
        deliver(self, delivery)

    monkeypatch.setattr(RayDriver, "_deliver", losing_one)
    ran = on_ray(experiment, "ray:a2-l1,jitter=0.003")
    (index,) = lost
    assert says(capfd.readouterr().err, f"A rollout of Collector {index} of 2 was lost", "1 of restarts=3")
    if experiment.scheme.free_running:
        repeated(ran)
    else:
        assert ran == inline(experiment)


def test_an_error_names_the_process_that_raised_it(monkeypatch: pytest.MonkeyPatch, cluster: None) -> None:
    call = RayDriver._call

    def misled(self: RayDriver, actor: Any, method: str, *args: Any) -> Any:
        return call(self, actor, method, *args, *(["nonsense"] if method == "announce" else []))

    monkeypatch.setattr(RayDriver, "_call", misled)
    with pytest.raises(WorkerError, match=r"^Learner 0 of 1 failed:(.|\n)*AttributeError: 'str' object"):
        on_ray(free(5), "ray:a1-l1")


def test_losses_have_a_bound(cluster: None) -> None:
    Killer("Collector", 3)
    with pytest.raises(WorkerError, match=r"Collector 0 of 1 (.|\n)*\b0 losses"):
        on_ray(long_run(), "ray:a1-l1,jitter=0.005,restarts=0")
    until(lambda: not actors(), "all actors to end")


@pytest.mark.parametrize("experiment", [cut(recipes.ppo_cartpole), free(9)])
def test_an_environment_that_raises(experiment: Experiment, tmp_path: Path, cluster: None) -> None:
    (tmp_path / "env.py").write_text(FAILING)
    env = dataclasses.replace(experiment.env, id=f"{tmp_path}/env.py:make", adapter="auto")
    experiment = experiment.replace(env=env)
    with pytest.raises(WorkerError, match=r"Collector 0 of 1 failed:(.|\n)*env.py(.|\n)*OverflowError: it fell off"):
        on_ray(experiment, "ray:a1-l1")
    until(lambda: not actors(), "all actors to end")


def test_a_connection_of_an_environment_s_own_is_no_lost_peer(tmp_path: Path, cluster: None) -> None:
    """Nothing is begun again, and the traceback is shown."""
    (tmp_path / "env.py").write_text(FAILING.replace('OverflowError("it fell off")', 'BrokenPipeError("Broken pipe")'))
    experiment = cut(recipes.ppo_cartpole, env={"id": f"{tmp_path}/env.py:make", "adapter": "auto"})
    with pytest.raises(WorkerError, match=r"Worker 0 of 1 failed:(.|\n)*env.py(.|\n)*BrokenPipeError: Broken pipe"):
        on_ray(experiment, "ray:1")


def test_a_cluster_that_is_too_small(cluster: None) -> None:
    with pytest.raises(SettingsError, match=r"\b8 CPUs.*\b4\b"):
        on_ray(EXPERIMENTS["cartpole-8-shards"](), "ray:8")


def test_processes_take_what_the_layout_says(cluster: None) -> None:
    experiment, layout = EXPERIMENTS["cartpole-lag-1"](), "ray:a2-l1,collector.desk=0.5,learner.cpus=2"
    assert on_ray(experiment, layout) == inline(experiment)
    groups = [list(each["bundles"].values()) for each in ray.util.placement_group_table().values()]
    assert [{"CPU": 2.0}, {"CPU": 1.0, "desk": 0.5}, {"CPU": 1.0, "desk": 0.5}] in groups


@pytest.mark.parametrize(
    ("layout", "said"),
    [("ray:a2-l1,collector.desk=2", "4 desk.* 2 in all"), ("ray:a1-l1,learner.gpus=2", "2 GPUs.* 1 in all")],
)
def test_what_the_cluster_lacks(layout: str, said: str, cluster: None) -> None:
    with pytest.raises(SettingsError, match=said):
        on_ray(EXPERIMENTS["cartpole-lag-1"](), layout)


def test_a_process_for_which_no_node_has_a_place() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": True, "Resources": {"CPU": 1.0, "desk": 1.0}}]
    nodes.append({"Alive": False, "Resources": {"CPU": 4.0, "desk": 1.0}})
    books = SimpleNamespace(cluster_resources=lambda: {"CPU": 5.0, "desk": 1.0}, nodes=lambda: nodes)
    require_places(books, Layout.parse("ray:1"), [{"CPU": 4.0}, {"CPU": 1.0, "desk": 1.0}])
    with pytest.raises(SettingsError, match="2 CPU, 1 desk, and no node"):
        require_places(books, Layout.parse("ray:1"), [{"CPU": 2.0, "desk": 1.0}])


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU")
def test_a_gpu_that_torch_cannot_use(cluster: None) -> None:
    experiment = EXPERIMENTS["cartpole-lag-1"]()
    with pytest.raises(SettingsError, match=r"Ray assigned a GPU of .* to Learner 0 of 1.* doctor"):
        on_ray(experiment, "ray:a1-l1,learner.gpus=0.5")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere.invalid:6379"])
def test_an_address_where_no_cluster_answers(address: str) -> None:
    with pytest.raises(SettingsError, match=f"Ray cluster .*RAY_ADDRESS={address}"), _answering(address):
        pytest.fail("Ray was asked, which tries for minutes")


@pytest.mark.parametrize("refusal", [ConnectionError, KeyError])
def test_a_cluster_that_asks_for_a_token(refusal: type[Exception]) -> None:
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        said = f"RAY_ADDRESS={address} does not take this program: .*No token.* set RAY_AUTH_MODE=token here and where"
        with pytest.raises(SettingsError, match=said), _answering(address, (KeyError,)):
            raise refusal("No token.")
    with pytest.raises(SettingsError, match="No Ray cluster answers at RAY_ADDRESS=auto"), _answering("auto"):
        raise ConnectionError("Found none")


@pytest.mark.parametrize(
    ("scheme", "layout", "said"),
    [
        ({"lag": "async"}, "ray:2", r"--scheme\.lag async .*ray:2.*cpu:aC-lL or ray:aC-lL "),
        ({"lag": "async", "refresh": "step"}, "ray:a1-l1", r"--scheme\.refresh step .*ray:a1-l1.*refresh rollout"),
    ],
)
def test_what_timing_cannot_decide_there(scheme: dict[str, Any], layout: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        on_ray(cut(recipes.impala_atari, epochs=1, scheme=scheme), layout)


def test_what_killed_processes_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    killed, foreign = tmp_path / "lockstep-ray-1" / "lock", tmp_path / "lockstep-ray-2" / "logs"
    for path in (killed, foreign):
        path.parent.mkdir()
        path.touch()
    with temporary_folder(tmp_path) as first:
        assert not killed.parent.exists() and foreign.exists()
        with temporary_folder(tmp_path) as second:
            assert first.exists() and second.exists() and first != second
    assert list(tmp_path.iterdir()) == [foreign.parent]


def test_ctrl_c_on_a_cluster_of_its_own(start: Callable[..., Child]) -> None:
    flags = "train ppo-cartpole --env.adapter gymnasium --algorithm.rollout 16 --scheme.acting-batch 0 --layout ray:2"
    child = start(*flags.split(), "--display", "plain", "--no-tensorboard", "--run", "run")
    child.until(lambda: Path("run/metrics.jsonl").exists(), "the first iteration")
    time.sleep(0.1)
    child.interrupt()
    assert child.wait() == 130, child.output()
    assert list(Path("run/checkpoints").glob("0*")), child.output()


def test_a_cluster_that_does_not_start_is_explained_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def late(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does on a busy machine

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", late)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with pytest.raises(SettingsError, match=r"timed out during startup.*RAY_ADDRESS"):
        train(cut(recipes.ppo_cartpole), "ray:1", options(Path("run")))
    assert not Path("run").exists()
