"""How collecting and learning are coupled: the shards, and the lag between the versions that collect and learn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.config.settings import SettingsError
from lockstep.core.schedule import Schedule
from lockstep.distributed.tree import TreeSum


@dataclass(frozen=True)
class Scheme:
    """How collection and learning are coupled. It is a part of the experiment, since it changes what is learned."""

    later: ClassVar[frozenset[str]] = frozenset({"gradient_lag", "max_gradient_lag", "preempt"})
    """See lockstep.config.serialization.to_json."""

    shards: int = 4
    """Number of equal parts into which environments, randomness and gradients are divided: a power of two. A run can
    use at most this many processes. More allow more processes, but make the batch of each kernel call smaller."""
    lag: int | Literal["async"] = 0
    """Rollout i is collected with version max(0, i - lag). 0 is synchronous. 1 is Cleanba's schedule, in which
    collection overlaps learning. Higher hides slow links, but makes data staler. With async, timing decides, as in
    IMPALA, APPO and Ape-X; its decisions are recorded, and `lockstep replay` repeats them."""
    max_lag: int = 4
    """With lag async: the largest age of data, in versions, when it is learned from (with replay: when it enters the
    memory). Higher lets fast collectors run further ahead. Lower keeps data fresher and makes learners wait for slow
    collectors."""
    refresh: Literal["rollout", "step"] = "rollout"
    """With lag async: when collectors take the newest version. step keeps data fresher, but mixes versions within a
    trajectory."""
    acting_batch: int = 0
    """Environments per inference call, a multiple of a shard's number; 0 means one shard. Larger calls are more
    efficient. Smaller ones let more processes share the work without padding."""
    gradient_lag: int | Literal["async"] = 0
    """Number of gradient steps between computing a gradient and applying it; as many first steps change nothing. This
    has the staleness of asynchronous learners without their randomness. 0 applies gradients at once; higher makes them
    staler. With one gradient step per iteration (as in A2C) the unit is versions. With async, every shard's slice of
    a minibatch gives a separate update, which is applied when it is ready: learners do not wait for each other, and the
    order is recorded."""
    max_gradient_lag: int = 8
    """With gradient_lag async: the most updates that may be applied between computing a gradient and applying it.
    Higher makes learners wait less for slow ones. Lower keeps gradients fresher; with 0, learners take turns."""
    preempt: float = 1.0
    """Once this share of the other processes' shards has finished its rollouts, the unfinished ones are cut, and their
    collected parts are learned from (DD-PPO). Lower waits less for stragglers and learns less from them; 1 waits for
    all. Timing decides which shards are cut, and the ledger records it."""

    @property
    def buffers(self) -> int:
        """The most rollouts of a shard that may exist before they are learned from, including the one being
        collected."""
        return (self.max_lag if self.lag == "async" else self.lag) + 1

    @property
    def free_running(self) -> bool:
        """Whether timing decides which version collects a rollout and which rollouts an iteration learns from."""
        return self.lag == "async"

    @property
    def timing_decides(self) -> bool:
        """Whether repeating a run needs its record. Otherwise its settings are enough."""
        return self.free_running or self.gradient_lag == "async" or self.preempt < 1

    def enough(self, own: int) -> int:
        """The number of other processes' shards that must have finished a rollout before this process's `own` shards
        are cut."""
        return math.ceil(self.preempt * (self.shards - own) - 1e-9)

    def schedule(self, iterations: int) -> Schedule:
        """The schedule, which says which version collects what and what each iteration learns from. An override may
        return another schedule, whose `collects_with(i)` must lie between i - lag and i and never decrease."""
        return Schedule(self.buffers - 1, iterations, self.shards)

    def reduction(self, tree: TreeSum, size: int) -> TreeSum:
        """The object that adds up the shards' gradients. An override may send gradients in another way, for example
        compressed. The sums must not depend on which process holds a shard.

        Args:
            tree: adds up everything else.
            size: the number of values in a gradient. Counts and sums of metrics follow it and must arrive unchanged.
        """
        return tree

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        if self.shards < 1 or self.shards & (self.shards - 1):
            raise SettingsError(
                f"scheme.shards={self.shards} is not a power of two. The reduction tree needs 1, 2, 4, 8, …: "
                "choose at least the number of processes you will ever want to use (4 is a good default)."
            )
        if self.lag != "async" and self.lag < 0:
            raise SettingsError(f"scheme.lag={self.lag} must be 0 (synchronous), 1 (Cleanba), more, or async.")
        if self.max_lag < 0:
            raise SettingsError(
                f"scheme.max_lag={self.max_lag} must be at least 0. With 0, collectors wait for every update; with 4 "
                "they may run ahead."
            )
        for name in ("max_lag", "refresh"):
            if not self.free_running and getattr(self, name) != getattr(Scheme, name):
                raise SettingsError(
                    f"scheme.{name}={getattr(self, name)} only applies with --scheme.lag async; with "
                    f"scheme.lag={self.lag} it has no effect. Leave it out, or use --scheme.lag async."
                )
        if self.gradient_lag != "async" and self.gradient_lag < 0:
            raise SettingsError(
                f"scheme.gradient_lag={self.gradient_lag} must be 0 (each gradient is applied at once), more (a number "
                "of gradient steps), or async."
            )
        if self.max_gradient_lag < 0:
            raise SettingsError(
                f"scheme.max_gradient_lag={self.max_gradient_lag} must be at least 0. With 0, learners take turns; "
                "with 8, up to nine compute at the same time."
            )
        if self.gradient_lag != "async" and self.max_gradient_lag != Scheme.max_gradient_lag:
            raise SettingsError(
                f"scheme.max_gradient_lag={self.max_gradient_lag} only applies with --scheme.gradient-lag async; with "
                f"scheme.gradient_lag={self.gradient_lag} it has no effect. Leave it out."
            )
        if self.gradient_lag == "async" and type(self).reduction is not Scheme.reduction:
            raise SettingsError(
                f"{type(self).__name__} overrides how gradients are added up, but scheme.gradient_lag=async applies "
                "each one alone. Use a number as --scheme.gradient-lag."
            )
        if not 0 < self.preempt <= 1:
            raise SettingsError(
                f"scheme.preempt={self.preempt} must be above 0 and at most 1: the share of other processes' shards "
                "that must finish before a shard is cut. DD-PPO used 0.6, PyTorchRL uses 0.8; 1 cuts none."
            )
        if self.preempt < 1 and (self.free_running or self.shards == 1):
            raise SettingsError(
                f"scheme.preempt={self.preempt} cuts the shards that an iteration would wait for. With scheme.lag="
                f"{self.lag} and scheme.shards={self.shards} it waits for none: leave --scheme.preempt out, or use "
                "--scheme.lag 0 and 2 or more shards."
            )
        if self.acting_batch < 0:
            raise SettingsError(f"scheme.acting_batch={self.acting_batch} must be 0 (one shard) or more.")
