"""What adds runs to a queue as others end: a search trial by trial, a population generation by generation."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from lockstep.config.layout import Layout
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import look_for_files_in
from lockstep.sweep.population import Population
from lockstep.sweep.queue import Entry, Queue, read_json, write_json
from lockstep.sweep.search import Search
from lockstep.sweep.slots import Needs, needs

AskedT = TypeVar("AskedT", Search, Population)
ProposalsT = TypeVar("ProposalsT", bound="Proposals[Any]")


class Proposals(ABC, Generic[AskedT]):
    """A search, or a population, in the folder of a sweep.

    KEY.json says what it is, PARTS/NUMBER.json what each of its trials, or generations, runs, and outcomes/, as of any
    run, how its runs ended. What comes next follows from these: so whatever ends this process, the next one goes on as
    it would have.
    """

    key: ClassVar[str]
    """What it is called: its file, and its place among what the command line prints for programs."""
    parts: ClassVar[str]
    """What it adds, one at a time: their folder, and the setting that says how many."""

    def __init__(self, queue: Queue, search: AskedT, directory: str, command: list[str]) -> None:
        """
        Args:
            directory: where it was started. Paths of users' files are relative to it.
            command: the command that started it.
        """
        search.validate()
        self.search: AskedT = search
        self._queue, self._directory, self._command = queue, directory, command

    @classmethod
    def make(cls: type[ProposalsT], queue: Queue, search: Any) -> ProposalsT:
        """One that begins in a folder, or goes on there.

        Raises:
            SettingsError: the folder holds another one.
        """
        before = cls.open(queue)
        if before is None:
            return cls(queue, search, os.getcwd(), list(sys.argv))
        if before.search.identity() != search.identity():
            raise SettingsError(
                f"{queue.folder} holds another {cls.key}: its {cls.parts} would say nothing of this one. Choose "
                f"another folder, or go on with that one, for more {cls.parts} if wanted: {queue.command} "
                f"--{cls.parts} N"
            )
        return cls(queue, search, before._directory, before._command)

    @classmethod
    def open(cls: type[ProposalsT], queue: Queue) -> ProposalsT | None:
        """The search or population that a folder holds, or None."""
        path = queue.folder / f"{cls.key}.json"
        if not path.exists():
            return None
        kept = read_json(path)
        look_for_files_in(kept["directory"])
        return cls(queue, from_json(kept[cls.key]), kept["directory"], kept["command"])

    def begin(self) -> None:
        """Keep what it is, and queue what a kill kept from being queued."""
        kept = {"directory": self._directory, "command": self._command, self.key: to_json(self.search)}
        write_json(self._queue.folder / f"{self.key}.json", kept)
        self._folder.mkdir(exist_ok=True)
        self._requeue()

    @property
    def needs(self) -> Needs:
        """What each run occupies."""
        run = self.search.runs[0]
        return needs(Layout.parse(run.layout), run.experiment.torch_threads, run.memory)

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether nothing further is wanted, or can be."""

    @abstractmethod
    def next(self) -> list[Entry]:
        """Begin another part; its runs, none while it has to wait for others."""

    @abstractmethod
    def all(self) -> Sequence[Any]:
        """What became of each so far."""

    @abstractmethod
    def best(self) -> Any:
        """The best that came to its end, None if none did."""

    @abstractmethod
    def summary(self) -> str:
        """How far it is."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """All of it, for programs."""

    @abstractmethod
    def _requeue(self) -> None:
        """Queue what has begun, and was not queued."""

    @property
    def _folder(self) -> Path:
        return self._queue.folder / self.parts

    @property
    def _count(self) -> int:
        """Parts that have begun."""
        return len(list(self._folder.glob("*.json")))
