"""A learner process: its agent, its batch slots, the rollouts that fill them, and the tree between learners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.agent import Agent, below
from lockstep.algorithms.base import Algorithm
from lockstep.algorithms.wrapper import Wrapper
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.core.schedule import Recorded
from lockstep.core.shards import block
from lockstep.distributed.groups import Group
from lockstep.distributed.tree import TreeSum
from lockstep.learners.asynchronous import AsyncLearner
from lockstep.learners.learner import Learner
from lockstep.learners.parameter_store import Store
from lockstep.models.observations import entries, precision_warning
from lockstep.models.versions import Version
from lockstep.run.checkpoint import Checkpoint, write_part
from lockstep.system.graphs import Capture
from lockstep.system.output import print_warning
from lockstep.transport.rollouts import RolloutSource


class LearnerProcess:
    """The state of a learner process: its agent, its rollouts and its learner. It merges statistics with the other
    learners and writes its parts of checkpoints. What it computes does not depend on the layout."""

    def __init__(
        self,
        agent: Agent,
        rollouts: RolloutSource,
        group: Group,
        heartbeat: Callable[[], None],
        capture: Capture | None,
        recorded: Recorded | None,
        store: Store | None,
    ) -> None:
        scheme = agent.experiment.scheme
        if group.rank and agent.experiment.precision == "portable":
            from lockstep.kernels.cache import notice  # which needs Numba

            notice.silent = True  # learner 0 tells of compiling
        shards = scheme.shards
        self.agent, self.rollouts, self.group = agent, rollouts, group
        self._heartbeat = heartbeat
        self.slots = block(shards, group.size, group.rank, group.groups)
        self._tree = TreeSum(shards, group)
        if scheme.gradient_lag == "async":
            updates = () if recorded is None else recorded.updates
            self.learner: Learner = AsyncLearner(
                agent, self.slots, self._tree, capture=capture, recorded=updates, store=store
            )
        else:
            self.learner = learner_of(agent, self.slots, self._tree, capture)
        self.learner.heartbeat = heartbeat
        self._begun = _numbers(agent.algorithm)
        self._told: set[str] = set()

    def close(self) -> None:
        """End collecting, and release the environments of this process."""
        self.rollouts.close()
        if isinstance(self.learner.batches, ReplayBatches):
            self.learner.batches.close()

    def merge_statistics(self, rollouts: dict[int, list[CollectedRollout]], *, stop: bool) -> tuple[bool, int]:
        """Add the rollouts' moments to the normalizers, in tree order, and agree on whether to stop.

        Returns:
            Whether any learner was asked to stop, and how many rollouts all of them took.
        """
        size = sum(map(len, self.agent.normalizers.state().values()))
        sums = {}
        for slot in self.slots:
            numbers = np.zeros(2 + size)
            numbers[:2] = stop and slot == self.slots[0], len(rollouts[slot])
            for each in rollouts[slot]:
                numbers[2:] += each.info.moments
            sums[slot] = torch.from_numpy(numbers)
        total = self._tree.sum(sums)
        self.agent.normalizers = self.agent.normalizers.merged(total[2:])
        stops, count = total[:2].tolist()
        return stops > 0, int(count)

    def state(self) -> dict[str, torch.Tensor]:
        """The named tensors that `digest:` covers."""
        return self.agent.state() | self.learner.state()

    def begin(self, weights: dict[str, torch.Tensor]) -> None:
        """Make version 0.

        Args:
            weights: what the agent began with, if that was not random: the optimizer's part of it is loaded here.
        """
        self.learner.load(weights)
        self.rollouts.versions.publish(self.agent.version(0))

    def restore(self, saved: Checkpoint) -> None:
        """Load a learner's part of a checkpoint, from any layout, and the versions that collectors still need."""
        tensors, meta = saved.part("learner")
        self.agent.load(tensors)
        self.learner.load(tensors)
        for slot in self.slots:
            self.learner.batches.restore(slot, saved)
            if f"reduction-{slot:03d}" in saved.parts:
                kept = saved.part(f"reduction-{slot:03d}")[0]["kept"]
                self.learner.reduction.kept[slot] = kept.to(self.agent.device)
        for number in meta["versions"]:
            state = below(f"version.{number}.normalizer.", tensors)
            vector = tensors[f"version.{number}.parameters"]
            options = tensors.get(f"version.{number}.curriculum", self.agent.options)
            self.rollouts.versions.publish(Version(number, vector, self.agent.normalizers.loaded(state), options))

    def save(self, directory: Path, iterations: int) -> list[dict[str, Any]]:
        """Write this process's parts of a checkpoint: its shards and, for learner 0, the learner.

        Returns:
            A record of each part for run.checkpoint.finish.
        """
        parts = self.rollouts.save(directory, iterations)
        for slot in self.slots:
            self._heartbeat()
            parts += self.learner.batches.save(slot, directory, iterations)
            if (kept := self.learner.reduction.kept.get(slot)) is not None:
                parts.append(write_part(directory, iterations, f"reduction-{slot:03d}", {"kept": kept}, {}))
        if self.group.rank == 0:
            self._tell_of_lost_state()
            tensors, held = self.state(), self.rollouts.versions.held()
            if self.agent.experiment.scheme.free_running:  # collectors go on with the newest
                held = {iterations: held[iterations]}
            for number, version in held.items():
                tensors[f"version.{number}.parameters"] = version.parameters
                if len(version.options):
                    tensors[f"version.{number}.curriculum"] = version.options
                for name, tensor in version.normalizers.state().items():
                    tensors[f"version.{number}.normalizer.{name}"] = tensor
            parts.append(write_part(directory, iterations, "learner", tensors, {"versions": list(held)}))
        return parts

    def warn_of_lost_precision(self, rollouts: dict[int, list[CollectedRollout]]) -> None:
        """Warn of observations that are too large for float32."""
        for first in rollouts[self.slots[0]][:1]:
            for key, x in entries(first.rollout.obs).items():
                if x.dtype == torch.float32 and x.numel():
                    low, high = (end.cpu().numpy() for end in x.flatten(0, 1).aminmax(dim=0))
                    if said := precision_warning(low, high):
                        print_warning(f"The observation{f' {key!r}' if key else ''} {said}")

    def _tell_of_lost_state(self) -> None:
        """Warn once if a user's algorithm keeps state on its object, where checkpoints do not hold it."""
        begun, now = self._begun, _numbers(self.agent.algorithm)
        if changed := [name for name in now if now[name] != begun.get(name) and name not in self._told]:
            self._told.update(changed)
            print_warning(
                f"{', '.join(changed)} of the algorithm changed while it learned, and checkpoints do not hold "
                "it: the run would not resume exactly. Let the algorithm's method variables return it."
            )


def learner_of(agent: Agent, slots: range, tree: TreeSum, capture: Capture | None = None) -> Learner:
    """The learner of an agent whose gradients are not asynchronous."""
    if agent.kernels is None:
        return Learner(agent, slots, tree, capture=capture)
    from lockstep.learners.learner_table import LEARNERS  # which need Numba

    return LEARNERS[type(agent.kernels)](agent, slots, tree)


def _numbers(algorithm: Algorithm[Any]) -> dict[str, str]:
    """The numbers and texts that an algorithm's object holds."""
    algorithm = algorithm.inner if isinstance(algorithm, Wrapper) else algorithm
    return {name: repr(x) for name, x in vars(algorithm).items() if isinstance(x, (int, float, str))}
