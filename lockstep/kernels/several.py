"""Acting with several policies: each row is evaluated by the network of the policy that plays it.

Shape legend: B rows, D numbers of an observation in the common form, d of one policy's, W parameters of a distribution,
E extra features and K numbers of the state of cores. P is the number of policies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.kernels.bound import Bound, PolicyKernels
from lockstep.kernels.cache import compiled
from lockstep.kernels.rollout import missing

evaluate = missing


def _evaluate(models, columns, extras, player, width, forbidden, obs, extra, start, state):
    """Evaluate each row by the network of its policy.

    Args:
        models: of each policy, the first arguments of `evaluate`.
        columns: of each policy, int64 [d]: which numbers of an observation it sees.
        extras: int64 [P]: how many extra features each policy has. Policies with fewer actions have fewer.
        player: the place of the number of the policy in an observation.
        width: W.
        forbidden: the parameter of actions that a policy does not have.
        obs: float32 [B, D].
        extra, start, state: see lockstep.kernels.rollout.evaluate_raw_with_memory.

    Returns:
        The policies' parameters float32 [B, W], and values float32 [B].
    """
    policy, value = np.full((len(obs), width), forbidden), np.zeros(len(obs), np.float32)
    for p in range(len(models)):
        rows = np.flatnonzero(obs[:, player] == p)
        if len(rows) == 0:
            continue
        seen = np.empty((len(rows), len(columns[p])), np.float32)
        features = np.empty((len(rows), extras[p]), np.float32)
        starts, kept = np.empty(len(rows), np.bool_), np.empty((len(rows), state.shape[1]), np.float32)
        for i in range(len(rows)):
            b = rows[i]
            starts[i], kept[i] = start[b], state[b]
            for d in range(len(columns[p])):
                seen[i, d] = obs[b, columns[p][d]]
            for e in range(extras[p] - 1):
                features[i, e] = extra[b, e]
            if extras[p]:
                features[i, -1] = extra[b, -1]  # the reward
        found, estimates = evaluate(*models[p], seen, features, starts, kept)
        for i in range(len(rows)):
            b = rows[i]
            value[b], state[b], policy[b, : found.shape[1]] = estimates[i], kept[i], found[i]
    return policy, value


@functools.cache
def _evaluating(evaluate: Any) -> Any:
    return compiled(_evaluate, evaluate=evaluate)


def policies_kernels(
    policies: Sequence[PolicyKernels], columns: Sequence[np.ndarray], player: int, width: int, forbidden: float
) -> PolicyKernels:
    """The kernels of all policies, given those of each. Their networks have the same kinds of layers and cores.

    Args:
        columns, player, width, forbidden: see _evaluate.
    """
    first, extras = policies[0], [each.extra for each in policies]
    arguments = tuple(each.evaluate.arguments for each in policies), tuple(columns), np.array(extras, np.int64)
    bound = Bound(_evaluating(first.evaluate.function), (*arguments, player, width, np.float32(forbidden)))
    return PolicyKernels(bound, max(extras), first.actions)
