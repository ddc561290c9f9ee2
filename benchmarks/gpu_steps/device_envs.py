"""Environments in torch: whether rollouts that stay on the GPU are always bit-identical, and how fast they are."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from gpu_steps.correctness import INLINE, place, quiet
from gpu_steps.step import Context, Outcome, last_lines
from lockstep.config.layout import Layout
from lockstep.config.user_code import load_object
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.reports.runs import Run

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpu_env.py"
_ON_GPU = (f"{INLINE},graphs=1", INLINE, "a0-l0")
"""Layouts that must have equal digests."""
_ON_CPU = "inline"
_SETTLING = {_ON_CPU: 1}
"""Iterations that are not timed: libraries load, memory is reserved, and graphs are captured. Elsewhere there are 4."""
_TIMED = {_ON_CPU: 2}
"""Iterations that are timed. Elsewhere they are the rest of the recipe's."""


def gpu_env(context: Context) -> Outcome:
    """PPO on 4,096 CartPoles in torch: samples a second, digests, and the score."""
    setting: Experiment = load_object(f"{_EXAMPLE}:recipe")()
    if context.rehearse:
        setting = _tiny(setting)
    found: dict[str, Any] = {}

    def outcome() -> Outcome:
        wrong = [f"{text}: {each['error'][-200:]}" for text, each in found.items() if "error" in each]
        digests = {text: each["digest"] for text, each in found.items() if "digest" in each and text in _ON_GPU}
        if len(set(digests.values())) > 1:
            wrong.append(f"digests differ: {digests}")
        told = [f"{each['rate']:,.0f} samples/s with {text}" for text, each in found.items() if "rate" in each]
        told += [f"score {each['score']:.0f}" for each in list(found.values())[:1] if each.get("score") is not None]
        told += wrong if wrong else [f"{len(digests)} equal digests"]
        return Outcome(not wrong, "; ".join(told), found)

    for text in (*_ON_GPU, _ON_CPU):
        if context.left < 2:
            break
        settling = _SETTLING.get(text, 4)
        iterations = settling + _TIMED.get(text, setting.iterations - settling)
        part = setting.replace(total_steps=iterations * setting.samples_per_iteration)
        try:
            found[text] = _trained(part, text, Path(place(context, text)), settling)
        except Exception as error:
            found[text] = {"error": last_lines(error)}
        print(f"{text}: {found[text]}", flush=True)
        context.save(outcome())
    return outcome()


def _tiny(setting: Experiment) -> Experiment:
    algorithm: Any = dataclasses.replace(setting.algorithm, rollout=4, minibatches=2, epochs=1)  # type: ignore[call-arg]
    env, scheme = dataclasses.replace(setting.env, num_envs=8), dataclasses.replace(setting.scheme, acting_batch=8)
    return setting.replace(env=env, scheme=scheme, algorithm=algorithm, total_steps=6 * 4 * 8)


def _trained(setting: Experiment, text: str, folder: Path, settling: int) -> dict[str, Any]:
    """Train, and read from the run's metrics how fast it was once it had settled."""
    result = train(setting, Layout.parse(text), quiet(str(folder)))
    records = Run.read(folder).records
    before: Any = records[settling - 1]
    timed = records[settling:]
    last: Any = timed[-1]
    shares = {
        name: statistics.fmean(float(each.get(name) or 0) for each in timed)
        for name in last
        if name.startswith(("time/", "wait/"))
    }
    shown = records[:: len(records) // 20 or 1]
    return {
        "digest": result.digest,
        "rate": (last["samples"] - before["samples"]) / (last["seconds"] - before["seconds"]),
        "samples": last["samples"],
        "seconds": last["seconds"],
        "score": last.get("score/mean"),
        "shares": shares,
        "curve": [[each["samples"], each["seconds"], each.get("score/mean")] for each in shown],
    }
