"""The other side of served.py, in the peer's process: answers every request with a rate."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def serve(train: Callable[[], int]) -> None:
    """Call `train`, which returns its number of samples, for as many seconds as each line from standard input says."""
    for line in sys.stdin:
        seconds, samples, begin = float(line), 0, time.perf_counter()
        while not samples or time.perf_counter() - begin < seconds:
            samples += train()
        print(f"samples/s {samples / (time.perf_counter() - begin)}", flush=True)
