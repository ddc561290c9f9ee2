"""`lockstep report`: shows runs on one page.

findings.py, curves.py and aggregates.py show the results of learning. ages.py and provenance.py show how they came
about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config.settings import SettingsError
from lockstep.evaluation.statistics import ENOUGH
from lockstep.reports import ages, aggregates, curves, findings, page, provenance, suites
from lockstep.reports.charts import PageRuns
from lockstep.reports.findings import Scored
from lockstep.reports.page import Section
from lockstep.reports.provenance import Proof
from lockstep.reports.runs import Method, Run, listed, methods, tasks, title, unique_names, with_metric
from lockstep.reports.suites import Standing
from lockstep.run.files import write_whole, writing


@dataclass(frozen=True)
class Report:
    """The result of writing a page."""

    path: Path
    metric: str
    """The metric that counts as the score."""
    left_out: tuple[str, ...]
    """Runs without a value of the metric."""
    proofs: tuple[tuple[str, Proof], ...]
    """The verdict of each run's ledger, also for runs that were left out."""
    scores: tuple[Scored, ...] = ()
    """The scores of each method on each task."""
    standing: Standing | None = None
    """The comparison with a suite's published scores, if one was asked for."""


def report(
    runs: Path | str | Sequence[Path | str],
    out: Path | str = "report.html",
    *,
    metric: str | None = None,
    verify: int = 0,
    suite: str | None = None,
) -> Report:
    """Write one self-contained HTML page about some runs. Runs that differ only in seed and task are one method.

    Args:
        runs: run folders; the runs may still be training.
        out: file to write, ending in .html.
        metric: name in metrics.jsonl that counts as the score, by default score/mean or that of the suite; runs without
        it are left out and named.
        verify: iterations of each run to repeat and compare (see lockstep.verify), 0 for none.
        suite: name of a suite (lockstep.reports.suites), whose published scores the page shows beside those of the
        runs.

    Returns:
        The page's path, and its findings about single runs.

    Raises:
        SettingsError: a folder is not a run, no run has the metric, the file's name does not end in .html, or there is
        no such suite.
    """
    metric = metric or (suites.suite_of(suite).metric if suite else "score/mean")
    runs = listed(runs)
    if not runs:
        raise SettingsError("No run was given. Name at least one run folder, for example: lockstep report runs/pong")
    found, left_out = read_runs(runs, metric)
    groups = methods(found, across_tasks=True)
    heading = title([run.settings for run in found])
    for group in groups:
        group.label = group.label or heading or "all runs"
    standing = suites.standing(suite, groups, metric) if suite else None
    return write_page(out, heading or "Report", groups, metric, left_out=left_out, verify=verify, standing=standing)


def read_runs(paths: Sequence[Path | str], metric: str) -> tuple[list[Run], list[Run]]:
    """Each run once, however its folder's path is written, and the runs left out because they have no value of the
    metric.

    Raises:
        SettingsError: a folder is not a run, or no run has the metric.
    """
    folders = list({path.resolve(): path for path in map(Path, paths)}.values())
    found = [replace(Run.read(path), label=name) for path, name in zip(folders, unique_names(folders), strict=True)]
    return with_metric(found, metric, "samples"), [run for run in found if not run.has(metric)]


def write_page(
    out: Path | str,
    heading: str,
    groups: Sequence[Method],
    metric: str,
    *,
    x: str = "samples",
    verdict: Section | None = None,
    left_out: Sequence[Run],
    verify: int = 0,
    standing: Standing | None = None,
) -> Report:
    """The page about some methods. verdict: the result of a comparison at equal x. left_out: the runs without the
    metric. standing: the comparison with a suite's published scores.

    Raises:
        SettingsError: see report.
    """
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise SettingsError(f"Cannot write a page to --out {out}. End its name in .html.")
    if verify < 0:
        raise SettingsError(f"--verify {verify} is out of range: give the iterations to repeat, or 0 for none.")
    runs = [run for group in groups for run in group.runs]
    named = tasks(runs)
    names = tuple(run.name for run in left_out)
    every = [*runs, *left_out]
    proofs = [provenance.prove(run, verify) for run in every]
    scored = findings.scored(groups, named, metric)
    drawn = PageRuns(runs, [number for number, group in enumerate(groups) for _ in group.runs])
    sections = [
        *([verdict] if verdict else []),
        *([suites.section(standing, metric)] if standing else []),
        Section("scores", "Scores", findings.warnings(groups, metric, names) + findings.scores(groups, scored, metric)),
        Section("curves", "Learning curves", curves.curves(groups, named, metric, drawn)),
        Section("parallel", "Parallel coordinates", curves.parallel(drawn, metric)),
        Section("aggregates", "Aggregates", aggregates.aggregates(groups, named, metric, drawn, x)),
        Section("diagnostics", "Diagnostics", curves.diagnostics(groups, named, drawn)),
        Section("speed", "Speed and waiting", provenance.speed(runs)),
        Section("lag", "Lag and asynchrony", ages.section(runs, groups, named, drawn)),
        Section("settings", "Settings", provenance.settings(groups)),
        Section("proof", "Proof", provenance.proof(every, proofs, len(runs))),
        Section("machines", "Versions and machines", provenance.machines(runs)),
        Section("videos", "Videos", provenance.videos(runs, named, metric)),
    ]
    counts = [(len(runs), "run"), (len(groups), "method"), (len(named), "task")]
    summary = ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts)
    labels = [group.label for group in groups]
    banded = any(len(group.on(task)) >= ENOUGH for group in groups for task in named)
    sized = any(len(group.runs) > 1 for group in groups)
    chips = [f"{group.label} ({group.size})" if sized else group.label for group in groups]
    controls = page.controls(chips, labels, drawn.described(labels), drawn.labels(), banded=banded)
    text = page.document(heading, summary, controls, [section for section in sections if section.body])
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text.encode(errors="replace"))  # a folder's name may not be valid text
    verdicts = tuple((run.name, proof) for run, proof in zip(every, proofs, strict=True))
    return Report(out, metric, names, verdicts, tuple(scored), standing)
