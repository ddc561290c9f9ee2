"""Settings that contradict each other, or mean nothing, are refused before anything starts, by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Union

import gymnasium
import numpy as np
import pytest
from tiny import cut, options

import lockstep
from lockstep import recipes
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import flat, from_json, to_json
from lockstep.config.settings import SettingsError, check_values, parse_count, parse_options, write_option
from lockstep.config.user_code import load_object
from lockstep.envs.checking.check import check_env
from lockstep.envs.settings import EnvConfig
from lockstep.launchers.launch import resume, train
from lockstep.models.normalize import NormalizeConfig
from lockstep.recipes import RECIPES
from lockstep.training.layout_checks import check_layout
from lockstep.training.prepare import learners_here, prepare, shards_here


def changed(settings: Any, path: str, value: Any) -> Any:
    """Settings with another value at a path, as in algorithm.replay.recency."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(settings, **{name: changed(getattr(settings, name), rest, value) if rest else value})


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("dqn-cartpole", {"model.previous_action_reward": True}, "no-previous-action-reward, or the recipes r2d2"),
        ("c51-atari", {"model.numbers": 1}, "at least 2 atoms"),
        ("dqn-cartpole", {"algorithm.warmup": 99_999, "total_steps": 100_000}, "leaves no time for learning"),
        ("r2d2-atari", {"algorithm.warmup": 0, "total_steps": 5_000}, "leaves no time.*algorithm.warmup=0"),
        ("ppo-cartpole", {"env.num_envs": 1, "scheme.shards": 1, "algorithm.rollout": 4}, "one-sample minibatch"),
        ("sac-mujoco", {"algorithm.replay.recency": 0.996, "algorithm.replay.recency_least": 4}, "recency_least=4"),
        ("mpc-pendulum", {"algorithm.discount": 0.9}, "algorithm.discount has no effect with algorithm=mpc"),
        ("mpc-pendulum", {"algorithm.target_period": 10}, "algorithm.target_period has no effect"),
        ("ppo-cartpole", {"algorithm.clip": math.nan}, r"algorithm\.clip=nan must be a number"),
        ("ppo-cartpole", {"algorithm.value_clip": math.nan}, r"algorithm\.value_clip=nan must be a number"),
        ("dqn-atari", {"algorithm.learning_rate": math.inf}, r"algorithm\.learning_rate=inf must be finite"),
        ("sac-mujoco", {"algorithm.actor_learning_rate": math.inf}, r"actor_learning_rate=inf must be finite"),
        ("c51-atari", {"model.v_max": math.inf}, r"model\.v_max=inf must be finite"),
        ("ppo-atari", {"algorithm.optimizer.betas": ("a", "b")}, r"betas=\('a', 'b'\) must be a tuple"),
        ("ppo-atari", {"algorithm.optimizer.betas": (0.9,)}, r"betas=\(0.9,\) must be a tuple"),
        ("ppo-cartpole", {"scheme.gradient_lag": 100_000}, "leaves nothing to learn"),
        (
            "dqn-cartpole",
            {"scheme.gradient_lag": 12_300, "total_steps": 100_000},
            "the run has only 12256 gradient steps",
        ),
        (
            "dqn-cartpole",
            {"scheme.gradient_lag": 12_256, "total_steps": 100_000},
            "the run has only 12256 gradient steps",
        ),
        ("ppo-cartpole", {"torch_threads": 0}, "torch_threads=0 must be at least 1"),
        ("mpc-pendulum", {"normalize.clip": 5.0}, r"algorithm=mpc refuses normalize\.clip=5"),
        ("ppo-cartpole", {"env.decorrelate": 10**20}, r"env\.decorrelate=1\d* must be below 2,147,483,648"),
        ("ppo-cartpole", {"env.curriculum": {"length": math.nan}}, r"env\.curriculum\.length=nan must be a number"),
        ("ppo-mujoco", {"normalize.clip": math.nan}, r"normalize\.clip=nan must be"),
    ],
)
def test_what_means_nothing_is_refused(recipe: str, changes: dict[str, Any], words: str) -> None:
    experiment = RECIPES[recipe]()
    experiment.validate()
    if recipe == "ppo-cartpole" and "algorithm.rollout" in changes:
        changes = {**changes, "algorithm.minibatches": 4, "scheme.acting_batch": 0}
    for path, value in changes.items():
        experiment = changed(experiment, path, value)
    with pytest.raises(SettingsError, match=words):
        experiment.validate()


@pytest.mark.parametrize("recipe", ["ppo-cartpole", "a2c-atari", "impala-atari", "appo-atari"])
@pytest.mark.parametrize("of", ["dqn-cartpole", "sac-mujoco", "mpc-pendulum"])
def test_on_policy_algorithms_refuse_models_without_a_policy_to_learn(recipe: str, of: str) -> None:
    model = RECIPES[of]().model
    with pytest.raises(SettingsError, match=f"policy and a value, .*{type(model).__name__}"):
        RECIPES[recipe]().replace(model=model).validate()


def test_a_recipe_s_budget_can_be_cut_to_where_it_just_learns() -> None:
    experiment = RECIPES["dqn-cartpole"]()
    assert isinstance(experiment.algorithm, OffPolicyConfig)
    warm = experiment.algorithm.build().warm_iterations(experiment.samples_per_iteration)
    experiment.replace(total_steps=(warm + 1) * experiment.samples_per_iteration).validate()
    with pytest.raises(SettingsError, match=f"first {warm} iterations, and the run has {warm}"):
        experiment.replace(total_steps=warm * experiment.samples_per_iteration).validate()


@pytest.mark.parametrize("name", ["algorithm.max_grad_norm", "algorithm.clip", "normalize.clip"])
def test_bounds_may_be_infinite(name: str) -> None:
    changed(RECIPES["ppo-mujoco"](), name, math.inf).validate()


@pytest.mark.parametrize(
    ("text", "count"),
    [("4.1M", 4_100_000), ("2.01k", 2010), ("1.07B", 1_070_000_000), ("9007199254740993", 2**53 + 1), ("1e6", 10**6)],
)
def test_counts_are_exact(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["2.0001k", "nan", "inf", "1e400k", "", "k", "1..2"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


@dataclasses.dataclass(frozen=True)
class Unusual:
    """What users' own settings may be annotated with."""

    anything: Any = 3
    maybe: float | None = None
    either: Optional[Union[int, str]] = "x"  # noqa: UP007, UP045 - as older code writes it
    names: list = dataclasses.field(default_factory=lambda: ["a"])  # type: ignore[type-arg]
    pair: tuple[int, str] = (1, "a")
    sizes: tuple[int, ...] = (1, 2)
    nothing: tuple[()] = ()
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    path: Path = Path()
    call: Callable[[int], int] = abs


@dataclasses.dataclass(frozen=True)
class Unreadable(Unusual):
    """One annotation that cannot be read spoils all."""

    unknown: "torch.nope" = 1.0  # type: ignore[name-defined] # noqa: F821, UP037


def test_settings_of_users_own_are_checked_as_far_as_their_kinds_are_known() -> None:
    check_values(Unusual())
    check_values(Unusual(names=("a",), sizes=[1, 2], either=2, maybe=1))  # type: ignore[arg-type]
    wrong: dict[str, Any]
    for wrong in (
        {"maybe": "1"},
        {"maybe": True},
        {"sizes": (1, False)},
        {"either": 2.5},
        {"sizes": (1, "2")},
        {"sizes": 3},
        {"pair": "ab"},
    ):
        with pytest.raises(SettingsError, match=f"{next(iter(wrong))}=.* must be "):
            check_values(Unusual(**wrong))
        check_values(Unreadable(**wrong))


@dataclasses.dataclass(frozen=True)
class Lists:
    """Sequences of several kinds."""

    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    maybe: list[str] | None = None
    pairs: tuple[list[int], ...] = ()
    named: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    any_kind: list = dataclasses.field(default_factory=list)  # type: ignore[type-arg]
    both: tuple[int, list[float]] = (1, [])
    fixed: tuple[int, ...] = (1,)


def test_lists_of_users_settings_are_lists_again_in_other_processes() -> None:
    lists = Lists([3], ["a"], ([1], [2, 3]), {"x": [4]}, [5], (6, [0.5]), (7,))
    assert from_json(json.loads(json.dumps(to_json(lists)))) == lists


def test_keys_that_json_cannot_restore_are_refused() -> None:
    with pytest.raises(SettingsError, match="key 3, but keys must be texts"):
        to_json(Unusual(options={3: 1.0}))  # type: ignore[dict-item]


@pytest.mark.parametrize(("value", "wrong"), [(math.nan, "must be a number"), (math.inf, "must be finite")])
def test_numbers_in_tuples_are_checked(value: float, wrong: str) -> None:
    with pytest.raises(SettingsError, match=f"anything=.*{wrong}"):
        check_values(Unusual(anything=((1.0, value),)))


class Undecorated(NormalizeConfig):
    clip: float = 3.0


@dataclasses.dataclass(frozen=True)
class Unannotated(NormalizeConfig):
    clip = 3.0


def test_attributes_that_dataclasses_ignore_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"Undecorated declares clip, .* Write @dataclass\(frozen=True\)"):
        check_values(Undecorated())
    with pytest.raises(SettingsError, match=r"Unannotated\.clip would be ignored, .* clip: float = 3\.0"):
        check_values(Unannotated())


def test_threads_that_depend_on_the_load_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = recipes.ppo_cartpole().replace(precision="fp32")
    for value, threads, refused in (("true", 2, True), ("TRUE", 1, False), ("false", 2, False)):
        monkeypatch.setenv("OMP_DYNAMIC", value)
        with pytest.raises(SettingsError, match="Unset OMP_DYNAMIC") if refused else contextlib.nullcontext():
            prepare(experiment.replace(torch_threads=threads), Layout())


def test_options_are_read_as_what_they_look_like() -> None:
    found = parse_options(["a=3", "b=3.0", "c=-1e2", "d=True", "e=nan", "f=x=y", "g="])
    assert list(map(repr, found.values())) == ["3", "3.0", "-100.0", "True", "'nan'", "'x=y'", "''"]
    for wrong in ("a", "=3"):
        with pytest.raises(ValueError, match="name=value"):
            parse_options([wrong])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("None", None),
        ("none", "none"),
        ("[1,2]", [1, 2]),
        ("(1, 2.5)", (1, 2.5)),
        ("{'a': [True, None]}", {"a": [True, None]}),
        ("'None'", "None"),
        ('"3"', "3"),
        ("maze.txt", "maze.txt"),
        ("1,2", "1,2"),
        ("a[0]", "a[0]"),
    ],
)
def test_options_are_literals_where_they_are_some_and_words_stay_texts(text: str, value: Any) -> None:
    found = parse_options([f"x={text}"])["x"]
    assert found == value and type(found) is type(value)
    assert parse_options([f"x={write_option(found)}"]) == {"x": value}


@pytest.mark.parametrize("text", ["[1,2", "[a]", "(true,)", "'x", "{1, 2}", "{1: 2}", "[b'x']", "[1,", "(a) b"])
def test_options_that_look_like_literals_and_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"x={text}"[:4])):
        parse_options([f"x={text}"])


def test_options_are_the_same_from_python_and_from_the_command_line_and_in_every_process() -> None:
    given = {"goal": None, "sizes": [1, 2], "shape": (3, [4]), "more": {"a": (1,)}}
    base = recipes.ppo_cartpole()
    experiment = base.replace(env=dataclasses.replace(base.env, options=given))
    read = parse_options([f"{name}={value!r}" for name, value in given.items()])
    from_flags = base.replace(env=dataclasses.replace(base.env, options=read))
    for other in (
        from_flags,
        pickle.loads(pickle.dumps(experiment)),
        from_json(json.loads(json.dumps(to_json(experiment)))),
    ):
        assert repr(other.env.options) == repr(given), "lists stay lists, and tuples tuples"
        assert other.identity() == experiment.identity() and to_json(other) == to_json(experiment)
    as_before = to_json(experiment)
    as_before["env"]["options"] = {"goal": None, "sizes": [1, 2], "shape": [3, [4]], "more": {"a": [1]}}
    assert experiment.identity() == hashlib.sha256(json.dumps(as_before, sort_keys=True).encode()).hexdigest()
    assert flat(to_json(experiment))["env.options.shape"] == [3, [4]]
    for wrong in ({"a": {1: 2}}, {"a": [math.nan]}, {"a": [{1}]}):
        with pytest.raises(SettingsError, match=r"env\.options\.a"):
            dataclasses.replace(base.env, options=wrong).validate()


@pytest.mark.parametrize(
    ("layout", "variables", "shards", "learners"),
    [
        ("inline", {}, 4, 1),
        ("processes:4", {}, 4, 4),
        ("cpu:a2-l3", {}, 4, 3),
        ("torchrun", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 4, 4),
        ("torchrun", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2, 2),
        ("torchrun", {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}, 2, 1),
        ("ray:4", {}, 1, 1),
        ("ray:a4-l2", {}, 2, 1),
    ],
)
def test_memory_is_asked_for_the_shards_of_this_machine(
    layout: str, variables: dict[str, str], shards: int, learners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parsed = Layout.parse(layout)
    assert (shards_here(recipes.ppo_cartpole(), parsed), learners_here(parsed)) == (shards, learners)


@pytest.mark.parametrize(
    ("path", "value", "layout", "words"),
    [
        ("env.adapter", "gymnasium", "inline,env_threads=2", "env_threads.*env_processes=N"),
        ("env.adapter", "envpool", "inline,env_processes=2", "env_processes.*env_threads=N"),
        ("scheme.preempt", 0.5, "torchrun", "Use --layout processes:N"),
        ("scheme.gradient_lag", "async", "torchrun", "update the same parameters"),
        ("scheme.lag", "async", "processes:2", "collectors can only run freely in separate processes"),
    ],
)
def test_layouts_that_cannot_hold_an_experiment(path: str, value: Any, layout: str, words: str) -> None:
    experiment = recipes.ppo_cartpole()
    for each, fits in ((changed(experiment, path, value), False), (changed(experiment, "env.adapter", "ale"), True)):
        with contextlib.nullcontext() if fits else pytest.raises(SettingsError, match=words):
            check_layout(each, Layout.parse("inline" if fits else layout), None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 1}, r"no setting 'lr'.*algorithm\.learning_rate"),
        ({"learning_rat": 1}, r"algorithm\.learning_rate"),
        ({"num_envs": 8}, r"replace\(\*\*\{\"env\.num_envs\": \.\.\.\}\)"),
        ({"algorithm.learning_rat": 1}, r"no setting 'learning_rat'.*learning_rate"),
        ({"algoritm.learning_rate": 1}, r"no setting 'algoritm\.learning_rate'.*algorithm\.learning_rate"),
        ({"seed.first": 1}, r"no setting 'seed\.first'"),
        ({"algorithm.learning_rate": "high"}, "learning_rate='high' must be a number"),
        ({"env": int}, r"env=<class 'int'> must be of the kind EnvConfig, as EnvConfig\.of"),
        ({"zzz": 1}, "It has env, model, algorithm"),
        ({"algorithm": {"learning_rate": 0.1}}, r"algorithm=.*AlgorithmConfig.*learning_rate\": 0\.1"),
        ({"env": "CartPole-v1"}, "env='CartPole-v1' must be"),
        ({"total_steps": "1M"}, "total_steps='1M' must be a whole number"),
    ],
)
def test_replace_refuses_what_is_no_setting_and_values_of_another_kind(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        recipes.ppo_cartpole().replace(**changes)


def test_whole_numbers_and_floats_give_an_experiment_one_identity() -> None:
    whole, real = (recipes.ppo_cartpole().replace(**{"algorithm.discount": x}) for x in (1, 1.0))
    assert whole.identity() == real.identity()


def test_dotted_names_replace_parts() -> None:
    base = recipes.ppo_cartpole()
    changes: dict[str, Any] = {"algorithm.optimizer.eps": 1e-3, "algorithm.learning_rate": 0.5, "seed": 7}
    found = base.replace(**changes, **{"env.num_envs": 16})
    algorithm = dataclasses.replace(
        base.algorithm, learning_rate=0.5, optimizer=dataclasses.replace(base.algorithm.optimizer, eps=1e-3)
    )
    assert found == base.replace(algorithm=algorithm, seed=7, env=dataclasses.replace(base.env, num_envs=16))
    both = base.replace(env=EnvConfig(id="Pendulum-v1"), **{"env.num_envs": 4})
    assert both.env == EnvConfig(id="Pendulum-v1", num_envs=4)


def test_a_results_metrics_are_columns(tmp_path: Path) -> None:
    result = train(cut(recipes.ppo_cartpole), options=options(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = result.metrics()
    assert {name for line in lines for name in line} == set(found) and len(lines) == 3
    for name, column in found.items():
        np.testing.assert_array_equal(column, [np.nan if line.get(name) is None else line[name] for line in lines])


def test_dir_lists_what_the_package_offers() -> None:
    assert set(lockstep.__all__) <= set(dir(lockstep))


class Own(gymnasium.Env[Any, Any]):
    pass


def test_environments_of_ones_own_are_passed_as_classes_and_functions() -> None:
    assert EnvConfig.of(Own, num_envs=3) == EnvConfig(id=f"{__name__}:Own", num_envs=3)
    assert load_object(EnvConfig.of(test_dotted_names_replace_parts).id) is test_dotted_names_replace_parts
    make: Any
    for make, where in (
        (lambda: Own(), "inside a function"),
        (functools.partial(Own), "without a name"),
        (Own().close, "without a name"),
    ):
        with pytest.raises(SettingsError, match=f"{where}.*writefile"):
            EnvConfig.of(make)


def test_a_class_on_standard_input_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(Own, "__module__", "__main__")
    with pytest.raises(SettingsError, match=r"standard input.*writefile"):
        EnvConfig.of(Own)


@pytest.mark.parametrize("name", ["options", "curriculum"])
def test_options_of_an_environment_are_a_dict(name: str) -> None:
    value: Any
    for value in ([1], "a=1", 3, {1: 2}):
        with pytest.raises(SettingsError, match=rf"env\.{name}=.* dict"):
            changed(recipes.ppo_cartpole(), f"env.{name}", value).validate()
    changed(recipes.ppo_cartpole(), f"env.{name}", {"sizes": [1, 2], "goal": None}).validate()


def test_layouts_and_options_of_another_kind_are_refused(tmp_path: Path) -> None:
    experiment: Any = cut(recipes.ppo_cartpole)
    arguments: Any
    for arguments, words in (
        ((3,), "3 is not a layout"),
        ((Layout("processes", "2"),), "workers='2' must be a whole number"),  # type: ignore[arg-type]
        ((None, 7), "7 is neither RunOptions nor a folder"),
        ((None, RunOptions(run=3)), "run=3 must be a text"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SettingsError, match=words):
            train(experiment, *arguments)
    for stop in ("2", 0):
        with pytest.raises(SettingsError, match="stop_after"):
            train(experiment, options=options(tmp_path / "run"), stop_after=stop)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="options='x'"):
        resume(tmp_path, None, "x")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="3 is not an environment"):
        check_env(3)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    with pytest.raises(SettingsError, match=r"Give an id, .* or EnvConfig\.of\(Path\)"):
        check_env(Path)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_may_stand_for_options(kind: type, tmp_path: Path) -> None:
    assert train(cut(recipes.ppo_cartpole), "inline", kind(tmp_path / "run"), stop_after=1).run == tmp_path / "run"
