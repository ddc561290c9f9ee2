"""The adapter `mixed`: several tasks at once, which one policy plays (mixed/Breakout+Pong).

Shape legend: B environments of a shard, T tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.config.settings import Names, SettingsError
from lockstep.envs.adapters import AUTO, MIXED, OF_TASK
from lockstep.envs.base import Adapter, Observation, ShardEnv, StepResult, load_adapter
from lockstep.envs.episodes import Seeds
from lockstep.envs.factory import resolve
from lockstep.envs.settings import EnvConfig
from lockstep.models.observations import VALUE_TASK

TASK = "task"
"""The entry of an observation that shows models the task, one-hot."""
_OBSERVATION = "observation"
"""The entry for a task's own observation, if that has no entries."""
_INPUT = "task_input"
_ENTRIES = {False: (), True: (TASK,), "value": (VALUE_TASK,), "both": (TASK, VALUE_TASK)}
"""The entries that show the task, for each value of the option _INPUT."""
_FORM = re.compile(r"(?P<id>.+?)(@(?P<adapter>[^@*]+))?(\*(?P<count>[1-9]\d*))?")


class Task(NamedTuple):
    """One of the tasks."""

    id: str
    adapter: str
    copies: int
    """The number of environments that play the task in a group, which has all tasks' copies."""

    @property
    def name(self) -> str:
        """The task's name in metrics."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.id)

    def __str__(self) -> str:
        return f"{self.id}@{self.adapter}" + f"*{self.copies}" * (self.copies > 1)


def tasks_of(env_id: str) -> tuple[Task, ...]:
    """The tasks of an id: mixed/ID+ID+…, or mixed/FILE.txt with an ID in each line. An ID may name its adapter, and the
    number of environments that play it for each environment of another task: Pong@envpool*2.

    Raises:
        SettingsError: the id does not have this form, names a task twice or a task that no adapter serves, or the file
            is missing.
    """
    return _tasks_of(env_id, _texts(env_id))


@functools.cache
def _tasks_of(env_id: str, texts: tuple[str, ...]) -> tuple[Task, ...]:
    """The tasks of these texts. The id is only for errors, since a file's content may change."""
    tasks = tuple(_settled(text, env_id) for text in texts)
    if len(tasks) < 2:
        raise SettingsError(
            f"env.id={env_id} must name at least two tasks, as in {MIXED}Breakout+Pong, or a file with one in each "
            f"line, as in {MIXED}tasks.txt."
        )
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"env.id={env_id} names {name} twice. Give it more environments instead: {name}*2.")
    return tasks


def _texts(env_id: str) -> tuple[str, ...]:
    """Each task as the user wrote it."""
    given = env_id.removeprefix(MIXED)
    if not given.endswith(".txt"):
        return tuple(text.strip() for text in given.split("+"))
    try:
        lines = Path(given).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SettingsError(f"env.id={env_id}: cannot read the tasks: {error}.") from error
    bare = (line.partition("#")[0].strip() for line in lines)
    return tuple(text for text in bare if text)


def _settled(text: str, env_id: str) -> Task:
    found = _FORM.fullmatch(text)
    if found is None:
        raise SettingsError(
            f"env.id={env_id}: {text!r} is not of the form ID, ID@ADAPTER, ID*COUNT or ID@ADAPTER*COUNT."
        )
    config = resolve(EnvConfig(id=found["id"], adapter=found["adapter"] or AUTO))
    if config.id.startswith(MIXED) or load_adapter(config.adapter).group_size(config) > 1:
        raise SettingsError(
            f"env.id={env_id}: {config.id} cannot be one of several tasks, since it consists of several itself."
        )
    return Task(config.id, config.adapter, int(found["count"] or 1))


def shares(env_id: str) -> dict[str, float]:
    """Each task's share of all samples, by its name; empty for an id with one task. All environments make the same
    number of steps, so the shares are exact."""
    if not env_id.startswith(MIXED):
        return {}
    tasks = tasks_of(env_id)
    total = sum(task.copies for task in tasks)
    return {task.name: task.copies / total for task in tasks}


def describe(found: Mapping[str, float]) -> str:
    """A description of the tasks' shares of all samples; "" if there are none."""
    if len(set(found.values())) == 1:
        return f"equal samples of {len(found)} tasks"
    return "samples " + ", ".join(f"{name} {share:.1%}" for name, share in found.items()) if found else ""


def config_of(config: EnvConfig, task: Task) -> EnvConfig:
    """The settings of one task's environments."""
    options = {name: value for name, value in config.options.items() if name != _INPUT}
    own = dataclasses.replace(config, id=task.id, adapter=task.adapter, options=options, metrics=())
    try:
        return dataclasses.replace(resolve(own), metrics=())
    except SettingsError as error:
        raise SettingsError(
            f"env.id={config.id}: the task {task.id} is played by the adapter {task.adapter}. {error} (Several tasks "
            f"name their adapters in the id, as in {task.id}@gymnasium.)"
        ) from error


class Mixed(Adapter):
    """Several tasks in every shard. A task's share of all steps is that of its environments, whatever its speed."""

    threads = True
    decorrelates = True  # if all tasks' adapters do
    limits_episodes = True  # if all tasks' environments do

    def ids(self) -> list[str]:
        return []

    def find(self, env_id: str) -> str | None:
        return MIXED + "+".join(map(str, tasks_of(env_id))) if env_id.startswith(MIXED) else None

    def plays_atari(self, env_id: str) -> bool:
        return all(load_adapter(task.adapter).plays_atari(task.id) for task in tasks_of(env_id))

    def has_levels(self, env_id: str) -> bool:
        return all(load_adapter(task.adapter).has_levels(task.id) for task in tasks_of(env_id))

    def changes_options(self, env_id: str) -> bool:
        return all(load_adapter(task.adapter).changes_options(task.id) for task in tasks_of(env_id))

    def needs_egl(self, env_id: str) -> bool:
        return any(load_adapter(task.adapter).needs_egl(task.id) for task in tasks_of(env_id))

    def own_metrics(self, config: EnvConfig) -> Names:
        return tuple(f"{OF_TASK}{task.name}" for task in tasks_of(config.id))

    def group_size(self, config: EnvConfig) -> int:
        return sum(task.copies for task in tasks_of(config.id))

    def group_rows(self, config: EnvConfig, num_envs: int) -> list[np.ndarray]:
        tasks, groups = tasks_of(config.id), num_envs // self.group_size(config)
        ends = np.cumsum([groups * task.copies for task in tasks])[:-1]
        by_task = [np.split(rows, groups) for rows in np.split(np.arange(num_envs), ends)]
        return [np.concatenate(rows) for rows in zip(*by_task, strict=True)]

    def make(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> MixedShard:
        return MixedShard(config, seeds=seeds, num_envs=num_envs, threads=threads, render=render)


class _Part(NamedTuple):
    """The environments of one task."""

    env: ShardEnv
    rows: slice
    """Their rows in the shard."""


class MixedShard(ShardEnv):
    """A shard's environments of T tasks, ordered by task. The score of an episode is a metric of its task
    (Mixed.own_metrics). For seeds, environments are numbered within their task, so that seeds do not depend on other
    tasks.

    Raises:
        SettingsError: the tasks differ in their spaces or in frames per step, or restart in different ways.
    """

    def __init__(self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int, render: bool) -> None:
        tasks = tasks_of(config.id)
        group = sum(task.copies for task in tasks)
        assert num_envs % group == 0 == seeds.first_index % group, "a shard has all tasks"
        self.num_envs = num_envs
        self._tasks = tasks
        self._parts: list[_Part] = []
        with contextlib.ExitStack() as failed:
            begin = 0
            for task in tasks:
                count = num_envs // group * task.copies
                own = seeds.of(seeds.first_index // group * task.copies)
                each = max(1, threads // len(tasks)) if load_adapter(task.adapter).threads else 1
                env = load_adapter(task.adapter).make(
                    config_of(config, task), seeds=own, num_envs=count, threads=each, render=render
                )
                failed.callback(env.close)
                self._parts.append(_Part(env, slice(begin, begin + count)))
                begin += count
            self._check(config)
            first = self._parts[0].env
            self._task_entries = _task_entries(config)
            """The entries of observations that show the task."""
            self.observation_space = first.observation_space
            if self._task_entries:
                self.observation_space = _with_task(first.observation_space, self._task_entries, len(tasks), config)
            failed.pop_all()
        self.action_space, self.frames_per_step = first.action_space, first.frames_per_step
        self.emulator = first.emulator if len({part.env.emulator for part in self._parts}) == 1 else ""
        self.share_seeds = any(part.env.share_seeds for part in self._parts)
        self.limits_episodes = all(part.env.limits_episodes for part in self._parts)
        self._number = np.repeat(np.arange(len(tasks)), [part.env.num_envs for part in self._parts])
        """int64 [B]: the task of each environment."""
        self._own = self._number[:, None] == np.arange(len(tasks))
        """bool [B, T]: the task of each environment, one-hot."""
        self._score = np.zeros(num_envs)
        """float64 [B]: the sum of raw rewards of the current episodes so far."""

    def _check(self, config: EnvConfig) -> None:
        """Raise SettingsError if one policy cannot play all tasks."""
        first = self._parts[0].env
        for task, (env, _) in zip(self._tasks[1:], self._parts[1:], strict=True):
            for kind in ("observation_space", "action_space", "frames_per_step"):
                ours, theirs = getattr(first, kind), getattr(env, kind)
                if ours != theirs:
                    games = load_adapter(config.adapter).plays_atari(config.id)
                    mend = "give all games all actions: --env.options full_action_space=true, or --env.protocol machado"
                    raise SettingsError(
                        f"env.id={config.id}: one policy plays all tasks, but {self._tasks[0].id} has the "
                        f"{kind.replace('_', ' ')} {ours} and {task.id} {theirs}. "
                        + (f"To {mend}." if games and kind == "action_space" else "Leave one of them out, or wrap it.")
                    )
        restarts = {
            task: type(env).reseed_due is not ShardEnv.reseed_due
            for task, (env, _) in zip(self._tasks, self._parts, strict=True)
        }
        if len(set(restarts.values())) > 1:
            together, alone = (next(str(t) for t, how in restarts.items() if how == wanted) for wanted in (True, False))
            raise SettingsError(
                f"env.id={config.id}: the environments of {together} can only get new seeds together, those of {alone} "
                "one by one. Name one adapter for all tasks, as in Breakout@envpool+Pong@envpool."
            )

    def _view(self, out: Observation, part: _Part) -> Observation:
        """A task's rows of an observation, without the entries that show the task."""
        seen = part.env.observation_space
        if isinstance(seen, spaces.Dict):
            return {key: out[key][part.rows] for key in seen.spaces}
        return (out[_OBSERVATION] if self._task_entries else out)[part.rows]

    def _tell(self, out: Observation) -> None:
        """Write the entries that show the task."""
        for key in self._task_entries:
            out[key][:] = self._own

    def reset(self, out: Observation) -> None:
        self._score[:] = 0
        for part in self._parts:
            part.env.reset(self._view(out, part))
        self._tell(out)

    def send(self, action: Any) -> None:
        for env, rows in self._parts:
            env.send(tuple(each[rows] for each in action) if isinstance(action, tuple) else action[rows])

    def recv(self, out: Observation) -> StepResult:
        steps = [part.env.recv(self._view(out, part)) for part in self._parts]
        self._tell(out)
        step = StepResult(*(np.concatenate(each) for each in zip(*(step[:5] for step in steps), strict=True)))
        self._score += step.reward
        ended = step.terminated | step.truncated
        metrics = np.where(self._own & ended[:, None], self._score[:, None], np.nan)
        self._score[ended] = 0
        return step._replace(metrics=metrics)

    def offer(self, options: dict[str, Any]) -> None:
        for part in self._parts:
            part.env.offer(options)

    def reseed_due(self) -> bool:
        return self._parts[0].env.reseed_due()

    def reseed(self, out: Observation) -> None:
        self._score[:] = 0
        for part in self._parts:
            part.env.reseed(self._view(out, part))
        self._tell(out)

    def state_dict(self) -> dict[str, np.ndarray]:
        states = {f"{i}.{name}": x for i, part in enumerate(self._parts) for name, x in part.env.state_dict().items()}
        return {**states, "score": self._score.copy()}

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        self._score = state["score"].astype(np.float64)
        steps = 0
        for i, part in enumerate(self._parts):
            own = {name.removeprefix(f"{i}."): x for name, x in state.items() if name.startswith(f"{i}.")}
            steps += part.env.load_state_dict(own, self._view(out, part), heartbeat)
        self._tell(out)
        return steps

    def render(self, index: int = 0) -> np.ndarray:
        env, rows = self._parts[self._number[index]]
        return env.render(index - rows.start)

    def examine(self) -> None:
        for part in self._parts:
            part.env.examine()

    def close(self) -> None:
        for part in self._parts:
            part.env.close()


def value_sees_task(config: EnvConfig) -> bool:
    """Whether values see the task, or there is only one task."""
    return not config.id.startswith(MIXED) or VALUE_TASK in _task_entries(config)


def _task_entries(config: EnvConfig) -> tuple[str, ...]:
    """The entries of observations that env.options lets show the task."""
    asked = config.options.get(_INPUT, False)
    if asked not in tuple(_ENTRIES):  # a list cannot be a key
        raise SettingsError(f"env.options.{_INPUT}={asked!r} must be true, false, value or both.")
    return _ENTRIES[asked]


def _with_task(space: gymnasium.Space[Any], keys: tuple[str, ...], tasks: int, config: EnvConfig) -> spaces.Dict:
    """The observation space with additional entries that show the task."""
    entries = dict(space.spaces) if isinstance(space, spaces.Dict) else {_OBSERVATION: space}
    for key in keys:
        if key in entries:
            raise SettingsError(
                f"env.options.{_INPUT}: observations of env.id={config.id} have an entry {key!r} already."
            )
        entries[key] = spaces.Box(0.0, 1.0, (tasks,), np.float32)
    return spaces.Dict(entries)
