"""The ledger (`ledger.jsonl`) proves the results of a run. It has one chained line of digests per iteration.

Unless timing decides, nothing in it depends on the layout or on time, so two runs of one experiment on one platform
have equal files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.config.layout import Layout
from lockstep.config.serialization import identities_of, to_json, with_current_names
from lockstep.config.settings import SettingsError
from lockstep.run.files import reading
from lockstep.run.platform import this_platform

VERSION = 1
_CHAIN = ',"chain":"'
_NO_CHAIN = "0" * 64


class LedgerError(SettingsError):
    """A ledger was damaged or edited. `iteration` is the iteration of its first bad line; None for the head."""

    def __init__(self, text: str, iteration: int | None = None) -> None:
        super().__init__(text)
        self.iteration = iteration


_ORDER = ("iteration", "collected_with", "events", "cuts", "rollout", "updates", "gradient", "parameters")


def _canonical(line: Mapping[str, Any]) -> dict[str, Any]:
    """The line with known entries first, and shards in numerical order. Tensors keep the order of the rollout and the
    model."""
    known = [name for name in _ORDER if name in line]
    result = {name: line[name] for name in [*known, *sorted(set(line) - set(known))]}
    for name in ("rollout", "gradient"):
        if name in result:
            result[name] = {str(shard): result[name][shard] for shard in sorted(result[name], key=int)}
    return result


def _seal(line: Mapping[str, Any], chain: str) -> tuple[str, str]:
    """The line's text with its chain hash, and this hash: SHA-256 over the previous hash and the line."""
    text = json.dumps(line, separators=(",", ":"))
    chain = hashlib.sha256((chain + text).encode()).hexdigest()
    return f'{text[:-1]}{_CHAIN}{chain}"}}\n', chain


def _unseal(raw: bytes, chain: str) -> tuple[dict[str, Any], str]:
    """The inverse of _seal. Raises ValueError if a byte has changed."""
    body, _, rest = raw.rpartition(_CHAIN.encode())
    expected = hashlib.sha256(chain.encode() + body + b"}").hexdigest()
    if rest != f'{expected}"}}\n'.encode():
        raise ValueError
    return json.loads(body + b"}"), expected


def _entries(path: Path, *, complete: bool = True) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Head and lines, each with its chain hash and the file offset of its end.

    Args:
        complete: whether the last line must be complete. Otherwise, an incomplete one is left out.

    Raises:
        LedgerError: the file does not exist, or a line has changed since it was written.
    """
    if not path.is_file():
        raise LedgerError(
            f"There is no ledger {path}. A run without a ledger can be neither verified nor resumed. Restore it from a "
            "copy, or give the folder of another run."
        )
    chain, end = _NO_CHAIN, 0
    with reading(path), path.open("rb") as file:
        for index, raw in enumerate(file):
            try:
                entry, chain = _unseal(raw, chain)
                if index and entry.get("iteration") != index - 1:
                    raise ValueError
            except ValueError:
                if not (complete or raw.endswith(b"\n")):
                    break
                which = f"iteration {index - 1}" if index else "the head"
                why = (
                    "does not match its hash, so it was damaged or edited"
                    if raw.endswith(b"\n")
                    else "is incomplete, as after a crash during the write (resume repairs that)"
                )
                raise LedgerError(
                    f"The ledger {path} is invalid from {which} on: line {index + 1} {why}. Restore the "
                    "file from a copy, or run the experiment again.",
                    index - 1 if index else None,
                ) from None
            end += len(raw)
            yield entry, chain, end
    if end == 0:
        raise LedgerError(f"The ledger {path} is empty. Restore it from a copy, or start a new run.")


def _first(path: Path, iterations: int) -> Iterator[tuple[dict[str, Any], str, int]]:
    """As _entries, for the head and the first iterations. Later lines may be damaged."""
    count = 0
    for each in itertools.islice(_entries(path, complete=False), iterations + 1):
        yield each
        count += 1
    if count < iterations + 1:
        raise LedgerError(
            f"The ledger {path} records {count - 1} iterations, but the checkpoint was taken after "
            f"{iterations}. Restore it from a copy, or resume from an earlier one with --checkpoint."
        )


class Ledger:
    """A ledger that is being written. Line i records iteration i, counted from 0."""

    def __init__(self, path: Path, file: IO[str], chain: str, iterations: int) -> None:
        self.path = path
        self.iterations = iterations
        """Number of lines so far, without the head."""
        self._file = file
        self._chain = chain

    @staticmethod
    def create(path: str | os.PathLike[str], head: Mapping[str, Any]) -> Ledger:
        """Start a ledger whose first line is `head` (see ledger_head).

        Raises:
            LedgerError: the file exists.
        """
        path = Path(path)
        try:
            file = path.open("x", encoding="ascii", newline="\n")
        except FileExistsError:
            raise LedgerError(
                f"The ledger {path} exists already. Resume its run, or choose another --run folder."
            ) from None
        ledger = Ledger(path, file, _NO_CHAIN, 0)
        ledger._write(head)
        ledger.sync()
        return ledger

    @staticmethod
    def reopen(path: str | os.PathLike[str], iterations: int) -> Ledger:
        """Continue a ledger after its first `iterations` lines. Later lines and an incomplete last line are cut off.

        Raises:
            LedgerError: a line to be kept is missing or damaged.
        """
        path = Path(path)
        chain, end = _NO_CHAIN, 0
        for _, chain, end in _first(path, iterations):  # noqa: B007 - the last values are used
            pass
        os.truncate(path, end)
        ledger = Ledger(path, path.open("a", encoding="ascii", newline="\n"), chain, iterations)
        ledger.sync()
        return ledger

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one iteration's line and flush it.

        It contains `iteration`, `collected_with` (the version), `rollout` (digests by shard and field), `gradient` (by
        shard), `parameters` (by name), and further entries such as `normalizer`.
        """
        assert line["iteration"] == self.iterations, f"line {self.iterations} was due, not {line}"
        self._write(_canonical(line))
        self.iterations += 1

    def _write(self, entry: Mapping[str, Any]) -> None:
        text, self._chain = _seal(entry, self._chain)
        self._file.write(text)
        self._file.flush()

    def sync(self) -> None:
        """Make the lines so far survive a power failure. Called before a checkpoint, which relies on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush to disk and close the file. Further calls do nothing."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def ledger_head(experiment: Any, layout: Layout | None = None) -> dict[str, Any]:
    """The head of an experiment's ledger: version, identity, settings, and this platform with users' files and the
    layout's GPUs."""
    settings = to_json(experiment)
    return {
        "version": VERSION,
        "experiment": experiment.identity(),
        "settings": settings,
        "platform": this_platform(settings, layout),
    }


def read(path: str | os.PathLike[str], iterations: int | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Head and lines of a ledger, without their chain hashes. Every byte is checked against the chain.

    Args:
        iterations: read only this many lines, which must exist; None reads all.

    Raises:
        LedgerError: the ledger is missing or damaged. The error names the first bad iteration.
    """
    path = Path(path)
    first, *lines = (entry for entry, _, _ in (_entries(path) if iterations is None else _first(path, iterations)))
    _require_version(path, first)
    return first, lines


def read_last(path: str | os.PathLike[str], iterations: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head, and the last of this many lines. All of them are checked as in read, but not kept in memory.

    Raises:
        LedgerError: as read.
    """
    path = Path(path)
    entries = (entry for entry, _, _ in _first(path, iterations))
    first = last = next(entries)
    for last in entries:  # noqa: B007 - the last value is used
        pass
    _require_version(path, first)
    return first, last


def _require_version(path: Path, first: dict[str, Any]) -> None:
    if first.get("version") != VERSION:
        raise LedgerError(
            f"The ledger {path} has format {first.get('version')}, and this lockstep reads format {VERSION}. "
            "Use the version of lockstep that wrote it (see run.json next to it)."
        )


# ------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs, a and b."""

    iteration: int | None
    """The first iteration that differs; None if no recorded iteration does."""
    where: str
    """The differing entry, such as "rollout of shard 2, obs" or "parameter encoder.0.weight"."""
    a: str
    """Its value in run a."""
    b: str
    """Its value in run b."""
    settings: tuple[str, ...] = ()
    """Differing settings and entries of the platform, which may be the cause."""

    def __str__(self) -> str:
        place = "" if self.iteration is None else f"Iteration {self.iteration}: "
        text = f"{place}{self.where} differs, {self.a} != {self.b}"
        if self.settings:
            text += f" (settings that differ: {'; '.join(self.settings)})"
        return text + "."


_ABSENT = "absent"
_OPTIONAL = ("libraries.", "code.")
"""Optional entries of a platform."""
_OF_GPUS = ("gpu", "cudnn", "devices", "cuda")
"""Entries of a platform about GPUs."""
_MODELS = ("gpu", "cudnn", "cuda")
_CPUS = {"collecting": "CPU", "learning": "CPU"}


def _differing(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted name and both values of every leaf that differs between nested dicts, in the order of a."""
    if isinstance(a, dict) and b == _ABSENT and a:
        b = {}
    if isinstance(b, dict) and a == _ABSENT and b:
        a = {}
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _differing(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{name}.{key}" if name else key)
    elif a != b:
        yield name, a, b


def without_gpus(platform: Mapping[str, Any]) -> dict[str, Any]:
    """A platform as if CPUs computed everything."""
    return {**{name: each for name, each in platform.items() if name not in _OF_GPUS}, "gpu": [], "cudnn": None}


def differing_platform(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """The entries of two platforms that differ, each as `name: a != b`. Libraries and users' files that only one
    platform has are ignored: such a library was not used, and such a file was not found, or an earlier version did not
    check it. Earlier versions also recorded GPUs that a run did not use, so their entries about GPUs are ignored."""
    if any(each.get("gpu") and "devices" not in each for each in (a, b)):
        a, b = ({name: value for name, value in each.items() if name not in _OF_GPUS} for each in (a, b))
    elif ("devices" in a) != ("devices" in b):  # the other entries would repeat this difference
        a, b = ({"devices": _CPUS} | {n: x for n, x in each.items() if n not in _MODELS} for each in (a, b))
    found = _differing(dict(a), dict(b))
    return tuple(_told(*each) for each in found if not (each[0].startswith(_OPTIONAL) and _ABSENT in each[1:]))


def platform_or_code(differs: Sequence[str]) -> str:
    """A phrase for differing entries, as the subject of a sentence."""
    return "your own code" if all(each.startswith("code.") for each in differs) else "this platform"


def _told(name: str, a: Any, b: Any) -> str:
    return f"{name}: {a} != {b}"


def _where(name: str, line: Mapping[str, Any]) -> str:
    """A readable name for an entry of a line."""
    rollout, gradient = ("of event", "in batch slot") if "events" in line else ("of shard", "of shard")
    kind, _, rest = name.partition(".")
    if kind == "rollout":
        shard, _, field = rest.partition(".")
        return f"rollout {rollout} {shard}" + (f", {field}" if field else "")
    if kind == "gradient":
        return f"gradient {gradient} {rest}"
    if kind == "parameters":
        return f"parameter {rest}"
    words = {
        "collected_with": "the version that collected",
        "events": "the timing decisions",
        "cuts": "where shards were cut",
        "updates": "the order of updates",
    }
    return words.get(name, name)


def compare(
    head_a: Mapping[str, Any],
    lines_a: list[dict[str, Any]],
    head_b: Mapping[str, Any],
    lines_b: list[dict[str, Any]],
    iterations: int | None = None,
) -> Difference | None:
    """The first difference of two runs, or None.

    Lines are compared first, in the order of cause and effect: the collecting version, each shard's rollout, each
    shard's gradient, the parameters. Differing settings are named with the difference, or alone if all lines agree.

    Args:
        head_a, lines_a: the ledger of run a.
        head_b, lines_b: the ledger of run b.
        iterations: compare only this many, which both ledgers must have.
    """
    settings_a, settings_b = (with_current_names(head["settings"]) for head in (head_a, head_b))
    differing = list(_differing(settings_a, settings_b))
    identities = {head_a["experiment"], head_b["experiment"]}
    if not differing and len(identities) > 1 and not identities <= set(identities_of(settings_a)):
        differing = [("identity", head_a["experiment"], head_b["experiment"])]
    settings = tuple(_told(*each) for each in differing)
    platforms = tuple(f"platform.{each}" for each in differing_platform(head_a["platform"], head_b["platform"]))
    for i, (line_a, line_b) in enumerate(zip(lines_a[:iterations], lines_b[:iterations], strict=False)):
        for name, a, b in _differing(_canonical(line_a), _canonical(line_b)):
            return Difference(i, _where(name, line_a), str(a), str(b), settings + platforms)
    count_a, count_b = (n if iterations is None else min(n, iterations) for n in (len(lines_a), len(lines_b)))
    if count_a != count_b or (iterations is not None and count_a < iterations):
        return Difference(min(count_a, count_b), "length", f"{count_a} iterations", f"{count_b} iterations", settings)
    if differing:
        name, a, b = differing[0]
        return Difference(None, f"settings: {name}", str(a), str(b), settings[1:])
    return None
