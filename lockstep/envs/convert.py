"""Converts observations to the form that models take, and actions to the form that environments take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.envs.base import Observation
from lockstep.models.action_spaces import action_parts, choices_of, composite
from lockstep.models.observations import ACTION_MASK
from lockstep.system.output import print_warning

_Write = Callable[[np.ndarray, np.ndarray], None]
_Where = Callable[[int], str]
_COLORS = (1, 3, 4)
"""Channels that an image may have."""
_LOOKS = 16
"""The number of first batches that are compared with the bounds of their space. Comparing every batch would take as
long as the steps of some environments."""
_FAR = 1e6
"""How far a number may lie outside its bounds, in multiples of their width. Small excesses are common and harmless."""
_GOALS = ("achieved_goal", "desired_goal")
"""Entries that the environment's compute_reward takes, so they are not shifted."""
_LARGE, _TIGHT = 2.0**16, 2.0**-7
"""If bounds are at least this far from 0, and their distance is at most this share of it, float32 keeps 16 bits or
fewer of differences."""
Leaf = tuple[tuple[str | int, ...], spaces.Space[Any]]


def as_array(x: Any) -> np.ndarray:
    """A value or tensor as an array."""
    return x.numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)


_warned: set[tuple[str, str]] = set()
"""Observations and spaces for which the warning about bounds was printed in this process."""


class _Unfit(SettingsError):
    """One observation of a batch does not fit its space."""

    def __init__(self, text: str, row: int = 0) -> None:
        super().__init__(text)
        self.row = row


class _Entry:
    """Checks and converts one entry of observations."""

    def __init__(
        self, key: str, path: tuple[str | int, ...], space: spaces.Space[Any], write: _Write, image: bool
    ) -> None:
        self.key, self.path, self.space, self.write = key, path, space, write
        self.name = f"observation {key!r}" if key else "observation"
        self.shape = tuple(space.shape or ())
        self.dtype: np.dtype[Any] | None = None
        """The type of the last batch that was checked."""
        whole = isinstance(space, spaces.MultiBinary) or (isinstance(space, spaces.Box) and space.dtype.kind in "biu")
        self._kinds = "bu" if image else "biu" if whole else "biuf"

    def require_kind(self, batch: np.ndarray, values: Any) -> None:
        """Raise SettingsError if a batch does not have the kind of numbers that the space declares."""
        if batch.dtype.kind not in self._kinds:
            kinds = [np.asarray(value).dtype.kind in self._kinds for value in values]
            row = kinds.index(False) if False in kinds else 0
            found = np.asarray(values[row])
            raise _Unfit(
                f"An {self.name} of the environment is of type {found.dtype}, as in {found.ravel().tolist()[:1]}, but "
                f"its observation_space, {self.space}, says {self.space.dtype}. Fix the environment, or wrap it, so "
                "that both agree.",
                row,
            )
        self.dtype = batch.dtype

    def of_batch(self, obs: Any, count: int) -> np.ndarray:
        """This entry of a batch of `count` observations."""
        value = obs
        try:
            for part in self.path:
                value = value[part]
            array = as_array(value)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(
                f"An {self.name} of the batched environment cannot be read ({error!r}). Return arrays or tensors "
                "with one row for each environment, nested as observation_space is."
            ) from error
        wanted = (count, *self.shape)
        if array.shape[:1] != wanted[:1] or _without_ones(array.shape[1:]) != _without_ones(self.shape):
            raise SettingsError(
                f"An {self.name} of the batched environment has the shape {array.shape}, but {wanted} is "
                f"needed: one row for each of the {count} environments, and observation_space says {self.shape}."
            )
        return array

    def compare(self, batch: np.ndarray, where: Callable[[int], str]) -> None:
        """Warn if numbers of a batch are outside the bounds of the space, once in each process.

        Raises:
            SettingsError: a number is far outside.
        """
        if isinstance(self.space, spaces.MultiBinary):
            low, high = np.zeros(self.shape), np.ones(self.shape)
        elif isinstance(self.space, spaces.Box):
            low, high = self.space.low.astype(np.float64), self.space.high.astype(np.float64)
        else:
            return  # the conversion checks these numbers
        x = batch.astype(np.float64)
        with np.errstate(all="ignore"):  # numbers and bounds may be infinite
            beyond = np.nan_to_num(np.maximum(low - x, x - high), posinf=0)
            beyond = np.maximum(beyond, 0) / np.where(np.isfinite(high - low), np.maximum(high - low, 1e-3), 1)
        if not beyond.any():
            return
        row, *at = (int(i) for i in np.unravel_index(beyond.argmax(), beyond.shape))
        value, least, most = batch[(row, *at)], low[tuple(at)], high[tuple(at)]
        text = (
            f"An {self.name} of the environment has {value:g}{f' at {at}' if at else ''}, but its observation_space "
            f"goes from {least:g} to {most:g}{' there' if at else ''}."
        )
        if beyond[(row, *at)] > _FAR:
            raise _Unfit(f"{text} Fix the environment, or wrap it, so that its observations lie inside.", row)
        if (key := (self.name, repr(self.space))) not in _warned:
            _warned.add(key)
            print_warning(f"{text} It was {where(row)}. Such observations are taken as they are.")


class ObservationWriter:
    """Converts batches of a library's observations into the caller's buffers, in one copy.

    Images (uint8 with two or more axes) become channels-first uint8: [H, W, C] -> [C, H, W], [H, W] -> [1, H, W],
    stacked [S, H, W, C] or [S, C, H, W] -> [S * C, H, W]; they keep the highest value of their space. Everything else
    becomes float32: numbers unchanged (or minus the middle of their bounds, if these are close together and far from
    0), Discrete and MultiDiscrete as one-hot vectors, scalars with shape [1]. Dict and Tuple spaces become one flat
    Dict, where dots join the keys of nested spaces.

    Args:
        space: the space of the library's observations.
        without: keys of the flat Dict that are left out; observations may lack them.
    """

    space: spaces.Space[Any]
    """The space of a single environment's written observations: a Box, or a Dict of Boxes."""

    def __init__(self, space: gymnasium.Space[Any], *, without: Collection[str] = ()) -> None:
        self._entries: list[_Entry] = []
        self.looks = _LOOKS
        """The number of further batches to compare with the bounds."""
        converted: dict[str, spaces.Space[Any]] = {}
        for path, leaf in _leaves(space, ()):
            key = ".".join(map(str, path))
            if key and key in without:
                continue
            if key in converted:
                raise SettingsError(f"Two entries of the observation would be called {key!r}: rename one of them.")
            converted[key], write = _conversion(leaf, key)
            self._entries.append(_Entry(key, path, leaf, write, image=converted[key].dtype == np.uint8))
        self._nested = isinstance(space, (spaces.Dict, spaces.Tuple))
        self.space = spaces.Dict(converted) if self._nested else converted[""]

    def write(self, obs: Any, out: Observation) -> None:
        """Convert a batch (arrays [B, ...], nested as the space is) into out."""
        for entry in self._entries:
            value = obs
            for part in entry.path:
                value = value[part]
            if value.shape[1:] != entry.shape:
                value = _as_declared(entry, value)
            entry.write(value, out[entry.key] if self._nested else out)

    def write_list(
        self, observations: list[Any], out: Observation, where: Callable[[int], str] = lambda j: f"observation {j}"
    ) -> None:
        """Convert a list of B single observations into out. where(j) describes the origin of observation j."""
        look = self._looks_now()
        for entry in self._entries:
            try:
                values = observations
                for part in entry.path:
                    values = [value[part] for value in values]
                self._write_entry(entry, np.array(values), values, out, where if look else None)
            except _Unfit as unfit:
                raise SettingsError(f"{unfit} It was {where(unfit.row)}.") from unfit
            except (LookupError, TypeError, ValueError, RuntimeError) as error:
                unfit = _unlike(entry, observations, error)
                raise SettingsError(f"{unfit} It was {where(unfit.row)}.") from error

    def arrays(self, obs: Any, count: int) -> list[np.ndarray]:
        """The entries of a batch of `count` observations, which are arrays or tensors [count, ...], nested as the space
        is.

        Raises:
            SettingsError: an entry is missing or has another shape.
        """
        return [entry.of_batch(obs, count) for entry in self._entries]

    def write_arrays(self, arrays: list[np.ndarray], out: Observation, where: Callable[[int], str]) -> None:
        """Convert the result of `arrays` into out. where(j) describes the origin of observation j."""
        look = self._looks_now()
        for entry, array in zip(self._entries, arrays, strict=True):
            try:
                self._write_entry(entry, array, array, out, where if look else None)
            except _Unfit as unfit:
                raise SettingsError(f"{unfit} It was {where(unfit.row)}.") from unfit

    def _looks_now(self) -> bool:
        """Whether this batch is compared with the bounds."""
        look, self.looks = self.looks > 0, max(0, self.looks - 1)
        return look

    def _write_entry(
        self, entry: _Entry, array: np.ndarray, values: Any, out: Observation, where: _Where | None
    ) -> None:
        """Check and convert one entry of a batch. Compare it with its bounds if `where` is given.

        Args:
            values: the single observations from which the array was made, or the array itself.
        """
        if array.dtype is not entry.dtype:
            entry.require_kind(array, values)
        if array.shape[1:] != entry.shape:
            array = _as_declared(entry, array)
        if where is not None:
            entry.compare(array, where)
        entry.write(array, out[entry.key] if self._nested else out)


def _as_declared(entry: _Entry, batch: np.ndarray) -> np.ndarray:
    """A batch in the shape of its space. Raises SettingsError if shapes differ in more than axes of length 1."""
    found, declared = batch.shape[1:], entry.shape
    if _without_ones(found) != _without_ones(declared):
        raise _Unfit(
            f"An {entry.name} of the environment has the shape {found}, but its observation_space says {declared}. "
            "Fix the environment, or wrap it, so that both are equal."
        )
    return batch.reshape(len(batch), *declared)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]


def _unlike(entry: _Entry, observations: list[Any], error: Exception) -> _Unfit:
    """The error that says why observations could not be converted."""
    for row, value in enumerate(observations):
        found = ""
        try:
            for part in entry.path:
                value = value[part]
        except (LookupError, TypeError):
            entries = f"are {', '.join(map(str, value))}" if isinstance(value, dict) else f"is {value!r}"
            found = f"is missing: there {entries}"
        else:
            with contextlib.suppress(ValueError, RuntimeError):  # a ragged list has no shape
                if np.shape(value) != entry.shape:
                    found = f"has the shape {np.shape(value)}, but its observation_space says {entry.shape}"
        if found:
            return _Unfit(f"An {entry.name} of the environment {found}. Fix the environment, or wrap it.", row)
    return _Unfit(f"An {entry.name} of the environment cannot be read ({error}). Fix the environment, or wrap it.")


def _leaves(space: gymnasium.Space[Any], path: tuple[str | int, ...]) -> list[Leaf]:
    children: list[tuple[str | int, spaces.Space[Any]]]
    if isinstance(space, spaces.Dict):
        children = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        children = list(enumerate(space.spaces))
    else:
        return [(path, space)]
    return [leaf for key, child in children for leaf in _leaves(child, (*path, key))]


def _conversion(space: spaces.Space[Any], key: str) -> tuple[spaces.Box, Callable[[np.ndarray, np.ndarray], None]]:
    where = f" {key!r}" if key else ""
    if key == ACTION_MASK and isinstance(space, spaces.MultiDiscrete) and (space.nvec == 2).all():
        space = spaces.MultiBinary(space.nvec.shape)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        sizes = np.array(choices_of(space))
        column = np.repeat(np.arange(sizes.size), sizes)
        symbol = np.concatenate([np.arange(size) for size in sizes]) + np.repeat(np.ravel(space.start), sizes)

        def one_hots(x: np.ndarray, out: np.ndarray) -> None:
            out[...] = x.reshape(len(out), -1)[:, column] == symbol
            lacking = np.flatnonzero(out.sum(-1) != sizes.size)  # a number outside the space has no one-hot vector
            if lacking.size:
                raise _Unfit(
                    f"An observation{where} of the environment is {x[lacking[0]]}, which its observation_space {space} "
                    "does not contain. Fix the environment, or wrap it, so that it does.",
                    int(lacking[0]),
                )

        return _vector((symbol.size,)), one_hots
    if not isinstance(space, (spaces.Box, spaces.MultiBinary)):
        raise SettingsError(
            f"The observation{where} has the space {space}. Models take Box, Discrete, MultiDiscrete and MultiBinary "
            "spaces, and Dict and Tuple spaces of them: wrap the environment in a gymnasium wrapper that turns it into "
            "one of these, and give that as --env.id file.py:make."
        )
    shape = tuple(space.shape)
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(shape) >= 2 and key != ACTION_MASK:
        return _image_conversion(shape, int(space.high.max()))
    target = shape or (1,)

    def number(x: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, x.reshape(out.shape), casting="unsafe")

    middle = _middle(space) if isinstance(space, spaces.Box) and key not in _GOALS else None
    if middle is None:
        return _vector(target), number
    return _vector(target), lambda x, out: number(np.subtract(x, middle, dtype=np.float64), out)


def _middle(space: spaces.Box) -> np.ndarray | None:
    """The offset to subtract from each number, so that rounding to float32 does not remove its variation. It is the
    middle of bounds that are close together and far from 0, and 0 elsewhere. None if there are no such bounds."""
    if space.dtype in (np.float16, np.float32):
        return None
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    reach = np.maximum(np.abs(low), np.abs(high))
    with np.errstate(over="ignore", invalid="ignore"):
        tight = np.isfinite(reach) & (reach >= _LARGE) & (high > low) & (high - low <= reach * _TIGHT)
        return np.where(tight, (low + high) / 2, 0.0) if tight.any() else None


def _image_conversion(
    shape: tuple[int, ...], brightest: int
) -> tuple[spaces.Box, Callable[[np.ndarray, np.ndarray], None]]:
    channels_first = len(shape) == 4 and shape[1] in _COLORS and shape[3] not in _COLORS
    if len(shape) == 4 and not channels_first:
        s, h, w, c = shape
        target = (s * c, h, w)

        def write(x: np.ndarray, out: np.ndarray) -> None:
            for i in range(s):
                np.copyto(out[:, i * c : (i + 1) * c], np.moveaxis(x[:, i], -1, 1))

    elif len(shape) == 3 and _channels_last(*shape):
        target = (shape[2], shape[0], shape[1])

        def write(x: np.ndarray, out: np.ndarray) -> None:
            np.copyto(out, np.moveaxis(x, -1, 1))

    else:
        target = (math.prod(shape[:-2]), *shape[-2:])

        def write(x: np.ndarray, out: np.ndarray) -> None:
            np.copyto(out, x.reshape(out.shape))

    return spaces.Box(0, brightest, target, np.uint8), write


def _channels_last(first: int, second: int, last: int) -> bool:
    """Whether an image's channels are the last axis: if the other two axes are equal, or only the last axis has a
    number of channels that colors have, or the last axis is far shorter than both others."""
    if (first == second) != (second == last):
        return first == second
    if (last in _COLORS) != (first in _COLORS):
        return last in _COLORS
    return 4 * last <= min(first, second)


def _vector(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def single_action(space: gymnasium.Space[Any], parts: tuple[np.ndarray, ...], j: int) -> Any:
    """A copy of environment j's action, of the type that its space declares."""
    if composite(space):
        actions = [single_action(part, (x,), j) for part, x in zip(action_parts(space), parts, strict=True)]
        return dict(zip(space.spaces, actions)) if isinstance(space, spaces.Dict) else tuple(actions)
    (x,) = parts
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(x[j])
    # Environments may change the action that they receive, so they get a copy.
    return np.array(x[j], space.dtype).reshape(space.shape)
