"""The common parts of Q-value policy gradient algorithms: critics learned from replay, and a policy that maximizes
them.

All losses of a gradient step use the parameters before it. So the policy uses the critics before their update, whereas
sequential implementations use the updated critics. This makes a step a single sum over shards.

With sequences (Ni et al. 2022, https://arxiv.org/abs/2110.05038), the policy and the critics have one core each. The
policy's core begins with the state that it had when the sequence was collected, as in R2D2. The critics' core does not
act, so no state is stored for it. It begins with zeros, and burn-in gives it a history.

Shape legend: n items, C critics, D dimensions of an action, T time (1, or the M steps of a sequence that are learned
from), L steps of burn-in, N steps of a return, F inputs of layers.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lockstep.algorithms.base import OptimizerConfig, ParameterGroup, Setup
from lockstep.algorithms.losses import mixed_priority
from lockstep.algorithms.offpolicy import Exploration, OffPolicy, OffPolicyConfig
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.transitions import Sequences, Transitions
from lockstep.models.actor_critic import ActorCritic, ActorCriticConfig, Recalled, Remembering
from lockstep.models.base import Networks
from lockstep.models.observations import allowed_actions

_OPTIMIZER = OptimizerConfig(eps=1e-8)
"""Adam with torch's default ε, as in the papers."""
_LARGEST_ERROR = 0.9
"""η of a sequence's priority (Kapturowski et al. 2019, section 2.3)."""


@dataclass(frozen=True)
class QPGConfig(OffPolicyConfig):
    """Settings of algorithms with action-value critics and a policy that maximizes them."""

    policies: ClassVar[tuple[str, ...]] = ()
    """Values of model.policy that the algorithm supports."""
    batch_renorm: ClassVar[bool] = False
    """Whether model.batch_renorm must be on. Otherwise it must be off, since nothing would update the statistics."""
    can_remember: ClassVar[bool] = False
    """Whether the loss takes sequences."""
    later: ClassVar[frozenset[str]] = OffPolicyConfig.later | {"unroll", "burn_in"}

    rollout: int = 16
    batch_size: int = 256
    updates: int = 64
    learning_rate: float = 3e-4
    """Step size of the critics. Higher learns faster until it becomes unstable."""
    actor_learning_rate: float = 3e-4
    """Step size of the policy. Higher follows the critics faster, including their errors."""
    anneal_learning_rate: bool = False
    """Lower all learning rates linearly to zero over total_steps."""
    optimizer: OptimizerConfig = _OPTIMIZER
    max_grad_norm: float = 1e9
    """Scale gradients of the critics and of the policy whose norm exceeds this. Lower is safer and slower."""
    target_rate: float = 0.005
    unroll: int = 0
    """M: the length of the sequences that models with a core learn from. Gradients flow back through all M steps, and
    batch_size counts sequences. A sequence begins at the first step of every rollout. Higher learns longer dependencies
    and costs time. 0 learns from single steps."""
    burn_in: int = 0
    """L: steps before these that only update the states of cores. Higher gives the critics' cores, which begin with
    zeros, a longer history, removes more of the policy's stale stored state, and costs time."""

    @property
    def sequence_steps(self) -> tuple[int, int] | None:
        return (self.burn_in, self.unroll) if self.unroll else None

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if not self.actor_learning_rate > 0:
            raise SettingsError(f"algorithm.actor_learning_rate={self.actor_learning_rate} must be positive.")
        for setting in ("unroll", "burn_in"):
            if getattr(self, setting) < 0:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must not be negative.")
        if (recurrent or self.unroll or self.burn_in) and not self.can_remember:
            raise SettingsError(
                f"algorithm={self.name} learns from single steps, which a recurrent core cannot use: use --model.core "
                "none, --algorithm.unroll 0 and --algorithm.burn-in 0, or SAC, TD3 or DDPG."
            )
        if self.burn_in and not self.unroll:
            raise SettingsError(
                f"algorithm.burn_in={self.burn_in} is the beginning of sequences, but algorithm.unroll=0 learns from "
                "single steps. Set the steps to learn from, for example --algorithm.unroll 32, or leave burn_in out."
            )
        if recurrent and not self.unroll:
            raise SettingsError(
                "A recurrent core learns from sequences, but algorithm.unroll=0. Say how long sequences are and how "
                "many a gradient step takes, for example --algorithm.unroll 32 --algorithm.burn-in 16 "
                "--algorithm.batch-size 32, or use the recipes sac-hidden and td3-hidden. For single steps: "
                "--model.core none."
            )

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        model = setup.model
        if not isinstance(model, ActorCriticConfig) or model.policy not in self.policies:
            raise SettingsError(
                f"algorithm={self.name} needs lockstep.models.ActorCriticConfig with policy "
                f"{' or '.join(map(repr, self.policies))}, but the model is {model}."
            )
        if model.uses_previous and not self.sequences:
            raise SettingsError(
                "model.previous_action_reward needs sequences, which have previous steps. Use "
                "--model.no-previous-action-reward, or --algorithm.unroll with their length."
            )
        if model.batch_renorm != self.batch_renorm:
            raise SettingsError(
                f"algorithm={self.name} needs model.batch_renorm {'on' if self.batch_renorm else 'off'}: use --model."
                f"{'' if self.batch_renorm else 'no-'}batch-renorm."
            )

    @abstractmethod
    def build(self) -> QPG[Any]:
        """The algorithm with these settings."""


QPGConfigT = TypeVar("QPGConfigT", bound=QPGConfig)


class QPG(OffPolicy[QPGConfigT]):
    """Critics and policy, each with its own loss and learning rate."""

    target_acts: ClassVar[bool] = False
    """Whether the target policy instead of the online one chooses the next action in targets."""

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The base class's hyperparameters, and `actor_learning_rate`."""
        hyper = super().hyperparameters(progress)
        rate = self.config.actor_learning_rate / self.config.learning_rate * hyper["learning_rate"]
        return {**hyper, "actor_learning_rate": rate}

    def steps_of(self, items: int) -> int:
        """The number of steps that are learned from in this many items."""
        return items * max(1, self.config.unroll)

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """The policy and the critics, at every step."""
        return (
            ParameterGroup("actor.", hyper["actor_learning_rate"]),
            ParameterGroup("critics.", hyper["learning_rate"]),
        )

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        """Uniform in the warm-up, then sampled from the policy."""
        return Exploration(samples < self.config.warmup, torch.zeros(len(environments), 0))

    def recalled(self, online: ActorCritic, target: ActorCritic, batch: Transitions | Sequences) -> Transitions:
        """Sequences as Transitions: the M steps that are learned from, with the outputs of cores as observations.
        Invalid steps have weight 0. Transitions are returned unchanged."""
        if isinstance(batch, Transitions):
            return batch
        burn_in, steps = self.config.burn_in, len(batch.action)
        extra = online.previous(batch.start, batch.prev_action, batch.prev_reward)
        begun = batch.state.new_zeros(len(batch.weight), online.critics.state_size)
        policy = _unroll(online.actor, batch, extra, batch.state, burn_in)
        values = _unroll(online.critics, batch, extra, begun, burn_in)
        allowed = None if online.actor.mask is None else allowed_actions(batch.obs)[burn_in:]
        with torch.no_grad():
            follows = _unroll(target.actor, batch, extra, batch.state, burn_in) if self.target_acts else policy
            valued = _unroll(target.critics, batch, extra, begun, burn_in)
            then = torch.arange(steps, device=policy.device).unsqueeze(1) + batch.ahead
            columns = torch.arange(len(batch.weight), device=policy.device)
            after = Recalled(
                follows[then, columns], valued[then, columns], None if allowed is None else allowed[then, columns]
            )
        return Transitions(
            obs=Recalled(policy[:steps], values[:steps], None if allowed is None else allowed[:steps]),
            action=batch.action,
            reward=batch.reward,
            discount=batch.discount,
            next_obs=after,
            weight=batch.weight * batch.valid,
            valid=batch.valid,
            noise=batch.noise,
        )


def actor_critics(model: Networks) -> tuple[ActorCritic, ActorCritic]:
    """The online model and the target model."""
    online, target = model
    assert isinstance(online, ActorCritic) and isinstance(target, ActorCritic)
    return online, target


def critic_error(q_tm1: Tensor, target_tm1: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors of critics, [C, T, n] against [T, n]: their sum over critics, and the mean absolute error,
    [T, n] each."""
    error = target_tm1 - q_tm1
    return error.square().sum(0), error.detach().abs().mean(0)


def priorities(size: Tensor, valid: Tensor) -> Tensor:
    """Absolute errors [T, n] -> the items' priorities [n]. Sequences have R2D2's."""
    return size[0] * valid[0] if len(size) == 1 else mixed_priority(size * valid, valid, _LARGEST_ERROR)


def _unroll(part: Remembering, batch: Sequences, extra: Tensor | None, state: Tensor, burn_in: int) -> Tensor:
    """Inputs of layers [M+N, n, F] after the burn-in, through which no gradient flows.

    Args:
        extra: inputs in addition to observations, [L+M+N, n, E].
        state: the core's state before the first step, [n, K].
    """

    def inputs(steps: slice, state: Tensor) -> tuple[Any, ...]:
        obs = map_structure(lambda leaf: leaf[steps], batch.obs)
        return obs, batch.start[steps], state, None if extra is None else extra[steps]

    if burn_in and part.core is not None:
        with torch.no_grad():
            _, state = part.features(*inputs(slice(0, burn_in), state))
    return part.features(*inputs(slice(burn_in, None), state))[0]
