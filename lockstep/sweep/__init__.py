"""Sets of experiments, run as one durable queue: see docs/sweep.md.

`Run` and `grid` are what a sweep file needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.sweep.spec import Run as Run
    from lockstep.sweep.spec import grid as grid

__all__ = ["Run", "grid"]


def __getattr__(name: str) -> Any:
    # A run's process gives itself to its parent and its cores before it imports torch, which takes seconds.
    if name not in __all__:
        raise AttributeError(f"module 'lockstep.sweep' has no attribute {name!r}")
    return getattr(importlib.import_module("lockstep.sweep.spec"), name)
