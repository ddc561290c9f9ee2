"""Replay of sequences, for recurrent models (Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX).

Shape legend: C steps of the ring, B environments of a shard, K core state, L steps of burn-in, M steps that are learned
from, N steps of a return, R steps of a rollout, J rollouts whose first steps are stored, n items of a slice.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.buffers.arrivals import Arrivals
from lockstep.buffers.replay import Replay, ring_steps
from lockstep.buffers.returns import replayed_returns
from lockstep.core.rollout import Rollout
from lockstep.core.transitions import Drawn, Sequences
from lockstep.experiment import Experiment
from lockstep.models.observations import PLAIN


class SequenceReplay(Replay, reads_on_gpu=True):
    """One shard's steps, drawn as sequences of L + M + N observations. Each sequence begins at the start of a rollout,
    where the core's state is known. Sequences longer than R overlap.

    Each step is stored once, as in Replay, no matter how many sequences contain it. Sequences continue across the ends
    of episodes: `start` says where the core's state is reset, returns end with their episode, and reset steps are not
    valid. The times that `draw` returns are numbers of rollouts here.

    Args:
        experiment: gives the settings.
        rollout: an example of the rollouts to be inserted.
        burn_in: L.
        unroll: M.
    """

    single_steps = False

    def __init__(self, experiment: Experiment, rollout: Rollout, burn_in: int, unroll: int) -> None:
        # One more than the ring holds, so that a rollout's place is reused only after all of its steps have been
        # overwritten.
        self._beginnings = ring_steps(experiment) // len(rollout.reward) + 1
        super().__init__(experiment, rollout)
        self._burn_in, self._unroll = burn_in, unroll
        self._length = burn_in + unroll + self._config.n_step
        self._previous = rollout.prev_action is not None
        self._start = torch.zeros(self.steps, self.size, dtype=torch.bool)
        self._first = torch.full((self._beginnings,), -self.steps, dtype=torch.int64)
        """The number of each rollout's first step."""
        self._state = torch.zeros(self._beginnings, *rollout.core_state.shape)
        """fp32 [J, B, K]: the core's state before this step."""
        self._rollouts = 0
        """Rollouts inserted so far."""
        self._ready = np.zeros(self._beginnings, bool)
        """bool [J]: which of them begin a complete sequence."""
        self._gap = 0
        """The first step after a gap: environments took steps that are not stored. No sequence may contain steps before
        and after it. Checkpoints do not need it, since replay that they contain has no gap."""

    def _places(self) -> int:
        return self._beginnings

    def _renew(self, before: int, rollout: Rollout) -> None:
        """Make sequences drawable that are now complete, and forbid those that were overwritten."""
        steps, place = len(rollout.reward), self._rollouts % self._beginnings
        assert not self._ready[place]
        self._start[(self.count - steps + torch.arange(steps + 1)) % self.steps] = rollout.start
        self._first[place], self._state[place] = self.count - steps, rollout.core_state
        if self._previous and (not self._rollouts or self.count - steps > before):
            # The previous step is not stored: there was none, or environments took steps that are not stored.
            place_before = (self.count - steps - 1) % self.steps
            self._action[place_before], self._reward[place_before] = rollout.prev_action[0], rollout.prev_reward[0]  # type: ignore[index]
        if self.count - steps > before and not rollout.start[0].all():
            self._gap = self.count - steps
        self._rollouts += 1
        known, self._ready = self._ready, self._complete()
        if self._tree is not None:
            changed = np.flatnonzero(known != self._ready)
            items = (changed[:, None] * self.size + np.arange(self.size)).reshape(-1)
            priorities = np.repeat(np.where(self._ready[changed], self._largest, 0.0), self.size)
            new = priorities > 0
            if self._estimates is not None and new.any():
                learned = self._burn_in + np.arange(self._unroll)[:, None]  # [M, 1]
                times = np.repeat(self._first.numpy()[changed], self.size)[new] + learned
                environments = np.tile(items[new] % self.size, (self._unroll, 1))
                priorities[new] = self._by_error(self._estimates, times, environments)
            self._tree.set(items, priorities)

    def _complete(self) -> np.ndarray:
        """bool [J]: whether the sequences that begin with these rollouts are complete."""
        first = self._first.numpy()
        last = first + self._length - 1
        return (first >= self._oldest()) & (last <= self.count) & ((first >= self._gap) | (last < self._gap))

    def _present(self, times: np.ndarray) -> np.ndarray:
        return (times >= self._rollouts - self._beginnings) & self._ready[times % self._beginnings]

    def draw(
        self, items: int, generator: np.random.Generator, newest: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The numbers of the rollouts [n] that sequences begin with, their environments [n], and the probability [n] of
        each."""
        assert newest is None, "recent sequences are not emphasized"
        assert self._ready.any(), "learning began before there was anything to learn from"
        if self._tree is not None:
            place, environment, probability = self._by_priority(self._tree, items, generator)
        else:
            ready = np.flatnonzero(self._ready)
            drawn = generator.integers(0, len(ready) * self.size, items)
            place, environment = ready[drawn // self.size], drawn % self.size
            probability = np.full(items, 1.0 / (len(ready) * self.size))
        last = self._rollouts - 1
        return last - (last - place) % self._beginnings, environment, probability

    def to_read(self, times: np.ndarray, environments: np.ndarray, weight: np.ndarray) -> Drawn:
        places = torch.from_numpy(times % self._beginnings)
        return super().to_read(times, environments, weight).replace(time=self._first[places], rollout=places)

    def items(self, drawn: Drawn) -> Sequences:
        """The minibatch of drawn sequences, as Replay.items."""
        kept, places, environment = self._kept(), drawn.rollout, drawn.environment
        assert places is not None
        time = drawn.time + torch.arange(self._length, device=drawn.time.device).unsqueeze(1)  # [L+M+N, n]
        at, rows = time % self.steps, environment.expand(time.shape)
        learned = slice(self._burn_in, self._burn_in + self._unroll)
        reward, discount, ahead = replayed_returns(kept, time[learned], rows[learned])
        obs = {
            name: ring.take(at.flatten(), rows.flatten()).unflatten(0, at.shape) for name, ring in self._rings.items()
        }
        before = (at - 1) % self.steps
        return Sequences(
            obs=obs.get(PLAIN, obs),
            start=kept["start"][at, rows],
            prev_action=kept["action"][before, rows] if self._previous else None,
            prev_reward=kept["reward"][before, rows] if self._previous else None,
            state=kept["core_state"][places, environment],
            action=kept["action"][at[learned], rows[learned]],
            reward=reward,
            discount=discount,
            ahead=ahead,
            weight=drawn.weight,
            valid=kept["valid"][at[learned], rows[learned]],
            noise=drawn.noise,
        )

    def _mirror(self, before: int, arrivals: Arrivals) -> None:
        super()._mirror(before, arrivals)
        place = (self._rollouts - 1) % self._beginnings
        arrivals.write(self._on_device["core_state"], place, self._state[place : place + 1])

    def _mirrored(self) -> dict[str, Tensor]:
        return {**super()._mirrored(), "core_state": self._state}

    def _by_step(self) -> dict[str, Tensor]:
        return {**super()._by_step(), "start": self._start}

    def state(self) -> dict[str, Tensor]:
        """The state that is not per step, by name."""
        return {
            **super().state(),
            "first": self._first,
            "core_state": self._state,
            "rollouts": torch.tensor(self._rollouts),
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of `state`. The steps must have been restored before."""
        self._state.copy_(tensors["core_state"])
        super().load(tensors)
        self._first.copy_(tensors["first"])
        self._rollouts = int(tensors["rollouts"])
        self._ready = self._complete()

    @property
    def nbytes(self) -> int:
        """The memory's size in bytes."""
        return super().nbytes + self._state.nbytes
