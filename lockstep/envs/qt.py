"""Loads Qt 5, which EnvPool's Procgen needs, from the package PyQt5-Qt5 (extra `procgen`) or else from the system."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import envpool.procgen

from lockstep.config.extras import install_command
from lockstep.config.settings import SettingsError

_LIBRARIES = ("libQt5Core.so.5", "libQt5Gui.so.5")


@functools.cache
def load_qt() -> None:
    """Load the package's libraries, if it is installed, and reload EnvPool's Procgen, which looks for them on import.

    Raises:
        SettingsError: the libraries need another library that the system lacks.
    """
    spec = importlib.util.find_spec("PyQt5")
    for package in (spec.submodule_search_locations if spec else None) or ():
        folder = Path(package, "Qt5", "lib")
        if not all((folder / name).exists() for name in _LIBRARIES):
            continue
        try:
            for name in _LIBRARIES:
                ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise SettingsError(
                f"Procgen draws with Qt 5, whose package PyQt5-Qt5 needs a library of the system: {error}. "
                "libGL.so.1 is in Debian's and Ubuntu's libgl1."
            ) from error
        importlib.reload(envpool.procgen)
        return


def missing_qt() -> str:
    """Advice on installing Qt 5 for Procgen."""
    return f"Procgen draws with Qt 5: {install_command('procgen')}, or apt install libqt5gui5."
