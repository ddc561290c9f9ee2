from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import help
from lockstep.cli.common import parse
from lockstep.cli.main import main
from lockstep.cli.sweep_arguments import SweepArguments
from lockstep.cli.train import TrainArguments
from lockstep.config.settings import SettingsError
from lockstep.recipes import RECIPES

Captured = pytest.CaptureFixture[str]
VERBS = (
    ["train", "ppo-cartpole"],
    ["bench", "dqn-cartpole"],
    ["tune", "ppo-cartpole"],
    ["submit", "ppo-cartpole"],
    ["sweep", "runs/set", "ppo-cartpole"],
    ["sweep"],
    ["eval"],
    ["export"],
    ["resume"],
    ["compare"],
    ["train"],
    [],
)


def printed(capsys: Captured, *arguments: str) -> list[str]:
    assert main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def broken_in_between(lines: list[str], width: int) -> list[str]:
    """Lines that end before the column does, though the next word would have had room."""
    found = []
    for line, following in itertools.pairwise(lines):
        indent = len(following) - len(following.lstrip())
        column = re.search(r"  (?=\S+(?: \S+)*$)", line)  # where the text of this line begins
        begin = column.end() if column else 0
        if following.strip() and indent >= 6 and indent == begin:
            word = following.split()[0]
            found += [line] if len(line) + 1 + len(word) <= width else []
    return found


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", VERBS, ids=" ".join)
def test_columns_hold(command: list[str], width: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for flag in ("--help", "--help-all") if command not in ([], ["train"]) else ("--help",):
        lines = printed(capsys, *command, flag)
        assert max(map(len, lines)) <= width
        assert not broken_in_between(lines, width)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_matters_first_is_one_line_each(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = TrainArguments(RECIPES[recipe]())
    lines = help.text(f"train {recipe}", ["--help"], arguments).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("The most important flags"))
    first = lines[begin + 1 : lines.index("", begin)]
    assert 17 <= len(first) <= 25 and all(line.startswith("  --") for line in first) and len(lines) <= 45
    assert first[0].startswith("  --env.id ") and arguments.experiment.env.id[-20:] in first[0]
    for flag in ("--total-steps", "--seed", "--run", "--layout", "--algorithm.learning-rate"):
        assert any(line.startswith(f"  {flag} ") for line in first)


@pytest.mark.parametrize("recipe", ["ppo-cartpole", "appo-atari", "rainbow-atari", "sac-mujoco", "mpc-pendulum"])
def test_all_flags_that_help_names_exist(recipe: str) -> None:
    arguments = TrainArguments(RECIPES[recipe]())
    flags = []
    for row in help.rows(arguments):
        if not isinstance(row.default, (bool, dict)) and row.given:
            flags += [f"--{row.path}", *row.given.split()]
        flags += [row.left.rpartition(", ")[2]] if row.default is True else []
    found = parse(TrainArguments, "train", [flag for flag in flags if "no-" not in flag], arguments)
    assert found == arguments
    switched = parse(TrainArguments, "train", [flag for flag in flags if "no-" in flag], arguments)
    assert dataclasses.asdict(switched) != dataclasses.asdict(arguments)
    assert all(row.text for row in help.rows(arguments)), "every flag is explained"


def test_a_group_a_part_and_a_name(capsys: Captured) -> None:
    def flags(*arguments: str) -> list[str]:
        lines = printed(capsys, "train", "sac-mujoco", *arguments)
        return [line.split()[0].rstrip(",") for line in lines if line.startswith("  --")]

    assert {flag.partition(".")[0] for flag in flags("--help", "algorithm")} == {"--algorithm"}
    assert "--algorithm.replay.capacity" in flags("--help=algorithm.replay")
    assert flags("-h", "capacity") == ["--algorithm.replay.capacity"]
    assert flags("--help", "gamma") == ["--algorithm.discount"]
    assert "--checkpoint-every" in flags("--help", "run") and "--warm-start.run" not in flags("--help", "run")
    everything = flags("--help-all")
    assert {"--seed", "--layout", "--run", "--env.id", "--algorithm.replay.alpha"} <= set(everything)
    assert main(["train", "sac-mujoco", "--help", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_help_of_small_verbs_needs_no_torch() -> None:
    code = (
        "import sys; from lockstep.cli.main import main\n"
        "for verb in ('eval', 'record', 'export', 'sweep', 'recipes'): assert main([verb, '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_flags_that_do_not_exist_are_refused(capsys: Captured) -> None:
    for arguments, words in (
        (["train", "ppo-cartpole", "--seeds", "3"], "--seed INT"),
        (["train", "ppo-cartpole", "--nonsense", "3"], "--help-all"),
        (["eval"], "eval lacks RUN"),
        (["eval", "--json"], "eval lacks RUN"),
        (["diff", "--json"], "diff lacks RUN_A and RUN_B"),
        (["diff", "a", "--json"], "diff lacks RUN_B (The folder of the other)"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error, arguments


@pytest.mark.parametrize("command", [verb for verb in VERBS if verb not in ([], ["train"])], ids=" ".join)
def test_texts_end_with_a_sentence_and_then_the_default(
    command: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for flag in ("--help", "--help-all"):
        told = "\n".join(printed(capsys, *command, flag))
        listed = told.partition("The most important flags")
        about = (listed[2].partition("\n\n")[2] or listed[0]).split("\n  --")[1:]
        for each in about:
            assert re.search(r"[^.]\.( \(default: [^()]*\))?$", " ".join(each.partition("\n\n")[0].split())), each


def test_a_default_that_depends_on_others_is_shown_last(capsys: Captured) -> None:
    told = " ".join(" ".join(printed(capsys, "verify", "--help")).split())
    assert "Iterations to repeat, or all. More prove more but take longer. (default: 3)" in told
    told = " ".join(" ".join(printed(capsys, "sweep", "--help")).split())
    assert "Trials of a search. (default: 20, or as before)" in told, "only the first of several sentences"


def test_texts_are_those_of_the_class() -> None:
    by_path = {row.path: row for row in help.rows(SweepArguments)}
    assert by_path["folder"].positional and not by_path["folder"].optional and by_path["what"].optional
    assert by_path["slots"].text.startswith("The maximum number of runs at once") and by_path["slots"].value == "INT"
    with pytest.raises(SettingsError, match="no setting --slot"):
        parse(SweepArguments, "sweep", ["a", "--slot", "3"])
