"""The protocol `baselines`: FIRE after a lost life."""

from __future__ import annotations

import ale_py
import numpy as np
import pytest
from ale_py import ALEInterface, roms
from playing import buffers, play, reset

from lockstep import envs
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.ale import games
from lockstep.envs.atari import FIRE, WITHOUT_FIRE, FireAfterLife

ADAPTERS = ["ale", pytest.param("envpool", marks=pytest.mark.envpool)]


def breakout(adapter: str, protocol: str, seed: int = 3) -> ShardEnv:
    config = EnvConfig(id="Breakout", adapter=adapter, protocol=protocol)  # type: ignore[arg-type]
    return envs.make(config, seed=seed, first_index=0, num_envs=2)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_game_goes_on_without_an_agent_that_presses_fire(adapter: str) -> None:
    nothing = [np.zeros(2, np.int64)] * 200
    lost = {}
    for protocol in ("classic", "baselines"):
        env = breakout(adapter, protocol)
        reset(env)
        steps = [step for _, step in play(env, nothing)]
        lost[protocol] = sum(step.life_lost.astype(int) for step in steps)
        ended = [step.terminated.any() for step in steps]
        assert any(ended) == (protocol == "baselines")
        env.close()
    assert lost["classic"].tolist() == [1, 1], (
        "FIRE is pressed at the start of a game alone, and the paddle stands still"
    )
    assert (lost["baselines"] >= 4).all()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_step_that_presses_it_is_no_sample_and_survives_a_checkpoint(adapter: str) -> None:
    seed, nothing = 7, np.zeros(2, np.int64)  # with which both soon lose a life on the same step
    env = breakout(adapter, "baselines", seed)
    reset(env)
    played = []
    while not (played and played[-1].step.life_lost.all()):
        played += play(env, [nothing])
    state = env.state_dict()
    assert state["fire.due"].all()
    steps = play(env, [nothing] * 30)
    assert steps[0].step.first.all() and not any(step.first.any() for _, step in steps[1:10])
    restored = breakout(adapter, "baselines", seed)
    restored.load_state_dict(state, buffers(restored))
    for (obs, step), (obs_again, step_again) in zip(steps, play(restored, [nothing] * 30), strict=True):
        assert np.array_equal(obs[""], obs_again[""])
        assert all(np.array_equal(a, b) for a, b in zip(step[:5], step_again[:5], strict=True))
    env.close()
    restored.close()


def test_rewards_and_ends_of_that_step_by_hand() -> None:
    fire = FireAfterLife(3)
    no, all_three = np.zeros(3, bool), np.ones(3, bool)
    reward, pressed = fire.take(np.array([1.0, 2.0, 3.0]), all_three, no)
    assert reward.tolist() == [1, 2, 3] and not pressed.any()
    assert fire.replace(np.array([0, 2, 3])).tolist() == [FIRE] * 3
    lost, ended = np.array([False, True, False]), np.array([False, False, True])
    reward, pressed = fire.take(np.array([5.0, 6.0, 7.0]), lost, ended)
    assert pressed.tolist() == [True, False, False], "nothing that happens is hidden from the agent"
    assert reward.tolist() == [0, 6, 7]
    assert fire.replace(np.array([0, 2, 3])).tolist() == [0, FIRE, 3]
    reward, pressed = fire.take(np.array([10.0, 0.0, 0.0]), no, no)
    assert reward.tolist() == [15, 0, 0] and pressed.tolist() == [False, True, False]


@pytest.mark.parametrize("game", [*sorted(WITHOUT_FIRE), "Breakout", "Pong", "SpaceInvaders", "Seaquest"])
def test_games_without_the_action_are_known(game: str) -> None:
    ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ALEInterface()
    emulator.loadROM(str(roms.get_rom_path(games()[game])))
    actions = [action.name for action in emulator.getMinimalActionSet()]
    assert ("FIRE" in actions) == (game not in WITHOUT_FIRE)
    assert game in WITHOUT_FIRE or actions[FIRE] == "FIRE"
