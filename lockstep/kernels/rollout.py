"""A policy's step in one compiled call, and with compiled environments a whole rollout.

Shape legend: T time, A rows of an acting batch, B environments of a shard, D numbers of an observation, N noise
numbers, W parameters of a distribution, E extra features and K numbers of the state of cores.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from lockstep.kernels import network as networks
from lockstep.kernels import recurrent_network
from lockstep.kernels.bound import Bound, PolicyKernels
from lockstep.kernels.cache import compiled
from lockstep.kernels.network import Network

Scale = tuple[np.ndarray, np.ndarray, np.float32, np.float32]
"""How a network sees numbers: mean, std, clip and brightest. They are divided by brightest, then normalized as
lockstep.kernels.network.normalize says, unless clip is 0."""


@compiled
def _seen(scale: Scale, obs: np.ndarray) -> np.ndarray:
    """Raw observations [B, ...] as a network sees them: float32 [B, D]."""
    (mean, std, clip, brightest), count = scale, len(obs)
    raw = obs.reshape((count, -1))
    size = obs.size // max(count, 1)
    x = np.empty((count, size), np.float32)
    for i in range(count):
        for d in range(size):
            x[i, d] = np.float32(raw[i, d]) / brightest
    if clip > 0:
        networks.normalize(x, mean, std, clip, x)
    return x


@compiled
def evaluate_raw(
    network: Network, scale: Scale, obs: np.ndarray, extra: np.ndarray, start: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate policy and value of raw observations.

    Args:
        obs: [B, ...], of D numbers each.
        extra, start, state: for evaluate_raw_with_memory.

    Returns:
        The policy's parameters float32 [B, W], and values float32 [B].
    """
    policy, value, _ = networks.evaluate(network, _seen(scale, obs))
    return policy, value


@compiled
def evaluate_raw_with_memory(
    network: Network,
    panels: np.ndarray,
    scale: Scale,
    obs: np.ndarray,
    extra: np.ndarray,
    start: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The same with cores: panels and extra are those of lockstep.kernels.recurrent_network.evaluate. The state of
    cores, float32 [B, K], is zeroed where an episode starts, bool [B], and replaced by that after the step."""
    inputs = _seen(scale, obs), extra, len(obs), start, state
    policy, value, _, _ = recurrent_network.evaluate(network, panels, *inputs)
    return policy, value


def missing(*_: Any) -> Any:
    raise NotImplementedError("a compiled function belongs here: see the argument `names` of `compiled`")


look = evaluate = encode = sample = log_prob = send = act = advance = missing


def _look(model, batch, t, first, last, state):
    """Evaluate obs_t of the rows first to last - 1, whose state of cores is [last - first, K]. Other arguments are
    those of _play."""
    _, (more, _, start), obs, actions, rewards, _, _ = batch
    extra = np.zeros((last - first, more), np.float32)
    if more:
        encode(actions[t, first:last], extra)
        for i in range(last - first):
            extra[i, more - 1] = rewards[t, first + i]
            if start[t, first + i]:
                extra[i] = 0
    return evaluate(*model, obs[t, first:last], extra, start[t, first:last], state)


def _act(model, batch, t, first, limits, sent):
    """Choose a_t in the rows first to first + B. Arguments as for _play."""
    noise, (_, state, _), _, actions, _, log_probs, value = batch
    last = first + len(sent)
    policy, value[t, first:last] = look(model, batch, t, first, last, state[first:last])
    chosen = actions[t + 1, first:last]
    sample(policy, noise[t, first:last], chosen)
    log_prob(policy, chosen, log_probs[t, first:last])
    send(chosen, limits, sent)


def _play(model, batch, world, first, bootstrap, bound, limits, sent, reward, ends):
    """Play T steps of the environments in rows first to first + B.

    Args:
        model, world: the first arguments of `evaluate` and of `advance`.
        batch: the arrays of the acting batch, in this order:

            - noise: float32 [T, A, N].
            - memory: E; states of cores, float32 [A, K], which are replaced by those after T steps; where episodes
              start, bool [T+1, A], of which the first is given.
            - obs: [T+1, A, ...], of which the first is given.
            - actions, rewards: [T+1, A, ...] and float32 [T+1, A]: those before the rollout, which are given, and in
              it.
            - log_probs, value: float32 [T, A] and [T+1, A]; they are written.
        first: the shard's first row.
        bootstrap: whether the last observation is evaluated, too.
        bound: of rewards, as the model sees them.
        limits: what `send` takes.
        sent: what environments receive, [B, ...]; only memory.
        reward, ends: float32 [T, B] and bool [T, 3, B]; they are written. See lockstep.envs.base.ShardEnv.kernel.
    """
    noise, (_, state, start), obs, _, rewards, _, value = batch
    steps, last = len(noise), first + len(sent)
    for t in range(steps):
        act(model, batch, t, first, limits, sent)
        advance(*world, sent, obs[t + 1, first:last], reward[t], ends[t])
        start[t + 1, first:last] = ends[t, 2]
        for i in range(last - first):
            rewards[t + 1, first + i] = min(max(reward[t, i], -bound), bound)
    if bootstrap:
        unused = state[first:last].copy()
        _, value[steps, first:last] = look(model, batch, steps, first, last, unused)


def acting_kernel(policy: PolicyKernels) -> Any:
    """_act with the functions of a model."""
    actions = policy.actions
    return _acting(_looking(policy.evaluate.function, actions.encode), actions.sample, actions.log_prob, actions.send)


def rollout_kernel(policy: PolicyKernels, step: Bound) -> Any:
    """_play with the functions of a model and of an environment."""
    return _playing(acting_kernel(policy), _looking(policy.evaluate.function, policy.actions.encode), step.function)


@functools.cache
def _looking(evaluate: Any, encode: Any) -> Any:
    return compiled(_look, evaluate=evaluate, encode=encode)


@functools.cache
def _acting(look: Any, sample: Any, log_prob: Any, send: Any) -> Any:
    return compiled(_act, look=look, sample=sample, log_prob=log_prob, send=send)


@functools.cache
def _playing(act: Any, look: Any, advance: Any) -> Any:
    return compiled(_play, act=act, look=look, advance=advance)
