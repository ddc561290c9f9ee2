"""Split layouts: whichever process fails, is killed or hangs, the run ends soon, says why and leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from children import Child
from tiny import cut, options

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.launchers.launch import resume, train
from lockstep.run import checkpoint
from lockstep.run.folder import RunFolder
from lockstep.system.supervision import WorkerError

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "1"))
"""Random moments at which a process of each kind is killed."""
SOON = 60.0
"""Seconds from a death to the end of the run, even on a busy machine; it usually takes a second or two. Nothing else
would end these runs so early, since a silent process is waited for longer."""
ITERATIONS = 60
"""Of runs to be killed; LAYOUTS make them last at least three seconds."""
LAYOUTS = [f"cpu:{roles},env_processes=1,learner_delay=0.05" for roles in ("a1-l1", "a2-l1")]
FLAGS = (
    *("train", "ppo-cartpole", "--env.adapter", "gymnasium", "--env.num-envs", "8", "--env.reseed-every", "20"),
    *("--scheme.acting-batch", "0", "--algorithm.rollout", "8", "--algorithm.epochs", "1"),
    *("--algorithm.minibatches", "1", "--total-steps", str(8 * 8 * ITERATIONS), "--checkpoint-every", "2"),
    *("--display", "plain", "--no-tensorboard", "--run", "run"),
)
ENV = """
import os, signal, time
from pathlib import Path
import gymnasium

class Env(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 13 and first():
            {fault}
        return super().step(action)

def make():
    return Env(gymnasium.make("CartPole-v1"))

def first():
    "Whether this is the first call in any process: one environment of one shard."
    try:
        (Path(__file__).parent / "once").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
"""


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, bytes]]:
    """Digest and ledger of FLAGS with a lag when nothing interferes, inline."""

    @functools.cache
    def ran(lag: int) -> tuple[str, bytes]:
        run = tmp_path_factory.mktemp(f"lag-{lag}") / "run"
        assert main([*FLAGS, "--scheme.lag", str(lag), "--checkpoint-every", "99", "--run", str(run)]) == 0
        return resume(run).digest, RunFolder(run).ledger.read_bytes()

    return ran


def resumed_inline() -> tuple[str, bytes]:
    result = resume("run", Layout(), options(Path("run"), checkpoint_every=50))
    return result.digest, RunFolder(result.run).ledger.read_bytes()


def lines() -> int:
    """Iterations that the ledger records so far."""
    path = Path("run/ledger.jsonl")
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


# ------------------------------------------------------------------------- environments that fail in the middle


@pytest.mark.parametrize(
    ("layout", "fault", "message"),
    [
        (
            "cpu:a2-l1",
            "raise BrokenPipeError(32, 'Broken pipe')",  # as if it followed from the end of another process
            r"Collector [01] of 2 failed:(.|\n)*env.py(.|\n)*BrokenPipeError",
        ),
        ("cpu:a2-l1", "os.kill(os.getpid(), signal.SIGKILL)", r"Collector [01] of 2 was ended by SIGKILL"),
        (
            "cpu:a1-l1,env_processes=1",
            "raise OverflowError('it fell off')",
            r"Collector 0 of 1 failed:(.|\n)*An environment process failed:(.|\n)*env.py(.|\n)*OverflowError: it fell",
        ),
        (
            "cpu:a1-l1,env_processes=1",
            "os.kill(os.getpid(), signal.SIGKILL)",
            r"Collector 0 of 1 failed:(.|\n)*An environment process was ended by SIGKILL",
        ),
        (
            "cpu:a1-l1,env_processes=1,stall_timeout=10",
            "time.sleep(1000)",
            r"Collector 0 of 1 failed:(.|\n)*process has not answered for 10 s",
        ),
    ],
    ids=["raises", "kills-itself", "raises-in-subprocess", "kills-its-subprocess", "hangs-in-subprocess"],
)
def test_an_environment_that_fails(
    layout: str, fault: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env.py").write_text(ENV.format(fault=fault))
    experiment = cut(recipes.ppo_cartpole, env={"id": f"{tmp_path}/env.py:make", "adapter": "auto"}, scheme={"lag": 1})
    with pytest.raises(WorkerError, match=message):
        train(experiment, Layout.parse(layout), options(Path("run"), checkpoint_every=1))
    if "sleep" in fault:
        stack = r"An environment process .*, stack:(.|\n)*env.py\", line \d+ in step"
        assert re.search(stack, capfd.readouterr().err)


# ---------------------------------------------------------------------------- processes that are killed or stopped

ENDS = {
    "learner": r"Learner 0 of 1 was ended by SIGKILL",
    "collector": r"Collector \d of \d was ended by SIGKILL",
    "environment": r"Collector \d of \d failed:(.|\n)*An environment process was ended by SIGKILL",
}


@pytest.mark.parametrize("layout", ["inline", "processes:2"])
def test_a_run_that_never_began_leaves_no_folder(layout: str) -> None:
    fault = "import gymnasium\ndef make():\n    raise OSError('no licence')\n"
    Path("simulator.py").write_text(fault)
    experiment = cut(recipes.ppo_cartpole, env={"id": "simulator.py:make"}, rollout=8)
    with pytest.raises((OSError, WorkerError), match="no licence"):
        train(experiment, layout, options(Path("run")))
    assert not Path("run").exists(), "the same command can run again"


@pytest.mark.parametrize("attempt", range(KILLS))
@pytest.mark.parametrize("kind", ["main", *ENDS])
def test_killed_at_random_moments(
    kind: str, attempt: int, start: Callable[..., Child], undisturbed: Callable[[int], tuple[str, bytes]]
) -> None:
    draw = random.Random(f"{kind} {attempt}")
    child = start(*FLAGS, "--scheme.lag", "1", "--layout", LAYOUTS[attempt % 2])
    child.until(lambda: len(child.tree()[kind]) > 0, f"a process of the kind {kind}")
    if draw.random() < 0.4:
        time.sleep(draw.uniform(0.0, 3.0))  # while it starts, or soon after
    else:
        moment = draw.randint(1, 40)
        child.until(lambda: lines() >= moment, f"iteration {moment}")
        time.sleep(draw.uniform(0.0, 0.05))
    killed = time.monotonic()
    os.kill(draw.choice(child.tree()[kind]), signal.SIGKILL)
    code = child.wait()
    seconds = time.monotonic() - killed
    assert seconds < SOON, f"{seconds:.1f} s\n{child.output()}"
    if kind == "main":
        assert code == -signal.SIGKILL
    else:
        assert code == 1
        assert re.search(ENDS[kind], child.output()), child.output()
    assert lines() < ITERATIONS
    if Path("run/run.json").exists():  # else it was killed before there was anything to resume
        assert resumed_inline() == undisturbed(1)


@pytest.mark.real_processes
def test_an_environment_process_that_dies_while_nothing_is_asked_of_it(start: Callable[..., Child]) -> None:
    child = start(*FLAGS, "--layout", "cpu:a1-l1,env_processes=1,learner_delay=1000")
    child.until(lambda: len(child.tree()["environment"]) > 0, "an environment process")
    (environment,) = child.tree()["environment"]
    child.until(lambda: idle(environment), "the environments to wait for the learner, who sleeps")
    killed = time.monotonic()
    os.kill(environment, signal.SIGKILL)
    assert child.wait() == 1
    assert time.monotonic() - killed < SOON
    assert re.search(ENDS["environment"], child.output()), child.output()


def idle(process: int) -> bool:
    """Whether a process whose imports are under way or done has used no processor for a second."""

    def used() -> int:
        with contextlib.suppress(OSError):
            return sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
        return 0

    before = used()
    time.sleep(1.0)
    return before > 20 and used() == before


@pytest.mark.parametrize(
    ("layout", "lag"), [("cpu:a1-l1,env_processes=1,learner_delay=0.3", 1), ("cpu:a1-l2,jitter=0.2", 2)]
)
def test_ctrl_c_while_collectors_are_ahead(
    layout: str, lag: int, start: Callable[..., Child], undisturbed: Callable[[int], tuple[str, bytes]]
) -> None:
    child = start(*FLAGS, "--scheme.lag", str(lag), "--layout", layout)
    child.until(lambda: lines() >= 3, "some iterations")
    child.interrupt()
    assert child.wait() == 130
    last = checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints"))
    assert 3 <= last.iteration == lines() < ITERATIONS
    assert resumed_inline() == undisturbed(lag)
