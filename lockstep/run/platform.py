"""The platform of a run. Its bits depend on the platform in addition to the experiment: on the machine, its libraries,
the environment variables that these read, and the contents of users' files, which settings only name."""

from __future__ import annotations

import contextlib
import json
import os
import platform as system
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lockstep.config.extras import EXTRAS
from lockstep.config.layout import Layout
from lockstep.config.user_code import digests_of
from lockstep.envs.multiagent.trained import TrainedRun
from lockstep.envs.settings import SHARED
from lockstep.run.gpus import used_gpus
from lockstep.system.machine import cpu

PORTABLE = 2
"""The version of portable arithmetic. Version 1, which runs did not record, rounded products before it added them."""
_ARITHMETIC_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "fphp", "bf16", "i8mm")
_ARITHMETIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "GLIBC_TUNABLES",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_LIBRARIES = sorted(
    {"numpy", "gymnasium", "box2d", "dm-control"}.union(*(extra.environments for extra in EXTRAS.values()))
)
"""Names of distributions. A version that only one of two platforms records is not a difference, so this list may grow.
"""


def _cpu() -> dict[str, str]:
    found = cpu()
    return {
        "model": found.model,
        "features": " ".join(sorted(flag for flag in found.flags if flag.startswith(_ARITHMETIC_FLAGS))),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def version(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def code_of(settings: Mapping[str, Any] | None) -> dict[str, str]:
    """The digests of the users' files that settings name, including those that their opponents' models need.

    Args:
        settings: the settings of an experiment in JSON form.
    """
    found: dict[str, str] = {}
    env = (settings or {}).get("env") or {}
    of_sides = env.get("policies", SHARED) != SHARED
    for opponent in env.get("opponents", ()):
        run = TrainedRun.parse(opponent.partition("=")[2] if of_sides else opponent)
        if run.digest is None:
            continue
        with contextlib.suppress(OSError, ValueError):  # the match itself reports missing or damaged files
            theirs, facts = (
                json.loads((Path(run.folder) / f"{name}.json").read_bytes()) for name in ("experiment", "run")
            )
            played = [theirs["model"], theirs["env"].get("policies")]
            found |= digests_of(played, facts.get("directory", ""))
    return found | digests_of(settings)


def this_platform(settings: Mapping[str, Any] | None = None, layout: Layout | None = None) -> dict[str, Any]:
    """The platform of a run: processor, torch, Python, C library, environment libraries, GPUs with their libraries, and
    the users' files named in its settings and by its opponents.

    Runs have comparable bits only if their platforms are equal.

    Args:
        settings: the settings of its experiment in JSON form.
        layout: the layout whose GPUs are recorded; by default, the CPU computes everything.
    """
    code, layout = code_of(settings), layout or Layout()
    portable = (settings or {}).get("precision") == "portable"
    return {
        "cpu": _cpu(),
        **{"gpu": [], "cudnn": None, **used_gpus(layout)},
        "torch": str(torch.__version__),
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "os": f"{system.system()} {system.machine()} {' '.join(system.libc_ver())}".strip(),
        "libraries": {name: found for name in _LIBRARIES if (found := version(name)) is not None},
        "variables": {name: os.environ[name] for name in _ARITHMETIC_VARIABLES if name in os.environ},
        **({"portable": PORTABLE} if portable else {}),
        **({"code": code} if code else {}),
    }
