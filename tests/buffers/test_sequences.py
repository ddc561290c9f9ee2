"""Replay of sequences against the plain history of the same environments, which keeps everything and searches it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_replay_buffer import World, experiment

from lockstep import recipes
from lockstep.buffers.replay import Replay
from lockstep.buffers.sequences import SequenceReplay
from lockstep.core.rollout import Rollout


class Remembered:
    """A world whose environments are recurrent: a core's state says which rollout of which environment it began.

    Args:
        burn_in: L, unroll: M, n_step: N, steps: C, rollout: R, afresh: rollouts between starts afresh.
    """

    def __init__(
        self, burn_in: int, unroll: int, n_step: int, steps: int, rollout: int, afresh: int, prioritized: bool
    ) -> None:
        self.shape, self.rollout, self.afresh = (burn_in, unroll, n_step), rollout, afresh
        self.settings = experiment(steps=steps, envs=3, n_step=n_step, rollout=rollout, prioritized=prioritized)
        self.world = World(3, 5, "noise", reset=0.04)
        self.first: list[int] = []
        """By rollout: number of its first step."""
        self.starts: dict[int, np.ndarray] = {}
        """By step: whether its observation begins an episode."""

    def memory(self, rollout: Rollout) -> SequenceReplay:
        return SequenceReplay(self.settings, rollout, self.shape[0], self.shape[1])

    def rollouts(self, count: int) -> Iterator[Rollout]:
        action, reward = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
        for number, each in enumerate(self.world.rollouts(self.rollout, count, self.afresh)):
            first = len(self.world.history) - self.rollout
            self.first.append(first)
            for t in range(self.rollout + 1):
                # A rollout knows best how its first step began, and those before one where the last one ended.
                self.starts[first + t] = each.start[t].numpy()
            states = torch.tensor([[float(number), float(env)] for env in range(3)])
            actions, rewards = torch.cat([action[None], each.action]), torch.cat([reward[None], each.reward])
            action, reward = each.action[-1], each.reward[-1]
            yield each.replace(prev_action=actions, prev_reward=rewards, core_state=states)

    def check(self, memory: SequenceReplay, numbers: np.ndarray, environments: np.ndarray) -> None:
        """Every sequence is what happened, step by step."""
        burn_in, unroll, n_step = self.shape
        batch = memory.batch(numbers, environments, np.ones(len(numbers)))
        assert batch.prev_action is not None and batch.prev_reward is not None
        history = self.world.history
        for i, (number, env) in enumerate(zip(numbers, environments, strict=True)):
            assert batch.state[i].tolist() == [number, env]
            first = self.first[number]
            for t in range(burn_in + unroll + n_step):
                now = first + t
                obs = history[now]["obs"][env] if now < len(history) else self.world.stack[env]
                assert np.array_equal(batch.obs[t, i].numpy(), obs)
                assert bool(batch.start[t, i]) == self.starts[now][env]
                if not self.starts[now][env]:
                    assert batch.prev_action[t, i] == history[now - 1]["action"][env]
                    assert batch.prev_reward[t, i] == history[now - 1]["reward"][env]
            for t in range(unroll):
                now = first + burn_in + t
                assert bool(batch.valid[t, i]) == history[now]["valid"][env]
                if batch.valid[t, i]:
                    expected = self.world.transition(now, int(env), n_step)
                    assert batch.action[t, i] == history[now]["action"][env]
                    assert float(batch.reward[t, i]) == pytest.approx(expected["reward"], abs=1e-5)
                    assert float(batch.discount[t, i]) == pytest.approx(expected["discount"], abs=1e-6)
                    after = batch.obs[burn_in + t + int(batch.ahead[t, i]), i].numpy()
                    assert np.array_equal(after, expected["next_obs"])

    def complete(self, steps: int) -> set[int]:
        """Rollouts with which a sequence can begin: nothing overwritten (a stack needs three frames before its own),
        nothing still to come."""
        count, length = len(self.world.history), sum(self.shape)
        return {
            number
            for number, first in enumerate(self.first)
            if first >= max(0, count - steps + 1 + 3) and first + length - 1 <= count
        }


SHAPES = [
    (4, 6, 2, 60, 5, 10**9),  # overlapping, as usual
    (0, 5, 1, 41, 5, 3),  # no burn-in, started afresh now and then
    (3, 7, 5, 64, 16, 2),  # rollouts longer than sequences
    (2, 9, 3, 50, 1, 7),  # one step a rollout
    (6, 1, 4, 33, 7, 4),
]


@pytest.mark.parametrize("prioritized", [True, False])
@pytest.mark.parametrize(("burn_in", "unroll", "n_step", "steps", "rollout", "afresh"), SHAPES)
def test_every_sequence_is_what_happened(
    burn_in: int, unroll: int, n_step: int, steps: int, rollout: int, afresh: int, prioritized: bool
) -> None:
    kept = Remembered(burn_in, unroll, n_step, steps, rollout, afresh, prioritized)
    draw = np.random.default_rng(1)
    memory: SequenceReplay | None = None
    priorities: dict[tuple[int, int], float] = {}
    seen: set[tuple[int, int]] = set()
    every = max(1, 4 // rollout)
    for number, each in enumerate(kept.rollouts(240 // rollout)):
        memory = memory or kept.memory(each)
        memory.insert(each)
        assert memory.count == len(kept.world.history)
        complete = kept.complete(steps)
        if not complete or number % every:
            continue
        items = {(number, env) for number in complete for env in range(3)}
        largest = float(memory.state()["largest"])
        priorities = {item: priorities.get(item, largest) for item in items}
        numbers, environments, probability = memory.draw(8, draw)
        drawn = list(zip(numbers.tolist(), environments.tolist(), strict=True))
        assert set(drawn) <= items
        share = np.array([priorities[item] for item in drawn]) / sum(priorities.values())
        assert probability == pytest.approx(share if prioritized else np.full(8, 1 / len(items)))
        kept.check(memory, numbers, environments)
        seen.update(drawn)
        if prioritized:
            chosen = draw.random(8)
            memory.prioritize(numbers, environments, chosen)
            alpha = kept.settings.algorithm.replay.alpha  # type: ignore[attr-defined]
            priorities |= {item: (p + 1e-6) ** alpha for item, p in zip(drawn, chosen, strict=True)}
    assert len(seen) > 30


def test_a_memory_that_begins_late_is_told_what_came_before() -> None:
    """As after a run was resumed without its memory."""
    kept = Remembered(2, 4, 1, 60, 5, 10**9, True)
    rollouts = list(kept.rollouts(8))[3:]
    memory = kept.memory(rollouts[0])
    for each in rollouts:
        memory.insert(each)
    batch, first = memory.batch(np.zeros(3, np.int64), np.arange(3), np.ones(3)), rollouts[0]
    assert batch.prev_action is not None and batch.prev_reward is not None
    assert first.prev_action is not None and first.prev_reward is not None
    assert torch.equal(batch.prev_action[0], first.prev_action[0]) and first.prev_action[0].any()
    assert torch.equal(batch.prev_reward[0], first.prev_reward[0]) and first.prev_reward[0].any()


def test_a_memory_that_missed_rollouts_is_told_what_came_before_the_next() -> None:
    """As after a run was resumed without its memory, which data filled."""
    kept = Remembered(0, 4, 1, 60, 5, 10**9, True)
    rollouts = list(kept.rollouts(8))
    memory = kept.memory(rollouts[0])
    for each in (*rollouts[:2], *rollouts[5:]):
        memory.insert(each)
    batch, first = memory.batch(np.full(3, 2), np.arange(3), np.ones(3)), rollouts[5]
    assert batch.prev_action is not None and batch.prev_reward is not None
    assert first.prev_action is not None and first.prev_reward is not None
    assert torch.equal(batch.obs[0], first.obs[0]), "the sequence begins after the gap"
    assert torch.equal(batch.prev_action[0], first.prev_action[0]) and first.prev_action[0].any()
    assert torch.equal(batch.prev_reward[0], first.prev_reward[0]) and first.prev_reward[0].any()


def test_no_sequence_contains_what_a_memory_missed() -> None:
    """A core would go on from one episode into another, whose beginning nobody has seen."""
    kept = Remembered(0, 8, 1, 60, 5, 10**9, True)
    rollouts = list(kept.rollouts(8))
    memory = kept.memory(rollouts[0])
    for each in (*rollouts[:2], *rollouts[5:]):
        memory.insert(each)
    drawn = {int(number) for number in memory.draw(500, np.random.default_rng(1))[0]}
    assert drawn == {0, 2, 3}, "the second begins before the gap and would end behind it"


def test_a_sequence_is_drawn_as_often_as_its_priority_says() -> None:
    kept = Remembered(2, 4, 1, 60, 5, 10**9, True)
    rollouts = list(kept.rollouts(8))
    memory = kept.memory(rollouts[0])
    for each in rollouts:
        memory.insert(each)
    items = [(number, env) for number in sorted(kept.complete(60)) for env in range(3)]
    numbers, environments = (np.array(column) for column in zip(*items, strict=True))
    memory.prioritize(numbers, environments, np.arange(1.0, len(items) + 1))
    drawn = memory.draw(20_000, np.random.default_rng(3))
    counts = [np.sum((drawn[0] == number) & (drawn[1] == env)) for number, env in items]
    alpha = kept.settings.algorithm.replay.alpha  # type: ignore[attr-defined]
    wanted = np.arange(1.0, len(items) + 1) ** alpha
    assert np.array(counts) / 20_000 == pytest.approx(wanted / wanted.sum(), abs=0.002)


def test_late_priorities_of_overwritten_sequences_are_refused() -> None:
    kept = Remembered(2, 4, 1, 40, 5, 10**9, True)
    rollouts = kept.rollouts(40)
    first = next(rollouts)
    memory = kept.memory(first)
    memory.insert(first)
    memory.insert(next(rollouts))
    numbers, environments, _ = memory.draw(8, np.random.default_rng(1))
    refused = 0
    for each in rollouts:
        memory.insert(each)
        if not set(numbers.tolist()) & kept.complete(40):
            before = memory.state()["priorities"]
            memory.prioritize(numbers, environments, np.full(8, 1e6))
            assert torch.equal(memory.state()["priorities"], before)
            refused += 1
    assert refused > 20


def test_state_is_all_there_is() -> None:
    kept = Remembered(3, 5, 2, 50, 4, 5, True)
    rollouts = list(kept.rollouts(40))
    memory = kept.memory(rollouts[0])
    for each in rollouts[:25]:
        memory.insert(each)
    memory.prioritize(*memory.draw(8, np.random.default_rng(4))[:2], np.arange(8.0))
    twin = kept.memory(rollouts[0])
    oldest = max(0, memory.count - memory.steps + 1)
    steps = memory.between(oldest, memory.count + 1)
    twin.put_back(oldest, {name: tensor.clone() for name, tensor in steps.items()})
    twin.load({name: tensor.clone() for name, tensor in memory.state().items()})
    for each in rollouts[25:]:
        memory.insert(each)
        twin.insert(each)
        drawn, again = (m.draw(8, np.random.default_rng(6)) for m in (memory, twin))
        assert all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=True))
        for a, b in zip(memory.batch(*drawn).leaves(), twin.batch(*again).leaves(), strict=True):
            assert torch.equal(a, b)


def test_overlapping_sequences_store_their_steps_once() -> None:
    kept = Remembered(40, 80, 5, 1_000, 40, 10**9, False)
    (each,) = kept.rollouts(1)
    sequences, transitions = kept.memory(each), Replay(kept.settings, each)
    assert sequences.nbytes < 1.05 * transitions.nbytes


def test_the_smallest_memory_that_settings_allow_always_holds_a_sequence() -> None:
    full = recipes.RECIPES["r2d2-memory"]()
    algorithm = full.algorithm
    least = full.env.num_envs * (algorithm.rollout + algorithm.item_steps + 8)  # type: ignore[attr-defined]
    enough = replace(algorithm.replay, capacity=least)  # type: ignore[attr-defined]
    full.replace(algorithm=replace(algorithm, replay=enough)).validate()  # type: ignore[call-arg]
    for rollout, burn_in, unroll in [(5, 2, 4), (16, 3, 7), (1, 2, 9), (7, 0, 1)]:
        kept = Remembered(burn_in, unroll, 2, rollout + burn_in + unroll + 2 - 1 + 8, rollout, 3, True)
        memory: SequenceReplay | None = None
        for number, each in enumerate(kept.rollouts(120 // rollout)):
            memory = memory or kept.memory(each)
            memory.insert(each)
            if (number + 1) * rollout >= sum(kept.shape) - 1:
                memory.draw(4, np.random.default_rng(number))
