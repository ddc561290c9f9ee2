"""Playing on a GPU where environments lie there, too. In a step nothing goes to or from the host, and nothing waits.

A step is the policy, drawing actions, the environments, and writing all of it into a rollout on the GPU. It can be one
CUDA graph, so everything that it reads and writes stays at its place in memory, and the number of the step is a tensor.
At the end, the rollout is copied to the host's buffer, which is hashed, and which other processes learn from.

Shape legend: T time, A rows of an acting batch, B environments of a shard, N noise numbers, K core state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.buffers.rollout_buffers import ActingGroup, RolloutBuffer, allocate_buffer
from lockstep.core.arrays import map_structure
from lockstep.core.rollout import Rollout
from lockstep.distributed.shared_memory import Arena
from lockstep.envs.device_steps import DeviceSteps
from lockstep.models.base import SendsTensors
from lockstep.models.capture import Inference, Inputs
from lockstep.system.graphs import Capture, Repeat, captured
from lockstep.system.numerics import each_written_once


class _DeviceArena(Arena):
    """Allocates tensors on a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


class DeviceRollout:
    """An acting batch's rollout on a GPU, which each new one overwrites.

    Args:
        envs: the environments, with their rows of the acting batch.
        noise: fp32 [T, A, N] in the host's memory, uniform in (0, 1): rewritten before each rollout.
        state: fp32 [A, K] on the GPU: the core state, which every step updates in place.
        choose: makes actions of the policy's parameters [A, P] and noise [A, N].
        capture: makes CUDA graphs of steps. None: each kernel is launched by itself.
    """

    def __init__(
        self,
        agent: Agent,
        group: ActingGroup,
        envs: list[tuple[slice, DeviceSteps]],
        noise: Tensor,
        state: Tensor,
        choose: Callable[[Tensor, Tensor], Tensor],
        capture: Capture | None,
    ) -> None:
        self._distribution = agent.model.distribution
        assert isinstance(self._distribution, SendsTensors)
        self._send = self._distribution.to_env_tensor
        self._envs, self._choose, self._capture = envs, choose, capture
        self._previous, self._clip = agent.experiment.model.uses_previous, agent.experiment.env.reward_clip
        device = state.device
        self.buffer: RolloutBuffer = allocate_buffer(agent, group, _DeviceArena(device))
        self._raw = torch.zeros_like(self.buffer.whole.reward) if self._clip else self.buffer.whole.reward
        """fp32 [T, A]: rewards before clipping."""
        self._drawn, self._noise = noise, torch.zeros_like(noise, device=device)
        self._t = torch.zeros(1, dtype=torch.int64, device=device)
        self._state = state
        self._like = self._inputs(lambda x: torch.zeros_like(x[:1]))
        """Inputs of the policy's shapes: zeros, which every model can be recorded with."""
        self._graphs: dict[Hashable, Repeat] = {}
        self._begun = False
        """Whether the last observations are those that the environments go on from."""

    def restart(self) -> None:
        """Environments were started or loaded: the next rollout begins from the host's first observation."""
        self._begun = False

    def begin(self, here: RolloutBuffer) -> None:
        """Begin a rollout with new noise.

        Args:
            here: the host's buffer for it, in which the first observation, and the action and reward before it, are
                right.
        """
        there = self.buffer
        for to, origin in zip(_carried(there), _carried(there if self._begun else here), strict=True):
            to[0].copy_(origin[-1 if self._begun else 0])
        there.whole.core_state.copy_(self._state)
        self._begun = True
        self._noise.copy_(self._drawn, non_blocking=True)
        self._t.zero_()

    def play(self, actor: Inference, way: Hashable) -> None:
        """Play the next step of the rollout.

        Args:
            actor: evaluates the policy.
            way: differs where `choose` does something else than before.
        """
        program = actor.prepared(self._like)
        if self._capture is None or program is None:
            self._step(actor)
            return
        graph = self._graphs.get((program, way))
        if graph is None:
            # The rows of the rollout that capturing writes are written again, since a rollout's first step is captured.
            changed = [self._t, self._state, *(x for _, env in self._envs for x in env.memory())]
            graph = self._graphs[program, way] = captured(lambda: self._step(actor), self._capture, changed)
        graph()

    def finish(self, actor: Inference, here: RolloutBuffer, raw: Tensor, *, bootstrap: bool) -> None:
        """Copy the rollout to the host, once for each field, and wait for it.

        Args:
            actor: evaluates the last observation if `bootstrap`.
            here: the host's buffer.
            raw: fp32 [T, A] in the host's memory: where rewards before clipping go.
        """
        whole = self.buffer.whole
        if bootstrap:
            output, _ = actor.evaluate(self._inputs(lambda x: x[-1:]))
            whole.value[-1].copy_(output.value[0])
        for to, x in zip(_fields(here), _fields(self.buffer), strict=True):
            to.copy_(x, non_blocking=True)
        if self._clip:
            raw.copy_(self._raw, non_blocking=True)
        torch.cuda.current_stream(whole.reward.device).synchronize()
        if not self._clip:
            raw.copy_(here.whole.reward)

    def shard(self, shard: int) -> Rollout:
        """A shard's rollout on the GPU, until the next one begins."""
        return self.buffer.shards[shard]

    def _inputs(self, at: Callable[[Tensor], Tensor]) -> Inputs:
        """What the model sees at one step, which `at` takes of each field."""
        buffer = self.buffer
        return Inputs(
            map_structure(at, buffer.whole.obs),
            at(buffer.whole.start),
            self._state,
            at(buffer.actions) if self._previous else None,
            at(buffer.rewards) if self._previous else None,
        )

    def _step(self, actor: Inference) -> None:
        """Act with what was observed at step t, and write what came of it."""
        t, whole = self._t, self.buffer.whole
        output, state = actor.evaluate(self._inputs(lambda x: x.index_select(0, t)))
        policy = output.policy[0]
        action = self._choose(policy, self._noise.index_select(0, t)[0]).to(whole.action.dtype)
        log_prob = self._distribution.log_prob(policy, action)
        after = t + 1
        with each_written_once():  # before environments step, which may change the actions that they are given
            _put(self.buffer.actions, after, action)
            _put(whole.log_prob, t, log_prob)
            _put(whole.value, t, output.value[0])
            if whole.policy is not None:
                _put(whole.policy, t, policy)
        played = [(rows, env.advance(self._send(action[rows]))) for rows, env in self._envs]
        with each_written_once():
            for rows, step in played:
                self._write(rows, t, after, step)
        self._state.copy_(state)
        t.add_(1).remainder_(len(self._noise))

    def _write(self, rows: slice, t: Tensor, after: Tensor, step: Any) -> None:
        """Write what environments returned for one step."""
        whole, reward = self.buffer.whole, step.reward
        if self._clip:
            _put(self._raw[:, rows], t, reward)
            reward = reward.clamp(-1.0, 1.0)
        map_structure(lambda to, x: _put(to[:, rows], after, x), whole.obs, step.obs)
        _put(whole.start[:, rows], after, step.first)
        _put(self.buffer.rewards[:, rows], after, reward)
        _put(whole.terminated[:, rows], t, step.terminated)
        _put(whole.truncated[:, rows], t, step.truncated)
        _put(whole.valid[:, rows], t, ~step.first)


def _put(to: Tensor, at: Tensor, x: Tensor) -> None:
    """Write x [...] into one row of [T, ...], whose number int64 [1] is on the GPU."""
    to.index_copy_(0, at, x.unsqueeze(0))


def _carried(buffer: RolloutBuffer) -> list[Tensor]:
    """The fields whose last row is the first of the next rollout."""
    found: list[Tensor] = []
    map_structure(found.append, buffer.whole.obs)
    return [*found, buffer.whole.start, buffer.actions, buffer.rewards]


def _fields(buffer: RolloutBuffer) -> list[Tensor]:
    """The memory of all fields, each once."""
    whole = buffer.whole
    parts = [whole.log_prob, whole.value, whole.terminated, whole.truncated, whole.valid, whole.core_state]
    return [*_carried(buffer), *parts, *([] if whole.policy is None else [whole.policy])]
