"""Processes that serve one run after another, since starting one costs seconds, and what is left of those runs."""

from __future__ import annotations

import multiprocessing
import os
import re
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import lockstep.training.loops
from lockstep.core.shards import block
from lockstep.distributed.channels import Channels, open_channels
from lockstep.distributed.groups import GlooGroup, Group
from lockstep.distributed.local_group import LocalGroup, join
from lockstep.distributed.tree import TreeSum, partners
from lockstep.run.folder import RunFolder
from lockstep.system import children
from lockstep.training.context import RunStatus, WorkerContext
from lockstep.training.job import Job, Result

MOST = 4
"""Processes of the largest layout that is tested."""
TIMEOUT = 120.0


@dataclass(frozen=True)
class Ran:
    """What a run ended with, and must be equal on every layout."""

    digest: str
    ledger: bytes = field(repr=False)
    run: Path = field(compare=False)


def ran_of(result: Result) -> Ran:
    assert re.fullmatch("[0-9a-f]{64}", result.digest), result.digest
    return Ran(result.digest, RunFolder(result.run).ledger.read_bytes(), result.run)


class AllReduce(TreeSum):
    """What others do: torch.distributed's own sum, whose order of addition depends on the processes."""

    def finish(self) -> Tensor:
        total = torch.stack([value for _, _, value in self._subtrees]).sum(0)
        self._subtrees = []
        dist.all_reduce(total)
        return total


def _learners(job: Job) -> int:
    return len(job.layout.learners) or job.layout.workers


def _serve(number: int, orders: Any, answers: Any) -> None:
    """One of the processes; learners come first."""
    warnings.simplefilter("error")
    children.die_with_parent()
    while True:
        order, folder, job, ends, channels, tree = orders.get()
        os.chdir(folder)
        learners, answer = _learners(job), None
        try:
            with mock.patch("lockstep.learners.process.TreeSum", tree):
                group = Group() if ends is None else LocalGroup(ends)
                if tree is AllReduce:
                    group = GlooGroup(f"file://{folder}/{order}.store", number, learners)
                try:
                    answer = lockstep.training.loops.work(job, WorkerContext(group, channels), RunStatus())
                finally:
                    group.close()
                    if channels is not None:
                        channels.close()
        except BaseException:
            answer = traceback.format_exc()
        answers.put((order, number, answer))


class Workers:
    """Four processes, of which runs use two, three or all."""

    def __init__(self) -> None:
        context = self._context = multiprocessing.get_context("spawn")
        self._orders = [context.Queue() for _ in range(MOST)]
        self._answers = context.Queue()
        self._started: list[Job] = []
        self._answered: dict[int, dict[int, Any]] = {}
        self._processes = [
            context.Process(target=_serve, args=(number, orders, self._answers))
            for number, orders in enumerate(self._orders)
        ]
        for process in self._processes:
            process.start()

    def start(self, job: Job, tree: type[TreeSum] = TreeSum) -> int:
        """Have it run; returns what result wants to know."""
        order = len(self._started)
        self._started.append(job)
        self._answered[order] = {}
        channels: list[Channels | None] = [None] * job.layout.processes
        if job.layout.split:
            shards, counts = job.experiment.scheme.shards, (len(job.layout.collectors), _learners(job))
            parts = [[block(shards, count, i, job.layout.copies) for i in range(count)] for count in counts]
            learners, collectors = open_channels(self._context, *parts)
            channels = [*learners, *collectors]
        learning, shards, copies = _learners(job), job.experiment.scheme.shards, job.layout.copies
        ends = [*join(self._context, learning, partners(shards, learning, copies), copies), *[None] * MOST]
        for orders, end, own in zip(self._orders, ends, channels, strict=False):
            orders.put((order, os.getcwd(), job, end, own, tree))
        return order

    def result(self, order: int) -> Result:
        """Wait for it; every learner must have ended with the same digest."""
        job, answered = self._started[order], self._answered[order]
        while len(answered) < job.layout.processes:
            of, number, answer = self._answers.get(timeout=TIMEOUT)
            self._answered[of][number] = answer
        failures = [answer for answer in answered.values() if isinstance(answer, str)]
        assert not failures, "\n".join(failures)
        results = [answered[number] for number in range(_learners(job))]
        assert len({result.digest for result in results}) == 1, results
        return results[0]

    def ran(self, order: int) -> Ran:
        return ran_of(self.result(order))

    def run(self, work: Any, job: Job) -> Result:
        """In the place of lockstep.launchers.processes.run_processes."""
        return self.result(self.start(job))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
