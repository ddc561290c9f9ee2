"""Scales on which scores of different games can be averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.reports import atari, procgen
from lockstep.reports.runs import SCORES


class Scale(NamedTuple):
    """A linear scale for the raw scores of a game."""

    name: str
    """The name of scores on this scale."""
    meaning: str
    """The meaning of 0 and 1, in words."""
    zero: float
    one: float

    def of(self, scores: np.ndarray) -> np.ndarray:
        """Raw scores on this scale."""
        return (scores - self.zero) / (self.one - self.zero)


def scale_of(task: str, metric: str) -> Scale | None:
    """The scale of a task's metric, or None."""
    if metric not in SCORES:
        return None
    if game := atari.game(task):
        return Scale("human-normalized", "0 is random play, 1 a human tester", *atari.RANDOM_AND_HUMAN[game])
    if bounds := procgen.bounds(task):
        meaning = "0 is a blind policy, 1 the highest possible or known score"
        return Scale("Procgen-normalized", meaning, *bounds)
    return None


def on_one_scale(tasks: Sequence[str], metric: str) -> dict[str, list[str]]:
    """The tasks whose scores can be averaged with others', by the name of their scale."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        if scale := scale_of(task, metric):
            found.setdefault(scale.name, []).append(task)
    return found


def capped_mean(scores: Mapping[str, float]) -> tuple[str, float] | None:
    """The mean of one policy's scores, by task, on the tasks' common scale, each at most 1, so that no task outweighs
    the others (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561). Returns the scale's name and the mean; None if
    tasks have no common scale."""
    scales = {task: scale_of(task, "score/mean") for task in scores}
    names = {None if scale is None else scale.name for scale in scales.values()}
    if len(names) != 1 or None in names:
        return None
    found = [min(1.0, float(scale.of(np.asarray(scores[task])))) for task, scale in scales.items() if scale is not None]
    return names.pop() or "", float(np.mean(found))
