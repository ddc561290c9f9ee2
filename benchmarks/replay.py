"""How fast replay of Atari frames takes steps in and gives items out, beside other libraries' replay; and how fast DQN
and SAC train, beside Stable-Baselines3.

    python benchmarks/replay.py storages     # about 4 minutes; writes benchmarks/replay/storages.json and .md
    python benchmarks/replay.py dqn sac      # about 5 minutes each; dqn.json, dqn.md, sac.json, sac.md
    python benchmarks/replay.py dqn-1-shard  # and other cases: how a minibatch is shared out over two cores

storages: every one is filled with the same 84x84 stacks of four random frames, of 8 environments in rollouts of 16
steps, and then goes on taking rollouts while minibatches of 32 items (both observations, as torch tensors) are drawn
from it: each of the two is timed by itself, in a process of its own with one thread, the storages in turn, round after
round. Ours are timed as one shard, as learners use them. The last column is what a million steps take.

dqn, sac: the same task, network, minibatches and gradient steps for each environment step, in turn, as `lockstep bench
--peers` measures them. The other libraries are installed on first use. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent / "replay"
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
    from lockstep import recipes
    from lockstep.agent import Agent
    from lockstep.buffers.batches import CollectedRollout
    from lockstep.buffers.replay_batches import ReplayBatches
    from lockstep.core.rollout import Rollout, RolloutInfo

    full = recipes.r2d2_atari() if kind == "sequences" else recipes.dqn_atari()
    settings: Any = full.algorithm
    memory = replace(settings.replay, capacity=capacity, prioritized=kind != "uniform")
    changes = {"burn_in": 8, "unroll": 16, "n_step": 5} if kind == "sequences" else {}
    algorithm = replace(
        settings, rollout=ROLLOUT, replay=memory, batch_size=BATCH, updates=ROLLOUT * ENVS // 4, warmup=0, **changes
    )
    scheme, env = replace(full.scheme, shards=1, acting_batch=0), replace(full.env, num_envs=ENVS)
    agent = Agent(full.replace(algorithm=algorithm, scheme=scheme, env=env))
    source, draw, hyper = steps(), np.random.default_rng(2), agent.algorithm.hyperparameters(0.0)
    none, numbers = torch.zeros(ROLLOUT + 1, ENVS, dtype=torch.bool), torch.zeros(ROLLOUT + 1, ENVS)
    rollouts = []
    for _ in range(8):  # taken in turn, so that making them is not timed
        taken = [next(source) for _ in range(ROLLOUT)]
        fields = {name: torch.from_numpy(np.stack([each[name] for each in taken])) for name in taken[0]}
        rollouts.append(
            Rollout(
                obs=torch.cat([fields["obs"], torch.from_numpy(taken[-1]["next_obs"]).unsqueeze(0)]),
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
    batches = ReplayBatches(agent, range(1))
    inserted, drawn, updates = itertools.count(), itertools.count(), algorithm.updates

    def insert() -> None:
        number = next(inserted)
        info = RolloutInfo(0, number, number, ((0, 0),), np.zeros(0), {}, [])
        batches.begin(number, {0: [CollectedRollout(info, rollouts[number % len(rollouts)], agent.normalizers)]}, hyper)

    def sample() -> Any:
        batch = batches.slice(0, next(drawn) % updates).batch
        batches.learned(0, torch.from_numpy(draw.random(BATCH)))
        return batch

    return insert, sample, lambda: batches._replays[0].nbytes


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
    if library == "lockstep":
        from lockstep.system.malloc import keep_freed_memory

        keep_freed_memory()  # as every process of a run does
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


def storages(rounds: int, capacity: int, seconds: float) -> None:
    """Measure all storages in turn, and write the table."""
    from other_systems.installed import python_of
    from other_systems.systems import PEERS

    interpreters = {"lockstep": Path(sys.executable)}
    for library, peer in (("torchrl", PEERS["torchrl"]), ("sb3", PEERS["stable-baselines3"])):
        interpreters[library] = python_of(peer.environment, peer.requirements, print)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in STORAGES}
    skipped: dict[str, str] = {}
    root = Path(__file__).resolve().parents[1]
    for number in range(1, rounds + 1):
        for name in [each for each in STORAGES if each not in skipped]:
            flags = ["--one", name, "--capacity", str(capacity), "--seconds", str(seconds)]
            paths = {"PYTHONPATH": str(root)} if name.startswith("lockstep") else {}
            finished = subprocess.run(
                [str(interpreters[name.split()[0]]), __file__, *flags],
                capture_output=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **paths},
            )
            if finished.returncode:
                skipped[name] = finished.stderr.decode().strip().splitlines()[-1]
                print(f"{name} failed: {skipped[name]}", flush=True)
                continue
            found = json.loads(finished.stdout.splitlines()[-1])
            results[name].append(found)
            print(
                f"round {number} of {rounds}: {name} {found['inserted']:,.0f} in, {found['drawn']:,.0f} out", flush=True
            )
    lines = ["| replay | steps/s in | items/s out | GB per million steps |", "|---|---|---|---|"]
    for name, found in results.items():
        if name in skipped:
            continue
        inserted, drawn = (statistics.median(each[key] for each in found) for key in ("inserted", "drawn"))
        lines.append(f"| {name} | {inserted:,.0f} | {drawn:,.0f} | {found[0]['gigabytes']:.1f} |")
    lines += [f"\n{name} is missing: {why}" for name, why in skipped.items()]
    report = {"rounds": rounds, "capacity": capacity, "results": results, "skipped": skipped}
    write("storages", report, "\n".join(lines))


@dataclass(frozen=True)
class Case:
    """How lockstep trains a recipe on two cores. The minibatch is the same, whoever computes which part of it."""

    recipe: str
    layout: str
    shards: int = 4
    torch_threads: int = 1
    precision: str | None = None
    """Instead of the recipe's."""


CASES = {
    "dqn": Case("dqn-atari", "processes:2"),
    "dqn-portable-1-shard": Case("dqn-atari", "inline,env_threads=2", shards=1),
    "dqn-bf16": Case("dqn-atari", "processes:2", precision="bf16"),
    "dqn-2-shards": Case("dqn-atari", "processes:2", shards=2, precision="bf16"),
    "dqn-1-shard": Case("dqn-atari", "inline,env_threads=2", shards=1, torch_threads=2, precision="bf16"),
    "sac": Case("sac-mujoco", "processes:2"),
    "sac-2-shards": Case("sac-mujoco", "processes:2", shards=2),
    "sac-1-shard": Case("sac-mujoco", "inline", shards=1),
}


def against(name: str, rounds: int, seconds: float, layout: str | None) -> None:
    """Measure an algorithm beside Stable-Baselines3, and write the table."""
    from other_systems.compare import compare

    from lockstep.config.layout import Layout
    from lockstep.recipes import RECIPES

    case = CASES[name]
    experiment = RECIPES[case.recipe]()
    settings: Any = experiment.algorithm
    # Its buffer of a million stacks would not fit into this machine's memory.
    small = replace(settings, replay=replace(settings.replay, capacity=100_000))
    scheme = replace(experiment.scheme, shards=case.shards, acting_batch=0)
    precision = case.precision or experiment.precision
    found = compare(
        experiment.replace(algorithm=small, scheme=scheme, torch_threads=case.torch_threads, precision=precision),
        Layout.parse(layout or case.layout),
        ["stable-baselines3"],
        rounds=rounds,
        seconds=seconds,
        say=lambda text: print(f"{name}: {text}", flush=True),
    )
    write(name, {"rounds": rounds, **asdict(case), **found.to_json()}, found.table())


def write(name: str, report: dict[str, Any], table: str) -> None:
    """One report as JSON and as Markdown."""
    from lockstep.cli.doctor import examine

    facts, load, date = examine()["machine"], os.getloadavg()[0], time.strftime("%Y-%m-%d")
    machine = {key: facts[key] for key in ("cpu", "cores", "python")}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps({"date": date, "machine": machine, **report}, indent=1) + "\n")
    head = f"`{name}`, {machine['cpu']}, {machine['cores']} cores, load {load:.1f} at the end, {date}:"
    (FOLDER / f"{name}.md").write_text(f"{head}\n\n{table}\n")
    print(f"\n{head}\n\n{table}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="CASE", help=f"storages, {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="of each measurement: 2 of storages, 20 of training by default")
    parser.add_argument("--layout", help="lockstep's for training, instead of the case's own, which is for two cores")
    parser.add_argument("--capacity", type=int, default=20_000, help="steps of all environments in a storage")
    parser.add_argument("--one", choices=STORAGES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.capacity, given.seconds)))
    if unknown := set(given.what) - {"storages", *CASES}:
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    for name in given.what:
        if name == "storages":
            storages(given.rounds, given.capacity, given.seconds or 2.0)
        else:
            against(name, given.rounds, given.seconds or 20.0, given.layout)


if __name__ == "__main__":
    main()
