"""Checks that all learners have the same parameters, since each learner computes its own copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.agent import Agent
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.digests import fast_digest


class LearnersDiffer(SettingsError):
    """Learners have computed different parameters."""


class Held(NamedTuple):
    """The device of a learner, and digests of its state."""

    device: str
    digests: tuple[str, ...]
    """Digests of its parameters and normalizers."""


def held(agent: Agent) -> Held:
    """The device and the digests of this process's agent."""
    digests = tuple(fast_digest(x) for x in (agent.flat.vector, *agent.normalizers.state().values()))
    return Held(str(agent.device), digests)


def require_agreement(every: Sequence[Held], layout: Layout, iterations: int) -> None:
    """Raise LearnersDiffer unless all learners have the same parameters and normalizers.

    Args:
        every: the device and digests of each learner, by rank.
        iterations: how many iterations are done.
    """
    others = [rank for rank, each in enumerate(every) if each.digests != every[0].digests]
    if not others:
        return
    named = [f"learner {rank} of {len(every)} ({every[rank].device})" for rank in (0, *others)]
    raise LearnersDiffer(
        f"After iteration {iterations}, {', '.join(named[1:])} and {named[0]} have different parameters, although all "
        "learners apply the same gradients. The result would depend on the layout, so it could be neither verified nor "
        "resumed exactly, and this checkpoint is not kept. Possible causes are learners on different kinds of "
        "processors, a model or algorithm of yours that computes something else in each process, a kernel that is not "
        "deterministic, and faulty hardware. Use one kind of processor for all learners. If all are of one kind, "
        f"lockstep verify --iterations all --layout {layout.repeating()} names the first iteration that differs."
    )
