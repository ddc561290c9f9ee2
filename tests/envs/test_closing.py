"""What environments do at the end ends nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs import EnvConfig, closing
from lockstep.envs.closing import close_all

ROOT = Path(__file__).parents[2]


class Standing(gymnasium.Wrapper):
    """An environment whose close() waits for ever."""

    def close(self) -> None:
        time.sleep(1000)


class Failing(Standing):
    def close(self) -> None:
        raise OSError("the simulator has gone")


class Closing(Standing):
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_PATIENCE", 0.05)
    monkeypatch.setattr(closing, "_LATER_PATIENCE", 0.05)
    monkeypatch.setattr(closing, "_patience", None)


def in_a_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [lambda call: call(), in_a_thread], ids=["main-thread", "another-thread"])
def test_a_close_that_stands_still_is_given_up_and_named(
    run: Callable[[Callable[[], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    env = gymnasium.make("CartPole-v1")
    last = Closing(env)
    run(lambda: close_all([Standing(gymnasium.wrappers.TimeLimit(env, 9)), Failing(env), Standing(env), last]))
    error = capsys.readouterr().err
    assert error.count("close() of the environment Standing") == 1
    assert "the simulator has gone" in error and last.closed


def test_the_place_is_shown_where_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    close_all([Standing(gymnasium.make("CartPole-v1"))])
    assert "time.sleep(1000)" in capsys.readouterr().err


USER = """
import gymnasium
import pettingzoo
from gymnasium import spaces

class Single(gymnasium.Env):
    "Notes which are open. The third one cannot be made."
    OPEN = []
    action_space = spaces.Discrete(2)

    def __init__(self, space=None):
        if len(self.OPEN) == 2:
            raise OSError("no license is left")
        self.observation_space = space or spaces.Discrete(2)
        self.OPEN.append(self)

    def close(self):
        self.OPEN.remove(self)

class Match(pettingzoo.ParallelEnv):
    OPEN, metadata = [], {"name": "match"}
    possible_agents = ["a", "b"]

    def __init__(self):
        self.OPEN.append(self)

    def observation_space(self, agent):
        return spaces.Discrete(2 + len(self.OPEN) * (agent == "b"))

    action_space = observation_space

    def close(self):
        self.OPEN.remove(self)

class Batch:
    OPEN = []
    observation_space, action_space = spaces.Text(3), spaces.Discrete(2)

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.OPEN.append(self)

    def reset(self, rows, seeds): ...

    def step(self, actions): ...

    def close(self):
        self.OPEN.remove(self)
"""


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("Single", {}, "no license"),
        ("Single", {"space": spaces.Text(3)}, "Text"),
        ("pettingzoo/Match", {}, "differ in their observation"),
        ("Batch", {}, "Text"),
    ],
)
def test_what_was_made_before_an_error_is_closed(name: str, options: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(USER)
    prefix, _, name = name.rpartition("/")
    named = f"{tmp_path}/counted.py:{name}"
    config = EnvConfig(f"{prefix}/{named}" if prefix else named, options=options)
    with pytest.raises((OSError, SettingsError), match=told):
        envs.make(config, seed=1, first_index=0, num_envs=2 if options or prefix else 4)
    assert load_object(named).OPEN == []


@pytest.mark.slow
def test_a_close_that_stands_in_native_code_ends_the_process() -> None:
    code = (
        "import ctypes\n"
        "from lockstep.envs import closing\n"
        "closing._PATIENCE = closing._GRACE = 0.1\n"
        "class Env:\n"
        "    def close(self):\n"
        "        mutex = ctypes.create_string_buffer(64)\n"
        "        for _ in range(2):\n"
        "            ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
        "closing.close_all([Env()])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ran.returncode == 1 and "close() of the environment Env" in ran.stderr
