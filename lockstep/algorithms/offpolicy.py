"""The common parts of algorithms that learn from replay: settings, and the base class.

Shape legend: B environments, N parameters, X numbers that control how an environment explores.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.base import Algorithm, AlgorithmConfig, Exploration, Setup
from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError, Steps
from lockstep.models.base import PolicyModel
from lockstep.models.gaussian import standard_normal


@dataclass(frozen=True)
class ReplayConfig:
    """What the replay memory stores, and how items are drawn from it."""

    capacity: Steps = 1_000_000
    """Steps that the memory holds, of all environments together. More keep rare experience longer and cost memory."""
    prioritized: bool = False
    """Draw items in proportion to a power of their last error (Schaul et al. 2016) instead of uniformly. On learns more
    from each sample if only few are informative, and costs time."""
    alpha: float = 0.6
    """Exponent of priorities: 0 is uniform, 1 fully proportional. Higher repeats surprising items more often."""
    beta: float = 0.4
    """Exponent of the importance weights at the start of training. Higher corrects more of the bias of prioritized
    draws, with more variance."""
    beta_end: float = 1.0
    """The same exponent at the end of training. It changes linearly over total_steps. Higher has less bias and more
    variance."""
    first_priority: Literal["largest", "error"] = "largest"
    """Priority of new items: the largest so far, or that of the error of the values by which actions were chosen
    (Horgan et al. 2018). largest learns from nearly every step at least once; error prefers surprising steps from the
    beginning, which matters where most steps are drawn at most once. error is for dqn, drq and r2d2, without
    categorical returns."""
    store_frames: bool = True
    """Store each frame of stacked images once and rebuild the stacks when they are drawn. On takes a quarter of the
    memory for stacks of four. When the memory is full, the oldest few steps cannot be drawn because their stacks are
    incomplete, so draws differ from those with this off."""

    hindsight: int = 0
    """k: of k + 1 items, k get a goal that was reached later in their episode instead of the desired one (HER,
    Andrychowicz et al. 2017, with k = 4). Higher learns from more successes, but from fewer items with the desired
    goal. For goal-conditioned environments; 0 switches it off."""
    recency: float = 1.0
    """η of ERE (Wang and Ross 2019, with η = 0.996): gradient step k of the K in an iteration draws from the newest
    c_k = C η^(1000 k / K) steps, where C is the capacity. η rises to 1 over total_steps. Lower learns more from new
    steps; 1 switches it off."""
    recency_least: Steps = 5_000
    """The smallest number of newest steps to which recency narrows a draw. Lower restricts the last updates of an
    iteration to the newest steps."""
    slack: float = 0.5
    """With lag async: the ratio of gradient steps to samples since the warm-up stays within a factor of 1 + slack of
    the ratio set by `updates`. Higher makes collectors and learners wait less for each other, and lets hardware affect
    the result more; with 0 the ratio is exact."""
    data: str = ""
    """Transitions that fill the replay memory before training: an .npz file, or a Minari dataset as minari:ID. More
    numerous and more varied ones give better initial values. New steps overwrite them in time."""
    data_digest: str = ""
    """SHA-256 of these transitions, computed when the run starts."""
    checkpoint: bool = True
    """Write the replay memory into checkpoints, so that a resumed run continues exactly. Off saves disk space and time.
    A resumed run then starts with an empty memory and collects for as long as the warm-up took before it learns again.
    Its result differs, and can be neither verified nor replayed."""

    later: ClassVar[frozenset[str]] = frozenset({"data", "data_digest", "first_priority"})
    needs: ClassVar[tuple[Need, ...]] = (
        Need(("alpha", "beta", "beta_end", "first_priority"), ("algorithm.replay.prioritized",)),
        Need(("recency_least",), ("algorithm.replay.recency",), lambda recency: recency < 1, "below 1"),
        Need(("data_digest",), ("algorithm.replay.data",)),
        Need(("slack",), ("scheme.lag",), ("async",)),
    )

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        if self.capacity < 1:
            raise SettingsError(f"algorithm.replay.capacity={self.capacity} must be at least 1, for example 100000.")
        for setting in ("alpha", "beta", "beta_end"):
            if not 0 <= getattr(self, setting) <= 1:
                raise SettingsError(f"algorithm.replay.{setting}={getattr(self, setting)} must be between 0 and 1.")
        if self.hindsight < 0:
            raise SettingsError(f"algorithm.replay.hindsight={self.hindsight} must be 0 (off) or more, for example 4.")
        if not self.slack >= 0:
            raise SettingsError(f"algorithm.replay.slack={self.slack} must be at least 0, for example 0.5.")
        if not 0 < self.recency <= 1 or self.recency_least < 1:
            raise SettingsError(
                f"algorithm.replay.recency={self.recency} must be above 0 and at most 1 (which is off), and "
                f"recency_least={self.recency_least} must be at least 1. Wang and Ross used 0.996 and 5000."
            )
        if self.recency < 1 and self.prioritized:
            raise SettingsError(
                f"algorithm.replay.recency={self.recency} draws uniformly from the newest steps, but "
                "algorithm.replay.prioritized draws by priority from all: choose one of them."
            )


@dataclass(frozen=True)
class OffPolicyConfig(AlgorithmConfig):
    """Settings of algorithms that learn from replay."""

    replays: ClassVar[bool] = True
    values_actions: ClassVar[bool] = False
    """Whether the policy's parameters are the values of actions, and the model's value is the highest of them, so that
    replay.first_priority may be error."""

    rollout: int = 4
    """Steps per environment and iteration. Longer lowers the overhead of an iteration, shorter updates more often."""
    batch_size: int = 32
    """Items (transitions or sequences) in each minibatch. More make gradient steps less noisy and slower."""
    updates: int = 1
    """Gradient steps per iteration. Each collected step is drawn updates * batch_size / (rollout * num_envs) times on
    average. More learn faster per sample, until they overfit the replay memory."""
    warmup: Steps = 10_000
    """Steps, of all environments together, that are collected with random actions before learning begins. More make the
    first data more varied and delay learning."""
    n_step: int = 1
    """Steps after which a return is bootstrapped from a value. More propagate rewards faster, but have more variance
    and the bias of old actions."""
    target_period: int = 1
    """Gradient steps between updates of the target network. More make learning more stable and slower."""
    target_rate: float = 1.0
    """Share of the distance by which the target network moves towards the model, every target_period gradient steps; 1
    copies the model. Lower makes learning more stable and slower."""
    replay: ReplayConfig = ReplayConfig()

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        for setting in ("batch_size", "updates", "n_step", "target_period"):
            if getattr(self, setting) < 1:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be at least 1.")
        if self.warmup < 0:
            raise SettingsError(f"algorithm.warmup={self.warmup} must not be negative.")
        if not 0 < self.target_rate <= 1:
            raise SettingsError(f"algorithm.target_rate={self.target_rate} must be above 0 and at most 1.")
        self.replay.validate()

    @property
    def relabels_goals(self) -> bool:
        return self.replay.hindsight > 0

    @property
    def keeps_policy(self) -> bool:
        return self.replay.prioritized and self.replay.first_priority == "error"

    def first_errors(
        self, value: np.ndarray, reward: np.ndarray, discount: np.ndarray, next_value: np.ndarray, valid: np.ndarray
    ) -> np.ndarray:
        """Errors of new items [n], if replay.first_priority is error: what the loss would return as priorities.

        Args:
            value: fp32 [M, n], the values of the actions of the M steps that an item learns from.
            reward: fp32 [M, n], the returns until a value is bootstrapped.
            discount: fp32 [M, n], the factor of that value.
            next_value: fp32 [M, n], that value.
            valid: bool [M, n], which steps count.
        """
        return (reward + discount * next_value - value)[0]

    def require_defaults(self, *settings: str, why: str) -> None:
        """Raise SettingsError if one of these settings, which an algorithm does not use, was changed."""
        for setting in settings:
            if getattr(self, setting) != getattr(type(self), setting):
                raise SettingsError(f"algorithm.{setting} has no effect with algorithm={self.name}, which has {why}")

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        if setup.several_policies:
            raise SettingsError(
                f"algorithm={self.name} learns from replay and trains one policy, but env.policies makes several. Use "
                "PPO, A2C, IMPALA or APPO, or --env.policies shared."
            )
        shards, environments = setup.shards, setup.num_envs
        if self.batch_size % shards:
            raise SettingsError(
                f"algorithm.batch_size={self.batch_size} cannot be divided over scheme.shards={shards}, each of which "
                f"draws an equal share. Use --algorithm.batch-size {max(1, round(self.batch_size / shards)) * shards}."
            )
        least = environments * (self.rollout + self.item_steps + 8)
        if self.replay.capacity < least:
            raise SettingsError(
                f"algorithm.replay.capacity={self.replay.capacity} is too small for {environments} environments, "
                f"rollouts of {self.rollout} steps and items of {self.item_steps}: it needs at least {least}."
            )
        if self.future_steps > self.n_step or (self.future_steps and (self.replay.hindsight or self.sequences)):
            raise SettingsError(
                f"algorithm={self.name} learns from {self.future_steps} next steps of each item (future_steps), so "
                f"algorithm.n_step={self.n_step} must be at least as many, without hindsight and sequences. Use "
                f"--algorithm.n-step {max(self.future_steps, self.n_step)} and --algorithm.replay.hindsight 0."
            )
        if self.replay.hindsight and (self.sequences or self.item_steps != 1):
            raise SettingsError(
                f"algorithm.replay.hindsight={self.replay.hindsight} gives single steps other goals, but items span "
                f"{self.item_steps} steps here. Use --algorithm.n-step 1, and an algorithm without sequences."
            )
        if self.keeps_policy and not self.values_actions:
            raise SettingsError(
                "algorithm.replay.first_priority=error needs an algorithm that chooses actions by their values, which "
                f"algorithm={self.name} does not. Use --algorithm.replay.first-priority largest."
            )
        if self.keeps_policy and setup.normalize.returns:
            raise SettingsError(
                "algorithm.replay.first_priority=error compares values with raw rewards, but normalize.returns scales "
                "them. Use --algorithm.replay.first-priority largest, or --no-normalize.returns."
            )
        if self.keeps_policy and self.replay.data:
            raise SettingsError(
                "algorithm.replay.first_priority=error needs the values by which actions were chosen, which "
                "algorithm.replay.data does not contain. Use --algorithm.replay.first-priority largest."
            )
        if self.replay.recency < 1 and self.replay.recency_least <= environments:
            raise SettingsError(
                f"algorithm.replay.recency_least={self.replay.recency_least} must be above env.num_envs="
                f"{environments}, so that two steps of each environment can be drawn. One of them may be a "
                "reset. Wang and Ross used 5000."
            )
        if self.replay.recency < 1 and self.sequences:
            raise SettingsError(
                f"algorithm.replay.recency={self.replay.recency} prefers recent steps, but algorithm={self.name} draws "
                "sequences: use --algorithm.replay.recency 1."
            )
        collecting = self.build().warm_iterations(setup.samples_per_iteration)
        if collecting >= setup.iterations:
            raise SettingsError(
                f"total_steps={setup.total_steps} leaves no time for learning: algorithm.warmup={self.warmup}, with "
                f"items of {self.item_steps} step{'s' * (self.item_steps > 1)}, takes the first {collecting} "
                f"iterations, and the run has {setup.iterations}. Lower --algorithm.warmup, or raise --total-steps."
            )
        if setup.lag == "async" and setup.max_lag == 0:
            raise SettingsError(
                "scheme.max_lag=0 with replay cannot work: an iteration that takes no rollout would make those in "
                "flight too old. Use --scheme.max-lag 1 or more, or --scheme.lag 0."
            )
        if setup.preempt < 1:
            raise SettingsError(
                f"scheme.preempt={setup.preempt:g} cuts rollouts, but replay needs whole ones. Leave it out; with "
                "--scheme.lag async an iteration does not wait for shards either."
            )
        if setup.lag != "async" and self.replay.slack != ReplayConfig.slack:
            raise SettingsError(
                f"algorithm.replay.slack={self.replay.slack} only applies with --scheme.lag async; with "
                f"scheme.lag={setup.lag} the ratio of gradient steps to samples is exact. Leave it out."
            )

    def warnings(self, setup: Setup) -> Iterator[str]:
        """Also warns if no sequence learns from some of the steps."""
        yield from super().warnings(setup)
        _, learned = self.sequence_steps or (0, self.rollout)
        if learned < self.rollout:
            yield (
                f"A sequence begins with each rollout of {self.rollout} steps (algorithm.rollout) and learns from "
                f"{learned} steps (algorithm.unroll), so {self.rollout - learned} of every {self.rollout} steps are "
                f"never learned from. Use --algorithm.rollout {learned}, or --algorithm.unroll {self.rollout}."
            )

    def gradient_steps(self, samples: int) -> tuple[int, int]:
        _, learned = self.sequence_steps or (0, 1)
        return self.updates, self.batch_size * learned

    @property
    def resumes_exactly(self) -> bool:
        return self.replay.checkpoint

    @property
    def sequence_steps(self) -> tuple[int, int] | None:
        """If minibatches hold sequences: the steps of burn-in, and the steps that are learned from. None if they hold
        single steps, which a recurrent core cannot learn from."""
        return None

    @property
    def future_steps(self) -> int:
        """J: minibatches also hold the actions of an item's first J steps and the observations after them. At most
        n_step, and 0 with sequences."""
        return 0

    @property
    def sequences(self) -> bool:
        """Whether minibatches hold sequences."""
        return self.sequence_steps is not None

    @property
    def item_steps(self) -> int:
        """Steps from the first observation of an item to its last."""
        burn_in, learned = self.sequence_steps or (0, 1)
        return burn_in + learned + self.n_step - 1

    @abstractmethod
    def build(self) -> OffPolicy[Any]:
        """The algorithm with these settings."""


def off_policy(config: AlgorithmConfig) -> OffPolicyConfig:
    """The settings of an algorithm that learns from replay."""
    assert isinstance(config, OffPolicyConfig), f"{config.name} does not learn from replay"
    return config


def drifting(noise: Tensor, last: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Drifting noise: x_t = (1 - θ) x_{t-1} + sqrt(1 - (1 - θ)²) n_t, where n_t are the normal quantiles of the given
    noise. It is an Ornstein-Uhlenbeck process in steps of 1 (Uhlenbeck and Ornstein 1930), scaled so that each x_t is
    standard normal for any θ.

    Args:
        noise: [T, B, N], uniform in (0, 1).
        last: [B, N], x before the first step.
        theta: θ, above 0 and at most 1.

    Returns:
        Uniform numbers [T, B, N] whose normal quantiles are x, and the last x.
    """
    fresh = standard_normal(noise) * math.sqrt(1 - (1 - theta) ** 2)
    drifted = torch.empty_like(fresh)
    for t, fresh_t in enumerate(fresh):
        last = torch.add(fresh_t, last, alpha=1 - theta, out=drifted[t])
    return torch.special.ndtr(drifted), last.clone()


OffPolicyConfigT = TypeVar("OffPolicyConfigT", bound=OffPolicyConfig)


class OffPolicy(Algorithm[OffPolicyConfigT]):
    """Learns from replay. Its loss takes Networks, and Transitions or Sequences."""

    has_target: ClassVar[bool] = True

    def __init__(self, config: OffPolicyConfigT) -> None:
        super().__init__(config)
        self.weighted = config.replay.prioritized

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The base class's hyperparameters, and `beta` and `recency` if they are used."""
        replay = self.config.replay
        if replay.recency < 1:
            weights = {"recency": replay.recency + (1 - replay.recency) * progress}
            return {**super().hyperparameters(progress), **weights}
        weights = {"beta": replay.beta + (replay.beta_end - replay.beta) * progress} if self.weighted else {}
        return {**super().hyperparameters(progress), **weights}

    @property
    def update_period(self) -> int:
        """The period after which the loss runs the same kernels again, so that one CUDA graph serves all updates whose
        numbers agree modulo it. If it is above 1, the loss may branch on hyper["update"] modulo it. In a graph,
        hyper["update"] is only correct modulo the period, and hyper["number"] is the true number, as a tensor."""
        return 1

    @property
    def bootstraps(self) -> bool:
        return self.config.keeps_policy

    def noise_numbers(self, model: PolicyModel, items: int) -> int:
        """Z: how many uniform numbers the loss of a slice consumes."""
        return 0

    def warm_iterations(self, samples_per_iteration: int) -> int:
        """The iterations until the warm-up is over and the first item can be drawn."""
        config = self.config
        return max(-(-config.item_steps // config.rollout), -(-config.warmup // samples_per_iteration))

    def updates_in(self, iteration: int, samples_per_iteration: int) -> int:
        """The number of gradient steps in an iteration."""
        return self.config.updates if iteration >= self.warm_iterations(samples_per_iteration) else 0

    def updates_before(self, iteration: int, samples_per_iteration: int) -> int:
        """The number of gradient steps before an iteration."""
        return self.config.updates * max(0, iteration - self.warm_iterations(samples_per_iteration))

    def following(self, updates: int) -> float:
        """The share of the distance by which the target network moves towards the model after this many gradient steps
        of the run: 0 does not move it, 1 copies the model."""
        return self.config.target_rate if updates % self.config.target_period == 0 else 0.0

    def follow(self, online: Tensor, target: Tensor, updates: int) -> None:
        rate = self.following(updates)
        if rate == 1.0:
            target.copy_(online)
        elif rate:
            target.lerp_(online, rate)

    @abstractmethod
    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        """How environments explore in a rollout; the arguments are those of Algorithm.exploration."""
