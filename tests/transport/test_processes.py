"""What collectors of a split layout tell the learners, without processes."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated_gpu
import torch
from tiny import EXPERIMENTS

from lockstep.agent import Agent
from lockstep.core.rollout import RolloutInfo
from lockstep.core.shards import block
from lockstep.distributed.channels import Channels, open_channels
from lockstep.distributed.device_memory import lend
from lockstep.distributed.groups import Group
from lockstep.models.versions import Version, Versions
from lockstep.transport.processes import CollectorConnection, SharedMemoryRollouts


def info(shard: int) -> RolloutInfo:
    return RolloutInfo(shard, 0, 0, ((0, 0),), np.zeros(0), {}, [])


@pytest.fixture
def agent() -> Agent:
    return Agent(EXPERIMENTS["cartpole-lag-1"]())


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[list[Channels], list[Channels]]]:
    """Those of the learners and of the collectors, of which there are as many as the test says."""
    parts = [[block(4, count, i) for i in range(count)] for count in request.param]
    learners, collectors = open_channels(multiprocessing.get_context("spawn"), *parts)
    yield learners, collectors
    for each in (*learners, *collectors):
        each.close()


@pytest.mark.parametrize("ends", [(2, 1)], indirect=True)
def test_times_of_several_rollouts_add_up_and_are_told_once(
    agent: Agent, ends: tuple[list[Channels], list[Channels]]
) -> None:
    (learner,), (first, second) = ends
    schedule = agent.experiment.schedule()
    rollouts = SharedMemoryRollouts(agent, learner, Group(), schedule, Versions(schedule), free=False, ipc=False)
    rollouts.publish(agent.version(0))
    first.send(("rollout", [info(0)], {"env": 1.0}), 0)
    second.send(("rollout", [info(2), info(3)], {"env": 4.0}), 0)
    first.send(("rollout", [info(1)], {"env": 2.0}), 0)
    assert {slot: [each.info.shard for each in taken] for slot, taken in rollouts.take(0).items()} == {
        slot: [slot] for slot in range(4)
    }
    assert rollouts.collector_times() == [{"env": 3.0}, {"env": 4.0}]
    assert rollouts.collector_times() == []


@pytest.mark.parametrize("ends", [(1, 2)], indirect=True)
def test_learner_0_hears_the_times_of_rollouts_that_are_not_its_own(
    agent: Agent, ends: tuple[list[Channels], list[Channels]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (zero, one), (channels,) = ends
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("lockstep.transport.processes.time", clock)
    collectors: Any = SimpleNamespace(
        shards=range(4), take_times=lambda: {"env": 1.0}, state=lambda numbers: {shard: {} for shard in numbers}
    )
    end = CollectorConnection(agent, channels, collectors, agent.experiment.schedule(), free=False)
    only = info(3)
    end.waited, clock.now = 2.0, 10.0
    end.deliver([only])
    ((_, (_, none, times)),), ((_, (_, own, again)),) = zero.receive([0], block=False), one.receive([0], block=False)
    assert (none, [each.shard for each in own]) == ([], [3]) and times == again
    assert times == {"env": 1.0, "waiting": 2.0, "other": 7.0}
    end.deliver([only])
    ((_, (_, _, times)),) = zero.receive([0], block=False)
    assert times == {"env": 1.0, "waiting": 0.0, "other": 0.0}, "since the last delivery"


@pytest.mark.parametrize("ends", [(1, 1)], indirect=True)
@pytest.mark.parametrize(
    ("collecting", "quiet", "tried", "told"),
    [("cuda:0", False, True, True), ("cuda:0", True, True, False), ("cpu", False, False, False)],
)
def test_parameters_lie_in_shared_memory_where_collectors_cannot_open_the_gpus(
    collecting: str,
    quiet: bool,
    tried: bool,
    told: bool,
    ends: tuple[list[Channels], list[Channels]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here both are one process, which cannot open its own handles."""
    (learner,), (channels,) = ends
    with simulated_gpu.simulated():
        agent = Agent(EXPERIMENTS["cartpole-lag-1"]().replace(precision="fp32"), "cuda:0")
        collectors_agent, schedule = Agent(agent.experiment, collecting), agent.experiment.schedule()
        rollouts = SharedMemoryRollouts(
            agent, learner, Group(), schedule, Versions(schedule), free=False, ipc=True, quiet=quiet
        )
        rollouts.versions.publish(agent.version(0))
        collectors: Any = SimpleNamespace(
            shards=range(4),
            frames_per_step=1,
            reset=lambda: None,
            offset=lambda shard: 0,
            state=lambda numbers: {shard: {} for shard in numbers},
        )
        read: list[Version] = []

        def collect() -> None:
            end = CollectorConnection(collectors_agent, channels, collectors, schedule, free=False)
            end.start(None)
            read.append(end.version(0))

        collector = threading.Thread(target=collect, daemon=True)
        collector.start()
        rollouts.start(None)
        collector.join()
        (version,) = read
        assert version.parameters.device.type == "cpu"
        assert torch.equal(version.parameters, agent.flat.vector.detach().cpu())
        assert any("opened by the process that made it" in fault for fault in simulated_gpu.faults()) == tried
        memory = simulated_gpu._books().shared._memory
        assert bool(memory) == tried, "what nobody opens is not lent, since torch would keep it"
    assert ("since CUDA IPC failed: CUDA error: a handle was opened by the process" in capsys.readouterr().err) == told


@pytest.mark.parametrize("ends", [(1, 1)], indirect=True)
@pytest.mark.parametrize("dead", [True, False])
def test_memory_of_a_dead_learner_is_no_error_of_the_collector(
    dead: bool, ends: tuple[list[Channels], list[Channels]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.distributed.device_memory._ENDING", 60.0 if dead else 0.01)
    (learner,), (channels,) = ends
    with simulated_gpu.simulated():
        agent = Agent(EXPERIMENTS["cartpole-lag-1"]().replace(precision="fp32"), "cuda:0")
        collectors: Any = SimpleNamespace(shards=range(4))
        end = CollectorConnection(agent, channels, collectors, agent.experiment.schedule(), free=False)
        handle = lend(torch.ones(3, device="cuda:0"))  # of this process, which cannot open it
        learner.send(("version", 0, handle), 0)
        if dead:
            learner.close()
        with pytest.raises(ConnectionError if dead else RuntimeError, match="closed by peer" if dead else "was opened"):
            end.listen()
        assert len(simulated_gpu.faults()) == 1
