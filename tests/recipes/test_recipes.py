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
from lockstep.algorithms import DDPGConfig, DQNConfig
from lockstep.config.serialization import from_json, to_json
from lockstep.envs import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import QModelConfig
from lockstep.recipes import RECIPES

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
        pytest.param(name, marks=[pytest.mark.envpool] if re.search("vizdoom$|minigrid", name) else [])
        for name in RECIPES
    ],
)
def test_recipe_builds_a_model_for_its_environment(name: str) -> None:
    experiment = RECIPES[name]()
    optional = (("gymnasium_robotics", "gymnasium_robotics:"), ("mpe2", "pettingzoo/mpe2."), ("vizdoom", "vizdoom/D"))
    for package, prefix in optional:
        lacks = experiment.env.adapter != "compiled" and importlib.util.find_spec(package) is None
        if experiment.env.id.startswith(prefix) and lacks:
            pytest.skip(f"needs {package}")
    model = experiment.build_model(*spaces_of(experiment.env))
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
    text = (Path(__file__).parents[2] / "docs" / "algorithms" / "ppo.md").read_text()
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


@pytest.mark.parametrize("name", ["appo-atari", "appo-vizdoom", "appo-vizdoom-deathmatch", "appo-vizdoom-duel"])
def test_appo_has_the_settings_of_its_paper(name: str) -> None:
    """Table A.5 of arXiv:2006.11751."""
    experiment = RECIPES[name]()
    algorithm: Any = experiment.algorithm
    assert (algorithm.rollout, algorithm.epochs) == (32, 1)
    assert experiment.samples_per_iteration // algorithm.minibatches == 2048
    assert (algorithm.learning_rate, algorithm.anneal_learning_rate) == (1e-4, False)
    assert algorithm.discount == (0.995 if "vizdoom-d" in name else 0.99)
    assert (algorithm.rho_clip, algorithm.c_clip, algorithm.clip) == (1, 1, 0.1)
    assert (algorithm.entropy_coef, algorithm.max_grad_norm) == (0.003, 4)
    assert algorithm.value_coef * 0.5 == 0.5  # of the squared error: the value loss has the half already
    assert algorithm.value_clip == (0 if name == "appo-atari" else 0.2)  # the latter is not in the table
    assert (algorithm.optimizer.betas, algorithm.optimizer.eps) == ((0.9, 0.999), 1e-6)


def test_ppo_has_the_settings_of_the_pytorchrl_paper() -> None:
    """Table 1 and appendix A.3 of arXiv:2007.02622."""
    small: Any = RECIPES["ppo-atari-small"]()
    algorithm = small.algorithm
    assert (small.env.num_envs, algorithm.rollout, algorithm.epochs, algorithm.minibatches) == (8, 128, 3, 4)
    assert (algorithm.learning_rate, algorithm.clip, algorithm.discount, algorithm.gae_lambda) == (
        2.5e-4,
        0.15,
        0.99,
        0.95,
    )
    assert (algorithm.entropy_coef, algorithm.value_coef, algorithm.max_grad_norm) == (0.01, 1.0, 0.5)
    assert algorithm.anneal_learning_rate and algorithm.anneal_clip
    tower: Any = RECIPES["ppo-procgen-memory"]()
    algorithm, learners = tower.algorithm, 4
    assert (tower.env.num_envs // learners, algorithm.rollout, algorithm.epochs) == (16, 800, 2)
    assert tower.samples_per_iteration // learners // algorithm.minibatches == 1600
    assert (algorithm.clip, algorithm.discount, algorithm.gae_lambda) == (0.15, 0.99, 0.95)
    assert (algorithm.entropy_coef, algorithm.value_coef) == (0.01, 0.2)
    assert (tower.model.core, tower.model.core_size, tower.model.initialization) == ("gru", 256, "fixup")
    annealing = tower.annealings(algorithm.build())["learning_rate"]
    rates = [annealing(int(share * tower.total_steps)) for share in (0, 0.19, 0.21, 0.79, 0.81, 1)]
    assert rates == pytest.approx([4e-4, 4e-4, 1e-4, 1e-4, 2.5e-5, 2.5e-5])


TABLES = {
    "a2c-atari": ("a2c", "Settings"),
    "impala-atari": ("impala", "Settings"),
    "r2d2-atari": ("r2d2", "Settings"),
    "sac-mujoco": ("sac", "Settings"),
    "sac-pybullet-style": ("sac", "Settings"),
    "ddpg-mujoco": ("ddpg", "Settings"),
    "td3-mujoco": ("ddpg", "Settings"),
    "mpo-mujoco": ("mpo", "Settings"),
    "crossq-mujoco": ("crossq", "Settings"),
    "mpc-pendulum": ("mpc", "Settings"),
    "ppo-rnd-minigrid": ("rnd", "Settings"),
    "pqn-cartpole": ("pqn", "Settings"),
    "pqn-minatar": ("pqn", "Settings"),
    "pqn-atari": ("pqn", "Settings"),
    "dqn-atari": ("dqn", "Recipes for Atari"),
    "c51-atari": ("dqn", "Recipes for Atari"),
    "qrdqn-atari": ("dqn", "Recipes for Atari"),
    "iqn-atari": ("dqn", "Recipes for Atari"),
    "rainbow-atari": ("dqn", "Recipes for Atari"),
    "apex-atari": ("dqn", "Ape-X"),
}
"""Documents, and their sections, that have a table of a recipe's settings."""


def setting(experiment: Experiment, name: str) -> list[Any]:
    """A setting's values, by the name that tables give it."""
    algorithm, (first, _, rest) = experiment.algorithm, name.partition(".")
    holder = next(
        each for each in (algorithm, algorithm.optimizer, experiment, experiment.model) if hasattr(each, first)
    )
    value = getattr(getattr(holder, first), rest) if rest else getattr(holder, first)
    return [int(each) if each in (True, False) else each for each in (value if isinstance(value, tuple) else (value,))]


def told(cell: str) -> list[float]:
    """The numbers of a table's cell, before what explains them."""
    text = re.split(r": |→", re.sub(r"\([^)]*\)", "", cell))[0].translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    text = re.sub(r"\boff\b", "0", re.sub(r"\bon\b", "1", text.replace("10-", "1e-")))
    text = re.sub(r"([\d.e-]+) / (\d+)", lambda found: repr(float(found[1]) / float(found[2])), text)
    found = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?[Mk]?", text)
    return [float(each.replace(",", "").replace("M", "e6").replace("k", "e3")) for each in found]


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_settings_show_what_recipes_have(name: str) -> None:
    document, section = TABLES[name]
    text = (Path(__file__).parents[2] / "docs" / "algorithms" / f"{document}.md").read_text()
    lines = text.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    column, experiment, compared = header.index(f"`{name}`") if f"`{name}`" in header else 1, RECIPES[name](), 0
    for row in rows:
        names, shown = re.findall(r"`([\w.]+)`", row[0]), told(row[column])
        if not names or not row[column] or names == ["normalize"]:
            continue
        expected = [value for each in names for value in setting(experiment, each)]
        if isinstance(expected[0], str):
            assert row[column].strip("`").startswith(expected[0]), row
        elif expected != [None]:
            shown = shown * len(expected) if len(shown) == 1 else shown[: len(expected)]
            assert shown == pytest.approx(expected, rel=1e-12), row
        if names[0] == "learning_rate" and document != "rnd":
            assert experiment.algorithm.anneal_learning_rate == ("→" in row[column])
        compared += 1
    assert compared >= 7


@pytest.mark.parametrize("name", ["dqn-atari", "c51-atari", "qrdqn-atari", "iqn-atari", "rainbow-atari"])
def test_value_learners_for_atari_share_what_their_document_says(name: str) -> None:
    """An update of 32 for every 4 steps, a replay of 1M steps, and 1M steps over which ε falls."""
    experiment = RECIPES[name]()
    algorithm: Any = experiment.algorithm
    assert (algorithm.batch_size, experiment.samples_per_iteration / algorithm.updates) == (32, 4)
    assert (algorithm.replay.capacity, algorithm.epsilon_fraction * experiment.total_steps) == (1e6, 1e6)
    assert (experiment.env.protocol, experiment.model.encoder) == ("classic", "nature")  # type: ignore[attr-defined]
    assert (algorithm.discount, algorithm.anneal_learning_rate, experiment.scheme.lag) == (0.99, False, 0)
    returns = {"c51": "categorical", "qrdqn": "quantiles", "iqn": "implicit", "rainbow": "categorical"}
    assert experiment.model.returns == returns.get(name.partition("-")[0], "expected")  # type: ignore[attr-defined]


def test_rainbow_has_the_settings_of_its_paper() -> None:
    """Table 1 of arXiv:1710.02298, in steps: 80k and 32k frames are 20k steps and 2,000 updates."""
    experiment = RECIPES["rainbow-atari"]()
    algorithm, model = experiment.algorithm, experiment.model
    assert isinstance(algorithm, DQNConfig) and isinstance(model, QModelConfig)
    assert (algorithm.warmup, algorithm.target_period, algorithm.n_step) == (20_000, 2_000, 3)
    assert (algorithm.learning_rate, algorithm.optimizer.name, algorithm.optimizer.eps) == (6.25e-5, "adam", 1.5e-4)
    assert algorithm.double and (algorithm.epsilon_start, algorithm.epsilon_end) == (0, 0)
    replay = algorithm.replay
    assert (replay.prioritized, replay.alpha, replay.beta, replay.beta_end) == (True, 0.5, 0.4, 1)
    assert (model.dueling, model.noisy, model.stream_size) == (True, True, 512)
    assert (model.numbers, model.v_min, model.v_max) == (51, -10, 10)


def test_dqn_on_minatar_has_the_settings_of_its_paper() -> None:
    """arXiv:2011.14826, with updates of 128 in place of 32 and as much learned from each step."""
    experiment = RECIPES["dqn-minatar"]()
    algorithm: Any = experiment.algorithm
    assert (algorithm.batch_size, experiment.samples_per_iteration / algorithm.updates) == (128, 16)
    assert (algorithm.learning_rate, algorithm.optimizer.eps) == (2 * 2.5e-4, 0.01 / 128)
    assert (algorithm.replay.capacity, algorithm.warmup, algorithm.target_period) == (100_000, 1_000, 1_000 // 16)
    assert algorithm.epsilon_fraction * experiment.total_steps == 250_000
    assert (algorithm.epsilon_start, algorithm.epsilon_end, algorithm.n_step) == (1, 0.01, 1)


def test_hindsight_has_the_settings_that_its_document_names() -> None:
    flips, fetch = RECIPES["her-bitflip"](), RECIPES["her-fetch"]()
    dqn, ddpg = flips.algorithm, fetch.algorithm
    assert isinstance(dqn, DQNConfig) and isinstance(ddpg, DDPGConfig)
    assert (dqn.replay.hindsight, dqn.discount, dqn.learning_rate, dqn.double) == (4, 0.98, 1e-3, True)
    assert (flips.samples_per_iteration, dqn.updates, dqn.batch_size, dqn.target_period) == (256, 16, 128, 100)
    assert (dqn.replay.capacity, dqn.epsilon_start, dqn.epsilon_end, dqn.epsilon_fraction) == (200_000, 1, 0.1, 0.1)
    assert (ddpg.replay.hindsight, ddpg.discount, ddpg.learning_rate, ddpg.actor_learning_rate) == (4, 0.98, 1e-3, 1e-3)
    assert (fetch.samples_per_iteration, ddpg.updates, ddpg.batch_size) == (100, 40, 256)
    assert (ddpg.target_rate, ddpg.target_period, ddpg.noise_std) == (0.05, 40, 0.2)
    assert (ddpg.warmup, ddpg.replay.capacity, fetch.normalize.observations) == (1_000, 100_000, True)
    assert fetch.model.hidden_sizes == (256,) * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "policy", "critics", "hidden"),
    [
        ("ddpg-mujoco", "deterministic", 1, (256, 256)),
        ("td3-mujoco", "deterministic", 2, (256, 256)),
        ("sac-mujoco", "squashed", 2, (256, 256)),
        ("mpo-mujoco", "gaussian", 1, (256, 256, 256)),
        ("crossq-mujoco", "squashed", 2, (256, 256)),
    ],
)
def test_policies_and_critics_are_those_of_the_papers(
    name: str, policy: str, critics: int, hidden: tuple[int, ...]
) -> None:
    experiment = RECIPES[name]()
    model: Any = experiment.model
    assert (model.policy, model.critics, model.hidden_sizes) == (policy, critics, hidden)
    assert (model.layer_norm, model.activation) == ((True, "elu") if name == "mpo-mujoco" else (False, "relu"))
    assert experiment.total_steps == 1_000_000
    assert experiment.precision == ("fp32" if name == "crossq-mujoco" else "portable")
