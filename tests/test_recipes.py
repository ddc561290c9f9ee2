from __future__ import annotations

import inspect
from typing import Any

import gymnasium
import numpy as np
import pytest

from lockstep import envs
from lockstep.envs import EnvConfig
from lockstep.recipes import RECIPES
from lockstep.settings import from_json, to_json

every_recipe = pytest.mark.parametrize("name", RECIPES)


@every_recipe
def test_recipe_is_valid_and_survives_json(name: str) -> None:
    experiment = RECIPES[name]()
    experiment.validate()
    assert from_json(to_json(experiment)) == experiment
    assert experiment.scheme.shards >= 4


def spaces_of(config: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    if config.id == "StarpilotEasy-v0":  # known by definition; creating one needs Qt, which few machines have
        return gymnasium.spaces.Box(0, 255, (3, 64, 64), np.uint8), gymnasium.spaces.Discrete(15)
    return envs.spaces(envs.resolve(config))


@every_recipe
def test_recipe_builds_a_model_for_its_environment(name: str) -> None:
    experiment = RECIPES[name]()
    model = experiment.model.build(
        *spaces_of(experiment.env),
        precision=experiment.precision,
        normalize_observations=experiment.normalize.observations,
        seed=experiment.seed,
    )
    assert model.distribution.num_params > 0


@every_recipe
def test_first_line_says_what_it_is(name: str) -> None:
    doc = inspect.getdoc(RECIPES[name])
    assert doc is not None
    first = doc.splitlines()[0]
    assert first.endswith(".") and len(first) <= 120


def test_atari_recipes_take_a_game() -> None:
    from lockstep.recipes import ppo_atari

    assert ppo_atari("Pong").env.id == "Pong"
