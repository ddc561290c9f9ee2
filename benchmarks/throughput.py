"""How near training comes to the machine's limit.

    python benchmarks/throughput.py [--rounds 3] [--workers 2] [--num-envs 64]

The limit of one core is 1 / (t_env + t_infer + epochs * t_train): seconds a sample for stepping the environment, for
acting, and for one forward and backward pass. Each part is measured raw, alone, in as many processes at once as
training will use, so that cores are equally loaded; all is interleaved over several rounds, and medians are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lockstep.train
from lockstep import envs, recipes
from lockstep.algorithms.base import Batch
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.run import RunOptions
from lockstep.runtime.memory import keep_freed_memory


def per_sample(step: Callable[[], object], samples: int, seconds: float) -> float:
    """Seconds a sample: the median over repetitions of step, which handles that many samples."""
    step()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / samples


def measure_parts(experiment: Experiment, seconds: float, barrier: Any, answers: Any) -> None:
    """One process: t_env, t_infer and t_train in the shapes that training uses."""
    keep_freed_memory()
    torch.set_num_threads(experiment.torch_threads)
    config = experiment.algorithm
    acting = experiment.scheme.acting_batch or experiment.envs_per_shard
    env = envs.make(experiment.env, seed=1, first_index=0, num_envs=acting)
    space = env.observation_space
    rows = envs.allocate_observation(space, (acting,)).numpy()
    env.reset(rows)
    model = experiment.model.build(
        space,
        env.action_space,
        precision=experiment.precision,
        normalize_observations=False,
        seed=1,
    )
    actor, noise = model.for_acting(), torch.rand(acting, model.distribution.noise_size)
    obs, start = torch.from_numpy(rows)[None], torch.zeros(1, acting, dtype=torch.bool)
    action = torch.zeros(acting, dtype=torch.int64)

    def step_env() -> None:
        env.send(model.distribution.to_env(action.numpy()))
        env.recv(rows)

    @torch.inference_mode()
    def act() -> None:
        out, _ = actor(obs, start, torch.zeros(acting, 0))
        action.copy_(model.distribution.sample(out.policy[0], noise.uniform_()))

    size = experiment.envs_per_shard * config.rollout // config.minibatches
    flat = torch.zeros(1, size)
    true = torch.ones(1, size, dtype=torch.bool)
    batch = Batch(
        obs=obs[:, torch.arange(size) % acting],
        start=~true,
        prev_action=None,
        prev_reward=None,
        state=torch.zeros(size, 0),
        action=torch.zeros(1, size, dtype=torch.int64),
        reward=flat,
        log_prob=flat,
        value=flat,
        terminated=~true,
        truncated=~true,
        valid=true,
        advantage=flat + 1.0,
        value_target=flat,
    )
    algorithm = config.build()
    hyper = algorithm.hyperparameters(0.0)

    def learn() -> None:
        algorithm.loss(model, batch, hyper).total.backward()

    times = {}
    for name, step, samples in (("env", step_env, acting), ("infer", act, acting), ("train", learn, size)):
        barrier.wait()
        times[name] = per_sample(step, samples, seconds)
    env.close()
    answers.put(times)


def parts(experiment: Experiment, workers: int, seconds: float) -> dict[str, float]:
    """Mean over processes that measure at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(workers), context.Queue()
    processes = [
        context.Process(target=measure_parts, args=(experiment, seconds, barrier, answers)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    times = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return {name: statistics.fmean(t[name] for t in times) for name in times[0]}


def rate(experiment: Experiment, layout: str, iterations: int) -> float:
    """Samples a second of real training, the first iteration left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = RunOptions(run=str(run), display="none", tensorboard=False, checkpoint_every=10**9)
        lockstep.train.train(experiment, Layout.parse(layout), options, stop_after=iterations)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    return (lines[-1]["samples"] - lines[0]["samples"]) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each raw part")
    arguments = parser.parse_args()
    experiment = recipes.ppo_atari("Breakout")
    environment = dataclasses.replace(experiment.env, num_envs=arguments.num_envs)
    experiment = experiment.replace(env=envs.resolve(environment))
    workers, epochs = arguments.workers, experiment.algorithm.epochs
    rows = []
    for number in range(arguments.rounds):
        measured = parts(experiment, workers, arguments.seconds)
        limit = workers / (measured["env"] + measured["infer"] + epochs * measured["train"])
        inline = rate(experiment, "inline", arguments.iterations)
        spread = rate(experiment, f"processes:{workers}", arguments.iterations)
        rows.append((*(1e6 * measured[part] for part in ("env", "infer", "train")), inline, spread, limit))
        print(f"round {number + 1}: " + "  ".join(f"{value:.0f}" for value in rows[-1]), flush=True)
    columns = list(zip(*rows, strict=True))
    names = ("t_env µs", "t_infer µs", "t_train µs", "inline samples/s", f"processes:{workers}", f"limit x{workers}")
    print("\n| figure | median | min | max |\n|---|---|---|---|")
    ratios = [("of the limit", [s / m for s, m in zip(columns[4], columns[5], strict=True)])]
    ratios.append((f"processes:{workers} / inline", [s / i for s, i in zip(columns[4], columns[3], strict=True)]))
    for name, values in zip(names, columns, strict=True):
        print(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} | {max(values):.0f} |")
    for name, values in ratios:
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
