"""HalfCheetah with small networks: each precision of lockstep beside Stable-Baselines3, in interleaved rounds.

    python benchmarks/small_networks.py ppo|sac|td3 [--rounds 3]

The settings are those of lockstep's recipes on both sides. Stable-Baselines3 steps gymnasium's environments in one
process, which is its fastest way here; it is installed on first use. SAC and TD3 take one gradient step per sample, so
that samples per second are gradient steps per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from other_systems.installed import python_of

from lockstep import RunOptions, recipes, train
from lockstep.experiment import Experiment

REQUIREMENTS = ("stable-baselines3==2.9.2", "gymnasium[mujoco]==1.4.0", "torch==2.13.0")
PRECISIONS, LAYOUTS = ("portable", "fp32"), ("inline", "processes:2")
_BEGIN = """
import sys, time, torch
from stable_baselines3 import PPO, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
torch.set_num_threads(int(sys.argv[1]))
def measure(agent, warm, steps):
    agent.learn(warm)
    begin = time.perf_counter()
    agent.learn(steps, reset_num_timesteps=False)
    print(steps / (time.perf_counter() - begin))
"""
_ON_POLICY = """
env = VecNormalize(make_vec_env("HalfCheetah-v4", n_envs=8))
agent = PPO("MlpPolicy", env, n_steps=256, batch_size=64, n_epochs=10, clip_range=0.2, ent_coef=0.0, device="cpu")
measure(agent, 2048, 12288)
"""
_OFF_POLICY = """
agent = NAME("MlpPolicy", "HalfCheetah-v4", learning_starts=200, train_freq=1, gradient_steps=1, batch_size=256,
    policy_kwargs={"net_arch": [256, 256]}, device="cpu")
measure(agent, 300, 600)
"""


class Case(NamedTuple):
    """What both sides train."""

    recipe: Callable[[str], Experiment]
    iterations: dict[str, int]
    """By precision: how many of lockstep's iterations are measured."""
    theirs: str


def _replaying(make: Callable[[], Experiment]) -> Callable[[str], Experiment]:
    """A recipe with a short warm-up."""

    def experiment(precision: str) -> Experiment:
        full = make()
        return full.replace(precision=precision, algorithm=replace(full.algorithm, warmup=256))

    return experiment


CASES = {
    "ppo": Case(
        lambda precision: recipes.ppo_mujoco().replace(precision=precision), {"portable": 12, "fp32": 4}, _ON_POLICY
    ),
    "sac": Case(_replaying(recipes.sac_mujoco), {"portable": 16, "fp32": 12}, _OFF_POLICY.replace("NAME", "SAC")),
    "td3": Case(_replaying(recipes.td3_mujoco), {"portable": 16, "fp32": 12}, _OFF_POLICY.replace("NAME", "TD3")),
}


def ours(case: Case, precision: str, layout: str) -> float:
    """lockstep's samples per second, the median over iterations that learn, except the first two."""
    base = case.recipe(precision)
    experiment = base.replace(total_steps=case.iterations[precision] * base.samples_per_iteration)
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(run=f"{folder}/run", display="none", tensorboard=False, check_env=False)
        train(experiment, layout, options)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "gradient_norm" in row]
    return statistics.median(row["speed/samples_per_second"] for row in learned[2:])


def theirs(case: Case, threads: int) -> float:
    """Stable-Baselines3's samples per second."""
    python = python_of("stable-baselines3-mujoco", REQUIREMENTS, print)
    command = [python, "-c", _BEGIN + case.theirs, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    case = CASES[given.case]
    found: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for precision in PRECISIONS:
            for layout in LAYOUTS:
                found.setdefault(f"lockstep, {precision}, {layout}", []).append(ours(case, precision, layout))
        for threads in (1, 2):
            found.setdefault(f"Stable-Baselines3, {threads} threads", []).append(theirs(case, threads))
    best = max(statistics.median(rates) for name, rates in found.items() if name.startswith("Stable"))
    for name, rates in found.items():
        rate = statistics.median(rates)
        print(f"{name}: {rate:,.0f} samples/s ({min(rates):,.0f} to {max(rates):,.0f}), {rate / best:.2f} of the peer")


if __name__ == "__main__":
    main()
