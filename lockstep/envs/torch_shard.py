"""One shard's environments in torch (TorchEnv).

Shape legend: B environments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure, torch_type
from lockstep.envs.answers import form_of
from lockstep.envs.base import Observation, ShardEnv, StepResult
from lockstep.envs.batches import batch_action
from lockstep.envs.convert import ObservationWriter
from lockstep.envs.device_steps import DeviceStep
from lockstep.envs.episodes import Seeds
from lockstep.envs.pictures import as_picture
from lockstep.envs.settings import EnvConfig
from lockstep.envs.torch_env import State, TorchEnv, episode_seeds
from lockstep.models.action_spaces import composite

_STATE = "state."
_WAITS = {
    "_local_scalar_dense": "reads a number of a tensor (item, if)",
    "item": "reads a number of a tensor (item, if)",
    "is_nonzero": "branches on a tensor (if)",
    "equal": "compares whole tensors (torch.equal)",
    "nonzero": "asks for the places of a mask (nonzero)",
    "argwhere": "asks for the places of a mask (argwhere)",
    "where.default": "asks for the places of a mask (where)",
    "masked_select": "selects by a mask",
    "repeat_interleave.Tensor": "repeats by a tensor (repeat_interleave)",
    "_unique2": "lists different numbers (unique)",
    "unique_dim": "lists different numbers (unique)",
}
"""Calls that make the host wait for a GPU, by the names of torch's kernels."""


class TorchShard(ShardEnv):
    """B environments whose state lockstep holds. An environment that has ended is stepped once more, and its next state
    is then replaced by the first state of a new episode.

    On a GPU, a rollout only needs `advance`. send and recv copy actions to the GPU and observations back.
    """

    frames_per_step = 1

    def __init__(self, env: TorchEnv, config: EnvConfig, *, seeds: Seeds, num_envs: int, device: torch.device) -> None:
        self._env, self._id, self._device = env, config.id, device
        self.num_envs = num_envs
        if env.num_envs != num_envs:
            raise SettingsError(
                f"env.id={config.id} has num_envs={env.num_envs}, but was asked for {num_envs}. Let its constructor "
                "call super().__init__(num_envs, device)."
            )
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(env, name, None), gymnasium.Space):
                raise SettingsError(f"env.id={config.id} has no {name}. Set it to that of a single environment.")
        self.action_space: gymnasium.Space[Any] = env.action_space
        if composite(self.action_space):
            raise SettingsError(f"env.id={config.id}: env.adapter=torch takes no actions of {self.action_space}.")
        self.observation_space = _checked_space(env.observation_space, config.id)
        self._longest = config.reseed_every
        self._levels = config.start_level, config.num_levels
        index = np.arange(num_envs)
        # Two seeds make a key of 62 bits, so that even a million environments all differ.
        first, second = (seeds.derive(index, np.full_like(index, count)) for count in (0, 1))
        self._keys = torch.from_numpy(first << 31 | second).to(device)
        self._first_length = torch.from_numpy(seeds.first_lengths(num_envs, config.decorrelate)).to(device)
        self._episode = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._steps = torch.zeros_like(self._episode)
        self._ended = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._watched = True
        """Whether to check the next step for calls that wait for a GPU."""
        with torch.no_grad():
            first = self._returned(env.reset(self._seeds()), "reset", None)
        self._state: State = {name: x.clone() for name, x in first.items()}
        """The state, always at the same addresses."""
        self._action: Tensor | None = None

    def _seeds(self) -> Tensor:
        """int64 [B]: the seeds of the current episodes."""
        start, count = self._levels
        seeds = episode_seeds(self._keys, self._episode)
        return start + seeds % count if count else seeds

    def reset(self, out: Observation) -> None:
        self._episode.zero_()
        self._begin(self._returned(self._reset(), "reset", self._state), 0, False)
        self._write(self._observe(), out)

    @torch.inference_mode()
    def _reset(self) -> Any:
        return self._env.reset(self._seeds())

    @torch.inference_mode()
    def _begin(self, state: State, steps: Any, ended: Any) -> None:
        for name, x in self._state.items():
            x.copy_(state[name])
        for to, x in ((self._steps, steps), (self._ended, ended)):
            to.copy_(x) if isinstance(x, Tensor) else to.fill_(x)

    def on_device(self) -> TorchShard | None:
        return None if self._device.type == "cpu" else self

    def memory(self) -> list[Tensor]:
        return [self._episode, self._steps, self._ended, *self._state.values()]

    @torch.inference_mode()
    def advance(self, actions: Tensor) -> DeviceStep:
        if not self._watched:
            return self._advance(actions)
        self._watched = False
        with _Watch(self._id):
            return self._advance(actions)

    def _advance(self, actions: Tensor) -> DeviceStep:
        first = self._ended.clone()
        self._episode.add_(first)
        fresh = self._returned(self._env.reset(self._seeds()), "reset", self._state)
        answer = self._env.step(dict(self._state), actions)
        if not (isinstance(answer, tuple) and len(answer) == 4):
            raise SettingsError(
                f"The step of env.id={self._id} returned {form_of(answer)}, but must return (state, rewards, "
                "terminated, truncated)."
            )
        state, reward, terminated, truncated = answer
        state = self._returned(state, "step", self._state)
        reward = self._numbers("rewards", reward)
        terminated, truncated = (
            self._numbers(name, x, torch.bool) for name, x in (("terminated", terminated), ("truncated", truncated))
        )
        chosen = {
            name: torch.where(first.view(-1, *[1] * (x.dim() - 1)), fresh[name], x) for name, x in state.items()
        }  # computed before anything is written, since a new entry may be an old tensor of the state
        for name, held in self._state.items():
            held.copy_(chosen[name])
        self._steps.copy_(torch.where(first, 0, self._steps + 1))
        cut = (self._steps == self._longest) | (
            (self._episode == 0) & (self._steps == self._first_length) & (self._steps > 0)
        )
        terminated = terminated & ~first
        truncated = (truncated | cut) & ~first & ~terminated
        self._ended.copy_(terminated | truncated)
        return DeviceStep(self._observe(), torch.where(first, 0, reward.float()), terminated, truncated, first)

    @torch.inference_mode()
    def _observe(self) -> Any:
        obs, space = self._env.observe(dict(self._state)), self.observation_space
        if not isinstance(space, spaces.Dict):
            return self._fitting("observations", obs, space)
        if not isinstance(obs, dict) or obs.keys() != space.spaces.keys():
            found = ", ".join(map(str, obs)) if isinstance(obs, dict) else form_of(obs)
            raise SettingsError(
                f"observe of env.id={self._id} returned {found}, but observation_space has the entries "
                f"{', '.join(space.spaces)}."
            )
        return {name: self._fitting(f"the observation {name!r}", obs[name], x) for name, x in space.spaces.items()}

    def _fitting(self, what: str, x: Any, space: gymnasium.Space[Any]) -> Tensor:
        wanted = torch_type(space.dtype)
        return self._tensor(f"observe of env.id={self._id} returned {what}", x, space.shape or (), wanted)

    def _numbers(self, name: str, x: Any, dtype: torch.dtype | None = None) -> Tensor:
        return self._tensor(f"The step of env.id={self._id} returned {name}", x, (), dtype)

    def _returned(self, state: Any, method: str, like: State | None) -> State:
        """Check a state that the environment returned, and return it.

        Raises:
            SettingsError: the state has other entries or shapes than the first one, or is on another device.
        """
        where = f"The {method} of env.id={self._id} returned"
        if not isinstance(state, dict) or not state or (like is not None and state.keys() != like.keys()):
            named = f"a state with {', '.join(map(str, state)) or 'no entry'}" if isinstance(state, dict) else ""
            wanted = "a dict of tensors" if like is None else f"a state with {', '.join(like)}, as reset first did"
            raise SettingsError(f"{where} {named or form_of(state)}, but must return {wanted}.")
        for name, x in state.items():
            known = None if like is None else like[name]
            shape = None if known is None else tuple(known.shape[1:])
            self._tensor(f"{where} {name!r} of the state", x, shape, None if known is None else known.dtype)
            if known is None and x.dtype == torch.bfloat16:
                raise SettingsError(
                    f"{where} {name!r} of the state as bfloat16, which checkpoints cannot keep. Use float16 or float32."
                )
        return state

    def _tensor(self, where: str, x: Any, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Tensor:
        if not isinstance(x, Tensor):
            raise SettingsError(f"{where} as {form_of(x)}, but it must be a tensor.")
        wanted = (self.num_envs, *(tuple(x.shape[1:]) if shape is None else shape))
        if tuple(x.shape) != wanted or (dtype is not None and x.dtype != dtype):
            raise SettingsError(
                f"{where} with the shape {tuple(x.shape)} and the type {x.dtype}, but {wanted} and {dtype or x.dtype} "
                "are needed."
            )
        if x.device != self._device:
            raise SettingsError(
                f"{where} on {x.device}, but the environment was made for {self._device}. Make tensors with "
                "device=self.device."
            )
        return x

    def send(self, action: Any) -> None:
        batch = batch_action(self.action_space, (np.asarray(action),), tensors=True)
        self._action = batch.to(self._device)

    def recv(self, out: Observation) -> StepResult:
        assert self._action is not None
        step = self.advance(self._action)
        self._write(step.obs, out)
        reward, terminated, truncated, first = (x.cpu().numpy() for x in step[1:])
        return StepResult(reward, terminated, truncated, first, np.zeros(self.num_envs, np.bool_))

    def _write(self, obs: Any, out: Observation) -> None:
        def write(x: Tensor, to: np.ndarray) -> None:
            to[...] = x.cpu().numpy()

        map_structure(write, obs, out)

    def state_dict(self) -> dict[str, np.ndarray]:
        own = {"episode": self._episode, "steps": self._steps, "ended": self._ended}
        parts = {**own, **{_STATE + name: x for name, x in self._state.items()}}
        return {name: x.cpu().numpy().copy() for name, x in parts.items()}

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        """Restore the state. Nothing is replayed."""
        tensors = {name: torch.from_numpy(x.copy()) for name, x in state.items()}
        self._episode.copy_(tensors["episode"])
        saved = {name: tensors[_STATE + name] for name in self._state}
        self._begin(saved, tensors["steps"], tensors["ended"])
        self._write(self._observe(), out)
        return 0

    def render(self, index: int = 0) -> np.ndarray:
        render = getattr(self._env, "render", None)
        if not callable(render):
            raise SettingsError(
                f"env.id={self._id} cannot render images. Give its class a method render(state, index) that returns a "
                "picture, uint8 [H, W, 3]."
            )
        return as_picture(render(dict(self._state), index))

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""


class _Watch(TorchDispatchMode):
    """Refuses calls that make the host wait for a GPU, even on a CPU."""

    def __init__(self, env_id: str) -> None:
        super().__init__()
        self._id = env_id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        whole = f"{name}.{func._overloadname}"
        by_mask = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        said = "indexes with a mask" if by_mask else _WAITS.get(whole) or _WAITS.get(name)
        if said:
            raise SettingsError(
                f"A step of env.id={self._id} {said}. On a GPU, the host would wait for that at every step. Compute "
                "all rows and choose with torch.where, and make constants in the constructor; or write a batch of "
                "arrays (lockstep.envs.batch.BatchEnv)."
            )
        return func(*args, **(kwargs or {}))


def _checked_space(space: gymnasium.Space[Any], env_id: str) -> gymnasium.Space[Any]:
    """The space as models see it.

    Raises:
        SettingsError: observations would have to be converted.
    """
    seen = ObservationWriter(space).space
    parts = [(space, seen)]
    if isinstance(space, spaces.Dict) and isinstance(seen, spaces.Dict) and space.spaces.keys() == seen.spaces.keys():
        parts = [(x, seen.spaces[name]) for name, x in space.spaces.items()]
    for given, wanted in parts:
        if not isinstance(given, spaces.Box) or (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            raise SettingsError(
                f"env.id={env_id} observes {space}, but env.adapter=torch takes a Box of float32 numbers, of uint8 "
                "pictures [C, H, W] (a short last axis is read as channels: turn such pictures, or pad them), or a "
                "Dict of these."
            )
    return seen
