"""Population-based training: members learn side by side, and after each generation the worst go on with what the best
have learned, and with other settings (Jaderberg et al. 2017, arXiv:1711.09846).

A member is a run in each generation, which begins with the weights and the optimizer of its predecessor's last
checkpoint. So each can be verified and repeated by itself, and who succeeds whom follows from scores alone.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.experiment import Experiment, WarmStart
from lockstep.layout import Layout
from lockstep.settings import SettingsError, from_json, look_for_files_in, to_json
from lockstep.sweep.queue import Entry, Outcome, Queue, State, read_json, write_json
from lockstep.sweep.search import OBJECTIVE, Between, OneOf, check_kinds, check_space, diverged, is_whole, reached
from lockstep.sweep.slots import Needs, needs
from lockstep.sweep.spec import Run, replaced, setting, task
from lockstep.warm_start import resolved

_STEP = 0.1
"""Of its range, by which a number is moved."""
_ANEW = 0.1
"""Probability that a setting is drawn anew instead."""
_DRAWS = 20
"""Draws at most until settings do not contradict each other."""


@dataclass(frozen=True)
class Population:
    """Runs that learn side by side and from each other, while the settings of their algorithm change."""

    run: Run
    """What a member does in one generation: total_steps are those of a generation. From its seed follow who begins with
    which settings and who succeeds whom; members' runs have the seeds from it on."""
    space: Mapping[str, Between | OneOf]
    """What changes, by a setting's path, such as {"algorithm.learning_rate": Between(1e-5, 1e-3, log=True)}."""
    members: int = 8
    """More find better settings, and tell them from luck more often; each costs a run a generation."""
    generations: int = 10
    """More let settings change more often, and weights that are worse be given up sooner."""
    share: float = 0.25
    """Share of the members that others succeed after each generation, and of those by which. Higher selects harder, and
    leaves less variety."""
    objective: str = OBJECTIVE
    """The metric (docs/metrics.md) to maximize: the last one of a member's run."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """What all members' runs are like."""
        return (self.run,)

    @property
    def steps(self) -> int:
        """Samples that a member collects in a generation."""
        return self.run.experiment.total_steps

    def validate(self) -> None:
        """Raise SettingsError for mistakes that can be found before anything runs."""
        if self.members < 2 or self.generations < 1 or not self.space:
            raise SettingsError(
                f"A population needs two members (--population {self.members}), a generation (--generations "
                f"{self.generations}) and a setting that changes ({len(self.space)} given), as in --search "
                "algorithm.learning_rate=log:1e-5..1e-3."
            )
        if not 0 < self.share <= 0.5:
            raise SettingsError(f"A population's share={self.share} must lie above 0 and not above 0.5.")
        check_kinds("A population", self.runs, self.space)
        experiment = self.run.experiment
        if experiment.algorithm.remembers:
            raise SettingsError(
                f"{experiment.algorithm.name} learns from a memory, which would be empty at the beginning of each "
                "generation. Populations are for algorithms that learn from fresh rollouts, such as PPO, IMPALA and "
                "APPO; search without --population."
            )
        algorithm = experiment.algorithm
        annealed = [f.name for f in dataclasses.fields(algorithm) if f.name.startswith("anneal_")]
        if on := [name for name in annealed if getattr(algorithm, name)]:
            flags = " ".join(f"--algorithm.no-{name.replace('_', '-')}" for name in on)
            raise SettingsError(
                f"algorithm.{on[0]} would be annealed to 0 within each generation. The population finds a schedule "
                f"itself: {flags}"
            )
        for name, space in self.space.items():
            if not name.startswith("algorithm.") or name == "algorithm.optimizer.name":
                raise SettingsError(
                    f"The population cannot vary {name}: members go on with each other's weights and optimizer, and "
                    "what these belong to has to stay. Vary settings of the algorithm, or search without --population."
                )
            check_space(name, space, setting(experiment, name))

    def begun(self) -> list[dict[str, Any]]:
        """The settings with which the members begin."""
        return [self._drawn(self._random(1, member)) for member in range(self.members)]

    def succession(self, generation: int, scores: Sequence[float | None]) -> list[int]:
        """Whom each member succeeds: itself, or one of the best if it is one of the worst or has no score.

        Args:
            generation: which begins.
            scores: of the members in the last one; None for one that had none, as after it had diverged.
        """
        known = {member: score for member, score in enumerate(scores) if score is not None and math.isfinite(score)}
        ranked = sorted(known, key=lambda member: (-known[member], member))
        lost = [member for member in range(self.members) if member not in known]
        count = max(1, int(self.share * self.members))
        best, worst = ranked[:count], [*ranked, *lost][-max(count, len(lost)) :]
        chosen = [best[int(self._random(generation, member).integers(len(best)))] for member in range(self.members)]
        return [chosen[member] if member in worst else member for member in range(self.members)]

    def explored(self, generation: int, member: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with which a member goes on that succeeds another one, which had these: each number a step up or
        down, and one in ten settings drawn anew. Something changes in any case."""
        random = self._random(generation, member, 1)
        for _ in range(_DRAWS):
            anew = self._drawn(random)
            found = {
                name: anew[name] if random.random() < _ANEW else self._moved(name, values[name], random)
                for name in self.space
            }
            if found != values and _holds(self._with(found)):
                return found
        return dict(values)

    def member(self, generation: int, member: int, values: Mapping[str, Any], begin: WarmStart | None) -> Run:
        """The run of a member in one generation.

        Args:
            generation, member: from 1, and from 0.
            values: its settings.
            begin: what it begins with; None in the first generation.
        """
        seed = self.run.experiment.seed + (generation - 1) * self.members + member
        experiment = self._with(values).replace(seed=seed)
        return self.labelled(generation, member, experiment if begin is None else experiment.replace(warm_start=begin))

    def labelled(self, generation: int, member: int, experiment: Experiment) -> Run:
        """The run with a member's experiment."""
        label = self.run.label or f"{task(experiment)}-{experiment.algorithm.name}"
        label += f"-g{generation:03}-m{member + 1:02}"
        return dataclasses.replace(self.run, experiment=experiment, label=label)

    def identity(self) -> Any:
        """All that decides what the members do; not how many generations there are."""
        space = to_json(dict(self.space))
        return self.run.experiment.identity(), space, self.members, self.share, self.objective

    def _with(self, values: Mapping[str, Any]) -> Experiment:
        experiment = self.run.experiment
        for name, value in values.items():
            experiment = replaced(experiment, name, value)
        return experiment

    def _random(self, *of: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self.run.experiment.seed % 2**64, *of]))

    def _drawn(self, random: np.random.Generator) -> dict[str, Any]:
        """Settings from anywhere in the space."""
        found: dict[str, Any] = {}
        for _ in range(_DRAWS):
            for name, space in self.space.items():
                if isinstance(space, OneOf):
                    found[name] = space.values[int(random.integers(len(space.values)))]
                else:
                    found[name] = self._at(name, space, float(random.random()))
            if _holds(self._with(found)):
                return found
        self._with(found).validate()  # which says what contradicts what
        return found

    def _moved(self, name: str, value: Any, random: np.random.Generator) -> Any:
        space = self.space[name]
        if isinstance(space, OneOf):
            return value
        up = 1 if random.random() < 0.5 else -1
        up = 1 if value <= space.low else -1 if value >= space.high else up
        low, high, now = (math.log(x) if space.log else x for x in (space.low, space.high, value))
        moved = self._at(name, space, (now - low) / (high - low) + up * _STEP)
        return value + up if moved == value else moved  # of whole numbers a step may be less than one

    def _at(self, name: str, space: Between, place: float) -> Any:
        """The number at a place of its range, 0 to 1; that of its nearest end outside."""
        place = min(max(place, 0.0), 1.0)
        low, high = (math.log(x) if space.log else x for x in (space.low, space.high))
        value = low + place * (high - low)
        value = math.exp(value) if space.log else value
        whole = is_whole(space, setting(self.run.experiment, name))
        return min(max(round(value), int(space.low)), int(space.high)) if whole else space.near(value)


@dataclass(frozen=True)
class Member:
    """A member in one generation."""

    generation: int
    """From 1."""
    number: int
    """From 1."""
    values: dict[str, Any]
    """By the setting's path."""
    run: str
    """Its run's name."""
    successor_of: int | None
    """The member of the generation before with whose weights it began."""
    state: State
    value: float | None = None
    """Of the objective, at the end."""

    def __str__(self) -> str:
        value = "–" if self.value is None else f"{self.value:.4g}"
        values = " ".join(f"{name}={x}" for name, x in self.values.items())
        succeeds = self.successor_of not in (None, self.number)
        return (
            f"generation {self.generation}, member {self.number}: {value} with {values}"
            f"{f', after member {self.successor_of}' if succeeds else ''}"
        )


class Generations:
    """A population in the folder of a sweep.

    population.json says what the members are, generations/NUMBER.json which settings each has and whom it succeeds, and
    outcomes/, as of any run, how its run ended. What comes next follows from these: so whatever ends this process, the
    next one goes on as it would have.
    """

    key = "population"
    """Of what document returns."""

    def __init__(self, queue: Queue, population: Population, directory: str, command: list[str]) -> None:
        """directory: where it was begun, to which files of the user's own are relative; command: by which."""
        population.validate()
        self.search = population
        self._queue, self._directory, self._command = queue, directory, command

    @staticmethod
    def make(queue: Queue, population: Population) -> Generations:
        """A population that begins in a folder, or goes on there.

        Raises:
            SettingsError: the folder holds another one.
        """
        before = Generations.open(queue)
        if before is None and queue.exists() and queue.entries():
            raise SettingsError(f"{queue.folder} holds runs that are no population's. Choose another folder.")
        if before is None:
            return Generations(queue, population, os.getcwd(), list(sys.argv))
        if before.search.identity() != population.identity():
            raise SettingsError(
                f"{queue.folder} holds another population, whose members cannot become this one's. Choose another "
                f"folder, or go on with that one, for more generations if wanted: {queue.command} --generations N"
            )
        return Generations(queue, population, before._directory, before._command)

    @staticmethod
    def open(queue: Queue) -> Generations | None:
        """The population in a folder, None if there is none."""
        path = queue.folder / "population.json"
        if not path.exists():
            return None
        kept = read_json(path)
        look_for_files_in(kept["directory"])
        return Generations(queue, from_json(kept["population"]), kept["directory"], kept["command"])

    def begin(self) -> None:
        """Keep what it is, and queue what a kill kept from being queued."""
        kept = {"directory": self._directory, "command": self._command, "population": to_json(self.search)}
        write_json(self._queue.folder / "population.json", kept)
        self._folder.mkdir(exist_ok=True)
        if count := self._count:
            self._enqueue(count)

    @property
    def needs(self) -> Needs:
        """What each run occupies."""
        run = self.search.run
        return needs(Layout.parse(run.layout), run.experiment.torch_threads, run.memory)

    @property
    def complete(self) -> bool:
        """Whether no further generation is wanted, or can be: what failed has to end first."""
        count = self._count
        states = self._ended(count)
        return count >= self.search.generations or ("failed" in states and None not in states)

    def next(self) -> list[Entry]:
        """The runs of another generation; none while the last one has not ended."""
        count = self._count
        if not set(self._ended(count)) <= {"done", "stopped"}:
            return []
        population, generation = self.search, count + 1
        values, successors = population.begun(), [None] * population.members
        begins: list[WarmStart | None] = [None] * population.members
        if count:
            before = self.members(count)
            if all(member.value is None for member in before):
                raise SettingsError(
                    f"No run of generation {count} has the metric {population.objective} (--objective), or all have "
                    "diverged: there is nothing to choose by. docs/metrics.md lists what there is; score/mean needs an "
                    "episode that ended, eval/score --eval-every N. Begin in another folder, with longer generations "
                    "or other settings."
                )
            successors = population.succession(generation, [member.value for member in before])
            values = [
                before[of].values if of == member else population.explored(generation, member, before[of].values)
                for member, of in enumerate(successors)
            ]
            begins = [self._ended_with(before[of].run) for of in successors]
        runs = [population.member(generation, m, values[m], begins[m]) for m in range(population.members)]
        members = [
            {"run": run.name, "values": value, "successor_of": of, "experiment": run.experiment}
            for run, value, of in zip(runs, values, successors)
        ]
        # First, so that a run that is queued belongs to a generation, whatever ends this process.
        write_json(self._folder / f"{generation:03}.json", {"members": to_json(members)})
        return self._enqueue(generation)

    def all(self) -> list[Member]:
        """The members of all generations so far."""
        return [member for generation in range(1, self._count + 1) for member in self.members(generation)]

    def members(self, generation: int) -> list[Member]:
        """Those of one generation."""
        found = []
        for number, kept in enumerate(self._kept(generation), 1):
            name, of = kept["run"], kept["successor_of"]
            state = self._queue.state(name)
            metrics = self._metrics(name)
            lost = state != "done" or diverged(metrics)
            value = None if lost else reached(metrics, self.search.objective)[0]
            successor_of = None if of is None else of + 1
            found.append(Member(generation, number, from_json(kept["values"]), name, successor_of, state, value))
        return found

    def metrics(self, member: Member) -> Path:
        """What a member's run measured."""
        return self._metrics(member.run)

    def best(self) -> Member | None:
        """The best of the last generation that has ended."""
        for generation in range(self._count, 0, -1):
            members = self.members(generation)
            scores = [-math.inf if member.value is None else member.value for member in members]
            if all(member.state in ("done", "stopped") for member in members) and max(scores) > -math.inf:
                return members[scores.index(max(scores))]
        return None

    def give_up(self, pattern: str) -> list[str]:
        """Have members that failed, and whose runs have such a name, end without a score, so that others succeed them.

        Raises:
            SettingsError: there is none.
        """
        ended = {member.run: member.state for member in (self.members(self._count) if self._count else ())}
        names = [name for name, state in ended.items() if state == "failed" and fnmatchcase(name, pattern)]
        if not names:
            raise SettingsError(
                f"--drop {pattern}: of a population what failed can be dropped, and no failed run has such a name. "
                f"Names: {self._queue.command} --status"
            )
        for name in names:
            self._queue.end(name, Outcome("stopped", reason="failed, and was given up"))
        return names

    def ancestry(self, member: Member) -> list[Member]:
        """A member and those whose weights it has, the first one first."""
        line = [member]
        while line[0].successor_of is not None:
            line.insert(0, self.members(line[0].generation - 1)[line[0].successor_of - 1])
        return line

    def summary(self) -> str:
        """How far it is."""
        best = self.best()
        done = best.generation if best else 0
        where = f"; its run: {self._queue.run(best.run)}" if best else ""
        search = self.search
        size = f"{search.generations} generations of {search.members}"
        return f"{done} of {size} done; best by {search.objective}: {best or 'none yet'}{where}"

    def document(self) -> dict[str, Any]:
        """All of it, for programs."""
        best = self.best()
        return {
            "objective": self.search.objective,
            "best": best and dataclasses.asdict(best),
            "ancestry": [member.run for member in self.ancestry(best)] if best else [],
            "members": [dataclasses.asdict(member) for member in self.all()],
        }

    @property
    def _folder(self) -> Path:
        return self._queue.folder / "generations"

    @property
    def _count(self) -> int:
        """Generations that have begun."""
        return len(list(self._folder.glob("*.json")))

    def _metrics(self, name: str) -> Path:
        return self._queue.run(name) / "metrics.jsonl"

    def _kept(self, generation: int) -> list[dict[str, Any]]:
        return read_json(self._folder / f"{generation:03}.json")["members"]

    def _ended(self, generation: int) -> list[str | None]:
        """How the runs of a generation have ended, each None if it has not."""
        outcomes = [self._queue.outcome(kept["run"]) for kept in self._kept(generation)] if generation else []
        return [outcome and outcome.state for outcome in outcomes]

    def _enqueue(self, generation: int) -> list[Entry]:
        experiments = [from_json(kept["experiment"]) for kept in self._kept(generation)]
        runs = [self.search.labelled(generation, member, each) for member, each in enumerate(experiments)]
        self._queue.add(runs, self._directory, self._command)
        return [self._queue.entry(kept["run"]) for kept in self._kept(generation)]

    def _ended_with(self, name: str) -> WarmStart:
        """The weights and the optimizer of a run that has ended."""
        path = self._queue.run(name)
        start = resolved(self.search.run.experiment.replace(warm_start=WarmStart(str(path), optimizer=True))).warm_start
        # Where the run will look from: so a population has the same names wherever its folder is below that one.
        relative = os.path.relpath(path, self._directory)
        return dataclasses.replace(start, run=str(path) if relative.startswith("..") else relative)


def _holds(experiment: Experiment) -> bool:
    """Whether settings do not contradict each other."""
    try:
        experiment.validate()
    except SettingsError:
        return False
    return True
