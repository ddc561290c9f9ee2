"""The particle worlds of MPE: the policies of simple_tag, and what a run's policies reach.

python benchmarks/mpe.py RUN …                      after `lockstep train mappo-mpe`, prints JSON
python benchmarks/mpe.py --curves FOLDER TO         JSON and curves, to TO, of the runs FOLDER/TASK-ALGORITHM-SEED
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot

from lockstep import load_policy
from lockstep.config.options import EvaluationSettings
from lockstep.envs.base import load_adapter
from lockstep.evaluation.policy import Policy
from lockstep.evaluation.scores import evaluate_policy
from lockstep.evaluation.statistics import bootstrap_interval
from lockstep.models.policies import Policies, PoliciesSpace
from lockstep.run.folder import RunFolder

EPISODES, COMPILED_EPISODES = 600, 24_000
"""Of agents, in an evaluation: in mpe2's worlds, and in compiled ones, which are faster."""
RETURNS = {"simple_spread": (6.0, -75.0), "simple_speaker_listener": (2.0, 0.0)}
"""By environment, in all versions: what turns a mean score of agents into a return of Papoudakis et al. 2021,
arXiv:2006.07869.

They add up the rewards of all agents. In simple_spread of their version of MPE, rewards are twice those of mpe2, and
each of three agents also loses 1 in each of 25 steps for colliding with itself, which mpe2 does not count."""
PUBLISHED = {
    "spread": {"mappo": (-133.54, 3.08), "ippo": (-133.86, 3.67)},
    "speaker": {"mappo": (-10.68, 0.30), "ippo": (-13.10, 3.50)},
}
"""The returns there after 20M steps of a match, with shared parameters: mean and deviation over five seeds."""
AGENTS = {"spread": 3, "speaker": 2}
EVALUATIONS, MATCHES = 400, 500
"""Evaluations in 20M steps of a match with EPyMARL's settings, and the matches of one, of five seeds together."""
_POINTS = 200


def role(agent: str) -> str:
    """The policy of an agent of simple_tag: adversary or agent."""
    return agent.rpartition("_")[0]


def measure(run: Path) -> dict[str, Any]:
    """A run's score, by itself and as a published return; with several policies also where some are untrained."""
    policy = load_policy(run)
    result: dict[str, Any] = {"run": run.name, "samples": policy.samples, **played(policy, policy.model)}
    if (turn := _turn(policy.experiment.env.id)) is not None:
        result["as_published"] = [turn(x) for x in (result["score"], *result["interval95"])]
    space, actions = policy.spaces
    if isinstance(space, PoliciesSpace) and isinstance(trained := policy.model, Policies):
        first = policy.experiment.build_model(space, actions)
        assert isinstance(first, Policies)
        names = list(space.parts)
        for chosen in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names))):
            mixed = Policies(space, {name: (trained if name in chosen else first)[name] for name in names}, actions)
            result[f"trained: {', '.join(chosen) or 'none'}"] = played(policy, mixed)
    return result


def played(policy: Policy, model: Any) -> dict[str, Any]:
    """Scores: means over agents. The interval is that of matches, whose agents follow each other."""
    env = policy.experiment.env
    agents = load_adapter(env.adapter).group_size(env)
    asked = EvaluationSettings(episodes=EPISODES)
    if env.adapter == "compiled":
        asked = EvaluationSettings(episodes=COMPILED_EPISODES, num_envs=240)
    found = evaluate_policy(model, policy.experiment, asked, seed_purpose="test")
    interval = bootstrap_interval(np.reshape(found.scores, (-1, agents)).mean(1))
    each = {name: [metric.mean, *(metric.interval or ())] for name, metric in found.metrics.items()}
    return {"score": found.mean, "interval95": list(interval or ()), "median": found.median, **each}


def _turn(env_id: str) -> Callable[[float], float] | None:
    """What turns a score into a published return; None if nothing is published."""
    found = [numbers for name, numbers in RETURNS.items() if name in env_id]
    return (lambda x: found[0][0] * x + found[0][1]) if found else None


def curve(run: RunFolder) -> tuple[np.ndarray, np.ndarray]:
    """Steps of a match, and the return of training episodes, averaged over a _POINTS-th of the run."""
    turn = _turn(run.experiment().env.id)
    assert turn is not None
    task = run.path.name.partition("-")[0]
    rows = [(row["samples"], row["score/iteration_mean"]) for row in run.records() if row.get("score/iteration_mean")]
    parts = np.array_split(np.array(rows), min(_POINTS, len(rows)))
    found = np.array([(part[-1, 0] / AGENTS[task], turn(part[:, 1].mean())) for part in parts])
    return found[:, 0], found[:, 1]


def best(runs: list[RunFolder]) -> float:
    """The best mean return of EVALUATIONS with the most likely actions, of MATCHES each, by the last policies of all
    seeds. A table of maximum returns counts this way, and luck raises such a maximum above the mean of every policy."""
    means = []
    for policy in (load_policy(run.path) for run in runs):
        env = policy.experiment.env
        each = MATCHES // len(runs) * load_adapter(env.adapter).group_size(env)
        asked = EvaluationSettings(episodes=EVALUATIONS * each, greedy=True, num_envs=240)
        found = evaluate_policy(policy.model, policy.experiment, asked, seed_purpose="test")
        means.append(np.reshape(found.scores, (EVALUATIONS, each)).mean(1))
    turn = _turn(runs[0].experiment().env.id)
    assert turn is not None
    return turn(float(np.mean(means, 0).max()))


def curves(folder: Path, to: Path) -> None:
    """Measure all runs of a folder, and draw what they learned."""
    runs: dict[str, dict[str, list[RunFolder]]] = {}
    for path in sorted(folder.glob("*-*-*/experiment.json")):
        task, algorithm, _ = path.parent.name.split("-")
        runs.setdefault(task, {}).setdefault(algorithm, []).append(RunFolder.open(path.parent))
    found: dict[str, Any] = {}
    for task, algorithms in runs.items():
        figure, axes = pyplot.subplots(figsize=(6, 3.6))
        for color, (algorithm, seeds) in zip(("C0", "C1"), algorithms.items(), strict=False):
            drawn = [curve(run) for run in seeds]
            for steps, returns in drawn:
                axes.plot(steps / 1e6, returns, color=color, alpha=0.4, linewidth=0.8)
            size = min(len(steps) for steps, _ in drawn)
            mean = np.mean([returns[:size] for _, returns in drawn], 0)
            axes.plot(
                drawn[0][0][:size] / 1e6, mean, color=color, linewidth=1.8, label=f"{algorithm} ({len(seeds)} seeds)"
            )
            found[f"{task}-{algorithm}-best"] = round(best(seeds), 2)
            published, _ = PUBLISHED[task][algorithm]
            axes.axhline(published, color=color, linestyle=":", linewidth=1.2, label=f"{algorithm}, published")
            found[f"{task}-{algorithm}"] = [
                {**measure(run.path), "curve": np.round(np.stack(points, 1)[::10], 2).tolist()}
                for run, points in zip(seeds, drawn, strict=True)
            ]
        axes.set(xlabel="million steps of a match", ylabel="return", title=task)
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(to / f"mpe-{task}.png", dpi=130)
    (to / "mpe-seeds.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--curves"]:
        curves(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(json.dumps([measure(Path(run)) for run in sys.argv[1:]], indent=1))
