"""Shards whose environments one call steps collect what they collect apart, and are restored from any process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import cut

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.collectors.collectors import Collector
from lockstep.collectors.preemption import RecordedPreemption
from lockstep.config.layout import Layout
from lockstep.core.arrays import named_leaves
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.experiment import Experiment
from lockstep.training.prepare import prepare
from lockstep.transport.rollouts import buffers_of

pytestmark = pytest.mark.envpool
STEPS, LAPS = 16, 6
ALL = range(4)


def experiment(recipe: Any, **env: Any) -> Experiment:
    """Four shards of two environments, which act together and are started afresh after every second rollout."""
    env = {"adapter": "envpool", "reseed_every": 2 * STEPS, **env}
    return cut(recipe, rollout=STEPS, env=env, scheme={"acting_batch": 8})


EXPERIMENTS = {
    "terminations": lambda: experiment(recipes.ppo_cartpole, id="CartPole-v1"),
    "truncations": lambda: experiment(recipes.ppo_mujoco, options={"max_episode_steps": 7}),
    "lives": lambda: experiment(recipes.ppo_atari, id="Breakout", protocol="classic", reseed_every=5 * STEPS),
    "random": lambda: experiment(recipes.ppo_cartpole, id="CartPole-v1", random_actions=True),
}


@pytest.fixture(autouse=True)
def _mujoco_writes_its_log_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the pools that were made."""
    made: list[int] = []
    make = pytest.importorskip("envpool").make_gymnasium

    def counted(*args: Any, num_envs: int, **settings: Any) -> Any:
        made.append(num_envs)
        return make(*args, num_envs=num_envs, **settings)

    monkeypatch.setattr("envpool.make_gymnasium", counted)
    yield made


class Collecting:
    """A collector of some shards, with what it collected.

    Args:
        apart: whether rollouts might be cut, so that each shard is stepped by a call to itself. None is cut.
    """

    def __init__(self, of: Experiment, shards: range = ALL, *, apart: bool = False) -> None:
        resolved = prepare(of, Layout())
        agent = Agent(resolved)
        (buffers,) = buffers_of(agent, shards, resolved.schedule(), PrivateArena(), ahead=False)
        self.shards, self._version = shards, agent.version(0)
        self.collector = Collector(agent, buffers, preemption=RecordedPreemption({}) if apart else None)
        self.found: dict[tuple[int, int], tuple[Any, dict[str, torch.Tensor]]] = {}
        """By shard and number: a rollout with its scores, and the shard's state behind it."""
        self.ends: dict[str, int] = dict.fromkeys(("terminated", "truncated"), 0)

    def play(self, laps: Sequence[int]) -> Collecting:
        for lap in laps:
            # The noise of a rollout is drawn by its number. Versions do not change, so that only environments matter.
            for each in self.collector.collect(lap, lambda t: self._version):
                info, leaves = each.info, {name: leaf.clone() for name, leaf in named_leaves(each.rollout)}
                for name in self.ends:
                    self.ends[name] += int(leaves[name].sum())
                state = {name: x.clone() for name, x in self.collector.state(info.shard).items()}
                kept = leaves, info.episodes, info.moments
                self.found[info.shard, info.number] = kept, state
        return self

    def close(self) -> None:
        self.collector.close()


def started(of: Experiment, shards: range = ALL, *, apart: bool = False) -> Collecting:
    collecting = Collecting(of, shards, apart=apart)
    collecting.collector.reset()
    return collecting


def loaded(of: Experiment, numbers: dict[int, int], *origins: Collecting, shards: range = ALL) -> Collecting:
    """A collector that goes on behind the rollouts of these numbers, by shard, as any of the origins has them."""
    found = {key: state for origin in origins for key, (_, state) in origin.found.items()}
    collecting = Collecting(of, shards)
    states = {shard: found[shard, numbers[shard]] for shard in shards}
    collecting.collector.load(states, {shard: numbers[shard] + 1 for shard in shards})
    return collecting


def assert_same(some: Collecting, expected: Collecting) -> None:
    """Everything that some collected, expected did, too, array for array."""
    assert some.found
    for key, ((leaves, episodes, moments), state) in some.found.items():
        (other, other_episodes, other_moments), other_state = expected.found[key]
        assert leaves.keys() == other.keys() and state.keys() == other_state.keys()
        for name, x in (leaves | state).items():
            assert torch.equal(x, (other | other_state)[name]), f"{name} of shard and rollout {key}"
        assert episodes == other_episodes and np.array_equal(moments, other_moments)


# That lives are lost alike in joined shards, test_shard_env.py finds where they are joined.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "lives" else ()) for name in EXPERIMENTS]
)
def test_shards_collect_together_what_they_collect_apart(name: str, pools: list[int]) -> None:
    of = EXPERIMENTS[name]()
    apart = started(of, apart=True).play(range(LAPS))
    assert set(pools) == {2}
    pools.clear()
    together = started(of).play(range(LAPS))
    assert set(pools) == {8} and len(pools) == (2 if name == "lives" else 3), "one at the start, and when due"
    assert_same(together, apart)
    assert together.ends["truncated" if name == "truncations" else "terminated"] > 4

    # On other layouts, and from one to the other.
    pools.clear()
    halves = [started(of, half).play(range(3)) for half in (range(2), range(2, 4))]
    assert set(pools) == {4}
    for half in halves:
        assert_same(half, apart)
    pools.clear()
    merged = loaded(of, dict.fromkeys(ALL, 2), *halves).play(range(LAPS - 3))
    assert set(pools) == {8}
    split = [loaded(of, dict.fromkeys(ALL, 2), together, shards=part) for part in (range(1), range(1, 4))]
    for collecting in (merged, *(each.play(range(LAPS - 3)) for each in split)):
        assert_same(collecting, apart)
    for collecting in (apart, together, merged, *halves, *split):
        collecting.close()


def test_shards_of_different_ages_are_stepped_apart(pools: list[int]) -> None:
    """As after a run whose shards did not collect equally often."""
    of = EXPERIMENTS["terminations"]()
    straight = started(of).play(range(LAPS))
    pools.clear()
    uneven = loaded(of, {0: 0, 1: 1, 2: 0, 3: 2}, straight).play(range(3))
    assert set(pools) == {2}
    assert_same(uneven, straight)
    assert set(uneven.found) >= {(0, 1), (1, 2), (3, 5)}
    for collecting in (straight, uneven):
        collecting.close()
