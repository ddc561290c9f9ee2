"""The environments of one shard, behind one small protocol."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium
import numpy as np
import torch

from lockstep.config.settings import Options, SettingsError, check_free
from lockstep.distributed.shared_memory import Arena, PrivateArena

Observation = Any
"""A numpy array [B, ...], or a dict of such arrays for a Dict space."""
MAX_LEVELS = 2**31 - 1
"""Levels have the numbers from 0 to this less one."""


@dataclass(frozen=True)
class EnvConfig:
    """Which environments, and under which protocol."""

    id: str = "CartPole-v1"
    """A game ("Breakout"), a gymnasium or EnvPool id ("HalfCheetah-v4"), or a callable ("file.py:make")."""
    num_envs: int = 8
    """Environments in all shards together. More collect faster and make batches larger; each sample then counts for
    less."""
    adapter: Literal["auto", "ale", "envpool", "gymnasium"] = "auto"
    """Library that steps them; auto takes the fastest installed one that can serve the id."""
    protocol: Literal["none", "machado", "classic"] = "none"
    """Atari protocol. machado: sticky actions 0.25, full action set, no life-loss signal, 108,000 frames.
    classic: 0 to 29 no-ops at the start, episode ends for the agent at a lost life. Both clip training rewards."""
    reward_clip: bool = False
    """Clip training rewards to [-1, 1]. Scores are always raw. Atari protocols switch it on."""
    reseed_every: int = 4096
    """Steps per environment after which it starts from a new seed. EnvPool cannot reseed single environments and starts
    them all afresh, episodes in flight being truncated and bootstrapped; gymnasium truncates an episode that lasts this
    long; ALE does it at the end of an episode, after 4,096 steps or this many if that is less. Bounds the time that
    resuming takes: lower resumes faster, higher disturbs long episodes less."""
    decorrelate: int = 0
    """Cut the first episode of each environment at a random length up to this, so that episodes of equal length
    do not stay in phase. 0 switches it off."""
    random_actions: bool = False
    """Send uniformly random actions to the training environments in place of the policy's, which is run and trained as
    usual but learns nothing: measures throughput without the policy's influence on the environments."""
    options: Options = field(default_factory=dict)
    """Further keyword arguments for the environment's constructor, as in repeat_action_probability=0.1. Values are
    numbers, true, false, None, and lists, tuples, dicts and quoted texts as Python writes them, as in 'sizes=[1,2]'.
    Anything else is a text."""
    curriculum: Options = field(default_factory=dict)
    """Options that only training environments get, over those in `options`: easier starts, say. Evaluations and videos
    play the task without them."""
    num_levels: int = 0
    """Levels that training episodes are drawn from, so that others can test what was learned; 0 for no limit. Fewer are
    learned sooner, and say less about all others. A level is what a seed makes of the task: Procgen's own levels, and
    with gymnasium the episode that reset(seed=level) begins."""
    start_level: int = 0
    """The first of these levels; the others follow it."""
    opponents: tuple[str, ...] = ()
    """Who plays the other agents of a match, where an environment has several: random, another run (RUN or
    RUN@ITERATION), or a function of your own (file.py:play). None by default, and the policy plays all, against or with
    itself. Of several, each match draws one: more are harder to exploit."""

    later: ClassVar[frozenset[str]] = frozenset({"curriculum", "num_levels", "start_level", "opponents"})
    free: ClassVar[frozenset[str]] = frozenset({"options", "curriculum"})

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        for name, least in (("num_envs", 1), ("reseed_every", 1), ("decorrelate", 0)):
            if getattr(self, name) < least:
                raise SettingsError(f"env.{name}={getattr(self, name)} must be at least {least}.")
            if getattr(self, name) >= 2**31:
                raise SettingsError(f"env.{name}={getattr(self, name)} must be below {2**31:,}.")
        if min(self.start_level, self.num_levels) < 0 or self.start_level + self.num_levels >= MAX_LEVELS:
            raise SettingsError(
                f"env.num_levels={self.num_levels} and env.start_level={self.start_level} must be at least 0, and "
                f"their sum below {MAX_LEVELS:,}, the number of all levels."
            )
        if self.start_level and not self.num_levels:
            raise SettingsError(
                f"env.start_level={self.start_level} names the first of a set of levels, but env.num_levels=0 sets no "
                "limit. Say how many there are, as in --env.num-levels 200."
            )

        for kind in ("options", "curriculum"):
            for name, value in getattr(self, kind).items():
                check_free(value, f"env.{kind}.{name}")

    def training(self) -> EnvConfig:
        """The environments of training, which follow the curriculum."""
        return replace(self, options={**self.options, **self.curriculum}, curriculum={})

    def held_out(self) -> EnvConfig:
        """The same environments on all levels above those that were trained on.

        Raises:
            SettingsError: training was not limited to a set of levels.
        """
        if not self.num_levels:
            raise SettingsError(
                "This run was trained on an unlimited number of levels (env.num_levels=0), which leaves none to test "
                "on. Train with a set of levels, as in --env.num-levels 200, or evaluate without --levels test."
            )
        end = self.start_level + self.num_levels
        return replace(self, start_level=end, num_levels=MAX_LEVELS - end)


class StepResult(NamedTuple):
    """What one step of B environments returned. The observation is written into the caller's buffer."""

    reward: np.ndarray
    """float32 [B], raw: never clipped or normalised. 0 on a reset step."""
    terminated: np.ndarray
    """bool [B]: the environment itself ended (game over)."""
    truncated: np.ndarray
    """bool [B]: ended by a time limit; the value of the observation must still be bootstrapped."""
    first: np.ndarray
    """bool [B]: this was a reset step. The action was ignored, and the observation starts a new episode."""
    life_lost: np.ndarray
    """bool [B]: a life was lost but the episode goes on. Always False under protocols without that signal."""


def atari_protocol(sticky: float, skip: int, longest: float) -> str:
    """What scores depend on most, in words: the probability that the last action is repeated, frames for each action,
    and frames that an episode may last."""
    limit = f"at most {longest:,} frames" if math.isfinite(longest) else "without a limit of frames"
    return f"sticky actions {sticky:g}, {skip} frames an action, {limit}"


class ShardEnv(ABC):
    """B environments with next-step autoreset: the step after an episode's end ignores the action and returns the
    first observation of the next episode. So the true final observation is always seen, and never skipped.

    Environment j of this shard has the global index first_index + j. Its seeds derive from (seed, global index,
    episode or reseeding count) alone.
    """

    num_envs: int
    observation_space: gymnasium.Space[Any]
    """Of a single environment."""
    action_space: gymnasium.Space[Any]
    """Of a single environment."""
    frames_per_step: int
    """Emulator frames per environment step (4 in Atari, 1 where the term means nothing)."""
    emulator: str = ""
    """How the emulator is run, if there is one, as protocols of evaluations say it."""

    @abstractmethod
    def reset(self, out: Observation) -> None:
        """Start every environment from its first seed; write the observations [B, ...] into out."""

    @abstractmethod
    def send(self, action: np.ndarray) -> None:
        """Begin a step with actions [B, ...]; returns at once where the library can step in the background."""

    @abstractmethod
    def recv(self, out: Observation) -> StepResult:
        """Wait for the step begun by send; write the observations into out."""

    def reseed_due(self) -> bool:
        """Whether all environments must be started afresh now (see EnvConfig.reseed_every). Asked between rollouts;
        never so where single environments can be reseeded."""
        return False

    def reseed(self, out: Observation) -> None:
        """Start every environment afresh from its next seed; write the observations into out."""
        raise NotImplementedError(f"{type(self).__name__} reseeds single environments")

    @abstractmethod
    def state_dict(self) -> dict[str, np.ndarray]:
        """Seed counters and the actions since the last seeded reset: enough to rebuild every environment exactly."""

    @abstractmethod
    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, alive: Callable[[], None] = lambda: None
    ) -> int:
        """Rebuild the environments by replaying their actions; write the current observations into out.

        Args:
            state: what state_dict returned, in this process or another.
            out: as for reset.
            alive: called at every replayed step, to tell whoever watches this process that it makes progress.

        Returns:
            The number of environment steps that were replayed.
        """

    def render(self, index: int = 0) -> np.ndarray:
        """One environment's picture, uint8 [H, W, 3], for videos."""
        raise SettingsError(f"{type(self).__name__} cannot draw pictures. Use another --env.adapter for recording.")

    @abstractmethod
    def close(self) -> None:
        """Release threads and memory."""


def allocate_observation(space: gymnasium.Space[Any], leading: tuple[int, ...], arena: Arena | None = None) -> Any:
    """Zeros for observations of a space, [*leading, ...]: a tensor, or a dict of them for a Dict space.

    arena: where the memory is; by default it is this process's own.
    """
    arena = arena or PrivateArena()
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: allocate_observation(entry, leading, arena) for key, entry in space.spaces.items()}
    assert space.shape is not None
    return arena.zeros((*leading, *space.shape), torch.from_numpy(np.zeros(0, space.dtype)).dtype)


_WHOLE = {
    "stack_num": 1,
    "img_height": 1,
    "img_width": 1,
    "frame_skip": 1,
    "frameskip": 1,
    "noop_max": 0,
    "max_episode_steps": 0,
    "max_num_frames_per_episode": 0,
}
"""Options of C++ environments that they take as they are, and crash or hang with; each with its least value."""


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for numbers that crash a library, or that it takes for something else."""
    for name, least in _WHOLE.items():
        value = options.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SettingsError(f"env.options.{name}={value!r} must be a whole number of at least {least}.")
    sticky = options.get("repeat_action_probability", 0.0)
    if not isinstance(sticky, (int, float)) or isinstance(sticky, bool) or not 0 <= sticky <= 1:
        raise SettingsError(f"env.options.repeat_action_probability={sticky!r} must lie between 0 and 1.")
