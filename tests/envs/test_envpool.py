"""EnvPool: reseeding, truncation, its first stack, conversions of its families' observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playing import buffers, equal, play, random_actions, reset, snapshot

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.envpool_shard import EnvPoolShard, settings_of

pytestmark = pytest.mark.envpool


@pytest.fixture(autouse=True)
def _mujoco_writes_its_log_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(env_id: str, num_envs: int = 2, render: bool = False, **settings: Any) -> ShardEnv:
    config = EnvConfig(id=env_id, adapter="envpool", **settings)
    return envs.make(config, seed=3, first_index=0, num_envs=num_envs, render=render)


def test_reseeding_is_due_after_its_steps_and_starts_new_episodes() -> None:
    env = make("CartPole-v1", reseed_every=30)
    start = reset(env)[""]
    actions = random_actions(env, 30)
    play(env, actions[:29])
    assert not env.reseed_due()
    play(env, actions[29:])
    assert env.reseed_due()
    out = buffers(env)
    env.reseed(out)
    assert not env.reseed_due() and int(env.state_dict()["count"]) == 1
    assert not np.array_equal(start, snapshot(out)[""])
    second = play(env, actions)
    env.reseed(out)
    assert not equal(second, play(env, actions))
    assert np.array_equal(reset(env)[""], start)


def test_time_limits_truncate_and_falling_terminates(tmp_path: Path) -> None:
    env = make("HalfCheetah-v4", num_envs=1)
    reset(env)
    assert env.observation_space.dtype == np.float32
    played = play(env, random_actions(env, 1001))
    assert played[999].step.truncated[0] and not played[999].step.terminated[0]
    assert not any(step.truncated[0] for _, step in played[:999]) and played[1000].step.first[0]
    pole = make("CartPole-v1")
    reset(pole)
    played = play(pole, [np.zeros(2, np.int64)] * 30)
    last = next(moment for moment in played if moment.step.terminated[0])
    assert not last.step.truncated[0]
    assert abs(last.obs[""][0, 2]) > 0.2095  # the fallen pole, not the next episode's upright one


def test_the_first_stack_repeats_the_frame() -> None:
    obs = reset(make("Breakout", protocol="machado"))[""]
    assert all(np.array_equal(obs[0, k], obs[0, 3]) for k in range(3)) and obs[0, 3].any()


@pytest.mark.slow
def test_atari_rewards_are_raw_and_lost_lives_are_flagged() -> None:
    env = make("MsPacman", protocol="machado")
    assert env.action_space.n == 18 and env.frames_per_step == 4  # type: ignore[attr-defined]
    reset(env)
    assert max(float(step.reward.max()) for _, step in play(env, random_actions(env, 150))) >= 10
    env = make("Breakout-v5", num_envs=1, protocol="classic")
    reset(env)
    played = play(env, random_actions(env, 400))
    end = next(t for t, (_, step) in enumerate(played) if step.terminated[0])
    assert sum(bool(step.life_lost[0]) for _, step in played[:end]) == 4


def test_observations_of_every_kind_become_vectors_and_images() -> None:
    grid = make("MiniGrid-DoorKey-5x5-v0")
    spaces = {key: (space.shape, space.dtype.name) for key, space in grid.observation_space.spaces.items()}  # type: ignore[attr-defined]
    assert spaces["image"] == ((3, 7, 7), "uint8") and spaces["direction"] == ((4,), "float32")
    obs = reset(grid)
    assert np.array_equal(obs["direction"].sum(-1), [1, 1])
    walker = reset(make("WalkerWalk-v1"))
    assert walker["height"].shape == (2, 1) and walker["orientations"].dtype == np.float32
    lake = reset(make("FrozenLake-v1"))[""]
    assert np.array_equal(lake, np.eye(16, dtype=np.float32)[[0, 0]])


def test_pictures() -> None:
    env = make("Breakout", num_envs=1, render=True)
    reset(env)
    assert env.render().shape == (210, 160, 3) and env.render().any()


@pytest.mark.parametrize(("skip", "steps"), [(4, 27_000), (2, 54_000)])
def test_a_protocol_s_longest_episode_is_counted_in_frames(skip: int, steps: int) -> None:
    env = make("Breakout", num_envs=1, protocol="machado", options={"frame_skip": skip})
    given = settings_of(EnvConfig("Breakout", protocol="machado", options={"frame_skip": skip}))
    assert isinstance(env, EnvPoolShard) and given["max_episode_steps"] == steps
    assert "108,000 frames" in str(env.emulator)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"frameskip": 2}}, "Did you mean 'frame_skip'"),
        ({"options": {"noop_max": 0}}, "noop_max=1 plays no no-ops or, in games without FIRE, one"),
        ({"options": {"reward_clip": True}}, "env.reward-clip"),
        ({"options": {"stack_num": 0}}, "stack_num=0 must be a whole number of at least 1"),
        ({"options": {"stack_num": "four"}}, "stack_num='four' must be a whole number"),
        ({"options": {"img_height": 0}}, "img_height=0"),
        ({"options": {"repeat_action_probability": 2.0}}, "between 0 and 1"),
        ({"options": {"frame_skip": -1}}, "frame_skip=-1"),
        ({"options": {"max_episode_steps": 1.5}}, "max_episode_steps=1.5"),
        ({"options": {"repeat_action_probability": "often"}}, "between 0 and 1"),
        ({"decorrelate": 100}, "adapter ale"),
    ],
)
def test_settings_that_cannot_work_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make("Breakout", **settings)
