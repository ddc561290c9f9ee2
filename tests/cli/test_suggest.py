from __future__ import annotations

import dataclasses

import pytest

from lockstep.cli.evaluate import EvalArguments
from lockstep.cli.main import main
from lockstep.cli.share import ExportArguments
from lockstep.cli.suggest import check_flags
from lockstep.cli.train import TrainArguments
from lockstep.config.options import RunOptions
from lockstep.config.serialization import flat, to_json
from lockstep.config.settings import SettingsError
from lockstep.config.synonyms import _ROWS, meaning_of, synonyms
from lockstep.recipes import RECIPES

NAMES = [name for _, names, *_ in _ROWS for name in names.split()]


def test_synonyms_stand_for_settings_that_exist() -> None:
    known = {path for recipe in RECIPES.values() for path in flat(to_json(recipe(), whole=True))}
    for arguments in (RunOptions, TrainArguments, EvalArguments, ExportArguments):
        known |= {field.name for field in dataclasses.fields(arguments)}
    assert {setting for setting, *_ in _ROWS} - {""} <= known


@pytest.mark.parametrize("recipe", ["ppo-cartpole", "impala-atari", "dqn-cartpole", "sac-mujoco", "mpc-pendulum"])
def test_every_synonym_gets_an_answer(recipe: str) -> None:
    arguments = TrainArguments(RECIPES[recipe]())
    for name in NAMES:
        if name == "horizon" and recipe == "mpc-pendulum":
            continue
        with pytest.raises(SettingsError, match=f"no setting --{name}"):
            check_flags("train", [[f"--{name}", "1"]], arguments)


def test_what_an_algorithm_has_decides() -> None:
    assert meaning_of("ent_coef", ["algorithm.entropy_coef"])[0].setting == "algorithm.entropy_coef"
    assert meaning_of("ent_coef", ["algorithm.initial_temperature"])[0].setting == "algorithm.initial_temperature"
    assert meaning_of("algorithm.lr", ["algorithm.learning_rate"])[0].setting == "algorithm.learning_rate"
    assert meaning_of("clip-range", ["algorithm.batch_size"]) == [] != synonyms("clip-range")


@pytest.mark.parametrize(
    ("recipe", "flag", "told"),
    [
        ("appo-vizdoom", "--recurrence", "--algorithm.rollout? It is 32 by default. Gradients flow"),
        ("r2d2-atari", "--batch-T", "--algorithm.unroll?"),
        ("r2d2-atari", "--eps-final", "--algorithm.epsilon-end?"),
        ("appo-vizdoom", "--max-policy-lag", "--scheme.max-lag? It is 4 by default. It needs --scheme.lag async."),
        ("appo-vizdoom", "--async-rl", "--scheme.lag?"),
        ("appo-vizdoom", "--reward-scale", "--normalize.returns? It is"),
        ("appo-vizdoom", "--with-pbt", "lockstep sweep FOLDER RECIPE --population 8"),
        ("appo-vizdoom", "--num-policies", "lockstep sweep FOLDER RECIPE --population 8"),
        ("appo-vizdoom", "--obs-scale", "divide pixels"),
        ("ppo-cartpole", "--n-trials", "lockstep sweep FOLDER RECIPE --trials 40"),
        ("ppo-cartpole", "--config", "or from the folder of a run: lockstep train runs/a."),
        ("ppo-cartpole", "total_steps=1000", "not a flag. Flags begin with two dashes, as in --total_steps=1000 or"),
        ("ppo-cartpole", "--policy-kwargs", "--model.… determine"),
        ("ppo-cartpole", "--resume", "lockstep resume RUN continues a run"),
        ("her-bitflip", "--n-sampled-goal", "--algorithm.replay.hindsight? It is 4 by default."),
        ("dqn-cartpole", "--dataset-id", "--algorithm.replay.data? It takes"),
    ],
)
def test_names_of_other_libraries_mean(recipe: str, flag: str, told: str) -> None:
    with pytest.raises(SettingsError) as error:
        check_flags(f"train {recipe}", [[flag, "1"]], TrainArguments(RECIPES[recipe]()))
    assert told in str(error.value)


def test_steps_before_learning_are_a_warm_up_where_there_is_one() -> None:
    assert meaning_of("warmup-steps", ["algorithm.anneal", "algorithm.warmup"])[0].setting == "algorithm.warmup"
    assert meaning_of("warmup-steps", ["algorithm.anneal"])[0].setting == "algorithm.anneal"


@pytest.mark.parametrize(
    ("recipe", "flag", "told"),
    [
        ("dqn-cartpole", "--algorithm.epochs", "for this recipe. Recipes of other algorithms have it."),
        ("dqn-cartpole", "--epochs", "for this recipe, but other algorithms have --algorithm.epochs."),
        ("dqn-cartpole", "--algorithm.foo", "--help-all lists all settings"),
        ("dqn-cartpole", "--algorithm.replaycapacity", "Did you mean --algorithm.replay.capacity"),
        ("dqn-cartpole", "--algoritm.learnin-rate", "Did you mean --algorithm.learning-rate"),
        ("ppo-cartpole", "--model.gae-lamda", "Did you mean --algorithm.gae-lambda"),
    ],
)
def test_names_alike_are_suggested_whatever_their_group(recipe: str, flag: str, told: str) -> None:
    with pytest.raises(SettingsError) as error:
        check_flags(f"train {recipe}", [[flag, "1"]], TrainArguments(RECIPES[recipe]()))
    assert told in str(error.value)


def test_a_setting_of_the_users_own_is_no_synonym() -> None:
    arguments = TrainArguments(RECIPES["ppo-cartpole"]())
    for flag in (
        "--algorithm.no-anneal-clip",
        "--algorithm.optimizer.eps",
        "--no-tensorboard",
        "--layout",
        "--dry_run",
    ):
        check_flags("train", [[flag]], arguments)
    assert meaning_of("gamma", ["algorithm.gamma", "algorithm.discount"])[0].setting == "algorithm.gamma"


def test_a_default_that_is_empty_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ppo-cartpole", "--run", "x"]) == 2
    assert capsys.readouterr().err.endswith("Did you mean --warm-start.run?\n")


def test_other_verbs_know_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["eval", "--run", "runs/a"], "write runs/a alone"),
        (["eval", "runs/a", "--n-episodes", "3"], "--episodes"),
        (["check-env", "CartPole-v1", "--num-envs", "3"], "--env.num-envs"),
        (["resume", "runs/a", "--lr", "3"], "--lr would change what is learned"),
        (["bench", "ppo-cartpole", "--gamma", "0.9"], "--algorithm.discount"),
        (["sweep", "runs/s", "ppo-cartpole", "--gamma", "0.9,0.99"], "--algorithm.discount"),
        (["sweep", "runs/s", "ppo-cartpole", "--search", "gamma=0.9,0.99"], "--algorithm.discount"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err, arguments


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--env.num-envs many", ["a whole number", "many", "default is 8", "--help env.num-envs"]),
        ("--precision fp16", ["bf16, fp32 or portable", "fp16"]),
        ("--total-steps abc", ["--total-steps", "'abc' is not a whole number", "500k"]),
        ("--model.hidden-sizes 64 x", ["each a whole number", "64 x", "64 64"]),
        ("--algorithm.optimizer.betas 0.9", ["2 values", "0.9", "0.9 0.999"]),
        ("--seed 1 2", ["a whole number", "1 2"]),
        ("--seed=", ["an empty text"]),
        ("--run", ["--run takes", "none"]),
        ("--normalize.observations True", ["no value", "--normalize.no-observations"]),
        ("--env.options foo", ["--env.options", "'foo'", "name=value"]),
        ("--run -foo", ["begins with a dash", "--run=-foo"]),
    ],
)
def test_values_that_a_flag_does_not_take(
    words: str, told: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # where a box would break names
    assert main(["train", "ppo-cartpole", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert not [each for each in told if each not in said], said


def test_one_word_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/a", "runs/b"]) == 2
    assert "runs/b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "lacking"),
    [("resume --layout inline", "RUN"), ("verify --iterations 3", "RUN"), ("diff --json a", "RUN_B")],
)
def test_one_word_too_few(words: str, lacking: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert f"{words.split()[0]} lacks {lacking} (" in capsys.readouterr().err


def test_python_knows_them_too() -> None:
    for recipe, change, words in (
        ("ppo-cartpole", "algorithm.gamma", "called discount here"),
        ("ppo-cartpole", "n_steps", "called algorithm.rollout here"),
        ("ppo-cartpole", "algorithm.batch_size", "called minibatches here. Its value may differ"),
        ("dqn-cartpole", "buffer_size", "called algorithm.replay.capacity here"),
        ("dqn-cartpole", "algorithm.learning_starts", "called warmup here"),
        ("ppo-cartpole", "algorithm.learnin_rate", "Did you mean learning_rate"),
    ):
        with pytest.raises(SettingsError, match=words):
            RECIPES[recipe]().replace(**{change: 1})


def test_values_of_a_flag_with_several_kinds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo-cartpole", "--scheme.lag", "asynch", "--dry-run"]) == 2
    assert "--scheme.lag takes a whole number or async, but got asynch." in capsys.readouterr().err
    assert main(["sweep", "runs", "ppo-cartpole", "--evolution", "pbt", "--dry-run"]) == 2
    assert "--evolution takes sample-factory, but got pbt." in capsys.readouterr().err
