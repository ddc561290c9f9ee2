"""Goal-conditioned environments: the rewards that steps would have earned with other goals.

Environments follow gymnasium-robotics' GoalEnv: observations have the entries `observation`, `achieved_goal` and
`desired_goal`, and `compute_reward(achieved_goal, desired_goal, info)` takes batches. They may also have
`compute_terminated`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.config.settings import SettingsError
from lockstep.envs.closing import close_all, closed_on_error
from lockstep.envs.convert import ObservationWriter
from lockstep.envs.factory import adapter_of
from lockstep.envs.settings import EnvConfig

_TRIALS = 8
"""The number of steps at which compute_reward is called with and without the step's info."""
ACHIEVED, DESIRED = "achieved_goal", "desired_goal"


class Goals:
    """An environment's reward as a function of goals.

    Args:
        config: the environments; its curriculum is applied.

    Raises:
        SettingsError: the environment has no goals, a wrapper changes its goals or rewards, its adapter cannot make
        single environments, or its goals are not vectors.
    """

    def __init__(self, config: EnvConfig) -> None:
        self._env: Any = adapter_of(config).single(config.training())
        self._clip, self._id = config.reward_clip, config.id
        with closed_on_error([self._env]):
            self._judge = self._checked(config)

    def _checked(self, config: EnvConfig) -> Any:
        """The object whose compute_reward counts. Raises SettingsError like the constructor."""
        env = self._env
        space = getattr(env, "observation_space", None)
        entries = set(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else set()
        judge, changing = _judge(env)
        if judge is None or not ({ACHIEVED, DESIRED} <= entries or changing):
            raise SettingsError(
                f"algorithm.replay.hindsight needs an environment with goals, and env.id={config.id} has none. Its "
                f"observations need the entries {ACHIEVED} and {DESIRED}, and it needs the method compute_reward of "
                "gymnasium_robotics.GoalEnv and env.adapter=gymnasium. Use lockstep/BitFlip-v0, for example, or "
                "--algorithm.replay.hindsight 0."
            )
        if changing:
            raise SettingsError(
                f"algorithm.replay.hindsight computes rewards for other goals, but the wrapper {changing} of "
                f"env.id={config.id} changes rewards or goals without a compute_reward that does the same. Add this "
                "method, leave the wrapper out, or use --algorithm.replay.hindsight 0."
            )
        assert isinstance(space, gymnasium.spaces.Dict)
        seen: Any = ObservationWriter(space).space
        for name in (ACHIEVED, DESIRED):
            if not isinstance(space[name], gymnasium.spaces.Box) or seen[name].shape != space[name].shape:
                raise SettingsError(
                    f"algorithm.replay.hindsight passes goals to env.id={config.id} as policies see them, but they see "
                    f"its {name}, {space[name]}, in another form. Make it a Box of shape [n], or use "
                    "--algorithm.replay.hindsight 0."
                )
        return judge

    def reward(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """float32 [n]: the rewards for achieved goals [n, ...], given desired goals [n, ...]."""
        reward = _answers(self._judge.compute_reward, achieved, desired).astype(np.float32)
        return np.clip(reward, -1.0, 1.0) if self._clip else reward

    def terminated(
        self, achieved: np.ndarray, desired: np.ndarray, wanted: np.ndarray, terminated: np.ndarray
    ) -> np.ndarray:
        """bool [n]: whether the episode would have terminated there.

        Args:
            achieved: achieved goals [n, ...].
            desired: the new goals [n, ...].
            wanted: the goals of the original episode [n, ...].
            terminated: bool [n]: whether the original episode terminated. If its goal was not the reason, it terminates
                with any goal.
        """
        if not self._judge.has_wrapper_attr("compute_terminated"):
            return terminated
        compute = self._judge.get_wrapper_attr("compute_terminated")
        of_goals, of_wanted = (_answers(compute, achieved, each).astype(bool) for each in (desired, wanted))
        return of_goals | (terminated & ~of_wanted)

    def check(self) -> None:
        """Raise SettingsError if rewards depend on the info of a step, which replay does not store."""
        if needed := _needs_info(self._env, self._judge):
            raise SettingsError(
                f"algorithm.replay.hindsight computes rewards of env.id={self._id} for other goals without the step's "
                f"info, which replay does not store. {needed} Compute it from the achieved and desired goal alone, or "
                "use --algorithm.replay.hindsight 0."
            )

    def close(self) -> None:
        """Release the environment."""
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            close_all([self._env])


def check_goals(config: EnvConfig) -> None:
    """Raise SettingsError unless hindsight can learn from an environment."""
    goals = Goals(config)
    try:
        goals.check()
    finally:
        goals.close()


def _answers(compute: Callable[..., Any], achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    """The results [n] of an environment's method for n goals."""
    answers = _ask(compute, achieved, desired, {})
    if answers.shape == (len(achieved),) or answers.shape == (len(achieved), 1):
        return answers.reshape(-1)
    # The method treated the batch as one goal, like gymnasium-robotics' mazes, so it is called for each goal.
    each = [_ask(compute, a, d, {}) for a, d in zip(achieved, desired, strict=True)]
    if each[0].size != 1:
        raise SettingsError(
            f"algorithm.replay.hindsight: the environment's {getattr(compute, '__name__', 'method')} returned "
            f"{each[0]} for one goal, but must return a number. Fix it, or use --algorithm.replay.hindsight 0."
        )
    return np.array([answer.item() for answer in each])


def _ask(compute: Callable[..., Any], achieved: Any, desired: Any, info: dict[str, Any]) -> np.ndarray:
    """Call an environment's method with copies of goals, which it may change.

    Raises:
        SettingsError: the method raised an error.
    """
    try:
        with ENVIRONMENT_SETTINGS.applied():
            return np.asarray(compute(np.array(achieved), np.array(desired), info))
    except Exception as error:
        raise SettingsError(
            f"algorithm.replay.hindsight: the environment's {getattr(compute, '__name__', 'method')} raised {error!r} "
            f"for goals of the shape {np.shape(achieved)} and info={info!r}. Fix it, or use "
            "--algorithm.replay.hindsight 0."
        ) from error


def _needs_info(env: Any, judge: Any) -> str:
    """A sentence that names a method whose result depends on the step's info; "" if there is none."""
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
                    return ""  # another mistake, which is reported when rewards are needed
                try:
                    same = np.array_equal(known, _ask(compute, *goals, {}))
                except SettingsError as error:
                    return f"Its {name} raised {error.__cause__!r} for an empty info."
                if not same:
                    return f"Its {name} returned something else for an empty info than for the info of the step."
            if terminated or truncated:
                break
    return ""


def _judge(env: Any) -> tuple[Any, str]:
    """The outermost object with compute_reward among an environment and its wrappers, and the name of a wrapper around
    it that changes rewards or goals, if any."""
    changing = ""
    while env is not None and not hasattr(env, "compute_reward"):
        if isinstance(env, (gymnasium.RewardWrapper, gymnasium.wrappers.NormalizeReward)) or (
            isinstance(env, gymnasium.ObservationWrapper) and _goals(env) != _goals(env.env)
        ):
            changing = type(env).__name__
        env = env.env if isinstance(env, gymnasium.Wrapper) else None
    return env, changing


def _goals(env: Any) -> list[Any]:
    """The spaces of an environment's goals."""
    space = env.observation_space
    shown = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {}
    return [shown.get(name) for name in (ACHIEVED, DESIRED)]
