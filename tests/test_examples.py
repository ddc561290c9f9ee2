"""What the documents show must work: the examples learn, on any layout alike, and the commands parse."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.main import VERBS, main
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.run import RunOptions
from lockstep.settings import load_object

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("custom_model", "custom_env", "custom_algorithm")


def short(*examples: str, iterations: int = 2) -> Experiment:
    """The first example's experiment with the other examples' own parts, cut to a few iterations."""
    experiment, *others = (load_object(f"{ROOT}/examples/{example}.py:recipe")() for example in examples)
    for example, other in zip(examples[1:], others, strict=True):
        part = example.removeprefix("custom_")
        experiment = dataclasses.replace(experiment, **{part: getattr(other, part)})
    return dataclasses.replace(experiment, total_steps=iterations * experiment.samples_per_iteration)


def train(experiment: Experiment, run: Path, layout: str) -> lockstep.Result:
    options = RunOptions(run=str(run), display="none", tensorboard=False)
    return lockstep.train(experiment, Layout.parse(layout), options)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains(example: str, tmp_path: Path) -> None:
    result = train(short(example), tmp_path / "run", "inline")
    assert result.iterations == 2
    other = train(dataclasses.replace(short(example), seed=2), tmp_path / "other", "inline")
    assert other.digest != result.digest


def test_all_examples_together_train_in_processes_as_inline(tmp_path: Path) -> None:
    experiment = short("custom_env", "custom_model", "custom_algorithm")
    digests = {train(experiment, tmp_path / layout, layout).digest for layout in ("inline", "processes:2")}
    assert len(digests) == 1


def test_the_script_computes_what_train_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = short("custom_model")
    experiment = dataclasses.replace(
        experiment,
        scheme=dataclasses.replace(experiment.scheme, lag=1),
        total_steps=4 * experiment.samples_per_iteration,
    )
    digest = load_object(f"{ROOT}/examples/script.py:run")(experiment)
    assert digest == train(experiment, tmp_path / "run", "inline").digest
    assert capsys.readouterr().out.startswith("iteration")


def commands() -> list[str]:
    """Every `lockstep …` line of the documents."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    return sorted(
        {
            line.split("  #")[0].removeprefix("$ ").strip()
            for text in texts
            for line in re.findall(r"^ *(?:\$ )?(lockstep (?!VERB).+)$", text, re.MULTILINE)
        }
    )


def test_commands_are_found() -> None:
    found = commands()
    assert len(found) > 15
    assert {command.split()[1] for command in found} >= {"train", "resume", "eval", "record", "plot", "verify", "diff"}


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, *arguments = shlex.split(command)[1:]
    assert verb in VERBS
    if verb == "train":
        given = {"my_file.py:recipe": "examples/custom_model.py:recipe", "RECIPE": "ppo-cartpole"}
        arguments = [given.get(argument, argument) for argument in arguments if argument != "--help"]
        code = main([verb, *arguments, "--dry-run"])
        said = capsys.readouterr().err
        if missing := re.search(r"needs the module (\w+), which cannot be imported", said):
            assert importlib.util.find_spec(missing[1]) is None
            pytest.skip(f"{missing[1]} is not installed")
        assert code == 0, said
    else:
        recipe = {"bench": ["ppo-cartpole"], "tune": ["ppo-cartpole"], "sweep": ["set", "ppo-cartpole"]}
        main([verb, *recipe.get(verb, []), "--help"])
        help_text = capsys.readouterr().out
        for flag in (argument for argument in arguments if argument.startswith("--")):
            assert re.search(rf"{flag.partition('=')[0]}\b", help_text), f"{verb} has no {flag}"
