"""The simulated GPU finds planted faults of every kind, and the small experiments train on it without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated_gpu
import torch
from simulated_books import BACK, COPY, KERNEL, LAUNCH, PAGEABLE, PEER, PINNED, SORTED, STAGED, SYNC
from simulated_cuda import Stream
from simulated_gpu import counts, faults
from tiny import ALIKE, EXPERIMENTS, options, squashed
from torch import Tensor

from lockstep.algorithms.offpolicy import off_policy
from lockstep.buffers import sources
from lockstep.buffers.batches import Slice
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.distributed.shared_memory import PrivateArena, SharedMemory
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.learners import learner
from lockstep.learners.gradient_graphs import GradientGraphs, graphs_of
from lockstep.system.graphs import Branches, cuda_graph

GPU = "cuda:0"
ALL: dict[str, Callable[[], Experiment]] = {
    **{name: make for name, make in EXPERIMENTS.items() if make().precision != "portable"},  # which is of CPUs alone
    "squashed": squashed,
    "td3-rmsprop-tf": lambda: EXPERIMENTS["td3"]().replace(**{"algorithm.optimizer.name": "rmsprop_tf"}),
}
LAYOUTS = {
    "impala-lstm-lag-2": ["a0-l1,2,3"],
    "td3": ["a0-l0", "a0,0-l0", "a0-l0,graphs=1", "a0-l0,0,ipc=0"],
    "crossq": ["inline,device=0,graphs=1"],
    "spr-lag-1": ["inline,device=0,graphs=1"],
    "policies-lag-1": ["inline,device=0,graphs=1"],
    "r2d2-prioritized-frames": ["processes:2,device=0,graphs=1"],
}
"""Each kind of layout with an experiment or two, since a run starts several processes."""
MORE_LAYOUTS = {
    "impala-lstm-lag-2": ["inline,device=0,graphs=1", "processes:2,device=0"],
    "critic-only-lstm": ["inline,device=0,graphs=1", "a0-l0,graphs=1"],
    "policies-lag-1": ["a0-l0"],
    "transformer-lag-1": ["inline,device=0,graphs=1", "processes:2,device=0"],
    "mingru": ["inline,device=0,graphs=1", "processes:2,device=0", "a0-l0"],
    "r2d2-prioritized-frames": ["a0-l0,graphs=1"],
}
"""Of `make test-full`. `python tests/simulated_gpu.py all` takes all."""
ON_POLICY = ("mujoco-normalized", "memory-gru-lag-2", "ppo-bf16", "ppo-lstm", "transformer-lag-1")
REPLAYING = ("td3", "sac-prioritized-lag-1", "r2d2-uniform-lag-1", "iqn", "td3-rmsprop-tf")
"""Trained with graphs and without."""
GRAPHS_MARKS = {
    "ppo-bf16": (pytest.mark.slow, pytest.mark.full),  # its convolutions are in test_graphs.py
    "ppo-lstm": (pytest.mark.slow, pytest.mark.full),  # ppo-bf16's convolutions, and a core as memory-gru-lag-2's
    "transformer-lag-1": (pytest.mark.slow, pytest.mark.full),  # a core, too
}
ELSEWHERE = {
    *ALIKE,
    *LAYOUTS,
    *ON_POLICY,
    *REPLAYING,
    *("cartpole-lag-1", "cartpole-8-shards"),  # cartpole-desired-kl and cartpole-gradient-lag-3
    "curriculum-lag-1",  # a matter of the host; the rest is ppo-lstm's
    "torch-env-gru-lag-1",  # in test_device_rollout.py
    *("a2c", "appo", "dqn-prioritized-frames"),  # impala-lstm-lag-2 and r2d2-prioritized-frames
    *("pqn-gru-lag-1", "sac-gru-lag-1", "td3-lstm-prioritized"),  # pqn, sac-prioritized-lag-1, td3 with cores
    "popart-impala-one-task",  # popart-lag-1
}
"""What other tests train on one GPU, or all parts of it."""


@pytest.fixture
def gpu() -> Iterator[None]:
    with simulated_gpu.simulated(gpus=4):
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def found(text: str) -> bool:
    """Whether a fault was written down, with the line of this file."""
    return any(text in fault and "test_simulated_gpu.py" in fault for fault in faults())


# What it simulates


@pytest.mark.usefixtures("gpu")
def test_tensors_are_where_they_were_put() -> None:
    x = torch.arange(6.0, device=GPU).view(2, 3)
    assert x.device == x[0].device == (x + 1).device == torch.zeros_like(x).device == torch.device(GPU)
    assert x.is_cuda and not x.is_cpu and x.get_device() == 0
    assert x.cpu().device.type == "cpu" and x.to("cuda:3").device.index == 3
    assert torch.zeros_like(x, device="cpu").device.type == x.new_zeros(2, device="cpu").device.type == "cpu"
    assert x.new_tensor([1.0]).device == torch.tensor(1, device=GPU).device == torch.device(GPU)
    assert x.sum().item() == 15 and x.tolist() == [[0, 1, 2], [3, 4, 5]]
    torch.cuda.set_device("cuda:2")
    assert torch.ones(1, device="cuda").device.index == torch.cuda.current_device() == 2


@pytest.mark.usefixtures("gpu")
def test_values_that_are_put_on_a_gpu_are_copies() -> None:
    values = np.zeros(3, np.float32)
    x = torch.as_tensor(values, device=GPU)
    x += 1
    assert not values.any() and torch.from_numpy(values).device.type == "cpu"


@pytest.mark.usefixtures("gpu")
def test_gradients_of_a_module() -> None:
    model = torch.nn.Linear(3, 2)
    expected = torch.autograd.grad(model(torch.ones(4, 3)).square().sum(), model.weight)[0]
    model.to(GPU)
    model(torch.ones(4, 3, device=GPU)).square().sum().backward()
    assert model.weight.grad is not None and model.weight.grad.device == torch.device(GPU)
    assert torch.equal(model.weight.grad.cpu(), expected)
    assert not faults()


def test_nothing_is_left_of_it() -> None:
    with simulated_gpu.simulated():
        x = torch.ones(2, device=GPU)
        assert torch.cuda.device_count() == 4
    assert not torch.cuda.is_available() and x.device.type == "cpu"
    assert x.numpy().sum() == 2
    with simulated_gpu.simulated():  # constants that are made once
        assert x.is_cuda


@pytest.mark.usefixtures("gpu")
def test_events_and_streams() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    event.synchronize()
    torch.cuda.synchronize()
    assert event.query() and event.elapsed_time(event) == 0
    assert counts()[SYNC] == 2


@pytest.mark.usefixtures("gpu")
def test_a_graph_repeats_what_it_captured_and_does_not_run_it_before() -> None:
    x, y = torch.zeros(2, device=GPU), torch.zeros(2, device=GPU)

    def add() -> None:
        x.add_(1)
        y.copy_(x * 2)

    repeat = cuda_graph(add)
    assert x.tolist() == [3, 3]  # of warming up
    x.zero_()
    before = counts()
    repeat()
    repeat()
    assert (counts() - before)[LAUNCH] == 2 and (counts() - before)[KERNEL] == 0
    assert x.tolist() == [2, 2] and y.tolist() == [4, 4]


@pytest.mark.usefixtures("gpu")
def test_a_graph_of_a_gradient() -> None:
    weight = torch.ones(3, 2, device=GPU, requires_grad=True)
    x, found = torch.zeros(4, 3, device=GPU), torch.zeros(3, 2, device=GPU)

    def gradient() -> None:
        found.copy_(torch.autograd.grad((x @ weight).square().sum(), weight)[0])

    repeat = cuda_graph(gradient)
    x.copy_(torch.arange(12.0, device=GPU).view(4, 3))
    repeat()
    captured = found.clone()
    gradient()
    assert torch.equal(captured.cpu(), found.cpu())


# Planted faults


@pytest.mark.usefixtures("gpu")
def test_tensors_of_two_devices_are_refused() -> None:
    x = torch.ones(2, device=GPU)
    assert (x * torch.tensor(2.0)).sum().item() == 4  # numbers of the CPU go with any device
    for other in (torch.ones(2), torch.ones(2, device="cuda:1")):
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(x, other)
    with pytest.raises(RuntimeError, match="same device"):
        torch.stack([x, torch.ones(2)])
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:4")
    assert found("at least two devices")


@pytest.mark.usefixtures("gpu")
def test_numpy_is_refused() -> None:
    x = torch.ones(2, device=GPU)
    for convert in (Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="can't convert"):
            convert(x)
    assert x.cpu().numpy().sum() == 2 and found("to numpy")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[[0, 1]],
        lambda x: x.copy_(torch.zeros(2)),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
    ],
)
def test_a_sync_in_a_capture_is_refused(waits: Callable[[Tensor], object]) -> None:
    x = torch.ones(2, device=GPU)
    before = counts()
    waits(x)
    assert (counts() - before)[SYNC]
    with pytest.raises(SettingsError, match=r"graphs=1: .* while a graph is captured"):
        cuda_graph(lambda: (waits(x), None)[1])
    assert found("while a graph is captured")
    assert x.sum().item() is not None  # the capture has ended


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("make", [lambda x: x.new_tensor([1.0]), lambda x: torch.tensor(1.0, device=x.device)])
def test_a_constant_in_a_capture_is_refused(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, device=GPU)
    with pytest.raises(SettingsError, match=r"graphs=1: .* made of the host's values"):
        cuda_graph(lambda: (x.add_(make(x)), None)[1])
    assert found("made of the host's values")


@pytest.mark.usefixtures("gpu")
def test_numbers_of_python_may_be_captured() -> None:
    x = torch.ones(2, device=GPU)

    def work() -> None:
        x[0] = 5.0
        x.add_(1).masked_fill_(x > 100, 0.0)
        torch.where(x > 0, x, 0.0)

    cuda_graph(work)()
    assert x.tolist() == [6, 5] and not faults()


@pytest.mark.usefixtures("gpu", "deterministic")
def test_an_operation_without_a_deterministic_kernel_is_refused() -> None:
    x = torch.ones(2, 3, device=GPU, requires_grad=True)
    torch.cumsum(torch.ones(2, dtype=torch.long, device=GPU), 0)
    torch.ones(3).cumsum(0)
    assert not faults()
    with pytest.raises(RuntimeError, match="cumsum does not have a deterministic implementation"):
        x.detach().cumsum(0)
    with pytest.raises(RuntimeError, match="_adaptive_avg_pool2d_backward"):
        torch.nn.functional.adaptive_avg_pool2d(x[None, None], (1, 2)).sum().backward()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="cumsum does not have a deterministic implementation"):
        x.detach().cumsum(0)
    assert found("cumsum") and found("_adaptive_avg_pool2d_backward")
    before = counts()
    x.gather(1, torch.zeros(2, 1, dtype=torch.long, device=GPU)).sum().backward()
    assert (counts() - before)[SORTED] == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shared", [False, True])
def test_pinned_memory_that_is_overwritten_too_early_is_found(shared: bool) -> None:
    source: Tensor = (
        SharedMemory().map(lambda arena: arena.zeros((4,)), pinned=True)
        if shared
        else PrivateArena(pinned=True).zeros((4,))
    )
    x = source.to(GPU, non_blocking=True)
    torch.cuda.synchronize()
    source += 1  # the copy was waited for
    assert not faults()
    x.copy_(source, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    x.copy_(source, non_blocking=True)
    event.synchronize()  # waits for the first copy alone
    source.numpy()[0] = 7
    torch.cuda.synchronize()
    assert found("overwritten before its copy was waited for") and sum(faults().values()) == 1


@pytest.mark.usefixtures("gpu")
def test_what_was_not_waited_for_has_not_arrived() -> None:
    x, here = torch.ones(3, device=GPU), torch.zeros(3, pin_memory=True)
    here.copy_(x, non_blocking=True)
    assert here.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert here.tolist() == [1, 1, 1]
    assert torch.zeros(3).copy_(x, non_blocking=True).tolist() == [1, 1, 1]  # pageable memory, so the host waited


def side_by_side(*functions: Callable[[], Tensor]) -> list[Tensor]:
    return Branches(torch.device(GPU), len(functions)).call(functions)


@pytest.mark.usefixtures("gpu")
def test_streams_that_wait_for_each_other_are_in_order() -> None:
    x, y = torch.ones(2, device=GPU), torch.ones(2, device=GPU)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    y += 1
    event.record()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        side.wait_event(event)
        x += y
    side.synchronize()  # the host waits, and launches what follows only then
    x += 1
    torch.cuda.synchronize()
    with side:
        x += 1
        del y
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    there = y.to("cuda:1")  # the streams of both GPUs wait
    found = [x, there.cpu(), *side_by_side(lambda: x * 2, lambda: x * 3, lambda: x * 4)]
    assert [each.tolist() for each in found] == [[5, 5], [10, 10], [10, 10], [15, 15], [20, 20]]
    x.zero_()
    assert not faults()


@pytest.mark.usefixtures("gpu")
def test_an_event_brings_only_what_was_before_it() -> None:
    x, y = torch.ones(2, device=GPU), torch.ones(2, device=GPU)
    side, event = torch.cuda.Stream(), torch.cuda.current_stream().record_event()
    y += 1
    with torch.cuda.stream(side):
        side.wait_event(event)
        x += 1
        assert not faults()
        y.add(1)
    assert found("read before its stream waited for another one that wrote it") and len(faults()) == 1
    x.sum().item()  # of the stream that is no longer current, which no one waits for
    side.synchronize()
    y.sum().item()
    assert sum(faults().values()) == 2


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("missing", ["fork", "join"])
def test_a_branch_that_does_not_wait_or_is_not_waited_for_is_found(
    missing: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, device=GPU)
    waits = Stream.wait_stream

    def forgets(stream: Stream, other: Stream) -> None:
        branching = stream is branches._streams[0] if missing == "fork" else other is branches._streams[0]
        if not branching:
            waits(stream, other)

    def work() -> None:
        x.add_(1)
        total = branches.call([lambda: x * 2, lambda: x * 3])
        if not captured:
            torch.stack(total)

    branches = Branches(torch.device(GPU), 2)
    monkeypatch.setattr(Stream, "wait_stream", forgets)
    if captured:
        with pytest.raises(SettingsError, match=r"the graph does not contain|did not wait for"):
            cuda_graph(work)
    else:
        work()
    if not captured:
        text = "read before its stream waited for another one that wrote it"
    elif missing == "fork":
        text = "by a stream that is not captured"
    else:
        text = "work that the graph's first stream did not wait for"
    assert any(text in fault for fault in faults())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("other", ["read", "written"])
def test_branches_that_share_memory_are_found(other: str, captured: bool) -> None:
    x, y = torch.ones(2, device=GPU), torch.ones(2, device=GPU)

    def work() -> None:
        side_by_side(lambda: x.add_(y), lambda: x * y if other == "read" else x.mul_(y))

    cuda_graph(work) if captured else work()
    assert found(f"{other} before its stream waited for another one that wrote it")
    assert sum(faults().values()) == (4 if captured else 1)  # three runs to warm up


@pytest.mark.usefixtures("gpu")
def test_memory_that_a_branch_writes_after_another_has_read_it_is_found() -> None:
    x = torch.ones(2, device=GPU)
    side_by_side(lambda: x * 2, lambda: x.add_(1))
    assert found("written before its stream waited for another one that read it") and len(faults()) == 1


@pytest.mark.usefixtures("gpu")
def test_a_graph_is_launched_in_the_order_of_its_stream() -> None:
    x, y = torch.ones(2, device=GPU), torch.ones(2, device=GPU)
    repeat = cuda_graph(lambda: (side_by_side(lambda: x.add_(1), lambda: y * 2), None)[1])
    repeat()
    x.add_(y)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        repeat()
    assert not faults()
    y.add_(1)
    assert found("written before its stream waited for another one that read it") and len(faults()) == 1
    x.add_(1)
    assert found("written before its stream waited for another one that wrote it") and len(faults()) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_noise_that_slots_share_is_found_if_they_are_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def branching(batches: Any, period: int, differentiate: Any, capture: Any, _: None) -> GradientGraphs | None:
        return graphs_of(batches, period, differentiate, capture, Branches(torch.device(GPU), 4))

    experiment = ALL["rainbow-lag-1"]()
    monkeypatch.setattr(learner, "graphs_of", branching)
    train(experiment, Layout.parse("inline,device=0,graphs=1"), options(tmp_path / "run"))
    assert any("written before its stream waited" in fault and "models/" in fault for fault in faults())


@pytest.mark.usefixtures("gpu")
def test_copies_are_counted_by_kind() -> None:
    pinned, x = torch.zeros(4, 4, pin_memory=True), torch.zeros(4, 4, device=GPU)
    assert pinned.is_pinned() and pinned[1].is_pinned() and not torch.zeros(2).is_pinned()
    cases: list[tuple[Callable[[], object], dict[str, int]]] = [
        (lambda: x.copy_(pinned, non_blocking=True), {PINNED: 1}),
        (lambda: x.copy_(pinned.t(), non_blocking=True), {STAGED: 1}),
        (lambda: pinned[:, :2].to(GPU, non_blocking=True), {STAGED: 1}),
        (lambda: x.copy_(pinned[0], non_blocking=True), {STAGED: 1}),
        (lambda: x[:, :2].copy_(pinned[:2].view(4, 2), non_blocking=True), {PINNED: 1, KERNEL: 1}),
        (lambda: pinned.t().to(GPU, non_blocking=True), {PINNED: 1}),
        (lambda: pinned.to(GPU, torch.float64, non_blocking=True), {PINNED: 1, KERNEL: 1}),
        (lambda: x.copy_(pinned), {PINNED: 1, SYNC: 1}),
        (lambda: x.copy_(torch.zeros(4, 4), non_blocking=True), {PAGEABLE: 1}),
        (lambda: torch.tensor([1.0], device=GPU), {PAGEABLE: 1, SYNC: 1}),
        (lambda: x.cpu(), {BACK: 1, SYNC: 1}),
        (lambda: x.to("cuda:1"), {PEER: 1}),
        (lambda: x.clone(), {COPY: 1}),
    ]
    for number, (act, expected) in enumerate(cases):
        before = counts()
        act()
        seen = counts() - before
        assert {kind: seen[kind] for kind in seen.kinds()} == expected, number
    assert all("test_simulated_gpu.py" in line for line in counts().lines(STAGED))


@pytest.mark.usefixtures("gpu")
def test_each_call_is_counted() -> None:
    class Part:
        def step(self, x: Tensor) -> Tensor:
            return (x + 1) * 2

    with simulated_gpu.each_call(Part, "step") as calls:
        Part().step(torch.ones(2))
        Part().step(torch.ones(2, device=GPU))
    assert [each[KERNEL] for each in calls] == [0, 2]


# Training


def run_here(experiment: Experiment, text: str, folder: Path) -> str:
    digest = train(experiment, Layout.parse(text), options(folder)).digest
    assert not faults()
    return digest


def run(experiment: Experiment, text: str, folder: Path) -> str:
    """The digest on simulated GPUs."""
    with simulated_gpu.simulated():
        return run_here(experiment, text, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in ELSEWHERE else ()) for name in ALL]
)
def test_every_experiment_trains(name: str, tmp_path: Path) -> None:
    run(ALL[name](), "inline,device=0", tmp_path / "run")


def test_the_hot_path_is_counted(tmp_path: Path) -> None:
    experiment = ALL["mujoco-normalized"]()
    with simulated_gpu.simulated():
        hot = simulated_gpu.hot_path(lambda: run_here(experiment, "inline,device=0", tmp_path / "run"))
    assert len(hot.acting) == 3 * 4 * 16 and len(hot.gradients) == 3 * 2 * 2 and len(hot.learning) == 3
    assert hot.acting[-1][KERNEL] and hot.acting[-1][BACK] and hot.gradients[-1][KERNEL]
    assert hot.iterations[-1][KERNEL] > hot.learning[-1][KERNEL] > 2 * 2 * hot.gradients[-1][KERNEL]


@pytest.mark.parametrize("name", [pytest.param(name, marks=GRAPHS_MARKS.get(name, ())) for name in ON_POLICY])
def test_with_graphs_a_step_and_a_gradient_step_are_one_launch_each(name: str, tmp_path: Path) -> None:
    digests: list[str] = []
    with simulated_gpu.simulated():
        text, folder = "inline,device=0,graphs=1", tmp_path / "graphs"
        hot = simulated_gpu.hot_path(lambda: digests.append(run_here(ALL[name](), text, folder)))
    acting, gradients = hot.acting[-1], hot.gradients[-1]
    assert {kind: acting[kind] for kind in acting.kinds()} == {LAUNCH: 1, PINNED: 1, BACK: 1, SYNC: 1}
    # One copy brings the hyperparameters. The others are of the results of four slots, which three kernels add up.
    assert {kind: gradients[kind] for kind in gradients.kinds()} == {LAUNCH: 1, COPY: 4, PINNED: 1, KERNEL: 3}
    assert digests == [run(ALL[name](), "inline,device=0", tmp_path / "plain")]


@pytest.mark.parametrize(
    "name",
    [
        *REPLAYING[:2],
        *(pytest.param(name, marks=pytest.mark.slow) for name in REPLAYING[2:]),
        pytest.param("r2d2-prioritized-frames", marks=[pytest.mark.slow, pytest.mark.full]),
    ],
)
def test_with_graphs_a_replayed_gradient_step_is_two_launches(name: str, tmp_path: Path) -> None:
    experiment = ALL[name]()
    experiment = experiment.replace(total_steps=experiment.total_steps + 2 * experiment.samples_per_iteration)
    digests: list[str] = []
    with simulated_gpu.simulated():
        text, folder = "inline,device=0,graphs=1", tmp_path / "graphs"
        hot = simulated_gpu.hot_path(lambda: digests.append(run_here(experiment, text, folder)))
    learning, algorithm = hot.learning[-1], off_policy(experiment.algorithm)
    assert learning[LAUNCH] == 2 * algorithm.updates > 2  # the gradients of all slots, and the update
    # For the digests of four slots, metrics and norms, once an iteration; for all slots' priorities, in every step.
    assert learning[SYNC] == 6 + (algorithm.updates if algorithm.replay.prioritized else 0)
    assert digests == [run(experiment, "inline,device=0", tmp_path / "plain")]


def test_slices_of_a_user_s_own_are_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Mine(ReplayBatches):
        def slice(self, slot: int, step: int) -> Slice:
            asked.append(slot)
            return super().slice(slot, step)

    experiment = ALL["td3"]()
    digest = run(experiment, "inline,device=0,graphs=1", tmp_path / "graphs")
    monkeypatch.setattr(sources, "ReplayBatches", Mine)
    assert run(experiment, "inline,device=0,graphs=1", tmp_path / "own") == digest
    updates = experiment.iterations - off_policy(experiment.algorithm).build().warm_iterations(
        experiment.samples_per_iteration
    )
    assert len(asked) == 4 * 3 * updates > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_LAYOUTS if name not in LAYOUTS)]
)
def test_layouts_agree(name: str, full: bool, tmp_path: Path) -> None:
    experiment, layouts = ALL[name](), LAYOUTS.get(name, []) + (MORE_LAYOUTS.get(name, []) if full else [])
    alone = run(experiment, "inline,device=0", tmp_path / "inline")
    for text in layouts:
        with simulated_gpu.simulated():
            assert run_here(experiment, text, tmp_path / text) == alone, text
            lines = counts().lines(KERNEL)
        assert any("collectors/" in line for line in lines) and any("learners/" in line for line in lines), (
            "processes leave their counts"
        )
