"""Distributed deep reinforcement learning: the same bits in one process, in many, or on a cluster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lockstep import presets as presets
    from lockstep import recipes as recipes
    from lockstep.config.layout import Layout as Layout
    from lockstep.config.options import RunOptions as RunOptions
    from lockstep.config.settings import SettingsError as SettingsError
    from lockstep.envs.checking.check import check_env as check_env
    from lockstep.evaluation.actor import Actor as Actor
    from lockstep.evaluation.policy import load_policy as load_policy
    from lockstep.evaluation.scores import evaluate as evaluate
    from lockstep.experiment import Experiment as Experiment
    from lockstep.experiment import WarmStart as WarmStart
    from lockstep.launchers.launch import resume as resume
    from lockstep.launchers.launch import train as train
    from lockstep.models.normalize import NormalizeConfig as NormalizeConfig
    from lockstep.reproducibility.replay import replay as replay
    from lockstep.reproducibility.verify import diff as diff
    from lockstep.reproducibility.verify import verify as verify
    from lockstep.run.checkpoint import CheckpointError as CheckpointError
    from lockstep.run.ledger import LedgerError as LedgerError
    from lockstep.scheme import Scheme as Scheme
    from lockstep.system.supervision import WorkerError as WorkerError
    from lockstep.training.callbacks import Callback as Callback
    from lockstep.training.job import Result as Result

_HOME = {
    "Experiment": "lockstep.experiment:Experiment",
    "NormalizeConfig": "lockstep.models.normalize:NormalizeConfig",
    "WarmStart": "lockstep.experiment:WarmStart",
    "Layout": "lockstep.config.layout:Layout",
    "RunOptions": "lockstep.config.options:RunOptions",
    "Scheme": "lockstep.scheme:Scheme",
    "SettingsError": "lockstep.config.settings:SettingsError",
    "CheckpointError": "lockstep.run.checkpoint:CheckpointError",
    "LedgerError": "lockstep.run.ledger:LedgerError",
    "WorkerError": "lockstep.system.supervision:WorkerError",
    "Callback": "lockstep.training.callbacks:Callback",
    "Result": "lockstep.training.job:Result",
    "train": "lockstep.launchers.launch:train",
    "resume": "lockstep.launchers.launch:resume",
    "evaluate": "lockstep.evaluation.scores:evaluate",
    "load_policy": "lockstep.evaluation.policy:load_policy",
    "Actor": "lockstep.evaluation.actor:Actor",
    "check_env": "lockstep.envs.checking.check:check_env",
    "verify": "lockstep.reproducibility.verify:verify",
    "replay": "lockstep.reproducibility.replay:replay",
    "diff": "lockstep.reproducibility.verify:diff",
    "presets": "lockstep.recipes.presets",
    "recipes": "lockstep.recipes",
}

__all__ = [
    "Actor",
    "Callback",
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


def __getattr__(name: str) -> Any:
    # Each name is imported when first used, so that `lockstep --help` does not wait for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return list({*globals(), *_HOME})  # also those that nothing has used yet, for dir() and a prompt's completion
