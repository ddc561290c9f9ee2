"""The runs that show that the algorithms learn what they should.

    python benchmarks/learning.py run cartpole        # train all seeds of a proof, one after another
    python benchmarks/learning.py report cartpole     # evaluate them; write curve, table row and data

Runs are kept below runs/proof; an interrupted one is resumed. Results go to benchmarks/learning/.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.evaluation.plots import plot
from lockstep.evaluation.scores import evaluate
from lockstep.run import RunFolder

RESULTS = Path(__file__).parent / "learning"
_POINTS = 400
"""Points of a curve that are kept as data."""


@dataclass(frozen=True)
class Proof:
    """One row of the table in benchmarks/README.md."""

    flags: str
    """Arguments of `lockstep train`, without the seed and the folder."""
    seeds: int
    episodes: int = 30
    """Episodes of the separate evaluation."""


_ATARI = "--env.protocol classic --scheme.shards 4 --scheme.acting-batch 16"
_IMPALA = (
    f"impala-atari --env.id Pong {_ATARI} --env.num-envs 32 --algorithm.rollout 64 --algorithm.minibatches 8 "
    "--algorithm.epochs 2 --algorithm.optimizer.name adam --algorithm.optimizer.eps 1e-5 "
    "--algorithm.learning-rate 4e-4 --algorithm.entropy-coef 0.002"
)
PROOFS = {
    "cartpole": Proof("ppo-cartpole", 5),
    "memory-lstm": Proof("ppo-memory", 3),
    "memory-gru": Proof("ppo-memory --model.core gru", 3),
    "memory-none": Proof("ppo-memory --model.core none", 1),
    "memory-r2d2": Proof("r2d2-memory", 1),
    "memory-r2d2-none": Proof("r2d2-memory --model.core none", 1),
    "memory-dqn": Proof("dqn-cartpole --env.id lockstep/Memory-v0 --total-steps 30k", 1),
    "cartpole-iqn": Proof(
        "dqn-cartpole --model.returns implicit --model.numbers 32 --algorithm.samples 8 --algorithm.target-samples 8 "
        "--total-steps 50k",
        1,
    ),
    "breakout-ppo": Proof(
        f"ppo-atari --env.id Breakout {_ATARI} --env.num-envs 16 --algorithm.minibatches 8 --total-steps 2.5M", 1
    ),
    "pong-ppo": Proof(
        f"ppo-atari --env.id Pong {_ATARI} --env.num-envs 16 --algorithm.minibatches 8 "
        "--algorithm.learning-rate 5e-4 --total-steps 2M",
        1,
    ),
    "pong-impala": Proof(f"{_IMPALA} --total-steps 6M", 1),
    "pong-impala-async": Proof(f"{_IMPALA} --scheme.lag async --scheme.max-lag 2 --total-steps 6M", 1),
    "halfcheetah-ppo": Proof("ppo-mujoco --env.id HalfCheetah-v4 --total-steps 1M", 1),
    "pendulum-sac": Proof("sac-mujoco --env.id Pendulum-v1 --algorithm.warmup 1000 --total-steps 12k", 1),
    "pendulum-td3": Proof("td3-mujoco --env.id Pendulum-v1 --algorithm.warmup 1000 --total-steps 12k", 1),
    "pendulum-ddpg": Proof("ddpg-mujoco --env.id Pendulum-v1 --algorithm.warmup 1000 --total-steps 12k", 1),
    "pendulum-mpo": Proof(
        "mpo-mujoco --env.id Pendulum-v1 --algorithm.updates 64 --algorithm.learning-rate 1e-3 "
        "--algorithm.actor-learning-rate 1e-3 --total-steps 20k",
        1,
    ),
    "halfcheetah-sac": Proof("sac-mujoco --env.id HalfCheetah-v4 --total-steps 300k", 1),
    "halfcheetah-td3": Proof("td3-mujoco --env.id HalfCheetah-v4 --total-steps 300k", 1),
    "halfcheetah-ddpg": Proof("ddpg-mujoco --env.id HalfCheetah-v4 --total-steps 300k", 1),
    "halfcheetah-mpo": Proof("mpo-mujoco --env.id HalfCheetah-v4 --algorithm.updates 64 --total-steps 300k", 1),
    "hopper-ppo": Proof("ppo-mujoco --env.id Hopper-v4 --total-steps 1M", 1),
}


def folders(name: str, root: Path) -> list[Path]:
    return [root / f"{name}-s{seed}" for seed in range(1, PROOFS[name].seeds + 1)]


def run(name: str, root: Path, layout: str) -> None:
    """Train every seed that is not finished."""
    for seed, folder in enumerate(folders(name, root), start=1):
        cli = [sys.executable, "-m", "lockstep"]
        if (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir()):
            command = [*cli, "resume", str(folder), "--layout", layout]
        else:
            command = [*cli, "train", *PROOFS[name].flags.split(), "--seed", str(seed)]
            command += ["--layout", layout, "--run", str(folder)]
        subprocess.run(command, check=True)


def report(name: str, root: Path) -> None:
    """Evaluate what is there, and write picture and numbers."""
    RESULTS.mkdir(exist_ok=True)
    runs = [folder for folder in folders(name, root) if (folder / "metrics.jsonl").is_file()]
    plot(runs, RESULTS / f"{name}.png", x="samples")
    rows = []
    for folder in runs:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        scored = [(line["samples"], line["score/mean"]) for line in lines if line.get("score/mean") is not None]
        with open(RESULTS / f"{folder.name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["samples", "score_mean_of_last_100_episodes"])
            writer.writerows(scored[:: max(1, len(scored) // _POINTS)])
        evaluation = evaluate(folder, episodes=PROOFS[name].episodes)
        rows.append(
            {
                "run": folder.name,
                "samples": scored[-1][0],
                "training_score": scored[-1][1],
                "evaluation": evaluation.to_json(),
                "identity": RunFolder.open(folder).experiment().identity(),
            }
        )
        print(f"{folder.name}: {scored[-1][0]:,} samples, training {scored[-1][1]:.2f}, evaluation {evaluation}")
    (RESULTS / f"{name}.json").write_text(json.dumps({"flags": PROOFS[name].flags, "runs": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("name", choices=list(PROOFS))
    parser.add_argument("--runs", type=Path, default=Path("runs/proof"))
    parser.add_argument("--layout", default="inline", help="cpu:a1-l1 for pong-impala-async")
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments.name, arguments.runs, arguments.layout)
    else:
        report(arguments.name, arguments.runs)


if __name__ == "__main__":
    main()
