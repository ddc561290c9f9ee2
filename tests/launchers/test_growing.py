"""Collectors that come and go with the nodes of a Ray cluster (ray:aC+-lL)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from children import until
from free_running import free, repeated, with_async
from ray_forks import forked_workers
from sentences import says
from tiny import EXPERIMENTS, options
from workers import Ran, ran_of

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.launchers.launch import train
from lockstep.launchers.ray.growing import GrowingDriver, moves
from lockstep.launchers.ray.requests import Process
from lockstep.run.folder import RunFolder

ray = pytest.importorskip("ray", reason="Ray is not installed")
utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.usefixtures("own_folder")
QUIET = {"include_log_monitor": False}
"""Nodes without the process that would show here what others print."""
UNLIKE = {"OMP_THREAD_LIMIT": "64"}
"""Makes nodes another platform, whose bits are the same nevertheless."""


@pytest.mark.parametrize(
    ("homes", "processes", "expected"),
    [
        ("aabb", "ab", {}),
        ("aabb", "abc", {1: "c"}),
        ("aabb", "abcd", {1: "c", 3: "d"}),
        ("aabb", "b", {0: "b", 1: "b"}),
        ("aabbc", "ab", {4: "a"}),
        ("a-b-", "ab", {1: "a", 3: "b"}),
        ("aaaaaaaa", "abc", {7: "b", 6: "c", 5: "b", 4: "c", 3: "b"}),
        ("ab", "abc", {}),
        ("aabb", "", {}),
    ],
)
def test_as_few_shards_as_possible_move(homes: str, processes: str, expected: dict[int, str]) -> None:
    """One letter for each shard: the process that has it, or - if none has."""
    found = moves({shard: None if home == "-" else home for shard, home in enumerate(homes)}, list(processes))
    assert found == expected


@pytest.mark.parametrize("scheme", [{"lag": 1}, {"lag": 0}])
def test_a_lag_that_is_a_number_needs_a_number_of_collectors(scheme: dict[str, Any]) -> None:
    experiment = EXPERIMENTS["cartpole-lag-1"]()
    with pytest.raises(SettingsError, match=r"ray:a1\+-l1 with --scheme\.lag 1.*--scheme\.lag async.*ray:a1-l1,"):
        train(experiment, Layout.parse("ray:a1+-l1"), options(Path("run")))
    with pytest.raises(SettingsError, match=r"cpu:a1\+-l1: collectors may join a run only with ray:aC-lL\. Leave"):
        Layout.parse("cpu:a1+-l1")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A head without room for any process, and a node with room for a learner and two collectors."""
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": {"worker_niceness": 0}, **QUIET}
    with forked_workers(bool(request.config.getoption("--real-processes"))):
        there = utils.Cluster(initialize_head=True, head_node_args=head)
        there.add_node(num_cpus=3, **QUIET)
        ray.init(there.address, log_to_driver=False)
        yield there
        ray.shutdown()
        there.shutdown()


ENDING = """
from pathlib import Path

def follow(progress):
    if Path("stop").exists():
        progress.stop()
"""


class Observed:
    """A run in a thread of its own, since only the main thread may start nodes.

    Args:
        started: the shard and the collector of each start so far.
    """

    def __init__(self, run: Future[Ran], started: list[tuple[int, str]]) -> None:
        self._run, self._started = run, started
        self._ledger = Path("run/ledger.jsonl").absolute()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            if self._run.done():
                self._run.result()
                raise AssertionError(f"the run ended before: {what}")
            return condition()

        until(met, f"{what}; started: {self._started}", 0.05)

    def starts(self, collectors: int) -> None:
        """Wait until so many collectors have had a shard."""
        self.until(lambda: len({name for _, name in self._started}) >= collectors, f"{collectors} collectors")

    def moves(self, starts: int) -> None:
        """Wait until shards were started so often."""
        self.until(lambda: len(self._started) >= starts, f"{starts} starts")

    def learns(self, iterations: int) -> None:
        """Wait until the ledger has so many more lines."""
        self.until(self._ledger.exists, "a ledger")
        there = self._ledger.read_bytes().count(b"\n")
        self.until(lambda: self._ledger.read_bytes().count(b"\n") >= there + iterations, f"{iterations} iterations")


def test_nodes_join_and_leave_a_run(
    cluster: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes join a run of two collectors one after the other, and are lost at once. As two collectors are the
    fewest, these losses are none of `restarts`."""
    start, started = GrowingDriver._start, list[tuple[int, str]]()

    def noted(self: GrowingDriver, group: int, process: Process) -> None:
        start(self, group, process)
        started.append((group, process.name))

    monkeypatch.setattr(GrowingDriver, "_start", noted)
    Path("ending.py").write_text(ENDING)
    layout = Layout.parse("ray:a2+-l1,restarts=0,jitter=0.04")
    followed = dataclasses.replace(options(Path("run")), callback=str(Path("ending.py:follow").absolute()))
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(lambda: ran_of(train(with_async(free(100_000, normalize=True)), layout, followed)))
        observed = Observed(run, started)
        try:
            observed.learns(3)
            nodes = []
            for collectors in (3, 4):
                nodes.append(cluster.add_node(num_cpus=1, env_vars=UNLIKE, **QUIET))
                observed.starts(collectors)
            observed.learns(3)
            for node in nodes:
                cluster.remove_node(node, allow_graceful=False)
            observed.moves(8)
            observed.learns(3)
        finally:
            Path("stop").touch()
        ran = run.result()
    said = capfd.readouterr().err
    assert [name for _, name in started[:4]] == ["Collector 0", "Collector 0", "Collector 1", "Collector 1"]
    assert [name for _, name in started[4:6]] == ["Collector 2", "Collector 3"], "one shard of each of the others"
    assert sorted(group for group, _ in started[4:6]) == sorted(group for group, _ in started[6:8]) == [1, 3]
    assert sorted(name for _, name in started[6:]) == ["Collector 0", "Collector 1"]
    for number in (2, 3):
        assert says(said, f"Collector {number} was lost", "Others take its shards")
    assert says(said, "is not like", "variables.OMP_THREAD_LIMIT: absent != 64", "run.json records each node")
    named = {each["process"]: bool(each["differs"]) for each in RunFolder(ran.run).facts()["nodes"]}
    assert named == {"Collector 0": False, "Collector 1": False, "Collector 2": True, "Collector 3": True}
    repeated(ran, ended=False)


def test_collectors_that_join_in_vain_wait_longer_each_time(
    cluster: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two that join end before their first rollout, and the third one stays. None is one of `restarts`."""
    following, start, started = GrowingDriver._next, GrowingDriver._start, list[tuple[int, str]]()

    def ended_twice(self: GrowingDriver) -> Process:
        process = following(self)
        if process.name in ("Collector 2", "Collector 3"):
            ray.kill(process.handle)
        return process

    def noted(self: GrowingDriver, group: int, process: Process) -> None:
        start(self, group, process)
        started.append((group, process.name))

    monkeypatch.setattr(GrowingDriver, "_next", ended_twice)
    monkeypatch.setattr(GrowingDriver, "_start", noted)
    monkeypatch.setattr("lockstep.launchers.ray.growing._LONGEST", 3.0)
    Path("ending.py").write_text(ENDING)
    layout = Layout.parse("ray:a2+-l1,restarts=0,jitter=0.04")
    followed = dataclasses.replace(options(Path("run")), callback=str(Path("ending.py:follow").absolute()))
    node = cluster.add_node(num_cpus=1, **QUIET)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(lambda: ran_of(train(free(100_000), layout, followed)))
        try:
            Observed(run, started).starts(3)
        finally:
            Path("stop").touch()
        run.result()
    cluster.remove_node(node)
    said = capfd.readouterr().err
    assert says(said, "Collector 2 was lost", "no rollout (1 in a row), so others join in 2 seconds at the earliest")
    assert says(said, "Collector 3 was lost", "no rollout (2 in a row), so others join in 3 seconds at the earliest")
    assert {name for _, name in started} == {"Collector 0", "Collector 1", "Collector 4"}
