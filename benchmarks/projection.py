"""How fast training would be on more hosts than there are here: one learner's costs, as measured, and a network.

Every host holds one learner with the same number of shards, so that n learners collect n times the samples of one
(weak scaling). free_running, instead, spreads the shards of one learner over more collectors (strong scaling).
docs/scaling.md derives the formulas and compares them with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """What joins any two hosts, each of which sends and receives at once."""

    latency: float
    """Seconds from one process to another, one way, software included."""
    bandwidth: float = math.inf
    """Bytes a second that a host can send, and as many that it can receive meanwhile."""

    def message(self, size: float) -> float:
        """Seconds until a message of so many bytes is there. Before gloo sends it, the receiver says that it is ready:
        so it takes two ways."""
        return 2 * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Work:
    """What one learner does in an iteration."""

    samples: int
    collecting: float
    """Seconds for its own rollouts."""
    learning: float
    """Seconds for its own gradients and the optimizer, without exchanging anything."""
    gradient_steps: int
    gradient_bytes: int
    """Of the vector that is reduced at each gradient step: 4 for each parameter."""
    rollout_bytes: int = 0
    """Of its rollouts, which travel where collectors have hosts of their own."""
    other: float = 0.0
    """Seconds for the rest: digests, metrics."""
    reductions: int = 2
    """Small sums in every iteration: of the normalizers' statistics, and of the advantages' moments if they are
    standardized."""


@dataclass(frozen=True)
class Projected:
    """One iteration of n learners."""

    learners: int
    computing: float
    """Seconds that the slower role computes, or both if they take turns."""
    network: float
    """Seconds that it waits for the network."""
    samples: int

    @property
    def seconds(self) -> float:
        return self.computing + self.network

    @property
    def rate(self) -> float:
        """Samples a second of all learners together."""
        return self.samples / self.seconds

    @property
    def efficiency(self) -> float:
        """Share of the speed that the learners would have if the network took no time."""
        return self.computing / self.seconds


def tree_seconds(learners: int, size: float, network: Network) -> float:
    """Seconds of one sum over all learners (lockstep.distributed.tree), of tensors of so many bytes.

    With a power of two of learners, partners swap halves on each of the log2(n) levels of the tree, and once more on
    the way back. Otherwise whole vectors climb the tree, and learner 0 sends the total to one after the other.
    """
    if learners == 1:
        return 0.0
    levels = math.ceil(math.log2(learners))
    if learners == 2**levels:
        return 2 * levels * network.message(0) + 2 * (1 - 1 / learners) * size / network.bandwidth
    return levels * network.message(size) + network.message(0) + (learners - 1) * size / network.bandwidth


def reporting_seconds(learners: int, network: Network) -> float:
    """Seconds at the end of an iteration, where learner 0 learns what the others did, and all wait for it.

    gloo gathers objects in two steps: the sizes go around all processes, then the objects to learner 0. Its barrier
    takes log2(n) messages.
    """
    if learners == 1:
        return 0.0
    return (learners - 1 + 1 + math.ceil(math.log2(learners))) * network.message(0)


def project(learners: int, work: Work, network: Network, *, apart: bool = False) -> Projected:
    """One iteration of so many learners.

    Args:
        work: of each of them.
        apart: whether every learner has a collector on a further host, and learns from its last rollouts while the
            next are collected (lag 1 or more). Otherwise learners collect for themselves, by turns.
    """
    exchanging = (
        work.gradient_steps * tree_seconds(learners, work.gradient_bytes, network)
        + work.reductions * tree_seconds(learners, 0, network)
        + reporting_seconds(learners, network)
    )
    computing = work.learning + work.other
    samples = learners * work.samples
    if not apart:
        return Projected(learners, computing + work.collecting, exchanging, samples)
    # A collector sends rollouts, and then needs the newest parameters: fp32, as the gradient is.
    sending = network.message(work.rollout_bytes) + network.message(work.gradient_bytes)
    learner, collector = computing + exchanging, work.collecting + sending
    seconds = max(learner, collector)
    computing = computing if learner >= collector else work.collecting
    return Projected(learners, computing, seconds - computing, samples)


@dataclass(frozen=True)
class FreeRunning:
    """A free-running scheme (lag async) with one learner: the slowest of the three works all the time."""

    seconds: float
    """Of an iteration."""
    limit: str
    """What works all the time: collectors, learner, or network."""
    policy_lag: float
    """Versions, mean over samples."""
    waiting: float
    """Share of the time in which collectors wait for a buffer."""


def free_running(
    collectors: int, work: Work, network: Network, *, shards: int, max_lag: int = 4, learner_delay: float = 0.0
) -> FreeRunning:
    """One iteration of a learner and so many collectors, each on a further host, none of which waits for the other.

    A collector steps its shards in turn, so its lap takes as long as it has shards, and begins with the newest version.
    Meanwhile the learner publishes a version each iteration. If it is the slowest, rollouts wait in all buffers:
    each shard has max_lag + 1, one of which is learned from and gives its place to the next.

    Args:
        work: of all shards, collected by one collector.
        learner_delay: seconds that the learner sleeps in each iteration.
    """
    parts = {
        "collectors": work.collecting / collectors,
        "learner": work.learning + work.other + learner_delay,
        "network": work.rollout_bytes / network.bandwidth,
    }
    limit = max(parts, key=lambda name: parts[name])
    seconds = parts[limit]
    # Of each shard, which has as many rollouts learned from as it collects.
    lap = work.collecting / shards * math.ceil(shards / collectors) + network.message(work.rollout_bytes / shards)
    lag = min(max_lag, lap / seconds) if limit == "collectors" else max_lag
    return FreeRunning(seconds, limit, lag, 1 - parts["collectors"] / seconds)
