"""Finds settings that have no effect because of other settings."""

from __future__ import annotations

from lockstep.config.needs import declared, parts
from lockstep.config.options import RunOptions
from lockstep.config.serialization import flat, to_json
from lockstep.experiment import Experiment


def idle(experiment: Experiment) -> dict[str, str]:
    """The settings that have no effect in an experiment, each with the flags that it needs."""
    given = flat(to_json(experiment, whole=True))
    return {
        prefix + name: str(need)
        for prefix, settings in parts(experiment)
        for need in declared(settings, "needs")
        if not need.met(given)
        for name in need.of
    }


def unused(experiment: Experiment, base: Experiment) -> list[str]:
    """Sentences about settings that differ from base and have no effect, or that leave out steps of rollouts."""
    before, after = flat(to_json(base, whole=True)), flat(to_json(experiment, whole=True))
    changed = {name: what for name, what in idle(experiment).items() if before.get(name) != after[name]}
    told = [sentence(name, what) for name, what in changed.items()]
    rollout, learned = "algorithm.rollout", "algorithm.unroll"
    if 0 < after.get(learned, 0) < after[rollout] and any(before.get(n) != after[n] for n in (rollout, learned)):
        told.append(
            f"Sequences learn from {after[learned]} (--{learned}) of a rollout's {after[rollout]} steps "
            f"(--{rollout}), and never from the others."
        )
    return told


def unused_options(options: RunOptions, base: RunOptions) -> list[str]:
    """Sentences about options that differ from base and have no effect."""
    before, given = vars(base), vars(options)
    idle = [(name, need) for need in declared(options, "needs") if not need.met(given) for name in need.of]
    return [sentence(name, str(need)) for name, need in idle if given[name] != before[name]]


def sentence(name: str, what: str) -> str:
    """The sentence about a setting without effect."""
    return f"--{name.replace('_', '-')} has no effect without {what}."
