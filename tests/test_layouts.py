"""What the project promises: digest and ledger are equal, byte for byte, on every layout, and after a resumption."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import golden
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentences import says
from tiny import ALIKE, EXPERIMENTS, ITERATIONS, options
from workers import TIMEOUT, AllReduce, Ran, Workers, ran_of

import lockstep
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.run import ledger
from lockstep.run.folder import RunFolder
from lockstep.training.job import Job
from lockstep.training.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
COLOCATED = ("processes:2", "processes:3", "processes:4")
SPLIT = ("cpu:a1-l1", "cpu:a2-l1", "cpu:a1-l2", "cpu:a2-l2", "cpu:a3-l1", "cpu:a1-l3")
BEFORE_LAST = ITERATIONS - 1
EVERYWHERE = ("cartpole-lag-1", "memory-gru-lag-2")
"""Every layout has these in `make test`: a short lag without a state, and a long one with a recurrent state."""


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Runs an experiment in this process, once."""
    folder = tmp_path_factory.mktemp("inline")

    @functools.cache
    def ran(name: str) -> Ran:
        result = lockstep.train(EXPERIMENTS[name](), Layout(), options(folder / name, checkpoint_every=BEFORE_LAST))
        return ran_of(result)

    return ran


@pytest.fixture(autouse=True)
def _libraries_write_their_logs_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job(name: str, run: Path, layout: str) -> Job:
    """A run, its folder made."""
    parsed = Layout.parse(layout)
    experiment = prepare(EXPERIMENTS[name](), parsed)
    return Job(RunFolder.create(experiment, parsed, options(run)), experiment, parsed, options(run))


def layouts(name: str, full: bool) -> list[str]:
    """Those that an experiment is tried on. What a layout could break depends on little of an experiment: each has one
    layout of either kind, in turn, so that neighbors in the list, which are often of one family, have different ones.
    `make test-full` tries all on all."""
    if full or name in EVERYWHERE:
        return [*COLOCATED, *SPLIT]
    turn = list(EXPERIMENTS).index(name)
    return [COLOCATED[turn % len(COLOCATED)], SPLIT[(turn + turn // len(SPLIT)) % len(SPLIT)]]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in ALIKE else ()) for name in EXPERIMENTS]
)
def test_layouts_agree(name: str, full: bool, workers: Workers, inline: Callable[[str], Ran], tmp_path: Path) -> None:
    tried = {each: workers.start(job(name, tmp_path / each.replace(":", "-"), each)) for each in layouts(name, full)}
    alone = inline(name)
    assert {each: workers.ran(order) for each, order in tried.items()} == dict.fromkeys(tried, alone)
    _, lines = ledger.read(RunFolder(alone.run).ledger)
    versions = [tuple(line["parameters"].values()) for line in lines]
    assert len(set(versions)) == ITERATIONS, "every iteration changed the parameters"


@pytest.mark.parametrize("env_processes", [1, 2, 3])
def test_environments_in_subprocesses_agree(
    env_processes: int, workers: Workers, inline: Callable[[str], Ran], tmp_path: Path
) -> None:
    layout = f"{'cpu:a1-l1,jitter=0.002' if env_processes > 1 else 'processes:2'},env_processes={env_processes}"
    assert workers.ran(workers.start(job("cartpole-lag-1", tmp_path / "run", layout))) == inline("cartpole-lag-1")


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["cartpole-lag-1", "memory-gru-lag-2"]),
    layout=st.sampled_from(["processes:2", *SPLIT]),
    jitter=st.sampled_from([0.001, 0.005, 0.02]),
    learner_delay=st.sampled_from([0.0, 0.2]),
)
def test_timing_decides_nothing(
    name: str,
    layout: str,
    jitter: float,
    learner_delay: float,
    workers: Workers,
    inline: Callable[[str], Ran],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    slowed = f"{layout},jitter={jitter},learner_delay={learner_delay}"
    run = tmp_path_factory.mktemp("slowed") / "run"
    assert workers.ran(workers.start(job(name, run, slowed))) == inline(name)


def test_another_seed_gives_another_result(inline: Callable[[str], Ran], tmp_path: Path) -> None:
    other = EXPERIMENTS["cartpole-8-shards"]().replace(seed=2)
    assert lockstep.train(other, options=options(tmp_path / "run")).digest != inline("cartpole-8-shards").digest


def test_an_ordinary_all_reduce_breaks_it(workers: Workers, inline: Callable[[str], Ran], tmp_path: Path) -> None:
    """In fp32 with 4 processes the same gradients, added in another order, make another agent."""
    order = workers.start(job("mujoco-normalized", tmp_path / "run", "processes:4"), AllReduce)
    alone, ordinary = inline("mujoco-normalized"), workers.ran(order)
    assert ordinary.digest != alone.digest
    (_, lines), (_, others) = (ledger.read(RunFolder(ran.run).ledger) for ran in (alone, ordinary))
    assert lines[0]["rollout"] == others[0]["rollout"], "until the first sum, nothing differs"
    assert [line["parameters"] for line in lines] != [line["parameters"] for line in others]


@pytest.mark.timeout(1800)  # where CI computes what nobody has recorded, the first test waits for it
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in ALIKE else ()) for name in EXPERIMENTS]
)
def test_digests_are_the_recorded_ones(name: str, inline: Callable[[str], Ran]) -> None:
    if name not in golden.known():
        pytest.skip("nobody has recorded digests on this platform; make golden BASE=COMMIT needs none")
    hint = "if this was intended, record them anew: make golden"
    assert inline(name).digest == golden.known()[name], hint


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in ALIKE else ())
        for name in EXPERIMENTS
        if name not in ("ppo", "ppo-bf16", "a2c", "appo")
    ],
)
def test_every_kind_of_run_resumes(name: str, inline: Callable[[str], Ran], tmp_path: Path) -> None:
    shutil.copytree(inline(name).run, tmp_path / "run")
    result = lockstep.resume(tmp_path / "run", checkpoint=BEFORE_LAST)
    assert result.iterations == ITERATIONS and ran_of(result) == inline(name)
    assert RunFolder(result.run).facts()["resumed"][-1]["iteration"] == BEFORE_LAST


def test_frames_are_those_of_the_emulator(inline: Callable[[str], Ran]) -> None:
    lines = RunFolder(inline("ppo-bf16").run).records()
    assert [line["frames"] for line in lines] == [4 * (line["samples"] or 0) for line in lines] != []


@pytest.mark.real_processes
def test_train_starts_processes_of_its_own(inline: Callable[[str], Ran], tmp_path: Path) -> None:
    """From settings to digest with nothing in between replaced."""
    result = lockstep.train(EXPERIMENTS["memory-gru-lag-2"](), Layout("processes", 2), options(tmp_path / "run"))
    assert ran_of(result) == inline("memory-gru-lag-2")


def test_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "ppo-cartpole --env.adapter gymnasium --algorithm.rollout 16 --total-steps 384 --scheme.acting-batch 0"
    command = ["train", *flags.split(), "--display", "none", "--no-tensorboard"]
    assert main([*command, "--run", "inline"]) == 0
    expected = capsys.readouterr().out.splitlines()[-1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    finished = subprocess.run(
        [*torchrun, "lockstep", *command, "--run", "torchrun", "--layout", "torchrun"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == expected
    assert expected.startswith("digest: ")
    assert RunFolder(Path("torchrun")).ledger.read_bytes() == RunFolder(Path("inline")).ledger.read_bytes()


def test_a_standstill_under_torchrun_ends_it() -> None:
    Path("hanging.py").write_text(
        "import os, time\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Hanging(CartPoleEnv):\n"
        "    steps = 0\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        time.sleep(3600 if (self.steps, os.environ['RANK']) == (3, '1') else 0)\n"
        "        return super().step(action)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    flags = ["--env.id", "hanging.py:Hanging", "--env.num-envs", "8", "--display", "none", "--no-tensorboard"]
    finished = subprocess.run(
        [
            *torchrun,
            "lockstep",
            "train",
            "ppo-cartpole",
            *flags,
            "--run",
            "run",
            "--layout",
            "torchrun,stall_timeout=10",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert finished.returncode != 0
    assert says(finished.stderr, "Process 1 of 2: ", "progress")
    assert "in step" in finished.stderr
