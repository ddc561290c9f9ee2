"""What recipes launch on a GPU, counted on the simulated one: a Markdown table.

python tests/simulated_counts.py [RECIPE ...]

Each recipe has 8 environments in 4 shards and small minibatches, which change no count but the number of slices. All
else, the networks and the lengths of R2D2's sequences included, is the recipe's.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from simulated_books import BACK, COPY, KERNEL, LAUNCH, PAGEABLE, PEER, PINNED, STAGED, SYNC, Counts
from simulated_gpu import HotPath, faults, hot_path, simulated
from tiny import options

from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train

_ENVS, _ITERATIONS = 8, 6


def small(experiment: Experiment, algorithm: dict[str, Any], **changes: Any) -> Experiment:
    """A recipe with few environments and iterations."""
    learning = dataclasses.replace(experiment.algorithm, **algorithm)
    steps = _ITERATIONS * learning.rollout * _ENVS
    env = dataclasses.replace(experiment.env, num_envs=_ENVS)
    scheme = dataclasses.replace(experiment.scheme, shards=4, acting_batch=0)
    return experiment.replace(env=env, scheme=scheme, algorithm=learning, total_steps=steps, **changes)


def replaying(experiment: Experiment, iterations: int, **algorithm: Any) -> Experiment:
    """The same for one that learns from replay, after this many iterations."""
    full: Any = experiment.algorithm
    replay = dataclasses.replace(full.replay, capacity=_ENVS * 400)
    rollout = algorithm.get("rollout", full.rollout)
    settings = {"batch_size": 8, "updates": 2, "replay": replay, "warmup": iterations * rollout * _ENVS, **algorithm}
    # Then come one without graphs, one that captures gradients, one that captures updates, and one that is counted.
    steps = (iterations + 4) * rollout * _ENVS
    return small(experiment, settings).replace(total_steps=steps)


ON_POLICY = {"rollout": 8, "minibatches": 2}
RECIPES: dict[str, Callable[[], Experiment]] = {
    "ppo-atari": lambda: small(recipes.ppo_atari(), {**ON_POLICY, "epochs": 2}),
    "impala-atari, ResNet": lambda: small(recipes.impala_atari().replace(**{"model.encoder": "impala"}), ON_POLICY),
    "appo-atari": lambda: small(recipes.appo_atari(), ON_POLICY),
    "dqn-atari": lambda: replaying(recipes.dqn_atari().replace(precision="bf16"), 3),
    "rainbow-atari": lambda: replaying(recipes.rainbow_atari().replace(precision="bf16"), 3),
    "sac-mujoco": lambda: replaying(recipes.sac_mujoco().replace(precision="fp32"), 2, rollout=8),
    "r2d2-atari": lambda: replaying(recipes.r2d2_atari(), 4),
}
LAYOUTS = ("inline,device=0", "inline,device=0,graphs=1")


def text(counts: Counts) -> str:
    """Kernels and graphs launched, copies, waits."""
    copies = sum(counts[kind] for kind in (COPY, PEER, PINNED, PAGEABLE, STAGED, BACK))
    return f"{counts[KERNEL] + counts[LAUNCH]:,}, {copies:,}, {counts[SYNC]:,}"


def counted(experiment: Experiment, layout: str) -> HotPath:
    """What it launches there."""
    with simulated(), tempfile.TemporaryDirectory() as folder:
        hot = hot_path(lambda: train(experiment, Layout.parse(layout), options(Path(folder) / "run")))
        assert not faults(), faults()
    return hot


def main(names: Sequence[str]) -> None:
    """Prints the table, row by row."""
    torch.set_num_threads(1)
    print("| launched, copies, waits | layout | acting, a step | gradients of a step | an iteration |")
    print("|---|---|---|---|---|")
    for name in names or RECIPES:
        for layout in LAYOUTS:
            hot = counted(RECIPES[name](), layout)
            cells = (text(hot.acting[-1]), text(hot.gradients[-1]), text(hot.iterations[-1]))
            print("|", " | ".join([f"`{name}`", f"`{layout}`", *cells]), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
