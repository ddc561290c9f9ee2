"""metrics.jsonl that was damaged: verify fails and names the rows, resume says so, keeps the file, and goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from manifests import sealed
from tiny import cut

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.config.options import RunOptions
from lockstep.launchers.launch import resume, train
from lockstep.reproducibility.verify import verify
from lockstep.run import checkpoint
from lockstep.run.folder import RunFolder

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three iterations with a checkpoint and an evaluation after each, to be read only."""
    run = tmp_path_factory.mktemp("rows") / "run"
    options = RunOptions(str(run), checkpoint_every=1, eval_every=1, eval_episodes=1, display="none", tensorboard=False)
    train(cut(recipes.ppo_cartpole, env={"adapter": "gymnasium"}), options=options)
    return run


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return shutil.copytree(recorded, tmp_path / "run")


def rows(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def doubled(path: Path) -> None:
    path.write_text("".join([*rows(path)[:3], *rows(path)[2:]]))


def without_a_row(path: Path) -> None:
    path.write_text("".join([*rows(path)[:2], *rows(path)[3:]]))


def flipped(path: Path) -> None:
    path.write_text("".join([*rows(path)[:2], rows(path)[2].replace("samples", "sbmples", 1), *rows(path)[3:]]))


def nameless(path: Path) -> None:
    named = rows(path)
    path.write_text("".join([*named[:2], named[2].replace("iteration", "iterbtion", 1), *named[3:]]))


def torn(path: Path) -> None:
    path.write_text("".join([*rows(path)[:2], rows(path)[2][:20] + "\n", *rows(path)[3:]]))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Change, str]] = {
    "emptied": (lambda path: path.write_text(""), "Iterations 1 to 3 are missing"),
    "deleted": (Path.unlink, "No such file"),
    "a row doubled": (doubled, "Line 4 repeats iteration 2"),
    "a row lost": (without_a_row, "Iteration 2 is missing before line 3"),
    "a row without its iteration": (nameless, "Line 3 is damaged"),
    "a row torn": (torn, "Line 3 is damaged"),
    "a key changed": (flipped, "A row of iterations 2 to 2"),
    "a folder in its place": (a_folder, "Is a directory"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_by_verify_and_the_learning_proved_all_the_same(name: str, run: Path) -> None:
    change, told = DAMAGES[name]
    change(run / "metrics.jsonl")
    verdict = verify(run, iterations=1)
    assert not verdict.ok and verdict.difference is not None
    assert told in verdict.message and "1 of 3 recorded iterations" in verdict.message


@pytest.mark.parametrize("name", DAMAGES)
def test_resume_says_so_keeps_the_file_and_ends_with_the_same_bits(
    name: str, run: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[name][0](run / "metrics.jsonl")
    result = resume(run, checkpoint=2)
    assert (run / "ledger.jsonl").read_bytes() == (recorded / "ledger.jsonl").read_bytes()
    assert result.iterations == 3
    assert "metrics.jsonl is damaged" in capsys.readouterr().err
    assert (run / "metrics.jsonl.damaged").exists() == (name != "deleted")
    repaired = name == "a row doubled"
    verdict = verify(run, iterations=1)
    assert verdict.ok == repaired, verdict.message
    if repaired:
        assert [json.loads(row)["iteration"] for row in rows(run / "metrics.jsonl")] == [1, 1, 2, 2, 3, 3]


def test_rows_after_the_checkpoint_are_written_again_without_a_word(
    run: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "metrics.jsonl"
    path.write_text("".join(rows(path)[:5]) + '{"iteration": 4, "sam')
    resume(run, checkpoint=2)
    assert "damaged" not in capsys.readouterr().err and not path.with_name("metrics.jsonl.damaged").exists()
    assert rows(path)[:4] == rows(recorded / "metrics.jsonl")[:4] and verify(run, iterations=1).ok


def test_checkpoints_of_earlier_versions_have_no_seal_and_do_without(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in checkpoint.list_checkpoints(run / "checkpoints"):
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["meta"]["metrics"]
        (path / "manifest.json").write_bytes(sealed(manifest))
    assert verify(run, iterations=1).ok
    resume(run, checkpoint=2)
    assert "damaged" not in capsys.readouterr().err and verify(run, iterations=1).ok


def test_the_command_line_fails(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    assert main(["verify", str(run), "--iterations", "1"]) == 1
    assert "metrics.jsonl has changed" in " ".join(capsys.readouterr().out.split())


def test_options_that_run_json_lost_or_has_beyond_those_known_are_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "run.json"
    path.write_text(path.read_text().replace('"checkpoint_every"', '"chekcpoint_every"'))
    options = RunFolder(run).options()
    assert options == dataclasses.replace(options, checkpoint_every=RunOptions().checkpoint_every)
    told = capsys.readouterr().err
    assert "chekcpoint_every" in told and "run.json" in told
