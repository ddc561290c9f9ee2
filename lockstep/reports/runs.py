"""Finished and unfinished runs as data for plots, reports and comparisons."""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lockstep.config.serialization import flat
from lockstep.config.settings import SettingsError
from lockstep.evaluation.statistics import Curve, readable
from lockstep.run.finding import is_run, runs_in
from lockstep.run.folder import RunFolder

_Item = TypeVar("_Item")

X_LABELS = {
    "frames": "Environment frames",
    "samples": "Agent samples (actions)",
    "updates": "Gradient steps",
    "time": "Training time",
}
SCORES = ("score/mean", "score/best", "score/iteration_mean", "score/iteration_max", "eval/score")
"""Metrics whose unit is the task's raw score."""
TASK = "env.id"
"""The setting that distinguishes tasks."""
_MAIN = (TASK, "algorithm.$type")
_RULES = ("env.protocol", "env.options", "env.num_levels", "env.start_level", "env.opponents")
_CURRICULUM = "env.curriculum"
_LINES = 20_000
"""At most about this many lines of a run's metrics are kept. Charts show far fewer."""
_NAMED = 6
"""The most runs that a sentence names."""


def time_unit(longest: float) -> tuple[float, str]:
    """The most readable unit for a number of seconds: its length in seconds, and its name."""
    return (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 120 else (1, "seconds")


@dataclass(frozen=True)
class Run:
    """A run as read from its folder."""

    path: Path
    seed: int
    settings: dict[str, Any]
    """The experiment without its seed, by dotted name."""
    facts: dict[str, Any]
    """run.json: layout, command, versions, machine."""
    records: list[dict[str, float | None]]
    """The lines of metrics.jsonl."""
    label: str = ""
    """A name that distinguishes it from others, if its folder's name does not."""

    @staticmethod
    def read(path: Path | str) -> Run:
        """Read a run's folder; the run may still be training.

        Raises:
            SettingsError: the folder is not a run.
        """
        folder = RunFolder.open(path)
        records = _fewer(folder.records()) if folder.metrics.is_file() else []  # missing before the first iteration
        settings = {name: value for name, value in flat(folder.read("experiment.json")).items() if value != {}}
        seed, steps = settings.pop("seed", None), settings.get("total_steps", 0)
        if not isinstance(seed, int) or not isinstance(steps, int):
            raise folder.damaged("experiment.json", "it holds no experiment")
        return Run(folder.path, seed, settings, folder.facts() if (folder.path / "run.json").is_file() else {}, records)

    @property
    def name(self) -> str:
        return self.label or self.path.resolve().name

    @property
    def task(self) -> str:
        return str(self.settings.get(TASK, "the task"))

    @property
    def finished(self) -> bool:
        """Whether it had all its iterations: if timing decides, it may have collected fewer samples than planned."""
        total, rollout, envs = (self.settings.get(n) for n in ("total_steps", "algorithm.rollout", "env.num_envs"))
        if isinstance(rollout, int) and isinstance(envs, int) and isinstance(total, int):
            return self.last("iteration") >= math.ceil(total / (rollout * envs))
        return self.last("samples") >= (total or math.inf)

    def curve(self, x: str, metric: str) -> Curve:
        """One metric: x [n] and y [n], without the iterations that have no value.

        Args:
            x: frames, samples, updates or time (seconds of training).

        Raises:
            SettingsError: the metric has no values yet.
        """
        horizontal = {"time": "seconds"}.get(x, x)
        points = [(r[horizontal], r[metric]) for r in self.records if r.get(metric) is not None and horizontal in r]
        values = np.array(points, dtype=np.float64).reshape(-1, 2)
        values = values[np.isfinite(values).all(axis=1)]
        if not len(values):
            raise SettingsError(self._no_values(metric, horizontal))
        return values[:, 0], values[:, 1]

    def has(self, metric: str) -> bool:
        return any(record.get(metric) is not None for record in self.records)

    def last(self, metric: str) -> float:
        """The last value, NaN if there is none."""
        values = (r[metric] for r in reversed(self.records) if r.get(metric) is not None)
        return next((float(value) for value in values if value is not None), math.nan)

    def diverged(self, metric: str) -> float | None:
        """Samples after which the metric or a loss is no longer a finite number; None if both are to the end."""
        ended = []
        for name in (metric, *self.names("loss/")):
            written = [record for record in self.records if name in record]
            if written and written[-1][name] is None:
                known = [record.get("samples") or 0.0 for record in written if record[name] is not None]
                ended.append(known[-1] if known else 0.0)
        return min(ended, default=None)

    def average(self, metric: str) -> float:
        """Mean over iterations, NaN if there is none."""
        values = [value for record in self.records if (value := record.get(metric)) is not None]
        return float(np.mean(values)) if values else math.nan

    def largest(self, metric: str) -> float:
        """The largest value, NaN if there is none."""
        return max((value for record in self.records if (value := record.get(metric)) is not None), default=math.nan)

    def share(self, metric: str, first: int = 0) -> float:
        """Mean over time of each iteration's share, from the record `first` on; NaN if there is none."""
        known, seconds, before = [], [], 0.0
        for index, record in enumerate(self.records):
            now = record.get("seconds") or before
            if index >= first and (value := record.get(metric)) is not None:
                known.append(value)
                seconds.append(now - before)
            before = now
        return float(np.average(known, weights=seconds)) if sum(seconds) > 0 else math.nan

    def names(self, prefix: str) -> list[str]:
        """The metrics with a prefix, in the order of their first appearance."""
        return [name for name in self._names if name.startswith(prefix)]

    @cached_property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.records for name in record))

    def _no_values(self, metric: str, horizontal: str) -> str:
        if self.has(metric):
            return f"{self.path} does not record {horizontal} with {metric!r}. Choose another --x."
        if metric in self._names:
            return f"{self.path} has no number for {metric!r}: every value is null; learning may have diverged."
        close = difflib.get_close_matches(metric, sorted(self._names), n=4, cutoff=0.5)
        known = ", ".join(sorted(self._names)) or "no metrics at all"
        hint = f"Similar names: {', '.join(close)}." if close else f"It has {known}."
        later = " Scores appear when the first episodes have ended." if metric.startswith("score/") else ""
        later = " Runs are evaluated with --eval-every." if metric.startswith("eval/") else later
        return f"{self.path} has no values of {metric!r} yet. {hint}{later}"


def _fewer(records: list[dict[str, float | None]]) -> list[dict[str, float | None]]:
    """Every k-th line of a very long run, with the last one and those of evaluations, so that many such runs fit into
    memory."""
    every = -(-len(records) // _LINES)
    if every <= 1:
        return records
    kept = {len(records) - 1, *range(0, len(records), every)}
    kept |= {n for n, record in enumerate(records) if "eval/score" in record}
    return [records[n] for n in sorted(kept)]


def listed(runs: Path | str | Sequence[_Item]) -> list[_Item | Path | str]:
    """The given runs, with the folder of a sweep, or any single folder, replaced by all runs in it.

    Other contents of such a folder are ignored, since a shell's FOLDER/* includes them, too.
    """
    given: list[_Item | Path | str] = [runs] if isinstance(runs, (str, Path)) else list(runs)
    found, others = list[_Item | Path | str](), list[_Item | Path | str]()
    for each in given:
        path = Path(each) if isinstance(each, (str, Path)) else None
        if path is None or is_run(path):
            found.append(each)
        elif inside := runs_in(path):
            found += inside
        else:
            beside = path.is_file() or (path.is_dir() and (path.parent / "queue").is_dir())
            (others if beside else found).append(each)
    return found or others


def with_metric(runs: Sequence[Run], metric: str, x: str) -> list[Run]:
    """The runs that have a value of the metric.

    Raises:
        SettingsError: no run has one; the message lists the available metrics.
    """
    found = [run for run in runs if run.has(metric)]
    if not found:
        runs[0].curve(x, metric)  # raises
    return found


@dataclass
class Method:
    """Runs that differ only in the seed, or only in seed and task."""

    settings: dict[str, Any]
    """The settings that they share, by dotted name."""
    runs: list[Run] = field(default_factory=list)
    label: str = ""
    """The text that distinguishes the method from others; empty if there is no other."""

    @property
    def size(self) -> str:
        """The number of runs, in words."""
        count = len(self.runs)
        noun = "seed" if len({run.seed for run in self.runs}) == count else "run"
        return f"{count} {noun}{'' if count == 1 else 's'}"

    def on(self, task: str) -> list[Run]:
        """The runs of one task."""
        return [run for run in self.runs if run.task == task]


def methods(runs: Sequence[Run], *, across_tasks: bool = False) -> list[Method]:
    """Group runs that differ only in their seed, or across tasks only in seed and task, and label what distinguishes
    each."""
    found: dict[str, Method] = {}
    for run in runs:
        shared = {name: value for name, value in run.settings.items() if not (across_tasks and name == TASK)}
        given = {name: value for name, value in shared.items() if value is not None}  # older runs may lack the setting
        found.setdefault(json.dumps(given, sort_keys=True), Method(shared)).runs.append(run)
    groups = list(found.values())
    for method, label in zip(groups, labels([method.settings for method in groups]), strict=True):
        method.label = label
    return groups


def at_equal_budget(runs: Sequence[Run], metric: str, x: str) -> tuple[float, np.ndarray]:
    """The largest x that all runs reached, and each run's metric there, [R].

    Raises:
        SettingsError: a run has no such metric, or its first value comes later.
    """
    curves = [run.curve(x, metric) for run in runs]
    budget = float(min(steps[-1] for steps, _ in curves))
    for run, (steps, _) in zip(runs, curves, strict=True):
        if steps[0] > budget:
            first, last = (f"{readable(at)} seconds" if x == "time" else f"{at:,.0f} {x}" for at in (steps[0], budget))
            raise SettingsError(
                f"{run.name} has its first {metric} at {first}, but another run on {run.task} reached only {last}, so "
                "there is no equal budget at which both have a score. Leave one of them out, or train the shorter run "
                "for longer."
            )
    return budget, np.array([np.interp(budget, *curve) for curve in curves])


def held_back(runs: Sequence[Run], metric: str, x: str) -> str | None:
    """A sentence if one of a task's runs is so short that at_equal_budget compares all far before most of them end."""
    ends = sorted(((float(run.curve(x, metric)[0][-1]), run) for run in runs), key=lambda end: end[0])
    budget, usual = ends[0][0], ends[(len(ends) - 1) // 2][0]
    short = [run.name for end, run in ends if end < 0.9 * usual]
    if not short:
        return None
    unit, told = ("seconds", readable) if x == "time" else (x, "{:,.0f}".format)
    return (
        f"{short[0]} has its last {metric} at {told(budget)} {unit}, where all runs of {runs[0].task} are therefore "
        f"compared, though most reached {told(usual)}. To compare those further on, leave out {', '.join(short)}."
    )


def endings(names: Sequence[Sequence[str]], between: str) -> list[str]:
    """The last part of each name, with as many parts before it as are needed to distinguish the names."""
    depths = [1] * len(names)
    while True:
        found = [between.join(each[-depth:]) for each, depth in zip(names, depths)]
        ambiguous = [number for number, ending in enumerate(found) if found.count(ending) > 1]
        if not any(depths[number] < len(names[number]) for number in ambiguous):
            return found
        for number in ambiguous:
            depths[number] += 1


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The name of each folder, with as many parents as are needed to distinguish the folders."""
    return endings([path.resolve().parts for path in paths], "/")


def some(names: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


def seeds_again(runs: Sequence[Run]) -> list[int]:
    """Seeds that several runs of the same task share."""
    counts = Counter((run.task, run.seed) for run in runs)
    return sorted({seed for (_, seed), count in counts.items() if count > 1})


def tasks(runs: Sequence[Run]) -> list[str]:
    """The tasks, each once, in the order of the runs."""
    return list(dict.fromkeys(run.task for run in runs))


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The names of settings that are not the same in all."""
    names = sorted({name for each in settings for name in each})
    return [name for name in names if len({json.dumps(each.get(name)) for each in settings}) > 1]


def other_rules(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The names of differing settings that make another task of the same env.id."""
    return [name for name in differing(settings) if name.startswith(_RULES)]


def eased(runs: Sequence[Run], metric: str) -> list[str]:
    """A sentence if the metric is a score of training episodes that were easier than the task."""
    names = [run.name for run in runs if any(name.startswith(_CURRICULUM) for name in run.settings)]
    if not names or not metric.startswith("score/"):
        return []
    return [
        f"{metric} of {', '.join(names)} is the score of training episodes, which used {_CURRICULUM}'s options "
        "instead of the task's. For scores of the task itself, train with --eval-every and use eval/score."
    ]


def title(settings: Sequence[dict[str, Any]]) -> str:
    """Task and algorithm, if all share them."""
    differ = differing(settings)
    main = [name for name in _MAIN if name in settings[0] and name not in differ]
    return " · ".join(_setting(name, settings[0][name]) for name in main)


def _follows(settings: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether a warm start's setting adds nothing to the run that it names."""
    group, _, last = name.rpartition(".")
    values = {json.dumps(each[name]) for each in settings if name in each}
    return group == "warm_start" and last != "run" and (last in ("$type", "digest") or len(values) == 1)


def labels(settings: Sequence[dict[str, Any]]) -> list[str]:
    """A short text that distinguishes each from the others."""
    differ = [name for name in differing(settings) if not _follows(settings, name)]
    # A different algorithm or model changes many other settings, too; its name says enough.
    parts = {n.rpartition(".")[0] for n in differ if n.endswith(".$type")}
    separating = [n for n in differ if n.endswith(".$type") or not any(n.startswith(p + ".") for p in parts)]
    separating.sort(key=lambda n: (n not in _MAIN, n))
    if len(separating) > 4:
        separating = _separating(settings, separating)
    short = dict(zip(differ, endings([name.split(".") for name in differ], ".")))
    named = {n: {_setting(n, each[n]) for each in settings if n in each} for n in separating}
    full = {n for n in separating if len(named[n]) < len({str(each[n]) for each in settings if n in each})}
    found = [
        ", ".join(str(each[n]) if n in full else _setting(n, each[n], short[n]) for n in separating if n in each)
        for each in settings
    ]
    for label, count in Counter(found).items() if parts else ():
        if 1 < count < len(settings):  # the same algorithm with other settings
            ambiguous = [number for number, each in enumerate(found) if each == label]
            for number, rest in zip(ambiguous, labels([settings[number] for number in ambiguous]), strict=True):
                found[number] = ", ".join(filter(None, (label, rest)))
    return found


def _separating(settings: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """A few names that distinguish all settings, as far as possible: each one separates the most of what is left."""
    chosen = [name for name in names if name in _MAIN]

    def distinguished(name: str) -> int:
        return len({json.dumps([each.get(n) for n in (*chosen, name)]) for each in settings})

    while not chosen or distinguished(chosen[-1]) < len(settings):
        best = max(names, key=distinguished)
        if chosen and distinguished(best) == distinguished(chosen[-1]):
            break
        chosen.append(best)
    return [name for name in names if name in chosen]


def _setting(name: str, value: Any, short: str = "") -> str:
    """A setting as a short text; short: the part of its name that distinguishes it."""
    if name.endswith(".$type"):
        kind = str(value).rpartition(":")[2].removesuffix("Config")
        return kind.upper() if len(kind) <= 4 else kind
    return str(value) if name == TASK else f"{short or name}={value}"
