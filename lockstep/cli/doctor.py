"""`lockstep doctor` describes this machine and installation, and measures their speed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch

from lockstep.cli.common import parse, say, say_json
from lockstep.config.extras import EXTRAS, install_command
from lockstep.config.settings import SettingsError
from lockstep.envs.level_cache import FOLDER, folder, kept, limit
from lockstep.envs.settings import EnvConfig
from lockstep.kernels.cache import folder as kernels_folder
from lockstep.run.platform import version
from lockstep.system.machine import cores, cpu, emulates_bf16

_CORE = (
    "lockstep",
    "torch",
    "numpy",
    "gymnasium",
    "tyro",
    "rich",
    "safetensors",
    "xxhash",
    "tensorboard",
    "matplotlib",
    "numba",
)
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class DoctorArguments:
    """Check this machine and installation, and measure the speed of one core for a few seconds."""

    seconds: float = 1.0
    """Seconds of each measurement; 0 skips them."""
    json: bool = False
    """Print one JSON document."""


def doctor(arguments: list[str]) -> int:
    """Run `lockstep doctor`."""
    given = parse(DoctorArguments, "doctor", arguments)
    if not 0 <= given.seconds < math.inf:
        raise SettingsError(f"--seconds {given.seconds} must be a number of seconds, or 0 to skip the measurements.")
    report = examine()
    if given.seconds > 0:
        report["speed"] = measure(given.seconds)
    if given.json:
        say_json(report)
        return 0
    machine = report["machine"]
    say(f"system    {machine['system']}, Python {machine['python']}")
    say(f"CPU       {machine['cpu']}, {machine['cores']} cores, {machine['capability']}")
    say(f"          {' '.join(machine['features']) or 'no vector features known'}")
    if emulates_bf16():
        say("          no instructions for bf16: --precision fp32 is at least ten times faster here")
    say(f"memory    {machine['memory_gigabytes']} GB")
    say(f"GPU       {', '.join(machine['gpus']) or 'none'}")
    say("packages  " + ", ".join(f"{name} {found}" for name, found in report["packages"].items()))
    say(f"kernels   {_kernels_told(report['kernels'])}")
    say(f"levels    {_levels_told(report['levels'])}")
    for extra, entry in report["extras"].items():
        say(f"extra     {extra}: {entry['version'] or 'missing'} ({entry['purpose']})")
    if absent := [extra for extra, entry in report["extras"].items() if not entry["version"]]:
        say(f"          to install what is missing: {install_command(','.join(absent))}")
    for name, value in report.get("speed", {}).items():
        say(f"speed     {name}: {value:,.0f}/s")
    if "speed" in report:
        say("          all on one core; --layout processes:N uses N of them")
    return 0


def examine() -> dict[str, Any]:
    """Facts about the machine, packages, extras and caches."""
    processor = cpu()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": processor.model,
        "cores": cores(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": [feature for feature in _FEATURES if feature in processor.flags],
        "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": gpus,
    }
    sources = importlib.metadata.packages_distributions()
    extras = {
        extra: {
            "version": version(min(sources[module], key=lambda name: name != module)) if module in sources else None,
            "purpose": purpose,
            "install": install_command(extra),
        }
        for extra, (module, purpose, _) in EXTRAS.items()
    }
    packages = {name: version(name) or "missing" for name in _CORE}
    return {"machine": machine, "packages": packages, "extras": extras, "kernels": _kernels(), "levels": _levels()}


def _kernels() -> dict[str, Any]:
    """Facts about the cache of compiled kernels."""
    root = kernels_folder()
    sizes = [] if root is None else [path.stat().st_size for path in root.glob("*.nbc")]
    return {"folder": root and str(root), "functions": len(sizes), "bytes": sum(sizes)}


def _kernels_told(kernels: dict[str, Any]) -> str:
    if kernels["folder"] is None:
        return "compiled anew by every process, because no folder can be written; NUMBA_CACHE_DIR may name one"
    return f"{kernels['folder']}: {kernels['functions']:,} compiled functions, {kernels['bytes'] / 1e6:.0f} MB"


def _levels() -> dict[str, Any]:
    """Facts about the cache of levels."""
    root = folder()
    if root is None:
        return {"folder": None}
    levels = kept(root)
    size = sum(size for _, size, _ in levels)
    return {"folder": str(root), "levels": len(levels), "bytes": size, "limit": limit()}


def _levels_told(levels: dict[str, Any]) -> str:
    if levels["folder"] is None:
        return f"not kept ({FOLDER} names no folder)"
    used = f"{levels['bytes'] / 1e9:.2f} of at most {levels['limit'] / 1e9:g} GB"
    return f"{levels['folder']}: {levels['levels']:,} levels, {used}"


def measure(seconds: float) -> dict[str, float]:
    """Environment steps, actions and trained samples per second on one core, for CartPole, Atari and Atari's
    network."""
    from lockstep.system.numerics import torch_configured

    with torch_configured(1):
        speed = {"CartPole-v1 environment steps": _env_speed(EnvConfig(id="CartPole-v1"), seconds)}
        atari = EnvConfig(id="Breakout", protocol="machado")
        with contextlib.suppress(SettingsError):  # the list of extras shows what is missing
            speed["Atari environment steps"] = _env_speed(atari, seconds)
        return speed | _network_speed(seconds)


def _env_speed(config: EnvConfig, seconds: float) -> float:
    from lockstep import envs

    config = envs.resolve(config)
    count = 16
    observation_space, action_space = envs.spaces(config)
    assert isinstance(action_space, gymnasium.spaces.Discrete)
    out = envs.allocate_observation(observation_space, (count,)).numpy()
    env = envs.make(config, seed=1, first_index=0, num_envs=count, purpose="doctor")
    actions = np.random.default_rng(1).integers(0, action_space.n, (64, count))
    try:
        env.reset(out)
        turn = iter(range(10**9))

        def step() -> None:
            env.send(actions[next(turn) % 64])
            env.recv(out)

        return count * _rate(step, seconds)
    finally:
        env.close()


def _network_speed(seconds: float) -> dict[str, float]:
    """The speed of ppo-atari's default network, the Nature CNN, in both precisions."""
    from lockstep.recipes import RECIPES

    recipe = RECIPES["ppo-atari"]()
    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    obs = torch.randint(0, 256, (1, 256, 4, 84, 84), dtype=torch.uint8)
    start = torch.zeros(1, 256, dtype=torch.bool)
    speed = {}
    for precision in ("bf16", "fp32"):
        model = recipe.build_model(observation_space, gymnasium.spaces.Discrete(18), precision)
        actor = model.for_acting()
        state = torch.zeros(256, model.state_size)

        def learn(model: Any = model, state: torch.Tensor = state) -> None:
            output, _ = model(obs, start, state)
            (output.policy.square().mean() + output.value.square().mean()).backward()

        def act(actor: Any = actor, state: torch.Tensor = state) -> None:
            with torch.inference_mode():
                actor(obs, start, state)

        speed[f"Atari network, {precision}, actions"] = 256 * _rate(act, seconds)
        speed[f"Atari network, {precision}, trained samples"] = 256 * _rate(learn, seconds)
    return speed


def _rate(call: Callable[[], None], seconds: float) -> float:
    """Calls per second, after a warm-up call."""
    call()
    begin, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds:
        call()
        calls += 1
    return calls / passed
