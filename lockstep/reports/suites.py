"""Suites: sets of tasks for comparing methods, with scores that others have published.

A new suite is an entry in SUITES and a table in published/, whose first lines name its sources.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.evaluation import statistics
from lockstep.evaluation.statistics import Estimate, Scores, estimate, readable
from lockstep.reports import atari, page
from lockstep.reports.page import Section
from lockstep.reports.runs import Method, Run, some
from lockstep.reports.scales import Scale, scale_of

AGGREGATES: dict[str, Callable[[Scores], np.ndarray]] = {
    "median": statistics.median,
    "interquartile mean": statistics.iqm,
    "mean": statistics.mean,
    "optimality gap": statistics.optimality_gap,
}
"""Aggregates of normalized scores, in the order of published tables."""
_OF_MEANS = ("median", "mean")
"""Aggregates that follow from the mean of each task alone."""


@dataclass(frozen=True)
class Suite:
    """Tasks, the protocol on which their scores are published, and these scores."""

    title: str
    tasks: tuple[str, ...]
    """Ids, as `--env.id` takes them."""
    metric: str
    """The metric that counts as the score of a run, unless another one is asked for."""
    rules: dict[str, Any]
    """Settings of a run whose scores can be compared, by dotted name."""
    protocol: str
    """Sentences about how scores are measured."""
    aggregates: dict[str, tuple[Estimate, ...]] = field(default_factory=dict)
    """Published aggregates over all tasks, by method, in the order of AGGREGATES."""

    def has(self, task: str) -> bool:
        """Whether an environment's id is one of the suite's tasks."""
        return task in self.tasks or atari.game(task) in self.tasks


def _published(*numbers: tuple[float, float, float]) -> tuple[Estimate, ...]:
    """Estimates from a value and its interval each."""
    return tuple(Estimate(value, (low, high)) for value, low, high in numbers)


SUITES: dict[str, Suite] = {
    "atari100k": Suite(
        "Atari 100k",
        (
            *("Alien", "Amidar", "Assault", "Asterix", "BankHeist", "BattleZone", "Boxing", "Breakout"),
            *("ChopperCommand", "CrazyClimber", "DemonAttack", "Freeway", "Frostbite", "Gopher", "Hero"),
            *("Jamesbond", "Kangaroo", "Krull", "KungFuMaster", "MsPacman", "Pong", "PrivateEye", "Qbert"),
            *("RoadRunner", "Seaquest", "UpNDown"),
        ),
        "eval/score",
        {"env.protocol": "classic", "total_steps": 100_000},
        "26 games, 100,000 steps (400,000 frames) each, without sticky actions, rewards clipped, a lost life ends an "
        "episode in training. The score is the mean of 100 episodes of the final policy (train with --eval-every "
        "100000 --eval-episodes 100; Agarwal et al. 2021, arXiv:2108.13264).",
        {
            "DER (rliable, 10 runs, read off a figure)": _published(
                (0.21, 0.17, 0.22), (0.18, 0.17, 0.20), (0.34, 0.33, 0.36), (0.70, 0.68, 0.71)
            ),
            "OTRainbow (rliable, 10 runs, read off a figure)": _published(
                (0.12, 0.10, 0.14), (0.11, 0.10, 0.12), (0.20, 0.19, 0.21), (0.83, 0.82, 0.84)
            ),
            "CURL (rliable, 10 runs)": _published(
                (0.120, 0.084, 0.137), (0.097, 0.085, 0.114), (0.246, 0.221, 0.271), (0.780, 0.761, 0.799)
            ),
            "DrQ(ε) (rliable, 10 runs)": _published(
                (0.331, 0.248, 0.383), (0.302, 0.275, 0.330), (0.505, 0.466, 0.550), (0.613, 0.594, 0.631)
            ),
            "SPR (rliable, 10 runs)": _published(
                (0.415, 0.369, 0.484), (0.375, 0.346, 0.409), (0.701, 0.616, 0.811), (0.554, 0.536, 0.574)
            ),
        },
    ),
    "atari57": Suite(
        "Atari 57",
        tuple(atari.RANDOM_AND_HUMAN),
        "score/mean",
        {"env.protocol": "machado", "total_steps": 50_000_000},
        "57 games, 50M steps (200M frames) each, sticky actions, the full action set, no signal of lost lives. The "
        "score is that of the last training episodes.",
    ),
    "mujoco": Suite(
        "MuJoCo",
        ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4", "Humanoid-v4"),
        "score/mean",
        {"total_steps": 1_000_000},
        "Five tasks, a million steps each. The score is that of the last training episodes. No scale makes scores of "
        "different tasks comparable, so there are no aggregates over tasks.",
    ),
    "minatar": Suite(
        "MinAtar",
        tuple(f"MinAtar/{game}-v1" for game in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")),
        "eval/score",
        {"total_steps": 5_000_000},
        "Five games, five million steps each, with sticky actions and rising difficulty, the games' defaults. The "
        "score is that of the run's last evaluation. No scale makes scores of different games comparable, so there are "
        "no aggregates over games.",
    ),
}


def suite_of(name: str) -> Suite:
    """The suite of a name.

    Raises:
        SettingsError: there is none.
    """
    if name not in SUITES:
        raise SettingsError(f"There is no suite {name!r}. --suite takes {', '.join(SUITES)}.")
    return SUITES[name]


def key(task: str) -> str:
    """A task's name without its library and version, as tables of published scores have it."""
    return atari.game(task) or re.sub(r"-v\d+$", "", task)


@cache
def published(name: str) -> dict[str, dict[str, float]]:
    """A suite's published scores: by method, by task."""
    text = (files("lockstep.reports") / "published" / f"{name}.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        task = row.pop("task")
        for method, score in row.items():
            if score:
                found.setdefault(method, {})[task] = float(score)
    return found


def sources(name: str) -> str:
    """The sources of a suite's published scores."""
    text = (files("lockstep.reports") / "published" / f"{name}.csv").read_text(encoding="utf-8")
    return " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))


@dataclass(frozen=True)
class Row:
    """The scores of one task."""

    task: str
    scores: dict[str, Estimate]
    """Mean over runs, by method."""
    normalized: dict[str, float]
    """The means on the task's scale, if it has one."""
    published: dict[str, float]


@dataclass(frozen=True)
class Standing:
    """The scores of runs on a suite, beside published scores."""

    suite: str
    rows: tuple[Row, ...]
    shared: tuple[str, ...]
    """The tasks that aggregates are over: all, without the methods that lack some; or, if no method has runs of all of
    them, those of which every method has runs."""
    aggregates: dict[str, dict[str, Estimate]]
    """Of normalized scores, by method and name; of published scores, those that means of tasks decide, and with all
    tasks those that were published. Empty if fewer than two tasks have a scale."""
    notes: tuple[str, ...]

    def __str__(self) -> str:
        of = len(suite_of(self.suite).tasks)
        lines = [f"{suite_of(self.suite).title}: {len(self.shared)} of {of} tasks"]
        width = max((len(name) for name in self.aggregates), default=0)
        for name, found in self.aggregates.items():
            numbers = (f"{kind} {value}" for kind, value in found.items())
            lines.append(f"  {name:{width}}  {', '.join(numbers)}")
        return "\n".join([*lines, *self.notes])


def standing(name: str, groups: Sequence[Method], metric: str) -> Standing:
    """Compare methods with a suite's published scores.

    Raises:
        SettingsError: no run is on one of its tasks.
    """
    suite, theirs = suite_of(name), published(name)
    on = {group.label: _by_task(suite, group, metric) for group in groups}
    on = {label: found for label, found in on.items() if found}
    if not on:
        raise SettingsError(f"No run is on a task of the suite {name}, which has {some(suite.tasks)}.")
    rows, scales = [], dict[str, Scale]()
    for task in map(key, suite.tasks):
        if not any(task in found for found in on.values()):
            continue
        ours = {label: estimate(statistics.mean, [found[task]]) for label, found in on.items() if task in found}
        scale = scale_of(task, metric)
        if scale is not None:
            scales[task] = scale
        normalized = {label: float(scale.of(np.array(each.value))) for label, each in ours.items()} if scale else {}
        rows.append(Row(task, ours, normalized, {m: each[task] for m, each in theirs.items() if task in each}))
    complete = [label for label, found in on.items() if len(found) == len(suite.tasks)]
    compared = complete or list(on)
    shared = tuple(row.task for row in rows if all(label in row.scores for label in compared))
    scaled = [task for task in shared if task in scales]
    aggregates: dict[str, dict[str, Estimate]] = {}
    if len(scaled) > 1:
        for label in compared:
            sample = [scales[task].of(on[label][task]) for task in scaled]
            aggregates[label] = {kind: estimate(statistic, sample) for kind, statistic in AGGREGATES.items()}
        for method, scores in theirs.items():
            if all(task in scores for task in scaled):
                means = [scales[task].of(np.array([scores[task]])) for task in scaled]
                aggregates[method] = {kind: Estimate(float(AGGREGATES[kind](means)), None) for kind in _OF_MEANS}
        if len(scaled) == len(suite.tasks):
            for method, known in suite.aggregates.items():
                aggregates[method] = dict(zip(AGGREGATES, known, strict=True))
    runs = [run for group in groups for run in group.runs if suite.has(run.task)]
    return Standing(name, tuple(rows), shared, aggregates, tuple(_notes(suite, on, compared, runs, groups)))


def _by_task(suite: Suite, group: Method, metric: str) -> dict[str, np.ndarray]:
    """The scores [R] of a method's runs, by task."""
    found: dict[str, list[float]] = {}
    for run in group.runs:
        if suite.has(run.task):
            found.setdefault(key(run.task), []).append(run.last(metric))
    return {task: np.array(scores) for task, scores in found.items()}


def _notes(
    suite: Suite,
    on: dict[str, dict[str, np.ndarray]],
    compared: Sequence[str],
    runs: Sequence[Run],
    groups: Sequence[Method],
) -> list[str]:
    """What a reader must know before comparing. compared: the methods that have aggregates."""
    notes = []
    for label, found in on.items():
        missing = [task for task in map(key, suite.tasks) if task not in found]
        if missing:
            left_out = " Aggregates leave it out, because another method has runs of all tasks."
            notes.append(
                f"{label} has no run of {len(missing)} tasks: {some(missing)}.{left_out * (label not in compared)}"
            )
    for name, value in suite.rules.items():
        if others := [run.name for run in runs if run.settings.get(name) != value]:
            notes.append(f"The suite has {name}={value}, but not these runs: {some(others)}.")
    if going := [run.name for run in runs if not run.finished]:
        notes.append(f"These runs have not finished all their iterations: {some(going)}.")
    if other := [run.name for group in groups for run in group.runs if not suite.has(run.task)]:
        notes.append(f"These runs are on other tasks: {some(other)}.")
    return notes


def section(found: Standing, metric: str) -> Section:
    """The section of a report that compares with published scores."""
    suite, theirs = suite_of(found.suite), published(found.suite)
    methods = list(dict.fromkeys(label for row in found.rows for label in row.scores))
    scaled = any(row.normalized for row in found.rows)
    header = ["Task", *(["Random", "Human"] if scaled else [])]
    for label in methods:
        header += [label, *([f"{label}, normalized"] if scaled else [])]
    rows = []
    for row in found.rows:
        cells = [row.task]
        if scaled:
            scale = scale_of(row.task, metric)
            cells += [readable(scale.zero), readable(scale.one)] if scale else ["", ""]
        for label in methods:
            cells.append(str(row.scores[label]) if label in row.scores else "")
            cells += [f"{100 * row.normalized[label]:.1f}%" if label in row.normalized else ""] if scaled else []
        rows.append([*cells, *(readable(row.published[m]) if m in row.published else "" for m in theirs)])
    body = page.paragraph(f"{suite.protocol} Means over runs, with 95% bootstrap intervals.")
    body += page.warnings(list(found.notes)) + page.table([*header, *theirs], rows)
    if found.aggregates:
        kinds = list(AGGREGATES)
        lines = [
            [name, *(str(each[kind]) if kind in each else "" for kind in kinds)]
            for name, each in found.aggregates.items()
        ]
        text = (
            f"Aggregates of normalized scores over {len(found.shared)} of {len(suite.tasks)} tasks. For published "
            "scores, whose runs are not known here, only the median and the mean follow from the table above."
        )
        body += page.paragraph(text) + page.table(["Method", *(kind[0].upper() + kind[1:] for kind in kinds)], lines)
    return Section("suite", suite.title, body + page.paragraph(sources(found.suite), "note"))
