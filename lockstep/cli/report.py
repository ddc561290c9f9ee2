"""`lockstep report RUN …` and `lockstep compare A … -- B …`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lockstep.cli.common import parse, progress_to_stderr, say, say_json
from lockstep.config.settings import SettingsError
from lockstep.run.folder import RunFolder


@dataclass(frozen=True)
class ReportArguments:
    """Write an HTML page about runs: curves, scores with intervals, speed, lag, settings, versions and verification."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN ...")]
    """Folders of runs, or of sweeps with all their runs. Runs that differ only in seed and task are one method."""
    out: str | None = None
    """The .html file to write. Default: report.html in the folder if there is one, else here."""
    metric: str | None = None
    """The metric in metrics.jsonl that counts as the score, such as eval/score for runs with evaluations. Default: the
    suite's metric, or score/mean without a suite."""
    suite: str | None = None
    """Show the runs beside published scores of a suite: atari100k, atari57, mujoco or minatar."""
    verify: int = 0
    """Iterations of each run to repeat and compare with its ledger. More prove more but take longer."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class CompareArguments:
    """Compare two sets of runs: lockstep compare A ... -- B ..., each with several seeds, at an equal budget."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="A ...")]
    """Folders of the first set's runs, or of a sweep."""
    against: Annotated[tuple[str, ...], tyro.conf.arg(metavar="B")] = ()
    """Folders of the second set's runs, or of a sweep. A bare -- means the same as this flag."""
    metric: str = "score/mean"
    """The metric in metrics.jsonl that counts as the score; higher is better."""
    x: Literal["samples", "frames", "updates", "time"] = "samples"
    """The budget: runs are compared at the largest value that all runs of a task reached."""
    out: str | None = None
    """An .html file to write, with the curves of both sets and all parts of a report."""
    json: bool = False
    """Print one JSON document."""


def report(arguments: list[str]) -> int:
    """Run `lockstep report`."""
    given = parse(ReportArguments, "report", arguments)
    from lockstep.reports.report import report as write
    from lockstep.reports.runs import listed, some

    runs = [RunFolder.open(run).path for run in listed(given.runs)]
    home = Path(given.runs[0]) if len(given.runs) == 1 else Path()
    out = Path(given.out) if given.out else home / "report.html"
    with progress_to_stderr():
        written = write(runs, out, metric=given.metric, verify=given.verify, suite=given.suite)
    if given.json:
        proofs = [{"run": name, "ok": proof.ok, "verdict": proof.verdict} for name, proof in written.proofs]
        known = {"file": str(out), "bytes": out.stat().st_size, "left_out": list(written.left_out)}
        suite = {} if written.standing is None else {"suite": asdict(written.standing)}
        say_json({**known, "scores": [asdict(each) for each in written.scores], **suite, "proofs": proofs})
    else:
        if written.left_out:
            say(f"left out, since they have no {written.metric}: {some(written.left_out)}")
        for name, proof in written.proofs if given.verify else ():
            say(f"{name}: {proof.verdict}")
        if written.standing:
            say(str(written.standing))
        _say_written(out)
    return 1 if given.verify and not all(proof.ok for _, proof in written.proofs) else 0


def compare(arguments: list[str]) -> int:
    """Run `lockstep compare`."""
    arguments = ["--against" if each == "--" else each for each in arguments]
    if arguments.count("--against") > 1:
        raise SettingsError(
            "compare takes two sets of runs, separated by one --. To show several sets, use lockstep report."
        )
    given = parse(CompareArguments, "compare", arguments)
    from lockstep.reports.compare import compare as contrast
    from lockstep.reports.runs import listed

    a, b = ([RunFolder.open(run).path for run in listed(runs)] for runs in (given.runs, given.against))
    with progress_to_stderr():
        found = contrast(a, b, metric=given.metric, x=given.x, out=given.out)
    if given.json:
        say_json(found.to_json() | {"file": given.out})
        return 0
    say(str(found))
    if given.out:
        _say_written(Path(given.out))
    return 0


def _say_written(path: Path) -> None:
    size = path.stat().st_size
    say(f"wrote {path} ({size / 1e6:.1f} MB)" if size >= 1e6 else f"wrote {path} ({size / 1e3:.0f} kB)")
