"""The trials of a search: a file for each in the sweep's folder, and their translation to Optuna (extra `optuna`)."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError, require
from lockstep.reports.runs import SCORES
from lockstep.sweep.proposals import Proposals
from lockstep.sweep.queue import Entry, Outcome, read_json, write_json
from lockstep.sweep.search import Between, Search, is_whole, mean, measured, reached
from lockstep.sweep.spec import changed, holds, setting

_DRAWS = 20
"""Maximum number of draws until a trial has new values that do not contradict each other: a small space may have
none."""
_OF_EPISODES = {"score/length", *SCORES} - {"eval/score"}
"""Metrics that every run has after some episodes have ended."""


@dataclass(frozen=True)
class Trial:
    """A set of values that was tried or is being tried."""

    number: int
    values: dict[str, Any]
    """Its values, by the settings' paths."""
    runs: list[str]
    """Names of its runs."""
    state: Literal["running", "done", "stopped", "failed"]
    """running while a run has not ended; else the outcome of the run that ended worst."""
    value: float | None = None
    """The objective; for a stopped trial, its value when it stopped. None if a run has no value, for example after it
    diverged."""
    samples: int = 0
    """Samples that all of its runs reached."""

    def __str__(self) -> str:
        value = "–" if self.value is None else f"{self.value:.4g}"
        return f"trial {self.number}: {value} with {' '.join(f'{n}={v}' for n, v in self.values.items())}"


class Trials(Proposals[Search]):
    """A search. trials/NUMBER.json holds the values of a trial; the next values follow from the trials so far and the
    trial's number alone."""

    key, parts = "search", "trials"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ended: dict[int, tuple[list[Outcome | None], Trial]] = {}
        """Trials that have ended, with the outcomes of their runs: reading the metrics of long runs takes seconds."""

    def begin(self) -> None:
        """See Proposals.begin.

        Raises:
            SettingsError: Optuna is not installed.
        """
        _library()
        super().begin()

    @cached_property
    def _optuna(self) -> Any:
        return _library()

    @property
    def complete(self) -> bool:
        """Whether no further trial is wanted."""
        return self._count >= self.search.trials

    def next(self) -> list[Entry]:
        """Begin another trial and return its runs."""
        trials = self.all()
        number = 1 + max((trial.number for trial in trials), default=0)  # not a later one's, if a file was removed
        values = self._proposed(number, trials)
        runs = self.search.trial(number, values)
        known = {entry.identity for entry in self._queue.entries()}
        found = [run.experiment.identities() for run in runs]
        identities = [next((each for each in both if each in known), both[0]) for both in found]
        # Write this first, so that a queued run always belongs to a trial, even if this process is killed.
        write_json(self._folder / f"{number:03}.json", {"values": to_json(values), "runs": identities})
        self._queue.add(runs, self._directory, self._command)
        return [entry for entry in self._queue.entries() if entry.identity in identities]

    def all(self) -> list[Trial]:
        """The trials so far."""
        names = {entry.identity: entry.name for entry in self._queue.entries()}
        return [
            self._trial(number, values, [names[identity] for identity in identities if identity in names])
            for number, (values, identities) in self._kept().items()
        ]

    def best(self) -> Trial | None:
        """The trial with the highest value among those that ran to their end."""
        done = {trial.value: trial for trial in self.all() if trial.state == "done" and trial.value is not None}
        return done[max(done)] if done else None

    def summary(self) -> str:
        """The progress so far, in one line."""
        search = self.search
        done = f"{len(self.all())} of {search.trials} trials"
        return f"{done}, runs in each: {len(search.runs)}; best by {search.objective}: {self.best() or 'none yet'}"

    def document(self) -> dict[str, Any]:
        """The whole search as JSON, for programs."""
        best = self.best()
        return {
            "objective": self.search.objective,
            "best": best and best.number,
            "trials": [dataclasses.asdict(trial) for trial in self.all()],
        }

    def _requeue(self) -> None:
        for number, (values, _) in self._kept().items():
            self._queue.add(self.search.trial(number, values), self._directory, self._command)

    def _kept(self) -> dict[int, tuple[dict[str, Any], list[str]]]:
        """The values of each trial and the identities of its runs' experiments, by the trial's number."""
        files = {int(path.stem): read_json(path) for path in self._folder.glob("*.json")}
        return {number: (from_json(files[number]["values"]), files[number]["runs"]) for number in sorted(files)}

    def _trial(self, number: int, values: dict[str, Any], names: list[str]) -> Trial:
        outcomes = [self._queue.outcome(name) for name in names]
        states = {outcome.state for outcome in outcomes if outcome is not None}
        if None in outcomes or not states:
            return Trial(number, values, names, "running")
        if number in self._ended and self._ended[number][0] == outcomes:
            return self._ended[number][1]
        ends = [reached(measured(self._queue.metrics(name)), self.search.objective) for name in names]
        state = "failed" if "failed" in states else "stopped" if "stopped" in states else "done"
        value = None if state == "failed" else mean([value for value, _ in ends])
        trial = Trial(number, values, names, state, value, min(samples for _, samples in ends))
        self._ended[number] = outcomes, trial
        return trial

    def _proposed(self, number: int, trials: list[Trial]) -> dict[str, Any]:
        """The values that Optuna would try next.

        Each trial gets a new sampler (TPE: Bergstra et al. 2011, section 4) with a seed derived from its number: a
        sampler that lived longer would be lost with this process. It treats running trials as bad, so that simultaneous
        trials differ.
        """
        done = [trial for trial in trials if trial.state == "done"]
        if done and not any(self._measured(name) for trial in done for name in trial.runs):
            raise SettingsError(
                f"No finished run has the metric {self.search.objective} (--objective). docs/metrics.md lists the "
                "metrics; eval/score needs --eval-every N. Start the search again in another folder."
            )
        tried = [trial.values for trial in trials]
        seeds = np.random.SeedSequence([self.search.seed, number]).generate_state(_DRAWS)
        values: dict[str, Any] = {}
        for seed in seeds.tolist():
            values = self._drawn(seed, trials)
            # Otherwise the trial would end or be refused at once, and teach nothing.
            if values not in tried and holds(changed(self.search.runs[0].experiment, values)):
                break
        return values

    def _drawn(self, seed: int, trials: list[Trial]) -> dict[str, Any]:
        sampler = self._optuna.samplers.TPESampler(seed=seed)
        study = self._optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([self._told(trial) for trial in trials])
        drawn = study.ask(self._distributions()).params
        return {
            name: space.near(drawn[name]) if isinstance(space, Between) else space.values[drawn[name]]
            for name, space in self.search.space.items()
        }

    def _measured(self, name: str) -> bool:
        """Whether a run has the objective, or would have it after an episode ended. After divergence the value is not a
        number."""
        if self.search.objective in _OF_EPISODES:
            return True
        metrics = self._queue.metrics(name)
        return metrics.exists() and f'"{self.search.objective}":'.encode() in metrics.read_bytes()

    def _told(self, trial: Trial) -> Any:
        """A trial in Optuna's terms. A trial without a value, for example after divergence, is reported as pruned at
        step 0, which ranks below all others: Optuna learns nothing from failed trials, and would try similar values
        again."""
        kinds = self._optuna.trial.TrialState
        state = {"running": kinds.RUNNING, "done": kinds.COMPLETE, "stopped": kinds.PRUNED, "failed": kinds.FAIL}
        stopped = trial.state == "stopped" and trial.value is not None
        params = {}
        for name, value in trial.values.items():
            space = self.search.space[name]
            params[name] = value if isinstance(space, Between) else space.values.index(value)
        return self._optuna.trial.create_trial(
            state=kinds.PRUNED if trial.state == "done" and trial.value is None else state[trial.state],
            value=trial.value if trial.state == "done" else None,
            intermediate_values={trial.samples: trial.value} if stopped else {},
            params=params,
            distributions=self._distributions(),
        )

    def _distributions(self) -> dict[str, Any]:
        """The space in Optuna's terms; listed values by their index."""
        kinds, found = self._optuna.distributions, {}
        for name, space in self.search.space.items():
            if isinstance(space, Between):
                whole = is_whole(space, setting(self.search.runs[0].experiment, name))
                kind = kinds.IntDistribution if whole else kinds.FloatDistribution
                found[name] = kind(space.low, space.high, log=space.log)
            else:
                found[name] = kinds.CategoricalDistribution(range(len(space.values)))
        return found


def _library() -> Any:
    """Optuna. Raises SettingsError if it is not installed."""
    require("optuna", "optuna", "A search", "Grids, as in --algorithm.learning-rate 1e-3,3e-4, need no extra.")
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
