"""Runs in groups of collectors and learners, as in a0-l1,2,3-d2. torchrun or srun starts one process for each group, on
one or more machines, and this process starts its group.

Rollouts and parameters stay in a group, in memory that its processes share. The learners of all groups sum gradients
over gloo. The processes that start the groups tell each other about failures: each is connected to the first one, which
forwards messages.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.core.shards import block
from lockstep.distributed.channels import open_channels
from lockstep.distributed.groups import Group, meeting_point
from lockstep.launchers.processes import Meeting, NoOtherGroups, WorkerSpec, run_specs
from lockstep.launchers.torchrun import agree, meet
from lockstep.system.supervision import WorkerError
from lockstep.training.context import RunStatus, Work
from lockstep.training.job import Job, Result

_CONNECTING = 60.0
"""Seconds that the processes have to connect to the first one, after all have met."""
_SECRET = 32
"""Bytes of a secret that only these processes know. Each connection begins with it."""
_FAILED, _MOVED, _ENDED = b"f", b"m", b"e"
"""Kinds of messages: a failure with its text, progress, and an end without errors."""
_SILENT = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Options by which a host that does not answer counts as lost after 30 seconds. Linux sends no keepalive probes while
sent data is unacknowledged. TCP_USER_TIMEOUT, in milliseconds, covers this case."""
_INTRODUCING = 5.0
"""Seconds that a new connection has to send the secret, since other programs may connect, too."""
_HEARING = 2.0
"""Seconds that the others have to receive a failure before connections close."""


def run_spread(work: Work, job: Job) -> Result:
    """Start one group, and watch it.

    Raises:
        WorkerError: a process of this group or of another one failed.
    """
    status = RunStatus()
    status.begin()  # on a signal, stop together with the others: a process that ends alone would count as lost
    group = meet(status)
    try:
        job = agree(group, job)
        store, meeting = meeting_point(os.environ["MASTER_ADDR"]) if group.rank == 0 else (None, None)
        host, port = group.broadcast(meeting)
        context = multiprocessing.get_context("spawn")
        specs = _specs(job, context, group.rank, host, port)
        with _connected(group, host) as others:
            result = run_specs(work, job, context, specs, others)
        del store  # must exist until the learners of all groups have met
        return result
    finally:
        group.close()


def _specs(job: Job, context: Any, group: int, host: str, port: int) -> list[WorkerSpec]:
    """The processes of one group."""
    shards, copies = job.experiment.scheme.shards, job.layout.copies
    collectors, learners = len(job.layout.collectors), len(job.layout.learners)
    own_collectors, own_learners = (
        range(group * count // copies, (group + 1) * count // copies) for count in (collectors, learners)
    )
    of_learners, of_collectors = open_channels(
        context,
        [block(shards, collectors, index, copies) for index in own_collectors],
        [block(shards, learners, index, copies) for index in own_learners],
    )
    return [
        *(
            WorkerSpec(
                f"Learner {rank} of {learners}",
                channels=channels,
                meeting=Meeting(host, port, rank, learners, copies),
            )
            for rank, channels in zip(own_learners, of_learners, strict=True)
        ),
        *(
            WorkerSpec(f"Collector {index} of {collectors}", channels=channels)
            for index, channels in zip(own_collectors, of_collectors, strict=True)
        ),
    ]


class OtherGroups(NoOtherGroups):
    """The processes that start the other groups.

    Args:
        links: by number of the other process, a connection to it. The first process is connected to all others, and
            each other process only to the first.
        names: the names of all processes.
        rank: the number of this process.
    """

    def __init__(self, links: dict[int, Connection], names: list[str], rank: int) -> None:
        self._links, self._names, self._rank = links, names, rank
        self._open, self._failure = dict(links), ""
        self._told = self._heard = False
        self._progress: object = None
        self._said = 0.0

    @property
    def connections(self) -> list[Connection]:
        return list(self._open.values())

    @property
    def running(self) -> bool:
        return bool(self._open)

    def failure(self) -> str | None:
        for number, link in list(self._open.items()):
            with contextlib.suppress(EOFError, OSError):  # the other process has ended; see below
                while link.poll():
                    message = link.recv_bytes()
                    if message[:1] == _FAILED:
                        self._failure = self._failure or message[1:].decode()
                    elif message == _ENDED:
                        del self._open[number]
                        break
                    self._heard = self._heard or message == _MOVED
                continue
            if number in self._open:
                self._failure = self._failure or f"{self._names[number]} was lost: it or its host has ended."
        return self._failure or None

    def moved(self, progress: object) -> bool:
        heard, now = self._heard, time.monotonic()
        if now > self._said + 1.0 and (progress != self._progress or (heard and self._rank == 0)):
            self._progress, self._said = progress, now
            self._tell(_MOVED)
        self._heard = False
        return heard

    def ended(self) -> None:
        if not self._told:
            self._told = True
            self._tell(_ENDED)

    def fail(self, text: str) -> None:
        """Tell the others how this group failed, or how another group failed, since they may not know it yet."""
        told = self._failure or f"{self._names[self._rank]}: {text}"
        self._tell(_FAILED + told.encode())
        # Closing a connection with unread messages would drop the messages that were sent.
        until = time.monotonic() + _HEARING
        while self._open and (left := until - time.monotonic()) > 0:
            for link in wait(list(self._open.values()), left):
                number = next(number for number, each in self._open.items() if each is link)
                try:
                    link.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    del self._open[number]

    def _tell(self, message: bytes) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the other process is lost, which failure() reports
                link.send_bytes(message)


@contextlib.contextmanager
def _connected(group: Group, host: str) -> Iterator[OtherGroups]:
    """Connect this process to the others, and tell them if it fails.

    Raises:
        WorkerError: they do not connect.
    """
    family = socket.getaddrinfo(host, None)[0][0]
    with contextlib.ExitStack() as stack:
        server = secret = None
        if group.rank == 0:
            server, secret = stack.enter_context(socket.create_server(("", 0), family=family)), os.urandom(_SECRET)
        port, secret = group.broadcast(server and (server.getsockname()[1], secret))
        names = group.gather(f"Group {group.rank} of {group.size} (host {socket.gethostname()})")
        names = group.broadcast(names)
        try:
            links = (
                {0: _joined(host, port, secret, group.rank)}
                if server is None
                else _accepted(server, secret, group.size - 1)
            )
        except OSError as error:
            raise WorkerError(
                f"{names[group.rank]} did not connect to the others: {error}. Each group must be able to reach the "
                f"first one at {host}, the address in MASTER_ADDR, on any port."
            ) from error
        for link in links.values():
            stack.callback(link.close)
        others = OtherGroups(links, names, group.rank)
        try:
            yield others
        except BaseException as error:
            others.fail(str(error) or f"ended by {type(error).__name__}")
            raise


def _joined(host: str, port: int, secret: bytes, number: int) -> Connection:
    """A connection to the first process."""
    link = socket.create_connection((host, port), timeout=_CONNECTING)
    link.sendall(secret + number.to_bytes(4, "big"))
    return _kept(link)


def _accepted(server: socket.socket, secret: bytes, count: int) -> dict[int, Connection]:
    """Connections from all other processes, by number."""
    links: dict[int, Connection] = {}
    deadline = time.monotonic() + _CONNECTING
    while len(links) < count:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        link, _ = server.accept()
        link.settimeout(_INTRODUCING)
        said = b""
        with contextlib.suppress(OSError):  # another program, which sends nothing or has disconnected
            said = link.recv(_SECRET + 4, socket.MSG_WAITALL)
        if len(said) == _SECRET + 4 and secrets.compare_digest(said[:_SECRET], secret):
            links[int.from_bytes(said[_SECRET:], "big")] = _kept(link)
        else:
            link.close()
    return links


def _kept(link: socket.socket) -> Connection:
    """A connection that fails when the other host is silent."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a failure must not wait for earlier acknowledgements
    for option, seconds in _SILENT.items():
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return Connection(link.detach())
