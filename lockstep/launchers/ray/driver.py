"""The driver a run on a Ray cluster: it starts every process and hands on references, never data.

Data flows between the actors, through the object store: what one will answer is handed to another as a reference.

    learner 0: version(max(0, i - lag)) ──► collector: collect(i, …) ──► its learner: deliver(a shard's rollout i)

Rollout i is asked for when the rollouts before i - lag have arrived, and begins when its version exists, so the store
never holds more than lag + 1 rollouts of a shard. Learners exchange gradients by torch.distributed.

A collector that is lost is replaced: another one goes on from the shards' states that came with their last rollouts,
and computes again what had not arrived. If a learner is lost, all begin again from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.shards import block, holder
from lockstep.distributed.groups import PeerGone
from lockstep.launchers.ray.actors import RayCollector, RayLearner
from lockstep.run.checkpoint import iteration_of
from lockstep.system.output import tell
from lockstep.system.supervision import StallDetector, WorkerError
from lockstep.training.context import StopRequest, Work
from lockstep.training.job import Job, Result

_POLL = 1.0
"""Seconds between two questions to every process whether it makes progress."""
_AGAIN = 0.5
"""Seconds after which a rollout is handed on again that could not be, while its collector seems to live."""
_NOTICING = 30.0
"""Seconds that Ray gets to notice the loss of a node, once a learner's connection to it is broken."""
_ENDING = 10.0
"""Seconds that processes get to end."""
_BESIDE = "beside"
"""The concurrency group of what actors answer while they work."""

_COLOR = re.compile(r"\x1b\[\d*m")
"""In what Ray says of exceptions."""


class Lost(Exception):
    """A process of the run is gone; the text says which, and how."""


def cpus(job: Job) -> int:
    """Cores that each process keeps busy."""
    layout = job.layout
    return max(job.experiment.torch_threads, layout.env_threads, layout.env_processes)


def allow(losses: int, layout: Layout, text: str) -> None:
    """Raise WorkerError if that is one loss too many; text: what it was."""
    if losses > layout.restarts:
        longer = dataclasses.replace(layout, restarts=Layout.restarts)
        raise WorkerError(
            f"{text}. That is more than the {layout.restarts} losses that the layout allows. To survive more, use "
            f"--layout {longer},restarts=N; lockstep resume goes on from the newest checkpoint."
        )


def say(text: str) -> None:
    """To people."""
    tell(text, sys.stderr)


@dataclass(eq=False)
class _Actor:
    """A process, as the driver knows it."""

    name: str
    handle: Any
    steps: int = -1
    """Its progress when it was asked last; -1 if it has not answered yet."""
    poll: Any = None
    """What it was asked, until it answers."""
    last: Any = None
    """What a collector was told to do last, which it does before anything else."""


@dataclass(frozen=True)
class _Feed:
    """A shard's rollout that is on its way from a collector to a learner."""

    collector: _Actor
    number: int
    shard: int
    answer: Any


class RayDriver:
    """One attempt, from the first process to the last result.

    Args:
        losses: processes that were lost before.
    """

    def __init__(self, ray: Any, work: Work, job: Job, stop: StopRequest, losses: int) -> None:
        layout, schedule = job.layout, job.schedule
        self._ray, self._work, self._job, self._layout, self._stop = ray, work, job, layout, stop
        self.losses = losses
        self._schedule, self._shards = schedule, job.experiment.scheme.shards
        begin = iteration_of(job.checkpoint)
        numbers = schedule.ticks(begin, job.stop_after)
        self._asked, self._end = numbers.start, numbers.stop
        """The rollout that is asked for next, and the one that is not wanted any more."""
        self._arrived = dict.fromkeys(range(self._shards), begin - 1)
        """By shard: the last rollout that a learner has."""
        self._learners: list[_Actor] = []
        self._collectors: list[_Actor] = []
        self._runs: dict[Any, int] = {}
        """By reference, as what follows: the learner whose result it is."""
        self._starts: dict[Any, int] = {}
        """The collector that starts."""
        self._feeds: dict[Any, _Feed] = {}
        self._again: list[tuple[float, _Feed]] = []
        self._versions: dict[int, Any] = {}
        self._results: dict[int, Result] = {}
        self._broken: tuple[float, str] | None = None
        """Since when a learner's connection is broken, and what it said."""
        self._places: Any = None
        self._polled = 0.0
        self._stall = StallDetector(job.layout.stall_timeout)
        self._told = False

    def run(self) -> Result:
        """The result of learner 0."""
        try:
            self._begin()
            while len(self._results) < len(self._learners):
                self._step()
            return self._results[0]
        finally:
            self._close()

    def _begin(self) -> None:
        layout = self._layout
        if self._job.options.display != "none":
            say(f"Starting {layout.processes} processes on Ray …")
        self._places = self._ray.util.placement_group([{"CPU": cpus(self._job)}] * layout.processes, strategy="SPREAD")
        learning, kind = layout.learning, "Learner" if layout.split else "Worker"
        for rank in range(learning):
            name = f"{kind} {rank} of {learning}"
            self._learners.append(self._actor(name, RayLearner, rank, rank))
        meeting = self._beside(self._learners[0], "meeting") if learning > 1 else None
        for rank, learner in enumerate(self._learners):
            self._runs[learner.handle.work.remote(self._work, meeting)] = rank
        for index in range(len(layout.collectors)):
            self._start(index)

    def _actor(self, name: str, kind: type, place: int, index: int) -> _Actor:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._places, placement_group_bundle_index=place
        )
        remote = self._ray.remote(
            num_cpus=cpus(self._job),
            max_restarts=0,
            max_task_retries=0,
            # Versions that are waited for may take lag + 1 threads; and nothing waits for what was asked before it.
            concurrency_groups={_BESIDE: self._schedule.lag + 8},
            allow_out_of_order_execution=True,
            scheduling_strategy=strategy,
        )
        return _Actor(name, remote(kind).remote(self._job, os.getcwd(), index))

    def _beside(self, actor: _Actor, method: str, *args: Any) -> Any:
        """Ask an actor for something while it works."""
        return getattr(actor.handle, method).options(concurrency_group=_BESIDE).remote(*args)

    def _start(self, index: int) -> None:
        """Start a collector, which goes on after what has arrived from its shards."""
        layout, learning = self._layout, len(self._learners)
        collectors = len(layout.collectors)
        shards = block(self._shards, collectors, index)
        next_one = min(self._arrived[shard] for shard in shards) + 1
        collector = self._actor(f"Collector {index} of {collectors}", RayCollector, learning + index, index)
        self._collectors[index : index + 1] = [collector]
        states = [
            self._beside(learner, "states", mine, next_one)
            for rank, learner in enumerate(self._learners)
            if (mine := [shard for shard in shards if shard in block(self._shards, learning, rank)])
        ]
        collector.last = collector.handle.start.remote(*states)
        self._starts[collector.last] = index
        self._beside(self._learners[0], "started", index, collector.last)
        for number in range(next_one, self._asked):
            self._collect(index, number)

    def _collect(self, index: int, number: int) -> None:
        """Ask a collector for a rollout of all its shards, and hand the answers on."""
        collector, wanted = self._collectors[index], self._schedule.collects_with(number)
        shards = block(self._shards, len(self._collectors), index)
        if wanted not in self._versions:
            self._versions[wanted] = self._beside(self._learners[0], "version", wanted)
        collect = collector.handle.collect.options(num_returns=len(shards) + 1)
        *answers, collector.last = collect.remote(number, self._versions[wanted], collector.last)
        for shard, answer in zip(shards, answers, strict=True):
            self._hand_on(_Feed(collector, number, shard, answer))

    def _hand_on(self, feed: _Feed) -> None:
        learner = self._learners[holder(self._shards, len(self._learners), feed.shard)]
        self._feeds[self._beside(learner, "deliver", feed.answer)] = feed

    def _step(self) -> None:
        """Wait for whatever comes first, and see to it."""
        self._poll()
        polls = {actor.poll: actor for actor in (*self._learners, *self._collectors) if actor.poll is not None}
        refs = [*self._starts, *self._runs, *polls, *self._feeds]
        for ref in self._ray.wait(refs, num_returns=1, timeout=_POLL / 2, fetch_local=False)[0]:
            if ref in self._starts:
                self._started(ref)
            elif ref in self._runs:
                self._ended(ref)
            elif ref in polls:
                self._polled_one(polls[ref])
            else:
                self._fed(ref)
        now = time.monotonic()
        due, self._again = [f for at, f in self._again if at <= now], [(at, f) for at, f in self._again if at > now]
        for feed in due:
            if feed.collector in self._collectors:
                self._hand_on(feed)
        if self._broken is not None and now > self._broken[0] + _NOTICING:
            raise Lost(self._broken[1])
        if self._stop.requested() and not self._told:
            self._told = True
            for learner in self._learners:
                self._beside(learner, "stop")
        self._ask()

    def _ask(self) -> None:
        """Ask for further rollouts, as far as there is room for them."""
        while self._collectors and self._asked < self._end:
            if min(self._arrived.values()) < self._asked - self._schedule.lag - 1:
                break
            for index in range(len(self._collectors)):
                self._collect(index, self._asked)
            self._asked += 1

    def _outcome(self, ref: Any) -> tuple[Any, Exception | None]:
        try:
            return self._ray.get(ref), None
        except self._ray.exceptions.RayError as error:
            return None, error

    def _raised(self, error: Exception | None) -> Exception | None:
        """The error that holds what was raised in another process; None if that was lost instead."""
        while isinstance(error, self._ray.exceptions.RayTaskError):
            cause = error.cause  # type: ignore[attr-defined]
            if not isinstance(cause, self._ray.exceptions.RayError):
                return error
            error = cause
        return None

    def _fail(self, name: str, error: Any) -> None:
        if isinstance(error.cause, SettingsError):
            raise error.cause.bare()
        raise WorkerError(f"{name} failed:\n{_COLOR.sub('', str(error))}")

    def _started(self, ref: Any) -> None:
        collector = self._collectors[self._starts.pop(ref)]
        _, error = self._outcome(ref)
        if (raised := self._raised(error)) is not None:
            self._fail(collector.name, raised)

    def _ended(self, ref: Any) -> None:
        rank = self._runs.pop(ref)
        name = self._learners[rank].name
        result, error = self._outcome(ref)
        if error is None:
            self._results[rank] = result
            return
        raised = self._raised(error)
        if raised is None:
            raise Lost(f"{name} was lost ({_short(error)})")
        if not isinstance(getattr(raised, "cause", None), PeerGone):
            self._fail(name, raised)
        if self._broken is None:  # others know more: whoever raised, or Ray of whoever is gone
            self._broken = time.monotonic(), f"{name} has lost its connection to another one"

    def _fed(self, ref: Any) -> None:
        feed = self._feeds.pop(ref)
        _, error = self._outcome(ref)
        if error is None:
            self._arrived[feed.shard] = max(self._arrived[feed.shard], feed.number)
            oldest = self._schedule.collects_with(min(self._arrived.values()) + 1)
            self._versions = {number: each for number, each in self._versions.items() if number >= oldest}
        elif (raised := self._raised(error)) is not None:
            self._fail(feed.collector.name, raised)
        else:  # one of the two is gone, and whoever asks it for its progress will hear that, or was out of reach
            self._again.append((time.monotonic() + _AGAIN, feed))

    def _polled_one(self, actor: _Actor) -> None:
        steps, error = self._outcome(actor.poll)
        actor.poll = None
        if error is None:
            actor.steps = steps
        elif not isinstance(error, self._ray.exceptions.ActorUnavailableError):
            if actor in self._collectors:
                self._replace(self._collectors.index(actor), _short(error))
            elif self._learners.index(actor) not in self._results:
                raise Lost(f"{actor.name} was lost ({_short(error)})")

    def _replace(self, index: int, why: str) -> None:
        lost = self._collectors[index]
        self.losses += 1
        allow(self.losses, self._layout, f"{lost.name} was lost ({why})")
        say(f"{lost.name} was lost ({why}). Another one goes on ({self.losses} of restarts={self._layout.restarts}).")
        self._feeds = {ref: feed for ref, feed in self._feeds.items() if feed.collector is not lost}
        self._starts = {ref: of for ref, of in self._starts.items() if of != index}
        self._start(index)

    def _poll(self) -> None:
        """Ask everyone for its progress from time to time; raise if nobody makes any."""
        now = time.monotonic()
        if now < self._polled + _POLL:
            return
        self._polled = now
        everyone = [*self._learners, *self._collectors]
        steps = sum(actor.steps for actor in everyone) + sum(self._arrived.values())
        patience = self._stall.too_long(steps, started=any(actor.steps > 0 for actor in everyone))
        if patience is not None:
            self._explain(everyone, patience)
        for actor in everyone:
            if actor.poll is None:
                actor.poll = self._beside(actor, "progress")

    def _explain(self, everyone: list[_Actor], patience: float) -> None:
        unborn = [actor.name for actor in everyone if actor.steps < 0]
        if unborn:
            raise WorkerError(
                f"Ray has not started {', '.join(unborn)} within {patience:g} seconds: the cluster may have no "
                f"{cpus(self._job)} free CPUs for each, or has lost nodes that nothing replaced. ray status shows it."
            )
        stacks = [(actor.name, self._beside(actor, "stack")) for actor in everyone]
        for name, ref in stacks:
            with contextlib.suppress(self._ray.exceptions.RayError):
                say(f"\n{name} stands here:\n{self._ray.get(ref, timeout=2.0)}")
        longer = dataclasses.replace(self._layout, stall_timeout=Layout.stall_timeout)
        raise WorkerError(
            f"No process has made progress for {patience:g} seconds (Layout.stall_timeout); their step counts are "
            f"{ {actor.name: actor.steps for actor in everyone} }. Where each of them stands is printed above: one "
            f"hangs, and the others wait for it. To allow longer, use --layout {longer},stall_timeout=SECONDS."
        )

    def _close(self) -> None:
        """End every process, and wait for those that may be writing the run's folder."""
        for actor in (*self._collectors, *self._learners):
            with contextlib.suppress(Exception):
                self._ray.kill(actor.handle)
        if self._runs:
            with contextlib.suppress(Exception):
                self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_ENDING, fetch_local=False)
        if self._places is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._places)


def _short(error: Exception) -> str:
    """The line of Ray's report that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "died" in line.lower() or "dead" in line.lower() or "lost" in line.lower()]
    return ((said or lines or [type(error).__name__])[-1])[:300].rstrip(".")
