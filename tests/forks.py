"""Processes that begin with torch imported, which takes each that is spawned more than a second."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forks() -> ForkServerContext:
    """In the place of multiprocessing's other contexts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lockstep.launchers.launch"])
    return context
