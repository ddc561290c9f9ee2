from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tiny import EXPERIMENTS, options

from lockstep.config.layout import Layout
from lockstep.launchers.launch import train
from lockstep.system.garbage import collected_afterwards, spare_what_exists


@pytest.fixture(autouse=True)
def unfrozen() -> None:
    gc.unfreeze()


def test_objects_are_spared_for_a_while() -> None:
    with collected_afterwards():
        spare_what_exists()
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_a_program_spared_itself_stays_spared() -> None:
    gc.freeze()
    try:
        with collected_afterwards():
            spare_what_exists()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_a_run_spares_objects_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spared = []
    monkeypatch.setattr("lockstep.training.writer.RunWriter.evaluate", lambda *_: spared.append(gc.get_freeze_count()))
    train(EXPERIMENTS["cartpole-8-shards"](), Layout.parse("inline"), options(tmp_path / "run"))
    assert min(spared) > 1000 and gc.get_freeze_count() == 0
