"""What was compiled is loaded again until a source changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def run(folder: Path) -> list[int]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run(
        [sys.executable, "main.py"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [int(word) for word in found.stdout.split()]


def test_a_change_of_what_a_function_calls_or_reads_is_noticed(tmp_path: Path) -> None:
    for name, text in (("helper.py", HELPER), ("limits.py", LIMITS), ("main.py", MAIN)):
        (tmp_path / name).write_text(text)
    assert run(tmp_path) == [2, 10, 0]
    assert run(tmp_path) == [2, 10, 1], "loaded"
    (tmp_path / "helper.py").write_text(HELPER.replace("x + 1", "x + 3"))
    assert run(tmp_path) == [4, 10, 0]
    (tmp_path / "limits.py").write_text("LIMIT = 20\n")
    assert run(tmp_path) == [4, 20, 0]
