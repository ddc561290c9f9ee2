"""What a step is given, what it answers, and how it shares its tasks among processes."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from lockstep.system import children

_LINES = 12
"""Lines of an error that are kept; the log has all of them."""
_IMPORTING = 60.0
"""Seconds that a process may take to import what its first task needs."""


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    ok: bool
    summary: str
    """One line."""
    data: dict[str, Any] = field(default_factory=dict)
    """What the report keeps, as JSON."""


@dataclass(frozen=True)
class Context:
    """What a step is given.

    Args:
        seconds: the step is stopped after this time.
        folder: an empty folder for its runs, which is deleted afterwards.
        rehearse: whether the GPU is simulated, so that everything must be tiny.
        report: the steps before it, by name.
        peers: commands of other libraries, to be measured as well.
        result: the file of its result.
        names: of the small experiments to train, in place of all.
    """

    seconds: float
    folder: Path
    rehearse: bool
    report: dict[str, Any]
    peers: tuple[str, ...]
    result: Path
    names: tuple[str, ...] = ()
    begin: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until the step should have answered, a little before it is stopped."""
        return self.seconds - (time.monotonic() - self.begin) - min(8.0, 0.1 * self.seconds)

    def save(self, outcome: Outcome) -> None:
        """Write the result so far, which counts if the step is stopped."""
        write(self.result, asdict(outcome))


def write(path: Path, content: Any) -> None:
    """Replace a JSON file in one go."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(new, path)


def last_lines(error: BaseException) -> str:
    """The message of an error, after the places in lockstep that led to it."""
    told = f"{type(error).__name__}: {error}".strip().splitlines()[-_LINES:]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "lockstep" in frame.filename][-3:]
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return "\n".join((*told, f"at {' > '.join(places)}" if places else "")).strip()


def device_memory() -> float | None:
    """Gigabytes of the GPU that all processes together hold; None if that is unknown."""
    try:
        free, total = torch.cuda.mem_get_info(0)
    except (RuntimeError, AttributeError, AssertionError):
        return None
    return (total - free) / 1e9


@dataclass(frozen=True)
class Task:
    """A call of a module's function, in another process."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class _Hand:
    """A process that does one task after the other."""

    def __init__(self) -> None:
        self.pipe, theirs = get_context("spawn").Pipe()
        self._process = children.start(_serve, (theirs,), "gpu-task")
        theirs.close()
        self.task: Task | None = None
        self._limited = 0.0
        """Since when its time counts."""

    def begin(self, task: Task) -> None:
        self.task, self._limited = task, time.monotonic() + _IMPORTING
        self.pipe.send((task.function, task.arguments))

    def answer(self, limit: float) -> tuple[str, Any] | None:
        """What its task gave: a value after "ok", or a text after "failed"; None while it works."""
        if self.pipe.poll():
            try:
                answer = self.pipe.recv()
                if answer is not None:
                    return answer
                self._limited = time.monotonic()
            except (EOFError, OSError):
                self._process.join()
                return "failed", f"its process {children.death_report(self._process)}"
        if time.monotonic() - self._limited > limit:
            children.show_stack(self._process, self.task.name if self.task else "idle")
            return "failed", f"no answer within {limit:.0f} s; its stack is in the log"
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def do(tasks: Sequence[Task], hands: int, limit: float, left: Callable[[], float], done: Callable[..., None]) -> int:
    """Do tasks in several processes at once. One that fails, hangs or crashes costs its process alone.

    Args:
        hands: processes at the same time.
        limit: seconds that a task may take.
        left: seconds until all of them are given up.
        done: called with each task, whether it succeeded, and its value or a text.

    Returns:
        the number of tasks that there was no time for.
    """
    waiting, idle, busy = deque(tasks), list[_Hand](), list[_Hand]()
    try:
        while (waiting or busy) and left() > 0:
            while waiting and len(busy) < hands:
                hand = idle.pop() if idle else _Hand()
                hand.begin(waiting.popleft())
                busy.append(hand)
            wait([hand.pipe for hand in busy], timeout=0.5)
            for hand in list(busy):
                if (answer := hand.answer(limit)) is None:
                    continue
                busy.remove(hand)
                ok = answer[0] == "ok"
                done(hand.task, ok, answer[1])
                if ok:
                    idle.append(hand)
                else:  # after some errors of CUDA a process can no longer use it
                    hand.close()
        return len(waiting) + len(busy)
    finally:
        for hand in (*idle, *busy):
            hand.close()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        function, arguments = pipe.recv()
        pipe.send(None)  # from now on its time counts
        try:
            answer = "ok", function(*arguments)
        except BaseException as error:
            traceback.print_exc()
            answer = "failed", last_lines(error)
        pipe.send(answer)
