"""A worker: the parts of one process, for its block of shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep import envs
from lockstep.clock import Versions
from lockstep.collect import Collector, Version
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.learn import Learner
from lockstep.models.base import PolicyModel
from lockstep.normalize import Normalizers
from lockstep.parameters import FlatParameters
from lockstep.runtime.checkpoint import Checkpoint, write_part
from lockstep.runtime.group import Group
from lockstep.shard import block
from lockstep.storage.rollout import Rollout
from lockstep.tree import TreeSum


class Worker:
    """Collectors, learners and the tree between them; what it computes does not depend on the layout."""

    def __init__(self, experiment: Experiment, layout: Layout, group: Group, alive: Callable[[], None]) -> None:
        self._alive = alive
        self.shards = block(experiment.scheme.shards, group.size, group.rank)
        self.tree = TreeSum(experiment.scheme.shards, group)
        algorithm = experiment.algorithm.build()
        observation_space, action_space = envs.spaces(experiment.env)
        self.model: PolicyModel = experiment.model.build(
            observation_space,
            action_space,
            precision=experiment.precision,
            normalize_observations=experiment.normalize.observations,
            observation_clip=experiment.normalize.clip,
            seed=experiment.seed,
        )
        self.flat = FlatParameters(self.model, tail=1 + len(algorithm.metric_names))
        self.normalizers = Normalizers.initial(experiment, self.model)
        self.collector = Collector(
            experiment,
            self.shards,
            self.model,
            self.flat,
            env_threads=layout.env_threads,
            bootstrap=algorithm.needs_targets,
            alive=alive,
        )
        self.learner = Learner(experiment, self.shards, self.model, algorithm, self.flat, self.tree, alive=alive)

    def version(self, number: int) -> Version:
        """A copy of the present state, to collect with later."""
        return Version(number, self.flat.vector.detach().clone(), self.normalizers)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that `digest:` covers, in named tensors."""
        return {
            **{f"parameter.{name}": tensor for name, tensor in self.flat.named().items()},
            **{f"optimizer.{name}": tensor for name, tensor in self.learner.update.state().items()},
            **{f"normalizer.{name}": tensor for name, tensor in self.normalizers.state().items()},
        }

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what state returned."""
        parts: dict[str, dict[str, torch.Tensor]] = {"parameter": {}, "optimizer": {}, "normalizer": {}}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind in parts:
                parts[kind][rest] = tensor
        self.flat.load(parts["parameter"])
        self.learner.update.load(parts["optimizer"])
        self.normalizers = self.normalizers.loaded(parts["normalizer"])

    def merge_statistics(self, rollouts: dict[int, Rollout], *, stop: bool) -> bool:
        """Add the rollouts' moments to the normalizers, in tree order, and agree on whether to stop.

        Returns:
            Whether any worker was asked to stop.
        """
        seats = self.collector.seats()
        sums = {}
        for shard in self.shards:
            moments = self.normalizers.rollout_sums(rollouts[shard], seats[shard][1])
            asked = torch.tensor([float(stop and shard == self.shards[0])], dtype=torch.float64)
            sums[shard] = torch.cat([asked, moments])
        total = self.tree.sum(sums)
        self.normalizers = self.normalizers.merged(total[1:])
        return bool(total[0] > 0)

    def resume(self, saved: Checkpoint, versions: Versions[Version]) -> int:
        """Restore a checkpoint that save wrote, under any layout; environments replay their actions.

        Returns:
            The environment steps that were replayed.
        """
        tensors, meta = saved.part("learner")
        self.load(tensors)
        for number in meta["versions"]:
            prefix = f"version.{number}.normalizer."
            state = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
            vector = tensors[f"version.{number}.parameters"]
            versions.publish(number, Version(number, vector, self.normalizers.loaded(state)))
        return sum(
            batch.load(seat, saved.part(f"shard-{shard:03d}")[0], self._alive)
            for shard, (batch, seat) in self.collector.seats().items()
        )

    def save(self, directory: Path, iterations: int, versions: Versions[Version]) -> list[dict[str, Any]]:
        """Write this worker's parts of a checkpoint: its shards and, if it holds shard 0, the learner.

        Returns:
            What runtime.checkpoint.finish wants to know of each part.
        """
        parts = []
        for shard, (batch, seat) in self.collector.seats().items():
            parts.append(write_part(directory, iterations, f"shard-{shard:03d}", batch.state(seat), {}))
        if 0 in self.shards:
            tensors = self.state()
            for number, version in versions.held().items():
                tensors[f"version.{number}.parameters"] = version.parameters
                for name, tensor in version.normalizers.state().items():
                    tensors[f"version.{number}.normalizer.{name}"] = tensor
            parts.append(write_part(directory, iterations, "learner", tensors, {"versions": list(versions.held())}))
        return parts
