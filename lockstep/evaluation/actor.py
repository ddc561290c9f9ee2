"""A trained policy that plays a user's environment, one observation at a time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.rng import stream
from lockstep.envs.convert import ObservationWriter, single_action
from lockstep.evaluation.policy import Policy
from lockstep.models.action_spaces import action_parts, composite
from lockstep.models.capture import Inference
from lockstep.models.policies import PoliciesSpace


class Actor:
    """Chooses actions for one environment.

        actor = Actor(load_policy("runs/cartpole", "best"), env)  # or load_policy("runs/mpe").of("listener_0")
        observation, _ = env.reset()
        actor.reset()
        action = actor.act(observation)

    Args:
        policy: chooses the actions; it is copied to the CPU.
        env: any environment with the spaces of training, but for what only a critic observed (model.critic_only). Only
        its observation_space and action_space are used; it is not stepped.
        greedy: take the most likely action instead of sampling.
        seed: of sampled actions. None takes the experiment's.

    Raises:
        SettingsError: the policy's observations or actions differ from this environment's.
    """

    def __init__(
        self, policy: Policy, env: gymnasium.Env[Any, Any], *, greedy: bool = False, seed: int | None = None
    ) -> None:
        experiment, model = policy.experiment, policy.model
        whole, actions = policy.spaces
        if isinstance(whole, PoliciesSpace):
            names = ", ".join(whole.parts)
            raise SettingsError(
                f"An Actor plays one policy, but env.policies={experiment.env.policies} made several: {names}. Choose "
                f'one with Policy.of, as in load_policy(run).of("{next(iter(whole.parts))}").'
            )
        seen = experiment.model.policy_space(whole)
        given = env.observation_space
        self._key = next(iter(_keys(seen)), "") if len(_keys(seen)) == 1 and not isinstance(given, spaces.Dict) else ""
        """The only entry that the policy observes, if environments return it without the Dict around it."""
        given = spaces.Dict({self._key: given}) if self._key else given
        self._writer = ObservationWriter(given, without=_keys(whole) - _keys(seen))
        theirs, ours = env.action_space, actions
        fits = _form(self._writer.space) == _form(seen) and _form(theirs) == _form(ours)
        if not fits or not np.allclose(_bounds(theirs), _bounds(ours)):
            raise SettingsError(
                f"The policy observes {seen} and acts in {actions}, but in this environment it would observe "
                f"{self._writer.space} and act in {env.action_space}. Use an environment like "
                f"env.id={experiment.env.id}."
            )
        self._space, self._distribution, self._greedy = env.action_space, model.distribution, greedy
        playing = model.for_playing().cpu()
        self._actor = Inference(playing)
        self._noise = stream(experiment.seed if seed is None else seed, "action-actor")
        self._obs = envs.allocate_observation(seen, (1, 1))
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
        self._writer.write_list([{self._key: observation} if self._key else observation], self._rows)
        if self._reward is not None:
            self._reward[:] = float(np.clip(reward, -1.0, 1.0) if self._clip else reward)
        out, self._state = self._actor(self._obs, self._start, self._state, self._action, self._reward)
        self._start[:] = False
        if self._greedy:
            action = self._distribution.mode(out.policy[0])
        else:
            noise = torch.from_numpy(self._noise.random((1, self._distribution.noise_size), np.float32))
            action = self._distribution.sample(out.policy[0], noise)
        if self._action is not None:
            self._action[0] = action
        parts = self._distribution.to_env(action.numpy())
        return single_action(self._space, parts if isinstance(parts, tuple) else (parts,), 0)


def _keys(space: gymnasium.Space[Any]) -> set[str]:
    """The entries of a Dict; none of another space."""
    return set(space.spaces) if isinstance(space, spaces.Dict) else set()


def _form(space: gymnasium.Space[Any]) -> Any:
    """What must agree; libraries differ in the bounds of vectors and in number types."""
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
