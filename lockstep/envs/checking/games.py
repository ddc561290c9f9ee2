"""Plays an environment and records everything that must be equal when it is played again."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
import xxhash

from lockstep.core.arrays import map_structure
from lockstep.core.rng import stream
from lockstep.envs.base import ShardEnv, StepResult, allocate_observation
from lockstep.envs.factory import make
from lockstep.envs.finite import FiniteCheck, forbids_all
from lockstep.envs.settings import EnvConfig
from lockstep.models.action_spaces import choices_of, make_distribution
from lockstep.models.observations import ACTION_MASK, ObservationLayout
from lockstep.system import children
from lockstep.system.supervision import WorkerError


class Trace(NamedTuple):
    """The results that must be equal, by time and environment. The first row is the start."""

    observation: np.ndarray
    """uint64 [T + 1, B]: hashes of observations."""
    reward: np.ndarray
    """float32 [T + 1, B]; the fields below are bool."""
    termination: np.ndarray
    truncation: np.ndarray
    reset: np.ndarray
    lost_life: np.ndarray

    @staticmethod
    def empty(steps: int, count: int) -> Trace:
        shape = steps + 1, count
        flags = (np.zeros(shape, np.bool_) for _ in range(4))
        return Trace(np.zeros(shape, np.uint64), np.zeros(shape, np.float32), *flags)

    def write_step(self, t: int, result: StepResult) -> None:
        for part, found in zip(self[1:], result[: len(self) - 1], strict=True):  # all but metrics
            part[t] = found

    def write_observation(self, t: int, entries: dict[str, np.ndarray]) -> None:
        for j in range(self.observation.shape[1]):
            content = b"".join(x[j].tobytes() for x in entries.values())
            self.observation[t, j] = xxhash.xxh3_64_intdigest(content)


class Played(NamedTuple):
    trace: Trace
    actions: list[Any]
    """T batches of the action space."""
    states: dict[int, dict[str, np.ndarray]]
    """States by step: one just after a later episode began, one within an episode. Only for random actions."""
    restarts: list[int]
    """Steps after which all environments were restarted."""
    numbers: Numbers
    """Only filled for random actions, because equal repetitions have the same numbers."""
    seconds: float
    """Seconds that the environments took for their steps."""
    env: tuple[gymnasium.Space[Any], gymnasium.Space[Any], str]
    """Observation space, action space and emulator."""
    share_seeds: bool
    """As for ShardEnv."""


@dataclass(frozen=True)
class Game:
    """The environments to play. Together with the actions, these values must determine all results."""

    config: EnvConfig
    seed: int
    rows: range
    """Global indices of the environments."""
    together: int = 1
    """Environments of one match."""

    def matches(self) -> list[slice]:
        """The rows of each match, or of each single environment."""
        return [slice(j, j + self.together) for j in range(0, len(self.rows), self.together)]

    def only(self, rows: slice) -> Game:
        """The same game with only some of its environments."""
        return replace(self, rows=self.rows[rows])

    def play(
        self,
        steps: int,
        actions: list[Any] | None = None,
        state: dict[str, np.ndarray] | None = None,
        beside: bool = False,
    ) -> Played:
        """Play random or given actions, from the start or from a state. beside: another shard plays the same actions
        meanwhile."""
        original, count = actions is None, len(self.rows)
        trace, sent, states, restarts = Trace.empty(steps, count), [], {}, []
        numbers, seconds = Numbers(), 0.0
        with contextlib.ExitStack() as closing:
            env = closing.enter_context(self._environments(self.rows.start))
            other = closing.enter_context(self._environments(self.rows.stop)) if beside else None
            env.examine()
            out = map_structure(torch.Tensor.numpy, allocate_observation(env.observation_space, (count,)))
            entries: dict[str, np.ndarray] = out if isinstance(out, dict) else {"": out}
            chosen = _random_actions(env, self.seed, self.rows, entries) if actions is None else iter(actions)
            if state is None:
                env.reset(out)
            else:
                env.load_state_dict(state, out)
            if other is not None:
                other.reset(map_structure(np.empty_like, out))
            for t in range(steps + 1):
                if t:
                    sent.append(next(chosen))
                    stuck = _stuck(env, entries, count) if original else np.zeros(count, np.bool_)
                    if other is not None:
                        _step(other, sent[-1], map_structure(np.empty_like, out))
                    began = time.perf_counter()
                    result = _step(env, sent[-1], out)
                    seconds += time.perf_counter() - began
                    trace.write_step(t, result)
                    if (stuck := stuck & ~result.first).any():
                        FiniteCheck(self.config.id).report_mask(self.rows[int(stuck.argmax())], when(t - 1))
                    if env.reseed_due():
                        env.reseed(out)
                        restarts.append(t)
                trace.write_observation(t, entries)
                if not original:
                    continue
                numbers.see(t, entries, trace.reward[t])
                begun = trace.reset[t].any() or t in restarts[-1:]
                if t == steps * 5 // 8 or (begun and t > steps // 2 and not states):
                    states[t] = {name: array.copy() for name, array in env.state_dict().items()}
        facts = env.observation_space, env.action_space, env.emulator
        return Played(trace, sent, states, restarts, numbers, seconds, facts, env.share_seeds)

    def _environments(self, first: int) -> contextlib.closing[ShardEnv]:
        """As many environments as are played, from a global index on."""
        return contextlib.closing(make(self.config, seed=self.seed, first_index=first, num_envs=len(self.rows)))


def _step(env: ShardEnv, action: Any, out: Any) -> StepResult:
    env.send(action)
    return env.recv(out)


def _stuck(env: ShardEnv, entries: dict[str, np.ndarray], count: int) -> np.ndarray:
    """bool [B]: the environments whose action mask forbids everything."""
    choices, mask = choices_of(env.action_space), entries.get(ACTION_MASK)
    if mask is None or not len(choices):
        return np.zeros(count, np.bool_)
    return forbids_all(mask.reshape(count, -1), np.array(choices, np.int64))


class Numbers:
    """The ranges of the numbers in observations."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[float, float]] = {}
        """The smallest and the largest number of each entry."""
        self.ends: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """The smallest and the largest value at each place of an entry."""
        self.not_finite = ""
        """A description of the first observation or reward that was not finite; "" if all were finite."""

    def see(self, t: int, entries: dict[str, np.ndarray], reward: np.ndarray) -> None:
        for name, x in entries.items():
            low, high = self.ranges.get(name, (np.inf, -np.inf))
            if x.size:
                low, high = min(low, float(x.min())), max(high, float(x.max()))
            self.ranges[name] = low, high
            least, most = self.ends.get(name, (x[0], x[0]))
            self.ends[name] = np.minimum(least, x.min(0)), np.maximum(most, x.max(0))
            self._require_finite(t, f"observation {name}".rstrip(), x)
        self._require_finite(t, "reward", reward)

    def _require_finite(self, t: int, what: str, x: np.ndarray) -> None:
        wrong = np.argwhere(~np.isfinite(x))
        if len(wrong) and not self.not_finite:
            self.not_finite = f"Environment {wrong[0][0]} gives {x[tuple(wrong[0])]} in its {what} {when(t)}"


def _random_actions(env: ShardEnv, seed: int, rows: range, entries: dict[str, np.ndarray]) -> Iterator[Any]:
    """Random actions that respect action masks. Those of environment j depend only on the seed and j."""
    distribution = make_distribution(env.action_space)
    ObservationLayout.of(env.observation_space).check_mask(env.action_space, distribution.num_logits)
    draws = [stream(seed, "check-env", j) for j in rows]
    while True:
        mask = entries.get(ACTION_MASK)
        allowed = None if mask is None else torch.from_numpy(mask.reshape(len(rows), -1) != 0)
        noise = torch.from_numpy(np.stack([draw.random(distribution.noise_size, np.float32) for draw in draws]))
        yield distribution.to_env(distribution.at_random(noise, allowed).numpy())


def columns(batch: Any, rows: slice | np.ndarray) -> Any:
    """The actions of some environments."""
    return tuple(part[rows] for part in batch) if isinstance(batch, tuple) else batch[rows]


def difference(expected: Trace, found: Trace, begin: int = 0) -> str:
    """A description of the first difference of two traces; "" if they are equal."""
    parts = [a != b for a, b in zip(_bits(expected), _bits(found), strict=True)]
    anywhere = np.logical_or.reduce(parts)
    if not anywhere.any():
        return ""
    t, j = (int(i) for i in np.argwhere(anywhere)[0])
    names = [name.replace("_", " ") for name, differs in zip(Trace._fields, parts, strict=True) if differs[t, j]]
    return f"Environment {j} has another {' and '.join(names)} {when(begin + t)}"


def _bits(trace: Trace) -> Trace:
    """A trace with rewards as bits, so that NaN equals itself."""
    return trace._replace(reward=np.ascontiguousarray(trace.reward).view(np.uint32))


def when(t: int) -> str:
    return f"after step {t:,}" if t else "at its start"


def in_child(game: Game, plays: list[tuple[Any, ...]]) -> list[Trace]:
    """The traces of game.play with each of these arguments, in a child process."""
    ours, theirs = multiprocessing.Pipe()
    process = children.start(_serve, (theirs, game), "lockstep-check-env")
    try:
        theirs.close()
        ours.send(plays)
        wait([ours, process.sentinel])
        error, traces = ours.recv()
    except (EOFError, OSError):
        process.join()
        raise WorkerError(f"The environment's process {children.death_report(process)}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if error:
        raise WorkerError(f"The environment failed in a child process, though not in this one:\n{error}")
    return traces


def _serve(pipe: Connection, game: Game) -> None:
    try:
        pipe.send(("", [game.play(*arguments).trace for arguments in pipe.recv()]))
    except Exception:
        pipe.send((traceback.format_exc(), []))
