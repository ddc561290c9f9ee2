"""Shows the progress of an evaluation to a waiting user."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from lockstep.system.output import print_line

INTERVAL = 30.0
"""Seconds between lines."""


class EpisodeProgress:
    """Reports every half minute how many episodes of an evaluation have ended.

    Args:
        episodes: the number of episodes of the whole evaluation.
        say: shows a line; by default on standard error.
    """

    def __init__(self, episodes: int, say: Callable[[str], object] = lambda text: print_line(text, sys.stderr)) -> None:
        self._episodes, self._say, self._before = episodes, say, 0
        self._next = time.monotonic() + INTERVAL

    def __call__(self, ended: int) -> None:
        """ended: the number of ended episodes of the current part, which is the whole unless `part` was called."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + INTERVAL
            self._say(f"evaluation: {self._before + ended} of {self._episodes} episodes have ended")

    def part(self, episodes: int) -> None:
        """Begin the next part, after a part with this many episodes."""
        self._before += episodes
