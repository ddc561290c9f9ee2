"""What the agents of matches report in their infos (env.metrics), against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from playing import buffers, play
from sentences import says
from tiny import options

import lockstep
from lockstep import envs
from lockstep.algorithms import PPOConfig
from lockstep.cli.main import main
from lockstep.cli.recipe import load_recipe
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig
from lockstep.envs.episodes import Seeds
from lockstep.envs.info import labels
from lockstep.experiment import Experiment
from lockstep.launchers.launch import resume
from lockstep.models import StandardModelConfig
from lockstep.reproducibility.verify import verify
from lockstep.scheme import Scheme

RACE, PILES = f"pettingzoo/{__file__}:Race", f"pettingzoo/{__file__}:Piles"
IGNORED = 1000.0
"""A number that no episode may count."""
Reported = dict[str, float]


class Race(pettingzoo.ParallelEnv):
    """Runner k is out after 2, 3 or 5 steps, and runs (k + 1) times the number of the step in each. One wins, which
    depends on the seed, and which each says in its last step."""

    metadata = {"name": "race"}  # noqa: RUF012 - as in every environment of PettingZoo
    lasting = (2, 3, 5)

    def __init__(self) -> None:
        self.possible_agents = ["x", "y", "z"]

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        assert seed is not None
        self.agents, self.time, self.winner = list(self.possible_agents), 0, seed % 3
        return self.look(), {name: {"pace": IGNORED} for name in self.agents}

    def look(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(2, np.float32) for name in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        obs, here = self.look(), self.agents
        infos: dict[str, Any] = {name: {"pace": IGNORED} for name in self.possible_agents}  # also of those that are out
        for k, name in enumerate(self.possible_agents):
            if name in here:
                infos[name] = {"pace": np.float32((k + 1) * self.time)}
                if self.time == self.lasting[k]:
                    infos[name]["won"] = self.winner == k
        out = {name: "won" in infos[name] for name in here}
        self.agents = [name for name in here if not out[name]]
        return obs, dict.fromkeys(here, 1.0), out, dict.fromkeys(here, False), infos


def raced(seed: int) -> list[Reported]:
    """What each runner of a match reports."""
    return [
        {
            "won": float(seed % 3 == k),
            "pace_mean": (k + 1) * (last + 1) / 2,
            "pace_sum": (k + 1) * last * (last + 1) / 2,
        }
        for k, last in enumerate(Race.lasting)
    ]


class Piles(pettingzoo.AECEnv):
    """Two players take turns, 4 to 6 in all or as many as asked for, and take as much as they have taken turns. Whoever
    takes last wins. The info of a player stays as it is until its next turn, as PettingZoo's environments leave it."""

    metadata = {"name": "piles"}  # noqa: RUF012 - as in every environment of PettingZoo

    def __init__(self, turns: int = 0) -> None:
        self.possible_agents, self.fixed = ["first", "second"], turns

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> np.ndarray:
        return np.zeros(2, np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        assert seed is not None
        self.agents, self.time, self.turns = list(self.possible_agents), 0, self.fixed or turns_of(seed)
        self.agent_selection = "first"
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {name: {"taken": IGNORED} for name in self.agents}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            return self._was_dead_step(action)
        self._clear_rewards()
        other = self.possible_agents[1 - self.time % 2]
        self.infos[agent] = {"taken": self.time // 2 + 1}
        self.time += 1
        if self.time == self.turns:
            self.terminations = dict.fromkeys(self.agents, True)
            self.infos[agent]["won"], self.infos[other]["won"] = 1, 0
        self.agent_selection = other


def turns_of(seed: int) -> int:
    return 4 + seed % 3


def took(seed: int) -> list[Reported]:
    """What each player of a match reports."""
    turns = turns_of(seed)
    own = [(turns + 1) // 2, turns // 2]
    last = (turns - 1) % 2
    return [
        {"won": float(k == last), "taken_sum": n * (n + 1) / 2, "taken_mean": (n + 1) / 2, "taken_max": n}
        for k, n in enumerate(own)
    ]


PACE, TAKEN = ("won", "pace:mean", "pace:sum"), ("won", "taken:sum", "taken:mean", "taken:max")


def team(agent: str) -> str:
    return "red" if agent == "x" else "blue"


def seed_of(index: int, episode: int, purpose: str = "train", run: int = 1) -> int:
    return int(Seeds(run, purpose, 0).derive(np.array([index]), np.array([episode]))[0])


def ended(config: EnvConfig, num_envs: int, steps: int) -> list[list[Reported]]:
    """By environment: what each of its episodes has reported by its end."""
    config = envs.resolve(config)
    env = envs.make(config, seed=1, first_index=0, num_envs=num_envs)
    env.reset(buffers(env))
    found: list[list[Reported]] = [[] for _ in range(num_envs)]
    for _, step in play(env, [np.zeros(num_envs, np.int64)] * steps):
        assert step.metrics is not None and step.metrics.shape == (num_envs, len(config.metrics))
        for j in np.flatnonzero(step.terminated | step.truncated).tolist():
            values = zip(labels(config.metrics), step.metrics[j].tolist(), strict=True)
            found[j].append({name: x for name, x in values if not math.isnan(x)})
    env.close()
    return found


KINDS = [(RACE, PACE, raced), (PILES, TAKEN, took)]


@pytest.mark.parametrize(("env_id", "metrics", "by_hand"), KINDS)
def test_each_agent_reports_its_own_numbers(
    env_id: str, metrics: tuple[str, ...], by_hand: Callable[[int], list[Reported]]
) -> None:
    size = len(by_hand(0))
    for j, episodes in enumerate(ended(EnvConfig(env_id, metrics=metrics), 2 * size, 30)):
        match, agent = j // size * size, j % size
        assert episodes == [by_hand(seed_of(match, episode))[agent] for episode in range(len(episodes))]
        assert len(episodes) >= 4


@pytest.mark.parametrize(("env_id", "metrics", "by_hand"), KINDS)
def test_agents_of_opponents_do_not_count(
    env_id: str, metrics: tuple[str, ...], by_hand: Callable[[int], list[Reported]]
) -> None:
    """The policy plays another agent in each episode. Its numbers are those that it has when it plays all of them."""
    for j, episodes in enumerate(ended(EnvConfig(env_id, metrics=metrics, opponents=("random",)), 3, 30)):
        matches = [by_hand(seed_of(j, episode)) for episode in range(len(episodes))]
        assert episodes == [agents[(j + episode) % len(agents)] for episode, agents in enumerate(matches)]
        assert len(episodes) >= 5


def test_a_match_that_an_opponent_ends_before_the_policy_acts_counts() -> None:
    """The first player wins with its first action."""
    config = EnvConfig(PILES, metrics=("won",), opponents=("random",), options={"turns": 1})
    for j, episodes in enumerate(ended(config, 2, 8)):
        assert episodes == [{"won": float((j + episode) % 2 == 0)} for episode in range(4)]


def test_each_policy_has_its_part_of_the_numbers() -> None:
    config = EnvConfig(RACE, metrics=("won", "pace:sum"), policies=f"{__file__}:team")
    names = ("score_red", "score_blue", "won_red", "won_blue", "pace_sum_red", "pace_sum_blue", "won", "pace:sum")
    assert envs.resolve(config).metrics == envs.resolve(envs.resolve(config)).metrics == names
    for j, episodes in enumerate(ended(config, 6, 20)):
        policy = "blue" if j % 3 else "red"
        expected = []
        for episode in range(len(episodes)):
            own = raced(seed_of(j // 3 * 3, episode))[j % 3]
            kept = {name: own[name] for name in ("won", "pace_sum")}
            score = {f"score_{policy}": float(Race.lasting[j % 3])}
            expected.append({**score, **kept, **{f"{name}_{policy}": x for name, x in kept.items()}})
        assert episodes == expected and len(episodes) >= 3


def test_policies_of_opponents_have_no_metrics() -> None:
    config = envs.resolve(EnvConfig(RACE, metrics=("won",), policies=f"{__file__}:team", opponents=("red=random",)))
    assert config.metrics == ("score_blue", "won_blue", "won") and envs.asked_metrics(config) == ("won",)
    for j, episodes in enumerate(ended(config, 4, 20)):
        for episode, found in enumerate(episodes):
            own = raced(seed_of(j // 2 * 2, episode))[1 + j % 2]["won"]
            assert found["won"] == found["won_blue"] == own
        assert len(episodes) >= 3


def test_metrics_are_reported_in_the_order_in_which_they_are_named() -> None:
    """An adapter's user may ask for some alone."""
    asked = EnvConfig(RACE, metrics=("won", "score_blue"), policies=f"{__file__}:team")
    env = envs.make(asked, seed=1, first_index=0, num_envs=3)
    env.reset(buffers(env))
    step = play(env, [np.zeros(3, np.int64)] * 5)[-1].step
    assert step.terminated.all() and step.metrics is not None
    won = [runner["won"] for runner in raced(seed_of(0, 0))]
    np.testing.assert_array_equal(step.metrics, np.stack((won, [np.nan, 3.0, 5.0]), 1))


def experiment(env_id: str = RACE, metrics: tuple[str, ...] = PACE, **env: Any) -> Experiment:
    return Experiment(
        env=EnvConfig(env_id, num_envs=12, metrics=metrics, **env),
        model=StandardModelConfig(hidden_sizes=(8,)),
        algorithm=PPOConfig(rollout=8, epochs=1, minibatches=2),
        scheme=Scheme(shards=2),
        total_steps=4 * 8 * 12,
        precision="fp32",
    )


def rows(run: Path) -> list[dict[str, float]]:
    """What environments have reported, by line of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if name.startswith(("env/", "eval/"))} for line in lines]


def expected_rows() -> list[dict[str, float]]:
    """env/… after each iteration of a race, from the seeds of the matches alone. A match takes five steps and a
    reset, so iterations end in the middle of one."""
    found = []
    for iteration in range(4):
        matches = [(match, episode) for match in range(0, 12, 3) for episode in range((8 * (iteration + 1) + 1) // 6)]
        reports = [runner for match, episode in matches for runner in raced(seed_of(match, episode))]
        found.append({f"env/{name}": statistics.fmean(each[name] for each in reports[-100:]) for name in reports[0]})
    return found


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> lockstep.Result:
    run = tmp_path_factory.mktemp("runs") / "inline"
    given = dataclasses.replace(options(run), eval_every=4, eval_episodes=6, eval_opponents=("random",))
    return lockstep.train(experiment(), "inline", given)


def test_means_in_training_and_evaluations_are_those_by_hand(inline: lockstep.Result) -> None:
    *training, evaluation = rows(inline.run)
    assert training == expected_rows()
    runners = [raced(seed_of(j, 0, "eval"))[j % 3] for j in range(6)]
    for name in ("won", "pace_mean", "pace_sum"):
        assert evaluation[f"eval/env/{name}"] == statistics.fmean(runner[name] for runner in runners)
    assert evaluation["eval/env/won_low"] < evaluation["eval/env/won_high"]


def test_they_change_nothing_that_is_learned(inline: lockstep.Result, tmp_path: Path) -> None:
    assert lockstep.train(experiment(metrics=()), "inline", options(tmp_path / "run")).digest == inline.digest


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["processes:2", "cpu:a1-l1,env_processes=2"])
def test_they_are_equal_on_every_layout(layout: str, inline: lockstep.Result, tmp_path: Path) -> None:
    result = lockstep.train(experiment(), layout, options(tmp_path / "run"))
    assert result.digest == inline.digest and rows(result.run) == rows(inline.run)[:-1]


PILED = {"env_id": PILES, "metrics": TAKEN, "policies": "separate"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, PILED, {**PILED, "opponents": ("second=random",)}])
def test_a_run_resumed_in_the_middle_of_matches_goes_on_with_the_same_numbers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    whole = lockstep.train(experiment(**settings), "inline", options(tmp_path / "whole"))
    lockstep.train(experiment(**settings), "inline", options(tmp_path / "run"), stop_after=2)
    result = resume(tmp_path / "run", "processes:2")
    assert result.digest == whole.digest and rows(result.run) == rows(whole.run) != []
    assert verify(result.run, "inline", iterations="all").ok


def test_eval_reports_them_against_opponents(inline: lockstep.Result, capsys: pytest.CaptureFixture[str]) -> None:
    runners = [raced(seed_of(j, 0, "test"))[j % 3] for j in range(6)]
    main(["eval", str(inline.run), "--episodes", "6", "--opponents", "random", "--json"])
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert {name: found[name]["values"] for name in found} == {
        name: [runner[name] for runner in runners] for name in ("won", "pace_mean", "pace_sum")
    }
    main(["eval", str(inline.run), "--episodes", "6", "--metrics", "pace:max,lacking"])
    printed = capsys.readouterr()
    assert "pace_max" in printed.out and says(printed.err, "lacking", "pace, won")


def test_several_policies_may_be_evaluated_with_other_sides(tmp_path: Path) -> None:
    policies = {"policies": f"{__file__}:team", "metrics": ("won",)}
    run = lockstep.train(experiment(**policies), "inline", options(tmp_path / "run")).run
    line = rows(run)[-1]
    assert line["env/won"] == pytest.approx((line["env/won_red"] + 2 * line["env/won_blue"]) / 3)
    assert list(lockstep.evaluate(run, episodes=3).metrics) == [
        *("score_red", "score_blue", "won_red", "won_blue", "won"),
    ]
    against = lockstep.evaluate(run, episodes=4, opponents=("red=random",))
    assert list(against.metrics) == ["score_blue", "won_blue", "won"]
    assert against.metrics["won"].values == against.metrics["won_blue"].values
    assert load_recipe(str(run)).env.metrics == ("won",), "its settings can be those of another run"
    assert list(lockstep.evaluate(run, episodes=3, opponents=("blue=random",), metrics=("pace",)).metrics) == [
        *("score_red", "pace_red", "pace"),
    ]


def test_compiled_matches_have_no_infos() -> None:
    for policies in ("shared", "separate"):
        with pytest.raises(SettingsError) as error:
            envs.resolve(EnvConfig("mpe/simple_spread_v3", metrics=("won",), policies=policies))
        assert says(
            str(error.value), "env.metrics=won:", "env.adapter=compiled", "pettingzoo/", "leave out --env.metrics"
        )


def test_names_that_two_metrics_would_have_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"env\.metrics=score: .*two metrics would have the name score_red"):
        envs.resolve(EnvConfig(RACE, metrics=("score",), policies=f"{__file__}:team"))


@pytest.mark.parametrize("absent", ["won", "never"])
def test_first_episodes_that_are_cut_need_not_report(absent: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runners win or lose in their last step."""
    config = EnvConfig(RACE, metrics=("pace", absent), decorrelate=1)
    env = envs.make(config, seed=1, first_index=0, num_envs=3)
    env.reset(buffers(env))
    assert play(env, [np.zeros(3, np.int64)])[0].step.truncated.all() and not capsys.readouterr().err
    assert play(env, [np.zeros(3, np.int64)] * 6)[-1].step.terminated.all()
    assert says(capsys.readouterr().err, "no never", "pace, won") == (absent == "never")
