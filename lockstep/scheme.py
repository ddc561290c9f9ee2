"""Who waits for whom: the shards, and the lag between the version that collects and the one that learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.settings import SettingsError


@dataclass(frozen=True)
class Scheme:
    """How collection and learning are coupled. Part of the experiment: it changes what is learned."""

    shards: int = 4
    """Units that environments, randomness and gradients are divided into; a power of two. A run can use at most
    this many processes. More shards allow more processes, at the price of smaller batches per kernel call."""
    lag: int | Literal["async"] = 0
    """Rollout i is collected with version max(0, i - lag). 0 is synchronous; 1 is Cleanba's schedule, which lets
    collection overlap learning; higher hides slow links, at the price of staler data. async lets timing decide, as in
    IMPALA, APPO and Ape-X: what it decided is recorded, and `lockstep replay` repeats it."""
    max_lag: int = 4
    """With lag async: iterations that data may at most be behind the version that learns from it, with replay the first
    that can. Higher lets fast collectors run further ahead, lower keeps data fresher and makes learners wait for slow
    collectors."""
    refresh: Literal["rollout", "step"] = "rollout"
    """With lag async: when collectors take the newest version. step keeps data fresher, and mixes versions within a
    trajectory."""
    acting_batch: int = 0
    """Environments per inference call, a multiple of a shard's; 0 means one shard's. Larger calls are more
    efficient, smaller ones let more processes share the work without padding."""

    @property
    def slabs(self) -> int:
        """Rollouts of a shard that may wait to be learned from, the one being collected included."""
        return (self.max_lag if self.lag == "async" else self.lag) + 1

    @property
    def free_running(self) -> bool:
        """Whether timing decides which version collects what, and what an iteration learns from."""
        return self.lag == "async"

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
                    f"scheme.{name}={getattr(self, name)} is for --scheme.lag async alone; with scheme.lag={self.lag} "
                    "it would do nothing. Leave it out, or let timing decide."
                )
        if self.acting_batch < 0:
            raise SettingsError(f"scheme.acting_batch={self.acting_batch} must be 0 (one shard) or more.")
