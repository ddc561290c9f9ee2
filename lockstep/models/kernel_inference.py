"""Inference of models whose networks kernels compute, and whose distributions torch computes.

Shape legend: T time, B environments, M numbers of a network's output.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels import recurrent_q
from lockstep.kernels.dense import ACTIVATION, TANH, activations, evaluate
from lockstep.kernels.q_networks import act, disturb, scale_noise
from lockstep.models.actor_critic import ActorCritic
from lockstep.models.base import ModelOutput, PolicyModel
from lockstep.models.capture import Inference, Inputs
from lockstep.models.continuous import Deterministic
from lockstep.models.distributions import Distribution
from lockstep.models.layer_tables import core_of_q, encoder_of, mlp_layers, observed, q_layers, q_network, rows_of
from lockstep.models.parameters import FlatParameters
from lockstep.models.q import QModel
from lockstep.portable.numbers import portable_numbers


class ExactInference(Inference):
    """Evaluates an acting copy with kernels and otherwise only exact operations. Its distribution may still need
    replaced operations."""

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        distribution = self._model.distribution
        exact = isinstance(distribution, Distribution) and distribution.exact
        return portable_numbers() if exact else super().arithmetic()


class _KernelInference(ExactInference):
    """Evaluates an acting copy of a model with kernels.

    Args:
        model: made by for_acting. Its parameters are moved into one vector.
    """

    def __init__(self, model: PolicyModel) -> None:
        super().__init__(model)
        self._encoder, self._flat = encoder_of(model), FlatParameters(model)


class TableInference(_KernelInference):
    """Evaluates a network that is one table of layers."""

    def __init__(self, model: QModel | ActorCritic) -> None:
        super().__init__(model)
        self._bound = None
        if isinstance(model, QModel):
            self._layers = q_layers(model, self._flat)
        else:
            self._layers, self._bound = mlp_layers(model.actor.layers, "actor.layers", self._flat), model.actor.bound
            if isinstance(model.distribution, Deterministic):  # whose bound is tanh
                self._layers[-1, ACTIVATION], self._bound = TANH, None
        self._values = isinstance(model, QModel)

    def evaluate(self, inputs: Inputs) -> tuple[ModelOutput, Tensor]:
        x, last = observed(self._encoder, inputs.obs), len(self._layers) - 1
        scratch = evaluate(self._layers, self._flat.vector.detach().numpy(), x)
        numbers = torch.from_numpy(activations(scratch, self._layers, len(x), last)).view(*inputs.start.shape[:2], -1)
        if self._values:
            return ModelOutput(numbers, numbers.amax(-1)), inputs.state
        policy = numbers if self._bound is None else self._bound(numbers)
        return ModelOutput(policy, policy.new_zeros(policy.shape[:2])), inputs.state


class QNetworkInference(_KernelInference):
    """Evaluates Q-networks with the bits of torch's replaced operations: those with noisy layers, dueling streams,
    distributions of returns or normalized layers, and PQN's."""

    def __init__(self, model: QModel) -> None:
        super().__init__(model)
        self._network, self._stale = q_network(model, self._flat), True
        self._noise = np.zeros(model.noise_numbers, np.float32)
        self._parameters = self._flat.vector.detach().numpy()
        self._disturbed = self._used = np.zeros_like(self._parameters)
        """Memory for weights and biases with noise, and the parameters that the network uses."""

    def load(self, vector: Tensor, *, lasts: bool) -> bool:
        if not lasts:
            vector = self._flat.vector.data.copy_(vector)
        self._parameters = vector.numpy()
        return True

    def set_noise(self, uniform: Tensor | None) -> None:
        if uniform is None:
            self._noise[:] = 0
        else:
            scale_noise(uniform.numpy(), self._noise)
        self.refresh()

    def evaluate(self, inputs: Inputs) -> tuple[ModelOutput, Tensor]:
        if self._stale:
            self._stale = False
            self._renew()
        q, state = self._values(observed(self._encoder, inputs.obs, whole=True), inputs)
        numbers = torch.from_numpy(q).view(*inputs.start.shape[:2], -1)
        return ModelOutput(numbers, numbers.amax(-1)), state

    def _renew(self) -> None:
        """Recompute everything that depends only on parameters and noise."""
        self._used = disturb(self._network, self._parameters, self._noise, self._disturbed)

    def _values(self, x: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, Tensor]:
        """The expected returns of all actions [T * B, A], given the encoder's inputs x, and the core's next state."""
        return act(self._network, self._used, x), inputs.state


class RecurrentQInference(QNetworkInference):
    """Evaluates Q-networks with a core."""

    def __init__(self, model: QModel) -> None:
        super().__init__(model)
        self._of_model, self._core = model, core_of_q(model, self._flat)

    def _renew(self) -> None:
        super()._renew()
        panels = recurrent_q.panels_of_core(self._core, self._parameters)
        self._recurrent = recurrent_q.RecurrentQNetwork(self._network, self._core, self._used, self._parameters, panels)

    def _values(self, x: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, Tensor]:
        given = self._of_model.extra(inputs.start, inputs.prev_action, inputs.prev_reward)
        extra = np.zeros((len(x), 0), np.float32) if given is None else rows_of(given)
        steps, state = recurrent_q.Steps(x, extra, inputs.start.reshape(-1).numpy()), inputs.state.numpy().copy()
        return recurrent_q.act(self._recurrent, steps, state), torch.from_numpy(state)
