"""Sets of experiments that run as one durable queue: see docs/sweep.md.

Sweep files need `Run` and `grid`; searches also need `Search` or `Population`, with `Between` and
`OneOf`, and perhaps `SampleFactory`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.sweep.evolution import SampleFactory as SampleFactory
    from lockstep.sweep.population import Population as Population
    from lockstep.sweep.search import Between as Between
    from lockstep.sweep.search import OneOf as OneOf
    from lockstep.sweep.search import Search as Search
    from lockstep.sweep.spec import Run as Run
    from lockstep.sweep.spec import grid as grid

__all__ = ["Between", "OneOf", "Population", "Run", "SampleFactory", "Search", "grid"]


def __getattr__(name: str) -> Any:
    # A run's process attaches itself to its parent and its cores before it imports torch, which takes seconds.
    if name not in __all__:
        raise AttributeError(f"module 'lockstep.sweep' has no attribute {name!r}")
    modules = {"Run": "spec", "grid": "spec", "Population": "population", "SampleFactory": "evolution"}
    return getattr(importlib.import_module(f"lockstep.sweep.{modules.get(name, 'search')}"), name)
