"""`lockstep report`: everything that some runs show, on one page.

findings.py says what was learned, provenance.py how it came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.evaluation import findings, page, provenance
from lockstep.evaluation.page import Section
from lockstep.evaluation.runs import Method, Run, methods, tasks, title
from lockstep.settings import SettingsError


def report(
    runs: Sequence[Path | str], out: Path | str = "report.html", *, metric: str = "score/mean", verify: int = 0
) -> Path:
    """Write one self-contained HTML page about some runs. Runs that differ only in seed and task are one method.

    Args:
        runs: run folders, of runs that have ended or not.
        out: file to write, ending in .html.
        metric: name in metrics.jsonl that counts as the score; runs without it are left out.
        verify: iterations of each run to repeat and compare (see lockstep.verify), 0 for none.

    Returns:
        The path written.

    Raises:
        SettingsError: a folder is no run, no run has the metric, or the file's name does not end in .html.
    """
    if not runs:
        raise SettingsError("No run was given. Name at least one run folder, for example: lockstep report runs/pong")
    found = read_runs(runs, metric)
    groups = methods(found, across_tasks=True)
    heading = title([run.settings for run in found])
    for group in groups:
        group.label = group.label or heading or "all runs"
    return write_page(out, heading or "Report", groups, metric, verify=verify)


def read_runs(paths: Sequence[Path | str], metric: str) -> list[Run]:
    """Each run once; those without a value of the metric are left out.

    Raises:
        SettingsError: a folder is no run, or none has the metric.
    """
    found = [Run.read(path) for path in dict.fromkeys(map(Path, paths))]
    scored = [run for run in found if run.has(metric)]
    if not scored:
        found[0].curve("samples", metric)  # raises, and says what there is instead
    return scored


def write_page(
    out: Path | str,
    heading: str,
    groups: Sequence[Method],
    metric: str,
    *,
    verdict: Section | None = None,
    verify: int = 0,
) -> Path:
    """The page about some methods; verdict is what a comparison found.

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
    sections = [
        *([verdict] if verdict else []),
        Section("scores", "Scores", findings.warnings(groups) + findings.scores(groups, named, metric)),
        Section("curves", "Learning curves", findings.curves(groups, named, metric)),
        Section("aggregates", "Aggregates", findings.aggregates(groups, named, metric)),
        Section("speed", "Speed and waiting", provenance.speed(runs)),
        Section("lag", "Policy lag", provenance.lag(runs)),
        Section("settings", "Settings", provenance.settings(groups)),
        Section("proof", "Proof", provenance.proof(runs, verify)),
        Section("machines", "Versions and machines", provenance.machines(runs)),
        Section("videos", "Videos", provenance.videos(runs, named, metric)),
    ]
    counts = [(len(runs), "run"), (len(groups), "method"), (len(named), "task")]
    summary = ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts)
    text = page.document(heading, summary, [section for section in sections if section.body])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out
