"""Actors choose the actions of an acting batch. Each kind of actor has its own file.

| actor | policy | environments | one call of act |
|---|---|---|---|
| TorchActor | torch on the host | stepped by the host | a step |
| CompiledActor | compiled function | stepped by the host | a step |
| CompiledRolloutActor | compiled function | compiled function | a rollout |
| DeviceActor | GPU | stepped by the host | a step |
| DeviceRolloutActor | GPU | GPU | a step |

The first three write the same bits, and so do the last two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lockstep.agent import Agent
from lockstep.collectors.acting import ActingBatch
from lockstep.collectors.compiled_actor import CompiledActor
from lockstep.collectors.compiled_rollout import CompiledRolloutActor
from lockstep.collectors.device_actor import DeviceActor
from lockstep.collectors.device_rollout import DeviceRolloutActor
from lockstep.collectors.torch_actor import TorchActor
from lockstep.models.base import PolicyModel, SendsTensors
from lockstep.models.capture import Inference
from lockstep.system.graphs import Capture


class Actor(Protocol):
    """Chooses the actions of an acting batch, and writes the policy's part of its rollout."""

    batch: ActingBatch
    steps: int
    """How many steps a call of act plays: one, or a whole rollout."""

    def begin(self) -> None:
        """Begin a rollout. Its first observation and its noise have been written."""
        ...

    def act(self, t: int, inference: Inference) -> None:
        """Choose a_t for all rows, and send it to the environments. If a call plays several steps, it plays them from t
        on."""
        ...

    def receive(self, t: int) -> None:
        """Receive the environments' results for a_{t-1}."""
        ...

    def finish(self, inference: Inference) -> None:
        """Complete the rollout after its last step: bootstrap value, log-probabilities, padding if it was preempted."""
        ...


def actors_of(
    batches: list[ActingBatch],
    agent: Agent,
    model: PolicyModel,
    *,
    capture: Capture | None,
    preempted: bool,
    heartbeat: Callable[[], None],
) -> list[Actor]:
    """Choose the actors of a collector's batches, all of one kind.

    Args:
        model: the copy for acting.
        capture: makes CUDA graphs of acting.
        preempted: whether rollouts may be preempted. Compiled functions do not support this.
        heartbeat: called while rollouts are played, to tell the supervisor that this process makes progress.
    """
    # Are both the policy and the environments on a GPU?
    if isinstance(agent.model.distribution, SendsTensors) and all(batch.envs.on_device() for batch in batches):
        return [DeviceRolloutActor(batch, agent, capture) for batch in batches]
    # Is only the policy on a GPU?
    if agent.device.type != "cpu" or capture is not None:
        return [DeviceActor(batch, agent, capture) for batch in batches]
    # Has the policy no compiled functions?
    policy = None if preempted else model.kernels()
    if policy is None:
        return [TorchActor(batch, agent) for batch in batches]
    # Are the environments compiled, too, and does one version act in a whole rollout?
    compiled = all(each.env.kernel() is not None for batch in batches for each in batch.envs.stepped)
    if compiled and agent.experiment.scheme.refresh == "rollout":
        return [CompiledRolloutActor(batch, agent, policy, heartbeat) for batch in batches]
    return [CompiledActor(batch, policy) for batch in batches]
