"""MinAtar's Seaquest for the adapter `compiled`. See compiled_minatar.py."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from lockstep.envs.compiled_minatar import DOWN, FIRE, LEFT, RIGHT, SEEN, UP, Game, chosen, picture
from lockstep.kernels.cache import part
from lockstep.kernels.random import integer, uniform

_MOST = 64
"""The most objects of one kind. A game never has that many."""
_SHOTS, _BOMBS, _FISH, _SUBS, _DIVERS = range(5)
_X, _Y, _WAY, _MOVE_WAIT, _FIRE_WAIT = range(5)


@part
def _add(state: Any, kind: Any, x: Any, y: Any, way: Any, move_wait: Any) -> None:
    if state.count[kind] < _MOST:
        thing = state.things[kind, state.count[kind]]
        thing[_X], thing[_Y], thing[_WAY], thing[_MOVE_WAIT], thing[_FIRE_WAIT] = x, y, way, move_wait, 10
        state.count[kind] += 1


@part
def _remove(state: Any, kind: Any, i: Any) -> None:
    """Remove an object. The order of the others does not change, because they act in this order."""
    state.count[kind] -= 1
    for j in range(i, state.count[kind]):
        state.things[kind, j] = state.things[kind, j + 1]


@part
def _find(state: Any, kind: Any, x: Any, y: Any) -> Any:
    """The index of the first object of a kind at a place; -1 if there is none."""
    for i in range(state.count[kind]):
        if state.things[kind, i, _X] == x and state.things[kind, i, _Y] == y:
            return i
    return -1


@part
def _remove_at(state: Any, kind: Any, x: Any, y: Any) -> Any:
    """Remove the first object of a kind at a place; return whether there was one."""
    i = _find(state, kind, x, y)
    if i >= 0:
        _remove(state, kind, i)
    return i >= 0


@part
def _spawn_enemy(state: Any) -> None:
    way = 1 if uniform(state, 0.0, 1.0) < 0.5 else -1
    kind = _SUBS if uniform(state, 0.0, 1.0) < 1 / 3 else _FISH
    y = 1 + integer(state, 8)
    for other in (_SUBS, _FISH):
        for i in range(state.count[other]):
            if state.things[other, i, _Y] == y and state.things[other, i, _WAY] != way:
                return
    _add(state, kind, 0 if way > 0 else 9, y, way, state.move_period)


@part
def _spawn_diver(state: Any) -> None:
    way = 1 if uniform(state, 0.0, 1.0) < 0.5 else -1
    _add(state, _DIVERS, 0 if way > 0 else 9, 1 + integer(state, 8), way, 5)


@part
def _move_shots(state: Any) -> Any:
    """Return the reward for hits."""
    reward = 0.0
    for i in range(state.count[_SHOTS] - 1, -1, -1):
        shot = state.things[_SHOTS, i]
        shot[_X] += shot[_WAY]
        if shot[_X] < 0 or shot[_X] > 9:
            _remove(state, _SHOTS, i)
        elif _remove_at(state, _FISH, shot[_X], shot[_Y]) or _remove_at(state, _SUBS, shot[_X], shot[_Y]):
            _remove(state, _SHOTS, i)
            reward += 1.0
    return reward


@part
def _move_divers(state: Any) -> None:
    for i in range(state.count[_DIVERS] - 1, -1, -1):
        diver = state.things[_DIVERS, i]
        gone = diver[_X] == state.x and diver[_Y] == state.y and state.rescued < 6
        if gone:
            state.rescued += 1
        elif diver[_MOVE_WAIT] == 0:
            diver[_MOVE_WAIT] = 5
            diver[_X] += diver[_WAY]
            gone = diver[_X] < 0 or diver[_X] > 9
            if not gone and diver[_X] == state.x and diver[_Y] == state.y and state.rescued < 6:
                gone = True
                state.rescued += 1
        else:
            diver[_MOVE_WAIT] -= 1
        if gone:
            _remove(state, _DIVERS, i)


@part
def _move_enemies(state: Any, kind: Any) -> Any:
    """Return the reward for enemies that met shots, and whether an enemy met the player."""
    reward, lost = 0.0, False
    for i in range(state.count[kind] - 1, -1, -1):
        enemy = state.things[kind, i]
        lost = lost or (enemy[_X] == state.x and enemy[_Y] == state.y)
        gone = False
        if enemy[_MOVE_WAIT] == 0:
            enemy[_MOVE_WAIT] = state.move_period
            enemy[_X] += enemy[_WAY]
            if enemy[_X] < 0 or enemy[_X] > 9:
                gone = True
            elif enemy[_X] == state.x and enemy[_Y] == state.y:
                lost = True
            elif _remove_at(state, _SHOTS, enemy[_X], enemy[_Y]):
                gone = True
                reward += 1.0
        else:
            enemy[_MOVE_WAIT] -= 1
        if kind == _SUBS:
            if enemy[_FIRE_WAIT] == 0:
                enemy[_FIRE_WAIT] = 10
                _add(state, _BOMBS, enemy[_X], enemy[_Y], enemy[_WAY], 0)
            else:
                enemy[_FIRE_WAIT] -= 1
        if gone:
            _remove(state, kind, i)
    return reward, lost


@part
def _move_bombs(state: Any) -> Any:
    """Return whether a bomb met the player."""
    lost = False
    for i in range(state.count[_BOMBS] - 1, -1, -1):
        bomb = state.things[_BOMBS, i]
        lost = lost or (bomb[_X] == state.x and bomb[_Y] == state.y)
        bomb[_X] += bomb[_WAY]
        lost = lost or (bomb[_X] == state.x and bomb[_Y] == state.y)
        if bomb[_X] < 0 or bomb[_X] > 9:
            _remove(state, _BOMBS, i)
    return lost


@part
def _surface(state: Any) -> Any:
    """Refill the oxygen; return the reward for a full load of divers."""
    state.surfaced = True
    reward = 0.0
    if state.rescued == 6:
        state.rescued = 0
        reward = float(state.oxygen * 10 // 200)
    state.oxygen = 200
    state.rescued -= 1
    if state.difficulty_ramping and (state.spawn_period > 1 or state.move_period > 2):
        if state.move_period > 2 and state.ramps % 2:
            state.move_period -= 1
        if state.spawn_period > 1:
            state.spawn_period -= 1
        state.ramps += 1
    return reward


class Seaquest(Game):
    """MinAtar/Seaquest. All six actions have an effect, so there is no minimal variant."""

    observation_space = picture(10)
    fields: ClassVar = {
        **{name: int for name in ("last_action", "x", "y", "way", "oxygen", "rescued", "spawn_period", "spawn_wait")},
        **{name: int for name in ("diver_wait", "move_period", "shot_wait", "ramps")},
        **{"surfaced": bool, "count": (np.int64, (5,)), "things": (np.int64, (5, _MOST, 5))},
    }

    @staticmethod
    def reset(state: Any) -> None:
        state.last_action = 0
        state.x, state.y, state.way = 5, 0, -1
        state.oxygen, state.rescued, state.surfaced = 200, 0, True
        state.spawn_period = state.spawn_wait = 20
        state.diver_wait, state.move_period, state.shot_wait, state.ramps = 30, 5, 0, 0
        state.count[:] = 0
        state.things[:] = 0

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        action = chosen(state, action)
        if state.spawn_wait == 0:
            _spawn_enemy(state)
            state.spawn_wait = state.spawn_period
        if state.diver_wait == 0:
            _spawn_diver(state)
            state.diver_wait = 30
        if action == FIRE and state.shot_wait == 0:
            _add(state, _SHOTS, state.x, state.y, state.way, 0)
            state.shot_wait = 5
        elif action in (LEFT, RIGHT):
            state.way = -1 if action == LEFT else 1
            state.x = min(max(state.x + state.way, 0), 9)
        elif action == UP:
            state.y = max(0, state.y - 1)
        elif action == DOWN:
            state.y = min(8, state.y + 1)
        reward = _move_shots(state)
        _move_divers(state)
        of_subs, met_sub = _move_enemies(state, _SUBS)
        met_bomb = _move_bombs(state)
        of_fish, met_fish = _move_enemies(state, _FISH)
        reward += of_subs + of_fish
        lost = met_sub or met_bomb or met_fish or state.oxygen <= 0
        state.spawn_wait = max(0, state.spawn_wait - 1)
        state.diver_wait = max(0, state.diver_wait - 1)
        state.shot_wait = max(0, state.shot_wait - 1)
        if state.y > 0:
            state.oxygen -= 1
            state.surfaced = False
        elif not state.surfaced:
            if state.rescued == 0:
                lost = True
            else:
                reward += _surface(state)
        return reward, lost

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[:] = 0
        out[0, state.y, state.x] = SEEN
        out[1, state.y, (state.x - state.way) % 10] = SEEN
        for x in range(max(0, state.oxygen) * 10 // 200):
            out[7, 9, x] = SEEN
        for x in range(9 - state.rescued, 9):
            out[8, 9, x] = SEEN
        for kind, channel in ((_SHOTS, 2), (_BOMBS, 4), (_FISH, 5), (_SUBS, 6), (_DIVERS, 9)):
            for i in range(state.count[kind]):
                thing = state.things[kind, i]
                out[channel, thing[_Y], thing[_X]] = SEEN
                behind = thing[_X] - thing[_WAY]
                if kind >= _FISH and 0 <= behind <= 9:
                    out[3, thing[_Y], behind] = SEEN
