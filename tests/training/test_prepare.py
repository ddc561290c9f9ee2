"""What a user is warned about before a run starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tiny import EXPERIMENTS, options
from torch import Tensor, nn

from lockstep import train
from lockstep.agent import NO_KERNELS, Agent
from lockstep.distributed.groups import Group
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.learners.kernel_learner import KernelLearner
from lockstep.learners.process import learner_of
from lockstep.models.trunk import TrunkConfig
from lockstep.recipes import RECIPES
from lockstep.system import machine


@pytest.mark.parametrize(
    ("flags", "precision", "warned"),
    [
        ("fpu avx2 fma", "bf16", True),
        ("fpu avx2 fma", "fp32", False),
        ("fpu avx2 avx512f avx512_bf16", "bf16", False),
        ("fp asimd bf16", "bf16", False),
        ("", "bf16", False),
    ],
)
def test_bf16_is_warned_about_where_the_cpu_emulates_it(
    flags: str,
    precision: str,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("", frozenset(flags.split())))
    experiment = dataclasses.replace(EXPERIMENTS["cartpole-lag-1"](), precision=precision)
    train(experiment, "inline", options(tmp_path / "run"), stop_after=1)
    assert ("no instructions for bf16" in capsys.readouterr().err) is warned


def test_a_process_that_does_everything_builds_its_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, built = Experiment.build_model, list[Experiment]()
    monkeypatch.setattr(Experiment, "build_model", lambda self, *given: built.append(self) or build(self, *given))
    experiment = EXPERIMENTS["cartpole-8-shards"]()
    first = train(experiment, "inline", options(tmp_path / "first"), stop_after=1)
    assert len(built) == 1
    # A run that begins with other weights builds it again, since these are loaded after the first version is known.
    warm = experiment.replace(**{"warm_start.run": str(tmp_path / "first")})
    assert train(warm, "inline", options(tmp_path / "second"), stop_after=1).digest != first.digest
    assert len(built) == 3


VECTOR, PICTURE = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (4, 84, 84), np.uint8)
ENTRIES = spaces.Dict({"a": VECTOR, "b": VECTOR})
CHOICES, ARMS = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("recipe", "changes", "seen", "actions", "kernels"),
    [
        ("ppo-mujoco", {}, VECTOR, ARMS, True),
        ("ppo-mujoco", {}, ENTRIES, ARMS, True),
        ("ppo-mujoco", {}, VECTOR, spaces.Tuple((CHOICES, ARMS)), False),
        ("ppo-mujoco", {"model.encoder": "auto"}, PICTURE, ARMS, False),
        ("ppo-mujoco", {"model.core": "mingru"}, VECTOR, ARMS, False),
        ("a2c-atari", {"model.encoder": "mlp"}, VECTOR, CHOICES, True),
        ("a2c-atari", {"model.encoder": "mlp", "model.activation": "elu"}, VECTOR, CHOICES, False),
        ("pqn-cartpole", {}, VECTOR, CHOICES, True),
        ("dqn-cartpole", {}, VECTOR, CHOICES, True),
        ("dqn-cartpole", {}, ENTRIES, CHOICES, True),
        ("dqn-cartpole", {"model.encoder": "auto"}, PICTURE, CHOICES, False),
        ("dqn-cartpole", {"model.encoder": "mlp"}, PICTURE, CHOICES, True),
        ("ppo-mujoco", {"model.encoder": "mlp"}, PICTURE, ARMS, True),
        ("dqn-cartpole", {"model.encoder": "minatar"}, PICTURE, CHOICES, True),
        ("dqn-cartpole", {"model.encoder": "der"}, PICTURE, CHOICES, True),
        ("dqn-cartpole", {"model.encoder": "dopamine"}, PICTURE, CHOICES, False),
        ("dqn-cartpole", {"model.returns": "implicit"}, VECTOR, CHOICES, True),
        ("dqn-cartpole", {"model.returns": "implicit", "model.activation": "elu"}, VECTOR, CHOICES, False),
        ("qrdqn-atari", {}, PICTURE, CHOICES, True),
        ("qrdqn-atari", {"model.encoder": "convnet_simple"}, PICTURE, CHOICES, False),
        ("qrdqn-atari", {"model.encoder": "der"}, PICTURE, CHOICES, True),
        ("r2d2-memory", {}, VECTOR, CHOICES, True),
        ("r2d2-memory", {"model.core": "none"}, VECTOR, CHOICES, False),
        ("r2d2-memory", {"model.core": "mingru"}, VECTOR, CHOICES, False),
        ("sac-mujoco", {}, VECTOR, ARMS, True),
        ("sac-mujoco", {}, ENTRIES, ARMS, True),
        ("sac-mujoco", {}, VECTOR, CHOICES, True),
        ("sac-mujoco", {}, PICTURE, ARMS, False),
        ("td3-mujoco", {}, VECTOR, ARMS, True),
        ("td3-mujoco", {"model.critic_sizes": (9,)}, VECTOR, ARMS, True),
        ("mpo-mujoco", {}, VECTOR, ARMS, True),
        ("mpo-mujoco", {}, PICTURE, ARMS, False),
        ("ddpg-mujoco", {}, VECTOR, ARMS, True),
        ("ddpg-mujoco", {"model.critic_only": ("a",)}, ENTRIES, ARMS, True),
    ],
)
def test_portable_arithmetic_without_kernels_is_warned_about(
    recipe: str, changes: dict[str, Any], seen: Any, actions: Any, kernels: bool
) -> None:
    """Whatever the reason: the algorithm, a setting of the model, or the spaces of the environment."""
    experiment = RECIPES[recipe]().replace(**{"precision": "portable", **changes})
    like: Any = SimpleNamespace(observation_space=seen, action_space=actions)
    agent = Agent(experiment, like=like)
    assert (agent.kernels is not None) is kernels
    assert (NO_KERNELS in agent.warnings()) is not kernels
    assert NO_KERNELS not in Agent(experiment.replace(precision="fp32"), like=like).warnings()


@pytest.mark.parametrize(("seen", "told"), [(PICTURE, 1), (VECTOR, 0), (ENTRIES, 0)])
def test_normalization_of_images_alone_is_told_to_have_no_effect(seen: Any, told: int) -> None:
    like: Any = SimpleNamespace(observation_space=seen, action_space=CHOICES)
    experiment = RECIPES["ppo-cartpole"]().replace(**{"model.encoder": "auto", "normalize.observations": True})
    for given, count in ((experiment, told), (experiment.replace(**{"normalize.observations": False}), 0)):
        assert sum("--normalize.observations has" in text for text in Agent(given, like=like).warnings()) == count


class Linear(nn.Linear):
    """A user's encoder."""


class Normalizing(Linear):
    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None: ...


class Wrapping(nn.Sequential):
    """A user's encoder, a part of which takes the statistics."""

    out_features = 4


class OwnEncoder(TrunkConfig):
    encoders: Any = None

    def build_encoder(self, observation_space: spaces.Space, **_: Any) -> nn.Module:
        return self.encoders[0](*self.encoders[1:])


@pytest.mark.parametrize(
    ("encoder", "told"),
    [((Linear, 3, 4), True), ((Normalizing, 3, 4), False), ((Wrapping, Normalizing(3, 4)), False)],
)
@pytest.mark.parametrize("recipe", ["ppo-cartpole", "dqn-cartpole", "sac-mujoco"])
def test_normalization_that_a_users_encoder_lacks_is_told(recipe: str, encoder: tuple[Any, ...], told: bool) -> None:
    like: Any = SimpleNamespace(observation_space=VECTOR, action_space=CHOICES)
    experiment = RECIPES[recipe]()
    own = type("Own", (OwnEncoder, type(experiment.model)), {"encoders": encoder})
    given = experiment.replace(model=own(**vars(experiment.model)), precision="fp32")
    for normalized in (True, False):
        agent = Agent(given.replace(**{"normalize.observations": normalized}), like=like)
        count = sum("Own.build_encoder" in text for text in agent.warnings())
        assert count == (1 if normalized and told else 0)


@pytest.mark.parametrize(
    "name", ["portable-pendulum", "hindsight", "sac-discrete", "iqn", "rainbow-lag-1", "r2d2-uniform-lag-1"]
)
def test_who_is_warned_learns_without_kernels(name: str) -> None:
    experiment = EXPERIMENTS[name]().replace(precision="portable")
    agent, shards = Agent(experiment), experiment.scheme.shards
    learner = learner_of(agent, range(shards), TreeSum(shards, Group()))
    assert isinstance(learner, KernelLearner) is (NO_KERNELS not in agent.warnings())
