"""Distributed deep reinforcement learning where hardware changes the speed and never the result."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lockstep import presets as presets
    from lockstep import recipes as recipes
    from lockstep.check_env import check_env as check_env
    from lockstep.evaluation.actor import Actor as Actor
    from lockstep.evaluation.policy import load_policy as load_policy
    from lockstep.evaluation.scores import evaluate as evaluate
    from lockstep.experiment import Experiment as Experiment
    from lockstep.experiment import NormalizeConfig as NormalizeConfig
    from lockstep.experiment import WarmStart as WarmStart
    from lockstep.job import Result as Result
    from lockstep.layout import Layout as Layout
    from lockstep.ledger import LedgerError as LedgerError
    from lockstep.replay import replay as replay
    from lockstep.run import RunOptions as RunOptions
    from lockstep.runtime.checkpoint import CheckpointError as CheckpointError
    from lockstep.runtime.supervisor import WorkerError as WorkerError
    from lockstep.scheme import Scheme as Scheme
    from lockstep.settings import SettingsError as SettingsError
    from lockstep.train import resume as resume
    from lockstep.train import train as train
    from lockstep.verify import diff as diff
    from lockstep.verify import verify as verify

_HOME = {
    "Experiment": "lockstep.experiment",
    "NormalizeConfig": "lockstep.experiment",
    "WarmStart": "lockstep.experiment",
    "Layout": "lockstep.layout",
    "RunOptions": "lockstep.run",
    "Scheme": "lockstep.scheme",
    "SettingsError": "lockstep.settings",
    "CheckpointError": "lockstep.runtime.checkpoint",
    "LedgerError": "lockstep.ledger",
    "WorkerError": "lockstep.runtime.supervisor",
    "Result": "lockstep.job",
    "train": "lockstep.train",
    "resume": "lockstep.train",
    "evaluate": "lockstep.evaluation.scores",
    "load_policy": "lockstep.evaluation.policy",
    "Actor": "lockstep.evaluation.actor",
    "check_env": "lockstep.check_env",
    "verify": "lockstep.verify",
    "replay": "lockstep.replay",
    "diff": "lockstep.verify",
    "presets": "lockstep.presets",
    "recipes": "lockstep.recipes",
}

__all__ = [
    "Actor",
    "CheckpointError",
    "Experiment",
    "Layout",
    "LedgerError",
    "NormalizeConfig",
    "Result",
    "RunOptions",
    "Scheme",
    "SettingsError",
    "WarmStart",
    "WorkerError",
    "__version__",
    "check_env",
    "diff",
    "evaluate",
    "load_policy",
    "presets",
    "recipes",
    "replay",
    "resume",
    "train",
    "verify",
]


class _CallableModule(ModuleType):
    """A module named after its main function: calling it calls that, and inspect.signature is that function's."""

    @property
    def _main(self) -> Callable[..., Any]:
        return getattr(self, self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._main)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._main(*args, **kwargs)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing lockstep.train binds the module to the name that the public function has; it may act as both.
        if name in ("train", "verify", "replay", "check_env") and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    # `lockstep --help` should not wait for torch, so that each name is imported when first used.
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if name == _HOME[name].rpartition(".")[2] else getattr(module, name)
