"""Checks the properties of an environment that equal bits depend on, by playing it in several ways and comparing."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
import xxhash
from gymnasium import spaces

from lockstep.config.settings import SettingsError, check_values
from lockstep.core.arrays import map_structure
from lockstep.core.rng import stream
from lockstep.envs.base import EnvConfig, ShardEnv, allocate_observation
from lockstep.envs.goals import ACHIEVED, DESIRED, check_goals
from lockstep.envs.registry import make, resolve, whole_matches
from lockstep.models.action_spaces import make_distribution
from lockstep.models.observations import ACTION_MASK, ObservationLayout, precision_warning, unused_mask
from lockstep.system import children
from lockstep.system.supervision import WorkerError

WAYS = {
    "finite": "observations and rewards are finite numbers",
    "again": "new instances give the same bits",
    "alone": "each environment gives the same bits without the others",
    "elsewhere": "another process gives the same bits",
    "rebuilt": "rebuilt in another process, as resume does it, they go on with the same bits",
}
"""The checks, in order."""
_SHARED_ALONE = "another shard in the process changes no bit"
"""What the check `alone` shows of environments that share a random stream, of which none can be without the others."""
_ADVICE = (
    "Take all randomness from self.np_random, which super().reset(seed=seed) seeds, and set everything else again in "
    "reset."
)
_CAUSES = {
    "finite": "No network learns from these. Fix the environment, or wrap it.",
    "again": "Either a generator is not seeded by reset(seed=...), such as np.random, random, or a "
    "generator that the constructor makes; or something is stored in a class or module, or depends on the clock.",
    "alone": "Environments of one process share something: a generator that each reset seeds for all of them, as "
    "np.random.seed does, or a variable of a class or module. Layouts differ in which environments share a process.",
    "elsewhere": "It depends on the process: on the order of a set of strings, on hash() or id(), on the clock, on "
    "files, or on something that the script has set.",
    "rebuilt": "An episode depends on earlier ones, because something outlives reset(seed=...): a count of episodes, "
    "the last observation or potential, a stack of frames, a generator that only the constructor seeds, or the running "
    "statistics of a wrapper (use --normalize.observations and --normalize.returns instead). Resume rebuilds an "
    "episode from its seed and actions alone.",
}
_TIMES = 4
"""Each environment begins from a new seed at least this often. Episodes are cut for it where the adapter can."""
_QUICK_STEPS = 32, 400
"""Least and most steps of quick_check."""
_MOST = 1_000_000
"""Most steps, because all of them are kept in memory."""


@dataclass(frozen=True)
class EnvCheck:
    """The result of check_env."""

    id: str
    adapter: str
    num_envs: int
    steps: int
    """Of each environment."""
    facts: dict[str, str]
    """Descriptions of what random actions met, by name. Episodes are cut more often than in training."""
    held: tuple[str, ...]
    """The checks of WAYS that hold, in order. Checks after the first failure were not run."""
    failed: str | None
    """The check that failed; None if all hold."""
    message: str
    """The verdict, and the usual causes of a failure."""

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return self.failed is None


def check_env(
    config: EnvConfig | str, *, steps: int = 1_000, seed: int = 1, tell: Callable[[str], Any] = lambda text: None
) -> EnvCheck:
    """Check that an environment gives equal bits for equal seeds and actions, by playing it with random actions.

    Args:
        config: the environments of training. At least 2, or two matches, are played side by side. An id uses its
        default settings.
        steps: for each environment, 8 to 1M. More steps reach what happens late.
        seed: of environments and actions.
        tell: called with each line of the report as soon as it is known.

    Raises:
        SettingsError: the environment is unknown or returns something wrong, no model takes its spaces, or a number is
            out of range.
        WorkerError: the environment failed in a child process, or that process died.
    """
    if not 2 * _TIMES <= steps <= _MOST:
        raise SettingsError(f"--steps {steps} must be from {2 * _TIMES} to {_MOST:,}, to begin several episodes.")
    config = EnvConfig(id=config) if isinstance(config, str) else config
    if not isinstance(config, EnvConfig):
        raise SettingsError(f"{config!r} is not an environment. Give an id, such as 'CartPole-v1', or an EnvConfig.")
    check_values(config)
    config.validate()
    if config.num_envs < 2:
        raise SettingsError(
            f"--env.num-envs {config.num_envs} must be at least 2 here, because one environment cannot show whether "
            "environments influence each other."
        )
    config = resolve(replace(config, random_actions=False, decorrelate=0))
    together = whole_matches(config, 1)
    config = replace(config, num_envs=whole_matches(config, max(config.num_envs, 2 * together)))
    longest = min(config.reseed_every, steps // _TIMES - 1)  # below round numbers, which often are time limits
    game = _Game(replace(config, reseed_every=longest), seed, range(config.num_envs), together)
    tell(f"environment {config.id}, stepped by {config.adapter}")
    expected = game.play(steps)
    facts = _facts(game, expected)
    for name, text in facts.items():
        tell(f"{name:<12}{text}")

    held: list[str] = []
    failed = None
    message = (
        f"As far as {steps:,} steps of {config.num_envs} environments show, seeds and actions decide everything: runs "
        "are the same on every layout, and can be verified and resumed exactly."
    )
    for way, found in _differences(game, expected, steps):
        shown = _SHARED_ALONE if way == "alone" and expected.share_seeds else WAYS[way]
        tell(f"{'fails' if found else 'holds':<12}{shown}")
        if found:
            failed, message = way, f"{found}. {_CAUSES[way]}" + ("" if way == "finite" else f" {_ADVICE}")
            break
        held.append(way)
    return EnvCheck(config.id, config.adapter, config.num_envs, steps, facts, tuple(held), failed, message)


def quick_check(config: EnvConfig, seed: int, seconds: float) -> tuple[str, str] | None:
    """A short check_env within this process. Return the check of WAYS that failed, with where and why; None if all that
    need no other process hold. It takes about `seconds` at most, unless making environments takes longer.

    Args:
        config: resolved. A single environment is not doubled.

    Raises:
        TimeoutError: the environments are too slow.
    """
    together = whole_matches(config, 1)
    count = whole_matches(config, min(config.num_envs, 2 * together))
    config = replace(config, num_envs=count, random_actions=False, decorrelate=0)
    began = time.monotonic()
    trial = _Game(replace(config, reseed_every=_TIMES), seed, range(count), together).play(2 * _TIMES)
    making = time.monotonic() - began - trial.seconds
    steps = min(_QUICK_STEPS[1], int((seconds - 5 * making) / (5 * max(1e-6, trial.seconds / (2 * _TIMES)))))
    if steps < _QUICK_STEPS[0]:
        raise TimeoutError
    longest = min(config.reseed_every, steps // _TIMES - 1)
    game = _Game(replace(config, reseed_every=longest), seed, range(count), together)
    expected = game.play(steps)
    for way, found in _differences(game, expected, steps, elsewhere=False):
        if found and way != "finite":  # the run itself finds these numbers
            return way, f"{found}. {_CAUSES[way]} {_ADVICE}"
    return None


def _differences(game: _Game, expected: _Played, steps: int, *, elsewhere: bool = True) -> Iterator[tuple[str, str]]:
    """Each check of WAYS, and the first difference in words or ""; elsewhere: whether to use other processes."""
    actions, trace = expected.actions, expected.trace
    yield "finite", expected.numbers.not_finite
    yield "again", _difference(trace, game.play(steps, actions).trace)
    if expected.share_seeds:
        alone = game.play(steps, actions, beside=True).trace
    else:
        each = [game.only(j).play(steps, [_columns(batch, j) for batch in actions]).trace for j in game.matches()]
        alone = _Trace(*(np.concatenate(parts, 1) for parts in zip(*each, strict=True)))
    yield "alone", _difference(trace, alone)
    later = [(steps - t, actions[t:], state) for t, state in expected.states.items()]
    if elsewhere:
        other, *rebuilt = _in_child(game, [(steps, actions), *later])
        yield "elsewhere", _difference(trace, other)
    else:
        rebuilt = [game.play(*arguments).trace for arguments in later]
    found = ""
    for t, again in zip(expected.states, rebuilt, strict=True):
        for part, known in zip(again[1:], trace[1:], strict=True):
            part[0] = known[t]  # the first row has the observation alone
        found = found or _difference(_Trace(*(part[t:] for part in trace)), again, t)
    yield "rebuilt", found


class _Trace(NamedTuple):
    """Everything that must be equal, by time and environment. The first row is the start."""

    observation: np.ndarray
    """uint64 [T + 1, B]: hashes of observations."""
    reward: np.ndarray
    """float32 [T + 1, B]; the fields below are bool."""
    termination: np.ndarray
    truncation: np.ndarray
    reset: np.ndarray
    lost_life: np.ndarray


class _Played(NamedTuple):
    trace: _Trace
    actions: list[Any]
    """T batches of the action space."""
    states: dict[int, dict[str, np.ndarray]]
    """States by step: one where a later episode has just begun, one within an episode. Only for random actions."""
    restarts: list[int]
    """Steps after which all environments were restarted."""
    numbers: _Numbers
    """Only for random actions, because equal repetitions have the same numbers."""
    seconds: float
    """Time that the environments took for their steps."""
    env: tuple[gymnasium.Space[Any], gymnasium.Space[Any], str]
    """Observation space, action space and emulator."""
    share_seeds: bool
    """As of ShardEnv."""


@dataclass(frozen=True)
class _Game:
    """What is played. With the actions, these values must determine all results."""

    config: EnvConfig
    seed: int
    rows: range
    """Global indices of the environments."""
    together: int = 1
    """Environments of one match."""

    def matches(self) -> list[slice]:
        """The rows of each match, or of each single environment."""
        return [slice(j, j + self.together) for j in range(0, len(self.rows), self.together)]

    def only(self, rows: slice) -> _Game:
        """The same game with some of its environments only."""
        return replace(self, rows=self.rows[rows])

    def play(
        self,
        steps: int,
        actions: list[Any] | None = None,
        state: dict[str, np.ndarray] | None = None,
        beside: bool = False,
    ) -> _Played:
        """Play random or given actions, from the start or from a state; beside: while another shard does the same."""
        original, count = actions is None, len(self.rows)
        trace = _Trace(
            np.zeros((steps + 1, count), np.uint64),
            np.zeros((steps + 1, count), np.float32),
            *(np.zeros((steps + 1, count), np.bool_) for _ in range(4)),
        )
        sent: list[Any] = []
        states: dict[int, dict[str, np.ndarray]] = {}
        restarts: list[int] = []
        numbers, seconds = _Numbers(), 0.0
        env = make(self.config, seed=self.seed, first_index=self.rows.start, num_envs=count)
        other = make(self.config, seed=self.seed, first_index=self.rows.stop, num_envs=count) if beside else None
        env.examine()
        out = map_structure(torch.Tensor.numpy, allocate_observation(env.observation_space, (count,)))
        entries: dict[str, np.ndarray] = out if isinstance(out, dict) else {"": out}
        chosen = _random_actions(env, self.seed, self.rows, entries) if actions is None else iter(actions)
        try:
            if state is None:
                env.reset(out)
            else:
                env.load_state_dict(state, out)
            if other is not None:
                other.reset(map_structure(np.empty_like, out))
            for t in range(steps + 1):
                if t:
                    sent.append(next(chosen))
                    if other is not None:
                        other.send(sent[-1])
                        other.recv(map_structure(np.empty_like, out))
                    began = time.perf_counter()
                    env.send(sent[-1])
                    result = env.recv(out)
                    seconds += time.perf_counter() - began
                    for part, found in zip(trace[1:], result[: len(trace) - 1], strict=True):  # all but metrics
                        part[t] = found
                    if env.reseed_due():
                        env.reseed(out)
                        restarts.append(t)
                for j in range(count):
                    content = b"".join(x[j].tobytes() for x in entries.values())
                    trace.observation[t, j] = xxhash.xxh3_64_intdigest(content)
                if not original:
                    continue
                numbers.see(t, entries, trace.reward[t])
                begun = trace.reset[t].any() or t in restarts[-1:]
                if t == steps * 5 // 8 or (begun and t > steps // 2 and not states):
                    states[t] = {name: array.copy() for name, array in env.state_dict().items()}
        finally:
            env.close()
            if other is not None:
                other.close()
        facts = env.observation_space, env.action_space, env.emulator
        return _Played(trace, sent, states, restarts, numbers, seconds, facts, env.share_seeds)


class _Numbers:
    """The ranges of the numbers in observations."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[float, float]] = {}
        """Least and largest number of each entry."""
        self.ends: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Least and largest value of each number of an entry."""
        self.not_finite = ""
        """The first observation or reward that was not finite, in words; "" if all were."""

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
            self.not_finite = f"Environment {wrong[0][0]} gives {x[tuple(wrong[0])]} in its {what} {_when(t)}"


def _random_actions(env: ShardEnv, seed: int, rows: range, entries: dict[str, np.ndarray]) -> Iterator[Any]:
    """Random actions that respect action masks. Those of environment j depend on the seed and j alone."""
    distribution = make_distribution(env.action_space)
    ObservationLayout.of(env.observation_space).check_mask(env.action_space, distribution.num_logits)
    draws = [stream(seed, "check-env", j) for j in rows]
    while True:
        mask = entries.get(ACTION_MASK)
        allowed = None if mask is None else torch.from_numpy(mask.reshape(len(rows), -1) != 0)
        noise = torch.from_numpy(np.stack([draw.random(distribution.noise_size, np.float32) for draw in draws]))
        yield distribution.to_env(distribution.at_random(noise, allowed).numpy())


def _columns(batch: Any, rows: slice) -> Any:
    """The actions of some environments."""
    return tuple(part[rows] for part in batch) if isinstance(batch, tuple) else batch[rows]


def _difference(expected: _Trace, found: _Trace, begin: int = 0) -> str:
    """The first difference of two traces in words; "" if they are equal."""
    parts = [a != b for a, b in zip(_bits(expected), _bits(found), strict=True)]
    anywhere = np.logical_or.reduce(parts)
    if not anywhere.any():
        return ""
    t, j = (int(i) for i in np.argwhere(anywhere)[0])
    names = [name.replace("_", " ") for name, differs in zip(_Trace._fields, parts, strict=True) if differs[t, j]]
    return f"Environment {j} has another {' and '.join(names)} {_when(begin + t)}"


def _bits(trace: _Trace) -> _Trace:
    """A trace with rewards as bits, so that NaN equals itself."""
    return trace._replace(reward=np.ascontiguousarray(trace.reward).view(np.uint32))


def _when(t: int) -> str:
    return f"after step {t:,}" if t else "at its start"


def _in_child(game: _Game, plays: list[tuple[Any, ...]]) -> list[_Trace]:
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


def _serve(pipe: Connection, game: _Game) -> None:
    try:
        pipe.send(("", [game.play(*arguments).trace for arguments in pipe.recv()]))
    except Exception:
        pipe.send((traceback.format_exc(), []))


def _facts(game: _Game, played: _Played) -> dict[str, str]:
    """Facts about an environment that help before training."""
    space, actions, emulator = played.env
    shapes = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
    trace, seen = played.trace, played.numbers.ranges
    reward = trace.reward[1:][~trace.reset[1:]]
    return {
        **({"protocol": emulator} if emulator else {}),
        **({"seeds": "one for each shard, so its environments depend on each other"} if played.share_seeds else {}),
        "observation": "; ".join(
            f"{name} {x.dtype} {list(x.shape or ())}, {seen[name][0]:.4g} to {seen[name][1]:.4g}".lstrip()
            for name, x in shapes.items()
        ),
        "scaling": _scaling(space),
        "action": str(actions),
        "reward": f"{reward.min():.4g} to {reward.max():.4g}, {np.mean(reward != 0):.1%} of them not 0",
        "episodes": _episodes(trace, played.restarts, game.config.reseed_every),
        **({"note": " ".join(notes)} if (notes := _notes(game.config, played)) else {}),
        "speed": f"about {trace.reward[1:].size / played.seconds:,.0f} steps a second here, in one process",
    }


def _scaling(space: gymnasium.Space[Any]) -> str:
    """How lockstep's models scale each entry."""
    layout = ObservationLayout.of(space)
    images = zip(layout.images, layout.brightest, strict=True)
    told = {key: f"pixels, divided by {brightest}" for (key, _), brightest in images}
    told |= {key: "numbers as they are, unless --normalize.observations standardizes them" for key, _ in layout.vectors}
    for key, _ in layout.flattened:
        told[key] += ", flattened (pictures are of uint8)"
    return "; ".join(f"{key}: {how}" if key else how for key, how in told.items())


def _notes(config: EnvConfig, played: _Played) -> list[str]:
    """Warnings of probable mistakes, and of what makes learning hard."""
    space, actions, _ = played.env
    distribution = make_distribution(actions)
    notes = [unused_mask(space, distribution.num_logits)]
    if isinstance(space, spaces.Dict) and {ACHIEVED, DESIRED} <= set(space.spaces):
        try:
            check_goals(config)
        except SettingsError as error:
            notes.append(str(error))
    notes += [
        f"The observation{f' {name!r}' if name else ''} {said}"
        for name, (low, high) in played.numbers.ends.items()
        if low.dtype == np.float32 and (said := precision_warning(low, high))
    ]
    if warning := distribution.warning_at_start(1.0):
        notes.append(f"With PPO, A2C, IMPALA and APPO: {warning}")
    return [note for note in notes if note]


def _episodes(trace: _Trace, restarts: list[int], longest: int) -> str:
    """How episodes ended, and how many were cut by this check or by env.reseed_every."""
    lengths, returns, cut, terminations = [], [], 0, 0
    for j in range(trace.reward.shape[1]):
        begin = 0
        ended = trace.termination[:, j] | trace.truncation[:, j]
        for t in sorted({*np.flatnonzero(ended).tolist(), *restarts}):
            if not ended[t] or (trace.truncation[t, j] and t - begin == longest):
                cut += 1
            else:
                terminations += int(trace.termination[t, j])
                lengths.append(t - begin)
                returns.append(float(trace.reward[begin + 1 : t + 1, j].sum()))
            begin = t if t in restarts else t + 1  # the next step resets
    shortened = f"; {cut} cut after up to {longest:,} steps" if cut else ""
    if not lengths:
        return f"none ended by itself{shortened}"
    return (
        f"{len(lengths)} ended by themselves, {terminations} of them by termination: {min(lengths):,} to "
        f"{max(lengths):,} steps, scores {min(returns):.4g} to {max(returns):.4g}, {np.mean(returns):.4g} on average"
        f"{shortened}"
    )
