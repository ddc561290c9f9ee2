"""The layout of a run whose user names none: a rule over the experiment and the machine.

No layout changes a result (unless timing decides, which the user then asked for), so the rule is about speed alone. It
never takes a GPU, which gives different bits than a CPU, a cluster, or a launcher of a user's own: these must be named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
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
from lockstep.system.machine import cores
from lockstep.system.output import print_line

_CALL = 1e-3
"""Seconds that one shard's small network takes for a forward pass, or for a gradient, about."""
_KERNELS = 0.2
"""Share of that time which lockstep's kernels take, about."""
_PICTURE = 1e-3
"""Seconds that a sample takes in all, if a convolution learns from it, about."""
_CONVOLUTIONS = ("impala", *(name for name, each in IMAGE_ENCODERS.items() if each.costly))
"""Encoders that cost so much."""
_SHARED = 5e6
"""Products of a gradient step, in the hidden layers and the core of one network, from which on processes share it with
gain, if kernels compute it. On two cores: PPO on HalfCheetah has 0.3e6 and is a tenth slower with two processes,
CartPole with minibatches of 1,024 has 4e6 and is as fast, SAC with 256 units has 17e6 and is half as fast again."""
_GATES = {"gru": 3, "lstm": 4}
"""How many gates those cores have that kernels compute."""
_LONG = 10.0
"""Seconds from which on a run is worth the start of several processes: two take a few seconds to import torch, and save
at most half of the time that follows."""
_FILE = "layouts.json"
"""Layouts that lockstep tune found, by experiment and machine."""


@dataclass(frozen=True)
class Choice:
    """A layout, and why it is the one."""

    layout: Layout
    reason: str


def choose(
    experiment: Experiment,
    available: int,
    *,
    iterations: int | None = None,
    repeats: bool = False,
    starts: bool = True,
    tuned: Layout | None = None,
) -> Choice:
    """The fastest layout, as far as a rule can tell.

    Args:
        experiment: of valid settings.
        available: cores.
        iterations: that will be run; by default, all of the experiment's.
        repeats: whether a record says what timing decided, where it decides.
        starts: whether this program can start processes.
        tuned: what lockstep tune found for this experiment on this machine.
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
    if not starts:
        return Choice(Layout(), 'the program does not guard its call by if __name__ == "__main__":')
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
    """Seconds that the experiment takes in one process, within a factor of five or so: the time of calls for small
    networks, of samples for large ones.

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
    """Whether processes would exchange gradients for longer than they save, if kernels compute these. Environments that
    are stepped in Python are worth a second process anyway."""
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
    """Whether kernels compute it, in the environment that it names."""
    if experiment.precision != "portable":
        return False
    try:
        return experiment.kernels(*envs.spaces(envs.resolve(experiment.env))) is not None
    except SettingsError:
        return False  # preparing the run says what is wrong


def chosen(
    layout: Layout, experiment: Experiment, *, iterations: int | None = None, repeats: bool = False, say: bool = True
) -> Layout:
    """The layout itself, unless it is auto: then the one for the experiment on this machine, with auto's options.

    Args:
        layout: as the user gave it.
        iterations, repeats: as of choose.
        say: whether to print which one it is.
    """
    if not layout.is_auto:
        return layout
    try:
        experiment.validate()
    except (AttributeError, SettingsError):
        return Layout()  # preparing the run says what is wrong
    known = remembered(experiment) if layout == Layout(layout.launcher_name) else None
    choice = choose(
        experiment, cores(), iterations=iterations, repeats=repeats, starts=_can_start_processes(), tuned=known
    )
    if say:
        print_line(f"layout: {choice.layout} (auto: {choice.reason})", sys.stderr)
    return with_options(choice.layout, layout)


def with_options(layout: Layout, options: Layout) -> Layout:
    """A chosen layout with the options of auto."""
    places = ("launcher_name", "workers", "collectors", "learners", "device")
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Layout) if f.name not in places}
    changed = {name: value for name, value in given.items() if value != getattr(Layout, name)}
    return dataclasses.replace(layout, **changed)


def _can_start_processes() -> bool:
    """Whether a new process can import this program again, without running all of it."""
    if multiprocessing.current_process().daemon:
        return False
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return True  # a notebook or a prompt, which new processes do not import
    try:
        return "__name__" in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # a script from standard input


def remember(experiment: Experiment, layout: Layout) -> Path | None:
    """Keep what lockstep tune found, for auto to choose it; None if it cannot be kept."""
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
    """What lockstep tune found for this experiment, of any seed and length, on this machine's CPU. A layout with GPUs
    is not taken without being asked for: it gives different bits."""
    path = _file()
    known = _known(path)
    text = known.get(_key(experiment) or "") if known else None
    try:
        layout = Layout.parse(text) if isinstance(text, str) else None
    except SettingsError:
        return None
    return None if layout is None or layout.uses_gpus else layout


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lockstep" / _FILE


def _known(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _key(experiment: Experiment) -> str | None:
    """The experiment without what does not matter to speed, the machine, and the cores that this process may use."""
    try:
        env = envs.resolve(experiment.env)
    except SettingsError:
        return None
    alike = dataclasses.replace(experiment, env=env, seed=1, total_steps=1, warm_start=WarmStart())
    return hashlib.sha256(json.dumps([alike.identity(), this_platform(), cores()], sort_keys=True).encode()).hexdigest()
