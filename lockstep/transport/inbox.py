"""The inbox of a learner's process. It receives the messages of collectors, and gives them versions.

Messages may arrive in any order, and twice. If collectors run freely, learner 0's inbox admits each of their rollouts
(lockstep.transport.free_running), and learner 0 chooses among those that were announced to it. Every learner that may
need these has received them.
"""

from __future__ import annotations

import threading
from collections import defaultdict

from lockstep.core.rollout import RolloutInfo
from lockstep.core.schedule import LapId
from lockstep.models.versions import Version
from lockstep.transport.free_running import Admission
from lockstep.transport.messages import RolloutMessage, State, VersionMessage


class Inbox:
    """Passes messages from the threads that receive them to a learner's thread. It waits without a limit: the launcher
    ends the process if a message will not come.

    Args:
        laps: how many rollouts of a shard may be under way at a time.
        admission: the admission of collectors that run freely.
    """

    def __init__(self, laps: int, admission: Admission | None = None) -> None:
        self.admission = admission
        self._changed = threading.Condition()
        self._messages: dict[LapId, RolloutMessage] = {}
        self._next: dict[int, int] = defaultdict(int)
        """By shard: the lap that is learned from next."""
        self._announced: dict[LapId, RolloutInfo] = {}
        """Laps that `announced` will return, in order of arrival."""
        self._early: dict[LapId, RolloutInfo] = {}
        """Laps that were announced before an earlier lap of their shard."""
        self._listed: dict[int, int] = defaultdict(int)
        """By shard: the lap that is announced next."""
        self._generation: dict[int, int] = defaultdict(int)
        """By shard: increases with each new collector."""
        self.offsets: dict[int, int] = {}
        """By shard: the number of the rollout that lap 0 collects. It is known as soon as a state of the shard is."""
        self._states: dict[int, dict[int, State]] = defaultdict(dict)
        """By shard and next lap: the shard's state before this lap."""
        self._kept = laps + 1
        self._versions: dict[int, VersionMessage] = {}
        self._ready: dict[int, tuple[int, int]] = {}

    def deliver(self, message: RolloutMessage) -> None:
        """Receive a rollout."""
        shard, lap = message.info.lap_id
        with self._changed:
            if lap < self._next[shard]:
                return  # a duplicate
            self._messages[message.info.lap_id] = message
            self.remember(shard, lap + 1, message.state)

    def take(self, lap_ids: list[LapId]) -> list[RolloutMessage]:
        """Wait for rollouts, and remove them from the inbox."""
        with self._changed:
            self._changed.wait_for(lambda: all(lap_id in self._messages for lap_id in lap_ids))
            self._next.update({shard: max(self._next[shard], lap + 1) for shard, lap in lap_ids})
            return [self._messages.pop(lap_id) for lap_id in lap_ids]

    def take_over(self, shards: list[int], generation: int) -> int:
        """Accept announcements of a new collector of these shards, and ignore those of its predecessor. Returns the lap
        that the new one continues with. No learner has learned from this lap or a later one, so its version and state
        still exist."""
        with self._changed:
            self._generation.update(dict.fromkeys(shards, generation))
            # Otherwise these laps could be learned from before the new collector collects them again.
            self._early = {lap_id: info for lap_id, info in self._early.items() if lap_id.shard not in shards}
            return self._listed[shards[0]]

    def announce(self, infos: list[RolloutInfo], generation: int = 0) -> None:
        """Receive the announcement of a lap of all shards of a collector. Every learner that may need the lap has
        received it."""
        with self._changed:
            for info in infos:
                if generation < self._generation[info.shard]:
                    continue  # its collector is lost, and another one collects the lap again
                if info.lap >= self._listed[info.shard]:  # or it is a duplicate
                    self._early[info.lap_id] = info
                while (lap_id := LapId(info.shard, self._listed[info.shard])) in self._early:
                    self._announced[lap_id] = self._early.pop(lap_id)
                    self._listed[info.shard] += 1
            self._changed.notify_all()

    def announced(self, *, block: bool) -> dict[LapId, RolloutInfo]:
        """The laps that were announced since the last call, each shard's in order. block: wait for at least one."""
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self._announced)
            announced, self._announced = self._announced, {}
            return announced

    def admit(self, shards: list[int], lap: int) -> int:
        """Wait for a free buffer of every shard. Returns the version to begin the lap with."""
        admission, version = self.admission, None
        assert admission is not None
        with self._changed:
            while not self._versions or (version := admission.begin(shards, lap)) is None:
                self._changed.wait()
        return version

    def remember(self, shard: int, lap: int, state: State) -> None:
        """Keep a shard's state before one of its laps, and drop old ones."""
        with self._changed:
            # Copies, since views would keep the whole message in memory.
            self._states[shard][lap] = {name: array.copy() for name, array in state.items()}
            self._states[shard].pop(lap - self._kept - 1, None)
            self._changed.notify_all()

    def states(self, shards: list[int], lap: int, *, begun: bool = False) -> dict[int, State]:
        """Wait for the states of shards before one of their laps. begun: also wait until their environments have
        started, so that the states are not empty."""

        def known(shard: int) -> bool:
            return lap in self._states[shard] and not (begun and not self._states[shard][lap])

        with self._changed:
            self._changed.wait_for(lambda: all(map(known, shards)))
            return {shard: self._states[shard][lap] for shard in shards}

    def publish(self, version: Version, oldest: int, learned: list[int]) -> None:
        """Make a version available to collectors, and drop those before the oldest. If collectors run freely, return
        one buffer for each entry of `learned`, the number of a shard."""
        with self._changed:
            self._versions[version.number] = VersionMessage.of(version)
            self._versions = {number: each for number, each in self._versions.items() if number >= oldest}
            if self.admission is not None:
                self.admission.publish(version.number, learned)
            self._changed.notify_all()

    def version(self, number: int) -> VersionMessage:
        """Wait for a version."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._versions)
            return self._versions[number]

    def started(self, group: int, ready: tuple[int, int]) -> None:
        """Receive the result of CollectorService.start."""
        with self._changed:
            self._ready[group] = ready
            self._changed.notify_all()

    def ready(self, groups: int) -> list[tuple[int, int]]:
        """Wait until the collectors of this many groups of shards have started. Returns the results of their starts."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) >= groups)
            return list(self._ready.values())
