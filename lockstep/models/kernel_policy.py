"""The standard model of vectors and small images in portable arithmetic: identical bits on every CPU.

The parameters, their names and their layout are those of StandardModel. Only the initial values, and a collector's
computations, come from lockstep.kernels. ppo_kernels.py and on_policy_kernels.py in lockstep.learners learn with the
same kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.rng import stream
from lockstep.kernels import network as networks
from lockstep.kernels import policies, recurrent_network
from lockstep.kernels.bound import ActionKernels, Bound, PolicyKernels
from lockstep.kernels.dense import NONE
from lockstep.kernels.initialize import orthogonal
from lockstep.kernels.rollout import evaluate_raw, evaluate_raw_with_memory
from lockstep.models.base import ModelOutput, PolicyModel
from lockstep.models.distributions import Categorical
from lockstep.models.gaussian import Gaussian
from lockstep.models.layer_tables import (
    brightness,
    core_layers,
    encoder_layers,
    encoder_of,
    layer_row,
    normalizes,
    observed,
    of_whole_pixels,
    rows_of,
)
from lockstep.models.parameters import FlatParameters, Places
from lockstep.models.policy import StandardModel
from lockstep.models.trunk import acting_copy


class KernelCategorical(Categorical):
    """A categorical distribution in portable arithmetic."""

    exact = True
    kind = policies.CATEGORICAL

    def kernels(self) -> ActionKernels:
        """The distribution's functions for a rollout in one compiled call."""
        first = np.array([self.start], np.int64)
        return ActionKernels(
            policies.sample_categorical,
            policies.log_prob_categorical,
            policies.send_categorical,
            policies.encode_categorical,
            first,
        )

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        action = np.empty(params.shape[:-1], np.int64)
        policies.sample_categorical(rows_of(params), rows_of(noise), action.reshape(-1))
        return torch.from_numpy(action)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        out = np.empty(params.shape[:-1], np.float32)
        policies.log_prob_categorical(rows_of(params), action.reshape(-1).numpy(), out.reshape(-1))
        return torch.from_numpy(out)


class KernelGaussian(Gaussian):
    """A diagonal normal distribution in portable arithmetic."""

    exact = True
    kind = policies.GAUSSIAN

    def kernels(self) -> ActionKernels | None:
        """The distribution's functions for a rollout in one compiled call; None for float16, which Numba lacks."""
        if self.space.dtype not in (np.float32, np.float64):
            return None
        limits = np.stack([self.space.low.reshape(-1), self.space.high.reshape(-1)])
        return ActionKernels(
            policies.sample_gaussian,
            policies.log_prob_gaussian,
            policies.send_gaussian,
            policies.encode_gaussian,
            limits,
        )

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        action = np.empty((*params.shape[:-1], self.size), np.float32)
        policies.sample_gaussian(rows_of(params), rows_of(noise), action.reshape(-1, self.size))
        return torch.from_numpy(action)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        out = np.empty(params.shape[:-1], np.float32)
        policies.log_prob_gaussian(rows_of(params), rows_of(action), out.reshape(-1))
        return torch.from_numpy(out)


def kernel_distribution(space: gymnasium.Space[Any]) -> KernelCategorical | KernelGaussian:
    """The distribution for an action space that kernels support: Discrete, or Box of floats."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return KernelCategorical(space)
    assert isinstance(space, gymnasium.spaces.Box)
    return KernelGaussian(space)


@dataclass(frozen=True)
class NetworkTable:
    """The layout of a model's parameters, in the form that lockstep.kernels.network takes."""

    layers: np.ndarray
    free_std: int
    log_stds: int

    @staticmethod
    def of(model: StandardModel, flat: Places, *, whole: bool = False) -> NetworkTable:
        """The layout of a model. whole: see lockstep.models.layer_tables.of_whole_pixels."""
        modules = dict(model.named_modules())
        rows: list[list[int]] = []
        ends = []
        for trunk in range(len(model.trunks)):
            apart = trunk == 0 and model.value_head is not None and model.policy_columns
            source = -1 - apart[0] if apart else -1
            for name, activation in encoder_layers(model, f"trunks.{trunk}.encoder"):
                rows.append(layer_row(modules, name, activation, source, flat))
                source = len(rows) - 1
            ends.append(source)
        if model.state_size:
            rows += core_layers(modules, ends, len(rows), flat)
            ends = list(range(len(rows) - len(ends), len(rows)))
        rows.append(layer_row(modules, "policy_head.linear", NONE, ends[0], flat))
        if model.value_head is not None:
            rows.append(layer_row(modules, "value_head.linear", NONE, ends[-1], flat))
        else:
            rows.append(rows[-1])  # a row that is never read
        free, layers = model.policy_head.log_std is not None, np.array(rows, np.int64)
        return NetworkTable(
            of_whole_pixels(layers, encoder_of(model)) if whole else layers,
            flat.offset("policy_head.log_std") if free else -1,
            len(model.policy_head.distribution.log_std_columns),
        )

    def with_parameters(self, parameters: np.ndarray) -> networks.Network:
        return self.layers, self.free_std, self.log_stds, parameters


def initialize(model: StandardModel, seed: int) -> None:
    """Draw a model's initial weights: orthogonal, with StandardModel's gains."""
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, (nn.Linear, nn.Conv2d))]
    for index, (name, layer) in enumerate(layers):
        gain = {"policy_head.linear": 0.01, "value_head.linear": 1.0}.get(name, math.sqrt(2))
        shape = len(layer.weight), layer.weight[0].numel()
        uniform = stream(seed, "weights", index).random(shape, np.float32)
        layer.weight.data = torch.from_numpy(orthogonal(uniform, gain)).view(layer.weight.shape)


def with_kernels(model: PolicyModel, action_space: gymnasium.Space[Any], seed: int | None) -> KernelModel:
    """A standard model that acts with kernels that cover it: see lockstep.algorithms.kernel_table.

    Args:
        seed: the seed of new initial weights. None keeps the model's weights, and acts with the bits of torch's
            replaced operations.
    """
    assert isinstance(model, StandardModel)
    made = KernelModel(model, kernel_distribution(action_space), as_torch=seed is None)
    if seed is not None:
        initialize(made, seed)
    return made


class KernelModel(StandardModel):
    """A standard model that acts in portable arithmetic. Its forward uses torch's operations, for export.

    Args:
        model: the model whose modules are taken over.
        distribution: the distribution of actions.
        as_torch: whether it acts with the bits of torch's replaced operations.
    """

    def __init__(
        self, model: StandardModel, distribution: KernelCategorical | KernelGaussian, *, as_torch: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self.as_torch = as_torch
        self.trunks, self.policy_head, self.value_head = model.trunks, model.policy_head, model.value_head
        self.policy_columns, self.has_value = model.policy_columns, model.has_value
        self.distribution = self.policy_head.distribution = self.kernel_distribution = distribution
        self.state_sizes, self.state_size = model.state_sizes, model.state_size
        self.uses_previous, self.masked, self.extra_features = model.uses_previous, model.masked, model.extra_features
        self._encode = distribution.encode

    def for_acting(self) -> KernelModel:
        return _Acting(self)

    def for_playing(self) -> KernelModel:
        playing = KernelModel(self, self.kernel_distribution, as_torch=self.as_torch)
        playing.drop_value()
        return _Acting(playing)


class _Acting(KernelModel):
    """A model for inference, with its parameters in one vector."""

    def __init__(self, model: KernelModel) -> None:
        super().__init__(acting_copy(model), model.kernel_distribution, as_torch=model.as_torch)
        self._flat = self.flat_parameters = FlatParameters(self)
        table, vector = NetworkTable.of(self, self._flat, whole=self.as_torch), self._flat.vector.detach().numpy()
        self._network = table.with_parameters(vector)
        self._encoder = encoder_of(self)
        self._panels = recurrent_network.hidden_panels(table.layers, vector) if self.state_size else None

    def weights_changed(self) -> None:
        if self._panels is not None:
            layers, _, _, vector = self._network
            self._panels[...] = recurrent_network.hidden_panels(layers, vector)

    def kernels(self) -> PolicyKernels | None:
        actions, encoder = self.kernel_distribution.kernels(), self._encoder
        if actions is None:
            return None
        clip, brightest = encoder.clip if normalizes(encoder) else 0, brightness(encoder, whole=self.as_torch)
        scale = encoder.mean.numpy(), encoder.std.numpy(), np.float32(clip), np.float32(brightest)
        if self._panels is None:
            evaluate = Bound(evaluate_raw, (self._network, scale))
        else:
            evaluate = Bound(evaluate_raw_with_memory, (self._network, self._panels, scale))
        return PolicyKernels(evaluate, self.extra_features, actions)

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        network, x = self._network, observed(self._encoder, obs, whole=self.as_torch)
        leading = start.shape[:2]
        if self._panels is not None:
            given = self.extra(start, prev_action, prev_reward)
            extra = np.zeros((len(x), 0), np.float32) if given is None else rows_of(given)
            starts, after = start.contiguous().view(-1).numpy(), state.numpy().copy()
            policy, value, _, _ = recurrent_network.evaluate(network, self._panels, x, extra, leading[1], starts, after)
            state = torch.from_numpy(after)
        else:
            policy, value, _ = networks.evaluate(network, x)
        if not self.has_value:
            value[:] = 0
        output = ModelOutput(torch.from_numpy(policy).view(*leading, -1), torch.from_numpy(value).view(leading))
        return output, state
