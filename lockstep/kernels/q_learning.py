"""Gradients of DQN in portable arithmetic: the loss of lockstep.algorithms.dqn for several shards' slices.

Shape legend: P parameters, L layers, S slices, N items of all slices, one slice after the other, D numbers of an
observation, A actions.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import activations, backward, evaluate
from lockstep.kernels.sums import add_up, write_sums

_HALF = np.float32(0.5)
DQN_SUMS = 4
"""Metrics of lockstep.algorithms.dqn.DQN."""


@compiled
def best(values: np.ndarray) -> int:
    """The first of the actions [A] with the highest value."""
    best = 0
    for a in range(1, len(values)):
        if values[a] > values[best]:
            best = a
    return best


@compiled
def huber(error: np.float32, delta: np.float32) -> tuple[np.float32, np.float32]:
    """The Huber loss of an error, which is linear from delta on, and its slope."""
    distance = abs(error)
    loss = _HALF * error * error if distance < delta else delta * (distance - _HALF * delta)
    return loss, min(max(error, -delta), delta)


@compiled
def dqn_gradients(
    layers: np.ndarray,
    parameters: np.ndarray,
    target: np.ndarray,
    double: bool,
    delta: np.float32,
    items: tuple[np.ndarray, ...],
    joined: bool,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradients of the Huber loss of the chosen actions' values.

    Args:
        layers: the table of lockstep.kernels.dense, whose last layer has A outputs.
        parameters, target: of the model and of the target network, float32 [P].
        double: whether the model chooses the action that the target network values.
        delta: the error from which on the loss is linear.
        items: see lockstep.kernels.replayed. They have actions int64 [N], and no noise.
        joined: write the tree's sum over all slices to out[0]. The rest of the numbers named below is overwritten.
        out: float32 [S, P + 1 + DQN_SUMS or more]: each slice's gradient by what the table names, the number of items,
            and the sum of each metric; written. The rest of it stays as it is.
        priority: float32 [N], written.
    """
    obs, action, reward, discount, next_obs, weight, _ = items
    n, last, each = len(obs), len(layers) - 1, len(obs) // len(out)
    sums = np.zeros((len(out), DQN_SUMS))
    q_t = activations(evaluate(layers, target, next_obs), layers, n, last)
    selector = activations(evaluate(layers, parameters, next_obs), layers, n, last) if double else q_t
    scratch = evaluate(layers, parameters, obs)
    q_tm1 = activations(scratch, layers, n, last)
    gradients = np.empty_like(scratch)
    by_q = activations(gradients, layers, n, last)
    by_q[:] = 0
    for i in range(n):
        wanted = reward[i] + discount[i] * q_t[i, best(selector[i])]
        value = q_tm1[i, action[i]]
        error = value - wanted
        loss, slope = huber(error, delta)
        by_q[i, action[i]] = weight[i] * slope
        priority[i] = abs(error)
        of_slice = sums[i // each]
        of_slice[0] += weight[i] * loss
        of_slice[1] += value
        of_slice[2] += wanted
        of_slice[3] += priority[i]
    backward(parameters, layers, obs, scratch, gradients, out, True, joined, obs[:0])
    write_sums(each, sums, out, len(parameters))
    if joined:
        add_up(out, len(parameters), len(parameters) + 1 + DQN_SUMS)
