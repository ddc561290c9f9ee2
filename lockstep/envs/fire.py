"""The protocol `baselines` of Atari: FIRE is pressed after a lost life.

Shape legend: B environments.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

FIRE = 1
"""Its index in minimal action sets and in the full one."""
WITHOUT_FIRE = frozenset(
    {"Asterix", "CrazyClimber", "Freeway", "Frogger", "JourneyEscape", "Koolaid", "KungFuMaster"}
    | {"LostLuggage", "MsPacman", "Pacman", "Skiing", "Surround", "Tutankham"}
)
"""Games whose minimal action set lacks it."""


class FireAfterLife:
    """Replaces the action after a lost life by FIRE, as the wrappers of OpenAI's Baselines do, which CleanRL and
    Stable-Baselines3 took over. The agent did not choose this action, so the step counts as a reset step
    (StepResult.first), unless the game ends or another life is lost in it. Its reward is added to the next step's.

    Args:
        num_envs: B.
    """

    def __init__(self, num_envs: int) -> None:
        self._due = np.zeros(num_envs, np.bool_)
        """Where the next action is FIRE."""
        self._owed = np.zeros(num_envs, np.float64)
        """Rewards of the last step that count with the next one."""

    def reset(self) -> None:
        """Forget everything, when all environments start anew."""
        self._due[:], self._owed[:] = False, 0.0

    def replace(self, action: np.ndarray) -> np.ndarray:
        """The actions [B] to send."""
        return np.where(self._due, FIRE, action).astype(action.dtype)

    def take(self, reward: np.ndarray, life_lost: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take the results of a step.

        Args:
            reward: [B], 0 where the library reset the environment.
            life_lost: bool [B].
            ended: bool [B], where an episode ended.

        Returns:
            The rewards to report, and where FIRE was pressed and the step counts as a reset step.
        """
        pressed = self._due & ~life_lost & ~ended
        reward = reward + self._owed
        self._owed = np.where(pressed, reward, 0.0)
        self._due = life_lost.copy()
        return np.where(pressed, 0.0, reward), pressed

    def state(self) -> dict[str, np.ndarray]:
        return {"fire.due": self._due.copy(), "fire.owed": self._owed.copy()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self._due = state["fire.due"].astype(np.bool_)
        self._owed = state["fire.owed"].astype(np.float64)


def fire_after_life(protocol: str, game: str, num_envs: int) -> FireAfterLife | None:
    """Under `baselines`, if the game has the action; otherwise None."""
    return FireAfterLife(num_envs) if protocol == "baselines" and game not in WITHOUT_FIRE else None
