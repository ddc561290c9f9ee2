"""Messages with rollouts and versions, which lockstep.launchers.ray sends between machines.

A CollectorService collects rollouts on request, and answers with a RolloutMessage for each of its shards. Every message
names its shard and rollout, or its version. A rollout comes with the state of its shard after it. A replacement of a
lost collector continues from this state, and learners write it into checkpoints.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.agent import Agent
from lockstep.collectors.collectors import Collectors
from lockstep.core.rollout import Rollout, RolloutInfo
from lockstep.core.schedule import LapId
from lockstep.models.versions import Version

State = dict[str, np.ndarray]
"""The state of a shard between two rollouts, by name. It is empty before the shard's first rollout."""


@dataclass(frozen=True)
class VersionMessage:
    """A version that is sent to collectors."""

    number: int
    parameters: np.ndarray
    """fp32 [N], flat."""
    normalizers: State
    options: np.ndarray
    """float64 [K]: the options that a curriculum gives to environments."""

    @staticmethod
    def of(version: Version) -> VersionMessage:
        normalizers = {name: tensor.numpy() for name, tensor in version.normalizers.state().items()}
        parameters, options = version.parameters.cpu().numpy(), version.options.numpy()
        return VersionMessage(version.number, parameters, normalizers, options)


@dataclass(frozen=True)
class RolloutMessage:
    """A shard's rollout that is sent to the learner that holds the shard."""

    info: RolloutInfo
    fields: list[Any]
    """The rollout's arrays in canonical order, or the compressed bytes of each."""
    state: State
    """The shard's state after the rollout."""
    spent: dict[str, float]
    """Seconds that its collector spent on each activity; empty except for the collector's first shard."""

    def unpack(self, rollout: Rollout) -> Rollout:
        """Copy the arrays into a rollout, and return it."""
        for to, field in zip(rollout.leaves(), self.fields, strict=True):
            place = to.numpy()
            place[...] = (
                np.frombuffer(zlib.decompress(field), place.dtype).reshape(place.shape)
                if isinstance(field, bytes)
                else field
            )
        return rollout


def _packed(rollout: Rollout, *, compress: bool) -> list[Any]:
    arrays = [np.ascontiguousarray(leaf.numpy()) for leaf in rollout.leaves()]
    return [zlib.compress(array.tobytes(), 1) for array in arrays] if compress else arrays


class CollectorService:
    """A collector that collects on request.

    Args:
        collectors: have one buffer each, since a rollout is sent before the next one begins.
        compress: whether rollouts are sent compressed.
    """

    def __init__(self, agent: Agent, collectors: Collectors, *, compress: bool) -> None:
        self._initial, self._collectors, self._compress = agent.normalizers, collectors, compress
        self._since = time.perf_counter()

    def start(self, states: dict[int, State], offsets: Mapping[int, int] | None = None) -> tuple[int, int]:
        """Start the environments, or restore each shard from its state.

        Args:
            states: by shard. If one is empty, no shard has collected a rollout, and all start from their first seeds:
                of a collector that was lost at its start, learners may know the states of some shards only.
            offsets: by shard, the number of the rollout that lap 0 collects; by default 0.

        Returns:
            The number of environment steps that were replayed, and the number of frames per step.
        """
        replayed = 0
        if all(states.values()):
            copies = {
                shard: {name: torch.from_numpy(array.copy()) for name, array in state.items()}
                for shard, state in states.items()
            }
            replayed = self._collectors.load(copies, offsets or dict.fromkeys(copies, 0))
        else:
            self._collectors.reset()
        self._since = time.perf_counter()
        return replayed, self._collectors.frames_per_step

    def states(self) -> dict[int, State]:
        """The current state of each shard."""
        return {shard: _arrays(state) for shard, state in self._collectors.state(self._collectors.shards).items()}

    def collect(self, lap: int, published: VersionMessage) -> list[RolloutMessage]:
        """Collect a rollout of each shard. The next one may be written into the same arrays, so send them first."""
        begin = time.perf_counter()
        normalizers = {name: torch.from_numpy(array.copy()) for name, array in published.normalizers.items()}
        parameters = torch.from_numpy(published.parameters.copy())  # arrays of a message may be read-only
        options = torch.from_numpy(published.options.copy())
        version = Version(published.number, parameters, self._initial.loaded(normalizers), options)
        collected = self._collectors.collect(LapId(self._collectors.shards[0], lap), lambda _: version)
        states = self.states()
        packed = [_packed(each.rollout, compress=self._compress) for each in collected]
        spent, end = self._collectors.take_times(), time.perf_counter()
        spent |= {"waiting": begin - self._since, "other": max(0.0, end - begin - sum(spent.values()))}
        self._since = end
        return [
            RolloutMessage(each.info, fields, states[each.info.shard], {} if index else spent)
            for index, (each, fields) in enumerate(zip(collected, packed, strict=True))
        ]

    def rest(self) -> None:
        """Start to count time as waiting. Before, the process collected for another service."""
        self._since = time.perf_counter()

    def close(self) -> None:
        """Release all environments."""
        self._collectors.close()


def _arrays(state: dict[str, torch.Tensor]) -> State:
    return {name: tensor.cpu().numpy().copy() for name, tensor in state.items()}
