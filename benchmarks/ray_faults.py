"""Whether a run survives the loss of machines: a Ray cluster of three nodes, all here, of which one is killed mid-run.

    python benchmarks/ray_faults.py [--kills 10] [--kinds Collector Learner] [--seed 0] [--gradient-lag async]

The first node only conducts; processes are spread over the others, of which either has room for all. At a random moment
the node is killed (SIGKILL to all of its processes) on which a collector, or a learner, is; then a new one joins. The
digest, and the ledger, must be those of an undisturbed run inline or, with asynchronous gradients, of a run inline that
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
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as with other layouts

import ray
from ray.cluster_utils import Cluster

from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.reproducibility.replay import replay
from lockstep.run.folder import RunFolder

ITERATIONS = 60
LAYOUTS = {"Collector": "ray:a2-l1,jitter=0.01", "Learner": "ray:a2-l2,jitter=0.01"}
"""By what is to be lost."""
CPUS = 4
"""Of a node: as many as the largest layout has processes."""


def experiment(gradient_lag: Any) -> Experiment:
    """PPO on CartPole, one version behind."""
    full = recipes.ppo_cartpole()
    return full.replace(
        env=dataclasses.replace(full.env, num_envs=8, adapter="gymnasium", reseed_every=40),
        algorithm=dataclasses.replace(full.algorithm, rollout=8, epochs=1, minibatches=2),
        scheme=dataclasses.replace(full.scheme, shards=4, lag=1, acting_batch=0, gradient_lag=gradient_lag),
        total_steps=ITERATIONS * 8 * 8,
    )


def options(folder: str) -> RunOptions:
    return RunOptions(run=folder, checkpoint_every=5, display="none", tensorboard=False)


def trained(gradient_lag: Any, layout: str, folder: str) -> tuple[str, bytes]:
    """Digest and ledger."""
    result = train(experiment(gradient_lag), Layout.parse(layout), options(folder))
    return result.digest, RunFolder(result.run).ledger.read_bytes()


def repeated() -> tuple[str, bytes]:
    """Digest and ledger of a run inline that repeats the decisions of the run in this folder."""
    found = replay("run", "inline", options("again"))
    return found.digest, RunFolder(found.run).ledger.read_bytes()


def processes(kind: str) -> list[int]:
    """Actors of a kind, by process id."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if (entry / "cmdline").read_bytes().startswith(f"ray::Ray{kind}".encode()):
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


class Kill(threading.Thread):
    """Kills the node of one of a kind of processes, at a moment of the run."""

    def __init__(self, cluster: Cluster, nodes: list[Any], kind: str, lines: int, draw: random.Random) -> None:
        super().__init__(daemon=True)
        self._cluster, self._nodes, self._kind, self._lines, self._draw = cluster, nodes, kind, lines, draw
        self.what = ""
        self.at = 0.0
        self.start()

    def run(self) -> None:
        ledger = Path("run/ledger.jsonl").absolute()
        while not (ledger.exists() and ledger.read_bytes().count(b"\n") > self._lines and processes(self._kind)):
            time.sleep(0.02)
        time.sleep(self._draw.uniform(0.0, 0.1))
        learning = [node_of(process, self._nodes) for process in processes("Learner")]
        homes = [node_of(process, self._nodes) for process in processes(self._kind)]
        # A collector's node without a learner where there is one.
        node = self._draw.choice([home for home in homes if home not in learning] or homes)
        there = [kind for kind in ("Learner", "Collector") for p in processes(kind) if node_of(p, self._nodes) is node]
        self.what = f"{there.count('Learner')} learners, {there.count('Collector')} collectors"
        self.at = time.monotonic()
        self._nodes.remove(node)
        # All that runs there at once, as if its power had failed.
        for process in sorted(descendants(node.all_processes["raylet"][0].process.pid), reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="what is to be lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gradient-lag", choices=["0", "async"], default="0", help="as --scheme.gradient-lag")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lag = "async" if given.gradient_lag == "async" else 0
        expected = None if lag else trained(lag, "inline", "inline")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=CPUS) for _ in range(2)]
        ray.init(cluster.address, log_to_driver=False)
        rows = []
        try:
            for kind in given.kinds:
                for number in range(given.kills):
                    draw = random.Random(f"{given.seed} {kind} {number}")
                    os.makedirs(f"{kind}-{number}")
                    os.chdir(f"{kind}-{number}")
                    moment = draw.randint(0, ITERATIONS - 10)
                    kill = Kill(cluster, nodes, kind, moment, draw)
                    begin = end = time.monotonic()
                    try:
                        ran = trained(lag, LAYOUTS[kind], "run")
                        end = time.monotonic()
                        outcome = "equal" if ran == (expected or repeated()) else "DIFFERS"
                    except Exception as error:
                        outcome = f"FAILED: {error}"
                    row = {
                        "killed": f"the node of a {kind.lower()}",
                        "after_iteration": moment,
                        "with_it": kill.what or "nothing",
                        "digest_and_ledger": outcome,
                        "seconds": round(end - begin, 1),
                        "seconds_after_the_kill": round(end - kill.at, 1) if kill.at else None,
                    }
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    os.chdir("..")
                    if len(nodes) < 2:
                        nodes.append(cluster.add_node(num_cpus=CPUS))
                    deadline = time.monotonic() + 20
                    while left := processes("Learner") + processes("Collector"):
                        assert time.monotonic() < deadline, f"left: {left}"
                        time.sleep(0.1)
        finally:
            ray.shutdown()
            cluster.shutdown()
        equal = sum(row["digest_and_ledger"] == "equal" for row in rows)
        after = [row["seconds_after_the_kill"] for row in rows if row["seconds_after_the_kill"]]
        print(f"{equal} of {len(rows)} runs ended with the right digest and ledger")
        if after:
            print(f"from the kill to the end: median {statistics.median(after):.1f} s, at most {max(after):.1f} s")


if __name__ == "__main__":
    main()
