"""Computes how much memory replay and rollouts take before they are allocated, and chooses the device of replay."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

import gymnasium
import torch

from lockstep import envs
from lockstep.algorithms.offpolicy import off_policy
from lockstep.buffers.data_sources import data_bytes
from lockstep.buffers.replay import Replay
from lockstep.buffers.rollout_buffers import allocate
from lockstep.buffers.storage import storage_for
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.distributed.shared_memory import Arena
from lockstep.experiment import Experiment
from lockstep.models.action_spaces import make_distribution
from lockstep.system.memory import available_bytes
from lockstep.system.output import print_line

_LARGE = 4 * 2**20
"""More bytes than any step takes. If rollouts of such steps fit, nobody needs their exact size, and no environment has
to be made to compute it."""

_SHARE = 0.5
"""The largest share of a GPU's free memory that replay takes. The rest is for networks, graphs and gradients."""


@dataclass(frozen=True)
class Placing:
    """Where a learner's replay memory should be."""

    where: Literal["auto", "gpu", "cpu"] = "auto"
    """auto: on the learner's GPU if it fits there."""
    sharing: int = 1
    """Learners that compute on the same GPU."""
    free: int | None = None
    """Bytes of the GPU's memory that were free before any learner had a replay memory. None: those that are free now.
    """
    shards: int = 0
    """Shards of all learners on this machine, whose replay must fit into its memory together; 0: this learner's."""
    learners: int = 1
    """Learners on this machine."""
    tells: bool = False
    """Whether to print where replay is."""


def on_gpu(experiment: Experiment, shards: int, rollout: Rollout, device: torch.device, placing: Placing) -> bool:
    """Whether a learner's replay memory is on its GPU. This does not change the bits of a run.

    Args:
        shards: the number of the learner's shards.
        rollout: an example of the rollouts to be inserted.
        device: the learner's device.

    Raises:
        SettingsError: replay=gpu is set, but impossible.
    """
    if device.type == "cpu":
        return False
    memory, fewer = _without_memory(experiment, rollout), ""
    if placing.where == "cpu":
        reason = "because of replay=cpu"
    elif off_policy(experiment.algorithm).replay.hindsight:
        reason = "since the rewards of other goals (algorithm.replay.hindsight) are computed there"
    elif not memory.reads_on_gpu:
        reason = f"since {type(memory).__name__} does not say that a GPU may read it (reads_on_gpu)"
    else:
        needed = shards * memory.nbytes
        free = torch.cuda.mem_get_info(device)[0] if placing.free is None else placing.free
        if needed <= _SHARE * free / placing.sharing:
            if placing.tells:
                print_line(f"The replay memory of a learner, {_size(needed)}, is on its GPU", sys.stderr)
            return True
        reason = (
            f"since it takes {_size(needed)}, and replay may take half of the {_size(free)} of the GPU's memory that "
            f"are free for {placing.sharing} learner{'s' * (placing.sharing > 1)}"
        )
        fewer = ", or store fewer steps (--algorithm.replay.capacity; another result)"
    if placing.where == "gpu":
        raise SettingsError(
            f"replay=gpu: the replay memory must be on the CPU, {reason}. Leave replay= out, which gives the same "
            f"bits{fewer}."
        )
    if placing.tells:
        print_line(f"The replay memory is on the CPU, {reason}", sys.stderr)
    return False


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def replay_bytes(experiment: Experiment, rollout: Rollout | None = None) -> int:
    """Bytes that one shard's replay takes; 0 if the algorithm does not replay.

    Args:
        rollout: an example of the rollouts to be inserted. Without one, images of several channels count as stacks of
            frames, with each frame stored once (if algorithm.replay.store_frames).
    """
    if not experiment.algorithm.replays:
        return 0
    return _without_memory(experiment, rollout or _example(experiment)).nbytes


def _without_memory(experiment: Experiment, rollout: Rollout) -> Replay:
    """The storage of a shard, with tensors that have shapes but no memory."""
    with torch.device("meta"):
        return storage_for(off_policy(experiment.algorithm).build(), experiment, rollout)


def rollout_bytes(experiment: Experiment) -> int:
    """Bytes that one rollout of one shard takes, without the states of a recurrent core."""
    observation, action = envs.spaces(experiment.env)
    count = Arena()
    allocate(experiment, observation, make_distribution(action), 0, experiment.envs_per_shard, count)
    return count.size


def require_rollouts(experiment: Experiment, shards: int, held: int) -> None:
    """Raise SettingsError if the rollouts of this many shards do not fit into memory.

    Args:
        held: rollouts of a shard that exist at the same time.
    """
    available = available_bytes()
    steps = shards * held * experiment.samples_per_rollout
    if available is None or steps * _LARGE <= available:
        return
    needed = shards * held * rollout_bytes(experiment)
    if needed <= available:
        return
    scheme, share = experiment.scheme, 0.8 * available / needed
    rollout, num_envs = experiment.algorithm.rollout, experiment.env.num_envs
    smaller = []
    if rollout * share >= 1:
        smaller.append(f"--algorithm.rollout {_round(math.floor(rollout * share))}")
    if num_envs * share >= scheme.shards:
        smaller.append(f"--env.num-envs {math.floor(num_envs * share) // scheme.shards * scheme.shards}")
    if held > 1:
        smaller.append("a lower --scheme.max-lag" if scheme.lag == "async" else "a lower --scheme.lag")
    raise SettingsError(
        f"Rollouts of algorithm.rollout={rollout} steps in env.num_envs={num_envs} environments take "
        f"{needed / 1e9:.1f} GB for {shards} of {scheme.shards} shards"
        f"{f', {held} of each at a time' if held > 1 else ''} ({needed / steps / 1e3:,.1f} kB for each step), and "
        f"{available / 1e9:.1f} GB of memory are available. Collect less at a time, for example "
        f"{' or '.join(smaller) or 'with smaller observations'} (another result). Observations as uint8 take a quarter "
        "of what float32 takes."
    )


def require(experiment: Experiment, shards: int, learners: int, rollout: Rollout | None = None) -> None:
    """Raise SettingsError if the replay of this many shards of this many learners does not fit into memory."""
    needed, available = shards * replay_bytes(experiment, rollout), available_bytes()
    filling = learners * data_bytes(experiment).own
    if available is None or needed + filling <= available:
        return
    replay = off_policy(experiment.algorithm).replay
    fitting = _round(math.floor(max(0.0, 0.8 * replay.capacity * (available - filling) / needed)))
    beside = f", beside {_size(filling)} of algorithm.replay.data" if filling else ""
    smaller = f", for example --algorithm.replay.capacity {fitting} (another result)" if fitting else ""
    share = " Processes share the arrays of an uncompressed file that have the environment's types." if filling else ""
    frames = "" if replay.store_frames else " --algorithm.replay.store-frames keeps each frame of a stack once."
    raise SettingsError(
        f"Replay of algorithm.replay.capacity={replay.capacity:,} steps takes {needed / 1e9:.1f} GB for "
        f"{shards} of {experiment.scheme.shards} shards{beside}, and {available / 1e9:.1f} GB of memory are available. "
        f"Store fewer steps{smaller}.{share}{frames} "
        "Fewer environments (env.num_envs) save little: capacity counts the steps of all of them together."
    )


def _round(count: int) -> int:
    """Round down to two significant digits."""
    digits = max(0, len(str(count)) - 2)
    return count // 10**digits * 10**digits


def _example(experiment: Experiment) -> Rollout:
    """A rollout of one shard, filled with zeros."""
    observation, action = envs.spaces(experiment.env)
    steps, size = experiment.algorithm.rollout, experiment.envs_per_shard
    discrete = isinstance(action, (gymnasium.spaces.Discrete, gymnasium.spaces.MultiDiscrete))
    actions = torch.zeros(steps + 1, size, *(action.shape or ()), dtype=torch.int64 if discrete else torch.float32)
    flags, numbers = torch.zeros(steps + 1, size, dtype=torch.bool), torch.zeros(steps + 1, size)
    return Rollout(
        obs=envs.allocate_observation(observation, (steps + 1, size)),
        start=flags,
        action=actions[1:],
        reward=numbers[1:],
        prev_action=actions if experiment.model.uses_previous else None,
        prev_reward=numbers if experiment.model.uses_previous else None,
        log_prob=numbers[1:],
        value=numbers,
        terminated=flags[1:],
        truncated=flags[1:],
        valid=flags[1:],
        core_state=torch.zeros(size, 0),
    )
