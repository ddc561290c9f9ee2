"""What was compiled is loaded again until a source changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.system.machine import user_cache

HELPER = "from numba import njit\n@njit\ndef change(x):\n    return x + 1\n"
LIMITS = "LIMIT = 10\n"
MAIN = """
import helper
from limits import LIMIT
from numba import njit
from lockstep.kernels.cache import compiled

change = None

def plain(x):
    return min(change(x), LIMIT)

function = compiled(plain, change=helper.change)
print(function(1), function(100), sum(function.stats.cache_hits.values()))
"""

EDITING = """
from pathlib import Path
import helper
from lockstep.kernels.cache import compiled

file = Path("helper.py")
file.write_text(file.read_text().replace("x + 1", "x + 3"))
function = compiled(lambda x: helper.change(x))
print(function(1), sum(function.stats.cache_hits.values()))
"""

TABLES = """
import numpy as np
LOW, HIGH, KIND, TYPE = 1, 2, "slow", np.dtype(np.float32)
TURNS = np.arange(2000.0), np.arange(2000.0)
"""
READING = """
import numpy as np
import games.tables
from games import tables as both
from games.tables import KIND, TURNS, TYPE
from lockstep.kernels.cache import compiled

functions = (
    compiled(lambda: games.tables.LOW),
    compiled(lambda: both.LOW + 10 * both.HIGH),
    compiled(lambda: 1 if KIND == "slow" else 2),
    compiled(lambda: int(TURNS[0][1000])),
    compiled(lambda: np.zeros(1, TYPE).itemsize),
)
print(*(each() for each in functions), sum(sum(each.stats.cache_hits.values()) for each in functions))
"""

APART = """
from numba import intp
from lockstep.kernels.cache import apart, compiled

@apart(intp)
def inner(x):
    return x + 1

@compiled
def outer(x):
    return 10 * inner(x)

print(outer(1), sum(outer.stats.cache_hits.values()), sum(inner.stats.cache_hits.values()))
"""

OF_A_FILE = """
from lockstep.config.user_code import load_object

function = load_object("users.py:function")
print(function(1), sum(function.stats.cache_hits.values()))
"""
USERS = "from lockstep.kernels.cache import compiled\nfunction = compiled(lambda x: x + 1)\n"

PAIR = "from typing import NamedTuple\nclass Pair(NamedTuple):\n    first: int\n    second: int\n"
TUPLES = """
from lockstep.kernels.cache import compiled
from pair import Pair

take = compiled(lambda pair: pair.first)
make = compiled(lambda: Pair(1, 2))
print(take(Pair(1, 2)), make().first, *(sum(function.stats.cache_hits.values()) for function in (take, make)))
"""

TOGETHER = """
import sys, time
from pathlib import Path
from numba import njit
from numba.core import compiler
from lockstep.kernels.cache import compiled

begun, other = Path("begun"), Path("other")

def wait(path):
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)

def slowly(*args, compile=compiler.compile_extra, **kwargs):
    begun.touch()
    wait(other)
    time.sleep(1)  # for the other process, which has nothing to do but to call the function
    return compile(*args, **kwargs)

function = compiled(lambda x: x + 1)
njit(lambda x: x)(1)  # what Numba does once takes longer than a second
if sys.argv[1] == "first":
    compiler.compile_extra = slowly
else:
    wait(begun)
    other.touch()
print(function(1), sum(function.stats.cache_hits.values()))
"""


def run(folder: Path, cache: Path | None = None) -> list[int]:
    return ended(start(folder, cache=cache))


def start(folder: Path, *words: str, cache: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache or folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "main.py", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> list[int]:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [int(word) for word in text.split()]


def test_a_second_process_waits_for_the_one_that_compiles(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(TOGETHER)
    first, second = start(tmp_path, "first"), start(tmp_path, "second")
    assert ended(first) == [2, 0]
    assert ended(second) == [2, 1], "loaded"


def test_a_function_from_the_cache_jumps_to_what_was_compiled_apart(tmp_path: Path) -> None:
    main = tmp_path / "main.py"
    main.write_text(APART)
    assert run(tmp_path) == [20, 0, 0]
    assert run(tmp_path) == [20, 1, 1], "loaded"
    main.write_text(APART.replace("x + 1", "x + 3"))
    assert run(tmp_path) == [40, 0, 0]


def test_a_change_of_what_a_function_calls_or_reads_is_noticed(tmp_path: Path) -> None:
    for name, text in (("helper.py", HELPER), ("limits.py", LIMITS), ("main.py", MAIN)):
        (tmp_path / name).write_text(text)
    assert run(tmp_path) == [2, 10, 0]
    assert run(tmp_path) == [2, 10, 1], "loaded"
    (tmp_path / "helper.py").write_text(HELPER.replace("x + 1", "x + 3"))
    assert run(tmp_path) == [4, 10, 0]
    (tmp_path / "limits.py").write_text("LIMIT = 20\n")
    assert run(tmp_path) == [4, 20, 0]


def test_a_change_of_what_a_function_reads_from_a_package_is_noticed(tmp_path: Path) -> None:
    tables = tmp_path / "games/tables.py"
    tables.parent.mkdir()
    (tmp_path / "main.py").write_text(READING)
    tables.write_text(TABLES)
    assert run(tmp_path) == [1, 21, 1, 1000, 4, 0]
    assert run(tmp_path) == [1, 21, 1, 1000, 4, 5], "loaded"
    changed = TABLES.replace("LOW, HIGH", "HIGH, LOW").replace("slow", "fast").replace("np.float32", "np.float64")
    tables.write_text(f"{changed}TURNS[0][1000] = 7\n")
    assert run(tmp_path) == [2, 12, 2, 7, 8, 0]


def test_a_change_between_loading_a_file_and_compiling_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(EDITING)
    (tmp_path / "helper.py").write_text(HELPER)
    assert run(tmp_path) == [2, 0]
    assert run(tmp_path) == [4, 0]


def test_copies_of_the_same_sources_share_what_is_compiled(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        for file, text in (("helper.py", HELPER), ("limits.py", LIMITS), ("main.py", MAIN)):
            (tmp_path / name / file).write_text(text)
    assert run(tmp_path / "one", tmp_path / "cache") == [2, 10, 0]
    assert run(tmp_path / "other", tmp_path / "cache") == [2, 10, 1], "loaded"


def test_copies_of_a_users_file_do_not_need_each_other(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "main.py").write_text(OF_A_FILE)
        (tmp_path / name / "users.py").write_text(USERS)
        assert run(tmp_path / name, tmp_path / "cache") == [2, 0], "modules of other names"
    assert run(tmp_path / "one", tmp_path / "cache") == [2, 1], "loaded"


def test_a_change_of_a_named_tuple_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(TUPLES)
    (tmp_path / "pair.py").write_text(PAIR)
    assert run(tmp_path) == [1, 1, 0, 0]
    assert run(tmp_path) == [1, 1, 1, 1], "loaded"
    (tmp_path / "pair.py").write_text(PAIR.replace("first", "third").replace("second", "first"))
    assert run(tmp_path) == [2, 2, 0, 0]


def test_what_a_file_held_that_cannot_be_read_is_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(APART)
    assert run(tmp_path) == [20, 0, 0]
    for name, size in (("*inner*.nbi", 150), ("*outer*.nbc", 0)):
        (damaged,) = (tmp_path / "cache").glob(name)
        os.truncate(damaged, size)
    assert run(tmp_path) == [20, 0, 0]
    assert run(tmp_path) == [20, 1, 1], "loaded"
    (index,) = (tmp_path / "cache").glob("*inner*.nbi")
    index.unlink()
    index.mkdir()  # which can be neither read nor removed
    assert run(tmp_path) == [20, 1, 0]


def test_without_a_folder_that_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(APART)
    for _ in range(2):
        assert run(tmp_path, Path(os.devnull) / "cache") == [20, 0, 0]


def test_the_cache_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_cache() == tmp_path / "home/.cache/lockstep"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, str]().__getitem__)
    with pytest.raises(OSError):
        user_cache().mkdir(parents=True)
