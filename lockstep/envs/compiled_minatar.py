"""MinAtar's games (Young and Tian 2019, https://arxiv.org/abs/1903.03176) for the adapter `compiled`.

They follow the rules of MinAtar 1.0.15 step by step and draw random numbers in the same order. As in
lockstep.envs.minatar, a sticky first action repeats "do nothing".

Shape legend: C kinds of objects.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from lockstep.envs.compiled import CompiledEnv
from lockstep.kernels.cache import part
from lockstep.kernels.random import integer, uniform

LEFT, UP, RIGHT, DOWN, FIRE = 1, 2, 3, 4, 5
SEEN = 255
_GRID = (np.uint8, (10, 10))


class Game(CompiledEnv):
    """A game with all six actions."""

    action_space = spaces.Discrete(6)
    options: ClassVar = {"sticky_action_prob": 0.1, "difficulty_ramping": True}


def picture(kinds: int) -> spaces.Box:
    return spaces.Box(0, SEEN, (kinds, 10, 10), np.uint8)


def _minimal(game: type[Game], *actions: int) -> type[Game]:
    """A variant of a game that has only these actions."""
    full = part(game.step)

    def step(state: Any, action: Any) -> Any:
        return full(state, actions[action])

    return type(
        f"{game.__name__}Minimal", (game,), {"step": staticmethod(step), "action_space": spaces.Discrete(len(actions))}
    )


@part
def chosen(state: Any, action: Any) -> Any:
    """The action to play: the given action, or a repetition of the last one."""
    if uniform(state, 0.0, 1.0) < state.sticky_action_prob:
        action = state.last_action
    state.last_action = action
    return action


class Breakout(Game):
    """MinAtar/Breakout."""

    observation_space = picture(4)
    fields: ClassVar = {
        **{name: int for name in ("last_action", "paddle", "x", "y", "old_x", "old_y", "right", "down")},
        **{"striking": bool, "bricks": _GRID},
    }

    @staticmethod
    def reset(state: Any) -> None:
        state.last_action = 0
        state.paddle = 4
        state.right = 1 - integer(state, 2)
        state.down = 1
        state.x = state.old_x = 0 if state.right else 9
        state.y = state.old_y = 3
        state.striking = False
        state.bricks[:] = 0
        state.bricks[1:4] = 1

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        action = chosen(state, action)
        if action == LEFT:
            state.paddle = max(0, state.paddle - 1)
        elif action == RIGHT:
            state.paddle = min(9, state.paddle + 1)
        state.old_x, state.old_y = state.x, state.y
        x, y = state.x + 2 * state.right - 1, state.y + 2 * state.down - 1
        if x < 0 or x > 9:
            x = min(max(x, 0), 9)
            state.right = 1 - state.right
        reward, struck, lost = 0.0, False, False
        if y < 0:
            y = 0
            state.down = 1 - state.down
        elif state.bricks[y, x]:
            struck = True
            if not state.striking:
                reward = 1.0
                state.striking = True
                state.bricks[y, x] = 0
                y = state.old_y
                state.down = 1 - state.down
        elif y == 9:
            if not state.bricks.any():
                state.bricks[1:4] = 1
            if state.x == state.paddle:
                y = state.old_y
                state.down = 1 - state.down
            elif x == state.paddle:
                y = state.old_y
                state.down = 1 - state.down
                state.right = 1 - state.right
            else:
                lost = True
        if not struck:
            state.striking = False
        state.x, state.y = x, y
        return reward, lost

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[:3] = 0
        out[0, 9, state.paddle] = SEEN
        out[1, state.y, state.x] = SEEN
        out[2, state.old_y, state.old_x] = SEEN
        out[3] = state.bricks * np.uint8(SEEN)


@part
def _new_traffic(state: Any) -> None:
    for i in range(8):
        state.speed[i] = 1 + integer(state, 5)
    for i in range(8):
        if uniform(state, 0.0, 1.0) < 0.5:
            state.speed[i] = -state.speed[i]
        state.wait[i] = abs(state.speed[i])


class Freeway(Game):
    """MinAtar/Freeway. An episode lasts 2,501 steps."""

    observation_space = picture(7)
    fields: ClassVar = {
        **{name: int for name in ("last_action", "y", "pause", "left")},
        **{name: (np.int64, (8,)) for name in ("x", "speed", "wait")},
    }

    @staticmethod
    def reset(state: Any) -> None:
        state.last_action = 0
        _new_traffic(state)
        state.x[:] = 0
        state.y, state.pause, state.left = 9, 3, 2500

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        action = chosen(state, action)
        if action == UP and state.pause == 0:
            state.pause = 3
            state.y = max(0, state.y - 1)
        elif action == DOWN and state.pause == 0:
            state.pause = 3
            state.y = min(9, state.y + 1)
        reward = 0.0
        if state.y == 0:
            reward = 1.0
            _new_traffic(state)
            state.y = 9
        for i in range(8):
            if state.x[i] == 4 and state.y == i + 1:
                state.y = 9
            if state.wait[i] == 0:
                state.wait[i] = abs(state.speed[i])
                state.x[i] = (state.x[i] + (1 if state.speed[i] > 0 else 9)) % 10
                if state.x[i] == 4 and state.y == i + 1:
                    state.y = 9
            else:
                state.wait[i] -= 1
        state.pause = max(0, state.pause - 1)
        state.left -= 1
        return reward, state.left < 0

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[:] = 0
        out[0, state.y, 4] = SEEN
        for i in range(8):
            out[1, i + 1, state.x[i]] = SEEN
            out[1 + abs(state.speed[i]), i + 1, (state.x[i] + (9 if state.speed[i] > 0 else 1)) % 10] = SEEN


@part
def _meet(state: Any, i: Any) -> Any:
    """If the player meets the object in row i: its reward, and whether it is an enemy."""
    if state.kind[i] and state.x[i] == state.player_x and i + 1 == state.player_y:
        if state.kind[i] == 2:
            state.kind[i] = 0
            return 1.0, False
        return 0.0, True
    return 0.0, False


class Asterix(Game):
    """MinAtar/Asterix."""

    observation_space = picture(4)
    fields: ClassVar = {
        **{name: int for name in ("last_action", "player_x", "player_y", "spawn_period", "spawn_wait")},
        **{name: int for name in ("move_period", "move_wait", "ramp_wait", "ramps")},
        **{name: (np.int64, (8,)) for name in ("kind", "x", "way")},
    }
    """`kind` is 0 in an empty row, 1 for an enemy and 2 for gold."""

    @staticmethod
    def reset(state: Any) -> None:
        state.last_action = 0
        state.player_x = state.player_y = 5
        state.kind[:] = 0
        state.spawn_period = state.spawn_wait = 10
        state.move_period = state.move_wait = 5
        state.ramp_wait, state.ramps = 100, 0

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        action = chosen(state, action)
        if state.spawn_wait == 0:
            way = 1 if uniform(state, 0.0, 1.0) < 0.5 else -1
            kind = 2 if uniform(state, 0.0, 1.0) < 1 / 3 else 1
            empty = np.sum(state.kind == 0)
            skipped = integer(state, empty) if empty else -1
            for i in range(8):
                if state.kind[i] == 0:
                    if skipped == 0:
                        state.kind[i], state.way[i], state.x[i] = kind, way, 0 if way > 0 else 9
                    skipped -= 1
            state.spawn_wait = state.spawn_period
        if action == LEFT:
            state.player_x = max(0, state.player_x - 1)
        elif action == RIGHT:
            state.player_x = min(9, state.player_x + 1)
        elif action == UP:
            state.player_y = max(1, state.player_y - 1)
        elif action == DOWN:
            state.player_y = min(8, state.player_y + 1)
        reward, lost = 0.0, False
        for i in range(8):
            gain, hit = _meet(state, i)
            reward, lost = reward + gain, lost or hit
        if state.move_wait == 0:
            state.move_wait = state.move_period
            for i in range(8):
                state.x[i] += state.way[i]
                if state.x[i] < 0 or state.x[i] > 9:
                    state.kind[i] = 0
                gain, hit = _meet(state, i)
                reward, lost = reward + gain, lost or hit
        state.spawn_wait -= 1
        state.move_wait -= 1
        if state.difficulty_ramping and (state.spawn_period > 1 or state.move_period > 1):
            if state.ramp_wait >= 0:
                state.ramp_wait -= 1
            else:
                if state.move_period > 1 and state.ramps % 2:
                    state.move_period -= 1
                if state.spawn_period > 1:
                    state.spawn_period -= 1
                state.ramps += 1
                state.ramp_wait = 100
        return reward, lost

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[:] = 0
        out[0, state.player_y, state.player_x] = SEEN
        for i in range(8):
            if state.kind[i]:
                out[3 if state.kind[i] == 2 else 1, i + 1, state.x[i]] = SEEN
                behind = state.x[i] - state.way[i]
                if 0 <= behind <= 9:
                    out[2, i + 1, behind] = SEEN


@part
def _nearest_column(state: Any) -> Any:
    """The column with aliens that is nearest to the cannon; of two, the left one."""
    for distance in range(10):
        for x in (state.cannon - distance, state.cannon + distance):
            if 0 <= x <= 9 and state.aliens[:, x].any():
                return x
    return 0


@part
def _shift_down(grid: Any) -> None:
    """Move all rows down by one, the lowest to the top."""
    for x in range(10):
        lowest = grid[9, x]
        for y in range(9, 0, -1):
            grid[y, x] = grid[y - 1, x]
        grid[0, x] = lowest


class SpaceInvaders(Game):
    """MinAtar/SpaceInvaders."""

    observation_space = picture(6)
    fields: ClassVar = {
        **{
            name: int for name in ("last_action", "cannon", "way", "move_period", "move_wait", "fire_wait", "shot_wait")
        },
        **{"aliens": _GRID, "shots": _GRID, "bombs": _GRID},
    }

    @staticmethod
    def reset(state: Any) -> None:
        state.last_action = 0
        state.cannon, state.way = 5, -1
        state.aliens[:] = 0
        state.aliens[0:4, 2:8] = 1
        state.shots[:] = 0
        state.bombs[:] = 0
        state.move_period = state.move_wait = 12
        state.fire_wait, state.shot_wait = 10, 0

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        action = chosen(state, action)
        if action == FIRE and state.shot_wait == 0:
            state.shots[9, state.cannon] = 1
            state.shot_wait = 5
        elif action == LEFT:
            state.cannon = max(0, state.cannon - 1)
        elif action == RIGHT:
            state.cannon = min(9, state.cannon + 1)
        for y in range(9):
            state.shots[y] = state.shots[y + 1]
        state.shots[9] = 0
        _shift_down(state.bombs)
        state.bombs[0] = 0
        lost = state.bombs[9, state.cannon] != 0 or state.aliens[9, state.cannon] != 0
        if state.move_wait == 0:
            state.move_wait = min(np.sum(state.aliens != 0), state.move_period)
            if state.aliens[:, 0 if state.way < 0 else 9].any():
                state.way = -state.way
                lost = lost or state.aliens[9].any()
                _shift_down(state.aliens)
            elif state.way < 0:
                for x in range(9):
                    state.aliens[:, x] = state.aliens[:, x + 1]
                state.aliens[:, 9] = 0
            else:
                for x in range(9, 0, -1):
                    state.aliens[:, x] = state.aliens[:, x - 1]
                state.aliens[:, 0] = 0
            lost = lost or state.aliens[9, state.cannon] != 0
        if state.fire_wait == 0:
            state.fire_wait = 10
            x = _nearest_column(state)
            y = 9
            while y > 0 and state.aliens[y, x] == 0:
                y -= 1
            state.bombs[y, x] = 1
        reward, remain = 0.0, False
        for y in range(10):
            for x in range(10):
                if state.aliens[y, x] and state.shots[y, x]:
                    reward += 1.0
                    state.aliens[y, x] = state.shots[y, x] = 0
                remain = remain or state.aliens[y, x] != 0
        state.shot_wait = max(0, state.shot_wait - 1)
        state.move_wait -= 1
        state.fire_wait -= 1
        if not remain:
            if state.move_period > 6 and state.difficulty_ramping:
                state.move_period -= 1
            state.aliens[0:4, 2:8] = 1
        return reward, lost

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[:] = 0
        out[0, 9, state.cannon] = SEEN
        for y in range(10):
            for x in range(10):
                if state.aliens[y, x]:
                    out[1, y, x] = out[2 if state.way < 0 else 3, y, x] = SEEN
                out[4, y, x] = state.shots[y, x] * SEEN
                out[5, y, x] = state.bombs[y, x] * SEEN


BreakoutMinimal = _minimal(Breakout, 0, LEFT, RIGHT)
FreewayMinimal = _minimal(Freeway, 0, UP, DOWN)
AsterixMinimal = _minimal(Asterix, 0, LEFT, UP, RIGHT, DOWN)
SpaceInvadersMinimal = _minimal(SpaceInvaders, 0, LEFT, RIGHT, FIRE)
