"""Whether a GPU computes what it should, and the same bits every time and on every layout."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lockstep.system.graphs as graphs
from gpu_steps.small import REHEARSED, SHAPES, experiment, on_gpu, small, usable
from gpu_steps.step import Context, Outcome, Task, do, last_lines
from lockstep.agent import Agent
from lockstep.buffers.rollout_buffers import RolloutBuffers, acting_groups
from lockstep.collectors.collectors import Collector
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena, SharedMemory
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.learners.gradient_graphs import HyperTensors
from lockstep.learners.process import learner_of
from lockstep.models.arithmetic import arithmetic
from lockstep.reproducibility.verify import diff, verify
from lockstep.system.numerics import torch_configured
from lockstep.training.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
GPU = "cuda:0"
INLINE = "inline,device=0"
LAYOUTS = (
    INLINE,
    f"{INLINE},graphs=1",
    "a0-l0,0,graphs=1",
    "processes:2,device=0",
    f"{INLINE} again",
    "a0-l0",
    "a0,0-l0,0",
)
"""Every experiment on each, the first layouts first; all must have the digest of the first."""
TOLERANCE = 1e-5
"""Of fp32 gradients against the CPU's. TF32 would differ by 3e-4. Where a gradient depends more on rounding, as with
V-trace's ratios of 1, which are clipped at 1, it may differ by twice as much as with other last bits of parameters."""
_MOVES = 8
"""Times that the last bits of the parameters are changed to find that out."""
LIMIT = 90.0
"""Seconds that a task may take."""


def primitives(context: Context) -> Outcome:
    """torch's settings on the GPU, whether fp32 is fp32, and whether shared memory can be registered."""
    with torch_configured(1, GPU):
        flags = {name: value for name, (value, _) in _flags().items()}
        wrong = [
            f"{name} is {value}, not {wanted[0]}" for name, (value, wanted) in _flags().items() if value not in wanted
        ]
        errors = {"matmul": _error(torch.matmul, (256, 256), (256, 256))}
        errors["convolution"] = _error(torch.nn.functional.conv2d, (8, 32, 20, 20), (64, 32, 4, 4))
        wrong += [f"fp32 {name} is off by {error:.1e}" for name, error in errors.items() if not error < TOLERANCE]
        memory = SharedMemory()
        registered = memory.map(lambda arena: arena.zeros((1 << 20,)), pinned=True)
        registered.copy_(torch.arange(1 << 20))
        copied = registered.to(GPU, non_blocking=True)
        torch.cuda.synchronize()
        if not registered.is_pinned():
            wrong.append("registered memory is not pinned")
        if not torch.equal(copied.cpu(), registered):
            wrong.append("registered memory was copied wrongly")
        memory.close()
    data = {"flags": flags, "fp32_errors": errors, "wrong": wrong}
    return Outcome(not wrong, "; ".join(wrong) or "flags as wanted, fp32 exact, shared memory registered", data)


def _flags() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Settings of torch, each with its value and the ones that identical bits and full precision allow."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    filling: Any = torch.utils.deterministic
    exact = ("ieee", "none")
    allowed: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
        "float32_matmul_precision": (torch.get_float32_matmul_precision, ("highest",)),
        "matmul.fp32_precision": (lambda: matmul.fp32_precision, exact),
        "cudnn.conv.fp32_precision": (lambda: cudnn.conv.fp32_precision, exact),
        "cudnn.rnn.fp32_precision": (lambda: cudnn.rnn.fp32_precision, exact),
        "cudnn.benchmark": (lambda: cudnn.benchmark, (False,)),
        "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, (True,)),
        "fill_uninitialized_memory": (lambda: filling.fill_uninitialized_memory, (False,)),
        "bf16_reduced_precision_reduction": (lambda: matmul.allow_bf16_reduced_precision_reduction, (False,)),
        "CUBLAS_WORKSPACE_CONFIG": (lambda: os.environ.get("CUBLAS_WORKSPACE_CONFIG"), (":4096:8", ":16:8")),
    }
    found = {}
    for name, (read, values) in allowed.items():
        try:
            found[name] = read(), values
        except (AttributeError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}", values
    return found


def _error(function: Callable[..., Tensor], *shapes: Sequence[int]) -> float:
    """The relative error of a function in fp32 on the GPU, against float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=generator) for shape in shapes]
    exact = function(*(x.double() for x in given))
    return float((function(*(x.to(GPU) for x in given)).cpu().double() - exact).norm() / exact.norm())


def experiments(context: Context) -> Outcome:
    """Every small experiment on all layouts, with equal digests."""
    names = REHEARSED if context.rehearse else context.names or tuple(small())
    return _layouts_agree(context, names)


def real_shapes(context: Context) -> Outcome:
    """A few iterations of recipes as they are, with equal digests; and one run verified as a whole."""
    names = REHEARSED[:1] if context.rehearse else tuple(f"real:{name}" for name in SHAPES)
    return _layouts_agree(context, names, verified=names[0])


def _layouts_agree(context: Context, names: Sequence[str], verified: str | None = None) -> Outcome:
    names, left_out = usable(names)
    layouts = LAYOUTS[:4] if context.rehearse else LAYOUTS
    if not context.report.get("exchange", {}).get("data", {}).get("works", True):  # they might hang, too
        layouts = tuple(text if text.startswith(INLINE) else f"{text},ipc=0" for text in layouts)
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    tasks = [
        Task(f"{name} {text}", trained, (name, text, place(context, f"{name}-{text}")))
        for text in layouts
        for name in names
    ]
    if verified in names:
        again = Task(f"{verified} verified", verification, (verified, str(context.folder / "verified")))
        tasks.insert(len(names), again)

    def outcome(missing: int = 0) -> Outcome:
        wrong = _differences(results)
        runs = sum(len(found) for found in results.values())
        text = f"{runs} of {len(tasks)} runs"
        text += f", {missing} had no time" if missing else ""
        text += f", {len(left_out)} left out" if left_out else ""
        text += f"; {len(wrong)} wrong: {' | '.join(wrong)[:300]}" if wrong else ", all digests equal"
        return Outcome(not wrong, text, {"wrong": wrong, "left_out": left_out, "results": results})

    def done(task: Task, ok: bool, value: Any) -> None:
        name, _, text = task.name.partition(" ")
        results[name][text] = value if ok else {"error": value}
        if "digest" in (first := results[name].get(INLINE, {})) and ok and value["digest"] != first["digest"]:
            places = (Path(place(context, f"{name}-{each}")) for each in (INLINE, text))
            value["difference"] = _difference(*places)
        state = f"{value['digest'][:12]} in {value['seconds']:.1f} s" if ok else f"FAILED: {value}"
        print(f"{task.name}: {state}", flush=True)
        context.save(outcome())

    hands = 2 if context.rehearse else max(2, (os.cpu_count() or 2) * 10 // 16)
    return outcome(do(tasks, hands, _limit(context), lambda: context.left, done))


def _limit(context: Context) -> float:
    return LIMIT * (5 if context.rehearse else 1)


def place(context: Context, text: str) -> str:
    """A run's folder, named after a text."""
    return str(context.folder / re.sub(r"[^a-z0-9]+", "-", text))


def _differences(results: dict[str, dict[str, Any]]) -> list[str]:
    """What failed, and which layouts have another digest than the first that succeeded."""
    wrong = []
    for name, found in results.items():
        digests = {text: each["digest"] for text, each in found.items() if "digest" in each}
        first = next(iter(digests.values()), None)
        for text, each in found.items():
            if "error" in each:
                wrong.append(f"{name} {text}: {str(each['error'])[:300]}")
            elif each["digest"] != first:
                wrong.append(f"{name} {text}: another digest. {each.get('difference', '')}")
    return wrong


def _difference(first: Path, second: Path) -> str:
    try:
        return str(diff(first, second))
    except Exception as error:
        return last_lines(error)


def trained(name: str, text: str, place: str) -> dict[str, Any]:
    """Train an experiment. Its ledger stays in the folder, in case that digests differ."""
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(experiment(name), Layout.parse(text.removesuffix(" again")), quiet(place))
    shutil.rmtree(Path(place) / "checkpoints", ignore_errors=True)
    told = sorted({str(each.message)[:300] for each in caught if not issubclass(each.category, DeprecationWarning)})
    return {"digest": result.digest, "seconds": time.perf_counter() - begin, **({"warnings": told} if told else {})}


def quiet(place: str) -> RunOptions:
    """Nothing shown, checkpoints at the end alone."""
    return RunOptions(run=place, checkpoint_every=10**9, display="none", tensorboard=False, check_env=False)


def verification(name: str, place: str) -> dict[str, Any]:
    """Train an experiment on two processes, and verify all of it in one.

    Raises:
        AssertionError: something differs.
    """
    begin = time.perf_counter()
    result = train(experiment(name), Layout.parse("a0-l0"), quiet(place))
    verdict = verify(place, Layout.parse(INLINE), "all")
    assert verdict.ok, verdict.message
    return {"digest": result.digest, "seconds": time.perf_counter() - begin, "message": verdict.message}


def losses(context: Context) -> Outcome:
    """The first gradient of every small experiment: against the CPU's, twice, and from a CUDA graph."""
    names, left_out = usable(REHEARSED if context.rehearse else tuple(small()))
    found: dict[str, Any] = {}

    def outcome(missing: int = 0) -> Outcome:
        wrong = [f"{name}: {each['wrong'][:300]}" for name, each in found.items() if each.get("wrong")]
        errors = {name: each["error"] for name, each in found.items() if "error" in each}
        text = f"{len(found)} of {len(names)} losses"
        if errors:
            worst = max(errors, key=lambda name: errors[name])
            text += f", at most {errors[worst]:.1e} from the CPU's ({worst})"
        text += f", {len(left_out)} left out" if left_out else ""
        text += f", {missing} had no time" if missing else ""
        text += f"; {len(wrong)} wrong: {' | '.join(wrong)[:300]}" if wrong else ""
        return Outcome(not wrong, text, found)

    def done(task: Task, ok: bool, value: Any) -> None:
        found[task.name] = value if ok else {"wrong": value}
        print(f"{task.name}: {found[task.name]}", flush=True)
        context.save(outcome())

    tasks = [Task(name, gradients, (name,)) for name in names]
    hands = 2 if context.rehearse else max(2, (os.cpu_count() or 2) * 3 // 4)
    return outcome(do(tasks, hands, _limit(context), lambda: context.left, done))


def gradients(name: str) -> dict[str, Any]:
    """The first gradient in fp32 on the CPU and, by several ways, on the GPU; `wrong` says what differs."""
    setting = prepare(on_gpu(experiment(name)).replace(precision="fp32"), Layout())
    with torch_configured(1):
        batch, normalizers, hyper = first_batch(setting)
        here = Gradient(setting, "cpu", normalizers)
        exact = here(batch, hyper).double()
        moved = [here.moved(seed)(batch, hyper).double() for seed in range(_MOVES)]
        rounding = max(float((each - exact).norm() / exact.norm()) for each in moved)
        allowed = max(TOLERANCE, 2 * rounding)
    with torch_configured(1, GPU):
        gradient = Gradient(setting, GPU, normalizers)
        there = batch.map(lambda leaf: leaf.to(GPU))
        once, twice = gradient(there, hyper), gradient(there, hyper)
        error = float((once.cpu().double() - exact).norm() / exact.norm())
        wrong = [] if error <= allowed else [f"it is {error:.1e} from the CPU's; {allowed:.1e} is allowed"]
        wrong += [] if torch.equal(once, twice) else ["a second time it has different bits"]
        captured = None
        if not setting.algorithm.replays:
            captured = _captured(gradient, there, hyper)
            wrong += [] if captured is True else [f"from a graph: {captured}"]
    known = {"error": error, "rounding": rounding, "norm": float(exact.norm())}
    return {**known, "captured": captured, "wrong": "; ".join(wrong)}


def _captured(gradient: Gradient, batch: Any, hyper: dict[str, Any]) -> bool | str:
    """Whether a graph gives the bits of the same kernels launched one by one; or the error."""
    numbers = HyperTensors(torch.device(GPU)).of(hyper)
    try:
        exact = gradient(batch, numbers).clone()
        held = torch.zeros_like(exact)

        def run() -> None:
            held.copy_(gradient(batch, numbers))

        repeat = graphs.cuda_graph(run)
        held.zero_()
        repeat()
        return torch.equal(held, exact) or "different bits"
    except Exception as error:
        return last_lines(error)


class Gradient:
    """The gradient of a new agent's loss on a device.

    Args:
        normalizers: what observations are normalized with.
    """

    def __init__(self, setting: Experiment, device: str, normalizers: Any) -> None:
        self._agent = Agent(setting, device)
        self._parameters = self._agent.flat.vector.detach().clone()
        """Those that `moved` begins from."""
        for model in (self._agent.model, self._agent.target):
            if model is not None:
                normalizers.apply(model)

    @torch.no_grad()
    def moved(self, seed: int) -> Gradient:
        """The same with each parameter moved by about one unit in the last place, up, down or not at all."""
        vector = self._agent.flat.vector
        moves = torch.randint(-1, 2, vector.shape, generator=torch.Generator().manual_seed(seed))
        vector.copy_(self._parameters * (1 + torch.finfo(vector.dtype).eps * moves))
        return self

    def __call__(self, batch: Any, hyper: dict[str, Any]) -> Tensor:
        """Of all parameters, as one vector."""
        agent = self._agent
        with arithmetic(agent.model):
            agent.flat.forget_gradient()
            loss = agent.algorithm.loss(agent.networks, batch, hyper)
            loss.total.backward()
            end = agent.flat.vector.numel()
            nothing = [loss.total.detach() * 0] * agent.flat.tail
            return agent.flat.gather_gradient(nothing)[:end]


def first_batch(setting: Experiment) -> tuple[Any, Any, dict[str, float]]:
    """A slice of the first minibatch, its normalizers and the algorithm's numbers, collected on the CPU."""
    agent = Agent(setting)
    group = acting_groups(setting, range(setting.scheme.shards))[0]
    shards = range(group.shards[0], group.shards[-1] + 1)
    collector, version = Collector(agent, RolloutBuffers(agent, shards, 1, PrivateArena())), agent.version(0)
    learner = learner_of(agent, range(1), TreeSum(1, Group()))
    hyper = agent.algorithm.hyperparameters(0.0)
    collector.reset()
    try:
        for lap in range(tiny_iterations(setting)):
            collected = collector.collect(lap, lambda t: version)[0]
            learner.batches.begin(lap, {0: [collected]}, hyper)
        part = learner.batches.slice(0, 0)
        return part.batch.map(lambda leaf: leaf.clone()), part.normalizers, {**hyper, "update": 1}
    finally:
        collector.close()


def tiny_iterations(setting: Experiment) -> int:
    """Rollouts until there is something to learn from."""
    return 3 if setting.algorithm.replays else 1


def gpu_tests(context: Context) -> Outcome:
    """pytest -m gpu, each test in its own process."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu"]
    if any(importlib.util.find_spec(name) is None for name in ("hypothesis", "pytest_timeout")):
        command += ["-c", os.devnull, "--rootdir", ".", "--noconftest"]  # the tests' settings need them
    elif context.rehearse:
        command += ["--simulated-gpu"]
    file = str(ROOT / "tests" / "test_gpu.py")
    listed = subprocess.run([*command, "--collect-only", "-q", file], cwd=ROOT, capture_output=True, text=True)
    names = [line.strip() for line in listed.stdout.splitlines() if "::" in line]
    if not names:
        return Outcome(False, f"no tests: {(listed.stdout + listed.stderr).strip()[-300:]}")
    names = [name for name in names if "resumes" in name] if context.rehearse else names
    found: dict[str, str] = {}

    def outcome(missing: int = 0) -> Outcome:
        wrong = [f"{name.partition('::')[2]}: {said}" for name, said in found.items() if said != "passed"]
        text = f"{len(found) - len(wrong)} of {len(names)} passed" + (f", {missing} had no time" if missing else "")
        return Outcome(not wrong, text + (f"; {' | '.join(wrong)[:300]}" if wrong else ""), found)

    def done(task: Task, ok: bool, value: Any) -> None:
        found[task.name] = value
        context.save(outcome())

    run = functools.partial(tested, command)
    hands = 2 if context.rehearse else max(2, (os.cpu_count() or 2) // 3)
    tasks = [Task(name, run, (name,)) for name in names]
    return outcome(do(tasks, hands, max(LIMIT, 0.9 * context.seconds), lambda: context.left, done))


def tested(command: list[str], name: str) -> str:
    """Run one test: "passed", or the end of what pytest said."""
    finished = subprocess.run([*command, "-q", name], cwd=ROOT, capture_output=True, text=True)
    print(finished.stdout[-6000:] + finished.stderr[-2000:], flush=True)
    if finished.returncode == 0 and " passed" in finished.stdout:
        return "passed"
    errors = [line for line in finished.stdout.splitlines() if line.startswith("E  ")]
    return "\n".join(errors[-4:] or finished.stdout.strip().splitlines()[-4:])
