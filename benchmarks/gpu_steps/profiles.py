"""Where the time goes on a GPU: kernels, launches, copies and waits of collecting and of learning."""

from __future__ import annotations

import collections
import contextlib
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_steps.correctness import INLINE, place, quiet
from gpu_steps.small import REHEARSED, SHAPES, experiment
from gpu_steps.step import Context, Outcome, last_lines
from lockstep.algorithms.offpolicy import off_policy
from lockstep.collectors.collectors import Collectors
from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.learners.learner import Learner
from lockstep.training.callbacks import Progress

_TOP = 12
"""Rows of a profile."""
_SETTLING = 2
"""Iterations before a profile, in which libraries load, memory is reserved and graphs are captured."""
_TIMED = 6
"""Iterations after these whose gradient steps a second are measured, where replay is profiled."""
_ONE = 12.0
"""Seconds of a run with replay, and of its profile."""
REPLAYING = ("sac-mujoco", "dqn-atari", "rainbow-atari", "r2d2-atari")
_PHASES = ("collecting", "learning")
_BOUND = "lockstep "
"""What the names of the profile's ranges begin with."""


def profile_ppo(context: Context) -> Outcome:
    return profile_of("ppo-atari", context)


def profile_impala(context: Context) -> Outcome:
    return profile_of("impala-atari-resnet", context)


def profile_of(name: str, context: Context) -> Outcome:
    """Kernels, launches, copies and waits of a few iterations in one process, with and without graphs."""
    data: dict[str, Any] = {}
    threads = "" if context.rehearse else ",env_threads=16"
    for text in (f"{INLINE}{threads},graphs=1", f"{INLINE}{threads}"):
        try:
            setting = experiment(REHEARSED[0]) if context.rehearse else SHAPES[name]()
            data[text] = _profiled(setting, text, context)
        except Exception as error:
            data[text] = {"error": last_lines(error)}
        print(f"{name} {text}: {data[text]}", flush=True)
        context.save(Outcome(True, "stopped early", data))
    ok = all("error" not in each for each in data.values())
    parts = []
    for text, each in data.items():
        for phase in _PHASES:
            if found := each.get(phase):
                parts.append(
                    f"{phase}{' (graphs)' * ('graphs' in text)} {found['wall_ms']:.0f} ms an iteration, GPU "
                    f"{found['gpu_ms']:.0f}, {found['launches']:.0f} launches, {found['waits']:.0f} waits"
                )
        parts += [str(each["error"])[:200]] if "error" in each else []
    return Outcome(ok, "; ".join(parts), data)


def replaying(context: Context) -> Outcome:
    """Gradient steps a second of algorithms that replay, and a profile of them, with graphs and without."""
    data: dict[str, Any] = {}
    for text in (f"{INLINE},graphs=1", INLINE):
        for name in ("td3",) if context.rehearse else REPLAYING:
            if context.left < _ONE:
                break
            setting = experiment(name if context.rehearse else f"real:{name}")
            try:
                data[f"{name} {text}"] = found = _profiled(setting, text, context, timed=_TIMED)
                print(f"{name} {text}: {found['updates']:,.0f} updates/s, {found}", flush=True)
            except Exception as error:
                data[f"{name} {text}"] = {"error": last_lines(error)}
                print(f"{name} {text}: {last_lines(error)}", flush=True)
            context.save(Outcome(True, "stopped early", data))
    rates = [f"{name} {each['updates']:,.0f}" for name, each in data.items() if "updates" in each]
    wrong = [f"{name}: {str(each['error'])[-200:]}" for name, each in data.items() if "error" in each]
    return Outcome(not wrong, f"updates/s: {', '.join(rates)}" + "".join(f"; {each}" for each in wrong), data)


def _profiled(setting: Experiment, text: str, context: Context, timed: int = 0) -> dict[str, Any]:
    """A profile of two iterations, and the gradient steps a second of `timed` iterations before it."""
    iterations, settling = 2, _SETTLING
    if setting.algorithm.replays:
        settling += off_policy(setting.algorithm).build().warm_iterations(setting.samples_per_iteration)
    setting = setting.replace(total_steps=(settling + timed + iterations) * setting.samples_per_iteration)
    profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (not context.rehearse)])
    shares: dict[str, float] = {}
    rated: dict[str, float] = {}
    begun = [0.0, 0.0]

    def follow(progress: Progress) -> None:
        now, updates = time.perf_counter(), progress.metrics["updates"]
        if progress.iteration == settling:
            begun[:] = now, updates
        elif timed and progress.iteration == settling + timed:
            rated["updates"] = (updates - begun[1]) / (now - begun[0])
            shares.update({name: value for name, value in progress.metrics.items() if name.startswith("time/")})
        if progress.iteration == settling + timed:
            profiler.start()
        elif progress.iteration == settling + timed + iterations:
            profiler.stop()
        if not timed:
            shares.update({name: value for name, value in progress.metrics.items() if name.startswith("time/")})

    if not context.rehearse:
        torch.cuda.reset_peak_memory_stats()
    with _ranges():  # one run for all, since making 128 Atari environments takes 20 seconds
        train(
            setting,
            Layout.parse(text),
            quiet(place(context, f"{type(setting.algorithm).__name__} {setting.identity()} {text}")),
            on_iteration=follow,
        )
    memory = {} if context.rehearse else {"gpu_memory_gb": torch.cuda.max_memory_reserved() / 1e9}
    return memory | rated | {"shares": shares} | _counted(profiler.events() or [], iterations)


@contextlib.contextmanager
def _ranges() -> Any:
    """Mark what is collecting and what is learning."""
    before = Collectors.collect, Learner.learn

    def marked(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(_BOUND + phase):
                return function(*args, **kwargs)

        return run

    Collectors.collect, Learner.learn = (marked(f, phase) for f, phase in zip(before, _PHASES))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Collectors.collect, Learner.learn = before  # type: ignore[method-assign]


def _counted(events: Any, iterations: int) -> dict[str, Any]:
    """A profile's figures for each phase and iteration; a kernel belongs to the phase in which it began."""
    ranges = sorted(
        (each.time_range.start, each.time_range.end, each.name.removeprefix(_BOUND))
        for each in events
        if each.name.startswith(_BOUND) and each.device_type.name == "CPU"
    )
    begins = [begin for begin, _, _ in ranges]

    def phase_at(when: float) -> str | None:
        at = int(np.searchsorted(begins, when, side="right")) - 1
        return ranges[at][2] if at >= 0 and when <= ranges[at][1] else None

    counts = {phase: collections.Counter[str]() for phase in _PHASES}
    kernels = {phase: collections.Counter[str]() for phase in _PHASES}
    times = {phase: collections.Counter[str]() for phase in _PHASES}
    cpu = {phase: collections.Counter[str]() for phase in _PHASES}
    for each in events:
        if each.name.startswith(_BOUND) or (phase := phase_at(each.time_range.start)) is None:
            continue
        if each.device_type.name == "CUDA":
            times[phase][each.name[:90]] += each.time_range.elapsed_us()
            kernels[phase][each.name[:90]] += 1
        elif re.match(r"cu(da)?[A-Z]", each.name):  # a call of the driver or the runtime
            counts[phase][each.name] += 1
        else:
            cpu[phase][each.name] += each.self_cpu_time_total
    result: dict[str, Any] = {}
    for phase in _PHASES:
        of_runtime = counts[phase]
        wall = sum(end - begin for begin, end, name in ranges if name == phase)
        result[phase] = {
            "wall_ms": wall / 1e3 / iterations,
            "gpu_ms": sum(times[phase].values()) / 1e3 / iterations,
            "launches": sum(n for name, n in of_runtime.items() if "Launch" in name) / iterations,
            "graph_launches": of_runtime["cudaGraphLaunch"] / iterations,
            "waits": sum(n for name, n in of_runtime.items() if "Synchronize" in name) / iterations,
            "copies": {n: k / iterations for n, k in kernels[phase].items() if n.startswith(("Memcpy", "Memset"))},
            "runtime_calls": {name: n / iterations for name, n in of_runtime.most_common(_TOP)},
            "top_kernels_ms": {
                name: [us / 1e3 / iterations, kernels[phase][name] / iterations]
                for name, us in times[phase].most_common(_TOP)
            },
            "top_cpu_ms": {name: us / 1e3 / iterations for name, us in cpu[phase].most_common(_TOP)},
        }
    return result
