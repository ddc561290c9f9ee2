"""Replay against the plain history of the same environments, which keeps everything and searches it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EXPERIMENTS, collected, options

from lockstep import recipes, train
from lockstep.agent import Agent
from lockstep.buffers import frames, replay_placement
from lockstep.buffers.arrivals import Arrivals
from lockstep.buffers.frames import ring_for
from lockstep.buffers.futures import FutureReplay
from lockstep.buffers.replay import Replay
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.experiment import Experiment
from lockstep.models.normalize import NormalizeConfig

STACK, SIDE, GAMMA = 4, 3, 0.9


def experiment(
    *, steps: int, envs: int, n_step: int, rollout: int, prioritized: bool = False, once: bool = True
) -> Experiment:
    base = recipes.RECIPES["dqn-atari"]()
    memory = replace(base.algorithm.replay, capacity=steps * envs, prioritized=prioritized, store_frames=once)  # type: ignore[attr-defined]
    algorithm = replace(base.algorithm, rollout=rollout, n_step=n_step, discount=GAMMA, replay=memory, batch_size=4)  # type: ignore[call-arg]
    return base.replace(
        env=replace(base.env, num_envs=envs), algorithm=algorithm, scheme=replace(base.scheme, shards=1, acting_batch=0)
    )


class World:
    """B environments with stacked frames, of which every step is remembered for ever.

    Args:
        pad: what fills the stack at an episode's start: `zero`, `repeat`, or `noise`, as after no-op actions.
        reset: probability of an episode's end at each step.
    """

    def __init__(self, envs: int, seed: int, pad: str, reset: float) -> None:
        self.draw, self.envs, self.pad, self.reset = np.random.default_rng(seed), envs, pad, reset
        self.stack = np.zeros((envs, STACK, SIDE, SIDE), np.uint8)
        self.history: list[dict[str, np.ndarray]] = []
        """By step: obs [B, K, H, W] before it, and what came of it."""
        self.ended = np.zeros(envs, bool)
        self.begin(np.ones(envs, bool))

    def frame(self) -> np.ndarray:
        return self.draw.integers(1, 256, (SIDE, SIDE), np.uint8)

    def begin(self, which: np.ndarray) -> None:
        for env in np.flatnonzero(which):
            newest = self.frame()
            older = {"zero": np.zeros_like(newest), "repeat": newest}
            self.stack[env] = [older[self.pad] if self.pad in older else self.frame() for _ in range(STACK)]
            self.stack[env, -1] = newest

    def step(self) -> dict[str, np.ndarray]:
        first, obs = self.ended, self.stack.copy()
        ends, life = self.draw.random(self.envs) < self.reset, self.draw.random(self.envs) < self.reset / 2
        by_time = self.draw.random(self.envs) < 0.5
        going = ~first
        for env in np.flatnonzero(going):
            self.stack[env] = [*self.stack[env, 1:], self.frame()]
        self.begin(first)
        self.ended = ends & going
        step = {
            "obs": obs,
            "action": self.draw.integers(0, 3, self.envs),
            "reward": np.where(first, 0, self.draw.integers(-3, 4, self.envs)).astype(np.float32),
            "terminated": (self.ended & ~by_time) | (life & going & ~self.ended),
            "truncated": self.ended & by_time,
            "valid": going,
            "start": first | (life & going),
        }
        self.history.append(step)
        return step

    def rollouts(self, steps: int, count: int, afresh_every: int = 10**9) -> Iterator[Rollout]:
        """Rollouts as collectors deliver them; every now and then all environments are started afresh in between."""
        start = np.ones(self.envs, bool)
        for number in range(count):
            if number and number % afresh_every == 0:
                # The history shows the cut as a step that nobody may learn from.
                last = self.history[-1]
                last["truncated"] = last["truncated"] | (last["valid"] & ~last["terminated"])
                self.history.append({**self.step_that_is_none(), "obs": self.stack.copy()})
                self.begin(np.ones(self.envs, bool))
                self.ended = np.zeros(self.envs, bool)
                start = np.ones(self.envs, bool)
            told = []
            for _ in range(steps):
                step = self.step()
                told.append({name: np.copy(value) for name, value in step.items()})
            starts = np.stack([start, *(step["start"] for step in told)])
            start = starts[-1]
            fields = {name: torch.from_numpy(np.stack([step[name] for step in told])) for name in told[0]}
            yield Rollout(
                obs=torch.from_numpy(np.stack([*(step["obs"] for step in told), self.stack])),
                start=torch.from_numpy(starts),
                action=fields["action"],
                reward=fields["reward"],
                prev_action=None,
                prev_reward=None,
                log_prob=torch.zeros(steps, self.envs),
                value=torch.zeros(steps + 1, self.envs),
                terminated=fields["terminated"],
                truncated=fields["truncated"],
                valid=fields["valid"],
                core_state=torch.zeros(self.envs, 0),
            )

    def step_that_is_none(self) -> dict[str, np.ndarray]:
        none = np.zeros(self.envs, bool)
        return {
            "action": np.zeros(self.envs, int),
            "reward": np.zeros(self.envs, np.float32),
            "terminated": none,
            "truncated": none,
            "valid": none,
            "start": none,
        }

    def transition(self, time: int, env: int, n_step: int) -> dict[str, Any]:
        """The slow way: walk on from a step until its episode ends."""
        reward, discount, terminated = 0.0, 1.0, False
        obs = self.history[time]["obs"][env]
        for _ in range(n_step):
            step = self.history[time]
            assert step["valid"][env], "a reset lies in between"
            reward += discount * float(step["reward"][env])
            discount *= GAMMA
            time += 1
            if step["terminated"][env] or step["truncated"][env]:
                terminated = bool(step["terminated"][env])
                break
        after = self.history[time]["obs"][env] if time < len(self.history) else self.stack[env]
        return {"obs": obs, "reward": reward, "discount": 0.0 if terminated else discount, "next_obs": after}


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("prioritized", [True, False])
@pytest.mark.parametrize(
    ("pad", "rollout", "n_step", "steps", "afresh"),
    [("zero", 5, 1, 40, 10**9), ("repeat", 4, 3, 64, 7), ("noise", 7, 5, 50, 3), ("noise", 1, 2, 41, 11)],
)
def test_every_item_is_what_happened(
    pad: str, rollout: int, n_step: int, steps: int, afresh: int, prioritized: bool, once: bool
) -> None:
    envs, draw = 3, np.random.default_rng(1)
    settings = experiment(steps=steps, envs=envs, n_step=n_step, rollout=rollout, prioritized=prioritized, once=once)
    world = World(envs, 5, pad, reset=0.02)
    memory: Replay | None = None
    seen: set[tuple[int, int]] = set()
    for number, each in enumerate(world.rollouts(rollout, 300 // rollout, afresh)):
        memory = memory or Replay(settings, each)
        memory.insert(each)
        assert memory.count == len(world.history)
        if (number + 1) * rollout < n_step + 1:
            continue
        times, environments, probability = memory.draw(16, draw)
        items = memory.batch(times, environments, np.ones(16))
        for i, (time, env) in enumerate(zip(times, environments, strict=True)):
            expected = world.transition(int(time), int(env), n_step)
            assert np.array_equal(items.obs[0, i].numpy(), expected["obs"])
            assert np.array_equal(items.next_obs[0, i].numpy(), expected["next_obs"])
            assert items.action[0, i] == world.history[time]["action"][env]
            assert float(items.reward[0, i]) == pytest.approx(expected["reward"], abs=1e-5)
            assert float(items.discount[0, i]) == pytest.approx(expected["discount"], abs=1e-6)
            assert len(world.history) - steps < time <= len(world.history) - n_step
            seen.add((int(time), int(env)))
        if prioritized:
            memory.prioritize(times, environments, draw.random(16))
            fit = {
                (t, e)
                for t in range(memory.episode_ends()[0], memory.count - n_step + 1)
                for e in range(envs)
                if world.history[t]["valid"][e]
            }
            positive = int((memory.state()["priorities"] > 0).sum())
            assert positive == len(fit)
        else:
            assert np.allclose(probability, probability[0])
    assert len(seen) > 200


@pytest.mark.parametrize("afresh", [3, 10**9])
def test_futures_are_what_followed_within_the_episode(afresh: int) -> None:
    envs, n_step, future, draw = 3, 4, 3, np.random.default_rng(1)
    settings = experiment(steps=50, envs=envs, n_step=n_step, rollout=5, prioritized=True)
    world = World(envs, 7, "noise", reset=0.1)
    memory: FutureReplay | None = None
    lengths = set()
    for number, each in enumerate(world.rollouts(5, 40, afresh)):
        memory = memory or FutureReplay(settings, each, future)
        memory.insert(each)
        if not number:
            continue
        times, environments, _ = memory.draw(16, draw)
        items = memory.batch(times, environments, np.ones(16))
        plain = Replay.items(memory, memory.to_read(times, environments, np.ones(16)))
        assert all(torch.equal(getattr(items, name), getattr(plain, name)) for name in ("obs", "next_obs", "reward"))
        for i, (time, env) in enumerate(zip(times, environments, strict=True)):
            going, length = True, 0
            for j in range(future):
                step = world.history[time + j]
                assert bool(items.future.valid[j, i]) == going
                if going:
                    after = world.history[time + j + 1]["obs"] if time + j + 1 < memory.count else world.stack
                    assert np.array_equal(items.future.obs[j, i].numpy(), after[env])
                    assert items.future.action[j, i] == step["action"][env]
                    length += 1
                going = going and not (step["terminated"][env] or step["truncated"][env])
            lengths.add(length)
        for part in range(2):
            half, on_gpu = items.part(part, 2).future, items.part(torch.tensor([part]), 2).future
            assert all(map(torch.equal, half.leaves(), on_gpu.leaves()))
            assert torch.equal(half.obs, items.future.obs[:, part * 8 : part * 8 + 8])
            assert torch.equal(half.valid, items.future.valid[:, part * 8 : part * 8 + 8])
    assert lengths == {1, 2, 3}


def test_frames_once_need_little_more_than_one_frame_a_step() -> None:
    settings = experiment(steps=640, envs=2, n_step=1, rollout=8)
    (each,) = World(2, 1, "zero", 0.01).rollouts(8, 1)
    memory = Replay(settings, each)
    others = sum(x.nbytes for name, x in memory.between(0, memory.steps).items() if not name.startswith("obs."))
    stored = memory.nbytes - others
    assert stored < (1.2 * SIDE * SIDE + 16 + 8 / 32) * 640 * 2


def test_a_memory_too_small_for_its_stacks_is_refused() -> None:
    (rollout,) = World(2, 3, "zero", 0.1).rollouts(4, 1)
    rollout = rollout.replace(obs=torch.zeros(5, 2, 20, SIDE, SIDE, dtype=torch.uint8))
    with pytest.raises(SettingsError, match=r"too small .*\b20 frames.*\b50\b"):
        Replay(experiment(steps=24, envs=2, n_step=1, rollout=4), rollout)
    Replay(experiment(steps=25, envs=2, n_step=1, rollout=4), rollout)


def test_many_short_episodes_take_more_memory_and_are_not_mixed_up() -> None:
    steps = 100
    settings = experiment(steps=2 * steps, envs=2, n_step=1, rollout=8)
    world = World(2, 1, "noise", 0.01)
    memory: Replay | None = None
    twin: Replay | None = None
    sizes = set()
    for number, each in enumerate(world.rollouts(8, 100)):
        world.reset = 0.01 if number < 3 else 0.4
        memory = memory or Replay(settings, each)
        memory.insert(each)
        sizes.add(memory.nbytes)
        if number == 60:
            first = memory.count - memory.steps + 1
            twin = Replay(settings, each)
            twin.put_back(first, memory.between(first, memory.count + 1))
            twin.load({name: tensor.clone() for name, tensor in memory.state().items()})
        elif twin is not None:
            twin.insert(each)
        if number < 20:
            continue
        drawn = memory.draw(32, np.random.default_rng(number))
        items = memory.batch(*drawn)
        for time, env, obs in zip(drawn[0], drawn[1], items.obs[0], strict=True):
            assert np.array_equal(obs, world.history[int(time)]["obs"][int(env)])
        if twin is not None:
            again = twin.batch(*twin.draw(32, np.random.default_rng(number)))
            assert all(torch.equal(a, b) for a, b in zip(items.leaves(), again.leaves(), strict=True))
    assert len(sizes) > 1, "there was more to be kept aside than had room"


def test_late_priorities_of_overwritten_steps_are_refused() -> None:
    settings = experiment(steps=24, envs=2, n_step=1, rollout=8, prioritized=True)
    world = World(2, 3, "zero", 0.01)
    rollouts = world.rollouts(8, 8)
    first = next(rollouts)
    memory = Replay(settings, first)
    memory.insert(first)
    times, environments, _ = memory.draw(8, np.random.default_rng(1))
    for each in rollouts:
        memory.insert(each)
    before = memory.state()["priorities"]
    memory.prioritize(times, environments, np.full(8, 1e6))
    assert torch.equal(memory.state()["priorities"], before)


def test_state_is_all_there_is() -> None:
    settings = experiment(steps=40, envs=3, n_step=3, rollout=5, prioritized=True)
    world = World(3, 9, "noise", 0.03)
    rollouts = list(world.rollouts(5, 24, 7))
    memory = Replay(settings, rollouts[0])
    for each in rollouts[:15]:
        memory.insert(each)
    memory.prioritize(*memory.draw(8, np.random.default_rng(4))[:2], np.arange(8.0))
    twin = Replay(settings, rollouts[0])
    first = memory.count - memory.steps + 1
    twin.put_back(first, memory.between(first, memory.count + 1))
    twin.load({name: tensor.clone() for name, tensor in memory.state().items()})
    for each in rollouts[15:]:
        memory.insert(each)
        twin.insert(each)
        drawn, again = (m.draw(8, np.random.default_rng(6)) for m in (memory, twin))
        assert all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=True))
        for a, b in zip(memory.batch(*drawn).leaves(), twin.batch(*again).leaves(), strict=True):
            assert torch.equal(a, b)


class Noting(Replay):
    """Notes what is drawn from it: the numbers of steps and the environments."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drawn: list[tuple[np.ndarray, np.ndarray]] = []

    def draw(
        self, items: int, generator: np.random.Generator, newest: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = super().draw(items, generator, newest)
        self.drawn.append(found[:2])
        return found


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Noting]:
    """The storages of all ReplayBatches to come, shard by shard."""
    found: list[Noting] = []

    def storage_for(_: Any, *arguments: Any) -> Noting:
        found.append(Noting(*arguments))
        return found[-1]

    monkeypatch.setattr("lockstep.buffers.replay_batches.storage_for", storage_for)
    return found


@pytest.mark.parametrize("recency", [0.5, 0.99, 0.9999])
def test_recent_steps_are_emphasised_as_the_formula_says(recency: float, replays: list[Noting]) -> None:
    base = experiment(steps=200, envs=2, n_step=1, rollout=8)
    memory = replace(base.algorithm.replay, recency=recency, recency_least=40)  # type: ignore[attr-defined]
    algorithm = replace(base.algorithm, replay=memory, updates=3, batch_size=400, warmup=0)  # type: ignore[call-arg]
    agent = Agent(base.replace(algorithm=algorithm, env=replace(base.env, num_envs=2)))
    batches = ReplayBatches(agent, range(1))
    world = World(2, 3, "zero", 0.01)
    for number, each in enumerate(world.rollouts(8, 40)):
        filled = {0: [collected(each, agent.normalizers)]}
        batches.begin(number, filled, agent.algorithm.hyperparameters(0.0))
    (replay,) = replays
    oldest, newest = replay.episode_ends()[0], replay.count - 1
    for k in (1, 2, 3):
        wanted = max(200 * 2 * recency ** (1000 * k / 3), 40)
        steps = min(math.ceil(wanted / 2), newest - oldest + 1)
        batches.slice(0, k - 1)
        times, _ = replay.drawn[k - 1]
        assert times.min() > newest - steps and times.max() <= newest
        assert len(set(times.tolist())) > 0.8 * steps, "all of them"


def test_recency_ends_as_uniform() -> None:
    base = experiment(steps=200, envs=2, n_step=1, rollout=8)
    memory = replace(base.algorithm.replay, recency=0.996)  # type: ignore[attr-defined]
    algorithm = replace(base.algorithm, replay=memory).build()  # type: ignore[call-arg]
    assert [algorithm.hyperparameters(progress)["recency"] for progress in (0.0, 0.5, 1.0)] == [0.996, 0.998, 1.0]
    with pytest.raises(SettingsError, match="choose one"):
        replace(memory, prioritized=True).validate()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hindsight", "iqn", "td3", "sac-discrete"])
def test_taking_several_minibatches_at_once_changes_no_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for at_once in (1, 300, 1 << 20):  # one gradient step, some, all of an iteration
        monkeypatch.setattr("lockstep.buffers.replay_batches._AT_ONCE", at_once)
        digests.add(train(EXPERIMENTS[name](), options=options(tmp_path / str(at_once))).digest)
    assert len(digests) == 1


def test_importance_weights_undo_what_priorities_do(replays: list[Noting]) -> None:
    base = experiment(steps=100, envs=2, n_step=1, rollout=8, prioritized=True)
    agent = Agent(base.replace(algorithm=replace(base.algorithm, warmup=0, updates=3)))  # type: ignore[call-arg]
    batches = ReplayBatches(agent, range(1))
    for number, each in enumerate(World(2, 3, "zero", 0.01).rollouts(8, 6)):
        batches.begin(number, {0: [collected(each, agent.normalizers)]}, agent.algorithm.hyperparameters(0.5))
    (replay,), draw = replays, np.random.default_rng(1)
    for _ in range(20):
        times, environments, _ = replay.draw(16, draw)
        replay.prioritize(times, environments, draw.random(16))
    assert agent.algorithm.hyperparameters(0.5)["beta"] == pytest.approx(0.7), "halfway from 0.4 to 1"
    batch = batches.slice(0, 0).batch
    times, environments = replay.drawn[-1]
    priority = replay.state()["priorities"].numpy()[times % replay.steps * replay.size + environments]
    assert len(set(priority.tolist())) > 1
    even = batch.weight.numpy() * priority**0.7
    assert even == pytest.approx(np.full(len(even), even[0]), rel=1e-5)


@pytest.mark.slow
def test_weights_count_against_the_largest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, taken = EXPERIMENTS["dqn-prioritized-frames"], ReplayBatches.slice
    usual = train(make(), options=options(tmp_path / "usual")).digest

    def heavier(self: ReplayBatches, slot: int, step: int) -> Any:
        found = taken(self, slot, step)
        return found._replace(batch=found.batch.replace(weight=8 * found.batch.weight))

    monkeypatch.setattr(ReplayBatches, "slice", heavier)
    assert train(make(), options=options(tmp_path / "heavier")).digest == usual


def test_new_steps_begin_with_the_largest_priority_so_far() -> None:
    settings = experiment(steps=40, envs=2, n_step=1, rollout=4, prioritized=True)
    rollouts = list(World(2, 3, "zero", 0.0).rollouts(4, 3))
    replay = Replay(settings, rollouts[0])
    replay.insert(rollouts[0])
    times, environments, _ = replay.draw(8, np.random.default_rng(1))
    replay.prioritize(times, environments, np.full(8, 9.0))
    replay.insert(rollouts[1])
    newest = replay.state()["priorities"].view(replay.steps, replay.size)[(replay.count - 1) % replay.steps]
    assert newest.tolist() == pytest.approx([9.0**settings.algorithm.replay.alpha] * 2)  # type: ignore[attr-defined]


def test_numbers_that_are_missing_do_not_look_like_a_reset() -> None:
    """With --on-nonfinite continue, environments may return NaN."""
    first, second = World(2, 1, "zero", 0.0).rollouts(4, 2)
    first, second = (each.replace(obs=each.obs / 2) for each in (first, second))
    first.obs[-1, 0, 0, 0, 0] = second.obs[0, 0, 0, 0, 0] = torch.nan
    memory = Replay(experiment(steps=40, envs=2, n_step=3, rollout=4), first)
    memory.insert(first)
    memory.insert(second)
    assert memory.count == 8, "no step is lost"
    reward = memory.batch(np.array([2]), np.array([0]), np.ones(1)).reward
    assert float(reward) == pytest.approx(
        float(first.reward[2, 0] + 0.9 * first.reward[3, 0] + 0.81 * second.reward[0, 0])
    )


def test_beginnings_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 1, "noise", 0.01)
    (first,) = world.rollouts(8, 1)
    memory = Replay(experiment(steps=200, envs=2, n_step=1, rollout=8), first)
    memory.insert(first)
    monkeypatch.setattr(frames, "available_bytes", lambda: 1_000)
    world.reset = 1.0  # every other step begins an episode
    with pytest.raises(SettingsError, match=r"Episodes .*store-frames"):
        for each in world.rollouts(8, 10):
            memory.insert(each)


def test_stacks_of_other_numbers_than_bytes_are_kept_as_they_are() -> None:
    (rollout,) = World(2, 1, "zero", 0.0).rollouts(8, 1)
    halves = rollout.obs / 2
    ring = ring_for(20, halves, once=True)
    ring.put(0, halves, Arrivals(halves.device))
    assert torch.equal(ring.take(torch.arange(9), torch.ones(9, dtype=torch.int64)), halves[:, 1])


def test_rewards_are_scaled_by_the_deviation_that_returns_have_when_they_are_drawn(replays: list[Noting]) -> None:
    base = experiment(steps=40, envs=2, n_step=1, rollout=8).replace(normalize=NormalizeConfig(returns=True))
    agent = Agent(base.replace(algorithm=replace(base.algorithm, warmup=0)))  # type: ignore[call-arg]
    batches, world = ReplayBatches(agent, range(1)), World(2, 3, "zero", 0.01)
    for number, each in enumerate(world.rollouts(8, 2)):
        batches.begin(number, {0: [collected(each, agent.normalizers)]}, {})
    agent.normalizers = agent.normalizers.merged(torch.tensor([4.0, 0.0, 16.0]))  # a deviation of 2
    reward = batches.slice(0, 0).batch.reward[0]
    raw = [world.history[time]["reward"][env] for time, env in zip(*replays[0].drawn[0], strict=True)]
    assert reward.tolist() == pytest.approx([each / 2 for each in raw]) and any(raw)


def test_a_memory_that_does_not_fit_is_refused_when_its_shapes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(experiment(steps=40, envs=2, n_step=1, rollout=8))
    (rollout,) = World(2, 3, "zero", 0.01).rollouts(8, 1)
    monkeypatch.setattr(replay_placement, "available_bytes", lambda: 1_000)
    with pytest.raises(SettingsError, match="for 1 of 1 shards"):
        ReplayBatches(agent, range(1)).begin(0, {0: [collected(rollout, agent.normalizers)]}, {})
