"""Whether a long run on Ray stays as it began: what the object store and the processes hold while a learner is slow.

    python benchmarks/soak.py [--lag async] [--minutes 30]          curves and a table in benchmarks/soak/
    python benchmarks/soak.py --lag 2 --minutes 2 --out FOLDER

Two collectors play Breakout faster than a learner learns, which sleeps 0.3 seconds in each iteration. The cluster is
on this machine, with an object store of 200 MB. A change is the median of the last tenth over that of the second tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as with other layouts

import ray
from endurance import late_over_early, table
from ray_faults import descendants

from lockstep import recipes
from lockstep.algorithms import IMPALAConfig
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train

LAYOUT = "ray:a2-l1,learner_delay=0.3"
NAMES = {
    "store": "object store, MB",
    "memory": "memory of the run's processes, MB",
    "conductor": "memory of the main process, MB",
    "cluster": "memory of Ray's own processes, MB",
    "shared": "shared memory, MB",
    "files": "open files",
    "threads": "threads",
    "processes": "processes",
    "logs": "Ray's logs, MB",
}
"""What is looked at."""
_EVERY = 2.0
"""Seconds between two looks."""


def experiment(lag: Any) -> Experiment:
    """14.9 MB of images an iteration."""
    atari = recipes.ppo_atari()
    ppo = dataclasses.replace(atari.algorithm, rollout=32, epochs=1, minibatches=4)
    return atari.replace(
        env=dataclasses.replace(atari.env, num_envs=16),
        algorithm=IMPALAConfig(rollout=32, minibatches=1) if lag == "async" else ppo,
        scheme=dataclasses.replace(atari.scheme, shards=4, lag=lag, acting_batch=0),
        total_steps=10**9,
    )


def kinds() -> dict[str, list[int]]:
    """The processes of the run, this one, and those of Ray."""
    found = {"memory": [], "conductor": [os.getpid()], "cluster": []}
    for process in descendants(os.getpid())[1:]:
        with contextlib.suppress(OSError):  # it has ended
            actor = Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::Ray")
            found["memory" if actor else "cluster"].append(process)
    return found


def held(processes: list[int]) -> dict[str, float]:
    """What processes hold: MB of own and of shared memory, open files and threads. Pages of libraries do
    not count: how many of them each process is charged for depends on other programs that use them."""
    found: dict[str, float] = dict.fromkeys(("own", "shared", "files", "threads"), 0.0)
    for process in processes:
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):  # it has ended
            lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            found["own"] += sizes["Pss_Anon"] / 1024
            found["shared"] += sizes["Pss_Shmem"] / 1024
            found["files"] += len(list((folder / "fd").iterdir()))
            found["threads"] += len(list((folder / "task").iterdir()))
    return found


def looked(store: float, logs: Path) -> dict[str, float]:
    """One look at everything. The object store is shared memory, too."""
    groups = kinds()
    looks = {kind: held(processes) for kind, processes in groups.items()}
    sizes = 0
    for path in logs.rglob("*"):
        with contextlib.suppress(OSError):
            sizes += path.stat().st_size if path.is_file() else 0
    return {
        **{kind: each["own"] for kind, each in looks.items()},
        **{name: sum(each[name] for each in looks.values()) for name in ("shared", "files", "threads")},
        "store": (store - ray.available_resources().get("object_store_memory", 0.0)) / 1e6,
        "processes": sum(map(len, groups.values())),
        "logs": sizes / 1e6,
    }


def soak(lag: Any, minutes: float) -> dict[str, list[float]]:
    """Train for so many minutes. Returns columns: when, in seconds, and what was there."""
    columns: dict[str, list[float]] = {"seconds": [], "iterations": [], **{name: [] for name in NAMES}}
    done = threading.Event()
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        ray.init(
            "local",
            num_cpus=4,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=f"{folder}/ray",
        )
        store, begin = ray.cluster_resources()["object_store_memory"], time.monotonic()
        ledger = Path(folder, "run", "ledger.jsonl")

        def look_on() -> None:
            told = 0.0
            while not done.wait(_EVERY):
                now, lines = time.monotonic() - begin, ledger.read_bytes().count(b"\n") if ledger.exists() else 0
                if lines > 2:
                    found = {"seconds": now, "iterations": lines - 1, **looked(store, Path(folder, "ray"))}
                    for name, values in columns.items():
                        values.append(round(found[name], 2))
                    if now > told + 60:
                        told = now
                        print(json.dumps({name: round(value, 1) for name, value in found.items()}), flush=True)
                if now > 60 * minutes:
                    os.kill(os.getpid(), signal.SIGTERM)  # the run ends as with any user
                    return

        watcher = threading.Thread(target=look_on)
        watcher.start()
        options = RunOptions(run=f"{folder}/run", checkpoint_every=500, display="none", tensorboard=False)
        try:
            train(experiment(lag), Layout.parse(LAYOUT), options)
        finally:
            done.set()
            watcher.join()
            ray.shutdown()
    return columns


def report(columns: dict[str, list[float]]) -> str:
    """The table."""
    looks = zip(*(columns[name] for name in NAMES), strict=True)
    steps = [b - a for a, b in zip(columns["iterations"], columns["iterations"][30:], strict=False)]
    tenth = max(1, len(columns["store"]) // 10)
    parts = [max(columns["store"][start : start + tenth]) for start in range(0, len(columns["store"]), tenth)]
    return "\n".join(
        [
            f"{columns['iterations'][-1]:.0f} iterations in {columns['seconds'][-1] / 60:.1f} minutes\n",
            table(NAMES.values(), looks),
            *[f"| iterations a minute | | | {100 * (late_over_early(steps) - 1):+.1f}% |"] * (len(steps) >= 10),
            f"\nMost MB in the object store, by tenths: {' '.join(f'{part:.1f}' for part in parts)}",
        ]
    )


def draw(columns: dict[str, list[float]], path: Path) -> None:
    """A curve for everything that was looked at."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(3, 3, figsize=(11, 6.5), sharex=True, layout="constrained")
    minutes = [each / 60 for each in columns["seconds"]]
    for (name, title), axes in zip(NAMES.items(), grid.flat, strict=True):
        axes.plot(minutes, columns[name], linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("minutes")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lag", choices=["2", "async"], default="async")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "soak", help="folder of the results")
    given = parser.parse_args()
    columns = soak("async" if given.lag == "async" else int(given.lag), given.minutes)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "soak.json").write_text(json.dumps(columns) + "\n")
    draw(columns, given.out / "soak.png")
    (given.out / "table.md").write_text(report(columns) + "\n")
    print(report(columns))


if __name__ == "__main__":
    main()
