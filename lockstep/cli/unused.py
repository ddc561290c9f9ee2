"""Finds settings that have no effect in combination with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lockstep.config.serialization import flat, to_json
from lockstep.experiment import Experiment


class _Need(NamedTuple):
    """What some settings need to have an effect: certain values of other settings."""

    of: tuple[str, ...]
    what: str
    """The flags that would give them an effect."""
    met: dict[str, Callable[[Any], bool]]
    """The other settings, each with a test of its value. One passing test is enough."""


def _replay(*names: str) -> tuple[str, ...]:
    return tuple(f"algorithm.replay.{name}" for name in names)


_RND = ("discount", "gae_lambda", "value_coef", "share", "features")
_NEEDS = (
    _Need(("model.core_size",), "--model.core gru or lstm", {"model.core": lambda core: core != "none"}),
    _Need(("model.channels",), "--model.encoder impala", {"model.encoder": lambda name: name in ("auto", "impala")}),
    _Need(
        ("model.v_min", "model.v_max"),
        "--model.returns categorical",
        {"model.returns": lambda returns: returns == "categorical"},
    ),
    _Need(
        ("model.numbers",),
        "--model.returns categorical, quantiles or implicit",
        {"model.returns": lambda returns: returns != "expected"},
    ),
    _Need(
        ("model.cosines", "algorithm.samples", "algorithm.target_samples"),
        "--model.returns implicit",
        {"model.returns": lambda returns: returns == "implicit"},
    ),
    _Need(
        tuple(f"algorithm.rnd.{name}" for name in _RND),
        "--algorithm.rnd.coef above 0",
        {"algorithm.rnd.coef": lambda coef: coef > 0},
    ),
    _Need(
        ("algorithm.optimizer.decay",),
        "--algorithm.optimizer.name rmsprop",
        {"algorithm.optimizer.name": lambda name: name == "rmsprop"},
    ),
    _Need(
        ("algorithm.optimizer.betas",),
        "--algorithm.optimizer.name adam, adamw or radam",
        {"algorithm.optimizer.name": lambda name: name != "rmsprop"},
    ),
    _Need(
        ("algorithm.optimizer.weight_decay",),
        "--algorithm.optimizer.name adamw",
        {"algorithm.optimizer.name": lambda name: name == "adamw"},
    ),
    _Need(
        (*_replay("alpha", "beta", "beta_end"), "algorithm.priority_max"),
        "--algorithm.replay.prioritized",
        {"algorithm.replay.prioritized": bool},
    ),
    _Need(
        _replay("recency_least"),
        "--algorithm.replay.recency below 1",
        {"algorithm.replay.recency": lambda recency: recency < 1},
    ),
    _Need(_replay("data_digest"), "--algorithm.replay.data", {"algorithm.replay.data": bool}),
    _Need(_replay("slack"), "--scheme.lag async", {"scheme.lag": lambda lag: lag == "async"}),
    _Need(
        ("algorithm.temperature_learning_rate", "algorithm.target_entropy"),
        "--algorithm.learn-temperature",
        {"algorithm.learn_temperature": bool},
    ),
    _Need(("model.elites",), "--model.planner cem", {"model.planner": lambda planner: planner == "cem"}),
    _Need(("model.temperature",), "--model.planner mppi", {"model.planner": lambda planner: planner == "mppi"}),
    _Need(("model.initial_std",), "--model.policy gaussian", {"model.policy": lambda policy: policy == "gaussian"}),
    _Need(
        ("warm_start.checkpoint", "warm_start.parts", "warm_start.optimizer", "warm_start.digest"),
        "--warm-start.run",
        {"warm_start.run": bool},
    ),
    _Need(
        ("normalize.clip",),
        "--normalize.observations or --normalize.returns",
        {"normalize.observations": bool, "normalize.returns": bool},
    ),
)


def idle(experiment: Experiment) -> dict[str, str]:
    """The settings without effect in an experiment, each with the flags that it needs."""
    given = flat(to_json(experiment))
    lacking = [need for need in _NEEDS if not any(n not in given or met(given[n]) for n, met in need.met.items())]
    return {name: need.what for need in lacking for name in need.of if name in given}


def unused(experiment: Experiment, base: Experiment) -> list[str]:
    """A sentence for each setting that differs from base and has no effect with the others, or leaves out steps."""
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


def sentence(name: str, what: str) -> str:
    """The sentence about a setting without effect."""
    return f"--{name.replace('_', '-')} has no effect without {what}."
