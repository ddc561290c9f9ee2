"""Q-networks with an LSTM or a GRU between encoder and streams, with the bits of torch's replaced operations.

The network is that of lockstep.kernels.q_networks, whose streams take the core's outputs. The core has a table of two
rows, those of lockstep.kernels.recurrent_network: the projection of its input, and the core. Its weights have no noise.

Shape legend: P parameters, T steps, n sequences, N = T * n samples, step by step; D numbers of an observation, E extra
features, F features and these, G gates, H hidden size, K numbers of a state, A actions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import OUTPUTS, activations, backward, evaluate
from lockstep.kernels.q_networks import (
    QNetwork,
    describe_features,
    differentiate_encoder,
    differentiate_streams,
    expected,
)
from lockstep.kernels.recurrent import KEPT, core_back, core_forward, core_panels, with_extra, without_extra


class RecurrentQNetwork(NamedTuple):
    """A Q-network with a core, and the parameters with which it computes."""

    network: QNetwork
    """Where the parts of encoder and streams lie."""
    core: np.ndarray
    """The core's table, int64 [2, 14]."""
    used: np.ndarray
    """The parameters of encoder and streams: what lockstep.kernels.q_networks.disturb returned."""
    parameters: np.ndarray
    """Those of the core: float32 [P]."""
    panels: np.ndarray
    """What panels_of_core returned."""


class Steps(NamedTuple):
    """What a network takes at T steps, besides the state before them."""

    x: np.ndarray
    """Observations as the encoder's layers see them: float32 [N, D]."""
    extra: np.ndarray
    """Further inputs of the core: float32 [N, E]."""
    start: np.ndarray
    """Where the state is zeroed before the step: bool [N]."""


class Unrolled(NamedTuple):
    """The results of a network for some steps."""

    of_encoder: np.ndarray
    """What lockstep.kernels.dense.evaluate returned."""
    inputs: np.ndarray
    """The core's inputs: float32 [N, F]."""
    gates: np.ndarray
    """float32 [N, G * H]"""
    kept: np.ndarray
    """float32 [KEPT, N, H]: see lockstep.kernels.recurrent.lstm."""
    h: np.ndarray
    """The core's outputs: float32 [N, H]."""


@compiled
def panels_of_core(core: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """The core's hidden weights in the order in which `unroll` takes them. core: its table, int64 [2, 14]."""
    return core_panels(core[1], core[0, OUTPUTS], parameters)


@compiled
def unroll(recurrent: RecurrentQNetwork, steps: Steps, state: np.ndarray) -> Unrolled:
    """Run encoder and core over T steps.

    Args:
        state: float32 [n, K], before the first step. It is replaced by that after the last step.
    """
    encoder, core = recurrent.network.encoder, recurrent.core
    samples, wide, size = len(steps.x), core[0, OUTPUTS], core[1, OUTPUTS]
    of_encoder = evaluate(encoder, recurrent.used, steps.x)
    inputs = with_extra(activations(of_encoder, encoder, samples, len(encoder) - 1), steps.extra)
    gates = evaluate(core[:1], recurrent.parameters, inputs).reshape((samples, wide))
    h, kept = np.empty((samples, size), np.float32), np.empty((KEPT, samples, size), np.float32)
    core_forward(core[1], recurrent.parameters, recurrent.panels, len(state), steps.start, state, gates, h, kept)
    return Unrolled(of_encoder, inputs, gates, kept, h)


@compiled
def act(recurrent: RecurrentQNetwork, steps: Steps, state: np.ndarray) -> np.ndarray:
    """The expected returns of all actions, [N, A]. Arguments are those of unroll."""
    h = unroll(recurrent, steps, state).h
    return expected(recurrent.network, describe_features(recurrent.network, recurrent.used, h)[0])


@compiled
def differentiate(
    recurrent: RecurrentQNetwork,
    noise: np.ndarray,
    steps: Steps,
    columns: int,
    unrolled: Unrolled,
    computed: tuple[np.ndarray, np.ndarray, np.ndarray],
    action: np.ndarray,
    by_numbers: np.ndarray,
    gradient: np.ndarray,
) -> None:
    """Write the gradients by all parameters.

    Args:
        noise: see lockstep.kernels.q_networks.disturb.
        steps, unrolled: what unroll took and returned.
        columns: n.
        computed: what lockstep.kernels.q_networks.describe_features returned of the core's outputs.
        action: int64 [N].
        by_numbers: the gradient by the chosen actions' values, float32 [N, 1].
        gradient: float32 [1, P or more].
    """
    network, core, used, parameters, _ = recurrent
    of_encoder, inputs, gates, kept, h = unrolled
    by_h = differentiate_streams(network, used, h, computed, action, by_numbers, gradient, False)
    by_projected, samples = np.empty_like(gates), len(steps.x)
    of_core = columns, steps.start, gates, kept, by_h, by_projected
    core_back(core[1], parameters, samples // columns, *of_core, gradient, False)
    by_inputs, flat = np.empty_like(inputs), gates.reshape(gates.size)
    projected = by_projected.reshape(by_projected.size)
    backward(parameters, core[:1], inputs, flat, projected, gradient, True, False, by_inputs)
    by_features = np.empty((samples, network.encoder[len(network.encoder) - 1, OUTPUTS]), np.float32)
    without_extra(by_inputs, by_features)
    differentiate_encoder(network, used, noise, steps.x, of_encoder, by_features, gradient, False)
