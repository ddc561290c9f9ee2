"""Memory, open files and start-up time of many environments, and the throughput of APPO with them.

    python benchmarks/environments.py cost                              # each number in a fresh process
    python benchmarks/environments.py throughput --tasks breakout       # APPO with these numbers, in turn
    python benchmarks/environments.py report                            # tables.md from what was measured

Each writes its part of benchmarks/environments/environments.json, and all tables. Memory and files do not depend on
what else the machine does; seconds and rates do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from endurance import look, of_group
from other_systems.rounds import interleave
from peers import appo_battle, appo_breakout, appo_simple_battle, ppo_cartpole
from torch import Tensor

from lockstep import envs
from lockstep.config.layout import Layout
from lockstep.core.arrays import map_structure
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.scheme import Scheme
from lockstep.speed.trial import Trial
from lockstep.system.memory import available_bytes
from lockstep.training.prepare import prepare

RESULTS = Path(__file__).parent / "environments"
NUMBERS = (20, 320, 1280, 3000)
TRAINED = (20, 320, 1280, 3072)
"""3,072 can be divided into minibatches of 2,048 samples."""
STEPS = 20
"""Steps before the look, so that all memory has been written once."""
LAYOUT = "processes:2"


def _vectors(env_id: str, num_envs: int) -> Experiment:
    """PPO on an environment of EnvPool that starts at once, in minibatches of 2,048 samples."""
    full = ppo_cartpole("envpool", Scheme(shards=2, lag=1, acting_batch=num_envs // 2))
    minibatches = max(1, num_envs * full.algorithm.rollout // 2048)
    algorithm = dataclasses.replace(full.algorithm, minibatches=minibatches)
    return full.replace(env=EnvConfig(env_id, num_envs, "envpool"), algorithm=algorithm)


TASKS = {
    "breakout": appo_breakout,
    "battle": appo_battle,
    "simple-battle": appo_simple_battle,
    "halfcheetah": partial(_vectors, "HalfCheetah-v4"),
    "cartpole": partial(_vectors, "CartPole-v1"),
}
LEFT = 5e9
"""Bytes that stay free for others: a number of environments that would need them is left out."""
CASES = {
    "CartPole, compiled": EnvConfig("CartPole-v1", adapter="compiled"),
    "CartPole, EnvPool": EnvConfig("CartPole-v1", adapter="envpool"),
    "CartPole, gymnasium": EnvConfig("CartPole-v1", adapter="gymnasium"),
    "HalfCheetah, gymnasium": EnvConfig("HalfCheetah-v4", adapter="gymnasium"),
    "HalfCheetah, EnvPool": EnvConfig("HalfCheetah-v4", adapter="envpool"),
    "Breakout, ALE": EnvConfig("Breakout", adapter="ale", protocol="machado"),
    "Breakout, EnvPool": EnvConfig("Breakout", adapter="envpool", protocol="machado"),
    "Doom's Battle": EnvConfig("vizdoom/Battle"),
}


@dataclass(frozen=True)
class Cost:
    """What environments take, beyond what one that was closed before has left."""

    number: int
    megabytes: float
    """Proportional set size of all processes: shared pages count once."""
    own_files: int
    """Open files of the process that steps them, which `ulimit -n` bounds."""
    files: int
    """Open files of all processes."""
    processes: int
    seconds: float
    """To make and reset them."""


def measure(case: str, number: int) -> Cost:
    """Make so many environments in this process, and look at it and at its children."""
    config = CASES[case]
    first, _ = _played(config, 1)  # imports the library and compiles kernels
    first.close()
    before = _look()
    shard, seconds = _played(config, number)
    after = _look()
    shard.close()
    megabytes, own_files, files, processes = (late - early for late, early in zip(after, before, strict=True))
    return Cost(number, round(megabytes, 3), int(own_files), int(files), int(processes), round(seconds, 2))


def _played(config: EnvConfig, number: int) -> tuple[envs.ShardEnv, float]:
    """Environments after a few steps, and the seconds until they were reset."""
    begin = time.perf_counter()
    shard = envs.make(config, seed=1, first_index=0, num_envs=number)
    out = map_structure(Tensor.numpy, envs.allocate_observation(shard.observation_space, (number,)))
    shard.reset(out)
    seconds = time.perf_counter() - begin
    action = np.repeat(np.asarray(shard.action_space.sample())[None], number, axis=0)
    for _ in range(STEPS):
        shard.send(action)
        shard.recv(out)
    return shard, seconds


def _look() -> tuple[float, int, int, int]:
    """MB, open files of this process and of all of its group, and the number of these."""
    processes = list(of_group(os.getpgid(0)))
    memory, _, files = look(processes)
    return memory, look([os.getpid()])[2], files, len(processes)


def costs(cases: list[str], numbers: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each number of each environment, in a fresh process."""
    for case in cases:
        each = 0.0
        for number in numbers:
            needed, free = 1.1e6 * each * number, (available_bytes() or 0) - LEFT
            if needed > free:
                yield case, {"number": number, "failed": f"needs {needed / 1e9:.0f} GB, of which {free / 1e9:.0f} free"}
                continue
            command = [sys.executable, __file__, "one", case, str(number)]
            child = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
            if child.returncode:
                yield case, {"number": number, "failed": (child.stderr.strip().splitlines() or [""])[-1]}
                continue
            found = json.loads(child.stdout.splitlines()[-1])
            each = found["megabytes"] / number
            yield case, found


def throughputs(task: str, numbers: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Training with each number of environments, in turn: samples a second, and what all of its processes take."""
    layout = Layout.parse(LAYOUT)
    found: dict[str, dict[str, Any]] = {}
    rows: dict[str, Callable[[], float]] = {}

    def rate(name: str, trial: Trial) -> float:
        reached = round(trial.run(seconds).rate, 1)
        memory, _, files = look(of_group(os.getpgid(trial._process.pid)))
        found[name] |= {"megabytes": round(memory), "files": files}
        return reached

    with contextlib.ExitStack() as stack:
        for number in numbers:
            begin = time.perf_counter()
            trial = stack.enter_context(contextlib.closing(Trial(prepare(TASKS[task](number), layout), layout)))
            trial.run(0.0)
            found[str(number)] = {"number": number, "start": round(time.perf_counter() - begin)}
            rows[str(number)] = partial(rate, str(number), trial)
        rates = interleave(rows, rounds, partial(print, task, flush=True))
    return {name: {**each, "rates": rates[name]} for name, each in found.items()}


def report(found: dict[str, Any]) -> str:
    """All tables."""
    parts = ["## Memory, open files and start, in one process and its child processes", "", _costs(found["cost"])]
    for task, rows in found.get("throughput", {}).items():
        parts += ["", f"## Training: {task}, `{LAYOUT}`", "", _throughputs(rows)]
    return "\n".join(parts) + "\n"


def _costs(cases: dict[str, Any]) -> str:
    rows = ["| environments | number | MB | MB each | open files here; of all | seconds to start |", "|" + "---|" * 6]
    for case, numbers in cases.items():
        for each in numbers.values():
            number = f"| {case} | {each['number']:,} |"
            if "failed" in each:
                rows.append(f"{number} {each['failed']} | | | |")
                continue
            megabytes, files = each["megabytes"], f"{each['own_files']:,}; {each['files']:,}"
            rows.append(
                f"{number} {megabytes:,.0f} | {megabytes / each['number']:.2f} | {files} | {each['seconds']:,.1f} |"
            )
    return "\n".join(rows)


def _throughputs(rows: dict[str, Any]) -> str:
    base = rows.get("320", next(iter(rows.values())))
    lines = [
        f"| environments | samples/s | beside {base['number']} | min to max | MB | MB each | open files |",
        "|" + "---|" * 7,
    ]
    for each in rows.values():
        ratios = [mine / other for mine, other in zip(each["rates"], base["rates"], strict=True)]
        lines.append(
            f"| {each['number']:,} | {statistics.median(each['rates']):,.0f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} | {each['megabytes']:,} "
            f"| {each['megabytes'] / each['number']:.1f} | {each['files']:,} |"
        )
    return "\n".join(lines)


def _saved(update: dict[str, Any]) -> None:
    """Put what was measured into the file, beside the rest."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "environments.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for what, tasks in update.items():
        for task, rows in tasks.items():
            results.setdefault(what, {}).setdefault(task, {}).update(rows)
    path.write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "tables.md").write_text(report(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "throughput", "report", "one"))
    parser.add_argument("given", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="of cost")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS), help="of throughput")
    parser.add_argument("--numbers", nargs="*", type=int, default=[])
    parser.add_argument("--rounds", type=int, default=2, help="of throughput")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(asdict(measure(given.given[0], int(given.given[1])))))
    elif given.what == "cost":
        for case, found in costs(given.cases, given.numbers or list(NUMBERS)):
            print(case, found, flush=True)
            _saved({"cost": {case: {str(found["number"]): found}}})
    elif given.what == "throughput":
        for task in given.tasks:
            _saved(
                {"throughput": {task: throughputs(task, given.numbers or list(TRAINED), given.rounds, given.seconds)}}
            )
    else:
        _saved({})
    return 0


if __name__ == "__main__":
    sys.exit(main())
