"""A trained policy that plays a user's environment, one observation at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.rng import stream
from lockstep.envs.base import Observation
from lockstep.envs.convert import ObservationWriter, single_action
from lockstep.evaluation.policy import Policy, load_policy
from lockstep.models.action_spaces import action_parts, composite
from lockstep.models.base import ModelConfig
from lockstep.models.capture import inference_of
from lockstep.models.policies import PoliciesSpace

Spaces = tuple[gymnasium.Space[Any], gymnasium.Space[Any]]
"""The observation space and the action space."""


class Reader:
    """Converts observations of an environment to the form that a policy observes.

    Args:
        model: settings of the policy's model.
        trained: what environments returned in training, and how the policy acts.
        given: the environment's observation and action space.
    """

    def __init__(self, model: ModelConfig, trained: Spaces, given: Spaces) -> None:
        (whole, actions), (observed, acted) = trained, given
        self.space = model.policy_space(whole)
        """The policy's observation space, without entries that only a critic observed (model.critic_only)."""
        keys = _keys(self.space)
        self._key = next(iter(keys)) if len(keys) == 1 and not isinstance(observed, spaces.Dict) else ""
        """The only entry that the policy observes, if environments return it without the Dict around it."""
        observed = spaces.Dict({self._key: observed}) if self._key else observed
        self._writer = ObservationWriter(observed, without=_keys(whole) - keys)
        observed_space = self._writer.space
        fits = _form(observed_space) == _form(self.space) and _form(acted) == _form(actions)
        self.misfit = ""
        """A description of how the environment's spaces differ from those of training; empty if they do not."""
        if not fits or not np.allclose(_bounds(acted), _bounds(actions)):
            self.misfit = (
                f"observes {self.space} and acts in {actions}, but in this environment it would observe "
                f"{observed_space} and act in {acted}"
            )

    def write(self, observations: list[Any], out: Observation) -> None:
        """Write a batch of observations."""
        self._writer.write_list([{self._key: obs} for obs in observations] if self._key else observations, out)


class Actor:
    """Chooses actions for one environment.

        actor = Actor(load_policy("runs/cartpole", "best"), env)  # or load_policy("runs/mpe").of("listener_0")
        observation, _ = env.reset()
        actor.reset()
        action = actor.act(observation)

    Args:
        policy: chooses the actions; it is copied to the CPU. A text or a path is a run's folder, whose latest policy
        plays.
        env: any environment with the spaces of training, but for what only a critic observed (model.critic_only). Only
        its observation_space and action_space are used; it is not stepped.
        greedy: take the most likely action instead of sampling.
        seed: of sampled actions. None takes the experiment's.

    Raises:
        SettingsError: the policy's observations or actions differ from this environment's, or env has no spaces.
    """

    def __init__(
        self,
        policy: Policy | str | Path,
        env: gymnasium.Env[Any, Any],
        *,
        greedy: bool = False,
        seed: int | None = None,
    ) -> None:
        if not hasattr(env, "observation_space") or not hasattr(env, "action_space"):
            raise SettingsError(
                f"An Actor plays in an environment, but {env!r} has no observation_space and action_space. Make one "
                "first, as in Actor(policy, gymnasium.make('CartPole-v1'))."
            )
        if not isinstance(policy, Policy):
            policy = load_policy(policy)
        experiment, model = policy.experiment, policy.model
        whole, actions = policy.spaces
        if isinstance(whole, PoliciesSpace):
            names = ", ".join(whole.parts)
            raise SettingsError(
                f"An Actor plays one policy, but env.policies={experiment.env.policies} made several: {names}. Choose "
                f'one with Policy.of, as in load_policy(run).of("{next(iter(whole.parts))}").'
            )
        self._reader = Reader(experiment.model, (whole, actions), (env.observation_space, env.action_space))
        if self._reader.misfit:
            like = f"Use an environment like env.id={experiment.env.id}."
            raise SettingsError(f"The policy {self._reader.misfit}. {like}")
        self._space, self._distribution, self._greedy = env.action_space, model.distribution, greedy
        playing = model.for_playing().cpu()
        self._actor = inference_of(policy.kernels, playing)
        self._noise = stream(experiment.seed if seed is None else seed, "action-actor")
        self._obs = envs.allocate_observation(self._reader.space, (1, 1))
        self._rows = map_structure(lambda leaf: leaf[0].numpy(), self._obs)
        self._start = torch.ones(1, 1, dtype=torch.bool)
        self._state = torch.zeros(1, playing.state_size)
        previous = experiment.model.uses_previous
        shape, dtype = self._distribution.action_shape, self._distribution.action_dtype
        self._action = torch.zeros(1, 1, *shape, dtype=dtype) if previous else None
        self._reward = torch.zeros(1, 1) if previous else None
        self._clip = experiment.env.reward_clip

    def reset(self) -> None:
        """The next observation is the first of its episode."""
        self._start[:] = True

    @torch.inference_mode()
    def act(self, observation: Any, reward: float = 0.0) -> Any:
        """Choose the action for an observation, both in the environment's form.

        Args:
            reward: of the previous action, for models that see it (model.uses_previous).
        """
        self._reader.write([observation], self._rows)
        if self._reward is not None:
            self._reward[:] = float(np.clip(reward, -1.0, 1.0) if self._clip else reward)
        with self._actor.arithmetic():
            out, self._state = self._actor(self._obs, self._start, self._state, self._action, self._reward)
            if self._greedy:
                action = self._distribution.mode(out.policy[0])
            else:
                noise = torch.from_numpy(self._noise.random((1, self._distribution.noise_size), np.float32))
                action = self._distribution.sample(out.policy[0], noise)
            parts = self._distribution.to_env(action.numpy())
        self._start[:] = False
        if self._action is not None:
            self._action[0] = action
        return single_action(self._space, parts if isinstance(parts, tuple) else (parts,), 0)


def _keys(space: gymnasium.Space[Any]) -> set[str]:
    """The entries of a Dict; none of another space."""
    return set(space.spaces) if isinstance(space, spaces.Dict) else set()


def _form(space: gymnasium.Space[Any]) -> Any:
    """The properties of a space that must agree. Libraries differ in the bounds of vectors and in number types."""
    if isinstance(space, spaces.Dict):
        return {name: _form(entry) for name, entry in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [_form(entry) for entry in space.spaces]
    if not isinstance(space, spaces.Box):
        return repr(space)
    image = space.dtype == np.uint8
    return space.shape, image, int(space.high.max()) if image else None


def _bounds(space: gymnasium.Space[Any]) -> list[float]:
    """The bounds of an action space, flattened."""
    if composite(space):
        return [bound for part in action_parts(space) for bound in _bounds(part)]
    return [*map(float, space.low.flat), *map(float, space.high.flat)] if isinstance(space, spaces.Box) else []
