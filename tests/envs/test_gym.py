"""Gymnasium environments and users' callables."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from playing import assert_same, buffers, play, random_actions, reset
from sentences import explained

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.episodes import Seeds
from lockstep.envs.pool.pool import SteppingPool


def make(env_id: str, num_envs: int = 2, render: bool = False, **settings: Any) -> ShardEnv:
    config = EnvConfig(id=env_id, adapter="gymnasium", **settings)
    return envs.make(config, seed=3, first_index=0, num_envs=num_envs, render=render)


@pytest.mark.parametrize(("env_id", "steps"), [("CartPole-v1", 120), ("MountainCarContinuous-v0", 30)])
def test_playing_equals_stepping_by_hand(env_id: str, steps: int) -> None:
    env = make(env_id, options={"max_episode_steps": 25})
    start = reset(env)[""]
    actions = random_actions(env, steps)
    played = play(env, actions)
    for j in range(2):
        seeds = iter(int(Seeds(3, "train", 0).derive(np.array([j]), np.array([k]))[0]) for k in range(100))
        own = gymnasium.make(env_id, max_episode_steps=25)
        obs, _ = own.reset(seed=next(seeds))
        assert np.array_equal(start[j], np.asarray(obs, np.float32))
        ended = False
        for t, action in enumerate(actions):
            if ended:
                obs, _ = own.reset(seed=next(seeds))
                reward, terminated, truncated, ended = 0.0, False, False, False
                assert played[t].step.first[j]
            else:
                value = action[j] if env_id != "CartPole-v1" else int(action[j])
                obs, reward, terminated, truncated, _ = own.step(value)
                ended = terminated or truncated
                assert not played[t].step.first[j]
            assert np.array_equal(played[t].obs[""][j], np.asarray(obs, np.float32))
            assert played[t].step.reward[j] == np.float32(reward)
            assert played[t].step.terminated[j] == terminated
            assert played[t].step.truncated[j] == (truncated and not terminated)


def test_the_log_of_actions_stays_short_and_exact_over_many_episodes() -> None:
    env, restored = make("CartPole-v1"), make("CartPole-v1")
    reset(env)
    actions = random_actions(env, 2600)
    play(env, actions[:2500])
    state = env.state_dict()
    log = state["actions.0"].base
    assert log is not None and len(log) < 1200, "the state is a view of what is kept"
    restored.load_state_dict(state, buffers(restored))
    assert_same(play(env, actions[2500:]), play(restored, actions[2500:]))


def test_an_episode_without_end_is_truncated_so_that_restoring_stays_short() -> None:
    env = make("Pendulum-v1", reseed_every=10, decorrelate=5, options={"max_episode_steps": -1})
    reset(env)
    played = play(env, random_actions(env, 64))
    for j in range(2):
        ends = [t + 1 for t, (_, step) in enumerate(played) if step.truncated[j]]
        assert 1 <= ends[0] <= 5
        assert ends[1:] == list(range(ends[0] + 11, 65, 11)), "ten steps, and one for the reset"
        assert [t for t, (_, step) in enumerate(played) if step.first[j]] == [end for end in ends if end < 64]
    assert not any(step.terminated.any() for _, step in played)
    assert make("Pendulum-v1").load_state_dict(env.state_dict(), buffers(env)) <= 2 * 10


USER = """
import gymnasium, numpy as np

class Countdown(gymnasium.Env):
    def __init__(self, length=3, render_mode=None):
        self.length = length
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.MultiDiscrete([length + 1, 2], start=[0, 5])
        self.action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return np.array([self.left, 5]), {}
    def step(self, action):
        self.left -= 1
        return np.array([self.left, 6]), float(action), self.left == 0, False, {}
    def render(self):
        return np.full((4, 6, 3), self.left, np.uint8)

def broken():
    raise ValueError("the user's own mistake")

def mistaken():
    return Countdown(lenght=2)

class Words(Countdown):
    def __init__(self):
        super().__init__()
        self.observation_space = gymnasium.spaces.Text(5)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "user_env.py"
    path.write_text(USER)
    return path


def test_a_users_callable_from_a_file(user_file: Path) -> None:
    env = make(f"{user_file}:Countdown", options={"length": 2}, render=True)
    assert np.array_equal(reset(env)[""][0], [0, 0, 1, 1, 0])  # one-hot 2 of 0 … 2, then 5 of 5 … 6
    played = play(env, [np.array([0, 1])] * 3)
    assert np.array_equal(played[1].obs[""][0], [1, 0, 0, 0, 1])
    assert played[1].step.terminated.all() and played[2].step.first.all()
    assert np.array_equal(played[0].step.reward, [0, 1])
    assert env.render(1)[0, 0, 0] == 2


def test_a_constructor_that_raises_is_seen_as_it_is(user_file: Path) -> None:
    with pytest.raises(ValueError, match="the user's own mistake"):
        make(f"{user_file}:broken")


@pytest.mark.parametrize(
    ("lacking", "offer"),
    [
        ((), r"installed\.$"),
        (("mujoco",), "with mujoco: .*pip install"),
        (("ale_py", "envpool"), "with atari and envpool: .*pip install"),
    ],
)
def test_only_extras_that_are_missing_are_offered(
    lacking: tuple[str, ...], offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda *given: None if given[0] in lacking else find(*given))
    with pytest.raises(SettingsError, match=rf"no environment 'CartPole-v9'.*{offer}"):
        make("CartPole-v9")


@pytest.mark.parametrize("env_id", ["gymnasium:CartPole-v9", "gymnasium:CartPol-v1"])
def test_an_id_that_its_module_does_not_register(env_id: str) -> None:
    with pytest.raises(SettingsError, match=f"no environment '{env_id}'. .*CartPole-v1"):
        make(env_id)
    with pytest.raises(SettingsError, match="No module named 'nowhere'"):
        make("nowhere:Pole-v1")


def test_options_that_the_constructor_does_not_take(user_file: Path) -> None:
    for env_id in ("CartPole-v1", f"{user_file}:Countdown"):
        with pytest.raises(SettingsError, match=r"names 'lenght'.*lenght.* --env\.options without any"):
            make(env_id, options={"lenght": 2})
    with pytest.raises(TypeError, match="'lenght'"):
        make(f"{user_file}:mistaken")


def test_arguments_for_a_class_without_a_constructor(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("import gymnasium\n\nclass Bare(gymnasium.Env):\n    pass\n")
    bare = f"{tmp_path}/bare.py:Bare"
    with pytest.raises(SettingsError, match=r"env\.options names 'goal', which .*:Bare does not take"):
        make(bare, options={"goal": 2})
    with pytest.raises(SettingsError, match=r"Bare cannot render images, .* does not take render_mode"):
        make(bare, render=True)
    with pytest.raises(SettingsError, match=r"Bare makes one environment, .* --env\.adapter gymnasium"):
        envs.make(EnvConfig(bare, adapter="vector"), seed=3, first_index=0, num_envs=2)


def test_spaces_that_models_cannot_take_are_errors(user_file: Path) -> None:
    with pytest.raises(SettingsError, match=r"Text\(1, 5"):
        make(f"{user_file}:Words")


@pytest.mark.slow
def test_an_atari_game_of_gymnasium_counts_frames_and_says_how_it_is_run() -> None:
    other: dict[str, str | int | float | bool] = {"frameskip": 3, "repeat_action_probability": 0.0}
    for env_id, options, frames, told in (
        ("ALE/Pong-v5", {}, 4, "sticky actions 0.25, 4 frames an action, at most 108,000 frames"),
        ("ALE/Pong-v5", other, 3, "sticky actions 0, 3 frames an action, at most 108,000 frames"),
        ("CartPole-v1", {}, 1, ""),
    ):
        config = EnvConfig(id=env_id, adapter="gymnasium", options=options)
        pool = SteppingPool(1)
        for stepped in (None, pool):
            shard = envs.make(config, seed=3, first_index=0, num_envs=1, pool=stepped)
            assert (shard.frames_per_step, shard.emulator) == (frames, told)
            shard.close()
        pool.close()


def test_pictures() -> None:
    pytest.importorskip("pygame", reason="gymnasium draws classic control with pygame (its extra classic-control)")
    env = make("CartPole-v1", render=True)
    reset(env)
    assert env.render(1).shape == (400, 600, 3)


def test_pictures_must_be_asked_for() -> None:
    env = make("CartPole-v1")
    reset(env)
    with pytest.raises(SettingsError, match="render=True"):
        env.render()


def test_pictures_of_what_cannot_draw_and_things_that_are_no_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="lockstep/Memory-v0 cannot render images"):
        make("lockstep/Memory-v0", render=True)
    Path("env.py").write_text("def nothing():\n    return None\ndef plain():\n    return object()\n")
    for name in ("nothing", "plain"):
        with pytest.raises(SettingsError, match=rf"env\.id=env\.py:{name} .* gymnasium.Env"):
            make(f"env.py:{name}")
    for bad in ("./env:nothing", "../env:nothing", "/env:nothing"):
        with pytest.raises(SettingsError, match=r"path .*\.py"):
            make(bad)


def test_files_whose_paths_look_alike_are_different_modules(tmp_path: Path) -> None:
    for name in ("a/b.py", "a_b.py", "a-b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"NAME = {name!r}\n")
    loaded = [load_object(f"{tmp_path}/{name}:NAME") for name in ("a/b.py", "a_b.py", "a-b.py")]
    assert loaded == ["a/b.py", "a_b.py", "a-b.py"]


CARELESS = """
from gymnasium.envs.classic_control import CartPoleEnv

class Unclosable(CartPoleEnv):
    def close(self):
        raise RuntimeError("the simulator is gone")

class Listed(CartPoleEnv):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, [reward], *rest

class Faulty(CartPoleEnv):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        if fault == "spaces":
            del self.action_space

    def reset(self, **options):
        if self.fault == "unseeded":
            (lambda options: None)(**options)
        answer = super().reset(**options)
        return answer[0] if self.fault == "old reset" else answer

    def step(self, action):
        if self.fault == "broken":
            raise RuntimeError("the wheel is off")
        obs, reward, terminated, truncated, info = super().step(action)
        if self.fault == "old step":
            return obs, reward, terminated, info
        reward = {"word": "good", "none": None, "two": [1.0, 2.0]}.get(self.fault, reward)
        return obs, reward, terminated, truncated, info
"""


@pytest.mark.parametrize(
    ("adapter", "name"), [("gymnasium", "id"), ("gymnasium", "disable_env_checker"), ("vector", "id")]
)
def test_options_cannot_set_what_lockstep_gives(adapter: str, name: str) -> None:
    config = EnvConfig(id="CartPole-v1", adapter=adapter, options={name: "x"})
    with pytest.raises(SettingsError, match=rf"env\.options cannot set {name}\b"):
        envs.make(config, seed=3, first_index=0, num_envs=2)


def test_an_environment_that_cannot_be_closed_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    env = make(f"{tmp_path}/careless.py:Unclosable")
    reset(env)
    env.close()
    assert capsys.readouterr().err.count("RuntimeError('the simulator is gone')") == 2


def test_rewards_may_be_arrays_of_one_number(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    env = make(f"{tmp_path}/careless.py:Listed")
    reset(env)
    assert play(env, random_actions(env, 1))[0].step.reward.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("word", "returned the reward 'good', which is not a number"),
        ("none", "returned the reward None, which is not a number"),
        ("two", "returned the reward .1.0, 2.0., which is not a number"),
        ("old step", "step returned a tuple of 4, .*observation, reward, terminated"),
        ("unseeded", "reset does not take a seed .* reset.self, ., seed=None, options=None"),
        ("spaces", "careless.py:Faulty has no action_space. Let its constructor set self.action_space to a"),
        ("old reset", "reset returned a ndarray, .*observation, info"),
    ],
)
def test_what_environments_may_not_return_is_explained(tmp_path: Path, fault: str, words: str) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    with pytest.raises(SettingsError, match=words):
        env = make(f"{tmp_path}/careless.py:Faulty", options={"fault": fault})
        reset(env)
        play(env, random_actions(env, 1))


def test_an_error_says_what_the_environment_was_doing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    env = make(f"{tmp_path}/careless.py:Faulty", options={"fault": "broken"})
    reset(env)
    with pytest.raises(RuntimeError, match="the wheel is off") as raised:
        play(env, [np.array([1, 0])])
    told = explained(raised.value, capsys.readouterr().err)
    assert re.search(r"Environment \d+ .*step 1 .*action 1\. .*seed .*\d+", told)


def test_an_error_of_the_first_reset_is_seen_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "careless.py").write_text(
        f"{CARELESS}\nclass Unready(Faulty):\n    def reset(self, **given):\n        raise RuntimeError('no wheel')\n"
    )
    env = make(f"{tmp_path}/careless.py:Unready", options={"fault": ""})
    with pytest.raises(RuntimeError, match="no wheel") as raised:
        reset(env)
    told = explained(raised.value, capsys.readouterr().err)
    assert re.search(r"Environment \d+ .*when it was reset\. .*seed .*\d+", told)
