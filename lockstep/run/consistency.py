"""Checks that the files in a run's folder agree with its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.agent import below
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.digests import fast_digest
from lockstep.run import checkpoint, ledger
from lockstep.run.folder import RunFolder
from lockstep.run.ledger import Difference
from lockstep.run.platform import PORTABLE, this_platform

_NOT_PROMISED = (
    "The experiment allows operations without deterministic kernels (allow_nondeterministic), so identical bits are "
    "not promised if GPUs compute it."
)
_OF_PROCESSOR = ("cpu.", "variables.")
"""Entries of a platform that portable arithmetic does not depend on."""


def of_processor(difference: str) -> bool:
    """Whether a difference between platforms is in an entry that portable arithmetic does not depend on."""
    return difference.startswith(_OF_PROCESSOR)


def edited_settings(folder: RunFolder, head: dict[str, Any]) -> Difference | None:
    """How experiment.json differs from the settings in the ledger's head; None if it does not."""
    written = folder.read("experiment.json")
    return ledger.compare(head, [], {**head, "settings": written}, [])


def require_same_arithmetic(folder: RunFolder, head: dict[str, Any]) -> None:
    """Raise SettingsError if a run was computed in another version of portable arithmetic, so that no repetition or
    continuation here could have its bits.

    Args:
        head: the head of the run's ledger.
    """
    recorded = head["platform"].get("portable", 1)
    if head["settings"].get("precision") == "portable" and recorded != PORTABLE:
        raise SettingsError(
            f"{folder.path} was computed in version {recorded} of portable arithmetic, and this lockstep has version "
            f"{PORTABLE}, which gives different bits. Use the lockstep that wrote it (see run.json), or train it again."
        )


def platform_warning(folder: RunFolder, head: dict[str, Any], layout: Layout | None = None) -> str | None:
    """A warning if this platform, one that the run was resumed on, a node that took part in the run, or a user's file
    differs from those at its start, or if the experiment does not promise identical bits. None if neither is the case.

    Args:
        head: the head of the run's ledger.
        layout: the layout of the repetition that the run is compared with; by default, the CPU computes it.
    """
    differing = ledger.differing_platform(head["platform"], this_platform(head["settings"], layout))
    told = [f"Recorded and present: {'; '.join(differing)}."] if differing else []
    every, facts, elsewhere = list(differing), folder.facts(), "the platform of a part of the run"
    for each in facts.get("resumed", []):
        if each.get("differs"):
            told.append(f"Recorded, and resumed on after {each['iteration']} iterations: {'; '.join(each['differs'])}.")
            every, elsewhere = [*every, *each["differs"]], "the platform that the run was resumed on"
    for differs, processes in _by_difference(facts.get("nodes", [])).items():
        told.append(f"Recorded, and of {', '.join(processes)}: {'; '.join(differs)}.")
        every += differs
    loose = _NOT_PROMISED if head["settings"].get("allow_nondeterministic") else ""
    if not told:
        return loose or None
    what = ledger.platform_or_code(differing) if differing else elsewhere
    portable = head["settings"].get("precision") == "portable" and all(map(of_processor, every))
    only = (
        "differs from that at the start of the run. Portable arithmetic does not depend on the difference, but an "
        "environment's library may."
        if portable
        else "differs from that at the start of the run, so bits may differ, too."
    )
    return f"{what[0].upper()}{what[1:]} {only} {' '.join(told)} {loose}".rstrip()


def _by_difference(nodes: Sequence[dict[str, Any]]) -> dict[tuple[str, ...], list[str]]:
    """The processes whose nodes differ from learner 0's, by their differences."""
    found: dict[tuple[str, ...], list[str]] = {}
    for each in nodes:
        if each.get("differs"):
            host = f" on {each['host']}" if "host" in each else ""  # a pulled run does not name its hosts
            found.setdefault(tuple(each["differs"]), []).append(f"{each['process']}{host}")
    return found


def checkpoint_difference(saved: checkpoint.Checkpoint, line: dict[str, Any]) -> Difference | None:
    """The first difference between a checkpoint's parameters and normalizers and its line in the ledger, or None.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    place = f"checkpoint {saved.path.name}"
    tensors, _ = saved.part("learner")
    for kind, entry in (("parameter", "parameters"), ("normalizer", "normalizer")):
        recorded = line.get(entry, {})
        held = below(f"{kind}.", tensors)
        for name in dict.fromkeys([*recorded, *held]):
            expected = recorded.get(name, "absent")
            actual = fast_digest(held[name]) if name in held else "absent"
            if actual != expected:
                return Difference(saved.iteration - 1, f"{kind} {name} in {place}", expected, actual)
    return None


def newest_checkpoint_difference(
    found: Sequence[Path], lines: list[dict[str, Any]], *, whole: bool = False
) -> Difference | None:
    """How the newest checkpoint differs from its line in the ledger; None if it does not, or if there is none.

    Args:
        found: the run's checkpoints, the newest last. List them before the ledger is read. Then each has its line, even
            if the run is still training.
        lines: the lines of the ledger.
        whole: whether to check also the files of shards and replay, which may be gigabytes.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    for path in reversed(found):
        try:
            saved = checkpoint.open_checkpoint(path, only=None if whole else ("learner",))
            if not 1 <= saved.iteration <= len(lines):
                where = f"length of the ledger and checkpoint {path.name}"
                return Difference(None, where, f"{len(lines)}", f"{saved.iteration}")
            return checkpoint_difference(saved, lines[saved.iteration - 1])
        except checkpoint.CheckpointError:
            if path.exists():  # otherwise the run is still training and has removed it
                raise
    return None
