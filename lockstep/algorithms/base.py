"""The interface between algorithms and the learner.

Shape legend: T time, B environments; a minibatch is always time-major [T, B] (single samples have T = 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import gymnasium
from torch import Tensor, nn

from lockstep.algorithms.annealing import Annealing
from lockstep.config.needs import Need, OfWeights
from lockstep.config.settings import SettingsError, Texts
from lockstep.models.base import ModelConfig, PolicyModel
from lockstep.models.normalize import NormalizeConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """Gradient descent on the reduced global gradient."""

    name: Literal["adam", "adamw", "radam", "rmsprop", "rmsprop_tf"] = "adam"
    """adam suits most tasks. It keeps means of gradients and of their squares. adamw is adam with weight decay. radam
    rectifies adam's first steps, which replaces a warm-up (Liu et al. 2020, arXiv:1908.03265); PQN uses it. rmsprop
    keeps only the mean of squares; IMPALA uses it. rmsprop_tf is TensorFlow's, which OpenAI Baselines' A2C uses: its
    mean begins at 1 instead of 0, and eps is added under the root. So its first steps are smaller."""
    eps: float = 1e-5
    """Added to the root of the mean of squared gradients; with rmsprop_tf, added to the mean under the root. Higher
    damps steps of parameters with small gradients."""
    decay: float = 0.99
    """Decay of RMSProp's mean of squared gradients. Higher smooths more."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decays of Adam's means of gradients and of squared gradients. Higher smooths more and reacts later to changes."""
    weight_decay: float = 0.01
    """adamw's λ: each step first multiplies all weights, biases and gains of networks by 1 - learning rate × λ
    (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101). Higher keeps parameters smaller."""

    later: ClassVar[frozenset[str]] = frozenset({"weight_decay"})
    needs: ClassVar[tuple[Need, ...]] = (
        Need(("decay",), ("algorithm.optimizer.name",), ("rmsprop", "rmsprop_tf")),
        Need(("betas",), ("algorithm.optimizer.name",), ("adam", "adamw", "radam")),
        Need(("weight_decay",), ("algorithm.optimizer.name",), ("adamw",)),
    )
    of_weights: ClassVar[OfWeights] = (("name", str),)

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        if not self.eps > 0:
            raise SettingsError(f"algorithm.optimizer.eps={self.eps} must be positive, for example 1e-5.")
        if not 0 < self.decay < 1:
            raise SettingsError(f"algorithm.optimizer.decay={self.decay} must be between 0 and 1, for example 0.99.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise SettingsError(
                f"algorithm.optimizer.betas={self.betas} must be two numbers of at least 0 and below 1, for example "
                "0.9 0.999."
            )
        if not self.weight_decay >= 0:
            raise SettingsError(
                f"algorithm.optimizer.weight_decay={self.weight_decay} must be at least 0, for example 0.01."
            )


@dataclass(frozen=True)
class Setup:
    """The parts of the experiment that an algorithm's settings depend on."""

    model: ModelConfig
    normalize: NormalizeConfig
    num_envs: int
    shards: int
    lag: int | Literal["async"]
    gradient_lag: int | Literal["async"]
    max_lag: int
    preempt: float
    several_policies: bool
    total_steps: int
    iterations: int
    samples_per_iteration: int


@dataclass(frozen=True)
class AlgorithmConfig(ABC):
    """Settings that every algorithm shares; each algorithm's file adds its own."""

    name: ClassVar[str] = ""

    replays: ClassVar[bool] = False
    """Whether the algorithm learns from replay (its settings are an OffPolicyConfig) or from each rollout once."""

    rollout: int = 128
    """Steps per environment and iteration. Longer lowers the overhead and, on-policy, the bias of bootstrapping;
    shorter updates more often."""
    learning_rate: float = 2.5e-4
    """Step size. Higher learns faster until it becomes unstable."""
    anneal_learning_rate: bool = True
    """Lower the learning rate linearly to zero over total_steps."""
    anneal: Texts = field(default_factory=dict)
    """How hyperparameters change over the run, as in learning_rate=warmup:10k,cosine entropy_coef=0:0.01,1M:0.001
    clip=my_file.py:clip. An entry replaces the anneal_… setting of its hyperparameter."""
    optimizer: OptimizerConfig = OptimizerConfig()
    max_grad_norm: float = 0.5
    """Scale gradients whose global norm exceeds this; a very large number leaves them unchanged. Lower is safer and
    slower."""
    discount: float = 0.99
    """γ: the weight of a reward one step later. Higher looks further ahead, with more variance."""

    later: ClassVar[frozenset[str]] = frozenset({"anneal"})
    """Settings that earlier versions did not have: see lockstep.config.serialization.to_json."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """The settings that have no effect without others. Those of base classes and of parts are added to them, here and
    in the next two attributes."""
    of_weights: ClassVar[OfWeights] = ()
    """Settings that decide which weights or optimizer moments exist, each with a function that maps its value to what
    these depend on. A population cannot vary this result, since members copy weights and moments from each other."""
    schedules: ClassVar[tuple[str, ...]] = ("anneal_learning_rate", "anneal")
    """Settings that, if on, change hyperparameters during a run. A population refuses them, since it changes
    hyperparameters itself."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        if self.rollout < 1:
            raise SettingsError(f"algorithm.rollout={self.rollout} must be at least 1.")
        if not self.learning_rate > 0:
            raise SettingsError(f"algorithm.learning_rate={self.learning_rate} must be positive, for example 2.5e-4.")
        if not self.max_grad_norm > 0:
            raise SettingsError(
                f"algorithm.max_grad_norm={self.max_grad_norm} must be positive, for example 0.5. A large number, such "
                "as 1e9, leaves gradients as they are."
            )
        if not 0 <= self.discount <= 1:
            raise SettingsError(f"algorithm.discount={self.discount} must be between 0 and 1.")
        self.optimizer.validate()

    def validate_with(self, setup: Setup) -> None:  # noqa: B027 - most have nothing to say
        """Raise SettingsError for settings that do not fit the rest of the experiment."""

    @property
    def keeps_policy(self) -> bool:
        """Whether rollouts keep the parameters of the distributions that actions were drawn from."""
        return False

    @property
    def relabels_goals(self) -> bool:
        """Whether the algorithm also learns from steps with other goals, whose rewards the environment must compute."""
        return False

    @property
    def resumes_exactly(self) -> bool:
        """Whether checkpoints contain all data that the algorithm learns from. Then a resumed run continues exactly."""
        return True

    def warnings(self, setup: Setup) -> Iterator[str]:
        """Warnings for the user before a new run: sentences about settings that work but rarely make sense together."""
        yield from ()

    @abstractmethod
    def gradient_steps(self, samples: int) -> tuple[int, int]:
        """The gradient steps of an iteration that collects this many samples, and the samples of each step."""

    @abstractmethod
    def build(self) -> Algorithm[Any]:
        """The algorithm with these settings."""


class LossOutput(NamedTuple):
    """Sums over a slice's valid samples. Added up over all shards, they are sums over the global minibatch."""

    total: Tensor
    """Scalar to differentiate: the sum, not the mean."""
    metrics: dict[str, Tensor]
    """Detached scalars, each a sum over valid samples; the same names in the same order at every call."""
    priorities: Tensor | None = None
    """Detached [n]: each item's new priority, for prioritized replay."""
    value_target: Tensor | None = None
    """Detached [T, B]: value targets, if an on-policy loss computes them itself."""


class Exploration(NamedTuple):
    """How the environments of a shard explore during one rollout."""

    random: bool
    """Whether actions are drawn uniformly, without the model."""
    numbers: Tensor
    """fp32 [B, X]: the argument of the distribution's explore."""


class ParameterGroup(NamedTuple):
    """Parameters that one gradient step moves together."""

    prefix: str
    """The prefix of their names. The parameters must be adjacent in the model."""
    learning_rate: float


class PlainGroup(ParameterGroup):
    """Parameters that a step changes by their gradient times the rate, without the optimizer. Running statistics are an
    example."""

    __slots__ = ()


ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)


class Algorithm(ABC, Generic[ConfigT]):
    """The loss and the targets of an algorithm: functions of tensors and hyperparameters."""

    metric_names: tuple[str, ...]
    """Names in LossOutput.metrics, in order."""
    needs_targets: bool = False
    """Whether targets are computed once for each rollout, before its first epoch."""
    mean_loss: bool = True
    """Whether the gradient is divided by the global number of valid samples (False: the loss is a sum)."""
    counted: tuple[tuple[str, str], ...] = ()
    """Pairs of a prefix of parameters' names and a metric: the gradient of these parameters is divided by the metric's
    sum instead of the number of all valid samples."""
    weighted: bool = False
    """Whether batches have a `weight` [n] for each item, and the gradient is divided by the largest one."""
    has_target: ClassVar[bool] = False
    """Whether there is a target network, an older copy of the model."""
    noise_theta: float = 1.0
    """θ: how fast the noise of actions returns to 0, see offpolicy.drifting; at 1 it is independent at every step."""
    annealings: Mapping[str, Annealing] = MappingProxyType({})
    """By name: how algorithm.anneal changes hyperparameters. The values replace those that hyperparameters returns."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @abstractmethod
    def loss(self, model: Any, batch: Any, hyper: dict[str, float]) -> LossOutput:
        """The loss of one shard's slice of a minibatch.

        Args:
            model: the PolicyModel that learns; off-policy, Networks with its target network.
            batch: a Batch; off-policy Transitions or Sequences.
            hyper: the result of hyperparameters, and `update`, the number of the gradient step as in groups. On a GPU,
                they are float64 tensors, so that CUDA graphs read their current values. Without graphs, `update`
                remains a number.
        """

    @property
    def bootstraps(self) -> bool:
        """Whether rollouts need the value of their last observation."""
        return self.needs_targets

    def check(self, observation_space: gymnasium.Space[Any]) -> None:
        """Raise SettingsError if the algorithm cannot learn from these observations. Called before a new run."""

    def companion(self, observation_space: gymnasium.Space[Any], seed: int) -> nn.Module | None:
        """Networks that learn in addition to the model. They become the model's `companion`, so every version and
        checkpoint contains them."""
        return None

    def variables(self, model: PolicyModel) -> dict[str, Tensor]:
        """Learned variables in addition to the model's parameters, such as temperatures: fp32 initial values by name.
        They become the model's `variables`, so every version and checkpoint contains them."""
        return {}

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """The parameters that a gradient step changes, with their learning rates. Other parameters and their optimizer
        moments do not change. The gradient norm of each group is clipped separately.

        Args:
            updates: number of the step, from 1: off-policy over the whole run, on-policy within the iteration.
            hyper: the result of hyperparameters.
        """
        return (ParameterGroup("", hyper["learning_rate"]),)

    @property
    def sees_gradients(self) -> bool:
        """Whether before_step does something."""
        return type(self).before_step is not Algorithm.before_step

    def before_step(self, model: PolicyModel, gradient: Mapping[str, Tensor]) -> None:
        """Called with each global gradient before the optimizer applies it. It may change model and gradient in place,
        for example to update running statistics by sums that the loss returned as their gradient. CUDA graphs capture
        the call, so it must only use tensors.

        Args:
            model: the model that learns.
            gradient: the gradient of each parameter, by name.
        """

    def follow(self, online: Tensor, target: Tensor, updates: int) -> None:
        """Update the target network's parameters [N] after this many gradient steps of the run."""
        raise NotImplementedError(f"{type(self).__name__} has a target network but does not say how it follows")

    def warm_iterations(self, samples_per_iteration: int) -> int:
        """The number of iterations at the beginning of a run that only collect."""
        return 0

    def updates_in(self, iteration: int, samples_per_iteration: int) -> int:
        """The number of gradient steps in an iteration, unless it stops early."""
        return self.config.gradient_steps(samples_per_iteration)[0]

    def updates_before(self, iteration: int, samples_per_iteration: int) -> int:
        """The number of gradient steps before an iteration, for algorithms that count them over the run."""
        return 0

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration | None:
        """How environments explore in a rollout. None: they sample the policy. Environments may differ in their
        numbers only, since one call acts for several shards.

        Args:
            progress: share of total_steps collected before the rollout.
            samples: steps collected before the rollout.
            environments: global indices [B].
            num_envs: number of all environments.
        """
        return None

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The hyperparameters of an iteration, which loss and targets receive; learning_rate is always among them.

        Args:
            progress: share of total_steps consumed before the iteration, in [0, 1).
        """
        config = self.config
        return {"learning_rate": self.annealed(config.learning_rate, progress), "discount": config.discount}

    def annealed(self, rate: float, progress: float) -> float:
        """A learning rate at this progress. It falls linearly to zero if anneal_learning_rate is on."""
        return rate * (1.0 - progress if self.config.anneal_learning_rate else 1.0)

    @property
    def reads_steps(self) -> bool:
        """Whether adapt or stop_early reads the metrics of each gradient step. On a GPU, each step waits for them."""
        return self._decides_unlike(Algorithm)

    def _decides_unlike(self, kind: type[Algorithm[Any]]) -> bool:
        """Whether the algorithm overrides a class's adapt or stop_early."""
        return type(self).adapt is not kind.adapt or type(self).stop_early is not kind.stop_early

    def adapt(self, hyper: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        """New values of hyperparameters, given the metrics of a gradient step. They hold from this step on, also in
        later iterations, and checkpoints contain them.

        Args:
            hyper: the hyperparameters of the step so far.
            metrics: the step's global mean metrics.
        """
        return {}

    def stop_early(self, metrics: dict[str, float]) -> bool:
        """Whether to skip the iteration's remaining gradient steps, given the last step's global mean metrics."""
        return False

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics to report, from an iteration's means. Several of them, such as moments, may become one."""
        return metrics
