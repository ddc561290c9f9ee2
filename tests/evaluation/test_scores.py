from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from sentences import says
from tiny import cut

import lockstep.envs.tasks  # noqa: F401 - registers lockstep/Memory-v0
from lockstep import envs
from lockstep.algorithms import PPOConfig
from lockstep.cli.main import main
from lockstep.config.options import EvaluationSettings
from lockstep.config.settings import SettingsError
from lockstep.core.rng import derive_seed
from lockstep.envs.settings import EnvConfig
from lockstep.evaluation.policy import Player
from lockstep.evaluation.progress import EpisodeProgress
from lockstep.evaluation.scores import Evaluation, Metric, evaluate_policy
from lockstep.evaluation.statistics import bootstrap_interval
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.models.base import PolicyModel
from lockstep.recipes import RECIPES

SCRIPTED = '''
import gymnasium
import numpy as np

class Scripted(gymnasium.Env):
    """Lasts 1 + seed % 9 steps; each earns 2.5; ends by a time limit if the seed is even."""
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.seed, self.left = seed, 1 + seed % 9
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.left -= 1
        ended, even = self.left == 0, self.seed % 2 == 0
        return np.full(3, self.left, np.float32), 2.5, ended and not even, ended and even, {}
'''


def experiment(env: EnvConfig, **model: Any) -> Experiment:
    return Experiment(env=env, model=StandardModelConfig(**model), algorithm=PPOConfig(), precision="fp32", seed=5)


def build(settings: Experiment, sharpen: float = 100.0) -> PolicyModel:
    """An untrained model; sharpened, so that it does not act almost uniformly."""
    model = settings.model.build(*envs.spaces(settings.env), precision="fp32", normalize_observations=False, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "policy_head" in name:
                parameter.mul_(sharpen)
    return model


@pytest.fixture
def scripted(tmp_path: Path) -> Experiment:
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    return experiment(EnvConfig(id=f"{tmp_path}/scripted.py:Scripted", num_envs=8, reward_clip=True))


CARTPOLE = EnvConfig(id="CartPole-v1", adapter="gymnasium")


@torch.no_grad()
def play_one_by_one(
    model: PolicyModel, make: Callable[[], gymnasium.Env[Any, Any]], episodes: int, num_envs: int, purpose: str
) -> list[tuple[float, int]]:
    """The greedy policy in single gymnasium environments, one episode after the other, without any batching."""
    results = []
    for number in range(episodes):
        env = make()
        obs, _ = env.reset(seed=derive_seed(5, f"env-{purpose}", number % num_envs, number // num_envs))
        state = torch.zeros(1, model.state_size)
        start, action, reward = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64), 0.0
        score, length, over = 0.0, 0, False
        while not over:
            obs_t = torch.as_tensor(obs, dtype=torch.float32)[None, None]
            out, state = model(obs_t, start, state, action, torch.full((1, 1), float(reward)))
            action = model.distribution.mode(out.policy)
            obs, reward, terminated, truncated, _ = env.step(int(action))
            start = torch.zeros(1, 1, dtype=torch.bool)
            score, length, over = score + float(reward), length + 1, terminated or truncated
        env.close()
        results.append((score, length))
    return results


@pytest.mark.parametrize(
    ("env", "model"),
    [
        (CARTPOLE, {}),
        (CARTPOLE, {"core": "lstm", "core_size": 16, "previous_action_reward": True}),
        (EnvConfig(id="lockstep/Memory-v0"), {"core": "gru", "core_size": 16, "previous_action_reward": True}),
    ],
)
def test_agrees_with_single_environments_played_one_by_one(env: EnvConfig, model: dict[str, Any]) -> None:
    settings = experiment(env, **model)
    policy = build(settings)
    expected = play_one_by_one(policy, lambda: gymnasium.make(env.id), 7, 3, "eval")
    got = evaluate_policy(policy, settings, EvaluationSettings(episodes=7, greedy=True, num_envs=3))
    assert list(zip(got.scores, got.lengths, strict=True)) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("num_envs", [1, 4, 16])
def test_episodes_are_assigned_beforehand_and_scores_are_raw(scripted: Experiment, num_envs: int) -> None:
    got = evaluate_policy(build(scripted), scripted, EvaluationSettings(episodes=23, num_envs=num_envs))
    seeds = [derive_seed(5, "env-eval", e % num_envs, e // num_envs) for e in range(23)]
    assert got.lengths == tuple(1 + seed % 9 for seed in seeds)
    assert got.scores == tuple(2.5 * length for length in got.lengths)


def test_progress_counts_the_episodes_that_have_ended(scripted: Experiment) -> None:
    ended: list[int] = []
    got = evaluate_policy(build(scripted), scripted, EvaluationSettings(episodes=3, num_envs=1), progress=ended.append)
    # The step after an episode's end resets the environment.
    first, second, third = got.lengths
    assert ended == [0] * (first - 1) + [1] * (1 + second) + [2] * (1 + third) + [3]


def test_progress_is_shown_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 129.9, 130.0, 130.0, 131.0, 165.0, 165.0, 200.0, 200.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    progress = EpisodeProgress(20, lines.append)
    for ended in (3, 4, 5, 6):
        progress(ended)
    progress.part(8)
    progress(1)
    assert lines == [f"evaluation: {count} of 20 episodes have ended" for count in (4, 6, 9)]


def test_decorrelation_does_not_cut_episodes(scripted: Experiment) -> None:
    cut = scripted.replace(env=dataclasses.replace(scripted.env, decorrelate=1))
    nine = EvaluationSettings(episodes=9)
    assert evaluate_policy(build(scripted), cut, nine) == evaluate_policy(build(scripted), scripted, nine)


def test_an_episode_that_never_ends_is_cut(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(SCRIPTED.replace("self.left == 0", "False"))
    endless = experiment(EnvConfig(id=f"{tmp_path}/endless.py:Scripted"))
    got = evaluate_policy(build(endless), endless, EvaluationSettings(episodes=5, num_envs=2, max_steps=30))
    assert got.lengths == (30,) * 5 and set(got.scores) == {2.5 * 30}
    assert got.protocol.startswith("5 episodes of ") and says(
        got.protocol, ", 5 ", "limit of 30 steps", "sampled actions"
    )
    with pytest.raises(SettingsError, match="--max-steps 0"):
        evaluate_policy(build(endless), endless, EvaluationSettings(episodes=5, max_steps=0))


def test_other_libraries_end_episodes_by_their_own_limits() -> None:
    options: dict[str, Any] = {"max_num_frames_per_episode": 80}
    atari = experiment(EnvConfig(id="Pong", protocol="machado", adapter="ale", options=options))
    with pytest.raises(SettingsError, match=r"--max-steps 7 .*env.adapter=ale"):
        evaluate_policy(build(atari), atari, EvaluationSettings(episodes=1, max_steps=7))
    vector = experiment(EnvConfig(id="CartPole-v1", adapter="vector"))
    with pytest.raises(SettingsError, match=r"--max-steps 7 .*env.adapter=vector"):
        evaluate_policy(build(vector), vector, EvaluationSettings(episodes=1, max_steps=7))
    got = evaluate_policy(build(atari), atari, EvaluationSettings(episodes=1))
    assert got.lengths == (20,) and got.protocol.startswith(
        "1 whole episode of Pong (machado protocol, sticky actions 0.25"
    )


def test_sampled_actions_repeat_with_their_seed_and_leave_other_streams_alone() -> None:
    settings = experiment(CARTPOLE)
    policy = build(settings)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    parameters = [p.clone() for p in policy.parameters()]
    six = EvaluationSettings(episodes=6)
    first = evaluate_policy(policy, settings, six)
    assert first == evaluate_policy(policy, settings, dataclasses.replace(six, seed=settings.seed))
    assert first == evaluate_policy(policy, settings, six, threads=2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(parameters, policy.parameters(), strict=True))
    others = [
        evaluate_policy(policy, settings, EvaluationSettings(episodes=6, seed=6)),
        evaluate_policy(policy, settings, six, seed_purpose="test"),
        evaluate_policy(policy, settings, EvaluationSettings(episodes=6, greedy=True)),
    ]
    assert all(other.scores != first.scores for other in others)


@pytest.mark.slow
def test_atari_in_bf16_with_memory_and_lost_lives() -> None:
    options: dict[str, Any] = {"max_num_frames_per_episode": 480}
    settings = dataclasses.replace(
        experiment(
            EnvConfig(id="Breakout", protocol="classic", adapter="ale", options=options),
            core="lstm",
            core_size=16,
            previous_action_reward=True,
        ),
        precision="bf16",
    )
    policy = build(settings)
    three = EvaluationSettings(episodes=3, num_envs=2)
    got = evaluate_policy(policy, settings, three)
    assert got == evaluate_policy(policy, settings, three)
    assert all(0 < length <= 120 for length in got.lengths) and all(s == int(s) for s in got.scores)
    stated = "sticky actions 0, 4 frames an action, at most 480 frames"
    assert f"Breakout (classic protocol, {stated}, max_num_frames_per_episode=480, ale)" in got.protocol


def test_the_agent_starts_anew_at_a_lost_life_as_in_training() -> None:
    settings = experiment(EnvConfig(id="Breakout", protocol="classic", adapter="ale"), core="gru", core_size=8)
    player = Player(build(settings), settings, EvaluationSettings(num_envs=2, seed=1), purpose="eval")
    starts = []
    for _ in range(150):
        step = player.step()
        starts.append((step.life_lost, step.first, player.inputs[1][0].numpy().copy()))
    player.close()
    assert any(life_lost.any() for life_lost, _, _ in starts)
    for life_lost, first, start in starts:
        np.testing.assert_array_equal(start, life_lost | first)


def test_statistics_by_hand() -> None:
    result = Evaluation((1.0, 2.0, 6.0), (10, 20, 60), "by hand")
    assert (result.mean, result.median) == (3.0, 2.0)
    assert result.std == pytest.approx(7**0.5)
    assert result.interval is not None and 1.0 <= result.interval[0] < 3.0 < result.interval[1] <= 6.0
    assert result.to_json()["interval95"] == list(result.interval)
    assert str(result).startswith("score 3 ± 2.646, 95% CI 1 to ") and "by hand" in str(result)
    single = Evaluation((4.0,), (9,), "by hand")
    assert single.std == 0.0 and single.interval is None and str(single) == "score 4, median 4 (by hand)"
    assert single.to_json()["std"] is None


def test_intervals_draw_whole_matches() -> None:
    result = Evaluation((1.0, 1.0, 2.0, 2.0, 6.0, 6.0), (10,) * 6, "by hand", together=2)
    assert result.interval == pytest.approx(Evaluation((1.0, 2.0, 6.0), (10,) * 3, "by hand").interval)
    reported = Metric((1.0, math.nan, 2.0, 2.0, math.nan, math.nan, 6.0, 6.0), together=2)
    assert reported.mean == 3.4 and reported.interval == (1.0, 6.0)
    assert Metric((1.0, 3.0, math.nan, math.nan), together=2).interval is None
    assert Evaluation((1.0, 2.0), (1, 1), "by hand", together=2).interval is None


def test_the_agents_of_a_match_belong_together() -> None:
    settings = cut(RECIPES["mappo-mpe"], env={"num_envs": 6})
    model = settings.build_model(*envs.spaces(settings.env))
    result = evaluate_policy(model, settings, EvaluationSettings(episodes=12))
    matches = np.array(result.scores).reshape(4, 3)
    assert result.together == 3 and np.ptp(matches.mean(axis=1)) > np.ptp(matches, axis=1).max(), "rewards are shared"
    assert result.interval == pytest.approx(bootstrap_interval(matches.mean(axis=1)))


@pytest.mark.parametrize("scores", [(1.0, math.inf, 2.0), (math.inf, -math.inf, 3.0), (1.0, math.nan, 2.0)])
def test_scores_that_are_not_finite_have_no_interval_and_no_warning(scores: tuple[float, ...]) -> None:
    result = Evaluation(scores, (1, 1, 1), "by hand")
    assert not math.isfinite(result.mean) and math.isnan(result.std) and result.interval is None
    assert str(result).startswith("score not finite ± not finite, median ")
    reported = Metric(scores)
    assert (reported.interval is None) == any(map(math.isinf, scores)) and str(reported)


@pytest.mark.parametrize(("arguments", "flag"), [({"episodes": 0}, "--episodes 0"), ({"num_envs": 0}, "--num-envs 0")])
def test_numbers_out_of_range_are_explained(arguments: dict[str, Any], flag: str) -> None:
    settings = experiment(CARTPOLE)
    with pytest.raises(SettingsError, match=flag):
        evaluate_policy(build(settings), settings, EvaluationSettings(**arguments))


def test_values_of_another_type_are_explained() -> None:
    settings = experiment(CARTPOLE)
    value: Any
    for name, value in (("episodes", 2.5), ("seed", "a"), ("metrics", "success"), ("opponents", "random")):
        with pytest.raises(SettingsError, match=f"{name}={value!r} must be a "):
            evaluate_policy(build(settings), settings, EvaluationSettings(**{name: value}))


@pytest.mark.parametrize(
    ("recipe", "acting"),
    [
        ("ppo-cartpole", "sampled"),
        ("dqn-cartpole", "ε-greedy (ε 0.001)"),
        ("sac-mujoco", "sampled"),
        ("td3-mujoco", "deterministic"),
    ],
)
def test_the_protocol_says_how_actions_were_chosen(recipe: str, acting: str) -> None:
    settings = RECIPES[recipe]()
    if "mujoco" in recipe:
        settings = settings.replace(env=dataclasses.replace(settings.env, id="Pendulum-v1"))
    policy = build(settings)
    assert f", {acting} actions, " in evaluate_policy(policy, settings, EvaluationSettings(episodes=1)).protocol
    result = evaluate_policy(policy, settings, EvaluationSettings(episodes=1, greedy=True))
    assert ", greedy actions, " in result.protocol and result.to_json()["actions"] == "greedy"
    with pytest.raises(SettingsError, match=r"--episodes 9999999 .* 1 to 1,000,000"):
        evaluate_policy(policy, settings, EvaluationSettings(episodes=9_999_999))


@pytest.mark.parametrize(
    ("recipe", "flags", "told"),
    [
        ("ppo-cartpole", [], "sampled actions; --greedy"),
        ("ppo-cartpole", ["--greedy"], "greedy actions"),
        ("td3-mujoco", [], "deterministic actions"),
    ],
)
def test_a_video_says_how_actions_were_chosen(
    recipe: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RECIPES[recipe]().replace(env=EnvConfig(id="Pendulum-v1"))
    monkeypatch.setattr("lockstep.evaluation.policy.load_policy", lambda *_: SimpleNamespace(model=build(settings)))
    monkeypatch.setattr("lockstep.evaluation.video.record_video", lambda run, out, **_: out)
    monkeypatch.setattr("lockstep.run.folder.RunFolder.open", lambda path: SimpleNamespace(path=Path(path)))
    assert main(["record", "run", "--out", "a.mp4", *flags]) == 0
    assert told in (said := capsys.readouterr().out) and ("--greedy" in told) == ("--greedy" in said)


@pytest.mark.parametrize(("clip", "expected"), [(True, 1.0), (False, 2.5)])
def test_models_see_the_last_reward_as_they_do_in_training(scripted: Experiment, clip: bool, expected: float) -> None:
    env = dataclasses.replace(scripted.env, reward_clip=clip)
    settings = experiment(env, core="gru", core_size=8, previous_action_reward=True)
    player = Player(build(settings), settings, EvaluationSettings(num_envs=2, seed=1), purpose="eval")
    assert player.step().reward.tolist() == [2.5, 2.5]
    previous = player.inputs[4]
    player.close()
    assert previous is not None and previous.tolist() == [[expected, expected]]
