"""Checks that environments return finite numbers, because networks cannot learn from NaN and infinities.

Shape legend: B environments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lockstep.config.settings import Diverged, NotFinite, SettingsError
from lockstep.system.output import print_warning


def all_finite(x: np.ndarray) -> bool:
    """Whether no number is NaN or infinite."""
    return bool(np.isfinite(x).all())


def floats(obs: Any) -> dict[str, np.ndarray]:
    """The entries of an observation that contain floats, by name. The name is "" if the observation has no entries."""
    entries: dict[str, np.ndarray] = obs if isinstance(obs, dict) else {"": obs}
    return {name: x for name, x in entries.items() if x.dtype.kind == "f"}


def wrong_numbers(obs: dict[str, np.ndarray], reward: np.ndarray | None) -> Iterator[tuple[int, str]]:
    """The first number of each environment that is not finite, as (environment, "the reward nan"), in order.

    Args:
        obs: the result of floats, [B, ...].
        reward: [B]; None after a reset.
    """
    named = {f"observation {name!r}" if name else "observation": x for name, x in obs.items()}
    parts = named if reward is None else {"reward": reward, **named}
    for j in range(len(next(iter(parts.values()), ()))):
        for name, x in parts.items():
            wrong = np.argwhere(~np.isfinite(x[j]))
            if len(wrong):
                at = wrong[0].tolist()
                yield j, f"the {name} {x[(j, *at)]}{f' at {at}' if at else ''}"
                break


def forbids_all(mask: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """Where action masks [..., N] forbid all choices of an action, or of a part of it: bool [...].

    Args:
        mask: the action masks.
        choices: int64, the number of choices of each part of an action. N is their sum.
    """
    some = np.logical_or.reduceat(mask != 0, np.cumsum(choices) - choices, axis=-1)
    return np.asarray(~some.all(-1))


class FiniteCheck:
    """Stops the run at a number that is not finite, or warns once.

    Args:
        env_id: the id of the environments.
        stop: whether to stop the run.
    """

    def __init__(self, env_id: str, *, stop: bool = True) -> None:
        self._id, self._stop = env_id, stop
        self.found = ""
        """A description of the first such number, or "". After the first, checking ends."""

    def report(self, environment: int, what: str, when: str) -> None:
        """Report that an environment, named by its global index, returned such a number.

        Raises:
            NotFinite: the run must stop.
        """
        self.found = f"environment {environment} of env.id={self._id} returned {what} {when}"
        if self._stop:
            raise NotFinite(
                f"{self.found[0].upper()}{self.found[1:]}. Nothing can be learned from that. Fix the environment, or "
                "replace such values in a wrapper; lockstep check-env finds them, too. Use --on-nonfinite continue to "
                "train anyway."
            )
        print_warning(f"{self.found}. The run continues because of --on-nonfinite continue.")

    def report_mask(self, environment: int, when: str) -> None:
        """Report that an environment, named by its global index, allowed no action where one was needed.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            f"The action_mask of environment {environment} of env.id={self._id} allowed no action {when}, but the "
            "episode continued. Allow at least one action in every step, such as one that does nothing, or end the "
            "episode."
        )

    def report_action(self) -> None:
        """Report that the policy chose an action that is not finite, although all observations and rewards were finite.

        Raises:
            NotFinite: the run must stop.
        """
        if self._stop:
            raise Diverged(
                "The policy chose an action that is NaN or infinite, before any environment returned such a number: "
                "learning has diverged. A lower --algorithm.learning-rate or --algorithm.max-grad-norm usually helps. "
                "The run's newest checkpoint is older than that. Use --on-nonfinite continue to train anyway."
            )
