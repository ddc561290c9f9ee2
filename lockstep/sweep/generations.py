"""The generations of a population. Each has a file in the sweep's folder that lists its members and predecessors."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lockstep import envs
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.evaluation import opponents
from lockstep.experiment import WarmStart
from lockstep.sweep.population import Population
from lockstep.sweep.proposals import Proposals
from lockstep.sweep.queue import Entry, Outcome, Queue, State, read_json, write_json
from lockstep.sweep.search import measured, reached
from lockstep.training.warm_start import resolved


@dataclass(frozen=True)
class Member:
    """A member in one generation."""

    generation: int
    """Its number, from 1."""
    number: int
    """From 1."""
    values: dict[str, Any]
    """The member's settings, by their paths."""
    run: str
    """Its run's name."""
    successor_of: int | None
    """The member of the previous generation whose weights it started from."""
    state: State
    value: float | None = None
    """The objective at the end of the run."""

    def __str__(self) -> str:
        value = "–" if self.value is None else f"{self.value:.4g}"
        values = " ".join(f"{name}={x}" for name, x in self.values.items())
        succeeds = self.successor_of not in (None, self.number)
        return (
            f"generation {self.generation}, member {self.number}: {value} with {values}"
            f"{f', after member {self.successor_of}' if succeeds else ''}"
        )


class Generations(Proposals[Population]):
    """A population. generations/NUMBER.json lists each member's settings and predecessor."""

    key, parts = "population", "generations"

    @classmethod
    def make(cls, queue: Queue, search: Any) -> Generations:
        """Begin or continue a population. Its folder may contain nothing else."""
        if queue.exists() and queue.entries() and cls.open(queue) is None:
            raise SettingsError(
                f"{queue.folder} already holds runs that are not part of a population. Choose another folder."
            )
        return super().make(queue, search)

    @property
    def complete(self) -> bool:
        """Whether no further generation is wanted or possible: failed runs have to end first."""
        count = self._count
        states = self._ended(count)
        return count >= self.search.generations or ("failed" in states and None not in states)

    def next(self) -> list[Entry]:
        """Begin the next generation and return its runs. Returns none while the last generation runs."""
        count = self._count
        if not set(self._ended(count)) <= {"done", "stopped"}:
            return []
        population, generation = self.search, count + 1
        values, successors = population.begun(), [None] * population.members
        begins: list[WarmStart | None] = [None] * population.members
        rivals: tuple[str, ...] = ()
        if count:
            before = self.members(count)
            if all(member.value is None for member in before):
                raise SettingsError(
                    f"No run of generation {count} has the metric {population.objective} (--objective), or every run "
                    "has diverged, so there is nothing to select by. docs/metrics.md lists the metrics; score/mean "
                    "needs a finished episode, eval/score needs --eval-every N. Start again in another folder, with "
                    "longer generations or other settings."
                )
            successors, values = population.following(
                generation, [member.value for member in before], [member.values for member in before]
            )
            begins = [self._ended_with(before[of].run) for of in successors]
            if population.rivals:
                rivals = tuple(self._rival(member.run) for member in before if member.value is not None)
        runs = [population.member(generation, m, values[m], begins[m], rivals) for m in range(population.members)]
        members = [
            {"run": run.name, "values": value, "successor_of": of, "experiment": run.experiment}
            for run, value, of in zip(runs, values, successors)
        ]
        # Write this first, so that a queued run always belongs to a generation, even if this process is killed.
        write_json(self._folder / f"{generation:03}.json", {"members": to_json(members)})
        return self._enqueue(generation)

    def all(self) -> list[Member]:
        """The members of all generations so far."""
        return [member for generation in range(1, self._count + 1) for member in self.members(generation)]

    def members(self, generation: int) -> list[Member]:
        """The members of one generation."""
        found = []
        for number, kept in enumerate(self._kept(generation), 1):
            name, of = kept["run"], kept["successor_of"]
            state = self._queue.state(name)
            lines = measured(self._queue.metrics(name)) if state == "done" else []
            value, _ = reached(lines, self.search.objective)
            successor_of = None if of is None else of + 1
            found.append(Member(generation, number, from_json(kept["values"]), name, successor_of, state, value))
        return found

    def measured(self, member: Member) -> list[dict[str, Any]]:
        """The lines of metrics that a member's run wrote."""
        return measured(self._queue.metrics(member.run))

    def best(self) -> Member | None:
        """The best member of the last generation that has ended."""
        for generation in range(self._count, 0, -1):
            members = self.members(generation)
            scores = [-math.inf if member.value is None else member.value for member in members]
            if all(member.state in ("done", "stopped") for member in members) and max(scores) > -math.inf:
                return members[scores.index(max(scores))]
        return None

    def give_up(self, pattern: str) -> list[str]:
        """End failed members whose runs match a pattern without a score, so that other members replace them.

        Raises:
            SettingsError: no failed run matches.
        """
        ended = {member.run: member.state for member in (self.members(self._count) if self._count else ())}
        names = [name for name, state in ended.items() if state == "failed" and fnmatchcase(name, pattern)]
        if not names:
            raise SettingsError(
                f"--drop {pattern}: in a population only failed runs can be dropped, and no failed run has such a "
                f"name. For the names, see: {self._queue.command} --status"
            )
        for name in names:
            self._queue.end(name, Outcome("stopped", reason="failed, and was given up"))
        return names

    def ancestry(self, member: Member) -> list[Member]:
        """A member and its ancestors, whose weights it inherited, the oldest first."""
        known = {(each.generation, each.number): each for each in self.all()}
        line = [member]
        while line[0].successor_of is not None:
            line.insert(0, known[line[0].generation - 1, line[0].successor_of])
        return line

    def summary(self) -> str:
        """The progress so far, in one line."""
        best = self.best()
        done = best.generation if best else 0
        where = f"; its run: {self._queue.run(best.run)}" if best else ""
        search = self.search
        size = f"{search.generations} generations of {search.members}"
        return f"{done} of {size} done; best by {search.objective}: {best or 'none yet'}{where}"

    def document(self) -> dict[str, Any]:
        """The whole population as JSON, for programs."""
        best = self.best()
        return {
            "objective": self.search.objective,
            "best": best and dataclasses.asdict(best),
            "ancestry": [member.run for member in self.ancestry(best)] if best else [],
            "members": [dataclasses.asdict(member) for member in self.all()],
        }

    def _requeue(self) -> None:
        if count := self._count:
            self._enqueue(count)

    def _kept(self, generation: int) -> list[dict[str, Any]]:
        return read_json(self._folder / f"{generation:03}.json")["members"]

    def _ended(self, generation: int) -> list[str | None]:
        """How the runs of a generation ended; None for runs that have not ended."""
        outcomes = [self._queue.outcome(kept["run"]) for kept in self._kept(generation)] if generation else []
        return [outcome and outcome.state for outcome in outcomes]

    def _enqueue(self, generation: int) -> list[Entry]:
        members = self._kept(generation)
        experiments = [from_json(kept["experiment"]) for kept in members]
        runs = [self.search.labelled(generation, member, each) for member, each in enumerate(experiments)]
        self._queue.add(runs, self._directory, self._command)
        return [self._queue.entry(kept["run"]) for kept in members]

    def _ended_with(self, name: str) -> WarmStart:
        """The weights and the optimizer state of a run that has ended."""
        path = self._queue.run(name)
        start = resolved(self.search.run.experiment.replace(warm_start=WarmStart(str(path), optimizer=True))).warm_start
        return dataclasses.replace(start, run=self._place(path))

    def _rival(self, name: str) -> str:
        """The name of a run that has ended, in the form of opponents' names."""
        path = self._queue.run(name)
        (found,) = opponents.resolved(envs.resolve(self.search.run.experiment.env), (str(path),))
        return self._place(path) + found.removeprefix(str(path))

    def _place(self, path: Path) -> str:
        """The path relative to where the run starts, so that names stay equal wherever the population's folder is."""
        relative = os.path.relpath(path, self._directory)
        return str(path) if relative.startswith("..") else relative
