from __future__ import annotations

import os
import time

import pytest

from lockstep.runtime import children


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pinned_processes_share_the_cores(count: int) -> None:
    cores = os.sched_getaffinity(0)
    processes = [children.start(time.sleep, (60.0,), f"sleeper-{index}") for index in range(count)]
    try:
        for index, process in enumerate(processes):
            children.pin(process, index, count)
        shares = [os.sched_getaffinity(process.pid) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert set.union(*shares) == cores
    assert sum(map(len, shares)) == max(count, len(cores)), "no core is shared while there is another"
