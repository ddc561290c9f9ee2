"""The sweep on this machine: starts a process for each run, watches them, and ends with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.layout import Layout
from lockstep.sweep import child
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.overview import Picture, Row, make_overview
from lockstep.sweep.queue import Entry, Outcome, Queue, State
from lockstep.sweep.slots import Machine, Needs, Share, needs
from lockstep.sweep.stopping import Curve, StopRule

_POLL = 0.1
"""Seconds between looks for processes that have ended."""
_LOOK = 1.0
"""Seconds between looks at the runs' metrics."""
_LAST_LINES = 20
"""Of what a run printed, if it ended without a word."""


def needs_of(entry: Entry) -> Needs:
    """The cores and GPUs that a run occupies."""
    return needs(Layout.parse(entry.layout), entry.experiment["torch_threads"])


@dataclass
class _Running:
    entry: Entry
    share: Share
    process: subprocess.Popen[bytes]
    curve: Curve
    objection: str = ""
    """Why it was told to stop early."""
    told: bool = False
    """Whether it was told to stop."""

    def tell(self) -> None:
        """Ask for a checkpoint and an end, once: a second time would be taken as impatience."""
        if not self.told:
            self.told = True
            self.process.terminate()


class Runner:
    """Runs what waits in a queue, as much at a time as the machine holds, in the order of the queue."""

    def __init__(self, queue: Queue, machine: Machine, options: SweepOptions) -> None:
        self._queue, self._machine = queue, machine
        self._slots = options.slots or sys.maxsize
        self._rule = StopRule.parse(options.stop_early) if options.stop_early else None
        entries = queue.entries()
        outcomes = {entry.name: queue.outcome(entry.name) for entry in entries}
        self._states: dict[str, State] = {name: ended.state if ended else "waiting" for name, ended in outcomes.items()}
        self._waiting = deque(entry for entry in entries if self._states[entry.name] == "waiting")
        self._running: list[_Running] = []
        for entry in self._waiting:
            machine.check(needs_of(entry))
        self._curves = {entry.name: self._curve(entry) for entry in entries} if self._rule else {}
        for curve in self._curves.values():
            curve.read()
        self._entries = entries
        self._asked = 0
        """How often the user asked to stop."""
        self._began = self._looked = time.monotonic()
        self._overview = make_overview(options.overview, self._picture, f"sweep {queue.folder.name}")

    def run(self) -> bool:
        """Run until nothing waits, or the user wants no more; whether all runs have ended, and none has failed."""
        try:
            with self._counting_signals():
                while self._running or (self._waiting and not self._asked):
                    self._start()
                    time.sleep(_POLL)
                    self._collect()
                    self._look()
                    if self._asked:
                        self._stop()
        finally:
            for running in self._running:
                running.process.kill()
            for running in self._running:
                running.process.wait()
            self._overview.close()
        return set(self._states.values()) <= {"done", "stopped"}

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it."""
        return bool(self._asked)

    def summary(self) -> str:
        """How many runs are in which state."""
        return self._picture().summary()

    @contextlib.contextmanager
    def _counting_signals(self) -> Iterator[None]:
        def count(number: int, frame: Any) -> None:
            self._asked += 1

        old = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        while self._waiting and not self._asked and len(self._running) < self._slots:
            share = self._machine.take(needs_of(self._waiting[0]))
            if share is None:
                return  # what waits behind might fit, but would keep the first waiting
            entry = self._waiting.popleft()
            command = [sys.executable, "-m", child.__name__, str(self._queue.folder), entry.name]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share.gpus else None
            with open(self._queue.log(entry.name), "ab") as log:
                process = subprocess.Popen(
                    [*command, str(os.getpid()), ",".join(map(str, share.cores))],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the sweep, which tells its runs
                )
            begun = self._queue.begun(entry.name)
            curve = self._curves.get(entry.name) or self._curve(entry)
            self._running.append(_Running(entry, share, process, curve))
            self._states[entry.name] = "running"
            self._overview.message(f"{'continue' if begun else 'start'} {entry.name} on {share}")

    def _curve(self, entry: Entry) -> Curve:
        """What a run has reached; its scores on the way matter only to a rule."""
        return Curve(self._queue.run(entry.name) / "metrics.jsonl", self._rule.samples if self._rule else 0)

    def _collect(self) -> None:
        """Take notice of processes that have ended."""
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            running.curve.read()
            self._machine.give_back(running.share)
            name, code = running.entry.name, running.process.returncode
            outcome = self._queue.outcome(name)
            resumable = code in (child.INTERRUPTED, child.ELSEWHERE) or (running.told and code < 0)
            if outcome is None and not resumable:
                outcome = Outcome("failed", reason=self._obituary(name, code))
                self._queue.end(name, outcome)
            elif outcome is None and running.objection:
                outcome = Outcome("stopped", score=running.curve.score, reason=running.objection)
                self._queue.end(name, outcome)
            self._states[name] = outcome.state if outcome else "waiting"
            if outcome is None and code == child.ELSEWHERE:
                self._overview.message(f"{name} is run by another process: left to it")
            elif outcome is None:
                self._overview.message(f"interrupted {name}")
            else:
                self._report(name, outcome)

    def _report(self, name: str, outcome: Outcome) -> None:
        score = "" if outcome.score is None else f", score {outcome.score:.2f}"
        if outcome.state == "failed":
            text = outcome.reason.replace("\n", "\n    ")
            self._overview.message(f"failed {name} (log: {self._queue.log(name)}):\n    {text}", "red")
        elif outcome.state == "stopped":
            self._overview.message(f"stopped {name} early: {outcome.reason}", "yellow")
        else:
            self._overview.message(f"done {name}{score}, digest {outcome.digest}", "green")

    def _obituary(self, name: str, code: int) -> str:
        how = f"ended without a word, with exit code {code}"
        if code < 0:
            hint = ": the system may have run out of memory, see dmesg" if code == -signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-code).name}{hint}"
        lines = self._queue.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join([f"The run's process {how}. It had printed last:", *lines])

    def _look(self) -> None:
        """Read what the runs have reached, show it, and stop what is hopeless."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        for running in self._running:
            running.curve.read()
        if self._rule is not None:
            self._judge(self._rule)
        self._overview.update()

    def _judge(self, rule: StopRule) -> None:
        for running in self._running:
            marks = running.curve.marks
            score = marks[-1] if marks else None
            if running.told or score is None:
                continue
            comparable = [e for e in self._entries if e.env == running.entry.env and e.name != running.entry.name]
            others = [self._curves[entry.name].marks for entry in comparable]
            known = [other[len(marks) - 1] for other in others if len(other) >= len(marks)]
            running.objection = rule.objection(score, [value for value in known if value is not None])
            if running.objection:
                running.objection += f" after {len(marks) * rule.samples:,} samples"
                running.tell()

    def _stop(self) -> None:
        """Do what the user asked for: the first time an end with checkpoints, the second time an end."""
        if self._asked > 1:
            for running in self._running:
                running.process.kill()
        elif any(not running.told for running in self._running):
            self._overview.message("checkpoint and stop after this iteration of each run; once more to stop at once")
            for running in self._running:
                running.tell()

    def _picture(self) -> Picture:
        counts: Counter[State] = Counter(self._states.values())
        rows = [
            Row(r.entry.name, str(r.share), r.curve.samples, r.entry.samples, r.curve.score, r.curve.rate)
            for r in self._running
        ]
        return Picture(dict(counts), rows, time.monotonic() - self._began)
