"""Scores and lengths of episodes, added up over rollouts."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lockstep.core.rollout import Episode


class Running(Protocol):
    """What unfinished episodes of B environments have reached."""

    score: np.ndarray
    """float64 [B]: the raw reward so far."""
    length: np.ndarray
    """int64 [B]: the steps so far."""


def ended_episodes(
    running: Running, rewards: np.ndarray, valid: np.ndarray, ended: np.ndarray, metrics: np.ndarray
) -> list[Episode]:
    """Add a rollout to the running scores.

    Args:
        running: changed in place.
        rewards: float32 [T, B], raw.
        valid: bool [T, B]: whether a step counts.
        ended: bool [T, B]: where episodes ended.
        metrics: float64 [T, B, M]: what environments reported, where episodes ended.

    Returns:
        The episodes that ended, in the order of their ends.
    """
    total = np.cumsum(rewards.T.astype(np.float64, "C"), 1)
    count = np.cumsum(valid.T.astype(np.int64, "C"), 1)
    env, t = np.nonzero(ended.T)
    again, over = np.zeros(len(env), bool), np.ones(len(env), bool)
    again[1:] = env[1:] == env[:-1]  # this is not the environment's first episode that ended
    over[:-1] = ~again[1:]  # it is the last
    order, of_all = np.argsort(t, kind="stable"), []
    for before, sofar in ((running.score, total), (running.length, count)):
        end = sofar[env, t]
        begin = before[env]
        begin[again] = -end[:-1][again[1:]]
        of_all.append((begin + end)[order].tolist())
        before[env[over]] = -end[over]
        before += sofar[:, -1]
    reported = map(tuple, metrics[t, env][order].tolist())
    return list(map(Episode, *of_all, reported))
