from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import golden
import pytest


@pytest.mark.full  # of a tool for changes that alter digests
def test_a_commit_that_computes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit's advantages reach one step less far: PPO learns something else, TD3 does not."""
    for folder in ("lockstep", "tests"):
        shutil.copytree(golden.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    returns = tmp_path / "lockstep" / "algorithms" / "returns.py"
    text = returns.read_text()
    right = "discount * lambda_ * _continues(terminated, truncated, r_t)"
    assert right in text
    returns.write_text(text.replace(right, f"0 * {right}"))

    @contextlib.contextmanager
    def planted(_: str) -> Iterator[Path]:
        yield tmp_path

    monkeypatch.setattr(golden, "checked_out", planted)
    assert golden.compare("planted", ["cartpole-lag-1", "td3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["cartpole-lag-1"]
    assert lines[-1].startswith("1 of 2 experiments")


def test_a_commit_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no-such-commit"), golden.checked_out("no-such-commit"):
        pass
