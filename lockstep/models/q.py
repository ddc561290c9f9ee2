"""Models that estimate the value of every action: Q-networks, with dueling streams, distributions of returns and noisy
layers.

Shape legend: T time, B environments, F features, A actions, K numbers with which a head describes an action's return,
E cosines of an embedding, Z numbers of noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError
from lockstep.models.base import ModelOutput, PolicyModel
from lockstep.models.distributions import EpsilonGreedy
from lockstep.models.encoders import Trunk, take_observation_statistics
from lockstep.models.gaussian import standard_normal
from lockstep.models.layers import initialize, linear, reproducible_initialization
from lockstep.models.observations import ObservationLayout, allowed_actions
from lockstep.models.trunk import PRECISIONS, TrunkConfig, acting_copy, previous_features


def midpoints(count: int, device: torch.device | None = None) -> Tensor:
    """The midpoints of K equal parts of [0, 1], which are the fractions of K quantiles: [K]."""
    return (torch.arange(count, device=device) + 0.5) / count


class NoisyLinear(nn.Module):
    """A linear layer with noise of learned size on its weights (Fortunato et al. 2018, factorised noise). Without noise
    it is an ordinary linear layer.
    """

    def __init__(self, in_features: int, out_features: int, sigma: float = 0.5):
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), sigma * bound))
        self.noise_numbers = in_features + out_features
        self.weight_noise: Tensor
        self.register_buffer("weight_noise", torch.zeros(out_features, in_features), persistent=False)
        self.bias_noise: Tensor
        self.register_buffer("bias_noise", torch.zeros(out_features), persistent=False)

    def disturb(self, noise: Tensor) -> None:
        """Set the noise [noise_numbers] of inputs and outputs."""
        into, out = noise.split((self.weight.shape[1], self.weight.shape[0]))
        torch.outer(out, into, out=self.weight_noise)
        self.bias_noise.copy_(out)

    def forward(self, x: Tensor) -> Tensor:
        """fp32 [..., F] -> [..., out_features]"""
        weight = torch.addcmul(self.weight, self.weight_sigma, self.weight_noise)
        return linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.bias_noise))


class QHead(nn.Module):
    """Maps features to K numbers per action that describe its return, in fp32. They are its expectation, logits of
    atoms, or quantiles.

    With dueling streams (Wang et al. 2016), an action's numbers are the state's value plus the action's advantage,
    minus the mean advantage of all actions.
    """

    def __init__(
        self,
        in_features: int,
        actions: int,
        numbers: int,
        *,
        dueling: bool,
        noisy: bool,
        stream_size: int,
        noisy_sigma: float = 0.5,
    ):
        super().__init__()
        self.actions, self.numbers = actions, numbers
        linear = partial(NoisyLinear, sigma=noisy_sigma) if noisy else nn.Linear

        def stream(size: int) -> nn.Module:
            if not stream_size:
                return linear(in_features, size)
            return nn.Sequential(linear(in_features, stream_size), nn.ReLU(), linear(stream_size, size))

        self.advantage = stream(actions * numbers)
        self.value = stream(numbers) if dueling else None

    def forward(self, features: Tensor) -> Tensor:
        """[T, B, F] -> [T, B, A, K]"""
        features = features.float()
        advantage = self.advantage(features).unflatten(-1, (self.actions, self.numbers))
        if self.value is None:
            return advantage
        return self.value(features).unsqueeze(-2) + advantage - advantage.mean(-2, keepdim=True)


class ImplicitQHead(nn.Module):
    """Maps features to quantiles of every action's return at any fractions (IQN, Dabney et al. 2018,
    https://arxiv.org/abs/1806.06923, section 3.1). The features are multiplied by an embedding of the fraction, φ(τ) =
    relu(W cos(π i τ) + b) for i from 0 to E - 1.

    Args:
        in_features: F.
        head: maps F features to one number per action.
        fractions: K, the number of default fractions, which are the midpoints of K equal parts.
        cosines: E.
    """

    def __init__(self, in_features: int, head: QHead, fractions: int, cosines: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(cosines, in_features), head
        self.midpoints: Tensor
        self.register_buffer("midpoints", midpoints(fractions), persistent=False)
        self.multiples: Tensor
        self.register_buffer("multiples", math.pi * torch.arange(cosines), persistent=False)

    def forward(self, features: Tensor, tau: Tensor | None = None) -> Tensor:
        """[T, B, F], fractions [T, B, K] in (0, 1) -> [T, B, A, K]"""
        tau = self.midpoints if tau is None else tau
        embedded = F.relu(self.embedding((tau.unsqueeze(-1) * self.multiples).cos()))
        return self.head(features.float().unsqueeze(-2) * embedded).squeeze(-1).transpose(-1, -2)


class QModel(PolicyModel):
    """Encoder, core and a head of action values.

    Args:
        trunk: encoder and core.
        head: maps features to K numbers per action.
        support: the meaning of the K numbers. None means one expected value, a tensor [K] means logits of these atoms,
            and "quantiles" means quantiles.
    """

    noise_at_every_step = True

    def __init__(
        self,
        trunk: Trunk,
        head: QHead | ImplicitQHead,
        distribution: EpsilonGreedy,
        support: Tensor | Literal["quantiles"] | None,
        *,
        uses_previous: bool = False,
    ) -> None:
        super().__init__()
        self.trunk, self.head, self.distribution = trunk, head, distribution
        self._encode, self._mask = distribution.encode, distribution.mask if distribution.masked else None
        self.uses_previous, self.state_size = uses_previous, trunk.state_size
        self.quantiles, self.implicit = isinstance(support, str), isinstance(head, ImplicitQHead)
        self.atoms: Tensor | None
        self.register_buffer("atoms", support if isinstance(support, Tensor) else None, persistent=False)
        self._noisy = [module for module in self.modules() if isinstance(module, NoisyLinear)]
        self.noise_numbers = sum(layer.noise_numbers for layer in self._noisy)
        self.noisy_trunk = any(isinstance(module, NoisyLinear) for module in trunk.modules())

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        """Returns the expected returns of all actions as the policy's parameters, and the highest of them as the
        value."""
        numbers, state = self.describe(obs, start, state, prev_action, prev_reward)
        q = self.choices(numbers, obs)
        return ModelOutput(q, q.amax(-1)), state

    def describe(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Like forward, but returns the head's numbers [T, B, A, K]."""
        features, state = self.features(obs, start, state, prev_action, prev_reward)
        return self.head(features), state

    def features(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Like forward, but returns the input of the head, [T, B, F]."""
        return self.trunk(obs, start, state, self.extra(start, prev_action, prev_reward))

    def extra(self, start: Tensor, prev_action: Tensor | None, prev_reward: Tensor | None) -> Tensor | None:
        """Further inputs of the trunk, [T, B, E], if it takes the previous action and reward."""
        return previous_features(self._encode, prev_action, prev_reward, start) if self.uses_previous else None

    def expected(self, numbers: Tensor) -> Tensor:
        """[..., A, K] -> [..., A]"""
        if self.atoms is not None:
            return (numbers.softmax(-1) * self.atoms).sum(-1)
        return numbers.mean(-1) if self.quantiles else numbers.squeeze(-1)

    def choices(self, numbers: Tensor, obs: Any) -> Tensor:
        """[T, B, A, K] -> the expected returns by which actions are chosen, [T, B, A]. Actions that the mask in obs
        forbids get less than any return. A mask that forbids all actions, as in an episode's last observation, is
        ignored."""
        q = self.expected(numbers)
        if self._mask is None:
            return q
        allowed = allowed_actions(obs)
        return self._mask(q, allowed | ~allowed.any(-1, keepdim=True))

    def set_noise(self, uniform: Tensor | None) -> None:
        """Set the noise of noisy layers from Z uniform numbers in (0, 1); None removes it."""
        if uniform is None:
            for layer in self._noisy:
                layer.disturb(layer.bias.new_zeros(layer.noise_numbers))
            return
        normal = standard_normal(uniform)
        scaled = normal.sign() * normal.abs().sqrt()
        for layer, noise in zip(self._noisy, scaled.split([layer.noise_numbers for layer in self._noisy]), strict=True):
            layer.disturb(noise)

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        take_observation_statistics(self, mean, std)

    def for_acting(self) -> QModel:
        acting = acting_copy(self)
        acting.set_noise(None)
        return acting


@dataclass(frozen=True)
class QModelConfig(TrunkConfig):
    """A Q-network over discrete actions."""

    has_policy_and_value: ClassVar[bool] = False
    later: ClassVar[frozenset[str]] = TrunkConfig.later | {"noisy_sigma", "layer_norm"}
    needs: ClassVar[tuple[Need, ...]] = (
        Need(("noisy_sigma",), ("model.noisy",)),
        Need(("v_min", "v_max"), ("model.returns",), ("categorical",)),
        Need(("numbers",), ("model.returns",), ("categorical", "quantiles", "implicit")),
        Need(("cosines",), ("model.returns",), ("implicit",)),
    )

    dueling: bool = False
    """Estimate the state's value and each action's advantage in separate streams. On generalizes over actions."""
    noisy: bool = False
    """Explore by learned noise in the head's weights instead of ε. On adapts exploration to the state and costs
    time."""
    stream_size: int = 0
    """Hidden units of each stream of the head; 0 makes the head linear. More fit harder functions and cost time."""
    returns: Literal["expected", "categorical", "quantiles", "implicit"] = "expected"
    """What is learned about the return: its expectation (DQN), the probabilities of atoms (C51), quantiles (QR-DQN), or
    quantiles at drawn fractions (IQN)."""
    numbers: int = 51
    """Number of atoms or quantiles; with implicit quantiles, the number of those whose mean chooses actions. More
    describe returns more finely and cost time."""
    cosines: int = 64
    """E: cosines in the embedding of an implicit quantile's fraction. More distinguish finer fractions and cost
    time."""
    v_min: float = -10.0
    """Lowest atom of a categorical return. If it is too high, bad returns look alike."""
    v_max: float = 10.0
    """Highest atom. If it is too low, good returns look alike."""
    noisy_sigma: float = 0.5
    """σ₀: the initial size of the noise in noisy layers, as a multiple of 1 / √inputs. Higher explores more at first
    and disturbs learning more."""
    layer_norm: bool = False
    """Normalize every layer of the encoder before its activation (Ba et al. 2016, arXiv:1607.06450); convolutions over
    the channels at each place. On keeps values from diverging, which PQN needs, and costs time."""

    @property
    def normalizes_layers(self) -> bool:
        return self.layer_norm

    def build(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        precision: Literal["bf16", "fp32"],
        normalize_observations: bool,
        seed: int,
        observation_clip: float = 10.0,
    ) -> QModel:
        self.validate()
        if not isinstance(action_space, spaces.Discrete):
            remedy = "Use PPO, which takes actions with several parts."
            if isinstance(action_space, spaces.Box):
                remedy = "Use an environment with Discrete actions, or an algorithm for continuous ones."
            elif isinstance(action_space, spaces.MultiDiscrete | spaces.MultiBinary):
                remedy = "Use PPO, which takes these actions, or wrap the environment so that one number counts all."
            raise SettingsError(f"A Q-network needs Discrete actions, but the action space is {action_space}. {remedy}")
        layout = ObservationLayout.of(observation_space)
        distribution = self.build_distribution(action_space, masked=layout.mask_size > 0)
        layout.check_mask(action_space, distribution.num_logits)
        extra = distribution.encoded_size + 1 if self.previous_action_reward else 0
        dtype = PRECISIONS[precision]
        support: Tensor | Literal["quantiles"] | None = None
        if self.returns == "categorical":
            support = torch.linspace(self.v_min, self.v_max, self.numbers)
        elif self.returns != "expected":
            support = "quantiles"
        with reproducible_initialization(seed):
            encoder = self.build_encoder(
                observation_space, dtype=dtype, normalize=normalize_observations, clip=observation_clip
            )
            trunk = Trunk(encoder, self.build_core, extra_features=extra, dtype=dtype)
            head: QHead | ImplicitQHead = QHead(
                trunk.out_features,
                int(action_space.n),
                self.numbers if self.returns in ("categorical", "quantiles") else 1,
                dueling=self.dueling,
                noisy=self.noisy,
                stream_size=self.stream_size,
                noisy_sigma=self.noisy_sigma,
            )
            if self.returns == "implicit":
                assert isinstance(head, QHead)
                head = ImplicitQHead(trunk.out_features, head, self.numbers, self.cosines)
            if self.initialization == "glorot":
                initialize(head, self.initialization)
            return self.assemble(trunk, head, distribution, support)

    def assemble(
        self,
        trunk: Trunk,
        head: QHead | ImplicitQHead,
        distribution: EpsilonGreedy,
        support: Tensor | Literal["quantiles"] | None,
    ) -> QModel:
        """The model that consists of these parts. Override this to add others."""
        return QModel(trunk, head, distribution, support, uses_previous=self.previous_action_reward)

    def build_distribution(self, action_space: spaces.Discrete, *, masked: bool) -> EpsilonGreedy:
        """The distribution that chooses actions by their values. Override this to explore by another rule than ε.

        Args:
            masked: whether the environment forbids actions.
        """
        return EpsilonGreedy(action_space, masked=masked)

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        super().validate()
        for name, least in (("stream_size", 0), ("numbers", 1), ("cosines", 1)):
            if getattr(self, name) < least:
                raise SettingsError(f"model.{name}={getattr(self, name)} must be at least {least}.")
        if not self.noisy_sigma > 0:
            raise SettingsError(f"model.noisy_sigma={self.noisy_sigma} must be above 0, for example 0.5.")
        if self.returns == "categorical" and self.numbers < 2:
            raise SettingsError(f"model.numbers={self.numbers}: categorical returns need at least 2 atoms, such as 51.")
        if self.returns == "categorical" and not self.v_min < self.v_max:
            raise SettingsError(f"model.v_min={self.v_min} must be below model.v_max={self.v_max}.")
