"""Checks that the nodes of a run compute alike. With precision bf16 or fp32, bits depend on the kind of processor. With
every precision, they depend on the versions of libraries.

Every process describes its node, which is compared with learner 0's. The ledger's head records learner 0's platform. If
the scheme promises the same bits as every other layout, a difference ends the run. If timing decides, run.json records
each node, and the user is warned.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray.util

from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.run import ledger
from lockstep.run.consistency import of_processor
from lockstep.run.platform import this_platform
from lockstep.system.output import print_warning
from lockstep.training.job import Job
from lockstep.training.resuming import warn_of_platform


@dataclass(frozen=True)
class Node:
    """A process's description of its machine."""

    host: str
    """The machine's name and address, since machines may share a name."""
    platform: Mapping[str, Any]
    """As in the head of a ledger, but without GPUs: learner 0 records its own GPU, and collectors may have others."""


def this_node(job: Job) -> Node:
    """The machine of this process."""
    address = ray.util.get_node_ip_address()
    return Node(f"{socket.gethostname()} ({address})", this_platform(to_json(job.experiment)))


class Platforms:
    """Compares the nodes of an attempt's processes in the order of their answers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._first: Node | None = None
        self._waiting: list[tuple[str, bool, Node]] = []
        self._told: set[tuple[str, tuple[str, ...]]] = set()

    def first(self, node: Node) -> None:
        """Take the answer of learner 0.

        Raises:
            SettingsError: another process that has answered must compute like learner 0, but does not.
        """
        self._first = node
        if self._job.checkpoint is not None:
            head, _ = ledger.read(self._job.folder.ledger, 0)
            if differs := self._differing(ledger.without_gpus(head["platform"]), node):
                warn_of_platform(differs)
                self._job.folder.note_difference(differs)
        for each in self._waiting:
            self.other(*each)

    def other(self, name: str, learns: bool, node: Node) -> None:
        """Take the answer of another process.

        Args:
            name: the name of the process.
            learns: whether it is a learner.

        Raises:
            SettingsError: it must compute like learner 0, but does not.
        """
        if self._first is None:
            self._waiting.append((name, learns, node))
            return
        scheme = self._job.experiment.scheme
        decides = scheme.timing_decides and self._job.recorded is None
        differs = self._differing(self._first.platform, node)
        same_updates = learns and scheme.gradient_lag != "async"  # all learners make the same updates, each in its copy
        if differs and (same_updates or not decides):
            raise SettingsError(self._refusal(name, node, differs, same_updates=same_updates))
        if not decides:
            return
        self._job.folder.note_node(name, node.host, differs)
        if differs and (node.host, differs) not in self._told:
            self._told.add((node.host, differs))
            print_warning(
                f"{name} is on {node.host}, which is not like {self._first.host}, where learner 0 is: "
                f"{'; '.join(differs)}. Timing decides in this scheme, so the run continues, and run.json records each "
                "node. But a replay can only repeat its bits if all nodes compute alike."
            )

    def _differing(self, platform: Mapping[str, Any], node: Node) -> tuple[str, ...]:
        """The differences of a node that bits depend on."""
        differs = ledger.differing_platform(platform, node.platform)
        portable = self._job.experiment.precision == "portable"
        return tuple(each for each in differs if not (portable and of_processor(each)))

    def _refusal(self, name: str, node: Node, differs: tuple[str, ...], *, same_updates: bool) -> str:
        assert self._first is not None
        layout, portable = self._job.layout, self._job.experiment.precision == "portable"
        roles, known = ("collector", "learner") if layout.split else ("worker",), dict(layout.resources)
        resources = tuple((f"{role}.alike", 1.0) for role in roles if f"{role}.alike" not in known)
        placed = dataclasses.replace(layout, resources=(*layout.resources, *resources))
        ways = [f"mark nodes that are alike (ray start --resources '{{\"alike\": 8}}') and use --layout {placed}"]
        processors = [of_processor(each) for each in differs]
        mend = ["install the same versions and files on all nodes"] * (not all(processors))
        mend += ["use --precision portable, which has identical bits on every CPU (another result than now)"] * any(
            processors
        )
        ways.insert(0, " and ".join(mend))
        if not (same_updates or portable):
            ways.append("let timing decide (--scheme.lag async), and each node is recorded")
        why = (
            "All learners must compute alike, since each applies the same gradients to its copy of the parameters"
            if same_updates
            else "This scheme promises the bits of every other layout, which needs nodes that compute alike"
        )
        return (
            f"{name} is on {node.host}, which is not like {self._first.host}, where learner 0 is: "
            f"{'; '.join(differs)}. {why}: {', or '.join(ways)}."
        )
