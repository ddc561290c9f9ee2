"""The driver of a run on a Ray cluster. It starts every process and passes references between them, never data.

Data flows between the actors through the object store: the driver passes the reference to one actor's answer to
another.

        learner 0: version(max(0, i - lag)) ──► collector: collect(i, …) ──► its learner: deliver(a shard's rollout i)

The driver requests rollout i when the rollouts before i - lag have arrived, and the collector begins it when its
version exists. So the store never holds more than lag + 1 rollouts of a shard. Learners exchange gradients by
torch.distributed.

If collectors run freely (lockstep.transport.free_running), learner 0 admits each lap of a collector's shards and says
which version begins it. The learners that may need its rollouts receive them. Then they are announced to learner 0,
which can choose them.

        learner 0: admit(lap) ──► collector: collect(lap, …) ──► learners: deliver(…) ──► learner 0: announce(…)

For decisions within an iteration that depend on timing, processes call learner 0 directly and not through the driver:
for the parameters of asynchronous gradients (lockstep.learners.parameter_store), and for the counts of collected
rollouts (lockstep.collectors.preemption).

The driver replaces a lost collector. The new one continues from the shards' states that came with their last rollouts,
and collects the missing rollouts again with the same versions. A collector that is alive does the same if a rollout was
lost on its way. If a learner is lost, all processes restart from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from typing import Any

from lockstep.core.shards import block, holder
from lockstep.distributed.groups import PeerGone
from lockstep.launchers.ray.actors import RayCollector, RayLearner, call
from lockstep.launchers.ray.ending import ProcessLost, require_restarts_left, say, stalled
from lockstep.launchers.ray.nodes import Nodes
from lockstep.launchers.ray.outcomes import fail, outcome, raised, short
from lockstep.launchers.ray.places import Places
from lockstep.launchers.ray.requests import Collector, Delivery, NextLap, Process, Request, Start
from lockstep.system.supervision import StallDetector
from lockstep.training.context import RunStatus, Work
from lockstep.training.job import Job, Result

_POLL = 1.0
"""Seconds between two polls of every process for its progress."""
_AGAIN = 0.5
"""Seconds after which a failed request is repeated if its collector seems to be alive."""
_TRIES = 3
"""If a request fails so often while its collector is alive, the data that it needs counts as lost."""
_NOTICING = 30.0
"""Seconds that Ray has to notice the loss of a node after a learner's connection to it broke."""
_ENDING = 10.0
"""Seconds that processes have to end."""


class RayDriver:
    """One attempt to run a job, from the first process to the last result.

    Args:
        losses: how many processes were lost before.
    """

    def __init__(self, ray: Any, work: Work, job: Job, status: RunStatus, losses: int) -> None:
        layout, schedule = job.layout, job.schedule
        self._ray, self._work, self._job, self._layout, self._status = ray, work, job, layout, status
        self.losses = losses
        self._schedule, self._shards = schedule, job.experiment.scheme.shards
        self._free = job.collects_freely
        begin = 0 if self._free else job.begin
        numbers = schedule.iterations_from(begin, job.stop_after)
        self._requested, self._end = numbers.start, numbers.stop
        """Unless collectors run freely: the rollout that is requested next, and the first that is not needed."""
        self._arrived = dict.fromkeys(range(self._shards), begin - 1)
        """By shard: the number of the last rollout that a learner has; its lap if collectors run freely."""
        self._learners: list[Process] = []
        self._processes: list[Process] = []
        """The processes that only collect."""
        self._groups = layout.groups(self._shards)
        self._collectors: dict[int, Collector] = {}
        """By group of shards."""
        self._generations = itertools.count()
        self._runs: dict[Any, int] = {}
        """By the reference to a learner's result: its rank."""
        self._starts: dict[Any, Start] = {}
        """By reference, as the dicts below: the collector that is starting."""
        self._deliveries: dict[Any, Delivery] = {}
        self._admissions: dict[Any, NextLap] = {}
        self._again: list[tuple[float, Request]] = []
        self._versions: dict[int, Any] = {}
        self._results: dict[int, Result] = {}
        self._broken: tuple[float, str] | None = None
        """When a learner's connection broke, and the error message."""
        self._places = Places(ray, job)
        self._nodes = Nodes(ray, job)
        self._polled = 0.0
        self._stall = StallDetector(job.layout.stall_timeout, job.environments_each)
        self._told = False

    def run(self) -> Result:
        """Run the job. Returns the result of learner 0.

        Raises:
            ProcessLost: a process is lost that cannot be replaced.
            SettingsError, WorkerError: as lockstep.launchers.ray.launcher.run_ray.
        """
        try:
            self._begin()
            while len(self._results) < len(self._learners):
                self._step()
            self._nodes.finish()
            return self._results[0]
        finally:
            self._close()

    def _begin(self) -> None:
        layout = self._layout
        if self._job.options.display != "none":
            say(f"Starting {layout.processes} processes on Ray …")
        self._places.reserve()
        learning, kind = layout.learning, "Learner" if layout.split else "Worker"
        for rank in range(learning):
            self._learners.append(self._new_process(f"{kind} {rank} of {learning}", RayLearner, rank, rank))
        meeting = self._call(self._learners[0], "meeting") if learning > 1 else None
        for rank, learner in enumerate(self._learners):
            self._runs[learner.handle.work.remote(self._work, meeting, self._learners[0].handle)] = rank
        self._begin_collectors()

    def _begin_collectors(self) -> None:
        for index in range(self._groups):
            self._processes.append(self._collecting(index))
            self._start(index, self._processes[index])

    def _collecting(self, index: int) -> Process:
        """A new process that collects."""
        place = len(self._learners) + index
        return self._new_process(f"Collector {index} of {self._groups}", RayCollector, index, place)

    def _new_process(self, name: str, kind: type, index: int, place: int | None = None) -> Process:
        """A new process. place: see Places.start."""
        process = self._places.start(name, kind, index, place)
        self._nodes.ask(process, index if kind is RayLearner else None)
        return process

    def _call(self, process: Process, method: str, *args: Any) -> Any:
        """Call a method of a process while it works."""
        return call(process.handle, method, *args)

    def _start(self, index: int, process: Process) -> None:
        """Start to collect a group of shards in a process, after their last rollouts that have arrived."""
        learning = len(self._learners)
        shards = block(self._shards, self._groups, index)
        collector = self._collectors[index] = Collector(index, shards, process, next(self._generations))
        next_one: Any = min(self._arrived[shard] for shard in shards) + 1
        if self._free:  # learner 0 knows better which laps have arrived
            next_one = self._call(self._learners[0], "take_over", list(shards), collector.generation)
        states = [
            self._call(learner, "states", mine, next_one)
            for rank, learner in enumerate(self._learners)
            if (mine := [shard for shard in shards if shard in block(self._shards, learning, rank)])
        ]
        start = process.handle.start.options(num_returns=len(shards) + 1)
        *begun, collector.last = start.remote(index, collector.generation, self._learners[0].handle, *states)
        self._starts[collector.last] = Start(collector)
        self._call(self._learners[0], "started", index, collector.last)
        if self._free:
            for shard, state in zip(shards, begun, strict=True):  # a checkpoint may be written before the first rollout
                self._call(self._learners[holder(self._shards, learning, shard)], "remember", shard, next_one, state)
            self._admit(NextLap(collector, next_one))
            return
        for number in range(next_one, self._requested):
            self._collect(collector, number, self._schedule.collects_with(number))

    def _collect(self, collector: Collector, number: int, wanted: int) -> None:
        """Request a rollout of all shards of a collector with the wanted version, and its delivery."""
        if wanted not in self._versions:
            self._versions[wanted] = self._call(self._learners[0], "version", wanted)
        collect = collector.process.handle.collect.options(num_returns=len(collector.shards) + 1)
        *answers, collector.last = collect.remote(
            collector.index, collector.generation, number, self._versions[wanted], collector.last
        )
        by_shard = dict(zip(collector.shards, answers, strict=True))
        for each in [by_shard] if self._free else [{shard: answer} for shard, answer in by_shard.items()]:
            self._deliver(Delivery(collector, number, each))

    def _deliver(self, delivery: Delivery) -> None:
        received = []
        for shard, answer in delivery.answers.items():
            learners = [self._learners[holder(self._shards, len(self._learners), shard)]]
            if self._free and not self._schedule.by_shard:
                learners = self._learners  # any of them may learn from it
            received += [self._call(learner, "deliver", answer) for learner in learners]
        if self._free:
            received = [self._call(self._learners[0], "announce", delivery.collector.generation, *received)]
        self._deliveries[received[0]] = delivery

    def _admit(self, admission: NextLap) -> None:
        collector = admission.collector
        ref = self._call(self._learners[0], "admit", list(collector.shards), admission.lap, collector.last)
        self._admissions[ref] = admission

    def _admitted(self, ref: Any) -> None:
        admission = self._admissions.pop(ref)
        admitted, error = outcome(self._ray, ref)
        if error is None:
            self._begin_lap(admission.collector, *admitted)
        else:
            self._failed(admission, error)

    def _begin_lap(self, collector: Collector, lap: int, version: int) -> None:
        """Request a lap, and the admission of the next one."""
        self._versions = {number: each for number, each in self._versions.items() if number >= version}
        self._collect(collector, lap, version)
        self._admit(NextLap(collector, lap + 1))

    def _step(self) -> None:
        """Wait for the next event, and handle it."""
        self._poll()
        polls = {process.poll: process for process in (*self._learners, *self._processes) if process.poll is not None}
        # Deliveries come before admissions, so that rollouts are freed before more are requested.
        refs = [*self._nodes.open, *self._starts, *self._runs, *polls, *self._deliveries, *self._admissions]
        for ref in self._ray.wait(refs, num_returns=1, timeout=_POLL / 2, fetch_local=False)[0]:
            if ref in self._nodes.open:
                self._nodes.answered(ref)
            elif ref in self._starts:
                self._started(ref)
            elif ref in self._runs:
                self._ended(ref)
            elif ref in polls:
                self._polled_one(polls[ref])
            elif ref in self._admissions:
                self._admitted(ref)
            else:
                self._delivered(ref)
        now = time.monotonic()
        failed, self._again = self._again, []
        for at, each in failed:
            if at + _AGAIN > now:
                self._again.append((at, each))
            elif self._collectors.get(each.collector.index) is each.collector:
                self._repeat(each, alive=each.collector.process.answered > at)
        if self._broken is not None and now > self._broken[0] + _NOTICING:
            raise ProcessLost(self._broken[1])
        if self._status.stop_requested() and not self._told:
            self._told = True
            for learner in self._learners:
                self._call(learner, "stop")
        self._request_rollouts()

    def _request_rollouts(self) -> None:
        """Request further rollouts as long as the lag allows them."""
        while self._collectors and self._requested < self._end and not self._free:
            if min(self._arrived.values()) < self._requested - self._schedule.lag - 1:
                break
            for collector in self._collectors.values():
                self._collect(collector, self._requested, self._schedule.collects_with(self._requested))
            self._requested += 1

    def _started(self, ref: Any) -> None:
        start = self._starts.pop(ref)
        _, error = outcome(self._ray, ref)
        if error is not None:
            self._failed(start, error)

    def _ended(self, ref: Any) -> None:
        rank = self._runs.pop(ref)
        name = self._learners[rank].name
        result, error = outcome(self._ray, ref)
        if error is None:
            self._results[rank] = result
            return
        cause = raised(self._ray, error)
        if cause is None:
            raise ProcessLost(f"{name} was lost ({short(error)})")
        gone = getattr(cause, "cause", None)
        if not isinstance(gone, PeerGone):
            fail(cause)
        if self._broken is None:  # the cause will be reported by Ray or by another process that raised an error
            self._broken = time.monotonic(), f"{name} has lost its connection to another process ({short(gone)})"

    def _delivered(self, ref: Any) -> None:
        delivery = self._deliveries.pop(ref)
        _, error = outcome(self._ray, ref)
        if error is not None:
            self._failed(delivery, error)
            return
        delivery.collector.process.delivered = True
        for shard in delivery.answers:
            self._arrived[shard] = max(self._arrived[shard], delivery.number)
        if not self._free:
            oldest = self._schedule.collects_with(min(self._arrived.values()) + 1)
            self._versions = {number: each for number, each in self._versions.items() if number >= oldest}

    def _failed(self, what: Request, error: Exception) -> None:
        if (cause := raised(self._ray, error)) is not None:
            fail(cause)
        # One of the processes was unreachable, or is lost, which the next poll will show.
        self._again.append((time.monotonic(), what))

    def _repeat(self, what: Request, *, alive: bool) -> None:
        """Repeat a request that failed. alive: whether its collector has answered since."""
        if isinstance(what, Start):
            self._start_again(what.collector)
        elif what.tries < _TRIES:
            again = dataclasses.replace(what, tries=what.tries + alive)
            self._deliver(again) if isinstance(again, Delivery) else self._admit(again)
        else:  # learners can be reached again by now, so the data that they or the collector need is lost
            name = what.collector.process.name
            if self._timing_preempts():
                raise ProcessLost(f"A rollout of {name} was lost")
            self._lose(f"A rollout of {name} was lost", "It collects the missing rollouts again")
            self._start_again(what.collector)

    def _start_again(self, collector: Collector) -> None:
        """Start a collector again, and repeat all later requests, which waited for the failed one and failed, too."""
        self._forget(collector)
        self._versions.clear()  # a request for one of them may have failed, too
        self._start(collector.index, collector.process)

    def _lose(self, what: str, then: str) -> None:
        """Count a loss that the run survives, and tell the user."""
        self.losses += 1
        require_restarts_left(self.losses, self._layout, what)
        say(f"{what}. {then} ({self.losses} of restarts={self._layout.restarts}).")

    def _forget(self, collector: Collector) -> None:
        """Drop all open requests to a collector."""
        for requested in (self._starts, self._deliveries, self._admissions):
            for ref in [ref for ref, each in requested.items() if each.collector is collector]:
                del requested[ref]

    def _polled_one(self, process: Process) -> None:
        steps, error = outcome(self._ray, process.poll)
        process.poll = None
        if error is None:
            process.steps, process.answered = steps, time.monotonic()
        elif not isinstance(error, self._ray.exceptions.ActorUnavailableError):
            if process in self._processes and not self._timing_preempts():
                self._replace(process, short(error))
            elif process in self._processes or self._learners.index(process) not in self._results:
                raise ProcessLost(f"{process.name} was lost ({short(error)})")

    def _timing_preempts(self) -> bool:
        """Whether timing decides the ends of rollouts. Then a new collector would not collect the same ones again."""
        return self._job.experiment.scheme.preempt < 1 and self._job.recorded is None and self._groups > 1

    def _replace(self, lost: Process, why: str) -> None:
        """Replace a lost process that collects."""
        self._lose(f"{lost.name} was lost ({why})", "A new one continues")
        index = self._processes.index(lost)
        self._forget(self._collectors[index])
        self._processes[index] = self._collecting(index)
        self._start(index, self._processes[index])

    def _poll(self) -> None:
        """Poll every process for its progress from time to time. Raise WorkerError if none makes progress."""
        now = time.monotonic()
        if now < self._polled + _POLL:
            return
        self._polled = now
        processes = [*self._learners, *self._processes]
        steps = sum(process.steps for process in processes) + sum(self._arrived.values())
        patience = self._stall.too_long(steps, started=any(process.steps > 0 for process in processes))
        if patience is not None:
            raise stalled(self._ray, processes, patience, self._layout)
        for process in processes:
            if process.poll is None:
                process.poll = self._call(process, "progress")

    def _close(self) -> None:
        """End every process, and wait for those that may be writing to the run's folder."""
        for process in (*self._processes, *self._learners):
            with contextlib.suppress(Exception):
                self._ray.kill(process.handle)
        if self._runs:
            with contextlib.suppress(Exception):
                self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_ENDING, fetch_local=False)
        self._places.free()
