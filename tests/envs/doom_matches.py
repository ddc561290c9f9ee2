"""Small experiments of Doom's matches, and what their tests share."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import ITERATIONS, cut, options
from workers import Workers, ran_of

import lockstep
from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.run.folder import RunFolder
from lockstep.training.job import Job
from lockstep.training.prepare import prepare

needs_vizdoom = pytest.mark.skipif(importlib.util.find_spec("vizdoom") is None, reason="vizdoom is not installed")
SMALL: dict[str, Any] = {"map": "map01", "img_width": 64, "img_height": 36, "minutes": 0.016}
"""Matches of 16 steps."""


def small(recipe: Callable[[], Experiment], **more: Any) -> Experiment:
    """Three iterations of 8 steps, so that matches end with the second one."""
    env = {"num_envs": 4, "options": {**SMALL, **more}, "decorrelate": 0}
    return cut(recipe, env=env, scheme={"shards": 2})


def check_that_layouts_agree(experiment: Experiment, folder: Path, workers: Workers) -> None:
    """Assert identical bits inline, on two other layouts, and after a resumption in the middle of a match."""
    orders = {}
    for text in ("processes:2", "cpu:a1-l1"):
        layout, run = Layout.parse(text), options(folder / text)
        ready = prepare(experiment, layout)
        orders[text] = workers.start(Job(RunFolder.create(ready, layout, run), ready, layout, run))
    alone = ran_of(lockstep.train(experiment, Layout(), options(folder / "inline", checkpoint_every=ITERATIONS - 1)))
    records = RunFolder(alone.run).records()
    assert [line["frames"] for line in records] == [2 * (line["samples"] or 0) for line in records] != []
    assert {text: workers.ran(order) for text, order in orders.items()} == dict.fromkeys(orders, alone)
    shutil.copytree(folder / "inline", folder / "resumed")
    assert ran_of(lockstep.resume(folder / "resumed", checkpoint=ITERATIONS - 1)) == alone
