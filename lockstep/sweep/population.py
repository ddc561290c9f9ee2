"""Population-based training: members learn side by side, and after each generation the worst continue with the weights
of the best and with other settings (Jaderberg et al. 2017, arXiv:1711.09846).

A member is one run per generation. Each run begins with the weights and the optimizer state of its predecessor's last
checkpoint, so it can be verified and repeated on its own. The succession depends on the scores alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lockstep import envs
from lockstep.config.needs import declared, parts
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.envs.multiagent.pettingzoo import agents_of
from lockstep.experiment import Experiment, WarmStart
from lockstep.sweep.evolution import SampleFactory
from lockstep.sweep.search import OBJECTIVE, Between, OneOf, check_kinds, check_objective, check_space, is_whole
from lockstep.sweep.spec import Run, changed, holds, setting

_STEP = 0.1
"""The step by which a number moves, as a share of its range."""
_ANEW = 0.1
"""Probability that a setting is drawn anew instead of moved."""
_INHERITED = (
    "members inherit each other's weights and optimizer state, so what these depend on must stay. Vary other settings "
    "of the algorithm or options of the environment, such as weights of its reward, or search without --population."
)
_DRAWS = 20
"""Maximum number of draws until settings do not contradict each other."""


@dataclass(frozen=True)
class Population:
    """Runs that learn side by side and from each other, while the settings of their algorithm change."""

    run: Run
    """What a member does in one generation: total_steps is the length of one generation. Its seed decides the first
    settings and the succession; the members' runs have the seeds that follow it."""
    space: Mapping[str, Between | OneOf]
    """The settings that change, by path, such as {"algorithm.learning_rate": Between(1e-5, 1e-3, log=True)}."""
    members: int = 8
    """Number of members. More find better settings and tell them from luck more reliably; each costs a run per
    generation."""
    generations: int = 10
    """Number of generations. More change settings more often and abandon worse weights sooner."""
    share: float = 0.25
    """Share of the members that are replaced after each generation, and of the members that replace them. A higher
    share selects harder and keeps less variety."""
    objective: str = OBJECTIVE
    """The metric (docs/metrics.md) to maximize: its last value in a member's run."""
    rivals: bool = False
    """Let members play against all members of the previous generation, in addition to env.opponents, which are the only
    opponents of the first generation. Self-play gets stuck less easily against several policies than against one."""

    evolution: SampleFactory | None = None
    """Sample Factory's rule in place of `share`: the settings of most members mutate, with or without new weights.
    None: only members that are replaced change their settings."""

    later: ClassVar[frozenset[str]] = frozenset({"rivals", "evolution"})

    @property
    def runs(self) -> tuple[Run, ...]:
        """One run like those of all members."""
        return (self.run,)

    @property
    def steps(self) -> int:
        """Samples that a member collects in one generation."""
        return self.run.experiment.total_steps

    def validate(self) -> None:
        """Raise SettingsError for mistakes that can be found before anything runs."""
        check_kinds("A population", self.runs, self.space)
        if self.members < 2:
            raise SettingsError(f"A population needs two members or more, not --population {self.members}.")
        if self.generations < 1:
            raise SettingsError(f"A population needs a generation or more, not --generations {self.generations}.")
        if not self.space:
            raise SettingsError(
                "A population needs a setting that changes, as in --search algorithm.learning_rate=log:1e-5..1e-3."
            )
        if not 0 < self.share <= 0.5:
            raise SettingsError(f"A population's share={self.share} must be above 0 and at most 0.5.")
        check_objective(self.objective, self.runs, self.space)
        experiment = self.run.experiment
        if self.rivals and not agents_of(envs.resolve(experiment.env)):
            raise SettingsError(
                f"--rivals lets members play against each other, but env.id={experiment.env.id} is not a PettingZoo "
                "environment and has no opponents. Leave it out."
            )
        if self.rivals and experiment.env.several_policies:
            raise SettingsError(
                f"--rivals lets one policy play against others, but env.policies={experiment.env.policies} makes "
                "several. Use --env.policies shared, or leave out --rivals."
            )
        if experiment.algorithm.replays:
            raise SettingsError(
                f"{experiment.algorithm.name} learns from a replay memory, which would be empty at the start of each "
                "generation. Populations work with algorithms that learn from fresh rollouts, such as PPO, IMPALA and "
                "APPO; search without --population."
            )
        algorithm = experiment.algorithm
        on = {name: value for name in declared(algorithm, "schedules") if (value := getattr(algorithm, name))}
        if on:
            flags = " ".join(f"--algorithm.no-{name.replace('_', '-')}" for name, value in on.items() if value is True)
            raise SettingsError(
                f"{', '.join(f'algorithm.{name}={value}' for name, value in on.items())} adapts hyperparameters within "
                f"each generation, but the population finds a schedule itself: {flags or 'leave it out.'}"
            )
        if experiment.curriculum:
            raise SettingsError(
                f"curriculum={experiment.curriculum} would begin again in each generation. Leave it out, or search "
                "without --population."
            )
        fixed = {
            prefix + name: depends
            for prefix, settings in parts(experiment)
            for name, depends in declared(settings, "of_weights")
        }
        for name, space in self.space.items():
            if not name.startswith(("algorithm.", "env.options.")):
                raise SettingsError(f"The population cannot vary {name}: {_INHERITED}")
            check_space(name, space, setting(experiment, name))
            if isinstance(space, OneOf) and len(space.values) == 1:
                raise SettingsError(
                    f"The population cannot vary {name}, which has only the value {space}. List several values or give "
                    f"a range, or leave it out of --search and set it with --{name.replace('_', '-')} {space}."
                )
            values = space.values if isinstance(space, OneOf) else (space.low, space.high)
            if name in fixed and len({fixed[name](value) for value in values}) > 1:
                raise SettingsError(
                    f"The population cannot vary {name} to {' as well as '.join(map(str, values))}: {_INHERITED}"
                )
        if self.evolution is not None:
            self._check_evolution(self.evolution)

    def _check_evolution(self, evolution: SampleFactory) -> None:
        evolution.validate()
        for name, space in self.space.items():
            value = setting(self.run.experiment, name)
            if isinstance(space, OneOf):
                inside = value in space.values
            else:
                inside = value is not None and space.low <= value <= space.high
            if not inside:
                raise SettingsError(
                    f"With Sample Factory's evolution, all members begin with {name}={value}, which is not in the "
                    f"population's range, {space}. Change one of them."
                )

    def begun(self) -> list[dict[str, Any]]:
        """The initial settings of the members."""
        if self.evolution is not None:
            return [{name: setting(self.run.experiment, name) for name in self.space}] * self.members
        return [self._drawn(self._random(1, member)) for member in range(self.members)]

    def following(
        self, generation: int, scores: Sequence[float | None], values: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], list[dict[str, Any]]]:
        """How the members continue: each member's predecessor (see succession) and its settings.

        Args:
            generation: the generation that begins.
            scores: of the members in the previous generation; None for a member without one, for example after it
                diverged.
            values: their settings.
        """
        successors = self.succession(generation, scores)
        if self.evolution is None:
            found = [
                dict(values[of]) if of == member else self.explored(generation, member, values[of])
                for member, of in enumerate(successors)
            ]
            return successors, found
        ranked = _ranked(scores)
        worse = self.evolution.worse(ranked, self.members)
        # A lost member's settings may be the reason for its loss, so it takes over its predecessor's.
        own = [values[member] if member in ranked else values[of] for member, of in enumerate(successors)]
        return successors, [
            self._mutated(generation, member, own[member]) if member in worse else dict(own[member])
            for member in range(self.members)
        ]

    def succession(self, generation: int, scores: Sequence[float | None]) -> list[int]:
        """The member from which each member continues: itself, or one of the best if it is one of the worst or has no
        score. See following."""
        ranked = _ranked(scores)
        if self.evolution is not None:
            random = [self._random(generation, member) for member in range(self.members)]
            return self.evolution.succession(ranked, scores, random)
        lost = [member for member in range(self.members) if member not in ranked]
        count = max(1, int(self.share * self.members))
        best, worst = ranked[:count], [*ranked, *lost][-max(count, len(lost)) :]
        chosen = [best[int(self._random(generation, member).integers(len(best)))] for member in range(self.members)]
        return [chosen[member] if member in worst else member for member in range(self.members)]

    def explored(self, generation: int, member: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a member that replaces another, given the settings of that other: each number moves a step up
        or down, and one setting in ten is drawn anew. At least one setting changes."""
        random = self._random(generation, member, 1)
        for _ in range(_DRAWS):
            anew = self._drawn(random)
            found = {
                name: anew[name] if random.random() < _ANEW else self._moved(name, values[name], random)
                for name in self.space
            }
            if found != values and holds(self._with(found)):
                return found
        for name in self.space:  # with few listed values, every draw may have left them unchanged
            for value in self._others(name, values[name]):
                if holds(self._with(found := {**values, name: value})):
                    return found
        return dict(values)

    def _mutated(self, generation: int, member: int, values: Mapping[str, Any]) -> dict[str, Any]:
        assert self.evolution is not None
        random = self._random(generation, member, 1)
        for _ in range(_DRAWS):
            found = self.evolution.mutate(self.space, values, random)
            if holds(self._with(found)):
                return found
        return dict(values)

    def member(
        self,
        generation: int,
        member: int,
        values: Mapping[str, Any],
        begin: WarmStart | None,
        rivals: tuple[str, ...] = (),
    ) -> Run:
        """The run of a member in one generation.

        Args:
            generation, member: from 1, and from 0.
            values: its settings.
            begin: the weights that it starts from; None in the first generation.
            rivals: further opponents, in the form of EnvConfig.opponents.
        """
        seed = self.run.experiment.seed + (generation - 1) * self.members + member
        experiment = self._with(values).replace(seed=seed)
        if rivals:
            env = experiment.env
            experiment = experiment.replace(env=dataclasses.replace(env, opponents=(*env.opponents, *rivals)))
        return self.labelled(generation, member, experiment if begin is None else experiment.replace(warm_start=begin))

    def labelled(self, generation: int, member: int, experiment: Experiment) -> Run:
        """The run with a member's experiment."""
        run = dataclasses.replace(self.run, experiment=experiment)
        return dataclasses.replace(run, label=f"{run.title}-g{generation:03}-m{member + 1:02}")

    def identity(self) -> Any:
        """Everything that decides what the members do, except the number of generations."""
        space, evolution = to_json(dict(self.space)), to_json(self.evolution)
        return self.run.experiment.identity(), space, self.members, self.share, self.objective, self.rivals, evolution

    def _with(self, values: Mapping[str, Any]) -> Experiment:
        return changed(self.run.experiment, values)

    def _random(self, *of: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self.run.experiment.seed % 2**64, *of]))

    def _drawn(self, random: np.random.Generator) -> dict[str, Any]:
        """Settings drawn from the whole space."""
        found: dict[str, Any] = {}
        for _ in range(_DRAWS):
            for name, space in self.space.items():
                if isinstance(space, OneOf):
                    found[name] = space.values[int(random.integers(len(space.values)))]
                else:
                    found[name] = self._at(name, space, float(random.random()))
            if holds(self._with(found)):
                return found
        self._with(found).validate()  # names the contradiction
        return found

    def _moved(self, name: str, value: Any, random: np.random.Generator) -> Any:
        space = self.space[name]
        if isinstance(space, OneOf):
            return value
        up = 1 if random.random() < 0.5 else -1
        up = 1 if value <= space.low else -1 if value >= space.high else up
        low, high, now = (math.log(x) if space.log else x for x in (space.low, space.high, value))
        moved = self._at(name, space, (now - low) / (high - low) + up * _STEP)
        whole = is_whole(space, setting(self.run.experiment, name))
        return value + up if whole and moved == value else moved  # for whole numbers a step may be less than one

    def _others(self, name: str, value: Any) -> list[Any]:
        """The other values of a listed setting, starting behind the given one."""
        space = self.space[name]
        listed = list(space.values) if isinstance(space, OneOf) else []
        place = listed.index(value) if value in listed else -1
        return [*listed[place + 1 :], *listed[: max(0, place)]]

    def _at(self, name: str, space: Between, place: float) -> Any:
        """The number at a position of its range, 0 to 1; a position outside gives the nearest bound."""
        place = min(max(place, 0.0), 1.0)
        low, high = (math.log(x) if space.log else x for x in (space.low, space.high))
        value = low + place * (high - low)
        value = math.exp(value) if space.log else value
        whole = is_whole(space, setting(self.run.experiment, name))
        return min(max(round(value), int(space.low)), int(space.high)) if whole else space.near(value)


def _ranked(scores: Sequence[float | None]) -> list[int]:
    """The members with a score, the best first."""
    known = {member: score for member, score in enumerate(scores) if score is not None and math.isfinite(score)}
    return sorted(known, key=lambda member: (-known[member], member))
