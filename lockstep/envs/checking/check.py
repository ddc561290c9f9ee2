"""Plays an environment in several ways and compares the results, to check everything that identical bits require."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError, check_values
from lockstep.envs.base import load_adapter
from lockstep.envs.checking.facts import facts_of
from lockstep.envs.checking.games import Game, Played, Trace, columns, difference, in_child
from lockstep.envs.factory import resolve, whole_matches
from lockstep.envs.settings import EnvConfig

WAYS = {
    "finite": "observations and rewards are finite numbers",
    "again": "new instances give the same bits",
    "alone": "each environment gives the same bits without the others",
    "elsewhere": "another process gives the same bits",
    "rebuilt": "rebuilt in another process, as resume does it, they continue with the same bits",
}
"""The checks, in order."""
_SHARED_ALONE = "another shard in the process changes no bit"
"""The check `alone` for environments that share a random stream, since none of them can be played alone."""
_CAUSES = {
    "finite": "Networks cannot learn from such numbers. Fix the environment, or wrap it.",
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
"""Each environment begins from a new seed at least this often. For this, episodes are cut if the adapter can do so."""
_QUICK_STEPS = 32, 400
"""The least and the most steps of quick_check."""
_MOST = 1_000_000
"""The most steps, because all of them are kept in memory."""


@dataclass(frozen=True)
class EnvCheck:
    """The result of check_env."""

    id: str
    adapter: str
    num_envs: int
    steps: int
    """Steps of each environment."""
    facts: dict[str, str]
    """Facts about the environment under random actions, by name. Episodes are cut more often than in training."""
    held: tuple[str, ...]
    """The checks of WAYS that passed, in order. Checks after the first failure were not run."""
    failed: str | None
    """The check that failed; None if all passed."""
    message: str
    """The verdict, and the usual causes of a failure."""

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return self.failed is None


def check_env(
    config: EnvConfig | str, *, steps: int = 1_000, seed: int = 1, tell: Callable[[str], Any] = lambda text: None
) -> EnvCheck:
    """Check that an environment gives identical bits for equal seeds and actions, by playing it with random actions.

    Args:
        config: the environments of training. At least 2, or two matches, are played side by side. An id uses its
        default settings.
        steps: steps of each environment, from 8 to 1M. More steps find differences that occur late.
        seed: the seed of environments and actions.
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
        of = f"EnvConfig.of({config.__name__})" if isinstance(config, type) else "an EnvConfig"
        raise SettingsError(f"{config!r} is not an environment. Give an id, such as 'CartPole-v1', or {of}.")
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
    longest = min(config.reseed_every, steps // _TIMES - 1)  # one less than round numbers, which often are time limits
    game = Game(replace(config, reseed_every=longest), seed, range(config.num_envs), together)
    tell(f"environment {config.id}, stepped by {config.adapter}")
    expected = game.play(steps)
    facts = facts_of(game, expected)
    for name, text in facts.items():
        tell(f"{name:<12}{text}")

    held: list[str] = []
    failed = None
    message = (
        f"In {steps:,} steps of {config.num_envs} environments, seeds and actions determined everything. So runs are "
        "the same on every layout, and can be verified and resumed exactly."
    )
    for way, found in _differences(game, expected, steps):
        shown = _SHARED_ALONE if way == "alone" and expected.share_seeds else WAYS[way]
        tell(f"{'fails' if found else 'holds':<12}{shown}")
        if found:
            advice = "" if way == "finite" else f" {load_adapter(config.adapter).repeat_advice}"
            failed, message = way, f"{found}. {_CAUSES[way]}{advice}"
            break
        held.append(way)
    return EnvCheck(config.id, config.adapter, config.num_envs, steps, facts, tuple(held), failed, message)


def quick_check(config: EnvConfig, seed: int, seconds: float) -> tuple[str, str] | None:
    """A short check_env within this process. Returns the check of WAYS that failed and an explanation; None if all
    checks pass that need no other process. It takes at most about `seconds`, unless making environments takes longer.

    Args:
        config: resolved. It may have a single environment.
        seed: the seed of environments and actions.
        seconds: the time limit.

    Raises:
        TimeoutError: the environments are too slow.
    """
    together = whole_matches(config, 1)
    count = whole_matches(config, min(config.num_envs, 2 * together))
    config = replace(config, num_envs=count, random_actions=False, decorrelate=0)
    began = time.monotonic()
    trial = Game(replace(config, reseed_every=_TIMES), seed, range(count), together).play(2 * _TIMES)
    making = time.monotonic() - began - trial.seconds
    steps = min(_QUICK_STEPS[1], int((seconds - 5 * making) / (5 * max(1e-6, trial.seconds / (2 * _TIMES)))))
    if steps < _QUICK_STEPS[0]:
        raise TimeoutError
    longest = min(config.reseed_every, steps // _TIMES - 1)
    game = Game(replace(config, reseed_every=longest), seed, range(count), together)
    expected = game.play(steps)
    for way, found in _differences(game, expected, steps, elsewhere=False):
        if found and way != "finite":  # the run itself reports these numbers
            return way, f"{found}. {_CAUSES[way]} {load_adapter(config.adapter).repeat_advice}"
    return None


def _differences(game: Game, expected: Played, steps: int, *, elsewhere: bool = True) -> Iterator[tuple[str, str]]:
    """Each check of WAYS with a description of the first difference, or "". elsewhere: whether to use a child
    process."""
    actions, trace = expected.actions, expected.trace
    yield "finite", expected.numbers.not_finite
    yield "again", difference(trace, game.play(steps, actions).trace)
    if expected.share_seeds:
        alone = game.play(steps, actions, beside=True).trace
    else:
        rows = load_adapter(game.config.adapter).group_rows(game.config, len(game.rows))
        each = [
            game.only(match).play(steps, [columns(batch, own) for batch in actions]).trace
            for match, own in zip(game.matches(), rows, strict=True)
        ]
        order = np.concatenate(rows).argsort()
        alone = Trace(*(np.concatenate(parts, 1)[:, order] for parts in zip(*each, strict=True)))
    yield "alone", difference(trace, alone)
    later = [(steps - t, actions[t:], state) for t, state in expected.states.items()]
    if elsewhere:
        other, *rebuilt = in_child(game, [(steps, actions), *later])
        yield "elsewhere", difference(trace, other)
    else:
        rebuilt = [game.play(*arguments).trace for arguments in later]
    found = ""
    for t, again in zip(expected.states, rebuilt, strict=True):
        for part, known in zip(again[1:], trace[1:], strict=True):
            part[0] = known[t]  # the first row of a trace only has the observation
        found = found or difference(Trace(*(part[t:] for part in trace)), again, t)
    yield "rebuilt", found
