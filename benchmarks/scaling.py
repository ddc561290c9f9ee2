"""Throughput, policy lag and gradient asynchrony of every preset on 1 to 4 workers; what more hosts would do.

    python benchmarks/scaling.py run            # presets on this machine (Figure 7 of arXiv:2007.02622, in small)
    python benchmarks/scaling.py check          # as root: the model against hosts with a slow network between them
    python benchmarks/scaling.py project        # what one learner costs here, and what 16, 64 and 256 would do
    python benchmarks/scaling.py nodes          # presets on 1 to 5 nodes of a Ray cluster whose environments sleep
    python benchmarks/scaling.py report         # tables.md from what was measured

Each writes its part of benchmarks/scaling/scaling.json. docs/scaling.md says what the numbers mean.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nodes
import torch
from hosts import ROOT, Hosts, change, go_first
from projection import Network, Work
from scaling_report import report

from lockstep import presets, recipes
from lockstep.agent import Agent
from lockstep.algorithms import PPOConfig
from lockstep.cli.train import derived_facts
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.distributed.groups import GlooGroup
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.run.folder import RunFolder
from lockstep.scheme import Scheme
from lockstep.speed.trial import Slot, Trial
from lockstep.training.context import RunStatus, WorkerContext
from lockstep.training.job import Job
from lockstep.training.loops import work
from lockstep.training.prepare import prepare

RESULTS = Path(__file__).parent / "scaling"
SLOW = {
    "as it is": Network(0.0),
    "20 ms": Network(0.020),
    "100 Mbit/s": Network(0.0, 12.5e6),
    "50 ms, 200 Mbit/s": Network(0.050, 25e6),
}
"""Networks that the model is checked on."""
SIZES = (64, 500_000, 7_000_000)
"""Bytes of the sums that are timed: a small message, and gradients."""
REPEATS = 7


def pong() -> Experiment:
    """PPO on Pong in rollouts of a second, so that a trial holds many iterations."""
    full = recipes.ppo_atari("Pong")
    return full.replace(env=replace(full.env, num_envs=16), algorithm=replace(full.algorithm, rollout=32, epochs=2))


def halfcheetah() -> Experiment:
    return recipes.sac_mujoco()


def cartpole() -> Experiment:
    """6 iterations of 8 gradient steps with a small gradient."""
    full = recipes.ppo_cartpole()
    return full.replace(
        env=replace(full.env, adapter="gymnasium"), algorithm=replace(full.algorithm, epochs=2), total_steps=6 * 512
    )


def breakout() -> Experiment:
    """6 iterations of one gradient step with a large gradient."""
    full = recipes.a2c_atari()
    return full.replace(env=replace(full.env, num_envs=4), scheme=Scheme(), total_steps=6 * 20)


TASKS = {"cartpole": cartpole, "pong": pong, "halfcheetah": halfcheetah}

CHECKED = {"PPO, MLP": cartpole, "A2C, CNN": breakout}
"""Runs that are timed on slow networks."""


NAMES: dict[Callable[..., presets.Composed], str] = {}
"""Of the presets: the first of each one's."""
for each, function in presets.PRESETS.items():
    NAMES.setdefault(function, each)


def _of_size(preset: Callable[..., presets.Composed], experiment: Experiment, workers: int) -> presets.Composed:
    """A preset with so many workers: collectors, unless its workers collect and learn."""
    number = {name: workers for name in inspect.signature(preset).parameters if name in ("workers", "collectors")}
    return preset(experiment, **number)


def run(seconds: float, numbers: list[int], tasks: list[str]) -> dict[str, Any]:
    """Every preset that suits these tasks, on so many workers, one after the other."""
    found: dict[str, Any] = {}
    for task in tasks:
        for preset, name in NAMES.items():
            for workers in numbers:
                try:
                    settings, layout = _of_size(preset, TASKS[task](), workers)
                    settings = prepare(settings, layout)
                except SettingsError as error:
                    print(f"{task} {name} {workers}: {error}")
                    break
                trial = Trial(settings, layout)
                try:
                    trial.run(1.0, iterations=2 * trial.settling)
                    found.setdefault(task, {}).setdefault(name, {})[workers] = _measured(trial.run(seconds), layout)
                finally:
                    trial.close()
                print(task, name, workers, found[task][name][workers], flush=True)
                if name == "single":
                    break
    return found


def _measured(slot: Slot, layout: Layout) -> dict[str, Any]:
    """Means over a trial."""
    lines = [line for _, line in slot.lines]

    def mean(name: str) -> float:
        values = [line[name] for line in lines if name in line]
        return statistics.fmean(values) if values else 0.0

    shares = slot.shares()
    return {
        "layout": str(layout),
        "rate": slot.rate,
        "policy_lag": mean("lag/policy_versions"),
        "gradient_asynchrony": mean("lag/gradient_asynchrony"),
        "computing": sum(shares.get(name, 0.0) for name in ("env", "inference", "learning")),
        "waiting": shares.get("waiting", 0.0),
    }


def probe() -> None:
    """Under torchrun: seconds of sums over all processes, of the barrier, of gathering, and of whole iterations, on
    every network of SLOW. The fastest of several counts: what else the machine does only adds."""
    go_first()
    group = GlooGroup("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    tree = TreeSum(group.size, group)

    def seconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            group.barrier()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    found: dict[str, Any] = {}
    for name, network in SLOW.items():
        if group.rank == 0:
            change(network)
        group.barrier()
        sums = {}
        for size in SIZES:
            value = torch.ones(size // 4)
            sums[str(size)] = seconds(lambda value=value: tree.sum({group.rank: value}))
        others = {"barrier": seconds(group.barrier), "gather": seconds(lambda: group.gather("x"))}
        checked = CHECKED if group.size == 2 else {}  # more would share the cores
        runs = {label: _iteration(experiment(), group) for label, experiment in checked.items()}
        found[name] = {"network": asdict(network), "sums": sums, **others, "runs": runs}
    if group.rank == 0:
        print(json.dumps(found))
    group.close()


def _iteration(experiment: Experiment, group: GlooGroup) -> dict[str, Any]:
    """Seconds of an iteration of this experiment on the processes of a group."""
    layout = Layout("torchrun", workers=group.size)
    with tempfile.TemporaryDirectory() as name:
        options = RunOptions(run=f"{group.broadcast(name)}/run", display="none", tensorboard=False)
        settings = prepare(experiment, layout)
        job = Job(RunFolder.create(settings, layout, options), settings, layout, options)
        work(job, WorkerContext(group), RunStatus())
        if group.rank:
            return {}
        lines = [json.loads(line) for line in job.folder.metrics.read_text().splitlines()]
    return {
        "seconds": min(after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)),
        "steps": settings.gradient_steps[0],
        "bytes": 4 * Agent(settings).flat.vector.numel(),
        "reductions": 1 + getattr(settings.algorithm.build(), "normalize_advantages", False),
    }


def check() -> dict[str, Any]:
    """Sums on 2 and 4 hosts, and whole runs on 2, with every network of SLOW between them."""
    found: dict[str, Any] = {}
    for count in (2, 4):
        with Hosts(count) as hosts:
            printed = hosts.torchrun([str(Path(__file__).resolve()), "probe"], ROOT, timeout=1800.0)
            found[str(count)] = json.loads(printed.splitlines()[-1])
        print(count, found[str(count)], flush=True)
    return found


def measured_work(seconds: float) -> dict[str, Any]:
    """What one learner costs on one core here, alone."""
    found = {}
    cheetah = recipes.ppo_mujoco()
    assert isinstance(cheetah.algorithm, PPOConfig)
    cheetah = cheetah.replace(algorithm=replace(cheetah.algorithm, minibatches=16))
    for name, experiment in {
        "PPO, Pong, CNN": pong(),
        "IMPALA, Pong, CNN": recipes.impala_atari("Pong"),
        "PPO, HalfCheetah, MLP": cheetah,
    }.items():
        settings = prepare(experiment, Layout())
        trial = Trial(settings, Layout())
        try:
            trial.run(1.0, iterations=trial.settling + 1)
            before = _cpu_seconds(trial)
            slot = trial.run(seconds, iterations=4)
            busy = (_cpu_seconds(trial) - before) / slot.seconds
        finally:
            trial.close()
        found[name] = asdict(_work(settings, [line for _, line in slot.lines], busy))
        print(name, found[name], flush=True)
    return found


def _cpu_seconds(trial: Trial) -> float:
    """That its process has used so far. Of one process with one thread that is the time that it needs alone, whatever
    else the machine does."""
    fields = Path(f"/proc/{trial._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(experiment: Experiment, lines: list[dict[str, float]], busy: float) -> Work:
    """busy: the share of the time in which the process had a core."""
    seconds = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)]

    def spent(*names: str) -> float:
        shares = [sum(line[f"time/{name}"] for name in names) for line in lines[1:]]
        return busy * statistics.fmean(share * each for share, each in zip(shares, seconds))

    facts = derived_facts(experiment, Layout())
    return Work(
        samples=experiment.samples_per_iteration,
        collecting=spent("env", "inference"),
        learning=spent("learning"),
        other=spent("other", "waiting"),
        gradient_steps=facts["gradient_steps_per_iteration"],
        gradient_bytes=4 * Agent(experiment).flat.vector.numel(),
        rollout_bytes=round(facts["rollout_megabytes"] * 1e6),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "check", "project", "nodes", "report", "probe"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of every trial")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--nodes", type=int, nargs="*", default=list(nodes.NODES))
    parser.add_argument("--presets", nargs="*", default=list(nodes.CASES), choices=nodes.CASES, help="of nodes")
    parser.add_argument("--rounds", type=int, default=3, help="of nodes: how often each is measured")
    given = parser.parse_args()
    what = given.what
    if what == "probe":
        probe()
        return 0
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "scaling.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if what != "report":
        found[what] = {
            "run": lambda: run(given.seconds, given.workers, given.tasks),
            "check": check,
            "project": lambda: measured_work(given.seconds),
            "nodes": lambda: (
                found.get("nodes", {}) | nodes.nodes(given.seconds, given.nodes, given.presets, given.rounds)
            ),
        }[what]()
        path.write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "tables.md").write_text(report(json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
