"""The experiment: all settings that determine the bits of the result."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium

from lockstep.algorithms.annealing import Annealing, annealings
from lockstep.algorithms.base import Algorithm, AlgorithmConfig, Setup
from lockstep.algorithms.rnd import with_curiosity
from lockstep.config.needs import Need
from lockstep.config.serialization import from_json, identities_of, to_json
from lockstep.config.settings import SettingsError, Steps, changed, check_values
from lockstep.core.rng import derive_seed
from lockstep.core.schedule import Schedule
from lockstep.envs.mixed import value_sees_task
from lockstep.envs.settings import EnvConfig
from lockstep.models.arithmetic import portable_operations
from lockstep.models.base import ModelConfig, PolicyModel, Precision
from lockstep.models.normalize import NormalizeConfig
from lockstep.models.policies import Policies, PoliciesSpace
from lockstep.scheme import Scheme
from lockstep.system.generators import seeded

if TYPE_CHECKING:
    from lockstep.algorithms.kernel_table import Kernels


@dataclass(frozen=True)
class WarmStart:
    """A start from the weights of another run. Replay and schedules begin anew."""

    run: str = ""
    """Folder of the run whose weights training starts from. Default: none, so parameters begin with random values."""
    checkpoint: str = "latest"
    """The run's checkpoint: latest, best, or an iteration."""
    parts: tuple[str, ...] = ()
    """The parts to load: prefixes of parameter names, such as trunks or actor, or normalizer for running statistics.
    All other parts are initialized as usual. Default: all; fewer suit a task with other actions."""
    digest: str = ""
    """SHA-256 of the loaded weights, computed when the run starts."""
    optimizer: bool = False
    """Load the optimizer's moments, too. On suits the same task, where the first steps would be large without them. Off
    suits another task, whose gradients differ."""

    later: ClassVar[frozenset[str]] = frozenset({"optimizer"})
    needs: ClassVar[tuple[Need, ...]] = (Need(("checkpoint", "parts", "optimizer", "digest"), ("warm_start.run",)),)

    def __post_init__(self) -> None:
        if isinstance(self.run, Path):  # the type of Result.run
            object.__setattr__(self, "run", str(self.run))

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        if "" in self.parts:
            raise SettingsError("warm_start.parts has an empty name: leave it out, or take all parts with none.")
        if self.optimizer and self.parts:
            raise SettingsError(
                "--warm-start.optimizer loads the moments of all parameters, not those of parts "
                f"({' '.join(self.parts)}). Leave one of the two out."
            )


@dataclass(frozen=True)
class Experiment:
    """Everything that determines what is learned. Its hash is the run's identity."""

    env: EnvConfig
    model: ModelConfig
    algorithm: AlgorithmConfig
    scheme: Scheme = field(default_factory=Scheme)
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)
    total_steps: Steps = 10_000_000
    """Agent samples to collect (one is one action of one environment), rounded up to whole iterations. With lag async
    and replay, the number of iterations is exact, and the number of samples may differ by algorithm.replay.slack."""
    seed: int = 1
    """The single seed from which all random streams and all seeds of environments are derived."""
    precision: Precision = "bf16"
    """Arithmetic of the model: bf16, fp32 or portable. bf16 applies to encoder and core; weights, losses, heads and
    optimizer are always fp32. It is faster with images; fp32 is more exact, and as fast with vectors. portable is fp32
    with identical bits on every CPU: faster for PPO, A2C, IMPALA, APPO, DQN, SAC, TD3, DDPG and MPO on small networks,
    else mostly slower."""
    torch_threads: int = 1
    """Threads of each process for torch's operations and NumPy's products. The bits depend on this number, so use more
    processes to use more cores."""
    warm_start: WarmStart = field(default_factory=WarmStart)
    curriculum: str = ""
    """Your function (file.py:NAME) that changes env.curriculum during training. It receives an iteration's metrics and
    the current options, and returns the options of the next episodes."""
    allow_nondeterministic: bool = False
    """On GPUs, only warn of an operation that has no deterministic kernel, instead of ending the run. Then identical
    bits are not guaranteed: verify, replay and resume may differ."""

    later: ClassVar[frozenset[str]] = frozenset({"warm_start", "curriculum", "allow_nondeterministic"})

    def validate(self) -> None:
        """Raise SettingsError if a setting is out of range, or if settings contradict each other."""
        check_values(self)
        if not -(2**63) <= self.seed < 2**63:
            raise SettingsError(f"seed={self.seed} is out of range: torch takes 64 bits, so give one below 2**63.")
        shards, num_envs = self.scheme.shards, self.env.num_envs
        self.env.validate()
        self.scheme.validate()
        self.normalize.validate()
        self.warm_start.validate()
        self.model.validate()
        if num_envs % shards:
            raise SettingsError(
                f"env.num_envs={num_envs} is not a multiple of scheme.shards={shards}. Every shard has the same "
                f"number of environments: use --env.num-envs {max(1, round(num_envs / shards)) * shards} or fewer "
                "shards (a power of two)."
            )
        if self.scheme.acting_batch % max(1, self.envs_per_shard):
            raise SettingsError(
                f"scheme.acting_batch={self.scheme.acting_batch} is not a multiple of a shard's "
                f"{self.envs_per_shard} environments (env.num_envs / scheme.shards). Use "
                f"--scheme.acting-batch 0 for one shard at a time, or a multiple of {self.envs_per_shard}."
            )
        if self.total_steps < 1:
            raise SettingsError(f"total_steps={self.total_steps} must be at least 1, for example --total-steps 10M.")
        if self.torch_threads < 1:
            raise SettingsError(f"torch_threads={self.torch_threads} must be at least 1.")
        if self.precision == "portable" and self.torch_threads != 1:
            raise SettingsError(
                f"torch_threads={self.torch_threads}: portable arithmetic uses one thread per process. Use "
                "--torch-threads 1, and --layout processes:N for several cores."
            )
        self.algorithm.validate(self.envs_per_shard, recurrent=self.model.recurrent)
        self.algorithm.validate_with(self.setup)
        self.annealings(with_curiosity(self.algorithm.build()))
        self._check_curriculum()
        if self.env.central_state != "none":
            hidden = self.model.hidden_entries
            if (hidden is not None or self.algorithm.replays) and "state" not in (hidden or ()):
                use = "--env.central-state none" if hidden is None else "--model.critic-only state"
                raise SettingsError(
                    f"env.central_state={self.env.central_state} adds the entry `state` to observations, which the "
                    f"policy would see, too. Use {use}."
                )
        if (popart := self.model.value_normalization) and popart.rate and not value_sees_task(self.env):
            raise SettingsError(
                f"model.popart.rate={popart.rate:g} learns a value for each task of env.id={self.env.id}, so "
                "observations must identify the task: add --env.options task_input=value (or task_input=both, to show "
                "it to the policy, too)."
            )
        collecting = self.algorithm.build().warm_iterations(self.samples_per_iteration)
        steps = (self.iterations - collecting) * self.gradient_steps[0]
        if self.scheme.gradient_lag != "async" and self.scheme.gradient_lag >= steps:
            raise SettingsError(
                f"scheme.gradient_lag={self.scheme.gradient_lag} leaves nothing to learn: the run has only {steps} "
                "gradient steps, but the first gradient is applied after as many steps as the lag. Use a smaller lag."
            )

    def kernels(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> Kernels | None:
        """The kernels that compute the experiment in portable arithmetic; None if torch's operations do. The spaces are
        those of an environment, as models see them."""
        if self.precision != "portable":
            return None
        from lockstep.algorithms.kernel_table import kernels_of  # imports Numba

        return kernels_of(self.algorithm, self.setup, observation_space, action_space)

    @property
    def setup(self) -> Setup:
        """The rest of the experiment, in the form that its algorithm receives."""
        return Setup(
            model=self.model,
            normalize=self.normalize,
            num_envs=self.env.num_envs,
            shards=self.scheme.shards,
            lag=self.scheme.lag,
            gradient_lag=self.scheme.gradient_lag,
            max_lag=self.scheme.max_lag,
            preempt=self.scheme.preempt,
            several_policies=self.env.several_policies,
            total_steps=self.total_steps,
            iterations=self.iterations,
            samples_per_iteration=self.samples_per_iteration,
        )

    def annealings(self, algorithm: Algorithm[Any]) -> dict[str, Annealing]:
        """How algorithm.anneal changes hyperparameters, by name.

        Raises:
            SettingsError: there is no such hyperparameter, or its form is wrong.
        """
        anneal, each = self.algorithm.anneal, self.samples_per_iteration
        return annealings(anneal, algorithm.hyperparameters(0.0), self.iterations * each, each) if anneal else {}

    def _check_curriculum(self) -> None:
        if self.curriculum and self.algorithm.relabels_goals:
            raise SettingsError(
                f"curriculum={self.curriculum} changes the options of environments, but algorithm.replay.hindsight "
                "computes rewards with an environment whose options do not change. Leave one of them out."
            )

    def schedule(self) -> Schedule:
        """The schedule, which says which version collects what. If timing decides, it only counts iterations and bounds
        the lag."""
        schedule = self.scheme.schedule(self.iterations)
        if type(schedule) is Schedule:
            return dataclasses.replace(schedule, by_shard=self.algorithm.replays)
        schedule.check(self.scheme.timing_decides)
        return schedule

    @property
    def envs_per_shard(self) -> int:
        return self.env.num_envs // self.scheme.shards

    @property
    def samples_per_iteration(self) -> int:
        """Agent samples that one iteration collects, on average: rollout length times environments."""
        return self.algorithm.rollout * self.env.num_envs

    @property
    def samples_per_rollout(self) -> int:
        """Agent samples in one shard's rollout."""
        return self.algorithm.rollout * self.envs_per_shard

    @property
    def gradient_steps(self) -> tuple[int, int]:
        """The gradient steps of an iteration, and the samples of each."""
        updates, samples = self.algorithm.gradient_steps(self.samples_per_iteration)
        apart = self.scheme.shards if self.scheme.gradient_lag == "async" else 1
        return updates * apart, samples // apart

    @property
    def iterations(self) -> int:
        """Iterations in the run: total_steps rounded up to whole iterations."""
        return -(-self.total_steps // self.samples_per_iteration)

    def build_model(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        precision: Precision | None = None,
    ) -> PolicyModel:
        """The initial model. precision replaces the experiment's."""
        precision = precision or self.precision
        portable = precision == "portable"

        def build(
            observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], seed: int
        ) -> PolicyModel:
            with seeded(derive_seed(seed, "global model")):  # some users' models draw from global generators
                return self.model.build(
                    observation_space,
                    action_space,
                    precision="fp32" if precision == "portable" else precision,
                    normalize_observations=self.normalize.observations,
                    observation_clip=self.normalize.clip,
                    seed=seed,
                )

        with portable_operations() if portable else contextlib.nullcontext():
            if isinstance(observation_space, PoliciesSpace):
                parts = enumerate(observation_space.parts.items())
                models = {name: build(*part, derive_seed(self.seed, "policy", place)) for place, (name, part) in parts}
                model: PolicyModel = Policies(observation_space, models, action_space)
            else:
                model = build(observation_space, action_space, self.seed)
        if not portable:
            return model
        if (kernels := self.kernels(observation_space, action_space)) is not None:
            return kernels.take(model, action_space, self.seed)
        model.portable_operations = True
        return model

    def identity(self) -> str:
        """SHA-256 of the canonical JSON of all settings."""
        return self.identities()[0]

    def identities(self) -> tuple[str, str]:
        """The identity, and the identity that earlier versions recorded, which named classes by their modules."""
        return identities_of(to_json(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes rebuild settings from JSON, like a resumed run: pickle cannot import classes of users' files.
        return from_json, (to_json(self),)

    def replace(self, **changes: object) -> Experiment:
        """The experiment with other values of some settings. A dotted name changes a part, as on the command line:
        replace(**{"algorithm.learning_rate": 1e-3, "env.num_envs": 16}).

        Raises:
            SettingsError: a setting does not exist, or its value has the wrong type.
        """
        return changed(self, changes)
