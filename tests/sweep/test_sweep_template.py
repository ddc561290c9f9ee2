"""Processes of runs that a template forks: they are what new Pythons would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import until

from lockstep import recipes
from lockstep.config.options import RunOptions
from lockstep.sweep import Run, child
from lockstep.sweep.queue import Queue
from lockstep.sweep.slots import Process
from lockstep.sweep.template import Forked, Template

FACTS = """
import json, os, signal, sys, time

def make():
    facts = {
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "variables": dict(os.environ),
        "path": sys.path,
        "files": sorted(os.readlink(f"/proc/self/fd/{file}") for file in (0, 1, 2)),
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "handlers": [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGCHLD, signal.SIGUSR2)],
    }
    print(json.dumps(facts), flush=True)
    time.sleep(float(os.environ.get("SECONDS", "0")))
    raise ValueError("that was all")
"""
NAMES = ("first", "second")


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """Two runs whose environment tells what their process is like, and then fails."""
    (tmp_path / "facts.py").write_text(FACTS)
    base = recipes.ppo_cartpole().replace(**{"env.id": f"{tmp_path}/facts.py:make", "env.adapter": "gymnasium"})
    queue = Queue.make(tmp_path / "set")
    runs = [base.replace(seed=seed) for seed in (1, 2)]
    queue.add([Run(each, options=RunOptions(check_env=False), label=name) for each, name in zip(runs, NAMES)])
    return queue


@pytest.fixture
def template() -> Iterator[Template]:
    with Template() as template:
        yield template


def named(queue: Queue) -> list[str]:
    return [entry.name for entry in queue.entries()]


def told(queue: Queue, name: str) -> dict[str, Any]:
    """What a process has told about itself."""

    def lines() -> list[str]:
        log = queue.log(name)
        written = log.read_text().splitlines(keepends=True) if log.is_file() else []
        return [line for line in written if line.startswith("{") and line.endswith("\n")]  # a long line comes in parts

    until(lambda: bool(lines()), f"the output of {name}")
    return json.loads(lines()[-1])


def test_a_forked_process_is_like_a_new_one(queue: Queue, template: Template) -> None:
    core, environment = min(os.sched_getaffinity(0)), {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OWN": "1"}
    facts = []
    for start, name in zip((child.start, template.start), named(queue), strict=True):
        process: Process = start(queue, name, [core], environment)
        assert isinstance(process, Forked) == (start == template.start)
        assert process.wait() == process.poll() == process.returncode == 1
        outcome = queue.outcome(name)
        assert outcome is not None and outcome.state == "failed" and "that was all" in outcome.reason
        found = told(queue, name)
        facts.append({**found, "files": [file.replace(name, "NAME") for file in found["files"]]})
    new, forked = facts
    assert {name: value for name, value in forked.items() if value != new[name]} == {}
    assert new["parent"] == os.getpid() and new["session"] and new["cores"] == [core] and new["variables"]["OWN"] == "1"


def test_forked_processes_can_be_stopped_and_outlive_their_template(queue: Queue, template: Template) -> None:
    first, second = named(queue)
    slow = {**os.environ, "SECONDS": "600"}
    running = template.start(queue, first, [0], slow)
    told(queue, first)
    assert running.poll() is None
    assert template._process is not None
    template._process.kill()
    template._process.wait()
    other = template.start(queue, second, [0], slow)
    told(queue, second)
    assert running.poll() is None, "runs do not end with the template"
    running.kill()
    other.terminate()
    assert running.wait() == -signal.SIGKILL and other.wait() in child.STOPPED
    running.terminate()  # of a process that has ended


def test_a_template_that_cannot_begin_is_done_without(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_template.py").write_text("raise SystemExit('no template')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("lockstep.sweep.template._ENTRY", "broken_template:serve")
    with Template() as template:
        process: Process = template.start(queue, named(queue)[0], [0])
        assert isinstance(process, subprocess.Popen) and process.wait() == 1
    log = queue.log(named(queue)[0]).read_text()
    assert "no template" in log and "that was all" in log


@pytest.mark.real_processes
def test_a_template_and_its_processes_end_with_the_sweep(queue: Queue) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from lockstep.sweep.queue import Queue; "
        "from lockstep.sweep.template import Forked, Template; template = Template(); "
        "process = template.start(Queue(Path(sys.argv[1])), sys.argv[2], [0]); "
        "print(process._process, template._process.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(queue.folder), named(queue)[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "SECONDS": "600"}) as sweep:
        assert sweep.stdout is not None
        processes = sweep.stdout.readline().split()
        told(queue, named(queue)[0])
        sweep.kill()
    assert len(processes) == 2
    until(lambda: not any(alive(process) for process in processes), "both to end")


def alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
