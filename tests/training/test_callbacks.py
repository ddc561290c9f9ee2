"""Users' functions that follow a run (--callback, on_iteration)."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sentences import says
from tiny import options

import lockstep
from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.evaluation.policy import load_policy
from lockstep.evaluation.scores import Evaluation
from lockstep.launchers.launch import resume
from lockstep.models.normalize import NormalizeConfig
from lockstep.training.callbacks import Callback, Progress, check

ITERATIONS = 4
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "callback.py"


def experiment() -> lockstep.Experiment:
    base = recipes.ppo_cartpole()
    return base.replace(
        env=dataclasses.replace(base.env, adapter="gymnasium", num_envs=4),
        algorithm=dataclasses.replace(base.algorithm, rollout=16, epochs=1, minibatches=1),
        scheme=dataclasses.replace(base.scheme, shards=2, acting_batch=0),
        normalize=NormalizeConfig(observations=True),
        total_steps=ITERATIONS * 16 * 4,
        precision="fp32",
    )


class Overwrites(Callback):
    """Writes down what it is told of, and then spoils everything that it was given or can reach."""

    def on_iteration(self, progress: Progress) -> None:
        policy = progress.policy()
        weights = {name: x.sum().item() for name, x in policy.model.named_parameters()}
        counts = [progress.iteration, progress.iterations, policy.iteration, policy.samples, policy.frames]
        self._write(
            progress, "iteration", counts, progress.metrics["loss/value"], progress.metrics.get("score/mean"), weights
        )
        with torch.no_grad():
            for x in (*policy.model.parameters(), *policy.model.buffers()):
                x.zero_()
        policy.experiment.env.options["gravity"] = 0.0
        progress.metrics.clear()
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        np.seterr(all="raise")
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> None:
        self._write(progress, "evaluation", progress.iteration, evaluation.mean)
        evaluation.metrics["spoiled"] = None  # type: ignore[assignment]

    def on_checkpoint(self, progress: Progress, path: Path) -> None:
        self._write(progress, "checkpoint", progress.iteration, path.name, path.is_dir(), sorted(progress.metrics)[:1])

    def _write(self, progress: Progress, *what: Any) -> None:
        with (progress.run / "seen.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")


def stops_at_two(progress: Progress) -> None:
    if progress.iteration == 2:
        progress.stop()


def fails_at_two(progress: Progress) -> None:
    if progress.iteration == 2:
        raise ValueError("two is too many")


def seen(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "seen.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> lockstep.Result:
    return lockstep.train(experiment(), "inline", options(tmp_path_factory.mktemp("runs") / "alone"))


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> lockstep.Result:
    given = options(tmp_path_factory.mktemp("runs") / "run", checkpoint_every=2)
    given = dataclasses.replace(given, callback=f"{__file__}:Overwrites", eval_every=3, eval_episodes=2)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    result = lockstep.train(experiment(), "inline", given)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (dtype, threads) and torch.is_grad_enabled()
    return result


def test_a_callback_changes_nothing(alone: lockstep.Result, followed: lockstep.Result) -> None:
    assert followed.digest == alone.digest and not followed.stopped


def test_a_callback_sees_what_the_run_writes(followed: lockstep.Result) -> None:
    told = seen(followed.run)
    assert [(what, counts[0] if what == "iteration" else counts) for what, counts, *_ in told] == [
        ("iteration", 1),
        ("iteration", 2),
        ("checkpoint", 2),
        ("iteration", 3),
        ("evaluation", 3),
        ("iteration", 4),
        ("checkpoint", 4),
    ]
    lines = [json.loads(line) for line in (followed.run / "metrics.jsonl").read_text().splitlines()]
    (evaluation,) = (line for line in lines if "eval/score" in line)
    assert told[4] == ["evaluation", 3, evaluation["eval/score"]] and "eval/env/spoiled" not in evaluation
    assert told[2] == ["checkpoint", 2, "00000002", True, ["episodes"]]
    for what in (told[1], told[5]):
        _, counts, loss, score, weights = what
        policy = load_policy(followed.run, counts[0])
        (line,) = (line for line in lines if line["iteration"] == counts[0] and "eval/score" not in line)
        assert counts == [policy.iteration, ITERATIONS, policy.iteration, policy.samples, policy.frames]
        assert (loss, score) == (line["loss/value"], line.get("score/mean"))
        assert weights == {name: x.sum().item() for name, x in policy.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["processes:2", "cpu:a1-l1"])
def test_a_callback_sees_and_changes_the_same_on_every_layout(
    layout: str, followed: lockstep.Result, tmp_path: Path
) -> None:
    given = dataclasses.replace(options(tmp_path / "run", checkpoint_every=2), eval_every=3, eval_episodes=2)
    result = lockstep.train(experiment(), layout, given, on_iteration=Overwrites())
    assert result.digest == followed.digest and seen(result.run) == seen(followed.run)


@pytest.mark.slow
def test_a_callback_ends_a_run_of_several_processes(alone: lockstep.Result, tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerError, match="ValueError: two is too many"):
        lockstep.train(experiment(), "cpu:a1-l1", options(tmp_path / "fails"), on_iteration=fails_at_two)
    stopped = lockstep.train(experiment(), "processes:2", options(tmp_path / "stops"), on_iteration=stops_at_two)
    assert stopped.iterations == 2 and resume(stopped.run, "inline").digest == alone.digest


def test_a_run_that_a_callback_ends_goes_on(alone: lockstep.Result, tmp_path: Path) -> None:
    said: list[int] = []

    def stops(progress: Progress) -> None:
        said.append(progress.iteration)
        stops_at_two(progress)

    stopped = lockstep.train(experiment(), "inline", options(tmp_path / "run"), on_iteration=stops)
    assert (stopped.iterations, stopped.stopped, said) == (2, False, [1, 2])
    result = resume(stopped.run, "inline", on_iteration=stops)
    assert result.digest == alone.digest and said == [1, 2, 3, 4]


def test_an_exception_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two is too many"):
        lockstep.train(experiment(), "inline", options(tmp_path / "run"), on_iteration=fails_at_two)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2

    def asks_wrongly(progress: Progress) -> None:
        lockstep.evaluate(progress.run / "absent")

    with pytest.raises(RuntimeError, match="The callback raised SettingsError") as error:
        lockstep.train(experiment(), "inline", options(tmp_path / "wrong"), on_iteration=asks_wrongly)
    assert isinstance(error.value.__cause__, SettingsError)


def test_the_example_follows_a_run(tmp_path: Path) -> None:
    given = dataclasses.replace(options(tmp_path / "run"), callback=f"{EXAMPLE}:UntilSolved")
    result = lockstep.train(experiment().replace(total_steps=10 * 16 * 4), "inline", given)
    (iteration, norm) = (result.run / "norm.csv").read_text().strip().split(",")
    parameters = load_policy(result.run).model.parameters()
    assert iteration == "10" and float(norm) == sum(x.square().sum().item() for x in parameters) ** 0.5


class Typed(Callback):
    pass


class NeedsArguments(Callback):
    def __init__(self, path: str) -> None:
        self.path = path


class Locks(Callback):
    def __init__(self) -> None:
        self.lock = multiprocessing.Lock()


class Refuses(Callback):
    def __reduce__(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("given", "layout", "words"),
    [
        ("Missing", "inline", ("Missing", "no Missing")),
        ("ITERATIONS", "inline", ("--callback", "is 4", "one argument", "lockstep.Callback")),
        ("experiment", "inline", ("--callback", "one argument")),
        ("Path", "inline", ("one argument",)),
        ("NeedsArguments", "inline", ("NeedsArguments", "no arguments")),
        (lambda _: None, "processes:2", ("on_iteration", "top level", "inline")),
        (Locks(), "processes:2", ("on_iteration", "Lock objects", "inline")),
        (Refuses(), "processes:2", ("on_iteration", "NotImplementedError", "inline")),
    ],
)
def test_what_is_no_callback_is_refused_before_the_run(given: Any, layout: str, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as error:
        check(f"{__file__}:{given}" if isinstance(given, str) else given, Layout.parse(layout))
    assert says(str(error.value), *words)


def test_a_callback_of_a_notebook_is_refused_where_processes_would_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook: Any = ModuleType("__main__")
    notebook.Typed = Typed
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setattr(Typed, "__module__", "__main__")
    check(Typed(), Layout.parse("inline"))
    given: Any
    for given in (Typed, Typed()):
        with pytest.raises(SettingsError, match=r"in a notebook .* top level of a file and import it"):
            check(given, Layout.parse("processes:2"))
