"""The common parts of batched environments' shards: actions, checks of a batch's results, and messages.

Shape legend: B environments, n of them in `rows`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.envs.convert import as_array
from lockstep.models.action_spaces import action_parts, composite
from lockstep.models.observations import ACTION_MASK
from lockstep.system.output import add_note


@contextlib.contextmanager
def locating(what: str) -> Iterator[None]:
    """If a batched environment raises an error other than SettingsError, add what it was doing."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        add_note(error, f"The batched environment raised this error {what}.")
        raise


def returned_numbers(name: str, value: Any, count: int) -> np.ndarray:
    """The numbers [count] that a batch of environments returned: an array or a tensor of numbers or bools.

    Args:
        name: the value's name for errors, such as "rewards".

    Raises:
        SettingsError: the value has another shape or holds something else.
    """
    try:
        found = as_array(value)
    except (TypeError, ValueError, RuntimeError):  # a ragged list, or a tensor of a type that NumPy lacks
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise SettingsError(
            f"The batched environment returned {name} of type {found.dtype}, but must return numbers, [{count}]."
        )
    if found.shape not in ((count,), (count, 1)):
        raise SettingsError(
            f"The batched environment returned {name} of the shape {found.shape}, but ({count},) is needed: one for "
            "each of its environments."
        )
    return found.reshape(count)


def returned_flags(name: str, value: Any, count: int) -> np.ndarray:
    """The bools [count] that a batch of environments returned, perhaps as the numbers 0 and 1.

    Raises:
        SettingsError: as for returned_numbers, or a number is neither 0 nor 1.
    """
    found = returned_numbers(name, value, count)
    if found.dtype == np.bool_:
        return found
    other = found[(found != 0) & (found != 1)]
    if other.size:
        raise SettingsError(
            f"The batched environment returned {name} with {other[0]}, which is neither True nor False. Fix the "
            "environment, or wrap it."
        )
    return found.astype(np.bool_)


def refuse_mask(space: gymnasium.Space[Any], env_id: str, when: str, instead: str) -> None:
    """Raise SettingsError if observations have an action mask. Called where a batch receives actions that the mask may
    forbid and whose results are discarded."""
    if isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces:
        raise SettingsError(
            f"The batch of env.id={env_id} has an {ACTION_MASK}, but {when}, some of its environments get actions that "
            f"the mask forbids and whose results are discarded. {instead}."
        )


def batch_action(space: gymnasium.Space[Any], parts: tuple[np.ndarray, ...], tensors: bool = False) -> Any:
    """A copy of the actions of a whole batch [B, ...], of the type that their space declares."""
    if composite(space):
        batches = [batch_action(part, (x,), tensors) for part, x in zip(action_parts(space), parts, strict=True)]
        return dict(zip(space.spaces, batches)) if isinstance(space, spaces.Dict) else tuple(batches)
    (x,) = parts
    batch = np.array(x, space.dtype).reshape(len(x), *(space.shape or ()))
    return torch.from_numpy(batch) if tensors else batch


def with_rows(arrays: list[np.ndarray], rows: np.ndarray, others: list[np.ndarray]) -> list[np.ndarray]:
    """Copies of the entries of a batch [B, ...], with some rows replaced by `others` [n, ...]."""
    # The types may differ: integers must not cut the floats of other rows.
    copies = [array.astype(np.result_type(array, other)) for array, other in zip(arrays, others, strict=True)]
    for copy, other in zip(copies, others, strict=True):
        copy[rows] = other.reshape(len(rows), *copy.shape[1:])
    return copies
