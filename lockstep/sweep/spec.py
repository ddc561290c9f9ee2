"""The runs of a sweep, which are experiments with layouts and options, and grids of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from lockstep.buffers.replay_placement import replay_bytes
from lockstep.config.layout import Layout
from lockstep.config.layout_text import AUTO
from lockstep.config.options import RunOptions
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.launchers.auto import choose, with_options
from lockstep.training.prepare import prepare

_LONGEST = 120
"""Maximum length of a name's readable part."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    experiment: Experiment
    """The experiment. Two runs with equal experiments are one run."""
    layout: str = "auto"
    """As for `lockstep train`; the sweep gives the run as many cores and GPUs as it needs. auto becomes the layout of
    one core (of two if collectors run freely), so that as many runs as possible execute side by side."""
    options: RunOptions = field(default_factory=RunOptions)
    """Options of the run, except its folder, which the sweep chooses."""
    label: str = ""
    """The beginning of its name, before seed and hash. Default: task and algorithm."""

    def __post_init__(self) -> None:
        if str(self.layout).startswith(AUTO) and isinstance(self.experiment, Experiment):
            alone = with_options(choose(self.experiment, 1).layout, Layout.parse(self.layout))
            object.__setattr__(self, "layout", str(alone))

    @property
    def title(self) -> str:
        """The beginning of its name."""
        return self.label or f"{task(self.experiment)}-{self.experiment.algorithm.name}"

    @property
    def name(self) -> str:
        """Its folder's name: a readable part and the beginning of the experiment's hash, which makes it unique."""
        readable = re.sub(r"[^A-Za-z0-9.=+_-]+", "-", self.title).strip("-.")[:_LONGEST] or "run"
        return f"{readable}-s{self.experiment.seed}-{self.experiment.identity()[:8]}"

    @property
    def memory(self) -> int:
        """Bytes that its replay memory takes when it is full."""
        return _memory(json.dumps(_without_fractions(to_json(self.experiment.replace(seed=1, total_steps=1)))))

    def validate(self, *, local: bool = True) -> None:
        """Raise SettingsError for mistakes that can be found before anything runs.

        Args:
            local: whether it will run on this machine, which must then have the GPUs.
        """
        for name, kind in (("experiment", Experiment), ("layout", str), ("options", RunOptions), ("label", str)):
            if not isinstance(getattr(self, name), kind):
                raise SettingsError(
                    f"A run of a sweep has {name}={getattr(self, name)!r}, but lockstep.sweep.Run takes "
                    f"{'an' if name == 'experiment' else 'a'} {kind.__name__}."
                )
        layout = Layout.parse(self.layout)
        if layout.launcher.started_externally:
            raise SettingsError(
                "A sweep starts its runs itself, but --layout torchrun leaves that to torchrun. Use processes:N, "
                "which gives the same result."
            )
        if self.options.run is not None:
            raise SettingsError(
                f"--run {self.options.run} cannot be given in a sweep, which chooses the folders of its runs. Leave "
                "it out."
            )
        prepare(self.experiment, layout if local else layout.anywhere())
        layout.validate()
        self.options.validate()


def _without_fractions(settings: Any) -> Any:
    """The settings that sizes depend on: learning rates and other fractions, which sweeps vary most, keep their
    defaults."""
    if isinstance(settings, dict):
        return {name: _without_fractions(x) for name, x in settings.items() if not isinstance(x, float)}
    return settings


@functools.cache  # making an environment to inspect it takes a while
def _memory(settings: str) -> int:
    try:
        experiment: Experiment = from_json(json.loads(settings))
        return experiment.scheme.shards * replay_bytes(experiment)
    except Exception:  # the environment cannot be made here: the run will say so
        return 0


def task(experiment: Experiment) -> str:
    """The environment's id without its folders."""
    return Path(experiment.env.id.removesuffix(".py")).name


def grid(
    experiment: Experiment,
    settings: Mapping[str, Iterable[Any]],
    *,
    layout: str = "auto",
    options: RunOptions | None = None,
    label: str = "",
) -> list[Run]:
    """An experiment with every combination of settings.

    Args:
        experiment: the settings that all runs share.
        settings: values by a setting's path, such as {"algorithm.learning_rate": [1e-3, 3e-4], "seed": range(5)}. The
            last setting varies fastest.
        layout, options: of each run.
        label: beginning of the names; the values of varied settings are appended. Default: task and algorithm.

    Raises:
        SettingsError: a setting does not exist.
    """
    if not isinstance(experiment, Experiment):
        raise SettingsError(
            f"A grid varies a lockstep.Experiment, but {experiment!r} is not one. Give an experiment, such as that of "
            "a recipe: grid(lockstep.recipes.ppo_cartpole(), ...)."
        )
    axes = {name: _axis(name, values) for name, values in settings.items()}
    runs = []
    for combination in itertools.product(*axes.values()):
        one = changed(experiment, dict(zip(axes, combination)))
        varied = {name: str(value) for name, value in zip(axes, combination) if len(axes[name]) > 1}
        begin = label or f"{task(one)}-{experiment.algorithm.name}"  # invalid values are found later
        runs.append(Run(one, layout, options or RunOptions(), labelled(begin, varied)))
    return runs


def _axis(name: str, values: Iterable[Any]) -> list[Any]:
    """The values of a setting."""
    listed = [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
    if not listed:
        raise SettingsError(
            f"The grid's {name} is {values!r}: give a list with at least one value, as in {{{name!r}: [...]}}."
        )
    return plain(listed)


def plain(values: Iterable[Any]) -> list[Any]:
    """Values with NumPy's numbers converted to Python's, which settings need."""
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def labelled(begin: str, varied: Mapping[str, str]) -> str:
    """A name's readable part, with the values of the varied settings that it does not contain already."""
    values = [f"{name.split('.')[-1]}={value}" for name, value in varied.items() if name not in ("env.id", "seed")]
    return "-".join([begin, *values])


def setting(experiment: Experiment, name: str) -> Any:
    """The value of a setting, by its path. Raises SettingsError if the setting does not exist."""
    value: Any = experiment
    for part in _path(name):
        value = _field(value, part, name)
    return value


def replaced(experiment: Experiment, name: str, value: Any) -> Experiment:
    """The experiment with one setting, by its path, replaced. Raises SettingsError if the setting does not exist."""
    return _replaced(experiment, _path(name), value, name)


def changed(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """The experiment with some settings, by their paths, replaced. Raises SettingsError if one does not exist."""
    for name, value in values.items():
        experiment = replaced(experiment, name, value)
    return experiment


def holds(experiment: Experiment) -> bool:
    """Whether its settings are consistent."""
    try:
        experiment.validate()
    except SettingsError:
        return False
    return True


def _path(name: str) -> list[str]:
    return name.replace("-", "_").split(".")


def _replaced(settings: Any, path: list[str], value: Any, name: str) -> Any:
    """The dataclass with one setting, at a path inside it, replaced."""
    before = _field(settings, path[0], name)
    if len(path) > 1:
        value = _replaced(before, path[1:], value, name)
    if isinstance(settings, Mapping):
        return {**settings, path[0]: value}
    if isinstance(settings, tuple):
        place = int(path[0])
        return (*settings[:place], value, *settings[place + 1 :])
    changed: Any = dataclasses.replace(cast("Any", settings), **{path[0]: value})
    return changed


def _field(settings: Any, part: str, name: str) -> Any:
    """A setting of a dataclass, an option by its name, or a number of several by its place."""
    if isinstance(settings, Mapping) and part in settings:
        return settings[part]
    if isinstance(settings, tuple) and part in map(str, range(len(settings))):
        return settings[int(part)]
    if isinstance(settings, Mapping):
        raise SettingsError(
            f"A sweep cannot vary {name}: it is not given. Give it a first value, as in --env.options {part}=0.5."
        )
    known = [f.name for f in dataclasses.fields(settings)] if dataclasses.is_dataclass(settings) else []
    known = [str(place) for place in range(len(settings))] if isinstance(settings, tuple) else known
    if part not in known:
        raise SettingsError(
            f"A sweep cannot vary {name}: {type(settings).__name__} has no setting {part}. It has: "
            f"{', '.join(known) or 'none'}."
        )
    return getattr(settings, part)
