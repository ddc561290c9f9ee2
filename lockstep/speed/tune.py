"""`lockstep tune`: finds the fastest layout for an experiment on this machine by short measured trials."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.algorithms.onpolicy import OnPolicyConfig
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.envs import adapter_of
from lockstep.experiment import Experiment
from lockstep.speed.bench import load_of_others
from lockstep.speed.trial import OutOfTime, Trial
from lockstep.system.machine import cores
from lockstep.system.supervision import WorkerError
from lockstep.training.prepare import check, prepare

_ENDING = 4.0
"""Seconds of the budget reserved for ending all processes."""
_STARTING = 0.6
"""Share of the budget in which candidates are started; the rest is for comparing the best of them."""
_ENOUGH = 6
"""After this many turns, two layouts are compared well enough."""
_ALIKE = 0.02
"""Layouts whose rates differ by less count as equally fast, and the simplest of them is chosen."""
_FEW_SAMPLES = 128
"""Trials do not shrink a shard's slice of a minibatch below this many samples: kernels would become less efficient."""
_FEW_STEPS = 16
"""Trials do not shrink a rollout below this many steps: the cost per rollout would weigh more than in training."""


def candidates(experiment: Experiment, available: int, gpus: int) -> list[Layout]:
    """Layouts worth trying, the most promising first.

    Args:
        experiment: its shards bound the number of processes, its adapter decides how environments can be spread, and
        its lag whether collecting and learning can overlap.
        available: cores.
        gpus: that torch can use.
    """
    shards = experiment.scheme.shards
    texts: list[str] = []
    most = min(shards, available)
    if not experiment.scheme.free_running:
        workers = sorted({most, *(1 << n for n in range(1, most.bit_length()))} - {0, 1}, reverse=True)
        texts += [f"processes:{n}" for n in workers[:1]] + ["inline"] + [f"processes:{n}" for n in workers[1:]]
    if experiment.scheme.buffers > 1 or experiment.scheme.free_running:
        for learners in sorted({1, available // 4, available // 2} - {0}):
            collectors = max(1, available - learners)
            texts.append(f"cpu:a{min(shards, collectors)}-l{min(shards, learners)}")
    for gpu_text in _with_gpus(experiment, available, gpus):
        texts.insert(0, gpu_text)
    found = [Layout.parse(text) for text in dict.fromkeys(texts)]
    found = [each for layout in found for each in _with_graphs(layout)]
    # Processes that the system moves between cores find cold caches, which slows game engines most of all.
    pinned = [dataclasses.replace(each, pin=1) for each in found if 1 < each.processes == available]
    helped = [each for layout in found for each in _with_helpers(experiment, layout, available)]
    return _valid(experiment, [*found, *pinned, *helped])


def _with_gpus(experiment: Experiment, available: int, gpus: int) -> list[str]:
    """The most promising last. Collectors feed a GPU from as many cores as there are."""
    if not gpus:
        return []
    shards = experiment.scheme.shards
    texts = []
    if experiment.scheme.buffers > 1 or experiment.scheme.free_running:
        several = min(shards, max(1, available // (4 * gpus)))
        texts += ["acpu" + ",cpu" * (min(shards, available - 1) - 1) + "-l0"] if available > 1 else []
        texts += [f"a{','.join(['0'] * count)}-l0" for count in sorted({1, several})]
        if gpus > 1:
            learners = ",".join(str(gpu) for gpu in range(1, min(gpus, shards + 1)))
            texts += [f"a0-l{learners}", f"a{','.join(['0'] * several)}-l{learners}"]
    if not experiment.scheme.free_running:
        if 1 < gpus <= shards:
            every = "+".join(str(gpu) for gpu in range(gpus))
            texts += [f"processes:{min(shards, max(4, gpus))},device={every}"]
        texts += [f"processes:{min(4, shards)},device=0"] * (shards > 1) + ["inline,device=0"]
    return texts


def _with_graphs(layout: Layout) -> list[Layout]:
    """The layout, on GPUs first with CUDA graphs, which mostly pay off."""
    return [dataclasses.replace(layout, graphs=1), layout] if set(layout.kinds) == {"GPU"} else [layout]


def _with_helpers(experiment: Experiment, layout: Layout, available: int) -> list[Layout]:
    """The layout with environments spread over the cores that it leaves idle, or over one more."""
    collecting = layout.collecting
    share = max(2, (available - len(layout.learners)) // collecting)  # a collector waits while its helpers step
    if available < 2 or collecting * share > 2 * available:
        return []
    name = "env_processes" if adapter_of(experiment.env).processes else "env_threads"
    return [dataclasses.replace(layout, **{name: min(share, experiment.envs_per_shard)})]


def _valid(experiment: Experiment, layouts: list[Layout]) -> list[Layout]:
    valid = []
    for layout in dict.fromkeys(layouts):
        try:
            prepare(experiment, layout)
        except SettingsError:
            continue
        valid.append(layout)
    return valid


def shortened(experiment: Experiment) -> Experiment:
    """The experiment with equal work per sample in shorter iterations, so that a trial sees more of them.

    It has fewer steps and proportionally fewer minibatches. Their size stays as long as there are two of them; then
    they shrink, but not below what efficient kernels need. With minibatches of whole sequences nothing is shortened,
    since a sample's cost depends on their length; nor with replay, whose iterations are short.
    """
    algorithm = experiment.algorithm
    if not isinstance(algorithm, OnPolicyConfig) or algorithm.sequences or experiment.model.recurrent:
        return experiment
    size = experiment.envs_per_shard
    slice_size = size * algorithm.rollout // algorithm.minibatches
    minibatches = min(2, algorithm.minibatches)
    samples = minibatches * min(slice_size, _FEW_SAMPLES)
    rollout = min(algorithm.rollout, max(_FEW_STEPS, -(-samples // size)))
    minibatches = max(minibatches, -(-size * rollout // slice_size))  # small ones do not grow for a kept rollout
    while size * rollout % minibatches:
        rollout += 1
    shorter = dataclasses.replace(algorithm, rollout=rollout, minibatches=minibatches)
    return experiment.replace(algorithm=shorter)


@dataclass
class Candidate:
    """A layout and its measured speeds."""

    layout: Layout
    rates: list[float] = field(default_factory=list)
    """Samples per second in each turn. Only the turns since the last halving are comparable."""
    note: str = ""
    """Why it was not measured, or what ended it."""
    trial: Trial | None = None

    @property
    def rate(self) -> float:
        """The median over turns; 0 if there was none."""
        return statistics.median(self.rates) if self.rates else 0.0

    def end(self, note: str = "") -> None:
        """Stop its processes."""
        self.note = note or self.note
        if self.trial is not None:
            self.trial.close()
            self.trial = None


@dataclass(frozen=True)
class Tuned:
    """The result of tuning."""

    best: Layout
    candidates: tuple[Candidate, ...]
    """Fastest first; unmeasured candidates last."""
    seconds: float
    load: float
    """The load of other programs, in cores."""

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.best),
            "seconds": self.seconds,
            "load_of_others": self.load,
            "candidates": [
                {"layout": str(each.layout), "samples_per_second": each.rate, "turns": each.rates, "note": each.note}
                for each in self.candidates
            ],
        }


def tune(
    experiment: Experiment, *, budget: float = 120.0, begin: float | None = None, say: Callable[[str], None] = print
) -> Tuned:
    """Find the fastest layout by real training.

    Every candidate's processes are started once and paused between turns. As many candidates as fit into 60% of the
    budget get a first turn; after each further round, the slower half is dropped.

    Args:
        experiment: as for train.
        budget: maximum number of seconds.
        begin: when the budget began (time.perf_counter); by default now.
        say: prints progress.

    Raises:
        SettingsError: the experiment's settings contradict each other, or the budget is too short for any trial.
    """
    begin = time.perf_counter() if begin is None else begin
    default = Layout.parse("cpu:a1-l1" if experiment.scheme.free_running else "inline")
    experiment = prepare(experiment, default)
    check(experiment, default)  # otherwise every layout would fail
    available = cores()
    load = load_of_others(available, say)
    trial_of = shortened(experiment)
    deadline, starting = begin + budget - _ENDING, begin + _STARTING * budget
    all_of_them = [Candidate(layout) for layout in candidates(experiment, available, torch.cuda.device_count())]
    say(f"up to {budget:.0f} s for {len(all_of_them)} layouts: {', '.join(str(each.layout) for each in all_of_them)}")
    try:
        running = _first_turns(all_of_them, trial_of, starting, deadline, say)
        _halve(running, deadline, say)
    finally:
        for each in all_of_them:
            each.end()
    ranked = sorted(all_of_them, key=lambda each: (-len(each.rates), -each.rate))
    measured = [each for each in ranked if each.rates]
    if not measured:
        failures = next((each.note for each in all_of_them if each.note), "none could start")
        raise SettingsError(
            f"No layout could be measured within {budget:.0f} seconds ({failures}). Allow more time with --budget, or "
            f"use --layout {default} without measuring."
        )
    # Only candidates with the most turns: a candidate dropped after a round was slower in it.
    finalists = [each for each in measured if len(each.rates) == len(measured[0].rates)]
    fastest = max(finalists, key=lambda each: each.rate)
    fast = [each for each in finalists if each.rate > (1 - _ALIKE) * fastest.rate]
    best = min(fast, key=lambda each: _size(each.layout))
    return Tuned(best.layout, tuple(ranked), time.perf_counter() - begin, load)


def _size(layout: Layout) -> int:
    """The complexity of a layout, for the machine and the reader."""
    return layout.processes + layout.env_threads + layout.env_processes + layout.pin


def _first_turns(
    all_of_them: list[Candidate], experiment: Experiment, starting: float, deadline: float, say: Callable[[str], None]
) -> list[Candidate]:
    """Start candidates, one after the other, and time a few iterations of each; returns those that run."""
    running: list[Candidate] = []
    longest = 0.0
    for each in all_of_them:
        now = time.perf_counter()
        if running and now + longest > starting:
            each.note = "not tried: no time left"
            continue
        limit = deadline if not running else min(deadline, starting + longest)
        try:
            each.trial = Trial(experiment, each.layout)
            each.trial.run(0.0, each.trial.settling, limit)
            each.rates.append(each.trial.run(_turn(starting - now, 4), 1, limit).rate)
        except OutOfTime:
            each.end("not measured: it took too long to start")
        except (WorkerError, SettingsError) as error:
            each.end(f"failed: {error}")
        else:
            say(f"{each.layout}: {each.rate:,.0f} samples/s")
            running.append(each)
            longest = max(longest, time.perf_counter() - now)
    return running


def _halve(running: list[Candidate], deadline: float, say: Callable[[str], None]) -> None:
    """Give turns to the better half of the remaining candidates, in rounds, until one is left or the time is over."""
    while len(running) > 1:
        running.sort(key=lambda each: -each.rates[-1])
        for slower in running[(len(running) + 1) // 2 if len(running) > 2 else 2 :]:
            slower.end()
        running = [each for each in running if each.trial is not None]
        left = deadline - time.perf_counter()
        turns: list[tuple[Candidate, float]] = []
        for each in running:
            assert each.trial is not None
            try:
                turns.append((each, each.trial.run(_turn(left, 3 * len(running)), 1, deadline).rate))
            except OutOfTime:
                return  # an unfinished round compares nothing
            except (WorkerError, SettingsError) as error:
                each.end(f"failed: {error}")
                each.rates.clear()
        for each, rate in turns:
            each.rates.append(rate)
            say(f"{each.layout}: {rate:,.0f} samples/s")
        running = [each for each, _ in turns]
        if len(running) == 2 and len(running[0].rates) >= _ENOUGH:
            return


def _turn(left: float, parts: int) -> float:
    """Seconds of one turn, given the time left: at least half a second, at most four."""
    return min(4.0, max(0.5, left / parts))
