"""What the documents show must work: the examples learn, on any layout alike, and the commands parse."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import re
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu
import torch
from workers import Workers

import lockstep
from lockstep.algorithms.dqn import DQNConfig
from lockstep.algorithms.ppo import PPOConfig
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.cli.main import VERBS, main
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.experiment import Experiment
from lockstep.reports.suites import suite_of
from lockstep.run import ledger
from lockstep.run.folder import RunFolder
from lockstep.scheme import Scheme
from lockstep.training.job import Job
from lockstep.training.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = (
    *("custom_model", "custom_env", "custom_vector_env", "compiled_env", "custom_algorithm"),
    *("custom_storage", "custom_scheme", "custom_exploration", "gradient_compression", "auxiliary_loss"),
)


def short(*examples: str, iterations: int = 2) -> Experiment:
    """The first example's experiment with the other examples' own parts, cut to a few short iterations."""
    experiment, *others = (load_object(f"{ROOT}/examples/{example}.py:recipe")() for example in examples)
    for example, other in zip(examples[1:], others, strict=True):
        part = example.removeprefix("custom_")
        experiment = dataclasses.replace(experiment, **{part: getattr(other, part)})
    if isinstance(experiment.algorithm, DQNConfig):
        algorithm = dataclasses.replace(experiment.algorithm, warmup=0, batch_size=32)
        experiment = experiment.replace(algorithm=algorithm)
    if isinstance(experiment.algorithm, PPOConfig):
        experiment = experiment.replace(algorithm=dataclasses.replace(experiment.algorithm, epochs=2))
    return dataclasses.replace(experiment, total_steps=iterations * experiment.samples_per_iteration)


def train(experiment: Experiment, run: Path, layout: str) -> lockstep.Result:
    options = RunOptions(run=str(run), display="none", tensorboard=False)
    return lockstep.train(experiment, Layout.parse(layout), options)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains(example: str, tmp_path: Path) -> None:
    result = train(short(example), tmp_path / "run", "inline")
    assert result.iterations == 2
    other = train(dataclasses.replace(short(example), seed=2), tmp_path / "other", "inline")
    assert other.digest != result.digest


@pytest.mark.parametrize("example", ["custom_env", "custom_vector_env", "compiled_env", "gpu_env"])
def test_the_identity_of_an_example_does_not_depend_on_its_folder(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = set()
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        shutil.copy(f"{ROOT}/examples/{example}.py", tmp_path / place)
        monkeypatch.chdir(tmp_path / place)
        identities.add(load_object(f"{example}.py:recipe")().identity())
    assert len(identities) == 1


def test_all_examples_together_train_in_processes_as_inline(tmp_path: Path) -> None:
    experiment = short("custom_env", "custom_model", "custom_algorithm")
    digests = {train(experiment, tmp_path / layout, layout).digest for layout in ("inline", "processes:2")}
    assert len(digests) == 1


def test_an_auxiliary_loss_has_equal_bits_in_processes(tmp_path: Path) -> None:
    results = [train(short("auxiliary_loss"), tmp_path / layout, layout) for layout in ("inline", "cpu:a1-l2")]
    assert len({result.digest for result in results}) == 1
    assert all(loss > 0 for loss in results[0].metrics()["loss/auxiliary"])


def test_the_example_of_locomotion_has_equal_bits_on_every_layout_and_resumed(tmp_path: Path) -> None:
    recipe = load_object(f"{ROOT}/examples/locomotion/recipe.py:recipe")()
    experiment = recipe.replace(total_steps=3 * recipe.samples_per_iteration)
    options = RunOptions(run=str(tmp_path / "run"), display="none", tensorboard=False, checkpoint_every=2)
    whole = lockstep.train(experiment, Layout(), options)
    assert {"env/success", "env/distance"} <= whole.metrics().keys()
    split = train(experiment, tmp_path / "split", "cpu:a2-l1")
    shutil.rmtree(tmp_path / "run/checkpoints/00000003")
    resumed = lockstep.resume(tmp_path / "run", Layout.parse("processes:2"))
    assert whole.digest == split.digest == resumed.digest


def test_the_script_computes_what_train_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = short("custom_model")
    experiment = dataclasses.replace(
        experiment,
        scheme=dataclasses.replace(experiment.scheme, lag=1),
        total_steps=4 * experiment.samples_per_iteration,
    )
    digest = load_object(f"{ROOT}/examples/script.py:run")(experiment)
    assert digest == train(experiment, tmp_path / "run", "inline").digest
    assert capsys.readouterr().out.startswith("iteration")


def job(experiment: Experiment, run: Path, layout: str, checkpoint: Path | None = None) -> Job:
    """A run for processes that wait for one, its folder made."""
    parsed, kept = Layout.parse(layout), RunOptions(run=str(run), display="none", tensorboard=False)
    experiment = prepare(experiment, parsed)
    return Job(RunFolder.create(experiment, parsed, kept), experiment, parsed, kept, checkpoint)


PARTS = {
    "custom_storage": (lambda: short("custom_storage", iterations=4), "algorithm", lambda own: DQNConfig(**vars(own))),
    "custom_scheme": (lambda: short("custom_scheme", iterations=6), "scheme", lambda own: plain(own, "period")),
    "gradient_compression": (lambda: short("gradient_compression"), "scheme", lambda own: plain(own, "share")),
}
"""Their experiments, what in them is the example's own part, and the library's in its place."""


def plain(own: Scheme, added: str) -> Scheme:
    return Scheme(**{name: value for name, value in vars(own).items() if name != added})


@pytest.mark.parametrize("example", PARTS)
def test_a_part_of_ones_own_decides_the_result_and_layouts_do_not(
    example: str, workers: Workers, tmp_path: Path
) -> None:
    make, part, without = PARTS[example]
    experiment = make()
    layouts = ("processes:3", "cpu:a1-l2")
    orders = [workers.start(job(experiment, tmp_path / layout.replace(":", "-"), layout)) for layout in layouts]
    alone = train(experiment, tmp_path / "alone", "inline")
    usual = experiment.replace(**{part: without(getattr(experiment, part))})
    assert train(usual, tmp_path / "usual", "inline").digest != alone.digest
    assert {workers.result(order).digest for order in orders} == {alone.digest}


def test_the_storage_draws_the_newest_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, Any]] = []
    learned = ReplayBatches.slice

    def noting(self: ReplayBatches, slot: int, step: int) -> Any:
        taken = learned(self, slot, step)
        drawn.append((self._replays[slot]._newest(), self._drawn[slot]))
        return taken

    monkeypatch.setattr(ReplayBatches, "slice", noting)
    train(short("custom_storage", iterations=6), tmp_path / "run", "inline")
    newest = [{0, 1} <= set(environments[times == last]) for last, (times, environments) in drawn]
    assert len(newest) > 50 and sum(newest) > 0.7 * len(newest), "all but where an episode ended just then"


def test_the_scheme_keeps_a_version_for_four_rollouts(tmp_path: Path) -> None:
    run = train(short("custom_scheme", iterations=10), tmp_path / "run", "inline").run
    _, lines = ledger.read(RunFolder(run).ledger)
    assert [line["collected_with"] for line in lines] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]


@pytest.mark.parametrize("layout", ["inline", "inline,device=0"])
def test_what_compression_keeps_for_later_is_in_checkpoints(layout: str, tmp_path: Path) -> None:
    experiment = short("gradient_compression", iterations=4)
    with contextlib.nullcontext() if layout == "inline" else simulated_gpu.simulated():
        experiment = experiment if layout == "inline" else experiment.replace(precision="fp32")
        whole = train(experiment, tmp_path / "whole", layout)
        options = RunOptions(run=str(tmp_path / "cut"), checkpoint_every=2, display="none", tensorboard=False)
        lockstep.train(experiment, Layout.parse(layout), options, stop_after=2)
        assert lockstep.resume(tmp_path / "cut", Layout.parse(layout)).digest == whole.digest


def test_what_is_not_added_up_cannot_be_compressed() -> None:
    scheme = dataclasses.replace(short("gradient_compression").scheme, gradient_lag="async")
    with pytest.raises(SettingsError, match="applies each one alone"):
        scheme.validate()


def commands() -> list[str]:
    """Every `lockstep …` line of the documents."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    return sorted(
        {
            line.split("  #")[0].removeprefix("$ ").strip()
            for text in texts
            for line in re.findall(r"^(?: {4,}|\w*\$ (?:\w+=\S+ )*)(lockstep (?!COMMAND).+)$", text, re.MULTILINE)
        }
    )


def test_commands_are_found() -> None:
    found = commands()
    assert len(found) > 15
    assert {command.split()[1] for command in found} >= {"train", "resume", "eval", "record", "plot", "verify", "diff"}


@functools.cache
def flags_of(verb: str, *needed: str) -> str:
    """Its help, of all flags."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main([verb, *needed, "--help-all"])
    return shown.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of users' that documented commands name, as arguments."""
    folder = tmp_path_factory.mktemp("files")
    runpy.run_path(str(ROOT / "examples" / "replay_data.py"))["collect"](folder / "cartpole.npz", episodes=2)
    (folder / "games.txt").write_text("\n".join(suite_of("atari100k").tasks))
    (folder / "callback.py").write_text("def follow(progress):\n    print(progress.iteration)\n")
    return {
        "cartpole.npz": str(folder / "cartpole.npz"),
        "mixed/games.txt": f"mixed/{folder}/games.txt",
        "my_file.py:follow": f"{folder}/callback.py:follow",
        "roles.py:role": f"{ROOT}/benchmarks/mpe.py:role",
    }


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_parses(command: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    verb, *arguments = shlex.split(command)[1:]
    assert verb in VERBS
    if verb == "train":
        if "--help" in arguments:
            assert main([verb, *arguments]) == 0
            return
        given = {"my_file.py:recipe": "examples/custom_model.py:recipe", "RECIPE": "ppo-cartpole"}
        given["my_env.py:Counter"] = "examples/compiled_env.py:Reach"
        given["my_env.py:Counters"] = "examples/custom_vector_env.py:Reach"
        given["roles.py:role"] = "benchmarks/mpe.py:role"
        given |= files
        arguments = [given.get(argument, argument) for argument in arguments]
        code = main([verb, *arguments, "--dry-run"])
        said = capsys.readouterr().err
        if missing := re.search(r"No module named '(\w+)'", said):
            assert importlib.util.find_spec(missing[1]) is None
            pytest.skip(f"{missing[1]} is not installed")
        if "Procgen draws with Qt 5" in said:
            assert importlib.util.find_spec("PyQt5") is None
            pytest.skip("PyQt5-Qt5 is not installed")
        if "needs GPU" in said:
            assert not torch.cuda.is_available()
            pytest.skip("this machine has no GPU")
        if "grids.py:Grids" in arguments:  # which the page shows in part
            assert "no Python file" in said and "grids.py" in said
            return
        if "--warm-start.run" in arguments:  # of a run that another command trains
            assert re.match(r"error: --warm-start\.run (\S+): \1 does not exist", said)
            return
        if "--env.opponents" in arguments and "runs/" in command:
            assert re.match(r"error: .*opponent (\S+?)(@200)?, .*: \1 does not exist", said)
            return
        assert code == 0, said
    else:
        for reference in filter(re.compile(r"examples/.+\.py:\w+").fullmatch, arguments):
            load_object(f"{ROOT}/{reference}")
        recipe = {
            "bench": ["ppo-cartpole"],
            "tune": ["ppo-cartpole"],
            "submit": ["ppo-cartpole"],
            "sweep": ["set", "ppo-cartpole"],
        }
        help_text = flags_of(verb, *recipe.get(verb, []))
        for flag in (argument for argument in arguments if argument.startswith("--")):
            assert re.search(rf"{flag.partition('=')[0]}\b", help_text), f"{verb} has no {flag}"
