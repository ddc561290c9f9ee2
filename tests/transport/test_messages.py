"""Rollouts and versions in messages, without anything that carries them."""

from __future__ import annotations

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny import EXPERIMENTS, options

from lockstep.agent import Agent
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import RolloutInfo
from lockstep.core.schedule import LapId, Schedule
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena, PrivateMemory
from lockstep.launchers.launch import train
from lockstep.models.versions import Version, Versions
from lockstep.run.folder import RunFolder
from lockstep.training.job import Job
from lockstep.training.prepare import prepare
from lockstep.training.start import collector_service
from lockstep.transport.free_running import Admission
from lockstep.transport.inbox import Inbox
from lockstep.transport.message_rollouts import MessageRollouts
from lockstep.transport.messages import CollectorService, RolloutMessage, VersionMessage

SHARDS = [0, 1, 2, 3]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    layout = Layout.parse("cpu:a1-l1")
    return Job(RunFolder(tmp_path), prepare(EXPERIMENTS["memory-gru-lag-2"](), layout), layout, RunOptions())


def sent(messages: list[RolloutMessage]) -> list[RolloutMessage]:
    """As they are on the other side: of memory of their own."""
    return [RolloutMessage(p.info, [x.copy() for x in p.fields], p.state, p.spent) for p in messages]


def test_whoever_replaces_a_collector_collects_what_it_would_have(job: Job) -> None:
    version = VersionMessage.of(Agent(job.experiment).version(0))
    first, second = collector_service(job, 0, lambda: None), collector_service(job, 0, lambda: None)
    first.start({shard: {} for shard in SHARDS})
    states = {message.info.shard: message.state for message in sent(first.collect(0, version))}
    replayed, _ = second.start(states)
    assert replayed > 0
    for number in (1, 2):
        lost, again = (sent(each.collect(number, version)) for each in (first, second))
        assert [p.info.digests for p in lost] == [p.info.digests for p in again]
        assert [p.info.number for p in again] == [number] * 4
    first.close()
    second.close()


def test_a_collector_that_replaces_one_at_its_start_may_know_some_of_the_states(job: Job) -> None:
    """A free-running collector was lost after learners had received the states of some of its shards."""
    version = VersionMessage.of(Agent(job.experiment).version(0))
    first, second = collector_service(job, 0, lambda: None), collector_service(job, 0, lambda: None)
    first.start({shard: {} for shard in SHARDS})
    assert second.start({**first.states(), 1: {}}, dict.fromkeys(SHARDS, 0)) == (0, 1)
    lost, again = (sent(each.collect(0, version)) for each in (first, second))
    assert [p.info.digests for p in lost] == [p.info.digests for p in again]
    first.close()
    second.close()


def test_rollouts_may_come_late_and_twice(job: Job) -> None:
    agent, schedule = Agent(job.experiment), job.experiment.schedule()
    versions = Versions(schedule)
    versions.publish(agent.version(0))
    inbox = Inbox(schedule.lag + 1)
    rollouts = MessageRollouts(agent, inbox, Group(), schedule, versions, 1)
    one: CollectorService = collector_service(job, 0, lambda: None)
    inbox.started(0, one.start({shard: {} for shard in SHARDS}))
    assert rollouts.start(None) == 0
    laps = [sent(one.collect(number, inbox.version(0))) for number in range(3)]
    for lap in (2, 0, 1, 0):
        for message in reversed(laps[lap]):
            inbox.deliver(message)
    for number in range(3):
        taken = rollouts.take(number)
        for shard, (collected,) in taken.items():
            expected = laps[number][shard]
            assert collected.info is expected.info
            for leaf, field in zip(collected.rollout.leaves(), expected.fields, strict=True):
                assert torch.equal(leaf, torch.from_numpy(field))
        inbox.deliver(laps[number][0])  # which was learned from
        rollouts.publish(agent.version(number + 1))
    assert len(rollouts.collector_times()) == 1, "where the collector's time went, once"
    assert {shard: list(state) for shard, state in inbox.states(SHARDS, 3).items()} == {
        message.info.shard: list(message.state) for message in laps[2]
    }
    one.close()


def test_compressed_rollouts_are_equal(job: Job) -> None:
    version = VersionMessage.of(Agent(job.experiment).version(0))
    compressing = replace(job, layout=replace(job.layout, compress=True))
    plain, compressed = collector_service(job, 0, lambda: None), collector_service(compressing, 0, lambda: None)
    for each in (plain, compressed):
        each.start({shard: {} for shard in SHARDS})
    (one, *_), (other, *_) = plain.collect(0, version), compressed.collect(0, version)
    assert all(isinstance(field, bytes) for field in other.fields)
    agent = Agent(job.experiment)
    buffers = RolloutBuffers(agent, range(len(SHARDS)), 1, PrivateArena())
    found = other.unpack(buffers.rollout(other.info.shard, 0)).leaves()
    assert all(torch.equal(leaf, torch.from_numpy(field)) for leaf, field in zip(found, one.fields, strict=True))
    plain.close()
    compressed.close()


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r'pip install .*\[ray\]"'):
        train(EXPERIMENTS["cartpole-lag-1"](), Layout.parse("ray:2"), options(tmp_path / "run"))


def message(shard: int, number: int, state: dict[str, np.ndarray]) -> RolloutMessage:
    return RolloutMessage(RolloutInfo(shard, number, number, ((0, 0),), np.zeros(0), {}, []), [], state, {})


def test_a_checkpoint_waits_for_the_first_state_of_a_shard_that_was_not_learned_from() -> None:
    inbox = Inbox(2)
    inbox.remember(0, 0, {})
    assert inbox.states([0], 0) == {0: {}}, "a collector begins with it"
    with ThreadPoolExecutor() as pool:
        state = pool.submit(inbox.states, [0], 0, begun=True)
        inbox.remember(0, 0, {"episode": np.ones(1)})
        assert state.result(timeout=60)[0]["episode"] == 1


def test_announcements_may_come_in_any_order_and_twice() -> None:
    inbox = Inbox(2, Admission(PrivateMemory(), 2, 2))

    def announce(*laps: tuple[int, int]) -> list[LapId]:
        inbox.announce([message(shard, lap, {}).info for shard, lap in laps])
        return list(inbox.announced(block=False))

    assert announce((1, 1)) == [], "lap 0 comes first"
    assert announce((0, 0)) == [(0, 0)]
    assert announce((1, 0), (0, 0)) == [(1, 0), (1, 1)]
    assert announce((1, 1), (1, 0)) == []
    assert announce((1, 3)) == [], "lap 2 did not arrive"
    assert inbox.take_over([1], 1) == 2
    assert announce((1, 2)) == [], "of a lost collector"
    inbox.announce([message(1, 2, {}).info], 1)
    assert list(inbox.announced(block=True)) == [(1, 2)]


def test_whoever_replaces_a_free_running_collector_begins_its_laps_with_the_same_versions() -> None:
    inbox = Inbox(2, Admission(PrivateMemory(), 2, 2))
    nothing: Any = SimpleNamespace(state=lambda: {})

    def publish(number: int, learned: list[int]) -> None:
        inbox.publish(Version(number, torch.zeros(1), nothing), 0, learned)

    publish(0, [])
    assert inbox.admit([0, 1], 0) == 0
    publish(1, [])
    assert inbox.admit([0, 1], 1) == 1
    assert [inbox.admit([0, 1], lap) for lap in (0, 1)] == [0, 1]
    publish(2, [0])
    with ThreadPoolExecutor() as pool:
        later = pool.submit(inbox.admit, [0, 1], 2)
        assert [inbox.admit([0, 1], lap) for lap in (0, 1)] == [0, 1]
        assert not later.done(), "shard 1 has no free buffer"
        publish(3, [1])
        assert later.result(timeout=60) == 3


class Noted(np.ndarray):
    """An array that can be told to be alive, and so can its copies."""

    references: ClassVar[list[weakref.ref[np.ndarray]]] = []

    def __array_finalize__(self, obj: object) -> None:
        Noted.references.append(weakref.ref(self))


def test_a_mailbox_keeps_what_is_still_needed_alone() -> None:
    """With two rollouts under way, a checkpoint may ask for the states of two rollouts ago."""
    inbox, messages = Inbox(2), list[weakref.ref[RolloutMessage]]()

    def deliver(number: int) -> None:
        sent = message(0, number, {"next": np.full(1, number + 1).view(Noted)})
        messages.append(weakref.ref(sent))
        inbox.deliver(sent)

    for number in range(9):
        deliver(number)
        inbox.take([LapId(0, number)])
        deliver(number)
    assert not any(each() for each in messages), "what was learned from and came twice"
    kept = {int(array[0]) for each in Noted.references if (array := each()) is not None}
    assert {7, 8, 9} <= kept and len(kept) <= 4
    assert [inbox.states([0], number)[0]["next"].tolist() for number in (7, 8, 9)] == [[7], [8], [9]]


def test_versions_that_no_rollout_needs_any_more_are_forgotten() -> None:
    inbox, schedule = Inbox(3), Schedule(2, iterations=20)
    versions = Versions(schedule)
    rollouts = MessageRollouts(Agent(EXPERIMENTS["cartpole-lag-1"]()), inbox, Group(), schedule, versions, 1)
    normalizers: Any = SimpleNamespace(state=lambda: {})
    messages: list[weakref.ref[VersionMessage]] = []
    for number in range(9):
        rollouts.publish(Version(number, torch.zeros(1), normalizers))
        messages.append(weakref.ref(inbox.version(number)))
        needed = list(range(max(0, number - 2), number + 1))
        assert [n for n, each in enumerate(messages) if each() is not None] == needed == list(versions.held())
        assert [inbox.version(n).number for n in needed] == needed
