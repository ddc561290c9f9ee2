"""Recurrent PPO on Pendulum: lockstep's kernels, its other arithmetic, and sb3-contrib's RecurrentPPO; and R2D2.

    python benchmarks/recurrent.py [--cores lstm gru] [--sizes 64 256] [--rounds 3] [--peer]
    python benchmarks/recurrent.py --r2d2

PPO has 8 environments of gymnasium × 128 steps, 10 epochs of two minibatches, one recurrent network for policy and
value with 64 × 64 units of tanh, four shards in one process. R2D2 is the recipe r2d2-memory and the row minatar-r2d2 of
proof.py. Every figure is processor time, so that other programs on the machine count little. Each run has a separate
process. Iterations that compile kernels or only collect are left out, and so is the last, which ends with a checkpoint.
The peer's network has its core before the 64 × 64 units, and lockstep's behind them. It is installed on first use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from other_systems.installed import python_of
from proof import PARTS

from lockstep import RunOptions, recipes, train
from lockstep.algorithms import PPOConfig
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.collectors.collectors import Collector
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.scheme import Scheme

ENVIRONMENTS, STEPS, EPOCHS, MINIBATCHES = 8, 128, 10, 2
WAYS = {"kernels": 6, "fp32": 6, "replaced": 3}
"""Ways to compute: kernels, torch's replaced operations in portable arithmetic, and fp32; with how many iterations
are measured."""
R2D2 = {"minatar-r2d2": PARTS["minatar"]["minatar-r2d2"].experiment, "r2d2-memory": recipes.r2d2_memory()}
"""Experiments by name."""
PEER = Path(__file__).parent / "other_systems" / "_recurrent.py"
REQUIREMENTS = ("sb3-contrib==2.9.2", "stable-baselines3==2.9.2", "gymnasium==1.4.0", "torch==2.13.0")


def ppo_of(core: str, size: int) -> Experiment:
    """PPO with a core."""
    return Experiment(
        env=EnvConfig(id="Pendulum-v1", num_envs=ENVIRONMENTS, adapter="gymnasium"),
        model=StandardModelConfig(encoder="mlp", core=core, core_size=size),  # type: ignore[arg-type]
        algorithm=PPOConfig(rollout=STEPS, epochs=EPOCHS, minibatches=MINIBATCHES),
        scheme=Scheme(shards=4, acting_batch=ENVIRONMENTS),
    )


def measure(way: str, experiment: Experiment) -> list[float]:
    """Seconds of processor time of some iterations that learn."""
    algorithm, samples = experiment.algorithm, experiment.setup.samples_per_iteration
    before = algorithm.build().warm_iterations(samples) if isinstance(algorithm, OffPolicyConfig) else 0
    experiment = experiment.replace(
        total_steps=(before + WAYS[way] + 2) * samples, precision="fp32" if way == "fp32" else "portable"
    )
    torch.set_num_threads(1)
    begins: list[float] = []
    collect = Collector.collect

    def timed(self: Collector, *given: object, **named: object) -> object:
        begins.append(time.process_time())
        return collect(self, *given, **named)  # type: ignore[arg-type]

    Collector.collect = timed  # type: ignore[assignment, method-assign]
    if way == "replaced":
        Experiment.kernels = lambda *_: None  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(run=f"{folder}/run", display="none", tensorboard=False, check_env=False)
        train(experiment, "inline", options)
    return [b - a for a, b in itertools.pairwise(begins[before + 1 :])]


def row(command: list[str]) -> float:
    """The mean of what a process prints. The peer's iterations differ, since it pads sequences that episodes cut."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return statistics.mean(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="also measure RecurrentPPO, which has an LSTM alone")
    parser.add_argument("--r2d2", action="store_true", help="measure R2D2 instead")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        way, name, *size = given.one
        print(json.dumps(measure(way, ppo_of(name, int(size[0])) if size else R2D2[name])))
        return
    cores = [(core, str(size)) for size in given.sizes for core in given.cores]
    rows = {
        f"{way}, {' '.join(kind)}": [sys.executable, __file__, "--one", way, *kind]
        for kind in ([(name,) for name in R2D2] if given.r2d2 else cores)
        for way in given.ways
    }
    if given.peer:
        python = python_of("sb3-contrib", REQUIREMENTS, print)
        rows |= {f"sb3-contrib, lstm {size}": [str(python), str(PEER), str(size)] for size in given.sizes}
    found: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(given.rounds):
        for name, command in rows.items():
            found[name].append(1000 * row(command))
            print(f"{name}: {found[name][-1]:.0f} ms", flush=True)
    print("\n| | ms of processor time per iteration |\n|---|---|")
    for name, times in found.items():
        print(f"| {name} | {statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f}) |")


if __name__ == "__main__":
    main()
