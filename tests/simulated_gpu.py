"""A simulated GPU: `cuda:0` and more on torch's build for CPUs, with real numbers.

All memory is the CPU's; which of it lies on which GPU is written down (simulated_books.py). Two torch modes
(simulated_modes.py) see every call and every kernel. So whole runs train, in one process or several, while what CUDA
refuses is refused, and kernels, copies and syncs are counted with the line of lockstep that caused them.

python tests/simulated_gpu.py EXPERIMENT [LAYOUT ...]      train an experiment of tests/tiny.py: digests and counts
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from simulated_books import Books, Counts
from simulated_cuda import Stream, stand_ins
from simulated_ipc import Shared
from simulated_modes import Functions, Kernels
from simulated_streams import Streams
from torch.multiprocessing import reductions

from lockstep.collectors.device_actor import DeviceActor
from lockstep.collectors.device_rollout import DeviceRolloutActor
from lockstep.learners.learner import Learner
from lockstep.system import children

_LEAVING = 5.0
"""Seconds that a process has to leave its counts before it is killed."""
_installed: tuple[Books, contextlib.ExitStack] | None = None


def install(gpus: int = 4) -> None:
    """From now on this process, and those that lockstep starts from it, have GPUs."""
    folder = Path(tempfile.mkdtemp(prefix="simulated-gpu-"))
    _install(gpus, folder).callback(shutil.rmtree, folder, ignore_errors=True)


def uninstall() -> None:
    """Everything is as it was before install()."""
    global _installed
    assert _installed is not None, "nothing is installed"
    _installed[1].close()
    _installed = None


@contextlib.contextmanager
def simulated(gpus: int = 4) -> Iterator[None]:
    """Installed for a while."""
    install(gpus)
    try:
        yield
    finally:
        uninstall()


def counts() -> Counts:
    """Since install(), in this process and in those that lockstep started from it and that have ended."""
    return _books().total()


def faults() -> dict[str, int]:
    """What CUDA would have refused, or what may give other numbers on it, and how often, in all processes."""
    return _books().faults()


def report(lines: int = 6) -> str:
    """Counts and faults, as text.

    Args:
        lines: of lockstep, for each kind of thing that was counted.
    """
    return "\n".join([counts().text(lines), *(f"FAULT {text} x{n}" for text, n in faults().items())])


@contextlib.contextmanager
def each_call(owner: Any, name: str) -> Iterator[list[Counts]]:
    """The counts of each call of owner.name in this process, in order; owner is a class or a module."""
    found: list[Counts] = []
    function = getattr(owner, name)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        before = _books().counts
        result = function(*args, **kwargs)
        found.append(_books().counts - before)
        return result

    setattr(owner, name, counted)
    try:
        yield found
    finally:
        setattr(owner, name, function)


@dataclass(frozen=True)
class HotPath:
    """Counts of this process's share of a training, in order."""

    acting: list[Counts]
    """Of each step that an acting batch chose its actions for."""
    gradients: list[Counts]
    """Of the gradients of a step, of all slots, and their sum in this process."""
    learning: list[Counts]
    """Of all gradient steps of each iteration."""
    iterations: list[Counts]
    """Of all that happened between the ends of learning, except in the first iteration."""


def hot_path(run: Callable[[], object]) -> HotPath:
    """What acting and learning cost while run() trains in this process. The last of each is past all warming up."""
    ends: list[Counts] = []
    learn = Learner.learn

    def noted(*args: Any) -> Any:
        report = learn(*args)
        ends.append(_books().counts)
        return report

    with contextlib.ExitStack() as stack:
        _replace(stack, Learner, "learn", noted)
        acting, there, gradients, learning = (
            stack.enter_context(each_call(owner, name))
            for owner, name in (
                *((actor, "act") for actor in (DeviceActor, DeviceRolloutActor)),
                *((Learner, name) for name in ("_push", "learn")),
            )
        )
        run()
    return HotPath(acting or there, gradients, learning, [end - begin for begin, end in itertools.pairwise(ends)])


def _books() -> Books:
    assert _installed is not None, "call install() first"
    return _installed[0]


def _install(gpus: int, folder: Path) -> contextlib.ExitStack:
    global _installed
    assert _installed is None, "a simulated GPU is installed already"
    books, stack = Books(gpus, folder), contextlib.ExitStack()
    shared = books.shared = Shared(books)
    books.streams = Streams(books, [Stream(books, index) for index in range(gpus)])
    for name, value in stand_ins(books).items():
        _replace(stack, torch.cuda, name, value)
    _replace(stack, reductions, "reduce_tensor", lambda x: (shared.opened, shared.handle(x)))
    _replace(stack, reductions, "rebuild_cuda_tensor", shared.opened)
    _replace(stack, children, "start", functools.partial(_start, children.start, gpus, folder))
    _replace(stack, threading.Thread, "run", _in_threads(threading.Thread.run, books))
    stack.enter_context(Functions(books))
    stack.enter_context(Kernels(books))
    _installed = books, stack
    return stack


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _in_threads(run: Callable[[threading.Thread], None], books: Books) -> Callable[[threading.Thread], None]:
    """Torch's modes are a thread's own."""

    def modes_and_run(thread: threading.Thread) -> None:
        with Functions(books), Kernels(books):
            run(thread)

    return modes_and_run


def _start(
    start: Callable[..., Any], gpus: int, folder: Path, target: Callable[..., Any], args: tuple[Any, ...], name: str
) -> Any:
    """As lockstep.system.children.start."""
    process = start(_child, (gpus, folder, target, *args), name)
    kill = process.kill

    def leave_and_die() -> None:
        process.join(_LEAVING)
        kill()

    process.kill = leave_and_die
    return process


def _child(gpus: int, folder: Path, target: Callable[..., Any], *args: Any) -> None:
    """What a child process runs."""
    _install(gpus, folder)
    try:
        target(*args)
    finally:
        _books().leave()


# ------------------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns how many layouts failed."""
    from tiny import EXPERIMENTS, options

    from lockstep.config.layout import Layout
    from lockstep.launchers.launch import train

    parser = argparse.ArgumentParser(description="Train small experiments on simulated GPUs.")
    parser.add_argument("experiment", choices=["all", *EXPERIMENTS], metavar="EXPERIMENT", help="of tests/tiny.py")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="by default inline,device=0")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--lines", type=int, default=0, help="of lockstep, for each kind of thing that is counted")
    parser.add_argument("--traces", action="store_true", help="print the tracebacks of failed runs")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wrong = 0
    for name in EXPERIMENTS if given.experiment == "all" else [given.experiment]:
        experiment, digests = EXPERIMENTS[name](), set[str]()
        if experiment.precision == "portable":  # its arithmetic is the CPU's
            continue
        for text in given.layouts or ["inline,device=0"]:
            with simulated(given.gpus), tempfile.TemporaryDirectory() as folder:
                try:
                    digest = train(experiment, Layout.parse(text), options(Path(folder) / "run")).digest
                    digests.add(digest)
                    verdict = digest[:12]
                except Exception as error:
                    verdict = f"FAILED, {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
                    if given.traces:
                        traceback.print_exc()
                found = faults()
                wrong += bool(found) or "FAILED" in verdict or len(digests) > 1
                print(f"{name} {text}: {verdict}{' DIFFERS' if len(digests) > 1 else ''}", flush=True)
                if given.lines or found:
                    print(report(given.lines), flush=True)
    print(f"{wrong} failed")
    return wrong


if __name__ == "__main__":
    import simulated_gpu  # by the name under which children know it

    sys.exit(bool(simulated_gpu.main()))
