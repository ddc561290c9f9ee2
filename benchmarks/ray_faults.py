"""Whether a run survives the loss of machines: a Ray cluster of three nodes, all here, of which one is killed mid-run.

    python benchmarks/ray_faults.py [--kills 10] [--kinds Collector Learner Store Joining] [--gradient-lag async]

The first node only conducts; processes are spread over the others, of which either has room for all. At a random moment
the node is killed (SIGKILL to all of its processes) on which a collector, or a learner, is; then a new one joins. With
Store, it is the node of learner 0, which keeps the parameters of asynchronous gradients. With Joining, a node joins a
run of ray:a2+-l1 and is killed once collectors work on it.

The digest, and the ledger, must be those of an undisturbed run inline or, if timing decides, of a run inline that
repeats the recorded decisions.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as with other layouts

import ray
from ray.cluster_utils import Cluster

from lockstep import recipes
from lockstep.algorithms import IMPALAConfig
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.reproducibility.replay import replay
from lockstep.run.folder import RunFolder

LAYOUTS = {
    "Collector": "ray:a2-l1,jitter=0.01",
    "Learner": "ray:a2-l2,jitter=0.01",
    "Store": "ray:a2-l2,jitter=0.01",
    "Joining": "ray:a2+-l1,jitter=0.03,restarts=0",
}
"""By what is to be lost."""
ITERATIONS = dict.fromkeys(LAYOUTS, 60) | {"Joining": 240}
"""Of a run; a node takes seconds to join."""
CPUS = 4
"""Of a node: as many as the largest layout has processes."""


def experiment(kind: str, gradient_lag: Any) -> Experiment:
    """PPO on CartPole, one version behind; free-running with IMPALA's loss where collectors come and go."""
    full, growing = recipes.ppo_cartpole(), kind == "Joining"
    algorithm = dataclasses.replace(full.algorithm, rollout=8, epochs=1, minibatches=2)
    lag = "async" if growing else 1
    return full.replace(
        env=dataclasses.replace(full.env, num_envs=8, adapter="gymnasium", reseed_every=40),
        algorithm=IMPALAConfig(rollout=8, minibatches=2) if growing else algorithm,
        scheme=dataclasses.replace(full.scheme, shards=4, lag=lag, acting_batch=0, gradient_lag=gradient_lag),
        precision="fp32",
        total_steps=ITERATIONS[kind] * 8 * 8,
    )


def options(folder: str) -> RunOptions:
    return RunOptions(run=folder, checkpoint_every=5, display="none", tensorboard=False)


def trained(kind: str, gradient_lag: Any, layout: str, folder: str) -> tuple[str, bytes]:
    """Digest and ledger."""
    result = train(experiment(kind, gradient_lag), Layout.parse(layout), options(folder))
    return result.digest, RunFolder(result.run).ledger.read_bytes()


def repeated() -> tuple[str, bytes]:
    """Digest and ledger of a run inline that repeats the decisions of the run in this folder."""
    found = replay("run", "inline", options("again"))
    return found.digest, RunFolder(found.run).ledger.read_bytes()


def processes(kind: str) -> list[int]:
    """Actors of a kind of the run in this folder, by process id."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name = (entry / "cmdline").read_bytes()
            if name.startswith(f"ray::Ray{kind}".encode()) and (entry / "cwd").readlink() == Path.cwd():
                found.append(int(entry.name))
    return sorted(found)


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(ancestor: int) -> list[int]:
    """A process and all that it started, directly or not."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = parent(int(entry.name))
    found = [ancestor]
    for process in found:
        found += [child for child, of in parents.items() if of == process]
    return found


def node_of(process: int, nodes: list[Any]) -> Any:
    """The node whose raylet a process descends from."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    while process not in raylets and process > 1:
        process = parent(process)
    return raylets.get(process)


def keeper() -> list[int]:
    """The process of learner 0, which writes the ledger."""
    ledger = str(Path("run/ledger.jsonl").absolute())
    found = []
    for process in processes("Learner"):
        with contextlib.suppress(OSError):
            if any(os.readlink(each) == ledger for each in Path(f"/proc/{process}/fd").iterdir()):
                found.append(process)
    return found


class Nodes:
    """The cluster, and what happens to its nodes during a run in another thread: only this one can start nodes."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes: list[Any] = []
        self._cpus = 0
        ray.init(self._cluster.address, log_to_driver=False)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def be(self, number: int, cpus: int) -> None:
        """Have so many nodes of this size beside the first one."""
        while self._nodes and (self._cpus != cpus or len(self._nodes) > number):
            self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)
        self._cpus = cpus
        while len(self._nodes) < number:
            self._nodes.append(self._cluster.add_node(num_cpus=cpus))
        while ray.cluster_resources().get("CPU", 0) != number * cpus:  # Ray learns of lost nodes late
            time.sleep(0.1)

    def disturb(self, kind: str, lines: int, draw: random.Random, run: Future[Any]) -> tuple[str, float]:
        """Kill a node at a moment of the run. Returns what was on it, and when."""
        ledger = Path("run/ledger.jsonl").absolute()

        def wait(condition: Callable[[], Any]) -> None:
            while not (condition() or run.done()):
                time.sleep(0.02)

        wait(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > lines and self._victims(kind))
        joined = None
        if kind == "Joining" and not run.done():
            before = len(processes("Collector"))
            joined = self._cluster.add_node(num_cpus=2)
            self._nodes.append(joined)
            wait(lambda: len(processes("Collector")) > before)
            lines = ledger.read_bytes().count(b"\n")
            wait(lambda: ledger.read_bytes().count(b"\n") > lines + 10)
        time.sleep(draw.uniform(0.0, 0.1))
        if run.done():
            return "nothing", time.monotonic()
        learning = [node_of(process, self._nodes) for process in processes("Learner")]
        homes = [node_of(process, self._nodes) for process in self._victims(kind)]
        # A collector's node without a learner where there is one.
        apart = [home for home in homes if home not in learning] if kind == "Collector" else []
        node = joined or draw.choice(apart or homes)
        there = [kind for kind in ("Learner", "Collector") for p in processes(kind) if node_of(p, self._nodes) is node]
        at = time.monotonic()
        self._nodes.remove(node)
        # All that runs there at once, as if its power had failed.
        for process in sorted(descendants(node.all_processes["raylet"][0].process.pid), reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        return f"{there.count('Learner')} learners, {there.count('Collector')} collectors", at

    def _victims(self, kind: str) -> list[int]:
        return keeper() if kind == "Store" else processes("Collector" if kind == "Joining" else kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="what is to be lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gradient-lag", choices=["0", "async"], default="0", help="as --scheme.gradient-lag")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as threads:
        os.chdir(folder)
        nodes = Nodes()
        try:
            for kind in given.kinds:
                lag = "async" if kind == "Store" or given.gradient_lag == "async" else 0
                decides = lag == "async" or kind == "Joining"
                expected = None if decides else trained(kind, lag, "inline", f"inline-{kind}")
                for number in range(given.kills):
                    draw = random.Random(f"{given.seed} {kind} {number}")
                    os.makedirs(f"{kind}-{number}")
                    os.chdir(f"{kind}-{number}")
                    nodes.be(*((1, 3) if kind == "Joining" else (2, CPUS)))
                    moment = draw.randint(0, ITERATIONS[kind] // 4 if kind == "Joining" else ITERATIONS[kind] - 10)
                    begin = time.monotonic()
                    run = threads.submit(trained, kind, lag, LAYOUTS[kind], "run")
                    there, at = nodes.disturb(kind, moment, draw, run)
                    try:
                        ran = run.result()
                        end = time.monotonic()
                        outcome = "equal" if ran == (expected or repeated()) else "DIFFERS"
                    except Exception as error:
                        end, outcome = time.monotonic(), f"FAILED: {error}"
                    row = {
                        "killed": kind,
                        "after_iteration": moment,
                        "with_it": there,
                        "digest_and_ledger": outcome,
                        "seconds": round(end - begin, 1),
                        "seconds_after_the_kill": round(end - at, 1),
                    }
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    deadline = time.monotonic() + 20
                    while left := processes("Learner") + processes("Collector"):
                        assert time.monotonic() < deadline, f"left: {left}"
                        time.sleep(0.1)
                    os.chdir("..")
        finally:
            nodes.close()
    for kind in given.kinds:
        all_of_kind = [row for row in rows if row["killed"] == kind]
        mine = [row for row in all_of_kind if row["with_it"] != "nothing"]
        if undisturbed := len(all_of_kind) - len(mine):
            print(f"{kind}: {undisturbed} runs ended before the kill, and do not count")
        if not mine:
            continue
        equal, after = (
            sum(row["digest_and_ledger"] == "equal" for row in mine),
            [row["seconds_after_the_kill"] for row in mine],
        )
        print(f"{kind}: {equal} of {len(mine)} runs ended with the right digest and ledger")
        print(f"from the kill to the end: median {statistics.median(after):.1f} s, at most {max(after):.1f} s")


if __name__ == "__main__":
    main()
