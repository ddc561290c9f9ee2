"""MinAtar's games for the adapter `compiled`: every step is the library's when both draw the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep import envs
from lockstep.envs import EnvConfig
from lockstep.envs.compiled_shard import CompiledShard
from tests.envs.playing import play, random_actions, reset

GAMES = {
    **{"asterix": "Asterix", "breakout": "Breakout", "freeway": "Freeway"},
    **{"seaquest": "Seaquest", "space_invaders": "SpaceInvaders"},
}


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


class SameNumbers:
    """Takes the place of the library's generator and draws what the compiled environment draws."""

    state = 0

    def _bits(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        return mix(self.state)

    def rand(self, count: int | None = None) -> Any:
        found = [(self._bits() >> 11) * 2.0**-53 for _ in range(count or 1)]
        return np.array(found) if count else found[0]

    def randint(self, low: int, high: int | None = None, size: int | None = None) -> Any:
        low, high = (0, low) if high is None else (low, high)
        found = [low + ((self._bits() >> 32) * (high - low) >> 32) for _ in range(size or 1)]
        return np.array(found) if size else found[0]


def make(env_id: str, num_envs: int = 1, **options: Any) -> CompiledShard:
    config = EnvConfig(id=env_id, adapter="compiled", options=options, reseed_every=10**6)
    env = envs.make(config, seed=3, first_index=0, num_envs=num_envs)
    assert isinstance(env, CompiledShard)
    return env


@pytest.mark.parametrize("ramping", [True, False])
@pytest.mark.parametrize("game", GAMES)
def test_steps_are_the_librarys(game: str, ramping: bool) -> None:
    library = pytest.importorskip("minatar")
    theirs = library.Environment(game, difficulty_ramping=ramping)
    numbers = SameNumbers()
    theirs.random = theirs.env.random = numbers
    ours = make(f"MinAtar/{GAMES[game]}-v0", difficulty_ramping=ramping)
    out = np.zeros((1, *(ours.observation_space.shape or ())), np.uint8)

    def begin() -> None:
        episode = int(ours._states["episode"][0])
        numbers.state = mix((mix(int(ours._keys[0])) + episode * 0x9E3779B97F4A7C15) % 2**64)
        theirs.reset()
        theirs.last_action = 0

    ours.reset(out)
    begin()
    ends, rewards = 0, 0.0
    for t, action in enumerate(random_actions(ours, 12_000)):
        if game == "freeway" and t % 8:
            action[:] = 2  # or nobody ever reaches the other side
        assert np.array_equal(out[0] == 255, np.moveaxis(theirs.state(), -1, 0))
        assert ours._states["random"][0] == numbers.state
        if game == "seaquest" and t % 97 == 0:
            theirs.env.diver_count = 6  # or nobody ever comes up with all divers
            ours._states["rescued"] = 6
        ours.send(action)
        step = ours.recv(out)
        if step.first[0]:
            begin()
            continue
        assert (step.reward[0], step.terminated[0]) == theirs.act(int(action[0]))
        ends, rewards = ends + int(step.terminated[0]), rewards + float(step.reward[0])
    assert ends > 3 and rewards > 3


@pytest.mark.parametrize("game", GAMES)
def test_minimal_actions_are_the_librarys(game: str) -> None:
    library = pytest.importorskip("minatar")
    minimal = library.Environment(game).minimal_action_set()
    full, short = make(f"MinAtar/{GAMES[game]}-v0", 2), make(f"MinAtar/{GAMES[game]}-v1", 2)
    actions = random_actions(short, 300)
    assert np.array_equal(reset(full)[""], reset(short)[""])
    expected = play(full, [np.array(minimal)[action] for action in actions])
    for one, other in zip(expected, play(short, actions), strict=True):
        assert np.array_equal(one.obs[""], other.obs[""]) and np.array_equal(one.step.reward, other.step.reward)
