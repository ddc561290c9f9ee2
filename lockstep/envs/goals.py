"""Environments that are told goals: what would have been earned, had another goal been the wanted one.

They follow gymnasium-robotics' GoalEnv: observations have the entries `observation`, `achieved_goal` and
`desired_goal`, and `compute_reward(achieved_goal, desired_goal, info)` takes batches. `compute_terminated` may, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.config.settings import SettingsError
from lockstep.envs.base import EnvConfig, adapter_of
from lockstep.envs.closing import close_all
from lockstep.envs.convert import ObservationWriter

_TRIALS = 8
"""Steps in which an environment is asked with their info and without."""
ACHIEVED, DESIRED = "achieved_goal", "desired_goal"


class Goals:
    """An environment's reward as a function of goals.

    Args:
        config: the environment, which is that of training.

    Raises:
        SettingsError: it is not told goals, a wrapper changes what it is told or earns, another library than gymnasium
            serves it, or its goals are no vectors.
    """

    def __init__(self, config: EnvConfig) -> None:
        env: Any = adapter_of(config.adapter).single(config.training())
        space = getattr(env, "observation_space", None)
        entries = set(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else set()
        judge, changing = _judge(env)
        if judge is None or not ({ACHIEVED, DESIRED} <= entries or changing):
            raise SettingsError(
                f"algorithm.replay.hindsight needs an environment that is told goals, and env.id={config.id} is none. "
                f"Its observations need the entries {ACHIEVED} and {DESIRED}, and it the method compute_reward, as "
                "gymnasium_robotics.GoalEnv has them, served by gymnasium. Use lockstep/BitFlip-v0, for example, or "
                "--algorithm.replay.hindsight 0."
            )
        if changing:
            raise SettingsError(
                f"algorithm.replay.hindsight asks an environment what other goals would have earned, but {changing} of "
                f"env.id={config.id} changes its rewards or goals, and has no compute_reward of its own that "
                "would do the same. Give it one, leave it out, or use --algorithm.replay.hindsight 0."
            )
        assert isinstance(space, gymnasium.spaces.Dict)
        seen: Any = ObservationWriter(space).space
        for name in (ACHIEVED, DESIRED):
            if not isinstance(space[name], gymnasium.spaces.Box) or seen[name].shape != space[name].shape:
                raise SettingsError(
                    f"algorithm.replay.hindsight asks env.id={config.id} about goals as policies see them, and they "
                    f"see its {name}, {space[name]}, in another form. Make it a Box of shape [n], or use "
                    "--algorithm.replay.hindsight 0."
                )
        self._env, self._judge = env, judge
        self._clip = config.reward_clip
        self._id = config.id

    def reward(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """float32 [n]: for having come to goals [n, ...] that were achieved, where these [n, ...] were desired."""
        reward = _answers(self._judge.compute_reward, achieved, desired).astype(np.float32)
        return np.clip(reward, -1.0, 1.0) if self._clip else reward

    def terminated(
        self, achieved: np.ndarray, desired: np.ndarray, wanted: np.ndarray, terminated: np.ndarray
    ) -> np.ndarray:
        """bool [n]: whether the episode would have ended there.

        Args:
            achieved: goals [n, ...] that were.
            desired: goals as they would have been.
            wanted: goals as they were,
            terminated: bool [n], and whether it ended: which it does again if that was for another reason.
        """
        if not self._judge.has_wrapper_attr("compute_terminated"):
            return terminated
        compute = self._judge.get_wrapper_attr("compute_terminated")
        of_goals, of_wanted = (_answers(compute, achieved, each).astype(bool) for each in (desired, wanted))
        return of_goals | (terminated & ~of_wanted)

    def check(self) -> None:
        """Raise SettingsError if answers depend on the info of a step, of which replay keeps nothing."""
        if needed := _needs_info(self._env, self._judge):
            raise SettingsError(
                f"algorithm.replay.hindsight asks env.id={self._id} what other goals would have earned, long after a "
                f"step whose info is not kept. {needed} Compute it from the achieved and the desired goal alone, or "
                "use --algorithm.replay.hindsight 0."
            )

    def close(self) -> None:
        """Release the environment."""
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            close_all([self._env])


def check_goals(config: EnvConfig) -> None:
    """Raise SettingsError unless an environment can be learned from with hindsight."""
    goals = Goals(config)
    try:
        goals.check()
    finally:
        goals.close()


def _answers(compute: Callable[..., Any], achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    """[n]: what an environment says of goals."""
    answers = _ask(compute, achieved, desired, {})
    if answers.shape == (len(achieved),) or answers.shape == (len(achieved), 1):
        return answers.reshape(-1)
    # It takes one goal alone, and judges a batch as if it were one (gymnasium-robotics' mazes).
    each = [_ask(compute, a, d, {}) for a, d in zip(achieved, desired, strict=True)]
    if each[0].size != 1:
        raise SettingsError(
            f"algorithm.replay.hindsight: the environment's {getattr(compute, '__name__', 'method')} answered "
            f"{each[0]} for one goal, where a number is wanted. Mend it, or use --algorithm.replay.hindsight 0."
        )
    return np.array([answer.item() for answer in each])


def _ask(compute: Callable[..., Any], achieved: Any, desired: Any, info: dict[str, Any]) -> np.ndarray:
    """What an environment answers; it may change copies of the goals.

    Raises:
        SettingsError: it raised an error.
    """
    try:
        with ENVIRONMENT_SETTINGS.applied():
            return np.asarray(compute(np.array(achieved), np.array(desired), info))
    except Exception as error:
        raise SettingsError(
            f"algorithm.replay.hindsight: the environment's {getattr(compute, '__name__', 'method')} raised {error!r} "
            f"for goals of the shape {np.shape(achieved)} and info={info!r}. Mend it, or use "
            "--algorithm.replay.hindsight 0."
        ) from error


def _needs_info(env: Any, judge: Any) -> str:
    """Which method of an environment answers otherwise without the step's info, in a sentence; "" if none does."""
    names = [name for name in ("compute_reward", "compute_terminated") if judge.has_wrapper_attr(name)]
    computes = [judge.get_wrapper_attr(name) for name in names]
    with ENVIRONMENT_SETTINGS.applied(thorough=True):
        env.reset(seed=0)
        env.action_space.seed(0)
        for _ in range(_TRIALS):
            obs, _, terminated, truncated, info = env.step(env.action_space.sample())
            for name, compute in zip(names, computes, strict=True):
                goals = obs[ACHIEVED], obs[DESIRED]
                try:
                    known = _ask(compute, *goals, info)
                except SettingsError:
                    return ""  # which is another fault, and is told when it matters
                try:
                    same = np.array_equal(known, _ask(compute, *goals, {}))
                except SettingsError as error:
                    return f"Its {name} raised {error.__cause__!r} for an empty info."
                if not same:
                    return f"Its {name} answered otherwise for an empty info than for that of the step."
            if terminated or truncated:
                break
    return ""


def _judge(env: Any) -> tuple[Any, str]:
    """The outermost of an environment and its wrappers that says what goals earn; and which wrapper around it, if any,
    makes something else of that."""
    changing = ""
    while env is not None and not hasattr(env, "compute_reward"):
        if isinstance(env, (gymnasium.RewardWrapper, gymnasium.wrappers.NormalizeReward)) or (
            isinstance(env, gymnasium.ObservationWrapper) and _goals(env) != _goals(env.env)
        ):
            changing = type(env).__name__
        env = env.env if isinstance(env, gymnasium.Wrapper) else None
    return env, changing


def _goals(env: Any) -> list[Any]:
    """The spaces of goals that an environment shows."""
    space = env.observation_space
    shown = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {}
    return [shown.get(name) for name in (ACHIEVED, DESIRED)]
