"""Does an environment keep what bit-identity rests on? It is played in several ways that must give the same bits."""

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
from lockstep.launchers.supervisor import WorkerError
from lockstep.models.distributions import make_distribution
from lockstep.models.observations import ACTION_MASK, ObservationLayout, precision_warning, unused_mask
from lockstep.system import children

WAYS = {
    "finite": "observations and rewards are finite numbers",
    "again": "new instances give the same bits",
    "alone": "each environment gives the same bits without the others beside it",
    "elsewhere": "another process gives the same bits",
    "rebuilt": "rebuilt in another process, as resume does it, they go on with the same bits",
}
"""What is checked, in this order."""
_MEND = "Take all randomness from self.np_random, which super().reset(seed=seed) seeds, and set all else anew in reset."
_CAUSES = {
    "finite": "No network learns from these. Mend the environment, or wrap it.",
    "again": "Either randomness comes from what reset(seed=...) does not seed, such as np.random, random, or a "
    "generator that the constructor makes; or something is kept on a class or module, or read from the clock.",
    "alone": "Environments of one process share something: a generator that each reset seeds for all of them, as "
    "np.random.seed does, or a variable of a class or module. Layouts differ in which environments share a process.",
    "elsewhere": "It depends on the process: on the order of a set of strings, on hash() or id(), on the clock, on "
    "files, or on what the script that made it has set.",
    "rebuilt": "An episode depends on those before it, since something outlives reset(seed=...): a count of episodes, "
    "the last observation or potential, a stack of frames, a generator that only the constructor seeds, or the running "
    "statistics of a wrapper (--normalize.observations and --normalize.returns keep theirs apart). Resume rebuilds an "
    "episode from its own seed and actions alone.",
}
_TIMES = 4
"""That each environment begins from a new seed, at least: where a library can, its episodes are cut for it."""
_QUICK_STEPS = 32, 400
"""Steps of the short form at the least and at the most."""
_MOST = 1_000_000
"""Steps, all of which are remembered."""


@dataclass(frozen=True)
class EnvCheck:
    """What check_env found."""

    id: str
    adapter: str
    num_envs: int
    steps: int
    """Of each environment."""
    facts: dict[str, str]
    """What random actions met, by name, in words. Episodes are cut more often than in training, for the last way."""
    held: tuple[str, ...]
    """Which of WAYS hold, in order. Those behind the first that does not were not tried."""
    failed: str | None
    """Which one does not; None if all hold."""
    message: str
    """The verdict, and what most often causes it."""

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return self.failed is None


def check_env(
    config: EnvConfig | str, *, steps: int = 1_000, seed: int = 1, tell: Callable[[str], Any] = lambda text: None
) -> EnvCheck:
    """Play an environment with random actions, and find out whether equal seeds and actions give equal bits.

    Args:
        config: which environments, as training has them, and how many side by side: at least 2, and at least two
            matches where several agents play one. An id alone has the defaults.
        steps: of each of them, 8 to 1M. More reach what happens late.
        seed: of environments and actions.
        tell: is given each line of the report as soon as it is known.

    Raises:
        SettingsError: there is no such environment, it returns what none may, there is no model for its spaces, or a
            number is out of range.
        WorkerError: the environment raised in a process of its own, or that process died.
    """
    if not 2 * _TIMES <= steps <= _MOST:
        raise SettingsError(f"--steps {steps} must be from {2 * _TIMES} to {_MOST:,}, to begin several episodes.")
    config = EnvConfig(id=config) if isinstance(config, str) else config
    if not isinstance(config, EnvConfig):
        raise SettingsError(f"{config!r} names no environment: give an id, such as 'CartPole-v1', or an EnvConfig.")
    check_values(config)
    config.validate()
    if config.num_envs < 2:
        raise SettingsError(
            f"--env.num-envs {config.num_envs} must be at least 2 here: one alone cannot show whether environments "
            "influence each other."
        )
    config = resolve(replace(config, random_actions=False, decorrelate=0))
    together = whole_matches(config, 1)
    config = replace(config, num_envs=whole_matches(config, max(config.num_envs, 2 * together)))
    longest = min(config.reseed_every, steps // _TIMES - 1)  # less than round numbers, which are limits of their own
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
        tell(f"{'fails' if found else 'holds':<12}{WAYS[way]}")
        if found:
            failed, message = way, f"{found}. {_CAUSES[way]}" + ("" if way == "finite" else f" {_MEND}")
            break
        held.append(way)
    return EnvCheck(config.id, config.adapter, config.num_envs, steps, facts, tuple(held), failed, message)


def quick_check(config: EnvConfig, seed: int, seconds: float) -> tuple[str, str] | None:
    """A short form of check_env, within this process: which of WAYS does not hold, with where and why; None if those
    that can be tried so hold. It takes about so many seconds at the most, unless making environments takes longer.

    Args:
        config: resolved. One environment alone is not doubled.

    Raises:
        TimeoutError: environments are too slow for it.
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
        if found and way != "finite":  # which the run itself finds, and where
            return way, f"{found}. {_CAUSES[way]} {_MEND}"
    return None


def _differences(game: _Game, expected: _Played, steps: int, *, elsewhere: bool = True) -> Iterator[tuple[str, str]]:
    """Each of WAYS, and where the environments do otherwise in it, or ""; elsewhere: whether to try other processes."""
    actions, trace = expected.actions, expected.trace
    yield "finite", expected.numbers.not_finite
    yield "again", _difference(trace, game.play(steps, actions).trace)
    alone = [game.only(j).play(steps, [_columns(batch, j) for batch in actions]).trace for j in game.matches()]
    yield "alone", _difference(trace, _Trace(*(np.concatenate(parts, 1) for parts in zip(*alone, strict=True))))
    later = [(steps - t, actions[t:], state) for t, state in expected.states.items()]
    if elsewhere:
        other, *rebuilt = _in_child(game, [(steps, actions), *later])
        yield "elsewhere", _difference(trace, other)
    else:
        rebuilt = [game.play(*arguments).trace for arguments in later]
    found = ""
    for t, again in zip(expected.states, rebuilt, strict=True):
        for part, known in zip(again[1:], trace[1:], strict=True):
            part[0] = known[t]  # of the step before the state, which has the observation alone
        found = found or _difference(_Trace(*(part[t:] for part in trace)), again, t)
    yield "rebuilt", found


class _Trace(NamedTuple):
    """What B environments did, by time and environment: all that must be equal. The first row is their start."""

    observation: np.ndarray
    """uint64 [T + 1, B]: a hash of each."""
    reward: np.ndarray
    """float32 [T + 1, B]; those below bool."""
    termination: np.ndarray
    truncation: np.ndarray
    reset: np.ndarray
    lost_life: np.ndarray


class _Played(NamedTuple):
    trace: _Trace
    actions: list[Any]
    """T batches of the action space."""
    states: dict[int, dict[str, np.ndarray]]
    """By step: where an episode has just begun, and within one, neither of them the first. Only of random actions."""
    restarts: list[int]
    """Steps after which all environments were started afresh."""
    numbers: _Numbers
    """Only of random actions, too: a repetition that is equal has the same."""
    seconds: float
    """That the environments took for their steps."""
    env: tuple[gymnasium.Space[Any], gymnasium.Space[Any], str]
    """Observation space, action space and emulator."""


@dataclass(frozen=True)
class _Game:
    """What is played: with the actions, all of it is a function of these."""

    config: EnvConfig
    seed: int
    rows: range
    """Global indices of the environments."""
    together: int = 1
    """How many of them are one match."""

    def matches(self) -> list[slice]:
        """The rows of each environment, or of the agents of one match."""
        return [slice(j, j + self.together) for j in range(0, len(self.rows), self.together)]

    def only(self, rows: slice) -> _Game:
        """Some of its environments, by themselves."""
        return replace(self, rows=self.rows[rows])

    def play(self, steps: int, actions: list[Any] | None = None, state: dict[str, np.ndarray] | None = None) -> _Played:
        """Play with random actions, or repeat what was played with the given ones, from the start or from a state."""
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
        env.examine()
        out = map_structure(torch.Tensor.numpy, allocate_observation(env.observation_space, (count,)))
        entries: dict[str, np.ndarray] = out if isinstance(out, dict) else {"": out}
        chosen = _random_actions(env, self.seed, self.rows, entries) if actions is None else iter(actions)
        try:
            if state is None:
                env.reset(out)
            else:
                env.load_state_dict(state, out)
            for t in range(steps + 1):
                if t:
                    sent.append(next(chosen))
                    began = time.perf_counter()
                    env.send(sent[-1])
                    result = env.recv(out)
                    seconds += time.perf_counter() - began
                    for part, found in zip(trace[1:], result, strict=True):
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
        facts = env.observation_space, env.action_space, env.emulator
        return _Played(trace, sent, states, restarts, numbers, seconds, facts)


class _Numbers:
    """What numbers observations consist of."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[float, float]] = {}
        """The least and the largest of each entry."""
        self.ends: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """The same of each number of an entry."""
        self.not_finite = ""
        """Where one was not, or a reward; "" if nowhere."""

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
    """What a policy that knows nothing does: it respects action masks. Environment j's depend on seed and j alone."""
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
    """Where two traces part first, in words; "" if they don't."""
    parts = [a != b for a, b in zip(_bits(expected), _bits(found), strict=True)]
    anywhere = np.logical_or.reduce(parts)
    if not anywhere.any():
        return ""
    t, j = (int(i) for i in np.argwhere(anywhere)[0])
    names = [name.replace("_", " ") for name, differs in zip(_Trace._fields, parts, strict=True) if differs[t, j]]
    return f"Environment {j} has another {' and '.join(names)} {_when(begin + t)}"


def _bits(trace: _Trace) -> _Trace:
    """A trace whose rewards compare as bits: NaN is equal to itself."""
    return trace._replace(reward=np.ascontiguousarray(trace.reward).view(np.uint32))


def _when(t: int) -> str:
    return f"after step {t:,}" if t else "at its start"


def _in_child(game: _Game, plays: list[tuple[Any, ...]]) -> list[_Trace]:
    """What game.play gives with each of these arguments, in a process of its own."""
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
        raise WorkerError(f"The environment failed in a process of its own, though not in this one:\n{error}")
    return traces


def _serve(pipe: Connection, game: _Game) -> None:
    try:
        pipe.send(("", [game.play(*arguments).trace for arguments in pipe.recv()]))
    except Exception:
        pipe.send((traceback.format_exc(), []))


def _facts(game: _Game, played: _Played) -> dict[str, str]:
    """What there is to know of an environment before it is trained on."""
    space, actions, emulator = played.env
    shapes = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
    trace, seen = played.trace, played.numbers.ranges
    reward = trace.reward[1:][~trace.reset[1:]]
    return {
        **({"protocol": emulator} if emulator else {}),
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
    """What is likely to be a mistake or to make learning hard, though it breaks nothing."""
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
    """How episodes ended by themselves, and how many were cut, by this check or as the settings have it."""
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
