"""Doom's matches without an engine: shaped rewards, pictures and options."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import recipes
from lockstep.config.settings import SettingsError
from lockstep.envs.doom.deathmatch import Deathmatch
from lockstep.envs.doom.player import MEASUREMENTS, Player, Rules, maps_in
from lockstep.envs.doom.shaping import NEEDED, SELF_PLAY, Shaping, Weights, supplies

ALIVE = {**dict.fromkeys(NEEDED, 0.0), "HEALTH": 100.0, "SELECTED_WEAPON": 2.0, "SELECTED_WEAPON_AMMO": 50.0}


def rewards(weights: Weights, *changes: dict[str, float]) -> list[float]:
    """Of steps that change these variables, one after the other."""
    shaping, now = Shaping(weights), dict(ALIVE)
    shaping.begin(now)
    found = []
    for change in changes:
        now = {**now, **change}
        found.append(shaping.reward(now))
    return found


@pytest.mark.parametrize(
    ("change", "expected", "in_self_play"),
    [
        ({"FRAGCOUNT": 2.0}, 2.0, 2.0),
        ({"FRAGCOUNT": -1.0}, -1.5, -0.001),
        ({"DEATHCOUNT": 1.0}, -0.75, -1.0),
        ({"HITCOUNT": 3.0}, 0.03, 0.0),
        ({"HITCOUNT": 9.0}, 0.05, 0.0),  # at most 5
        ({"DAMAGECOUNT": 60.0}, 0.18, 0.6),
        ({"DAMAGECOUNT": 500.0}, 0.6, 2.0),  # at most 200
        ({"HEALTH": 125.0}, 0.125, 0.25),
        ({"HEALTH": 60.0}, -0.12, -0.4),
        ({"HEALTH": -80.0}, -0.3, -1.0),  # dead is dead
        ({"ARMOR": 100.0}, 0.5, 0.5),
        ({"WEAPON3": 1.0}, 0.1, 0.1),  # 0.02 × 5
        ({"WEAPON7": 1.0}, 0.2, 0.2),
        ({"WEAPON2": 1.0}, 0.02, 0.02),
        ({"AMMO5": 10.0}, 0.01, 0.01),  # 10 × 0.0002 × 5
        ({"FRAGCOUNT": 1.0, "DAMAGECOUNT": 100.0, "HEALTH": 90.0}, 1.27, 1.9),  # 1 + 0.3 - 0.03; 1 + 1 - 0.1
    ],
)
def test_a_change_is_worth_what_the_weights_say(change: dict[str, float], expected: float, in_self_play: float) -> None:
    assert rewards(Weights(), change) == pytest.approx([expected])
    assert rewards(SELF_PLAY, change) == pytest.approx([in_self_play])


def test_what_is_found_is_worth_more_than_what_is_lost() -> None:
    found = rewards(Weights(), {"AMMO2": 20.0, "ARMOR": 100.0, "WEAPON6": 1.0}, dict.fromkeys(("AMMO2", "ARMOR"), 0.0))
    assert found == pytest.approx([0.004 + 0.5 + 0.2, -0.002 - 0.1])
    assert rewards(Weights(), {"WEAPON6": 1.0}, {"WEAPON6": 0.0})[1] == pytest.approx(-0.1)


def test_only_changes_since_the_step_before_count() -> None:
    assert rewards(Weights(), {"FRAGCOUNT": 1.0}, {}, {"FRAGCOUNT": 3.0}) == pytest.approx([1.0, 0.0, 2.0])


def test_what_a_dead_player_gets_back_is_no_reward() -> None:
    dying = {"HEALTH": 0.0, "DEATHCOUNT": 1.0, "DEAD": 1.0, "WEAPON5": 1.0}
    back = {"HEALTH": 100.0, "DEAD": 0.0, "WEAPON5": 0.0}
    assert rewards(Weights(), dying, {}, back, {"HEALTH": 90.0}) == pytest.approx([-0.3 - 0.75 + 0.1, 0.0, 0.0, -0.03])


def test_a_weapon_is_rewarded_after_five_steps_if_it_is_loaded() -> None:
    held = {"SELECTED_WEAPON": 6.0}
    assert rewards(Weights(), held, *[{}] * 5) == pytest.approx([0, 0, 0, 0, 0.002, 0.002])  # 0.0002 × 10
    assert rewards(Weights(), held, {}, {}, {"SELECTED_WEAPON": 5.0}, {}, {}) == [0.0] * 6
    assert rewards(Weights(), {"SELECTED_WEAPON_AMMO": 0.0}, *[{}] * 6) == [0.0] * 7
    assert rewards(Weights(), {"SELECTED_WEAPON": -1.0}, *[{}] * 6) == [0.0] * 7  # none


def test_supplies_of_several_games_are_worth_what_the_weights_say() -> None:
    before = {"HEALTH": [100, 50, 20, 80], "AMMO2": [20, 10, 0, 5], "AMMO5": [0, 0, 0, 3], "KILLCOUNT": [0, 0, 0, 0]}
    now = {"HEALTH": [90, 75, -5, 80], "AMMO2": [18, 30, 0, 5], "AMMO5": [0, 0, 10, 3], "KILLCOUNT": [1, 0, 0, 0]}
    # 10 × 0.003 + 2 × 0.0001; 25 × 0.005 + 20 × 0.0002; dead is dead: 20 × 0.003, and 10 × 0.0002 × 5
    expected = [-0.03 - 0.0002, 0.125 + 0.004, -0.06 + 0.01, 0.0]
    found = supplies(Weights(), *({name: np.array(x, np.int32) for name, x in each.items()} for each in (before, now)))
    assert found.tolist() == pytest.approx(expected)


def test_a_weight_is_an_option() -> None:
    rules = Rules.of({"frag": 3, "health_lost": 0.5}, map="map01", weights=SELF_PLAY)
    assert rules.weights.frag == 3.0 and rules.weights.death == SELF_PLAY.death == 1.0
    assert rewards(rules.weights, {"FRAGCOUNT": 1.0, "HEALTH": 98.0}) == pytest.approx([3.0 - 1.0])


def slowly_scaled(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear interpolation, pixel by pixel, in float64."""
    out = np.zeros((3, height, width))
    for y in range(height):
        for x in range(width):
            v, u = (y + 0.5) * 120 / height - 0.5, (x + 0.5) * 160 / width - 0.5
            i, j = int(v), int(u)
            a, b = v - i, u - j
            top = picture[:, i, j] * (1 - b) + picture[:, i, j + 1] * b
            below = picture[:, i + 1, j] * (1 - b) + picture[:, i + 1, j + 1] * b
            out[:, y, x] = top * (1 - a) + below * a
    return out


@pytest.mark.parametrize(("height", "width"), [(72, 128), (36, 64)])
def test_pictures_are_scaled_bilinearly(height: int, width: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (3, 120, 160), dtype=np.uint8)
    player = Player(Rules("map01", Weights(), img_height=height, img_width=width, measurements=False))
    player.picture = picture
    seen = player.observation()
    assert seen.dtype == np.uint8 and player.observation_space.contains(seen)
    assert np.abs(seen - slowly_scaled(picture, height, width)).max() < 1.5
    player.picture = np.full_like(picture, 255)
    assert (player.observation() == 255).all()


def test_measurements_are_what_the_game_shows() -> None:
    player = Player(Rules("map01", Weights()))
    numbers = {**dict.fromkeys(player.variables, 0.0), "HEALTH": -20.0, "FRAGCOUNT": -2.0, "AMMO3": 7.0, "ARMOR": 50.0}
    player.begin(np.zeros((3, 120, 160), np.uint8), np.array([numbers[name] for name in player.variables]))
    seen = dict(zip(MEASUREMENTS, player.observation()["measurements"].tolist(), strict=True))
    assert (seen["HEALTH"], seen["FRAGCOUNT"], seen["AMMO3"], seen["ARMOR"], seen["WEAPON1"]) == (0, -2, 7, 50, 0)


def test_the_maps_of_a_file_are_found(tmp_path: Path) -> None:
    lumps = ["MAP01", "THINGS", "LINEDEFS", "E1M3", "TEXTMAP", "ENDMAP", "SCRIPTS"]
    directory = b"".join(struct.pack("<ii8s", 0, 0, name.encode()) for name in lumps)
    (tmp_path / "some.wad").write_bytes(struct.pack("<4sii", b"PWAD", len(lumps), 12) + directory)
    assert maps_in(tmp_path / "some.wad") == ["map01", "e1m3"]
    (tmp_path / "other.wad").write_text("something else")
    assert maps_in(tmp_path / "other.wad") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bots": 16}, "bots=16 must be a whole number from 0 to 15"),
        ({"bots": "many"}, "bots='many'"),
        ({"actions": "few"}, "full or compact"),
        ({"frame_skip": 0}, "frame_skip=0 must be a whole number from 1 to"),
        ({"img_width": 200}, "from 1 to 160"),
        ({"minutes": 0}, "minutes=0 must be above 0"),
        ({"minutes": 0.01, "frame_skip": 40}, "from 1 to 21"),
        ({"shaping": "yes"}, "shaping='yes' must be true or false"),
        ({"measurements": 0}, "measurements=0 must be true or false"),
        ({"wad": "none.wad"}, r"none\.wad: there is no such file"),
        ({"map": "map 01; quit"}, "name of a map"),
        ({"frag": "much"}, "frag='much' must be a number"),
        ({"death": -1.0}, r"death=-1\.0 must be a number that is 0 or larger"),
    ],
)
def test_options_that_cannot_work_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Deathmatch(**options)


def test_an_unknown_option_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'frags'"):
        Deathmatch(frags=2)


def test_a_match_has_the_papers_length_heads_and_deviations() -> None:
    env = Deathmatch()
    assert env.action_space.nvec.tolist() == [3, 3, 2, 2, 2, 8, 21]  # type: ignore[attr-defined]
    assert Rules.of({}, map="map02", weights=Weights()).steps == 4 * 60 * 35 // 2 == 4200
    experiment = recipes.appo_vizdoom_deathmatch()
    algorithm: Any = experiment.algorithm
    assert algorithm.discount == 0.995 and env.tics_per_action == 2
    assert experiment.samples_per_iteration == 2048
    assert experiment.env.training().options["shaping"] is True and "shaping" not in experiment.env.options
