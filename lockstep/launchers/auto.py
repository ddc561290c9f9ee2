"""Chooses the layout of a run if the user names none, by a rule over the experiment and the machine.

No layout changes a result (unless the user's scheme lets timing decide), so the rule only concerns speed. It never
chooses a GPU, which gives other bits than a CPU, or a cluster, or a user's launcher. The user must name these.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import envs
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.envs.adapters import entry_of
from lockstep.experiment import Experiment, WarmStart
from lockstep.models.encoders import IMAGE_ENCODERS
from lockstep.models.trunk import TrunkConfig
from lockstep.run.files import write_whole
from lockstep.run.platform import this_platform
from lockstep.system.machine import cores, user_cache
from lockstep.system.output import print_line
from lockstep.training.callbacks import CallbackLike, unsendable

_CALL = 1e-3
"""Approximate seconds of a forward pass or gradient of one shard's small network."""
_KERNELS = 0.2
"""Approximate share of this time that lockstep's kernels take."""
_PICTURE = 1e-3
"""Approximate total seconds per sample, if a convolution learns from it."""
_CONVOLUTIONS = ("impala", *(name for name, each in IMAGE_ENCODERS.items() if each.costly))
"""Encoders that take this time."""
_SHARED = 5e6
"""The least number of multiplications in a gradient step, in the hidden layers and the core of one network, from which
several processes are faster than one, if kernels compute it. On two cores: PPO on HalfCheetah has 0.3e6 and is a tenth
slower with two processes, CartPole with minibatches of 1,024 has 4e6 and is as fast, and SAC with 256 units has 17e6
and is 1.4 times as fast."""
_GATES = {"gru": 3, "lstm": 4}
"""The number of gates of each recurrent core that kernels compute."""
_LONG = 10.0
"""Seconds. Several processes start only for a run that takes at least this long: two take a few seconds to import
torch, and save at most half of the remaining time."""
_FILE = "layouts.json"
"""Layouts that lockstep tune found, by experiment and machine."""


@dataclass(frozen=True)
class Choice:
    """A layout, and why it was chosen."""

    layout: Layout
    reason: str


def choose(
    experiment: Experiment,
    available: int,
    *,
    iterations: int | None = None,
    repeats: bool = False,
    alone: str = "",
    tuned: Layout | None = None,
) -> Choice:
    """The layout that is probably the fastest.

    Args:
        experiment: an experiment with valid settings.
        available: the number of cores.
        iterations: the number of iterations that will be run; by default, all of the experiment's.
        repeats: whether the run repeats recorded decisions of timing.
        alone: why this program cannot start processes; empty if it can.
        tuned: the layout that lockstep tune found for this experiment on this machine.
    """
    scheme = experiment.scheme
    shards = scheme.shards
    count = f"{available} core{'s' * (available > 1)}"
    if scheme.timing_decides and repeats:
        return Choice(Layout(), "one process repeats what timing decided")
    if scheme.free_running:
        learners = max(1, available // 4)
        collectors, learners = min(shards, max(1, available - learners)), min(shards, learners)
        return Choice(Layout.parse(f"cpu:a{collectors}-l{learners}"), f"{count}, {shards} shards, lag async")
    most = min(shards, available // max(1, experiment.torch_threads))
    if most < 2 and tuned is None:
        return Choice(Layout(), "1 shard" if shards == 1 else count)
    if alone:
        return Choice(Layout(), alone)
    kernels = _has_kernels(experiment)
    if seconds(experiment, iterations, kernels=kernels) < _LONG:
        return Choice(Layout(), "a short run")
    if tuned is not None:
        return Choice(tuned, "lockstep tune found it")
    if kernels and _too_small_to_share(experiment):
        return Choice(Layout(), "gradient steps too small to share")
    each = -(-shards // most)  # shards of the process that has most of them, for which the others wait
    return Choice(Layout("processes", -(-shards // each)), f"{count}, {shards} shards")


def seconds(experiment: Experiment, iterations: int | None = None, *, kernels: bool = False) -> float:
    """Seconds that the experiment takes in one process, within a factor of about five. For small networks this is the
    time of calls, and for large ones the time of samples.

    Args:
        kernels: whether lockstep.kernels compute it.
    """
    steps, _ = experiment.gradient_steps
    scheme, rollout = experiment.scheme, experiment.algorithm.rollout
    acting = experiment.env.num_envs // max(1, scheme.acting_batch or experiment.envs_per_shard)
    call = _CALL * (_KERNELS if kernels else 1)
    each = call * (rollout * max(1, acting) + steps * scheme.shards)
    if isinstance(experiment.model, TrunkConfig) and experiment.model.encoder in _CONVOLUTIONS:
        each += _PICTURE * experiment.samples_per_iteration
    return each * (experiment.iterations if iterations is None else min(iterations, experiment.iterations))


def _too_small_to_share(experiment: Experiment) -> bool:
    """Whether exchanging gradients would take processes longer than they save, if kernels compute the gradients. For
    environments that are stepped in Python, a second process always pays."""
    model = experiment.model
    if not (isinstance(model, TrunkConfig) and model.encoder in ("mlp", "auto") and _steps_natively(experiment)):
        return False
    _, samples = experiment.gradient_steps
    each = sum(into * out for into, out in itertools.pairwise(model.hidden_sizes))
    if model.recurrent:
        each += _GATES[model.core] * model.core_size * (model.hidden_sizes[-1] + model.core_size)
    return samples * each < _SHARED


def _steps_natively(experiment: Experiment) -> bool:
    try:
        return entry_of(envs.resolve(experiment.env).adapter).native
    except SettingsError:
        return False


def _has_kernels(experiment: Experiment) -> bool:
    """Whether kernels compute the experiment in its environment."""
    if experiment.precision != "portable":
        return False
    try:
        return experiment.kernels(*envs.spaces(envs.resolve(experiment.env))) is not None
    except SettingsError:
        return False  # preparing the run says what is wrong


def chosen(
    layout: Layout,
    experiment: Experiment,
    *,
    iterations: int | None = None,
    repeats: bool = False,
    on_iteration: CallbackLike | None = None,
    say: bool = True,
) -> Layout:
    """The user's layout; if it is auto, the one that is chosen for the experiment on this machine, with auto's options.

    Args:
        layout: the user's layout.
        iterations, repeats: as for choose.
        on_iteration: the user's callback, which other processes must be able to load.
        say: whether to print the chosen layout.
    """
    if not layout.is_auto:
        return layout
    try:
        experiment.validate()
    except (AttributeError, SettingsError):
        return Layout()  # preparing the run says what is wrong
    known = remembered(experiment) if layout == Layout(layout.launcher_name) else None
    alone = _why_alone(on_iteration)
    choice = choose(experiment, cores(), iterations=iterations, repeats=repeats, alone=alone, tuned=known)
    if say:
        print_line(f"layout: {choice.layout} (auto: {choice.reason})", sys.stderr)
    return with_options(choice.layout, layout)


def with_options(layout: Layout, options: Layout) -> Layout:
    """A chosen layout with the options of an auto layout."""
    places = ("launcher_name", "workers", "collectors", "learners", "device")
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Layout) if f.name not in places}
    changed = {name: value for name, value in given.items() if value != getattr(Layout, name)}
    return dataclasses.replace(layout, **changed)


def _why_alone(on_iteration: CallbackLike | None) -> str:
    """Why this program cannot start processes; empty if it can: they import the program without running all of it."""
    if multiprocessing.current_process().daemon:
        return "a daemon process cannot start others"
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:  # new processes do not import a notebook or a prompt
        guarded = file is None or "__name__" in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:  # a script from standard input
        guarded = False
    if not guarded:
        return 'the program is not a file with if __name__ == "__main__": before its call'
    if on_iteration is not None and unsendable(on_iteration):
        return "other processes cannot load on_iteration"
    return ""


def remember(experiment: Experiment, layout: Layout) -> Path | None:
    """Store the layout that lockstep tune found, so that auto chooses it. Returns the file; None if it cannot be
    written."""
    path, key = _file(), _key(experiment)
    if key is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**_known(path), key: str(layout)}, indent=1).encode())
    except OSError:
        return None
    return path


def remembered(experiment: Experiment) -> Layout | None:
    """The layout that lockstep tune found for this experiment, with any seed and length, on this machine. A layout with
    GPUs is ignored: it gives other bits, so users must name it."""
    path = _file()
    known = _known(path)
    text = known.get(_key(experiment) or "") if known else None
    try:
        layout = Layout.parse(text) if isinstance(text, str) else None
    except SettingsError:
        return None
    return None if layout is None or layout.uses_gpus else layout


def _file() -> Path:
    return user_cache() / _FILE


def _known(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _key(experiment: Experiment) -> str | None:
    """A hash of the settings that affect speed, of the machine, and of the cores that this process may use."""
    try:
        env = envs.resolve(experiment.env)
    except SettingsError:
        return None
    same_speed = dataclasses.replace(experiment, env=env, seed=1, total_steps=1, warm_start=WarmStart())
    settings = json.dumps([same_speed.identity(), this_platform(), cores()], sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()
