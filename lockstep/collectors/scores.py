"""Scores and lengths of episodes, added up over rollouts."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lockstep.core.rollout import Episode


class Running(Protocol):
    """Scores and lengths of the unfinished episodes of B environments."""

    score: np.ndarray
    """float64 [B]: the raw reward so far."""
    length: np.ndarray
    """int64 [B]: the steps so far."""
    counts: np.ndarray
    """bool [B]: whether the episode counts."""


def ended_episodes(
    running: Running, rewards: np.ndarray, valid: np.ndarray, ended: np.ndarray, metrics: np.ndarray
) -> list[Episode]:
    """Add a rollout to the running scores.

    Args:
        running: changed in place.
        rewards: float32 [T, B], raw.
        valid: bool [T, B]: whether a step counts.
        ended: bool [T, B]: where episodes ended.
        metrics: float64 [T, B, M]: what environments reported where episodes ended.

    Returns:
        The episodes that ended and count, in the order of their ends.
    """
    total = rewards.T.astype(np.float64, "C").cumsum(1)  # along contiguous memory, which is faster
    count = valid.T.astype(np.int64, "C").cumsum(1)
    t, env = np.nonzero(ended)
    scores, lengths = running.score.tolist(), running.length.tolist()
    episodes = []
    ends = zip(env.tolist(), total[env, t].tolist(), count[env, t].tolist(), metrics[t, env].tolist(), strict=True)
    for b, reached, steps, reported in ends:
        if running.counts[b]:
            episodes.append(Episode(scores[b] + reached, lengths[b] + steps, tuple(reported)))
        running.counts[b] = True
        scores[b], lengths[b] = -reached, -steps
    running.score[:], running.length[:] = scores, lengths
    running.score += total[:, -1]
    running.length += count[:, -1]
    return episodes
