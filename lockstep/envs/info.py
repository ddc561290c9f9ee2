"""Numbers that environments report in their info, combined over the steps of an episode (env.metrics).

Shape legend: B environments, M metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.envs.answers import single
from lockstep.system.output import print_warning


def _last(before: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), before, x)


def _sum(before: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(before), x, before + np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf))


_OVER_STEPS = {"last": _last, "mean": _sum, "sum": _sum, "max": np.fmax, "min": np.fmin}
"""How the numbers of an episode's steps are combined. NaN means a step without a number. A mean is divided later."""
_CLOCK = "episode.t"
"""Seconds that gymnasium's RecordEpisodeStatistics measures."""
_told: set[str] = set()
"""Metrics about which this process has warned."""


class Asked(NamedTuple):
    """One entry of env.metrics."""

    key: str
    """The key in the info: `success`, or `episode.r` for the entry r of a dict."""
    over: str
    """How an episode's steps are combined: last, mean, sum, max or min."""

    @property
    def label(self) -> str:
        """The name among the metrics: the key, followed by `over` unless that is last."""
        return self.key if self.over == "last" else f"{self.key}_{self.over}"

    @staticmethod
    def parse(text: str) -> Asked:
        """Read KEY or KEY:OVER.

        Raises:
            SettingsError: the text has neither form.
        """
        key, colon, over = text.rpartition(":")
        key, over = (key, over) if colon else (text, "last")
        if not key or over not in _OVER_STEPS or any(c.isspace() or c in ",/" for c in key):
            raise SettingsError(
                f"env.metrics={text!r} is neither KEY nor KEY:OVER. KEY is the name of a number in the environment's "
                f"info, and OVER one of {', '.join(_OVER_STEPS)}, over the steps of an episode. For example, "
                "--env.metrics success,height:mean."
            )
        if key == _CLOCK:
            raise SettingsError(
                f"env.metrics={text!r} is measured with a clock, so it differs on every layout. Leave it out: the "
                "metrics time/… and speed/… show where time goes."
            )
        return Asked(key, over)


def labels(metrics: tuple[str, ...]) -> list[str]:
    """The names of the metrics that env.metrics asks for, without the group env/.

    Raises:
        SettingsError: an entry has the wrong form, or two have the same name.
    """
    found = [Asked.parse(text).label for text in metrics]
    for name in found:
        if found.count(name) > 1:
            raise SettingsError(f"env.metrics={','.join(metrics)} names {name} twice: leave one of the two out.")
    return found


class EpisodeNumbers:
    """The numbers that the current episodes of B environments have reported.

    An adapter calls `begin` where episodes begin, `note` or `note_all` for every step, and then `add` once. Rebuilding
    an environment from its actions does the same, so checkpoints need not contain these numbers.

    Args:
        metrics: env.metrics.
        num_envs: B.
        tells: whether to warn about keys that no info has. One shard of a run does this.
    """

    def __init__(self, metrics: tuple[str, ...], num_envs: int, *, tells: bool = True) -> None:
        self._asked = [Asked.parse(text) for text in metrics]
        shape = num_envs, len(metrics)
        self._noted, self._so_far = np.full(shape, np.nan), np.full(shape, np.nan)
        self._counts = np.zeros(shape, np.int64)
        self._nothing = np.full(shape, np.nan)
        self._unseen = {each.key for each in self._asked} if tells else set[str]()
        """Keys that no info has had so far."""
        self._others: dict[str, None] = {}
        """Keys of all numbers in infos so far, in the order of their appearance."""

    def begin(self, rows: int | slice | np.ndarray) -> None:
        """Clear the numbers of these environments, whose episodes begin now."""
        self._noted[rows] = self._so_far[rows] = np.nan
        self._counts[rows] = 0

    def note(self, j: int, info: Any) -> None:
        """Read the info of environment j's step."""
        for m, each in enumerate(self._asked):
            self._noted[j, m] = number_of(info, each.key)
        if self._unseen:
            self._look(info)

    def note_all(self, infos: Mapping[str, Any], going: np.ndarray) -> None:
        """Read the infos of a step of all environments at once, in the form that numbers_of takes. going: bool [B],
        False for environments that were reset instead."""
        for m, each in enumerate(self._asked):
            self._noted[:, m] = np.where(going, numbers_of(infos, each.key, len(going)), np.nan)
        if self._unseen:
            self._look(infos)

    def add(self) -> None:
        """Add the numbers that were read to the episodes'."""
        for m, each in enumerate(self._asked):
            self._so_far[:, m] = _OVER_STEPS[each.over](self._so_far[:, m], self._noted[:, m])
        self._counts += ~np.isnan(self._noted)
        self._noted[:] = np.nan

    def values(self, ended: np.ndarray, shortened: np.ndarray | None = None) -> np.ndarray:
        """The combined numbers of episodes that have ended, float64 [B, M]; NaN where there was no number. If no
        environment has reported a key by the end of an episode, a warning names the keys that exist.

        Args:
            ended: bool [B]: the episodes that have ended. The other rows are meaningless.
            shortened: bool [B]: those that env.decorrelate has cut. They may lack the numbers of a last step, so they
                cause no warning.
        """
        if not ended.any():
            return self._nothing
        found = self._so_far.copy()
        for m, each in enumerate(self._asked):
            if each.over == "mean":
                found[:, m] /= np.maximum(self._counts[:, m], 1)
        if self._unseen and (shortened is None or (ended & ~shortened).any()):
            self._warn()
        return found

    def state(self) -> dict[str, np.ndarray]:
        """The numbers of the current episodes, for environments that are not rebuilt from their actions."""
        return {"numbers": self._so_far.copy(), "number_counts": self._counts.copy()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a result of state."""
        self._so_far = state["numbers"].astype(np.float64)
        self._counts = state["number_counts"].astype(np.int64)

    def _look(self, info: Mapping[str, Any]) -> None:
        keys = dict.fromkeys(_keys(info))
        self._unseen -= keys.keys()
        self._others |= keys

    def _warn(self) -> None:
        unseen = sorted(self._unseen - _told)
        _told.update(unseen)
        self._unseen.clear()  # because looking for keys takes time
        if unseen:
            found = ", ".join(self._others) or "no numbers"
            print_warning(
                f"env.metrics: the environment's info had no {' and no '.join(unseen)} in any step of an "
                f"episode. It had {found}. Metrics appear once an episode reports them."
            )


def number_of(info: Any, key: str) -> float:
    """The number that a step's info has for a key; NaN if it has none.

    Args:
        info: the info of a gymnasium environment.
        key: the key of an entry, or `outer.inner` for the entry of a dict in it.

    Raises:
        SettingsError: the entry is something else, such as a text.
    """
    found = _entry(info, key)
    value = None if found is None else found[0][found[1]]
    if value is None:
        return np.nan
    number = value if isinstance(value, (float, int)) else single(value)
    if number is None:
        raise _no_number(key, value)
    return float(number)


def numbers_of(infos: Mapping[str, Any], key: str, num_envs: int) -> np.ndarray:
    """The numbers that the infos of B environments have for a key, float64 [B]; NaN where there is none.

    Args:
        infos: arrays [B] by key, as gymnasium's vector environments and EnvPool return them. A bool array [B] whose key
            begins with an underscore tells which environments have the entry, or the dict that contains it.
        key: as for number_of.
        num_envs: B.

    Raises:
        SettingsError: the entry is not an array of B numbers.
    """
    found = _entry(infos, key)
    if found is None:
        return np.full(num_envs, np.nan)
    holder, name = found
    values = np.asarray(holder[name])
    if values.dtype.kind not in "biuf" or values.size != num_envs:
        raise _no_number(key, holder[name])
    present = np.ones(num_envs, np.bool_)
    while True:
        name = key if key in infos else key.partition(".")[0]
        present &= np.asarray(infos.get(f"_{name}", True), np.bool_)
        if name == key:
            return np.where(present, values.astype(np.float64).reshape(num_envs), np.nan)
        infos, key = infos[name], key.partition(".")[2]


def _entry(info: Any, key: str) -> tuple[Mapping[str, Any], str] | None:
    """The dict that contains an entry, and the entry's name there; None if there is none. A key with a dot may be one
    name, such as TimeLimit.truncated, or lead into a dict."""
    if not isinstance(info, Mapping):
        return None
    if key in info:
        return info, key
    outer, dot, inner = key.partition(".")
    return _entry(info.get(outer), inner) if dot else None


def _keys(info: Any, prefix: str = "") -> Iterator[str]:
    """The keys of all numbers in an info, as env.metrics names them."""
    for name, value in info.items() if isinstance(info, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
        elif not str(name).startswith("_") and f"{prefix}{name}" != _CLOCK and _is_numeric(value):
            yield f"{prefix}{name}"


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (float, int)) or single(value) is not None:
        return True
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "biuf"


def _no_number(key: str, value: Any) -> SettingsError:
    return SettingsError(
        f"env.metrics={key}: the environment's info has {value!r} there, which is not a number. Name another key, or "
        "let the environment report a number."
    )
