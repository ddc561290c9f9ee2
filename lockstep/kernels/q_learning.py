"""The gradient of DQN in portable arithmetic: the loss of lockstep.algorithms.dqn for one shard's slice.

Shape legend: P parameters, L layers, n items, D numbers of an observation, A actions.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.dense import activations, backward, evaluate

_HALF, _ONE = np.float32(0.5), np.float32(1)
DQN_SUMS = 4
"""Metrics of lockstep.algorithms.dqn.DQN."""


@compiled
def _best(values: np.ndarray) -> int:
    """The first of the actions [A] with the highest value."""
    best = 0
    for a in range(1, len(values)):
        if values[a] > values[best]:
            best = a
    return best


@compiled
def dqn_gradient(
    layers: np.ndarray,
    parameters: np.ndarray,
    target: np.ndarray,
    double: bool,
    obs: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    next_obs: np.ndarray,
    weight: np.ndarray,
    out: np.ndarray,
    priority: np.ndarray,
) -> None:
    """The gradient of the Huber loss of the chosen actions' values.

    Args:
        layers: the table of lockstep.kernels.dense, whose last layer has A outputs.
        parameters, target: of the model and of the target network, float32 [P].
        double: whether the model chooses the action that the target network values.
        obs, next_obs: as layers see them, float32 [n, D].
        action: int64 [n].
        reward, discount, weight: float32 [n].
        out: float32 [P + 1 + DQN_SUMS]: the gradient, the number of items, and the sum of each metric; written.
        priority: float32 [n], written.
    """
    n, last, size = len(obs), len(layers) - 1, len(parameters)
    gradient, sums = out[:size], np.zeros(DQN_SUMS)
    gradient[:] = 0
    q_t = activations(evaluate(layers, target, next_obs), layers, n, last)
    selector = activations(evaluate(layers, parameters, next_obs), layers, n, last) if double else q_t
    scratch = evaluate(layers, parameters, obs)
    q_tm1 = activations(scratch, layers, n, last)
    gradients = np.zeros_like(scratch)
    by_q = activations(gradients, layers, n, last)
    for i in range(n):
        wanted = reward[i] + discount[i] * q_t[i, _best(selector[i])]
        value = q_tm1[i, action[i]]
        error = value - wanted
        distance = abs(error)
        huber = _HALF * error * error if distance < _ONE else distance - _HALF
        by_q[i, action[i]] = weight[i] * min(max(error, -_ONE), _ONE)
        priority[i] = distance
        sums[0] += weight[i] * huber
        sums[1] += value
        sums[2] += wanted
        sums[3] += distance
    backward(parameters, layers, obs, scratch, gradients, gradient, obs[:0])
    out[size] = np.float32(n)
    for j in range(DQN_SUMS):
        out[size + 1 + j] = np.float32(sums[j])
