"""The section of a report about the scores of each task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.config.options import RunOptions
from lockstep.evaluation.statistics import ENOUGH, Estimate, estimate, iqm, readable
from lockstep.reports import page
from lockstep.reports.runs import (
    SCORES,
    Method,
    Run,
    eased,
    other_rules,
    seeds_again,
    some,
    tasks,
)
from lockstep.reports.scales import scale_of


@dataclass(frozen=True)
class Scored:
    """The scores of a method's runs on a task."""

    task: str
    method: str
    runs: int
    samples: tuple[float, float]
    """Samples of the shortest and of the longest run."""
    score: Estimate
    """Interquartile mean over runs."""
    lowest: float
    highest: float
    normalized: float | None
    """The interquartile mean on the benchmark's scale; None for a task without a scale."""
    scale: str | None
    """The name of the scale."""


def warnings(groups: Sequence[Method], metric: str, left_out: Sequence[str]) -> str:
    """Warnings about limits of the numbers on the page."""
    texts = [f"Left out, since they have no {metric}: {some(left_out)}."] if left_out else []
    for group in groups:
        if again := seeds_again(group.runs):
            texts.append(
                f"{group.label}: several runs of a task have seed {', '.join(map(str, again))}. Such runs are not "
                "independent of each other, so intervals are too narrow."
            )
    counts = [len(group.on(task)) for group in groups for task in tasks(group.runs)]
    runs = [run for group in groups for run in group.runs]
    for task in tasks(runs):
        if rules := other_rules([run.settings for run in runs if run.task == task]):
            texts.append(f"Not all runs of {task} have the same task, since they differ in {', '.join(rules)}.")
    texts += [*few(counts), *diverged(runs, metric), *eased(runs, metric)]
    unfinished = [
        f"{run.name} ({run.last('samples'):,.0f} of {run.settings.get('total_steps', 0):,})"
        for run in runs
        if not run.finished
    ]
    if unfinished:
        texts.append(f"These runs have not collected all their samples: {some(unfinished)}.")
    return page.warnings(texts)


def few(counts: Sequence[int]) -> list[str]:
    """Sentences about the intervals of tasks with this many runs."""
    texts = (
        ["A task with one run has no interval, since one run says nothing about other seeds."] if 1 in counts else []
    )
    if any(1 < count < ENOUGH for count in counts):
        texts.append(
            f"With fewer than {ENOUGH} runs of a task, intervals are too narrow, and miss the true value too often: "
            "train more seeds."
        )
    return texts


def diverged(runs: Sequence[Run], metric: str) -> list[str]:
    """A sentence for each run whose metric, or a loss, is not a number any more."""
    ends = [(run.name, run.diverged(metric)) for run in runs]
    return [
        f"{name} has diverged: after {samples:,.0f} samples its metrics are not numbers any more."
        for name, samples in ends
        if samples is not None
    ]


def scored(groups: Sequence[Method], named: Sequence[str], metric: str) -> list[Scored]:
    """One entry for each task and method that has runs of it."""
    every = []
    for task, group in itertools.product(named, groups):
        if runs := group.on(task):
            found = np.array([run.last(metric) for run in runs])
            samples = sorted(float(run.curve("samples", metric)[0][-1]) for run in runs)
            score, scale = estimate(iqm, [found]), scale_of(task, metric)
            on_scale = (float(scale.of(np.array(score.value))), scale.name) if scale else (None, None)
            ends, extremes = (samples[0], samples[-1]), (float(found.min()), float(found.max()))
            every.append(Scored(task, group.label, len(runs), ends, score, *extremes, *on_scale))
    return every


def scores(groups: Sequence[Method], found: Sequence[Scored], metric: str) -> str:
    """A table with a row for each task and method."""
    scales = {each.scale for each in found if each.scale}
    rows = []
    for each in found:
        budget = " to ".join(dict.fromkeys(f"{count:,.0f}" for count in each.samples))
        row = [each.task, each.method, str(each.runs), budget, str(each.score)]
        row.append(f"{readable(each.lowest)} and {readable(each.highest)}")
        if scales:
            row.append("" if each.normalized is None else f"{100 * each.normalized:,.1f}%")
        rows.append(row)
    header = ["Task", "Method", "Runs", "Samples", "Score (95% interval)", "Lowest and highest run"]
    texts = [
        f"A run's score is the last value of {metric}.",
        protocol([run for group in groups for run in group.runs], metric),
        "Of several runs: the interquartile mean (of fewer than four the mean) with its 95% bootstrap interval over "
        "runs.",
    ]
    if any(each.samples[0] < 0.9 * each.samples[1] for each in found):
        texts.append("Runs of unequal length count with the last value of each.")
    text = " ".join(filter(None, texts))
    if scales:
        (name,) = scales if len(scales) == 1 else ("normalized",)
        header.append(name[0].upper() + name[1:])
    return page.table(header, rows) + page.paragraph(text, "note")


def protocol(runs: Sequence[Run], metric: str) -> str:
    """A sentence about the protocol of scores; empty for other metrics."""
    if metric not in SCORES:
        return ""
    if metric == "eval/score":
        text = _evaluations(runs)
    elif metric == "score/mean":
        text = "That is the mean raw score of the last 100 training episodes, exploration included"
    else:
        text = "That is a raw score of training episodes, exploration included"
    rules = {str(run.settings.get("env.protocol", "none")) for run in runs} - {"none"}
    return text + f" (Atari protocol: {', '.join(sorted(rules))})" * bool(rules) + "."


def _evaluations(runs: Sequence[Run]) -> str:
    default, parts = RunOptions(), [(run, options) for run in runs for options in _evaluated_with(run)]
    options = [each for _, each in parts]
    counts = sorted({each.get("eval_episodes", default.eval_episodes) for each in options})
    episodes = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    greedy = {each.get("eval_greedy", default.eval_greedy) for each in options}
    acting = {(True,): "the most likely actions", (False,): "actions chosen as by lockstep eval"}
    how = acting.get(tuple(greedy), "the most likely actions in some evaluations only")
    text = f"That is the mean raw score of {episodes} episodes on separate environments, with {how}"
    text += ", on levels that training does not see" * any(run.settings.get("env.num_levels") for run in runs)
    played = [each.get("eval_opponents") or run.settings.get("env.opponents") for run, each in parts]
    against = {str(name).partition("#")[0] for names in played for name in names or ()}
    return text + f", against {', '.join(sorted(against))}" * bool(against)


def _evaluated_with(run: Run) -> list[dict[str, Any]]:
    """The options of each part of a run that had evaluations; a run has several parts if it was resumed."""
    begun = run.facts.get("options", {})
    resumed = [(each.get("iteration", 0), each.get("options", {})) for each in run.facts.get("resumed", [])]
    parts = [(0, begun), *((iteration, {**begun, **options}) for iteration, options in resumed)]
    ends = [begin for begin, _ in parts[1:]] + [math.inf]
    trained = [options for (begin, options), end in zip(parts, ends, strict=True) if begin < end]
    return [options for options in trained if options.get("eval_every")] or [begun]
