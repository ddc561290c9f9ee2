"""Runs with kernels beside the same runs with torch's replaced operations."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import options

from lockstep import train
from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import Kernels
from lockstep.experiment import Experiment


def compare_ledgers(
    experiment: Experiment, folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: type[Kernels] = Kernels
) -> None:
    """Assert that these kernels compute a run, and that its ledger is the same without them."""
    assert isinstance(Agent(experiment).kernels, kernels)
    train(experiment, options=options(folder / "kernels"))
    monkeypatch.setattr(Experiment, "kernels", lambda *_: None)
    assert Agent(experiment).kernels is None
    train(experiment, options=options(folder / "torch"))
    ledgers = [(folder / run / "ledger.jsonl").read_bytes() for run in ("kernels", "torch")]
    assert ledgers[0] == ledgers[1]
