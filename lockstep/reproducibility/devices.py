"""Chooses the devices of a repetition. They are of the run's kinds, since a GPU gives different bits than a CPU."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.launchers.auto import with_options
from lockstep.run.folder import RunFolder


def layout_to_repeat(folder: RunFolder, head: dict[str, Any], asked: Layout) -> Layout:
    """The layout of a repetition: the user's layout or, if this is auto and the run used GPUs, the smallest layout with
    the run's kinds of device.

    Args:
        folder: the run.
        head: the head of the run's ledger.
        asked: the user's layout.

    Raises:
        SettingsError: the layout or this machine lacks a kind of device that computed the run.
    """
    try:
        recorded = folder.layout()
    except SettingsError as error:  # it names a launcher in a file that no longer exists, or mixes devices in a role
        if head["platform"].get("gpu"):
            raise SettingsError(
                f"{folder.path} was computed on a GPU, with a layout that this version cannot repeat: {error}"
            ) from error
        return asked
    if asked.is_auto and recorded.uses_gpus:
        asked = with_options(recorded.repeating(), asked)
        if not torch.cuda.device_count():
            gpus = ", ".join(head["platform"].get("gpu", ())) or "the same GPU"
            raise SettingsError(
                f"{folder.path} was computed {_where(recorded)} (layout {recorded}), and a CPU gives different bits. "
                f"torch finds no GPU on this machine, so it cannot check them: use a machine with {gpus}, where the "
                f"layout will be {asked}."
            )
    if not asked.is_auto and asked.kinds != recorded.kinds:
        suitable = "auto or another layout on the CPU"
        raise SettingsError(
            f"{folder.path} was computed {_where(recorded)} (layout {recorded}), and --layout {asked} computes "
            f"{_where(asked)}: a GPU gives different bits than a CPU, so they cannot be compared. Use --layout "
            f"{recorded.repeating() if recorded.uses_gpus else suitable}."
        )
    return asked


def _where(layout: Layout) -> str:
    collecting, learning = layout.kinds
    if collecting == learning:
        return f"on {'GPUs' if learning == 'GPU' else 'the CPU'}"
    return f"with collectors on {collecting}s and learners on {learning}s"
