from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import EXPERIMENTS, options

from lockstep.config.layout import Layout
from lockstep.launchers.launch import train
from lockstep.system.garbage import objects_frozen
from lockstep.training.callbacks import Progress


class Node:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.node = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_objects_are_frozen_for_a_while_and_garbage_is_not() -> None:
    garbage = weakref.ref(Node())
    with objects_frozen():
        assert gc.get_freeze_count() > 1000 and garbage() is None
    assert gc.get_freeze_count() == 0


def test_what_a_program_freezes_itself_is_left_to_it() -> None:
    gc.freeze()
    before, garbage = gc.get_freeze_count(), weakref.ref(Node())
    with objects_frozen():
        assert gc.get_freeze_count() <= before
    assert gc.get_freeze_count() > 1000
    gc.collect()
    assert garbage() is None


def test_a_run_freezes_objects_until_it_ends(tmp_path: Path) -> None:
    frozen: list[int] = []

    def follow(_: Progress) -> None:
        frozen.append(gc.get_freeze_count())

    train(EXPERIMENTS["cartpole-8-shards"](), Layout.parse("inline"), options(tmp_path / "run"), on_iteration=follow)
    assert min(frozen) > 1000 and gc.get_freeze_count() == 0
