"""Doom's matches with their engines: an episode follows from its seed, and nothing hangs or is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import TIMEOUT, until
from doom_matches import SMALL, check_that_layouts_agree, needs_vizdoom, small
from workers import Workers

from lockstep import envs, recipes
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig
from lockstep.envs.doom import engine as engines
from lockstep.envs.doom import network
from lockstep.envs.doom.deathmatch import Deathmatch
from lockstep.envs.doom.engine import Engine, EngineError

pytestmark = needs_vizdoom


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    current, temporary = tmp_path_factory.mktemp("current"), tmp_path_factory.mktemp("temporary")
    monkeypatch.chdir(current)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    instances, unlink = [], engines.unlink

    def noting(marks: Path) -> None:
        instances.extend(mark.name for mark in marks.iterdir())
        unlink(marks)

    monkeypatch.setattr(engines, "unlink", noting)
    yield
    assert not list(current.glob("_vizdoom*"))
    all_engines = f"lockstep-vizdoom-{os.getuid()}"  # a folder that stays
    assert {each.name for each in temporary.glob("lockstep-vizdoom-*")} <= {all_engines}
    assert not [file.name for file in Path("/dev/shm").iterdir() if file.name.endswith(tuple(instances))]


def played(env: Any, seed: int, steps: int = 60) -> list[Any]:
    """What an episode with random actions shows."""
    draw = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    seen = [obs["image"].tobytes(), obs["measurements"].tolist()]
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(draw.integers(env.action_space.nvec))
        seen += [obs["image"].tobytes(), obs["measurements"].tolist(), reward, terminated, truncated, info]
    return seen


@pytest.fixture
def match() -> Iterator[Callable[..., Deathmatch]]:
    made: list[Deathmatch] = []

    def make(**options: Any) -> Deathmatch:
        made.append(Deathmatch(**{**SMALL, "minutes": 1, **options}))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_a_match_follows_from_its_seed_and_actions(match: Callable[..., Deathmatch]) -> None:
    first, second = match(bots=3), match(bots=3)
    expected = played(first, 3)
    assert played(second, 5) != expected
    assert played(second, 3) == expected, "whatever was played before"
    assert first.reset(seed=3)[0]["measurements"][3] == 4, "three bots and the player"


def test_bots_fight_and_frags_are_the_reward(match: Callable[..., Deathmatch]) -> None:
    env = match(bots=7, minutes=0.5)
    env.reset(seed=1)
    draw = np.random.default_rng(0)
    rewards, info, truncated = 0.0, {}, []
    for _ in range(525):
        _, reward, terminated, cut, info = env.step(draw.integers(env.action_space.nvec))  # type: ignore[attr-defined]
        rewards, truncated = rewards + reward, [*truncated, cut]
        assert not terminated
    assert truncated == [False] * 524 + [True]
    assert rewards == info["frags"] and info["deaths"] > 0 and 1 <= info["place"] <= 8


def test_shaping_changes_rewards_and_nothing_else(match: Callable[..., Deathmatch]) -> None:
    plain, shaped = (played(match(bots=3, shaping=shaping), 3) for shaping in (False, True))
    assert plain[::6] == shaped[::6] and plain[1::6] == shaped[1::6]
    assert plain[4::6] != shaped[4::6]


def test_the_weapons_options_and_video(match: Callable[..., Deathmatch]) -> None:
    env = match(bots=0, map="map02", actions="compact", render_mode="rgb_array")
    env.reset(seed=1)
    assert env.action_space.nvec.tolist() == [3, 3, 2, 2, 11]  # type: ignore[attr-defined]
    assert env.render().shape == (120, 160, 3) and env.render().std() > 5


@pytest.mark.full  # a duel is a match, too
def test_layouts_and_resumed_runs_agree_on_a_deathmatch(tmp_path: Path, workers: Workers) -> None:
    check_that_layouts_agree(small(recipes.appo_vizdoom_deathmatch, bots=2), tmp_path, workers)


def test_an_engine_that_is_killed_is_an_error(match: Callable[..., Deathmatch]) -> None:
    env = match(bots=1)
    env.reset(seed=1)
    assert env._engine is not None
    assert env._engine.pid
    os.kill(env._engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="player agent ended"):
        env.step(np.zeros(7, int))


def test_an_engine_that_hangs_is_ended(match: Callable[..., Deathmatch], monkeypatch: pytest.MonkeyPatch) -> None:
    env = match(bots=1)
    env.reset(seed=1)
    assert env._engine is not None
    assert env._engine.pid
    os.kill(env._engine.pid, signal.SIGSTOP)
    monkeypatch.setattr(engines, "PATIENCE", 1)
    with pytest.raises(EngineError, match="did not answer for 1 seconds"):
        env.step(np.zeros(7, int))


def test_an_engine_that_cannot_start_is_an_error(
    match: Callable[..., Deathmatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = engines.starter
    monkeypatch.setattr(engines, "starter", lambda folder, engine, watch: start(folder, "/bin/false", watch=watch))
    with pytest.raises(EngineError, match="player agent could not start: it ended"):
        match().reset(seed=1)


def test_a_map_that_the_file_lacks_is_an_error(match: Callable[..., Deathmatch]) -> None:
    with pytest.raises(SettingsError, match=r"map09: .*cig\.wad has no such map. It has map01, map02"):
        match(map="map09").reset(seed=1)


# Duels


def duel(**options: Any) -> Any:
    pytest.importorskip("pettingzoo")
    from lockstep.envs.doom.duel import Duel

    return Duel(**{**SMALL, "minutes": 0.1, **options})


def fought(env: Any, seed: int, steps: int = 60, pause: Callable[[], None] = lambda: None) -> list[Any]:
    """What a duel with random actions shows to both players."""
    draw = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    seen = []
    for _ in range(steps):
        seen += [each[key].tobytes() for each in obs.values() for key in ("image", "measurements")]
        pause()
        obs, *rest = env.step({name: draw.integers(env.action_space(name).nvec) for name in env.agents})
        seen.append(rest)
    return seen


def test_a_duel_follows_from_its_seed_and_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the players' engines take for each tic."""
    env = duel(shaping=True)
    try:
        expected = fought(env, 3)
        draw, act = np.random.default_rng(), Engine.act

        def slowly(self: Engine, *args: Any, **keywords: Any) -> None:
            time.sleep(max(0.0, draw.uniform(-0.01, 0.01)))
            act(self, *args, **keywords)

        monkeypatch.setattr(Engine, "act", slowly)
        assert fought(env, 3) == expected
    finally:
        env.close()


def test_neither_player_acts_before_the_other() -> None:
    """Both turn in one step. The turns show in the same tic."""
    env = duel(frame_skip=1)
    try:
        env.reset(seed=1)
        turned = {name: [] for name in env.agents}
        for choice in (10, 20, 10, 10, 10):
            env.step({name: np.array([0, 0, 0, 0, 0, 0, choice]) for name in env.agents})
            for name, player in zip(turned, env._players, strict=True):
                turned[name].append(player.now["ANGLE"])
        for angles in turned.values():
            assert (np.diff(angles) != 0).tolist() == [False, True, False, False]
    finally:
        env.close()


def test_the_player_with_more_frags_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    env = duel(minutes=0.01)
    try:
        for frags, expected in (((2, -1), [1, -1]), ((0, 3), [-1, 1]), ((1, 1), [0, 0])):
            for player, count in zip(env._players, frags, strict=True):
                player.now = {"FRAGCOUNT": float(count)}
            assert env._result() == expected
        env.reset(seed=1)
        still = {name: np.array([0, 0, 0, 0, 0, 0, 10]) for name in env.agents}
        steps = [env.step(still) for _ in range(10)]
        assert [step[2]["player_0"] for step in steps] == [False] * 9 + [True] and env.agents == []
        assert [step[1] for step in steps] == [{"player_0": 0.0, "player_1": 0.0}] * 10
        numbers = {"frags": 0.0, "deaths": 0.0, "damage": 0.0}
        assert [step[4]["player_1"] for step in steps] == [numbers] * 9 + [{**numbers, "won": 0.5}]
        env.reset(seed=1)
        monkeypatch.setattr(env, "_result", lambda: [-1.0, 1.0])
        infos = [env.step(still)[4] for _ in range(10)][-1]
        assert [infos[name]["won"] for name in ("player_0", "player_1")] == [0.0, 1.0]
    finally:
        env.close()


def test_layouts_and_resumed_runs_agree_on_a_duel(tmp_path: Path, workers: Workers) -> None:
    pytest.importorskip("pettingzoo")
    check_that_layouts_agree(small(recipes.appo_vizdoom_duel), tmp_path, workers)


def test_a_port_that_is_taken_is_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    taken.bind(("", 0))
    free, ports = network._free_port, []

    def first_the_taken_one() -> int:
        ports.append(free() if ports else taken.getsockname()[1])
        return ports[-1]

    monkeypatch.setattr(network, "_free_port", first_the_taken_one)
    env = duel()
    try:
        env.reset(seed=1)
        assert len(ports) >= 2  # on a busy machine, further attempts may fail, too
        assert ports[0] != ports[-1]
    finally:
        env.close()
        taken.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_duel_whose_engine_is_killed_is_an_error(number: int) -> None:
    env = duel()
    try:
        env.reset(seed=1)
        os.kill(env._engines[number].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=f"player_{number} ended"):
            for _ in range(3):
                env.step({name: np.zeros(7, int) for name in env.agents})
    finally:
        env.close()


ENDING = """
import sys
from lockstep.envs.doom.duel import Duel
env = Duel(img_width=64, img_height=36)
env.reset(seed=1)
print(*[pid for engine in env._engines for pid in engine._pids], flush=True)
sys.stdin.read()
"""


def test_engines_end_with_a_killed_process() -> None:
    pytest.importorskip("pettingzoo")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", ENDING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 4 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.kill()
    process.wait(TIMEOUT)
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids), "engines to end", 0.05)
    process.communicate()


def test_ids_lead_to_the_libraries_that_play_them() -> None:
    pytest.importorskip("pettingzoo")
    assert envs.resolve(EnvConfig(id="vizdoom/Deathmatch")).adapter == "gymnasium"
    found = envs.resolve(EnvConfig(id="vizdoom/Duel"))
    assert (found.id, found.adapter) == ("pettingzoo/vizdoom/Duel", "gymnasium")
    with pytest.raises(SettingsError, match="frags"):
        envs.make(EnvConfig(id="vizdoom/Duel", options={"frags": 1}), seed=1, first_index=0, num_envs=2)
