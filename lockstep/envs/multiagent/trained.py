"""The names of trained runs as opponents."""

from __future__ import annotations

import re
from typing import NamedTuple

_FORM = re.compile(r"(.+?)(?:@(\d+|latest|best))?(?:#([0-9a-f]{16}))?")


class TrainedRun(NamedTuple):
    """A trained run that is named as RUN, RUN@CHECKPOINT or RUN@ITERATION#DIGEST."""

    folder: str
    checkpoint: str | None = None
    """latest, best or an iteration; None if the name does not say."""
    digest: str | None = None
    """The first 16 digits of the weights' digest. Only resolved names have it."""

    @staticmethod
    def parse(name: str) -> TrainedRun:
        """Read a name, which must not contain the side that the opponent plays."""
        found = _FORM.fullmatch(name)
        return TrainedRun(name) if found is None else TrainedRun(*found.groups())

    @property
    def place(self) -> str:
        """The name without the digest, for messages."""
        return self.folder if self.checkpoint is None else f"{self.folder}@{self.checkpoint}"

    def __str__(self) -> str:
        return self.place if self.digest is None else f"{self.place}#{self.digest}"
