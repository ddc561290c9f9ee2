"""What a policy lag costs PPO and IMPALA on three small tasks.

    python benchmarks/lag.py run        # trains what is not there yet: 9 cases, 4 lags, 10 seeds
    python benchmarks/lag.py report     # writes tables, numbers and pictures into benchmarks/lag/

Runs are kept below runs/lag. The lag belongs to the experiment: any layout gives the same scores, so one core will do.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from curves import draw_band
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

import lockstep
from lockstep import RunOptions, recipes
from lockstep.algorithms import IMPALAConfig, PPOConfig
from lockstep.algorithms.base import OptimizerConfig
from lockstep.evaluation.scores import evaluate
from lockstep.evaluation.statistics import Interval, bootstrap_interval
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.reports.plots import COLORS, STYLE
from lockstep.reports.runs import Run
from lockstep.scheme import Scheme

RESULTS = Path(__file__).parent / "lag"
LAGS = (0, 1, 2, 4)
SEEDS = range(1, 11)
EPISODES = 30
"""Episodes of the separate evaluation of each final policy."""
UNTRAINED = {"CartPole-v1": 20.0, "Acrobot-v1": -500.0, "Hopper-v4": 14.0}
"""What the initial policy scores, from which gains are counted."""


@dataclass(frozen=True)
class Case:
    """One algorithm on one task; the settings were chosen at lag 0 and are the same at every lag."""

    label: str
    experiment: Experiment

    @property
    def task(self) -> str:
        return self.experiment.env.id


def _cases() -> dict[str, Case]:
    cartpole = recipes.ppo_cartpole().replace(scheme=Scheme(shards=1), total_steps=30_000)
    acrobot = cartpole.replace(env=replace(cartpole.env, id="Acrobot-v1", num_envs=16), total_steps=60_000)
    hopper = recipes.ppo_mujoco("Hopper-v4").replace(scheme=Scheme(shards=1), total_steps=40_000)
    hopper = hopper.replace(model=StandardModelConfig(encoder="mlp", separate_value_network=True))

    ppo = PPOConfig(rollout=64, epochs=10, learning_rate=1e-3, clip=0.2, entropy_coef=0.0)
    cases = {
        "ppo-cartpole": Case("PPO", cartpole.replace(algorithm=replace(ppo, discount=0.98, gae_lambda=0.9))),
        "ppo-acrobot": Case("PPO", acrobot.replace(algorithm=replace(ppo, gae_lambda=0.94))),
        "ppo-hopper": Case(
            "PPO", hopper.replace(algorithm=replace(hopper.algorithm, rollout=128, minibatches=8, value_clip=0.2))
        ),
    }
    impala = IMPALAConfig(minibatches=4, learning_rate=2e-3, optimizer=OptimizerConfig("adam"))
    faster = replace(impala, rollout=32, minibatches=8, learning_rate=3e-3, entropy_coef=0.0)
    for task, base, algorithm in (
        ("cartpole", cartpole, impala),
        ("acrobot", acrobot, impala),
        ("hopper", hopper, faster),
    ):
        cases[f"impala-{task}"] = Case("IMPALA", base.replace(algorithm=algorithm))
        slow = replace(algorithm, learning_rate=algorithm.learning_rate / 4)
        cases[f"impala-slow-{task}"] = Case("IMPALA, ¼ learning rate", base.replace(algorithm=slow))
    return cases


CASES = _cases()
LABELS = tuple(dict.fromkeys(case.label for case in CASES.values()))


def experiment(name: str, lag: int, seed: int) -> Experiment:
    base = CASES[name].experiment
    return base.replace(scheme=replace(base.scheme, lag=lag), seed=seed)


def folder(root: Path, name: str, lag: int, seed: int) -> Path:
    return root / f"{name}-lag{lag}-s{seed}"


def run(root: Path) -> None:
    """Train and evaluate what is missing; a run that was interrupted starts again, since it takes seconds."""
    todo = [(name, lag, seed) for name in CASES for seed in SEEDS for lag in LAGS]
    for number, (name, lag, seed) in enumerate(todo, start=1):
        path, settings = folder(root, name, lag, seed), experiment(name, lag, seed)
        if _evaluation(path, settings) is not None:
            continue
        shutil.rmtree(path, ignore_errors=True)
        options = RunOptions(run=str(path), checkpoint_every=settings.iterations, display="none", tensorboard=False)
        if lockstep.train(settings, options=options).stopped:
            raise SystemExit(f"stopped in {path}; the same command goes on from here")
        score = evaluate(path, episodes=EPISODES).mean
        result = {"identity": settings.identity(), "evaluation": score}
        (path / "result.json").write_text(json.dumps(result) + "\n")
        print(f"{number}/{len(todo)} {path.name}: {score:.1f}", flush=True)


def _evaluation(path: Path, settings: Experiment) -> float | None:
    """The final policy's score, None if this experiment has not been run to its end there."""
    if not (path / "result.json").is_file():
        return None
    result = json.loads((path / "result.json").read_text())
    return result["evaluation"] if result["identity"] in settings.identities() else None


@dataclass(frozen=True)
class Group:
    """All seeds of one case at one lag."""

    samples: np.ndarray
    """[I], at the end of each iteration."""
    curves: np.ndarray
    """[seeds, I]: mean score of the episodes that ended in an iteration, interpolated where none did; UNTRAINED before
    the first."""
    final: np.ndarray
    """[seeds]: the final policy's score in the separate evaluation."""
    kl: float
    """Mean of policy/approx_kl over iterations and seeds: how far the learner moves from the data it learns from."""

    @property
    def area(self) -> np.ndarray:
        """[seeds]: mean score over the whole run."""
        return self.curves.mean(axis=1)

    def delayed(self, lag: int, untrained: float) -> np.ndarray:
        """[seeds]: what area would be if every curve only came `lag` iterations later."""
        iterations = self.curves.shape[1]
        return (self.curves[:, : iterations - lag].sum(axis=1) + lag * untrained) / iterations


def read(root: Path, name: str, lag: int) -> Group | None:
    """All seeds at one lag, None if one of them is not finished."""
    curves, final, kl, samples = [], [], [], np.empty(0)
    for seed in SEEDS:
        path = folder(root, name, lag, seed)
        score = _evaluation(path, experiment(name, lag, seed))
        if score is None:
            return None
        samples, divergence = Run.read(path).curve("samples", "policy/approx_kl")
        scores = Run.read(path).curve("samples", "score/iteration_mean")
        curves.append(np.interp(samples, *scores, left=UNTRAINED[CASES[name].task]))
        final.append(score)
        kl.append(divergence.mean())
    return Group(samples, np.stack(curves), np.array(final), float(np.mean(kl)))


@dataclass(frozen=True)
class Change:
    """Lag k minus lag 0, seed by seed, as a percentage of what is learned at lag 0."""

    values: np.ndarray
    """[seeds]"""

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def interval(self) -> Interval:
        """95%, over seeds."""
        interval = bootstrap_interval(self.values)
        assert interval is not None
        return interval

    def __str__(self) -> str:
        low, high = self.interval
        cell = f"{self.mean:+.1f} ({low:+.1f} to {high:+.1f})"
        return f"**{cell}**" if low > 0 or high < 0 else cell

    def to_json(self) -> dict[str, Any]:
        worse = int((self.values < 0).sum())
        return {"mean": self.mean, "interval95": self.interval, "seeds_worse": worse, "seeds": self.values.tolist()}


@dataclass(frozen=True)
class Cost:
    """What a lag changes, in percent of what lag 0 gains over the initial policy."""

    area: Change
    """In the mean training score over the whole run."""
    delay: float
    """The part of area that the later start alone explains: lag 0's own curves, shifted by the lag."""
    final: Change
    """In the final policy's score."""


def cost(groups: dict[int, Group], lag: int, untrained: float) -> Cost:
    base, other = groups[0], groups[lag]
    area_gain, final_gain = base.area.mean() - untrained, base.final.mean() - untrained
    return Cost(
        Change(100 * (other.area - base.area) / area_gain),
        float(100 * (base.delayed(lag, untrained) - base.area).mean() / area_gain),
        Change(100 * (other.final - base.final) / final_gain),
    )


Groups = dict[str, dict[int, Group]]
"""By case and lag."""
Costs = dict[str, dict[int, Cost]]
"""By case and lag, from lag 1 on."""


def report(root: Path) -> None:
    """Write tables, numbers and pictures of the cases whose runs are all finished."""
    RESULTS.mkdir(exist_ok=True)
    groups: Groups = {}
    for name in CASES:
        found = {lag: group for lag in LAGS if (group := read(root, name, lag)) is not None}
        if len(found) == len(LAGS):
            groups[name] = found
        else:
            print(f"{name} is left out: not all of its runs are finished")
    if not groups:
        raise SystemExit("No case is finished: python benchmarks/lag.py run")
    costs = {
        name: {lag: cost(by_lag, lag, UNTRAINED[CASES[name].task]) for lag in LAGS[1:]}
        for name, by_lag in groups.items()
    }
    tables = _tables(groups, costs)
    (RESULTS / "tables.md").write_text(tables)
    (RESULTS / "lag.json").write_text(json.dumps(_numbers(groups, costs), indent=1) + "\n")
    with mpl.rc_context(STYLE):
        _draw_curves(groups).savefig(RESULTS / "curves.png")
        _draw_costs(costs).savefig(RESULTS / "cost.png")
    print(tables)


def _tables(groups: Groups, costs: Costs) -> str:
    lags = LAGS[1:]
    lines = []
    for title, final in (("Mean score of the whole run", False), ("Score of the final policy", True)):
        lines += [f"{title}: at lag 0, and the change in % of the gain of lag 0 over the initial policy", ""]
        lines.append("| | | lag 0 | " + " | ".join(f"lag {lag}" for lag in lags) + " |")
        lines.append("|---" * (3 + len(lags)) + "|")
        for name, by_lag in groups.items():
            level = (by_lag[0].final if final else by_lag[0].area).mean()
            changes = [str(costs[name][lag].final if final else costs[name][lag].area) for lag in lags]
            lines.append(f"| {CASES[name].label} | {CASES[name].task} | {level:.1f} | " + " | ".join(changes) + " |")
        lines.append("")
    lines += ["Mean of policy/approx_kl over the run", ""]
    lines.append("| | | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |")
    lines.append("|---" * (2 + len(LAGS)) + "|")
    for name, by_lag in groups.items():
        cells = " | ".join(f"{group.kl:.1e}" for group in by_lag.values())
        lines.append(f"| {CASES[name].label} | {CASES[name].task} | {cells} |")
    return "\n".join(lines) + "\n"


def _numbers(groups: Groups, costs: Costs) -> dict[str, Any]:
    def percent(c: Cost) -> dict[str, Any]:
        return {"whole_run": c.area.to_json(), "delay_alone": c.delay, "final": c.final.to_json()}

    return {
        f"{name}-lag{lag}": {
            "iterations": len(group.samples),
            "samples": int(group.samples[-1]),
            "approx_kl": group.kl,
            "whole_run": group.area.tolist(),
            "final": group.final.tolist(),
            **({"percent_of_gain": percent(costs[name][lag])} if lag else {}),
        }
        for name, by_lag in groups.items()
        for lag, group in by_lag.items()
    }


def _tasks(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(CASES[name].task for name in names))


def _draw_curves(groups: Groups) -> Figure:
    tasks = _tasks(groups)
    figure = Figure(figsize=(11, 8.4), dpi=130, layout="constrained")
    grid = figure.subplots(len(LABELS), len(tasks), sharex="col", sharey="col", squeeze=False)
    for name, by_lag in groups.items():
        case = CASES[name]
        row, column = LABELS.index(case.label), tasks.index(case.task)
        axes: Axes = grid[row, column]
        for number, (lag, group) in enumerate(by_lag.items()):
            draw_band(axes, group.samples, group.curves, color=COLORS[number], label=f"lag {lag}")
        axes.set_title(f"{case.label} · {case.task}", fontsize=10)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.margins(x=0.01)
        if row == len(LABELS) - 1:
            axes.set_xlabel("Agent samples (actions)")
        if column == 0:
            axes.set_ylabel("Episode return")
    grid[0, 0].legend(loc="upper left", labelcolor="#333333")
    return figure


def _draw_costs(costs: Costs) -> Figure:
    tasks = _tasks(costs)
    figure = Figure(figsize=(11, 6.4), dpi=130, layout="constrained")
    grid = figure.subplots(2, len(tasks), sharex=True, sharey="row", squeeze=False)
    for name, by_lag in costs.items():
        number = LABELS.index(CASES[name].label)
        place = np.arange(len(by_lag)) + 0.22 * (number - 1)
        column, style = tasks.index(CASES[name].task), {"color": COLORS[number], "label": LABELS[number]}
        for row, changes in enumerate(([c.area for c in by_lag.values()], [c.final for c in by_lag.values()])):
            mean = np.array([c.mean for c in changes])
            low, high = np.array([c.interval for c in changes]).T
            grid[row, column].errorbar(place, mean, (mean - low, high - mean), fmt="o", capsize=3, **style)
        delay = [c.delay for c in by_lag.values()]
        note = "a later start alone" if number == column == 0 else None
        grid[0, column].scatter(place, delay, marker="_", s=140, color="#333333", zorder=3, label=note)
    for column, task in enumerate(tasks):
        for axes in grid[:, column]:
            axes.axhline(0, color="#888888", linewidth=1)
            axes.grid(axis="x", visible=False)
        grid[0, column].set_title(task)
        grid[1, column].set_xticks(range(len(LAGS) - 1), [f"lag {lag}" for lag in LAGS[1:]])
    for axes, title in zip(grid[:, 0], ("Whole run", "Final policy"), strict=True):
        axes.set_ylabel(f"{title}: change, % of lag 0's gain")
    grid[0, 0].legend(loc="lower left", labelcolor="#333333")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--runs", type=Path, default=Path("runs/lag"))
    arguments = parser.parse_args()
    {"run": run, "report": report}[arguments.action](arguments.runs)


if __name__ == "__main__":
    main()
