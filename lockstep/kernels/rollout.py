"""A policy's step in one compiled call, and with compiled environments a whole rollout.

Shape legend: T time, A rows of an acting batch, B environments of a shard, D numbers of an observation, N noise
numbers, W parameters of a distribution, E extra features and K numbers of the state of cores.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from lockstep.kernels import network, recurrent_network
from lockstep.kernels.bound import Bound, PolicyKernels
from lockstep.kernels.cache import compiled


@compiled
def _seen(mean: np.ndarray, std: np.ndarray, clip: np.float32, brightest: np.float32, obs: np.ndarray) -> np.ndarray:
    """Raw observations [B, ...] as a network sees them: float32 [B, D]. Arguments are those of evaluate_raw."""
    count = len(obs)
    raw = obs.reshape((count, -1))
    size = obs.size // max(count, 1)
    x = np.empty((count, size), np.float32)
    for i in range(count):
        for d in range(size):
            x[i, d] = np.float32(raw[i, d]) / brightest
    if clip > 0:
        network.normalize(x, mean, std, clip, x)
    return x


@compiled
def evaluate_raw(
    layers: np.ndarray,
    free_std: int,
    log_stds: int,
    parameters: np.ndarray,
    mean: np.ndarray,
    std: np.ndarray,
    clip: np.float32,
    brightest: np.float32,
    obs: np.ndarray,
    extra: np.ndarray,
    start: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate policy and value of raw observations.

    Args:
        layers, free_std, log_stds, parameters: see lockstep.kernels.network.evaluate.
        mean, std, clip: see lockstep.kernels.network.normalize. With a clip of 0, observations are not normalized.
        brightest: divides observations: 1, or the brightest value of pixels.
        obs: [B, ...], of D numbers each.
        extra, start, state: for evaluate_raw_with_memory.

    Returns:
        The policy's parameters float32 [B, W], and values float32 [B].
    """
    x = _seen(mean, std, clip, brightest, obs)
    policy, value, _ = network.evaluate(layers, free_std, log_stds, parameters, x)
    return policy, value


@compiled
def evaluate_raw_with_memory(
    layers: np.ndarray,
    free_std: int,
    log_stds: int,
    parameters: np.ndarray,
    panels: np.ndarray,
    mean: np.ndarray,
    std: np.ndarray,
    clip: np.float32,
    brightest: np.float32,
    obs: np.ndarray,
    extra: np.ndarray,
    start: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The same with cores: panels and extra are those of lockstep.kernels.recurrent_network.evaluate. The state of
    cores, float32 [B, K], is zeroed where an episode starts, bool [B], and replaced by that after the step."""
    x = _seen(mean, std, clip, brightest, obs)
    inputs = x, extra, len(x), start, state
    policy, value, _, _ = recurrent_network.evaluate(layers, free_std, log_stds, parameters, panels, *inputs)
    return policy, value


def missing(*_: Any) -> Any:
    raise NotImplementedError("a compiled function belongs here: see the argument `names` of `compiled`")


look = evaluate = encode = sample = log_prob = send = act = advance = missing


def _look(model, t, first, last, memory, obs, actions, rewards, state):
    """Evaluate obs_t of the rows first to last - 1. Other arguments are those of _play, except that
    state [last - first, K] belongs to these rows alone."""
    more, _, start = memory
    extra = np.zeros((last - first, more), np.float32)
    if more:
        encode(actions[t, first:last], extra)
        for i in range(last - first):
            extra[i, more - 1] = rewards[t, first + i]
            if start[t, first + i]:
                extra[i] = 0
    return evaluate(*model, obs[t, first:last], extra, start[t, first:last], state)


def _act(model, t, first, limits, sent, noise, memory, obs, actions, rewards, log_probs, value):
    """Choose a_t in the rows first to first + B. Arguments as for _play."""
    last, state = first + len(sent), memory[1]
    policy, value[t, first:last] = look(model, t, first, last, memory, obs, actions, rewards, state[first:last])
    chosen = actions[t + 1, first:last]
    sample(policy, noise[t, first:last], chosen)
    log_prob(policy, chosen, log_probs[t, first:last])
    send(chosen, limits, sent)


def _play(
    model,
    world,
    first,
    bootstrap,
    bound,
    limits,
    sent,
    noise,
    memory,
    obs,
    actions,
    rewards,
    log_probs,
    value,
    reward,
    ends,
):
    """Play T steps of the environments in rows first to first + B.

    Args:
        model, world: the first arguments of `evaluate` and of `advance`.
        first: the shard's first row.
        bootstrap: whether the last observation is evaluated, too.
        bound: of rewards, as the model sees them.
        limits: what `send` takes.
        sent: what environments receive, [B, ...]; only memory.
        noise: float32 [T, A, N].
        memory: E; states of cores, float32 [A, K], which are replaced by those after T steps; where episodes start,
            bool [T+1, A], of which the first is given.
        obs: [T+1, A, ...], of which the first is given.
        actions, rewards: [T+1, A, ...] and float32 [T+1, A]: those before the rollout, which are given, and in it.
        log_probs, value: float32 [T, A] and [T+1, A]; they are written.
        reward, ends: float32 [T, B] and bool [T, 3, B]; they are written. See lockstep.envs.base.ShardEnv.kernel.
    """
    steps, last = len(noise), first + len(sent)
    _, state, start = memory
    for t in range(steps):
        act(model, t, first, limits, sent, noise, memory, obs, actions, rewards, log_probs, value)
        advance(*world, sent, obs[t + 1, first:last], reward[t], ends[t])
        start[t + 1, first:last] = ends[t, 2]
        for i in range(last - first):
            rewards[t + 1, first + i] = min(max(reward[t, i], -bound), bound)
    if bootstrap:
        unused = state[first:last].copy()
        _, value[steps, first:last] = look(model, steps, first, last, memory, obs, actions, rewards, unused)


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
