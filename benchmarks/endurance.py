"""Whether a long run stays as it began: memory, shared memory, file descriptors and speed over 10 million samples.

    python benchmarks/endurance.py [--layout cpu:a1-l1 --scheme.lag 1 …]

Trains CartPole from EnvPool, which gives many samples, rollouts and checkpoints in little time; further flags go to
`lockstep train`. All processes of the run are looked at once a second. A change is the median of the last tenth over
that of the second tenth (in the first one caches fill).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

FLAGS = (
    "ppo-cartpole --env.adapter envpool --env.num-envs 32 --algorithm.rollout 32 --algorithm.epochs 1 "
    "--algorithm.minibatches 1 --scheme.shards 2 --scheme.acting-batch 16 --total-steps 10M --checkpoint-every 500 "
    "--display plain"
)


def look(processes: Iterable[int]) -> tuple[float, float, int]:
    """MB of memory (proportional, so that shared pages count once), MB of it shared, and open files of processes."""
    memory = shared = files = 0
    for process in processes:
        folder = Path(f"/proc/{process}")
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            memory += sizes["Pss"]
            shared += sizes["Pss_Shmem"]
            files += len(list((folder / "fd").iterdir()))
        except (OSError, KeyError):  # it has ended
            continue
    return memory / 1024, shared / 1024, files


def of_group(group: int) -> Iterator[int]:
    """The processes of a group."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if process.name.isdigit() and os.getpgid(int(process.name)) == group:
                yield int(process.name)


def table(names: Iterable[str], looks: Iterable[tuple[float, ...]]) -> str:
    """A row for each column of looks."""
    rows = ["| | second tenth | last tenth | change |", "|---|---|---|---|"]
    for name, values in zip(names, zip(*looks, strict=True), strict=True):
        tenth = len(values) // 10
        early, late = statistics.median(values[tenth : 2 * tenth]), statistics.median(values[-tenth:])
        rows.append(f"| {name} | {early:.0f} | {late:.0f} | {f'{100 * (late / early - 1):+.1f}%' if early else '–'} |")
    return "\n".join(rows)


def late_over_early(values: list[float]) -> float:
    tenth = len(values) // 10
    return statistics.median(values[-tenth:]) / statistics.median(values[tenth : 2 * tenth])


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "lockstep", "train", *FLAGS.split(), "--run", str(run), *sys.argv[1:]]
        looks: list[tuple[float, float, int]] = []
        with open(Path(folder) / "output", "w+") as output:
            child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            while child.poll() is None:
                looks.append(look(of_group(child.pid)))
                time.sleep(1.0)
            output.seek(0)
            if child.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{output.read()[-3000:]}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step = max(1, len(lines) // 400)
    marks = [(line["samples"], line["seconds"]) for line in lines[::step]]
    rates = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(marks)]
    print(f"{lines[-1]['samples']:,} samples in {len(lines):,} iterations, {len(looks)} looks at all processes\n")
    print(table(("memory, MB", "shared memory, MB", "open files"), looks[:-1]))
    print(f"| samples a second | | | {100 * (late_over_early(rates) - 1):+.1f}% |")


if __name__ == "__main__":
    main()
