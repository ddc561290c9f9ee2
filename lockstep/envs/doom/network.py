"""Two engines of one match, connected by UDP on this machine. Seeds and actions determine everything.

Engines exchange the actions of each tic. The host's actions reach the guest in the tic in which they apply. The guest
adapts the pace of its actions to what has arrived, so timing would decide whether they take effect after 0, 1 or more
tics. Three measures make the delay exact:

1. `-netmode 1` lets the guest get ahead of the host, but not fall behind.
2. The engines never compute at the same time. In every tic the host goes first. It can, because the guest's actions for
   this tic have arrived. So the guest has no reason to adapt its pace.
3. The delay is measured at the start of a match and must be one tic.

The caller delays the host's actions by one tic, too, so that neither player has an advantage.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.envs.doom.actions import TURN
from lockstep.envs.doom.engine import PATIENCE, Engine, EngineError

_ATTEMPTS = 5
_QUARTER = 90.0
"""Degrees of a turn that the game can undo without rounding errors."""
_WARM_UP = 10
"""Tics at the start of a match until players can turn."""


def connected(make: Callable[[int], Engine], buttons: Sequence[str], angle: int, respawn: int) -> list[Engine]:
    """Start the two engines of a match: the host, and the guest, whose actions take effect one tic late.

    Args:
        make: makes engine 0 or 1.
        buttons: the buttons of both players. One of them must turn.
        angle: index of the variable ANGLE.
        respawn: least number of seconds for which dead players stay dead.

    Raises:
        EngineError: five attempts with different ports failed.
    """
    reasons = []
    for _ in range(_ATTEMPTS):
        host, guest = make(0), make(1)
        try:
            _connect(host, guest, _free_port(), respawn)
            _check_delay(host, guest, [_QUARTER * (button == TURN) for button in buttons], angle)
            return [host, guest]
        except BaseException as error:
            host.close()
            guest.close()
            if not isinstance(error, EngineError):
                raise
            reasons.append(str(error))
    why = " ".join(dict.fromkeys(reasons))
    raise EngineError(f"Two Doom engines could not be connected in {_ATTEMPTS} attempts. {why}")


def tic(pair: Sequence[Engine], pressed: Sequence[list[float] | None], *, look: bool) -> None:
    """Play one tic: the host, then the guest.

    Args:
        pressed: the argument of Engine.act for each engine.
        look: as for Engine.act.
    """
    for engine, buttons in zip(pair, pressed, strict=True):
        engine.act(buttons, look=look)


def _connect(host: Engine, guest: Engine, port: int, respawn: int) -> None:
    host.host(2, port, respawn=respawn)
    # A guest must not join the match of another host that took the port first.
    for _ in range(200 * PATIENCE):
        if host.failed() or _owns(host.pid, port):
            break
        time.sleep(0.005)
    else:
        raise EngineError(f"The host did not open a port within {PATIENCE} seconds.")
    if not host.failed():
        guest.join(port)
        guest.ready()
    host.ready()


def _check_delay(host: Engine, guest: Engine, turn: list[float], angle: int) -> None:
    """Let the guest turn and turn back, and raise EngineError unless it does so one tic late."""
    seen = []
    for number in range(_WARM_UP + 6):
        pressed = {_WARM_UP: turn, _WARM_UP + 3: [-x for x in turn]}.get(number)
        tic([host, guest], [None, pressed], look=True)
        seen.append(round(guest.look()[1][angle]))
    turned = [(other - seen[0]) % 360 != 0 for other in seen[_WARM_UP:]]
    if turned != [False, True, True, True, False, False]:
        raise EngineError("The guest's actions did not take effect one tic late.")


def _free_port() -> int:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _owns(pid: int | None, port: int) -> bool:
    """Whether a process has opened the UDP port."""
    with contextlib.suppress(OSError):  # the process has ended or is closing a file
        lines = Path(f"/proc/{pid}/net/udp").read_text().splitlines()[1:]
        sockets = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[1].endswith(f":{port:04X}")}
        folder = f"/proc/{pid}/fd"
        return bool(sockets) and any(os.readlink(f"{folder}/{fd}") in sockets for fd in os.listdir(folder))
    return False
