"""How much memory replay and rollouts take, and how much there is: asked before any of it is allocated."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import gymnasium
import torch

from lockstep import envs
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.buffers.rollout_buffers import allocate
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.distributed.shared_memory import Arena
from lockstep.experiment import Experiment

_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files that limit this process, say how much it uses, and what of that are files' contents that can be given back:
version 2, version 1."""

_LARGE = 4 * 2**20
"""Bytes that no step takes: a rollout that would fit even so is not looked at, which takes an environment."""


def replay_bytes(experiment: Experiment, rollout: Rollout | None = None) -> int:
    """Bytes that one shard's replay takes; 0 where nothing is remembered.

    Args:
        rollout: an example of what will be inserted. Without one, images with several channels are taken for stacks of
            frames, of which each is kept once (if algorithm.replay.store_frames).
    """
    if not isinstance(experiment.algorithm, OffPolicyConfig):
        return 0
    rollout = rollout or _example(experiment)
    with torch.device("meta"):  # which has shapes and no memory
        return experiment.algorithm.build().memory(experiment, rollout).nbytes


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still get without swapping; None where the system does not say so."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    known = [int(lines["MemAvailable"].split()[0]) * 1024]
    for group in _groups(proc, cgroup):
        for limit, usage, statistics, cached in _CGROUPS:
            if (group / limit).is_file() and (group / usage).is_file():
                most, used = ((group / file).read_text(encoding="ascii").strip() for file in (limit, usage))
                with contextlib.suppress(OSError):
                    entries = (line.split() for line in (group / statistics).read_text(encoding="ascii").splitlines())
                    used = int(used) - sum(int(value) for name, value in entries if name == cached)
                known += [int(most) - int(used)] if most != "max" else []
    return max(0, min(known))


def _groups(proc: Path, cgroup: Path) -> list[Path]:
    """The cgroup of this process, and all that it is part of: as a job of Slurm's, or a service, it is not at the root,
    and each of them may have a limit."""
    own = Path("/")
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        own = next((Path(line.split(":", 2)[2]) for line in lines if line.startswith("0::")), own)
    return [cgroup / group.relative_to("/") for group in (own, *own.parents)]


def rollout_bytes(experiment: Experiment) -> int:
    """Bytes that one rollout of one shard takes, but for the states of a recurrent core."""
    from lockstep.models.distributions import make_distribution

    observation, action = envs.spaces(experiment.env)
    count = Arena()
    allocate(experiment, observation, make_distribution(action), 0, experiment.envs_per_shard, count)
    return count.size


def require_rollouts(experiment: Experiment, shards: int, held: int) -> None:
    """Raise SettingsError if the rollouts of so many shards do not fit into memory.

    Args:
        held: rollouts of a shard that are there at a time.
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


def require(experiment: Experiment, shards: int, rollout: Rollout | None = None) -> None:
    """Raise SettingsError if the replay of so many shards does not fit into memory."""
    needed, available = shards * replay_bytes(experiment, rollout), available_bytes()
    if available is None or needed <= available:
        return
    config = experiment.algorithm
    assert isinstance(config, OffPolicyConfig)
    fitting = math.floor(0.8 * config.replay.capacity * available / needed)
    frames = "" if config.replay.store_frames else " --algorithm.replay.store-frames keeps each frame of a stack once."
    raise SettingsError(
        f"Replay of algorithm.replay.capacity={config.replay.capacity:,} steps takes {needed / 1e9:.1f} GB for "
        f"{shards} of {experiment.scheme.shards} shards, and {available / 1e9:.1f} GB of memory are available. "
        f"Remember fewer steps, for example --algorithm.replay.capacity {_round(fitting)} (another result).{frames} "
        "Fewer environments (env.num_envs) save little: capacity counts the steps of all of them together."
    )


def _round(count: int) -> int:
    """Down to two digits."""
    digits = max(0, len(str(count)) - 2)
    return count // 10**digits * 10**digits


def _example(experiment: Experiment) -> Rollout:
    """A rollout of one shard, of zeros."""
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
