"""Presets: well-known schemes of distributed reinforcement learning, each composed of three parts.

A collector set, a learner set and an update rule say which process does what, and which waits for which. What affects
the result becomes the experiment's Scheme, and what only affects the speed becomes a Layout. So

    lockstep.train(*presets.ddppo(recipes.ppo_atari("Pong"), workers=4))

trains with DD-PPO. The names are those in figure 5 of the PyTorchRL paper (https://arxiv.org/abs/2007.02622), and
others. In the diagrams, time goes to the right; c collects a rollout, g computes gradients, u applies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.scheme import Scheme

# ------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class CollectorSet:
    """The processes that collect rollouts."""

    number: int = 0
    """Number of processes that only collect. With 0, every learner collects for itself (PyTorchRL: central
    collection)."""
    lag: int | Literal["async"] = 0
    """The version that collectors wait for: 0 is the newest, k is k versions older; with async they do not wait."""
    preempt: float = 1.0
    """The share of other processes' shards that must finish their rollouts before late ones are cut."""
    device: str = "cpu"
    """The device: cpu, or the number of a GPU."""


@dataclass(frozen=True)
class LearnerSet:
    """The processes that compute gradients."""

    number: int = 1
    device: str = "cpu"
    """The device: cpu, or the number of a GPU."""


@dataclass(frozen=True)
class Updates:
    """How gradients update the parameters."""

    lag: int | Literal["async"] = 0
    """0: all learners' gradients are added up, and every learner applies the sum. g: every learner applies it g
    gradient steps later. async: each learner's gradient is applied to the shared parameters when it is ready."""


class Composed(NamedTuple):
    """The first two arguments of lockstep.train."""

    experiment: Experiment
    layout: Layout


def compose(experiment: Experiment, collectors: CollectorSet, learners: LearnerSet, updates: Updates) -> Composed:
    """The experiment with another scheme, and the corresponding layout. Settings for other kinds of schemes (max_lag,
    refresh, max_gradient_lag) return to their defaults. The rest of the scheme does not change.

    Raises:
        SettingsError: a part has values that are out of range.
    """
    apart = () if collectors.lag == "async" else ("max_lag", "refresh")
    apart += () if updates.lag == "async" else ("max_gradient_lag",)
    scheme = dataclasses.replace(
        experiment.scheme,
        lag=collectors.lag,
        preempt=collectors.preempt,
        gradient_lag=updates.lag,
        **{name: getattr(Scheme, name) for name in apart},
    )
    if collectors.number:
        devices = [(each.device,) * each.number for each in (collectors, learners)]
        layout = Layout("processes", collectors=devices[0], learners=devices[1])
    else:
        layout = Layout("inline" if learners.number == 1 else "processes", learners.number, device=learners.device)
    scheme.validate()
    layout.validate()
    return Composed(experiment.replace(scheme=scheme), layout)


# ----------------------------------------------------------------------------------------------------- the presets


def single(experiment: Experiment) -> Composed:
    """One process does everything in turn.

    process   | c0 | g0 u0 | c1 | g1 u1 |
    """
    return compose(experiment, CollectorSet(), LearnerSet(), Updates())


def sync(experiment: Experiment, collectors: int = 2, learners: int = 1) -> Composed:
    """A2C and PPO: collectors use the newest version, and the learner waits for all of them.

    collector 0   | c0 |       | c1 |       |
    collector 1   | c0   |     | c1   |     |
    learner              | g0 u0 |    | g1 u1 |
    """
    return compose(experiment, CollectorSet(collectors), LearnerSet(learners), Updates())


def cleanba(experiment: Experiment, collectors: int = 2, learners: int = 1) -> Composed:
    """Cleanba (Huang et al. 2023): the next rollout is collected while the previous one is learned from.

    collectors   | c0 | c1    | c2    | c3    |
    learners          | g0 u0 | g1 u1 | g2 u2 |     c2 acts with the version that u0 made
    """
    return compose(experiment, CollectorSet(collectors, lag=1), LearnerSet(learners), Updates())


def impala(experiment: Experiment, collectors: int = 2, learners: int = 1) -> Composed:
    """IMPALA (Espeholt et al. 2018): no process waits. The learner takes the rollouts that have arrived.

    collector 0   | c | c | c | c | c | c |       with the newest version
    collector 1   | c   | c   | c   | c   |
    learner           | g u | g u | g u | g u |
    """
    return compose(experiment, CollectorSet(collectors, lag="async"), LearnerSet(learners), Updates())


def apex(experiment: Experiment, collectors: int = 2, learners: int = 1) -> Composed:
    """Ape-X (Horgan et al. 2018): like IMPALA, with replay between collectors and learner.

    collector 0   | c | c | c | c | c | c |
                        into replay
    learner       | g u | g u | g u | g u |       from replay, within a bounded ratio to what is collected
    """
    replaying = _replaying(experiment, "apex")
    return compose(replaying, CollectorSet(collectors, lag="async"), LearnerSet(learners), Updates())


def r2d2(experiment: Experiment, collectors: int = 2, learners: int = 1) -> Composed:
    """R2D2 (Kapturowski et al. 2019): Ape-X with a recurrent model, and replay of sequences.

    collector 0   | c | c | c | c | c | c |
                        into replay, with the core's state
    learner       | g u | g u | g u | g u |       from replay, whole sequences
    """
    recurrent = _recurrent(_replaying(experiment, "r2d2"))
    return compose(recurrent, CollectorSet(collectors, lag="async"), LearnerSet(learners), Updates())


def appo(experiment: Experiment, workers: int = 2) -> Composed:
    """Asynchronous PPO, as in PyTorchRL: workers collect together, and apply their gradients when they are ready.

    worker 0   | c0 | g u | g u |       | c1 | g u | g u |
    worker 1   | c0 | g   u | g   u |   | c1 | g   u | g   u |       u: to the parameters that all share
    """
    return compose(experiment, CollectorSet(), LearnerSet(workers), Updates(lag="async"))


def dppo(experiment: Experiment, workers: int = 2) -> Composed:
    """Distributed PPO (Heess et al. 2017): workers collect for themselves, and add up their gradients.

    worker 0   | c0 |    | g | + u | g | + u | c1 |
    worker 1   | c0    | | g | + u | g | + u | c1    |       +: the sum over all workers
    """
    return compose(experiment, CollectorSet(), LearnerSet(workers), Updates())


def ddppo(experiment: Experiment, workers: int = 2) -> Composed:
    """DD-PPO (Wijmans et al. 2020): DPPO that cuts stragglers once 80% of the others have their rollouts.

    worker 0   | c0 | g | + u | c1 |
    worker 1   | c0 | g | + u | c1 |
    worker 2   | c0 x g | + u | c1 x       x: cut; what it has is learned from
    """
    return compose(experiment, CollectorSet(preempt=0.8), LearnerSet(workers), Updates())


def rapid(experiment: Experiment, collectors: int = 2, learners: int = 2) -> Composed:
    """RAPID (Berner et al. 2019, OpenAI Five): collectors do not wait, learners add up their gradients.

    collectors   | c | c | c | c | c | c |
    learner 0        | g | + u | g | + u |
    learner 1        | g | + u | g | + u |       +: the sum over all learners
    """
    return compose(experiment, CollectorSet(collectors, lag="async"), LearnerSet(learners), Updates())


def async_rapid(experiment: Experiment, collectors: int = 2, learners: int = 2) -> Composed:
    """RAPID with asynchronous gradients: no process waits for another within an iteration.

    collectors   | c | c | c | c | c | c |
    learner 0        | g u | g u | g u |
    learner 1        | g   u | g   u | g   u |       u: to the parameters that all share
    """
    return compose(experiment, CollectorSet(collectors, lag="async"), LearnerSet(learners), Updates(lag="async"))


PRESETS: dict[str, Callable[[Experiment], Composed]] = {
    "single": single,
    "sync": sync,
    "a2c": sync,
    "ppo": sync,
    "cleanba": cleanba,
    "impala": impala,
    "apex": apex,
    "r2d2": r2d2,
    "appo": appo,
    "dppo": dppo,
    "ddppo": ddppo,
    "rapid": rapid,
    "async-rapid": async_rapid,
}
"""All presets, by their names on the command line."""


def _replaying(experiment: Experiment, preset: str) -> Experiment:
    if not experiment.algorithm.replays:
        raise SettingsError(
            f"The preset {preset} is for algorithms that learn from replay, but {experiment.algorithm.name} does not. "
            "Use the preset impala, whose collectors run just as freely, or a recipe such as apex-atari or sac-mujoco."
        )
    return experiment


def _recurrent(experiment: Experiment) -> Experiment:
    if not experiment.model.recurrent:
        raise SettingsError(
            "The preset r2d2 is for models with a recurrent core, but this one has none. Use the preset apex, or a "
            "recipe such as r2d2-atari."
        )
    return experiment
