"""What the scripts share that run in a peer's own virtual environment: they cannot import lockstep.

Each is started as `python SCRIPT TASK.json ANSWER.json`: what to measure (see other_systems.task), and where the
rate goes.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_TASK, _ANSWER = (Path(text) for text in sys.argv[1:3])  # read now, since a script may change its arguments


class Meter:
    """Samples a second over whole iterations, after a warm-up of at least one."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._made = time.perf_counter()
        self._begin: tuple[float, int] | None = None

    def mark(self, samples: int) -> bool:
        """An iteration has ended, `samples` so far. Whether enough has been measured: the answer is written then."""
        now = time.perf_counter()
        if self._begin is None:
            if now - self._made >= self._task["warmup"]:
                self._begin = now, samples
            return False
        seconds, counted = now - self._begin[0], samples - self._begin[1]
        if seconds < self._task["seconds"] or not counted:
            return False
        answer = {"samples_per_second": counted / seconds, "samples": counted, "seconds": seconds}
        answer["versions"] = {name: metadata.version(name) for name in self._task["packages"]}
        _ANSWER.write_text(json.dumps(answer), encoding="utf-8")
        return True


def read_task() -> dict[str, Any]:
    """The task that this script was started for."""
    return json.loads(_TASK.read_text(encoding="utf-8"))


def use_threads(count: int) -> None:
    """Have torch compute in so many threads."""
    import torch

    torch.set_num_threads(count)


def end_with(parent: int) -> None:
    """End this process soon after the one that started it, however that ended.

    The kernel's own signal for this follows the thread that started a process, and Sample Factory starts its workers in
    threads that end.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_pool(env: dict[str, Any], num_envs: int, threads: int) -> Any:
    """An EnvPool of the task's environments, with gymnasium's interface."""
    import envpool

    return envpool.make_gymnasium(
        env["id"], num_envs=num_envs, batch_size=num_envs, num_threads=threads, **env["options"]
    )
