from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch

from lockstep.distributed.local_group import Ends, LocalGroup, join

SIZES = [1, 7, 4_000, 100_000, 3, 2_000_000, 50_000]
"""Numbers of tensors that are sent one after another: through the pipe, through memory, and through more of it."""


def talk(ends: Ends, answers: Any) -> None:
    group = LocalGroup(ends)
    draw = torch.Generator().manual_seed(group.rank)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    equal = True
    for size in SIZES:
        mine, theirs = torch.rand(size, generator=draw), torch.empty(size)
        if group.size == 2:
            group.exchange(mine, theirs, right)
        else:
            group.send(mine, right)
            group.recv(theirs, left)
        other = torch.Generator().manual_seed(left)
        for before in SIZES[: SIZES.index(size)]:
            torch.rand(before, generator=other)
        equal &= torch.equal(theirs, torch.rand(size, generator=other))
        group.barrier()
    gathered = group.gather({"rank": group.rank, "tensor": torch.arange(group.rank)})
    told = group.broadcast([group.rank, "x" * 100_000])
    # No tensors: torch would send them through sockets of this process, which ends now.
    sizes = None if gathered is None else [(each["rank"], len(each["tensor"])) for each in gathered]
    answers.put((group.rank, equal, sizes, told[0], len(told[1])))
    group.close()


def start(target: Any, size: int, *arguments: Any) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    everyone = {(a, b) for a in range(size) for b in range(size) if a != b}
    ends = join(context, size, everyone)
    processes = [context.Process(target=target, args=(each, *arguments)) for each in ends]
    for process in processes:
        process.start()
    for each in ends:
        each.close()
    return processes


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_sent_arrives(size: int) -> None:
    answers = multiprocessing.get_context("spawn").Queue()
    processes = start(talk, size, answers)
    got = sorted((answers.get(timeout=120) for _ in processes), key=lambda answer: answer[0])
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for rank, equal, gathered, origin, length in got:
        assert equal and origin == 0 and length == 100_000
        assert gathered == (None if rank else [(each, each) for each in range(size)])


def wait_for_ever(ends: Ends, answers: Any) -> None:
    group = LocalGroup(ends)
    if group.rank != 1:  # it will be killed, and may not take the queue's lock with it
        answers.put("waits")
    try:
        if group.rank == 0:
            group.recv(torch.empty(10), 1)
        elif group.rank == 1:
            time.sleep(600)
        else:
            for _ in range(3):  # the second does not fit until the first has been taken out
                group.send(torch.zeros(1_000_000), 1)
    except ConnectionError as error:
        answers.put(str(error))


def test_the_death_of_a_peer_ends_every_wait() -> None:
    answers = multiprocessing.get_context("spawn").Queue()
    processes = start(wait_for_ever, 3, answers)
    assert [answers.get(timeout=120) for _ in range(2)] == ["waits"] * 2
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGKILL)
    assert [answers.get(timeout=120) for _ in range(2)] == ["Connection closed by peer"] * 2
    for process in processes:
        process.join()
