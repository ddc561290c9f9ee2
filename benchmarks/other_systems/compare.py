"""lockstep beside other systems: the same environments, network, batches and epochs, on the same cores, in turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.run.platform import version
from lockstep.speed.bench import load_of_others
from lockstep.speed.trial import Trial
from lockstep.system.machine import cores
from lockstep.training.prepare import prepare
from other_systems.installed import PeerError, python_of
from other_systems.systems import PEERS, Peer, Task, find
from other_systems.task import comparable, task_of

_WARM_UP = 0.25
"""Seconds that a peer runs before it is measured, as a share of the measured ones; one iteration at least."""
_PATIENCE = 300.0, 8.0
"""How long a peer may take: so many seconds, and so many times those that it is measured for."""


@dataclass(frozen=True)
class System:
    """What was measured of one system."""

    name: str
    layout: str
    versions: dict[str, str | None]
    rates: tuple[float, ...]
    """Samples a second, one number a round."""

    def spread(self) -> dict[str, float]:
        return _spread(self.rates)


@dataclass(frozen=True)
class Comparison:
    """What compare found."""

    task: Task
    load: float
    """Of other programs, in cores, before anything was measured."""
    systems: tuple[System, ...]
    """lockstep first."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why a peer was left out, by its name."""

    def ratios(self, system: System) -> dict[str, float]:
        """lockstep's rate as a multiple of a system's, round by round."""
        own = self.systems[0].rates
        return _spread([mine / theirs for mine, theirs in zip(own, system.rates, strict=True)])

    def to_json(self) -> dict[str, Any]:
        systems = [
            {**asdict(each), "samples_per_second": each.spread(), "lockstep_is_faster_by": self.ratios(each)}
            for each in self.systems
        ]
        return {"task": self.task, "load_of_others": self.load, "systems": systems, "skipped": self.skipped}

    def table(self) -> str:
        """Markdown: medians over rounds, with least and greatest."""
        lines = [
            "| system | samples/s | min to max | lockstep ÷ system | min to max | layout |",
            "|---|---|---|---|---|---|",
        ]
        for each in self.systems:
            rate, ratio = each.spread(), self.ratios(each)
            shown = " ".join([each.name, (each.versions.get(each.name.lower().replace(" ", "-")) or "")]).strip()
            lines.append(
                f"| {shown} | {rate['median']:,.0f} | {rate['min']:,.0f} to {rate['max']:,.0f} | {ratio['median']:.2f} "
                f"| {ratio['min']:.2f} to {ratio['max']:.2f} | `{each.layout}` |"
            )
        lines += [f"\n{name} is missing: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def compare(
    experiment: Experiment,
    layout: Layout,
    peers: Sequence[str],
    *,
    rounds: int = 3,
    seconds: float = 20.0,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Measure lockstep and its peers in turn, over several rounds.

    Args:
        experiment: what all of them train; Atari is played with EnvPool, whose options all of them share.
        layout: lockstep's. Of a peer's own ones the fastest is taken, found before the first round.
        peers: as other_systems.systems.find reads them.
        seconds: that every system is measured for in every round, or one iteration if that takes longer.
        say: hears what is being done.

    Raises:
        SettingsError: the experiment cannot be compared, or a peer does not exist.
        WorkerError: lockstep itself failed.
    """
    if not peers:
        raise SettingsError(f"--peers needs names: {', '.join(PEERS)}, cleanrl=FILE or leanrl=FILE.")
    chosen = [find(text) for text in peers]
    experiment = prepare(comparable(experiment), layout)
    available = cores()
    load = load_of_others(available, say)
    task = {**task_of(experiment, threads=available), "seconds": seconds, "warmup": _WARM_UP * seconds}
    # In the precision that it was asked for, and, where that is not theirs, in that of the others.
    variants = {"lockstep": experiment}
    if experiment.precision != "fp32":
        variants["lockstep, fp32"] = experiment.replace(precision="fp32")
    skipped: dict[str, str] = {}
    runners: dict[str, _Runner] = {}
    for peer in chosen:
        try:
            runners[peer.name] = _ready(peer, task, say)
        except PeerError as error:
            say(f"{peer.name} is left out: {error}")
            skipped[peer.name] = str(error)
    rates: dict[str, list[float]] = {name: [] for name in (*variants, *runners)}
    trials: dict[str, Trial] = {}
    try:
        for name, variant in variants.items():
            say(f"starting {name} with {layout} …")
            trials[name] = Trial(variant, layout)
            trials[name].run(task["warmup"], iterations=1 + trials[name].settling)
        for number in range(1, rounds + 1):
            for name, trial in trials.items():
                rates[name].append(trial.run(seconds).rate)
                say(f"round {number} of {rounds}: {name} {rates[name][-1]:,.0f} samples/s")
            for name, runner in list(runners.items()):
                try:
                    rates[name].append(runner.measure(task))
                except PeerError as error:
                    skipped[name] = str(error)
                    del runners[name], rates[name]
                    say(f"{name} is left out: {error}")
                    continue
                say(f"round {number} of {rounds}: {name} {rates[name][-1]:,.0f} samples/s")
    finally:
        for trial in trials.values():
            trial.close()
    own = {name: version(name) for name in ("lockstep", "torch", "envpool")}
    systems = [System(name, str(layout), own, tuple(rates[name])) for name in variants]
    for name, runner in runners.items():
        systems.append(System(name, runner.described(), runner.versions, tuple(rates[name])))
    return Comparison(task, load, tuple(systems), skipped)


@dataclass
class _Runner:
    """A peer with its Python and the layout that is fastest here."""

    peer: Peer
    python: Path
    layout: dict[str, Any]
    versions: dict[str, str | None] = field(default_factory=dict)

    def measure(self, task: Task) -> float:
        """Samples a second, of a process that trains the task from the beginning.

        Raises:
            PeerError: it failed, or took far too long.
        """
        answer = _run_script(self.peer, self.python, {**task, "layout": self.layout, "packages": self.peer.packages})
        self.versions = answer["versions"]
        return answer["samples_per_second"]

    def described(self) -> str:
        """The layout as a text, without a file's path."""
        shown = {name: value for name, value in self.layout.items() if name not in ("file", "flags")}
        return " ".join(f"{name}={str(value).lower()}" for name, value in shown.items())


def _ready(peer: Peer, task: Task, say: Callable[[str], None]) -> _Runner:
    """Install a peer and find its fastest layout."""
    if reason := peer.unable(task):
        raise PeerError(reason)
    python = python_of(peer.environment, peer.requirements, say)
    runners = [_Runner(peer, python, layout) for layout in peer.layouts(task)]
    if len(runners) == 1:
        return runners[0]
    found: dict[int, float] = {}
    error = PeerError("it has no layout for this task")
    for index, runner in enumerate(runners):
        try:
            found[index] = runner.measure({**task, "seconds": task["seconds"] / 2})
            say(f"trying {peer.name} with {runner.described()}: {found[index]:,.0f} samples/s")
        except PeerError as failure:
            error = failure
            say(f"trying {peer.name} with {runner.described()}: {failure}")
    if not found:
        raise error
    return runners[max(found, key=lambda index: found[index])]


def _run_script(peer: Peer, python: Path, task: Task) -> dict[str, Any]:
    """Run a peer's script in its environment, and read its answer. Its processes end with it, and with this one."""
    script = Path(__file__).parent / peer.script
    with tempfile.TemporaryDirectory(prefix="lockstep-peer-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps({**task, "parent": os.getpid()}), encoding="utf-8")
        command = [str(python), str(script), str(folder / "task.json"), str(folder / "answer.json")]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            )
            limit = _PATIENCE[0] + _PATIENCE[1] * task["seconds"]
            late = False
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with all that it started
                process.wait()
        answer = folder / "answer.json"
        if answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
        said = (folder / "output").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        what = f"gave no answer within {limit:.0f} s" if late else f"ended with code {process.returncode}"
        raise PeerError("\n".join([f"its script {what}. It printed last:", *said]))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
