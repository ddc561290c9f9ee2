"""One player's engine in a match on this machine, from the package `vizdoom` (extra `vizdoom`)."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.envs.doom.starting import check_room, engine_and_watch, starter, unlink

WIDTH, HEIGHT = 160, 120
"""The size of an engine's pictures, in pixels."""
PATIENCE = 20
"""Seconds after which an engine that does not answer is killed. Nothing else can interrupt a call that waits for it."""
_MATCH = (
    "-deathmatch +sv_forcerespawn 1 +sv_noautoaim 1 +sv_respawnprotect 1 +sv_spawnfarthest 1 +sv_nocrouch 1 "
    "+sv_nojump 1 +sv_nofreelook 1 +sv_noexit 1 +timelimit 0 +viz_afk_timeout 1000000"
)
"""Rules of a match, as in Sample Factory. The caller ends the match, so that its last picture can be observed."""


class EngineError(RuntimeError):
    """An engine could not start, ended, or did not answer. The message names the player."""


class Engine:
    """The engine of one player. The seed and the actions of all players determine everything that it shows.

    Args:
        name: the player's name for messages.
        wad: absolute path of the file that contains the map.
        level: the map's name, as in map01.
        seed: 0 … 2³¹ - 1. The host's seed counts for all players.
        buttons: what the player can press, in the order of actions.
        variables: the game's variables to observe.
    """

    def __init__(
        self, name: str, wad: str, level: str, seed: int, buttons: Sequence[str], variables: Sequence[str]
    ) -> None:
        # Where the package is not installed, type checkers would take it for lockstep.envs.vizdoom.
        vizdoom: Any = import_module("vizdoom")
        self.name = name
        self._marks = tempfile.TemporaryDirectory(prefix="lockstep-vizdoom-")
        self._folder = Path(self._marks.name)
        self._started, self._failure, self._closed = threading.Event(), "", False
        self._pids: list[int] = []
        """The process ids of the engine and of the process that watches it, once they have started."""
        self._game: Any = vizdoom.DoomGame()
        folder = Path(vizdoom.__file__).parent
        self._game.set_vizdoom_path(starter(self._folder, str(folder / "vizdoom"), watch=True))
        self._game.add_game_args(f"+viz_bots_path {folder / 'bots.cfg'} +name {name} +colorset 0")
        self._game.set_doom_scenario_path(wad)
        self._game.set_doom_map(level)
        self._game.set_seed(seed)
        self._game.set_mode(vizdoom.Mode.PLAYER)  # the engine waits for actions
        self._game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        self._game.set_screen_format(vizdoom.ScreenFormat.CRCGCB)
        self._game.set_window_visible(False)
        self._game.set_render_hud(False)
        self._game.set_render_decals(False)
        self._game.set_render_particles(False)
        self._game.set_render_crosshair(True)
        self._game.set_render_weapon(True)
        self._game.set_available_buttons([getattr(vizdoom.Button, button) for button in buttons])
        self._game.set_available_game_variables([getattr(vizdoom.GameVariable, each) for each in variables])
        self._nothing = [0.0] * len(buttons)

    def host(self, players: int, port: int | None = None, *, respawn: int = 0) -> None:
        """Begin to start as the host of a match; `ready` waits until this is done.

        Args:
            players: the number of players with an engine, including this one. Bots have none.
            port: UDP port for the other players.
            respawn: least number of seconds for which a dead player stays dead.
        """
        network = "" if port is None else f"-port {port} -netmode 1"
        self._start(f"-host {players} {network} {_MATCH} +viz_respawn_delay {respawn}")

    def join(self, port: int) -> None:
        """Begin to start as a guest of the host with this UDP port; `ready` waits until this is done."""
        # Without prediction, a guest sees where it is and not where it expects to be.
        self._start(f"-join 127.0.0.1:{port} +cl_noprediction 1")

    def _start(self, arguments: str) -> None:
        check_room(1)
        self._game.add_game_args(f"{arguments} +viz_connect_timeout {PATIENCE}")
        threading.Thread(target=self._init, name=f"doom-{self.name}", daemon=True).start()

    def _init(self) -> None:
        """Start the game, in a thread. If the engine fails, this waits forever instead of crashing the process: see
        lockstep.envs.doom.engine_program."""
        try:
            self._game.init()
        except Exception as error:
            self._failure = f"{error}"
        self._started.set()

    def ready(self) -> None:
        """Wait until the engine and those of all other players have started.

        Raises:
            EngineError: the engine ended, for example because its port is taken or no host answered.
        """
        for _ in range(100 * PATIENCE):
            if self._started.wait(0.01):
                break
            if self.failed():
                self._failure = "it ended"
                break
        else:
            self._failure = f"it was not ready after {PATIENCE} seconds"
            self.kill()
        if self._failure:
            self.close()
            raise EngineError(f"The Doom engine of player {self.name} could not start: {self._failure}.")
        self._pids = engine_and_watch(self._folder)
        self._clean()

    def failed(self) -> bool:
        """Whether the engine ended before it was ready."""
        return (self._folder / "failed").exists()

    @property
    def pid(self) -> int | None:
        """The engine's process id; None before it has started."""
        return next(iter(self._pids or engine_and_watch(self._folder)), None)

    def kill(self) -> None:
        """End the engine at once. A call that waits for it then raises EngineError."""
        for pid in self._pids or engine_and_watch(self._folder)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def command(self, text: str) -> None:
        """Send the engine a command of Doom's console. It takes effect in the next tic."""
        self._game.send_game_command(text)

    def act(self, pressed: list[float] | None, tics: int = 1, *, look: bool = True) -> None:
        """Play.

        Args:
            pressed: how far each button is pressed; None presses none.
            tics: the number of tics.
            look: whether `look` must return the new state afterwards.

        Raises:
            EngineError: the engine ended, or did not answer.
        """
        with self._heard():
            self._game.set_action(self._nothing if pressed is None else pressed)
            self._game.advance_action(tics, look)

    def look(self) -> tuple[np.ndarray, np.ndarray]:
        """The player's picture, uint8 [3, HEIGHT, WIDTH], and variables, float64, after the last action."""
        state = self._game.get_state()
        if state is None:
            raise EngineError(f"The Doom engine of player {self.name} ended the match by itself.")
        return state.screen_buffer, state.game_variables

    def close(self) -> None:
        """End the engine. This takes a fraction of a second. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._started.is_set():
            self._clean()  # first, so that the watching process ends together with the engine
            with contextlib.suppress(Exception), _watch.over(self):  # closing fails after a crash
                self._game.close()
        else:
            self.kill()
            for _ in range(100):  # wait until the watching process has looked for the folder
                if not self.pid or self.failed():
                    break
                time.sleep(0.01)
            self._clean()

    def _clean(self) -> None:
        """Remove the files of a start."""
        if self._folder.exists():
            unlink(self._folder)
            self._marks.cleanup()

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            with _watch.over(self):
                yield
        except Exception as error:
            self.close()
            raise EngineError(
                f"The Doom engine of player {self.name} ended, or did not answer for {PATIENCE} seconds: {error}"
            ) from error


class _Watch:
    """A thread that kills engines that do not answer."""

    def __init__(self) -> None:
        self._since: dict[Engine, int] = {}
        """The count at which the current call of each engine began."""
        self._count = 0
        self._process = 0

    @contextlib.contextmanager
    def over(self, engine: Engine) -> Iterator[None]:
        if self._process != os.getpid():  # a fork has no threads
            self._process, self._since = os.getpid(), {}
            threading.Thread(target=self._look, name="doom-watch", daemon=True).start()
        self._since[engine] = self._count
        try:
            yield
        finally:
            self._since.pop(engine, None)

    def _look(self) -> None:
        while True:
            # Unlike a clock, a count of pauses does not advance while this process is stopped.
            time.sleep(1)
            self._count += 1
            for engine, since in list(self._since.items()):
                if self._count - since > PATIENCE:
                    engine.kill()


_watch = _Watch()
