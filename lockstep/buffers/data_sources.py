"""Reads the arrays of algorithm.replay.data, a file or a Minari dataset, and computes how much memory they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep import envs
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.buffers.mapped import mapped_arrays, read_arrays
from lockstep.config.extras import install_command
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.models.observations import entry_spaces

_MINARI = "minari:"
"""The prefix of a Minari dataset's ID in algorithm.replay.data."""
NEXT = "next_observations"
"""The name of the arrays with the observations after each transition."""


def arrays_of(source: str) -> dict[str, np.ndarray]:
    """The arrays of algorithm.replay.data, by name.

    Raises:
        SettingsError: the source does not exist or cannot be read.
    """
    return _of_minari(source.removeprefix(_MINARI)) if source.startswith(_MINARI) else _of_file(source)


class DataBytes(NamedTuple):
    """Bytes of the data that fills replay. Learners hold it until their memories are filled."""

    shared: int = 0
    """Bytes that stay in the file: all processes of a machine share their pages, which the system may drop."""
    own: int = 0
    """Bytes that each learner has a copy of."""

    def held_by(self, learners: int) -> int:
        """Bytes that this many learners of one machine hold together."""
        return self.shared + learners * self.own


def data_bytes(experiment: Experiment) -> DataBytes:
    """The size of the data that fills replay; 0 if there is none, or if it no longer exists, since a resumed run does
    not need it."""
    config = experiment.algorithm
    source = config.replay.data if isinstance(config, OffPolicyConfig) else ""
    if not source:
        return DataBytes()
    mapped: dict[str, np.ndarray] = {}
    try:
        if source.startswith(_MINARI):
            count = int(_dataset(source.removeprefix(_MINARI)).total_steps)
        else:
            count = len(np.atleast_1d(_of_file(source, only=("rewards",)).get("rewards", [])))
            mapped = _of_file(source, mapped_arrays)
    except SettingsError:
        return DataBytes()
    seen, acted = envs.spaces(experiment.env)
    rows = [(action_type(acted), math.prod(acted.shape or ()), "actions")]
    for name, space in entry_spaces(seen).items():
        each = math.prod(space.shape or ())
        rows += [(space.dtype, each, f"{kind}{name and '/'}{name}") for kind in ("observations", NEXT)]
    rows += [(np.float32, 1, "" if experiment.env.reward_clip else "rewards"), (bool, 1, "terminations"), (bool, 1, "")]
    sizes = {True: 0, False: 0}
    for dtype, numbers, name in rows:  # without a name: computed from the file's arrays
        sizes[name in mapped and mapped[name].dtype == dtype] += count * numbers * np.dtype(dtype).itemsize
    return DataBytes(shared=sizes[True], own=sizes[False])


def _of_file(
    source: str,
    read: Callable[[Path, Collection[str] | None], dict[str, np.ndarray]] = read_arrays,
    only: Collection[str] | None = None,
) -> dict[str, np.ndarray]:
    path = Path(source)
    if not path.is_file():
        raise SettingsError(
            f"algorithm.replay.data={source} does not exist in {Path.cwd()}. Name an .npz file, or a Minari dataset as "
            "minari:ID."
        )
    try:
        return read(path, only)
    except (OSError, ValueError, AttributeError, TypeError, BadZipFile) as error:
        raise SettingsError(
            f"algorithm.replay.data={source} cannot be read as an .npz file of numbers ({error}). Write it with "
            "numpy.savez."
        ) from error


def _dataset(name: str) -> Any:
    """A Minari dataset on this machine."""
    try:
        import minari  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SettingsError(
            f"algorithm.replay.data={_MINARI}{name} needs Minari: {install_command('minari')}"
        ) from error
    try:
        return minari.load_dataset(name)
    except (FileNotFoundError, ValueError) as error:
        raise SettingsError(
            f"algorithm.replay.data={_MINARI}{name} is not on this machine. Download it: minari download {name}"
        ) from error


def _of_minari(name: str) -> dict[str, np.ndarray]:
    dataset = _dataset(name)
    parts: dict[str, list[np.ndarray]] = {}
    for episode in dataset.iterate_episodes():
        observed = _by_name("observations", episode.observations)
        each = {key: x[:-1] for key, x in observed.items()}
        each |= {key.replace("observations", NEXT, 1): x[1:] for key, x in observed.items()}
        each |= _by_name("actions", episode.actions)
        each |= {key: getattr(episode, key) for key in ("rewards", "terminations", "truncations")}
        for key, x in each.items():
            parts.setdefault(key, []).append(x)
    return {key: np.concatenate(found) for key, found in parts.items()}


def _by_name(name: str, value: Any) -> dict[str, np.ndarray]:
    """Nested entries by names like observations/a.b."""
    if not isinstance(value, dict):
        return {name: np.asarray(value)}
    joined = {}
    for key, inner in value.items():
        joined |= _by_name(f"{name}.{key}" if "/" in name else f"{name}/{key}", inner)
    return joined


def action_type(space: gymnasium.Space[Any]) -> Any:
    """The NumPy type of the data's actions."""
    return np.int64 if isinstance(space, spaces.Discrete) else space.dtype
