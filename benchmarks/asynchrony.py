"""What a slower learner changes: the study of section 3 of the Cleanba paper (Huang et al. 2023, arXiv:2310.00036).

    python benchmarks/asynchrony.py run        # trains what is not there yet: 2 schemes, 2 learners, 10 seeds
    python benchmarks/asynchrony.py report     # writes table, numbers and picture into benchmarks/asynchrony/

IMPALA on CartPole with the same hyperparameters under a free-running scheme and under lag 1, each once as fast as the
machine allows and once with a learner that sleeps before every iteration. Runs are kept below runs/asynchrony.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import lockstep
from lockstep import Layout, RunOptions, recipes
from lockstep.algorithms import IMPALAConfig
from lockstep.algorithms.base import OptimizerConfig
from lockstep.evaluation.statistics import Interval, bootstrap_interval
from lockstep.experiment import Experiment
from lockstep.reproducibility.replay import replay
from lockstep.run.ledger import read as read_ledger
from lockstep.scheme import Scheme
from lockstep.training.lags import TRAJECTORY

RESULTS = Path(__file__).parent / "asynchrony"
SEEDS = range(1, 11)
DELAY = 0.35
"""Seconds that the slowed learner sleeps before each iteration: several times what a whole iteration takes."""
REPLAYED = 1
"""Seed of the slowed free-running run that is replayed."""
_LAST = 0.2
"""The part of a run that its final score is taken from."""


class Arm(NamedTuple):
    """One of the four conditions."""

    lag: Literal[1, "async"]
    slowed: bool

    @property
    def layout(self) -> Layout:
        return Layout.parse("cpu:a2-l1" + (f",learner_delay={DELAY}" if self.slowed else ""))

    @property
    def scheme(self) -> str:
        return "free-running" if self.lag == "async" else f"lag {self.lag}"

    def __str__(self) -> str:
        return f"{self.scheme.replace(' ', '')}-{'slowed' if self.slowed else 'fast'}"


PAIRS = [(Arm("async", False), Arm("async", True)), (Arm(1, False), Arm(1, True))]
ARMS = [arm for pair in PAIRS for arm in pair]


def experiment(arm: Arm, seed: int) -> Experiment:
    base = recipes.ppo_cartpole()
    return base.replace(
        env=replace(base.env, num_envs=16),
        algorithm=IMPALAConfig(minibatches=2, learning_rate=3e-3, optimizer=OptimizerConfig("adam")),
        scheme=Scheme(shards=2, lag=arm.lag, max_lag=16, refresh="step"),
        total_steps=30_720,
        seed=seed,
    )


def folder(root: Path, arm: Arm, seed: int) -> Path:
    return root / f"{arm}-s{seed}"


def run(root: Path) -> None:
    """Train what is missing, all arms of a seed in turn; a run that was interrupted starts again."""
    for seed in SEEDS:
        for arm in ARMS:
            path, settings = folder(root, arm, seed), experiment(arm, seed)
            if _digest(path, settings) is None:
                shutil.rmtree(path, ignore_errors=True)
                options = RunOptions(str(path), checkpoint_every=settings.iterations, display="none", tensorboard=False)
                result = lockstep.train(settings, arm.layout, options)
                if result.stopped:
                    raise SystemExit(f"stopped in {path}; the same command goes on from here")
                kept = {"identity": settings.identity(), "digest": result.digest}
                (path / "result.json").write_text(json.dumps(kept) + "\n")
                print(f"{path.name}: score {result.score:.1f}, digest {result.digest}", flush=True)
        if seed == REPLAYED:
            _replay(folder(root, Arm("async", True), seed))


def _replay(path: Path) -> None:
    """Repeat a run in one process and keep what came of it."""
    again = path.with_name(f"{path.name}-replay")
    if (again / "result.json").is_file():
        return
    shutil.rmtree(again, ignore_errors=True)
    found = replay(path, Layout.parse("inline"), RunOptions(str(again), display="none", tensorboard=False))
    (again / "result.json").write_text(json.dumps({"ok": found.ok, "digest": found.digest}) + "\n")
    print(f"{again.name}: {'equal' if found.ok else found.difference}, digest {found.digest}", flush=True)


def _digest(path: Path, settings: Experiment) -> str | None:
    """What the run ended with, None if this experiment has not been run to its end there."""
    if not (path / "result.json").is_file():
        return None
    result = json.loads((path / "result.json").read_text())
    return result["digest"] if result["identity"] in settings.identities() else None


def versions_per_trajectory(lines: list[dict[str, Any]], steps: int) -> float:
    """Distinct versions that acted in TRAJECTORY steps of a shard, on average over all stretches of that length.

    Args:
        lines: of a ledger.
        steps: of a rollout.
    """
    of_shard: dict[str, list[set[int]]] = {}
    for line in lines:
        if "events" in line:
            for event in line["events"]:
                of_shard.setdefault(event["shard"], []).append({version for _, version in event["versions"]})
        else:
            for shard in line["rollout"]:
                of_shard.setdefault(shard, []).append({line["collected_with"]})
    length = TRAJECTORY // steps
    counts = [
        len(set().union(*rollouts[i : i + length]))
        for rollouts in of_shard.values()
        for i in range(len(rollouts) - length + 1)
    ]
    return float(np.mean(counts))


@dataclass(frozen=True)
class Group:
    """All seeds of one arm."""

    samples: np.ndarray
    """[I], at the end of each iteration."""
    curves: np.ndarray
    """[seeds, I]: mean score of the episodes that ended in an iteration, interpolated where none did."""
    lag: np.ndarray
    """[seeds]: versions between collecting and learning, on average over the run."""
    versions: np.ndarray
    """[seeds]: versions per trajectory."""
    digests: list[str]
    seconds: np.ndarray
    """[seeds]: how long training took."""

    @property
    def area(self) -> np.ndarray:
        """[seeds]: mean score over the whole run."""
        return self.curves.mean(axis=1)

    @property
    def final(self) -> np.ndarray:
        """[seeds]: mean score over the last part of the run."""
        return self.curves[:, -round(_LAST * self.curves.shape[1]) :].mean(axis=1)


def finished(root: Path) -> list[int]:
    """Seeds of which all arms have been run."""
    return [seed for seed in SEEDS if all(_digest(folder(root, arm, seed), experiment(arm, seed)) for arm in ARMS)]


def read(root: Path, arm: Arm, seeds: list[int]) -> Group:
    from lockstep.reports.runs import Run

    curves, lag, versions, digests, seconds, samples = [], [], [], [], [], np.empty(0)
    for seed in seeds:
        path, settings = folder(root, arm, seed), experiment(arm, seed)
        samples, lags = Run.read(path).curve("samples", "lag/policy_versions")
        curves.append(np.interp(samples, *Run.read(path).curve("samples", "score/iteration_mean")))
        lag.append(lags.mean())
        _, lines = read_ledger(path / "ledger.jsonl")
        versions.append(versions_per_trajectory(lines, settings.algorithm.rollout))
        digests.append(str(_digest(path, settings)))
        seconds.append(Run.read(path).curve("samples", "seconds")[1][-1])
    return Group(samples, np.stack(curves), np.array(lag), np.array(versions), digests, np.array(seconds))


def report(root: Path) -> None:
    """Write table, numbers and picture of all seeds that are finished; check what must be equal."""
    seeds = finished(root)
    if len(seeds) < 2:
        raise SystemExit(f"{root} holds too few finished seeds: python benchmarks/asynchrony.py run")
    RESULTS.mkdir(exist_ok=True)
    groups = {arm: read(root, arm, seeds) for arm in ARMS}
    digest = _check(root, seeds)
    table = _table(groups, len(seeds))
    (RESULTS / "table.md").write_text(table)
    (RESULTS / "asynchrony.json").write_text(json.dumps(_numbers(groups, seeds, digest), indent=1) + "\n")
    _draw(groups)
    print(table)


def _check(root: Path, seeds: list[int]) -> str:
    """Check that only timing's decisions differ, and that they can be repeated; returns the replay's digest."""
    for fast, slowed in PAIRS:
        for seed in seeds:
            a, b = folder(root, fast, seed), folder(root, slowed, seed)
            digests = _digest(a, experiment(fast, seed)), _digest(b, experiment(slowed, seed))
            same = digests[0] == digests[1]
            ledgers = (a / "ledger.jsonl").read_bytes() == (b / "ledger.jsonl").read_bytes()
            if fast.lag == 1 and not (same and ledgers):
                raise SystemExit(f"{a} and {b} must be equal, and are not: lockstep diff says where they part")
            if fast.lag == "async" and same:
                raise SystemExit(f"{a} and {b} are equal: timing decided nothing, so they show nothing")
    path = folder(root, Arm("async", True), REPLAYED)
    again = json.loads((path.with_name(f"{path.name}-replay") / "result.json").read_text())
    if not again["ok"] or again["digest"] != _digest(path, experiment(Arm("async", True), REPLAYED)):
        raise SystemExit(f"the replay of {path} ended with another digest: {again['digest']}")
    return again["digest"]


def _interval(values: np.ndarray) -> Interval:
    """95%, over seeds."""
    interval = bootstrap_interval(values)
    assert interval is not None
    return interval


def _cell(values: np.ndarray, sign: str = "") -> str:
    low, high = _interval(values)
    return f"{values.mean():{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})"


def _table(groups: dict[Arm, Group], seeds: int) -> str:
    lines = [
        f"| scheme | learner | lag, versions | versions in {TRAJECTORY} steps | mean score of the run "
        f"| of its last {_LAST:.0%} | the same bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for fast, slowed in PAIRS:
        a, b = groups[fast], groups[slowed]
        equal = sum(x == y for x, y in zip(a.digests, b.digests, strict=True))
        for label, g in (("fast", a), ("slowed", b)):
            lines.append(
                f"| {fast.scheme} | {label} | {g.lag.mean():.1f} | {g.versions.mean():.1f} | {_cell(g.area)} "
                f"| {_cell(g.final)} | |"
            )
        area, final = b.area - a.area, b.final - a.final
        changes = ["0 on every seed" if not change.any() else _cell(change, "+") for change in (area, final)]
        lines.append(f"| | difference | | | {' | '.join(changes)} | {equal} of {seeds} seeds |")
    return "\n".join(lines) + "\n"


def _numbers(groups: dict[Arm, Group], seeds: list[int], replayed: str) -> dict[str, Any]:
    arms = {
        str(arm): {
            "layout": str(arm.layout),
            "identity_seed1": experiment(arm, 1).identity(),
            "digests": g.digests,
            "lag": g.lag.round(3).tolist(),
            "versions_per_trajectory": g.versions.round(3).tolist(),
            "area": g.area.round(3).tolist(),
            "final": g.final.round(3).tolist(),
            "seconds": g.seconds.round(1).tolist(),
            "curve": {"samples": g.samples.tolist(), "mean": g.curves.mean(axis=0).round(2).tolist()},
        }
        for arm, g in groups.items()
    }
    return {"seeds": seeds, "replayed_seed": REPLAYED, "replayed_digest": replayed, "arms": arms}


def _draw(groups: dict[Arm, Group]) -> None:
    # Not at the top: every process of a run imports this file, and none of them draws.
    import matplotlib as mpl
    from curves import draw_band
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    from lockstep.reports.plots import COLORS, STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
        for axes, pair in zip(figure.subplots(1, 2, sharey=True), PAIRS, strict=True):
            for arm, color, style in zip(pair, COLORS, ("-", "--")):
                label = "slowed learner" if arm.slowed else "fast learner"
                draw_band(axes, groups[arm].samples, groups[arm].curves, color=color, label=label, linestyle=style)
            axes.set_title(pair[0].scheme.capitalize())
            axes.set_xlabel("Agent samples (actions)")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.margins(x=0.01)
        figure.axes[0].set_ylabel("Episode return")
        figure.axes[0].legend(loc="upper left", labelcolor="#333333")
        figure.savefig(RESULTS / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--runs", type=Path, default=Path("runs/asynchrony"))
    arguments = parser.parse_args()
    {"run": run, "report": report}[arguments.action](arguments.runs)


if __name__ == "__main__":
    main()
