"""Environments in torch (TorchEnv): physics, seeds, ends, states, training, and mistakes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from playing import assert_same, buffers, play, random_actions, reset
from tiny import cut, options
from torch import Tensor

from lockstep import envs, recipes
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs import EnvConfig, Seeds, batch
from lockstep.envs.torch_env import State, TorchEnv, episode_seeds, uniform
from lockstep.envs.torch_shard import TorchShard
from lockstep.experiment import Experiment
from lockstep.launchers.launch import resume, train
from lockstep.models.action_spaces import make_distribution
from lockstep.models.base import SendsTensors
from lockstep.models.continuous import Deterministic
from lockstep.reproducibility.verify import verify

CARTPOLE = f"{Path(__file__).resolve().parents[2] / 'examples'}/gpu_env.py:CartPole"


def make(env: str, num_envs: int = 3, **settings: Any) -> TorchShard:
    env_id = env if ":" in env else f"{__file__}:{env}"
    made = envs.make(EnvConfig(env_id, **settings), seed=1, first_index=3, num_envs=num_envs)
    assert isinstance(made, TorchShard)
    return made


class Counts(TorchEnv):
    """Episodes of `steps` steps, which end by termination where the first action was 1. Rewards are the steps left."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, num_envs: int, device: torch.device, steps: int = 3, wrong: str = "") -> None:
        super().__init__(num_envs, device)
        self.steps, self.wrong = steps, wrong

    def reset(self, seeds: Tensor) -> Any:
        state = {"count": torch.zeros_like(seeds), "seed": seeds, "before": torch.full_like(seeds, -1)}
        return None if self.wrong == "nothing" else state

    def step(self, state: State, actions: Tensor) -> Any:
        count, wrong = state["count"] + 1, self.wrong
        lost = (count == self.steps) & (actions == 1)
        state = {"before": state["count"], "count": count, "seed": state["seed"]}
        if wrong == "item" and count.max().item() > 100:
            lost = ~lost
        if wrong == "if" and lost.any():
            lost = ~lost
        if wrong == "mask":
            count = count.clone()
            count[lost] = 0
        if wrong == "five":
            return state, count, lost, lost, None
        if wrong == "entries":
            state["more"] = count
        if wrong == "shape":
            state["count"] = count[:1]
        reward = float(self.steps) if wrong == "reward" else self.steps - count
        return state, reward, count if wrong == "flag" else lost, (count == self.steps) & ~lost

    def observe(self, state: State) -> Any:
        obs = torch.stack([state["count"], state["before"]], -1)
        return obs if self.wrong == "observation" else obs.float()


class Parts(Counts):
    action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2)))


class Doubles(Counts):
    observation_space = spaces.Box(-1, 1, (2,), np.float64)  # type: ignore[assignment]


def test_cartpole_has_the_physics_of_gymnasium() -> None:
    """The environments that have not yet ended agree at every step, in float64."""
    count, draw = 20, np.random.default_rng(0)
    env = load_object(CARTPOLE)(num_envs=count, device=torch.device("cpu"))
    others = [gymnasium.make("CartPole-v1").unwrapped for _ in range(count)]
    body = torch.from_numpy(draw.uniform(-0.05, 0.05, (count, 4)))
    for row, other in zip(body.numpy(), others, strict=True):
        other.reset(seed=0)
        other.state = row.copy()  # type: ignore[attr-defined]
    state, going = {"body": body, "steps": torch.zeros(count, dtype=torch.int64)}, set(range(count))
    for _ in range(200):
        actions = torch.from_numpy(draw.integers(0, 2, count))
        state, reward, lost, truncated = env.step(state, actions)
        for j in list(going):
            _, expected, terminated, _, _ = others[j].step(int(actions[j]))
            np.testing.assert_allclose(state["body"][j], others[j].state, rtol=1e-12)  # type: ignore[attr-defined]
            assert float(reward[j]) == expected and bool(lost[j]) == terminated and not truncated[j]
            going -= {j} if terminated else set()
    assert not going
    full = {"body": torch.zeros(count, 4), "steps": torch.arange(480, 500)}
    assert env.step(full, torch.ones(count, dtype=torch.int64))[3].tolist() == [False] * 19 + [True], (
        "at 500 steps, as gymnasium's TimeLimit"
    )
    assert env.reset(torch.arange(count))["body"].abs().max() <= 0.05


def test_random_numbers_are_those_of_batches() -> None:
    seeds, draw = np.array([0, 1, 2**31 - 1, 77]), np.array([0, 5, 2, 9])
    expected = batch.uniform(seeds, 5, -2.0, 3.0, draw=draw)
    found = uniform(torch.from_numpy(seeds), 5, -2.0, 3.0, draw=torch.from_numpy(draw))
    assert found.dtype == torch.float32 and np.abs(found.numpy() - expected).max() < 5 * 2.0**-23
    found = uniform(torch.from_numpy(seeds), 5, draw=123_456)
    assert np.abs(found.numpy() - batch.uniform(seeds, 5, draw=123_456)).max() < 2.0**-23
    many = episode_seeds(torch.arange(2000).repeat(20), torch.arange(20).repeat_interleave(2000))
    assert many.min() >= 0 and many.max() < 2**31 and len(many.unique()) > 39_990


def test_episodes_end_and_begin_as_worked_out_by_hand() -> None:
    env = make("Counts", options={"steps": 3})
    first, second = (Seeds(1, "train", 3).derive(np.arange(3), np.full(3, count)) for count in (0, 1))
    keys = torch.from_numpy(first * 2**31 + second)
    assert reset(env)[""].tolist() == [[0, -1]] * 3
    moments = play(env, [np.array([0, 1, 0])] * 5)
    assert [m.obs[""][0].tolist() for m in moments] == [[1, 0], [2, 1], [3, 2], [0, -1], [1, 0]]
    assert [m.step.reward.tolist() for m in moments] == [[2] * 3, [1] * 3, [0] * 3, [0] * 3, [2] * 3]
    assert [m.step.terminated.tolist() for m in moments[2:4]] == [[False, True, False], [False] * 3]
    assert [m.step.truncated.tolist() for m in moments[2:4]] == [[True, False, True], [False] * 3]
    assert [m.step.first.all() for m in moments] == [False, False, False, True, False]
    assert env.state_dict()["state.seed"].tolist() == episode_seeds(keys, torch.ones_like(keys)).tolist()
    levels = make("Counts", num_levels=2, start_level=7)
    reset(levels)
    assert set(levels.state_dict()["state.seed"].tolist()) <= {7, 8}


def test_lockstep_cuts_episodes_and_first_episodes() -> None:
    env = make("Counts", options={"steps": 100}, reseed_every=4, decorrelate=3)
    reset(env)
    firsts = np.array([m.step.first for m in play(env, [np.zeros(3, int)] * 12)])
    lengths = Seeds(1, "train", 3).first_lengths(3, 3)
    for j, length in enumerate(lengths):
        expected = [t for t in range(12) if t == length or (t > length and (t - length) % 5 == 0)]
        assert np.flatnonzero(firsts[:, j]).tolist() == expected


@pytest.mark.parametrize("env", [CARTPOLE, "wind:Wind"])
def test_restoring_goes_on_with_the_same_bits_and_replays_nothing(env: str) -> None:
    made = make(env)
    actions = random_actions(made, 60)
    reset(made)
    played = play(made, actions[:35])
    state, restored = made.state_dict(), make(env)
    out = buffers(restored)
    assert restored.load_state_dict(state, out) == 0
    current = out if isinstance(out, dict) else {"": out}
    assert all(np.array_equal(current[name], x) for name, x in played[-1].obs.items())
    assert_same(play(made, actions[35:]), play(restored, actions[35:]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("nothing", "reset .* returned a NoneType, but must return a dict of tensors"),
        ("item", "reads a number of a tensor"),
        ("if", "reads a number of a tensor|branches"),
        ("mask", "indexes with a mask.*torch.where"),
        ("five", r"a tuple of 5, but must return \(state, rewards"),
        ("entries", "a state with .*more, but must return a state with count, seed, before"),
        ("shape", r"'count' of the state with the shape \(1,\)"),
        ("reward", "rewards as a float, but it must be a tensor"),
        ("flag", "terminated with the shape .*torch.int64, but .*torch.bool"),
        ("observation", "observations with .*torch.int64, but .*torch.float32"),
    ],
)
def test_mistakes_are_named(wrong: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        env = make("Counts", options={"wrong": wrong})
        reset(env)
        play(env, [np.zeros(3, int)])


def test_what_it_does_not_support_is_refused() -> None:
    for env, message in (("Parts", "takes no actions of Tuple"), ("Doubles", "takes a Box of float32")):
        with pytest.raises(SettingsError, match=message):
            make(env)
    with pytest.raises(SettingsError, match=r"env\.options .*device.*--layout"):
        make("Counts", options={"device": "cuda"})
    with pytest.raises(SettingsError, match=r"env.adapter=vector cannot serve .*Use --env.adapter torch"):
        make("Counts", adapter="vector")
    with pytest.raises(SettingsError, match="env_processes cannot step"):
        train(experiment(), Layout.parse("inline,env_processes=1"), options(Path("unused")))
    with pytest.raises(SettingsError, match=r"changes options between episodes, which env.adapter=torch cannot"):
        train(experiment().replace(curriculum="tiny:longer", **{"env.curriculum": {"longest": 9}}), Layout())
    with pytest.raises(SettingsError, match=r"env.metrics=place: env.adapter=torch does not pass on"):
        make("Counts", metrics=("place",))
    assert envs.resolve(EnvConfig(CARTPOLE)).adapter == "torch"


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=2),
        spaces.MultiDiscrete([3, 2], start=[1, 5]),
        spaces.MultiBinary(3),
        spaces.Box(np.array([-1, 0], np.float32), np.array([2, 0.5], np.float32)),
        spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    ],
)
def test_actions_as_tensors_are_those_as_arrays(space: Any) -> None:
    kinds = [make_distribution(space)]
    if isinstance(space, spaces.Box):
        kinds += [make_distribution(space, squash=True), Deterministic(space)]
    for distribution in kinds:
        assert isinstance(distribution, SendsTensors)
        draw = torch.Generator().manual_seed(1)
        noise = torch.rand(6, distribution.noise_size, generator=draw)
        action = distribution.sample(torch.randn(6, distribution.num_params, generator=draw), noise)
        sent, expected = distribution.to_env_tensor(action), distribution.to_env(action.numpy())
        np.testing.assert_allclose(sent.numpy(), expected, rtol=1e-6)
        assert sent.numpy().dtype == space.dtype and sent.shape[1:] == space.shape


MISTAKES = """
import numpy as np
import torch
from gymnasium import spaces
from lockstep.envs.torch_env import TorchEnv

class Right(TorchEnv):
    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, seeds):
        return {"x": torch.zeros(len(seeds), 1)}

    def observe(self, state):
        return state["x"]

class NoInit(Right):
    def __init__(self, num_envs, device):
        pass

class NoSpace(Right):
    action_space = None

class NoDevice(Right):
    def __init__(self, num_envs):
        super().__init__(num_envs, "cpu")

class Half(Right):
    def reset(self, seeds):
        return {"x": torch.zeros(len(seeds), 1, dtype=torch.bfloat16)}

class Empty(Right):
    def reset(self, seeds):
        return {}

def made(num_envs):
    return Right(num_envs, torch.device("cpu"))

def alone(num_envs, device):
    return Right(num_envs, device)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoInit", "num_envs=0, but was asked for 1. Let its constructor call super"),
        ("NoSpace", "has no action_space"),
        ("NoDevice", r"takes no device. Let it take \(num_envs, device"),
        ("made", "Name the class itself"),
        ("alone", "Name the class itself"),
        ("Half", "as bfloat16, which checkpoints cannot keep"),
        ("Empty", "a state with no entry"),
    ],
)
def test_mistakes_of_a_class_are_explained(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MISTAKES)
    with pytest.raises(SettingsError, match=message):
        envs.spaces(envs.resolve(EnvConfig(id=f"{tmp_path}/mine.py:{name}", num_envs=2)))


def experiment() -> Experiment:
    env = {"id": CARTPOLE, "adapter": "auto"}
    return cut(recipes.ppo_cartpole, env=env, model={"core": "lstm"}, scheme={"lag": 1})


@pytest.mark.slow
def test_training_is_the_same_on_every_layout_and_resumed(tmp_path: Path) -> None:
    whole = train(experiment(), Layout(), options(tmp_path / "run", checkpoint_every=2)).digest
    for text in ("processes:2", "cpu:a1-l1"):
        assert train(experiment(), Layout.parse(text), options(tmp_path / text)).digest == whole
    verdict = verify(str(tmp_path / "run"), Layout(), "all")
    assert verdict.ok, verdict.message
    shutil.rmtree(tmp_path / "run/checkpoints/00000003")
    assert resume(tmp_path / "run", Layout()).digest == whole


def test_random_actions_are_played(tmp_path: Path) -> None:
    changed = experiment()
    changed = changed.replace(env=dataclasses.replace(changed.env, random_actions=True))
    assert train(changed, Layout(), options(tmp_path / "run")).iterations == 3
