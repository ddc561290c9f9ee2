"""Acting on a GPU that also steps the environments. A step copies nothing to or from the host, and does not wait.

A step evaluates the policy, draws actions, steps the environments, and writes all results into a rollout on the GPU. It
can be one CUDA graph, so everything that it reads and writes stays at its place in memory, and the number of the step
is a tensor. At the end, the rollout is copied to the host's buffer, where it is hashed, and where other processes can
learn from it.

Shape legend: T time, A rows of an acting batch, B environments of a shard, N noise numbers, K core state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.buffers.rollout_buffers import RolloutBuffer, allocate_buffer
from lockstep.collectors.acting import ActingBatch
from lockstep.collectors.explorer import Choose
from lockstep.core.arrays import map_structure
from lockstep.distributed.shared_memory import Arena
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


class DeviceRolloutActor:
    """Steps policy and environments on a GPU. They write into one rollout there, which each new rollout overwrites.

    Args:
        capture: makes CUDA graphs of steps. None: each kernel is launched by itself.
    """

    steps = 1

    def __init__(self, batch: ActingBatch, agent: Agent, capture: Capture | None) -> None:
        envs, self._distribution = batch.envs.on_device(), agent.model.distribution
        assert envs is not None and isinstance(self._distribution, SendsTensors)
        self.batch, self._envs, self._capture = batch, envs, capture
        self._send = self._distribution.to_env_tensor
        self._previous, self._clip = agent.experiment.model.uses_previous, agent.experiment.env.reward_clip
        self._buffer = allocate_buffer(agent, batch.group, _DeviceArena(agent.device))
        if len(batch.buffers) == 1:
            batch.on_device = self._buffer.shards
        whole = self._buffer.whole
        self._raw_reward = torch.zeros_like(whole.reward) if self._clip else whole.reward
        """fp32 [T, A]: rewards before clipping."""
        self._noise = torch.zeros_like(batch.explorer.noise, device=agent.device)
        self._t = torch.zeros(1, dtype=torch.int64, device=agent.device)
        self._like = self._inputs(lambda x: torch.zeros_like(x[:1]))
        """The policy's inputs for one step, filled with zeros, with which every model can be recorded."""
        self._graphs: dict[Hashable, Repeat] = {}
        self._begun = False
        """Whether the GPU holds the last observations. The first rollout begins with the host's."""

    def begin(self) -> None:
        on_host, on_device = self.batch.open.buffer, self._buffer
        for to, origin in zip(_carried(on_device), _carried(on_device if self._begun else on_host), strict=True):
            to[0].copy_(origin[-1 if self._begun else 0])
        on_device.whole.core_state.copy_(self.batch.core_state)
        self._begun = True
        self._noise.copy_(self.batch.explorer.noise, non_blocking=True)
        self._t.zero_()

    def act(self, t: int, inference: Inference) -> None:
        choose, program = self.batch.explorer.choose, inference.prepared(self._like)
        if self._capture is None or program is None:
            self._step(inference, choose)
            return
        graph = self._graphs.get((program, choose))
        if graph is None:
            # Capturing also writes rows of the rollout, but graphs are captured in its first step, so that they are
            # written again.
            changed = [self._t, self.batch.core_state, *(x for _, env in self._envs for x in env.memory())]
            graph = self._graphs[program, choose] = captured(
                lambda: self._step(inference, choose), self._capture, changed
            )
        graph()

    def receive(self, t: int) -> None:
        """Nothing: act has written the environments' results."""

    def finish(self, inference: Inference) -> None:
        """Copy the rollout to the host, field by field, and wait for it."""
        batch, whole, on_host = self.batch, self._buffer.whole, self.batch.open.buffer
        if batch.bootstraps:
            output, _ = inference.evaluate(self._inputs(lambda x: x[-1:]))
            whole.value[-1].copy_(output.value[0])
        for to, x in zip(_fields(on_host), _fields(self._buffer), strict=True):
            to.copy_(x, non_blocking=True)
        if self._clip:
            batch.raw_reward.copy_(self._raw_reward, non_blocking=True)
        torch.cuda.current_stream(whole.reward.device).synchronize()
        if not self._clip:
            batch.raw_reward.copy_(on_host.whole.reward)
        batch.ended = (on_host.whole.terminated | on_host.whole.truncated).numpy()
        batch.received = batch.steps

    def _inputs(self, at: Callable[[Tensor], Tensor]) -> Inputs:
        """The model's inputs at one step, which `at` selects from each field."""
        buffer = self._buffer
        return Inputs(
            map_structure(at, buffer.whole.obs),
            at(buffer.whole.start),
            self.batch.core_state,
            at(buffer.actions) if self._previous else None,
            at(buffer.rewards) if self._previous else None,
        )

    def _step(self, inference: Inference, choose: Choose) -> None:
        """Act on the observations of step t, step the environments, and write the results."""
        t, whole = self._t, self._buffer.whole
        output, state = inference.evaluate(self._inputs(lambda x: x.index_select(0, t)))
        policy = output.policy[0]
        action = choose(policy, self._noise.index_select(0, t)[0]).to(whole.action.dtype)
        log_prob = self._distribution.log_prob(policy, action)
        after = t + 1
        with each_written_once():  # before environments step, which may change the actions that they are given
            _put(self._buffer.actions, after, action)
            _put(whole.log_prob, t, log_prob)
            _put(whole.value, t, output.value[0])
            if whole.policy is not None:
                _put(whole.policy, t, policy)
        played = [(rows, env.advance(self._send(action[rows]))) for rows, env in self._envs]
        with each_written_once():
            for rows, step in played:
                self._write(rows, t, after, step)
        self.batch.core_state.copy_(state)
        t.add_(1).remainder_(len(self._noise))

    def _write(self, rows: slice, t: Tensor, after: Tensor, step: Any) -> None:
        """Write the environments' results of one step."""
        whole, reward = self._buffer.whole, step.reward
        if self._clip:
            _put(self._raw_reward[:, rows], t, reward)
            reward = reward.clamp(-1.0, 1.0)
        map_structure(lambda to, x: _put(to[:, rows], after, x), whole.obs, step.obs)
        _put(whole.start[:, rows], after, step.first)
        _put(self._buffer.rewards[:, rows], after, reward)
        _put(whole.terminated[:, rows], t, step.terminated)
        _put(whole.truncated[:, rows], t, step.truncated)
        _put(whole.valid[:, rows], t, ~step.first)


def _put(to: Tensor, at: Tensor, x: Tensor) -> None:
    """Write x [...] into row `at` of [T, ...]. `at` is int64 [1] on the GPU."""
    to.index_copy_(0, at, x.unsqueeze(0))


def _carried(buffer: RolloutBuffer) -> list[Tensor]:
    """The fields whose last row is the first row of the next rollout."""
    found: list[Tensor] = []
    map_structure(found.append, buffer.whole.obs)
    return [*found, buffer.whole.start, buffer.actions, buffer.rewards]


def _fields(buffer: RolloutBuffer) -> list[Tensor]:
    """Tensors that hold all fields and do not overlap."""
    whole = buffer.whole
    parts = [whole.log_prob, whole.value, whole.terminated, whole.truncated, whole.valid, whole.core_state]
    return [*_carried(buffer), *parts, *([] if whole.policy is None else [whole.policy])]
