"""Which kernels compute an experiment in portable arithmetic. TABLE lists them, and kernels_of chooses. A model's
initial weights, acting, minibatches, the learner and warnings depend on the choice.

Where no kernels apply, torch's operations are replaced one by one: see lockstep.portable.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.algorithms.a2c import A2CConfig
from lockstep.algorithms.appo import APPOConfig
from lockstep.algorithms.base import AlgorithmConfig, Setup
from lockstep.algorithms.ddpg import DDPGConfig
from lockstep.algorithms.dqn import DQNConfig
from lockstep.algorithms.drq import DrQConfig
from lockstep.algorithms.impala import IMPALAConfig
from lockstep.algorithms.mpo import MPOConfig
from lockstep.algorithms.onpolicy import OnPolicyConfig
from lockstep.algorithms.ppo import PPOConfig
from lockstep.algorithms.pqn import PQNConfig
from lockstep.algorithms.qpg import QPGConfig
from lockstep.algorithms.r2d2 import R2D2Config
from lockstep.algorithms.sac import SACConfig
from lockstep.algorithms.td3 import TD3Config
from lockstep.kernels.losses import a2c_loss, appo_loss, impala_loss, ppo_loss
from lockstep.kernels.sums import PARTS
from lockstep.models.actor_critic import ActorCriticConfig
from lockstep.models.asymmetric import AsymmetricConfig
from lockstep.models.base import ModelConfig, PolicyModel
from lockstep.models.capture import Inference
from lockstep.models.encoders import IMAGE_ENCODERS
from lockstep.models.kernel_inference import ExactInference, QNetworkInference, RecurrentQInference, TableInference
from lockstep.models.kernel_policy import kernel_distribution, with_kernels
from lockstep.models.observations import VALUE_TASK, ObservationLayout
from lockstep.models.policies import Policies, PoliciesSpace
from lockstep.models.policy import StandardModelConfig
from lockstep.models.q import QModelConfig
from lockstep.models.trunk import TrunkConfig


class Case(NamedTuple):
    """The parts of an experiment that decide which kernels can compute it."""

    config: AlgorithmConfig
    """The settings of an algorithm in TABLE."""
    model: ModelConfig
    observation_space: gymnasium.Space[Any]
    """The observation space of an environment, as models see it."""
    action_space: gymnasium.Space[Any]
    several: bool = False
    """Whether this is one of several policies with normalized observations."""


class Kernels(ABC):
    """Kernels of one or several algorithms. lockstep.learners.learner_table has their learners."""

    as_torch: ClassVar[bool] = False
    """Whether their results are bit-identical to those of torch's replaced operations. Other kernels have different
    initial weights or sum in a different order."""
    pads: ClassVar[bool] = True
    """Whether acting batches contain empty rows for the shards of other collectors. They are unnecessary if bits depend
    neither on the number of rows that act together nor on the memory layout of rollouts."""

    @abstractmethod
    def covers(self, case: Case) -> bool:
        """Whether these kernels can compute all of the case. They never cover a subclass of a model's settings, since
        it may build another model."""

    def take(self, model: PolicyModel, action_space: gymnasium.Space[Any], seed: int) -> PolicyModel:
        """The initial model for these kernels.

        Args:
            model: the model that its settings build. It may be changed in place.
            seed: the seed of initial weights.
        """
        model.portable_operations = True  # around the kernels, which compute its networks
        return model

    def inference(self, model: Any) -> Inference | None:
        """The object that evaluates an acting copy of the model; None if the model does this itself."""
        return None


class _OnPolicyKernels(Kernels):
    """Kernels of a policy and a value, for vectors, MinAtar's grids, or images that an MLP sees."""

    entries: ClassVar[bool] = False
    """Whether observations may be a Dict of vectors, some of them for the value alone."""

    def covers(self, case: Case) -> bool:
        config, model, observations, actions, several = case
        assert isinstance(config, OnPolicyConfig)
        if type(model) is not StandardModelConfig:
            return False
        if isinstance(observations, spaces.Dict) and not ((self.entries or several) and _joins(case)):
            return False
        layout, discrete = ObservationLayout.of(observations), isinstance(actions, spaces.Discrete)
        floats = isinstance(actions, spaces.Box) and np.issubdtype(actions.dtype, np.floating)
        known = model.core in ("gru", "lstm") or (model.core == "none" and not model.previous_action_reward)
        same = _like_torch(model, layout) and math.prod(actions.shape or ()) <= PARTS
        return (
            (known and not model.squash and not model.popart.rate)
            and not (config.rnd.coef or config.keeps_policy)
            and (discrete or floats)
            and (same or not self.as_torch)
            and _encodes(model, layout, flat=self.as_torch)
        )

    def take(self, model: PolicyModel, action_space: gymnasium.Space[Any], seed: int) -> PolicyModel:
        return with_kernels(model, action_space, None if self.as_torch else seed)


class PPOKernels(_OnPolicyKernels):
    """PPO without a core. These kernels are older than torch's replaced operations and have different bits."""

    entries = True

    def covers(self, case: Case) -> bool:
        if case.model.recurrent or not super().covers(case):
            return False
        assert isinstance(case.model, StandardModelConfig)
        # These kernels draw the initial weights themselves, those of an image's layers always as orthogonal matrices.
        drawn = case.model.initialization in ("auto", "orthogonal")
        return drawn or not ObservationLayout.of(case.observation_space).images


@dataclass(frozen=True)
class LossKernels(_OnPolicyKernels):
    """A loss of lockstep.kernels.losses and its inputs."""

    loss: Any
    numbers: tuple[str, ...]
    """Names of fields of lockstep.algorithms.onpolicy.Batch, in order."""
    flags: tuple[str, ...]
    """Names of its boolean fields, in order; `valid` follows them."""
    hyper: Callable[[Any, dict[str, float]], tuple[float, ...]]
    """Maps the config and the iteration's hyperparameters to the kernel's hyperparameters that follow value_coef. The
    mean and deviation of standardized advantages follow these."""

    as_torch = True


@dataclass(frozen=True)
class PoliciesKernels(Kernels):
    """Kernels of several policies that learn by the same loss."""

    loss: LossKernels

    as_torch = True

    def covers(self, case: Case) -> bool:
        """Whether these kernels compute every policy. Observations must be normalized, since normalizing copies them
        and the order of torch's sums depends on this copy."""
        space = case.observation_space
        assert isinstance(space, PoliciesSpace)
        cases = [Case(case.config, case.model, *part, several=True) for part in space.parts.values()]
        return case.several and all(map(self.loss.covers, cases))

    def take(self, model: PolicyModel, action_space: gymnasium.Space[Any], seed: int) -> PolicyModel:
        assert isinstance(model, Policies)
        changed = model.changed(self.loss.take, seed, kernel_distribution(action_space))
        return super().take(changed, action_space, seed)

    def inference(self, model: Any) -> Inference:
        return ExactInference(model)


class _QKernels(Kernels):
    """Kernels of a Q-network, for vectors or one image."""

    entries: ClassVar[bool] = False
    """Whether observations may be a Dict of vectors."""
    strides: ClassVar[bool] = False
    """Whether they support convolutions with a stride above 1."""
    cores: ClassVar[tuple[str, ...]] = ("none",)
    """The cores that they support."""
    pads = False

    def covers(self, case: Case) -> bool:
        _, model, observations, *_ = case
        if type(model) is not QModelConfig or not (
            isinstance(observations, spaces.Box) or (self.entries and _joins(case))
        ):
            return False
        layout = ObservationLayout.of(observations)
        return (
            model.core in self.cores
            and not (model.core == "none" and model.previous_action_reward)
            and self._knows(model, layout)
            and _encodes(model, layout, strides=self.strides, flat=self.as_torch)
        )

    @abstractmethod
    def _knows(self, model: QModelConfig, layout: ObservationLayout) -> bool:
        """Whether these kernels compute the model's head."""


class DQNKernels(_QKernels):
    """One linear layer after the encoder. These kernels are older than torch's replaced operations and have different
    bits."""

    def _knows(self, model: QModelConfig, layout: ObservationLayout) -> bool:
        changed = model.dueling or model.noisy or model.stream_size or model.layer_norm
        return model.returns == "expected" and not changed

    def inference(self, model: Any) -> Inference:
        return TableInference(model)


class ReturnsKernels(_QKernels):
    """Noisy layers, dueling streams, distributions of returns, normalized layers, and larger networks for images."""

    as_torch = True
    entries = True
    strides = True

    def _knows(self, model: QModelConfig, layout: ObservationLayout) -> bool:
        if model.layer_norm and min((max(0, model.dense_size) or 2, *model.hidden_sizes), default=2) < 2:
            return False  # torch sums the gradients of a norm over a single number in parts
        return _like_torch(model, layout)

    def inference(self, model: Any) -> Inference:
        return QNetworkInference(model)


class DrQKernels(ReturnsKernels):
    """DrQ with one copy of every image: DQN's loss on augmented images."""

    def covers(self, case: Case) -> bool:
        config = case.config
        assert isinstance(config, DrQConfig)
        return config.copies == config.target_copies == 1 and super().covers(case)


class ValueKernels(ReturnsKernels):
    """PQN: DQN's networks, which learn from fresh rollouts."""

    entries = False
    numbers: ClassVar[tuple[str, ...]] = ("value_target",)
    """As for LossKernels."""
    flags: ClassVar[tuple[str, ...]] = ()
    pads = True  # the order of a layer's sum depends on whether a rollout's observations are contiguous


class SequenceKernels(ReturnsKernels):
    """R2D2: DQN's networks with a core, which learn from sequences."""

    entries = False
    cores = ("gru", "lstm")

    def inference(self, model: Any) -> Inference:
        return RecurrentQInference(model)


class _ActorCriticKernels(Kernels):
    """Kernels of a policy and critics, for vectors. Critics may see more entries than the policy."""

    actions: ClassVar[type[gymnasium.Space[Any]]] = spaces.Box

    def covers(self, case: Case) -> bool:
        config, model, observations, actions, _ = case
        assert isinstance(config, QPGConfig)
        if type(model) is not ActorCriticConfig or not isinstance(actions, self.actions):
            return False
        remembers = model.recurrent or model.previous_action_reward or config.unroll
        firsts = {sizes[0] for sizes in (model.hidden_sizes, model.critic_sizes) if sizes}
        single = model.layer_norm and 1 in firsts  # torch sums the gradients of its norm in parts
        vectors = (
            _joins(case) if isinstance(observations, spaces.Dict) else not ObservationLayout.of(observations).images
        )
        return vectors and not (remembers or single or model.batch_renorm)

    def inference(self, model: Any) -> Inference:
        return TableInference(model)


class SACKernels(_ActorCriticKernels):
    """SAC."""


class DiscreteSACKernels(_ActorCriticKernels):
    """SAC with discrete actions."""

    actions = spaces.Discrete
    as_torch = True


class TD3Kernels(_ActorCriticKernels):
    """TD3 and DDPG."""


class MPOKernels(_ActorCriticKernels):
    """MPO."""

    as_torch = True


def _joins(case: Case) -> bool:
    """Whether kernels can read a Dict as one row: it contains only vectors, and the policy sees adjacent columns."""
    model, observations = case.model, case.observation_space
    if not isinstance(observations, spaces.Dict) or VALUE_TASK in observations.spaces:
        return False
    layout = ObservationLayout.of(observations)
    if layout.images or layout.mask_size:
        return False
    seen = (model.policy_columns(observations) if isinstance(model, AsymmetricConfig) else None) or [0]
    return seen[-1] - seen[0] == len(seen) - 1


def _encodes(model: TrunkConfig, layout: ObservationLayout, *, flat: bool, strides: bool = False) -> bool:
    """Whether kernels compute the model's encoder: an MLP for vectors, or an image network that has kernels.

    Args:
        strides: whether they support convolutions with a stride above 1.
        flat: whether they support images that an MLP sees.
    """
    networks = [name for name, each in IMAGE_ENCODERS.items() if each.kernels and strides >= each.strides]
    return model.encoder in ((*networks, *["mlp"] * flat) if layout.images else ("auto", "mlp", *networks))


def _like_torch(model: TrunkConfig, layout: ObservationLayout) -> bool:
    """Whether an encoder's kernels can have the bits of torch's replaced operations. With ELU they cannot, since its
    slope has several formulas."""
    return model.activation != "elu" or not layout.vectors


def _of_vtrace(config: IMPALAConfig | APPOConfig, hyper: dict[str, float]) -> tuple[float, ...]:
    return hyper["discount"], config.vtrace_lambda, config.rho_clip, config.c_clip


def _of_appo(config: APPOConfig, hyper: dict[str, float]) -> tuple[float, ...]:
    highest = 1.0 + hyper["clip"]
    return *_of_vtrace(config, hyper), 1.0 / highest, highest, config.value_clip, float(config.standardize_advantages)


def _of_ppo(config: PPOConfig, hyper: dict[str, float]) -> tuple[float, ...]:
    clip = hyper["clip"]
    return 1.0 - clip, 1.0 + clip, clip, config.value_clip


_ENDS = ("terminated", "truncated")
_TARGETS = ("advantage", "value_target")
TABLE: Mapping[type[AlgorithmConfig], tuple[Kernels, ...]] = {
    PPOConfig: (PPOKernels(), LossKernels(ppo_loss, (*_TARGETS, "log_prob", "value"), (), _of_ppo)),
    A2CConfig: (LossKernels(a2c_loss, _TARGETS, (), lambda config, hyper: ()),),
    IMPALAConfig: (LossKernels(impala_loss, ("reward", "log_prob"), _ENDS, _of_vtrace),),
    APPOConfig: (LossKernels(appo_loss, ("reward", "log_prob", "value"), _ENDS, _of_appo),),
    PQNConfig: (ValueKernels(),),
    DQNConfig: (DQNKernels(), ReturnsKernels()),
    R2D2Config: (SequenceKernels(),),
    DrQConfig: (DrQKernels(),),
    SACConfig: (SACKernels(), DiscreteSACKernels()),
    TD3Config: (TD3Kernels(),),
    DDPGConfig: (TD3Kernels(),),
    MPOConfig: (MPOKernels(),),
}
"""Kernels by the class of an algorithm's settings. The first that cover an experiment compute it. Subclasses have no
kernels, since they may compute another loss."""


def kernels_of(
    config: AlgorithmConfig,
    setup: Setup,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> Kernels | None:
    """The kernels that compute an experiment in portable arithmetic; None if torch's operations do.

    Args:
        setup: the rest of the experiment.
        observation_space, action_space: the spaces of an environment, as models see them.
    """
    if setup.gradient_lag == "async":
        return None
    known, case = TABLE.get(type(config), ()), Case(config, setup.model, observation_space, action_space)
    if isinstance(observation_space, PoliciesSpace):
        known = tuple(PoliciesKernels(each) for each in known if isinstance(each, LossKernels))
        case = case._replace(several=setup.normalize.observations)
    return next((each for each in known if each.covers(case)), None)
