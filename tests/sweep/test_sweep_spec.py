from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import says

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.cli.sweep_flags import runs_of
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.sweep import OneOf, Run, grid
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.queue import Queue
from lockstep.sweep.user_file import from_file

ROOT = Path(__file__).resolve().parents[2]


def of_flags(*flags: str) -> list[Run]:
    return runs_of({"ppo-cartpole": recipes.ppo_cartpole()}, list(flags), "set", SweepOptions())[0]


def test_a_grid_is_every_combination_the_last_setting_fastest() -> None:
    runs = grid(recipes.ppo_cartpole(), {"algorithm.learning_rate": [1e-3, 3e-4], "seed": range(1, 4)})
    given = [(run.experiment.algorithm.learning_rate, run.experiment.seed) for run in runs]
    assert given == [(1e-3, 1), (1e-3, 2), (1e-3, 3), (3e-4, 1), (3e-4, 2), (3e-4, 3)]
    assert len({run.name for run in runs}) == 6
    assert re.fullmatch(r"CartPole-v1-ppo-learning_rate=0.0003-s2-[0-9a-f]{8}", runs[4].name)


def test_a_run_keeps_its_name_when_the_grid_grows_in_seeds() -> None:
    few, many = (grid(recipes.ppo_cartpole(), {"seed": range(n)}) for n in (2, 5))
    assert [run.name for run in few] == [run.name for run in many][:2]


def test_names_are_fit_for_files() -> None:
    experiment = recipes.ppo_cartpole()
    assert Run(experiment, label="../a b/ü*?").name.startswith("a-b-s1-")
    assert len(Run(experiment, label="x" * 1000).name) < 200


@pytest.mark.parametrize("setting", ["learning_rate", "algorithm.lerning_rate", "algorithm.clip.x"])
def test_a_grid_over_an_unknown_setting(setting: str) -> None:
    with pytest.raises(SettingsError, match=rf"{setting}: "):
        grid(recipes.ppo_cartpole(), {setting: [1]})


def test_a_number_of_several_is_named_by_its_place() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.optimizer\.betas\.2: .* It has: 0, 1\."):
        grid(recipes.ppo_cartpole(), {"algorithm.optimizer.betas.2": [0.9]})


def test_a_grid_varies_an_experiment() -> None:
    with pytest.raises(SettingsError, match=r"'ppo-cartpole' .*recipes\.ppo_cartpole\(\)"):
        grid("ppo-cartpole", {"seed": [1]})  # type: ignore[arg-type]


def test_flags_with_several_values_are_what_a_grid_is() -> None:
    flags = ("--algorithm.learning-rate", "1e-3,3e-4", "--seed=1..2,7", "--total-steps", "20k")
    settings = {"algorithm.learning_rate": [1e-3, 3e-4], "seed": [1, 2, 7], "total_steps": [20_000]}
    experiments = [run.experiment for run in of_flags(*flags)]
    assert experiments == [run.experiment for run in grid(recipes.ppo_cartpole(), settings)]


@pytest.mark.parametrize(
    ("flags", "path", "values"),
    [
        (("--model.hidden-sizes", "64", "64,128", "128"), "model.hidden_sizes", [(64, 64), (128, 128)]),
        (("--algorithm.anneal-learning-rate", "True,False"), "algorithm.anneal_learning_rate", [True, False]),
        (("--env.id", "CartPole-v1,Acrobot-v1"), "env.id", ["CartPole-v1", "Acrobot-v1"]),
        (("--env.num-envs", "8..10"), "env.num_envs", [8, 9, 10]),
        (("--env.options", "gravity=1,", "gravity=2"), "env.options", [{"gravity": 1}, {"gravity": 2}]),
        (("--env.options", "gravity=1..2"), "env.options", [{"gravity": 1}, {"gravity": 2}]),
        (
            ("--env.options", "a=x b=1,3..4"),
            "env.options",
            [{"a": "x", "b": 1}, {"a": "x", "b": 3}, {"a": "x", "b": 4}],
        ),
        (("--env.options", "a=1..2", "b=x"), "env.options", [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]),
        (("--env.options", "a=1,2", "b=3..3"), "env.options", [{"a": 1, "b": 3}, {"a": 2, "b": 3}]),
        (("--env.options", "gravity=1,2"), "env.options", [{"gravity": 1}, {"gravity": 2}]),
        (("--env.options", "a=x b=True,False"), "env.options", [{"a": "x", "b": True}, {"a": "x", "b": False}]),
        (("--env.options", "a=[1,2],[3, 4]"), "env.options", [{"a": [1, 2]}, {"a": [3, 4]}]),
        (("--env.options", "a=[1,", "2]", "b=None,1..2"), "env.options", [{"a": [1, 2], "b": b} for b in (None, 1, 2)]),
        (("--env.options", "a='x, y',z"), "env.options", [{"a": "x, y"}, {"a": "z"}]),
        (("--env.options", "a={'k': 'v=1,2'},None"), "env.options", [{"a": {"k": "v=1,2"}}, {"a": None}]),
        (("--env.options", "a=it's"), "env.options", [{"a": "it's"}]),
        (
            ("--algorithm.anneal", "learning_rate=warmup:1k,cosine"),
            "algorithm.anneal",
            [{"learning_rate": "warmup:1k,cosine"}],
        ),
        (
            ("--algorithm.anneal", "clip=0:0.2,1k:0.1", "learning_rate=linear,", "clip=linear"),
            "algorithm.anneal",
            [{"clip": "0:0.2,1k:0.1", "learning_rate": "linear"}, {"clip": "linear"}],
        ),
        (("--seed", "5"), "seed", [5]),
    ],
)
def test_values_of_every_kind(flags: tuple[str, ...], path: str, values: list[Any]) -> None:
    def setting(run: Run) -> Any:
        part, _, name = path.rpartition(".")
        return getattr(getattr(run.experiment, part) if part else run.experiment, name)

    runs = of_flags(*flags)
    assert [setting(run) for run in runs] == values
    assert len({run.name for run in runs}) == len(values)


def test_commas_of_flags_that_say_nothing_of_what_is_learned_are_their_own() -> None:
    flags = ["--layout", "processes:2,env_threads=2", "--seed", "1,2", "--slots", "3", "--checkpoint-every", "7"]
    runs, options = runs_of({"a": recipes.ppo_cartpole(), "b": recipes.dqn_cartpole()}, flags, "set", SweepOptions())
    assert [(run.layout, run.options.checkpoint_every) for run in runs] == [("processes:2,env_threads=2", 7)] * 4
    assert [run.name[:18] for run in runs] == ["a-CartPole-v1-s1-" + runs[0].experiment.identity()[0]] + [
        f"{name}-CartPole-v1-s{seed}-{run.experiment.identity()[0]}"
        for run, (name, seed) in zip(runs[1:], [("a", 2), ("b", 1), ("b", 2)])
    ]
    assert options.slots == 3


@pytest.mark.parametrize("seeds", ["1,x", "1..2,3.5"])
def test_seeds_that_are_no_numbers(seeds: str) -> None:
    with pytest.raises(SettingsError, match=r"--seed \S*(x|3\.5) "):
        of_flags("--seed", seeds)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--seed", "1,5..3,7"), r"5\.\.3 .*empty"),
        (("--seed", "1,,2"), "--seed 1,,2: "),
        (("--seed", "1,true"), "--seed true "),
        (("--algorithm.learning-rate", "1e-3,true"), "--algorithm.learning-rate .*true"),
        (("--algorithm.learning-rate", "1e-3,"), "--algorithm.learning-rate 1e-3,: "),
    ],
)
def test_lists_with_a_gap(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        of_flags(*flags)


def test_settings_that_do_nothing_in_any_run_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--algorithm.minibatches", "1", "--model.core-size", "128,256")
    of_flags(*small, "--seed", "1..2")
    assert capsys.readouterr().err.count("--model.core-size has no effect") == 1
    of_flags("--model.core", "none,gru", *small)
    assert not capsys.readouterr().err


def test_switches_may_be_repeated_and_options_of_several_flags_name_a_run() -> None:
    task = ("--env.id", "lockstep/Memory-v0", "--no-tensorboard", "--no-tensorboard")
    runs = of_flags(*task, "--env.options", "length=2,length=3", "--env.options", "symbols=4,symbols=5")
    assert [run.experiment.env.options for run in runs] == [
        {"length": length, "symbols": symbols} for length in (2, 3) for symbols in (4, 5)
    ]
    assert len({run.name.partition("-s1-")[0] for run in runs}) == 4


def test_lists_are_as_good_as_tuples() -> None:
    (a,), (b,) = (grid(recipes.ppo_cartpole(), {"model.hidden_sizes": [sizes]}) for sizes in ([8, 8], (8, 8)))
    a.validate()
    assert a.experiment.identity() == b.experiment.identity()
    runs = of_flags("--model.hidden-sizes", "64 64,128 128")
    assert [getattr(run.experiment.model, "hidden_sizes") for run in runs] == [(64, 64), (128, 128)]  # noqa: B009


def test_paths_with_spaces_are_values_of_their_own() -> None:
    runs = of_flags("--env.id", "my envs/a.py:make,my envs/b.py:make")
    assert [run.experiment.env.id for run in runs] == ["my envs/a.py:make", "my envs/b.py:make"]


@pytest.mark.parametrize("values", ["CartPole-v1", 3, [], ()])
def test_a_grid_s_values_are_a_list(values: Any) -> None:
    with pytest.raises(SettingsError, match=r"env\.id .*a list"):
        grid(recipes.ppo_cartpole(), {"env.id": values})


def test_numbers_of_numpy_are_numbers() -> None:
    runs = grid(recipes.ppo_cartpole(), {"algorithm.learning_rate": np.geomspace(1e-4, 1e-3, 2), "seed": np.arange(2)})
    for run in runs:
        run.validate()
    assert len({run.name for run in runs}) == 4
    assert OneOf(tuple(np.arange(2))) == OneOf((0, 1))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"algorithm.learning_rate": ["1e-3"]}, "algorithm.learning_rate='1e-3' .*number"),
        ({"total_steps": ["5k"]}, "total_steps='5k' .*whole number"),
        ({"seed": [1.5]}, "seed=1.5 .*whole number"),
        ({"seed": ["1"]}, "seed='1' .*whole number"),
        ({"seed": [10**22]}, r"seed=10{22} "),
        ({"precision": ["fp8"]}, "precision='fp8' .*'bf16' or 'fp32'"),
        ({"model.hidden_sizes": [(64, "x")]}, "model.hidden_sizes=.*tuple.*whole number"),
        ({"algorithm.anneal_learning_rate": [1]}, "algorithm.anneal_learning_rate=1 .*True or False"),
        ({"algorithm.learning_rate": [float("nan")]}, "algorithm.learning_rate=nan .*number"),
        ({"algorithm": [3]}, "algorithm"),
    ],
)
def test_values_of_the_wrong_kind_are_found_before_anything_runs(settings: Any, complaint: str) -> None:
    (run,) = grid(recipes.ppo_cartpole(), settings)
    with pytest.raises(SettingsError, match=complaint):
        run.validate()


def test_an_empty_range() -> None:
    with pytest.raises(SettingsError, match=r"--seed 5\.\.1: .*empty"):
        of_flags("--seed", "5..1")


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (Run(recipes.ppo_cartpole(), layout="proceses:2"), "proceses:2"),
        (Run(recipes.ppo_cartpole(), layout="torchrun"), "torchrun.*processes:N"),
        (Run(recipes.ppo_cartpole(), layout="processes:8"), "processes:8 .*scheme.shards="),
        (Run(recipes.ppo_cartpole(), options=RunOptions(run="here")), "--run here "),
        (Run(recipes.ppo_cartpole(), options=RunOptions(checkpoint_every=0)), "--checkpoint-every 0 "),
        (Run(recipes.ppo_cartpole().replace(total_steps=0)), "total_steps=0"),
        (Run("ppo-cartpole"), "takes an? Experiment"),  # type: ignore[arg-type]
        (Run(recipes.ppo_cartpole(), options=None), "options=None"),  # type: ignore[arg-type]
        (Run(recipes.ppo_cartpole(), options=RunOptions(eval_every="5")), "eval_every='5'"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_found_before_anything_runs(run: Run, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        run.validate()


FILE = """
from lockstep import recipes
from lockstep.sweep import OneOf, Run, grid

EXPERIMENT = recipes.ppo_cartpole()
LIST = [EXPERIMENT, Run(EXPERIMENT.replace(seed=2))]
NUMBER = 3
EMPTY = []

def runs():
    return grid(EXPERIMENT, {"seed": range(4)})

def recipe():
    return EXPERIMENT
"""


def test_a_file_gives_runs_or_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(FILE)

    def given(name: str) -> Any:
        return from_file(f"{tmp_path}/file.py:{name}")

    assert [run.experiment.seed for run in given("runs")] == [0, 1, 2, 3]
    assert [run.experiment.seed for run in given("LIST")] == [1, 2]
    assert given("EXPERIMENT") == given("recipe") == recipes.ppo_cartpole()
    with pytest.raises(SettingsError, match=r"NUMBER gives a int\b.* list"):
        given("NUMBER")
    with pytest.raises(SettingsError, match="EMPTY"):
        given("EMPTY")


def test_the_documented_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n# proof.py\n(.*?)```", (ROOT / "docs/sweep.md").read_text(), re.DOTALL)
    Path("proof.py").write_text(code)
    assert main(["sweep", "runs/proof", "proof.py:runs", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 2 * 3 + 10 + 1
    assert all(line.startswith("waiting") for line in lines)
    assert not Path("runs").exists(), "a dry run creates nothing"


def error(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed to standard error, as one line."""
    return " ".join(capsys.readouterr().err.split())


def test_recipes_of_several_files_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.py").write_text(FILE)
    file = f"{tmp_path}/file.py"
    command = ["sweep", str(tmp_path / "set")]
    assert main([*command, f"dqn-cartpole,{file}:recipe", "--seed", "1,2", "--dry-run"]) == 0
    assert [line.split()[-1][:6] for line in capsys.readouterr().out.splitlines()] == ["dqn-ca"] * 2 + ["recipe"] * 2
    assert main([*command, f"{file}:recipe,dqn-cartpole", "--dry-run"]) == 0
    assert [line.split()[-1][:6] for line in capsys.readouterr().out.splitlines()] == ["recipe", "dqn-ca"]
    assert main([*command, f"{file}:recipe,{file}:runs", "--dry-run"]) == 2
    assert says(error(capsys), "file.py:runs", "not a recipe", "list of runs")
    assert main([*command, "ppo-cartpole,,dqn-cartpole", "--dry-run"]) == 2
    assert says(error(capsys), "recipe", "comma")
    assert main([*command, "ppo-cartpole", f"{file}:runs", "--dry-run"]) == 2
    assert says(error(capsys), "file.py:runs", "ppo-cartpole", "commas")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ("--seed", "1-3"),
            ("--seed 1-3", "several values", "1..3"),
        ),
        (("--algorithm.learning-rate", "1e-3", "3e-4"), ("--algorithm.learning-rate 1e-3 3e-4", "several values")),
        (("--seeds", "1..3"), ("no setting --seeds", "--seed ")),
        (
            ("--search", "algorithm.learning_ratee=1,2"),
            ("no setting --algorithm.learning_ratee", "--algorithm.learning-rate"),
        ),
        (
            ("--algorithm.lr", "1e-3,3e-4"),
            ("no setting --algorithm.lr", "--algorithm.learning-rate"),
        ),
    ],
)
def test_flags_of_recipes_that_cannot_be_read(
    flags: tuple[str, ...], complaint: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(tmp_path / "set"), "ppo-cartpole", *flags, "--dry-run"]) == 2
    assert says(error(capsys), *complaint)


def test_flags_that_are_right_get_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("--model.hidden-sizes", "64", "64")
    assert main(["sweep", "dr", "ppo-cartpole", *sizes, "--dry-run"]) == 0, "dr is no initials of --dry-run"
    assert main(["sweep", "dr", "ppo-cartpole", *sizes, "--total-steps", "1e", "--dry-run"]) == 2
    assert "several values" not in capsys.readouterr().err
    assert main(["sweep", "dr", "--seed", "1..3", "ppo-cartpole"]) == 2
    assert says(error(capsys), "lockstep sweep FOLDER ppo-cartpole --seed")
    assert main(["sweep", "dr", "--seed", "1", "--help"]) == 0


@pytest.mark.parametrize("flag", ["--seed", "--algorithm.learning_rate", "--no-tensorboard", "--layout"])
def test_flags_of_recipes_without_a_recipe(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.py").write_text(FILE)
    command = ["sweep", str(tmp_path / "set")]
    assert main([*command, f"{tmp_path}/file.py:runs", f"{flag}=1"]) == 2
    assert says(error(capsys), f"{flag} is for recipes", "file.py:runs")
    assert main([*command, flag, "1"]) == 2
    assert says(error(capsys), flag, "folder")


def test_status_adds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", str(tmp_path / "set"), "ppo-cartpole"]
    assert main([*command, "--status"]) == 2
    assert says(error(capsys), "set does not exist")
    Queue.make(tmp_path / "set").add(of_flags("--seed", "1"))
    assert main([*command, "--seed", "1..3", "--status"]) == 0
    assert main([*command, "--search", "algorithm.epochs=1..2", "--population", "4", "--status"]) == 2
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1 and "-s1-" in shown.out
    assert "--population is for populations" in shown.err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--trials", "5"), ("--trials", "searches")),
        (("--objective", "score/meen"), ("--objective", "searches")),
        (("--slurm-options", "mem=1GB"), ("--slurm-options", "Slurm")),
        (("--retry-failed",), ("--retry-failed", "--status and --dry-run")),
    ],
)
def test_options_that_would_do_nothing(
    flags: tuple[str, ...], complaint: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(tmp_path / "set"), "ppo-cartpole", *flags, "--dry-run"]) == 2
    assert says(error(capsys), *complaint)


def test_a_sweep_keeps_its_options_wherever_flags_stand(tmp_path: Path) -> None:
    queue = Queue.make(tmp_path / "set")
    kept = {"slots": 1, "runs_per_gpu": 1, "stop_early": "20@1M"}
    (queue.folder / "sweep.json").write_text(json.dumps(kept))
    assert main(["sweep", "--retry-failed", str(queue.folder)]) == 0
    assert json.loads((queue.folder / "sweep.json").read_text()) == kept
