"""What learns: model, algorithm, parameters and normalizers, as every process holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep import envs
from lockstep.algorithms.base import Algorithm
from lockstep.experiment import Experiment
from lockstep.models.base import PolicyModel
from lockstep.normalize import Normalizers
from lockstep.parameters import FlatParameters


@dataclass(frozen=True)
class Version:
    """What acts: the state after some number of iterations."""

    number: int
    parameters: Tensor
    """fp32 [N], flat."""
    normalizers: Normalizers
    """What observations and rewards of its rollouts are normalised with."""


class Agent:
    """An experiment's model with its state: built anew it is version 0, the same bits in every process.

    Args:
        device: where it computes, as torch names it.
    """

    def __init__(self, experiment: Experiment, device: str = "cpu") -> None:
        self.experiment = experiment
        self.device = torch.device(device)
        self.observation_space, self.action_space = envs.spaces(experiment.env)
        self.algorithm: Algorithm[Any] = experiment.algorithm.build()
        self.model: PolicyModel = experiment.model.build(
            self.observation_space,
            self.action_space,
            precision=experiment.precision,
            normalize_observations=experiment.normalize.observations,
            observation_clip=experiment.normalize.clip,
            seed=experiment.seed,
        )
        self.model.to(self.device)
        self.flat = FlatParameters(self.model, tail=1 + len(self.algorithm.metric_names))
        self.normalizers = Normalizers.initial(experiment, self.model)

    def version(self, number: int) -> Version:
        """A copy of the present state, to collect with later."""
        return Version(number, self.flat.vector.detach().clone(), self.normalizers)

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and normalizers, by name."""
        return {
            **{f"parameter.{name}": tensor for name, tensor in self.flat.named().items()},
            **{f"normalizer.{name}": tensor for name, tensor in self.normalizers.state().items()},
        }

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what state returned; further tensors may be among them."""
        self.flat.load(_below("parameter.", tensors))
        self.normalizers = self.normalizers.loaded(_below("normalizer.", tensors))


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
