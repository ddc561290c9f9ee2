"""How fast lockstep trains on a GPU, where the time goes, and what it learns in minutes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpu_steps.correctness import INLINE, quiet
from gpu_steps.small import REHEARSED, experiment, on_gpu
from gpu_steps.step import Context, Outcome, device_memory, last_lines
from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.reports.runs import Run
from lockstep.run.folder import RunFolder
from lockstep.speed.trial import OutOfTime, Trial

PPO_LAYOUTS = (
    f"envpool: {INLINE},env_threads=4,graphs=1",
    "envpool, lag 1: a0-l0,env_threads=4,graphs=1",
    f"{INLINE},env_threads=4,graphs=1",
    "lag 1: a0-l0,env_threads=4,graphs=1",
)
IMPALA_LAYOUTS = (
    f"envpool: {INLINE},env_threads=4,graphs=1",
    "envpool: a0-l0,env_threads=4,graphs=1",
)
"""Before a layout: another adapter for the environments, or another lag. With a lag of 1, processes that only collect
go on while learners learn. Making 128 environments of ALE takes 20 seconds on one thread, so they come last."""


def resnet() -> Experiment:
    """IMPALA with the paper's network."""
    full = recipes.impala_atari()
    return full.replace(model=dataclasses.replace(full.model, encoder="impala"))


def throughput(context: Context, make: Callable[[], Experiment], layouts: tuple[str, ...]) -> Outcome:
    """Samples a second of all layouts, measured in turn, beside those of the environments alone."""
    setting = on_gpu(make())
    if context.rehearse:
        setting, layouts = experiment(REHEARSED[0]), (INLINE, "a0-l0")
    before = context.report.get("throughput-ppo", {}).get("data", {})  # with as many environments
    data: dict[str, Any] = {"raw": {} if context.rehearse else before.get("raw") or raw_rates(setting.env.num_envs)}
    found = in_turn({text: _case(setting, text) for text in layouts}, context)
    data["layouts"] = found
    raw = max(data["raw"].values(), default=None) if data["raw"] else None
    rates = {text: each["rate"] for text, each in found.items() if "rate" in each}
    wrong = [f"{text}: {str(each['error'])[-200:]}" for text, each in found.items() if "error" in each]
    best = max(rates, key=lambda text: rates[text], default=None)
    summary = f"{rates[best]:,.0f} samples/s with {best}" if best else "nothing was measured"
    if best and raw:
        data["share_of_raw"] = rates[best] / raw
        summary += f", {rates[best] / raw:.0%} of the environments' {raw:,.0f}"
    data["best"] = best
    return Outcome(bool(rates) and not wrong, summary + (f"; {' | '.join(wrong)}" if wrong else ""), data)


def _case(setting: Experiment, text: str) -> tuple[Experiment, str]:
    """An experiment with the changes that may stand before a layout."""
    changes, _, layout = text.rpartition(": ")
    for change in filter(None, changes.split(", ")):
        if change.startswith("lag "):
            setting = setting.replace(scheme=dataclasses.replace(setting.scheme, lag=int(change.removeprefix("lag "))))
        else:
            setting = setting.replace(env=dataclasses.replace(setting.env, adapter=change))
    return setting, layout


def in_turn(cases: dict[str, tuple[Experiment, str]], context: Context, rounds: int = 2) -> dict[str, Any]:
    """Train all cases in turn, for as long as the step has: rates in samples and updates a second, shares of the time
    by activity, and the GPU's memory in gigabytes. They start one after the other: together, each would take the cores
    of all others."""
    found: dict[str, Any] = {name: {"rates": [], "updates": []} for name in cases}
    trials: dict[str, Trial] = {}
    whole = time.perf_counter() + context.left

    def guarded(name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if not (isinstance(error, OutOfTime) and found[name]["rates"]):
                found[name]["error"] = "it was too slow" if isinstance(error, OutOfTime) else last_lines(error)
                print(f"{name}: {found[name]['error']}", flush=True)
            if name in trials:
                trials.pop(name).close()

    def start(name: str) -> None:
        trials[name] = Trial(cases[name][0], Layout.parse(cases[name][1]))

    def settle(name: str) -> None:
        begin = time.perf_counter()
        trials[name].run(0.0, iterations=1 + trials[name].settling, deadline=whole - 0.4 * context.seconds)
        print(f"{name}: ready after {time.perf_counter() - begin:.0f} s", flush=True)

    def measure(name: str, seconds: float) -> None:
        slot = trials[name].run(seconds, iterations=2, deadline=whole)
        lines = slot.lines
        found[name]["rates"].append(slot.rate)
        if len(lines) > 1:
            first, last = lines[0], lines[-1]
            found[name]["updates"].append((last[1]["updates"] - first[1]["updates"]) / (last[0] - first[0]))
        found[name]["shares"] = slot.shares()
        found[name]["rate"] = statistics.median(found[name]["rates"])
        print(f"{name}: {slot.rate:,.0f} samples/s, {found[name]['updates'][-1:]} updates/s", flush=True)
        context.save(Outcome(True, "stopped early", {"layouts": found}))

    try:
        for name in cases:
            guarded(name, functools.partial(start, name))
            if name in trials:
                guarded(name, functools.partial(settle, name))
        for number in range(rounds):
            for name in list(trials):
                left = (rounds - number) * max(1, len(trials))
                seconds = 0.5 if context.rehearse else min(10.0, 0.85 * (whole - time.perf_counter()) / left)
                if seconds < 0.3:
                    break
                guarded(name, functools.partial(measure, name, seconds))
    finally:
        for name, trial in trials.items():
            before = device_memory()
            trial.close()
            after = device_memory()
            found[name]["gpu_memory_gb"] = before - after if before is not None and after is not None else None
    for each in found.values():
        if "rate" not in each:
            each.setdefault("error", "there was no time")
    return found


def raw_rates(count: int) -> dict[str, float]:
    """Steps a second of Breakout alone with random actions, by library, on all cores."""
    cores = len(os.sched_getaffinity(0))
    found = {}
    for name, make in {"ale-py": _ale, "envpool": _envpool}.items():
        with contextlib.suppress(ImportError):
            found[name] = make(count, cores)
            print(f"{name} on {cores} threads: {found[name]:,.0f} steps/s", flush=True)
    return found


def _ale(count: int, threads: int) -> float:
    from ale_py.vector_env import AtariVectorEnv

    envs = AtariVectorEnv("breakout", num_envs=count, num_threads=threads)
    return _stepped(envs, lambda actions: envs.step(actions), count, 4, np.int64)


def _envpool(count: int, threads: int) -> float:
    import envpool

    envs: Any = envpool.make("Breakout-v5", env_type="gymnasium", num_envs=count, num_threads=threads)
    return _stepped(envs, lambda actions: envs.step(actions), count, 4, np.int32)


def _stepped(envs: Any, step: Callable[[Any], Any], count: int, actions: int, dtype: Any) -> float:
    generator = np.random.default_rng(0)
    envs.reset()
    steps, begin = -10, time.perf_counter()
    while steps <= 0 or time.perf_counter() - begin < 2.0:
        step(generator.integers(actions, size=count).astype(dtype))
        steps += 1
        if steps == 0:
            begin = time.perf_counter()
    rate = steps * count / (time.perf_counter() - begin)
    envs.close()
    return rate


def throughput_ppo(context: Context) -> Outcome:
    return throughput(context, recipes.ppo_atari, PPO_LAYOUTS)


def throughput_impala(context: Context) -> Outcome:
    return throughput(context, resnet, IMPALA_LAYOUTS)


def mujoco(context: Context) -> Outcome:
    """Small networks: gradient steps a second on the CPU, in portable arithmetic and fp32, and on the GPU."""
    cases: dict[str, tuple[Experiment, str]] = {}
    for name, make in {"sac-mujoco": recipes.sac_mujoco, "ppo-mujoco": recipes.ppo_mujoco}.items():
        for text in ("inline", INLINE, f"{INLINE},graphs=1"):
            cases[f"{name} {text}"] = on_gpu(make()), text
        cases[f"{name} portable inline"] = make(), "inline"
    if context.rehearse:
        cases = {name: (experiment("td3"), text) for name, (_, text) in list(cases.items())[:2]}
    found = in_turn(cases, context)
    wrong = [f"{name}: {str(each['error'])[-200:]}" for name, each in found.items() if "error" in each]
    rates = [f"{name} {each['updates'][-1]:,.0f}" for name, each in found.items() if each["updates"]]
    text = "updates/s: " + ", ".join(rates)
    return Outcome(not wrong, text + (f"; {' | '.join(wrong)}" if wrong else ""), found)


def peers(context: Context) -> Outcome:
    """The speeds that other libraries' scripts print, each for an equal part of the time."""
    found: dict[str, Any] = {}
    for number, command in enumerate(context.peers):
        seconds = context.left / (len(context.peers) - number)
        found[command] = _peer(command, seconds, context.folder)
        context.save(Outcome(True, "stopped early", found))
    texts = [f"{name.split()[0]} {each.get('rate') or each.get('error')}" for name, each in found.items()]
    return Outcome(all("rate" in each for each in found.values()), "; ".join(texts) or "none were given", found)


def _peer(command: str, seconds: float, folder: Path) -> dict[str, Any]:
    log = folder / "peer.txt"
    with log.open("wb") as file:
        arguments = [sys.executable, "-u", *shlex.split(command)]
        process = subprocess.Popen(arguments, stdout=file, stderr=file, cwd=folder, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    print(text[-3000:], flush=True)
    rates = [float(each) for each in re.findall(r"(?:SPS|sps|speed)\W{1,8}(\d+(?:\.\d+)?)", text)]
    if not rates:
        return {"error": text.strip()[-300:]}
    return {"rate": statistics.median(rates[len(rates) // 2 :]), "rates": rates[-20:]}


def _stop(place: Path, when: float) -> None:
    """Ask this process's run to stop at a time, but not before it has something to show."""
    metrics = RunFolder(place).metrics
    while time.monotonic() < when or not metrics.exists() or not metrics.stat().st_size:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


def for_minutes() -> Experiment:
    """ppo_atari with eight times its gradient steps and a larger learning rate: its own are made for 50M steps."""
    recipe = recipes.ppo_atari()
    return recipe.replace(algorithm=dataclasses.replace(recipe.algorithm, minibatches=32, learning_rate=1e-3))


def learning(context: Context) -> Outcome:
    """Breakout with PPO on the layout that was fastest, for the rest of the time, with gradient steps that suit it."""
    fastest = context.report.get("throughput-ppo", {}).get("data", {})
    text = fastest.get("best") or f"{INLINE},env_threads=2"
    rate = fastest.get("layouts", {}).get(text, {}).get("rate", 5000.0)
    seconds = min(context.left - 10.0, 6.0 if context.rehearse else 10**6)
    setting = experiment(REHEARSED[0]) if context.rehearse else for_minutes()
    if context.rehearse:
        text, rate = INLINE, 50.0
    steps = max(setting.samples_per_iteration, int(0.9 * max(seconds, 1.0) * rate))
    setting, layout = _case(setting.replace(total_steps=steps), text)
    folder = context.folder / "learning"
    threading.Thread(target=_stop, args=(folder, time.monotonic() + seconds), daemon=True).start()
    train(setting, Layout.parse(layout), quiet(str(folder)))
    run = Run.read(folder)
    score = run.last("score/mean")
    every = max(1, len(run.records) // 40)
    curve = [[each.get("samples"), each.get("seconds"), each.get("score/mean")] for each in run.records[::every]]
    data = {"layout": text, "samples": run.last("samples"), "seconds": run.last("seconds"), "score": score}
    text = f"score {score:.1f} after {data['samples']:,.0f} samples in {data['seconds']:.0f} s with {text}"
    return Outcome(True, text, {**data, "curve": curve})
