"""The short form of `python tests/faults`: damaged files, and what counts as a fault. test_resume tries kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_trials import Outcome, damaged, files


def faults(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{outcome}\n{outcome.output}" for outcome in outcomes if not outcome.ok)


def test_damaged_files_are_told_or_change_nothing(tmp_path: Path) -> None:
    outcomes = list(files(tmp_path, ["inline"], 0, seed=1, few=True))
    assert len(outcomes) > 50 and not faults(outcomes), faults(outcomes)


@pytest.mark.parametrize(
    ("code", "printed", "ok"),
    [
        (0, f"digest: {'1' * 64}", False),
        (0, f"metrics.jsonl\ndigest: {'2' * 64}", False),
        (0, f"metrics.jsonl\ndigest: {'1' * 64}", True),
        (2, "metrics.jsonl", True),
        (2, "something is wrong", False),
        (None, "metrics.jsonl", False),
    ],
)
def test_silence_other_digests_and_tracebacks_are_faults(
    code: int | None, printed: str, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(_: list[str]) -> int:
        print(printed)
        if code is None:
            raise OSError("a traceback")
        return code

    monkeypatch.setattr("fault_trials.main", told)
    assert damaged(tmp_path, "metrics.jsonl", "trial", "resume", "1" * 64).ok == ok
