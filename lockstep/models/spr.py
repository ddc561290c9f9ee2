"""The model of self-predictive representations (SPR): a Q-network, and a transition model that predicts its features
over the next steps. Features are the outputs of convolutions, scaled to [0, 1].

Shape legend: n items, J predicted steps, F features = C channels of H x W places, P numbers of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.config.settings import SettingsError
from lockstep.models.distributions import EpsilonGreedy
from lockstep.models.encoders import ConvNet, ObservationEncoder, Trunk
from lockstep.models.layers import Conv2d, Initialization, Linear, flatten_places, initialize, linear
from lockstep.models.q import ImplicitQHead, QHead, QModel, QModelConfig
from lockstep.models.trunk import EncoderName

_SMALLEST = 1e-5
"""Added to the range of features, which is 0 if all are equal."""


class TransitionModel(nn.Module):
    """Maps features and an action to the next features: two convolutions of 3x3, of which the first one also sees the
    action, as a channel that is 1 at every place (Schwarzer et al. 2021, appendix; without batch normalization, as in
    Dopamine).

    Args:
        places: C, H and W.
        actions: the number of actions.
    """

    def __init__(self, places: tuple[int, int, int], actions: int) -> None:
        super().__init__()
        self.places, self.actions = places, actions
        channels = places[0]
        self.hidden = Conv2d(channels + actions, channels, 3, padding=1)
        self.out = Conv2d(channels, channels, 3, padding=1)

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """[n, F], int64 [n] -> [n, F], scaled to [0, 1]"""
        channels, height, width = self.places
        x = features.view(-1, height, width, channels).permute(0, 3, 1, 2)
        taken = (action.view(-1, 1, 1, 1) == torch.arange(self.actions, device=x.device).view(-1, 1, 1)).to(x.dtype)
        x = torch.cat([x, taken.expand(-1, -1, height, width)], 1).contiguous(memory_format=torch.channels_last)
        return scaled(flatten_places(self.out(self.hidden(x).relu()).relu()))


class SPRModel(QModel):
    """A Q-network that also predicts projections of its next features.

    The projection is the first layer of each stream of the head, without noise and activation. So learning to predict
    changes the layers that estimate returns.

    Args:
        trunk: the encoder, without a core.
        head: has streams with a hidden layer.
        distribution, support: as for QModel.
        places: C, H and W of the encoder's last convolution.
    """

    def __init__(
        self,
        trunk: Trunk,
        head: QHead | ImplicitQHead,
        distribution: EpsilonGreedy,
        support: Tensor | Literal["quantiles"] | None,
        places: tuple[int, int, int],
    ) -> None:
        super().__init__(trunk, head, distribution, support)
        assert isinstance(head, QHead)
        self.transition = TransitionModel(places, head.actions)
        streams = [head.advantage] if head.value is None else [head.value, head.advantage]
        self._projections: list[Any] = [stream[0] for stream in streams]  # type: ignore[index]
        size = sum(len(layer.bias) for layer in self._projections)
        self.predictor = Linear(size, size)

    def features(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The input of the head and of the transition model, [T, B, F]."""
        features, state = super().features(obs, start, state, prev_action, prev_reward)
        return scaled(features), state

    def project(self, features: Tensor) -> Tensor:
        """[..., F] -> fp32 [..., P]"""
        x = features.float()
        return torch.cat([linear(x, layer.weight, layer.bias) for layer in self._projections], -1)

    def predict(self, features: Tensor, action: Tensor) -> Tensor:
        """Predicted projections of the features after each of several actions.

        Args:
            features: [n, F], before the first action.
            action: int64 [J, n].

        Returns:
            fp32 [J, n, P]
        """
        predicted = []
        for action_t in action:
            features = self.transition(features, action_t)
            predicted.append(features)
        return self.predictor(self.project(torch.stack(predicted)))


@dataclass(frozen=True)
class SPRModelConfig(QModelConfig):
    """A Q-network over discrete actions for SPR. The defaults are those of Schwarzer et al. 2021 for Atari."""

    encoder: EncoderName = "nature"
    dense_size: int = -1
    initialization: Literal["auto", Initialization, "fixup"] = "pytorch"
    dueling: bool = True
    noisy: bool = True
    stream_size: int = 256
    returns: Literal["expected", "categorical", "quantiles", "implicit"] = "categorical"

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        super().validate()
        if self.stream_size == 0:
            raise SettingsError(
                "model.stream_size=0 leaves out the streams' hidden layers, which SPR needs for its projection. Use "
                "--model.stream-size 256."
            )
        if self.returns == "implicit":
            raise SettingsError(
                "model.returns=implicit multiplies features by an embedding, which SPR cannot predict. Use "
                "--model.returns categorical."
            )
        if self.core != "none" or self.previous_action_reward:
            raise SettingsError(
                "SPR predicts the outputs of convolutions, so its model takes neither a core nor the previous action "
                "and reward. Use --model.core none and --model.no-previous-action-reward."
            )

    def assemble(
        self,
        trunk: Trunk,
        head: QHead | ImplicitQHead,
        distribution: EpsilonGreedy,
        support: Tensor | Literal["quantiles"] | None,
    ) -> SPRModel:
        encoder = trunk.encoder
        images = list(encoder.images or ()) if isinstance(encoder, ObservationEncoder) else []
        network = images[0] if len(images) == 1 and encoder.vectors is None else None
        if not isinstance(network, ConvNet) or network.dense is not None:
            raise SettingsError(
                "SPR predicts the outputs of convolutions, so observations must be one image, and its encoder must end "
                f"with a convolution, but model.encoder={self.encoder} with model.dense_size={self.dense_size} does "
                "not give that here. Use --model.encoder nature and --model.dense-size -1."
            )
        model = SPRModel(trunk, head, distribution, support, network.places)
        if self.initialization == "glorot":
            for added in (model.transition, model.predictor):
                initialize(added, self.initialization)
        return model


def scaled(features: Tensor) -> Tensor:
    """[..., F] -> [..., F]: the smallest feature becomes 0, the largest 1."""
    x = features.float()
    low = x.amin(-1, keepdim=True)
    return ((x - low) / (x.amax(-1, keepdim=True) - low + _SMALLEST)).to(features.dtype)
