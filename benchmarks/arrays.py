"""What an array tuple costs per call, beside tensordict: `python benchmarks/arrays.py [--markdown FILE]`.

Needs tensordict (`pip install tensordict`), which lockstep itself does not use. Both hold the same twelve tensors,
those of one shard's rollout, and run in turns within one process; small tensors, so that the call dominates the copy.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

from lockstep.core.arrays import ArrayTuple

T, B = 16, 8


class RolloutBuffer(ArrayTuple):
    obs: Any
    start: Tensor
    action: Tensor
    reward: Tensor
    prev_action: Tensor
    prev_reward: Tensor
    log_prob: Tensor
    value: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor


def fields() -> dict[str, Any]:
    """Twelve tensors [T, B, ...], two of them in a dict."""
    tensors: dict[str, Any] = {name: torch.zeros(T, B) for name in RolloutBuffer._fields[1:]}
    return {"obs": {"image": torch.zeros(T, B, 4, dtype=torch.uint8), "vector": torch.zeros(T, B, 3)}, **tensors}


def cases(tensordict: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """The same operation on an array tuple and on a TensorDict."""
    values = fields()
    ours = RolloutBuffer(**values)
    theirs = tensordict.TensorDict(values, batch_size=[T, B])
    rows = torch.tensor([1, 5, 2, 9])
    TensorDict = tensordict.TensorDict

    def identity(x: Tensor) -> Tensor:
        return x

    return {
        "read `x[t]`": (lambda: ours[3], lambda: theirs[3]),
        "read `x[t:u]`": (lambda: ours[4:8], lambda: theirs[4:8]),
        "read `x[:, i]`": (lambda: ours[:, 2], lambda: theirs[:, 2]),
        "read `x[rows]`": (lambda: ours[rows], lambda: theirs[rows]),
        "construct": (lambda: RolloutBuffer(**values), lambda: TensorDict(values, batch_size=[T, B])),
        "get a field": (lambda: ours.reward, lambda: theirs["reward"]),
        "map": (lambda: ours.map(identity), lambda: theirs.apply(identity)),
    }


def measure(pair: tuple[Callable[[], Any], Callable[[], Any]], rounds: int) -> tuple[float, float, float]:
    """Median CPU microseconds per call of both, and the median of the ratios of neighboring rounds."""
    calls = max(1, int(1e-3 / min(timeit.repeat(pair[1], number=20, repeat=3)) * 20))
    times = [
        tuple(timeit.timeit(fn, timer=process_time, number=calls) / calls * 1e6 for fn in pair) for _ in range(rounds)
    ]
    ours, theirs = zip(*times, strict=True)
    return (
        statistics.median(ours),
        statistics.median(theirs),
        statistics.median(b / a for a, b in times),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=301, help="interleaved rounds per row")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    try:
        import tensordict  # pyright: ignore[reportMissingImports]
    except ImportError:
        print(
            "This benchmark compares with tensordict, which is not installed: pip install tensordict", file=sys.stderr
        )
        return 2

    torch.set_num_threads(1)
    lines = ["| operation | ArrayTuple, µs | TensorDict, µs | TensorDict / ArrayTuple |", "|---|---:|---:|---:|"]
    ratios = {}
    for name, pair in cases(tensordict).items():
        ours, theirs, ratios[name] = measure(pair, args.rounds)
        lines.append(f"| {name} | {ours:.2f} | {theirs:.2f} | {ratios[name]:.2f} |")
    slower = [name for name, ratio in ratios.items() if ratio <= 1]
    table = "\n".join(lines)
    print(table)
    if args.markdown:
        args.markdown.write_text(
            "# Overhead of named array tuples\n\n"
            f"A call takes tensordict's TensorDict {min(ratios.values()):.1f} to {max(ratios.values()):.1f} times as "
            "long as an ArrayTuple:\n\n"
            f"{table}\n\n"
            f"*Measured* with twelve tensors [{T}, {B}, …], two of them in a nested dict, on one thread: CPU time, "
            f"medians of {args.rounds} interleaved rounds, and the median of each round's ratio.\nTime includes the "
            "work on the tensors, which is the same for both. "
            f"Python {platform.python_version()}, torch {torch.__version__}, tensordict {tensordict.__version__}, "
            f"{platform.machine()}.\nMade by `python benchmarks/arrays.py --markdown benchmarks/arrays.md`.\n",
            encoding="utf-8",
        )
    if slower:
        print(f"slower than tensordict: {', '.join(slower)}", file=sys.stderr)
    return bool(slower)


if __name__ == "__main__":
    raise SystemExit(main())
