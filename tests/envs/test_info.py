"""What environments report in their info (env.metrics)."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from sentences import says
from tiny import options

import lockstep
from lockstep import envs, recipes
from lockstep.cli.main import main
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.envs.episodes import Seeds
from lockstep.envs.info import EpisodeNumbers, labels, number_of, numbers_of
from lockstep.envs.settings import EnvConfig
from lockstep.launchers.launch import resume
from lockstep.reproducibility.verify import verify

METRICS = ("success", "height:mean", "height:max", "episode.r")
ITERATIONS, ROLLOUT, ENVS = 4, 8, 4


class Ladder(gymnasium.Env[Any, Any]):
    """An episode of 3 to 5 steps, at heights 1, 2, … It succeeds if its seed is odd, and says so in its last step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        assert seed is not None
        self._length, self._success, self._height = 3 + seed % 3, bool(seed % 2), 0
        return np.zeros(2, np.float32), {"height": 1000.0}

    def step(self, action: Any) -> Any:
        self._height += 1
        over = self._height == self._length
        info: dict[str, Any] = {"height": np.float32(self._height), "word": "up"}
        return np.zeros(2, np.float32), 2.0, over, False, info | ({"success": self._success} if over else {})


def make() -> gymnasium.Env[Any, Any]:
    return RecordEpisodeStatistics(Ladder())


def experiment(**env: Any) -> lockstep.Experiment:
    base = recipes.ppo_cartpole()
    given = {"id": f"{__file__}:make", "adapter": "gymnasium", "num_envs": ENVS, "metrics": METRICS, **env}
    return base.replace(
        env=dataclasses.replace(base.env, **given),
        algorithm=dataclasses.replace(base.algorithm, rollout=ROLLOUT, epochs=1, minibatches=1),
        scheme=dataclasses.replace(base.scheme, shards=2, acting_batch=0),
        total_steps=ITERATIONS * ROLLOUT * ENVS,
        precision="fp32",
    )


def rows(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: x for name, x in line.items() if name.startswith(("env/", "score/", "eval/", "loss/"))} for line in lines
    ]


def by_hand() -> list[dict[str, float]]:
    """env/… after each iteration, from the seeds of the episodes alone."""
    ended: list[tuple[int, int, bool]] = []
    for j in range(ENVS):
        t = episode = 0
        while t < ITERATIONS * ROLLOUT:
            seed = int(Seeds(1, "train", 0).derive(np.array([j]), np.array([episode]))[0])
            length = 3 + seed % 3
            ended.append((t + length, length, bool(seed % 2)))
            t, episode = t + length + 1, episode + 1  # another step resets
    found = []
    for iteration in range(ITERATIONS):
        so_far = [(length, success) for t, length, success in ended if t <= (iteration + 1) * ROLLOUT]
        lengths = [length for length, _ in so_far]
        found.append(
            {
                "env/success": statistics.fmean(success for _, success in so_far),
                "env/height_mean": statistics.fmean((length + 1) / 2 for length in lengths),
                "env/height_max": statistics.fmean(lengths),
                "env/episode.r": statistics.fmean(2.0 * length for length in lengths),
            }
        )
    return found


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> lockstep.Result:
    run = tmp_path_factory.mktemp("runs") / "inline"
    given = dataclasses.replace(options(run), eval_every=ITERATIONS, eval_episodes=3)
    return lockstep.train(experiment(), "inline", given)


def test_means_of_episodes_are_those_by_hand(inline: lockstep.Result) -> None:
    *training, evaluation = rows(inline.run)
    assert [{name: x for name, x in row.items() if name.startswith("env/")} for row in training] == by_hand()
    seeds = Seeds(1, "eval", 0).derive(np.arange(3), np.zeros(3, np.int64))
    assert evaluation["eval/env/success"] == statistics.fmean(seeds % 2)
    assert evaluation["eval/env/height_max"] == evaluation["eval/length"] == statistics.fmean(3 + seeds % 3)
    assert evaluation["eval/env/height_max_low"] == evaluation["eval/score_low"] / 2


def test_metrics_change_nothing_that_is_learned(inline: lockstep.Result, tmp_path: Path) -> None:
    without = lockstep.train(experiment(metrics=()), "inline", options(tmp_path / "run"))
    assert without.digest == inline.digest
    assert not any(name.startswith("env/") for row in rows(without.run) for name in row)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["processes:2", "cpu:a1-l1,env_processes=2"])
def test_metrics_are_equal_on_every_layout(layout: str, inline: lockstep.Result, tmp_path: Path) -> None:
    result = lockstep.train(experiment(), layout, options(tmp_path / "run"))
    assert result.digest == inline.digest and rows(result.run) == rows(inline.run)[:-1]


def test_a_resumed_run_goes_on_with_the_same_numbers(inline: lockstep.Result, tmp_path: Path) -> None:
    lockstep.train(experiment(), "inline", options(tmp_path / "run"), stop_after=2)
    result = resume(tmp_path / "run", "inline")
    assert result.digest == inline.digest and rows(result.run) == rows(inline.run)[:-1]
    assert verify(result.run, "inline", iterations="all").ok
    text = (result.run / "metrics.jsonl").read_text()
    (result.run / "metrics.jsonl").write_text(text.replace('"env/success": ', '"env/success": 7'))
    assert "env/success" in str(verify(result.run, "inline", iterations="all").difference)


def test_eval_reports_them(inline: lockstep.Result, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = Seeds(1, "test", 0).derive(np.arange(4), np.zeros(4, np.int64))
    main(["eval", str(inline.run), "--episodes", "4"])
    assert f"success {statistics.fmean(seeds % 2):g}, 95% CI" in capsys.readouterr().out
    main(["eval", str(inline.run), "--episodes", "4", "--metrics", "height:min,absent", "--json"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)["metrics"]
    assert found["height_min"] == {"mean": 1.0, "interval95": [1.0, 1.0], "values": [1.0] * 4}
    assert found["absent"] == {"mean": None, "interval95": None, "values": [None] * 4}
    assert says(printed.err, "absent", "height, success, episode.r, episode.l")


def test_a_step_without_a_number_changes_nothing() -> None:
    numbers = EpisodeNumbers(("a", "a:mean", "a:sum", "a:max", "a:min"), 2)
    for found in (3.0, None, -1.0, math.nan):
        numbers.note(0, {} if found is None else {"a": found})
        numbers.add()
    ended = np.array([True, False])
    assert numbers.values(ended)[0].tolist() == [-1.0, 1.0, 2.0, 3.0, -1.0]
    assert np.isnan(numbers.values(ended)[1]).all()
    numbers.begin(0)
    numbers.note(0, {"a": np.array([7], np.int32)})
    numbers.add()
    assert numbers.values(ended)[0].tolist() == [7.0] * 5


def test_a_key_may_lead_into_a_dict() -> None:
    info = {"episode": {"r": np.float64(4.0), "deep": {"x": True}}, "TimeLimit.truncated": False, "none": None}
    assert number_of(info, "episode.r") == 4.0 and number_of(info, "episode.deep.x") == 1.0
    assert number_of(info, "TimeLimit.truncated") == 0.0
    assert all(math.isnan(number_of(info, key)) for key in ("r", "episode.l", "none", "none.x"))
    for value in ("yes", [1, 2], {"r": 1}):
        with pytest.raises(SettingsError, match=r"env\.metrics=x: "):
            number_of({"x": value}, "x")


def test_infos_of_several_environments_are_read_as_those_of_one() -> None:
    together = SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode.DISABLED)
    alone = [make() for _ in range(3)]
    together.reset(seed=6)
    for j, env in enumerate(alone):
        env.reset(seed=6 + j)
    infos = {}
    for _ in range(3):
        *_, infos = together.step(np.zeros(3, np.int64))
        single = [env.step(0)[-1] for env in alone]
        for key in ("success", "height", "episode.r", "absent"):
            np.testing.assert_array_equal(numbers_of(infos, key, 3), [number_of(info, key) for info in single])
    with pytest.raises(SettingsError, match=r"env\.metrics=word"):
        numbers_of(infos, "word", 3)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (("height:median",), ("height:median", "last, mean, sum, max, min")),
        (("",), ("KEY", "success,height:mean")),
        (("a b",), ("'a b'",)),
        (("episode.t",), ("episode.t", "clock")),
        (("a:mean", "a_mean"), ("a:mean,a_mean", "twice")),
    ],
)
def test_wrong_metrics_are_explained(metrics: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as error:
        EnvConfig(metrics=metrics).validate()
    assert says(str(error.value), "env.metrics", *words)


def test_names_say_what_they_are_of_the_steps() -> None:
    assert labels(("success", "height:mean", "a.b:last")) == ["success", "height_mean", "a.b"]


def test_an_experiment_without_metrics_keeps_its_identity() -> None:
    assert "metrics" not in to_json(EnvConfig()) and to_json(EnvConfig(metrics=("a",)))["metrics"] == ["a"]


@pytest.mark.parametrize(
    ("env_id", "adapter", "words"),
    [("Breakout", "auto", ("env.adapter=ale", "--env.adapter envpool")), ("CartPole-v1", "compiled", ("gymnasium",))],
)
def test_adapters_without_infos_refuse(env_id: str, adapter: str, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as error:
        envs.resolve(EnvConfig(env_id, adapter=adapter, metrics=("lives",)))
    assert says(str(error.value), "env.metrics=lives", *words)


def test_envpool_reports_the_same_after_a_restore() -> None:
    pytest.importorskip("envpool")
    metrics = "reward_run:sum", "x_position"
    config = EnvConfig(
        "HalfCheetah-v4", adapter="envpool", options={"max_episode_steps": 5}, num_envs=2, metrics=metrics
    )
    out = np.zeros((2, 17), np.float32)
    draw = np.random.default_rng(1)
    actions = draw.uniform(-1, 1, (14, 2, 6)).astype(np.float32)

    def play(env: envs.ShardEnv, begin: int) -> list[Any]:
        found = []
        for action in actions[begin:]:
            env.send(action)
            step = env.recv(out)
            assert step.metrics is not None
            if step.truncated.any():
                found.append(step.metrics.tolist())
        return found

    env, restored = (envs.make(config, seed=1, first_index=0, num_envs=2) for _ in range(2))
    env.reset(out)
    whole = play(env, 0)
    env.reset(out)
    total, info = np.zeros(2), np.zeros(2)
    for action in actions[:5]:
        env.send(action)
        env.recv(out)
        total, info = total + env._info["reward_run"], env._info["x_position"]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(whole[0], np.stack([total, info], 1))
    for action in actions[5:9]:  # a reset and three steps of the second episode
        env.send(action)
        env.recv(out)
    restored.load_state_dict(env.state_dict(), out)
    assert play(restored, 9) == whole[1:] and len(whole) == 2
    env.close()
    restored.close()
