"""Splits an observation space into images, vectors and an action mask."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep.config.settings import SettingsError

ACTION_MASK = "action_mask"
"""The entry of a Dict observation with the mask of allowed discrete actions. Models do not observe it."""
_LIKE_A_MASK = re.compile(r"mask|valid|legal|avail|allowed|feasible|permitted", re.IGNORECASE)
_PICTURE = 8
"""The smallest side of an entry that looks like an image."""
VALUE_TASK = "value_task"
"""The entry of a Dict observation with its task, one-hot, for values with one output per task (lockstep.models.popart).
Models do not observe it."""
PLAIN = ""
"""The key of the only entry of an observation that is not a Dict."""


@dataclass(frozen=True)
class ObservationLayout:
    """The entries of an observation space, in groups that are each sorted by key (the canonical order)."""

    images: tuple[tuple[str, tuple[int, int, int]], ...]
    """uint8 entries with three dimensions [C, H, W]. Their pixels are divided by the numbers in `brightest` and never
    normalized."""
    vectors: tuple[tuple[str, int], ...]
    """All other entries, flattened. Only these can be normalized."""
    mask_size: int
    """Length of the action mask, 0 without one."""
    flattened: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Vectors that look like images: they have three dimensions, two of them large."""
    brightest: tuple[int, ...] = ()
    """The highest value that each image's space allows, usually 255."""

    @staticmethod
    def of(space: gymnasium.Space[Any]) -> ObservationLayout:
        """Classify the entries of a Box, or of a Dict of Boxes (and MultiBinary masks).

        Raises:
            SettingsError: the space has an entry of another type, or nothing to observe.
        """
        images, vectors, mask_size, brightest, flattened = [], [], 0, [], []
        for key, entry in sorted(entry_spaces(space).items()):
            if not isinstance(entry, (spaces.Box, spaces.MultiBinary)):
                raise SettingsError(
                    f"The observation {'entry ' + repr(key) if key else 'space'} is {entry}. The standard model "
                    "observes Box, MultiBinary, and Dict spaces of these. Wrap the environment (for example in "
                    "gymnasium.wrappers.FlattenObservation), or write your own ModelConfig."
                )
            if key == ACTION_MASK:
                mask_size = math.prod(entry.shape)
            elif key == VALUE_TASK:
                continue
            elif len(entry.shape) == 3 and entry.dtype == np.uint8:
                images.append((key, entry.shape))
                brightest.append(max(1, int(entry.high.max())) if isinstance(entry, spaces.Box) else 1)
            else:
                vectors.append((key, math.prod(entry.shape)))
                if len(entry.shape) == 3 and sorted(entry.shape)[1] >= _PICTURE:
                    flattened.append((key, entry.shape))
        if not images and not sum(size for _, size in vectors):
            besides = " except an action mask" if mask_size else ""
            raise SettingsError(
                f"The observation space {space} has nothing to observe{besides}. If there is nothing to tell, let the "
                "environment return a constant, such as a 0 of Box(0, 1, (1,))."
            )
        return ObservationLayout(tuple(images), tuple(vectors), mask_size, tuple(flattened), tuple(brightest))

    def check_mask(self, action_space: gymnasium.Space[Any], choices: int) -> None:
        """Raise SettingsError if the action mask does not fit an action space with this many choices."""
        if self.mask_size not in (0, choices):
            raise SettingsError(
                f"The observation's action_mask has {self.mask_size} entries, but the action space {action_space} has "
                f"{choices} discrete choices. The mask needs one entry for each, in the order of the space. If it is "
                "not a mask, rename it."
            )

    @property
    def vector_size(self) -> int:
        """D: the number of numbers that can be normalized."""
        return sum(size for _, size in self.vectors)

    def columns(self, keys: Collection[str]) -> list[int]:
        """The indices of these vectors' numbers among all D."""
        owners = [key for key, size in self.vectors for _ in range(size)]
        return [place for place, key in enumerate(owners) if key in keys]

    def vector(self, obs: Any) -> Tensor:
        """The vectors in an observation [T, B, ...], concatenated in canonical order: fp32 [T, B, D]."""
        parts = [flatten_entry(entry(obs, key)).float() for key, _ in self.vectors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1) if parts else empty_like(obs)


def observed_by_policies(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """An observation space without the entry VALUE_TASK, which only values see."""
    if not isinstance(space, spaces.Dict) or VALUE_TASK not in space.spaces:
        return space
    return spaces.Dict({key: entry for key, entry in space.spaces.items() if key != VALUE_TASK})


def allowed_actions(obs: Any) -> Tensor:
    """The action mask of observations [T, B, ...]: bool [T, B, num_logits], True where an action is allowed."""
    return obs[ACTION_MASK].flatten(2).bool()


def unused_mask(space: gymnasium.Space[Any], choices: int) -> str:
    """A warning about an entry that looks like an action mask but is not used as one; "" if there is none.

    Args:
        space: the observation space, as models see it.
        choices: number of discrete actions; 0 if actions are not discrete.
    """
    named = space.spaces if isinstance(space, spaces.Dict) else {}
    if not choices or ACTION_MASK in named:
        return ""
    for key, found in named.items():
        names = key.split(".")
        if ACTION_MASK in names or (_LIKE_A_MASK.search(names[-1]) and math.prod(found.shape or ()) == choices):
            return (
                f"The entry {key!r} of the observation looks like a mask of the {choices} actions, but the model only "
                f"observes it, and it forbids no action. A mask must be one array, the entry {ACTION_MASK!r} of the "
                "outermost Dict, with 1 for each allowed action. If it is a mask, change it in the environment or a "
                "wrapper."
            )
    return ""


def precision_warning(low: np.ndarray, high: np.ndarray) -> str:
    """A warning about numbers between low and high [D] that are too large for float32 to distinguish; "" if there are
    none."""
    reach = np.maximum(np.abs(low), np.abs(high)).astype(np.float32)
    with np.errstate(invalid="ignore"):  # infinities and NaN
        step, spread = np.spacing(reach), high.astype(np.float64) - low
        lost = (reach >= _EXACT / 16) & (spread < _LEVELS * step) & ((spread > 0) | (reach >= _EXACT))
    if not lost.any():
        return ""
    at = int(np.argmax(np.where(lost, reach, 0)))
    return (
        f"has numbers as large as {reach.flat[at]:.4g}. float32 cannot tell such numbers apart if they differ by less "
        f"than {step.flat[at]:g}, and the observed ones differ by {spread.flat[at]:g}. Declare the true bounds in "
        "the observation_space (their middle is then subtracted in float64), or subtract an offset in the environment."
    )


_EXACT = 2.0**24
"""float32 represents all whole numbers up to this one."""
_LEVELS = 64
"""An observation should vary by at least this many steps of float32."""


def entry_spaces(space: gymnasium.Space[Any]) -> dict[str, gymnasium.Space[Any]]:
    """The space of each entry of an observation, by key."""
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {PLAIN: space}


def entries(obs: Any) -> dict[str, Tensor]:
    """The tensor of each entry of an observation, by key."""
    return obs if isinstance(obs, dict) else {PLAIN: obs}


def entry(obs: Any, key: str) -> Tensor:
    """The tensor under a key. PLAIN means the observation itself."""
    return obs if key == PLAIN else obs[key]


def flatten_entry(x: Tensor) -> Tensor:
    """[T, B, ...] -> [T, B, D]"""
    return x.reshape(*x.shape[:2], -1)


def empty_like(obs: Any) -> Tensor:
    """fp32 [T, B, 0], for an observation without vectors."""
    first = obs if isinstance(obs, Tensor) else next(iter(obs.values()))
    return torch.empty(*first.shape[:2], 0, device=first.device)
