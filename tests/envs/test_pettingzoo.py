"""Environments of several agents: against PettingZoo's own loop, and with opponents."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pettingzoo
import pytest
import tiny
from gymnasium import spaces
from playing import assert_same, buffers, play, play_legally, random_actions, reset, snapshot, user_file
from tiny import cut

from lockstep import check_env, envs, recipes, train
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.episodes import Seeds
from lockstep.envs.multiagent import pettingzoo as matches
from lockstep.envs.pool.pool import SteppingPool
from lockstep.evaluation.opponents import _loaded, resolved
from lockstep.evaluation.scores import evaluate

FOUR, SHAPES = "pettingzoo/classic/connect_four-v3", "pettingzoo/classic/rps-v2"

USER = """
import numpy as np
import pettingzoo
from gymnasium import spaces

SEEN = []

class Leaving(pettingzoo.ParallelEnv):
    "Agent k terminates after step k + 1, the last one is truncated; everybody earns k + 1 at each step."
    metadata = {"name": "leaving"}

    def __init__(self, count=3, differ=False, cut_first=False):
        self.possible_agents = list(range(count))
        self.differ, self.cut_first = differ, cut_first

    def observation_space(self, agent):
        return spaces.Box(0, 9, (2 + self.differ * agent,), np.float32)

    def action_space(self, agent):
        return spaces.Box(-1, 1, (1,), np.float32)

    def look(self):
        return {k: np.array([self.time, k + 1], np.float32) for k in self.agents}

    def reset(self, seed=None, options=None):
        self.agents, self.time = list(self.possible_agents), 0
        return self.look(), {k: {} for k in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), "others than those that play have acted"
        self.time += 1
        obs, here, last = self.look(), self.agents, len(self.possible_agents) - 1
        self.agents = [k for k in here if k >= self.time]
        rewards = {k: k + 1.0 for k in here}
        out = {k: k < self.time for k in here}
        cut = {k: out[k] and (k == last or (k == 0 and self.cut_first)) for k in here}
        return obs, rewards, {k: out[k] and not cut[k] for k in here}, cut, {}


class Staying(Leaving):
    "As many people write them."

    def step(self, actions):
        answer = super().step(actions)
        self.agents = list(self.possible_agents)
        return answer


class Folding(pettingzoo.AECEnv):
    "The first to act folds with action 1, and loses; after action 0 the other one is asked, up to eight times."
    metadata = {"name": "folding"}

    def __init__(self, discrete=True, several=False, told=False):
        self.possible_agents = ["a", "b"]
        self.discrete, self.several, self.told = discrete, several, told

    def observation_space(self, agent):
        return spaces.Dict(turn=spaces.Discrete(9)) if self.told else spaces.Discrete(9)

    def action_space(self, agent):
        if self.several:
            return spaces.MultiDiscrete([2, 3])
        return spaces.Discrete(2) if self.discrete else spaces.Box(-1, 1, (1,), np.float32)

    def observe(self, agent):
        return self.time

    def reset(self, seed=None, options=None):
        self.agents, self.time, self.agent_selection = ["a", "b"], 0, "a"
        self.rewards, self._cumulative_rewards = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
        self.terminations, self.truncations = {"a": False, "b": False}, {"a": False, "b": False}
        self.infos = {"a": {}, "b": {}}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            return self._was_dead_step(action)
        self._clear_rewards()
        other = "b" if agent == "a" else "a"
        self.time += 1
        if action == 1:
            self.rewards = {agent: -1.0, other: 1.0}
            self.terminations = {"a": True, "b": True}
        elif self.time == 8:
            self.truncations = {"a": True, "b": True}
        self.agent_selection = other


class Older(Leaving):
    "Resets without infos, as before PettingZoo 1.23."

    def reset(self, seed=None, options=None):
        return super().reset(seed)[0]


class Oldest(Leaving):
    "Steps with one dict of ends."

    def step(self, actions):
        return super().step(actions)[:4]


class Unseeded(Leaving):
    def reset(self):
        return super().reset()


class Nameless(pettingzoo.ParallelEnv):
    metadata = {"name": "nameless"}


class Reusing(Leaving):
    "Writes all observations into the same arrays."

    def look(self):
        self.seen = getattr(self, "seen", {})
        for k in self.possible_agents:
            self.seen.setdefault(k, np.zeros(2, np.float32))[:] = self.time, k + 1
        return {k: self.seen[k] for k in self.agents}


class Skipping(Folding):
    "The last of three is out after a turn, but stays in the list of agents, and never has its turn."

    def __init__(self):
        super().__init__()
        self.possible_agents = ["a", "b", "c"]

    def reset(self, seed=None, options=None):
        super().reset(seed, options)
        self.agents.append("c")
        for each in (self.rewards, self._cumulative_rewards):
            each["c"] = 0.0
        self.terminations["c"] = self.truncations["c"] = False

    def step(self, action):
        super().step(action)
        self.terminations["c"] = True


def folds(observation, space, draw):
    SEEN.append(observation)
    return 1


def cheats(observation, space, draw):
    return int(np.flatnonzero(observation["action_mask"] == 0)[0]) if (observation["action_mask"] == 0).any() else 99


def by_chance(observation, space, draw):
    return draw.choice(np.flatnonzero(observation["action_mask"]))
"""


@pytest.fixture(scope="module", autouse=True)
def user_files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with user_file(tmp_path_factory, "user_matches.py", USER):
        yield


def make(env_id: str, num_envs: int = 4, first: int = 0, pool: SteppingPool | None = None, **settings: Any) -> ShardEnv:
    config = EnvConfig(id=env_id, **settings)
    return envs.make(config, seed=3, first_index=first, num_envs=num_envs, pool=pool)


def test_a_game_of_turns_equals_playing_it_by_hand() -> None:
    env = make(FOUR)
    actions, moments = play_legally(env, 120)
    ends = 0
    for m in (0, 1):
        seeds = iter(int(Seeds(3, "train", 0).derive(np.array([2 * m]), np.array([k]))[0]) for k in range(99))
        game: Any = pettingzoo.make("aec", FOUR.removeprefix("pettingzoo/"))
        game.reset(seed=next(seeds))
        ended = False
        for action, (obs, step) in zip(actions, moments, strict=True):
            if ended:
                game.reset(seed=next(seeds))
                assert step.first[2 * m : 2 * m + 2].all() and not step.reward[2 * m : 2 * m + 2].any()
            else:
                mover = game.possible_agents.index(game.agent_selection)
                game.step(int(action[2 * m + mover]))
                assert not step.first[2 * m]
                rewards = [game.rewards[name] for name in game.possible_agents]
                assert step.reward[2 * m : 2 * m + 2].tolist() == rewards
            ended = all(game.terminations.values())
            ends += ended
            assert step.terminated[2 * m : 2 * m + 2].tolist() == [ended, ended] and not step.truncated.any()
            for i, name in enumerate(game.possible_agents):
                seen = game.observe(name)
                assert np.array_equal(obs["observation"][2 * m + i], seen["observation"].astype(np.float32))
                acting = not ended and name == game.agent_selection
                mask = seen["action_mask"] if acting else [1, 0, 0, 0, 0, 0, 0]
                assert obs["action_mask"][2 * m + i].tolist() == list(mask)
                assert obs["turn"][2 * m + i].tolist() == [acting]
    assert ends > 5


def test_a_game_of_one_time_equals_playing_it_by_hand() -> None:
    env = make(SHAPES, options={"max_cycles": 7})
    reset(env)
    actions = random_actions(env, 40)
    played = play(env, actions)
    game = pettingzoo.make("parallel", SHAPES.removeprefix("pettingzoo/"), max_cycles=7)
    game.reset(seed=1)
    ends = 0
    for action, (obs, step) in zip(actions, played, strict=True):
        if step.first[2]:
            assert step.first[3]
            game.reset(seed=1)
            continue
        seen, rewards, _, truncations, _ = game.step(dict(zip(game.agents, map(int, action[2:]), strict=True)))
        ends += truncations["player_0"]
        assert step.reward[2:].tolist() == list(rewards.values())
        assert step.truncated[2:].tolist() == list(truncations.values()) and not step.terminated.any()
        assert obs[""][2:].argmax(-1).tolist() == [int(x) for x in seen.values()]
    assert ends == 5


def test_who_is_out_sees_zeros_and_earns_nothing_until_the_match_is_over() -> None:
    env = make("pettingzoo/user_matches.py:Leaving", 6)
    assert reset(env)[""].tolist() == 2 * [[0, 1], [0, 2], [0, 3]]
    first, second, third, fourth = play(env, random_actions(env, 4))
    assert first.obs[""][:3].tolist() == [[1, 1], [1, 2], [1, 3]], "the last observation of agent 0"
    assert second.obs[""][:3].tolist() == [[0, 0], [2, 2], [2, 3]]
    assert third.obs[""][:3].tolist() == [[0, 0], [0, 0], [3, 3]]
    assert [moment.step.reward[:3].tolist() for moment in (first, second, third)] == [[1, 2, 3], [0, 2, 3], [0, 0, 3]]
    assert not (second.step.terminated | second.step.truncated).any()
    assert third.step.terminated.tolist() == 2 * [True, True, False]
    assert third.step.truncated.tolist() == 2 * [False, False, True]
    assert fourth.step.first.all() and fourth.obs[""][:3].tolist() == [[0, 1], [0, 2], [0, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("opponents", [(), ("random",), ("random", "user_matches.py:by_chance")])
def test_matches_are_the_same_in_other_shards_in_processes_and_when_restored(opponents: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {"opponents": opponents, "reseed_every": 30, "decorrelate": 9}
    whole = make(FOUR, 8, **settings)
    actions, expected = play_legally(whole, 70)
    part = make(FOUR, 4, first=4, **settings)
    assert_same(expected, play_legally(part, 70, first=4)[1], slice(4, 8))

    pool = SteppingPool(3)
    try:
        pooled = make(FOUR, 8, pool=pool, **settings)
        reset(pooled)
        assert_same(expected[:50], play(pooled, actions[:50]))
        restored = make(FOUR, 8, **settings)
        out = buffers(restored)
        restored.load_state_dict(pooled.state_dict(), out)
        assert all(np.array_equal(snapshot(out)[key], value) for key, value in expected[49].obs.items())
        assert_same(expected[50:], play(restored, actions[50:]))
        pooled.close()
    finally:
        pool.close()


def test_episodes_of_a_match_are_cut_together() -> None:
    env = make(FOUR, 8, decorrelate=6, reseed_every=11)
    _, moments = play_legally(env, 80)
    step = np.stack([moment.step.truncated for moment in moments])
    assert np.array_equal(step[:, ::2], step[:, 1::2]) and len(set(step.argmax(0).tolist())) > 1
    assert step.sum() > 10


def test_opponents_play_all_other_agents_until_it_is_ones_turn() -> None:
    env = make(FOUR, 6, opponents=("user_matches.py:by_chance",))
    obs = reset(env)
    begun = [int(row.sum()) for row in obs["observation"]]
    assert begun == [0, 1, 0, 1, 0, 1], "in every second environment one is the second player"
    assert (obs["action_mask"] == 1).all()
    _, moments = play_legally(env, 60)
    scores, episode = set(), np.zeros(6, int)
    for obs, step in moments:
        episode += step.first
        going = ~(step.terminated | step.truncated)
        own, other = (obs["observation"][going, :, :, i].sum((1, 2)) for i in (0, 1))
        assert np.array_equal(other - own, (np.arange(6) + episode)[going] % 2), "they change sides with every episode"
        scores |= set(step.reward[step.terminated].tolist())
        assert (obs["action_mask"][going].sum(-1) >= 1).all() and not step.reward[going].any()
    assert scores >= {1.0, -1.0}


def test_an_opponent_may_only_do_what_is_allowed() -> None:
    env = make(FOUR, 2, opponents=("user_matches.py:cheats",))
    with pytest.raises(SettingsError, match=r"user_matches.py:cheats .* 99\b.* \[0, 1, 2, 3"):
        reset(env)


def test_opponents_differ_by_match_and_by_episode() -> None:
    env = make("pettingzoo/user_matches.py:Folding", 32, opponents=("random",))
    reset(env)
    lengths = np.stack([moment.step.terminated for moment in play(env, [np.zeros(32, int)] * 3)]).argmax(0)
    assert len(set(lengths.tolist())) > 1


def test_a_match_that_opponents_end_before_ones_first_turn_counts() -> None:
    env = make("pettingzoo/user_matches.py:Folding", 2, opponents=("user_matches.py:folds",))
    reset(env)
    wins, again, _, _ = play(env, [np.zeros(2, int)] * 4)
    assert wins.step.reward.tolist() == [1.0, 1.0], "whoever begins"
    assert wins.step.terminated.all() and again.step.first.all() and not again.step.reward.any()


def test_whose_agents_stay_in_the_list_of_agents_are_out_all_the_same() -> None:
    env = make("pettingzoo/user_matches.py:Staying", 3)
    reset(env)
    _, second, third, _ = play(env, random_actions(env, 4))
    assert second.step.reward.tolist() == [0, 2, 3] and second.obs[""][0].tolist() == [0, 0]
    assert third.step.terminated.tolist() == [True, True, False]


def test_who_is_out_before_its_turn_sees_zeros() -> None:
    env = make("pettingzoo/user_matches.py:Skipping", 3)
    reset(env)
    moments = play(env, [np.zeros(3, int)] * 4)
    assert [obs["observation"].argmax(-1).tolist() for obs, _ in moments] == [[1] * 3, [2, 2, 0], [3, 3, 0], [4, 4, 0]]
    assert [obs["turn"].ravel().tolist() for obs, _ in moments] == [[0, 1, 0], [1, 0, 0]] * 2


@pytest.mark.parametrize("name", ["Leaving", "Reusing"])
def test_who_was_truncated_early_is_bootstrapped_from_what_it_saw_last(name: str) -> None:
    env = make(f"pettingzoo/user_matches.py:{name}", 3, options={"cut_first": True})
    reset(env)
    first, _, third = play(env, random_actions(env, 3))
    assert third.step.truncated.tolist() == [True, False, True]
    assert third.obs[""][0].tolist() == first.obs[""][0].tolist() == [1, 1]

    against = make("pettingzoo/user_matches.py:Leaving", 1, options={"cut_first": True}, opponents=("random",))
    reset(against)
    (only,) = play(against, random_actions(against, 1))
    assert only.step.truncated.all() and only.obs[""].tolist() == [[1, 1]], "its match ends when it is out"


def test_who_is_out_for_good_has_terminated_when_the_match_is_cut() -> None:
    env = make("pettingzoo/user_matches.py:Leaving", 3, reseed_every=2)
    reset(env)
    _, second, third = play(env, random_actions(env, 3))
    assert second.step.terminated.tolist() == [True, True, False] and second.step.truncated.tolist() == [
        False,
        False,
        True,
    ]
    assert third.step.first.all()


def test_those_who_wait_have_one_allowed_choice_of_each_kind() -> None:
    env = make("pettingzoo/user_matches.py:Folding", 2, options={"several": True})
    assert reset(env)["action_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 0, 1, 0, 0]]


def test_turns_without_masks_get_some() -> None:
    env = make("pettingzoo/user_matches.py:Folding", 2)
    obs = reset(env)
    assert obs["observation"].shape == (2, 9) and obs["action_mask"].tolist() == [[1, 1], [1, 0]]
    assert obs["turn"].tolist() == [[1], [0]]
    moments = play(env, [np.zeros(2, int)] * 8)
    assert moments[0].obs["action_mask"].tolist() == [[1, 0], [1, 1]]
    assert moments[-1].step.truncated.all() and moments[-1].obs["observation"].argmax(-1).tolist() == [8, 8]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"id": "pettingzoo/user_matches.py:Leaving", "num_envs": 12, "options": {"differ": True}},
            r"observation spaces: 0 has .* 1 .*SuperSuit",
        ),
        (
            {"id": "pettingzoo/user_matches.py:Folding", "options": {"discrete": False}},
            "take turns.*Box.*parallel",
        ),
        ({"id": "pettingzoo/user_matches.py:Folding", "options": {"told": True}}, "entry 'turn'.*Rename"),
        ({"id": FOUR, "num_envs": 12}, r"A shard has 3 .*takes groups of 2, .*--env.num-envs 16\."),
        ({"id": "user_matches.py:Leaving"}, "gymnasium.Env.* pettingzoo/file.py:make"),
        ({"id": "pettingzoo/lockstep.envs.tasks:BitFlip"}, "PettingZoo environment"),
        ({"id": FOUR, "opponents": ("nobody",)}, "nobody does not exist"),
        ({"id": FOUR, "opponents": ("user_matches.py:nothing",)}, "nothing"),
        ({"id": FOUR, "opponents": ("user_matches.py:SEEN",)}, "SEEN .*function"),
        ({"id": "CartPole-v1", "opponents": ("random",)}, "CartPole-v1 has no other agents"),
        (
            {"id": "pettingzoo/user_matches.py:Leaving", "options": {"count": 1}, "opponents": ("random",)},
            "has no other agents",
        ),
        (
            {"id": "pettingzoo/user_matches.py:Leaving", "options": {"count": 2}, "curriculum": {"count": 1}},
            r"env\.curriculum=.*agents",
        ),
        ({"id": FOUR, "options": {"boards": 2}}, "names 'boards'"),
        ({"id": "pettingzoo/classic/connect_for-v3"}, "Did you mean pettingzoo/classic/connect_four-v3"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    experiment = cut(recipes.ppo_self_play)
    experiment = experiment.replace(env=dataclasses.replace(experiment.env, **settings))
    with pytest.raises(SettingsError, match=expected):
        train(experiment, options=RunOptions(run=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Older", r"reset returned a dict, but must return \(observations, infos\).*environment 0, at the start"),
        (
            "Oldest",
            r"step returned a tuple of 4, but must return \(observations, .*, infos\).*environment 0, in step 1",
        ),
        ("Unseeded", r"reset does not take a seed .*reset\(self, seed=None, options=None\).*environment 0"),
        ("Nameless", r"user_matches.py:Nameless names no agents.*self\.possible_agents"),
        ("Leaving", r"render_mode=None.*take render_mode"),
    ],
)
def test_what_environments_must_have_and_return_is_explained(name: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        env = make(f"pettingzoo/user_matches.py:{name}", 3)
        reset(env)
        play(env, random_actions(env, 1))
        env.render()


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pettingzoo" else find(name))
    with pytest.raises(SettingsError, match=r'pip install .*\[pettingzoo\]"'):
        envs.resolve(EnvConfig(id=FOUR))
    monkeypatch.undo()
    with pytest.raises(SettingsError, match=r"pip install 'pettingzoo\[atari\]'"):
        envs.spaces(EnvConfig(id="pettingzoo/atari/pong-v3"))


def test_check_env_takes_whole_matches() -> None:
    found = check_env(EnvConfig(id="pettingzoo/user_matches.py:Leaving", num_envs=4), steps=40)
    assert found.ok and found.num_envs == 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "self-play"
    options = RunOptions(
        run=str(folder), display="none", eval_every=tiny.ITERATIONS, eval_episodes=6, eval_opponents=("random",)
    )
    train(cut(recipes.ppo_self_play), options=options)
    return folder


def test_self_play_scores_nothing_and_evaluations_have_opponents(trained: Path) -> None:
    text = (trained / "metrics.jsonl").read_text()
    assert '"eval/score"' in text
    beside = evaluate(trained, episodes=7)
    assert sum(beside.scores[:6]) == 0 and beside.scores[0] == -beside.scores[1] and "8 environments" in beside.protocol
    against = evaluate(trained, episodes=8, opponents=("random", f"{trained}@{tiny.ITERATIONS}"))
    assert f"against random, {trained}@{tiny.ITERATIONS}" in against.protocol
    assert against == evaluate(trained, episodes=8, opponents=("random", str(trained)))
    assert against.scores != evaluate(trained, episodes=8, opponents=("random",)).scores


@pytest.mark.usefixtures("processes_are_there_already")
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_training_against_a_run_is_the_same_on_another_layout_and_resumed(
    core: str, trained: Path, tmp_path: Path
) -> None:
    if core == "lstm":
        opponent = tmp_path / "opponent"
        train(cut(recipes.ppo_self_play, model={"core": "lstm"}), options=RunOptions(run=str(opponent), display="none"))
    else:
        opponent = trained
    experiment = cut(recipes.ppo_self_play, env={"opponents": ("random", str(opponent))})

    def options(name: str) -> RunOptions:
        return RunOptions(run=str(tmp_path / name), display="none", checkpoint_every=1)

    expected = train(experiment, options=options("inline"))
    train(experiment, "processes:2,env_processes=2", options("resumed"), stop_after=1)
    from lockstep import resume

    assert resume(tmp_path / "resumed").digest == expected.digest
    kept = (tmp_path / "inline" / "experiment.json").read_text()
    assert f"{opponent}@{tiny.ITERATIONS}#" in kept


def test_opponents_that_changed_or_do_not_fit_are_refused(trained: Path, tmp_path: Path) -> None:
    changed = cut(recipes.ppo_self_play, env={"opponents": (f"{trained}@{tiny.ITERATIONS}#0123456789abcdef",)})
    with pytest.raises(SettingsError, match=r"self-play@3 .*#"):
        train(changed, options=RunOptions(run=str(tmp_path / "changed"), display="none"))
    other = cut(recipes.ppo_self_play, env={"id": SHAPES, "opponents": (str(trained),)})
    with pytest.raises(SettingsError, match=r"self-play@3#\w+ .*Discrete\(7\)"):
        train(other, options=RunOptions(run=str(tmp_path / "other"), display="none"))
    options = RunOptions(run=str(tmp_path / "later"), display="none", eval_every=100, eval_opponents=(str(trained),))
    with pytest.raises(SettingsError, match=r"self-play@3#\w+ .*Discrete\(7\)"):
        train(cut(recipes.ppo_self_play, env={"id": SHAPES}), options=options)
    assert not (tmp_path / "later").exists(), "before it begins, rather than at the first evaluation"


def test_opponents_may_have_had_opponents_that_are_gone(trained: Path, tmp_path: Path) -> None:
    for name in ("me@home", "second", "third"):
        opponents = ("random", str(trained) if name == "me@home" else str(tmp_path / "me@home"))
        experiment = cut(recipes.ppo_self_play, env={"opponents": opponents})
        train(experiment, options=RunOptions(run=str(tmp_path / name), display="none"))
    shutil.rmtree(tmp_path / "me@home")
    assert evaluate(tmp_path / "second", episodes=4, opponents=("random", str(tmp_path / "third"))).scores
    _loaded.cache_clear()
    with pytest.raises(SettingsError, match=r"me@home@3,.* does not exist"):
        evaluate(tmp_path / "second", episodes=4)


def test_a_match_makes_one_environment_whomever_it_is_played_against(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = trained
    for generation in range(3):
        experiment = cut(recipes.ppo_self_play, env={"opponents": (str(last), "random")})
        last = tmp_path / str(generation)
        train(experiment, options=RunOptions(run=str(last), display="none"))
    config = EnvConfig(id=FOUR)
    config = dataclasses.replace(config, opponents=resolved(envs.resolve(config), (str(last),)))
    made: list[EnvConfig] = []
    construct = matches.construct
    monkeypatch.setattr(matches, "construct", lambda config, *rest: made.append(config) or construct(config, *rest))
    envs.make(config, seed=1, first_index=0, num_envs=4)
    assert len(made) == 4


def test_an_observation_of_nothing_is_in_its_space() -> None:
    from lockstep.envs.multiagent.match_spaces import _zeros

    space = spaces.Dict(
        {
            "symbol": spaces.Discrete(3, start=2),
            "pair": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2, 2), np.float32))),
            "bits": spaces.MultiBinary(4),
            "year": spaces.Box(np.array([1900, -1]), np.array([2100, 1]), dtype=np.float64),
        }
    )
    assert space.contains(_zeros(space))
