"""The processes of a run on a Ray cluster. They are actors, which lockstep.launchers.ray.driver controls."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import traceback
from concurrent.futures import Future
from typing import Any, Literal

import torch

from lockstep.collectors.preemption import Counts
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import RolloutInfo
from lockstep.core.schedule import RolloutId
from lockstep.distributed.groups import GlooGroup, Group, PeerGone, meeting_point
from lockstep.distributed.shared_memory import PrivateMemory
from lockstep.launchers.ray.platforms import Node, this_node
from lockstep.learners.parameter_store import Changed, ParameterStore, Read
from lockstep.learners.steps import Computed
from lockstep.run.finding import is_run
from lockstep.system import children
from lockstep.training.context import RunStatus, Work, WorkerContext
from lockstep.training.job import Job, Result
from lockstep.training.start import collector_service
from lockstep.transport.free_running import Admission
from lockstep.transport.inbox import Inbox
from lockstep.transport.messages import CollectorService, RolloutMessage, State, VersionMessage

WHILE_BUSY = "while-busy"
"""The concurrency group of the calls that actors answer while they work."""


def call(actor: Any, method: str, *args: Any) -> Any:
    """Call a method of an actor while it works. Returns the reference to its answer."""
    return getattr(actor, method).options(concurrency_group=WHILE_BUSY).remote(*args)


class _Process:
    """Methods that the driver may call in every process at any time.

    Args:
        name: the name in messages to the user.
    """

    def __init__(self, name: str, job: Job, directory: str) -> None:
        self._name, self._job, self._status, self._thread = name, job, RunStatus(), 0
        if threading.current_thread() is threading.main_thread():
            children.ignore((signal.SIGINT,))
        with contextlib.suppress(OSError):  # paths in settings are relative to the folder where the run was started
            os.chdir(directory)

    def __repr__(self) -> str:
        """The name that Ray shows in errors."""
        return self._name

    def _works(self) -> None:
        """Record that the calling thread does the work, and unblock Ctrl-C in it. Ray blocks it, and programs that
        environments start would inherit that."""
        self._thread = threading.get_ident()
        if children.ignores(signal.SIGINT):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))

    def _require_gpu(self, role: Literal["collector", "learner"]) -> None:
        """Raise SettingsError if this process should compute on a GPU, but torch can use none."""
        if self._job.layout.device_of(role, 0) != "cpu" and not torch.cuda.is_available():
            raise SettingsError(
                f"Ray assigned a GPU of {socket.gethostname()} to {self._name}, but torch can use none there. Run "
                "lockstep doctor on that machine to see what torch finds."
            )

    def progress(self) -> int:
        """Steps so far."""
        return self._status.steps()

    def node(self) -> Node:
        """The machine of this process."""
        return this_node(self._job)

    def stack(self) -> str:
        """The stack of the working thread."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "not at work\n"


class RayLearner(_Process):
    """A process that learns, and also collects unless the layout has separate collectors."""

    def __init__(self, name: str, job: Job, directory: str, rank: int) -> None:
        super().__init__(name, job, directory)
        self._rank, self._meeting = rank, None
        scheme = job.experiment.scheme
        self._parameters, self._counts = ParameterStore(scheme.max_gradient_lag), Counts(scheme.shards)
        schedule, admission = job.schedule, None
        if job.collects_freely:
            admission = Admission(PrivateMemory(), schedule.shards, schedule.lag + 1)
        self._inbox = Inbox(schedule.lag + 1, admission)

    def meeting(self) -> tuple[str, int]:
        """The host and port where learners meet."""
        import ray

        self._meeting, place = meeting_point(ray.util.get_node_ip_address())
        return place

    def work(self, work: Work, meeting: tuple[str, int] | None, learner_0: Any) -> Result | None:
        """Take part in the run from beginning to end.

        Args:
            learner_0: the actor of learner 0.
        """
        self._works()
        layout, folder = self._job.layout, self._job.folder.path
        if not is_run(folder):
            raise SettingsError(
                f"The run's folder {folder} does not exist on {socket.gethostname()}, which runs a learner. On several "
                "machines, it must have the same path on all of them: --run /SHARED/FOLDER/NAME."
            )
        self._require_gpu("learner")
        group = Group()
        if meeting is not None:
            group = GlooGroup(self._meeting or meeting_point(*meeting)[0], self._rank, layout.learning)
        try:
            inbox = self._inbox if layout.split else None
            store = self._parameters if self._rank == 0 else RemoteStore(learner_0)
            counts = RemoteCounts(learner_0)
            return work(self._job, WorkerContext(group, inbox=inbox, store=store, counts=counts), self._status)
        finally:
            group.close()

    def stop(self) -> None:
        """End after this iteration, with a checkpoint."""
        self._status.request_stop()

    def stored(self, method: str, *args: Any) -> Any:
        """Call a method of learner 0's parameter store."""
        return getattr(self._parameters, method)(*args)

    def counted(self, method: str, *args: Any) -> Any:
        """Call a method of learner 0's counts."""
        return getattr(self._counts, method)(*args)

    def deliver(self, message: RolloutMessage) -> RolloutInfo | None:
        """Receive a rollout. Returns its info if collectors run freely, so that it can be announced to learner 0."""
        self._inbox.deliver(message)
        return message.info if self._job.collects_freely else None

    def take_over(self, shards: list[int], generation: int) -> int:
        """As Inbox.take_over."""
        return self._inbox.take_over(shards, generation)

    def announce(self, generation: int, *infos: RolloutInfo) -> None:
        """As Inbox.announce."""
        self._inbox.announce(list(infos), generation)

    def admit(self, shards: list[int], lap: int, before: None) -> tuple[int, int]:
        """Wait until shards may begin a lap. Returns the lap, and the version to begin it with.

        Args:
            before: the result of the collector's previous task. Ray waits for it, so that a lap is only admitted when
                the collector can begin it.
        """
        return lap, self._inbox.admit(shards, lap)

    def remember(self, shard: int, lap: int, state: State) -> None:
        """Keep the initial state of a shard."""
        self._inbox.remember(shard, lap, state)

    def states(self, shards: list[int], lap: int) -> tuple[dict[int, State], dict[int, int]]:
        """The states of shards before a lap, and their offsets."""
        return self._inbox.states(shards, lap), {shard: self._inbox.offsets[shard] for shard in shards}

    def version(self, number: int) -> VersionMessage:
        """As Inbox.version."""
        return self._inbox.version(number)

    def started(self, group: int, ready: tuple[int, int]) -> None:
        """As Inbox.started."""
        self._inbox.started(group, ready)


class RemoteStore:
    """The parameter store of learner 0, for the other learners."""

    def __init__(self, learner_0: Any) -> None:
        self._learner_0 = learner_0

    def read(self, learner: int, seen: int) -> Read:
        return self._ask("read", learner, seen)

    def newest(self, seen: int) -> Read:
        return self._ask("newest", seen)

    def change(self, learner: int, computed: Computed, first: int) -> Changed:
        return self._ask("change", learner, computed, first)

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the store. Raises PeerGone if learner 0 is gone."""
        import ray
        from ray import exceptions as errors

        try:
            return ray.get(call(self._learner_0, "stored", method, *args))
        except (
            errors.RayActorError,
            errors.NodeDiedError,
            errors.LocalRayletDiedError,
            errors.ObjectLostError,
        ) as error:
            raise PeerGone(str(error)) from None


class RemoteCounts:
    """The counts of learner 0, for every process that collects."""

    def __init__(self, learner_0: Any) -> None:
        self._learner_0 = learner_0

    def collected(self, rollout_id: RolloutId) -> None:
        call(self._learner_0, "counted", "collected", rollout_id)

    def late(self, rollout_id: RolloutId, enough: int) -> Future[Any]:
        return call(self._learner_0, "counted", "late", rollout_id, enough).future()


class RayCollector(_Process):
    """A process that collects rollouts of some groups of shards on request."""

    def __init__(self, name: str, job: Job, directory: str, _: int) -> None:
        super().__init__(name, job, directory)
        self._services: dict[int, CollectorService] = {}
        """By group of shards, as the generations."""
        self._generations: dict[int, int] = {}

    def start(
        self, group: int, generation: int, learner_0: Any, *held: tuple[dict[int, State], dict[int, int]]
    ) -> list[Any]:
        """Start a group of shards. Returns the state of each shard, and the result of CollectorService.start.

        Args:
            generation: requests with a lower generation are outdated.
            learner_0: the actor of learner 0.
            held: from each learner: the states of its shards, and their offsets.
        """
        self._works()
        self._require_gpu("collector")
        self.leave(group)
        self._generations[group] = generation
        service = collector_service(self._job, group, self._status.heartbeat, RemoteCounts(learner_0))
        self._services[group] = service
        states, offsets = ({shard: each for some in kind for shard, each in some.items()} for kind in zip(*held))
        ready = service.start(states, offsets)
        return [*service.states().values(), ready]

    def collect(self, group: int, generation: int, lap: int, version: VersionMessage, before: Any) -> list[Any]:
        """Collect a rollout of each shard of a group. Returns a message for each, and None, which the next call can
        wait for."""
        service = self._services.get(group)
        if service is None or generation < self._generations[group]:
            raise NotWanted(group)
        self._works()
        messages = [_of_process(message, len(self._services)) for message in service.collect(lap, version)]
        for each in self._services.values():
            each.rest()
        return [*messages, None]

    def leave(self, group: int) -> None:
        """Close a group's environments in this process."""
        if (service := self._services.pop(group, None)) is not None:
            service.close()


class NotWanted(Exception):
    """A request is outdated, since its collector started again or left after it. Nobody waits for the rollout."""


def _of_process(message: RolloutMessage, groups: int) -> RolloutMessage:
    """The message with times of the whole process, estimated from those of one of its groups."""
    if groups == 1 or not message.spent:
        return message
    return dataclasses.replace(message, spent={name: groups * seconds for name, seconds in message.spent.items()})
