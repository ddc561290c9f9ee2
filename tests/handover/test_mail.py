"""Rollouts and versions in messages, without anything that carries them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EXPERIMENTS, options

from lockstep.agent import Agent, Version
from lockstep.clock import Clock, Fill, Versions
from lockstep.collecting.collectors import Delivery
from lockstep.handover.mail import Collection, Mailbox, MailedRollouts, Parcel, Published
from lockstep.job import Job
from lockstep.layout import Layout
from lockstep.prepare import prepare
from lockstep.run import RunFolder, RunOptions
from lockstep.runtime.group import Group
from lockstep.settings import SettingsError
from lockstep.train import collection, train

SHARDS = [0, 1, 2, 3]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    layout = Layout.parse("cpu:a1-l1")
    return Job(RunFolder(tmp_path), prepare(EXPERIMENTS["memory-gru-lag-2"](), layout), layout, RunOptions())


def sent(parcels: list[Parcel]) -> list[Parcel]:
    """As they are on the other side: of memory of their own."""
    return [Parcel(p.delivery, [x.copy() for x in p.fields], p.state, p.spent) for p in parcels]


def test_whoever_replaces_a_collector_collects_what_it_would_have(job: Job) -> None:
    version = Published.of(Agent(job.experiment).version(0))
    first, second = collection(job, 0, lambda: None), collection(job, 0, lambda: None)
    first.start({shard: {} for shard in SHARDS})
    states = {parcel.delivery.shard: parcel.state for parcel in sent(first.collect(0, version))}
    replayed, _ = second.start(states)
    assert replayed > 0
    for number in (1, 2):
        lost, again = (sent(each.collect(number, version)) for each in (first, second))
        assert [p.delivery.digests for p in lost] == [p.delivery.digests for p in again]
        assert [p.delivery.number for p in again] == [number] * 4
    first.close()
    second.close()


def test_rollouts_may_come_late_and_twice(job: Job) -> None:
    agent, clock = Agent(job.experiment), Clock.of(job.experiment)
    versions = Versions(clock)
    versions.publish(agent.version(0))
    mailbox = Mailbox(clock.lag + 1)
    rollouts = MailedRollouts(agent, mailbox, Group(), clock, versions, 1)
    one: Collection = collection(job, 0, lambda: None)
    mailbox.started(0, one.start({shard: {} for shard in SHARDS}))
    assert rollouts.start(None) == 0
    laps = [sent(one.collect(number, mailbox.version(0))) for number in range(3)]
    for lap in (2, 0, 1, 0):
        for parcel in reversed(laps[lap]):
            mailbox.deliver(parcel)
    for number in range(3):
        taken = rollouts.take(number)
        for shard, (arrival,) in taken.items():
            expected = laps[number][shard]
            assert arrival.delivery is expected.delivery
            for leaf, field in zip(arrival.filled.rollout.leaves(), expected.fields, strict=True):
                assert torch.equal(leaf, torch.from_numpy(field))
        mailbox.deliver(laps[number][0])  # which was learned from
        rollouts.publish(agent.version(number + 1))
    assert len(rollouts.collector_times()) == 1, "where the collector's time went, once"
    assert {shard: list(state) for shard, state in mailbox.states(SHARDS, 3).items()} == {
        parcel.delivery.shard: list(parcel.state) for parcel in laps[2]
    }
    one.close()


def test_compressed_rollouts_are_equal(job: Job) -> None:
    version = Published.of(Agent(job.experiment).version(0))
    plain, compressed = collection(job, 0, lambda: None), collection(job, 0, lambda: None)
    compressed._compress = True
    for each in (plain, compressed):
        each.start({shard: {} for shard in SHARDS})
    (one, *_), (other, *_) = plain.collect(0, version), compressed.collect(0, version)
    assert all(isinstance(field, bytes) for field in other.fields)
    rollout = plain._collectors.rollout(one.delivery)
    expected = [leaf.clone() for leaf in rollout.leaves()]
    for leaf in rollout.leaves():
        leaf.zero_()
    assert all(map(torch.equal, other.unpack(rollout).leaves(), expected))
    plain.close()
    compressed.close()


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r'pip install .*\[ray\]"'):
        train(EXPERIMENTS["cartpole-lag-1"](), Layout.parse("ray:2"), options(tmp_path / "run"))


def parcel(shard: int, number: int) -> Parcel:
    return Parcel(Delivery(shard, number, number, ((0, 0),), np.zeros(0), {}, []), [], {}, {})


def test_a_mailbox_keeps_what_is_still_needed_alone() -> None:
    """With two rollouts under way, a checkpoint may ask for the states of two rollouts ago."""
    mailbox = Mailbox(2)
    for number in range(9):
        mailbox.deliver(parcel(0, number))
        mailbox.take([Fill(0, number)])
        mailbox.deliver(parcel(0, number))
    assert not mailbox._parcels, "what was learned from and came twice"
    assert {7, 8, 9} <= mailbox._states[0].keys() and len(mailbox._states[0]) <= 4


def test_versions_that_no_rollout_needs_any_more_are_forgotten() -> None:
    mailbox, clock = Mailbox(3), Clock(2, iterations=20)
    versions = Versions(clock)
    rollouts: Any = SimpleNamespace(versions=versions, _speaks=True, _mailbox=mailbox, _clock=clock)
    normalizers: Any = SimpleNamespace(state=lambda: {})
    for number in range(9):
        MailedRollouts.publish(rollouts, Version(number, torch.zeros(1), normalizers))
        assert list(mailbox._versions) == list(range(max(0, number - 2), number + 1)) == list(versions.held())
