"""What every adapter promises: seeds, independence of sharding, autoreset, exact restoring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playing import assert_same, buffers, equal, play, random_actions, reset, snapshot

from lockstep import envs
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.episodes import joined, part

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Short episodes and early reseeding, so that little playing sees many of each.
CASES = {
    "ale": EnvConfig(
        id="Breakout",
        adapter="ale",
        protocol="classic",
        reseed_every=30,
        decorrelate=15,  # so that episodes, and the seeds' renewals, do not stay in phase
        options={"max_num_frames_per_episode": 80, "repeat_action_probability": 0.25, "stack_num": 2},
    ),
    "envpool-atari": EnvConfig(
        id="Breakout", adapter="envpool", protocol="machado", reseed_every=40, options={"max_episode_steps": 15}
    ),
    "envpool-lives": EnvConfig(
        id="Breakout",
        adapter="envpool",
        protocol="baselines",
        reseed_every=40,
        options={"max_episode_steps": 35, "repeat_action_probability": 0.25},
    ),
    "envpool-cartpole": EnvConfig(id="CartPole-v1", adapter="envpool", reseed_every=40),
    "vizdoom": EnvConfig(id="vizdoom/Basic", reseed_every=40, options={"max_episode_steps": 15}),
    "gymnasium-cartpole": EnvConfig(id="CartPole-v1", adapter="gymnasium"),
    "gymnasium-endless": EnvConfig(
        id="Pendulum-v1", adapter="gymnasium", reseed_every=7, options={"max_episode_steps": -1}
    ),
    "vector-sync": EnvConfig(
        id="CartPole-v1", adapter="vector", reseed_every=40, options={"vectorization_mode": "sync"}
    ),
    "vector-same-step": EnvConfig(
        id="lockstep/TupleBandit-v0",
        adapter="vector",
        reseed_every=40,
        options={"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": "SameStep"}},
    ),
    "vector-disabled": EnvConfig(
        id="CartPole-v1",
        adapter="vector",
        reseed_every=40,
        options={"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": "Disabled"}},
    ),
    "batch": EnvConfig(id=f"{EXAMPLES}/custom_vector_env.py:Reach", reseed_every=7),
    "random-actions": EnvConfig(id="CartPole-v1", adapter="gymnasium", random_actions=True),
    "gymnasium-tuple": EnvConfig(id="lockstep/TupleBandit-v0", adapter="gymnasium", options={"mask": True}),
}


def _by_envpool(config: EnvConfig) -> bool:
    return config.adapter == "envpool" or config.id.startswith("vizdoom/")


def make(config: EnvConfig, first_index: int = 0, num_envs: int = 2, **options: Any) -> ShardEnv:
    return envs.make(config, **{"seed": 7, **options}, first_index=first_index, num_envs=num_envs)


def _marks(name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.envpool] if _by_envpool(CASES[name]) else []
    if name == "envpool-atari":  # the other one of Atari has sticky actions and a limit of steps, too
        marks.append(pytest.mark.full)
    return marks


PARAMETERS = [pytest.param(case, marks=_marks(name), id=name) for name, case in CASES.items()]


@pytest.fixture(params=PARAMETERS)
def config(request: pytest.FixtureRequest) -> EnvConfig:
    return request.param


def play_reseeding(env: ShardEnv, actions: list[Any], rollout: int = 20) -> list[Any]:
    """Play as a collector does: rollouts, with reseeding between them where it is due."""
    moments = []
    for start in range(0, len(actions), rollout):
        if env.reseed_due():
            env.reseed(buffers(env))
        moments += play(env, actions[start : start + rollout])
    return moments


def test_a_seed_fixes_everything_and_every_environment_has_its_own(config: EnvConfig) -> None:
    env, again = make(config), make(config)
    actions = random_actions(env, 60)
    same_for_all = [
        tuple(p[:1].repeat(2, 0) for p in a) if isinstance(a, tuple) else a[:1].repeat(2, 0) for a in actions
    ]
    first, first_again = reset(env), reset(again)
    assert all(np.array_equal(first[key], first_again[key]) for key in first)
    played = play_reseeding(env, same_for_all)
    assert_same(played, play_reseeding(again, same_for_all))
    tracks = [b"".join(m.obs[key][j].tobytes() for m in played for key in m.obs) for j in range(2)]
    assert len(set(tracks)) == 2
    for other in (make(config, seed=8), make(config, purpose="eval")):
        reset(other)
        assert not equal(played, play_reseeding(other, same_for_all))
        other.close()
    env.close()
    again.close()


def test_an_environment_is_the_same_in_any_shard_and_with_any_threads(config: EnvConfig) -> None:
    whole, part = make(config, num_envs=3), make(config, first_index=1, num_envs=2, threads=2)
    actions = random_actions(whole, 60)
    halves = [tuple(p[1:] for p in a) if isinstance(a, tuple) else a[1:] for a in actions]
    first, first_part = reset(whole), reset(part)
    assert all(np.array_equal(first[key][1:], first_part[key]) for key in first)
    assert_same(play_reseeding(whole, actions), play_reseeding(part, halves), slice(1, 3))
    whole.close()
    part.close()


def test_autoreset_spends_exactly_the_step_after_an_end(config: EnvConfig) -> None:
    env = make(config)
    reset(env)
    ended = np.zeros(2, bool)
    ends = 0
    for _, step in play(env, random_actions(env, 80)):
        assert np.array_equal(step.first, ended)
        assert not step.reward[step.first].any()
        assert not (step.terminated & step.truncated).any()
        assert not ((step.terminated | step.truncated | step.life_lost) & step.first).any()
        ended = step.terminated | step.truncated
        ends += int(ended.sum())
        if config.protocol == "baselines":
            ended = ended | step.life_lost  # FIRE is pressed
    assert ends >= 3
    env.close()


def test_restoring_continues_bit_for_bit(config: EnvConfig) -> None:
    env = make(config)
    actions = random_actions(env, 100)
    reset(env)
    states, currents = {}, {}
    played = []
    moments = {0, *np.random.default_rng(3).integers(2, 80, 2).tolist()}
    after_end = None
    for t, action in enumerate(actions):
        if t % 20 == 0 and env.reseed_due():
            env.reseed(buffers(env))
        if t in moments or after_end in (t, t - 1):  # a reset is due, and it has just happened
            states[t] = env.state_dict()
            currents[t] = played[-1].obs if played else None
        played += play(env, [action])
        if after_end is None and t > 30 and (played[-1].step.terminated | played[-1].step.truncated).any():
            after_end = t + 1
    assert after_end in states
    env.close()
    for t, state in states.items():
        restored = make(config)
        out = buffers(restored)
        signs: list[None] = []
        replayed = restored.load_state_dict(state, out, lambda signs=signs: signs.append(None))
        assert 0 <= replayed <= 2 * t
        assert replayed // 2 <= len(signs) <= replayed, "a sign of life at every step, of one environment or of all"
        # Reseeding overwrites the current observation, and would here have happened before the state was taken.
        if currents[t] is not None and t % 20:
            assert all(np.array_equal(currents[t][key], value) for key, value in snapshot(out).items())
        stop = next((s for s in range(t + 1, 100) if s % 20 == 0 and _reseeds(config, s)), 100)
        assert_same(played[t:stop], play(restored, actions[t:stop]))
        restored.close()


@pytest.mark.parametrize("config", [case for case in PARAMETERS if case.marks])
def test_shards_that_are_joined_go_on_as_they_do_alone(config: EnvConfig) -> None:
    """Of 1, 2 and 1 environments: in one, alone, put together from those alone, and taken out of the one."""
    assert envs.adapter_of(config).joins
    sizes = [slice(0, 1), slice(1, 3), slice(3, 4)]

    def shards() -> list[ShardEnv]:
        return [make(config, rows.start, rows.stop - rows.start) for rows in sizes]

    def same(a: dict[str, np.ndarray] | None, b: dict[str, np.ndarray]) -> bool:
        return a is not None and a.keys() == b.keys() and all(a[x].tobytes() == b[x].tobytes() for x in a)

    whole, alone = make(config, num_envs=4), shards()
    actions = random_actions(whole, 130)
    reset(whole)
    for shard in alone:
        reset(shard)
    ends = 0
    for begin, end in ((0, 13), (13, 55), (55, 100)):
        played = play_reseeding(whole, actions[begin:end])
        for rows, shard in zip(sizes, alone, strict=True):
            assert_same(played, play_reseeding(shard, [action[rows] for action in actions[begin:end]]), rows)
        ends += sum(int((step.terminated | step.truncated | step.life_lost).sum()) for _, step in played)
        state, states = whole.state_dict(), [shard.state_dict() for shard in alone]
        assert same(joined(states), state)
        assert all(same(part(state, rows), state_of) for rows, state_of in zip(sizes, states, strict=True))
    assert ends >= 3 and int(state["count"]) > 0

    restored, again = make(config, num_envs=4), shards()
    restored.load_state_dict(joined(states) or {}, buffers(restored))
    for rows, shard in zip(sizes, again, strict=True):
        shard.load_state_dict(part(state, rows), buffers(shard))
    played = play(whole, actions[100:])
    assert_same(played, play(restored, actions[100:]))
    for rows, shard in zip(sizes, again, strict=True):
        assert_same(played, play(shard, [action[rows] for action in actions[100:]]), rows)
    for env in (whole, restored, *alone, *again):
        env.close()


def test_shards_of_different_ages_are_not_joined() -> None:
    state = {"since": np.array(3), "ended": np.zeros(2, np.bool_), "actions.0": np.zeros((3, 2), np.int64)}
    assert joined([state, state]) is not None
    assert joined([state, state, {**state, "since": np.array(4)}]) is None


def _reseeds(config: EnvConfig, step: int) -> bool:
    return (_by_envpool(config) or config.adapter == "vector") and step % config.reseed_every == 0


def test_restoring_replaces_whatever_was_played_before(config: EnvConfig) -> None:
    env, other = make(config), make(config)
    reset(env)
    actions = random_actions(env, 60)
    play(env, actions[:25])
    state = env.state_dict()
    reset(other)
    play(other, actions[::-1][:33])
    other.load_state_dict(state, buffers(other))
    assert_same(play(env, actions[25:]), play(other, actions[25:]))
    env.close()
    other.close()


@pytest.mark.parametrize("name", ["ale", "gymnasium-cartpole"])
def test_decorrelation_cuts_only_first_episodes_each_at_its_own_length(name: str) -> None:
    config = EnvConfig(
        id=CASES[name].id, adapter=CASES[name].adapter, decorrelate=12, options={"noop_max": 1} if name == "ale" else {}
    )
    env = make(config, num_envs=3)
    reset(env)
    still = [np.zeros(3, np.int64)] * 40  # neither pole nor ball is lost in 12 steps of one constant action
    if name == "gymnasium-cartpole":
        still = [np.full(3, t % 2) for t in range(40)]
    played = play(env, still)
    ends = [[t + 1 for t, (_, step) in enumerate(played) if step.truncated[j]] for j in range(3)]
    assert all(len(e) == 1 and 1 <= e[0] <= 12 for e in ends)
    assert len({e[0] for e in ends}) > 1
    restored = make(config, num_envs=3)
    reset(env)
    play(env, still[:6])
    restored.load_state_dict(env.state_dict(), buffers(restored))
    assert_same(played[6:], play(restored, still[6:]))
    env.close()
    restored.close()
