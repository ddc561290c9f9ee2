"""Doom: action heads, measurements, rewards, and engines that leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import TIMEOUT, Child, until
from gymnasium import spaces
from playing import Moment, play, reset

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv

pytestmark = pytest.mark.envpool


@contextlib.contextmanager
def playing(scenario: str, num_envs: int = 1, **options: Any) -> Iterator[ShardEnv]:
    config = EnvConfig(id=f"vizdoom/{scenario}", options=options)
    env = envs.make(config, seed=3, first_index=0, num_envs=num_envs)
    try:
        yield env
    finally:
        env.close()


def repeat(*choices: int, steps: int) -> list[np.ndarray]:
    return [np.array([choices])] * steps


def until_the_end(moments: list[Moment]) -> list[Moment]:
    return moments[: 1 + next(t for t, m in enumerate(moments) if m.step.terminated[0] or m.step.truncated[0])]


@pytest.fixture(autouse=True)
def _the_current_folder_stays_empty(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("current")
    monkeypatch.chdir(folder)
    yield
    assert not list(folder.iterdir())


def test_spaces_and_buttons() -> None:
    from lockstep.envs.vizdoom import SCENARIOS  # imports EnvPool

    with playing("Battle") as env:
        assert isinstance(env.observation_space, spaces.Dict) and isinstance(env.action_space, spaces.MultiDiscrete)
        assert env.observation_space["image"] == spaces.Box(0, 255, (3, 72, 128), np.uint8)
        assert env.observation_space["measurements"].shape == (11,)
        assert env.action_space.nvec.tolist() == [3, 3, 2, 2, 2, 8, 21]
        assert env.frames_per_step == 4
        choices = np.array([[0, 0, 0, 0, 0, 0, 10], [1, 2, 1, 0, 1, 7, 0], [2, 1, 0, 1, 0, 1, 20]])
        buttons = SCENARIOS["Battle"].actions["full"].buttons(choices)
        nothing = [0.0] * 15
        forward_left_shooting = [1, 0, 0, 1, 1, 0, 1, *[0] * 6, 1, -12.5]
        back_right_running = [0, 1, 1, 0, 0, 1, 0, 1, *[0] * 6, 12.5]
        assert buttons.tolist() == [nothing, forward_left_shooting, back_right_running]
    with playing("Battle2", actions="compact", measurements=False) as env:
        assert env.action_space.nvec.tolist() == [3, 3, 2, 2, 11]  # type: ignore[attr-defined]
        assert env.observation_space == spaces.Box(0, 255, (3, 72, 128), np.uint8)
    with playing("Battle", actions="single", measurements=False) as env:
        assert env.action_space == spaces.Discrete(9)
        buttons = SCENARIOS["Battle"].actions["single"].buttons(np.array([[0], [1], [7]]))
        assert buttons.tolist() == [[0.0] * 8, [1.0] + [0.0] * 7, [0.0] * 6 + [1.0, 0.0]]
        reset(env)
        assert play(env, [np.array([6])])[0].obs[""].shape == (1, 3, 72, 128)


def test_turning_there_and_back_shows_what_was_seen_before() -> None:
    with playing("HealthGathering", measurements=False) as env:
        reset(env)
        turns = [0] * 10 + [1, 1, 1, 0, 2, 2, 2, 0]
        played = play(env, [np.array([[turn, 0]]) for turn in turns])
        before, there, back = (played[t].obs[""].astype(int) for t in (9, 13, 17))
    assert np.abs(there - before).mean() > 5 * np.abs(back - before).mean()


def test_standing_in_acid_is_rewarded_by_the_tic_until_health_is_gone() -> None:
    with playing("HealthGathering") as env:
        health = [reset(env)["measurements"][0, 0]]
        episode = until_the_end(play(env, repeat(0, 0, steps=120)))
    health += [m.obs["measurements"][0, 0] for m in episode]
    assert all(b <= a for a, b in pairwise(health)) and health[0] > 90 and health[-1] < 10
    assert [float(m.step.reward[0]) for m in episode] == [4.0] * (len(episode) - 1) + [4.0 - 100.0]
    assert episode[-1].step.terminated[0] and not episode[-1].step.truncated[0]


def test_shots_cost_and_the_monsters_death_pays() -> None:
    with playing("Basic") as env:
        reset(env)
        left = play(env, [a for _ in range(20) for a in (np.array([[1, 0]]), np.array([[1, 1]]))])
        reset(env)
        idle = until_the_end(play(env, repeat(0, 0, steps=80)))
    assert [float(m.step.reward[0]) for m in idle] == [-4.0] * 75
    assert idle[-1].step.truncated[0], "a time limit, which is bootstrapped"
    rewards = {float(m.step.reward[0]) for m in left if not m.step.first[0]}
    assert {-4.0, -9.0} <= rewards <= {-4.0, -9.0, 104.0, 99.0}


def test_kills_are_the_score_of_a_battle() -> None:
    with playing("Battle", num_envs=4) as env:
        kills = [reset(env)["measurements"][:, -1]]
        rng = np.random.default_rng(0)
        choices = [np.stack([rng.integers(n, size=4) for n in (3, 1, 2, 1, 1, 1, 21)], -1) for _ in range(200)]
        played = play(env, choices)
    kills += [m.obs["measurements"][:, -1] for m in played]
    assert max(k.max() for k in kills) >= 1, "the test saw no kill"
    for before, after, moment in zip(kills, kills[1:], played):
        going = ~moment.step.first
        assert np.array_equal(moment.step.reward[going], (after - before)[going])


def test_metrics_are_the_games_variables_over_an_episode() -> None:
    metrics, options = ("HEALTH", "HEALTH:mean"), {"max_episode_steps": 30}
    config = EnvConfig(id="vizdoom/HealthGathering", metrics=metrics, options=options)
    with contextlib.closing(envs.make(config, seed=3, first_index=0, num_envs=2)) as env:
        reset(env)
        episode = until_the_end(play(env, [np.zeros((2, 2), np.int64)] * 40))
    health = np.array([m.obs["measurements"][:, 0] for m in episode])
    assert health[-1].min() < health[0].min(), "the test saw no change"
    assert episode[-1].step.metrics == pytest.approx(np.stack([health[-1], health.mean(0)], -1))


@pytest.mark.parametrize(
    ("weights", "found", "lost", "loaded", "spent"),
    [({}, 0.005, 0.003, 0.0012, 0.0006), ({"health": 0.1, "ammo_spent": 0.0}, 0.1, 0.003, 0.0012, 0.0)],
)
def test_a_battles_shaped_reward_counts_health_and_bullets_too(
    weights: dict[str, float], found: float, lost: float, loaded: float, spent: float
) -> None:
    # Bullets are the ammunition of slots 2 and 4, which are worth 1 and 5: 0.0002 × 6 and 0.0001 × 6 each.
    with playing("Battle", num_envs=8, actions="compact", shaping=True, **weights) as env:
        numbers = [reset(env)["measurements"].astype(float)]
        rng = np.random.default_rng(0)
        forward = [np.minimum(1, rng.integers(4, size=8)) for _ in range(150)]
        choices = [np.stack([f, *(rng.integers(n, size=8) for n in (3, 2, 2, 11))], -1) for f in forward]
        played = play(env, choices)
    numbers += [m.obs["measurements"].astype(float) for m in played]
    seen = set()
    for before, after, moment in zip(numbers, numbers[1:], played):
        for b in np.flatnonzero(~moment.step.first):
            health, bullets = after[b, 0] - before[b, 0], max(0, after[b, 4]) - max(0, before[b, 4])
            kills = after[b, -1] - before[b, -1]
            expected = kills + health * (found if health > 0 else lost) + bullets * (loaded if bullets > 0 else spent)
            assert moment.step.reward[b] == pytest.approx(expected, abs=1e-6)
            seen |= {("health", np.sign(health)), ("bullets", np.sign(bullets)), ("kills", np.sign(kills))}
    assert {("health", 1), ("health", -1), ("bullets", 1), ("bullets", -1), ("kills", 1)} <= seen


ENDING = """
import os, signal, sys
import numpy as np
from lockstep import envs
from lockstep.envs import EnvConfig
env = envs.make(EnvConfig(id="vizdoom/Basic", options={"measurements": False}), seed=1, first_index=0, num_envs=2)
out = np.zeros((2, 3, 72, 128), np.uint8)
env.reset(out)
print("ready", flush=True)
for line in sys.stdin:
    env.send(np.zeros((2, 2), np.int64))
    env.recv(out)
    print("stepped", flush=True)
"""


class Player:
    """A process that steps two games at each line that it is given."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENDING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.answer() == "ready"
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        self.engines = [int(pid) for file in children for pid in file.read_text().split()]
        assert len(self.engines) == 2
        arguments = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in self.engines]
        self.instances = [each[each.index("+viz_instance_id") + 1] for each in arguments]

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def step(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def left_behind(self) -> list[str]:
        memory = [file.name for file in Path("/dev/shm").iterdir() if any(i in file.name for i in self.instances)]
        return memory + [str(pid) for pid in self.engines if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it has ended
        return False


@pytest.fixture
def player() -> Iterator[Player]:
    player = Player()
    yield player
    player.process.kill()
    player.process.communicate()


def await_the_end_of(player: Player) -> None:
    until(lambda: not player.left_behind(), "engines to end and their memory to be freed", 0.05)


def test_engines_end_with_a_killed_process_and_leave_no_memory(player: Player) -> None:
    assert player.step() == "stepped"
    player.process.kill()
    await_the_end_of(player)


def test_engines_do_not_hear_what_is_meant_for_the_trainer(player: Player) -> None:
    for engine in player.engines:
        os.kill(engine, signal.SIGINT)
        os.kill(engine, signal.SIGTERM)
    assert player.step() == "stepped"


def test_a_process_does_not_wait_for_an_engine_that_was_killed(player: Player) -> None:
    os.kill(player.engines[0], signal.SIGKILL)
    assert player.step() == ""
    assert player.process.wait(TIMEOUT) == -signal.SIGABRT
    await_the_end_of(player)


@pytest.mark.parametrize("pause", [0.0, 1.0])
def test_a_command_that_is_told_to_end_leaves_no_memory(pause: float, start: Callable[..., Child]) -> None:
    child = start("check-env", "vizdoom/Basic", "--steps", "100000")

    def plays() -> bool:
        for pid in child.members():
            with contextlib.suppress(OSError):  # it has ended
                if b"+viz_instance_id" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return True
        return False

    child.until(plays, "an engine")
    time.sleep(pause)  # while engines start; while they play
    child.signal(signal.SIGTERM)
    child.process.wait()
    shutil.rmtree(child.temporary / f"lockstep-vizdoom-{os.getuid()}")  # all engines' folder, which stays
    assert child.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("vizdoom/Batle", {}, "Did you mean vizdoom/Battle"),
        ("vizdoom/Battle", {"actions": "few"}, "full or compact or single"),
        ("vizdoom/Battle", {"shaping": 1}, "shaping=1 must be true or false"),
        ("vizdoom/Battle", {"health": -1.0}, r"health=-1\.0 must be a number that is 0 or larger"),
        ("vizdoom/Basic", {"shaping": True}, "shaping is for battles and matches"),
        ("vizdoom/Battle", {"frameskip": 2}, "Did you mean 'frame_skip'"),
        ("vizdoom/Battle", {"frame_skip": 0}, "whole number from 1 to"),
        ("vizdoom/Battle", {"frame_skip": "many"}, "whole number from 1 to"),
        ("vizdoom/Battle", {"frame_skip": 10_000}, "whole number from 1 to"),
    ],
)
def test_settings_that_cannot_work_are_errors(env_id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        envs.make(EnvConfig(id=env_id, options=options), seed=1, first_index=0, num_envs=1)


def test_there_are_no_videos() -> None:
    with pytest.raises(SettingsError, match=r"vizdoom/Basic .*render images"):
        envs.make(EnvConfig(id="vizdoom/Basic"), seed=1, first_index=0, num_envs=1, render=True)


def test_too_little_shared_memory_is_an_error_before_any_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    little = type("Little", (), {"f_bavail": 1000, "f_frsize": 4096})
    with playing("Basic", num_envs=2) as env:
        monkeypatch.setattr(os, "statvfs", lambda _: little)
        with pytest.raises(SettingsError, match=r"5 MB .*/dev/shm .*4 MB"):
            reset(env)


def test_engines_raise_the_limit_of_open_files_as_far_as_the_system_allows() -> None:
    asks = """
import os, resource
from lockstep.config.settings import SettingsError
from lockstep.envs.doom.starting import check_room

opened = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 20, opened + 116))
try:
    check_room(100)
    check_room(101)
except SettingsError as error:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - opened, error)
"""
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("116 101 games of Doom need as many open files"), done.stderr
    assert "allows 100 more (ulimit -Hn)" in done.stdout and "--ulimit nofile" in done.stdout
