"""PPO on HalfCheetah with small networks: each precision of lockstep beside Stable-Baselines3, in interleaved rounds.

    python benchmarks/halfcheetah.py [--rounds 3]

The settings are those of the recipe ppo-mujoco on both sides. Stable-Baselines3 steps gymnasium's environments in one
process, which is its fastest way here; it is installed on first use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from other_systems.installed import python_of

from lockstep import RunOptions, recipes, train

REQUIREMENTS = ("stable-baselines3==2.9.2", "gymnasium[mujoco]==1.4.0", "torch==2.13.0")
OURS = [("portable", "inline", 12), ("portable", "processes:2", 12), ("fp32", "inline", 4), ("fp32", "processes:2", 4)]
"""Precision, layout, iterations."""
THEIRS = """
import sys, time, torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
torch.set_num_threads(int(sys.argv[1]))
env = VecNormalize(make_vec_env("HalfCheetah-v4", n_envs=8))
agent = PPO("MlpPolicy", env, n_steps=256, batch_size=64, n_epochs=10, clip_range=0.2, ent_coef=0.0, device="cpu")
agent.learn(2048)
begin = time.perf_counter()
agent.learn(12288)
print(12288 / (time.perf_counter() - begin))
"""


def ours(precision: str, layout: str, iterations: int) -> float:
    """lockstep's samples per second, the median over all iterations but the first."""
    base = recipes.ppo_mujoco("HalfCheetah-v4")
    experiment = base.replace(precision=precision, total_steps=iterations * base.samples_per_iteration)
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(run=f"{folder}/run", display="none", tensorboard=False, check_env=False)
        train(experiment, layout, options)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["speed/samples_per_second"] for row in rows[1:])


def theirs(threads: int) -> float:
    """Stable-Baselines3's samples per second."""
    python = python_of("stable-baselines3-mujoco", REQUIREMENTS, print)
    done = subprocess.run([python, "-c", THEIRS, str(threads)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    found: dict[str, list[float]] = {}
    for _ in range(parser.parse_args().rounds):
        for case in OURS:
            found.setdefault(f"lockstep, {case[0]}, {case[1]}", []).append(ours(*case))
        for threads in (1, 2):
            found.setdefault(f"Stable-Baselines3, {threads} threads", []).append(theirs(threads))
    best = max(statistics.median(rates) for name, rates in found.items() if name.startswith("Stable"))
    for name, rates in found.items():
        rate = statistics.median(rates)
        print(f"{name}: {rate:,.0f} samples/s ({min(rates):,.0f} to {max(rates):,.0f}), {rate / best:.2f} of the peer")


if __name__ == "__main__":
    main()
