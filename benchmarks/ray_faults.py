"""Whether a run survives the loss of machines: a Ray cluster of three nodes, all here, of which one is killed mid-run.

    python benchmarks/ray_faults.py [--kills 10] [--kinds Collector FreeCollector …]      results in benchmarks/faults/

The first node only conducts; processes are spread over the others, of which either has room for all. At a random moment
the node is killed (SIGKILL to all of its processes) on which a collector, or a learner, is; then a new one joins. With
Store, it is the node of learner 0, which keeps the parameters of asynchronous gradients. With Joining, a node joins a
run of ray:a2+-l1 and is killed once collectors work on it. The kinds named Free… have --scheme.lag async, the others a
lag of one.

The digest, and the ledger, must be those of an undisturbed run inline or, if timing decides, of a run inline that
repeats the recorded decisions. A run may leave nothing behind: no process, shared memory, placement group or object.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

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
from lockstep.launchers.ray.driver import RayDriver
from lockstep.reproducibility.replay import replay
from lockstep.run.folder import RunFolder


@dataclass(frozen=True)
class Kind:
    """What is to be lost, and the run that loses it."""

    victim: str
    """Ray's name of the actors, one of whose nodes is killed."""
    layout: str
    lag: Any = 1
    gradient_lag: Any = 0
    iterations: int = 60

    @property
    def decides(self) -> bool:
        """Whether timing decides a part of the run."""
        return "async" in (self.lag, self.gradient_lag)


KINDS = {
    "Collector": Kind("Collector", "ray:a2-l1,jitter=0.01"),
    "FreeCollector": Kind("Collector", "ray:a2-l1,jitter=0.01", lag="async"),
    "Learner": Kind("Learner", "ray:a2-l2,jitter=0.01"),
    "FreeLearner": Kind("Learner", "ray:a2-l1,jitter=0.01", lag="async"),
    "Store": Kind("Learner", "ray:a2-l2,jitter=0.01", gradient_lag="async"),
    # A node takes seconds to join.
    "Joining": Kind("Collector", "ray:a2+-l1,jitter=0.03,restarts=0", lag="async", iterations=240),
}
CPUS = 4
"""Of a node: as many as the largest layout has processes."""
PATIENCE = 420.0
"""Seconds after which a run hangs."""
EVERY = 5
"""Iterations between two checkpoints."""


def experiment(kind: Kind) -> Experiment:
    """PPO on CartPole, one version behind; free-running with IMPALA's loss."""
    full, free = recipes.ppo_cartpole(), kind.lag == "async"
    algorithm = dataclasses.replace(full.algorithm, rollout=8, epochs=1, minibatches=2)
    scheme = dataclasses.replace(full.scheme, shards=4, lag=kind.lag, acting_batch=0, gradient_lag=kind.gradient_lag)
    return full.replace(
        env=dataclasses.replace(full.env, num_envs=8, adapter="gymnasium", reseed_every=40),
        algorithm=IMPALAConfig(rollout=8, minibatches=2) if free else algorithm,
        scheme=scheme,
        precision="fp32",
        total_steps=kind.iterations * 8 * 8,
    )


def options(folder: str) -> RunOptions:
    return RunOptions(run=folder, checkpoint_every=EVERY, display="none", tensorboard=False)


def trained(kind: Kind, layout: str, folder: str) -> tuple[str, bytes]:
    """Digest and ledger."""
    result = train(experiment(kind), Layout.parse(layout), options(folder))
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
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(Path("ray").absolute())}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
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

    def disturb(self, kind: str, moment: int, draw: random.Random, run: Future[Any]) -> dict[str, Any]:
        """Kill a node at a moment of the run: when it has so many iterations. Returns what was on it, and when."""
        found: dict[str, Any] = {"with_it": "nothing"}

        def until(condition: Callable[[], Any]) -> None:
            while not (condition() or run.done()):
                time.sleep(0.02)

        until(lambda: iterations() > moment and self._victims(kind))
        joined = None
        if kind == "Joining" and not run.done():
            before = len(processes("Collector"))
            joined = self._cluster.add_node(num_cpus=2)
            self._nodes.append(joined)
            there = time.monotonic()
            until(lambda: len(processes("Collector")) > before)
            found["seconds_until_used"] = round(time.monotonic() - there, 1)
            lines = iterations()
            until(lambda: iterations() > lines + 10)
        time.sleep(draw.uniform(0.0, 0.1))
        if run.done():
            return found
        learning = [node_of(process, self._nodes) for process in processes("Learner")]
        homes = [node_of(process, self._nodes) for process in self._victims(kind)]
        # A collector's node without a learner where there is one, as otherwise it would be a learner's loss.
        apart = [home for home in homes if home not in learning] if KINDS[kind].victim == "Collector" else []
        node = joined or draw.choice(apart or homes)
        on_it = [role for role in ("Learner", "Collector") for p in processes(role) if node_of(p, self._nodes) is node]
        self._nodes.remove(node)
        lines, at = iterations(), time.monotonic()
        # All that runs there at once, as if its power had failed.
        for process in sorted(descendants(node.all_processes["raylet"][0].process.pid), reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        # What was under way when the node was lost may still arrive.
        until(lambda: iterations() > lines + 3)
        return found | {
            "with_it": f"{on_it.count('Learner')} learners, {on_it.count('Collector')} collectors",
            "killed_at": at,
            "iterations_before": lines,
            "seconds_until_it_goes_on": round(time.monotonic() - at, 1),
        }

    def _victims(self, kind: str) -> list[int]:
        return keeper() if kind == "Store" else processes(KINDS[kind].victim)


def iterations() -> int:
    """Of the run in this folder, so far."""
    ledger = Path("run/ledger.jsonl")
    return max(0, ledger.read_bytes().count(b"\n") - 1) if ledger.exists() else 0


class Repetitions:
    """Counts rollouts that are requested a second time, of one attempt after the other."""

    def __init__(self) -> None:
        self.count = 0
        collect = RayDriver._collect

        def counted(driver: RayDriver, collector: Any, number: int, wanted: int) -> None:
            seen = vars(driver).setdefault("requested_so_far", set())
            for shard in collector.shards:
                self.count += (shard, number) in seen
                seen.add((shard, number))
            collect(driver, collector, number, wanted)

        self.patch = mock.patch.object(RayDriver, "_collect", counted)


def left(before: set[str]) -> list[str]:
    """What a run has left: its processes, shared memory that was not there and that nobody has open, places, objects.
    Waits for what is about to end."""
    deadline, found = time.monotonic() + 20, ["?"]
    while found and time.monotonic() < deadline:
        found = [f"process {each}" for each in processes("Learner") + processes("Collector")]
        groups = ray.util.placement_group_table().values()
        found += [f"placement group {each['placement_group_id']}" for each in groups if each["state"] != "REMOVED"]
        used = ray.cluster_resources()["object_store_memory"] - ray.available_resources().get("object_store_memory", 0)
        found += [f"{used / 1e6:.1f} MB of objects"] if used > 1e5 else []
        if new := shared() - before:
            found += [f"/dev/shm/{name}" for name in new - opened()]
        if found:
            time.sleep(0.2)
    return found


def shared() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def opened() -> set[str]:
    """Names in /dev/shm that a process has open or mapped."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                maps = (entry / "maps").read_text()
                files = [os.readlink(each) for each in (entry / "fd").iterdir()]
                found |= {name for text in (maps, *files) for name in re.findall(r"/dev/shm/(\S+)", text)}
    return found


def once(nodes: Nodes, name: str, number: int, seed: int, threads: Any, expected: Any) -> dict[str, Any]:
    """One run, of which a node is killed, in this folder."""
    kind, draw = KINDS[name], random.Random(f"{seed} {name} {number}")
    nodes.be(*((1, 3) if name == "Joining" else (2, CPUS)))
    before, repetitions = shared(), Repetitions()
    moment = draw.randint(0, kind.iterations // 4 if name == "Joining" else kind.iterations - 10)
    begin = time.monotonic()
    with repetitions.patch:
        run = threads.submit(trained, kind, kind.layout, "run")
        found = nodes.disturb(name, moment, draw, run)
        wait([run], timeout=PATIENCE)
    end = time.monotonic()
    try:
        outcome = "HANGS"
        if run.done():
            outcome = "equal" if run.result() == (expected or repeated()) else "DIFFERS"
    except Exception as error:
        outcome = f"FAILED: {error}"
    resumed = json.loads(Path("run/run.json").read_text()).get("resumed", [])
    killed = found.pop("killed_at", end)
    again = [found["iterations_before"] - each["iteration"] for each in resumed[-1:] if "iterations_before" in found]
    return {
        "killed": name,
        "number": number,
        "after_iteration": moment,
        **found,
        "restarts_from_checkpoints": len(resumed),
        "iterations_repeated": sum(again),
        "rollouts_collected_again": repetitions.count,
        "digest_and_ledger": outcome,
        "left": left(before),
        "seconds": round(end - begin, 1),
        "seconds_after_the_kill": round(end - killed, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each kind; medians, and the largest in brackets."""
    lines = [
        "| killed | runs | equal | left over | continued after, s | iterations repeated | rollouts collected again "
        "| end after, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        mine = [row for row in rows if row["killed"] == kind and row["with_it"] != "nothing"]
        if not mine:
            continue
        equal = sum(row["digest_and_ledger"] == "equal" for row in mine)
        cells = [kind, str(len(mine)), str(equal), str(sum(bool(row["left"]) for row in mine))]
        for name in (
            "seconds_until_it_goes_on",
            "iterations_repeated",
            "rollouts_collected_again",
            "seconds_after_the_kill",
        ):
            values = [row[name] for row in mine]
            cells.append(f"{statistics.median(values):.3g} ({max(values):.3g})")
        lines.append(f"| {' | '.join(cells)} |")
    used = [row["seconds_until_used"] for row in rows if "seconds_until_used" in row]
    if used:
        lines.append(
            f"\nA node that joined was used after {statistics.median(used):.1f} s (median; at most {max(used):.1f} s)."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what is to be lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "faults", help="folder of the results")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as threads:
        os.chdir(folder)
        nodes = Nodes()
        try:
            for kind in given.kinds:
                told = KINDS[kind]
                expected = None if told.decides else trained(told, "inline", f"inline-{kind}")
                for number in range(given.kills):
                    os.makedirs(f"{kind}-{number}")
                    os.chdir(f"{kind}-{number}")
                    rows.append(once(nodes, kind, number, given.seed, threads, expected))
                    print(f"{time.strftime('%H:%M:%S')} {json.dumps(rows[-1])}", flush=True)
                    (out / "faults.json").write_text(json.dumps(rows, indent=1) + "\n")
                    if rows[-1]["digest_and_ledger"] == "HANGS":
                        faulthandler.dump_traceback()
                        os._exit(1)  # its thread does not end
                    os.chdir("..")
        finally:
            nodes.close()
            os.chdir(out)
    (out / "table.md").write_text(table(rows) + "\n")
    print(table(rows))
    sys.exit(any(row["digest_and_ledger"] != "equal" or row["left"] for row in rows))


if __name__ == "__main__":
    main()
