"""The interface between models and everything that uses them.

Shape legend: T time, B environments, P distribution parameters, N noise numbers, K core state size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from lockstep.kernels.bound import PolicyKernels
from lockstep.models.parameters import FlatParameters

if TYPE_CHECKING:
    from lockstep.models.popart import PopArtConfig, PopArtHead

Precision = Literal["bf16", "fp32", "portable"]
"""Arithmetic of a model: see Experiment.precision."""


class ModelOutput(NamedTuple):
    """The outputs of a model for observations [T, B]."""

    policy: Tensor
    """fp32 [T, B, P]: parameters of the action distribution, action masks already applied."""
    value: Tensor
    """fp32 [T, B]: state values."""
    features: Tensor | None = None
    """[T, B, F]: the inputs of the policy's head, for auxiliary losses. None in collectors, and for models that do not
    return them."""


class ActionDistribution(Protocol):
    """Pure functions of distribution parameters. Actions are one tensor [..., *action_shape]."""

    num_params: int
    noise_size: int
    """N: the number of uniform numbers in [0, 1] that sampling one action takes. Clamp them if 0 or 1 would give an
    infinite action, as in torch.special.ndtri(noise.clamp(1e-7, 1 - 1e-7))."""
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """[..., P], [..., N] -> action [..., *action_shape]. All randomness comes from noise."""
        ...

    def mode(self, params: Tensor) -> Tensor:
        """The most likely action."""
        ...

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """[..., P], [..., *action_shape] -> [...]"""
        ...

    def entropy(self, params: Tensor) -> Tensor:
        """[..., P] -> [...]"""
        ...

    def to_env(self, action: np.ndarray) -> Any:
        """The action batch [B, *action_shape] in the form that the environment's ShardEnv.send takes."""
        ...


@runtime_checkable
class Exploring(Protocol):
    """Further methods that collectors need from a distribution if the algorithm controls exploration."""

    def explore(self, params: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
        """Like sample, but `numbers` [..., X] control exploration."""
        ...

    def uniform(self, params: Tensor, noise: Tensor) -> Tensor:
        """[..., P], [..., N] -> an action drawn uniformly from those that a mask in params allows."""
        ...


@runtime_checkable
class Storing(Protocol):
    """A further method that replay needs from a distribution to store actions of a dataset."""

    def from_env(self, action: np.ndarray) -> Tensor:
        """A batch of the action space -> actions [B, *action_shape]. It is the inverse of to_env."""
        ...


@runtime_checkable
class Diverging(Protocol):
    """A further method that a distribution needs if the learning rate adapts to the divergence."""

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        """The divergence KL(params ‖ other) in nats: [..., P] each -> [...]"""
        ...


@runtime_checkable
class SendsTensors(Protocol):
    """A further method that collectors need from a distribution whose actions go to environments on a GPU."""

    def to_env_tensor(self, action: Tensor) -> Tensor:
        """As to_env, for spaces without parts, with tensors on any device. Only the first call on a device copies
        constants to it."""
        ...


@runtime_checkable
class Masking(Protocol):
    """A further attribute of distributions that observe an action mask."""

    num_logits: int
    """Number of parameters, from the first, that have an entry in an action mask."""


@runtime_checkable
class DescribesActing(Protocol):
    """A further attribute of distributions whose sample is not a draw from the policy."""

    acting: str
    """How sample chooses actions, in a word or two. Evaluations report it; the default is "sampled"."""


@runtime_checkable
class Described(Protocol):
    """A further attribute of distributions that exported policies describe."""

    description: str
    """Sentences that say what its parameters are, and which action follows from them."""


class PolicyModel(nn.Module, ABC):
    """Encoder, core and heads. Feed-forward models return the state unchanged."""

    distribution: ActionDistribution
    state_size: int = 0
    """K: numbers of core state per environment (0 for feed-forward models, H for GRU, 2H for LSTM)."""
    portable_operations: bool = False
    """Whether torch's operations are replaced by portable ones for this model: see lockstep.models.arithmetic."""
    has_value: bool = True
    """Whether the values of forward are estimates."""
    flat_parameters: FlatParameters | None = None
    """In a copy for acting: its parameters as one vector, if they are stored in one."""
    variables: nn.ParameterDict
    """Variables that an algorithm learns in addition to the model, if any: see Algorithm.variables."""

    @abstractmethod
    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        """Evaluate T steps of B environments.

        Args:
            obs: raw observations [T, B, ...] (uint8 images stay uint8), a tensor or a dict of tensors.
            start: bool [T, B], True where obs is the first of its episode: the core state is reset before it, and
                prev_action and prev_reward count as zero.
            state: fp32 [B, K], the core state before the first step.
            prev_action: [T, B, *action_shape], the action before each observation.
            prev_reward: fp32 [T, B], the reward that came with each observation.

        Returns:
            The outputs, and the core state [B, K] after the last step.
        """

    noise_numbers: int = 0
    """Z: the number of uniform numbers that set_noise takes."""
    noise_at_every_step: ClassVar[bool] = False
    """Whether collectors draw new noise at every step instead of once per rollout."""

    def set_noise(self, uniform: Tensor | None) -> None:
        """Set the noise of noisy layers from fp32 [Z], uniform in [0, 1); None removes it."""
        assert self.noise_numbers == 0, "a model with noisy layers must override set_noise"

    @abstractmethod
    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set the running statistics (fp32 [D]) with which forward normalizes vector observations. Copy them into the
        tensors that forward reads, since a captured forward pass continues to read those."""

    def weights_changed(self) -> None:
        """Called after the weights or statistics of a copy for acting have changed, before the next forward pass. It
        computes everything that depends on them alone."""

    def kernels(self) -> PolicyKernels | None:
        """In a copy for acting: forward and the distribution as compiled functions, so that a rollout can be one call.
        Their arguments follow weights_changed and set_observation_statistics. None if there are no such functions."""
        return None

    def popart_head(self) -> PopArtHead | None:
        """The head that estimates normalized values of several tasks; None if there is none. See
        ModelConfig.value_normalization."""
        return None

    @abstractmethod
    def for_acting(self) -> PolicyModel:
        """A copy for inference only, with weights in the precision of its computation."""

    def for_playing(self) -> PolicyModel:
        """A copy like for_acting for playing after training. It need not estimate values."""
        return self.for_acting()


class Networks(NamedTuple):
    """A model that learns, and its target network: an older copy."""

    online: PolicyModel
    target: PolicyModel


@dataclass(frozen=True)
class ModelConfig(ABC):
    """Settings of a model; the concrete config builds it."""

    core: Literal["none", "gru", "lstm", "mingru", "transformer"] = "none"
    """Core (memory) between encoder and heads, which remembers past observations and costs time. gru has fewer
    parameters than lstm. mingru is fastest on long rollouts; its gates depend only on the current input. transformer
    attends to single earlier steps, which helps if a few of them are decisive, and costs most."""

    has_policy_and_value: ClassVar[bool] = True
    """Whether forward returns a value and the parameters of a policy whose log_prob can be learned. On-policy
    algorithms need both."""

    @property
    def recurrent(self) -> bool:
        return self.core != "none"

    @property
    def uses_previous(self) -> bool:
        """Whether forward needs prev_action and prev_reward."""
        return False

    @property
    def hidden_entries(self) -> tuple[str, ...] | None:
        """The entries of Dict observations that policy_space leaves out. None if the model cannot leave any out."""
        return None

    @property
    def value_normalization(self) -> PopArtConfig | None:
        """The settings of PopArt, which normalizes values of several tasks; its rate is 0 if it is off. None if the
        model does not support it."""
        return None

    def policy_space(self, observation_space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
        """The space of the policy's observations, which may lack entries of the environment's. A policy that plays
        after training gets no others. By default it is the whole space."""
        return observation_space

    def validate(self) -> None:  # noqa: B027 - a model without numbers has nothing to say
        """Raise SettingsError for values that are out of range in any environment."""

    def check(  # noqa: B027 - most can begin anywhere
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> None:
        """Raise SettingsError if a new run cannot begin with these settings in this environment. build accepts them, so
        that existing runs can continue."""

    def warnings(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> list[str]:
        """Warnings for the user before a new run with these spaces: sentences about settings that work but are probably
        unintended."""
        return []

    @abstractmethod
    def build(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        precision: Literal["bf16", "fp32"],
        normalize_observations: bool,
        seed: int,
        observation_clip: float = 10.0,
    ) -> PolicyModel:
        """Build and initialize the model. Equal arguments give identical bits, whatever the state of torch's generator.

        observation_clip bounds the magnitude of normalized observations.
        """
