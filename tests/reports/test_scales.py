from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.evaluation import statistics
from lockstep.reports import atari, procgen
from lockstep.reports.scales import Scale, capped_mean, on_one_scale, scale_of

DATA = Path(__file__).parent / "data"


# ------------------------------------------------------------------------------------------------------------ Atari


def published() -> dict[str, dict[str, float]]:
    """By game: random, human, cleanba_impala, cleanrl_ppo."""
    lines = [line for line in (DATA / "atari57.csv").read_text().splitlines() if not line.startswith("#")]
    header = lines[0].split(",")
    rows = [dict(zip(header, line.split(","), strict=True)) for line in lines[1:]]
    return {row.pop("game"): {name: float(value) for name, value in row.items()} for row in rows}


def human(game: str) -> Scale:
    scale = scale_of(game, "score/mean")
    assert scale is not None and scale.name == "human-normalized"
    return scale


def test_random_and_human_scores_are_those_that_are_in_use() -> None:
    assert {game: (row["random"], row["human"]) for game, row in published().items()} == atari.RANDOM_AND_HUMAN
    assert len(atari.RANDOM_AND_HUMAN) == 57 and all(
        human > random for random, human in atari.RANDOM_AND_HUMAN.values()
    )


@pytest.mark.parametrize(("arm", "expected"), [("cleanba_impala", 1.658), ("cleanrl_ppo", 1.726)])
def test_medians_are_those_published(arm: str, expected: float) -> None:
    scores = [human(game).of(np.array([row[arm]])) for game, row in published().items()]
    assert float(statistics.median(scores)) == pytest.approx(expected, abs=0.0005)
    middle = np.sort(np.concatenate(scores))[14:-14]  # 57 scores: a quarter is 14.25
    assert float(statistics.iqm(scores)) == pytest.approx(middle.mean())


def test_human_and_random_players_are_one_and_zero() -> None:
    assert human("Pong").of(np.array([14.6, -20.7])).tolist() == [1, 0]
    assert human("Breakout").of(np.array(414.7)) == pytest.approx(413 / 28.8)


@pytest.mark.parametrize(
    ("env_id", "game"),
    [
        ("Pong", "Pong"),
        ("ALE/Pong-v5", "Pong"),
        ("PongNoFrameskip-v4", "Pong"),
        ("montezuma_revenge", "MontezumaRevenge"),
        ("UpNDown-v5", "UpNDown"),
        ("CartPole-v1", None),
        ("MinAtar/Breakout-v1", None),
        ("Pooyan", None),
    ],
)
def test_games_are_recognized(env_id: str, game: str | None) -> None:
    assert atari.game(env_id) == game


@pytest.mark.parametrize(
    ("task", "zero", "one"),
    [
        ("StarpilotEasy-v0", 2.5, 64.0),
        ("StarpilotHard-v0", 1.5, 35.0),
        ("FruitbotEasy-v0", -1.5, 32.4),
        ("MinerHard-v0", 1.5, 20.0),
    ],
)
def test_procgen_games_have_the_scale_of_their_difficulty(task: str, zero: float, one: float) -> None:
    scale = scale_of(task, "eval/score")
    assert scale is not None and scale.name == "Procgen-normalized"
    assert scale.of(np.array([zero, one, (zero + one) / 2])).tolist() == pytest.approx([0, 1, 0.5])


@pytest.mark.parametrize("task", ["MazeMemory-v0", "StarpilotExtreme-v0", "PongEasy-v0", "CartPole-v1"])
def test_other_tasks_have_no_scale(task: str) -> None:
    assert scale_of(task, "score/mean") is None


def test_tasks_of_one_scale_are_found() -> None:
    tasks = ["Pong", "StarpilotEasy-v0", "CartPole-v1", "Breakout", "MazeHard-v0"]
    scales = {"human-normalized": ["Pong", "Breakout"], "Procgen-normalized": ["StarpilotEasy-v0", "MazeHard-v0"]}
    assert on_one_scale(tasks, "score/mean") == scales
    assert on_one_scale(tasks, "loss/value") == {}


def test_the_mean_of_one_policy_over_games_lets_none_outweigh_the_others() -> None:
    found = capped_mean({"Breakout": 1.7 + 28.8 / 4, "Pong": 21.0})  # a quarter of a human, and more
    assert found is not None and found[0] == "human-normalized" and found[1] == pytest.approx((0.25 + 1) / 2)
    assert capped_mean({"Breakout": 1.7, "CartPole-v1": 500.0}) is None
    assert capped_mean({"Breakout": 1.7, "StarpilotEasy-v0": 2.5}) is None
    assert capped_mean({}) is None


@pytest.mark.envpool
def test_every_easy_and_hard_game_of_procgen_has_a_scale() -> None:
    from lockstep.envs.base import load_adapter

    envpool = load_adapter("envpool")

    tables = {"Easy": procgen.EASY, "Hard": procgen.HARD}
    games = {name for name in envpool.ids() if envpool.has_levels(name) and name.endswith(("Easy-v0", "Hard-v0"))}
    ranges = {f"{game}{kind}-v0": pair for kind, table in tables.items() for game, pair in table.items()}
    assert games == set(ranges) and len(games) == 32
    assert all(low < high and procgen.bounds(name) == (low, high) for name, (low, high) in ranges.items())
