"""The runs of benchmarks/learning.py, as far as they can be checked without being run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.common import parse
from lockstep.cli.train import TrainArguments, load_recipe, recipe_and_flags
from lockstep.settings import load_object

PROOFS = load_object(f"{Path(__file__).parents[1] / 'benchmarks' / 'learning.py'}:PROOFS")


@pytest.mark.parametrize("name", PROOFS)
def test_the_flags_are_those_of_a_valid_experiment(name: str) -> None:
    recipe, flags = recipe_and_flags("train", PROOFS[name].flags.split())
    assert recipe is not None
    parse(TrainArguments, f"train {recipe}", flags, TrainArguments(load_recipe(recipe))).experiment.validate()
