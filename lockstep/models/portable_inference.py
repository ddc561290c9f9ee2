"""Inference of models whose networks kernels know, and whose distributions torch computes.

Shape legend: T time, B environments, M numbers of a network's output.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.dense import ACTIVATION, TANH, activations, evaluate
from lockstep.models.actor_critic import ActorCritic
from lockstep.models.base import ModelOutput, PolicyModel
from lockstep.models.capture import Inference, Inputs
from lockstep.models.continuous import Deterministic
from lockstep.models.distributions import Distribution
from lockstep.models.encoders import ObservationEncoder
from lockstep.models.layer_tables import encoder_of, mlp_layers, observed, q_layers
from lockstep.models.parameters import FlatParameters
from lockstep.models.q import QModel
from lockstep.portable.numbers import portable_numbers


class KernelInference(Inference):
    """Evaluates an acting copy of a model with one kernel.

    Args:
        model: made by for_acting; its parameters are moved into one vector.
        encoder: of the model; it makes observations into what the table's layers see.
    """

    def __init__(self, model: QModel | ActorCritic, encoder: ObservationEncoder) -> None:
        super().__init__(model)
        self._encoder, self._flat, self._bound = encoder, FlatParameters(model), None
        if isinstance(model, QModel):
            self._layers = q_layers(model, self._flat)
        else:
            self._layers, self._bound = mlp_layers(model.actor.layers, "actor.layers", self._flat), model.actor.bound
            if isinstance(model.distribution, Deterministic):  # whose bound is tanh
                self._layers[-1, ACTIVATION], self._bound = TANH, None
        self._values = isinstance(model, QModel)

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        distribution = self._model.distribution
        exact = isinstance(distribution, Distribution) and distribution.exact
        return portable_numbers() if exact else super().arithmetic()

    def evaluate(self, inputs: Inputs) -> tuple[ModelOutput, Tensor]:
        x, last = observed(self._encoder, inputs.obs), len(self._layers) - 1
        scratch = evaluate(self._layers, self._flat.vector.detach().numpy(), x)
        numbers = torch.from_numpy(activations(scratch, self._layers, len(x), last)).view(*inputs.start.shape[:2], -1)
        if self._values:
            return ModelOutput(numbers, numbers.amax(-1)), inputs.state
        policy = numbers if self._bound is None else self._bound(numbers)
        return ModelOutput(policy, policy.new_zeros(policy.shape[:2])), inputs.state


def kernel_inference(model: PolicyModel) -> KernelInference | None:
    """Inference by a kernel, if it covers an acting copy of a model whose settings have kernels."""
    encoder = encoder_of(model)
    if encoder is None:
        return None
    assert isinstance(model, (QModel, ActorCritic))
    return KernelInference(model, encoder)
