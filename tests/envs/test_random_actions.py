"""Random actions in place of the policy's: of every kind of action, and only where training plays."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from playing import play, reset

from lockstep import SettingsError, envs
from lockstep.envs import EnvConfig

ALL = spaces.Tuple(
    (
        spaces.Discrete(3, start=2),
        spaces.MultiDiscrete([2, 5]),
        spaces.MultiBinary(3),
        spaces.Box(-2.0, 1.0, (2,), np.float32),
        spaces.Box(0.0, np.inf, (1,), np.float32),
    )
)


class Everything(gymnasium.Env[np.ndarray, Any]):
    """Shows the actions that it receives."""

    observation_space = spaces.Box(-10.0, 10.0, (9,), np.float32)
    action_space = ALL

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, object]]:
        super().reset(seed=seed)
        return np.zeros(9, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        assert action in self.action_space
        return np.concatenate([np.ravel(part) for part in action]).astype(np.float32), 0.0, False, False, {}


def seen(random_actions: bool, purpose: str = "train") -> np.ndarray:
    config = EnvConfig(id=f"{__name__}:Everything", random_actions=random_actions)
    env = envs.make(config, seed=3, first_index=0, num_envs=2, purpose=purpose)
    reset(env)
    sent = tuple(np.zeros((2, *(part.shape or ())), part.dtype) for part in ALL.spaces)
    sent = (sent[0] + 2, *sent[1:])
    played = [moment.obs[""] for moment in play(env, [sent] * 600)]
    env.close()
    return np.stack(played)


def test_every_kind_of_action_is_drawn_from_all_of_its_space() -> None:
    played = seen(random_actions=True)
    low, high = played.min((0, 1)), played.max((0, 1))
    assert low[:6].tolist() == [2, 0, 0, 0, 0, 0] and high[:6].tolist() == [4, 1, 4, 1, 1, 1]
    assert (low[6:8] < -1.9).all() and (high[6:8] > 0.9).all()
    assert low[8] == 0 and high[8] > 2
    assert np.abs(np.corrcoef(played[:, 0, :8].T) - np.eye(8)).max() < 0.15
    assert not np.array_equal(played[:, 0], played[:, 1])


@pytest.mark.slow
def test_only_training_plays_at_random() -> None:
    sent = [2.0] + [0.0] * 8
    for random_actions, purpose in ((False, "train"), (True, "eval")):
        assert (seen(random_actions, purpose) == sent).all()


def test_forbidden_actions_cannot_be_random() -> None:
    config = EnvConfig(id="lockstep/TupleBandit-v0", options={"mask": True}, random_actions=True)
    with pytest.raises(SettingsError, match=r"action_mask.*--env.no-random-actions"):
        envs.spaces(config)
