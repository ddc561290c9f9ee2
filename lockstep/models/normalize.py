"""Running normalization of observations and rewards, as versioned state.

Statistics are sums in float64, so that shards' statistics can be added up in tree order. They are immutable: merging
makes new ones, and versions that still collect keep the old ones.

Shape legend: T time, B environments, D numbers of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.models.base import PolicyModel
from lockstep.models.observations import ObservationLayout

_EPSILON = 1e-8
"""Added to variances, so that constant numbers are not divided by zero."""


@dataclass(frozen=True)
class NormalizeConfig:
    """Running normalization. Versions and checkpoints contain its statistics."""

    observations: bool = False
    """Standardize vector observations by their running mean and standard deviation. On suits observations with mixed
    units. Images are only scaled to [0, 1]."""
    returns: bool = False
    """Divide rewards by the running standard deviation of the discounted return (no mean is subtracted). On makes other
    settings independent of the size of rewards."""
    clip: float = 10.0
    """Bound on the magnitude of normalized observations and rewards (with replay, of the sum of n rewards). Lower
    limits the effect of outliers; higher keeps more of their information."""

    needs: ClassVar[tuple[Need, ...]] = (Need(("clip",), ("normalize.observations", "normalize.returns")),)

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        if not self.clip > 0:
            raise SettingsError(f"normalize.clip={self.clip} must be positive, for example 10.")


@dataclass(frozen=True)
class RunningMoments:
    """Mean and deviation of all samples so far. Before the first sample, the mean is 0 and the deviation 1.

    The population variance is E[x^2] - E[x]^2, which loses 2 log10(|mean| / deviation) of float64's 16 digits.
    """

    sums: Tensor
    """float64 [1 + 2D]: the number of samples, their sum, their sum of squares."""

    @staticmethod
    def empty(size: int) -> RunningMoments:
        return RunningMoments(torch.zeros(1 + 2 * size, dtype=torch.float64))

    def merged(self, sums: Tensor) -> RunningMoments:
        """The moments after adding a result of batch_sums."""
        return RunningMoments(self.sums + sums)

    @property
    def count(self) -> float:
        return float(self.sums[0])

    @property
    def mean(self) -> Tensor:
        """fp32 [D]"""
        return self._moments()[0].float()

    @property
    def std(self) -> Tensor:
        """fp32 [D]"""
        if not self.count:
            return torch.ones_like(self.mean)
        # NumPy rounds square roots as IEEE 754 requires. Torch does not on every CPU, and portable runs use them, too.
        return torch.from_numpy(np.sqrt((self._moments()[1] + _EPSILON).numpy())).float()

    def _moments(self) -> tuple[Tensor, Tensor]:
        total, squares = self.sums[1:].chunk(2)
        count = max(self.count, 1.0)
        mean = total / count
        return mean, (squares / count - mean.square()).clamp(min=0.0)


def batch_sums(x: Tensor, valid: Tensor) -> Tensor:
    """The sums that RunningMoments adds up, over samples [..., D]. Only valid ones count, bool [...].

    Returns:
        float64 [1 + 2D].
    """
    rows = x.flatten(0, -2).double().masked_fill(~valid.reshape(-1, 1), 0.0)
    return torch.cat([valid.sum().double().reshape(1), rows.sum(0), rows.square().sum(0)])


def discounted_returns(reward: Tensor, done: Tensor, carry: Tensor, discount: float) -> tuple[Tensor, Tensor]:
    """The discounted return of each episode so far, R_t = discount * R_{t-1} + r_t. Its deviation scales rewards.

    Rewards divided by this deviation keep returns near one in all units of rewards. Engstrom et al. 2020
    ("Implementation matters in deep policy gradients", section 3) found it to be among the details that decide whether
    PPO works.

    Args:
        reward: [T, B], zero on reset steps.
        done: bool [T, B], True where the episode ended with this reward.
        carry: [B], R of the step before the first, zero if its episode ended there.
        discount: the algorithm's discount.

    Returns:
        R [T, B], and the carry [B] for the next rollout.
    """
    returns = torch.empty_like(reward)
    for t, (reward_t, going_t) in enumerate(zip(reward, (~done).to(reward.dtype), strict=True)):
        torch.add(reward_t, carry, alpha=discount, out=returns[t])
        carry = returns[t] * going_t
    return returns, carry


def portable_sums(x: Tensor, valid: Tensor) -> Tensor:
    """As batch_sums, in portable arithmetic: x is [T, B, D]."""
    from lockstep.kernels import returns  # which needs Numba

    sums = torch.empty(1 + 2 * x.shape[-1], dtype=torch.float64)
    returns.batch_sums(x.contiguous().numpy(), valid.contiguous().numpy(), sums.numpy())
    return sums


def portable_returns(reward: Tensor, done: Tensor, carry: Tensor, discount: float) -> tuple[Tensor, Tensor]:
    """As discounted_returns, in portable arithmetic."""
    from lockstep.kernels import returns  # which needs Numba

    found, carry = torch.empty(reward.shape), carry.clone()
    returns.discounted_returns(reward.contiguous().numpy(), done.numpy(), carry.numpy(), discount, found.numpy())
    return found, carry


@dataclass(frozen=True)
class Normalizers:
    """The normalizers of an experiment. Those that are off are None."""

    config: NormalizeConfig
    discount: float
    layout: ObservationLayout | None
    observations: RunningMoments | None
    returns: RunningMoments | None
    portable: bool = False
    """Whether sums are computed in portable arithmetic."""

    @staticmethod
    def initial(
        config: NormalizeConfig, discount: float, observation_space: gymnasium.Space[Any], *, portable: bool = False
    ) -> Normalizers:
        """Statistics before the first sample, which only clip observations and rewards."""
        layout = None
        if config.observations:
            layout = ObservationLayout.of(observation_space)
            layout = layout if layout.vector_size else None
        return Normalizers(
            config,
            discount,
            layout,
            RunningMoments.empty(layout.vector_size) if layout else None,
            RunningMoments.empty(1) if config.returns else None,
            portable,
        )

    def apply(self, model: PolicyModel) -> None:
        """Make a model normalize its observations with these statistics."""
        if self.observations is not None:
            model.set_observation_statistics(self.observations.mean, self.observations.std)

    @property
    def normalizes_observations(self) -> bool:
        """Whether apply changes a model."""
        return self.observations is not None

    def scale_rewards(self, reward: Tensor, obs: Any = None, deviation: Tensor | None = None) -> Tensor:
        """fp32 [T, B] for the learner: divided by the deviation of returns, and clipped.

        Args:
            reward: [T, B], raw.
            obs: the observations [T, B, ...]. With several policies, they tell which policy earned the rewards.
            deviation: the deviation as a tensor on the rewards' device if that is a GPU, since GPUs divide exactly only
                by tensors.
        """
        del obs
        if self.returns is None:
            return reward
        by = float(self.returns.std) if deviation is None else deviation
        return (reward / by).clamp(-self.config.clip, self.config.clip)

    def rollout_sums(self, rollout: Rollout, return_carry: Tensor) -> Tensor:
        """The float64 vector that a shard's rollout adds to the statistics. Call this once per rollout: it updates
        return_carry, fp32 [B], the discounted returns of unfinished episodes."""
        parts = []
        steps = rollout.reward.shape[0]
        sums_of, returns_of = (portable_sums, portable_returns) if self.portable else (batch_sums, discounted_returns)
        if self.layout is not None:
            parts.append(sums_of(self.layout.vector(rollout.obs)[:steps], rollout.valid))
        if self.returns is not None:
            done = rollout.terminated | rollout.truncated
            returns, carry = returns_of(rollout.reward, done, return_carry, self.discount)
            return_carry.copy_(carry)
            parts.append(sums_of(returns.unsqueeze(-1), rollout.valid))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def merged(self, sums: Tensor) -> Normalizers:
        """The normalizers after adding the total of all shards' rollout_sums."""
        observations, returns = self.observations, self.returns
        if observations is None and returns is None:
            return self
        size = observations.sums.numel() if observations else 0
        return replace(
            self,
            observations=observations.merged(sums[:size]) if observations else None,
            returns=returns.merged(sums[size:]) if returns else None,
        )

    def state(self) -> dict[str, Tensor]:
        """The statistics as named tensors."""
        moments = {"observations": self.observations, "returns": self.returns}
        return {name: m.sums for name, m in moments.items() if m is not None}

    def loaded(self, state: dict[str, Tensor]) -> Normalizers:
        """The normalizers with the statistics of a result of state."""
        assert state.keys() == self.state().keys(), f"{sorted(state)} are not {sorted(self.state())}"
        return replace(self, **{name: RunningMoments(sums) for name, sums in state.items()})
