"""Searches and populations: both add runs to a queue as others end, trial by trial or generation by generation."""

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

    KEY.json holds its settings, PARTS/NUMBER.json the runs of each trial or generation, and outcomes/, as for any run,
    how they ended. The next part follows from these files alone, so a sweep that was killed continues as if nothing had
    happened.
    """

    key: ClassVar[str]
    """The name of its file, and its key in the JSON that the command line prints."""
    parts: ClassVar[str]
    """The plural name of its parts, trials or generations: the name of their folder and of the setting that limits
    them."""

    def __init__(self, queue: Queue, search: AskedT, directory: str, command: list[str]) -> None:
        """
        Args:
            directory: the folder in which it was started. Users' files are relative to it.
            command: the command that started it.
        """
        search.validate()
        self.search: AskedT = search
        self._queue, self._directory, self._command = queue, directory, command

    @classmethod
    def make(cls: type[ProposalsT], queue: Queue, search: Any) -> ProposalsT:
        """Begin one in a folder, or continue the one that the folder holds.

        Raises:
            SettingsError: the folder holds a different one.
        """
        before = cls.open(queue)
        if before is None:
            return cls(queue, search, os.getcwd(), list(sys.argv))
        if before.search.identity() != search.identity():
            raise SettingsError(
                f"{queue.folder} holds another {cls.key}, whose {cls.parts} say nothing about this one. Choose "
                f"another folder, or continue that one, with more {cls.parts} if you like: {queue.command} "
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
        """Write its settings, and queue runs that a kill kept from being queued."""
        kept = {"directory": self._directory, "command": self._command, self.key: to_json(self.search)}
        write_json(self._queue.folder / f"{self.key}.json", kept)
        self._folder.mkdir(exist_ok=True)
        self._requeue()

    @property
    def needs(self) -> Needs:
        """The resources of each of its runs."""
        run = self.search.runs[0]
        return needs(Layout.parse(run.layout), run.experiment.torch_threads, run.memory)

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether no further part is wanted or possible."""

    @abstractmethod
    def next(self) -> list[Entry]:
        """Begin another part and return its runs; none while it has to wait for others."""

    @abstractmethod
    def all(self) -> Sequence[Any]:
        """The result of each part so far."""

    @abstractmethod
    def best(self) -> Any:
        """The best part that ran to its end, None if there is none."""

    @abstractmethod
    def summary(self) -> str:
        """The progress so far, in one line."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The whole search or population as JSON."""

    @abstractmethod
    def _requeue(self) -> None:
        """Queue runs of parts that have begun, if they were not queued."""

    @property
    def _folder(self) -> Path:
        return self._queue.folder / self.parts

    @property
    def _count(self) -> int:
        """Number of parts that have begun."""
        return len(list(self._folder.glob("*.json")))
