"""One agent under every preset: what each scheme costs in score, and gains in speed.

    python benchmarks/presets.py run ppo     # PPO on CartPole; writes benchmarks/presets/ppo.json and .md
    python benchmarks/presets.py run sac     # SAC on MuJoCo's InvertedPendulum

Every preset that suits the agent, with as many processes as it has by itself (DD-PPO with four, of which three cut the
fourth), three seeds; finished runs are kept below runs/presets and not repeated. Policy lag (PL)
and gradient asynchrony (GA) are those of the PyTorchRL paper (arXiv:2007.02622): gradient steps between the parameters
that acted, or that a gradient was computed with, and those that learned.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lockstep
from lockstep import recipes
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.evaluation.scores import evaluate
from lockstep.experiment import Experiment
from lockstep.recipes.presets import PRESETS, ddppo
from lockstep.run.folder import RunFolder

RESULTS = Path(__file__).parent / "presets"
EPISODES = 30


def ppo() -> Experiment:
    return recipes.ppo_cartpole().replace(total_steps=100_000)


def sac() -> Experiment:
    full = recipes.sac_mujoco()
    algorithm = replace(
        full.algorithm,
        batch_size=128,
        warmup=1000,
        learning_rate=1e-3,
        actor_learning_rate=1e-3,
        temperature_learning_rate=1e-3,
    )
    return full.replace(
        env=replace(full.env, id="InvertedPendulum-v4"),
        model=replace(full.model, hidden_sizes=(64, 64)),
        algorithm=algorithm,
        scheme=replace(full.scheme, shards=2),
        total_steps=16_000,
    )


AGENTS: dict[str, Callable[[], Experiment]] = {"ppo": ppo, "sac": sac}
LEFT_OUT = {"ppo": "sync", "a2c": "sync", "r2d2": "apex"}
"""Further names of the same, or for other agents."""


def one(agent: str, preset: str, seed: int, runs: Path) -> dict[str, float] | None:
    """A run's score, speed and lags; None where the preset does not suit the agent."""
    try:
        start = AGENTS[agent]()
        experiment, layout = ddppo(start, workers=4) if preset == "ddppo" else PRESETS[preset](start)
    except SettingsError as error:
        print(f"{agent} {preset}: {error}")
        return None
    path = runs / f"{agent}-{preset}-s{seed}"
    if not (path / "ended").exists():
        try:
            options = RunOptions(run=str(path), display="none", tensorboard=False)
            if path.exists():
                lockstep.resume(path, layout, options)
            else:
                lockstep.train(experiment.replace(seed=seed), layout, options)
            (path / "ended").touch()
        except SettingsError as error:
            print(f"{agent} {preset}: {error}")
            return None
    lines = [json.loads(line) for line in RunFolder.open(path).metrics.read_text().splitlines()]
    learned = [line for line in lines if "lag/gradient_asynchrony" in line][len(lines) // 10 :]  # after the beginning

    def mean(name: str) -> float:
        return statistics.fmean(line.get(name, 0.0) for line in learned)

    return {
        "score": evaluate(path, episodes=EPISODES).mean,
        "samples_per_second": statistics.median(line["speed/samples_per_second"] for line in learned),
        "policy_versions": mean("lag/policy_versions"),
        "policy_lag": mean("lag/gradient_steps"),
        "gradient_asynchrony": mean("lag/gradient_asynchrony"),
        "kept": statistics.fmean(line.get("lag/kept", 1.0) for line in learned),
    }


def run(agent: str, seeds: int, runs: Path) -> None:
    """All presets in turn, seed after seed, and the table."""
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(1, seeds + 1):
        for preset in PRESETS:
            if preset not in LEFT_OUT and (result := one(agent, preset, seed, runs)):
                found.setdefault(preset, []).append(result)
                print(agent, preset, seed, {name: round(value, 3) for name, value in result.items()}, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{agent}.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / f"{agent}.md").write_text(table(found))
    print(table(found))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each preset: the mean over seeds, and of the score the range."""
    lines = [
        "| preset | score | min to max | samples/s | PL, versions | PL | GA | kept |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for preset, results in found.items():
        scores = [each["score"] for each in results]

        def mean(name: str, results: list[dict[str, Any]] = results) -> float:
            return statistics.fmean(each[name] for each in results)

        lines.append(
            f"| `{preset}` | {statistics.fmean(scores):.1f} | {min(scores):.1f} to {max(scores):.1f} | "
            f"{mean('samples_per_second'):,.0f} | {mean('policy_versions'):.2f} | {mean('policy_lag'):.1f} | "
            f"{mean('gradient_asynchrony'):.2f} | {mean('kept'):.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run"])
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/presets"))
    given = parser.parse_args()
    run(given.agent, given.seeds, given.runs)


if __name__ == "__main__":
    main()
