"""CartPole and MinAtar, where networks and environments cost little: lockstep beside PureJaxRL (JAX) and rlox (Rust).

    python benchmarks/small_environments.py [--rounds 3] [--seconds 8] [--environments 1024 32] [--epochs 1 4]
    python benchmarks/small_environments.py --tasks minatar minatar-mlp --environments 1024 64
    python benchmarks/small_environments.py --seeds 16     # as many runs at once

All train PPO with PureJaxRL's settings and two networks of 64 and 64 units on rollouts of 32 steps, in one epoch of one
minibatch and in four of four. In MinAtar's Breakout, `minatar-mlp` has these networks, which are PureJaxRL's, and
`minatar` has the network of our recipe, on both sides. rlox has no MinAtar. lockstep's environments are the compiled
ones, and with few of them EnvPool's, too. One process needs only one shard; rows with two shards have the bits of two
processes.
Rounds are interleaved, and nothing that is compiled is compiled while the time is taken. Peers are installed on first
use. PureJaxRL has no package, so it is cloned from GitHub; --purejaxrl FOLDER takes a clone that you have.

With --seeds, PureJaxRL trains all of them in one program (vmap), and `lockstep sweep` a run of each, one on every core.
Rates are samples per second of all together: from the start of the program to its end, which includes what JAX compiles
(lockstep keeps its kernels from one run to the next), and while it trains.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from other_systems.installed import JAX, PeerError, clone_of, python_of
from other_systems.rounds import interleave, table
from other_systems.served import Served, rate_of

from lockstep.algorithms import PPOConfig
from lockstep.cli.common import parse
from lockstep.cli.recipe import load_recipe
from lockstep.cli.train import TrainArguments
from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.speed.trial import Trial
from lockstep.system.machine import cores

PUREJAXRL = "https://github.com/luchris429/purejaxrl"
COMMIT = "31756b197773a52db763fdbe6d635e4b46522a73"
_JAX = (
    "gymnax==0.0.9",
    "distrax==0.1.9",
    "chex==0.1.92",
    *JAX,
)
_RLOX = ("--only-binary=rlox", "rlox==1.2.0", "torch==2.13.0", "gymnasium==1.4.0")
PEERS = ("PureJaxRL", "rlox")
LAYOUTS = (("inline", 1), ("inline", 2), ("processes:2", 2))
"""Layouts with numbers of shards: as many as processes, which is the least, and two for both."""
ROLLOUT, FEW = 32, 32
"""Steps, and up to how many environments EnvPool steps them, too."""
CALL = 20 * 1024 * ROLLOUT
"""Samples of a call of PureJaxRL's function; the metrics of all of them stay in memory until it ends."""


@dataclass(frozen=True)
class Task:
    """What all sides train on."""

    recipe: str
    environment: str
    """Its name in gymnax."""
    network: dict[str, str]
    """Flags of lockstep's."""
    convolution: bool = False
    """Whether PureJaxRL's network has one, too."""


_TWO_NETWORKS = {"model.hidden-sizes": "64 64", "model.encoder": "mlp", "model.separate-value-network": ""}
TASKS = {
    "cartpole": Task("ppo-cartpole", "CartPole-v1", {"model.hidden-sizes": "64 64"}),
    "minatar": Task("ppo-minatar", "Breakout-MinAtar", {}, convolution=True),
    "minatar-mlp": Task("ppo-minatar", "Breakout-MinAtar", _TWO_NETWORKS),
}


def flags(task: Task, num_envs: int, epochs: int, adapter: str, shards: int = 1) -> list[str]:
    """What makes of the recipe the experiment: PureJaxRL's settings."""
    named = {
        **task.network,
        "env.num-envs": num_envs,
        "env.adapter": adapter,
        "algorithm.rollout": ROLLOUT,
        "algorithm.epochs": epochs,
        "algorithm.minibatches": epochs,
        "algorithm.learning-rate": 2.5e-4,
        "algorithm.discount": 0.99,
        "algorithm.gae-lambda": 0.95,
        "algorithm.value-clip": 0.2,
        "algorithm.entropy-coef": 0.01,
        "scheme.shards": shards,
        "scheme.acting-batch": 0,
    }
    return [word for name, value in named.items() for word in (f"--{name}", *str(value).split())]


def experiment_of(task: Task, words: list[str]) -> Experiment:
    """What `lockstep train` makes of the flags."""
    given = TrainArguments(load_recipe(task.recipe))
    return parse(TrainArguments, f"train {task.recipe}", words, given).experiment


def settings_of(task: Task, experiment: Experiment, samples: int, seeds: int = 1) -> dict[str, Any]:
    """What the peers need of it."""
    algorithm = experiment.algorithm
    assert isinstance(algorithm, PPOConfig)
    names = ("rollout", "epochs", "minibatches", "learning_rate", "discount", "gae_lambda", "clip", "entropy_coef")
    settings = {name: getattr(algorithm, name) for name in (*names, "value_coef", "max_grad_norm")}
    sizes = {"num_envs": experiment.env.num_envs, "samples": samples, "seeds": seeds}
    return {**settings, **sizes, "environment": task.environment, "convolution": task.convolution}


def purejaxrl(settings: dict[str, Any], source: str) -> Served:
    """PureJaxRL's process, installed."""
    python = python_of("purejaxrl", _JAX, print)
    folder = clone_of("purejaxrl", source, COMMIT, print) / "purejaxrl"
    return Served("PureJaxRL", python, "_purejaxrl.py", {**settings, "folder": str(folder)}, {"JAX_PLATFORMS": "cpu"})


def rlox(settings: dict[str, Any], threads: int) -> Served:
    """rlox's process, installed where there is a wheel of it: others would build it with Rust."""
    return Served("rlox", python_of("rlox", _RLOX, print), "_rlox.py", {**settings, "threads": threads})


def alone(task: Task, num_envs: int, epochs: int, given: argparse.Namespace) -> str:
    """The table of one run at a time."""
    rows: dict[str, Callable[[], float]] = {}
    cartpole = task.recipe == "ppo-cartpole"
    with contextlib.ExitStack() as stack:
        for adapter in ("compiled", "envpool") if cartpole and num_envs <= FEW else ("compiled",):
            for layout, shards in LAYOUTS:
                name = f"lockstep, {adapter}, `{layout}`, {shards} shard{'s' * (shards > 1)}"
                print(f"starting {name} …", flush=True)
                trial = Trial(experiment_of(task, flags(task, num_envs, epochs, adapter, shards)), Layout.parse(layout))
                stack.enter_context(contextlib.closing(trial))
                trial.run(1.0, iterations=2)
                rows[name] = lambda trial=trial: trial.run(given.seconds).rate
        settings = settings_of(
            task, experiment_of(task, flags(task, num_envs, epochs, "compiled")), CALL // (1 if cartpole else 5)
        )
        peers: dict[str, Callable[[], Served]] = {"PureJaxRL": lambda: purejaxrl(settings, given.purejaxrl)}
        for threads in sorted({1, cores()}) if cartpole else ():
            peers[f"rlox, {threads} thread{'s' * (threads > 1)}"] = functools.partial(rlox, settings, threads)
        for name, start in peers.items():
            if (rate := rate_of(name, start, given.seconds, stack)) is not None:
                rows[name] = rate
        return table(interleave(rows, given.rounds, functools.partial(print, flush=True)), PEERS)


def swept(task: Task, words: list[str], samples: int, seeds: int) -> tuple[float, float]:
    """Samples per second of `lockstep sweep`: from its start to its end, and while runs train on all cores."""
    runs = ["--layout", "inline", "--total-steps", str(samples), "--seed", f"1..{seeds}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "sweep", folder, task.recipe, *words, *runs]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        whole = time.perf_counter() - begin
        if done.returncode:
            raise SystemExit(f"lockstep sweep ended with code {done.returncode}:\n{done.stderr[-2000:]}")
        files = [path.read_text(encoding="utf-8") for path in Path(folder).glob("runs/*/metrics.jsonl")]
    ends = [(json.loads(lines[0]), json.loads(lines[-1])) for lines in map(str.splitlines, files)]
    learned = sum(last["samples"] - first["samples"] for first, last in ends)
    spent = sum(last["seconds"] - first["seconds"] for first, last in ends)
    return sum(last["samples"] for _, last in ends) / whole, min(cores(), seeds) * learned / max(spent, 1e-9)


def together(task: Task, num_envs: int, epochs: int, given: argparse.Namespace) -> str:
    """The tables of many seeds at once."""
    words = flags(task, num_envs, epochs, "compiled")
    experiment = experiment_of(task, [*words, "--total-steps", str(given.samples)])
    samples = experiment.iterations * experiment.samples_per_iteration
    settings = settings_of(task, experiment, samples, given.seeds)
    whole: dict[str, list[float]] = {}
    training: dict[str, list[float]] = {}
    sweep, vmap = f"lockstep sweep, {given.seeds} runs", f"PureJaxRL, {given.seeds} seeds"
    swept(task, words, 2 * experiment.samples_per_iteration, 1)  # compiles the kernels, if no run has done so before
    with contextlib.ExitStack() as stack:
        try:
            purejaxrl(settings, given.purejaxrl).close()  # installs it
            begin = time.perf_counter()
            served = stack.enter_context(contextlib.closing(purejaxrl(settings, given.purejaxrl)))
            served.measure(0.0)
            whole[vmap] = [given.seeds * samples / (time.perf_counter() - begin)]
        except PeerError as error:
            print(f"PureJaxRL is left out: {error}", flush=True)
            served = None
        for number in range(1, given.rounds + 1):
            rates = swept(task, words, samples, given.seeds)
            for found, rate in zip((whole, training), rates, strict=True):
                found.setdefault(sweep, []).append(rate)
            print(
                f"round {number} of {given.rounds}: {sweep} {rates[0]:,.0f} and {rates[1]:,.0f} samples/s", flush=True
            )
            if served is not None:
                training.setdefault(vmap, []).append(served.measure(0.0))
                print(f"round {number} of {given.rounds}: {vmap} {training[vmap][-1]:,.0f} samples/s", flush=True)
    return f"From start to end:\n\n{table(whole, PEERS)}\n\nWhile training:\n\n{table(training, PEERS)}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=["cartpole"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each row in each round, at least")
    parser.add_argument("--environments", type=int, nargs="+", default=[1024, 32])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 4], help="and as many minibatches")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=1_000_000, help="of each seed, if there are several")
    parser.add_argument("--purejaxrl", default=PUREJAXRL, help="where git finds PureJaxRL")
    given = parser.parse_args()
    measure = together if given.seeds > 1 else alone
    for name, num_envs, epochs in itertools.product(given.tasks, given.environments, given.epochs):
        head = f"{name}, {num_envs:,} environments × {ROLLOUT} steps, {epochs} × {epochs} minibatches"
        print(f"\n{head} …", flush=True)
        print(f"\n{head}:\n\n{measure(TASKS[name], num_envs, epochs, given)}", flush=True)


if __name__ == "__main__":
    main()
