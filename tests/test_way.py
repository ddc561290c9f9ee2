"""Few functions and files lie between an environment and the optimizer, so that a run can be read in one go."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EXPERIMENTS, options

import lockstep
from lockstep.agent import Agent
from lockstep.config.layout import Layout
from lockstep.launchers.launch import train

ROOT = f"{Path(lockstep.__file__).parent}/"
CARRIERS = {"Rollout", "RolloutBuffer", "CollectedRollout", "Batch", "Slice", "ModelOutput", "LossOutput", "Computed"}
"""Classes that hold observations, or what is computed from them."""


class Way:
    """The functions that take or return an observation, a rollout, a batch or a gradient, in the order of their first
    call. Only the second iteration counts, since the first prepares what later ones repeat. core/ is left out: its
    containers and digests say nothing about where data goes.

    Args:
        features: the size of an observation, by which arrays of observations are recognized.
        parameters: the size of the model; a gradient has at least as many numbers.
    """

    def __init__(self, features: int, parameters: int) -> None:
        self._features, self._parameters = features, parameters
        self._iterations, self._learning = 0, False
        self._called: dict[tuple[str, str, int], bool] = {}
        """By (file, function, line), in order of first call: whether data passed through it."""

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(ROOT):
            return
        place, name = code.co_filename.removeprefix(ROOT), code.co_name
        if event == "call" and place == "transport/rollouts.py" and name == "take":
            self._iterations += 1
        if self._iterations != 2 or place.startswith("core/") or name.startswith("<"):
            return
        self._learning |= place.startswith("learners/")
        if place == "models/parameters.py" and not self._learning:
            return  # weights are loaded, whose shapes may resemble those of observations
        key = place, name, code.co_firstlineno
        given = [frame.f_locals.get(x) for x in code.co_varnames[: code.co_argcount]] if event == "call" else [result]
        self._called[key] = any(map(self._carries, given)) or self._called.get(key, False)

    def _carries(self, x: Any) -> bool:
        if isinstance(x, (torch.Tensor, np.ndarray)):
            gradient = self._learning and x.ndim == 1 and x.shape[0] >= self._parameters
            return gradient or (x.ndim >= 2 and x.shape[-1] == self._features)
        if isinstance(x, dict):
            return any(map(self._carries, x.values()))
        if isinstance(x, (tuple, list)):
            return any(map(self._carries, x))
        return type(x).__name__ in CARRIERS

    def files(self) -> list[str]:
        """Where data passes through, from file to file, as far as the optimizer."""
        way: list[str] = []
        for (place, _, _), carries in self._called.items():
            if carries and way[-1:] != [place]:
                way.append(place)
            if place == "learners/optimizer.py" and carries:
                break
        return way


TORCH = {"envs/convert.py", "collectors/acting.py", "buffers/on_policy.py", "algorithms/ppo.py"}
KERNELS = {"collectors/compiled_rollout.py", "buffers/ppo_batches.py", "learners/kernel_learner.py"}


@pytest.mark.parametrize(
    ("name", "through", "moves", "most"),
    [("mujoco-normalized", TORCH, 25, 18), ("portable-pendulum", KERNELS, 15, 14)],
)
def test_an_observation_reaches_the_optimizer_in_few_moves(
    name: str, through: set[str], moves: int, most: int, tmp_path: Path
) -> None:
    experiment = EXPERIMENTS[name]()
    agent = Agent(experiment)
    assert agent.observation_space.shape is not None
    (features,) = agent.observation_space.shape
    # Compile the kernels first, so that calls of the compiler do not count.
    train(experiment, Layout.parse("inline"), options(tmp_path / "compiled"))
    way = Way(features, agent.flat.vector.numel())
    sys.setprofile(way)
    try:
        train(experiment, Layout.parse("inline"), options(tmp_path / "run"))
    finally:
        sys.setprofile(None)
    files = way.files()
    assert files[0] == "transport/rollouts.py" and files[-1] == "learners/optimizer.py"
    assert through <= set(files)
    assert len(files) - 1 <= moves, files
    assert len(set(files)) <= most, files
