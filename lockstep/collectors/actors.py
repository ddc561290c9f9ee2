"""Actors: the ways in which an acting batch acts. Each is a class in its own file.

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
    """How many steps a call of act plays: one, or all of a rollout."""

    def begin(self) -> None:
        """Begin a rollout, whose first observation and noise are there."""
        ...

    def act(self, t: int, inference: Inference) -> None:
        """Choose a_t for all rows, and send it to the environments. If a call plays several steps, all from t on."""
        ...

    def receive(self, t: int) -> None:
        """Receive what the environments return for a_{t-1}."""
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
    """Choose how the batches of a collector act: all in the same way.

    Args:
        model: the copy for acting.
        capture: makes CUDA graphs of acting.
        preempted: whether rollouts may be preempted, which compiled functions do not know.
        heartbeat: called while rollouts are played, to tell the supervisor that this process makes progress.
    """
    # Are policy and environments on a GPU?
    if isinstance(agent.model.distribution, SendsTensors) and all(batch.envs.on_device() for batch in batches):
        return [DeviceRolloutActor(batch, agent, capture) for batch in batches]
    # Is the policy alone there?
    if agent.device.type != "cpu" or capture is not None:
        return [DeviceActor(batch, agent, capture) for batch in batches]
    # Does the host compute the policy with torch?
    policy = None if preempted else model.kernels()
    if policy is None:
        return [TorchActor(batch, agent) for batch in batches]
    # It has compiled functions. Are the environments compiled, too, and does one version act in a whole rollout?
    compiled = all(each.env.kernel() is not None for batch in batches for each in batch.envs.stepped)
    if compiled and agent.experiment.scheme.refresh == "rollout":
        return [CompiledRolloutActor(batch, agent, policy, heartbeat) for batch in batches]
    return [CompiledActor(batch, policy) for batch in batches]
