from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from free_running import free, with_async
from made_runs import write_run
from plotly.offline import get_plotlyjs
from sentences import says

from lockstep import recipes
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.launchers.launch import train
from lockstep.reports.ages import _captioned, of_gradients, of_policy
from lockstep.reports.charts import Chart, mean_curve
from lockstep.reports.compare import compare
from lockstep.reports.report import report as write_report
from lockstep.reports.runs import Run, methods
from lockstep.run import ledger

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Reader(HTMLParser):
    """The text of a page, by section; fails where a tag is not closed by its own."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.section = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.section = "" if tag == "section" else self.section

    def handle_data(self, data: str) -> None:
        self.sections[self.section] = self.sections.get(self.section, "") + data + " "


def report(*arguments: Any, **named: Any) -> Path:
    """The page."""
    return write_report(*arguments, **named).path


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert not reader.open
    return reader


def rows(path: Path, section: str) -> list[list[str]]:
    """The cells of a section's tables."""
    text = path.read_text(encoding="utf-8")
    body = text[text.index(f'<section id="{section}">') :].partition("</section>")[0]
    found = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body)]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in row] for row in found]


def charts(path: Path, section: str) -> dict[str, dict[str, Any]]:
    """A section's charts, by caption, each with the numbers that it shares with others."""
    body = path.read_text().partition(f'<section id="{section}">')[2].partition("</section>")[0]
    captions = [html.unescape(each) for each in re.findall(r"<figcaption>(.*?)</figcaption>", body)]
    groups = [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', body)]
    return dict(zip(captions, [chart | {"shared": g["shared"]} for g in groups for chart in g["charts"]], strict=True))


def lines(path: Path, kind: str, section: str = "curves") -> list[dict[str, Any]]:
    """The lines of a section's first chart that are of a kind."""
    return [line for line in next(iter(charts(path, section).values()))["lines"] if line["role"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, to be read only."""
    full = recipes.ppo_cartpole()
    experiment = full.replace(
        env=dataclasses.replace(full.env, adapter="gymnasium", num_envs=8),
        algorithm=dataclasses.replace(full.algorithm, rollout=32, epochs=1),
        total_steps=8 * 32 * 3,
    )
    path = tmp_path_factory.mktemp("report") / "real"
    train(experiment, None, RunOptions(run=str(path), display="none", tensorboard=False))
    return path


@pytest.mark.slow
def test_twenty_runs_in_one_light_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{lag}-{s}", seed=s, lag=lag, iterations=400) for lag in range(4) for s in range(5)]
    page = report(runs, tmp_path / "new" / "report.html")
    assert page.stat().st_size < 2_700_000, "of which Plotly is 2 MB"
    reader = read(page)
    assert list(reader.sections)[-10:] == [
        *("", "scores", "curves", "aggregates", "diagnostics", "speed", "lag", "settings", "proof", "machines")
    ]
    assert list(charts(page, "curves")) == ["score/mean"] and list(charts(page, "diagnostics")) == ["loss/value"]
    assert len(lines(page, "middle")) == 4 and len(lines(page, "single")) == 20
    (header, *scores) = rows(page, "scores")
    assert header[:4] == ["Task", "Method", "Runs", "Samples"] and header[-1] == "Human-normalized"
    assert [row[1:4] for row in scores] == [[f"lag={lag}", "5", "6,553,600"] for lag in range(4)]
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", row[4]) for row in scores)
    assert len([row for row in rows(page, "aggregates") if row[0].startswith("lag=")]) == 6
    assert report(runs, tmp_path / "again.html").read_bytes() == page.read_bytes()


def set_env(run: Path, **settings: Any) -> Path:
    """The run with other settings of its environment."""
    experiment = json.loads((run / "experiment.json").read_text())
    experiment["env"] |= settings
    (run / "experiment.json").write_text(json.dumps(experiment))
    return run


def test_runs_of_other_rules_are_named(tmp_path: Path) -> None:
    a = set_env(write_run(tmp_path / "a"), options={"length": 8}, curriculum={"length": 2})
    b = set_env(write_run(tmp_path / "b"), options={"length": 8}, curriculum={"length": 4})
    c = set_env(write_run(tmp_path / "c", task="Pong"), options={"length": 16})
    scores = read(report([a, b, c], tmp_path / "r.html")).sections["scores"]
    assert "same task" not in scores, "another game, and other beginnings of one task"
    assert says(scores, "score/mean of a, b", "training episodes", "env.curriculum")
    scores = read(report([a, c], tmp_path / "r.html", metric="loss/value")).sections["scores"]
    assert "env.curriculum" not in scores
    d = set_env(write_run(tmp_path / "d"), options={"length": 16})
    scores = read(report([d, b], tmp_path / "r.html")).sections["scores"]
    assert says(scores, "Breakout", "same task", "env.options.length")
    notes = compare([b], [d]).notes
    assert says(notes, "score/mean of b", "training episodes") and says(notes, "env.options.length")


def test_who_asks_for_evaluations_is_told_how_runs_get_them(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"eval/score.*--eval-every"):
        report([write_run(tmp_path / "a")], tmp_path / "r.html", metric="eval/score")


def test_labels_tell_settings_of_one_name_apart(tmp_path: Path) -> None:
    a = set_env(write_run(tmp_path / "a"), options={"length": 8}, curriculum={"length": 2})
    b = set_env(write_run(tmp_path / "b", lag=1), options={"length": 16}, curriculum={"length": 4})
    found = [group.label for group in methods([Run.read(a), Run.read(b)])]
    assert found == [f"curriculum.length={x}, options.length={y}, lag={z}" for x, y, z in ((2, 8, 0), (4, 16, 1))]


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = report([write_run(tmp_path / "a")], tmp_path / "r.html")
    reader = read(page)
    assert not [tag for tag, _ in reader.tags if tag in ("link", "iframe")]
    assert not [given for tag, given in reader.tags if tag == "script" and "src" in given]
    assert all((given["src"] or "").startswith("data:") for tag, given in reader.tags if tag == "img")
    style = page.read_text().partition("<style>")[2].partition("</style>")[0]
    assert "prefers-color-scheme: dark" in style and "@media print" in style
    assert not re.findall(r"url\(|@import|https?:", page.read_text())
    packed = page.read_text().partition('id="plotly">')[2].partition("</script>")[0]
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()


def test_readers_without_scripts_see_the_curves(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{task}-{seed}", task=task, seed=seed) for task in "abcdef" for seed in (1, 2)]
    page = report(runs, tmp_path / "r.html")
    pictures = [given["src"] for tag, given in read(page).tags if tag == "img"]
    assert len(pictures) == 4, "of six tasks"
    picture = base64.b64decode((pictures[0] or "").partition("base64,")[2]).decode()
    assert "score/mean" in picture and picture.count("stroke-opacity: 0.35") == 2


def test_every_color_exists_in_light_in_dark_and_on_paper(tmp_path: Path) -> None:
    text = report([write_run(tmp_path / "a")], tmp_path / "r.html").read_text()
    used = set(re.findall(r"var\((--\w+)\)", text)) - {"--c"}
    blocks = re.findall(r":root[^{]*\{(.*?)\}", text, re.DOTALL)
    palettes = [set(re.findall(r"(--\w+):", block)) for block in blocks]
    light, dark = palettes
    assert used <= light and light == dark
    assert re.search(r"@media screen and \(prefers-color-scheme: dark\) \{\s*:root", text), "paper is light"
    named = re.findall(r'color\("(--\w+)"\)', text)  # by charts.js
    assert len(named) == 3 and set(named) <= light


def test_scores_by_hand(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{s}", seed=s, task="Pong", score=lambda done, s=s: 10 * done + s) for s in (1, 2, 3)]
    (_, row) = rows(report(runs, tmp_path / "r.html"), "scores")
    assert row == ["Pong", "Pong · PPO", "3", "983,040", "12 (11 to 13)", "11 and 13", "92.6%"]


def test_a_single_run_has_no_interval(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", task="CartPole-v1", score=lambda done: 500.0)
    header, row = rows(report([run], tmp_path / "r.html"), "scores")
    assert row[4:] == ["500", "500 and 500"] and "Human-normalized" not in header


def test_games_are_aggregated_and_other_tasks_are_not(tmp_path: Path) -> None:
    games = {"Pong": (-20.7, 14.6), "Breakout": (1.7, 30.5)}
    runs = [
        write_run(
            tmp_path / f"{game}-{algorithm}-{seed}",
            seed=seed,
            algorithm=algorithm,
            task=game,
            score=lambda done, low=low, high=high, level=level, seed=seed: (
                low + (level + seed / 10) * done * (high - low)
            ),
        )
        for game, (low, high) in games.items()
        for algorithm, level in (("PPO", 1.0), ("IMPALA", 2.0))
        for seed in (1, 2)
    ]
    page = report(runs, tmp_path / "games.html")
    aggregates = {row[0]: row[1:] for row in rows(page, "aggregates") if len(row) == 5}
    # Both games' runs end at level + 0.1 and level + 0.2.
    assert aggregates["PPO"][:3] == ["1.15 (1.1 to 1.2)"] * 3 and aggregates["PPO"][3] == "0 (0 to 0)"
    assert aggregates["IMPALA"][:3][0].startswith("2.15")
    assert rows(page, "aggregates")[-1] == ["PPO", "IMPALA", "2", "0 (0 to 0)"]
    shown = read(page).sections["aggregates"]
    assert "runs that score above τ" in shown and "games whose mean is above τ" in shown

    others = [write_run(tmp_path / task, task=task) for task in ("CartPole-v1", "Acrobot-v1")]
    told = read(report(others, tmp_path / "others.html")).sections["aggregates"]
    assert says(told, "no aggregate", "Atari", "Procgen")
    others[0] = write_run(tmp_path / "other-method", task="CartPole-v1", lag=1)
    told = read(report(others, tmp_path / "others.html")).sections["aggregates"]
    assert says(told, "no aggregate", "every method")


def test_games_of_two_benchmarks_are_aggregated_apart(tmp_path: Path) -> None:
    ends = {"Pong": 14.6, "Breakout": 30.5, "StarpilotEasy-v0": 33.25, "MazeHard-v0": 7.0}
    runs = [write_run(tmp_path / task, task=task, score=lambda done, end=end: end) for task, end in ends.items()]
    page = report(runs, tmp_path / "r.html")
    header, *scores = rows(page, "scores")
    assert header[-1] == "Normalized" and [row[-1] for row in scores] == ["100.0%", "100.0%", "50.0%", "50.0%"]
    means = [row[1] for row in rows(page, "aggregates") if len(row) == 5 and row[0] != "Method"]
    assert means == ["1", "0.5"]
    told = read(page).sections["aggregates"]
    assert says(told, "Procgen-normalized", "2 games")
    profile = charts(page, "aggregates")["Share of runs that score above τ"]
    assert profile["own"] == "Procgen-normalized score τ" and profile["lines"][0]["by"]["own"]["y"][0] == 1
    procgen = [run for run in runs if run.name.endswith("v0")]
    assert rows(report(procgen, tmp_path / "r.html"), "scores")[0][-1] == "Procgen-normalized"
    one_each = report([runs[0], runs[3]], tmp_path / "r.html")
    assert says(read(one_each).sections["aggregates"], "Pong and MazeHard-v0")


def test_readers_are_warned(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=7) for name in ("a", "b")]
    runs.append(write_run(tmp_path / "c", seed=8, iterations=30, planned=60))
    told = read(report(runs, tmp_path / "r.html")).sections["scores"]
    assert says(told, "several runs", "seed 7") and "c (491,520 of 491,520)" not in told
    assert "c (491,520 of 983,040)" in told


def test_a_run_that_diverged_is_warned_of(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(6)]
    for seed in (0, 1):
        change_lines(runs[seed], lambda n, line, end=20 + seed: line | {"loss/value": None} if n >= end else line)
    told = read(report(runs, tmp_path / "r.html")).sections["scores"]
    assert "0 has diverged: after 327,680 samples" in told and "1 has diverged: after 344,064 samples" in told
    assert told.count("has diverged") == 2 and "diverged" in " ".join(compare(runs[:3], runs[3:]).notes)


def test_shares_are_those_of_time_and_not_of_iterations(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", iterations=4)
    change_lines(
        run, lambda number, line: line | {"seconds": [1, 2, 3, 13][number], "time/env": [0.8, 0.8, 0.8, 0.15][number]}
    )
    assert Run.read(run).share("time/env") == pytest.approx((3 * 0.8 + 10 * 0.15) / 13)


def change_lines(run: Path, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    changed = (json.dumps(change(number, json.loads(line))) for number, line in enumerate(lines))
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in changed))


def test_the_protocol_of_scores_is_stated(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed, metrics={"eval/score": 3.0}) for seed in (1, 2)]
    for run in runs:
        settings, facts = (json.loads((run / name).read_text()) for name in ("experiment.json", "run.json"))
        settings["env"] |= {"protocol": "sticky", "num_levels": 200}
        options = {"eval_episodes": 30, "eval_greedy": True, "eval_opponents": ["random"]}
        (run / "experiment.json").write_text(json.dumps(settings))
        (run / "run.json").write_text(json.dumps(facts | {"options": options}))
    told = read(report(runs, tmp_path / "r.html")).sections["scores"]
    assert says(told, "mean", "100 training episodes", "exploration", "Atari protocol: sticky")
    told = read(report(runs, tmp_path / "r.html", metric="eval/score")).sections["scores"]
    assert says(told, "30 episodes", "most likely actions", "levels", "against random")
    assert "episodes" not in read(report(runs, tmp_path / "r.html", metric="loss/value")).sections["scores"]


def test_the_protocol_covers_evaluations_after_a_resume(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics={"eval/score": 3.0})
    written = json.loads((run / "run.json").read_text())

    def told(begun: dict[str, Any], *resumed: dict[str, Any]) -> str:
        facts = {"options": begun, "resumed": [{"iteration": each.pop("iteration"), **each} for each in resumed]}
        (run / "run.json").write_text(json.dumps(written | facts))
        return read(report(run, tmp_path / "r.html", metric="eval/score")).sections["scores"]

    few, many = ({"eval_every": 2, "eval_episodes": episodes} for episodes in (3, 100))
    greedy = many | {"eval_greedy": True, "eval_opponents": ["random"]}
    assert says(told(few), "mean raw score of 3 episodes")
    text = told(few, {"iteration": 4, "options": greedy})
    assert says(text, "3 to 100 episodes", "most likely actions in some evaluations", "against random")
    assert says(told(few, {"iteration": 4, "options": many}, {"iteration": 6}), "3 to 100 episodes")
    assert says(told({"eval_every": 0}, {"iteration": 4, "options": many}), "mean raw score of 100 episodes")
    assert says(told(few, {"iteration": 0, "options": many}), "mean raw score of 100 episodes"), "it began again"


def test_a_run_that_has_just_been_made_is_left_out(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    (runs[0] / "metrics.jsonl").unlink()
    assert says(read(report(runs, tmp_path / "r.html")).sections["scores"], "Left out", "score/mean", ": 0.")
    with pytest.raises(SettingsError, match="no values of 'score/mean'"):
        report(runs[:1], tmp_path / "r.html")


def test_a_setting_that_older_runs_do_not_have_makes_no_method_of_its_own(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    settings = json.loads((runs[0] / "experiment.json").read_text())
    (runs[0] / "experiment.json").write_text(json.dumps(settings | {"new": None}))
    (row,) = rows(report(runs, tmp_path / "r.html"), "scores")[1:]
    assert row[2] == "2"


def test_profiles_end_where_they_can_be_read(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / game, task=game, score=lambda done: 2000.0) for game in ("Pong", "Breakout")]
    text = report(runs, tmp_path / "r.html").read_text()
    assert "above τ, up to 8" in text


def test_names_stand_beside_intervals(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{game}-{lag}", task=game, lag=lag) for game in ("Pong", "Breakout") for lag in (0, 1)
    ]
    found = charts(report(runs, tmp_path / "r.html"), "aggregates").values()
    names = [[row["name"] for row in chart["rows"]] for chart in found if chart["kind"] == "intervals"]
    assert names == [["lag=0", "lag=1"]] * 4


def test_few_seeds_are_warned_of_and_enough_are_not(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(5)]
    assert "fewer than 5" not in read(report(runs, tmp_path / "r.html")).sections["scores"]
    assert "fewer than 5" in read(report(runs[:4], tmp_path / "r.html")).sections["scores"]


def test_runs_of_equal_names_are_told_apart_by_those_of_the_folders_above(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "s1", lag=lag) for lag, folder in enumerate(("p", "q"))]
    runs.append(write_run(tmp_path / "q" / "s2", lag=2))
    told = read(report(runs, tmp_path / "r.html")).sections["speed"]
    assert "p/s1" in told and "q/s1" in told and "q/s2" not in told


def test_a_run_that_went_on_otherwise_says_where(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    facts = {**json.loads((run / "run.json").read_text()), "code": {"mine.py": "12ab"}}
    resumed = [{"iteration": at, **facts, "layout": layout} for at, layout in ((20, "inline"), (40, "processes:2"))]
    (run / "run.json").write_text(json.dumps({**facts, "resumed": resumed}))
    sections = read(report([run], tmp_path / "r.html")).sections
    assert "inline; after iteration 40: processes:2" in sections["speed"]
    assert "inline; after iteration 40: processes:2" in sections["machines"]
    assert ["mine.py, SHA-256", "12ab"] in rows(tmp_path / "r.html", "machines")


@pytest.mark.slow
def test_pairs_that_are_not_shown_are_counted(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{lag}-{seed}", lag=lag, seed=seed) for lag in range(7) for seed in (1, 2)]
    assert "first 15 of 21 pairs" in read(report(runs, tmp_path / "r.html")).sections["aggregates"]
    assert "pairs:" not in read(report(runs[:12], tmp_path / "r.html")).sections["aggregates"]
    assert "aggregates" not in read(report(runs[::2], tmp_path / "r.html")).sections, (
        "of single runs there is no chance"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"iteration": 1}\n{"iterat\n{"iteration": 3}\n'),
        ("metrics.jsonl", '[1]\n{"iteration": 3}\n'),
        ("metrics.jsonl", '{"iteration": "one"}\n'),
        ("experiment.json", '{"seed": 1'),
        ("experiment.json", "[]"),
        ("experiment.json", "{}"),
        ("metrics.jsonl", '{"score/mean": 1.0}\n'),
        ("run.json", "{"),
        ("run.json", '{"layout": "inline", "versions": 5}'),
        ("run.json", '{"layout": "inline", "resumed": [7]}'),
    ],
)
def test_damaged_files_are_named(name: str, text: str, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / each) for each in ("good", "bad")]
    (runs[1] / name).write_text(text)
    with pytest.raises(SettingsError, match=rf"bad/{name}.*damaged"):
        report(runs, tmp_path / "r.html")


def test_metrics_of_other_makers_do_not_end_a_report(tmp_path: Path) -> None:
    report([write_run(tmp_path / "a", metrics={"lag/share_x": 0.5})], tmp_path / "r.html")


def test_waits_lag_settings_and_versions_are_told(tmp_path: Path) -> None:
    shares = {"lag/share_0_behind": 0.25, "lag/share_1_behind": 0.75, "lag/policy_versions_max": 1.0}
    runs = [
        write_run(tmp_path / "sync"),
        write_run(tmp_path / "free", lag="async", metrics={"wait/rollouts": 0.0123, **shares}),
    ]
    page = report(runs, tmp_path / "r.html")
    speed = {row[0]: row[1:] for row in rows(page, "speed")}
    assert (
        speed["free"][:5] == ["inline", "3.333 hours", "327.7", "81.92", "0.08"]
        and speed["free"][-1] == "learners for rollouts 12.3 ms"
    )
    assert speed["sync"][-1] == ""
    assert 'title="env 25%, learning 75%"' in page.read_text()
    lag = rows(page, "lag")
    assert lag[2][:4] == ["free", "async", "0", "1"] and 'title="0 behind 25%, 1 behind 75%"' in page.read_text()
    # 60 iterations of 12.3 ms in 200 seconds each.
    assert lag[-1] == ["free", "0.0%"] and not charts(page, "lag"), "nothing changed"
    assert ["scheme.lag", "0", "async"] in rows(page, "settings")
    assert ["torch version", "2.13.0"] in rows(page, "machines")


def with_ledger(run: Path, lines: list[dict[str, Any]], shards: int, **facts: Any) -> Path:
    """The run with a ledger that has these lines, and further facts in run.json."""
    settings, known = (json.loads((run / name).read_text()) for name in ("experiment.json", "run.json"))
    settings["scheme"]["shards"] = shards
    (run / "experiment.json").write_text(json.dumps(settings))
    (run / "run.json").write_text(json.dumps(known | facts))
    writer = ledger.Ledger.create(
        run / "ledger.jsonl", {"version": ledger.VERSION, "experiment": "0", "settings": {}, "platform": {}}
    )
    for number, line in enumerate(lines):
        writer.append({"iteration": number, **line})
    writer.close()
    return run


def event(shard: int, *versions: tuple[int, int]) -> dict[str, Any]:
    return {"shard": shard, "rollout": 0, "versions": versions}


def test_lag_and_asynchrony_of_each_process_by_hand(tmp_path: Path) -> None:
    """Rollouts of 128 steps, and 16 updates an iteration. The second of three iterations is that of another layout."""
    resumed = [{"iteration": 1, "layout": "cpu:a1-l1"}, {"iteration": 2, "layout": "cpu:a2-l2"}]
    lines = [
        {"events": [event(0, (0, 0)), event(1, (0, 0))], "updates": [[0, 0], [1, 0]]},
        {"events": [event(1, (0, 0)), event(0, (0, 1))], "updates": [[0, 0], [1, 1]]},
        {"events": [event(1, (0, 0), (96, 1)), event(1, (0, 2))], "updates": [[1, 0], [0, 3], [0, 0]]},
    ]
    made = write_run(tmp_path / "free", lag="async", iterations=3)
    run = Run.read(with_ledger(made, lines, 2, layout="cpu:a2-l2", resumed=resumed))
    policy = {name: (ages.rollouts, ages.versions, ages.steps) for name, ages in of_policy(run, lines_of(made)).items()}
    assert policy == {
        "collector 0 of cpu:a2-l2": (1, {0: 128}, {0: 128}),
        "collector 1 of cpu:a2-l2": (3, {0: 256, 2: 96, 1: 32}, {0: 256, 32: 96, 16: 32}),
        "collector 0 of cpu:a1-l1": (2, {0: 128, 1: 128}, {0: 128, 16: 128}),
    }
    gradients = {name: dict(ages.versions) for name, ages in of_gradients(run, lines_of(made)).items()}
    assert gradients == {
        "learner 0 of cpu:a2-l2": {0: 2, 3: 1},
        "learner 1 of cpu:a2-l2": {0: 2},
        "learner 0 of cpu:a1-l1": {0: 1, 1: 1},
    }
    shown = rows(report([made], tmp_path / "r.html"), "lag")
    row = ["free", "collector 1 of cpu:a2-l2", "50.0%", "0.583", "2", "9.333", "32"]  # 224 / 384, 3584 / 384
    assert [*row, " 0:\N{NO-BREAK SPACE}67%, 1:\N{NO-BREAK SPACE}8%, 2:\N{NO-BREAK SPACE}25%"] in shown
    assert [
        "free",
        "learner 0 of cpu:a2-l2",
        "3",
        "1",
        "3",
        " 0:\N{NO-BREAK SPACE}67%, 3:\N{NO-BREAK SPACE}33%",
    ] in shown

    cuts = [{"collected_with": 0, "cuts": [[1, 32]]}, {"collected_with": 0, "cuts": []}]
    cut = write_run(tmp_path / "cut", lag=1, iterations=3, metrics={"lag/kept": 0.75})
    page = report([with_ledger(cut, cuts, 2, layout="processes:2")], tmp_path / "r.html")
    assert rows(page, "lag")[1][:4] == ["cut", "1", "1", "75.0%"]
    assert [
        "cut",
        "process 1",
        "50.0%",
        "0.5",
        "1",
        "8",
        "16",
        "62.5%",
        " 0:\N{NO-BREAK SPACE}50%, 1:\N{NO-BREAK SPACE}50%",
    ] in rows(page, "lag")


@pytest.mark.parametrize(
    ("rollouts", "parameters", "slower"),
    [(2.0, 90.0, "learners"), (20.0, 4.0, "collectors"), (19.0, 2.0, "neither"), (60.0, 90.0, "neither")],
)
def test_the_slower_side_is_the_one_that_was_waited_for(
    tmp_path: Path, rollouts: float, parameters: float, slower: str
) -> None:
    """In iterations of 200 seconds, of which the first does not count. The oldest samples are those of the whole run,
    and bounds of lags are told."""
    metrics = {"wait/rollouts": rollouts, "wait/parameters": parameters, "lag/gradient_asynchrony": 0.5}
    run = write_run(tmp_path / "a", lag="async", metrics=metrics, iterations=3)
    settings = json.loads((run / "experiment.json").read_text())
    settings["scheme"] |= {"max_lag": 4, "gradient_lag": "async"}
    (run / "experiment.json").write_text(json.dumps(settings))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with (run / "metrics.jsonl").open("w") as file:
        for line, oldest in zip(lines, (1, 4, 2), strict=True):
            beginning = {"wait/rollouts": 150.0, "time/waiting": 0.9} if oldest == 1 else {"time/waiting": 0.2}
            file.write(json.dumps(line | beginning | {"lag/policy_versions_max": oldest}) + "\n")
    shown = rows(report([run], tmp_path / "r.html"), "lag")
    assert ["a", f"{rollouts / 2:.1f}%", f"{parameters / 2:.1f}%", "20.0%", slower] in shown
    assert shown[1][:6] == ["a", "async, at most 4", "0", "4", "async, at most 8", "0.5"]


def test_waits_count_the_iterations_that_a_long_run_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.reports.runs._LINES", 20)
    run = write_run(tmp_path / "a", lag="async", metrics={"wait/rollouts": 50.0, "wait/parameters": 20.0})
    assert len(Run.read(run).records) == 21, "of 60 iterations of 200 seconds"
    assert ["a", "25.0%", "10.0%", "collectors"] in rows(report([run], tmp_path / "r.html"), "lag")


def test_waits_of_the_beginning_do_not_flatten_a_chart() -> None:
    lines = [{"y": [90.0, *[2.0] * 18, 4.0]}, {"y": [1.0, None, 3.0]}]
    cut = _captioned(Chart("wait/rollouts", {"kind": "curves", "lines": lines}))
    assert cut.caption.endswith("learners waited for rollouts; the beginning is higher")
    assert cut.spec["range"] == pytest.approx([-0.22, 4.4])
    with_none = _captioned(Chart("wait/rollouts", {"kind": "curves", "lines": [*lines, {"y": []}]}))
    assert with_none.spec["range"] == cut.spec["range"], "the runs of a method may have waited at different times"
    for metric, drawn in (("wait/rollouts", lines[1:]), ("lag/policy_versions", lines)):
        whole = _captioned(Chart(metric, {"kind": "curves", "lines": drawn}))
        assert "beginning" not in whole.caption and "range" not in whole.spec


def lines_of(run: Path) -> list[dict[str, Any]]:
    return ledger.read(run / "ledger.jsonl")[1]


def test_lag_and_asynchrony_of_a_free_running_run(tmp_path: Path) -> None:
    """What the ledger says of each process adds up to what the metrics say of all."""
    path = tmp_path / "free"
    train(with_async(free(8)), "cpu:a2-l2,jitter=0.003", RunOptions(run=str(path), display="none", tensorboard=False))
    run = Run.read(path)
    policy, gradients = of_policy(run, lines_of(path)), of_gradients(run, lines_of(path))
    assert list(policy) and set(policy) <= {"collector 0", "collector 1"}
    assert set(gradients) == {"learner 0", "learner 1"}

    def mean(counts: list[Counter[int]]) -> float:
        whole = sum(counts, Counter[int]())
        return sum(age * n for age, n in whole.items()) / whole.total()

    assert mean([ages.versions for ages in policy.values()]) == pytest.approx(run.average("lag/policy_versions"))
    assert mean([ages.steps for ages in policy.values()]) == pytest.approx(run.average("lag/gradient_steps"))
    assert mean([a.versions for a in gradients.values()]) == pytest.approx(run.average("lag/gradient_asynchrony"))
    page = report([path], tmp_path / "r.html", metric="loss/value")
    assert any("waited" in chart for chart in charts(page, "lag")), "for whom, timing decides"
    assert [row[0] for row in rows(page, "lag")].count("free") == 1 + len(policy) + 2 + 1


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a<b>&c", task="my<script>.py:make")
    reader = read(report([run, write_run(tmp_path / "d", lag=1, task="my<script>.py:make")], tmp_path / "r.html"))
    assert "my<script>.py:make" in reader.sections["curves"] + reader.sections["scores"]
    assert "a<b>&c" in reader.sections["speed"]


def test_the_ledgers_verdict(trained: Path, tmp_path: Path) -> None:
    same, edited, bare = (tmp_path / name for name in ("same", "edited", "bare"))
    for copy in (same, edited, bare):
        shutil.copytree(trained, copy)
    text = (edited / "ledger.jsonl").read_text()
    (edited / "ledger.jsonl").write_text(text.replace('"iteration":1', '"iteration":7', 1))
    (bare / "ledger.jsonl").unlink()
    verdicts = {row[0]: row[1:] for row in rows(report([trained, same, edited, bare], tmp_path / "r.html"), "proof")}
    assert verdicts["real"][3].startswith("✓ 3 iterations, intact") and verdicts["real"] == verdicts["same"]
    assert re.fullmatch("[0-9a-f]{12}", verdicts["real"][2])
    assert verdicts["edited"][3].startswith("✗ ") and "iteration 1" in verdicts["edited"][3]
    assert "no ledger ledger.jsonl" in verdicts["bare"][3], "the run's folder stands beside it"


def test_settings_that_contradict_the_ledger_are_found(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    settings = (run / "experiment.json").read_text()
    changed = re.sub(r'"clip": [\d.]+', '"clip": 0.3', settings, count=1)
    assert changed != settings
    (run / "experiment.json").write_text(changed)
    (_, row) = rows(report([run], tmp_path / "r.html"), "proof")
    assert "contradicts its own ledger" in row[4] and "clip" in row[4]


@pytest.mark.slow
def test_iterations_are_repeated_if_asked(trained: Path, tmp_path: Path) -> None:
    (_, row) = rows(report([trained], tmp_path / "r.html", verify=2), "proof")
    assert row[4].startswith("✓ Verified: 2 of 3 recorded iterations")

    forged = shutil.copytree(trained, tmp_path / "forged")
    head, lines = ledger.read(forged / "ledger.jsonl")
    (forged / "ledger.jsonl").unlink()
    writer = ledger.Ledger.create(forged / "ledger.jsonl", head)
    for line in lines:
        writer.append({**line, "rollout": {**line["rollout"], "0": {}}})
    writer.close()
    (_, row) = rows(report([forged], tmp_path / "f.html", verify=1), "proof")
    assert row[4].startswith("✗ Not verified")


def test_the_best_runs_video_is_embedded_and_large_ones_are_not(tmp_path: Path) -> None:
    best, other = (write_run(tmp_path / n, seed=i, score=lambda done, i=i: i * done) for n, i in (("b", 5), ("o", 4)))
    (best / "video.mp4").write_bytes(b"best")
    (other / "video.mp4").write_bytes(b"other")
    page = report([other, best], tmp_path / "r.html")
    (source,) = [attributes["src"] for tag, attributes in read(page).tags if tag == "video"]
    assert source == "data:video/mp4;base64," + base64.b64encode(b"best").decode()
    (best / "video.mp4").write_bytes(bytes(3_000_000))
    told = read(report([other, best], page))
    assert "Left out" in told.sections["videos"] and "3.0 MB" in told.sections["videos"]
    assert page.stat().st_size < 2_500_000, "of which Plotly is 2 MB"
    (best / "video.mp4").unlink()
    (other / "video.mp4").unlink()
    assert "videos" not in read(report([other, best], page)).sections


def test_a_running_run_and_one_without_scores(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", iterations=10)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 11, "samp')
    young = write_run(tmp_path / "b", iterations=2)
    written = write_report([run, young], tmp_path / "r.html")
    assert len(rows(written.path, "scores")) == 2 and written.left_out == ("b",)
    assert says(read(written.path).sections["scores"], "Left out", "score/mean", ": b.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": "r.pdf"}, ["--out", "r.pdf", ".html"]),
        ({"metric": "score/meen"}, ["score/meen", "Similar names: score/mean"]),
        ({"runs": []}, ["No run was given"]),
        ({"runs": ["nowhere"]}, ["nowhere does not exist"]),
        ({"verify": -1}, ["--verify -1"]),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    arguments: dict[str, Any] = {"runs": [write_run(tmp_path / "a")], "out": tmp_path / "r.html", **changes}
    with pytest.raises(SettingsError) as error:
        report(**arguments)
    for word in words:
        assert word in str(error.value)


def of_records(*records: dict[str, float | None], **settings: Any) -> Run:
    return Run(Path("run"), 1, {name.replace("__", "."): value for name, value in settings.items()}, {}, list(records))


def test_shares_are_weighted_by_the_time_that_iterations_took() -> None:
    run = of_records({"seconds": 10.0, "time/env": 0.1}, {"seconds": 20.0}, {"seconds": 50.0, "time/env": 0.5})
    assert run.share("time/env") == pytest.approx((10 * 0.1 + 30 * 0.5) / 40)
    assert np.isnan(of_records({"seconds": 10.0}).share("time/env"))


def test_averages_are_means_over_the_iterations_that_have_a_value() -> None:
    run = of_records({"lag/x": 1.0}, {"lag/x": None}, {}, {"lag/x": 4.0})
    assert run.average("lag/x") == 2.5 and np.isnan(run.average("lag/y"))


@pytest.mark.parametrize(("iteration", "finished"), [(3, False), (4, True)])
def test_a_run_has_finished_with_its_last_iteration_though_it_has_fewer_samples(iteration: int, finished: bool) -> None:
    planned = {"total_steps": 100, "algorithm__rollout": 8, "env__num_envs": 4}
    assert of_records({"iteration": iteration, "samples": 90}, **planned).finished == finished


def test_means_of_curves_are_over_the_range_that_all_share() -> None:
    x, y = mean_curve([(np.array([0.0, 2.0]), np.array([0.0, 4.0])), (np.array([1.0, 3.0]), np.array([4.0, 8.0]))])
    assert (x[0], x[-1], y[0], y[-1]) == (1, 2, 3, 5)


def test_curves_over_time_are_drawn_in_the_unit_of_their_axis(tmp_path: Path) -> None:
    for runs in (1, 2):
        folders = [write_run(tmp_path / f"{runs}-{seed}", seed=seed) for seed in range(runs)]
        page = report(folders, tmp_path / "r.html")
        assert '"time":"Training time [hours]"' in page.read_text()
        shared = charts(page, "curves")["score/mean"]["shared"]
        for line in lines(page, "middle"):
            times = line["by"]["time"]["x"] if "by" in line else shared[line["x"]["time"]]
            assert times[-1] == pytest.approx(60 * 200 / 3600, rel=1e-4)


def test_videos_of_several_tasks_share_the_room_on_a_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / task, task=task) for task in ("Pong", "Breakout", "Freeway")]
    for run, size in zip(runs, (1_500_000, 1_500_000, 900_000), strict=True):
        (run / "video.mp4").write_bytes(bytes(size))
    page = report(runs, tmp_path / "r.html")
    assert sum(tag == "video" for tag, _ in read(page).tags) == 2
    assert "Left out" in page.read_text() and "Breakout/video.mp4 (1.5 MB)" in page.read_text()


def test_ages_of_data_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    shares = {"lag/share_10_behind": 0.25, "lag/share_2_behind": 0.75}
    text = report([write_run(tmp_path / "a", lag="async", metrics=shares)], tmp_path / "r.html").read_text()
    assert 'title="2 behind 75%, 10 behind 25%"' in text


def test_runs_of_unequal_length_are_told_of(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(n), iterations=n, planned=60, seed=n) for n in (60, 54, 53)]
    assert "unequal length" not in read(report(runs[:2], tmp_path / "r.html")).sections["scores"]
    assert "unequal length" in read(report(runs, tmp_path / "r.html")).sections["scores"]
