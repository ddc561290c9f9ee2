"""Critics that observe more than the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sentences import says
from tiny import EXPERIMENTS, options
from torch import Tensor

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.cli.main import main
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.envs.tasks import TupleBandit
from lockstep.evaluation.actor import Actor
from lockstep.evaluation.policy import load_policy
from lockstep.evaluation.scores import evaluate
from lockstep.export.policy import export, load
from lockstep.launchers.launch import train
from lockstep.models import ActorCritic, ActorCriticConfig, StandardModel, StandardModelConfig
from lockstep.models.observations import VALUE_TASK
from lockstep.run.folder import RunFolder

SPACE = spaces.Dict(
    arm=spaces.Box(-1, 1, (2,)), hidden=spaces.Box(-1, 1, (3,)), speed=spaces.Box(-1, 1, (1,))
)  # six numbers, in this order
BUILD: dict[str, Any] = {"precision": "fp32", "normalize_observations": True, "seed": 1}
STEPS, ENVS = 3, 4


def observations(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {key: torch.randn(STEPS, ENVS, *entry.shape, generator=draw) for key, entry in SPACE.items()}  # type: ignore


def perturbed(obs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**obs, "hidden": obs["hidden"] + 1}


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
def test_a_policy_never_sees_what_is_the_value_s(core: Any) -> None:
    config = StandardModelConfig(core=core, core_size=8, critic_only=("hidden",))
    model = config.build(SPACE, spaces.Discrete(4), **BUILD)
    assert isinstance(model, StandardModel) and len(model.trunks) == 2, "the value has a separate encoder and core"
    start, state = torch.zeros(STEPS, ENVS, dtype=torch.bool), torch.zeros(ENVS, model.state_size)
    obs = observations(1)
    (policy, value, _), after = model(obs, start, state)
    (same, other, _), after_other = model(perturbed(obs), start, state)
    assert torch.equal(policy, same) and (value != other).all()
    own = model.state_size // 2
    assert torch.equal(after[:, :own], after_other[:, :own])
    assert core == "none" or not torch.equal(after[:, own:], after_other[:, own:])

    playing = model.for_playing()
    assert playing.state_size == own and not playing.has_value and playing.value_head is None
    alone = {key: x for key, x in obs.items() if key != "hidden"}
    output, left = playing(alone, start, state[:, :own])
    assert torch.equal(output.policy, policy) and not output.value.any() and torch.equal(left, after[:, :own])
    assert model.for_acting().has_value and model.value_head is not None, "of copies alone"


@pytest.mark.parametrize("policy", ["squashed", "deterministic", "gaussian"])
def test_a_policy_never_sees_what_is_the_critics(policy: Any) -> None:
    config = ActorCriticConfig(policy=policy, hidden_sizes=(8,), critic_only=("hidden",))
    model = config.build(SPACE, spaces.Box(-1, 1, (2,)), **BUILD)
    assert isinstance(model, ActorCritic)
    obs, action = observations(1), torch.zeros(STEPS, ENVS, 2)
    assert torch.equal(model.actor(obs), model.actor(perturbed(obs)))
    assert (model.q(obs, action) != model.q(perturbed(obs), action)).all()
    assert model.actor.layers.weights[0].shape[1:] == (3, 8), "three numbers"
    assert model.critics.layers.weights[0].shape[1:] == (6 + 2, 8), "six, and those of the action"


def test_each_network_normalizes_the_numbers_that_it_sees() -> None:
    mean, std = torch.arange(6.0), torch.arange(6.0) + 10
    value = StandardModelConfig(critic_only=("hidden",)).build(SPACE, spaces.Discrete(4), **BUILD)
    critics = ActorCriticConfig(critic_only=("hidden",)).build(SPACE, spaces.Box(-1, 1, (2,)), **BUILD)
    pairs = [[trunk.encoder for trunk in value.trunks], [critics.actor.encoder, critics.critics.encoder]]
    for model, (of_policy, of_critic) in zip((value, critics), pairs, strict=True):
        model.set_observation_statistics(mean, std)
        assert of_policy.mean.tolist() == [0, 1, 5] and of_policy.std.tolist() == [10, 11, 15]  # type: ignore
        assert torch.equal(of_critic.mean, mean) and torch.equal(of_critic.std, std)  # type: ignore
        playing: Any = model.for_playing()
        playing.set_observation_statistics(2 * mean, std)
        assert [x.mean.tolist() for x in playing.modules() if hasattr(x, "mean")] == [[0, 2, 10]]


def test_images_can_be_the_critic_s() -> None:
    space = spaces.Dict(camera=spaces.Box(0, 255, (3, 15, 15), np.uint8), arm=spaces.Box(-1, 1, (2,)))
    for hidden, convolutions in (("camera", [False, True]), ("arm", [True, True])):
        model = StandardModelConfig(critic_only=(hidden,)).build(space, spaces.Discrete(4), **BUILD)
        assert [any("conv" in name for name, _ in trunk.named_modules()) for trunk in model.trunks] == convolutions
        model.set_observation_statistics(torch.tensor([3.0, 4.0]), torch.ones(2))
    discrete = ActorCriticConfig(critic_only=("camera",)).build(space, spaces.Discrete(4), **BUILD)
    obs = {"camera": torch.zeros(1, 2, 3, 15, 15, dtype=torch.uint8), "arm": torch.zeros(1, 2, 2)}
    assert discrete.q_all(obs).shape == (2, 1, 2, 4) and discrete.actor({"arm": obs["arm"]}).shape == (1, 2, 4)


MASKED = spaces.Dict({**SPACE.spaces, "action_mask": spaces.MultiBinary(4)})


@pytest.mark.parametrize(
    ("space", "keys", "words"),
    [
        (SPACE, ("hiden",), ("model.critic_only", "'hiden'", "arm, hidden, speed")),
        (SPACE, ("arm", "hidden", "speed"), ("model.critic_only", "nothing", "arm, hidden, speed")),
        (MASKED, ("arm", "hidden", "speed"), ("model.critic_only", "nothing")),
        (MASKED, ("action_mask",), ("model.critic_only", "mask")),
        (spaces.Box(-1, 1, (3,)), ("hidden",), ("model.critic_only", "Dict", "Box")),
    ],
)
@pytest.mark.parametrize("kind", [StandardModelConfig, ActorCriticConfig])
def test_entries_that_cannot_be_the_critic_s_are_refused(kind: Any, space: Any, keys: Any, words: Any) -> None:
    with pytest.raises(SettingsError) as error:
        kind(critic_only=keys).build(space, spaces.Discrete(4), **BUILD)
    assert says([str(error.value)], *words)


def test_models_without_a_critic_have_no_such_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dqn-cartpole", "--model.critic-only", "hidden"]) == 2
    assert says(capsys.readouterr().err, "--model.critic-only", "other algorithms")


def test_experiments_without_it_are_what_they_were() -> None:
    assert "critic_only" not in to_json(StandardModelConfig()) and "critic_only" not in to_json(ActorCriticConfig())


def test_kernels_compute_it_where_the_policy_s_numbers_lie_together() -> None:
    experiment = recipes.ppo_cartpole().replace(precision="portable")
    changes: dict[tuple[str, ...], bool] = {(): True, ("arm",): True, ("speed",): True, ("hidden",): False}
    for hidden, computed in changes.items():
        found = experiment.replace(**{"model.critic_only": hidden}).kernels(SPACE, spaces.Discrete(4))
        assert (found is not None) == computed, hidden
    assert not experiment.replace(**{"model.core": "gru"}).kernels(SPACE, spaces.Discrete(4))
    assert not experiment.kernels(MASKED, spaces.Discrete(4))
    told = spaces.Dict({**SPACE.spaces, VALUE_TASK: spaces.Box(0.0, 1.0, (2,), np.float32)})
    assert not experiment.kernels(told, spaces.Discrete(4)), "models do not observe this entry"
    agent = Agent(EXPERIMENTS["critic-only-sac"]().replace(precision="portable"))
    assert agent.model.portable_operations and not agent.kernels


class Blind(gymnasium.ObservationWrapper[Any, Any, Any]):
    """TupleBandit as it is after training: nobody sees the vector."""

    def __init__(self) -> None:
        super().__init__(TupleBandit(mask=True))
        self.observation_space = spaces.Dict({k: x for k, x in self.env.observation_space.items() if k != "vector"})  # type: ignore

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {key: x for key, x in observation.items() if key != "vector"}


@pytest.mark.slow
def test_a_trained_policy_plays_without_it(tmp_path: Path) -> None:
    result = train(EXPERIMENTS["critic-only-lstm"](), options=options(tmp_path / "run"))
    assert len(evaluate(result.run, episodes=3).scores) == 3
    policy, chosen = load_policy(result.run), []
    for env in (Blind(), TupleBandit(mask=True)):
        actor, actions = Actor(policy, env, greedy=True), []
        observation, _ = env.reset(seed=3)
        for _ in range(5):
            observation.pop("vector", None)  # the space of the second has it, but what it is given does not
            actions.append(actor.act(observation))
            observation, *_ = env.step(actions[-1])
        chosen.append(actions)
    assert all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in zip(*chosen, strict=True))

    done = export(result.run, tmp_path / "policy.ts", format="torchscript", observations=40)
    told = json.loads((tmp_path / "policy.ts.json").read_text())
    assert done.ok and set(told["inputs"]) == {"obs.action_mask", "obs.image", "start", "state"}
    assert told["inputs"]["state"]["shape"] == ["batch", 2 * 16] and "value" not in told["outputs"]
    assert "vector" not in told["observation_space"]
    inputs = {
        name: torch.ones(1, *each["shape"][1:], dtype=getattr(torch, each["dtype"]))
        for name, each in told["inputs"].items()
    }
    assert load(tmp_path / "policy.ts")(inputs)["policy"].shape == (1, 4 + 4)


@pytest.mark.parametrize("name", ["a2c-atari", "impala-atari", "appo-atari", "td3-mujoco", "ddpg-mujoco", "mpo-mujoco"])
def test_algorithms_learn_with_it(name: str, tmp_path: Path) -> None:
    like = EXPERIMENTS["critic-only-lstm" if name.endswith("atari") else "critic-only-sac"]()
    changes: dict[str, Any] = {"algorithm.rollout": 8, "total_steps": 64, "env.decorrelate": 0}
    if name.endswith("mujoco"):
        env = like.env.__class__(f"{__file__}:Pendulum", num_envs=4, adapter="gymnasium")
        changes |= {"algorithm.warmup": 32, "algorithm.batch_size": 8, "algorithm.updates": 2, "env": env}
        changes |= {"model.critic_only": ("hidden",), "model.hidden_sizes": (8,)}
    else:
        changes |= {"env": like.env, "model": like.model, "algorithm.minibatches": 1}
    experiment = recipes.RECIPES[name]().replace(scheme=like.scheme, precision="fp32").replace(**changes)
    result = train(experiment, options=options(tmp_path / "run"))
    last = RunFolder(result.run).records()[-1]
    losses = [x for key, x in last.items() if key.startswith("loss/")]
    assert last["updates"] and losses and all(x is not None and np.isfinite(x) for x in losses)


class Pendulum(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Pendulum whose speed is a separate entry."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        self.observation_space = spaces.Dict(seen=spaces.Box(-1, 1, (2,)), hidden=spaces.Box(-8, 8, (1,)))

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"seen": observation[:2], "hidden": observation[2:]}
