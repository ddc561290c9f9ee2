from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import write_run
from sentences import says

from lockstep.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, final in (("a", 20.0), ("b", 10.0)):
        for seed in (1, 2):
            write_run(Path(f"runs/{name}{seed}"), seed=seed, score=lambda done, f=final, s=seed: (f + s) * done)


def test_report_of_one_run_goes_into_its_folder(capsys: Captured) -> None:
    assert main(["report", "runs/a1"]) == 0
    written = Path("runs/a1/report.html")
    size = f"{written.stat().st_size / 1e6:.1f} MB"
    assert capsys.readouterr().out == f"wrote {written} ({size})\n"
    assert Path("runs/a1/report.html").read_text().startswith("<!doctype html>")


def test_report_of_several_runs(capsys: Captured) -> None:
    assert main(["report", "runs/a1", "runs/b1", "--out", "page.html", "--metric", "loss/value", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == "page.html" and told["bytes"] == Path("page.html").stat().st_size
    assert told["left_out"] == [] and [proof["run"] for proof in told["proofs"]] == ["a1", "b1"]
    assert main(["report", "runs/a1", "runs/b1"]) == 0
    assert (
        "wrote report.html" in capsys.readouterr().out
        and "<figcaption>loss/value</figcaption>" in Path("page.html").read_text()
    )


def test_a_sweeps_folder_stands_for_its_runs(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("queue", "logs"):
        Path("set", folder).mkdir(parents=True)
    Path("set/sweep.json").write_text("{}")
    Path("runs").rename("set/runs")
    assert main(["report", "set", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [proof["run"] for proof in told["proofs"]] == ["a1", "a2", "b1", "b2"] and told["file"] == "set/report.html"
    for runs in (["set/runs"], [str(path) for path in sorted(Path("set").iterdir())]):
        assert main(["report", *runs, "--out", "r.html", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["scores"] == told["scores"]
    assert main(["plot", "set"]) == 0 and Path("set/learning-curve.png").is_file()
    assert "wrote set/learning-curve.png" in capsys.readouterr().out
    assert main(["compare", "set", "--", "set/runs/b1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tasks"][0]["scores_a"]) == 4
    assert main(["report", "set/logs"]) == 2 and says(capsys.readouterr().err, "set/logs is not", "run")
    assert main(["report", "set/sweep.json"]) == 2


def test_names_of_many_runs_make_a_short_line(capsys: Captured) -> None:
    for seed in range(20):
        write_run(Path(f"young/{seed}"), seed=seed, iterations=2)
    assert main(["report", "runs/a1", "young"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("left out") and "and 14 more" in line and len(line) < 100
    assert main(["plot", "runs/a1", "young"]) == 0
    assert "and 14 more" in capsys.readouterr().err


def test_a_report_that_does_not_verify_says_so(capsys: Captured) -> None:
    write_run(Path("runs/young"), iterations=2)
    assert main(["report", "runs/a1", "runs/young"]) == 0, "proof was not asked for"
    assert says(capsys.readouterr().out, "left out", "score/mean", ": young")
    assert main(["report", "runs/a1", "runs/young", "--verify", "1"]) == 1
    told = capsys.readouterr().out
    assert says(told, "a1: ", "no ledger") and says(told, "young: ", "no ledger")


def test_compare(capsys: Captured) -> None:
    assert main(["compare", "runs/a1", "runs/a2", "--", "runs/b1", "runs/b2", "--out", "c.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  A         21.5 (21 to 22)" in lines and "  A - B     10 (9 to 11)" in lines
    assert "  P(A > B)  1 (1 to 1)" in lines
    assert lines[-1].startswith("wrote c.html") and Path("c.html").is_file()


def test_compare_as_json(capsys: Captured) -> None:
    assert main(["compare", "runs/a1", "--against", "runs/b1", "--x", "time", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["x"] == "time" and told["file"] is None and told["tasks"][0]["a"]["value"] == 21.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "runs/nothing"], "runs/nothing does not exist"),
        (["compare", "runs/nothing", "--", "runs/a1"], "runs/nothing does not exist"),
        (["compare", "runs/a1", "--", "runs/b1", "--", "runs/b2"], "separated by one --"),
        (["compare", "runs/a1", "runs/b1"], "two sets"),
        (["report", "runs/a1", "--out", "page.png"], "--out page.png"),
        (["report", "runs/a1", "--metric", "score/men"], "score/mean"),
    ],
)
def test_mistakes_are_one_paragraph(arguments: list[str], words: str, capsys: Captured) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
