"""The state of a sweep: a folder with one file for each run, each written atomically. There is no other record."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar

from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.run.files import locked, locked_within, sync, write_whole, writing
from lockstep.run.finding import is_run

Kept = TypeVar("Kept", "Entry", "Outcome")
State = Literal["waiting", "running", "done", "stopped", "failed"]
SEARCH = "search"
"""The name of a whole search in lists of runs, such as Slurm's jobs."""
_DYING = 20.0
"""Seconds that a run's process may take to exit after its sweep was killed."""


@dataclass(frozen=True)
class Entry:
    """A run in the queue."""

    name: str
    order: int
    """Its position in the queue."""
    identity: str
    """The experiment's identity. A sweep holds each experiment once."""
    experiment: dict[str, Any]
    layout: str
    options: dict[str, Any]
    """Fields of RunOptions."""
    directory: str
    """Where the sweep was started. Paths of users' files are relative to it."""
    command: list[str] = field(default_factory=list)
    """The command that added the run to the sweep. The run records it."""
    memory: int = 0
    """Bytes that its replay memory takes when it is full."""

    @property
    def env(self) -> str:
        return self.experiment["env"]["id"]

    @cached_property
    def env_settings(self) -> dict[str, Any]:
        """The settings that make scores comparable."""
        return {name: value for name, value in self.experiment["env"].items() if name != "num_envs"}

    @property
    def samples(self) -> int:
        """Agent samples that it will collect."""
        return self.experiment["total_steps"]


class Queued(Protocol):
    """An object that can be added to a queue: a lockstep.sweep.Run, whose module imports torch."""

    @property
    def experiment(self) -> Any: ...
    @property
    def layout(self) -> str: ...
    @property
    def options(self) -> Any: ...
    @property
    def name(self) -> str: ...
    @property
    def memory(self) -> int: ...


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    state: Literal["done", "stopped", "failed"]
    """stopped: early, by a rule."""
    digest: str | None = None
    iterations: int | None = None
    score: float | None = None
    reason: str = ""
    """The traceback of a failure, or why a run was stopped."""


@dataclass(frozen=True)
class Queue:
    """The folder of a sweep.

    queue/NAME.json describes a run, and outcomes/NAME.json how it ended. runs/NAME is the run's folder, and
    logs/NAME.txt holds its output. The process that runs NAME holds a lock on its log. The lock disappears with the
    process, so it tells reliably which runs are running.
    """

    folder: Path

    @staticmethod
    def open(folder: Path) -> Queue:
        """The sweep in an existing folder.

        Raises:
            SettingsError: the folder holds no sweep.
        """
        queue = Queue(folder.resolve())
        queue._make_whole()
        if not queue.exists():
            what = "holds no sweep" if folder.is_dir() else "does not exist"
            raise SettingsError(
                f"{folder} {what}. To begin a sweep, name what to run after its folder, as in: lockstep sweep "
                "runs/cartpole ppo-cartpole --seed 1..5"
            )
        return queue

    @staticmethod
    def planned(folder: Path) -> Queue:
        """The sweep in a folder, which need not exist yet.

        Raises:
            SettingsError: the folder holds something else.
        """
        queue = Queue(folder.resolve())
        if folder.exists() and not queue.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SettingsError(
                f"{folder} exists and is not the folder of a sweep. Choose another folder or a new one."
            )
        return queue

    @staticmethod
    def make(folder: Path) -> Queue:
        """As planned, but the folder is created if it does not exist."""
        queue = Queue.planned(folder)
        with writing(folder):
            queue._queue.mkdir(parents=True, exist_ok=True)
        queue._make_whole()
        return queue

    def _make_whole(self) -> None:
        """Create its subfolders, which a copy may lack if they were empty."""
        if self.exists():
            with writing(self.folder):
                for part in (self._outcomes, self._logs, self.folder / "runs"):
                    part.mkdir(exist_ok=True)

    @property
    def command(self) -> str:
        """The command that continues it."""
        return f"lockstep sweep {shlex.quote(str(self.folder))}"

    def exists(self) -> bool:
        return self._queue.is_dir()

    @contextlib.contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Keep other sweeps out of this folder. The lock disappears with the process.

        Raises:
            SettingsError: another process still holds the lock after `patience` seconds.
        """
        with writing(self.folder):
            opened = open(self.folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below
        with opened as file, _locked(file, patience) as mine:
            if not mine:
                raise SettingsError(
                    f"{self.folder} is being swept by another process. Watch it with: {self.command} "
                    "--status, or stop it with Ctrl-C or SIGTERM first."
                )
            yield

    @contextlib.contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Hold the lock of a run; False if another process still holds it after some seconds."""
        with open(self.log(name), "a", encoding="utf-8") as file, _locked(file, _DYING) as mine:
            yield mine

    def add(self, runs: Sequence[Queued], directory: str | None = None, command: Sequence[str] | None = None) -> None:
        """Queue the runs whose experiments are new. Runs that are already here and have not ended get the given layout
        and options.

        Args:
            runs: what to run.
            directory: the folder that users' files are relative to; None for the current one.
            command: the command that the runs record; None for that of this process.
        """
        before = {entry.name: entry for entry in self.entries()}
        for entry in self.with_runs(runs, directory, command):
            if entry != before.get(entry.name):
                write_json(self._queue / f"{entry.name}.json", dataclasses.asdict(entry))

    def with_runs(
        self,
        runs: Sequence[Queued],
        directory: str | None = None,
        command: Sequence[str] | None = None,
        again: Collection[State] = (),
    ) -> list[Entry]:
        """The entries that adding these runs would queue, if runs that ended in the given states waited again."""
        known = {entry.identity: entry for entry in self.entries()}
        for run in runs:
            identities = run.experiment.identities()
            identity = next((each for each in identities if each in known), identities[0])
            old = known.get(identity)
            ended = self.outcome(old.name) if old is not None else None
            if ended is not None and ended.state not in again:
                continue
            known[identity] = Entry(
                name=old.name if old else run.name,
                order=old.order if old else 1 + max((entry.order for entry in known.values()), default=0),
                identity=identity,
                experiment=to_json(run.experiment),
                layout=run.layout,
                options=dataclasses.asdict(run.options),
                directory=directory or os.getcwd(),
                command=list(command or sys.argv),
                memory=run.memory,
            )
        return list(known.values())

    def entries(self) -> list[Entry]:
        """All runs, in the order in which they were given."""
        found = [_read(Entry, path) for path in self._queue.glob("*.json")]
        return sorted(found, key=lambda entry: entry.order)

    def has(self, name: str) -> bool:
        return (self._queue / f"{name}.json").exists()

    def entry(self, name: str) -> Entry:
        return _read(Entry, self._queue / f"{name}.json")

    def outcome(self, name: str) -> Outcome | None:
        """How a run ended; None if it has not ended."""
        path = self._outcomes / f"{name}.json"
        return _read(Outcome, path) if path.exists() else None

    def end(self, name: str, outcome: Outcome) -> None:
        """Record how a run ended."""
        write_json(self._outcomes / f"{name}.json", dataclasses.asdict(outcome))

    def retry(self, state: Literal["failed", "stopped"]) -> int:
        """Make the runs that ended in this state wait again, to continue from their checkpoints. Returns their
        number."""
        ended = [entry.name for entry in self.entries() if self.state(entry.name) == state]
        for name in ended:
            (self._outcomes / f"{name}.json").unlink()
        return len(ended)

    def drop(self, pattern: str) -> list[str]:
        """Remove waiting and failed runs that match a pattern from the queue; their folders stay.

        Raises:
            SettingsError: no such run matches.
        """
        named = [entry.name for entry in self.entries() if fnmatchcase(entry.name, pattern)]
        dropped = [name for name in named if self.state(name) in ("waiting", "failed")]
        if not dropped:
            what = f"{len(named)} runs have such a name, but none waits" if named else "no run has such a name"
            raise SettingsError(f"--drop {pattern}: {what}. Names: {self.command} --status")
        for name in dropped:
            (self._outcomes / f"{name}.json").unlink(missing_ok=True)
            (self._queue / f"{name}.json").unlink()
        return dropped

    def state(self, name: str) -> State:
        """The state of a run."""
        outcome = self.outcome(name)
        if outcome is not None:
            return outcome.state
        for lock in (self.log(name), self.run(name) / ".lock"):  # the second is locked by a run resumed by hand
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(lock, "rb") as file:
                if _is_locked(file):
                    return "running"
        return "waiting"

    def run(self, name: str) -> Path:
        """A run's folder."""
        return self.folder / "runs" / name

    def metrics(self, name: str) -> Path:
        """The file of a run's metrics."""
        return self.run(name) / "metrics.jsonl"

    def log(self, name: str) -> Path:
        """The file of a run's output."""
        return self._logs / f"{name}.txt"

    def begun(self, name: str) -> bool:
        """Whether a run's folder is complete."""
        return is_run(self.run(name))

    def discard_unfinished_folder(self, name: str) -> None:
        """Remove a run's folder if its process was killed while making it.

        Raises:
            SettingsError: it contains checkpoints, so it was complete once.
        """
        folder = self.run(name)
        if self.begun(name):
            return
        if any(folder.glob("checkpoints/*")):
            raise SettingsError(
                f"{folder} has checkpoints, but no experiment.json: it is damaged. Restore that file from a copy, or "
                "remove the folder to train the run again."
            )
        shutil.rmtree(folder, ignore_errors=True)

    @property
    def _queue(self) -> Path:
        return self.folder / "queue"

    @property
    def _outcomes(self) -> Path:
        return self.folder / "outcomes"

    @property
    def _logs(self) -> Path:
        return self.folder / "logs"


def write_json(path: Path, value: Any) -> None:
    """Write a file atomically, even if this process or the machine dies meanwhile."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())
    sync(path.parent)


def read_json(path: Path) -> Any:
    """Read a file of write_json."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read(cls: type[Kept], path: Path) -> Kept:
    """An entry or an outcome. Fields that other versions add are ignored."""
    found = read_json(path)
    fields = dataclasses.fields(cls)
    try:
        return cls(**{field.name: found[field.name] for field in fields if field.name in found})
    except TypeError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, why: object) -> SettingsError:
    return SettingsError(
        f"{path} cannot be read: {why}. The sweep's folder is damaged: restore this file from a copy, or remove it to "
        "forget what it held."
    )


@contextlib.contextmanager
def _locked(file: IO[Any], seconds: float) -> Iterator[bool]:
    with contextlib.ExitStack() as held:
        try:
            mine = held.enter_context(locked(file, seconds))
        except OSError:  # a file system without locks: nobody can know
            mine = True
        yield mine


def _is_locked(file: IO[Any]) -> bool:
    try:
        return not locked_within(file.fileno(), 0.0, shared=True)
    except OSError:
        return False
