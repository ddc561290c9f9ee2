"""The sections of a report about speed, settings, proof and machines."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.settings import SettingsError
from lockstep.envs.mixed import describe
from lockstep.evaluation.statistics import readable
from lockstep.reports import page
from lockstep.reports.page import Html
from lockstep.reports.runs import Method, Run, differing, time_unit
from lockstep.reproducibility.verify import verify
from lockstep.run import ledger
from lockstep.run.checkpoint import list_checkpoints
from lockstep.run.consistency import edited_settings, newest_checkpoint_difference
from lockstep.run.folder import RunFolder
from lockstep.system.supervision import WorkerError

_MAX_VIDEO = 2_500_000
"""Maximum number of bytes of all videos on a page."""
_BESIDE = 4
"""Methods side by side in a table; with more, they go below each other."""
_WAITING = {"wait/rollouts": "learners for rollouts", "wait/parameters": "collectors for parameters"}
"""Metrics of waits, and how the table of speeds names them."""


def speed(runs: Sequence[Run]) -> str:
    """Throughput of each run, and where its time went."""
    parts = list(dict.fromkeys(name for run in runs for name in run.names("time/")))
    rows = []
    for run in runs:
        seconds = run.last("seconds")
        rates = [readable(run.last(n) / seconds) if seconds > 0 else "" for n in ("frames", "samples", "updates")]
        waits = [
            f"{_WAITING.get(name, _tail(name))} {readable(1000 * run.average(name))} ms" for name in run.names("wait/")
        ]
        shares = {_tail(name): run.share(name) for name in parts}
        bar = page.share_bar({name: 0.0 if math.isnan(share) else share for name, share in shares.items()})
        rows.append([run.name, str(_facts(run).get("layout", "")), _duration(seconds), *rates, bar, ", ".join(waits)])
    header = ["Run", "Layout", "Time", "Frames/s", "Samples/s", "Updates/s", "Where time went", "Waits, each iteration"]
    text = "Over the whole run. Waits are means over iterations; only split layouts record them."
    text = text if any(row[-1] for row in rows) else "Over the whole run."
    key = page.key([_tail(name) for name in parts])
    return key + page.table(header, rows, range(len(runs))) + page.paragraph(text, "note")


def settings(groups: Sequence[Method]) -> str:
    """The settings that differ between methods, and all others, folded."""
    every = [group.settings for group in groups]
    names = differing(every)
    if names and len(groups) > _BESIDE:
        rows = [[group.label, *(_value(group.settings.get(name, "—")) for name in names)] for group in groups]
        told = page.table(["Method", *names], rows)
    elif names:
        rows = [[_code(name), *(_value(each.get(name, "—")) for each in every)] for name in names]
        told = page.table(["Setting", *(group.label for group in groups)], rows)
    else:
        told = page.paragraph("All runs have the same settings except seed and task.")
    told += "".join(page.paragraph(text, "note") for text in _sampling(groups))
    same = [[_code(name), _value(value)] for name, value in every[0].items() if name not in names]
    return told + page.details(f"{len(same)} settings shared by all", page.table(["Setting", "Value"], same))


def _sampling(groups: Sequence[Method]) -> list[str]:
    """Each method's shares of samples of several tasks, in sentences."""
    told = []
    for group in groups:
        every = [run.facts["shares_of_samples"] for run in group.runs if run.facts.get("shares_of_samples")]
        told += dict.fromkeys(f"One policy for several tasks ({group.label}): {describe(found)}." for found in every)
    return told


@dataclass(frozen=True)
class Proof:
    """The verdict of a run's ledger."""

    ok: bool
    verdict: str
    experiment: str = ""
    """First digits of the experiment's identity."""
    digest: str = ""
    """First digits of the SHA-256 of the ledger: equal if and only if runs computed the same bits."""


def prove(run: Run, again: int) -> Proof:
    """Compare a run's ledger, settings and newest checkpoint with each other; repeat some iterations."""
    folder = RunFolder(run.path)
    checkpoints = list_checkpoints(folder.checkpoints)
    try:
        head, lines = ledger.read(folder.ledger)
    except ledger.LedgerError as error:
        return Proof(False, _within(run, error))
    known = head["experiment"][:12], hashlib.sha256(folder.ledger.read_bytes()).hexdigest()[:12]
    try:
        found = edited_settings(folder, head) or newest_checkpoint_difference(checkpoints, lines)
        if found:
            return Proof(False, f"The run contradicts its own ledger: {found}", *known)
        if again and lines:
            checked = verify(run.path, None, min(again, len(lines)))
            warning = f" {checked.warning}" if checked.warning else ""
            return Proof(checked.ok, checked.message + warning, *known)
    except (SettingsError, WorkerError) as error:
        return Proof(
            False, f"The ledger is intact, but it could not be compared with the run: {_within(run, error)}", *known
        )
    text = f"{len(lines):,} iteration{'s' * (len(lines) != 1)}, intact; settings and newest checkpoint agree with it."
    return Proof(True, text, *known)


def _within(run: Run, error: Exception) -> str:
    """An error's text, without the path of the run's folder, since the run's name is shown next to it."""
    return str(error).replace(f"{run.path}/", "")


def proof(runs: Sequence[Run], proofs: Sequence[Proof], shown: int) -> str:
    """The verdict of each run's ledger; the first `shown` runs are those on the page."""
    rows = []
    for run, found in zip(runs, proofs, strict=True):
        mark = '<span class="good">✓</span> ' if found.ok else '<span class="bad">✗</span> '
        verdict = Html(mark + page.plain(found.verdict))
        rows.append([run.name, str(run.seed), _code(found.experiment), _code(found.digest), verdict])
    text = (
        "Runs whose ledgers have the same digest computed the same bits. An intact ledger was not changed after it "
        "was written. lockstep verify shows that the run can be repeated, as does this report with --verify N."
    )
    places = [place if place < shown else None for place in range(len(runs))]
    table = page.table(["Run", "Seed", "Experiment", "Ledger", "Verdict"], rows, places)
    return table + page.paragraph(text, "note")


def machines(runs: Sequence[Run]) -> str:
    """Versions, machines and commands: once if all runs share them, else by run."""
    facts = [_facts(run) for run in runs]
    differ = differing(facts)
    names = list(dict.fromkeys(name for each in facts for name in each))
    shared = [[name, str(facts[0][name])] for name in names if name not in differ]
    told = page.table(["In all runs", ""], shared) if shared else ""
    if differ:
        rows = [[run.name, *(str(each.get(name, "—")) for name in differ)] for run, each in zip(runs, facts)]
        told += page.table(["Run", *differ], rows, range(len(runs)))
    commands = [[run.name, _code(str(run.facts.get("command", "")))] for run in runs]
    return told + page.details("Commands", page.table(["Run", "Command"], commands))


def videos(runs: Sequence[Run], named: Sequence[str], metric: str) -> str:
    """The video of each task's best run that has one, as long as the page stays small."""
    players, left_out, room = [], [], _MAX_VIDEO
    for task in named:
        filmed = [run for run in runs if run.task == task and (run.path / "video.mp4").is_file()]
        if not filmed:
            continue
        best = max(filmed, key=lambda run: run.last(metric))
        data = (best.path / "video.mp4").read_bytes()
        if len(data) > room:
            left_out.append(f"{best.path / 'video.mp4'} ({len(data) / 1e6:.1f} MB)")
            continue
        room -= len(data)
        source = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        player = f'<video controls muted playsinline src="{source}"></video>'
        players.append(page.figure(f"{task}: {best.name}, score {readable(best.last(metric))}", player))
    told = f'<div class="charts">{"".join(players)}</div>' if players else ""
    if left_out:
        text = f"Left out to keep the page small: {', '.join(left_out)}. lockstep record --max-steps makes short ones."
        told += page.paragraph(text, "note")
    return told


def _facts(run: Run) -> dict[str, object]:
    """The facts about a run's machine and versions; changes after a resume follow, with the iteration."""
    told: dict[str, object] = {}
    last: dict[str, object] = {}
    for each in ({**run.facts, "iteration": 0}, *run.facts.get("resumed", [])):
        versions = {f"{name} version": version for name, version in each.get("versions", {}).items() if version}
        code = {f"{name}, SHA-256": digest for name, digest in each.get("code", {}).items()}
        kept = {name: each[name] for name in ("python", "platform", "cores", "layout", "started") if name in each}
        for name, value in (versions | code | kept).items():
            if name not in told:
                told[name] = value
            elif value != last[name]:
                told[name] = f"{told[name]}; after iteration {each.get('iteration')}: {value}"
            last[name] = value
    return told


def _code(text: str) -> Html:
    return Html(f"<code>{page.plain(text)}</code>")


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tail(name: str) -> str:
    return name.partition("/")[2]


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return ""
    scale, unit = time_unit(seconds)
    return f"{readable(seconds / scale)} {unit}"
