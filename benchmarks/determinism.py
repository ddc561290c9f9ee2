"""What identical bits on any layout cost, as CPU time in paired runs.

    python benchmarks/determinism.py [--pairs 5] [CASE …]

Each pair trains the same experiment inline, in turn as it is (fixed shards, a gradient for each, the tree, digests of
all that is computed, the ledger) and bare: one shard, no digest, no ledger. Both act in batches of the same size, and
take the same number of gradient steps on the same number of samples. The last row compares the tree's reduction over
two processes with torch.distributed's all-reduce (gloo) on gradients of the Nature CNN, in wall time, since waiting
takes no CPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import lockstep
from lockstep import recipes
from lockstep.algorithms import PPOConfig
from lockstep.config.options import RunOptions
from lockstep.distributed.groups import GlooGroup
from lockstep.distributed.local_group import Ends, LocalGroup, join
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.run.ledger import Ledger

_PARAMETERS = 1_690_000
"""Of the Nature CNN, rounded."""


def atari() -> Experiment:
    base = recipes.ppo_atari("Breakout")
    return base.replace(
        env=replace(base.env, num_envs=64),
        scheme=replace(base.scheme, shards=4, acting_batch=64),
    )


def mujoco() -> Experiment:
    base = recipes.ppo_mujoco("HalfCheetah-v4")
    assert isinstance(base.algorithm, PPOConfig)
    return base.replace(algorithm=replace(base.algorithm, minibatches=16))


def cartpole() -> Experiment:
    base = recipes.ppo_cartpole()
    return base.replace(
        env=replace(base.env, num_envs=32, adapter="envpool"),
        algorithm=replace(base.algorithm, rollout=32, epochs=1, minibatches=1),
        scheme=replace(base.scheme, acting_batch=32),
    )


CASES = {"atari": (atari, 1), "mujoco": (mujoco, 12), "cartpole": (cartpole, 100)}
"""Experiment and iterations of a run."""


def cpu_seconds(experiment: Experiment, iterations: int, *, bare: bool) -> float:
    """Of all threads of a run, without its start."""
    if bare:
        acting = experiment.scheme.acting_batch or experiment.envs_per_shard
        experiment = experiment.replace(scheme=replace(experiment.scheme, shards=1, acting_batch=acting))
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        original: Any = Ledger._write

        def write(self: Ledger, entry: dict[str, Any]) -> None:
            marks.append(time.process_time())
            if not bare:
                original(self, entry)

        stack.enter_context(mock.patch.object(Ledger, "_write", write))
        if bare:
            for place in ("training.writer.fast_digest", "learners.learner.fast_digest"):
                stack.enter_context(mock.patch(f"lockstep.{place}", lambda tensor: ""))
            stack.enter_context(mock.patch("lockstep.core.digests.Digests.__call__", lambda self: {}))
        options = RunOptions(run=f"{folder}/run", display="none", tensorboard=False, checkpoint_every=10**9)
        lockstep.train(experiment.replace(total_steps=10**9), "inline", options, stop_after=iterations + 1)
    return marks[-1] - marks[-1 - iterations]


def reduce(rank: int, ends: Ends, folder: str, rounds: int, answers: Any) -> None:
    """One of two processes: seconds of a reduction of 4 shards' gradients, with the tree and with an all-reduce."""
    torch.set_num_threads(1)
    gloo, local = GlooGroup(f"file://{folder}/meeting", rank, 2), LocalGroup(ends)
    tree = TreeSum(4, local)
    seconds: dict[str, list[float]] = {"tree": [], "all-reduce": []}
    for number in range(rounds + 1):
        for kind, times in seconds.items():
            mine = [torch.randn(_PARAMETERS) for _ in range(2)]
            local.barrier()
            begin = time.perf_counter()
            if kind == "tree":
                for shard, gradient in zip((2 * rank, 2 * rank + 1), mine, strict=True):
                    tree.push(shard, gradient)
                tree.finish()
            else:
                dist.all_reduce(mine[0].add_(mine[1]))
            local.barrier()
            if number:
                times.append(time.perf_counter() - begin)
    answers.put({kind: statistics.median(times) for kind, times in seconds.items()})
    gloo.close()
    local.close()


def reductions(rounds: int) -> float:
    """Time of the tree over that of the all-reduce."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ends = join(context, 2, {(0, 1)})
        processes = [
            context.Process(target=reduce, args=(rank, ends[rank], folder, rounds, answers)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        measured = [answers.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    return statistics.fmean(m["tree"] for m in measured) / statistics.fmean(m["all-reduce"] for m in measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| what | price | min | max | pairs |\n|---|---|---|---|---|")
    for name in arguments.cases or CASES:
        make, iterations = CASES[name]
        ratios = []
        for pair in range(arguments.pairs):
            order = (False, True) if pair % 2 else (True, False)
            seconds = {bare: cpu_seconds(make(), iterations, bare=bare) for bare in order}
            ratios.append(seconds[False] / seconds[True] - 1)
        row = " | ".join(f"{100 * value:+.1f}%" for value in (statistics.median(ratios), min(ratios), max(ratios)))
        print(f"| {name} | {row} | {len(ratios)} |", flush=True)
    if not arguments.cases:
        times = [reductions(20) - 1 for _ in range(arguments.pairs)]
        row = " | ".join(f"{100 * value:+.1f}%" for value in (statistics.median(times), min(times), max(times)))
        print(f"| tree against all-reduce, two processes, wall time | {row} | {len(times)} |")


if __name__ == "__main__":
    main()
