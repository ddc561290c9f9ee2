"""Searches: what is tried follows from what was tried, and from nothing that a kill can take away."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Child
from made_runs import Instant, carry_out
from sentences import says
from tiny import options

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.cli.sweep import _trials
from lockstep.cli.sweep_flags import search_of
from lockstep.config.extras import install_command
from lockstep.config.serialization import from_json
from lockstep.config.settings import SettingsError
from lockstep.launchers.launch import train
from lockstep.sweep import Between, OneOf, Run, Search, grid
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.queue import Outcome, Queue
from lockstep.sweep.runner import Runner
from lockstep.sweep.search import measured, space_of
from lockstep.sweep.slots import Machine
from lockstep.sweep.trials import Trial, Trials
from lockstep.sweep.user_file import from_file

pytest.importorskip("optuna", reason="Optuna is not installed")
pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).resolve().parents[2]
RATE = {"algorithm.learning_rate": Between(1e-5, 1e-1, log=True)}
ALL = {**RATE, "algorithm.epochs": Between(1, 8), "model.hidden_sizes": OneOf(((64, 64), (256,)))}


def search(space: Any = None, seeds: tuple[int, ...] = (1,), **settings: Any) -> Search:
    return Search(grid(recipes.ppo_cartpole(), {"seed": seeds}), space or ALL, **settings)


def end(queue: Queue, trial: Trial, score: float | None, state: Any = "done") -> None:
    """As runs would, with a score for the first and less for others."""
    for index, name in enumerate(trial.runs):
        queue.run(name).mkdir(parents=True)
        known = {} if score is None else {"score/mean": score - index}
        lines = [{"samples": 64, "score/mean": -1.0}, {"samples": 128, **known}] if known else [{"samples": 128}]
        (queue.run(name) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        queue.end(name, Outcome(state))


def goodness(values: dict[str, Any], best: float = -3.0) -> float:
    """Of a learning rate near 10 ** best, and few epochs."""
    return -((math.log10(values["algorithm.learning_rate"]) - best) ** 2) - 0.1 * values["algorithm.epochs"]


def searched(folder: str, count: int, *, again: bool = False, best: float = -3.0) -> list[Trial]:
    """A whole search; again: by a new process for each trial."""
    queue = Queue.make(Path(folder))

    def step(trials: Trials) -> None:
        trials.next()
        last = trials.all()[-1]
        end(queue, last, goodness(last.values, best))

    return carry_out(Trials.make(queue, search(trials=count)), queue, step, again=again).all()


def test_a_search_repeats_itself_whenever_its_process_was_killed() -> None:
    whole, pieces = searched("whole", 14), searched("pieces", 14, again=True)
    assert whole == pieces
    assert len({trial.values["algorithm.learning_rate"] for trial in whole}) == 14


def test_a_search_learns_from_its_trials() -> None:
    low, high = (
        [math.log10(trial.values["algorithm.learning_rate"]) for trial in searched(str(best), 25, best=best)]
        for best in (-4.5, -1.5)
    )
    assert low[:10] == high[:10], "drawn at random"
    assert statistics.fmean(low[10:]) < -3.5 < -2.5 < statistics.fmean(high[10:])


def test_settings_that_contradict_each_other_are_not_tried() -> None:
    space = {"algorithm.discount": Between(0.9, 1.5), "algorithm.epochs": Between(1, 8)}
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search(space, trials=8))
    trials.begin()
    while not trials.complete:
        trials.next()
        end(queue, trials.all()[-1], 1.0)
    discounts = [trial.values["algorithm.discount"] for trial in trials.all()]
    assert len({*discounts}) == 8 and all(0.9 <= discount <= 1 for discount in discounts)


def test_spaces_are_shown_as_search_takes_them() -> None:
    spaces = (Between(1e-5, 1e-2, log=True), Between(1, 10), OneOf(("none", "lstm")), OneOf(((64, 64), (128,))))
    assert [str(space) for space in spaces] == ["log:1e-5..0.01", "1..10", "none,lstm", "64 64,128"]
    assert space_of("algorithm.clip", str(spaces[0]), lambda: []) == spaces[0]


def test_numbers_near_one_keep_their_distance_from_it() -> None:
    near = Between(0.9, 0.99999).near
    assert [near(x) for x in (0.99987654321, 0.987654321, 0.9)] == [0.9998765, 0.98765, 0.9]
    assert Between(0.1, 0.9).near(0.123456) == 0.1235 and Between(0.9, 2.0).near(1.23456) == 1.235
    assert near(0.9999999) == 0.99999, "within its range"


def test_what_ended_trials_measured_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, read = Queue.make(Path("set")), list[Path]()
    whole = measured
    monkeypatch.setattr("lockstep.sweep.trials.measured", lambda path: (read.append(path), whole(path))[1])
    trials = Trials.make(queue, search(trials=5))
    trials.begin()
    while not trials.complete:
        trials.next()
        end(queue, trials.all()[-1], 1.0)
    assert len(trials.all()) == 5 and trials.best() and len(read) == 5
    (name,) = trials.all()[1].runs
    queue.retry("done")  # type: ignore[arg-type]
    assert trials.all()[1].state == "running"
    queue.end(name, Outcome("failed"))
    assert trials.all()[1].state == "failed"


def test_trials_stay_within_their_space() -> None:
    trials = searched("set", 12)
    for trial in trials:
        rate, epochs, sizes = trial.values.values()
        assert 1e-5 <= rate <= 1e-1 and float(f"{rate:.4g}") == rate
        assert isinstance(epochs, int) and 1 <= epochs <= 8
        assert sizes in ((64, 64), (256,))
    assert {trial.values["model.hidden_sizes"] for trial in trials} == {(64, 64), (256,)}
    entry = Queue(Path("set").resolve()).entry(trials[-1].runs[0])
    experiment = from_json(entry.experiment)
    assert (experiment.algorithm.learning_rate, experiment.algorithm.epochs) == tuple(trials[-1].values.values())[:2]
    assert re.fullmatch(r"CartPole-v1-ppo-t012-s1-[0-9a-f]{8}", entry.name)


def test_a_trial_is_the_mean_over_its_seeds_and_as_bad_as_its_worst_run() -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search(seeds=(1, 2)))
    trials.begin()
    for score, state in (
        (5.0, "done"),
        (9.0, "failed"),
        (3.0, "stopped"),
        (None, "done"),
        (math.nan, "done"),
        (4.0, "done"),
    ):
        trials.next()
        assert (trials.all()[-1].state, len(trials.all()[-1].runs)) == ("running", 2)
        end(queue, trials.all()[-1], score, state)
    trials.next()
    found = [(trial.state, trial.value, trial.samples) for trial in trials.all()]
    assert found == [
        *(("done", 4.5, 128), ("failed", None, 128), ("stopped", 2.5, 128), ("done", None, 128), ("done", None, 128)),
        ("done", 3.5, 128),
        ("running", None, 0),
    ]
    best = trials.best()
    assert best is not None and best.number == 1 and str(best).startswith("trial 1: 4.5 with algorithm.learning_rate=")


def test_a_kill_before_a_trial_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search())
    trials.begin()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Queue, "add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        trials.next()
    assert not queue.entries() and len(trials.all()) == 1
    trials.begin()
    assert [entry.name for entry in queue.entries()] == trials.all()[0].runs
    assert trials.all()[0].state == "running"


def test_a_trial_whose_file_was_removed_is_forgotten_alone() -> None:
    before = searched("set", 3)
    Path("set/trials/002.json").unlink()
    trials = Trials.open(Queue(Path("set").resolve()))
    assert trials is not None and not trials.complete
    trials.next()
    first, third, new = trials.all()
    assert [first, third] == [before[0], before[2]] and (new.number, new.state) == (4, "running")


def test_values_that_were_tried_before_need_no_run() -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search({"algorithm.epochs": OneOf((2, 4))}, trials=5))
    trials.begin()
    while not trials.complete:
        trials.next()
        if trials.all()[-1].state == "running":
            end(queue, trials.all()[-1], 1.0)
    assert len(queue.entries()) == 2 and [trial.state for trial in trials.all()] == ["done"] * 5


def test_what_was_not_tried_yet_is_tried_first() -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search({"algorithm.epochs": OneOf((1, 2, 4, 8))}, trials=4))
    trials.begin()
    while not trials.complete:
        trials.next()
        end(queue, trials.all()[-1], 1.0)
    assert sorted(trial.values["algorithm.epochs"] for trial in trials.all()) == [1, 2, 4, 8]


def test_lists_are_values_and_values_that_never_fit_are_found_before_anything_runs() -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search({"model.hidden_sizes": OneOf(([8, 8], [16, 16], [8, 8]))}, trials=2))
    trials.begin()
    for _ in range(2):
        trials.next()
        end(queue, trials.all()[-1], 1.0)
    assert sorted(trial.values["model.hidden_sizes"] for trial in trials.all()) == [(8, 8), (16, 16)]
    with pytest.raises(SettingsError, match=r"algorithm\.minibatches=[35] .*divide"):
        search({"algorithm.minibatches": OneOf((3, 5))}).validate()


def test_an_objective_that_no_run_has() -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search(objective="speed/nothing"))
    trials.begin()
    trials.next()
    end(queue, trials.all()[0], 1.0)
    with pytest.raises(SettingsError, match=r"speed/nothing .*--eval-every"):
        trials.next()


def test_a_first_trial_that_diverges() -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search())
    trials.begin()
    trials.next()
    end(queue, trials.all()[0], math.nan)
    trials.next()
    assert [(trial.state, trial.value) for trial in trials.all()] == [("done", None), ("running", None)]


def test_a_search_avoids_what_diverges() -> None:
    """However well it went before."""
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search(RATE, trials=40))

    def step(trials: Trials) -> None:
        trials.next()
        last = trials.all()[-1]
        rate = last.values["algorithm.learning_rate"]
        end(queue, last, math.log10(rate))
        if rate > 1e-3:
            metrics = queue.metrics(last.runs[0])
            metrics.write_text(metrics.read_text() + json.dumps({"samples": 192, "loss/value": None}) + "\n")

    found = carry_out(trials, queue, step, again=False).all()
    lost = [trial.values["algorithm.learning_rate"] > 1e-3 for trial in found]
    assert [trial.value is None for trial in found] == lost and [trial.state for trial in found] == ["done"] * 40
    assert sum(lost[20:]) <= 12, "all 20 of them would be lost if what is lost taught nothing"
    best = trials.best()
    assert best is not None and best.value is not None and -3.5 < best.value <= -3


@pytest.mark.parametrize("objective", ["score/mean", "score/length"])
def test_a_first_trial_without_a_finished_episode(objective: str) -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search(objective=objective))
    trials.begin()
    trials.next()
    end(queue, trials.all()[0], None)
    trials.next()
    assert [(trial.state, trial.value) for trial in trials.all()] == [("done", None), ("running", None)]


def test_trials_that_need_no_run_are_not_said_to_wait(capsys: pytest.CaptureFixture[str]) -> None:
    queue = Queue.make(Path("set"))
    trials = Trials.make(queue, search({"algorithm.epochs": OneOf((2, 4))}, trials=6))
    trials.begin()
    assert Runner(queue, Instant([0]), SweepOptions(overview="plain"), trials).run()
    assert len(queue.entries()) == 2 and "waiting: " not in capsys.readouterr().out


def test_runs_for_which_there_is_never_room() -> None:
    queue, layout = Queue.make(Path("set")), "inline,device=0"
    trials = Trials.make(queue, Search(grid(recipes.ppo_cartpole(), {"seed": [1]}, layout=layout), ALL))
    trials.begin()
    with pytest.raises(SettingsError, match=r"\b1 GPUs.*\b0\b"):
        Runner(queue, Machine([0]), SweepOptions(), trials)


def test_a_search_begun_by_flags_goes_on_with_its_number_of_trials() -> None:
    queue, found = Queue.make(Path("set")), search(trials=80, objective="loss/value")
    Trials.make(queue, found).begin()
    again = dataclasses.replace(found, trials=20, objective="score/mean")  # what flags say without --trials
    for given, trials in ((SweepOptions(search={"a": "b"}), 80), (SweepOptions(search={"a": "b"}, trials=9), 9)):
        made = _trials(queue, again, given)
        assert isinstance(made, Trials) and (made.search.trials, made.search.objective) == (trials, "loss/value")
    made = _trials(queue, dataclasses.replace(found, trials=20), SweepOptions())
    assert isinstance(made, Trials) and made.search.trials == 20, "a file says what it says"


def test_another_search_in_the_same_folder() -> None:
    queue = Queue.make(Path("set"))
    Trials.make(queue, search()).begin()
    assert Trials.make(queue, search(trials=30)).search.trials == 30
    for other in (search(RATE), search(seed=1), search(seeds=(1, 2)), search(objective="loss/policy")):
        with pytest.raises(SettingsError, match=r"set .*--trials N"):
            Trials.make(queue, other)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("algorithm.learning-rate", "log:1e-5..1e-3", Between(1e-5, 1e-3, log=True)),
        ("algorithm.learning_rate", ".5e-4..1e-3", Between(5e-5, 1e-3)),
        ("algorithm.epochs", "1..8", Between(1, 8)),
        ("env.num_envs", "log:1k..4k", Between(1000, 4000, log=True)),
        ("env.num_envs", "8", OneOf((8,))),
        ("model.hidden_sizes", "64 64,128", OneOf(((64, 64), (128,)))),
        ("algorithm.anneal_learning_rate", "true,false", OneOf((True, False))),
        ("model.core", "none,lstm", OneOf(("none", "lstm"))),
        ("env.id", "../a.py:make,../b.py:make", OneOf(("../a.py:make", "../b.py:make"))),
    ],
)
def test_spaces_from_flags(name: str, text: str, expected: Between | OneOf) -> None:
    flags = ["--seed", "1..2", "--search", f"{name}={text}", "--trials", "3", "--total-steps", "20k"]
    flags += ["--algorithm.minibatches", "2"]  # which fits a recurrent model, too
    found, given = search_of({"ppo-cartpole": recipes.ppo_cartpole()}, flags, "set", SweepOptions())
    found.validate()
    assert found.space == {name.replace("-", "_"): expected}
    assert [run.experiment.seed for run in found.runs] == [1, 2] and given.trials == 3
    assert {run.experiment.total_steps for run in found.runs} == {20_000}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"space": {}}, r"\([1-9] given\).*\(0 given\)"),
        ({"runs": []}, r"\(0 given\).*\([1-9] given\)"),
        ({"trials": 0}, r"--trials 0\b"),
        ({"space": {"algorithm.lerning_rate": OneOf((1,))}}, r"\blerning_rate\b"),
        ({"space": {"algorithm.epochs": Between(0.5, 2)}}, r"algorithm\.epochs .*whole number"),
        ({"space": {"model.hidden_sizes": Between(1, 2)}}, r"model\.hidden_sizes .*commas"),
        ({"space": {"algorithm.anneal_learning_rate": Between(0, 1)}}, r"algorithm\.anneal_learning_rate .*commas"),
        ({"space": {"algorithm.learning_rate": Between(1e-3, 1e-5)}}, r"algorithm\.learning_rate .*lower"),
        ({"space": {"algorithm.learning_rate": Between(0, 1e-5, log=True)}}, r"algorithm\.learning_rate .*logarithmic"),
        ({"space": {"algorithm.epochs": OneOf(())}}, r"algorithm\.epochs over"),
        ({"space": {"algorithm.learning_rate": Between(0, math.inf)}}, r"algorithm\.learning_rate .*finite"),
        ({"space": {"algorithm.learning_rate": [1e-3, 1e-4]}}, r"lockstep\.sweep\.Run, or a Between"),
        ({"runs": [recipes.ppo_cartpole()]}, r"lockstep\.sweep\.Run, or a Between"),
        ({"space": {"seed": Between(1, 9)}}, "--seed 1..3"),
        ({"runs": Run(recipes.ppo_cartpole())}, r"runs .*list of lockstep\.sweep\.Run"),
        ({"space": [OneOf((1, 2))]}, r"space=\[.*OneOf\(\(2, 4\)\)"),
        ({"space": {"algorithm.discount": Between(0.9, 1.5)}}, "discount"),
        ({"objective": "eval/score"}, "eval/score.*--eval-every N"),
        ({"objective": "loss/polcy"}, r"loss/polcy \(--objective\).*loss/policy.*value/explained_variance"),
        ({"objective": "nothing"}, r"nothing \(--objective\).*score/mean"),
        ({"runs": [Run(recipes.ppo_cartpole()), Run(recipes.dqn_cartpole())]}, "--seed .*--search "),
    ],
)
def test_searches_that_are_none(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        dataclasses.replace(search(), **changed).validate()


@pytest.mark.parametrize("objective", ["loss/value", "loss/value/adversary", "gradient_norm", "policy/kl", "lag/kept"])
def test_objectives_that_runs_may_have(objective: str) -> None:
    space = {"algorithm.desired_kl": OneOf((0.0, 0.01))}
    dataclasses.replace(search(space), objective=objective).validate()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--search", "algorithm.epochs=1..x"), r"--search algorithm\.epochs=1\.\.x "),
        (
            ("--search", "algorithm.epochs=1-8"),
            r"--search algorithm\.epochs=1-8 .* LOW\.\.HIGH",
        ),
        (
            ("--search", "algorithm.clip=0..x", "--search", "algorithm.epochs=1..8"),
            r"--search algorithm\.clip=0\.\.x ",
        ),
        (("--algorithm.epochs", "1,2", "--algorithm.epochs", "4"), "--algorithm.epochs .*--algorithm.epochs 1,2,3"),
        (
            ("--search", "algorithm.epochs=1..2", "--search", "algorithm.epochs=4,8"),
            "--search names .* twice",
        ),
        (("--env.options", "a=1", "b=2", "a=3"), "--env.options names a twice"),
        (("--seed", "1,true"), r"--seed 1\.\.5"),
        (("--search", "algorithm.epochs=1..2", "--algorithm.rollout", "8,16"), "--seed .*--search "),
    ],
)
def test_mistakes_of_flags(flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "set", "ppo-cartpole", *flags]) == 2
    assert re.search(complaint, capsys.readouterr().err)


def test_a_flag_of_a_searched_setting_is_said_to_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--algorithm.epochs", "3", "--search", "algorithm.epochs=1,2")
    assert main(["sweep", "set", "ppo-cartpole", *flags, "--dry-run"]) == 0
    assert says(capsys.readouterr().err, "--algorithm.epochs", "no effect", "--search")


def test_a_search_needs_something_to_search_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "set", "--search", "algorithm.epochs=1..2"]) == 2
    assert says(capsys.readouterr().err, "--search", "recipe")


def test_without_optuna(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "optuna" else found(name))
    assert main(["sweep", "set", "ppo-cartpole", "--search", "algorithm.epochs=1..2"]) == 2
    assert install_command("optuna") in capsys.readouterr().err


def test_what_became_of_a_search_needs_no_optuna(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched("set", 2)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", "set", "--status"]) == 0
    assert "2 of 2 trials" in capsys.readouterr().out


def test_the_documented_search(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n# search.py\n(.*?)```", (ROOT / "docs/sweep.md").read_text(), re.DOTALL)
    Path("search.py").write_text(code)
    found = from_file("search.py:search")
    assert isinstance(found, Search)
    assert main(["sweep", "set", "search.py:search", "--dry-run", "--trials", "7"]) == 0
    assert says(capsys.readouterr().out, "0 of 7 trials", f"each: {len(found.runs)}", "score/mean: none")
    assert not Path("set").exists(), "a dry run creates nothing"


SMALL = (
    *("--env.adapter", "gymnasium", "--env.num-envs", "8", "--env.reseed-every", "20", "--scheme.acting-batch", "0"),
    *("--algorithm.rollout", "8", "--algorithm.epochs", "1", "--algorithm.minibatches", "1"),
    *("--checkpoint-every", "2", "--no-tensorboard", "--layout", "inline,learner_delay=0.02"),
)
STEPS = 8 * 8 * 20


@pytest.mark.timeout(400)  # starting a run takes seconds, and a busy machine many more
def test_a_killed_search_goes_on(start: Callable[..., Child], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--search", "algorithm.learning_rate=log:1e-4..1e-2", "--trials", "2", "--slots", "1")
    child = start("sweep", "set", "ppo-cartpole", *SMALL, "--total-steps", str(STEPS), *asked)
    child.until(lambda: any(Path("set/runs").glob("*t001*/checkpoints/0*")), "the first trial to learn")
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert main(["sweep", "set", "--json"]) == 0
    captured = capsys.readouterr()
    assert says(captured.err, "2 of 2 trials", "each: 1", "score/mean: trial ")
    found = json.loads(captured.out)["search"]
    assert [trial["state"] for trial in found["trials"]] == ["done", "done"]
    assert found["best"] == max(found["trials"], key=lambda trial: trial["value"])["number"]
    queue = Queue.open(Path("set"))
    for entry in queue.entries():
        outcome = queue.outcome(entry.name)
        again = train(from_json(entry.experiment), options=options(Path(entry.name)))
        assert outcome is not None and (outcome.digest, outcome.score) == (again.digest, again.score)
    assert main(["sweep", "set", "--status"]) == 0
    assert "algorithm.learning_rate: log:0.0001..0.01" in capsys.readouterr().out


def test_trials_are_told_as_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[Any]] = []
    monkeypatch.setattr("optuna.study.Study.add_trials", lambda _, trials: told.append(list(trials)))
    queue = Queue.make(tmp_path / "set")
    trials = Trials.make(queue, search(seeds=(1, 2)))
    trials.begin()
    trials.next()
    end(queue, trials.all()[0], 3.0, "stopped")
    second = queue.metrics(trials.all()[0].runs[1])
    second.write_text(second.read_text() + json.dumps({"samples": 500, "score/mean": 2.0}) + "\n")
    again = Trials.open(queue)
    assert again is not None
    again.begin()
    again.next()
    again.next()
    stopped, running = told[-1]
    assert (stopped.state.name, stopped.intermediate_values) == ("PRUNED", {128: 2.5})
    assert running.state.name == "RUNNING"
