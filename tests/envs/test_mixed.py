"""Several tasks that one policy plays (mixed/A+B): each compared with separate environments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playing import assert_same, buffers, equal, play, random_actions, reset, snapshot, user_file
from tiny import cut

from lockstep import envs, recipes, resume, train
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.checking.check import quick_check
from lockstep.envs.episodes import Seeds
from lockstep.envs.factory import check_matches
from lockstep.evaluation.attempts import evaluate_attempts
from lockstep.evaluation.scores import evaluate
from lockstep.reproducibility.verify import verify
from lockstep.run.folder import RunFolder

USER = """
import gymnasium
import numpy as np

class Pay(gymnasium.Env):
    "Episodes of `length` steps that pay `pay` each for action 1."
    length, pay = 3, 1.0

    def __init__(self, sides=2):
        self.observation_space = gymnasium.spaces.Box(0, 1, (sides,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self.time += 1
        seen = self.np_random.random(2, np.float32)
        return seen, self.pay * float(action == 1), self.time == self.length, False, {}

class Rich(Pay):
    length, pay = 5, 10.0

class Wide(Pay):
    def __init__(self):
        super().__init__(sides=3)
"""
TWO = "mixed/pay.py:Pay+pay.py:Rich*2"


@pytest.fixture(scope="module", autouse=True)
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with user_file(tmp_path_factory, "pay.py", USER):
        yield


def make(config: EnvConfig, num_envs: int, first_index: int = 0) -> ShardEnv:
    return envs.make(config, seed=1, first_index=first_index, num_envs=num_envs)


def test_each_task_is_played_as_by_environments_of_its_own() -> None:
    config = EnvConfig("mixed/Breakout+Pong*2", num_envs=12, protocol="machado")
    assert envs.resolve(config).id == "mixed/Breakout@ale+Pong@ale*2"
    whole = make(config, 6, first_index=6)
    out = buffers(whole)
    whole.reset(out)
    start = snapshot(out)[""]
    actions = random_actions(whole, 60)
    played = play(whole, actions)
    for game, rows, first in (("Breakout", slice(0, 2), 2), ("Pong", slice(2, 6), 4)):
        adapter = envs.adapter_of(EnvConfig(game))
        settings = envs.resolve(EnvConfig(game, protocol="machado"))
        alone = adapter.make(settings, seeds=Seeds(1, "train", first), num_envs=rows.stop - rows.start)
        assert np.array_equal(start[rows], reset(alone)[""])
        assert_same(played, play(alone, [action[rows] for action in actions]), rows)
        alone.close()
    state = whole.state_dict()
    further = random_actions(whole, 40, seed=1)
    expected = play(whole, further)
    whole.close()
    again = make(config, 6, first_index=6)
    assert again.load_state_dict(state, out) > 0
    assert equal(play(again, further), expected)
    again.close()


def test_the_score_of_an_episode_is_a_metric_of_its_task() -> None:
    env = make(EnvConfig(TWO, num_envs=6), 6)
    assert envs.resolve(EnvConfig(TWO)).metrics == ("score_pay.py-Pay", "score_pay.py-Rich")
    reset(env)
    by_task: list[list[float]] = [[], []]
    out, ones = buffers(env), np.ones(6, np.int64)
    for t in range(24):
        if t == 8:  # within episodes
            state = env.state_dict()
            env.close()
            env = make(EnvConfig(TWO, num_envs=6), 6)
            env.load_state_dict(state, out)
        env.send(ones)
        step = env.recv(out)
        assert step.metrics is not None
        for j in np.flatnonzero(step.terminated):
            task = int(j >= 2)
            assert np.isnan(step.metrics[j, 1 - task])
            by_task[task].append(step.metrics[j, task])
    env.close()
    assert by_task == [[3.0] * 12, [50.0] * 16], "2 × 24 steps of 3 + 1, and 4 × 24 of 5 + 1"


def test_observations_may_tell_the_task() -> None:
    config = EnvConfig(TWO, num_envs=3, options={"task_input": True})
    env = make(config, 3)
    seen = reset(env)
    plain = make(EnvConfig(TWO, num_envs=3), 3)
    assert np.array_equal(seen["observation"], reset(plain)[""])
    told = [[1, 0], [0, 1], [0, 1]]
    assert seen["task"].tolist() == told
    actions = random_actions(env, 12)
    for with_task, without in zip(play(env, actions), play(plain, actions), strict=True):
        assert np.array_equal(with_task.obs["observation"], without.obs[""])
        assert with_task.obs["task"].tolist() == told
    env.close()
    plain.close()
    for value in ("yes", [1]):
        with pytest.raises(SettingsError, match=re.escape(f"task_input={value!r} must be true, false, value or both")):
            make(EnvConfig(TWO, num_envs=3, options={"task_input": value}), 3)


def test_a_file_lists_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.txt").write_text("# two tasks\nCartPole-v1@gymnasium\n\npay.py:Pay*3  # thrice\n")
    found = envs.resolve(EnvConfig("mixed/tasks.txt"))
    assert found.id == "mixed/CartPole-v1@gymnasium+pay.py:Pay@gymnasium*3"
    (tmp_path / "tasks.txt").write_text("CartPole-v1@gymnasium\nAcrobot-v1@gymnasium\n")
    assert envs.resolve(EnvConfig("mixed/tasks.txt")).id == "mixed/CartPole-v1@gymnasium+Acrobot-v1@gymnasium"
    with pytest.raises(SettingsError, match=r"mixed/no\.txt: cannot read the tasks"):
        envs.resolve(EnvConfig("mixed/no.txt"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvConfig("mixed/Breakout"), "must name at least two tasks"),
        (EnvConfig("mixed/Breakout+Breakout"), r"names Breakout twice.*Breakout\*2"),
        (EnvConfig(TWO, adapter="compiled"), r"--env\.adapter auto, and ID@compiled in the id"),
        (EnvConfig("mixed/Breakout+Pang"), "no environment 'Pang'"),
        (EnvConfig("mixed/Breakout+Pong*0"), r"'Pong\*0'"),
        (EnvConfig("mixed/Breakout+mixed/Pong+Breakout"), "must name at least two"),
        (EnvConfig("mixed/Breakout+Pong", protocol="classic"), "full_action_space=true"),
        (
            EnvConfig("mixed/CartPole-v1+pay.py:Pay"),
            "CartPole-v1 has the observation space .* and pay.py:Pay .* wrap it",
        ),
        pytest.param(
            EnvConfig("mixed/CartPole-v1@envpool+Acrobot-v1@envpool", decorrelate=9),
            "as in CartPole-v1@gymnasium",
            marks=pytest.mark.envpool,
        ),
        (EnvConfig("mixed/pay.py:Pay+pay.py:Wide"), "observation space"),
        (EnvConfig("mixed/CartPole-v1+pay.py:Pay", protocol="machado"), "is for Atari games"),
        (EnvConfig("mixed/pay.py:Pay+pay.py:Rich", metrics=("success",)), "Leave out --env.metrics"),
        pytest.param(EnvConfig("mixed/CartPole-v1@envpool+CartPole-v1@gymnasium"), "twice", marks=pytest.mark.envpool),
    ],
)
def test_what_one_policy_cannot_play_is_refused(config: EnvConfig, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        envs.spaces(config)


@pytest.mark.envpool
def test_libraries_that_restart_in_different_ways_are_refused() -> None:
    config = EnvConfig("mixed/Breakout@envpool+Pong@ale", protocol="machado")
    with pytest.raises(SettingsError, match=r"Breakout@envpool can only get new seeds together, those of Pong@ale"):
        envs.spaces(config)
    config = EnvConfig("mixed/Breakout@envpool+Pong@envpool", num_envs=2, protocol="machado", reseed_every=20)
    env = make(config, 2)
    reset(env)
    play(env, random_actions(env, 20))
    assert env.reseed_due()
    env.reseed(buffers(env))
    assert not env.reseed_due()
    env.close()


def test_every_shard_has_all_tasks() -> None:
    check_matches(EnvConfig(TWO, num_envs=12), 6)
    with pytest.raises(SettingsError, match=r"takes groups of 3.*--env\.num-envs 12"):
        check_matches(EnvConfig(TWO, num_envs=8), 4)


def test_a_run_has_the_same_bits_on_another_layout_and_resumed(tmp_path: Path) -> None:
    experiment = cut(recipes.ppo_cartpole, env={"id": TWO, "adapter": "auto", "num_envs": 12}, scheme={"shards": 2})

    def options(name: str) -> RunOptions:
        return RunOptions(run=str(tmp_path / name), display="none", tensorboard=False, checkpoint_every=1)

    whole = train(experiment, "inline", options("whole"))
    train(experiment, "cpu:a1-l1", options("stopped"), stop_after=1)
    assert resume(tmp_path / "stopped").digest == whole.digest
    assert verify(whole.run, iterations="all").ok
    last: Any = RunFolder(whole.run).records()[-1]
    assert 0 <= last["env/score_pay.py-Pay"] <= 3 and 0 <= last["env/score_pay.py-Rich"] <= 50
    found = evaluate(whole.run, episodes=9, num_envs=1)
    assert [len(metric.known) for metric in found.metrics.values()] == [3, 6], "of 3 environments, 2 play Rich"
    assert max(found.metrics["score_pay.py-Pay"].known) <= 3.0
    found = evaluate(whole.run, episodes=21)
    assert [len(metric.known) for metric in found.metrics.values()] == [7, 14], "of 18 environments, 6 play Pay"
    played = evaluate_attempts(whole.run, levels="1..2", attempts=2)
    assert all(0 <= score <= (3 + 2 * 50) / 3 for row in played.scores for score in row)
    assert [set(row) for row in played.lengths] == [{(3 + 2 * 5) / 3}] * 2, "each attempt plays Pay once and Rich twice"


def test_a_check_compares_each_group_with_its_own_environments() -> None:
    rows = envs.adapter_of(EnvConfig(TWO)).group_rows(envs.resolve(EnvConfig(TWO)), 6)
    assert [each.tolist() for each in rows] == [[0, 2, 3], [1, 4, 5]], "Pay is 0 and 1, Rich 2 to 5"
    assert quick_check(envs.resolve(EnvConfig(TWO, num_envs=6)), seed=1, seconds=20.0) is None
