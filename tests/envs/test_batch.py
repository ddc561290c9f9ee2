"""Batched environments of arrays and tensors (BatchEnv): transitions, seeds, states, training, and mistakes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from playing import assert_same, buffers, play, random_actions, reset
from sentences import explained
from tiny import cut

from lockstep import check_env, envs, recipes
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs import EnvConfig, Seeds
from lockstep.envs.batch import uniform
from lockstep.envs.batch_shard import BatchShard
from lockstep.launchers.launch import resume, train

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REACH = f"{EXAMPLES}/custom_vector_env.py:Reach"
Reach = load_object(REACH)


def make(env: str, num_envs: int = 5, **settings: Any) -> BatchShard:
    env_id = env if ":" in env else f"{__file__}:{env}"
    made = envs.make(EnvConfig(env_id, **settings), seed=1, first_index=3, num_envs=num_envs)
    assert isinstance(made, BatchShard)
    return made


class Torch:
    """The example's task in torch."""

    observation_space, action_space = Reach.observation_space, Reach.action_space

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.steps = torch.zeros(num_envs, dtype=torch.int64)
        self.position = torch.zeros(num_envs, 2, dtype=torch.float64)
        self.velocity = torch.zeros(num_envs, 2, dtype=torch.float64)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> torch.Tensor:
        self.steps[rows] = 0
        self.position[rows] = torch.from_numpy(uniform(seeds, 2, -1.0, 1.0))
        self.velocity[rows] = 0.0
        return self.observe()[rows]

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        assert isinstance(actions, torch.Tensor) and actions.dtype == torch.float32
        self.steps += 1
        self.velocity = 0.95 * self.velocity + 0.05 * actions.clip(-1.0, 1.0)
        self.position += self.velocity
        distance = (self.position**2).sum(1).sqrt()
        lost = distance > 3.0
        reward = torch.where(lost, -10.0, -distance / 10)
        return self.observe(), reward, lost, self.steps >= 100, None

    def observe(self) -> torch.Tensor:
        return torch.cat([self.position, self.velocity], 1).float()


class WithState(Torch):
    """Its checkpoints keep tensors."""

    def get_state(self) -> dict[str, torch.Tensor]:
        return {"steps": self.steps, "position": self.position, "velocity": self.velocity}

    def set_state(self, state: dict[str, torch.Tensor]) -> None:
        self.steps, self.position, self.velocity = state["steps"], state["position"], state["velocity"]


class Counts:
    """Episodes of `steps` steps, which report their step and a total."""

    observation_space, action_space = spaces.Box(0, 99, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, num_envs: int, steps: int = 3) -> None:
        self.num_envs, self.asked = num_envs, steps
        self.at, self.steps = np.zeros((2, num_envs), np.int64)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        self.at[rows], self.steps[rows] = 0, self.asked
        return self.observe()[rows]

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        self.at = self.at + 1
        infos = {"place": self.at, "action": actions * 1.0}
        return self.observe(), np.ones(self.num_envs), self.at >= self.steps, np.zeros(self.num_envs, bool), None, infos

    def observe(self) -> np.ndarray:
        return np.stack([self.at, self.steps], -1).astype(np.float32)


class CountsWithOptions(Counts):
    """The same, whose length a curriculum may change."""

    def set_options(self, options: dict[str, Any]) -> None:
        self.asked = options["steps"]

    def get_state(self) -> dict[str, np.ndarray]:
        return {"at": self.at, "steps": self.steps}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        self.at, self.steps = state["at"], state["steps"]


class ResetsItself(Reach):
    """A simulator that puts each environment that has ended at another place at once."""

    def step(self, actions: np.ndarray) -> Any:
        last, reward, terminated, truncated, _ = super().step(actions)
        rows = np.flatnonzero(terminated | truncated)
        obs = last.copy()
        obs[rows] = super().reset(rows, np.full(len(rows), 7))
        last[~(terminated | truncated)] = np.nan  # rows that nobody may read
        return obs, reward, terminated, truncated, last


def test_a_point_moves_as_worked_out_by_hand() -> None:
    """From rest, with the action (1, -1): velocities 0.05, then 0.95 * 0.05 + 0.05 = 0.0975."""
    env = make(REACH, options={"steps": 3})
    start = reset(env)[""]
    seeds = Seeds(1, "train", 3).derive(np.arange(5), np.zeros(5, int))
    assert np.array_equal(start[:, :2], uniform(seeds, 2, -1, 1).astype(np.float32)) and not start[:, 2:].any()
    moments = play(env, [np.tile(np.array([1, -1], np.float32), (5, 1))] * 5)
    place = start[:, :2].astype(np.float64)
    for moment, speed in zip(moments[:3], (0.05, 0.0975, 0.142625)):
        place = place + np.array([speed, -speed])
        np.testing.assert_allclose(moment.obs[""], np.hstack([place, np.tile([speed, -speed], (5, 1))]), rtol=1e-5)
        np.testing.assert_allclose(moment.step.reward, -np.linalg.norm(place, axis=1) / 10, rtol=1e-5)
    assert [m.step.truncated.tolist() for m in moments] == [[at == 2] * 5 for at in range(5)]
    assert moments[3].step.first.all() and not moments[3].step.reward.any() and not moments[3].step.truncated.any()
    seeds = Seeds(1, "train", 3).derive(np.arange(5), np.ones(5, int))
    assert np.array_equal(moments[3].obs[""][:, :2], uniform(seeds, 2, -1, 1).astype(np.float32))
    assert not moments[4].step.first.any()


@pytest.mark.parametrize("kind", ["Torch", "WithState", "ResetsItself"])
def test_the_same_task_in_other_ways_gives_the_same_bits(kind: str) -> None:
    expected, env = make(REACH, reseed_every=30, decorrelate=20), make(kind, reseed_every=30, decorrelate=20)
    actions = random_actions(expected, 150)
    assert np.array_equal(reset(expected)[""], reset(env)[""])
    played = play(expected, actions)
    assert sum(int(step.first.sum()) for _, step in played) > 15
    assert_same(played, play(env, actions))


@pytest.mark.parametrize(("kind", "replays"), [(REACH, True), ("ResetsItself", True), ("WithState", False)])
def test_restoring_replays_actions_unless_there_is_a_state(kind: str, replays: bool) -> None:
    """In the middle of episodes, between an end and its reset, and just after it."""
    env = make(kind, options={"steps": 30} if kind == REACH else {}, decorrelate=20)
    actions = random_actions(env, 90)
    reset(env)
    states, played = [], []
    for t, action in enumerate(actions):
        ended = bool(played) and (played[-1].step.terminated | played[-1].step.truncated).any()
        if t == 50 or (t < 50 and ended) or (played and played[-1].step.first.any()):
            states.append((t, env.state_dict(), played[-1].obs[""]))
        played += play(env, [action])
    assert len(states) > 4
    for t, state, current in states:
        assert any(name.startswith("actions") for name in state) == (replays and state["steps"].max() > 0)
        restored = make(kind, options={"steps": 30} if kind == REACH else {}, decorrelate=20)
        out = np.empty_like(current)
        assert restored.load_state_dict(state, out) == (5 * state["steps"].max() if replays else 0)
        assert np.array_equal(out, current)
        assert_same(played[t:], play(restored, actions[t:]))


@pytest.mark.parametrize("kind", ["Counts", "CountsWithOptions"])
def test_numbers_of_a_batch_become_metrics(kind: str) -> None:
    def made() -> BatchShard:
        return make(kind, 2, metrics=("place", "action:sum"))

    env, actions = made(), [np.array([t % 2, 1]) for t in range(12)]
    reset(env)
    played = play(env, actions[:5])
    first = [step.metrics for _, step in played][2]
    assert first is not None and first.tolist() == [[3, 1], [3, 3]], "actions 0, 1, 0 and 1, 1, 1"
    restored = made()
    restored.load_state_dict(env.state_dict(), buffers(restored))
    for shard in (env, restored):
        ends = [step for _, step in play(shard, actions[5:]) if step.terminated.all()]
        # The step after an end begins an episode: steps 4, 5, 6 and 8, 9, 10 are the next two.
        assert [step.metrics.tolist() for step in ends if step.metrics is not None] == [
            [[3, 1], [3, 3]],
            [[3, 1], [3, 3]],
        ]
        assert len(ends) == 2
    with pytest.raises(SettingsError, match=r"env\.metrics .*custom_vector_env\.py:Reach .*--env\.metrics"):
        play(made_of_reach(), random_actions(made_of_reach(), 1))


def made_of_reach() -> BatchShard:
    env = make(REACH, 2, metrics=("success",))
    reset(env)
    return env


def test_a_curriculum_changes_the_options_of_a_batch_s_next_episodes() -> None:
    assert not envs.adapter_of(EnvConfig(f"{__file__}:Counts", adapter="vector")).changes_options(f"{__file__}:Counts")
    named = f"{__file__}:CountsWithOptions"
    assert envs.adapter_of(EnvConfig(named, adapter="vector")).changes_options(named)

    def seen(env: BatchShard, count: int) -> list[list[float]]:
        return [obs[""][0].tolist() for obs, _ in play(env, [np.zeros(2, np.int64)] * count)]

    env = make("CountsWithOptions", 2)
    env.offer({"steps": 2})
    reset(env)
    begun = seen(env, 1)
    env.offer({"steps": 3})
    assert begun + seen(env, 3) == [[1, 2], [2, 2], [0, 3], [1, 3]], "the episode that runs keeps its own"
    env.offer({"steps": 1})
    restored = make("CountsWithOptions", 2)
    restored.offer({"steps": 1})
    restored.load_state_dict(env.state_dict(), buffers(restored))
    assert seen(restored, 4) == seen(env, 4) == [[2, 3], [3, 3], [0, 1], [1, 1]]


def test_levels_and_episodes() -> None:
    env = make(REACH, options={"steps": 4})
    starts = [reset(env)[""], *(obs[""][step.first] for obs, step in play(env, random_actions(env, 40)))]
    assert len(np.unique(np.concatenate(starts), axis=0)) == 5 * 9
    env = make(REACH, options={"steps": 4}, num_levels=2, start_level=10)
    starts = [reset(env)[""], *(obs[""][step.first] for obs, step in play(env, random_actions(env, 40)))]
    levels = uniform(np.array([10, 11]), 2, -1, 1).astype(np.float32)
    assert np.array_equal(np.unique(np.concatenate(starts)[:, :2], axis=0), np.unique(levels, axis=0))


def test_random_numbers_are_splitmix64s() -> None:
    def mix(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> shift)) * factor % 2**64
        return x ^ (x >> 31)

    step = 0x9E3779B97F4A7C15
    assert mix(step) == 0xE220A8397B1DCDAF, "the first number of SplitMix64 from 0"
    found = uniform(np.array([3, 9]), 2, -1.0, 3.0, draw=np.array([0, 5]))
    for row, (seed, draw) in enumerate(((3, 0), (9, 5))):
        key = mix((mix(seed) + draw * step) % 2**64)
        assert found[row].tolist() == [-1 + 4 * ((mix((key + k * step) % 2**64) >> 11) * 2.0**-53) for k in (1, 2)]
    assert np.array_equal(found[1:], uniform(np.array([9]), 2, -1.0, 3.0, draw=5))
    many = uniform(np.arange(20_000), 2)
    assert abs(many.mean() - 0.5) < 0.01 and abs(np.corrcoef(many.T)[0, 1]) < 0.03


class Unseeded(Reach):
    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        return super().reset(rows, np.random.randint(2**31, size=len(rows)))


class Shares(Reach):
    """One generator for all environments: what one draws depends on the others."""

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        draw = np.random.default_rng(seeds[0])
        return super().reset(rows, draw.integers(2**31, size=len(rows)))


class Keeps(Reach):
    """The velocity outlives an episode."""

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        velocity = self._velocity.copy()
        super().reset(rows, seeds)
        self._velocity = velocity
        return self._observe()[rows]


class Forgets(WithState):
    """A state without the velocity."""

    def get_state(self) -> Any:
        return {name: x for name, x in super().get_state().items() if name != "velocity"}

    def set_state(self, state: Any) -> None:
        super().set_state({**state, "velocity": torch.zeros(self.num_envs, 2, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("env", "failed"),
    [
        ("Torch", None),
        ("Unseeded", "again"),
        ("Shares", "alone"),
        ("Keeps", "rebuilt"),
        ("Forgets", "rebuilt"),
    ],
)
@pytest.mark.slow
def test_planted_faults_are_found(env: str, failed: str | None) -> None:
    found = check_env(EnvConfig(f"{__file__}:{env}", num_envs=3), steps=80)
    assert found.failed == failed
    assert failed is None or "lockstep.envs.batch.uniform" in found.message


class Parts(Reach):
    """Nested observations, actions of a Tuple, and numbers as a user may return them."""

    observation_space = spaces.Dict(
        point=spaces.Tuple((Reach.observation_space, spaces.Discrete(3))),
        picture=spaces.Box(0, 255, (8, 8, 3), np.uint8),
    )
    action_space = spaces.Tuple((Reach.action_space, spaces.Discrete(3)))

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        return self.parts(super().reset(rows, seeds))

    def step(self, actions: Any) -> Any:
        push, kind = actions
        assert kind.dtype == np.int64 and kind.shape == (self.num_envs,)
        obs, reward, terminated, truncated, _ = super().step(push)
        return self.parts(obs), reward.tolist(), terminated.astype(np.int64), truncated[:, None], None

    picture = np.uint8

    def parts(self, obs: np.ndarray) -> Any:
        return {"point": (obs, np.arange(len(obs)) % 3), "picture": np.full((len(obs), 8, 8, 3), 9, self.picture)}


class WidePicture(Parts):
    picture = np.int64


def test_nested_spaces() -> None:
    env = make("Parts", reseed_every=10)
    moments = play(env, random_actions(env, 30)) if reset(env) else []
    assert {name: x.shape for name, x in moments[-1].obs.items()} == {
        "picture": (5, 3, 8, 8),
        "point.0": (5, 4),
        "point.1": (5, 3),
    }
    assert moments[10].step.first.all()
    with pytest.raises(SettingsError, match=r"'picture' .* int64, .* uint8\), says uint8.*environment 3, at the start"):
        reset(make("WidePicture"))


class Slotted:
    """The least that a batch needs, of a class without weak references."""

    __slots__ = ("action_space", "num_envs", "observation_space")

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.observation_space, self.action_space = num_envs, Reach.observation_space, spaces.Discrete(2)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        return np.zeros((len(rows), 4))

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        no = np.zeros(self.num_envs, bool)
        return np.ones((self.num_envs, 4)), no, no, no, None


def test_a_batch_of_any_class_will_do() -> None:
    env = make("Slotted")
    assert not reset(env)[""].any() and play(env, random_actions(env, 2))[1].obs[""].all()
    env.close()


class Halves(Counts):
    """Steps return integers, and resets halves."""

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        return super().reset(rows, seeds) + 0.5

    def observe(self) -> np.ndarray:
        return super().observe().astype(np.int64)


def test_resets_may_return_other_types_than_steps() -> None:
    env = make("Halves", 1)
    assert reset(env)[""].tolist() == [[0.5, 3.5]]
    assert [obs[""][0, 0] for obs, _ in play(env, [np.zeros(1, np.int64)] * 5)] == [1, 2, 3, 0.5, 1]


class Wrong(Reach):
    """Returns something wrong where its argument says."""

    def __init__(self, num_envs: int, at: str) -> None:
        super().__init__(num_envs)
        self.at = at

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        obs = super().reset(rows, seeds)
        return self._observe() if self.at == "rows" and len(rows) < self.num_envs else obs

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, last = super().step(actions)
        truncated = self._steps >= np.arange(2, 2 + self.num_envs)
        return {
            "rows": (obs, reward, terminated, truncated, last),
            "info": (obs, reward, terminated, truncated, {}),
            "four": (obs, reward, terminated, truncated),
            "reward": (obs, reward[:2], terminated, truncated, last),
            "words": (obs, ["a"] * self.num_envs, terminated, truncated, last),
            "ends": (obs, reward, terminated + 0.5, truncated, last),
            "shape": (obs[:, :3], reward, terminated, truncated, last),
            "kind": (obs.astype(np.complex64), reward, terminated, truncated, last),
        }[self.at]


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("rows", r"has the shape \(5, 4\), but \(1, 4\) is needed"),
        ("info", r"observation of the batched environment cannot be read|shape \(\)"),
        ("four", r"returned a tuple of 4, but must return \(observations, rewards"),
        ("reward", r"rewards of the shape \(2,\), but \(5,\) is needed"),
        ("words", r"rewards of type <U1, but must return numbers, \[5\]"),
        ("ends", r"terminated with 0\.5, which is neither True nor False"),
        ("shape", r"has the shape \(5, 3\), but \(5, 4\) is needed"),
        ("kind", r"is of type complex64.*environment 3, in step 1 of an episode that begins from seed \d+"),
    ],
)
def test_wrong_answers_are_explained(at: str, message: str) -> None:
    env = make("Wrong", options={"at": at})
    with pytest.raises(SettingsError, match=message):
        reset(env)
        play(env, random_actions(env, 6))


class Drawn(Reach):
    def render(self, index: int) -> Any:
        return np.full((4, 6, 3), index, np.uint8)


def test_pictures() -> None:
    assert (make("Drawn").render(2) == np.full((4, 6, 3), 2)).all()


class Raises(Reach):
    def step(self, actions: Any) -> Any:
        raise KeyError("ours")


def test_an_error_of_the_users_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    env = make("Raises")
    reset(env)
    with pytest.raises(KeyError, match="ours") as raised:
        play(env, random_actions(env, 1))
    assert "in a step of the environments 3 to 7." in explained(raised.value, capfd.readouterr().err)


class HalfState(Torch):
    def get_state(self) -> Any:
        return {}


class FlatState(WithState):
    def get_state(self) -> Any:
        return {"steps": self.steps[:2]}


class StateOfObjects(WithState):
    def get_state(self) -> Any:
        return {"rng": [np.random.default_rng(j).bit_generator.state for j in range(self.num_envs)]}


class MaskedReach(Reach):
    observation_space = spaces.Dict(x=Reach.observation_space, action_mask=spaces.MultiBinary(2))


class Counted(Reach):
    def __init__(self, num_envs: int) -> None:
        super().__init__(4)


def test_mistakes_are_explained() -> None:
    with pytest.raises(SettingsError, match=r"get_state.*'rng' of the type object"):
        reset(make("StateOfObjects"))
    with pytest.raises(SettingsError, match=r"action_mask.*get_state"):
        make("MaskedReach")
    with pytest.raises(SettingsError, match="only one of get_state and set_state"):
        make("HalfState")
    with pytest.raises(SettingsError, match=r"'steps' of the type int64 and the shape \(2,\).*length 5"):
        reset(make("FlatState"))
    with pytest.raises(SettingsError, match=r"has num_envs=4, but a shard takes 5"):
        make("Counted")
    with pytest.raises(SettingsError, match=r"render\(index\)"):
        make(REACH).render()
    with pytest.raises(SettingsError, match="env_processes"):
        train(cut(recipes.ppo_mujoco, env={"id": REACH}), Layout.parse("inline,env_processes=2"))


def test_4096_environments_train_to_the_same_bits_on_every_layout_and_resumed(
    processes_are_there_already: None, tmp_path: Path
) -> None:
    experiment = cut(recipes.ppo_mujoco, env={"id": REACH, "num_envs": 4096, "options": {"steps": 10}})

    def options(name: str) -> RunOptions:
        return RunOptions(run=str(tmp_path / name), display="none", tensorboard=False, checkpoint_every=1)

    expected = train(experiment, "inline", options("inline"))
    assert expected.iterations == 3
    assert train(experiment, "processes:2", options("two")).digest == expected.digest
    train(experiment, "cpu:a1-l1", options("split"), stop_after=2)
    assert resume(tmp_path / "split").digest == expected.digest
    other = experiment.replace(env=dataclasses.replace(experiment.env, id=f"{__file__}:WithState", options={}))
    whole = train(other, "inline", options("state")).digest
    train(other, "inline", options("state-stopped"), stop_after=2)
    assert resume(tmp_path / "state-stopped").digest == whole
