"""What the project promises: digest and ledger are equal, byte for byte, on every layout."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import golden
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import EXPERIMENTS, ITERATIONS, options
from torch import Tensor

import lockstep.train
from lockstep import ledger
from lockstep.cli.main import main
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.run import RunFolder
from lockstep.runtime import children
from lockstep.runtime.channels import Link, links
from lockstep.runtime.group import GlooGroup, Group
from lockstep.runtime.supervisor import Seat, StopRequest
from lockstep.tree import TreeSum

ROOT = Path(__file__).resolve().parents[1]
COLOCATED = ("processes:2", "processes:3", "processes:4")
SPLIT = ("cpu:a1-l1", "cpu:a2-l1", "cpu:a1-l2", "cpu:a2-l2", "cpu:a3-l1", "cpu:a1-l3")
MOST = 4
"""Processes of the largest of them."""
EVERYWHERE = ("ppo-lag-1", "impala-lstm-lag-2", "cartpole-lag-1")
TIMEOUT = 120.0


class AllReduce(TreeSum):
    """What others do: torch.distributed's own sum, whose order of addition depends on the processes."""

    def finish(self) -> Tensor:
        total = torch.stack([value for _, _, value in self._subtrees]).sum(0)
        self._subtrees = []
        dist.all_reduce(total)
        return total


@dataclass(frozen=True)
class Order:
    """One run, for as many of the processes as its layout has."""

    experiment: Experiment
    run: Path
    layout: Layout
    tree: type[TreeSum] = TreeSum

    @property
    def learners(self) -> int:
        return len(self.layout.learners) or self.layout.workers


def _serve(number: int, orders: Any, answers: Any) -> None:
    """A process of this module, for any number of runs: starting one costs seconds."""
    warnings.simplefilter("error")
    children.die_with_parent()
    for order, link in iter(orders.get, None):
        job = lockstep.train.Job(RunFolder(order.run), order.experiment, order.layout, options(order.run))
        store = f"file://{order.run}.store"
        try:
            with mock.patch("lockstep.worker.TreeSum", order.tree):
                joins = number < order.learners and order.learners > 1
                group = GlooGroup(store, number, order.learners) if joins else Group()
                try:
                    result = lockstep.train.work(job, Seat(group, link), StopRequest())
                finally:
                    group.close()
            answers.put((order.run, number, result and result.digest))
        except BaseException:
            answers.put((order.run, number, traceback.format_exc()))


class Workers:
    """Four processes, of which runs use two, three or all; learners come first."""

    def __init__(self) -> None:
        context = self._context = multiprocessing.get_context("spawn")
        self._orders = [context.Queue() for _ in range(MOST)]
        self._answers = context.Queue()
        self._answered: dict[Path, dict[int, str | None]] = {}
        self._processes = [
            context.Process(target=_serve, args=(number, orders, self._answers))
            for number, orders in enumerate(self._orders)
        ]
        for process in self._processes:
            process.start()

    def start(self, order: Order) -> None:
        """Make the run's folder, and have it run."""
        lockstep.train.RunFolder.create(order.experiment, order.layout, options(order.run))
        seats: list[Link | None] = [None] * order.layout.processes
        if order.layout.backend == "split":
            learners, collectors = links(self._context, len(order.layout.collectors), order.learners)
            seats = [*learners, *collectors]
        for orders, link in zip(self._orders, seats, strict=False):
            orders.put((order, link))

    def digest(self, order: Order) -> str:
        """Wait for it; every learner must have ended with the same digest."""
        answered = self._answered.setdefault(order.run, {})
        while len(answered) < order.layout.processes:
            run, number, answer = self._answers.get(timeout=TIMEOUT)
            self._answered.setdefault(run, {})[number] = answer
        failures = [answer for answer in answered.values() if answer is not None and "Traceback" in answer]
        assert not failures, "\n".join(failures)
        found = {str(answered[number]) for number in range(order.learners)}
        assert len(found) == 1, "\n".join(found)
        (digest,) = found
        assert re.fullmatch("[0-9a-f]{64}", digest), digest
        return digest

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for process in self._processes:
            process.join(10)
            process.kill()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@dataclass(frozen=True)
class Ran:
    """What a run left behind."""

    digest: str
    run: Path

    @property
    def ledger(self) -> bytes:
        return RunFolder(self.run).ledger.read_bytes()


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Runs an experiment in this process, once."""
    folder = tmp_path_factory.mktemp("inline")

    @functools.cache
    def ran(name: str) -> Ran:
        result = lockstep.train.train(EXPERIMENTS[name](), Layout(), options(folder / name))
        return Ran(result.digest, result.run)

    return ran


@pytest.fixture(autouse=True)
def _libraries_write_their_logs_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def order(name: str, run: Path, layout: str, tree: type[TreeSum] = TreeSum) -> Order:
    parsed = Layout.parse(layout)
    return Order(lockstep.train.prepare(EXPERIMENTS[name](), parsed), run, parsed, tree)


def layouts(name: str) -> list[str]:
    """Those that an experiment is tried on: some on all, each on two with separate roles, so that all are covered."""
    if name in EVERYWHERE:
        return [*COLOCATED, *SPLIT]
    turn = list(EXPERIMENTS).index(name)
    return [*COLOCATED, SPLIT[turn % len(SPLIT)], SPLIT[(turn + 3) % len(SPLIT)]]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_layouts_agree(name: str, workers: Workers, inline: Callable[[str], Ran], tmp_path: Path) -> None:
    orders = [order(name, tmp_path / layout.replace(":", "-"), layout) for layout in layouts(name)]
    for each in orders:
        workers.start(each)
    alone = inline(name)
    for each in orders:
        assert workers.digest(each) == alone.digest, str(each.layout)
        assert Ran("", each.run).ledger == alone.ledger, str(each.layout)
    _, lines = ledger.read(RunFolder(alone.run).ledger)
    versions = [tuple(line["parameters"].values()) for line in lines]
    assert len(set(versions)) == ITERATIONS, "every iteration changed the parameters"


@pytest.mark.parametrize("env_processes", [1, 2, 3])
def test_environments_in_subprocesses_agree(
    env_processes: int, workers: Workers, inline: Callable[[str], Ran], tmp_path: Path
) -> None:
    layout = f"{'cpu:a1-l1,jitter=0.002' if env_processes > 1 else 'processes:2'},env_processes={env_processes}"
    each = order("cartpole-lag-1", tmp_path / "run", layout)
    workers.start(each)
    assert workers.digest(each) == inline("cartpole-lag-1").digest


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["cartpole-lag-1", "memory-gru-lag-2"]),
    layout=st.sampled_from(["processes:2", *SPLIT]),
    jitter=st.sampled_from([0.001, 0.005, 0.02]),
    learner_delay=st.sampled_from([0.0, 0.2]),
)
def test_timing_decides_nothing(
    name: str,
    layout: str,
    jitter: float,
    learner_delay: float,
    workers: Workers,
    inline: Callable[[str], Ran],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    slowed = f"{layout},jitter={jitter},learner_delay={learner_delay}"
    each = order(name, tmp_path_factory.mktemp("slowed") / "run", slowed)
    workers.start(each)
    assert workers.digest(each) == inline(name).digest
    assert Ran("", each.run).ledger == inline(name).ledger


def test_another_seed_gives_another_result(inline: Callable[[str], Ran], tmp_path: Path) -> None:
    other = EXPERIMENTS["cartpole-8-shards"]().replace(seed=2)
    assert lockstep.train.train(other, options=options(tmp_path / "run")).digest != inline("cartpole-8-shards").digest


def test_an_ordinary_all_reduce_breaks_it(workers: Workers, inline: Callable[[str], Ran], tmp_path: Path) -> None:
    """In fp32 with 4 processes the same gradients, added in another order, make another agent."""
    ordinary = order("ppo", tmp_path / "run", "processes:4", AllReduce)
    workers.start(ordinary)
    alone = inline("ppo")
    assert workers.digest(ordinary) != alone.digest
    (_, lines), (_, others) = (ledger.read(RunFolder(run).ledger) for run in (alone.run, ordinary.run))
    assert lines[0]["rollout"] == others[0]["rollout"], "until the first sum, nothing differs"
    assert [line["parameters"] for line in lines] != [line["parameters"] for line in others]


@pytest.mark.parametrize("name", golden.NAMES)
def test_digests_are_the_recorded_ones(
    name: str, workers: Workers, inline: Callable[[str], Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = golden.read().get(golden.platform_key())
    if entry is not None:
        hint = "if this was intended, record them anew: make golden"
        assert inline(name).digest == entry["digests"][name], hint
        return
    with capsys.disabled():
        print(f"\nNo golden digests for this platform (make golden records them): {name} inline and in processes.")
    other = order(name, tmp_path / "run", "processes:4")
    workers.start(other)
    assert workers.digest(other) == inline(name).digest


def test_train_starts_processes_of_its_own(inline: Callable[[str], Ran], tmp_path: Path) -> None:
    """From settings to digest with nothing in between replaced."""
    result = lockstep.train.train(EXPERIMENTS["ppo-lstm"](), Layout("processes", 2), options(tmp_path / "run"))
    assert (result.digest, Ran("", result.run).ledger) == (inline("ppo-lstm").digest, inline("ppo-lstm").ledger)


def test_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "ppo-cartpole --env.adapter gymnasium --algorithm.rollout 16 --total-steps 384 --scheme.acting-batch 0"
    command = ["train", *flags.split(), "--display", "none", "--no-tensorboard"]
    assert main([*command, "--run", "inline"]) == 0
    expected = capsys.readouterr().out.splitlines()[-1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    finished = subprocess.run(
        [*torchrun, "lockstep", *command, "--run", "torchrun", "--layout", "torchrun"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == expected
    assert expected.startswith("digest: ")
    assert Ran("", Path("torchrun")).ledger == Ran("", Path("inline")).ledger
