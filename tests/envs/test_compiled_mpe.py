"""Compiled particle worlds: the steps of mpe2, and matches of several agents in general."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from sentences import says

from lockstep import check_env, envs, resume, train
from lockstep.algorithms import PPOConfig
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig
from lockstep.envs.compiled import CompiledEnv
from lockstep.envs.compiled_shard import CompiledShard
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.models.policies import PoliciesSpace
from lockstep.scheme import Scheme
from tests.envs.playing import assert_same, play, random_actions, reset

SPREAD, SPEAKER = "mpe/simple_spread_v3", "mpe/simple_speaker_listener_v4"
FORMER_SPREAD, FORMER_SPEAKER = "mpe/simple_spread_v2", "mpe/simple_speaker_listener_v3"
EXACT, TOUCHING = 1e-15, 1e-8
"""Errors of positions and speeds: of what needs no exponential, and of agents that touch."""


def make(env_id: str, num_envs: int, first_index: int = 0, **settings: Any) -> CompiledShard:
    config = EnvConfig(id=env_id, num_envs=num_envs, **settings)
    env = envs.make(config, seed=1, first_index=first_index, num_envs=num_envs)
    assert isinstance(env, CompiledShard)
    return env


def theirs(name: str, *, former: bool = False, **options: Any) -> Any:
    """An environment of mpe2; with former, its world moves agents as the original MPE did."""
    module = pytest.importorskip(f"mpe2.{name}")
    env = module.parallel_env(**options)
    env.reset(seed=0)
    if former:
        world = env.unwrapped.world
        world.integrate_state = lambda forces: original_order(world, forces)
    return env


def original_order(world: Any, forces: list[Any]) -> None:
    """Let agents move with the velocities that the forces of the step have made."""
    for body, force in zip(world.entities, forces, strict=True):
        if body.movable:
            acceleration = np.zeros(2) if force is None else force / body.mass
            body.state.p_vel = (1 - world.damping) * body.state.p_vel + world.dt * acceleration
            body.state.p_pos = body.state.p_pos + world.dt * body.state.p_vel


def bodies(env: Any) -> tuple[list[Any], list[Any]]:
    """The agents and landmarks of an environment of mpe2."""
    world = env.unwrapped.world
    return world.agents, world.landmarks


def give(env: Any, state: Any, movers: list[int]) -> None:
    """Let mpe2's world have our state. Agent movers[i] has our i-th position."""
    agents, landmarks = bodies(env)
    for row, i in enumerate(movers):
        agents[i].state.p_pos, agents[i].state.p_vel = state["position"][row].copy(), state["velocity"][row].copy()
    for k, landmark in enumerate(landmarks):
        landmark.state.p_pos = state["landmark"][k].copy()


def near(state: Any, env: Any, movers: list[int], tolerance: float) -> None:
    agents, _ = bodies(env)
    for row, i in enumerate(movers):
        np.testing.assert_allclose(state["position"][row], agents[i].state.p_pos, rtol=0, atol=tolerance)
        np.testing.assert_allclose(state["velocity"][row], agents[i].state.p_vel, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("env_id", "ratio"),
    [
        (SPREAD, 0.5),
        pytest.param(SPREAD, 0.0, marks=pytest.mark.full),  # 0.5 has both parts of the reward
        pytest.param(SPREAD, 1.0, marks=pytest.mark.full),
        (FORMER_SPREAD, 0.5),
    ],
)
def test_simple_spread_is_mpe2s(env_id: str, ratio: float) -> None:
    other = theirs("simple_spread_v3", former=env_id == FORMER_SPREAD, local_ratio=ratio)
    ours = make(env_id, 3, options={"local_ratio": ratio})
    assert ours.action_space == other.action_space("agent_0") and ours.observation_space.shape == (18,)
    assert list(ours._class.agents) == other.possible_agents
    out, draw = np.zeros((3, 18), np.float32), np.random.default_rng(3)
    ours.reset(out)
    touched = hit = 0
    for _ in range(1500):
        state = ours._states[0]
        if draw.random() < 0.2:  # bring agents together
            state["position"][1] = state["position"][0] + draw.normal(0, 0.15, 2)
        give(other, state, [0, 1, 2])
        before = [state["position"][i].copy() for i in range(3)]
        action = draw.integers(5, size=3)
        ours.send(action)
        step = ours.recv(out)
        if step.first[0]:
            assert not step.reward.any() and (np.abs(state["position"]) <= 1).all()
            other.reset(seed=0)
            continue
        seen, reward, terminated, truncated, _ = other.step({f"agent_{i}": int(a) for i, a in enumerate(action)})
        contact = min(np.linalg.norm(before[i] - before[j]) for i in range(3) for j in range(i)) < 0.4
        near(state, other, [0, 1, 2], TOUCHING if contact else EXACT)
        touched += contact
        hit += len(set(reward.values())) > 1
        for i in range(3):
            np.testing.assert_allclose(out[i], seen[f"agent_{i}"], rtol=2e-7, atol=1e-7)
            np.testing.assert_allclose(step.reward[i], np.float32(reward[f"agent_{i}"]), rtol=2e-6, atol=1e-7)
        assert not step.terminated.any() and list(truncated.values()) == step.truncated.tolist()
        assert not any(terminated.values()) and step.truncated[0] == (state["steps"] == 25)
    assert touched > 100 and (hit > 20) == (ratio > 0)


@pytest.mark.parametrize("env_id", [SPEAKER, FORMER_SPEAKER])
def test_simple_speaker_listener_is_mpe2s(env_id: str) -> None:
    other, ours = theirs("simple_speaker_listener_v4", former=env_id == FORMER_SPEAKER), make(env_id, 2)
    assert list(ours._class.agents) == other.possible_agents
    assert ours.action_space == other.action_space("listener_0"), "of which the speaker has the first three"
    out, draw = np.zeros((2, 13), np.float32), np.random.default_rng(3)
    ours.reset(out)
    goals = set()
    assert not out[1, 8:11].any(), "nothing has been said"
    for _ in range(800):
        state = ours._states[0]
        action = draw.integers(5, size=2)
        give(other, state, [1])
        agents, landmarks = bodies(other)
        agents[0].goal_b = landmarks[state["goal"]]
        goals.add(int(state["goal"]))
        ours.send(action)
        step = ours.recv(out)
        if step.first[0]:
            other.reset(seed=0)
            continue
        words = {"speaker_0": min(int(action[0]), 2), "listener_0": int(action[1])}
        seen, reward, _, truncated, _ = other.step(words)
        near(state, other, [1], EXACT)
        speaker, listener = seen["speaker_0"], seen["listener_0"]
        np.testing.assert_allclose(out[0], [*speaker, *np.zeros(8), 1, 0], rtol=2e-7)
        np.testing.assert_allclose(out[1], [*listener, 0, 1], rtol=2e-7, atol=1e-7)
        np.testing.assert_allclose(step.reward, list(reward.values()), rtol=2e-6)
        assert list(truncated.values()) == step.truncated.tolist()
    assert goals == {0, 1, 2}


@pytest.mark.parametrize("env_id", [SPEAKER, FORMER_SPEAKER])
def test_a_force_moves_an_agent_at_once_in_former_versions_alone(env_id: str) -> None:
    env = make(env_id, 2)
    reset(env)
    before = env._states[0]["position"][0].copy()
    for _ in play(env, [np.array([0, 2])]):
        pass
    moved = env._states[0]["position"][0] - before
    np.testing.assert_allclose(moved, [0.05 if env_id == FORMER_SPEAKER else 0, 0], atol=EXACT)
    np.testing.assert_allclose(env._states[0]["velocity"][0], [0.5, 0], atol=EXACT)


@pytest.mark.parametrize("env_id", [SPREAD, SPEAKER])
def test_the_central_state_holds_all_observations(env_id: str) -> None:
    agents = 3 if env_id == SPREAD else 2
    plain, central = make(env_id, 2 * agents), make(env_id, 2 * agents, central_state="observations")
    size = plain.observation_space.shape[0]  # type: ignore[index]
    assert isinstance(central.observation_space, spaces.Dict)
    assert central.observation_space["state"].shape == (agents * size,)
    actions = random_actions(plain, 40)
    alone, together = reset(plain), reset(central)
    for one, other in [
        (alone, together),
        *zip((x for x, _ in play(plain, actions)), (x for x, _ in play(central, actions)), strict=True),
    ]:
        np.testing.assert_array_equal(one[""], other["observation"])
        expected = one[""].reshape(2, 1, agents * size).repeat(agents, 1).reshape(2 * agents, -1)
        np.testing.assert_array_equal(expected, other["state"])


def test_a_match_is_the_same_in_every_shard() -> None:
    whole, part = make(SPREAD, 6), make(SPREAD, 3, first_index=3)
    actions = random_actions(whole, 60)
    np.testing.assert_array_equal(reset(whole)[""][3:], reset(part)[""])
    ends = 0
    mine = play(part, [action[3:] for action in actions])
    for (obs, step), (own, alone) in zip(play(whole, actions), mine, strict=True):
        np.testing.assert_array_equal(obs[""][3:], own[""])
        assert all(np.array_equal(a[3:], b) for a, b in zip(step[:5], alone[:5], strict=True))
        assert len({(step.truncated[j], step.first[j]) for j in range(3)}) == 1, "matches end for all"
        ends += step.truncated[0]
    assert ends == 2


def test_first_matches_are_cut_whole() -> None:
    env = make(SPREAD, 12, decorrelate=20)
    reset(env)
    first = np.zeros(12, int)
    for t, (_, step) in enumerate(play(env, random_actions(env, 30)), start=1):
        first[(first == 0) & step.truncated] = t
    matches = first.reshape(4, 3)
    assert (matches == matches[:, :1]).all() and len(set(matches[:, 0])) > 1 and matches.max() <= 20


class Race(CompiledEnv):
    """Two agents step towards 5. The first to reach it ends the match."""

    agents = ("left", "right")
    observation_space = spaces.Box(0, 5, (2,), np.float32)
    action_space = spaces.Discrete(2)
    fields = {"place": (np.int64, (2,))}  # noqa: RUF012

    @staticmethod
    def reset(state: Any) -> None:
        state.place[:] = 0

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        for i in range(2):
            state.place[i] += action[i]
        return action, state.place[0] == 5 or state.place[1] == 5

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        for i in range(2):
            out[i, 0], out[i, 1] = state.place[i], state.place[1 - i]


@pytest.mark.slow
@pytest.mark.parametrize("env_id", [SPREAD, f"{__file__}:Race"])
def test_check_env_finds_nothing(env_id: str) -> None:
    found = check_env(EnvConfig(id=env_id, num_envs=2, central_state="observations"), steps=200)
    assert found.ok and found.num_envs in (4, 6), found.message


def test_a_users_match_ends_for_all_of_its_agents() -> None:
    env = make(f"{__file__}:Race", 4)
    out = reset(env)[""]
    assert not out.any()
    rewards, ended = np.zeros(4), []
    for _ in range(5):
        env.send(np.array([1, 0, 0, 0]))
        step = env.recv(out)
        rewards += step.reward
        ended.append(step.terminated.tolist())
    assert rewards.tolist() == [5, 0, 0, 0] and out.tolist() == [[5, 0], [0, 5], [0, 0], [0, 0]]
    assert ended == [[False] * 4] * 4 + [[True, True, False, False]]
    env.send(np.ones(4, int))
    step = env.recv(out)
    assert step.first.tolist() == [True, True, False, False] and not step.reward[:2].any()


def test_states_are_saved_and_restored() -> None:
    env, other = make(SPREAD, 6), make(SPREAD, 6)
    reset(env)
    actions = random_actions(env, 50)
    list(play(env, actions[:30]))
    saved, out = env.state_dict(), np.zeros((6, 18), np.float32)
    other.load_state_dict(saved, out)
    assert_same(list(play(env, actions[30:])), list(play(other, actions[30:])))


def pairs(agent: str) -> str:
    return "first" if agent == "agent_0" else "others"


@pytest.mark.parametrize("central", ["none", "observations"])
def test_several_policies_see_the_same_and_their_number(central: str) -> None:
    plain = make(SPREAD, 6, central_state=central)
    several = make(SPREAD, 6, central_state=central, policies=f"{__file__}:pairs")
    assert isinstance(several.observation_space, PoliciesSpace)
    assert list(several.observation_space.parts) == ["first", "others"]
    actions = random_actions(plain, 40)
    alone, apart = reset(plain), reset(several)
    for one, other in [
        (alone, apart),
        *zip((x for x, _ in play(plain, actions)), (x for x, _ in play(several, actions)), strict=True),
    ]:
        assert other["policy"].ravel().tolist() == [0, 1, 1, 0, 1, 1]
        np.testing.assert_array_equal(one["" if central == "none" else "observation"], other["observation"])
        if central != "none":
            np.testing.assert_array_equal(one["state"], other["state"])


def test_the_score_of_each_policy_is_the_sum_of_its_agents_rewards() -> None:
    env = make(f"{__file__}:Race", 4, policies="separate")
    assert envs.resolve(EnvConfig(f"{__file__}:Race", 4, policies="separate")).metrics == ("score_left", "score_right")
    out = {"observation": np.zeros((4, 2), np.float32), "policy": np.zeros((4, 1), np.float32)}
    env.reset(out)
    chosen = [np.array([1, 1, 0, 0])] * 3 + [np.array([1, 0, 0, 1])] * 2
    for action in chosen[:-1]:
        env.send(action)
        env.recv(out)
    env.send(chosen[-1])
    step = env.recv(out)
    expected = [[5, np.nan], [np.nan, 3], [0, np.nan], [np.nan, 2]]
    np.testing.assert_array_equal(step.metrics, expected)
    assert step.terminated.tolist() == [True, True, False, False]

    restored = make(f"{__file__}:Race", 4, policies="separate")
    restored.load_state_dict(env.state_dict(), out)
    assert out["observation"].tolist() == [[5, 3], [3, 5], [0, 2], [2, 0]] and out["policy"].tolist() == [[0], [1]] * 2
    for each in (env, restored):
        each.send(np.ones(4, int))
        step = each.recv(out)
        np.testing.assert_array_equal(step.metrics, [[0, np.nan], [np.nan, 0], [1, np.nan], [np.nan, 3]])
    env.reset(out)
    env.send(np.ones(4, int))
    np.testing.assert_array_equal(
        env.recv(out).metrics, [[1, np.nan], [np.nan, 1]] * 2, "scores begin at 0 with every reset"
    )


def test_several_policies_learn_the_same_on_every_layout_and_when_resumed(tmp_path: Path) -> None:
    experiment = Experiment(
        env=EnvConfig(SPREAD, 12, policies="separate", central_state="observations"),
        model=StandardModelConfig(hidden_sizes=(8,), critic_only=("state",)),
        algorithm=PPOConfig(rollout=8, epochs=1, minibatches=2),
        scheme=Scheme(shards=2),
        total_steps=5 * 8 * 12,
        precision="fp32",
    )
    options = RunOptions(display="none", tensorboard=False, checkpoint_every=2, keep_checkpoints=9)
    alone = train(experiment, "inline", replace(options, run=str(tmp_path / "alone")))
    both = train(experiment, "processes:2", replace(options, run=str(tmp_path / "both")))
    assert alone.digest == both.digest
    scores = [alone.metrics()[f"env/score_agent_{i}"] for i in range(3)]
    assert np.isfinite(scores)[:, -1].all()
    again = resume(both.run, "inline", checkpoint=2)
    assert again.digest == alone.digest
    np.testing.assert_array_equal([again.metrics()[f"env/score_agent_{i}"] for i in range(3)], scores)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policies": "each"}, ("env.policies='each'", "separate")),
        ({"central_state": "state"}, ("env.central_state=state", "observations", "pettingzoo/")),
        ({"opponents": ("random",)}, ("env.opponents=random", "all agents")),
        (
            {"policies": "separate", "opponents": ("agent_0=random",)},
            ("env.opponents=agent_0=random", "all agents"),
        ),
    ],
)
def test_what_compiled_matches_lack_is_refused(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as error:
        make(SPREAD, 3, **settings)
    assert says([str(error.value)], *words)


def test_half_a_match_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"env\.num-envs 6"):
        envs.check_matches(EnvConfig(id=SPREAD, num_envs=4), 2)
