"""Whether all learners still hold the same parameters, which they compute each for itself."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.agent import Agent
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.digests import fast_digest


class LearnersDiffer(SettingsError):
    """Learners have computed different parameters."""


def held(agent: Agent) -> tuple[str, ...]:
    """Digests of a learner's parameters and normalizers."""
    return tuple(fast_digest(x) for x in (agent.flat.vector, *agent.normalizers.state().values()))


def require_agreement(every: Sequence[tuple[str, ...]], layout: Layout, iterations: int) -> None:
    """Raise LearnersDiffer unless all learners hold the same.

    Args:
        every: what each of them holds, by rank.
        iterations: done.
    """
    others = [rank for rank, each in enumerate(every) if each != every[0]]
    if not others:
        return
    named = [f"learner {rank} of {len(every)} ({layout.device_of('learner', rank)})" for rank in (0, *others)]
    raise LearnersDiffer(
        f"After iteration {iterations}, {', '.join(named[1:])} and {named[0]} have different parameters, although all "
        "learners apply the same gradients. The result would depend on the layout, so it could be neither verified nor "
        "resumed exactly, and this checkpoint is not kept. The cause is one of these: learners on processors of "
        "different models, a model or algorithm of yours that computes something else in each process, a kernel that "
        "is not deterministic, or faulty hardware. Use one model of processor for all learners. If they are alike, "
        "lockstep verify --iterations all with one learner (inline) names the first iteration that differs."
    )
