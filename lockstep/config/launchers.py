"""The launchers. Each starts a run's processes and declares what it can do.

A launcher is an entry of LAUNCHERS, or a `Launcher` in a user's file that a layout names: `my_file.py:NAME`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object

REFERENCE = re.compile(r"(?P<name>[^:]*\.[^:]*:[^\W\d]\w*)(:(?P<processes>.*))?")
"""A user's launcher in a layout: `my_file.py:NAME` or `package.module:NAME`, and the number of processes."""

OPTIONAL = {
    "device": "its processes compute on the CPU, so leave device= out. On the GPUs of one machine use a0-l1.",
    "pin": "pin is for processes that lockstep starts on this machine, as in processes:2,pin=1. Elsewhere, taskset or "
    "numactl pin a process to cores.",
    "nice": "nice is for collectors that lockstep starts on this machine apart from learners, as in cpu:a2-l1,nice=10. "
    "Elsewhere, start the whole run with the command nice, or leave nice= out.",
    "restarts": "restarts is for {}, which replace lost processes: leave it out.",
    "compress": "compress is for {}, which send rollouts over a network. Elsewhere they stay in memory: leave it out.",
    "growing": "collectors may join a run only with {}. Leave out the +.",
    "resources": "resources of processes, such as learner.gpus, are for {}. On one machine, a0-l1 names the GPUs.",
}
"""Options of layouts that only some launchers support, with advice for other launchers. {} stands for the layouts that
support the option."""


@dataclass(frozen=True)
class Launcher:
    """Starts the processes of a run and declares what they can do."""

    start: str | Callable[[Any, Any], Any]
    """A function, or its `module:name`, which is imported on use. It is called with `work` and `job`, makes every
    process call `work(job, context, status)` (lockstep.training.context), and returns learner 0's Result."""
    starts_processes: bool = False
    """Whether it starts processes. Their number follows its name in a layout: NAME:2 or NAME:a2-l1."""
    started_externally: bool = False
    """Whether another program, such as torchrun, starts the processes and calls train or resume in each of them."""
    one_machine: bool = True
    """Whether all processes run on this machine."""
    shares_memory: bool = True
    """Whether processes share memory. If not, nothing may depend on timing, unless decides_by_messages is set."""
    decides_by_messages: bool = False
    """Whether processes without shared memory exchange messages about what timing decides: free-running collectors,
    asynchronous gradients and preemption."""
    options: tuple[str, ...] = ("device",)
    """The layout's options in OPTIONAL that it supports."""
    package: str = ""
    """An optional package that it needs. lockstep's extra for it has the same name."""

    @property
    def one_process(self) -> bool:
        """Whether the calling process does everything."""
        return not (self.starts_processes or self.started_externally)

    @property
    def decides(self) -> bool:
        """Whether timing may decide something in its runs."""
        return self.shares_memory or self.decides_by_messages

    @property
    def leads(self) -> bool:
        """Whether this process prepares the run's folder. With torchrun, only rank 0 does."""
        return not self.started_externally or os.environ.get("RANK", "0") == "0"

    @property
    def computes_here(self) -> bool:
        """Whether this machine certainly computes a part of the run."""
        return self.one_machine or self.started_externally

    def function(self) -> Callable[[Any, Any], Any]:
        """The function that starts a run."""
        if not isinstance(self.start, str):
            return self.start
        module, _, name = self.start.partition(":")
        return getattr(importlib.import_module(module), name)


PROCESSES = "processes"
"""The launcher of layouts that name devices, as in a0-l1, or begin with cpu:."""
LAUNCHERS = {
    "inline": Launcher("lockstep.launchers.inline:run_inline"),
    PROCESSES: Launcher(
        "lockstep.launchers.processes:run_processes", starts_processes=True, options=("device", "pin", "nice")
    ),
    "torchrun": Launcher(
        "lockstep.launchers.torchrun:run_torchrun", started_externally=True, one_machine=False, shares_memory=False
    ),
    "ray": Launcher(
        "lockstep.launchers.ray.launcher:run_ray",
        starts_processes=True,
        one_machine=False,
        shares_memory=False,
        decides_by_messages=True,
        options=("restarts", "compress", "growing", "resources"),
        package="ray",
    ),
}
"""Launchers by the name that a layout begins with."""

SPREAD = Launcher(
    "lockstep.launchers.spread:run_spread",
    starts_processes=True,
    started_externally=True,
    one_machine=False,
    shares_memory=False,
    options=("device", "nice"),
)
"""The launcher in place of `processes` if torchrun or srun has started a process for each copy of a layout such as
a0-l1,2,3-d2."""


def layouts_with(able: Callable[[Launcher], bool], also: str = "", *, split: bool) -> str:
    """Advice: the forms of layouts with several processes whose launchers meet a condition.

    Args:
        able: the condition.
        also: a launcher that may be missing from the table, such as a user's.
        split: whether processes must either collect or learn.
    """
    found = []
    for name in [*LAUNCHERS, *([also] if REFERENCE.fullmatch(also) else [])]:
        if (launcher := launcher_named(name)).starts_processes and able(launcher):
            found += [] if split else [f"{name}:N"]
            found.append(f"{'cpu' if name == PROCESSES else name}:aC-lL")
    return " or ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))


def advice_without(option: str) -> str:
    """Advice for a launcher that does not support one of the layout's options."""
    able = layouts_with(lambda launcher: option in launcher.options, split=option == "growing")
    return OPTIONAL[option].format(able)


def launcher_named(name: str) -> Launcher:
    """A launcher from the table or from a user's file.

    Raises:
        SettingsError: the launcher does not exist.
    """
    if name in LAUNCHERS:
        return LAUNCHERS[name]
    if REFERENCE.fullmatch(name) is None:
        raise SettingsError(f"There is no launcher {name!r}. Use Layout.parse({name!r}).")
    launcher = load_object(name)
    if not isinstance(launcher, Launcher):
        raise SettingsError(f"{name} is {launcher!r}, but must be a lockstep.config.launchers.Launcher.")
    return launcher
