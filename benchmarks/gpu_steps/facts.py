"""What the machine is, and how fast it copies, launches and waits."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lockstep.system.graphs as graphs
from gpu_steps.step import Context, Outcome, last_lines
from lockstep.distributed.shared_memory import SharedMemory

_QUERY = "name,driver_version,memory.total,mig.mode.current,clocks.max.sm,power.limit,pcie.link.gen.current"


def facts(context: Context) -> Outcome:
    """The GPU, the libraries, transfer rates in GB/s, latencies in microseconds, and rates of arithmetic."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for name, part in {
        "machine": machine,
        "nvidia_smi": nvidia_smi,
        "device": device,
        "versions": versions,
        "latency_us": lambda: latencies(context),
        "transfer_gb_s": lambda: transfers(context),
        "tflops": lambda: arithmetic(context),
    }.items():
        try:
            found[name] = part()
        except Exception as error:
            found[name] = {"error": last_lines(error)}
            if name != "nvidia_smi":  # which not every machine has
                wrong.append(name)
        context.save(Outcome(not wrong, "stopped early", found))
    transfer, latency = found["transfer_gb_s"], found["latency_us"]
    text = f"h2d pinned {transfer.get('h2d pinned', 0):.1f} GB/s, launch {latency.get('launch', 0):.1f} µs"
    return Outcome(
        not wrong,
        f"{found['device'].get('name', '?')}: {text}" + (f"; unknown: {', '.join(wrong)}" if wrong else ""),
        found,
    )


def machine() -> dict[str, Any]:
    """The CPU and its memory."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def nvidia_smi() -> dict[str, str]:
    """What the driver says."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return dict(zip(_QUERY.split(","), (each.strip() for each in found.splitlines()[0].split(",")), strict=False))


def device() -> dict[str, Any]:
    """What torch says."""
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gb": found.total_memory / 1e9,
        "count": torch.cuda.device_count(),
    }


def versions() -> dict[str, Any]:
    """torch and the libraries that it computes with."""
    wanted = ("torch", "numpy", "gymnasium", "ale-py", "envpool", "mujoco", "numba", "triton")
    installed = {each.name: each.version for each in importlib.metadata.distributions() if each.name}
    found = {name: version for name, version in installed.items() if name in wanted or name.startswith("nvidia-")}
    return {**found, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def seconds(call: Callable[[], object], times: int) -> float:
    """Of one call, the GPU's work included: the least of three averages."""
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / times)
    return min(found)


def latencies(context: Context) -> dict[str, float]:
    """Microseconds of what happens at every step."""
    times = 10 if context.rehearse else 1000
    x, small = torch.zeros(1, device="cuda:0"), torch.zeros(32)
    pinned, held = torch.zeros(32, pin_memory=True), torch.zeros(32, device="cuda:0")

    def waiting(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: (call(), torch.cuda.synchronize())

    def one() -> None:
        x.add_(1)

    def twenty() -> None:
        for _ in range(20):
            x.add_(1)

    calls = {
        "launch": one,
        "sync": torch.cuda.synchronize,
        "launch and sync": waiting(one),
        "item": lambda: x.item(),
        "small h2d pageable": lambda: held.copy_(small),
        "small h2d pinned": lambda: held.copy_(pinned, non_blocking=True),
        "small h2d pinned and sync": waiting(lambda: held.copy_(pinned, non_blocking=True)),
        "small d2h": lambda: held.cpu(),
        "20 launches": twenty,
        "graph of 1 kernel": graphs.cuda_graph(one),
        "graph of 20 kernels": graphs.cuda_graph(twenty),
        "graph of 20 kernels and sync": waiting(graphs.cuda_graph(twenty)),
    }
    with torch.no_grad():
        return {name: 1e6 * seconds(call, times) for name, call in calls.items()}


def transfers(context: Context) -> dict[str, float]:
    """GB/s from and to pageable, pinned and registered memory, of a slab of frames and of a small one."""
    found = {}
    for label, size in (("", 1 << 26), (" of 1 MB", 1 << 20)):
        size = size >> 10 if context.rehearse else size
        held = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
        memory = SharedMemory()
        places = {
            "pageable": torch.zeros(size, dtype=torch.uint8),
            "pinned": torch.zeros(size, dtype=torch.uint8, pin_memory=True),
            "registered": memory.map(lambda arena, n=size: arena.zeros((n,), torch.uint8), pinned=True),
        }
        times = 2 if context.rehearse else max(1, (1 << 28) // size)
        for name, place in places.items():
            place.fill_(1)
            for way, to, of in (("h2d", held, place), ("d2h", place, held)):
                rate = size / 1e9 / seconds(functools.partial(to.copy_, of, non_blocking=True), times)
                found[f"{way} {name}{label}"] = rate
        memory.close()
    return found


def arithmetic(context: Context) -> dict[str, float]:
    """10^12 operations a second of matrix products, in torch's default settings for each type."""
    n = 64 if context.rehearse else 4096
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(n, n, device="cuda:0", dtype=dtype)
        found[str(dtype).removeprefix("torch.")] = 2 * n**3 / 1e12 / seconds(lambda a=x: a @ a, 10)
    return found
