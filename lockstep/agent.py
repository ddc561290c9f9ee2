"""The agent: model, algorithm, parameters and normalizers. Every process has a copy."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import envs
from lockstep.algorithms.base import Algorithm
from lockstep.algorithms.popart import with_popart
from lockstep.algorithms.rnd import with_curiosity
from lockstep.algorithms.several import with_policies
from lockstep.config.settings import SettingsError
from lockstep.core.rng import derive_seed
from lockstep.envs.curriculum import first_options, pack
from lockstep.experiment import Experiment
from lockstep.models.arithmetic import arithmetic
from lockstep.models.base import Masking, Networks, PolicyModel
from lockstep.models.observations import ObservationLayout, unused_mask
from lockstep.models.parameters import FlatParameters
from lockstep.models.policies import first_normalizers, parts_of
from lockstep.models.trunk import PRECISIONS, TrunkConfig
from lockstep.models.versions import Version
from lockstep.system.generators import seeded

NO_KERNELS = (
    "no kernels compute this algorithm with this model, so torch's operations are replaced one by one, and the run "
    "takes two to seven times as long as with --precision fp32. fp32 learns as well, but its digest depends on the "
    "kind of CPU. docs/reproducibility.md lists what kernels compute."
)


class Agent:
    """An experiment's model with its state. A new agent is version 0, before any warm start, with the same bits in
    every process.

    Args:
        experiment: its settings.
        device: the torch device of the model.
        like: another agent of this experiment. Its spaces are used, so that no environment has to be made.
    """

    def __init__(self, experiment: Experiment, device: str = "cpu", *, like: Agent | None = None) -> None:
        self.experiment = experiment
        self.device = torch.device(device)
        spaces = envs.spaces(experiment.env) if like is None else (like.observation_space, like.action_space)
        self.observation_space, self.action_space = spaces
        algorithm = with_curiosity(experiment.algorithm.build())
        self.model: PolicyModel = experiment.build_model(self.observation_space, self.action_space)
        algorithm = with_popart(algorithm, self.model)
        self.algorithm: Algorithm[Any] = with_policies(algorithm, self.observation_space)
        self.algorithm.annealings = experiment.annealings(self.algorithm)
        self.sees_gradients = self.algorithm.sees_gradients
        portable = experiment.precision == "portable"
        self.kernels = experiment.kernels(*spaces)
        """The kernels that replace torch's operations in portable arithmetic; None if there are none."""
        with seeded(derive_seed(experiment.seed, "global companion")):
            with arithmetic(self.model):
                companion = self.algorithm.companion(self.observation_space, experiment.seed)
            if companion:
                self.model.companion = companion
            if variables := self.algorithm.variables(self.model):
                self.model.variables = nn.ParameterDict(variables)
        self.model.to(self.device)
        tail = 1 + len(self.algorithm.metric_names) + (experiment.scheme.shards if self.algorithm.weighted else 0)
        dtype = PRECISIONS[experiment.precision]
        self.flat = FlatParameters(self.model, tail, dtype)
        self.target: PolicyModel | None = None
        self._target_flat: FlatParameters | None = None
        if self.algorithm.has_target:
            self.target = copy.deepcopy(self.model).requires_grad_(False)
            self._target_flat = FlatParameters(self.target, dtype=dtype)
        self.normalizers = first_normalizers(
            experiment.normalize,
            experiment.algorithm.discount,
            self.observation_space,
            portable=portable,
        )

        self.options = pack(first_options(experiment.env) if experiment.curriculum else {})
        """float64 [K]: options of training environments that a curriculum changes."""

    def check(self) -> None:
        """Raise SettingsError if a new run cannot begin with these settings."""
        model = self.experiment.model
        if model.recurrent and not self.model.state_size:
            raise SettingsError(
                f"model.core={model.core} asks for a memory, but {type(self.model).__name__} has none: its state_size "
                "is 0. Use --model.core none, or build the core into the model."
            )
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise SettingsError(
                    f"The model's {name} is a {type(module).__name__}, which computes a row from all rows of a batch: "
                    "actions would depend on the layout, and neither collectors nor checkpoints get its running "
                    "statistics. Use torch.nn.LayerNorm or GroupNorm, or --normalize.observations."
                )
        for part in parts_of(self.observation_space, self.action_space):
            model.check(*part)
        self.algorithm.check(self.observation_space)
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise SettingsError if the first gradient step would change a parameter twice, or none for a group."""
        groups = self.algorithm.groups(1, self.algorithm.hyperparameters(0.0))
        spans = [(self.flat.span(group.prefix), group.prefix) for group in groups]
        for (first, name), (second, other) in itertools.combinations(spans, 2):
            if first.start < second.stop and second.start < first.stop:
                raise SettingsError(
                    f"The groups {name!r} and {other!r} of {type(self.algorithm).__name__} share parameters, which a "
                    "gradient step would change twice. Choose prefixes so that each parameter belongs to one group."
                )

    def warnings(self) -> list[str]:
        """Warnings for the user before a new run, as sentences."""
        parts = parts_of(self.observation_space, self.action_space)
        found = list(dict.fromkeys(text for part in parts for text in self.experiment.model.warnings(*part)))
        distribution = self.model.distribution
        choices = distribution.num_logits if isinstance(distribution, Masking) else 0
        if mask := unused_mask(self.observation_space, choices):
            found.append(mask)
        if self.experiment.normalize.observations and not ObservationLayout.of(self.observation_space).vectors:
            found.append("--normalize.observations has no effect, because the observations are images alone.")
        elif self.experiment.normalize.observations and self._ignores_statistics:
            found.append(
                "--normalize.observations does not change what the networks observe: the encoder that "
                f"{type(self.experiment.model).__name__}.build_encoder returns has no method "
                "set_observation_statistics(mean, std)."
            )
        if self.experiment.precision == "portable" and self.kernels is None:
            found.append(NO_KERNELS)
        return found

    @property
    def _ignores_statistics(self) -> bool:
        """Whether no part of a user's encoder takes the statistics of observations."""
        if not (isinstance(config := self.experiment.model, TrunkConfig) and config.own_encoder):
            return False
        parts = (module for module in self.model.modules() if not isinstance(module, PolicyModel))
        return not any(hasattr(part, "set_observation_statistics") for part in parts)

    @property
    def networks(self) -> PolicyModel | Networks:
        """The argument of the algorithm's loss: the model, with its target network if there is one."""
        return self.model if self.target is None else Networks(self.model, self.target)

    @property
    def vectors(self) -> list[Tensor]:
        """The parameters, and the target network's if there is one: fp32 [N] each. Call round after changing them."""
        flats = [self.flat] if self._target_flat is None else [self.flat, self._target_flat]
        return [flat.vector.detach() for flat in flats]

    def round(self) -> None:
        """Update the rounded copies of parameters that some layers keep."""
        self.flat.round()
        if self._target_flat is not None:
            self._target_flat.round()

    def before_step(self, gradient: Tensor) -> None:
        """Pass a global gradient to Algorithm.before_step, before the optimizer applies it."""
        with arithmetic(self.model):
            self.algorithm.before_step(self.model, self.flat.named(gradient))

    def follow(self, updates: int) -> None:
        """Update the target network after this many gradient steps of the run."""
        if self._target_flat is not None:
            target = self._target_flat.vector.detach()
            before = target._version
            with arithmetic(self.model):
                self.algorithm.follow(self.flat.vector.detach(), target, updates)
            if target._version != before:
                self._target_flat.round()

    def version(self, number: int, *, copied: bool = True) -> Version:
        """The current state, for collectors. copied: it does not change while this agent learns."""
        vector = self.flat.vector.detach()
        return Version(number, vector.clone() if copied else vector, self.normalizers, self.options)

    def not_finite(self) -> list[str]:
        """Names of parameters and normalizing statistics that are NaN or infinite."""
        statistics = self.normalizers.state()
        if all(math.isfinite(float(x.detach().sum())) for x in (self.flat.vector, *statistics.values())):
            return []
        return [name for name, x in {**self.flat.named(), **statistics}.items() if not x.isfinite().all()]

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, normalizers and a curriculum's options, by name."""
        return {
            **({"curriculum": self.options} if len(self.options) else {}),
            **{f"parameter.{name}": tensor for name, tensor in self.flat.named().items()},
            **{f"target.{name}": tensor for name, tensor in self._target_named().items()},
            **{f"normalizer.{name}": tensor for name, tensor in self.normalizers.state().items()},
        }

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore a result of state. Other tensors are ignored."""
        self.flat.load(below("parameter.", tensors))
        if self._target_flat is not None:
            self._target_flat.load(below("target.", tensors))
        self.normalizers = self.normalizers.loaded(below("normalizer.", tensors))
        self.options = tensors.get("curriculum", self.options)

    def _target_named(self) -> dict[str, torch.Tensor]:
        return {} if self._target_flat is None else self._target_flat.named()


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
