"""Acting on a GPU, while the host steps the environments. In a step, one copy sends the observation to the GPU, and one
copy brings the results back. If the policy also sees where episodes start, or its last action and reward, one further
copy sends all of these.

The work on the GPU can be one CUDA graph, so everything that it reads and writes stays at its place in memory.

Shape legend: T time, A rows of an acting batch, N noise numbers, K core state.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.collectors.acting import ActingBatch, SteppingActor
from lockstep.collectors.explorer import Choose
from lockstep.core.pieces import room, side_by_side
from lockstep.models.base import ActionDistribution
from lockstep.models.capture import Inference, Inputs, Program
from lockstep.system.graphs import Capture, Repeat, captured

_SMALL = 1 << 16
"""Bytes. The host gathers an input of at most this size with others in less time than it launches a separate copy."""


class DeviceActor(SteppingActor):
    """Sends observations to the GPU in every step, evaluates the policy there, and copies its outputs back.

    Args:
        capture: makes CUDA graphs of steps. None: each kernel is launched by itself.
    """

    def __init__(self, batch: ActingBatch, agent: Agent, capture: Capture | None) -> None:
        super().__init__(batch)
        keeps_policy, noise = agent.experiment.algorithm.keeps_policy, batch.explorer.noise
        self._policy = DevicePolicy(agent.model.distribution, noise, batch.core_state, capture, keeps_policy)

    def begin(self) -> None:
        super().begin()
        self._policy.begin()

    def act(self, t: int, inference: Inference) -> None:
        batch, rollout = self.batch, self.batch.open.whole
        acted = self._policy.act(inference, batch.inputs(slice(t, t + 1)), batch.explorer.choose)
        rollout.action[t], rollout.log_prob[t], rollout.value[t] = acted.action, acted.log_prob, acted.value
        if rollout.policy is not None:
            rollout.policy[t] = acted.policy
        batch.send(rollout.action[t])

    def finish(self, inference: Inference) -> None:
        batch, rollout = self.batch, self.batch.open.whole
        if batch.bootstraps and batch.going:
            rollout.value[-1] = self._policy.value(inference, batch.inputs(slice(-1, None)))
        batch.pad(rollout.log_prob, rollout.policy)


class Acted(NamedTuple):
    """A policy's outputs in a step."""

    action: Tensor
    """[A, *action_shape]"""
    log_prob: Tensor
    """fp32 [A]"""
    value: Tensor
    """fp32 [A]"""
    policy: Tensor
    """fp32 [A, P]: the distribution's parameters; [A, 0] if they are not kept."""


class DevicePolicy:
    """Evaluates a policy and draws actions on the policy's device.

    Args:
        distribution: the distribution of actions.
        noise: fp32 [T, A, N] in the host's memory, uniform in [0, 1]: rewritten before each rollout.
        state: fp32 [A, K] on the GPU: the core state, which every step updates in place.
        capture: makes CUDA graphs of steps. None: each kernel is launched by itself.
        keeps_policy: whether the distribution's parameters are copied back, too.
    """

    def __init__(
        self,
        distribution: ActionDistribution,
        noise: Tensor,
        state: Tensor,
        capture: Capture | None,
        keeps_policy: bool = False,
    ) -> None:
        self._distribution, self._capture = distribution, capture
        self._drawn, self._noise = noise, torch.zeros_like(noise, device=state.device)
        self._t = torch.zeros(1, dtype=torch.int64, device=state.device)
        self.state = state
        kept = distribution.num_params if keeps_policy else 0
        parts = _acted(distribution, noise.shape[1], kept)
        self._on_device = room(parts, state.device).zero_()
        """One piece of memory on the GPU."""
        self._acted = Acted(*side_by_side(parts, self._on_device))
        """Views of it."""
        self._on_host = room(parts, torch.device("cpu"), pinned=state.is_cuda)
        """Its copy in the host's memory."""
        self._returned = Acted(*side_by_side(parts, self._on_host))
        self._held: Inputs | None = None
        """The inputs of a step on the GPU."""
        self._gathered = torch.empty(0), torch.empty(0)
        """Memory that holds all small inputs: the host's, and the GPU's."""
        self._pieces: dict[int, Tensor] = {}
        """By the index of a small input: its view of the host's memory."""
        self._graphs: dict[Hashable, Repeat] = {}

    def begin(self) -> None:
        """Begin a rollout with new noise."""
        self._noise.copy_(self._drawn, non_blocking=True)
        self._t.zero_()

    def act(self, inference: Inference, inputs: Inputs, choose: Choose) -> Acted:
        """Act in the next step of the rollout.

        Args:
            inference: evaluates the policy.
            inputs: in the host's memory, except for the core state.
            choose: makes actions from the policy's parameters [A, P] and noise [A, N]. Each function has its own graph.

        Returns:
            Tensors in the host's memory, which the next call overwrites.
        """
        held, program = self._to_device(inference, inputs)
        if self._capture is None or program is None:
            self._step(inference, held, choose)
        else:
            graph = self._graphs.get((program, choose))
            if graph is None:
                changed = self._t, self.state
                graph = captured(lambda: self._step(inference, held, choose), self._capture, changed)
                self._graphs[program, choose] = graph
            graph()
        self._on_host.copy_(self._on_device)
        return self._returned

    def value(self, inference: Inference, inputs: Inputs) -> Tensor:
        """fp32 [A] on the GPU: the value of an observation. The core state does not change."""
        held, _ = self._to_device(inference, inputs)
        output, _ = inference.evaluate(held)
        return output.value[0]

    def _step(self, inference: Inference, held: Inputs, choose: Choose) -> None:
        output, state = inference.evaluate(held)
        policy = output.policy[0]
        action = choose(policy, self._noise.index_select(0, self._t)[0])
        acted = self._acted
        acted.action.copy_(action)
        acted.log_prob.copy_(self._distribution.log_prob(policy, acted.action))
        acted.value.copy_(output.value[0])
        if acted.policy.numel():
            acted.policy.copy_(policy)
        self.state.copy_(state)
        self._t.add_(1).remainder_(len(self._noise))

    def _to_device(self, inference: Inference, inputs: Inputs) -> tuple[Inputs, Program | None]:
        """Copy inputs to the GPU. Returns the copies, and the recorded calls for them."""
        if self._held is None:
            self._held = self._hold(inputs)
        program, gathered = inference.prepared(self._held), False
        for index, (to, x) in enumerate(zip(self._held.leaves(), inputs.leaves(), strict=True)):
            if to is x or not (program is None or program.uses[index]):
                continue
            if index in self._pieces:
                self._pieces[index].copy_(x)
                gathered = True
            else:
                to.copy_(x, non_blocking=True)
        if gathered:
            on_host, on_device = self._gathered
            # Nobody waits for the copy: the host writes on_host again only after it has waited for this step.
            on_device.copy_(on_host, non_blocking=True)
        return self._held, program

    def _hold(self, inputs: Inputs) -> Inputs:
        """Memory on the GPU for inputs like these, filled with zeros, with which every model can be recorded."""
        device, leaves = self.state.device, inputs.leaves()
        small = [number for number, x in enumerate(leaves) if x is not inputs.state and x.nbytes <= _SMALL]
        parts = [leaves[number] for number in small]
        on_host = room(parts, torch.device("cpu"), pinned=self.state.is_cuda).zero_()
        on_device = room(parts, device).zero_()
        self._gathered, self._pieces = (on_host, on_device), dict(zip(small, side_by_side(parts, on_host), strict=True))
        places = {id(x): to for x, to in zip(parts, side_by_side(parts, on_device), strict=True)}
        places[id(inputs.state)] = self.state
        return inputs.map(lambda x: places[id(x)] if id(x) in places else torch.zeros_like(x, device=device))


def _acted(distribution: ActionDistribution, size: int, kept: int) -> list[Tensor]:
    """The fields of Acted, without memory."""
    number = ((size,), torch.float32)
    shapes = (((size, *distribution.action_shape), distribution.action_dtype), number, number)
    of_policy = ((size, kept), torch.float32)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in (*shapes, of_policy)]
