"""HalfCheetah with small networks: lockstep beside Stable-Baselines3 and SBX (JAX), in interleaved rounds.

    python benchmarks/small_networks.py ppo|sac|td3 [--rounds 3] [--seconds 10] [--fp32]

The settings are those of lockstep's recipes on all sides. The peers step gymnasium's environments in one process, which
is their fastest way here; they are installed on first use. SAC and TD3 take one gradient step per sample, so that
samples per second are gradient steps per second. Nothing that is compiled is compiled while the time is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

from other_systems.installed import JAX, python_of
from other_systems.rounds import interleave, table
from other_systems.served import Served, rate_of

from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.launchers.auto import chosen
from lockstep.speed.trial import Trial
from lockstep.system.machine import cores

_COMMON = ("stable-baselines3==2.9.2", "gymnasium[mujoco]==1.4.0", "torch==2.13.0")
PEERS = {
    "Stable-Baselines3": ("stable-baselines3-mujoco", "stable_baselines3", _COMMON),
    "SBX": ("sbx-mujoco", "sbx", ("sbx-rl==0.28.0", *_COMMON, *JAX)),
}
"""By the name in the table: the environment's, the package's, and what is installed."""
LAYOUTS = ("inline", "processes:2")


class Case(NamedTuple):
    """What all sides train."""

    recipe: Callable[[], Experiment]
    algorithm: str
    """The name of the peers' class."""


CASES = {
    "ppo": Case(recipes.ppo_mujoco, "PPO"),
    "sac": Case(recipes.sac_mujoco, "SAC"),
    "td3": Case(recipes.td3_mujoco, "TD3"),
}


def layouts_of(experiment: Experiment) -> dict[str, Layout]:
    """How rows are called, and their layouts: the named ones, and the one that users get who name none."""
    default = chosen(Layout.parse("auto"), experiment, say=False)
    layouts = {str(layout): layout for layout in map(Layout.parse, LAYOUTS)}
    layouts.setdefault(str(default), default)
    return {f"`{name}`" + " (auto)" * (layout == default): layout for name, layout in layouts.items()}


def peer(name: str, algorithm: str, threads: int) -> Served:
    """A peer's process, installed and warm.

    Args:
        threads: for torch, or for XLA, which has one or as many as there are cores.
    """
    environment, package, requirements = PEERS[name]
    python = python_of(environment, requirements, print)
    task = {"package": package, "algorithm": algorithm, "threads": threads}
    flags = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if threads == 1 else {}
    return Served(name, python, "_small_networks.py", task, {**flags, "JAX_PLATFORMS": "cpu"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row in each round")
    parser.add_argument("--fp32", action="store_true", help="also measure lockstep in fp32, which is slow")
    given = parser.parse_args()
    case = CASES[given.case]
    rows: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:
        for precision in ("portable", "fp32") if given.fp32 else ("portable",):
            experiment = case.recipe().replace(precision=precision)
            for name, layout in layouts_of(experiment).items():
                print(f"starting lockstep, {precision}, {name} …", flush=True)
                trial = stack.enter_context(contextlib.closing(Trial(experiment, layout)))
                trial.run(0.0, iterations=2 + trial.settling)
                rows[f"lockstep, {precision}, {name}"] = lambda trial=trial: trial.run(given.seconds).rate
        for name in PEERS:
            for threads in sorted({1, cores()}):
                count = f"{threads} thread{'s' * (threads > 1)}"
                start = functools.partial(peer, name, case.algorithm, threads)
                if (rate := rate_of(f"{name}, {count}", start, given.seconds, stack)) is not None:
                    rows[f"{name}, {count}"] = rate
        found = interleave(rows, given.rounds, functools.partial(print, flush=True))
    print(f"\n{table(found, tuple(PEERS))}")


if __name__ == "__main__":
    main()
