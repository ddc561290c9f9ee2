"""Named array tuples: typed nested structures of arrays whose fields are all indexed at once.

A *structure* is an array (numpy or torch), None, a dict of structures, or an ArrayTuple. Functions with a structure as
argument also accept observations, which are either a single array or a dict.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree
from typing_extensions import Self, dataclass_transform

S = TypeVar("S")

_ARRAYS = (Tensor, np.ndarray, np.generic)
_PLAIN = frozenset((Tensor, np.ndarray))


class _FieldError(Exception):
    """An error to which every enclosing field adds its name while the error propagates."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []

    def within(self, name: str) -> Self:
        self.path.insert(0, str(name))
        return self

    def __str__(self) -> str:
        return ".".join(self.path) + ": " * bool(self.path) + str(self.args[0])


class StructureError(_FieldError, ValueError):
    """Two structures do not match, or a structure contains something that is not an array. The message names the
    field."""


class FieldIndexError(_FieldError, IndexError):
    """An index does not fit the array of the field that the message names."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class ArrayTuple:
    """Base class of named array tuples. A subclass declares its fields by annotations.

        class Step(ArrayTuple):
            obs: Any  # an array, or a dict of arrays
            reward: Tensor
            prev_reward: Tensor | None = None

        step = Step(obs={"image": image, "speed": speed}, reward=reward)

    Fields are arrays, None, dicts or other ArrayTuples, and cannot be rebound (see replace).

    `x[index]` indexes every array and returns the same type. As in numpy and torch, the result is a view if the index
    is basic (integers and slices) and a copy otherwise. To write, write to the arrays themselves.

    For torch's pytree functions, the fields that are not None are children.

    Raises:
        TypeError: fields are missing or unknown, at construction or in replace.
        StructureError: (a ValueError) structures differ. The message begins with the field's dotted name.
        FieldIndexError: (an IndexError) the index does not fit an array. The message begins with the field's dotted
            name.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _optional: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {k: a for k, a in inspect.get_annotations(cls).items() if "ClassVar" not in str(a)}
        if reserved := sorted(name for name in own if name.startswith("_") or hasattr(ArrayTuple, name)):
            raise TypeError(f"{cls.__name__}: {', '.join(reserved)} cannot be the name of a field")
        for name in own:
            if vars(cls).get(name) is not None:
                raise TypeError(f"{cls.__name__}.{name} can only have the default None")
        cls._fields = tuple(dict.fromkeys((*cls._fields, *own)))
        cls._optional = cls._optional.union(name for name in own if name in vars(cls))
        _pytree.register_pytree_node(cls, _flatten, partial(_unflatten, cls), flatten_with_keys_fn=_flatten_with_keys)

    def __init__(self, **fields: Any) -> None:
        cls = type(self)
        if tuple(fields) != cls._fields:
            fields = _complete(cls, fields)
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be rebound; use replace")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    # Otherwise iteration would use __getitem__ along the first axis until one of the fields ends.
    __iter__ = None

    def __getitem__(self, index: Any) -> Self:
        cls = self.__class__
        result = cls.__new__(cls)
        fields = result.__dict__
        name = ""
        try:
            for name, x in self.__dict__.items():
                fields[name] = x[index] if x.__class__ is Tensor else None if x is None else read(x, index)
        except _FieldError as error:
            raise error.within(name) from error.__cause__
        except IndexError as error:
            raise FieldIndexError(str(error)).within(name) from error
        return result

    def map(self, fn: Callable[[Any], Any]) -> Self:
        """Apply fn to every array. None stays None."""
        return map_structure(fn, self)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed. It shares the other arrays."""
        return type(self)(**{**self.__dict__, **changes})

    def leaves(self) -> list[Any]:
        """All arrays, in canonical order."""
        return [leaf for _, leaf in named_leaves(self)]

    def named_leaves(self) -> Iterator[tuple[str, Any]]:
        """Dotted name and array of each leaf, in canonical order: fields as declared, dict keys sorted."""
        return named_leaves(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dimensions that all arrays share."""
        shared: tuple[int, ...] | None = None
        for leaf in self.leaves():
            shape = tuple(leaf.shape)
            shared = shape if shared is None else _common_prefix(shared, shape)
        return shared or ()

    def to_numpy(self) -> Self:
        """The same memory as numpy arrays."""
        return to_numpy(self)

    def __repr__(self) -> str:
        fields = (f"{name}={_describe(x)}" for name, x in self.__dict__.items())
        return f"{type(self).__name__}({', '.join(fields)})"


def torch_type(dtype: Any) -> torch.dtype:
    """The torch type that corresponds to a numpy type."""
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def map_structure(fn: Callable[..., Any], structure: Any, *rest: Any) -> Any:
    """Apply fn to the corresponding arrays of one or more structures. None, dicts and types are kept.

    Raises:
        StructureError: the structures differ or contain something that is not an array.
    """
    if rest:
        return _map_many(fn, (structure, *rest))
    return _map(fn, structure)


def named_leaves(structure: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and array of each leaf, in canonical order: fields as declared, dict keys sorted."""
    if isinstance(structure, dict):
        items: Iterable[tuple[str, Any]] = sorted(structure.items())
    elif isinstance(structure, ArrayTuple):
        items = structure.__dict__.items()
    else:
        if structure is not None:
            yield prefix, structure
        return
    for name, x in items:
        yield from named_leaves(x, f"{prefix}.{name}" if prefix else name)


def read(structure: S, index: Any) -> S:
    """Index every array of a structure.

    Raises:
        FieldIndexError: the index does not fit an array.
    """
    if structure.__class__ is np.ndarray:
        return _take(structure, index)
    if isinstance(structure, ArrayTuple):
        return structure[index]
    return _map(lambda x: _take(x, index), structure)


class Overlap(NamedTuple):
    """Views of one [T+1, ...] buffer, such that `previous[t]` is `current[t - 1]`."""

    current: Any
    """[T, ...]: all but the first entry."""
    previous: Any
    """[T+1, ...]: the buffer itself. Its first entry precedes the first step."""


def overlap(buffer: Any) -> Overlap:
    """Views of the current and the previous entry of each step, such as action and prev_action."""
    return Overlap(read(buffer, slice(1, None)), buffer)


def to_numpy(structure: Any) -> Any:
    """The same memory as numpy arrays. Tensors must be on the CPU and have a dtype that numpy has."""
    return _map(lambda x: x.detach().numpy() if isinstance(x, Tensor) else x, structure)


def _map(fn: Callable[[Any], Any], x: Any) -> Any:
    if x.__class__ in _PLAIN:
        return fn(x)
    if x is None:
        return None
    if isinstance(x, dict):
        return _map_items(fn, x, {})
    if isinstance(x, ArrayTuple):
        result = x.__class__.__new__(x.__class__)
        _map_items(fn, x.__dict__, result.__dict__)
        return result
    if not isinstance(x, _ARRAYS):
        raise StructureError(f"{type(x).__name__} is not an array, None, dict or ArrayTuple")
    return fn(x)


def _map_items(fn: Callable[[Any], Any], items: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    name = ""
    try:
        for name, x in items.items():
            result[name] = fn(x) if x.__class__ in _PLAIN else _map(fn, x)
    except _FieldError as error:
        raise error.within(name) from error.__cause__
    except IndexError as error:
        raise FieldIndexError(str(error)).within(name) from error
    return result


def _map_many(fn: Callable[..., Any], xs: tuple[Any, ...]) -> Any:
    x = xs[0]
    for y in xs[1:]:
        _check_match(x, y)
    if isinstance(x, (dict, ArrayTuple)):
        parts = xs if isinstance(x, dict) else tuple(y.__dict__ for y in xs)
        result = {}
        for name in parts[0]:
            try:
                result[name] = _map_many(fn, tuple(part[name] for part in parts))
            except _FieldError as error:
                raise error.within(name) from error.__cause__
        return result if isinstance(x, dict) else type(x)(**result)
    return None if x is None else fn(*xs)


def _check_match(x: Any, y: Any) -> None:
    """Raise unless both are arrays, None, dicts with the same keys, or ArrayTuples of one class."""
    if isinstance(x, _ARRAYS) and isinstance(y, _ARRAYS):
        return
    if isinstance(x, dict) and isinstance(y, dict):
        if x.keys() != y.keys():
            raise StructureError(f"expected the keys {sorted(x)}, got {sorted(y)}")
    elif type(x) is not type(y):
        raise StructureError(f"expected {_kind(x)}, got {_kind(y)}")
    elif x is not None and not isinstance(x, ArrayTuple):
        raise StructureError(f"{type(x).__name__} is not an array, None, dict or ArrayTuple")


def _take(x: Any, index: Any) -> Any:
    return x[index] if isinstance(x, Tensor) else x[_numpy_index(index)]


def _numpy_index(index: Any) -> Any:
    """Convert tensors to arrays. numpy would treat a tensor of one integer as this integer, regardless of its shape."""
    if isinstance(index, Tensor):
        return index.numpy(force=True)
    if isinstance(index, tuple):
        return tuple(part.numpy(force=True) if isinstance(part, Tensor) else part for part in index)
    return index


def _kind(x: Any) -> str:
    if x is None or isinstance(x, (dict, ArrayTuple)):
        return type(x).__name__ if x is not None else "None"
    return "an array" if isinstance(x, _ARRAYS) else f"something that is not an array ({type(x).__name__})"


def _describe(x: Any) -> str:
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key}: {_describe(value)}" for key, value in x.items()) + "}"
    if not isinstance(x, _ARRAYS):
        return repr(x)
    dtype = str(x.dtype) if isinstance(x, Tensor) else f"numpy.{x.dtype}"
    device = f"@{x.device}" if isinstance(x, Tensor) and x.device.type != "cpu" else ""
    return f"{dtype}{list(x.shape)}{device}"


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    size = next((i for i, (m, n) in enumerate(zip(a, b, strict=False)) if m != n), min(len(a), len(b)))
    return a[:size]


def _complete(cls: type[ArrayTuple], fields: dict[str, Any]) -> dict[str, Any]:
    """Put the fields into their declared order and fill in None where it is the default."""
    if unknown := sorted(fields.keys() - set(cls._fields)):
        raise TypeError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(cls._fields)}")
    if missing := [name for name in cls._fields if name not in fields and name not in cls._optional]:
        raise TypeError(f"{cls.__name__} lacks the field {', '.join(missing)}")
    return {name: fields.get(name) for name in cls._fields}


def _flatten(x: Any) -> tuple[list[Any], tuple[str, ...]]:
    # For torch's pytrees, None is a leaf, which every map would have to handle. So the context keeps it.
    present = {name: value for name, value in x.__dict__.items() if value is not None}
    return list(present.values()), tuple(present)


def _flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    leaves, names = _flatten(x)
    return [(_pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], names


def _unflatten(cls: type[ArrayTuple], leaves: Iterable[Any], names: Any) -> Any:
    result = cls.__new__(cls)
    result.__dict__.update(dict.fromkeys(cls._fields), **dict(zip(names, leaves, strict=True)))
    return result


def join_entries(obs: dict[str, np.ndarray], out: np.ndarray) -> None:
    """Write the entries of a Dict side by side, sorted by key: [..., *shape] each -> [..., D]."""
    place = 0
    for key in sorted(obs):
        rows = obs[key].reshape(*out.shape[:-1], -1)
        out[..., place : place + rows.shape[-1]] = rows
        place += rows.shape[-1]


def split_entries(joined: np.ndarray, out: dict[str, np.ndarray]) -> None:
    """The inverse of join_entries: [..., D] -> [..., *shape] each."""
    place = 0
    for key in sorted(out):
        size = math.prod(out[key].shape[joined.ndim - 1 :])
        out[key][...] = joined[..., place : place + size].reshape(out[key].shape)
        place += size
