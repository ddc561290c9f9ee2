"""A run that is killed or stopped, and resumed, ends as if nothing had happened: same digest, same ledger.

test_layouts.py resumes a run of every kind."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Child
from sentences import says
from tiny import EXPERIMENTS, cut, options, replaying

from lockstep import recipes
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.evaluation.scores import Evaluation
from lockstep.experiment import Experiment
from lockstep.launchers.launch import resume, train
from lockstep.reproducibility.verify import verify
from lockstep.run import checkpoint
from lockstep.run.folder import RunFolder
from lockstep.run.platform import this_platform
from lockstep.training.callbacks import Callback, Progress
from lockstep.training.job import Result

ITERATIONS = 150
"""Of runs to be killed."""
DELAY = "learner_delay=0.05"
"""In their layouts, so that a test that has to wait for a processor still finds them running."""
FLAGS = (
    *("train", "ppo-cartpole", "--env.num-envs", "8", "--env.reseed-every", "20", "--scheme.acting-batch", "0"),
    *("--algorithm.rollout", "8", "--algorithm.epochs", "1", "--algorithm.minibatches", "1", "--scheme.lag", "1"),
    *("--total-steps", str(8 * 8 * ITERATIONS), "--checkpoint-every", "2", "--display", "plain", "--no-tensorboard"),
)
ADAPTERS = ["gymnasium", pytest.param("envpool", marks=pytest.mark.envpool)]


pytestmark = pytest.mark.usefixtures("processes_are_there_already", "own_folder")


def outcome(result: Result) -> tuple[str, bytes]:
    """What must be equal."""
    assert not result.stopped
    return result.digest, RunFolder(result.run).ledger.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, bytes]]:
    """The outcome of FLAGS with an adapter when nothing interferes."""

    @functools.cache
    def ran(adapter: str) -> tuple[str, bytes]:
        run = tmp_path_factory.mktemp(adapter) / "run"
        assert main([*FLAGS, "--env.adapter", adapter, "--checkpoint-every", "99", "--run", str(run)]) == 0
        last = checkpoint.open_checkpoint(checkpoint.latest(run / "checkpoints"))
        assert last.iteration == ITERATIONS
        return outcome(resume(run))

    return ran


def lines() -> int:
    """Iterations that the ledger records so far."""
    path = Path("run/ledger.jsonl")
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


@pytest.mark.parametrize(
    ("layout", "kills", "adapter"),
    [
        ("inline", 3, "gymnasium"),
        pytest.param("inline", 3, "envpool", marks=[pytest.mark.envpool, pytest.mark.full]),
        pytest.param("processes:2", 1, "gymnasium", marks=pytest.mark.full),  # each half of it is in another
        pytest.param("processes:2", 1, "envpool", marks=pytest.mark.envpool),
    ],
)
def test_killed_at_random_moments(
    adapter: str,
    layout: str,
    kills: int,
    start: Callable[..., Child],
    undisturbed: Callable[[str], tuple[str, bytes]],
) -> None:
    draw = random.Random(f"{adapter} {layout}")
    expected = undisturbed(adapter)
    kill(start(*FLAGS, "--env.adapter", adapter, "--layout", f"{layout},{DELAY}", "--run", "run"), draw)
    for _ in range(kills - 1):
        kill(start("resume", "run", "--layout", f"inline,{DELAY}"), draw)
    assert outcome(resume("run", Layout(), options(Path("run"), checkpoint_every=50))) == expected


def test_killed_while_remembering(start: Callable[..., Child]) -> None:
    """What is remembered wraps around twice, and outlives the kills with every checkpoint."""
    flags = (
        *("train", "dqn-cartpole", "--env.num-envs", "8", "--env.reseed-every", "20", "--scheme.acting-batch", "0"),
        *("--algorithm.rollout", "8", "--algorithm.updates", "2", "--algorithm.batch-size", "8"),
        *("--algorithm.warmup", "64", "--algorithm.replay.capacity", "4800", "--algorithm.replay.prioritized"),
        *("--total-steps", str(8 * 8 * ITERATIONS), "--checkpoint-every", "2", "--display", "plain"),
        *("--no-tensorboard", "--env.adapter", "gymnasium"),
    )
    draw = random.Random(7)
    assert main([*flags, "--checkpoint-every", "99", "--run", "whole"]) == 0
    kill(start(*flags, "--layout", f"inline,{DELAY}", "--run", "run"), draw)
    kill(start("resume", "run", "--layout", f"inline,{DELAY}"), draw)
    assert outcome(resume("run", Layout("processes", 2), options(Path("run"), checkpoint_every=50))) == (
        outcome(resume("whole"))
    )


def kill(child: Child, draw: random.Random) -> None:
    """SIGKILL after a random iteration, and a random part of the next."""
    begin = lines()
    if begin:
        child.until(lambda: "resumed at iteration" in child.output(), "resuming")
        begin = int(re.findall(r"resumed at iteration (\d+)", child.output())[-1])
    moment = draw.randint(begin + 3, begin + 30)
    child.until(lambda: lines() >= moment, f"iteration {moment}")
    time.sleep(draw.uniform(0, 0.01))
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert lines() < ITERATIONS


@pytest.mark.parametrize(("layout", "number"), [("inline", signal.SIGTERM), ("processes:2", signal.SIGINT)])
def test_stopped_by_a_signal(
    layout: str,
    number: signal.Signals,
    start: Callable[..., Child],
    undisturbed: Callable[[str], tuple[str, bytes]],
) -> None:
    expected = undisturbed("gymnasium")
    child = start(*FLAGS, "--env.adapter", "gymnasium", "--layout", f"{layout},{DELAY}", "--run", "run")
    child.until(lambda: lines() >= 5, "some iterations")
    if number == signal.SIGINT:
        child.interrupt()
    else:
        child.signal(number)
    assert child.wait() == 130
    assert f"{number.name}: checkpoint and stop" in child.output() and ": lockstep resume run" in child.output()
    last = checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints"))
    assert 5 <= last.iteration == lines() < ITERATIONS
    assert outcome(resume("run", Layout(), options(Path("run"), checkpoint_every=50))) == expected


@pytest.mark.parametrize("layout", ["inline", "processes:2"])
def test_a_signal_ends_an_evaluation_which_is_repeated(
    layout: str, start: Callable[..., Child], undisturbed: Callable[[str], tuple[str, bytes]]
) -> None:
    expected = undisturbed("gymnasium")
    endless = ("--eval-every", "75", "--eval-episodes", "1000000")
    child = start(*FLAGS, *endless, "--env.adapter", "gymnasium", "--layout", layout, "--run", "run")
    child.until(lambda: lines() >= 75, "the evaluation")
    child.signal(signal.SIGTERM)
    assert child.wait() == 130
    assert checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints")).iteration == 75
    given = dataclasses.replace(options(Path("run"), checkpoint_every=50), eval_every=75, eval_episodes=3)
    assert outcome(resume("run", Layout(), given)) == expected
    assert [each["iteration"] for each in evaluations("run")] == [75, 150]


def evaluations(run: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if name != "seconds"} for row in rows if "eval/score" in row]


@pytest.mark.parametrize("iteration", [1, 3])
@pytest.mark.parametrize("name", ["cartpole-lag-1", "rainbow-lag-1", "r2d2-uniform-lag-1"])
def test_a_signal_ends_an_evaluation_which_is_repeated_before_anything_is_learned(
    name: str, iteration: int, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = EXPERIMENTS[name]()
    given = functools.partial(dataclasses.replace, eval_every=iteration, eval_episodes=3)
    whole = train(experiment, options=given(options(Path("whole"))))

    def stops(progress: Progress) -> None:
        if progress.iteration == iteration:
            signal.raise_signal(signal.SIGINT)

    class Follows(Callback):
        def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> None:
            followed.append((progress.iteration, progress.policy().samples, progress.metrics))

    followed: list[tuple[int, int, dict[str, float]]] = []
    part = train(experiment, options=given(options(Path("part"))), on_iteration=stops)
    assert part.stopped and part.iterations == iteration and not evaluations("part")
    last = json.loads(Path("part/metrics.jsonl").read_text().splitlines()[-1])
    capsys.readouterr()
    assert outcome(resume("part", on_iteration=Follows())) == outcome(whole)
    assert ("during its last evaluation, which is repeated" in capsys.readouterr().err) == (iteration == 3)
    assert followed[0] == (iteration, last["samples"], last), "the callback sees the evaluation's iteration"
    assert evaluations("part") == evaluations("whole") != []
    count = len(followed)
    assert outcome(resume("part", on_iteration=Follows())) == outcome(whole)
    assert len(followed) == count, "the evaluation is not repeated again"
    assert evaluations("part") == evaluations("whole")


def cartpole(**env: object) -> Experiment:
    return cut(recipes.ppo_cartpole, env={"adapter": "gymnasium", **env}, scheme={"lag": 1})


def test_decorrelated_episodes_resume() -> None:
    expected = outcome(train(cartpole(decorrelate=9), options=options(Path("whole"))))
    train(cartpole(decorrelate=9), options=options(Path("part")), stop_after=1)
    assert outcome(resume("part")) == expected


def test_scores_have_no_decorrelated_episodes() -> None:
    def ended(run: str) -> list[tuple[float | None, ...]]:
        return [tuple(row.get(name) for name in ("episodes", "score/length")) for row in RunFolder.open(run).records()]

    short = cartpole(decorrelate=4, options={"max_episode_steps": 10})  # no pole falls before 8 steps
    train(short, options=options(Path("whole")))
    # The first rollout of 8 steps has the cut episodes, of at most 4 steps, and resets. The second one has the ends of
    # the next episodes.
    found = ended("whole")
    assert found[0] == (0, None)
    assert found[1][0] == short.env.num_envs and 8 <= (found[1][1] or 0) <= 10
    train(short, options=options(Path("part")), stop_after=1)
    resume("part")
    assert ended("part") == found


def test_another_layout_goes_on() -> None:
    expected = outcome(train(cartpole(), options=options(Path("whole"))))
    train(cartpole(), options=options(Path("part")), stop_after=1)
    stopped = resume("part", Layout("processes", 3), stop_after=2)
    assert stopped.iterations == 2
    assert outcome(resume("part", Layout())) == expected


def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(capsys: pytest.CaptureFixture[str]) -> None:
    expected = outcome(train(cartpole(), options=options(Path("whole"))))
    train(cartpole(), options=options(Path("part"), checkpoint_every=1), stop_after=2)
    file = Path("part/checkpoints/00000002/shard-002.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = {path: path.read_bytes() for path in Path("part").rglob("*") if path.is_file()}

    assert main(["resume", "part"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "part/checkpoints/00000002" in error and "shard-002.safetensors" in error and "SHA-256" in error
    offered = re.search(r"lockstep (resume part --checkpoint 00000001)", error)
    assert offered, error
    assert before == {path: path.read_bytes() for path in Path("part").rglob("*") if path.is_file()}

    assert main(offered[1].split()) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"digest: {expected[0]}"
    assert Path("part/ledger.jsonl").read_bytes() == expected[1]
    assert Path("part/checkpoints/00000002.superseded").is_dir(), "nothing is deleted"


def test_a_checkpoint_that_was_set_aside_or_copied_can_be_resumed_from() -> None:
    experiment = cut(recipes.ppo_cartpole)
    expected = outcome(train(experiment, options=options(Path("run"), checkpoint_every=1)))
    shutil.copytree("run/checkpoints/00000002", "run/checkpoints/copy")
    for name, begin in (("1", 1), ("00000002.superseded", 2), ("copy", 2)):
        again = resume("run", Layout(), options(Path("run"), checkpoint_every=1), checkpoint=name)
        assert outcome(again) == expected
        assert RunFolder(Path("run")).facts()["resumed"][-1]["iteration"] == begin


@pytest.mark.parametrize("lag", [0, "async"])
@pytest.mark.parametrize("recipe", ["dqn-cartpole", "r2d2-memory"])
def test_a_memory_that_was_not_kept_is_filled_again_before_learning_goes_on(recipe: str, lag: int | str) -> None:
    base = recipes.RECIPES[recipe]
    lengths = {"burn_in": 2, "unroll": 4} if recipe == "r2d2-memory" else {}
    scheme: dict[str, Any] = {"lag": lag} if lag == 0 else {"lag": lag, "max_lag": 2}
    tiny = replaying(base, replay={"checkpoint": False, "capacity": 4 * 40}, algorithm=lengths, scheme=scheme)
    assert isinstance(tiny.algorithm, OffPolicyConfig)
    algorithm = dataclasses.replace(tiny.algorithm, rollout=4, warmup=64)
    experiment = tiny.replace(algorithm=algorithm, total_steps=16 * 16)
    warm = algorithm.build().warm_iterations(experiment.samples_per_iteration)
    assert warm >= 4
    layout = Layout.parse("cpu:a1-l1")
    train(experiment, layout, options(Path("run")), stop_after=7)
    assert not list(Path("run").rglob("replay-*")), "nothing is written"
    assert resume("run", layout, options(Path("run"))).iterations == 16
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    learned = [line["iteration"] for line in lines if "loss/value" in line]
    assert learned == [*range(warm + 1, 8), *range(8 + warm, 17)]

    train(experiment, layout, options(Path("late"), checkpoint_every=1), stop_after=17 - warm)
    with pytest.raises(SettingsError, match=f"{warm} iterations left.*needs? {warm}"):
        resume("late", layout, options(Path("late")), checkpoint=str(16 - warm))
    assert not list(Path("late").rglob("*.superseded")), "refused before anything was changed"


def test_lost_checkpoints_do_not_begin_a_run_again() -> None:
    expected = outcome(train(cartpole(), options=options(Path("run"), checkpoint_every=1)))
    shutil.rmtree("run/checkpoints")
    with pytest.raises(SettingsError, match=r"lost its checkpoints.* \d iterations"):
        resume("run")
    Path("run/checkpoints").mkdir()
    Path("run/.checkpointed").unlink()  # as of a run that did not note it yet
    with pytest.raises(SettingsError, match="lost its checkpoints"):
        resume("run")
    assert Path("run/ledger.jsonl").read_bytes() == expected[1]

    train(cartpole(), options=options(Path("early"), checkpoint_every=50))
    for path in Path("early/checkpoints").glob("0*"):
        shutil.rmtree(path)
    with pytest.raises(SettingsError, match="lost its checkpoints"):
        resume("early")
    Path("early/.checkpointed").unlink()  # as if it had been killed before the first
    settings = Path("early/experiment.json")
    written = json.loads(settings.read_text())
    del written["torch_threads"]  # as of a version that did not have it yet
    settings.write_text(json.dumps(written))
    settings.write_text(json.dumps({**written, "seed": 9}))
    with pytest.raises(SettingsError, match=r"settings that differ.*: seed differs"):
        resume("early", checkpoint="latest")
    settings.write_text(json.dumps(written))
    assert outcome(resume("early", checkpoint="latest")) == expected
    assert Path("early/ledger.jsonl.superseded").read_bytes() == expected[1], "nothing is deleted"
    assert verify("early", Layout(), 1).ok


def test_what_the_ledger_does_not_record_is_not_resumed_from() -> None:
    train(cartpole(), options=options(Path("run"), checkpoint_every=1))
    train(cartpole().replace(seed=7), options=options(Path("other"), checkpoint_every=1))
    files = {path: path.read_bytes() for path in Path("run").rglob("*.json*")}
    with pytest.raises(SettingsError, match=r"Unknown checkpoint '../../other/checkpoints/00000001'"):
        resume("run", checkpoint="../../other/checkpoints/00000001")
    shutil.copytree("other/checkpoints/00000001", "run/checkpoints/00000001.mine")
    with pytest.raises(SettingsError, match=r"run/ledger.jsonl .*: Iteration 0: parameter"):
        resume("run", checkpoint="00000001.mine")
    shutil.copytree("run/checkpoints/00000001", "run/checkpoints/00000099")
    with pytest.raises(SettingsError, match=r"after 1 iterations.*renamed"):
        resume("run")
    shutil.rmtree("run/checkpoints/00000099")
    settings = Path("run/experiment.json")
    settings.write_text(settings.read_text().replace('"discount": 0.98', '"discount": 0.9'))
    assert settings.read_bytes() != files[settings]
    with pytest.raises(SettingsError, match=r"settings that differ.*: algorithm.discount differs"):
        resume("run", checkpoint="1")
    settings.write_bytes(files[settings])
    assert files == {path: path.read_bytes() for path in Path("run").rglob("*.json*") if "mine" not in str(path)}
    assert not list(Path("run").rglob("*.superseded"))


def test_a_resumption_on_another_platform_is_told_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(cartpole(), options=options(Path("run")), stop_after=1)
    other = {**this_platform(), "torch": "9.9"}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("lockstep.training.resuming.this_platform", lambda *of: other)
        resume("run")
    assert says(capsys.readouterr().err, "warning: ", "platform")
    (again,) = RunFolder(Path("run")).facts()["resumed"]
    (differs,) = again["differs"]
    assert differs.startswith("torch: ") and differs.endswith(" != 9.9")
    warning = verify("run", Layout(), 1).warning
    assert warning is not None and f"resumed on after 1 iterations: {differs}" in warning


def test_a_file_of_users_that_was_edited_is_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_USER_FILES", "")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom lockstep.models import StandardModelConfig\n"
        "@dataclass(frozen=True)\nclass Model(StandardModelConfig):\n    pass\n"
    )
    experiment = cartpole().replace(model=load_object("mine.py:Model")())
    train(experiment, options=options(Path("run")), stop_after=1)
    resume("run", stop_after=2)
    assert "warning" not in capsys.readouterr().err and verify("run", Layout(), 1).warning is None
    before = RunFolder(Path("run")).facts()["code"]["mine.py"]
    with (tmp_path / "mine.py").open("a") as file:
        file.write("# edited\n")
    resume("run")
    assert says(capsys.readouterr().err, "warning: ", "own code")
    (differs,) = RunFolder(Path("run")).facts()["resumed"][-1]["differs"]
    assert differs.startswith(f"code.mine.py: {before} != ")
    warning = verify("run", Layout(), 1).warning
    assert warning is not None and "own code" in warning and differs in warning
