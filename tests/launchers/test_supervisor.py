"""A run that fails says why and ends; it neither waits forever nor leaves anything behind."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from children import Child, hold
from sentences import says
from tiny import cut, options

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.distributed.groups import Group, meeting_point
from lockstep.launchers import watching
from lockstep.launchers.launch import resume, train
from lockstep.launchers.processes import NoOtherGroups, _first_cause, _watch
from lockstep.system import children, supervision
from lockstep.system.machine import cores
from lockstep.system.supervision import WorkerError
from lockstep.training.context import RunStatus

ROOT = Path(__file__).parents[2]
ENV = """
import os, signal, time
from pathlib import Path
import gymnasium

HERE = Path(__file__).parent

class Env(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        {step}
        return super().step(action)

def make():
    {make}
    return Env(gymnasium.make("CartPole-v1"))

def first():
    "Whether this is the first call in any process: one environment of one shard."
    try:
        (HERE / "once").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes an environment that misbehaves in its constructor or its step, and gives its id."""
    monkeypatch.chdir(tmp_path)

    def write(step: str = "pass", make: str = "pass") -> str:
        (tmp_path / "env.py").write_text(ENV.format(step=step, make=make))
        return f"{tmp_path}/env.py:make"

    return write


def run(env_id: str, layout: str = "processes:2") -> None:
    experiment = cut(recipes.ppo_cartpole, env={"id": env_id, "adapter": "auto"})
    train(experiment, Layout.parse(layout), options(Path("run"), checkpoint_every=1))


def test_a_constructor_that_raises(env: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    env_id = env(make="raise OSError('the simulator has no licence')")
    command = ["train", "ppo-cartpole", "--env.id", env_id, "--layout", "processes:2", "--run", "run"]
    assert main([*command, "--display", "none"]) == 1
    error = capfd.readouterr().err
    assert "OSError: the simulator has no licence" in error and "env.py" in error


def test_one_environment_that_raises(env: Callable[..., str]) -> None:
    env_id = env("if self.steps == 13 and first(): raise OverflowError('the cart fell off')")
    with pytest.raises(WorkerError, match=r"Worker [01] of 2 failed:(.|\n)*OverflowError: the cart fell off"):
        run(env_id)
    assert resume("run", Layout()).iterations == 3, "first() is false from now on"


def test_a_worker_that_is_killed(env: Callable[..., str]) -> None:
    env_id = env("if self.steps == 13 and first(): os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(WorkerError, match=r"Worker [01] of 2 .*SIGKILL"):
        run(env_id)
    damaged = resume("run", Layout())
    train(cut(recipes.ppo_cartpole, env={"id": env_id}), options=options(Path("other")))
    assert damaged.iterations == 3
    assert Path("run/ledger.jsonl").read_bytes() == Path("other/ledger.jsonl").read_bytes()


def test_a_worker_that_is_killed_before_it_has_read_what_to_do() -> None:
    """Then its end of the pipe is not closed but reset."""
    ours, theirs = multiprocessing.Pipe()
    process = children.start(hold, (theirs,), "lockstep-test")
    theirs.close()
    ours.send("what to do")
    process.kill()
    with pytest.raises(WorkerError, match=r"Worker 0 of 1 .*SIGKILL"):
        _watch(["Worker 0 of 1"], [process], [ours], RunStatus(), Layout(), NoOtherGroups())


def test_a_worker_that_hangs(env: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError, match=r"progress for 10 seconds"):
        run(env("if self.steps == 13 and first(): time.sleep(1000)"), "processes:2,stall_timeout=10")
    assert re.search(r"Worker [01] of 2 \(process \d+\).*:\n.*\n.*env.py\", line \d+ in step", capfd.readouterr().err)


@pytest.mark.parametrize("layout", ["inline", "processes:2", "cpu:a1-l1,env_processes=1"])
def test_a_second_ctrl_c_stops_at_once(layout: str, env: Callable[..., str], start: Callable[..., Child]) -> None:
    env_id = env("(HERE / 'stepping').touch(); time.sleep(0.3)")
    flags = ["--env.id", env_id, "--layout", layout, "--run", "run", "--display", "plain", "--algorithm.rollout", "64"]
    flags += ["--no-check-env"]
    child = start("train", "ppo-cartpole", *flags)
    child.until(lambda: Path("stepping").exists(), "the first step")
    child.interrupt()
    child.until(lambda: "a further Ctrl-C stops at once" in child.output(), "the answer to the first Ctrl-C")
    time.sleep(2 * children._CTRL_C_ECHO)
    child.interrupt()
    assert child.wait() == 130
    assert not list(Path("run/checkpoints").iterdir()), "the iteration, which takes minutes, was not waited for"


@pytest.mark.parametrize("moment", ["starting", "stepping"])
def test_workers_end_with_their_main_process(moment: str, env: Callable[..., str], start: Callable[..., Child]) -> None:
    env_id = env("(HERE / 'stepping').touch(); time.sleep(0.3)")
    child = start(
        *("train", "ppo-cartpole", "--env.id", env_id, "--layout", "processes:2", "--run", "run", "--no-check-env")
    )
    if moment == "starting":
        child.until(lambda: len(child.members()) >= 3, "worker processes")
    else:
        child.until(lambda: Path("stepping").exists(), "the first step")
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert Path("stepping").exists() == (moment == "stepping"), "no worker began to work without its main process"


def test_a_mistake_that_explains_the_other_failures_is_told() -> None:
    (mine, told), (theirs, _) = multiprocessing.Pipe(), multiprocessing.Pipe()
    told.send(("mistake", SettingsError("env.id=X needs a library")))
    alive = SimpleNamespace(is_alive=lambda: True, sentinel=theirs)
    with pytest.raises(SettingsError, match=r"env\.id=X needs a library"):
        _first_cause(
            {1: "failed: Connection closed by peer"}, ["a", "b"], [alive] * 2, [mine, theirs], {}, NoOtherGroups()
        )


def test_waiting_for_others_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    failed: list[str] = []

    def watch(waiting: bool) -> None:
        left, group, over, begun = iter(range(400)), Group(), threading.Event(), threading.Event()
        group.waiting = waiting

        def wait(_: float) -> bool:
            begun.wait(60)  # on a busy machine, the thread that watches may be ahead of the one that starts it
            if next(left, None) is not None:
                return False
            over.set()
            return True

        event = SimpleNamespace(wait=wait, set=lambda: None)
        of_threads = {**vars(threading), "Event": lambda: event}
        monkeypatch.setattr(watching, "threading", SimpleNamespace(**of_threads))
        with watching.watched(failed.append, RunStatus(), 300.0, group):
            begun.set()
            assert over.wait(60)

    watch(True)
    assert failed == []
    watch(False)
    assert "progress for 300 seconds" in failed[0] and "test_waiting_for_others" in failed[0]


def test_a_layout_of_many_processes_raises_the_limit_of_open_files() -> None:
    makes_ends = """
import multiprocessing, resource
from lockstep.config.layout import Layout
from lockstep.launchers.processes import _worker_specs

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
specs = _worker_specs(Layout.parse("cpu:a32-l32"), 32, multiprocessing.get_context("spawn"))
assert len(specs) == 64
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = subprocess.run([sys.executable, "-c", makes_ends], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2048, "a pipe for each pair alone has as many ends"


def test_a_meeting_that_hangs_in_gloo_ends() -> None:
    """As where one ends between saying that it is here and connecting."""
    code = (
        "import os, time\n"
        "from datetime import timedelta\n"
        "from lockstep import recipes\n"
        "from lockstep.config.layout import Layout\n"
        "from lockstep.launchers import torchrun\n"
        "from lockstep.system import supervision\n"
        "supervision._STARTUP, torchrun.MEETING = 0.5, timedelta(seconds=0.5)\n"
        "torchrun.GlooGroup = lambda *_: time.sleep(600)\n"
        "os.environ |= {'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2'}\n"
        "torchrun.run_torchrun(None, type('Job', (), {'layout': Layout('torchrun'), \n"
        "    'experiment': recipes.ppo_cartpole()}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 1 and says(done.stderr, "Process 1 of 2: ", "others"), done.stderr


def test_pinned_processes_know_the_cores_of_the_whole_run(tmp_path: Path) -> None:
    """Or each would take its own share for the machine, and call the layout a waste."""
    (tmp_path / "env.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "from lockstep.system.machine import cores, cores_of_the_run\n"
        "class Seeing(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        seen = f'{cores()} {cores_of_the_run()}'\n"
        "        Path(__file__).with_name(f'seen-{os.getpid()}').write_text(seen)\n"
        "        return super().step(action)\n"
    )
    experiment = cut(recipes.ppo_cartpole, env={"id": f"{tmp_path}/env.py:Seeing", "adapter": "gymnasium"})
    train(experiment, "processes:2,pin=1", options(tmp_path / "run"))
    seen = [tuple(map(int, path.read_text().split())) for path in tmp_path.glob("seen-*")]
    assert len(seen) == 2 and all(whole == cores() for _, whole in seen)
    assert cores() < 2 or all(own < whole for own, whole in seen)


def test_collectors_with_their_threads_and_programs_yield_to_learners(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "import os, subprocess, threading\n"
        "from pathlib import Path\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "SEEN = Path(__file__).with_name('collector')\n"
        "class Seeing(CartPoleEnv):\n"
        "    def reset(self, **given):\n"
        "        if not SEEN.exists():\n"
        "            found = [os.getpriority(os.PRIO_PROCESS, 0)]\n"
        "            thread = threading.Thread(target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)))\n"
        "            thread.start(), thread.join()\n"
        "            found.append(int(subprocess.check_output(['nice'])))\n"
        "            SEEN.write_text(' '.join(map(str, found)))\n"
        "        return super().reset(**given)\n"
    )
    (tmp_path / "watch.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "def learner(progress):\n"
        "    Path(__file__).with_name('learner').write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))\n"
    )
    experiment = cut(recipes.ppo_cartpole, env={"id": f"{tmp_path}/env.py:Seeing", "adapter": "gymnasium"})
    expected = train(experiment, "inline", options(tmp_path / "inline")).digest
    (tmp_path / "collector").unlink()
    called = dataclasses.replace(options(tmp_path / "run"), callback=f"{tmp_path}/watch.py:learner")
    assert train(experiment, "cpu:a1-l1,nice=3", called).digest == expected
    own = os.getpriority(os.PRIO_PROCESS, 0)
    above = min(own + 3, 19)
    assert (tmp_path / "collector").read_text() == f"{above} {above} {above}", "of its thread and of a program, too"
    assert (tmp_path / "learner").read_text() == str(own)


@pytest.mark.parametrize("agent", [False, True])
def test_processes_on_several_hosts_do_not_wait_for_ever_for_one_that_ended_before(
    agent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.distributed.groups.MEETING", timedelta(seconds=1))
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    store, (_, known) = meeting_point("localhost")  # as torchrun's own process makes it
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(known if agent else port),
    }
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": str(agent)}
    for name, value in {**variables, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorkerError, match=r"Process 0 of 2 .*others: .*ended before"):
        train(recipes.ppo_cartpole(), Layout("torchrun"), options(tmp_path / "run"))
    del store
