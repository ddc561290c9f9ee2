"""Whether two processes can open each other's memory on the GPU, how long an exchange takes, and whether bits stay."""

from __future__ import annotations

import hashlib
import statistics
import time
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from gpu_steps.correctness import place, trained
from gpu_steps.small import REHEARSED, usable
from gpu_steps.step import Context, Outcome, Task, do, last_lines
from lockstep.distributed.local_group import Ends, LocalGroup, join
from lockstep.distributed.tree import TreeSum, partners
from lockstep.system import children

GPU = torch.device("cuda:0")
PATHS = ("gpu", "host")
"""Through the GPU's memory, and through the CPU's."""
SIZES = {"1.7M": 1_700_000, "25M": 25_000_000}
"""Numbers of fp32: the gradients of the Nature CNN, and of a large network."""
LAYOUTS = ("inline,device=0", "processes:2,device=0", "processes:2,device=0,ipc=0", "a0-l0,0")
EXPERIMENTS = ("cartpole-lag-1", "ppo-bf16")
_LIMIT = 60.0
_SHARE = 0.6
"""Of the step's time, for the exchanges alone."""


def exchange(context: Context) -> Outcome:
    """Milliseconds of an exchange between two processes on one GPU, by both paths, and digests of small experiments."""
    data: dict[str, Any] = {"works": False, "problem": "not known"}
    context.save(Outcome(False, "stopped early", data))
    sizes = dict.fromkeys(SIZES, 20_000) if context.rehearse else SIZES
    answers = _both(sizes, 3 if context.rehearse else 20, _SHARE * context.left)
    wrong = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
    if not wrong:
        data["problem"] = answers[0]["problem"]
        data["works"] = data["problem"] is None
        data["milliseconds"] = {rank: answer["milliseconds"] for rank, answer in enumerate(answers)}
        digests = {
            name: {answer["digests"][f"{path} {name}"] for answer in answers for path in PATHS} for name in sizes
        }
        wrong += [
            f"{name}: different bits by another path or in another process" for name in sizes if len(digests[name]) > 1
        ]
    runs: dict[str, dict[str, Any]] = {}
    data |= {"wrong": wrong, "runs": runs}
    context.save(Outcome(not wrong, "stopped early", data))
    names, left_out = usable(REHEARSED[:1] if context.rehearse else EXPERIMENTS)
    data["left_out"] = left_out

    def done(task: Task, ok: bool, value: Any) -> None:
        name, _, text = task.name.partition(" ")
        runs.setdefault(name, {})[text] = value["digest"] if ok else {"error": value}
        context.save(Outcome(not wrong, "stopped early", data))

    tasks = [
        Task(f"{name} {text}", trained, (name, text, place(context, f"{name}-{text}")))
        for name in names
        for text in (LAYOUTS[1:3] if context.rehearse else LAYOUTS)
    ]
    missing = do(tasks, 2, _LIMIT * (5 if context.rehearse else 1), lambda: context.left, done)
    for name, found in runs.items():
        failed = {text: each["error"] for text, each in found.items() if isinstance(each, dict)}
        wrong += [f"{name} {text}: {error}"[:300] for text, error in failed.items()]
        if len({each for each in found.values() if isinstance(each, str)}) > 1:
            wrong.append(f"{name}: digests differ")
    return Outcome(not wrong, _summary(data, missing), data)


def _summary(data: dict[str, Any], missing: int) -> str:
    text = "IPC works" if data["works"] else f"no IPC: {data['problem']}"
    if times := data.get("milliseconds"):
        text += "; " + ", ".join(f"{name} {value:.2f} ms" for name, value in times[0].items())
    text += f"; {sum(map(len, data['runs'].values()))} runs" + (f", {missing} had no time" if missing else "")
    return text + (
        f"; {len(data['wrong'])} wrong: {' | '.join(data['wrong'])[:300]}" if data["wrong"] else ", identical bits"
    )


def _both(sizes: dict[str, int], times: int, limit: float) -> list[Any]:
    """What two processes found out together, by rank; a text instead of what failed."""
    context = get_context("spawn")
    groups = [join(context, 2, partners(2, 2)) for _ in PATHS]
    pipes, processes, answers = [], [], ["no answer in time"] * 2
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            ends = tuple(group[rank] for group in groups)
            processes.append(children.start(_exchange, (ends, sizes, times, theirs), f"exchange-{rank}"))
            theirs.close()
            pipes.append(ours)
        for ends in (end for group in groups for end in group):
            ends.close()
        deadline, waiting = time.monotonic() + limit, set(range(2))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait([pipes[rank] for rank in waiting], timeout=left):
                rank = pipes.index(ready)
                waiting.remove(rank)
                try:
                    answers[rank] = pipes[rank].recv()
                except EOFError:
                    processes[rank].join()
                    answers[rank] = f"its process {children.death_report(processes[rank])}"
        for rank in waiting:
            children.show_stack(processes[rank], f"exchange {rank}")
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def _exchange(ends: tuple[Ends, ...], sizes: dict[str, int], times: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    try:
        torch.cuda.set_device(GPU)
        answer.send(_measured(ends, sizes, times))
    except BaseException as error:
        traceback.print_exc()
        answer.send(last_lines(error))


def _measured(ends: tuple[Ends, ...], sizes: dict[str, int], times: int) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": None, "milliseconds": {}, "digests": {}}
    for path, end in zip(PATHS, ends, strict=True):
        group = LocalGroup(end)
        if path == "gpu":
            found["problem"] = group.open_devices(GPU)
        tree = TreeSum(2, group)
        for name, size in sizes.items():
            generator = torch.Generator().manual_seed(group.rank)
            value = torch.randn(size, generator=generator).to(GPU)
            spent, total = [], value
            for _ in range(times):
                mine = value.clone()
                torch.cuda.synchronize()
                group.barrier()
                begin = time.perf_counter()
                tree.push(group.rank, mine)
                total = tree.finish().to(GPU)
                torch.cuda.synchronize()
                spent.append(1000 * (time.perf_counter() - begin))
            found["milliseconds"][f"{path} {name}"] = statistics.median(spent)
            found["digests"][f"{path} {name}"] = hashlib.sha256(total.cpu().numpy().tobytes()).hexdigest()
            group.barrier()
        group.close()
    return found
