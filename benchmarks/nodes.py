"""Every preset on one to five nodes of a Ray cluster (Figure 7 of arXiv:2007.02622), for benchmarks/scaling.py nodes.

The nodes are here, and share two cores; so the environments sleep (benchmarks/sleeping.py), and no node is needed for
its core. Collectors, or workers that collect and learn, have a node each; learners have one together. The 8 shards of
one environment each are spread over the collectors, which step them in turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from projection import FreeRunning, Network, Work, free_running
from sleeping import SECONDS

from lockstep import presets, recipes, train
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.recipes.presets import Composed
from lockstep.reports.ages import of_gradients, of_policy
from lockstep.reports.runs import Run
from lockstep.run import ledger
from lockstep.training.status import Status, bottleneck

NODES = (1, 2, 3, 4, 5)
SHARDS, ROLLOUT = 8, 16
SLOW_LEARNER = 1.0
"""Seconds that a learner sleeps in the runs in which it is to be the limit. One node collects for 2.6 seconds."""
_ENV = str(Path(__file__).parent.resolve() / "sleeping.py:Sleeping")


def on_policy() -> Experiment:
    """PPO with small networks, in iterations of 8 · 16 steps."""
    full = recipes.ppo_cartpole()
    return full.replace(
        env=replace(full.env, id=_ENV, num_envs=SHARDS, adapter="gymnasium"),
        algorithm=replace(full.algorithm, rollout=ROLLOUT, epochs=2, minibatches=2),
        scheme=replace(full.scheme, shards=SHARDS, acting_batch=0),
        precision="fp32",
    )


def replaying() -> Experiment:
    """DQN, for the presets with replay."""
    full, small = recipes.dqn_cartpole(), on_policy()
    algorithm = replace(full.algorithm, rollout=ROLLOUT, warmup=SHARDS * ROLLOUT, updates=4)
    return full.replace(env=small.env, algorithm=algorithm, scheme=small.scheme, precision="fp32")


@dataclass(frozen=True)
class Case:
    """A preset that is measured."""

    preset: Callable[..., Composed]
    """Called with an experiment and, except single, a number of nodes."""
    delay: float = 0.0
    """Seconds that the learner sleeps in each iteration."""
    rollout: int = ROLLOUT
    busy: int = 0
    """Other processes that compute all the time, for which this machine is too small."""


CASES = {
    "single": Case(presets.single),
    "sync": Case(presets.sync),
    "cleanba": Case(presets.cleanba),
    "impala": Case(presets.impala),
    "impala, 32 steps": Case(presets.impala, rollout=32),
    "impala, slow learner": Case(presets.impala, SLOW_LEARNER),
    "impala, busy machine": Case(presets.impala, busy=6),
    "apex": Case(presets.apex),
    "appo": Case(presets.appo),
    "dppo": Case(presets.dppo),
    "ddppo": Case(presets.ddppo),
    "rapid": Case(presets.rapid),
    "async-rapid": Case(presets.async_rapid),
}


def on_ray(layout: Layout, delay: float) -> Layout:
    """The layout of a preset, with a node for each process that collects."""
    if layout.split:
        resources = (("collector.place", 1.0), ("learner.desk", 1.0))
        return replace(layout, launcher_name="ray", resources=resources, learner_delay=delay)
    return Layout("ray", layout.workers, resources=(("worker.place", 1.0),))


def nodes(seconds: float, numbers: list[int], names: list[str], rounds: int) -> dict[str, Any]:
    """Each preset on so many nodes, for about so many seconds: the run with the median rate of so many rounds. Numbers
    of nodes take turns, since what else the machine does changes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=2, resources={"desk": 2})
    for _ in range(max(numbers)):
        cluster.add_node(num_cpus=1, resources={"place": 1})
    ray.init(cluster.address, log_to_driver=False)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    try:
        for name in names * rounds:
            for number in numbers[:1] if name == "single" else numbers:
                try:
                    with _busy(CASES[name].busy):
                        measured = _measured(name, number, seconds)
                except SettingsError as error:
                    print(f"{name} {number}: {error}")
                    break
                found.setdefault(name, {}).setdefault(str(number), []).append(measured)
                print(name, number, measured, flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {name: {number: _median(runs) for number, runs in by_nodes.items()} for name, by_nodes in found.items()}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median rate, and the rates of all, in the order of rounds."""
    return sorted(runs, key=lambda run: run["rate"])[len(runs) // 2] | {"rates": [run["rate"] for run in runs]}


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that compute all the time, as programs do that share the machine."""
    processes = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _spin() -> None:
    while True:
        pass


def _measured(name: str, number: int, seconds: float) -> dict[str, Any]:
    case = CASES[name]
    start = replaying() if name == "apex" else on_policy()
    start = start.replace(algorithm=replace(start.algorithm, rollout=case.rollout))
    experiment, layout = case.preset(start, *[number] * (name != "single"))
    layout = on_ray(layout, case.delay)
    expected = max(SHARDS * case.rollout * SECONDS / number, case.delay)
    experiment = experiment.replace(total_steps=(4 + round(seconds / expected)) * SHARDS * case.rollout)
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(run=f"{folder}/run", display="none", tensorboard=False, checkpoint_every=100_000)
        train(experiment, layout, options)
        run = Run.read(f"{folder}/run")
        _, lines = ledger.read(Path(folder) / "run" / "ledger.jsonl")
    first, last = run.records[2], run.records[-1]
    policy, gradients = of_policy(run, lines[3:]), of_gradients(run, lines[3:])
    settled = replace(run, records=run.records[3:])
    waits = {each: settled.average(each) for each in settled.names("wait/")}
    each_iteration = _between(first, last, "seconds", "iteration")

    def spent(part: str) -> float:
        """Seconds of an iteration in all processes, of which `time/` is the mean."""
        return run.share(f"time/{part}", 3) * layout.processes * each_iteration

    return {
        "layout": str(layout),
        "rate": _between(first, last, "samples"),
        "policy_lag": settled.average("lag/policy_versions"),
        "policy_lag_max": max([max(ages.versions) for ages in policy.values()], default=0),
        "gradient_asynchrony": settled.average("lag/gradient_asynchrony"),
        "gradient_asynchrony_max": max([max(ages.versions) for ages in gradients.values()], default=0),
        "kept": settled.average("lag/kept") if settled.has("lag/kept") else 1.0,
        "learning": spent("learning"),
        "step": spent("env") / (SHARDS * case.rollout),
        "collectors_wait": waits.get("wait/parameters", 0.0) / each_iteration,
        "waits": waits,
        "said": _advice(replace(run, records=run.records[-max(3, len(run.records) // 3) :]), layout),
    }


def _between(first: dict[str, Any], last: dict[str, Any], name: str, per: str = "seconds") -> float:
    return (last[name] - first[name]) / (last[per] - first[per])


def _advice(run: Run, layout: Layout) -> str:
    """What the display says after these iterations."""
    each = _between(run.records[0], run.records[-1], "seconds", "iteration")
    shares = {name.partition("/")[2]: run.average(name) for name in run.names("time/")}
    waits = {name.partition("/")[2]: run.average(name) for name in run.names("wait/")}
    blank = dict.fromkeys(("iteration", "iterations", "samples", "total_samples", "frames", "updates", "episodes"), 0)
    speeds = dict.fromkeys(("samples_per_second", "frames_per_second", "seconds", "policy_lag"), 0.0)
    status = Status(
        **blank,
        **speeds,
        iteration_seconds=each,
        score=None,
        best=None,
        length=None,
        history=[],
        shares=shares,
        metrics={},
        layout=layout,
        shards=SHARDS,
        waits=waits,
        timing_decides=True,
    )
    return bottleneck(status, os.cpu_count() or 1)


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A row for each preset and number of nodes; efficiency is that of linear scaling from one node."""
    rows = []
    for name, by_nodes in found.items():
        for number, each in by_nodes.items():
            row = [name, number, f"{each['rate']:,.1f}", f"{efficiency(by_nodes, number):.2f}"]
            row += [f"{each['policy_lag']:.2f} ({each['policy_lag_max']})"]
            row += [f"{each['gradient_asynchrony']:.2f} ({each['gradient_asynchrony_max']})"]
            row += [f"{each['kept']:.0%}" * (each["kept"] < 1)]
            # With replay, an iteration may take rollouts of several, or none.
            row += [f"{1000 * each['step']:.1f}" if "step" in each and name != "apex" else ""]
            row += [f"{each['collectors_wait']:.1%}" if each["waits"] and "step" in each else ""]
            told = ""
            if name.startswith("impala"):
                model = modeled(by_nodes, int(number), CASES[name])
                told = f"{SHARDS * CASES[name].rollout / model.seconds:,.1f}, PL {model.policy_lag:.1f}: {model.limit}"
            rows.append([*row, told])
    head = ["preset", "nodes", "samples/s", "of linear", "PL (largest)", "GA (largest)", "kept"]
    return [*head, "a step, ms", "collectors wait", "model"], rows


def efficiency(by_nodes: dict[str, Any], number: str) -> float:
    """The rate of each node, as a share of that with the fewest nodes: the median over rounds, in each of which both
    were measured one soon after the other."""
    fewest = min(by_nodes, key=int)
    base, each = by_nodes[fewest], by_nodes[number]
    pairs = zip(each.get("rates", [each["rate"]]), base.get("rates", [base["rate"]]))
    return statistics.median(rate / int(number) / (alone / int(fewest)) for rate, alone in pairs)


def modeled(by_nodes: dict[str, Any], number: int, case: Case) -> FreeRunning:
    """The model of a free-running run, from what one node collects, and what an iteration learns."""
    alone, samples = by_nodes["1"], SHARDS * case.rollout
    work = Work(samples, samples / alone["rate"], alone["learning"], 4, 20_000)
    return free_running(number, work, Network(0.0), shards=SHARDS, learner_delay=case.delay)
