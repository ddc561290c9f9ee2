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
def unroll(
    network: QNetwork,
    core: np.ndarray,
    used: np.ndarray,
    parameters: np.ndarray,
    panels: np.ndarray,
    x: np.ndarray,
    extra: np.ndarray,
    start: np.ndarray,
    state: np.ndarray,
) -> Unrolled:
    """Run encoder and core over T steps.

    Args:
        network, core: where the parts of the model lie.
        used: what lockstep.kernels.q_networks.disturb returned.
        parameters: float32 [P].
        panels: what panels_of_core returned.
        x: observations as the encoder's layers see them, float32 [N, D].
        extra: further inputs of the core, float32 [N, E].
        start: bool [N]: where the state is zeroed before the step.
        state: float32 [n, K], before the first step. It is replaced by that after the last step.
    """
    samples, wide, size = len(x), core[0, OUTPUTS], core[1, OUTPUTS]
    of_encoder = evaluate(network.encoder, used, x)
    inputs = with_extra(activations(of_encoder, network.encoder, samples, len(network.encoder) - 1), extra)
    gates = evaluate(core[:1], parameters, inputs).reshape((samples, wide))
    h, kept = np.empty((samples, size), np.float32), np.empty((KEPT, samples, size), np.float32)
    core_forward(core[1], parameters, panels, len(state), start, state, gates, h, kept)
    return Unrolled(of_encoder, inputs, gates, kept, h)


@compiled
def act(
    network: QNetwork,
    core: np.ndarray,
    used: np.ndarray,
    parameters: np.ndarray,
    panels: np.ndarray,
    x: np.ndarray,
    extra: np.ndarray,
    start: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """The expected returns of all actions, [N, A]. Arguments are those of unroll."""
    unrolled = unroll(network, core, used, parameters, panels, x, extra, start, state)
    return expected(network, describe_features(network, used, unrolled.h)[0])


@compiled
def differentiate(
    network: QNetwork,
    core: np.ndarray,
    used: np.ndarray,
    parameters: np.ndarray,
    noise: np.ndarray,
    x: np.ndarray,
    start: np.ndarray,
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
        columns: n.
        unrolled: what unroll returned. Other arguments are also those of unroll.
        computed: what lockstep.kernels.q_networks.describe_features returned of the core's outputs.
        action: int64 [N].
        by_numbers: the gradient by the chosen actions' values, float32 [N, 1].
        gradient: float32 [1, P or more].
    """
    of_encoder, inputs, gates, kept, h = unrolled
    by_h = differentiate_streams(network, used, h, computed, action, by_numbers, gradient, False)
    by_projected = np.empty_like(gates)
    steps = len(x) // columns
    core_back(core[1], parameters, steps, columns, start, gates, kept, by_h, by_projected, gradient, False)
    by_inputs, flat = np.empty_like(inputs), gates.reshape(gates.size)
    projected = by_projected.reshape(by_projected.size)
    backward(parameters, core[:1], inputs, flat, projected, gradient, True, False, by_inputs)
    by_features = np.empty((len(x), network.encoder[len(network.encoder) - 1, OUTPUTS]), np.float32)
    without_extra(by_inputs, by_features)
    differentiate_encoder(network, used, noise, x, of_encoder, by_features, gradient, False)
