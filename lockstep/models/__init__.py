"""Models: the standard model, and parts from which others can be built."""

from lockstep.models.action_spaces import Joint, make_distribution
from lockstep.models.actor_critic import ActorCritic, ActorCriticConfig
from lockstep.models.base import ActionDistribution, ModelConfig, ModelOutput, PolicyModel
from lockstep.models.core import GRU, LSTM, Core, MinGRU, RecurrentCore
from lockstep.models.distributions import Categorical, Distribution
from lockstep.models.encoders import MLP, ConvNet, NatureCNN, ObservationEncoder, SimpleConvNet, Trunk
from lockstep.models.gaussian import Gaussian
from lockstep.models.layers import reproducible_initialization
from lockstep.models.observations import ObservationLayout
from lockstep.models.policy import PolicyHead, StandardModel, StandardModelConfig, ValueHead
from lockstep.models.q import NoisyLinear, QHead, QModel, QModelConfig
from lockstep.models.resnet import ImpalaResNet
from lockstep.models.spr import SPRModel, SPRModelConfig
from lockstep.models.transformer import Transformer
from lockstep.models.trunk import TrunkConfig

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "ActionDistribution",
    "ActorCritic",
    "ActorCriticConfig",
    "Categorical",
    "ConvNet",
    "Core",
    "Distribution",
    "Gaussian",
    "ImpalaResNet",
    "Joint",
    "MinGRU",
    "ModelConfig",
    "ModelOutput",
    "NatureCNN",
    "NoisyLinear",
    "ObservationEncoder",
    "ObservationLayout",
    "PolicyHead",
    "PolicyModel",
    "QHead",
    "QModel",
    "QModelConfig",
    "RecurrentCore",
    "SPRModel",
    "SPRModelConfig",
    "SimpleConvNet",
    "StandardModel",
    "StandardModelConfig",
    "Transformer",
    "Trunk",
    "TrunkConfig",
    "ValueHead",
    "make_distribution",
    "reproducible_initialization",
]
