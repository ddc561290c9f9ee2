"""The adapter `vector` with gymnasium's VectorEnvs: transitions in each autoreset mode, seeds, and mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from playing import assert_same, buffers, play, random_actions, reset

from lockstep import check_env, envs
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, Seeds
from lockstep.envs.vector_shard import VectorShard


def make(env_id: str = "CartPole-v1", num_envs: int = 3, reseed_every: int = 4096, **options: Any) -> VectorShard:
    config = EnvConfig(env_id, adapter="vector", num_envs=num_envs, reseed_every=reseed_every, options=options)
    env = envs.make(config, seed=1, first_index=5, num_envs=num_envs)
    assert isinstance(env, VectorShard)
    return env


class Single:
    """One gymnasium environment, stepped by hand as a VectorEnv of a mode and lockstep step it together."""

    def __init__(self, mode: str, seed: int, limit: int) -> None:
        self.env = gymnasium.make("CartPole-v1", max_episode_steps=limit)
        self.mode, self.ended = mode, False
        self.first, _ = self.env.reset(seed=seed)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, bool]:
        """What lockstep has to record: observation, reward, terminated, truncated, first."""
        if not self.ended:
            obs, reward, terminated, truncated, _ = self.env.step(action)
            self.ended = terminated or truncated
            if self.ended and self.mode == "SameStep":
                self.env.reset()
            return obs, float(reward), terminated, truncated and not terminated, False
        self.ended = False
        if self.mode == "Disabled":
            self.env.reset()
        if self.mode != "NextStep":
            self.env.step(action)  # a VectorEnv steps all of its environments
        return self.env.reset()[0], 0.0, False, False, True


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_transitions_are_those_of_single_environments(mode: str) -> None:
    limit = 20
    env = make(vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}, max_episode_steps=limit)
    seeds = Seeds(1, "train", 5).derive(np.arange(3), np.zeros(3, np.int64))
    singles = [Single(mode, int(seed), limit) for seed in seeds]
    start = reset(env)[""]
    actions = random_actions(env, 300)
    terminations = truncations = 0
    for action, (obs, step) in zip(actions, play(env, actions), strict=True):
        for j, single in enumerate(singles):
            seen, *rest = single.step(action[j])
            assert np.array_equal(obs[""][j], seen)
            assert [step.reward[j], step.terminated[j], step.truncated[j], step.first[j]] == rest
        terminations += int(step.terminated.sum())
        truncations += int(step.truncated.sum())
        assert not (step.terminated & step.truncated).any()
    assert all(np.array_equal(start[j], single.first) for j, single in enumerate(singles))
    assert terminations > 5 and truncations > 5
    env.close()


def test_a_class_for_the_whole_batch_takes_one_seed_and_steps_as_single_environments() -> None:
    """gymnasium.make_vec prefers such a class for CartPole. Its dynamics are those of the single environment."""
    env = make(max_episode_steps=20)
    assert env.share_seeds
    theirs: Any = env._env.unwrapped
    assert type(theirs).__name__ == "CartPoleVectorEnv"
    single: Any = gymnasium.make("CartPole-v1").unwrapped
    single.reset(seed=0)
    again = gymnasium.make_vec("CartPole-v1", num_envs=3)
    seed = int(Seeds(1, "train", 5).derive(np.zeros(1, int), np.zeros(1, int))[0])
    assert np.array_equal(reset(env)[""], again.reset(seed=seed)[0])
    out, compared, truncations = buffers(env), 0, 0
    for action in random_actions(env, 200):
        before = theirs.state.copy()
        env.send(action)
        step = env.recv(out)
        for j in np.flatnonzero(~step.first):
            single.state, single.steps_beyond_terminated = before[:, j], None
            obs, reward, terminated, _, _ = single.step(action[j])
            np.testing.assert_allclose(out[j], obs, rtol=1e-6, atol=1e-12)
            assert (step.reward[j], step.terminated[j]) == (reward, terminated)
            compared += 1
        assert (np.abs(out[step.first]) <= 0.05).all() and not step.reward[step.first].any()
        truncations += int(step.truncated.sum())
    assert 400 < compared < 600 and truncations > 5


def test_all_restart_from_new_seeds_together() -> None:
    env = make(vectorization_mode="sync", reseed_every=30)
    out = buffers(env)
    env.reset(out)
    play(env, random_actions(env, 29))
    assert not env.reseed_due()
    play(env, random_actions(env, 1))
    assert env.reseed_due()
    env.reseed(out)
    seeds = Seeds(1, "train", 5).derive(np.arange(3), np.ones(3, int)).tolist()
    assert np.array_equal(out, gymnasium.make_vec("CartPole-v1", 3, "sync").reset(seed=seeds)[0])


@pytest.mark.slow
def test_processes_of_gymnasiums_give_the_same_bits() -> None:
    """AsyncVectorEnv has other code for the masks of resets."""
    played = []
    for kind in ("sync", "async"):
        env = make(num_envs=2, vectorization_mode=kind, vector_kwargs={"autoreset_mode": "SameStep"})
        reset(env)
        played.append(play(env, random_actions(env, 60)))
        env.close()
    assert sum(int(step.first.sum()) for _, step in played[0]) > 2
    assert_same(*played)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_metrics_are_those_of_single_environments(mode: str) -> None:
    def metrics_of(adapter: str, **options: Any) -> list[list[list[float]]]:
        """What the episodes of each of three environments report, the first five of each."""
        config = EnvConfig(
            f"{__file__}:climb" if adapter == "gymnasium" else f"{__file__}:climb_together",
            adapter=adapter,
            num_envs=3,
            options=options,
            metrics=("height", "height:mean"),
        )
        env = envs.make(config, seed=1, first_index=0, num_envs=3)
        reset(env)
        found: list[list[list[float]]] = [[], [], []]
        for _, step in play(env, random_actions(env, 80)):
            assert step.metrics is not None
            for j in np.flatnonzero(step.terminated | step.truncated):
                found[j].append(step.metrics[j].tolist())
        env.close()
        return [each[:5] for each in found]

    found = metrics_of("vector", mode=mode)
    assert found == metrics_of("gymnasium")
    assert found[0] == [[length, (length + 1) / 2] for length in (3.0, 4.0, 5.0, 6.0, 7.0)]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_wrapper_that_counts_episodes_is_understood(mode: str) -> None:
    config = EnvConfig(
        f"{__file__}:counted", adapter="vector", num_envs=3, options={"mode": mode}, metrics=("episode.r", "episode.l")
    )
    env = envs.make(config, seed=1, first_index=0, num_envs=3)
    reset(env)
    found = [
        step.metrics[j].tolist()  # type: ignore[index]
        for _, step in play(env, random_actions(env, 40))
        for j in np.flatnonzero(step.terminated)
    ]
    assert found[:15] == [[length, length] for length in (3.0, 4.0, 5.0, 6.0, 7.0) for _ in range(3)]
    env.close()
    with pytest.raises(SettingsError, match=r"forgets all episodes.*NEXT_STEP"):
        envs.make(dataclasses.replace(config, options={"mode": "Disabled"}), seed=1, first_index=0, num_envs=3)


def counted(num_envs: int, mode: str) -> VectorEnv[Any, Any, Any]:
    return RecordEpisodeStatistics(climb_together(num_envs, mode))


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_masks_need_the_mode_in_which_no_action_is_dropped(mode: str) -> None:
    with pytest.raises(SettingsError, match=r"action_mask.*NEXT_STEP"):
        make(f"{__file__}:masked", mode=mode)
    make(f"{__file__}:masked", mode="NextStep").close()


class Masked(gymnasium.Env[Any, Any]):
    observation_space: spaces.Space[Any] = spaces.Dict(x=spaces.Box(0, 1, (1,)), action_mask=spaces.MultiBinary(2))
    action_space: spaces.Space[Any] = spaces.Discrete(2)


def masked(num_envs: int, mode: str) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([Masked] * num_envs, autoreset_mode=AutoresetMode(mode))


class Climb(gymnasium.Env[Any, Any]):
    """After n episodes, the next one has n + 3 steps, at heights 1, 2, …"""

    observation_space: spaces.Space[Any] = spaces.Box(-1, 1, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)
    episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.height = 0
        return np.zeros(2, np.float32), {"height": 1000.0}

    def step(self, action: Any) -> Any:
        self.height += 1
        over = self.height == self.episodes + 3
        self.episodes += over
        return np.zeros(2, np.float32), 1.0, over, False, {"height": float(self.height)}


def climb() -> Climb:
    return Climb()


def climb_together(num_envs: int, mode: str = "NextStep") -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([Climb] * num_envs, autoreset_mode=AutoresetMode(mode))


def test_pictures() -> None:
    pytest.importorskip("pygame")
    env = envs.make(EnvConfig("CartPole-v1", adapter="vector"), seed=1, first_index=0, num_envs=2, render=True)
    reset(env)
    assert env.render(1).shape == (400, 600, 3)
    env.close()
    with pytest.raises(SettingsError, match="render_mode=None"):
        make().render()


class Walks(VectorEnv[Any, Any, Any]):
    """Random walks with one generator, as users write a VectorEnv: it resets those that ended in the next step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (gymnasium's own declaration)

    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-9, 9, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x, self.over = self.np_random.uniform(-1, 1, self.num_envs), np.zeros(self.num_envs, np.bool_)
        return self.observation(), {}

    def observation(self) -> Any:
        return self.x[:, None].astype(np.float32)

    def step(self, actions: Any) -> Any:
        self.x = np.where(self.over, self.np_random.uniform(-1, 1, self.num_envs), self.x + 1.2 * actions - 0.6)
        self.over = ~self.over & (np.abs(self.x) > 2)
        return self.observation(), -np.abs(self.x), self.over, np.zeros_like(self.over), {}


class Unseeded(Walks):
    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return obs + np.random.normal(size=obs.shape).astype(np.float32) / 100, *rest


class Counts(Walks):
    """Influences the shards beside it."""

    steps = 0

    def step(self, actions: Any) -> Any:
        type(self).steps += 1
        obs, *rest = super().step(actions)
        return obs + np.float32(type(self).steps % 2), *rest

    def reset(self, **arguments: Any) -> Any:
        type(self).steps = 0
        return super().reset(**arguments)


class SaysNothing(Walks):
    metadata = {}  # noqa: RUF012


class SaysNonsense(Walks):
    metadata = {"autoreset_mode": "never"}  # noqa: RUF012


class NoMask(Walks):
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012


class NoFinal(Walks):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012


class OneMore(Walks):
    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs + 1)


class Four(Walks):
    def step(self, actions: Any) -> Any:
        return super().step(actions)[:4]


class Flat(Walks):
    def observation(self) -> Any:
        return self.x[:2].astype(np.float32)


class Spaceless(Walks):
    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs = num_envs


def single(num_envs: int = 1) -> Any:
    return gymnasium.make("CartPole-v1")


def nothing(num_envs: int = 1) -> Any:
    return [num_envs]


def anyhow(**options: Any) -> Any:
    """Makes a batch, though nothing says so."""
    return Walks(options.get("num_envs", 1))


@pytest.mark.slow
def test_a_users_class_is_recognized_and_checked() -> None:
    config = EnvConfig(f"{__file__}:Walks", num_envs=3)
    assert envs.resolve(config).adapter == "vector"
    found = check_env(config, steps=80)
    assert found.ok and "one for each shard" in found.facts["seeds"]


@pytest.mark.parametrize(("env", "way"), [("Unseeded", "again"), ("Counts", "alone")])
def test_planted_faults_are_found(env: str, way: str) -> None:
    found = check_env(EnvConfig(f"{__file__}:{env}", num_envs=3), steps=80)
    assert found.failed == way


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("SaysNothing", r'does not say metadata\["autoreset_mode"\].*NEXT_STEP, AutoresetMode.SAME_STEP'),
        ("SaysNonsense", r"says 'never' for metadata"),
        ("NoMask", r'ignores options\["reset_mask"\].*NEXT_STEP'),
        ("NoFinal", r'infos have no "final_obs"'),
        ("OneMore", r"has num_envs=4, but a shard takes 3.*env\.num_envs / scheme\.shards"),
        ("Four", r"returned a tuple of 4, but a VectorEnv must return \(observations"),
        ("Flat", r"has the shape \(2,\), but \(3, 1\) is needed: one row for each of the 3"),
        ("Spaceless", r"has no single_observation_space"),
        ("single", r"is one environment\. Use --env\.adapter gymnasium"),
        ("nothing", r"returned \[3\].*reset\(rows, seeds\)"),
    ],
)
def test_mistakes_are_explained(env: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        shard = envs.make(EnvConfig(f"{__file__}:{env}"), seed=1, first_index=0, num_envs=3)
        reset(shard)
        play(shard, random_actions(shard, 60))


def test_single_and_batched_are_told_apart() -> None:
    with pytest.raises(SettingsError, match=r"Walks, which is a batch .*num_envs, or use --env\.adapter vector"):
        envs.make(EnvConfig(f"{__file__}:anyhow"), seed=1, first_index=0, num_envs=1)
    env = envs.make(EnvConfig(f"{__file__}:anyhow", adapter="vector"), seed=1, first_index=0, num_envs=3)
    assert isinstance(env, VectorShard) and env.num_envs == 3
    assert envs.make(
        EnvConfig(f"{__file__}:single", adapter="gymnasium", options={"num_envs": 1}),
        seed=1,
        first_index=0,
        num_envs=2,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"num_envs": 4}}, r"cannot set num_envs: use --env\.num-envs"),
        ({"num_levels": 4}, r"env\.num_levels=4: .*--env\.num-levels 0"),
        ({"decorrelate": 4}, r"env\.decorrelate=4: .*--env\.decorrelate 0"),
        ({"options": {"color": 1}}, r"'color'"),
        ({"options": {"vectorization_mode": "both"}}, r"vectorization_mode.*async"),
    ],
)
def test_settings_that_it_cannot_follow_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        envs.make(EnvConfig("CartPole-v1", adapter="vector", **settings), seed=1, first_index=0, num_envs=3)
