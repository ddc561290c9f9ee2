"""ALE's vector environment: protocols, true final observations, lives, pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from playing import buffers, play, random_actions, reset

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.episodes import Seeds


def make(game: str = "Breakout", num_envs: int = 1, render: bool = False, **settings: Any) -> ShardEnv:
    config = EnvConfig(id=game, adapter="ale", **settings)
    return envs.make(config, seed=3, first_index=0, num_envs=num_envs, render=render)


def raw(game: str, count: int, **options: Any) -> AtariVectorEnv:
    """A single environment of the library, seeded as environment 0 is after `count` seeded resets."""
    env = AtariVectorEnv(game, 1, num_threads=1, reward_clipping=False, **options)
    env.reset(seed=Seeds(3, "train", 0).derive(np.array([0]), np.array([count])))
    return env


@pytest.mark.slow
def test_episodes_equal_the_librarys_own_and_end_with_their_true_last_observation() -> None:
    env = make(protocol="machado", reseed_every=1, options={"max_num_frames_per_episode": 80})
    options = {
        "repeat_action_probability": 0.25,
        "full_action_space": True,
        "noop_max": 1,
        "max_num_frames_per_episode": 80,
    }
    assert env.action_space == AtariVectorEnv("breakout", 1, full_action_space=True).single_action_space
    start = reset(env)[""]
    played = play(env, random_actions(env, 42))
    t = 0
    for count in (0, 1):
        own = raw("breakout", count, **options)
        if count == 0:
            expected, _ = raw("breakout", 0, **options).reset(
                seed=Seeds(3, "train", 0).derive(np.array([0]), np.array([0]))
            )
            assert np.array_equal(start, expected)
        actions = random_actions(env, 42)
        for step in range(1, 21):
            obs, reward, terminated, truncated, _ = own.step(actions[t])
            assert np.array_equal(played[t].obs[""], obs)
            assert played[t].step.reward == reward
            assert not terminated and truncated == (step == 20)  # 80 frames, whatever the reset took
            assert played[t].step.truncated == truncated and not played[t].step.terminated
            t += 1
        assert played[t].step.first
        assert not np.array_equal(played[t].obs[""], played[t - 1].obs[""])
        t += 1


def test_the_first_stack_is_padded_with_zeros() -> None:
    obs = reset(make(protocol="machado"))[""]
    assert obs.shape == (1, 4, 84, 84) and obs.dtype == np.uint8
    assert not obs[0, :3].any() and obs[0, 3].any()


def test_seeds_are_renewed_at_the_first_end_after_reseed_every_steps() -> None:
    env = make(protocol="machado", reseed_every=30, options={"max_num_frames_per_episode": 80})
    reset(env)
    counts = []
    for action in random_actions(env, 90):
        play(env, [action])
        counts.append(int(env.state_dict()["count"][0]))
    # Episodes of 20 steps and a reset: they end after 20, 41, 62 and 83 steps; only the second and fourth renew.
    assert counts.index(1) == 41 and counts[-1] == 2 and counts.index(2) == 41 + 42


def test_rewards_are_raw_under_protocols_that_clip() -> None:
    env = make("MsPacman", protocol="machado")
    reset(env)
    rewards = {float(step.reward[0]) for _, step in play(env, random_actions(env, 150))}
    assert max(rewards) >= 10 and envs.resolve(EnvConfig(id="MsPacman", protocol="machado")).reward_clip


def test_a_lost_life_is_flagged_and_the_game_goes_on() -> None:
    env = make(protocol="classic")
    reset(env)
    own = raw("breakout", 0, noop_max=30)
    actions = random_actions(env, 250)
    lives, expected = 5, []
    for action in actions:
        _, _, terminated, _, info = own.step(action)
        expected.append(bool(0 < info["lives"][0] < lives))
        lives = info["lives"][0]
        if terminated[0]:
            break
    played = play(env, actions[: len(expected)])
    assert [bool(step.life_lost[0]) for _, step in played] == expected
    assert sum(expected) == 4 and played[-1].step.terminated[0] and not any(step.first[0] for _, step in played)
    reset(env)
    play(env, actions[: expected.index(True)])
    restored = make(protocol="classic")
    restored.load_state_dict(env.state_dict(), buffers(restored))
    assert play(restored, [actions[expected.index(True)]])[0].step.life_lost[0]
    without = make(protocol="machado")
    reset(without)
    assert not any(step.life_lost[0] for _, step in play(without, random_actions(without, 250)))


def test_protocols_set_their_options_and_are_overridden_by_the_users() -> None:
    assert make(protocol="machado").action_space.n == 18  # type: ignore[attr-defined]
    assert make(protocol="classic").action_space.n == 4  # type: ignore[attr-defined]
    assert make(protocol="machado", options={"full_action_space": False}).action_space.n == 4  # type: ignore[attr-defined]
    env = make(options={"frameskip": 2, "img_height": 40, "grayscale": False})
    assert env.frames_per_step == 2
    assert env.observation_space.shape == (12, 40, 84)


def test_pictures_show_the_game_that_is_played() -> None:
    env = make(protocol="machado", render=True)
    plain = make(protocol="machado")
    out = buffers(env)
    assert np.array_equal(reset(env)[""], reset(plain)[""])
    actions = random_actions(env, 40)
    for action, moment in zip(actions, play(plain, actions)):
        env.send(action)
        env.recv(out)
        assert np.array_equal(out, moment.obs[""])  # drawing changes nothing
    picture = env.render()
    assert picture.shape == (210, 160, 3) and picture.dtype == np.uint8
    gray = (picture @ np.array([0.299, 0.587, 0.114]))[np.arange(84) * 210 // 84][:, np.arange(84) * 160 // 84]
    assert np.corrcoef(gray.ravel(), out[0, -1].ravel())[0, 1] > 0.8
    with pytest.raises(SettingsError, match="render=True"):
        plain.render()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_skip": 2}, "Did you mean 'frameskip'"),
        ({"reward_clipping": True}, "env.reward-clip"),
        ({"episodic_life": True}, "protocol classic"),
        ({"stack_num": 0}, "stack_num=0 must be a whole number of at least 1"),
        ({"img_height": 0}, "img_height=0"),
        ({"frameskip": 0}, "frameskip=0"),
        ({"noop_max": 1000.0}, "noop_max=1000.0"),
        ({"grayscale": 5}, "grayscale=5 must be true or false"),
        ({"repeat_action_probability": 2.0}, "between 0 and 1"),
    ],
)
def test_options_that_do_not_exist_or_are_ours_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make(options=options)
