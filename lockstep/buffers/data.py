"""Transitions of a file or of a Minari dataset, which fill replay before the first rollout (algorithm.replay.data).

They become one stream of steps. The last observation of an episode is a step without an action, like an environment's
reset step. The stream is cut into equal pieces, one for each environment of the experiment. So a shard's part depends
only on the experiment, not on the layout.

Shape legend: N transitions, M steps of the stream, S steps of a piece, B environments of a shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep import envs
from lockstep.algorithms.offpolicy import OffPolicyConfig, off_policy
from lockstep.buffers.data_sources import NEXT, action_type, arrays_of
from lockstep.buffers.replay import Replay, ring_steps
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import ArrayTuple
from lockstep.core.digests import state_digest
from lockstep.core.rollout import Rollout
from lockstep.experiment import Experiment
from lockstep.models.base import Storing
from lockstep.models.observations import PLAIN, entries, entry_spaces

_AT_ONCE = 1024
"""About how many steps of every environment are inserted at once."""


class Data(ArrayTuple):
    """N transitions in the order of their file, as replay stores them."""

    obs: Any
    """[N, ...]"""
    next_obs: Any
    """[N, ...]: the observation after each transition."""
    action: Tensor
    """[N, *shape of the action space], in the units of the environment."""
    reward: Tensor
    """fp32 [N]"""
    terminated: Tensor
    """bool [N]"""
    truncated: Tensor
    """bool [N]"""

    @property
    def digest(self) -> str:
        """SHA-256 of all fields."""
        named: dict[str, Tensor] = {}
        for name in self._fields:
            value = getattr(self, name)
            named |= {f"{name}.{key}": x for key, x in entries(value).items()}
        return state_digest(named)

    @property
    def ends(self) -> Tensor:
        """bool [N]: whether the next transition does not continue the episode."""
        ends = self.terminated | self.truncated
        ends[-1] = True
        after, before = entries(self.next_obs), entries(self.obs)
        for name in before:
            ends[:-1] |= (after[name][:-1] != before[name][1:]).flatten(1).any(1)
        return ends


def resolved(experiment: Experiment) -> Experiment:
    """Check the data that fills an experiment's replay. Returns the experiment with the data's digest.

    Raises:
        SettingsError: the data does not exist or does not fit.
    """
    config = experiment.algorithm
    if not isinstance(config, OffPolicyConfig) or not config.replay.data or config.replay.data_digest:
        return experiment
    data = load(experiment, *envs.spaces(experiment.env))
    replay = dataclasses.replace(config.replay, data_digest=data.digest)
    return dataclasses.replace(experiment, algorithm=dataclasses.replace(config, replay=replay))


def load(experiment: Experiment, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> Data:
    """Read and check the data that algorithm.replay.data names.

    Raises:
        SettingsError: the data does not exist, does not fit the environment or the capacity, or has changed since the
            run began.
    """
    replay = off_policy(experiment.algorithm).replay
    source = replay.data
    arrays = arrays_of(source)
    data = _checked(arrays, observation_space, action_space, f"algorithm.replay.data={source}")
    if experiment.env.reward_clip:
        data = data.replace(reward=data.reward.clamp(-1, 1))
    _require_capacity(experiment, data)
    if replay.data_digest not in ("", data.digest):
        raise SettingsError(
            f"algorithm.replay.data={source} has changed since the run began: algorithm.replay.data_digest is "
            f"{replay.data_digest[:8]}…, but its digest is {data.digest[:8]}…. Restore it from a copy, or leave the "
            "digest out to begin a run with the changed data."
        )
    return data


def fill(
    memory: Replay,
    experiment: Experiment,
    shard: int,
    data: Data,
    example: Rollout,
    distribution: Any,
    heartbeat: Callable[[], None] = lambda: None,
) -> None:
    """Insert a shard's part of the data into its empty memory.

    Args:
        example: a rollout of the shard, with the shapes and types of the memory.
        distribution: the model's distribution, which converts actions into the form that replay stores.
        heartbeat: called at every insertion.

    Raises:
        SettingsError: the distribution cannot convert actions.
    """
    if not isinstance(distribution, Storing):
        raise SettingsError(
            f"algorithm.replay.data: {type(distribution).__name__} has no method from_env(action), which turns an "
            "action of the environment into one that replay stores. Write one, or leave the data out."
        )
    action = distribution.from_env(data.action.numpy()).to(example.action.dtype)
    rollout = experiment.algorithm.rollout
    at_once = rollout * max(1, _AT_ONCE // rollout if memory.single_steps else 1)
    for part in rollouts(data.replace(action=action), experiment, shard, at_once):
        heartbeat()
        memory.insert(part.replace(core_state=torch.zeros_like(example.core_state)))


def rollouts(data: Data, experiment: Experiment, shard: int, at_once: int) -> Iterator[Rollout]:
    """A shard's part of the data as consecutive rollouts of at most `at_once` steps."""
    ends = data.ends
    row, final = _stream(ends)
    length, size = _piece(experiment, len(row)), experiment.envs_per_shard
    pieces = torch.arange(shard * size, (shard + 1) * size) * length
    for first in range(0, length, at_once):
        steps = min(at_once, length - first)
        at = pieces + torch.arange(first, first + steps + 1).unsqueeze(1)  # [T+1, B]
        slot = at.clamp(max=len(row) - 1)
        rows, over = row[slot], final[slot]
        inside = torch.arange(first, first + steps + 1).unsqueeze(1)
        valid, taken = ~over[:-1], rows[:-1]
        terminated = data.terminated[taken] & valid
        cut = ends[taken] | (inside[:-1] == length - 1)
        action, zeros = data.action[taken], torch.zeros(steps + 1, size)
        yield Rollout(
            obs=_observations(data, rows, over),
            start=(inside == 0) | final[(slot - 1).clamp(min=0)],
            action=action,
            reward=data.reward[taken] * valid,
            prev_action=torch.cat([torch.zeros_like(action[:1]), action]),
            prev_reward=torch.cat([zeros[:1], data.reward[taken] * valid]),
            log_prob=zeros[1:],
            value=zeros,
            terminated=terminated,
            truncated=valid & cut & ~terminated,
            valid=valid,
            core_state=torch.zeros(size, 0),
        )


def _observations(data: Data, rows: Tensor, final: Tensor) -> Any:
    """Observations [T+1, B, ...] of steps of the stream; final says where they are the last of an episode."""
    before, after = entries(data.obs), entries(data.next_obs)
    found = {}
    for name, obs in before.items():
        found[name] = obs[rows]
        found[name][final] = after[name][rows[final]]
    return found if isinstance(data.obs, dict) else found[PLAIN]


def _stream(ends: Tensor) -> tuple[Tensor, Tensor]:
    """For each step of the stream [M]: its transition, and whether it shows the last observation of an episode."""
    row = torch.repeat_interleave(torch.arange(len(ends)), 1 + ends.long())
    final = torch.zeros(len(row), dtype=torch.bool)
    final[1:] = row[1:] == row[:-1]
    return row, final


def _piece(experiment: Experiment, steps: int) -> int:
    """S, a multiple of the rollout's steps, since sequences begin with rollouts."""
    rollout = experiment.algorithm.rollout
    return -(-steps // (experiment.env.num_envs * rollout)) * rollout


def _require_capacity(experiment: Experiment, data: Data) -> None:
    replay, rollout = off_policy(experiment.algorithm).replay, experiment.algorithm.rollout
    count = len(data.reward)
    steps = count + int(data.ends.sum())
    needed = _piece(experiment, steps) + rollout + 1  # the first rollout should not overwrite data
    if needed > ring_steps(experiment):
        raise SettingsError(
            f"algorithm.replay.data={replay.data} has {count:,} transitions, which take {steps:,} steps with the last "
            f"observations of episodes. With the first rollout, that is more than algorithm.replay.capacity="
            f"{replay.capacity}. Use --algorithm.replay.capacity {needed * experiment.env.num_envs} or more, or fewer "
            "transitions."
        )


class _Columns:
    """Named arrays with one row for each transition. SettingsErrors name where they come from."""

    def __init__(self, arrays: Mapping[str, np.ndarray], who: str) -> None:
        self.arrays, self.who, self.count = arrays, who, len(np.atleast_1d(arrays["rewards"]))
        if not self.count:
            raise SettingsError(f"{who} has no transitions. Give it at least one row.")

    def take(self, name: str, shape: tuple[int, ...], kinds: str, dtype: Any) -> Tensor:
        """An array as a tensor of this type, [N, *shape].

        Args:
            kinds: the kinds of NumPy's types that it may have.
        """
        x, who, count = self.arrays[name], self.who, self.count
        if x.shape != (count, *shape) or x.dtype.kind not in kinds:
            kind = {"b": "bool", "biu": "whole numbers", "biuf": "numbers"}[kinds]
            raise SettingsError(
                f"{who}: {name} is {x.dtype} {list(x.shape)}, but must contain {kind} {[count, *shape]}, to match "
                "rewards and the environment's spaces. Convert it (lockstep check-env shows the spaces)."
            )
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            row = int(np.flatnonzero(~np.isfinite(x).reshape(count, -1).all(1))[0])
            raise SettingsError(f"{who}: {name} has NaN or an infinity in row {row}. Leave such rows out.")
        with np.errstate(over="ignore", invalid="ignore"):
            kept = np.ascontiguousarray(x.astype(dtype, copy=False))
        lost = kept != x if kept.dtype.kind in "biu" else ~np.isfinite(kept)
        if lost.any():
            row = int(np.flatnonzero(lost.reshape(count, -1).any(1))[0])
            raise SettingsError(
                f"{who}: {name} in row {row}, {x[row].tolist()}, does not fit {kept.dtype}, the environment's type. "
                "Convert or leave out such rows."
            )
        return torch.from_numpy(kept)

    def observations(self, name: str, space: gymnasium.Space[Any]) -> dict[str, Tensor]:
        found = {}
        for entry, part in entry_spaces(space).items():
            kinds = "biu" if part.dtype == np.uint8 else "biuf"
            found[entry] = self.take(f"{name}{_suffix(entry)}", tuple(part.shape or ()), kinds, part.dtype)
        return found

    def actions(self, space: gymnasium.Space[Any]) -> Tensor:
        who = self.who
        if isinstance(space, spaces.Discrete):
            action = self.take("actions", (), "biu", action_type(space))
            low, high = np.asarray(space.start), np.asarray(space.start + space.n - 1)
        elif isinstance(space, spaces.Box):
            action = self.take("actions", tuple(space.shape), "biuf", action_type(space))
            low, high = space.low, space.high
        else:
            raise SettingsError(
                f"{who}: replay takes data for Discrete and Box actions, but the environment has {space}."
            )
        x = action.numpy()
        outside = ((x < low) | (x > high)).reshape(len(x), -1).any(1)
        if outside.any():
            row = int(np.flatnonzero(outside)[0])
            raise SettingsError(
                f"{who}: the action in row {row}, {self.arrays['actions'][row].tolist()}, is not in the action space "
                f"{space}. Give actions in the environment's units, clipped to its bounds."
            )
        return action


def _suffix(entry: str) -> str:
    """What follows the name of the arrays of observations in that of one entry."""
    return f"/{entry}" if entry else ""


def _checked(
    arrays: Mapping[str, np.ndarray],
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    who: str,
) -> Data:
    """The transitions in arrays.

    Raises:
        SettingsError: arrays are missing, or do not fit the spaces.
    """
    suffixes = [_suffix(entry) for entry in entry_spaces(observation_space)]
    needed = ["actions", "rewards", "terminations", "truncations", *(f"observations{each}" for each in suffixes)]
    further = [f"{NEXT}{each}" for each in suffixes]
    given = [name for name in further if name in arrays]
    if missing := [name for name in (*needed, *(further if given else ())) if name not in arrays]:
        raise SettingsError(
            f"{who} lacks {', '.join(missing)}. It has {', '.join(arrays) or 'nothing'}. Add arrays of these names, "
            "with one row for each transition."
        )
    columns = _Columns(arrays, who)
    obs, reward = (
        columns.observations("observations", observation_space),
        columns.take("rewards", (), "biuf", np.float32),
    )
    terminated, truncated = (columns.take(name, (), "b", bool) for name in ("terminations", "truncations"))
    if given:
        next_obs = columns.observations(NEXT, observation_space)
    else:
        following = _following(terminated, truncated, further[0], who)
        next_obs = {name: x[following] for name, x in obs.items()}
    nested = isinstance(observation_space, spaces.Dict)
    return Data(
        obs=obs if nested else obs[PLAIN],
        next_obs=next_obs if nested else next_obs[PLAIN],
        action=columns.actions(action_space),
        reward=reward,
        terminated=terminated,
        truncated=truncated & ~terminated,
    )


def _following(terminated: Tensor, truncated: Tensor, lacking: str, who: str) -> Tensor:
    """int64 [N]: the row with the observation after each transition, if there is no array of these.

    Args:
        lacking: its name.
    """
    count, unknown = len(terminated), truncated & ~terminated
    unknown[-1] |= ~terminated[-1]
    if unknown.any():
        raise SettingsError(
            f"{who} lacks {lacking}. Without it, the observation after a transition is that of the next row, "
            f"but row {int(unknown.nonzero()[0, 0])} is the last one of an episode that does not terminate. Add "
            "it, or leave such rows out."
        )
    # The observation after a termination is never used.
    return torch.where(terminated, torch.arange(count), (torch.arange(count) + 1).clamp(max=count - 1))
