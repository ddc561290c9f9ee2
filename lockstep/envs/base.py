"""The interface of one shard's environments, and of the adapters that make them."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np

from lockstep.config.settings import Names, SettingsError
from lockstep.config.user_code import load_object
from lockstep.core.arrays import torch_type
from lockstep.distributed.shared_memory import Arena, PrivateArena
from lockstep.envs.adapters import entry_of
from lockstep.envs.device_steps import DeviceSteps
from lockstep.envs.episodes import Seeds
from lockstep.envs.settings import EnvConfig
from lockstep.kernels.bound import Bound

Observation = Any
"""A numpy array [B, ...], or a dict of such arrays for a Dict space."""


class StepResult(NamedTuple):
    """The results of one step of B environments. Observations are written into the caller's buffer."""

    reward: np.ndarray
    """float32 [B], raw: never clipped or normalized. 0 in a reset step."""
    terminated: np.ndarray
    """bool [B]: the environment ended the episode (game over)."""
    truncated: np.ndarray
    """bool [B]: a time limit ended the episode; the value of the observation must still be bootstrapped."""
    first: np.ndarray
    """bool [B]: this was a reset step, which ignored the action and started a new episode."""
    life_lost: np.ndarray
    """bool [B]: a life was lost, but the episode continues. Always False under protocols without this signal."""
    metrics: np.ndarray | None = None
    """float64 [B, M]: the metrics (EnvConfig.metrics) of episodes that ended; other rows are meaningless. NaN where the
    environment reported no number. lockstep.envs.info.EpisodeNumbers makes them. None if there are no metrics."""


class ShardEnv(ABC):
    """B environments with next-step autoreset: the step after the end of an episode ignores the action and returns the
    first observation of the next episode. So the final observation of an episode is never skipped.

    Environment j of this shard has the global index first_index + j. Its seeds depend only on the run's seed, the
    global index, and the number of the episode or of the reseeding.
    """

    num_envs: int
    observation_space: gymnasium.Space[Any]
    """Of a single environment."""
    action_space: gymnasium.Space[Any]
    """Of a single environment."""
    frames_per_step: int
    """Emulator frames per environment step (4 in Atari, 1 without an emulator)."""
    emulator: str = ""
    """How the emulator runs, if there is one; evaluations add it to their protocol."""
    share_seeds: bool = False
    """Whether all environments use one random stream. Then each depends on the others of its shard."""
    limits_episodes: bool = True
    """False if the shard cannot truncate an episode after env.reseed_every steps, although its adapter declares it."""

    @abstractmethod
    def reset(self, out: Observation) -> None:
        """Start every environment from its first seed; write the observations [B, ...] into out."""

    @abstractmethod
    def send(self, action: Any) -> None:
        """Begin a step with actions [B, ...], a tuple of arrays if the space is a Tuple. It returns at once if the
        library can step in the background."""

    @abstractmethod
    def recv(self, out: Observation) -> StepResult:
        """Wait for the step begun by send; write the observations into out."""

    def kernel(self) -> Bound | None:
        """A step of all environments as a compiled function, so that a rollout can be one call; None if there is none.

        Its further arguments are the actions that send takes; out as for recv, but with the entries of a Dict side by
        side (lockstep.core.arrays.join_entries); reward, float32 [B]; and ends, bool [3, B], for terminated, truncated
        and first of StepResult. It writes the last three. Lives are never lost.
        """
        return None

    def report(self, played: StepResult) -> StepResult:
        """Add the metrics of episodes, if any, to the results of the T steps, [T, B], that `kernel` has just played."""
        return played

    def on_device(self) -> DeviceSteps | None:
        """Steps with tensors on the policy's GPU, so that rollouts stay there; None if there are none. Between such
        steps, reset, state_dict and load_state_dict work as usual."""
        return None

    def offer(self, options: dict[str, Any]) -> None:
        """Give these options to episodes that begin from now on. The first call passes the current options."""
        raise NotImplementedError(f"{type(self).__name__} cannot change the options of its environments")

    def reseed_due(self) -> bool:
        """Whether all environments must be restarted now (see EnvConfig.reseed_every). The collector calls this between
        rollouts. Always False if single environments can be reseeded."""
        return False

    def reseed(self, out: Observation) -> None:
        """Restart every environment from its next seed; write the observations into out."""
        raise NotImplementedError(f"{type(self).__name__} reseeds single environments")

    @abstractmethod
    def state_dict(self) -> dict[str, np.ndarray]:
        """The state from which every environment can be rebuilt exactly: its own state, or seed counters and the
        actions since the last seeded reset."""

    @abstractmethod
    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        """Rebuild the environments, if necessary by replaying their actions; write current observations into out.

        Args:
            state: the result of state_dict, from this process or another.
            out: as for reset.
            heartbeat: called at every replayed step, so that supervision sees progress.

        Returns:
            The number of environment steps that were replayed.
        """

    def render(self, index: int = 0) -> np.ndarray:
        """One environment's image for videos, uint8 [H, W, 3].

        Raises:
            SettingsError: the environments cannot render images.
        """
        raise SettingsError(f"{type(self).__name__} cannot render images. Use another --env.adapter for recording.")

    def examine(self) -> None:  # noqa: B027 - most shards have nothing to do
        """Compare the results of every step with the spaces from now on, instead of only those of the first steps."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and memory."""


class Adapter(ABC):
    """A library that steps environments: which ids it serves, what it can do, and how it makes a shard.

    The attributes declare which features lockstep may use. By default it may use none.
    """

    threads: ClassVar[bool] = False
    """Whether it steps a shard's environments in several threads (the layout's env_threads)."""
    processes: ClassVar[bool] = False
    """Whether child processes of a collector may step them (the layout's env_processes). The shards that it makes must
    then keep the state that lockstep.envs.gymnasium_shard.GymShard keeps."""
    decorrelates: ClassVar[bool] = False
    """Whether it can cut the first episode of each environment at a separate length (env.decorrelate)."""
    limits_episodes: ClassVar[bool] = False
    """Whether it truncates every episode after env.reseed_every steps, so that evaluations can limit their length."""
    joins: ClassVar[bool] = False
    """Whether consecutive shards may share one ShardEnv, so that one call steps them all. All environments must then be
    reseeded at the same time, and lockstep.envs.episodes.joined must be able to join the shards' states."""

    own_seeds: ClassVar[bool] = False
    """Whether environments differ even if their first seeds are equal, as can happen among 100,000 environments."""
    repeat_advice: ClassVar[str] = (
        "Take all randomness from self.np_random, which super().reset(seed=seed) seeds, and set everything else again "
        "in reset."
    )
    """What lockstep check-env tells users whose environments do not repeat their bits."""
    devices: ClassVar[bool] = False
    """Whether its environments can run on the policy's GPU. Then make takes a further argument, device (torch's name),
    and its shards return steps from ShardEnv.on_device."""

    @abstractmethod
    def ids(self) -> list[str]:
        """The ids that it serves, as users write them."""

    def find(self, env_id: str) -> str | None:
        """The canonical spelling of an id; None if the adapter does not serve it."""
        return env_id if env_id in self.ids() else None

    def games(self) -> list[str]:
        """Atari games that it serves by name, under the protocols of EnvConfig.protocol."""
        return []

    def plays_atari(self, env_id: str) -> bool:
        """Whether an id is one of these games."""
        return env_id in self.games()

    def has_levels(self, env_id: str) -> bool:
        """Whether it can draw the episodes of an id from a set of levels (env.num_levels)."""
        del env_id
        return False

    def reports(self, env_id: str) -> bool:
        """Whether the steps of an id return its metrics (env.metrics)."""
        del env_id
        return False

    def changes_options(self, env_id: str) -> bool:
        """Whether options of an id's environments can change between episodes (ShardEnv.offer)."""
        del env_id
        return False

    def own_metrics(self, config: EnvConfig) -> Names:
        """Metrics that environments with these settings always report."""
        del config
        return ()

    def needs_egl(self, env_id: str) -> bool:
        """Whether the process must have loaded EGL before the library renders images of an id."""
        del env_id
        return False

    def central_states(self, env_id: str) -> tuple[str, ...]:
        """The values of env.central_state that an id allows besides none; empty if it has one agent."""
        del env_id
        return ()

    def several_policies(self, env_id: str) -> bool:
        """Whether the agents of an id may have different policies (env.policies)."""
        del env_id
        return False

    def opponents(self, env_id: str) -> bool:
        """Whether opponents may play agents of an id (env.opponents)."""
        del env_id
        return False

    def group_size(self, config: EnvConfig) -> int:
        """The number of environments that belong together, such as the agents of a match, or one of each task."""
        del config
        return 1

    def group_rows(self, config: EnvConfig, num_envs: int) -> list[np.ndarray]:
        """The rows of each group in a shard of num_envs environments: int64 [group_size] each."""
        return np.split(np.arange(num_envs), num_envs // self.group_size(config))

    def single(self, config: EnvConfig) -> gymnasium.Env[Any, Any] | None:
        """One environment outside a shard, for its methods such as compute_reward; None if the library has none."""
        del config
        return None

    @abstractmethod
    def make(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> ShardEnv:
        """Make the environments of one shard.

        Args:
            config: resolved. Its `num_envs` counts the environments of all shards.
            seeds: derives the seed of each episode from the environment and the number of the episode.
            num_envs: environments of this shard.
            threads: the number of threads that step them, if the adapter declares `threads`.
            render: whether images will be requested.

        Raises:
            SettingsError: an option of the config is unknown or out of range.
        """


@functools.cache
def load_adapter(name: str) -> Adapter:
    """The adapter that a name or a reference refers to.

    Raises:
        SettingsError: there is no such adapter, or the class is not an Adapter.
    """
    entry = entry_of(name)
    if entry.built_in:
        module, _, cls = entry.reference.partition(":")
        return getattr(importlib.import_module(module), cls)()
    found = load_object(entry.reference)
    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise SettingsError(f"env.adapter={name}: {found!r} must be a subclass of lockstep.envs.Adapter.")
    return found()


def allocate_observation(space: gymnasium.Space[Any], leading: tuple[int, ...], arena: Arena | None = None) -> Any:
    """Allocate zeros for observations of a space, [*leading, ...]: a tensor, or a dict of tensors for a Dict space.

    Args:
        arena: provides the memory. By default, the memory is private to this process.
    """
    arena = arena or PrivateArena()
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: allocate_observation(entry, leading, arena) for key, entry in space.spaces.items()}
    assert space.shape is not None
    return arena.zeros((*leading, *space.shape), torch_type(space.dtype))
