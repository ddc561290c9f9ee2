"""The experiments that the steps train: the tests' small ones, and real shapes cut to a few iterations."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from lockstep import envs, recipes
from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.training.prepare import prepare

REHEARSED = ("cartpole-lag-1", "td3")


def on_gpu(experiment: Experiment) -> Experiment:
    """The same in an arithmetic that GPUs have: in bf16 if it learns from images by the Nature CNN."""
    if experiment.precision != "portable":
        return experiment
    return experiment.replace(precision="bf16" if getattr(experiment.model, "encoder", "") == "nature" else "fp32")


def small() -> dict[str, Callable[[], Experiment]]:
    """The tests' experiments, but for those that are about portable arithmetic."""
    found: dict[str, Callable[[], Experiment]] = importlib.import_module("tiny").EXPERIMENTS  # of tests/
    return {name: make for name, make in found.items() if not name.startswith("portable")}


def _on_policy(recipe: Callable[[], Experiment], *, encoder: str, precision: str, **algorithm: Any) -> Experiment:
    full = recipe()
    changed = dataclasses.replace(full.algorithm, **algorithm)
    return full.replace(
        algorithm=changed,
        model=dataclasses.replace(full.model, encoder=encoder),
        total_steps=2 * full.env.num_envs * changed.rollout,
        precision=precision,
    )


def _replaying(recipe: Callable[[], Experiment], **algorithm: Any) -> Experiment:
    """Two iterations of learning, after those that only collect."""
    full = on_gpu(recipe())
    settings: Any = full.algorithm
    per_iteration = full.env.num_envs * settings.rollout
    changed = {"capacity": max(20_000, 4 * per_iteration), **algorithm.pop("replay", {})}
    settings = dataclasses.replace(
        settings, warmup=per_iteration, replay=dataclasses.replace(settings.replay, **changed), **algorithm
    )
    iterations = settings.build().warm_iterations(per_iteration) + 2
    return full.replace(algorithm=settings, total_steps=iterations * per_iteration)


# The rollouts are shorter than the recipes', and their minibatches fewer, so that slices have the recipes' shapes.
SHAPES: dict[str, Callable[[], Experiment]] = {
    "ppo-atari": lambda: _on_policy(
        recipes.ppo_atari, encoder="nature", precision="bf16", rollout=32, minibatches=1, epochs=2
    ),
    "impala-atari-resnet": lambda: _on_policy(recipes.impala_atari, encoder="impala", precision="bf16"),
    "ppo-atari-fp32": lambda: _on_policy(
        recipes.ppo_atari, encoder="nature", precision="fp32", rollout=32, minibatches=1, epochs=2
    ),
    "sac-mujoco": lambda: _replaying(recipes.sac_mujoco),
    "td3-mujoco": lambda: _replaying(recipes.td3_mujoco),
    "r2d2-atari": lambda: _replaying(recipes.r2d2_atari),
    "appo-atari": lambda: _on_policy(recipes.appo_atari, encoder="convnet_simple", precision="bf16"),
    "dqn-atari": lambda: _replaying(recipes.dqn_atari),
    "rainbow-atari": lambda: _replaying(recipes.rainbow_atari),
}


def usable(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The experiments whose environments this machine has, and why the others are left out."""
    found, missing = [], {}
    for name in names:
        try:
            envs.spaces(prepare(experiment(name), Layout()).env)
            found.append(name)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"[-300:]
            print(f"{name} is left out: {missing[name]}", flush=True)
    return found, missing


def experiment(name: str) -> Experiment:
    """A small experiment, or a real shape after `real:`."""
    kind, _, real = name.partition(":")
    return SHAPES[real]() if kind == "real" else on_gpu(small()[name]())
