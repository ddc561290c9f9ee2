from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_video import read
from tiny import EXPERIMENTS, portable

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.config.options import EvaluationSettings, RunOptions
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs.construct import construct
from lockstep.evaluation import scores as scoring
from lockstep.evaluation import video
from lockstep.evaluation.actor import Actor
from lockstep.evaluation.policy import Player, find_checkpoint, load_policy
from lockstep.evaluation.scores import evaluate, evaluate_policy
from lockstep.evaluation.video import record_video
from lockstep.launchers.launch import train
from lockstep.models.encoders import ObservationEncoder
from lockstep.models.normalize import NormalizeConfig
from lockstep.models.q import QModel
from lockstep.reports.runs import Run as RunData

QUIET: dict[str, Any] = {"display": "none", "tensorboard": False}


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four iterations, of which the checkpoints 3 and 4 and the best are kept."""
    base = recipes.ppo_cartpole()
    settings = base.replace(normalize=NormalizeConfig(observations=True), total_steps=4 * base.samples_per_iteration)
    path = tmp_path_factory.mktemp("runs") / "cartpole"
    train(settings, options=RunOptions(run=str(path), checkpoint_every=1, keep_checkpoints=2, **QUIET))
    return path


@pytest.fixture(scope="module")
def breakout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One iteration of a tiny Atari run."""
    base = recipes.ppo_atari("Breakout")
    settings = dataclasses.replace(
        base,
        env=dataclasses.replace(base.env, num_envs=4, adapter="ale"),
        algorithm=dataclasses.replace(base.algorithm, rollout=8, epochs=1, minibatches=2),
        scheme=dataclasses.replace(base.scheme, shards=4, acting_batch=0),
        total_steps=32,
    )
    path = tmp_path_factory.mktemp("runs") / "breakout"
    train(settings, options=RunOptions(run=str(path), **QUIET))
    return path


def test_checkpoints_by_name(cartpole: Path) -> None:
    assert find_checkpoint(cartpole).iteration == find_checkpoint(cartpole, "latest").iteration == 4
    assert find_checkpoint(cartpole, "3").iteration == find_checkpoint(cartpole, "00000003").iteration == 3
    assert find_checkpoint(cartpole, "best").iteration in (1, 2, 3, 4)


@pytest.mark.parametrize("name", ["newest", "77"])
def test_unknown_checkpoints_are_explained(cartpole: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}.*4"):
        load_policy(cartpole, name)


def test_unknown_runs_are_explained(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"/nowhere .*train"):
        load_policy(tmp_path / "nowhere")


def test_policy_is_that_of_the_checkpoint(cartpole: Path) -> None:
    policy = load_policy(cartpole, "3")
    tensors, _ = find_checkpoint(cartpole, "3").part("learner")
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, tensors[f"parameter.{name}"])
    assert policy.iteration == 3
    encoders = [m for m in policy.model.modules() if isinstance(m, ObservationEncoder)]
    # The experience of three iterations: positions near 0, velocities that spread further.
    assert encoders
    for encoder in encoders:
        assert (encoder.std > 0.01).all() and (encoder.std < 5).all() and not (encoder.std == 1).any()


def test_evaluation_of_a_run(cartpole: Path) -> None:
    torch.set_num_threads(2)
    result = evaluate(cartpole, episodes=5)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert result == evaluate(cartpole, episodes=5, checkpoint="4")
    assert len(result.scores) == 5 and "checkpoint of iteration 4" in result.protocol
    policy = load_policy(cartpole)
    five = EvaluationSettings(episodes=5)
    during_training = evaluate_policy(policy.model, policy.experiment, five)
    assert result.scores != during_training.scores
    assert result.scores == evaluate_policy(policy.model, policy.experiment, five, seed_purpose="test").scores
    assert result != evaluate(cartpole, episodes=5, seed=2)


@pytest.mark.slow
def test_evaluating_during_training_changes_no_bit_of_it(tmp_path: Path) -> None:
    base = recipes.ppo_cartpole()
    settings = base.replace(total_steps=2 * base.samples_per_iteration)
    results = [
        train(settings, options=RunOptions(run=str(tmp_path / str(every)), eval_every=every, eval_episodes=3, **QUIET))
        for every in (0, 1)
    ]
    assert results[0].digest == results[1].digest
    lines = [json.loads(line) for line in (tmp_path / "1" / "metrics.jsonl").read_text().splitlines()]
    scores = [line["eval/score"] for line in lines if "eval/score" in line]
    final = load_policy(tmp_path / "1")
    assert len(scores) == 2
    assert scores[-1] == evaluate_policy(final.model, final.experiment, EvaluationSettings(episodes=3)).mean


@pytest.mark.parametrize(
    "name", ["td3-lstm-prioritized", "sac-discrete", "iqn", "r2d2-uniform-lag-1", "mpc-lag-1", "ppo-rnd"]
)
def test_every_kind_of_agent_is_evaluated_during_training(name: str, tmp_path: Path) -> None:
    settings = EXPERIMENTS[name]()
    often = settings.iterations
    options = RunOptions(run=str(tmp_path), eval_every=often, eval_episodes=1, eval_greedy=True, **QUIET)
    train(settings, options=options)
    scores, final = RunData.read(tmp_path).curve("samples", "eval/score")[1], load_policy(tmp_path)
    assert list(scores) == [evaluate_policy(final.model, final.experiment, options.evaluation).mean]


@pytest.mark.parametrize("name", ["rainbow-lag-1", "r2d2-uniform-lag-1", "sac-discrete", "iqn"])
def test_kernels_evaluate_a_policy_with_the_bits_of_torchs_replaced_operations(name: str) -> None:
    experiment = portable(name)
    agent = Agent(experiment)
    assert agent.kernels is not None and agent.kernels.as_torch

    def played(kernels: Any) -> tuple[type, list[torch.Tensor]]:
        player = Player(agent.model, experiment, EvaluationSettings(num_envs=3), purpose="test", kernels=kernels)
        outputs = []
        for _ in range(12):
            player.step()
            assert player.output is not None
            outputs.append(player.output.policy.clone())
        player.close()
        return type(player._actor), outputs

    by_kernels, by_torch = played(agent.kernels), played(None)
    assert by_kernels[0] != by_torch[0]
    assert all(map(torch.equal, by_kernels[1], by_torch[1]))


def test_whatever_plays_a_portable_policy_uses_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = portable("rainbow-lag-1")

    def forward(*_: Any) -> None:
        raise AssertionError("torch evaluates the model")

    monkeypatch.setattr(QModel, "forward", forward)
    train(experiment, options=RunOptions(run=str(tmp_path), eval_every=1, eval_episodes=1, **QUIET), stop_after=1)
    evaluate(tmp_path, episodes=1)
    env = construct(experiment.env)
    Actor(load_policy(tmp_path), env).act(env.reset(seed=1)[0])
    assert load_policy(tmp_path, precision="fp32").kernels is None


def test_what_had_diverged_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = recipes.ppo_cartpole()
    algorithm = dataclasses.replace(base.algorithm, learning_rate=1e30, max_grad_norm=1e30)
    settings = base.replace(algorithm=algorithm, total_steps=2 * base.samples_per_iteration)
    train(settings, options=RunOptions(run=str(tmp_path / "run"), on_nonfinite="continue", **QUIET))
    evaluate(tmp_path / "run", episodes=1, checkpoint=2)
    assert "had diverged by then" in capsys.readouterr().err


MINE = """
import gymnasium

class Mine(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-1, 1, (SIZE,))

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}
"""


def test_a_file_that_has_changed_since_training_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # which could be taken for the changed file
    file.write_text(MINE.replace("SIZE", "3"))
    base = recipes.ppo_cartpole()
    env = dataclasses.replace(base.env, id=f"{file}:Mine")
    settings = base.replace(env=env, total_steps=base.samples_per_iteration)
    train(settings, options=RunOptions(run=str(tmp_path / "run"), **QUIET))
    file.write_text(MINE.replace("SIZE", "5"))
    for name in [name for name in sys.modules if name.startswith("lockstep_user_")]:
        monkeypatch.delitem(sys.modules, name)  # as a new process would find it
    with pytest.raises(SettingsError, match=r"checkpoints/00000001 .*vectors\.layers\.0\.weight"):
        load_policy(tmp_path / "run")


def test_video_of_a_run(cartpole: Path, tmp_path: Path) -> None:
    out = record_video(cartpole, tmp_path / "a.mp4", episodes=2, max_steps=40, fps=25)
    description, pictures = read(out)
    assert " 25 fps" in description and pictures.shape == (41, 400, 600, 3)
    assert out.read_bytes() == record_video(cartpole, tmp_path / "b.mp4", episodes=2, max_steps=40, fps=25).read_bytes()
    changed = np.abs(np.diff(pictures.astype(np.int16), axis=0)).max(axis=(1, 2, 3))
    assert (changed > 50).mean() > 0.5


@pytest.mark.slow
def test_video_ends_with_its_episodes(cartpole: Path, tmp_path: Path) -> None:
    _, one = read(record_video(cartpole, tmp_path / "a.mp4"))
    _, two = read(record_video(cartpole, tmp_path / "b.mp4", episodes=2))
    assert 9 <= len(one) < len(two) and len(two) >= 18


@pytest.mark.slow
def test_atari_video_shows_the_color_screen_in_real_time(breakout: Path, tmp_path: Path) -> None:
    description, pictures = read(record_video(breakout, tmp_path / "a.mp4", max_steps=20))
    assert " 15 fps" in description and pictures.shape == (21, 630, 480, 3)
    assert np.ptp(pictures[10].astype(np.int16), axis=2).max() > 100


def test_a_greedy_evaluation_of_atari(breakout: Path) -> None:
    policy = load_policy(breakout)
    short = dataclasses.replace(policy.experiment.env, options={"max_num_frames_per_episode": 200})
    result = evaluate_policy(
        policy.model, policy.experiment.replace(env=short), EvaluationSettings(episodes=2, greedy=True)
    )
    assert result.lengths == (50, 50)


def test_an_environment_that_cannot_draw_is_explained(tmp_path: Path) -> None:
    (tmp_path / "blind.py").write_text(
        """
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Blind(CartPoleEnv):
    def render(self):
        if Blind.drawn == "nothing":
            return None
        if Blind.drawn == "floats":
            return np.full((30, 40), 0.5)
        if Blind.drawn == "mistake":
            raise KeyError("color")
        raise OSError("no graphics driver")
"""
    )
    base = recipes.ppo_cartpole()
    settings = base.replace(
        env=dataclasses.replace(base.env, id=f"{tmp_path}/blind.py:Blind"), total_steps=base.samples_per_iteration
    )
    run = str(tmp_path / "run")
    train(settings, options=RunOptions(run=run, **QUIET))
    blind = load_object(settings.env.id)
    for drawn, told in (
        ("driver", r"could not render an image: OSError: no graphics driver.*MUJOCO_GL"),
        ("mistake", r"could not render an image: KeyError: .*blind\.py, line \d+\.$"),
        ("nothing", r"render returned None.* \[H, W, 3\]"),
    ):
        blind.drawn = drawn
        with pytest.raises(SettingsError, match=told):
            record_video(run, tmp_path / "a.mp4")
    assert not list(tmp_path.glob("*.mp4"))
    blind.drawn = "floats"
    _, pictures = read(record_video(run, tmp_path / "a.mp4", max_steps=3))
    assert len(pictures) == 4 and np.abs(pictures.astype(int) - 128).max() < 6


def test_pictures_that_need_a_library_name_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = recipes.ppo_cartpole()
    settings = base.replace(
        env=dataclasses.replace(base.env, adapter="gymnasium"), total_steps=base.samples_per_iteration
    )
    run = str(tmp_path / "run")
    train(settings, options=RunOptions(run=run, **QUIET))
    for name in [name for name in sys.modules if name.partition(".")[0] == "pygame"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pygame", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pygame" else object())
    with pytest.raises(SettingsError, match=r'CartPole-v1 needs .*pygame.*pip install .*\[classic\]"'):
        record_video(run, tmp_path / "a.mp4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"out": "a.avi"}, "Name a file that ends in .mp4"),
        ({"episodes": 0}, "--episodes 0"),
        ({"max_steps": 0}, "--max-steps 0"),
        ({"fps": 0}, "--fps 0"),
    ],
)
def test_mistakes_are_explained(cartpole: Path, tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"out": tmp_path / "a.mp4", **arguments}
    with pytest.raises(SettingsError, match=words):
        record_video(cartpole, **given)
    assert not list(tmp_path.iterdir())


class Asked(Exception):
    """What would have played, and how."""


def asked(*model: Any, **how: Any) -> None:
    raise Asked(*model, how)


def test_evaluations_are_played_as_they_are_asked_for(cartpole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "evaluate_policy", asked)
    how: dict[str, Any] = {"seed": 7, "num_envs": 3, "levels": "test", "max_steps": 9}
    with pytest.raises(Asked) as found:
        evaluate(cartpole, episodes=5, greedy=True, checkpoint=3, **how)
    model, _, settings, given = found.value.args
    assert settings == EvaluationSettings(episodes=5, greedy=True, **how) and given["seed_purpose"] == "test"
    expected = load_policy(cartpole, 3).model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


def test_videos_show_what_they_are_asked_for(cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "Player", asked)
    monkeypatch.setattr(video, "prepare_graphics", lambda env: None)
    for given in (7, None):
        with pytest.raises(Asked) as found:
            record_video(cartpole, tmp_path / "a.mp4", greedy=True, checkpoint=3, seed=given)
        model, _, settings, how = found.value.args
        assert settings == EvaluationSettings(greedy=True, seed=given, num_envs=1) and how["purpose"] == "video"
        expected = load_policy(cartpole, 3).model.parameters()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
