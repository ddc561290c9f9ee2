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

from lockstep.cli.common import parse
from lockstep.cli.recipe import load_recipe, recipe_and_flags
from lockstep.cli.train import TrainArguments
from lockstep.evaluation.scores import evaluate
from lockstep.evaluation.statistics import thinned
from lockstep.experiment import Experiment
from lockstep.reports.plots import plot
from lockstep.reports.runs import Run as RunData
from lockstep.run.folder import RunFolder

RESULTS = Path(__file__).parent / "learning"
_POINTS = 400
"""Points of a curve that are kept as data."""


@dataclass(frozen=True)
class Proof:
    """One row of the table in benchmarks/learning.md."""

    flags: str
    """Arguments of `lockstep train`, without the seed and the folder."""
    seeds: int
    episodes: int = 30
    """Episodes of the separate evaluation."""
    greedy: bool = False
    """Whether that takes the most likely actions, as scores of continuous control are published."""

    def experiment(self) -> Experiment:
        """What `lockstep train` makes of the flags."""
        recipe, flags = recipe_and_flags("train", self.flags.split())
        assert recipe is not None
        return parse(TrainArguments, f"train {recipe}", flags, TrainArguments(load_recipe(recipe))).experiment


_ATARI = "--env.protocol classic --scheme.shards 4 --scheme.acting-batch 16"
_CARTPOLE = "dqn-cartpole --precision fp32 --algorithm.anneal-learning-rate --total-steps 100k"
_ATOMS = "--model.returns categorical --model.v-min 0 --model.v-max 50"
_RAINBOW = (
    "--algorithm.double --algorithm.n-step 3 --model.dueling --model.noisy --algorithm.epsilon-start 0 "
    "--algorithm.epsilon-end 0 --algorithm.replay.prioritized --algorithm.replay.alpha 0.5 --algorithm.replay.beta 0.4"
)
_MINATAR = "dqn-minatar --precision fp32 --algorithm.epsilon-fraction 0.1 --total-steps 1M"
_PONG = (
    "--env.id Pong --env.num-envs 8 --scheme.shards 1 --algorithm.rollout 16 --algorithm.batch-size 64 "
    "--algorithm.n-step 3 --algorithm.warmup 10k --algorithm.target-period 500 --algorithm.replay.capacity 200k"
)
_PONG_FP32 = "--precision fp32 --env.id Pong --env.protocol classic --scheme.shards 1 --scheme.acting-batch 0"
_DISTRIBUTIONS = (
    f"{_PONG} --algorithm.updates 16 --algorithm.optimizer.eps 1e-6 --algorithm.epsilon-fraction 0.25 "
    "--checkpoint-every 500 --total-steps 600k"
)
_HALFCHEETAH = "--env.id HalfCheetah-v4 --scheme.shards 1 --total-steps 300k"
_REPEAT = "ppo-memory --env.id popgym.envs.repeat_previous:RepeatPreviousEasy --total-steps 1M"
"""POPGym's task to name the suit of the card four steps ago; needs `pip install popgym`."""
_ALONE = "--scheme.shards 1 --scheme.acting-batch 0"
"""Small networks are computed fastest in one piece."""
_BOTH_RATES = "--algorithm.learning-rate 1e-3 --algorithm.actor-learning-rate 1e-3"
_SHORT = "ppo-rnd-minigrid --env.options max_episode_steps=50"
_DOORKEY = "ppo-rnd-minigrid --env.id MiniGrid-DoorKey-8x8-v0 --total-steps 1.5M"
_HUNDREDFOLD = (
    "ppo-rnd-minigrid --env.id mixed/MiniGrid-Empty-8x8-v0+MiniGrid-LavaGapS5-v0@benchmarks/scaled_rewards.py:"
    "Hundredfold+MiniGrid-DoorKey-5x5-v0+MiniGrid-SimpleCrossingS9N1-v0 --env.num-envs 32 --algorithm.rnd.coef 0 "
    "--algorithm.entropy-coef 0.01 --total-steps 600k --env.options max_episode_steps=100 task_input=value"
)
_IMPALA = (
    f"impala-atari --env.id Pong {_ATARI} --env.num-envs 32 --algorithm.rollout 64 --algorithm.minibatches 8 "
    "--algorithm.epochs 2 --algorithm.optimizer.name adam --algorithm.optimizer.eps 1e-5 "
    "--algorithm.learning-rate 4e-4 --algorithm.entropy-coef 0.002"
)
PROOFS = {
    "cartpole": Proof("ppo-cartpole --precision fp32", 5),
    "cartpole-dqn": Proof(_CARTPOLE, 1),
    "cartpole-c51": Proof(f"{_CARTPOLE} {_ATOMS}", 1),
    "cartpole-qrdqn": Proof(f"{_CARTPOLE} --model.returns quantiles --model.numbers 51", 1),
    "cartpole-iqn": Proof(
        f"{_CARTPOLE} --model.returns implicit --model.numbers 32 --algorithm.samples 8 --algorithm.target-samples 8", 1
    ),
    "cartpole-rainbow": Proof(f"{_CARTPOLE} {_ATOMS} {_RAINBOW} --model.stream-size 64", 1),
    "cartpole-pqn": Proof("pqn-cartpole --precision fp32", 3),
    "minatar-dqn": Proof(_MINATAR, 1),
    "minatar-c51": Proof(f"{_MINATAR} --model.returns categorical", 1),
    "minatar-qrdqn": Proof(f"{_MINATAR} --model.returns quantiles --model.numbers 51", 1),
    "minatar-iqn": Proof(
        f"{_MINATAR} --model.returns implicit --model.numbers 32 --algorithm.samples 8 --algorithm.target-samples 8", 1
    ),
    "minatar-rainbow": Proof(f"{_MINATAR} --model.returns categorical {_RAINBOW} --model.stream-size 128", 1),
    "minatar-pqn": Proof("pqn-minatar --precision fp32 --total-steps 1M", 3),
    "minatar-ppo": Proof(
        "ppo-minatar --precision fp32 --algorithm.rollout 32 --algorithm.minibatches 4 --algorithm.learning-rate 1e-3 "
        "--total-steps 1M",
        1,
    ),
    "memory-lstm": Proof("ppo-memory --precision fp32", 3),
    "memory-gru": Proof("ppo-memory --precision fp32 --model.core gru", 3),
    "memory-mingru": Proof("ppo-memory --precision fp32 --model.core mingru", 3),
    "memory-transformer": Proof("ppo-memory --precision fp32 --model.core transformer", 3),
    "memory-none": Proof("ppo-memory --precision fp32 --model.core none", 1),
    "repeat-lstm": Proof(f"{_REPEAT} --precision portable", 1),
    "repeat-gru": Proof(f"{_REPEAT} --precision portable --model.core gru", 1),
    "repeat-mingru": Proof(f"{_REPEAT} --precision fp32 --model.core mingru", 1),
    "repeat-transformer": Proof(f"{_REPEAT} --precision fp32 --model.core transformer --model.core-memory 8", 1),
    "repeat-none": Proof(f"{_REPEAT} --precision portable --model.core none", 1),
    "memory-r2d2": Proof("r2d2-memory --precision fp32", 1),
    "memory-r2d2-none": Proof("r2d2-memory --precision fp32 --model.core none", 1),
    "memory-dqn": Proof("dqn-cartpole --precision fp32 --env.id lockstep/Memory-v0 --total-steps 30k", 1),
    "breakout-ppo": Proof(
        "ppo-atari --env.id Breakout --env.protocol classic --scheme.shards 1 --env.num-envs 16 "
        "--algorithm.minibatches 8 --algorithm.learning-rate 1e-3 --total-steps 2.5M",
        1,
    ),
    "breakout-ppo-gpu": Proof(
        "ppo-atari --env.id Breakout --env.protocol baselines --algorithm.rollout 32 --algorithm.learning-rate 1e-3 "
        "--scheme.shards 4 --scheme.lag 1 --total-steps 7.5M",
        1,
        episodes=100,
    ),
    "pong-ppo": Proof(
        f"ppo-atari --env.id Pong {_ATARI} --env.num-envs 16 --algorithm.minibatches 8 "
        "--algorithm.learning-rate 5e-4 --total-steps 2M",
        1,
    ),
    "pong-impala": Proof(f"{_IMPALA} --total-steps 6M", 1),
    "pong-impala-async": Proof(f"{_IMPALA} --scheme.lag async --scheme.max-lag 2 --total-steps 6M", 1),
    "pong-dqn": Proof(
        f"dqn-atari --precision bf16 {_PONG} --algorithm.updates 16 --algorithm.learning-rate 2e-4 --total-steps 1.5M",
        1,
    ),
    "pong-rainbow": Proof(
        f"rainbow-atari --precision bf16 {_PONG} --algorithm.updates 16 --algorithm.learning-rate 1e-4 "
        "--algorithm.optimizer.eps 1e-6 --total-steps 1.5M",
        1,
    ),
    "pong-a2c": Proof(f"a2c-atari {_PONG_FP32} --env.num-envs 16 --checkpoint-every 2000 --total-steps 4M", 1),
    "pong-appo": Proof(
        f"appo-atari {_PONG_FP32} --env.num-envs 32 --algorithm.epochs 2 --algorithm.minibatches 4 "
        "--algorithm.learning-rate 4e-4 --model.core-size 256 --checkpoint-every 200 --total-steps 3M",
        1,
    ),
    "pong-c51": Proof(f"c51-atari {_DISTRIBUTIONS} --algorithm.learning-rate 2e-4", 1),
    "pong-qrdqn": Proof(f"qrdqn-atari {_DISTRIBUTIONS} --algorithm.learning-rate 1e-4", 1),
    "pong-iqn": Proof(
        f"iqn-atari {_DISTRIBUTIONS} --algorithm.learning-rate 1e-4 --algorithm.samples 8 --algorithm.target-samples 8",
        1,
    ),
    "pong-r2d2": Proof(
        "r2d2-atari --precision portable --env.id Pong --env.protocol classic --env.num-envs 16 --scheme.shards 1 "
        "--scheme.acting-batch 16 --model.core-size 256 --model.stream-size 256 --algorithm.rollout 20 "
        "--algorithm.batch-size 16 --algorithm.updates 4 --algorithm.burn-in 10 --algorithm.unroll 40 "
        "--algorithm.warmup 20k --algorithm.learning-rate 2e-4 --algorithm.optimizer.eps 1e-6 "
        "--algorithm.target-period 500 --algorithm.replay.capacity 200k --checkpoint-every 200 --total-steps 600k",
        1,
    ),
    "pong-apex": Proof(
        "apex-atari --precision portable --env.id Pong --scheme.shards 1 --scheme.acting-batch 64 "
        "--algorithm.batch-size 64 --algorithm.updates 80 --algorithm.warmup 20k --algorithm.learning-rate 2e-4 "
        "--algorithm.optimizer.name adam --algorithm.optimizer.eps 1e-5 --algorithm.target-period 500 "
        "--algorithm.replay.capacity 200k --checkpoint-every 50 --total-steps 1M",
        1,
    ),
    "battle": Proof(
        "appo-vizdoom --env.num-envs 32 --env.options actions=compact --scheme.acting-batch 32 --algorithm.epochs 4 "
        "--algorithm.minibatches 4 --algorithm.learning-rate 2.5e-4 --algorithm.clip 0.2 --algorithm.value-coef 0.5 "
        "--algorithm.value-clip 0 --total-steps 4M",
        1,
    ),
    "pendulum-sac": Proof(
        "sac-mujoco --precision fp32 --env.id Pendulum-v1 --algorithm.warmup 1000 --total-steps 12k", 1
    ),
    "pendulum-td3": Proof(
        "td3-mujoco --precision fp32 --env.id Pendulum-v1 --algorithm.warmup 1000 --total-steps 12k", 1
    ),
    "pendulum-ddpg": Proof(
        "ddpg-mujoco --precision fp32 --env.id Pendulum-v1 --algorithm.warmup 1000 --total-steps 12k", 1
    ),
    "pendulum-mpo": Proof(
        "mpo-mujoco --precision fp32 --env.id Pendulum-v1 --algorithm.updates 64 --algorithm.learning-rate 1e-3 "
        "--algorithm.actor-learning-rate 1e-3 --total-steps 20k",
        1,
    ),
    "pendulum-crossq": Proof(
        "crossq-mujoco --env.id Pendulum-v1 --model.critic-sizes 256 256 --total-steps 40k",
        3,
        episodes=100,
        greedy=True,
    ),
    "hidden-sac": Proof(f"sac-hidden {_ALONE}", 3, greedy=True),
    "hidden-sac-none": Proof(
        f"sac-hidden {_ALONE} --model.core none --model.no-previous-action-reward", 3, greedy=True
    ),
    "hidden-td3": Proof(f"td3-hidden {_ALONE}", 3),
    "halfcheetah-sac": Proof(
        f"sac-mujoco --precision fp32 {_HALFCHEETAH} {_BOTH_RATES} --algorithm.no-learn-temperature "
        "--algorithm.initial-temperature 0.2",
        1,
        greedy=True,
    ),
    "halfcheetah-td3": Proof(f"td3-mujoco --precision fp32 {_HALFCHEETAH}", 1),
    "halfcheetah-ddpg": Proof(f"ddpg-mujoco --precision fp32 {_HALFCHEETAH} {_BOTH_RATES}", 1),
    "halfcheetah-mpo": Proof(
        f"mpo-mujoco --precision fp32 {_HALFCHEETAH} --model.initial-std 0.3 --model.hidden-sizes 256 256 "
        "--algorithm.updates 32 --algorithm.n-step 5 --algorithm.epsilon-mean 0.0025",
        1,
        greedy=True,
    ),
    "bitflip-her": Proof("her-bitflip --precision fp32 --total-steps 100k", 1, episodes=100),
    "bitflip-dqn": Proof(
        "her-bitflip --precision fp32 --algorithm.replay.hindsight 0 --total-steps 100k", 1, episodes=100
    ),
    "fetch-her": Proof("her-fetch", 1, episodes=100),
    "fetch-ddpg": Proof("her-fetch --algorithm.replay.hindsight 0", 1, episodes=100),
    "pendulum-mpc": Proof("mpc-pendulum", 1),
    "empty-rnd": Proof("ppo-rnd-minigrid", 1),
    "empty-ppo": Proof("ppo-rnd-minigrid --algorithm.rnd.coef 0", 1),
    "minigrid-four": Proof(
        "ppo-rnd-minigrid --env.id mixed/MiniGrid-Empty-8x8-v0+MiniGrid-LavaGapS5-v0+MiniGrid-DoorKey-5x5-v0"
        "+MiniGrid-SimpleCrossingS9N1-v0 --env.num-envs 32 --total-steps 600k",
        3,
        episodes=200,
    ),
    "minigrid-hundredfold": Proof(_HUNDREDFOLD, 3, episodes=200),
    "minigrid-hundredfold-popart": Proof(
        f"{_HUNDREDFOLD} --model.popart.rate 0.01 --model.popart.smallest 0.1", 3, episodes=200
    ),
    "short-rnd": Proof(f"{_SHORT} --total-steps 400k", 1),
    "short-ppo": Proof(f"{_SHORT} --algorithm.rnd.coef 0 --total-steps 1M", 1),
    "doorkey-rnd": Proof(_DOORKEY, 1),
    "doorkey-ppo": Proof(f"{_DOORKEY} --algorithm.rnd.coef 0", 1),
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
        if code := subprocess.run(command).returncode:
            sys.exit(code)


def report(name: str, root: Path) -> None:
    """Evaluate what is there, and write picture and numbers."""
    RESULTS.mkdir(exist_ok=True)
    runs = [folder for folder in folders(name, root) if (folder / "metrics.jsonl").is_file()]
    plot(runs, RESULTS / f"{name}.png", x="samples")
    rows = []
    for folder in runs:
        samples, scores = RunData.read(folder).curve("samples", "score/mean")
        with open(RESULTS / f"{folder.name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["samples", "score_mean_of_last_100_episodes"])
            points = zip(*thinned((samples, scores), _POINTS), strict=True)
            writer.writerows((int(taken), float(score)) for taken, score in points)
        evaluation = evaluate(folder, episodes=PROOFS[name].episodes, greedy=PROOFS[name].greedy)
        rows.append(
            {
                "run": folder.name,
                "samples": int(samples[-1]),
                "training_score": float(scores[-1]),
                "evaluation": evaluation.to_json(),
                "identity": RunFolder.open(folder).experiment().identity(),
            }
        )
        print(f"{folder.name}: {samples[-1]:,.0f} samples, training {scores[-1]:.2f}, evaluation {evaluation}")
    (RESULTS / f"{name}.json").write_text(json.dumps({"flags": PROOFS[name].flags, "runs": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("name", choices=list(PROOFS))
    parser.add_argument("--runs", type=Path, default=Path("runs/proof"))
    parser.add_argument("--layout", default="inline", help="benchmarks/learning.md names those of other rows")
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments.name, arguments.runs, arguments.layout)
    else:
        report(arguments.name, arguments.runs)


if __name__ == "__main__":
    main()
