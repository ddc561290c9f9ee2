"""Checkpoints: a safetensors file for each part and a JSON manifest of digests, safe against crashes.

    checkpoints/00000040/manifest.json        digests of the files and of itself, the run's counters, whether it
                                              was the best so far
    checkpoints/00000040/<part>.safetensors   tensors, with the part's JSON in the file's metadata

A checkpoint exists if and only if its folder has its final name. Parts are written into `.partial-00000040`, and a
rename completes the checkpoint. Deletion renames the folder to `.removing-00000040` first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lockstep.config.settings import SettingsError
from lockstep.run.files import reading, sync, write_whole

VERSION = 1
_MANIFEST = "manifest.json"


class CheckpointError(SettingsError):
    """A checkpoint is missing or damaged. The message names the file, the damage, and a checkpoint to resume
    instead."""


class _Damage(Exception):
    """Describes the damage of one checkpoint. CheckpointError adds an alternative to it."""


def _folder(iteration: int) -> str:
    return f"{iteration:08d}"


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """The path of an iteration's checkpoint, which need not exist."""
    return directory / _folder(iteration)


def _sealed(entries: Mapping[str, Any]) -> bytes:
    """Canonical JSON with its own SHA-256 (over all other entries) added."""
    # Convert to JSON and back first: keys become text, which may sort differently.
    body = json.loads(json.dumps({key: value for key, value in entries.items() if key != "sha256"}))
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def _unsealed(path: Path) -> dict[str, Any]:
    """The entries that _sealed wrote into a file. Raises _Damage if a byte of the file has changed."""
    try:
        raw = path.read_bytes()
        entries = json.loads(raw)
        if not isinstance(entries, dict) or _sealed(entries) != raw:
            raise ValueError
    except OSError as error:
        raise _Damage(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _Damage(f"{path.name} does not match its own SHA-256, so its contents changed") from None
    return entries


# ---------------------------------------------------------------------------------------------------- writing


def write_part(
    directory: Path, iteration: int, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Write one part of a checkpoint. Any process may write parts under its own names. `finish` completes the
    checkpoint.

    Args:
        directory: the run's checkpoints folder.
        iteration: the number of iterations done.
        name: the name of the part, unique in the checkpoint. Write one part per shard and not per process, so that any
            layout can resume.
        tensors: tensors of any dtype and shape, on any device. They may share memory.
        meta: JSON values (tuples are read back as lists, and keys as text).

    Returns:
        The entry for `finish`: name, sha256 and bytes of the file.
    """
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", name), f"not a file name: {name!r}"
    # Clones, since safetensors rejects views that share memory, such as overlapping rollout fields.
    own = {key: t.detach().cpu().clone(memory_format=torch.contiguous_format) for key, t in tensors.items()}
    data = safetensors.torch.save(own, {"meta": json.dumps(meta)})
    folder = directory / f".partial-{_folder(iteration)}"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{name}.safetensors", data)
    return {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def link_part(directory: Path, iteration: int, part: Mapping[str, Any], origin: Path) -> dict[str, Any]:
    """Reuse a part of another checkpoint unchanged, as a hard link if the file system supports it, else as a copy.

    Args:
        directory: the run's checkpoints folder.
        iteration: the number of iterations done.
        part: the entry that write_part returned for it.
        origin: the folder of a finished checkpoint that contains the part.

    Returns:
        The entry for `finish`.
    """
    folder, file = directory / f".partial-{_folder(iteration)}", f"{part['name']}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.link(origin / file, folder / file)
    except FileNotFoundError:
        raise
    except OSError:
        write_whole(folder / file, (origin / file).read_bytes())
    return dict(part)


def finish(
    directory: Path,
    iteration: int,
    parts: Iterable[Mapping[str, Any]],
    meta: Mapping[str, Any],
    *,
    keep: int,
    best: bool = False,
    finite: bool = True,
) -> Path:
    """Complete a checkpoint from the entries of write_part. Delete all checkpoints except the newest `keep` and the
    best.

    A crash at any moment leaves the old state or the new one. Checkpoints of later iterations (of a run that was
    resumed from an earlier one) are neither counted nor deleted.

    Args:
        directory, iteration: as for write_part.
        parts: the entries of all parts.
        meta: JSON values of the run as a whole.
        keep: how many checkpoints to keep.
        best: whether this is the run's best checkpoint so far, which is kept until a better one is written.
        finite: whether its parameters are finite. If not, the newest checkpoint with finite ones is kept, too.

    Returns:
        The checkpoint's folder.
    """
    assert keep >= 1, "the checkpoint just written is always kept"
    partial, final = directory / f".partial-{_folder(iteration)}", directory / _folder(iteration)
    parts = sorted(parts, key=lambda part: part["name"])
    for part in parts:
        assert (partial / f"{part['name']}.safetensors").stat().st_size == part["bytes"], part
    manifest = {
        "version": VERSION,
        "iteration": iteration,
        "parts": [dict(part) for part in parts],
        "meta": dict(meta),
        "best": best,
        **({} if finite else {"finite": False}),
    }
    write_whole(partial / _MANIFEST, _sealed(manifest))
    sync(partial)
    if final.exists():
        os.rename(final, directory / f".replaced-{_folder(iteration)}")
    os.rename(partial, final)
    sync(directory)
    older = [path for path in list_checkpoints(directory) if iteration_of(path) <= iteration]
    kept = (_best(older), None if finite else newest_finite(directory))
    for path in older[:-keep]:
        if path not in kept:
            os.rename(path, directory / f".removing-{path.name}")
    _sweep(directory)
    return final


def _sweep(directory: Path) -> None:
    """Restore a checkpoint whose replacement was not completed. Then delete folders that are no longer checkpoints."""
    for path in directory.glob(".replaced-*"):
        final = directory / path.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(path)
        else:
            os.rename(path, final)
    for path in directory.glob(".removing-*"):
        shutil.rmtree(path)


def recover(directory: Path) -> None:
    """Clean up after a crash. Call once when a run starts or resumes, before anything is written."""
    if directory.is_dir():
        _sweep(directory)
        for path in [*directory.glob(".partial-*"), *directory.glob(".*.partial")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def set_aside_newer(directory: Path, iteration: int) -> list[Path]:
    """Rename checkpoints that are newer than an iteration to `<name>.superseded`, since a run that is resumed there
    will replace them.

    A checkpoint that was set aside under the same name before is deleted. Returns the new paths.
    """
    moved = []
    for path in list_checkpoints(directory):
        if iteration_of(path) > iteration:
            target = directory / f"{path.name}.superseded"
            if target.exists():
                shutil.rmtree(target)
            moved.append(path.rename(target))
    return moved


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint. Its parts are read and checked again on demand."""

    path: Path
    iteration: int
    """Iterations done when it was written, which is the version of its parameters."""
    meta: dict[str, Any]
    """The meta that `finish` received."""
    parts: dict[str, dict[str, Any]]
    """The size in bytes and the SHA-256 of each file, by name."""

    def names(self) -> list[str]:
        """Names of all parts, sorted."""
        return sorted(self.parts)

    def part(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors (on the CPU, in new memory) and JSON values of one part.

        Raises:
            CheckpointError: the part does not exist, or its file is damaged.
        """
        if name not in self.parts:
            raise CheckpointError(
                f"Checkpoint {self.path} has no part {name!r}, only {', '.join(self.names())}: it belongs to "
                "another experiment or version of lockstep. Resume with the version that run.json names."
            )
        try:
            data = _intact(self.path, self.parts[name])
        except _Damage as damage:
            raise _error(self.path, damage) from None
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return safetensors.torch.load(data), json.loads(header["__metadata__"]["meta"])


def _intact(path: Path, part: Mapping[str, Any]) -> bytes:
    """The bytes of one part's file. Raises _Damage if they have changed since they were written."""
    file = f"{part['name']}.safetensors"
    try:
        data = (path / file).read_bytes()
    except OSError as error:
        raise _Damage(f"{file} cannot be read ({error.strerror})") from None
    if len(data) != part["bytes"]:
        raise _Damage(f"{file} has {len(data):,} bytes, but {part['bytes']:,} were written")
    if hashlib.sha256(data).hexdigest() != part["sha256"]:
        raise _Damage(f"{file} does not match its recorded SHA-256, so its contents changed")
    return data


def _open(path: Path, only: Collection[str] | None = None) -> Checkpoint:
    manifest = _unsealed(path / _MANIFEST)
    if manifest["version"] != VERSION:
        raise _Damage(f"{_MANIFEST} has format version {manifest['version']}; this lockstep reads {VERSION}")
    named = path.name.partition(".")[0]
    if named.isdecimal() and int(named) != manifest["iteration"]:
        raise _Damage(f"it was taken after {manifest['iteration']} iterations, so its folder was renamed")
    for part in manifest["parts"]:
        if only is None or part["name"] in only:
            _intact(path, part)
    parts = {part["name"]: part for part in manifest["parts"]}
    return Checkpoint(path, manifest["iteration"], manifest["meta"], parts)


def _error(path: Path, damage: _Damage) -> CheckpointError:
    """An error that describes the damage and offers the newest intact checkpoint before this one."""
    earlier = [p for p in list_checkpoints(path.parent) if p.name < path.name]
    for candidate in reversed(earlier):
        try:
            _open(candidate)
        except _Damage:
            continue
        offer = (
            f"The newest intact one before it is {candidate.name}: "
            f"lockstep resume {shlex.quote(str(path.parent.parent))} --checkpoint {candidate.name}"
        )
        break
    else:
        offer = "No earlier one of this run is intact: restore the folder from a copy, or start a new run."
    return CheckpointError(f"Checkpoint {path} cannot be used: {damage}. {offer}")


def open_checkpoint(path: str | os.PathLike[str], only: Collection[str] | None = None) -> Checkpoint:
    """Open a checkpoint folder after checking the size and SHA-256 of every file.

    Args:
        only: the parts to check; None checks all, which may be gigabytes with replay. Each part is also checked when it
            is read.

    Raises:
        CheckpointError: a file is missing, truncated or changed.
    """
    path = Path(path)
    if not path.is_dir():
        available = ", ".join(p.name for p in list_checkpoints(path.parent)) or "none"
        raise CheckpointError(f"There is no checkpoint {path}. Checkpoints there: {available}.")
    try:
        return _open(path, only)
    except _Damage as damage:
        raise _error(path, damage) from None


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints in a run's checkpoints folder, oldest first. Their contents are not checked."""
    directory = Path(directory)
    with reading(directory):
        found = list(directory.iterdir()) if directory.is_dir() else []
    return sorted((p for p in found if re.fullmatch(r"\d{8,}", p.name)), key=iteration_of)


def iteration_of(path: Path) -> int:
    """Iterations done when one of list_checkpoints was written, by its name."""
    return int(path.name)


def latest(directory: str | os.PathLike[str]) -> Path:
    """The newest checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    found = list_checkpoints(directory)
    if not found:
        raise CheckpointError(
            f"There is no checkpoint in {directory} yet: the first is written after --checkpoint-every iterations, or "
            "when the run ends. If the run was killed before that, lockstep resume starts it again."
        )
    return found[-1]


def find(directory: Path, name: str | int | None = None) -> Path:
    """A run's checkpoint by name: latest (also None), best, or an iteration.

    Raises:
        CheckpointError: the checkpoint does not exist.
    """
    name, run = "latest" if name is None else str(name), directory.parent
    if name == "latest":
        return latest(directory)
    if name == "best":
        best = best_iteration(directory)
        if best is None:
            raise CheckpointError(
                f"{run} has no best checkpoint yet: the first checkpoint after an episode has ended becomes the best. "
                "Use --checkpoint latest."
            )
        return checkpoint_path(directory, best)
    if name not in ("", "..") and Path(name).name == name and (directory / name).is_dir():  # set aside or copied
        return directory / name
    if not name.isdecimal():
        available = ", ".join(str(iteration_of(path)) for path in list_checkpoints(directory)) or "none"
        raise CheckpointError(f"Unknown checkpoint {name!r}. Use latest, best or an iteration; {run} has: {available}.")
    return checkpoint_path(directory, int(name))


def best_iteration(directory: str | os.PathLike[str]) -> int | None:
    """The iteration of the checkpoint with the best score, None if none is intact."""
    path = _best(list_checkpoints(directory))
    return None if path is None else iteration_of(path)


def newest_finite(directory: Path) -> Path | None:
    """The newest checkpoint with finite parameters, None if none is intact."""
    for path in reversed(list_checkpoints(directory)):
        with contextlib.suppress(_Damage):
            if _unsealed(path / _MANIFEST).get("finite", True):
                return path
    return None


def _best(paths: list[Path]) -> Path | None:
    """The newest of these checkpoints that was its run's best when it was written."""
    for path in reversed(paths):
        with contextlib.suppress(_Damage):
            if _unsealed(path / _MANIFEST).get("best"):
                return path
    return None
