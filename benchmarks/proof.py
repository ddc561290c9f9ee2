"""The many-seed proof, as one durable queue.

    lockstep sweep runs/seeds benchmarks/proof.py:runs      # trains what is not there yet; goes on after any end
    python benchmarks/proof.py report --runs runs/seeds     # evaluates what has ended; writes into benchmarks/seeds/

A part of it: benchmarks/proof.py:minatar, :mujoco or :atari. Seeds vary slowest within a part, so that a queue that
is stopped early has as many of them for every algorithm.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import RunOptions, recipes
from lockstep.algorithms import A2CConfig, APPOConfig, IMPALAConfig, PPOConfig, R2D2Config
from lockstep.algorithms.base import OptimizerConfig
from lockstep.algorithms.dqn import DQNConfig
from lockstep.algorithms.qpg import QPGConfig
from lockstep.cli.common import parse
from lockstep.cli.train import TrainArguments, load_recipe, recipe_and_flags
from lockstep.evaluation.plots import plot
from lockstep.evaluation.scores import evaluate
from lockstep.evaluation.statistics import estimate, iqm, readable
from lockstep.experiment import Experiment
from lockstep.models import QModelConfig
from lockstep.scheme import Scheme
from lockstep.settings import load_object
from lockstep.sweep import Run
from lockstep.sweep.queue import Queue

RESULTS = Path(__file__).parent / "seeds"
EPISODES = 30
"""Of the evaluation of each final policy."""
_ALONE = Scheme(shards=1)
"""Small networks are computed fastest in one piece."""


@dataclass(frozen=True)
class Proof:
    """One row of the table: an algorithm on a task."""

    label: str
    experiment: Experiment
    """Of the first seed."""
    seeds: int
    greedy: bool = False
    """Whether the evaluation takes the most likely actions, as scores of continuous control are published."""
    published: str = "—"

    def run(self, name: str, seed: int) -> Run:
        return Run(self.experiment.replace(seed=seed), options=_KEPT, label=name)


_KEPT = RunOptions(checkpoint_every=100, tensorboard=False)


def _minatar() -> dict[str, Proof]:
    """Ten algorithms on MinAtar's Breakout; only what is no default of a recipe or of its algorithm was chosen here."""
    many = recipes.ppo_minatar().replace(scheme=_ALONE, total_steps=1_000_000)
    few = many.replace(env=replace(many.env, num_envs=16))
    ppo = few.replace(algorithm=replace(_ppo(few), rollout=64, minibatches=8))
    behind = Scheme(shards=1, lag=1)
    dqn = recipes.dqn_minatar().replace(scheme=_ALONE, total_steps=300_000)
    learned = replace(_config(dqn), epsilon_fraction=0.2)
    dqn = dqn.replace(algorithm=learned)
    rainbow = replace(
        learned,
        double=True,
        n_step=3,
        epsilon_start=0.0,
        epsilon_end=0.0,
        replay=replace(learned.replay, prioritized=True, alpha=0.5, beta=0.4),
    )
    recurrent = R2D2Config(
        rollout=16,
        batch_size=32,
        updates=4,
        warmup=1_000,
        burn_in=4,
        unroll=16,
        n_step=3,
        learning_rate=5e-4,
        optimizer=OptimizerConfig(eps=1e-5),
        discount=0.99,
        target_period=62,
        replay=replace(learned.replay, prioritized=True, alpha=0.6),
    )

    def network(**settings: Any) -> QModelConfig:
        return QModelConfig(encoder="minatar", **settings)

    experiments = {
        "PPO": ppo,
        "IMPALA": few.replace(
            algorithm=IMPALAConfig(rollout=32, minibatches=4, learning_rate=1e-3, optimizer=OptimizerConfig("adam")),
            scheme=behind,
        ),
        "APPO": many.replace(
            algorithm=APPOConfig(rollout=32, epochs=4, minibatches=4, learning_rate=1e-3, clip=0.2), scheme=behind
        ),
        "A2C": few.replace(algorithm=A2CConfig(rollout=8, learning_rate=2e-3)),
        "DQN": dqn,
        "C51": dqn.replace(model=network(returns="categorical")),
        "QR-DQN": dqn.replace(model=network(returns="quantiles", numbers=51)),
        "IQN": dqn.replace(
            model=network(returns="implicit", numbers=32),
            algorithm=replace(learned, samples=8, target_samples=8),
        ),
        "Rainbow": dqn.replace(
            model=network(returns="categorical", dueling=True, noisy=True, stream_size=128), algorithm=rainbow
        ),
        "R2D2": dqn.replace(
            env=replace(dqn.env, num_envs=16), model=network(core="lstm", core_size=128), algorithm=recurrent
        ),
    }
    return {f"minatar-{_short(label)}": Proof(label, each, 10) for label, each in experiments.items()}


def _mujoco() -> dict[str, Proof]:
    """Five algorithms on three tasks. Tianshou's settings where it has the algorithm; the published figures are its own
    ten seeds' after 300,000 steps, or after 1M for PPO."""
    tianshou = {
        ("DDPG", "HalfCheetah-v4"): "9137 ± 784",
        ("TD3", "HalfCheetah-v4"): "7546 ± 717",
        ("SAC", "HalfCheetah-v4"): "9059 ± 1051",
    }
    proofs = {}
    for task in ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"):
        experiments = {"PPO": recipes.ppo_mujoco(task).replace(scheme=_ALONE)}
        for recipe in (recipes.ddpg_mujoco, recipes.td3_mujoco, recipes.sac_mujoco, recipes.mpo_mujoco):
            base = recipe()
            algorithm = _policy_gradient(base)
            if algorithm.name in ("ddpg", "sac"):
                algorithm = replace(algorithm, learning_rate=1e-3, actor_learning_rate=1e-3)
            if algorithm.name == "sac":
                algorithm = replace(algorithm, learn_temperature=False, initial_temperature=0.2)
            if algorithm.name == "mpo":
                algorithm = replace(algorithm, updates=32, learning_rate=3e-4, actor_learning_rate=3e-4)
                base = base.replace(model=replace(base.model, initial_std=0.3))
            experiments[algorithm.name.upper()] = base.replace(
                env=replace(base.env, id=task), algorithm=algorithm, scheme=_ALONE, total_steps=300_000
            )
        for label, each in experiments.items():
            name = f"{task.removesuffix('-v4').lower()}-{label.lower()}"
            greedy = label in ("SAC", "MPO")
            proofs[name] = Proof(label, each, 3, greedy, tianshou.get((label, task), "—"))
    return proofs


def _atari() -> dict[str, Proof]:
    """The proofs of learning.py with more seeds, and Procgen with levels that training does not see."""
    published = {
        "pong-ppo": "20.36 ± 0.20 at 10M (CleanRL)",
        "pong-impala": "19.09 ± 0.34 at 50M, Machado protocol (Cleanba)",
        "pong-dqn": "20.25 ± 0.41 at 10M (CleanRL)",
        "breakout-ppo": "414.7 ± 28.1 at 10M (CleanRL)",
    }
    procgen = recipes.ppo_procgen()
    levels = replace(procgen.env, num_levels=200)
    return {
        **{
            name: Proof(name.split("-")[1].upper(), _flags(name), 3, published=known)
            for name, known in published.items()
        },
        "starpilot-ppo": Proof("PPO", procgen.replace(env=levels, total_steps=2_000_000), 1),
    }


def _flags(name: str) -> Experiment:
    """What `lockstep train` would make of a proof's flags."""
    proofs = load_object(f"{Path(__file__).parent / 'learning.py'}:PROOFS")
    recipe, flags = recipe_and_flags("train", proofs[name].flags.split())
    assert recipe is not None
    return parse(TrainArguments, f"train {recipe}", flags, TrainArguments(load_recipe(recipe))).experiment


def _ppo(experiment: Experiment) -> PPOConfig:
    assert isinstance(experiment.algorithm, PPOConfig)
    return experiment.algorithm


def _config(experiment: Experiment) -> DQNConfig:
    assert isinstance(experiment.algorithm, DQNConfig)
    return experiment.algorithm


def _policy_gradient(experiment: Experiment) -> Any:
    assert isinstance(experiment.algorithm, QPGConfig)
    return experiment.algorithm


def _short(label: str) -> str:
    return label.lower().replace("-", "")


PARTS = {"minatar": _minatar(), "mujoco": _mujoco(), "atari": _atari()}


def _queued(part: str) -> list[Run]:
    proofs = PARTS[part]
    seeds = range(1, 1 + max(proof.seeds for proof in proofs.values()))
    return [proof.run(name, seed) for seed in seeds for name, proof in proofs.items() if seed <= proof.seeds]


def minatar() -> list[Run]:
    return _queued("minatar")


def mujoco() -> list[Run]:
    return _queued("mujoco")


def atari() -> list[Run]:
    return _queued("atari")


def runs() -> list[Run]:
    return [run for part in PARTS for run in _queued(part)]


def report(root: Path) -> None:
    """Evaluate the runs that have ended; write a table, numbers and pictures of each part."""
    queue = Queue.open(root)
    RESULTS.mkdir(exist_ok=True)
    for part, proofs in PARTS.items():
        rows, drawn = [], []
        for name, proof in proofs.items():
            ended = [run for seed in range(1, proof.seeds + 1) if _ended(queue, run := proof.run(name, seed))]
            if not ended:
                continue
            folders = [queue.run(run.name) for run in ended]
            drawn += folders
            plot(folders, RESULTS / f"{name}.png")
            scores = _scores(name, proof, queue, ended)
            rows.append(_row(name, proof, scores))
            print(rows[-1])
        if rows:
            plot(drawn, RESULTS / f"{part}.png")
            (RESULTS / f"{part}.md").write_text("\n".join([*_HEAD, *rows]) + "\n")


_HEAD = (
    "| NAME | algorithm | steps | seeds | training (95% interval) | evaluation (95% interval) | range | published |",
    "|---|---|---|---|---|---|---|---|",
)


def _ended(queue: Queue, run: Run) -> bool:
    outcome = queue.outcome(run.name)
    return outcome is not None and outcome.state == "done"


def _scores(name: str, proof: Proof, queue: Queue, ended: list[Run]) -> list[dict[str, Any]]:
    """Of every seed, from the file where it was evaluated before if its digest is the same."""
    path = RESULTS / f"{name}.json"
    known = {each["digest"]: each for each in json.loads(path.read_text())["runs"]} if path.is_file() else {}
    found = []
    for run in ended:
        outcome = queue.outcome(run.name)
        assert outcome is not None
        if outcome.digest not in known:
            evaluation = evaluate(queue.run(run.name), episodes=EPISODES, greedy=proof.greedy)
            known[outcome.digest] = {
                "run": run.name,
                "seed": run.experiment.seed,
                "digest": outcome.digest,
                "training": outcome.score,
                "evaluation": evaluation.mean,
                "scores": list(evaluation.scores),
                "protocol": evaluation.protocol,
            }
        found.append(known[outcome.digest])
    path.write_text(json.dumps({"runs": found}, indent=1) + "\n")
    return found


def _row(name: str, proof: Proof, scores: list[dict[str, Any]]) -> str:
    training, final = (np.array([each[key] for each in scores]) for key in ("training", "evaluation"))
    steps = proof.experiment.total_steps
    cells = [
        f"`{name}`",
        proof.label,
        f"{steps / 1e6:g}M" if steps >= 1_000_000 else f"{steps // 1000}k",
        str(len(scores)),
        str(estimate(iqm, [training])),
        str(estimate(iqm, [final])),
        f"{readable(final.min())} to {readable(final.max())}",
        proof.published,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["report"])
    parser.add_argument("--runs", type=Path, default=Path("runs/seeds"))
    report(parser.parse_args().runs)


if __name__ == "__main__":
    main()
