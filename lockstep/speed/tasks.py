"""`lockstep bench --tasks`: what a step of each of several tasks costs, and how many environments give all of them the
same computing time."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.envs.adapters import MIXED
from lockstep.envs.mixed import Task, config_of, tasks_of
from lockstep.envs.random_actions import RandomActions
from lockstep.experiment import Experiment

_COPIES = 4
"""Environments that measure each task."""
_ENOUGH = 0.05
"""More environments are not worth it once the computing times of all tasks differ from their mean by less than this."""


@dataclass(frozen=True)
class TaskCosts:
    """The processor time of a step of each task, and numbers of environments that balance it."""

    tasks: tuple[Task, ...]
    costs: tuple[tuple[float, ...], ...]
    """Seconds of a step, by task and round."""
    copies: tuple[int, ...]
    """Environments of each task, among sum(copies)."""
    num_envs: int
    """env.num_envs for them: about as many as the experiment has."""

    @property
    def medians(self) -> list[float]:
        return [statistics.median(rounds) for rounds in self.costs]

    @property
    def env_id(self) -> str:
        """The id with these numbers."""
        return MIXED + "+".join(str(task._replace(copies=n)) for task, n in zip(self.tasks, self.copies, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Each task's cost in microseconds, its environments, and its shares of samples and of computing time."""
        spent = [n * cost for n, cost in zip(self.copies, self.medians, strict=True)]
        rows = [
            {
                "task": task.name,
                "microseconds": {"median": 1e6 * cost, "min": 1e6 * min(rounds), "max": 1e6 * max(rounds)},
                "environments": n,
                "share_of_samples": n / sum(self.copies),
                "share_of_time": time_ / sum(spent),
            }
            for task, cost, rounds, n, time_ in zip(
                self.tasks, self.medians, self.costs, self.copies, spent, strict=True
            )
        ]
        return {"tasks": rows, "env_id": self.env_id, "num_envs": self.num_envs}

    def table(self) -> str:
        """The same as text, with the flags that use it."""
        width = max(len(task.name) for task in self.tasks)
        head = f"{'task':<{width}}  {'µs a step':>20}  environments  share of samples  share of time"
        lines = [head]
        for row in self.to_json()["tasks"]:
            cost = row["microseconds"]
            measured = f"{cost['median']:.1f} ({cost['min']:.1f} to {cost['max']:.1f})"
            lines.append(
                f"{row['task']:<{width}}  {measured:>20}  {row['environments']:>12}  {row['share_of_samples']:>16.1%}  "
                f"{row['share_of_time']:>13.1%}"
            )
        flags = f"--env.id '{self.env_id}' --env.num-envs {self.num_envs}"
        return "\n".join([*lines, f"equal computing time: {flags}"])


def task_costs(
    experiment: Experiment,
    *,
    rounds: int = 3,
    seconds: float = 3.0,
    say: Callable[[str], None] = lambda text: None,
) -> TaskCosts:
    """Step the environments of each task with random actions, in turn over several rounds.

    Args:
        experiment: its environments are measured. A shard's are the most that its tasks may share.
        seconds: of processor time for each task and round.
        say: prints progress.

    Raises:
        SettingsError: env.id names no several tasks, a shard has fewer environments than tasks, or a task forbids
        some actions.
    """
    config = envs.resolve(experiment.env)
    if not config.id.startswith(MIXED):
        raise SettingsError(f"--tasks measures several tasks, but env.id={config.id}. Use --env.id {MIXED}ID+ID.")
    tasks, most = tasks_of(config.id), experiment.envs_per_shard
    if most < len(tasks):
        raise SettingsError(
            f"A shard has {most} environments (env.num_envs / scheme.shards), fewer than the {len(tasks)} tasks of "
            "env.id. Every shard plays all tasks, so raise --env.num-envs."
        )
    playing = [_Playing(config_of(config, task)) for task in tasks]
    costs: list[list[float]] = [[] for _ in tasks]
    try:
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}: {len(tasks)} tasks, {seconds:g} s of processor time each")
            for task, found in zip(playing, costs, strict=True):
                found.append(task.cost(seconds))
    finally:
        for task in playing:
            task.env.close()
    copies = balanced([statistics.median(found) for found in costs], most)
    whole = sum(copies) * experiment.scheme.shards
    num_envs = max(1, round(experiment.env.num_envs / whole)) * whole
    return TaskCosts(tasks, tuple(map(tuple, costs)), copies, num_envs)


def balanced(costs: Sequence[float], most: int) -> tuple[int, ...]:
    """Numbers of environments, in total at most `most`, whose number times cost is as equal as it can be. They grow one
    by one where the least time is spent, and the first with a small deviation from the mean are enough."""
    copies = [1] * len(costs)
    best, deviation = tuple(copies), _uneven(copies, costs)
    while sum(copies) < most and deviation >= _ENOUGH:
        spent = [n * cost for n, cost in zip(copies, costs, strict=True)]
        copies[spent.index(min(spent))] += 1
        if (found := _uneven(copies, costs)) < deviation:
            best, deviation = tuple(copies), found
    return best


def _uneven(copies: Sequence[int], costs: Sequence[float]) -> float:
    """The largest deviation of a task's computing time from the mean, as a share of it."""
    spent = [n * cost for n, cost in zip(copies, costs, strict=True)]
    mean = sum(spent) / len(spent)
    return max(abs(each / mean - 1) for each in spent)


class _Playing:
    """The environments of one task, which random actions step."""

    def __init__(self, config: envs.EnvConfig) -> None:
        count = envs.whole_matches(config, _COPIES)
        config = dataclasses.replace(config, num_envs=count)
        env = envs.make(config, seed=1, first_index=0, num_envs=count, purpose="bench")
        self.env = RandomActions(env, seed=1, first_index=0)
        self._out = map_structure(
            lambda leaf: leaf.numpy(), envs.allocate_observation(self.env.observation_space, (count,))
        )
        self.env.reset(self._out)

    def cost(self, seconds: float) -> float:
        """Processor time of one environment's step, with all threads and with resets."""
        begin, steps = time.process_time(), 0
        while (spent := time.process_time() - begin) < seconds:
            self.env.send(None)
            self.env.recv(self._out)
            steps += 1
        return spent / (steps * self.env.num_envs)
