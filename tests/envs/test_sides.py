"""Several policies of which opponents play some, and opponents that are runs of several policies or with a critic that
sees all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import talk
import torch
from gymnasium import spaces
from playing import play, play_legally, reset

from lockstep import envs, evaluate, load_policy, recipes, resume, train, verify
from lockstep.algorithms import PPOConfig
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.episodes import Seeds
from lockstep.evaluation.opponents import resolved
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.models.action_spaces import make_distribution
from lockstep.models.policies import Policies, PoliciesSpace
from lockstep.scheme import Scheme
from lockstep.sweep.population import Population
from lockstep.sweep.search import Between
from lockstep.sweep.spec import Run

FILE = Path(talk.__file__)
TALK, WALK = f"pettingzoo/{FILE}:Talk", f"pettingzoo/{FILE}:Walk"
FOUR = "pettingzoo/classic/connect_four-v3"


def counts(observation: np.ndarray, action_space: spaces.Discrete, draw: np.random.Generator) -> int:
    """The guide's word is the time."""
    del draw
    assert observation.shape == (3,) and action_space.n == 4
    return int(observation[1]) % 4


def fails(agent: str) -> str:
    return {"walker_0": "walker", "guide": "walker"}[agent]


def config(opponents: tuple[str, ...], **settings: Any) -> EnvConfig:
    found = envs.resolve(EnvConfig(**{"id": TALK, "policies": f"{FILE}:roles", **settings}))
    return envs.resolve(EnvConfig(**{**vars(found), "opponents": resolved(found, opponents), "metrics": ()}))


def make(opponents: tuple[str, ...], num_envs: int, **settings: Any) -> ShardEnv:
    return envs.make(config(opponents, **settings), seed=3, first_index=0, num_envs=num_envs)


def small(**changes: Any) -> Experiment:
    experiment = Experiment(
        env=EnvConfig(id=TALK, num_envs=12, policies=f"{FILE}:roles", central_state="observations"),
        model=StandardModelConfig(hidden_sizes=(8,), critic_only=("state",)),
        algorithm=PPOConfig(rollout=8, epochs=1, minibatches=2, learning_rate=0.02),
        scheme=Scheme(shards=2),
        total_steps=3 * 8 * 12,
        precision="fp32",
    )
    return experiment.replace(**changes)


def quiet(folder: Path, **settings: Any) -> RunOptions:
    return RunOptions(run=str(folder), display="none", **settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both policies, with critics that see all."""
    folder = tmp_path_factory.mktemp("runs") / "talk"
    train(small(), options=quiet(folder))
    return folder


@pytest.fixture(scope="module")
def walkers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One policy for both walkers, with a critic that sees both, and a memory."""
    folder = tmp_path_factory.mktemp("runs") / "walkers"
    shared = small(**{"env.id": WALK, "env.policies": "shared", "model.core": "gru"})
    train(shared, options=quiet(folder))
    return folder


def test_policies_that_are_left_play_every_match_and_critics_see_all_agents() -> None:
    env = make((f"guide={__file__}:counts",), 4, central_state="observations")
    assert isinstance(env.observation_space, PoliciesSpace) and list(env.observation_space.parts) == ["walker"]
    assert env.action_space == spaces.Discrete(2) and env.num_envs == 4
    obs = reset(env)
    assert {key: x.shape[1:] for key, x in obs.items()} == {"observation": (5,), "state": (13,), "policy": (1,)}
    assert obs["policy"].ravel().tolist() == [0, 0, 0, 0]
    goals = obs["state"][:, 0]
    played = play(env, [np.array([0, 1, 0, 1])] * 5)
    for t, (seen, step) in enumerate(played[:3], start=1):
        assert seen["observation"][:, t - 1].tolist() == [1, 1, 1, 1], "what the guide said is the time"
        assert seen["state"][0].tolist() == [goals[0], t, 1, *seen["observation"][0], *seen["observation"][1]]
        assert step.reward.tolist() == [30 * (goal == action) for goal, action in zip(goals, [0, 1, 0, 1])]
    assert played[3].step.terminated.all(), "the match is over when the walkers are out, though the guide is not"
    assert played[4].step.first.all()


def test_only_scores_of_policies_that_are_left_are_metrics() -> None:
    assert config(("guide=random",)).metrics == ("score_walker",)
    assert config(("walker=random",)).metrics == ("score_guide",)


def test_agents_that_take_turns_have_sides() -> None:
    """Without names, every second environment would begin as the second player, and change with each episode."""
    env = make(("player_1=random",), 6, id=FOUR, policies="separate")
    obs = reset(env)
    assert obs["observation"].sum() == 0 and (obs["turn"] == 1).all() and (obs["policy"] == 0).all()
    _, moments = play_legally(env, 60)
    for obs, step in moments:
        going = ~(step.terminated | step.truncated)
        own, other = (obs["observation"][going, :, :, i].sum((1, 2)) for i in (0, 1))
        assert np.array_equal(own, other)


@pytest.mark.parametrize("named", [("guide=RUN",), ("guide=random", "guide=RUN")])
def test_a_run_plays_each_agent_with_the_policy_of_that_agent(named: tuple[str, ...], trained: Path) -> None:
    """Against the run's own model, called by hand with the random stream of the match."""
    env = make(tuple(name.replace("RUN", str(trained)) for name in named), 4)
    model = load_policy(trained).model
    assert isinstance(model, Policies)
    guide = model["guide"].for_playing()
    first = reset(env)["observation"]
    words = np.stack([moment.obs["observation"][::2, :4].argmax(-1) for moment in play(env, [np.zeros(4, int)] * 3)])
    assert first.shape == (4, 5)
    for match, expected in enumerate(words.T):
        seeds = Seeds(3, "train", 0)
        game = talk.Talk()
        seed = int(seeds.derive(np.array([2 * match]), np.zeros(1, np.int64))[0])
        seen = game.reset(seed=seed)[0]["guide"]
        draw = seeds.stream("opponent", 2 * match, 0)
        chosen = named[int(draw.integers(len(named)))]
        said = []
        for _ in range(3):
            noise = torch.from_numpy(draw.random((1, guide.distribution.noise_size), np.float32))
            if chosen == "guide=random":
                action = make_distribution(spaces.Discrete(4)).at_random(noise, None)
            else:
                obs = {"observation": torch.from_numpy(seen)[None, None]}
                with torch.no_grad():
                    out, _ = guide(obs, torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, 0))
                action = guide.distribution.sample(out.policy[0], noise)
            said.append(int(action))
            seen = game.step({"guide": said[-1], "walker_0": 0, "walker_1": 0})[0]["guide"]
        assert said == expected.tolist()


def test_of_all_policies_some_can_be_evaluated_against_opponents(trained: Path) -> None:
    policy = load_policy(trained)
    left, action_space = envs.spaces(config(("guide=random",), central_state="observations"))
    assert isinstance(policy.model, Policies) and isinstance(left, PoliciesSpace)
    playing = policy.model.for_playing().playing(left, action_space)
    seen = torch.rand(1, 3, 5)
    with torch.no_grad():
        start, state = torch.zeros(1, 3, dtype=torch.bool), torch.zeros(3, 0)
        out, _ = playing({"observation": seen, "policy": torch.zeros(1, 3, 1)}, start, state)
        expected, _ = policy.model["walker"].for_playing()({"observation": seen}, start, state)
    assert torch.equal(out.policy, expected.policy)

    found = evaluate(trained, episodes=8, opponents=("guide=random", f"guide={trained}"))
    assert list(found.metrics) == ["score_walker"] and found.metrics["score_walker"].values == found.scores
    assert f"against guide=random, guide={trained}@3" in found.protocol
    assert all(score % 30 == 0 for score in found.scores)


@pytest.mark.usefixtures("processes_are_there_already")
def test_training_against_policies_is_the_same_on_every_layout_resumed_and_verified(
    trained: Path, tmp_path: Path
) -> None:
    experiment = small(**{"env.opponents": ("guide=random", f"guide={trained}"), "model.core": "lstm"})
    options: dict[str, Any] = {
        "checkpoint_every": 1,
        "eval_every": 3,
        "eval_episodes": 4,
        "eval_opponents": (f"guide={trained}",),
    }
    expected = train(experiment, options=quiet(tmp_path / "inline", **options))
    two = train(experiment, "processes:2,env_processes=2", options=quiet(tmp_path / "two", **options))
    assert two.digest == expected.digest
    train(experiment, "cpu:a1-l1", options=quiet(tmp_path / "resumed", **options), stop_after=1)
    assert resume(tmp_path / "resumed").digest == expected.digest
    assert verify(tmp_path / "inline", "processes:2", iterations=3).ok
    kept = json.loads((tmp_path / "inline" / "experiment.json").read_text())["env"]
    assert kept["opponents"][0] == "guide=random" and kept["opponents"][1].startswith(f"guide={trained}@3#")
    lines = [json.loads(line) for line in (tmp_path / "inline" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval/env/score_walker"] == lines[-1]["eval/score"]

    again = evaluate(tmp_path / "inline", episodes=6, opponents=("guide=random",))
    assert list(again.metrics) == ["score_walker"]
    with pytest.raises(SettingsError, match=r"policies walker, but here agents of guide are left .* guide=random"):
        evaluate(tmp_path / "inline", episodes=6, opponents=("walker=random",))
    with pytest.raises(SettingsError, match=r"no policy for 'guide': it trained walker .*env\.opponents=guide=random"):
        evaluate(trained, episodes=6, opponents=(f"guide={tmp_path / 'inline'}",))


def test_a_run_with_a_critic_that_sees_all_is_an_opponent_and_has_some(walkers: Path, tmp_path: Path) -> None:
    plain = small(**{"env.id": WALK, "env.policies": "shared", "env.central_state": "none", "model.critic_only": ()})
    plain = plain.replace(**{"env.opponents": (str(walkers),)})
    result = train(plain, options=quiet(tmp_path / "plain"))
    assert train(plain, "processes:2", options=quiet(tmp_path / "again")).digest == result.digest
    central = small(**{"env.id": WALK, "env.policies": "shared", "env.opponents": (str(tmp_path / "plain"), "random")})
    train(central, options=quiet(tmp_path / "central"))
    assert len(evaluate(tmp_path / "central", episodes=5, opponents=(str(walkers),)).scores) == 5
    assert evaluate(tmp_path / "plain", episodes=5, opponents=(str(tmp_path / "central"),)).scores


def test_a_run_of_one_policy_plays_agents_with_its_spaces(walkers: Path) -> None:
    env = make((f"walker={walkers}",), 3)
    reset(env)
    assert play(env, [np.zeros(3, int)] * 6)[-1].step.terminated.all()
    with pytest.raises(SettingsError, match=r"observes .*\(5,\).* as guide of .*same environment"):
        config((f"guide={walkers}",))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"env.opponents": ("random",)}, r"the opponent 'random' must say whose agents it plays: use NAME=random"),
        ({"env.opponents": ("=random",)}, r"must say whose agents it plays"),
        ({"env.opponents": ("walker_0=random",)}, r"the policy 'walker_0', but .* makes the policies guide, walker"),
        ({"env.opponents": ("guide=random", "walker=random")}, "all agents of the policies guide, walker"),
        ({"env.opponents": ("guide=nobody",)}, r"The opponent nobody, .* does not exist"),
        ({"env.opponents": (f"guide={__file__}:FILE",)}, r"FILE must be a function"),
        ({"env.policies": "shared", "env.id": WALK, "env.opponents": ("walker_1=random",)}, r"--env\.policies"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=expected):
        train(small(**changes), options=quiet(tmp_path / "run"))


def test_populations_of_several_policies_have_no_rivals() -> None:
    experiment = small(**{"algorithm.anneal_learning_rate": False})
    population = Population(Run(experiment), {"algorithm.clip": Between(0.1, 0.3)}, rivals=True)
    with pytest.raises(SettingsError, match=r"--rivals .*env\.policies="):
        population.validate()
    assert recipes.mappo_mpe().env.players() == {}
