from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
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
    assert experiment.scheme.shards >= min(4, experiment.env.num_envs)


def spaces_of(config: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    if config.id == "StarpilotEasy-v0":  # known by definition; creating one needs Qt, which few machines have
        return gymnasium.spaces.Box(0, 255, (3, 64, 64), np.uint8), gymnasium.spaces.Discrete(15)
    return envs.spaces(envs.resolve(config))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.envpool] if re.search("vizdoom|minigrid", name) else [])
        for name in RECIPES
    ],
)
def test_recipe_builds_a_model_for_its_environment(name: str) -> None:
    experiment = RECIPES[name]()
    for package, prefix in (("minatar", "MinAtar/"), ("gymnasium_robotics", "gymnasium_robotics:")):
        if experiment.env.id.startswith(prefix) and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
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


def test_the_table_of_ppo_shows_the_recipes_settings() -> None:
    text = (Path(__file__).parents[1] / "docs" / "algorithms" / "ppo.md").read_text()
    lines = [line for line in text.partition("## Settings")[2].partition("## ")[0].splitlines() if line.startswith("|")]
    rows = {row[0]: row[1:] for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}
    for column, name in enumerate(rows["Setting"]):
        experiment = RECIPES[name.strip("`")]()
        algorithm: Any = experiment.algorithm
        normalized = [name for name in ("observations", "returns") if getattr(experiment.normalize, name)]
        numbers = {
            "`env.num_envs` × `rollout`": [experiment.env.num_envs, algorithm.rollout],
            "`epochs` × `minibatches`": [algorithm.epochs, algorithm.minibatches],
            "`learning_rate`": [algorithm.learning_rate, *([0] if algorithm.anneal_learning_rate else [])],
            "`clip`": [algorithm.clip],
            "`value_clip`": [algorithm.value_clip],
            "`discount`, `gae_lambda`": [algorithm.discount, algorithm.gae_lambda],
            "`entropy_coef`, `value_coef`": [algorithm.entropy_coef, algorithm.value_coef],
            "`max_grad_norm`": [algorithm.max_grad_norm],
            "Adam's `eps`": [algorithm.optimizer.eps],
            "`scheme.shards`": [experiment.scheme.shards],
            "`total_steps`": [experiment.total_steps],
        }
        for row, expected in numbers.items():
            shown = re.split(" × | → |, ", rows[row][column].replace("off", "0"))
            assert [float(x.replace("M", "e6").replace("k", "e3")) for x in shown] == expected, f"{row} of {name}"
        assert rows["`normalize`"][column] == (", ".join(normalized) or "none")
        assert rows["`precision`"][column] == experiment.precision


@pytest.mark.parametrize("name", ["appo-atari", "appo-vizdoom"])
def test_appo_has_the_settings_of_its_paper(name: str) -> None:
    """Table A.5 of arXiv:2006.11751."""
    experiment = RECIPES[name]()
    algorithm: Any = experiment.algorithm
    assert (algorithm.rollout, algorithm.epochs) == (32, 1)
    assert experiment.samples_per_iteration // algorithm.minibatches == 2048
    assert (algorithm.learning_rate, algorithm.anneal_learning_rate) == (1e-4, False)
    assert (algorithm.discount, algorithm.rho_clip, algorithm.c_clip, algorithm.clip) == (0.99, 1, 1, 0.1)
    assert (algorithm.entropy_coef, algorithm.value_coef, algorithm.max_grad_norm) == (0.003, 0.5, 4)
    assert (algorithm.optimizer.betas, algorithm.optimizer.eps) == ((0.9, 0.999), 1e-6)
