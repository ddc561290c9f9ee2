"""Populations: who goes on with what follows from scores alone, and from nothing that a kill can take away."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child
from made_runs import Instant, carry_out
from safetensors.torch import load_file
from sentences import says

from lockstep import recipes
from lockstep.algorithms.ppo import PPOConfig
from lockstep.cli.main import main
from lockstep.cli.sweep import _trials
from lockstep.cli.sweep_flags import search_of
from lockstep.config.layout import Layout
from lockstep.config.serialization import from_json
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig
from lockstep.experiment import WarmStart
from lockstep.reproducibility.verify import verify
from lockstep.run import checkpoint
from lockstep.sweep import Between, OneOf, Population, Run, SampleFactory, Search
from lockstep.sweep.child import INTERRUPTED
from lockstep.sweep.generations import Generations, Member
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.queue import Outcome, Queue
from lockstep.sweep.runner import Runner
from lockstep.sweep.slots import Process, Share
from lockstep.sweep.user_file import from_file

pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).resolve().parents[2]
PPO = dataclasses.replace(recipes.ppo_cartpole().algorithm, anneal_learning_rate=False)
KL = recipes.ppo_cartpole().replace(algorithm=dataclasses.replace(PPO, desired_kl=0.01))
CHANGING = recipes.ppo_cartpole().replace(algorithm=PPO, curriculum="f.py:f")
RUN = Run(recipes.ppo_cartpole().replace(algorithm=PPO))
RATE: dict[str, Between | OneOf] = {"algorithm.learning_rate": Between(1e-5, 1e-1, log=True)}
ALL = {**RATE, "algorithm.epochs": Between(1, 8), "algorithm.normalize_advantages": OneOf((True, False))}


@dataclasses.dataclass(frozen=True)
class Mine(PPOConfig):
    width: int = 8
    wave: bool = False
    of_weights = (("width", int),)
    schedules = ("wave",)


UNSET = RUN.experiment.replace(env=dataclasses.replace(RUN.experiment.env, options={"health": None}))
WIDE, WAVE = (RUN.experiment.replace(algorithm=Mine(anneal_learning_rate=False, wave=wave)) for wave in (False, True))


def population(space: Any = None, **settings: Any) -> Population:
    return Population(RUN, space or ALL, **settings)


def distance(member: Member) -> float:
    """Of its learning rate from 10 ** -3, in orders of magnitude."""
    return abs(math.log10(member.values["algorithm.learning_rate"]) + 3)


def end(queue: Queue, member: Member, score: float | None, state: Any = "done") -> None:
    """As its run would."""
    queue.run(member.run).mkdir(parents=True, exist_ok=True)
    line = {"samples": 128} if score is None else {"samples": 128, "score/mean": score}
    (queue.run(member.run) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    queue.end(member.run, Outcome(state))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that nobody trained have none; what their successors would begin with is their names."""
    monkeypatch.setattr(Generations, "_ended_with", lambda _, name: WarmStart(name, "1", optimizer=True, digest="ab"))


def grown(folder: str, *, again: bool = False, **settings: Any) -> Generations:
    """A whole population; again: by a new process for each generation."""
    queue = Queue.make(Path(folder))

    def step(found: Generations) -> None:
        assert len(found.next()) == found.search.members and found.next() == []
        for member in found.all()[-found.search.members :]:
            end(queue, member, -distance(member))

    return carry_out(Generations.make(queue, population(**settings)), queue, step, again=again)


@pytest.mark.usefixtures("no_weights")
def test_a_population_repeats_itself_whenever_its_process_was_killed() -> None:
    assert grown("whole").all() == grown("pieces", again=True).all()


@pytest.mark.usefixtures("no_weights")
def test_a_population_learns_from_its_scores() -> None:
    found = grown("set", generations=12)
    first, last = found.members(1), found.members(12)
    assert statistics.fmean(map(distance, first)) > 1 > 0.35 > statistics.fmean(map(distance, last))
    best = found.best()
    assert best is not None and distance(best) == min(map(distance, last)) and best.generation == 12
    line = found.ancestry(best)
    assert [member.generation for member in line] == list(range(1, 13)) and line[-1] == best
    seeds = {entry.experiment["seed"] for entry in Queue.open(Path("set")).entries()}
    assert seeds == set(range(1, 1 + 8 * 12)), "no two runs repeat each other"


@pytest.mark.usefixtures("no_weights")
def test_each_member_begins_with_its_predecessor() -> None:
    found, queue = grown("set", generations=3), Queue.open(Path("set"))
    for member in found.members(1):
        assert member.successor_of is None and "warm_start" not in queue.entry(member.run).experiment
    for generation in (2, 3):
        before = found.members(generation - 1)
        ranked = sorted(before, key=lambda member: -(member.value or 0))
        for member in found.members(generation):
            assert member.successor_of is not None
            begun = from_json(queue.entry(member.run).experiment)
            assert begun.warm_start.run == before[member.successor_of - 1].run
            assert begun.algorithm.learning_rate == member.values["algorithm.learning_rate"]
            if member.successor_of == member.number:
                assert (
                    before[member.number - 1] not in ranked[-2:] and member.values == before[member.number - 1].values
                )
            else:
                assert before[member.number - 1] in ranked[-2:] and before[member.successor_of - 1] in ranked[:2]
                of = before[member.successor_of - 1].values
                assert member.values == population().explored(generation, member.number - 1, of) != of


def test_succession_by_hand() -> None:
    of = population(members=4)
    assert of.succession(2, [3.0, 9.0, 1.0, 2.0]) == [0, 1, 1, 3], "the best succeeds the worst, others stay"
    assert of.succession(2, [3.0, None, 9.0, 4.0]) == [0, 2, 2, 3], "what has no score is worst"
    assert of.succession(2, [-3.0, math.nan, -9.0, -1.0]) == [0, 3, 2, 3]
    two = population(members=4, share=0.5)
    chosen = two.succession(2, [3.0, 9.0, 1.0, 2.0])
    assert chosen[:2] == [0, 1] and {*chosen[2:]} <= {0, 1}
    assert population(members=2).succession(2, [1.0, 1.0]) == [0, 0], "of equals the last is replaced"
    assert two.succession(2, [None, None, None, 5.0]) == [3, 3, 3, 3], "nobody goes on without a score"
    assert population().succession(2, [1.0, None, None, None, None, None, 2.0, 3.0])[:1] == [0]
    assert {*population().succession(2, [1.0, None, None, None, None, None, 2.0, 3.0])[1:6]} <= {6, 7}


SHAPED = RUN.experiment.replace(env=EnvConfig(id="file.py:Env", options={"health": 0.5}))
OWN: dict[str, Between | OneOf] = {
    "algorithm.learning_rate": Between(1e-4, 1e-2),
    "algorithm.optimizer.betas.0": Between(0.5, 0.99),
    "env.options.health": Between(0.1, 1.0),
}


def evolving(members: int = 10, **settings: Any) -> Population:
    return Population(Run(SHAPED), OWN, members, evolution=SampleFactory(**settings))


def test_sample_factorys_succession_by_hand() -> None:
    scores: list[float | None] = [5.0, 1.0, 9.0, 4.0, 7.0, 2.0, 8.0, 3.0, 6.0, 0.0]
    chosen = evolving().succession(2, scores)
    stay = [0, 2, 3, 4, 6, 7, 8]
    assert [chosen[member] for member in stay] == stay
    assert all(chosen[member] in (2, 6, 4) for member in (1, 5, 9)), "three of ten, from the three best"
    assert {evolving().succession(n, scores)[9] for n in range(2, 30)} == {2, 6, 4}
    close = evolving(gap=6.5).succession(2, scores)
    best = {member: evolving().succession(2, scores)[member] for member in (1, 5, 9)}
    for member, of in best.items():
        assert close[member] == (of if (scores[of] or 0) - (scores[member] or 0) > 6.5 else member)
    lost = evolving(gap=100.0).succession(2, [None, *scores[1:]])
    assert lost[0] in (2, 6, 4) and lost[1:] == list(range(1, 10)), "a member without weights takes others"


def test_sample_factorys_mutations_by_hand() -> None:
    population = evolving()
    begun = population.begun()
    assert (
        begun == [{"algorithm.learning_rate": 1e-3, "algorithm.optimizer.betas.0": 0.9, "env.options.health": 0.5}] * 10
    )
    scores = [float(member) for member in range(10)]
    seen: dict[str, set[float]] = {name: set() for name in OWN}
    changes = 0
    for generation in range(2, 102):
        _, values = population.following(generation, scores, begun)
        assert values[7:] == begun[7:], "the best three of ten keep their settings"
        for member in range(7):
            for name, value in values[member].items():
                seen[name].add(value)
                changes += value != begun[0][name]
    assert seen["algorithm.learning_rate"] == {1e-3, 1.2e-3, 8.333e-4}
    assert seen["algorithm.optimizer.betas.0"] == {0.9, 0.88, 0.91667}, "by distance from 1"
    assert seen["env.options.health"] == {0.5, 0.6, 0.4167}
    assert 0.12 < changes / (100 * 7 * 3) < 0.18
    run = population.member(2, 0, {**begun[0], "algorithm.optimizer.betas.0": 0.88, "env.options.health": 0.6}, None)
    assert run.experiment.algorithm.optimizer.betas == (0.88, 0.999)
    assert run.experiment.env.options == {"health": 0.6} and SHAPED.env.options == {"health": 0.5}
    assert evolving().identity() != evolving(gap=0.35).identity()


def test_sample_factorys_numbers_keep_their_kind_and_their_range() -> None:
    draw = np.random.default_rng(3)
    space: dict[str, Between | OneOf] = {
        "algorithm.entropy_coef": Between(0, 1),
        "algorithm.epochs": Between(1, 8),
        "algorithm.optimizer.weight_decay": Between(1e-4, 1e-1, log=True),
    }
    values: dict[str, Any] = {"algorithm.entropy_coef": 0.9, "algorithm.epochs": 2}
    values["algorithm.optimizer.weight_decay"] = 0.01
    steps, seen = [], set()
    for _ in range(200):
        found = SampleFactory(rate=1.0).mutate(space, values, draw)
        steps.append(found["algorithm.optimizer.weight_decay"] / values["algorithm.optimizer.weight_decay"])
        assert isinstance(found["algorithm.entropy_coef"], float) and isinstance(found["algorithm.epochs"], int)
        assert 0.0 < found["algorithm.entropy_coef"] <= 1.0 and 1 <= found["algorithm.epochs"] <= 8
        seen.add(found["algorithm.epochs"])
        values = found
    assert all(0.8 < step < 1.25 for step in steps), "it is no discount"
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": 1.5}, "evolution.rate=1.5 "),
        ({"replaced": 0.6}, "evolution.replaced=0.6 "),
        ({"factor": 1.0}, "evolution.factor=1.0 "),
    ],
)
def test_numbers_of_an_evolution_that_are_out_of_range(settings: dict[str, float], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        SampleFactory(**settings).validate()


@pytest.mark.usefixtures("no_weights")
def test_a_population_that_evolves_like_sample_factorys_learns_from_its_scores() -> None:
    rule = SampleFactory(rate=0.5, factor=2.0)
    found = grown("set", generations=12, space=RATE, evolution=rule)
    assert distance(found.members(1)[0]) == distance(found.members(1)[7]), "all begin with the recipe's settings"
    best = found.best()
    assert best is not None and distance(best) <= distance(found.members(1)[0])
    assert grown("again", again=True, generations=12, space=RATE, evolution=rule).all() == found.all()


def test_settings_move_by_a_tenth_of_their_range() -> None:
    of = population()
    values = {"algorithm.learning_rate": 1e-3, "algorithm.epochs": 1, "algorithm.normalize_advantages": True}
    found = [of.explored(generation, member, values) for generation in range(2, 60) for member in range(8)]
    rates = [each["algorithm.learning_rate"] for each in found]
    step = 10**0.4  # a tenth of four orders of magnitude
    moved = [rate for rate in rates if any(math.isclose(rate, x, rel_tol=1e-3) for x in (1e-3 * step, 1e-3 / step))]
    assert 0.8 < len(moved) / len(found) < 0.97, "one in ten is drawn anew"
    assert all(1e-5 <= rate <= 1e-1 for rate in rates)
    assert {each["algorithm.epochs"] for each in found} >= {1, 2, 4, 6}, "at the end of its range, or drawn anew"
    assert 0.01 < sum(not each["algorithm.normalize_advantages"] for each in found) / len(found) < 0.12
    assert all(each != values for each in found)


def test_a_number_whose_steps_are_too_small_to_tell_stays_in_its_range() -> None:
    of = population({"algorithm.clip": Between(0.2, 0.2003)})
    moved = {of.explored(2, member, {"algorithm.clip": 0.2})["algorithm.clip"] for member in range(40)}
    assert all(0.2 <= value <= 0.2003 for value in moved)


@pytest.mark.parametrize("space", [Between(1e-4, 1e-1, log=True), Between(0.0, 0.1), Between(0.5, 1)])
def test_settings_at_an_end_of_their_range_move_inwards(space: Between) -> None:
    name = "algorithm.entropy_coef"
    for value, inner in ((space.low, min), (space.high, max)):
        found = {population({name: space}).explored(2, member, {name: value})[name] for member in range(40)}
        assert all(space.low <= each <= space.high for each in found) and value not in found
        step = inner(found)
        place = math.log(step / space.low, space.high / space.low) if space.log else step / space.high
        assert space.low == 0.5 or min(place, 1 - place) <= 0.1001


def test_settings_that_contradict_each_other_are_not_tried() -> None:
    of = population({"algorithm.minibatches": Between(1, 64)})
    for values in of.begun():
        of.member(1, 0, values, None).experiment.validate()
        of.member(2, 0, of.explored(2, 0, values), None).experiment.validate()


def test_something_changes_where_only_values_are_listed_too() -> None:
    of, values = population({"algorithm.epochs": OneOf((2, 4))}), {"algorithm.epochs": 2}
    found = [of.explored(generation, member, values) for generation in range(2, 40) for member in range(4)]
    assert all(each == {"algorithm.epochs": 4} for each in found)


def test_other_seeds_begin_with_other_settings() -> None:
    other = Population(dataclasses.replace(RUN, experiment=RUN.experiment.replace(seed=2)), ALL)
    assert population().begun() == population().begun() != other.begun()
    Population(dataclasses.replace(RUN, experiment=RUN.experiment.replace(seed=-5)), ALL).begun()


@pytest.mark.usefixtures("no_weights")
def test_a_failed_member_keeps_the_others_waiting() -> None:
    queue = Queue.make(Path("set"))
    found = Generations.make(queue, population(members=2, generations=3))
    found.begin()
    found.next()
    one, other = found.all()
    end(queue, one, None, "failed")
    assert not found.complete and found.next() == []
    end(queue, other, 1.0)
    assert found.complete, "nothing can be done before it is retried"
    assert queue.retry("failed") == 1 and not found.complete and found.next() == []
    end(queue, one, 2.0)
    assert len(found.next()) == 2 and found.members(2)[1].successor_of == 1


@pytest.mark.usefixtures("no_weights")
def test_a_failed_member_may_be_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    queue = Queue.make(Path("set"))
    found = Generations.make(queue, population(members=2, generations=3))
    found.begin()
    found.next()
    one, other = found.all()
    with pytest.raises(SettingsError, match=r"--drop \*: .*--status"):
        found.give_up("*")
    end(queue, one, 5.0, "failed")
    end(queue, other, 1.0)
    assert found.give_up(f"{one.run[:-9]}*") == [one.run] and not found.complete
    assert len(found.next()) == 2 and [member.successor_of for member in found.members(2)] == [2, 2]
    assert found.best() == found.members(1)[1]
    assert main(["sweep", "set", "--drop", "*", "--slots", "1"]) == 2
    assert says(capsys.readouterr().err, "--drop *", "failed")


@pytest.mark.usefixtures("no_weights")
def test_members_that_diverged_have_no_score() -> None:
    queue = Queue.make(Path("set"))
    found = Generations.make(queue, population(members=3))
    found.begin()
    found.next()
    for member, loss in zip(found.all(), (0.5, math.nan, 0.1)):
        end(queue, member, 9.0)
        lines = [{"samples": 64, "loss/value": None}, {"samples": 128, "score/mean": 9.0 - (loss == 0.1)}]
        lines[1]["loss/value"] = None if math.isnan(loss) else loss
        lines.append({"samples": 128, "eval/score": 3.0, "eval/score_low": None})
        queue.metrics(member.run).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [member.value for member in found.all()] == [9.0, None, 8.0]
    found.next()
    assert [member.successor_of for member in found.members(2)] == [1, 1, 3]


class Interrupted(Instant):
    """Where what nobody but the sweep should stop is stopped."""

    def start(self, queue: Queue, name: str, share: Share) -> Process:
        if name.partition("-m")[2].startswith("02"):
            return subprocess.Popen(["sh", "-c", f"exit {INTERRUPTED}"])
        return super().start(queue, name, share)


def test_a_member_that_somebody_stopped_ends_the_sweep() -> None:
    queue = Queue.make(Path("set"))
    found = Generations.make(queue, population(members=3))
    found.begin()
    assert not Runner(queue, Interrupted([0]), SweepOptions(overview="none"), found).run()
    assert sorted(member.state for member in found.all()) == ["done", "done", "waiting"]


@pytest.mark.usefixtures("no_weights")
def test_a_population_by_another_name_goes_on() -> None:
    grown("set", generations=1)
    named = dataclasses.replace(population(generations=2), run=dataclasses.replace(RUN, label="mine"))
    again = Generations.make(Queue.open(Path("set")), named)
    again.begin()
    assert [entry.name[:4] for entry in again.next()] == ["mine"] * 8


def test_nothing_else_goes_into_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Generations.make(Queue.make(Path("set")), population()).begin()
    for flags in (("--seed", "1..2"), ("--search", "algorithm.epochs=1..2")):
        assert main(["sweep", "set", "ppo-cartpole", *flags]) == 2
        assert says(capsys.readouterr().err, "set ", "population")


def test_scores_that_nobody_has() -> None:
    queue = Queue.make(Path("set"))
    found = Generations.make(queue, population(members=2))
    found.begin()
    found.next()
    for member in found.all():
        end(queue, member, None)
    with pytest.raises(SettingsError, match=r"score/mean .*--objective.*--eval-every"):
        found.next()


def test_a_kill_before_a_generation_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue.make(Path("set"))
    found = Generations.make(queue, population(members=3))
    found.begin()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Queue, "add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        found.next()
    assert not queue.entries()
    found.begin()
    assert [entry.name for entry in queue.entries()] == [member.run for member in found.all()]


def test_another_population_in_the_same_folder() -> None:
    queue = Queue.make(Path("set"))
    Generations.make(queue, population()).begin()
    assert Generations.make(queue, population(generations=30)).search.generations == 30
    for other in (population(RATE), population(members=4), population(share=0.5), population(objective="eval/score")):
        with pytest.raises(SettingsError, match=r"set .*--generations N"):
            Generations.make(queue, other)
    plain = Queue.make(Path("plain"))
    plain.add([RUN])
    with pytest.raises(SettingsError, match=r"plain .*population"):
        Generations.make(plain, population())


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"space": {}}, "--search "),
        ({"members": 1}, r"--population 1\b"),
        ({"generations": 0}, r"--generations 0\b"),
        ({"share": 0.6}, "share=0.6 "),
        ({"space": {"model.hidden_sizes": OneOf(((8,), (16,)))}}, r" model\.hidden_sizes: "),
        ({"space": {"algorithm.optimizer.name": OneOf(("adam", "rmsprop"))}}, r" algorithm\.optimizer\.name .*rmsprop"),
        ({"space": {"algorithm.rnd.features": Between(32, 128)}}, r" algorithm\.rnd\.features .*\b32 .*\b128:"),
        ({"space": {"algorithm.rnd.coef": OneOf((0.0, 0.5))}}, r" algorithm\.rnd\.coef .*\b0\b"),
        (
            {"run": Run(WIDE), "space": {"algorithm.width": OneOf((8, 16))}},
            r"algorithm\.width .*\b8\b.*\b16\b",
        ),
        ({"run": Run(WAVE)}, r"algorithm\.wave=True .* --algorithm\.no-wave$"),
        ({"space": {"algorithm.lerning_rate": OneOf((1,))}}, r"\blerning_rate\b"),
        ({"space": {"algorithm.epochs": OneOf((4, 4))}}, r" algorithm\.epochs, .*--algorithm\.epochs 4\b"),
        ({"space": {"algorithm.learning_rate": Between(1e-3, 1e-5)}}, r"algorithm\.learning_rate .*finite"),
        ({"run": Run(recipes.ppo_cartpole())}, "--algorithm.no-anneal-learning-rate"),
        ({"run": Run(KL)}, r"algorithm\.desired_kl=0\.01 "),
        ({"run": Run(CHANGING)}, r"curriculum=f\.py:f .*--population"),
        ({"run": Run(recipes.dqn_cartpole())}, "dqn .*replay.*--population"),
        ({"run": recipes.ppo_cartpole()}, r"lockstep\.sweep\.Run"),
        ({"rivals": True}, "--rivals .*env.id=CartPole-v1 "),
        ({"space": {"algorithm.learning_rate": (1e-3, 1e-4)}}, r"lockstep\.sweep\.Run.*Between.*OneOf"),
        (
            {"space": {"algorithm.optimizer.name": Between(0.1, 0.5)}, "evolution": SampleFactory()},
            r"algorithm\.optimizer\.name .*'adam'.*separated by commas",
        ),
        (
            {"run": Run(UNSET), "space": {"env.options.health": Between(0.1, 0.5)}, "evolution": SampleFactory()},
            r"env\.options\.health=None, .* 0\.1\.\.0\.5\.",
        ),
    ],
)
def test_populations_that_are_none(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        dataclasses.replace(population(), **changed).validate()


FLAGS = ("--search", "algorithm.learning_rate=log:1e-5..1e-1", "--algorithm.no-anneal-learning-rate")


def test_a_population_from_flags() -> None:
    found, given = search_of(
        {"ppo-cartpole": recipes.ppo_cartpole()}, [*FLAGS, "--population", "6", "--seed", "3"], "set", SweepOptions()
    )
    assert isinstance(found, Population) and given.generations is None
    assert (found.members, found.generations, found.space, found.run.experiment.seed) == (6, 10, RATE, 3)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((*FLAGS, "--population", "4", "--seed", "1..3"), r"\b3 experiments .*--seed"),
        ((*FLAGS, "--population", "4", "--trials", "3"), "--trials 3 .*--generations"),
        ((*FLAGS, "--population", "4", "--stop-early", "3@1k"), "--stop-early 3@1k "),
        ((*FLAGS, "--population", "4", "--drop", "x"), "--drop x: .*failed"),
        ((*FLAGS, "--population", "4", "--retry-stopped"), "--retry-stopped .*set "),
        ((*FLAGS, "--population", "4", "--objective", "eval/score"), "eval/score.*--eval-every N"),
        ((*FLAGS, "--population", "4", "--objective", "loss/polcy"), r"loss/polcy \(--objective\).*loss/policy"),
        ((*FLAGS, "--population", "4", "--objective", "env/won"), "--objective env/won .*--env.metrics"),
        ((*FLAGS, "--population", "4", "--gap", "0.3"), "--gap .*--evolution sample-factory"),
        ((*FLAGS, "--rivals"), "--rivals .*--search SETTING=VALUES --population N"),
        ((*FLAGS, "--generations", "4"), "--generations .*--population N"),
        (("--population", "4"), "--population .*--search SETTING=VALUES,"),
    ],
)
def test_mistakes_of_flags(flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "set", "ppo-cartpole", *flags]) == 2
    assert re.search(complaint, capsys.readouterr().err)


def test_sample_factorys_rule_from_flags() -> None:
    flags = [*FLAGS, "--population", "4", "--evolution", "sample-factory", "--gap", "0.35"]
    search, given = search_of({"ppo-cartpole": recipes.ppo_cartpole()}, flags, "set", SweepOptions())
    trials = _trials(Queue(Path("set").resolve()), search, given)
    assert trials is not None and trials.search.evolution == SampleFactory(gap=0.35)


def test_sample_factorys_members_begin_with_the_value_of_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    name = "algorithm.learning_rate"
    flags = ["--algorithm.learning-rate", "5e-4", "--algorithm.no-anneal-learning-rate", "--population", "2"]
    flags += ["--search", f"{name}=1e-5..1e-2"]
    search_of({"ppo-cartpole": recipes.ppo_cartpole()}, flags, "set", SweepOptions())
    assert says(capsys.readouterr().err, "--algorithm.learning-rate", "no effect", "--search")
    flags += ["--evolution", "sample-factory"]
    search, given = search_of({"ppo-cartpole": recipes.ppo_cartpole()}, flags, "set", SweepOptions())
    trials = _trials(Queue(Path("set").resolve()), search, given)
    assert trials is not None and [begun[name] for begun in trials.search.begun()] == [5e-4, 5e-4]
    assert not says(capsys.readouterr().err, "no effect")


def test_the_documented_population(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n# population.py\n(.*?)```", (ROOT / "docs/sweep.md").read_text(), re.DOTALL)
    Path("population.py").write_text(code)
    found = from_file("population.py:population")
    assert isinstance(found, Population) and not isinstance(found, Search)
    assert main(["sweep", "set", "population.py:population", "--dry-run", "--generations", "7"]) == 0
    printed = capsys.readouterr().out
    assert says(printed, f"0 of 7 generations of {found.members}", "score/mean: none")
    assert not Path("set").exists(), "a dry run creates nothing"


SMALL = (
    *("--env.adapter", "gymnasium", "--env.num-envs", "8", "--env.reseed-every", "20", "--scheme.acting-batch", "0"),
    *("--algorithm.rollout", "8", "--algorithm.epochs", "1", "--algorithm.minibatches", "1"),
    *("--checkpoint-every", "2", "--no-tensorboard", "--total-steps", "1280"),
)


@pytest.mark.timeout(400)  # starting a run takes seconds, and a busy machine many more
def test_a_killed_population_goes_on(
    full: bool, start: Callable[..., Child], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("ppo-cartpole", *FLAGS, *SMALL, "--population", "2", "--generations", "2")
    child = start("sweep", "killed", *asked, "--slots", "1", "--layout", "inline,learner_delay=0.02")
    child.until(lambda: any(Path("killed/runs").glob("*g002-m02*/checkpoints/0*")), "the last run to learn")
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert main(["sweep", "killed", "--json"]) == 0
    captured = capsys.readouterr()
    assert says(captured.err, "2 of 2 generations", "score/mean: generation 2, member ")
    killed = json.loads(captured.out)["population"]
    assert Path("killed/population.png").stat().st_size > 10_000
    assert len(killed["ancestry"]) == 2 and killed["ancestry"][-1] == killed["best"]["run"]

    # Elsewhere, two at once.
    layout = "processes:2" if full else "inline"
    assert main(["sweep", "whole", *asked, "--layout", layout, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    outcomes = [Queue.open(Path("killed")).outcome(member["run"]) for member in killed["members"]]
    assert [outcome and outcome.digest for outcome in outcomes] == [run["digest"] for run in whole["runs"]]
    for name in ("generation", "number", "values", "successor_of", "value"):
        assert [member[name] for member in killed["members"]] == [x[name] for x in whole["population"]["members"]]

    # What a member begins with is all that its predecessor ended with, and its copy is enough to prove it.
    last = killed["members"][-1]
    before, run = killed["members"][last["successor_of"] - 1]["run"], Path("killed/runs") / last["run"]
    held, _ = checkpoint.open_checkpoint(checkpoint.find(Path("killed/runs") / before / "checkpoints")).part("learner")
    taken = load_file(run / "weights.safetensors")
    assert {"optimizer.exp_avg", "optimizer.step"} < taken.keys()
    assert all(torch.equal(tensor, held[name]) for name, tensor in taken.items())
    shutil.rmtree(Path("killed/runs") / before)
    assert verify(run, Layout(), 3).ok


@pytest.mark.timeout(400)
def test_members_play_against_the_generation_before(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, *SMALL, "--env.opponents", "random", "--population", "2", "--generations", "2", "--rivals"]
    assert main(["sweep", "league", "ppo-self-play", *flags, "--json"]) == 0
    capsys.readouterr()
    queue = Queue.open(Path("league"))
    found = Generations.open(queue)
    assert found is not None and len(found.all()) == 4
    for member in found.all():
        opponents = from_json(queue.entry(member.run).experiment).env.opponents
        before = [each for each in found.all() if each.generation == member.generation - 1 and each.value is not None]
        assert opponents[0] == "random" and len(opponents) == 1 + len(before)
        for name, rival in zip(opponents[1:], before, strict=True):
            assert name.startswith(f"league/runs/{rival.run}@20#")
    run = queue.run(found.members(2)[-1].run)
    assert len(from_json(json.loads((run / "experiment.json").read_text())).env.opponents) == 3
    assert verify(run, Layout.parse("processes:2"), 2).ok


def test_rivals_of_an_id_that_has_another_name_in_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vizdoom/Duel` is one of PettingZoo's matches only under the name `pettingzoo/vizdoom/Duel`."""
    for library in ("pettingzoo", "vizdoom"):
        pytest.importorskip(library)
    monkeypatch.setattr("lockstep.evaluation.opponents._resolved", lambda config, name, agents: f"{name}@1#digest")
    queue = Queue.make(Path("set"))
    duels = Population(Run(recipes.appo_vizdoom_duel()), RATE, 2, rivals=True)
    assert Generations.make(queue, duels)._rival("first") == "set/runs/first@1#digest"


def test_a_member_of_every_algorithm_that_may() -> None:
    for recipe in (recipes.impala_atari, recipes.appo_atari, recipes.a2c_atari, recipes.ppo_mujoco):
        experiment = recipe()
        algorithm = dataclasses.replace(experiment.algorithm, anneal_learning_rate=False)
        Population(Run(experiment.replace(algorithm=algorithm)), RATE).validate()


def test_a_population_of_another_experiment_is_another() -> None:
    other = dataclasses.replace(RUN, experiment=RUN.experiment.replace(total_steps=999))
    assert dataclasses.replace(population(), run=other).identity() != population().identity()


def test_members_with_rivals_are_another_population() -> None:
    assert population(rivals=True).identity() != population().identity()


def test_predecessors_are_named_as_seen_from_where_the_population_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.sweep.generations.resolved", lambda experiment: experiment)
    for folder, runs in (("set", Path("set/runs")), ("../set", Path("../set/runs").resolve())):
        queue = Queue.make(Path(folder))
        found = Generations.make(queue, population(members=2))
        found.begin()
        found.next()
        names = [member.run for member in found.members(1)]
        for score, member in enumerate(found.members(1)):
            end(queue, member, score)
        begun = [from_json(entry.experiment).warm_start for entry in found.next()]
        assert begun == [WarmStart(str(runs / names[1]), optimizer=True)] * 2
