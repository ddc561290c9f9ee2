"""Our own small tasks."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from lockstep.envs.tasks import BitFlip, Hidden, Memory, TupleBandit


@pytest.mark.parametrize("env_id", ["lockstep/Memory-v0", "lockstep/TupleBandit-v0", "lockstep/BitFlip-v0"])
def test_the_gymnasium_interface_is_kept(env_id: str) -> None:
    check_env(gymnasium.make(env_id, disable_env_checker=True).unwrapped, skip_render_check=True)


def episode(env: Memory, answer: str, seed: int) -> tuple[float, list[np.ndarray]]:
    obs, _ = env.reset(seed=seed)
    seen = [obs]
    cue = int(obs[3:].argmax())
    total, ended = 0.0, False
    while not ended:
        action = cue if answer == "cue" else int(seen[-1][3:].argmax()) if answer == "current" else 0
        obs, reward, ended, _, _ = env.step(np.int64(action))
        total += reward
        seen.append(obs)
    return total, seen


def test_remembering_the_cue_always_scores_one() -> None:
    env = Memory(length=5)
    for seed in range(20):
        total, seen = episode(env, "cue", seed)
        assert total == 1.0 and len(seen) == 5 + 3  # cue, distractors, question, and what follows the answer


def test_no_memoryless_answer_beats_its_bound() -> None:
    env = Memory(length=3, symbols=4)
    questions = {episode(env, "cue", seed)[1][4].tobytes() for seed in range(50)}
    assert len(questions) == 1  # the question says nothing about the cue
    # Every memoryless policy is a mixture of constant answers to that one question.
    cues = np.array([int(env.reset(seed=seed)[0][3:].argmax()) for seed in range(4000)])
    for answer in range(4):
        assert abs(np.where(cues == answer, 1, -1).mean() - (2 / 4 - 1)) < 0.06
    for answer in ("current", "constant"):
        assert np.mean([episode(env, answer, seed)[0] for seed in range(300)]) < 0


def test_distractors_are_independent_of_the_cue() -> None:
    env = Memory(length=1, symbols=2)
    same = [np.array_equal(seen[0][3:], seen[1][3:]) for seen in (episode(env, "cue", s)[1] for s in range(1000))]
    assert 0.4 < np.mean(same) < 0.6


def test_the_bandit_pays_for_the_lit_arm_and_the_right_point() -> None:
    env = TupleBandit(mask=True)
    obs, _ = env.reset(seed=1)
    for step in range(8):
        arm = int(obs["image"][0, :, 0].argmax()) // 9
        forbidden = int(np.flatnonzero(obs["action_mask"] == 0)[0])
        assert obs["action_mask"][arm] == 1 and obs["action_mask"].sum() == 2
        choose_right = step % 2 == 0
        point = obs["vector"] + (0 if choose_right else np.float32(0.5))
        obs, reward, terminated, truncated, _ = env.step((arm if choose_right else forbidden, point))
        assert reward == pytest.approx(1.0 if choose_right else -1.25)
        assert not terminated and truncated == (step == 7)


def test_the_bits_that_are_wrong_are_the_way_to_the_goal() -> None:
    env = BitFlip(bits=6)
    for seed in range(30):
        obs, _ = env.reset(seed=seed)
        wrong = np.flatnonzero(obs["observation"] != obs["desired_goal"])
        assert len(wrong)
        rewards = []
        for bit in wrong:
            obs, reward, terminated, _, _ = env.step(np.int64(bit))
            rewards.append(reward)
            assert terminated == (bit == wrong[-1])
        assert rewards == [-1.0] * (len(wrong) - 1) + [0.0]


def test_episodes_without_the_goal_are_cut() -> None:
    env = BitFlip(bits=4)
    obs, _ = env.reset(seed=3)
    wrong = int(np.flatnonzero(obs["observation"] != obs["desired_goal"])[0])
    other = np.int64((wrong + 1) % 4)
    ends = [env.step(other)[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]


def test_only_the_numbers_asked_for_are_seen() -> None:
    whole, env = gymnasium.make("Pendulum-v1", g=5.0), Hidden(seen=(2, 0), g=5.0)
    assert np.array_equal(env.observation_space.high, np.array([8.0, 1.0], np.float32))  # type: ignore[attr-defined]
    (obs, _), (seen, _) = whole.reset(seed=3), env.reset(seed=3)
    truncated = False
    while not truncated:
        assert np.array_equal(seen, obs[[2, 0]]) and seen.dtype == np.float32
        obs, reward, _, truncated, _ = whole.step(np.ones(1, np.float32))
        seen, *same = env.step(np.ones(1, np.float32))
        assert same[:3] == [reward, False, truncated]


@pytest.mark.parametrize("options", [{"seen": []}, {"seen": (0, 0)}, {"seen": (3,)}, {"task": "FrozenLake-v1"}])
def test_what_cannot_be_hidden_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"places 0 to 2|only numbers of a vector"):
        Hidden(**options)  # type: ignore[arg-type]
