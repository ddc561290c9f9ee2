"""Scores of runs as they come in, and the rule by which hopeless runs are stopped."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.settings import SettingsError, parse_count
from lockstep.run.files import read_objects

_ENOUGH = 3
"""The least number of other runs with as many samples that a median requires."""
_END = 65_536
"""Bytes that hold the last lines of metrics.jsonl."""


@dataclass(frozen=True)
class StopRule:
    """Stop a run whose score is too low."""

    least: float | None
    """The score to reach; None: the median of the other runs of the same environment, after as many samples."""
    samples: int
    """The rule is applied every time this many further agent samples were collected."""

    @staticmethod
    def parse(text: str) -> StopRule:
        """Read median@SAMPLES or SCORE@SAMPLES.

        Raises:
            SettingsError: it has neither form.
        """
        least, _, samples = text.partition("@")
        with contextlib.suppress(ValueError):
            rule = StopRule(None if least == "median" else float(least), parse_count(samples))
            if rule.samples > 0 and (rule.least is None or math.isfinite(rule.least)):
                return rule
        raise SettingsError(
            f"--stop-early {text!r} is neither median@SAMPLES nor SCORE@SAMPLES. For example, median@200k stops at "
            "every 200k samples those runs whose score is below the median of the others."
        )

    def objection(self, score: float, others: list[float]) -> str:
        """Why a run should be stopped, given the scores of others after as many samples; empty if it should not."""
        if self.least is not None:
            return f"score {score:.4g} is below {self.least:g}" if score < self.least else ""
        if len(others) < _ENOUGH:
            return ""
        median = statistics.median(others)
        below = f"score {score:.4g} is below {median:.4g}, the median of {len(others)} other runs"
        return below if score < median else ""


class Curve:
    """A run's metrics.jsonl, read as it grows."""

    def __init__(self, metrics: Path, every: int = 0) -> None:
        """every: agent samples between the scores that are kept in marks; 0 keeps none."""
        self._metrics, self._every = metrics, every
        self._forget()

    def _forget(self) -> None:
        self._read, self._last = 0, b""
        """Bytes read so far, and the last line of them: its times are unique."""
        self.samples = 0
        self.score: float | None = None
        """Mean of the last 100 episodes."""
        self.rate = 0.0
        """Current agent samples per second."""
        self.marks: list[float | None] = []
        """The scores when `every` samples were first reached, twice as many, and so on."""

    def read(self, *, end: bool = False) -> None:
        """Read what was written since the last call; end: only the last lines, which is enough without marks."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(self._read - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._forget()  # a resumed run has rewritten the file without the part that it will repeat
                size = os.fstat(file.fileno()).st_size
                if end and size - self._read > _END:
                    file.seek(size - _END)
                    self._read = file.tell() + len(file.readline())
                file.seek(self._read)
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return
        for line, values in read_objects(text):
            self._read += len(line)
            self._last = line
            if values is None:
                continue
            self.samples = values.get("samples", self.samples)
            self.score = values.get("score/mean", self.score)
            self.rate = values.get("speed/samples_per_second") or self.rate
            while self._every and self.samples >= self._every * (len(self.marks) + 1):
                self.marks.append(self.score)
