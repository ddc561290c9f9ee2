"""What several policies and central critics see of a match, and which settings do not fit."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import talk
import torch
from gymnasium import spaces
from playing import assert_same, buffers, play, reset, snapshot

from lockstep import check_env, envs, evaluate, load_policy, recipes, train
from lockstep.algorithms import PPOConfig
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.pool.pool import SteppingPool
from lockstep.evaluation.actor import Actor
from lockstep.evaluation.policy import Policy
from lockstep.experiment import Experiment
from lockstep.export.hub import foreign_code
from lockstep.export.policy import export
from lockstep.models import StandardModelConfig
from lockstep.models.policies import Policies, PoliciesSpace
from lockstep.scheme import Scheme

FILE = Path(talk.__file__)
TALK = f"pettingzoo/{FILE}:Talk"
FOUR, SHAPES = "pettingzoo/classic/connect_four-v3", "pettingzoo/classic/rps-v2"


def make(num_envs: int = 6, pool: SteppingPool | None = None, **settings: Any) -> ShardEnv:
    config = envs.resolve(EnvConfig(**{"id": TALK, "policies": f"{FILE}:roles", **settings}))
    return envs.make(config, seed=3, first_index=0, num_envs=num_envs, pool=pool)


def chosen(steps: int, num_envs: int = 6) -> list[np.ndarray]:
    """Actions that all agents have."""
    draw = np.random.default_rng(1)
    return [draw.integers(0, 2, num_envs) for _ in range(steps)]


def test_policies_see_padded_observations_whose_number_they_are() -> None:
    env = make(central_state="observations")
    assert isinstance(env.observation_space, PoliciesSpace) and env.action_space == spaces.Discrete(4)
    guide, walker = env.observation_space.parts["guide"], env.observation_space.parts["walker"]
    assert (guide.action_space, walker.action_space) == (spaces.Discrete(4), spaces.Discrete(2))
    sizes = [{key: entry.shape for key, entry in part.observation_space.items()} for part in (guide, walker)]
    assert sizes == [{"observation": (3,), "state": (13,)}, {"observation": (5,), "state": (13,)}]
    obs = reset(env)
    assert obs["policy"].ravel().tolist() == [0, 1, 1, 0, 1, 1]
    goal = obs["observation"][0, 0]
    seen = [[goal, 0, 1, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 1]]
    assert obs["observation"][:3].tolist() == seen
    assert obs["state"][0].tolist() == [*seen[0][:3], *seen[1], *seen[2]]
    assert (obs["state"][:3] == obs["state"][0]).all()
    (moment,) = play(env, [np.array([1, 0, 1, 0, 0, 0])])
    assert moment.obs["observation"][:3].tolist() == [[goal, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 1]]
    assert moment.step.reward[:3].tolist() == [goal == 1, 30 * (goal == 0), 30 * (goal == 1)]

    own = env.observation_space.own("guide", {key: torch.from_numpy(x)[None] for key, x in obs.items()})
    assert own["observation"].tolist() == [[row[:3] for row in obs["observation"].tolist()]]


def test_the_state_of_the_environment_is_what_it_says_itself() -> None:
    env = make(central_state="state")
    goals = reset(env)["observation"][::3, 0]
    played = play(env, chosen(3))
    assert [moment.obs["state"][0].tolist() for moment in played] == [[goals[0], t] for t in (1, 2, 3)]


def test_the_score_of_each_policy_is_a_metric_of_its_own_episodes() -> None:
    env = make()
    assert envs.resolve(EnvConfig(id=TALK, policies=f"{FILE}:roles")).metrics == ("score_guide", "score_walker")
    reset(env)
    played = play(env, chosen(6))
    scores = np.sum([moment.step.reward.astype(np.float64) for moment in played], 0)
    last = played[-1].step
    assert (last.terminated | last.truncated).all() and last.metrics is not None
    expected = np.full((6, 2), np.nan)
    expected[[0, 3], 0], expected[[1, 2, 4, 5], 1] = scores[[0, 3]], scores[[1, 2, 4, 5]]
    np.testing.assert_array_equal(last.metrics, expected)
    assert scores[1] % 30 == 0 and scores[1] <= 120, "a walker is out after four steps"


def test_matches_of_several_policies_are_the_same_in_processes_and_when_restored() -> None:
    settings: dict[str, Any] = {"central_state": "observations", "reseed_every": 5}
    whole, actions = make(**settings), chosen(30)
    reset(whole)
    expected = play(whole, actions)
    pool = SteppingPool(2)
    try:
        pooled = make(pool=pool, **settings)
        assert isinstance(pooled.observation_space, PoliciesSpace)
        reset(pooled)
        assert_same(expected[:17], play(pooled, actions[:17]))
        restored = make(**settings)
        out = buffers(restored)
        restored.load_state_dict(pooled.state_dict(), out)
        assert all(np.array_equal(snapshot(out)[key], value) for key, value in expected[16].obs.items())
        again = play(restored, actions[17:])
        assert_same(expected[17:], again)
        for one, other in zip(expected[17:], again, strict=True):
            ended = one.step.terminated | one.step.truncated
            assert one.step.metrics is not None and other.step.metrics is not None
            np.testing.assert_array_equal(one.step.metrics[ended], other.step.metrics[ended])
        pooled.close()
    finally:
        pool.close()


def test_random_play_has_only_actions_that_agents_have() -> None:
    assert check_env(EnvConfig(id=TALK, num_envs=6, policies=f"{FILE}:roles"), steps=40).ok


def small(**changes: Any) -> Experiment:
    experiment = Experiment(
        env=EnvConfig(id=TALK, num_envs=12, policies=f"{FILE}:roles", central_state="observations"),
        model=StandardModelConfig(hidden_sizes=(8,), critic_only=("state",)),
        algorithm=PPOConfig(rollout=8, epochs=1, minibatches=2),
        scheme=Scheme(shards=2),
        total_steps=3 * 8 * 12,
        precision="fp32",
    )
    return experiment.replace(**changes)


def test_one_of_several_policies_computes_in_the_arithmetic_of_the_run() -> None:
    experiment = small(precision="portable", **{"model.core": "mingru"})
    whole = Policy(experiment.build_model(*envs.spaces(experiment.env)), experiment, 0, 0, 0)
    assert whole.model.portable_operations and whole.of("guide").model.portable_operations


def raising(agent: str) -> str:
    return {"walker_0": "walker"}[agent]


def taken(agent: str) -> str:
    return "keys"


def set_on_objects(agent: str) -> str:
    return "training"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"env.policies": "shared"}, r"guide has .*walker_0 .*--env\.policies separate"),
        ({"env.policies": "each"}, r"env\.policies='each' .*shared.*separate.*file\.py:policy_of"),
        ({"env.policies": f"{FILE}:one"}, r"env\.policies=.*'one' .*observation"),
        ({"env.policies": f"{FILE}:nameless"}, r"env\.policies=.*'the guide'"),
        ({"env.policies": f"{FILE}:nobody"}, "nobody"),
        ({"env.policies": f"{__file__}:raising"}, r"env\.policies=\S*:raising .*KeyError.*'guide'"),
        ({"env.policies": f"{__file__}:taken"}, r"env\.policies=.*'keys'.*PyTorch"),
        ({"env.policies": f"{__file__}:set_on_objects"}, r"env\.policies=.*'training'.*PyTorch"),
        ({"env.policies": f"{__file__}:SHAPES"}, r"env\.policies=\S*:SHAPES .*function"),
        ({"model.critic_only": ()}, r"Use --model\.critic-only state"),
        ({"env.id": "CartPole-v1"}, r"env\.policies=.*CartPole-v1"),
        ({"env.id": "CartPole-v1", "env.policies": "shared"}, r"env\.central_state=.*CartPole-v1"),
        ({"env.id": FOUR}, r"env\.central_state=observations .*player_0"),
        (
            {"env.id": FOUR, "env.central_state": "state"},
            r"env\.central_state=state .*state_space.*--env\.central-state observations",
        ),
        ({"algorithm.target_kl": 0.1}, r"algorithm\.target_kl=0\.1 .*env\.policies"),
        ({"algorithm.desired_kl": 0.1}, r"algorithm\.desired_kl=0\.1 .*env\.policies"),
        ({"algorithm.rnd.coef": 0.5}, r"algorithm\.rnd\.coef=0\.5 .*env\.policies"),
        ({"algorithm": recipes.dqn_cartpole().algorithm}, r"algorithm=dqn .*env\.policies shared"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=expected):
        train(small(**changes), options=RunOptions(run=str(tmp_path / "run")))


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpe2", None)
    with pytest.raises(SettingsError, match=r'pip install .*\[mpe\]"'):
        envs.resolve(recipes.mappo_mpe("simple_nothing_v0").env)


def test_a_shared_policy_may_have_a_critic_that_sees_all() -> None:
    """Then observations have the state, but no number of a policy."""
    env = make(2, id=SHAPES, policies="shared", central_state="none")
    assert isinstance(env.observation_space, spaces.Box)
    with pytest.raises(SettingsError, match=r"env\.central_state=observations .*Discrete"):
        make(2, id=SHAPES, policies="shared", central_state="observations")
    config = EnvConfig(id=f"pettingzoo/{FILE}:Walk", central_state="observations")
    seen, _ = envs.spaces(config)
    assert isinstance(seen, spaces.Dict) and not isinstance(seen, PoliciesSpace)
    assert {key: entry.shape for key, entry in seen.items()} == {"observation": (5,), "state": (10,)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "talk"
    train(small(), options=RunOptions(run=str(folder), display="none", eval_every=3, eval_episodes=6))
    return folder


def test_metrics_name_policies(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    line, evaluated = lines[0], lines[-1]
    entropy = {name: line[f"policy/entropy/{name}"] for name in ("guide", "walker")}
    assert entropy == pytest.approx({"guide": math.log(4), "walker": math.log(2)}, abs=0.02), "of 4 and of 2 actions"
    assert line["policy/entropy"] == pytest.approx((entropy["guide"] + 2 * entropy["walker"]) / 3, abs=1e-3)
    assert line["env/score_walker"] > 10 * line["env/score_guide"] > 0
    assert line["score/mean"] == pytest.approx((line["env/score_guide"] + 2 * line["env/score_walker"]) / 3)
    assert evaluated["eval/env/score_walker"] > evaluated["eval/env/score_guide"]


def test_several_policies_are_evaluated_and_verified_elsewhere(trained: Path) -> None:
    found = evaluate(trained, episodes=9)
    means = [found.metrics[name].mean for name in ("score_guide", "score_walker")]
    assert found.mean == pytest.approx((3 * means[0] + 6 * means[1]) / 9)
    assert str(small().env.policies) in foreign_code(json.loads((trained / "experiment.json").read_text()))


def test_an_actor_plays_one_of_several_policies(trained: Path) -> None:
    """It takes the agent's own observations and has its own actions."""
    run, match = load_policy(trained), talk.Talk()
    guide = SimpleNamespace(
        observation_space=match.observation_space("guide"), action_space=match.action_space("guide")
    )
    with pytest.raises(SettingsError, match=r'guide, walker.*of\("guide"\)'):
        Actor(run, cast(Any, guide))
    with pytest.raises(SettingsError, match=r"'nobody'.*guide, walker"):
        run.of("nobody")
    actor, model = Actor(run.of("guide"), cast(Any, guide), greedy=True), run.model
    assert isinstance(model, Policies)
    looked = torch.tensor([[[1.0, 2.0, 1.0]]])
    with torch.no_grad():
        own = model["guide"].for_playing()
        out, _ = own({"observation": looked}, torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, 0))
    assert actor.act(looked[0, 0].numpy()) == int(out.policy.argmax())
    with pytest.raises(SettingsError, match=r"Discrete\(4\)"):
        Actor(run.of("walker"), cast(Any, guide))


@pytest.mark.slow
def test_an_exported_file_plays_all_policies(trained: Path, tmp_path: Path) -> None:
    exported = export(trained, tmp_path / "policy.pt2", format="torch", observations=60)
    assert exported.check.equal == exported.check.observations
    described = json.loads(exported.description.read_text())
    assert described["policies"] == ["guide", "walker"] and set(described["inputs"]) == {
        "obs.observation",
        "obs.policy",
    }
