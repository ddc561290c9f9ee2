"""Identities of recipes and small experiments.

A published run is found by its identity, so no change may alter one by accident. After an intended change,
`python tests/test_identities.py` records them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import EXPERIMENTS

from lockstep.experiment import Experiment
from lockstep.recipes import RECIPES

FILE = Path(__file__).with_name("identities.json")
MAKERS: dict[str, Callable[[], Experiment]] = {
    **{f"recipe {name}": make for name, make in RECIPES.items()},
    **{f"small {name}": make for name, make in EXPERIMENTS.items()},
}


def recorded() -> dict[str, str]:
    """Identities by the experiment's name."""
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("name", MAKERS)
def test_an_experiment_keeps_its_identity(name: str) -> None:
    assert MAKERS[name]().identity() == recorded()[name]


def test_no_recorded_experiment_has_gone() -> None:
    assert set(recorded()) == set(MAKERS)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: make().identity() for name, make in MAKERS.items()}, indent=1) + "\n")
