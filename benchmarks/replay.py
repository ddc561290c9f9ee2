"""How fast replay of Atari frames takes steps in and gives items out, beside other libraries' replay.

    python benchmarks/replay.py [--rounds 3] [--torchrl PYTHON] [--stable-baselines3 PYTHON]

Every storage is filled with the same 84x84 stacks of four random frames, of 8 environments in rollouts of 16 steps, and
then goes on taking rollouts while minibatches of 32 items (both observations, as torch tensors) are drawn from it: each
of the two is timed by itself, in a process of its own with one thread, the storages in turn, round after round. PYTHON
is an interpreter that has the library. Ours are timed as one shard. The last column is what a million steps would take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ENVS, ROLLOUT, STACK, SIDE, BATCH, EPISODE = 8, 16, 4, 84, 32, 400
STORAGES = ("lockstep uniform", "lockstep prioritized", "lockstep sequences", "torchrl uniform", "torchrl prioritized")
STORAGES += ("sb3 uniform",)


def steps() -> Iterator[dict[str, np.ndarray]]:
    """Steps of 8 environments: obs [8, 4, 84, 84], action, reward, whether the episode ended, and what came next."""
    draw = np.random.default_rng(1)
    frames = draw.integers(0, 256, (512, SIDE, SIDE), np.uint8)
    stack, time_step = np.zeros((ENVS, STACK, SIDE, SIDE), np.uint8), 0
    while True:
        after = np.roll(stack, -1, 1)
        after[:, -1] = frames[draw.integers(0, len(frames), ENVS)]
        ended = (time_step + np.arange(ENVS) * (EPISODE // ENVS)) % EPISODE == 0
        yield {
            "obs": stack,
            "action": draw.integers(0, 6, ENVS),
            "reward": draw.random(ENVS, np.float32),
            "terminated": ended,
            "next_obs": after,
        }
        stack = after.copy()
        stack[ended, :-1] = 0
        time_step += 1


def ours(kind: str, capacity: int) -> tuple[Callable[[], None], Callable[[], Any], Callable[[], int]]:
    """Functions that insert a rollout, draw a minibatch, and tell the bytes taken."""
    from dataclasses import replace

    from lockstep import recipes
    from lockstep.storage.rollout import Rollout

    full = recipes.r2d2_atari() if kind == "sequences" else recipes.dqn_atari()
    settings: Any = full.algorithm
    memory = replace(settings.replay, capacity=capacity, prioritized=kind != "uniform")
    changes = {"burn_in": 8, "unroll": 16, "n_step": 5} if kind == "sequences" else {}
    algorithm = replace(settings, rollout=ROLLOUT, replay=memory, batch_size=BATCH, **changes)
    scheme, env = replace(full.scheme, shards=1, acting_batch=0), replace(full.env, num_envs=ENVS)
    experiment = full.replace(algorithm=algorithm, scheme=scheme, env=env)
    made: list[Any] = []
    source, draw = steps(), np.random.default_rng(2)
    none, numbers = torch.zeros(ROLLOUT + 1, ENVS, dtype=torch.bool), torch.zeros(ROLLOUT + 1, ENVS)
    rollouts = []
    last: np.ndarray | None = None
    for _ in range(8):  # taken in turn, so that making them is not timed
        taken = [next(source) for _ in range(ROLLOUT)]
        last = taken[-1]["next_obs"]
        fields = {name: torch.from_numpy(np.stack([each[name] for each in taken])) for name in taken[0]}
        rollouts.append(
            Rollout(
                obs=torch.cat([fields["obs"], torch.from_numpy(last).unsqueeze(0)]),
                start=none,
                action=fields["action"],
                reward=fields["reward"],
                prev_action=torch.zeros(ROLLOUT + 1, ENVS, dtype=torch.int64),
                prev_reward=numbers,
                log_prob=numbers[1:],
                value=numbers,
                terminated=fields["terminated"],
                truncated=none[1:],
                valid=~none[1:],
                core_state=torch.zeros(ENVS, 1024),
            )
        )
    count = 0

    def insert() -> None:
        nonlocal count
        if not made:
            made.append(algorithm.build().memory(experiment, rollouts[0]))
        made[0].insert(rollouts[count % len(rollouts)])
        count += 1

    def sample() -> Any:
        replay = made[0]
        times, environments, probability = replay.draw(BATCH, draw)
        batch = replay.batch(times, environments, probability)
        if kind != "uniform":
            replay.prioritize(times, environments, np.abs(draw.random(BATCH)))
        return batch

    return insert, sample, lambda: made[0].nbytes


def torchrl(kind: str, capacity: int) -> tuple[Callable[[], None], Callable[[], Any], Callable[[], int]]:
    """The same of TensorDictReplayBuffer in memory, which stores next observations too, as its collectors give them."""
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
    from torchrl.data import (  # pyright: ignore[reportMissingImports]
        LazyTensorStorage,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )

    storage = LazyTensorStorage(capacity)
    if kind == "uniform":
        buffer: Any = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    else:
        buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)
    source = steps()
    taken = []
    for _ in range(8):
        each = [next(source) for _ in range(ROLLOUT)]
        taken.append(
            TensorDict(
                {name: torch.from_numpy(np.concatenate([step[name] for step in each])) for name in each[0]},
                batch_size=[ROLLOUT * ENVS],
            )
        )
    count = 0

    def insert() -> None:
        nonlocal count
        buffer.extend(taken[count % len(taken)].clone(recurse=False))
        count += 1

    def sample() -> Any:
        batch = buffer.sample()
        if kind != "uniform":
            batch["td_error"] = torch.rand(BATCH)
            buffer.update_tensordict_priority(batch)
        return batch

    def taken_bytes() -> int:
        return sum(leaf.nbytes for leaf in storage._storage.values(True, True))

    return insert, sample, taken_bytes


def sb3(kind: str, capacity: int) -> tuple[Callable[[], None], Callable[[], Any], Callable[[], int]]:
    """The same of ReplayBuffer, which takes one step at a time, in its form that stores observations once."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer  # pyright: ignore[reportMissingImports]

    space = spaces.Box(0, 255, (STACK, SIDE, SIDE), np.uint8)
    buffer = ReplayBuffer(
        capacity,
        space,
        spaces.Discrete(6),
        "cpu",
        n_envs=ENVS,
        optimize_memory_usage=True,
        handle_timeout_termination=False,
    )
    source = steps()
    taken = [next(source) for _ in range(128)]
    count = 0

    def insert() -> None:
        nonlocal count
        for _ in range(ROLLOUT):
            step = taken[count % len(taken)]
            infos: list[dict[str, Any]] = [{}] * ENVS
            buffer.add(step["obs"], step["next_obs"], step["action"], step["reward"], step["terminated"], infos)
            count += 1

    def sample() -> Any:
        return buffer.sample(BATCH)

    arrays = (buffer.observations, buffer.actions, buffer.rewards, buffer.dones, buffer.timeouts)
    return insert, sample, lambda: sum(array.nbytes for array in arrays)


def measure(name: str, capacity: int, seconds: float) -> dict[str, float]:
    """Steps a second inserted and items a second drawn, and bytes for a million steps, of one storage."""
    torch.set_num_threads(1)
    library, kind = name.split()
    insert, sample, nbytes = {"lockstep": ours, "torchrl": torchrl, "sb3": sb3}[library](kind, capacity)
    for _ in range(capacity // (ROLLOUT * ENVS) + 2):
        insert()

    def rate(function: Callable[[], Any], items: int) -> float:
        function()
        begin, calls = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            function()
            calls += 1
        return calls * items / (time.perf_counter() - begin)

    inserted, drawn = rate(insert, ROLLOUT * ENVS), rate(sample, BATCH)
    return {"inserted": inserted, "drawn": drawn, "gigabytes": nbytes() / capacity * 1e6 / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capacity", type=int, default=20_000, help="steps of all environments")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--torchrl", help="an interpreter that has torchrl")
    parser.add_argument("--stable-baselines3", help="an interpreter that has stable-baselines3")
    parser.add_argument("--one", choices=STORAGES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.capacity, given.seconds)))
        return
    interpreters = {"lockstep": sys.executable, "torchrl": given.torchrl, "sb3": given.stable_baselines3}
    names = [name for name in STORAGES if interpreters[name.split()[0]]]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    root = Path(__file__).resolve().parents[1]
    for _ in range(given.rounds):
        for name in names:
            flags = ["--one", name, "--capacity", str(given.capacity), "--seconds", str(given.seconds)]
            paths = {"PYTHONPATH": str(root)} if name.startswith("lockstep") else {}
            finished = subprocess.run(
                [interpreters[name.split()[0]], __file__, *flags],
                capture_output=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **paths},
            )
            if finished.returncode:
                print(f"{name} failed: {finished.stderr.decode().strip().splitlines()[-1]}", file=sys.stderr)
                continue
            results[name].append(json.loads(finished.stdout.splitlines()[-1]))
    print("| replay | steps/s in | items/s out | GB per million steps |\n|---|---|---|---|")
    for name, rounds in results.items():
        if not rounds:
            continue
        inserted, drawn = (statistics.median(each[key] for each in rounds) for key in ("inserted", "drawn"))
        print(f"| {name} | {inserted:,.0f} | {drawn:,.0f} | {rounds[0]['gigabytes']:.1f} |")


if __name__ == "__main__":
    main()
