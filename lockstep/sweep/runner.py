"""Runs a sweep: starts a process for each run when there is room, watches the processes, and stops them when it
stops."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import look_for_files_in
from lockstep.run.rows import diverged
from lockstep.sweep import child
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.overview import Picture, Row, make_overview
from lockstep.sweep.queue import Entry, Outcome, Queue, State
from lockstep.sweep.slots import Needs, Place, Process, needs
from lockstep.sweep.stopping import Curve, StopRule
from lockstep.system import children

_POLL = 0.1
"""Seconds between checks for processes that have ended."""
_LOOK = 1.0
"""Seconds between reads of the runs' metrics."""
_LAST_LINES = 20
"""Lines of output to show for a run that died without a message."""
_LOSSES = 3
"""How often a run may lose its machine before it counts as failed."""


def needs_of(entry: Entry) -> Needs:
    """The cores, GPUs and memory that a run occupies."""
    return needs(layout_of(entry), entry.experiment["torch_threads"], entry.memory)


def layout_of(entry: Entry) -> Layout:
    """A run's layout. A launcher in a user's file is looked for where the run was added."""
    look_for_files_in(entry.directory)
    return Layout.parse(entry.layout)


class Search(Protocol):
    """An object that adds runs as others end: lockstep.sweep.proposals.Proposals. That module needs torch."""

    @property
    def needs(self) -> Needs:
        """The resources of the runs that it adds at once."""
        ...

    @property
    def complete(self) -> bool:
        """Whether it adds no more runs."""
        ...

    def next(self) -> list[Entry]:
        """Add runs to the queue."""
        ...


@dataclass
class _Running:
    entry: Entry
    share: Any
    process: Process
    curve: Curve
    begin: float
    """Samples that the run had when it was started."""
    objection: str = ""
    """The reason why it was asked to stop early; empty if it was not."""
    stopping: bool = False
    """Whether it was asked to stop."""

    def stop(self) -> None:
        """Ask the run to write a checkpoint and stop."""
        if not self.stopping:
            self.stopping = True
            self.process.terminate()


class Runner:
    """Runs the waiting entries of a queue, then those that a search or a population adds, in this order, and as many at
    a time as the place has room for."""

    def __init__(self, queue: Queue, place: Place, options: SweepOptions, search: Search | None = None) -> None:
        self._queue, self._place, self._search = queue, place, search
        self._slots = options.slots or sys.maxsize
        self._rule = StopRule.parse(options.stop_early) if options.stop_early else None
        self._entries: list[Entry] = []
        self._states: dict[str, State] = {}
        self._curves: dict[str, Curve] = {}
        """The curves of all runs, if there is a rule."""
        self._waiting: deque[Entry] = deque()
        self._running: list[_Running] = []
        self._elsewhere: list[Entry] = []
        """Runs of other processes."""
        self._losses: Counter[str] = Counter()
        self._admit(queue.entries())
        if search is not None and not search.complete:
            place.check(search.needs)  # otherwise it would wait forever for room
        self._asked = 0
        """The number of times that the user has asked to stop."""
        self._requests = children.Requests()
        self._stopping: int | None = None
        """How often the user had asked when the runs were last asked to stop."""
        self._trouble: Exception | None = None
        """Why the sweep cannot continue."""
        self._crowded = False
        """Whether something could have started if there had been room."""
        self._idle = False
        self._barred = False
        """Whether the next part waits for a run that was interrupted."""
        self._began = self._looked = time.monotonic()
        self._overview = make_overview(options.overview, self._picture, f"sweep {queue.folder.name}")

    def _admit(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.name in self._states:
                continue
            outcome = self._queue.outcome(entry.name)
            self._entries.append(entry)
            self._states[entry.name] = outcome.state if outcome else "waiting"
            if outcome is None:
                self._place.check(needs_of(entry))
                self._waiting.append(entry)
            if self._rule:
                self._curves[entry.name] = self._curve(entry)
                self._curves[entry.name].read()

    def run(self) -> bool:
        """Run until nothing waits or the user stops it. Returns whether every run has ended and none has failed.

        Raises:
            SettingsError: the sweep cannot continue, for example on a full disk. Running runs have written checkpoints
            and ended.
        """
        try:
            with children.handling_stops(self._count):
                while self._running or not (self._trouble or self._asked or (self._searched and not self._waiting)):
                    try:
                        self._step()
                    except Exception as error:  # whatever it is, runs must end with checkpoints
                        self._trouble = self._trouble or error
                    if self._asked or self._trouble:
                        self._stop()
            if self._trouble and not isinstance(self._trouble, (SettingsError, OSError)):
                raise self._trouble
            if self._trouble:
                why = str(self._trouble).rstrip(".")
                raise SettingsError(
                    f"The sweep in {self._queue.folder} cannot continue: {why}. No run was lost. To continue once "
                    f"this is solved: {self._queue.command}"
                ) from self._trouble
        finally:
            for running in self._running:
                running.process.kill()
            for running in self._running:
                running.process.wait()
            self._overview.close()
        return self._searched and set(self._states.values()) <= {"done", "stopped"}

    def _step(self) -> None:
        self._start()
        self._note_idleness()
        time.sleep(_POLL)
        self._collect()
        self._look()

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped it."""
        return bool(self._asked)

    def summary(self) -> str:
        """The number of runs in each state."""
        return self._picture().summary()

    def _count(self, number: int) -> None:
        if self._requests.insists(number) or not self._asked:
            self._asked += 1
        if number == signal.SIGHUP:
            children.forget_terminal()

    def _start(self) -> None:
        self._crowded = False
        if self._trouble:
            return
        while not self._asked and len(self._running) < self._slots and (self._waiting or self._propose()):
            share = self._place.take(needs_of(self._waiting[0]))
            if share is None:
                self._crowded = True
                return  # a later run might fit, but would keep the first one waiting
            entry = self._waiting[0]
            curve = self._curves.get(entry.name) or self._curve(entry)
            curve.read()
            begun = self._queue.begun(entry.name)
            process = self._place.start(self._queue, entry.name, share)
            self._waiting.popleft()
            self._running.append(_Running(entry, share, process, curve, curve.samples))
            self._states[entry.name] = "running"
            self._overview.message(f"{'continue' if begun else 'start'} {entry.name} on {share}")

    def _note_idleness(self) -> None:
        """Report that nothing runs because there is no room, for example in a cluster whose nodes are still
        starting."""
        idle = self._crowded and not self._running and not self._asked
        if idle and not self._idle:
            self._overview.message("waiting: there is no room for a run yet (Ctrl-C ends the sweep)")
        self._idle = idle

    def _propose(self) -> bool:
        """Let the search begin a trial, or the population a generation, as soon as there is room and not before: it
        learns from the runs that have ended."""
        if self._search is None or self._searched:
            return False
        if not self._place.has_room(self._search.needs):
            self._crowded = True
            return False
        added = self._search.next()
        self._admit(added)
        self._barred = not (added or self._running or self._elsewhere)
        return bool(self._waiting)

    @property
    def _searched(self) -> bool:
        """Whether no search will add runs any more."""
        return self._search is None or self._barred or self._search.complete

    def _curve(self, entry: Entry) -> Curve:
        """A run's progress. Earlier scores are only kept for a stopping rule."""
        return Curve(self._queue.metrics(entry.name), self._rule.samples if self._rule else 0)

    def _collect(self) -> None:
        """Handle processes that have ended."""
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            running.curve.read()
            self._place.give_back(running.share)
            name, code = running.entry.name, running.process.returncode
            outcome = self._queue.outcome(name)
            lost = code == child.LOST and not running.stopping
            self._losses[name] += lost
            # When a machine shuts down, signals reach the process directly, perhaps before it has installed its
            # handlers.
            resumable = code in (*child.STOPPED, child.ELSEWHERE) or (running.stopping and code < 0)
            resumable |= code == child.FULL or (code == child.LOST and self._losses[name] <= _LOSSES)
            if outcome is None and not resumable:
                outcome = Outcome("failed", reason=self._death_report(name, code))
                self._queue.end(name, outcome)
            held = code == child.ELSEWHERE or (running.objection and self._queue.state(name) == "running")
            if outcome is None and resumable and running.objection and not held:
                outcome = Outcome("stopped", score=running.curve.score, reason=running.objection)
                self._queue.end(name, outcome)
            self._states[name] = outcome.state if outcome else "waiting"
            if code == child.FULL:
                raise SettingsError(f"the disk is full for {name} (log: {self._queue.log(name)}).")
            if outcome is None and lost:
                self._waiting.appendleft(running.entry)
                self._overview.message(f"lost {name} with its machine: it continues elsewhere", "yellow")
            elif outcome is None and held:
                self._elsewhere.append(running.entry)
                self._overview.message(f"{name} is already run by another process")
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
            lost = diverged(self._queue.metrics(name))
            verdict = f", but diverged ({', '.join(lost)} ended as NaN or infinity)" if lost else ""
            color = "yellow" if lost else "green"
            self._overview.message(f"done {name}{score}, digest {(outcome.digest or '')[:12]}{verdict}", color)

    def _death_report(self, name: str, code: int) -> str:
        how = f"ended without a message, with exit code {code}"
        if code == child.LOST:
            how = f"was lost with its machine {_LOSSES + 1} times"
        if code < 0:
            hint = ""
            if code == -signal.SIGKILL:
                hint = ": the system may have run out of memory, see dmesg; --slots N runs fewer at once"
            how = f"was ended by {children.signal_name(-code)}{hint}"
        lines = self._queue.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join([f"The run's process {how}. It had printed last:", *lines])

    def _look(self) -> None:
        """Read the runs' progress, show it, and stop hopeless runs."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        for running in self._running:
            running.curve.read()
        if self._rule is not None:
            for entry in self._elsewhere:
                self._curves[entry.name].read()
        for entry in [entry for entry in self._elsewhere if self._queue.state(entry.name) != "running"]:
            self._elsewhere.remove(entry)
            outcome = self._queue.outcome(entry.name)
            if outcome is None:
                self._waiting.append(entry)  # the process that ran it is gone
            else:
                self._states[entry.name] = outcome.state
        if self._rule is not None:
            self._judge(self._rule)
        self._overview.update()

    def _judge(self, rule: StopRule) -> None:
        for running in self._running:
            marks = running.curve.marks
            score = marks[-1] if marks else None
            if running.stopping or score is None or running.curve.samples <= running.begin:
                continue  # until it progresses, another process may train it while this one waits
            entry = running.entry
            comparable = [e for e in self._entries if e.env_settings == entry.env_settings and e.name != entry.name]
            others = [self._curves[each.name].marks for each in comparable]
            known = [other[len(marks) - 1] for other in others if len(other) >= len(marks)]
            running.objection = rule.objection(score, [value for value in known if value is not None])
            if running.objection:
                running.objection += f" after {len(marks) * rule.samples:,} samples"
                running.stop()

    def _stop(self) -> None:
        """Ask the runs for checkpoints; end them at once if the user asks again."""
        if self._stopping is None:
            self._stopping = min(self._asked, 1)  # even if several signals came at once, ask all runs first
            for running in self._running:
                running.stop()
            if self._running:
                text = "checkpoint and stop after each run's iteration; a further Ctrl-C stops at once"
                if self._trouble:
                    why = str(self._trouble).rstrip(".")
                    text = f"{why}. All runs write a checkpoint and stop; Ctrl-C stops them at once"
                self._overview.message(text)
        elif self._asked > self._stopping:
            for running in self._running:
                running.process.kill()

    def _picture(self) -> Picture:
        counts: Counter[State] = Counter(self._states.values())
        return Picture(dict(counts), [self._row(running) for running in self._running], time.monotonic() - self._began)

    def _row(self, running: _Running) -> Row:
        entry, curve = running.entry, running.curve
        pending = self._place.pending(running.process)
        return Row(entry.name, str(running.share), curve.samples, entry.samples, curve.score, curve.rate, pending)
