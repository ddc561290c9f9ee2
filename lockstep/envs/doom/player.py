"""A player's observations, actions and rewards in a match, and the options of these environments.

Shape legend: H, W height and width of the observed picture.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.envs.doom.actions import COMPACT, FULL
from lockstep.envs.doom.engine import HEIGHT, WIDTH
from lockstep.envs.doom.shaping import NEEDED, SLOTS, Shaping, Weights, switch, weight

TICS_A_MINUTE = 35 * 60
MEASUREMENTS = (
    *("HEALTH", "ARMOR", "FRAGCOUNT", "PLAYER_COUNT", "SELECTED_WEAPON", "SELECTED_WEAPON_AMMO", "ATTACK_READY"),
    *(f"WEAPON{n}" for n in SLOTS),
    *(f"AMMO{n}" for n in SLOTS if n > 1),
)
"""Variables in the order of the observation's `measurements`: the numbers that the game shows to human players, raw.
Only frags can be below 0."""
_ACTIONS = {"full": FULL, "compact": COMPACT}


@dataclasses.dataclass(frozen=True)
class Rules:
    """Options of a match. Weights of the shaped reward (lockstep.envs.doom.shaping.Weights) are options, too."""

    map: str
    """Name of the map in the file."""
    weights: Weights
    wad: str = ""
    """File with the map; "" is cig.wad of the package vizdoom, with map01 and map02."""
    minutes: float = 4.0
    """Length of a match, in minutes of the game, which has 35 tics a second."""
    frame_skip: int = 2
    """Tics that an action lasts."""
    actions: str = "full"
    """full: the paper's seven heads. compact: five heads, without weapons and use, and with fewer angles."""
    measurements: bool = True
    """Whether players observe measurements in addition to the picture."""
    img_width: int = 128
    img_height: int = 72
    shaping: bool = False
    """Whether rewards are shaped by the weights. Otherwise they come from frags or the result alone."""

    @staticmethod
    def of(options: Mapping[str, Any], *, map: str, weights: Weights) -> Rules:
        """Rules with these options. A TypeError names an option that does not exist.

        Raises:
            SettingsError: a value is out of range.
        """
        names = {field.name for field in dataclasses.fields(Weights)}
        own = {name: weight(name, value) for name, value in options.items() if name in names}
        others = {name: value for name, value in options.items() if name not in names}
        rules = Rules(**{"map": map, **others}, weights=dataclasses.replace(weights, **own))
        rules._check()
        return rules

    def _check(self) -> None:
        if self.actions not in _ACTIONS:
            raise SettingsError(f"env.options.actions={self.actions!r} is unknown. Use {' or '.join(_ACTIONS)}.")
        if not isinstance(self.minutes, (int, float)) or not 0 < self.minutes <= 1000:
            raise SettingsError(
                f"env.options.minutes={self.minutes!r} must be above 0 and at most 1000: the length of a match in "
                "minutes of the game."
            )
        most = int(self.minutes * TICS_A_MINUTE)
        for name, least, highest in (("frame_skip", 1, most), ("img_width", 1, WIDTH), ("img_height", 1, HEIGHT)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= highest:
                raise SettingsError(f"env.options.{name}={value!r} must be a whole number from {least} to {highest}.")
        for name in ("measurements", "shaping"):
            switch(name, getattr(self, name))
        if self.wad and not Path(self.wad).is_file():
            raise SettingsError(f"env.options.wad={self.wad}: there is no such file. Name a WAD file with Doom maps.")
        if not str(self.map).isalnum():
            raise SettingsError(f"env.options.map={self.map!r} must be the name of a map in the file, such as map01.")

    @property
    def steps(self) -> int:
        """Steps of a match."""
        return int(self.minutes * TICS_A_MINUTE) // self.frame_skip

    @property
    def path(self) -> str:
        """Absolute path of the file with the map.

        Raises:
            SettingsError: the file has no such map. (The engine would silently play another one.)
        """
        import vizdoom

        path = Path(self.wad).resolve() if self.wad else Path(vizdoom.__file__).parent / "scenarios" / "cig.wad"
        known = maps_in(path)
        if self.map.lower() not in known:
            listed = f"has {', '.join(known)}" if known else "is no WAD file with maps"
            raise SettingsError(f"env.options.map={self.map}: {path} has no such map. It {listed}.")
        return str(path)

    @property
    def buttons(self) -> list[str]:
        """Buttons, in the order of Player.pressed."""
        return [button for head in _ACTIONS[self.actions].heads for button in head]


class Player:
    """One player: its spaces, its last observation, and its shaped reward.

    Args:
        rules: the options of the match.
        more: further variables to observe, in addition to those that measurements and rewards need.
    """

    def __init__(self, rules: Rules, more: tuple[str, ...] = ()) -> None:
        self._rules = rules
        self._actions = _ACTIONS[rules.actions]
        self._shaping = Shaping(rules.weights)
        self._scale = _Scale(rules.img_height, rules.img_width)
        self.variables = tuple(dict.fromkeys((*MEASUREMENTS, *NEEDED, *more)))
        """Names of the variables whose values `see` takes."""
        image = spaces.Box(0, 255, (3, rules.img_height, rules.img_width), np.uint8)
        vector = spaces.Box(-np.inf, np.inf, (len(MEASUREMENTS),), np.float32)
        self.observation_space: spaces.Space[Any] = (
            spaces.Dict({"image": image, "measurements": vector}) if rules.measurements else image
        )
        self.action_space = spaces.MultiDiscrete(self._actions.sizes)
        self.picture = np.zeros((3, HEIGHT, WIDTH), np.uint8)
        """The picture that was drawn last, uint8 [3, HEIGHT, WIDTH]."""
        self.now: dict[str, float] = {}
        """The last values of the variables."""

    def begin(self, picture: np.ndarray, numbers: np.ndarray) -> None:
        """Begin an episode. Arguments are those of `see`."""
        self._see(picture, numbers)
        self._shaping.begin(self.now)

    def see(self, picture: np.ndarray, numbers: np.ndarray) -> float:
        """Store the engine's picture and variables after a step; return the step's shaped reward.

        Args:
            picture: uint8 [3, HEIGHT, WIDTH]
            numbers: float64, the `variables`.
        """
        self._see(picture, numbers)
        return self._shaping.reward(self.now)

    def _see(self, picture: np.ndarray, numbers: np.ndarray) -> None:
        self.picture, self.now = picture, dict(zip(self.variables, numbers.tolist(), strict=True))

    def numbers(self) -> dict[str, float]:
        """The player's frags, deaths and damage in the match so far, for the info of a step."""
        return {"frags": self.now["FRAGCOUNT"], "deaths": self.now["DEATHCOUNT"], "damage": self.now["DAMAGECOUNT"]}

    def pressed(self, choices: np.ndarray) -> list[float]:
        """How far an action presses each button."""
        return self._actions.buttons(np.asarray(choices)[None])[0].tolist()

    def observation(self) -> Any:
        """The player's observation, an element of observation_space."""
        image = self._scale(self.picture)
        if not self._rules.measurements:
            return image
        numbers = [self.now[name] if name == "FRAGCOUNT" else max(0.0, self.now[name]) for name in MEASUREMENTS]
        return {"image": image, "measurements": np.array(numbers, np.float32)}


class _Scale:
    """Scales a picture bilinearly, in integer arithmetic, so that every machine gets the same result."""

    def __init__(self, height: int, width: int) -> None:
        self._same = (height, width) == (HEIGHT, WIDTH)
        self._top, self._below = _neighbors(HEIGHT, height)
        self._left, self._right = _neighbors(WIDTH, width)

    def __call__(self, picture: np.ndarray) -> np.ndarray:
        """uint8 [3, HEIGHT, WIDTH] -> uint8 [3, H, W]"""
        if self._same:
            return picture
        (top, near), (below, far) = self._top, self._below
        rows = picture[:, top] * near[:, None] + picture[:, below] * far[:, None]
        (left, near), (right, far) = self._left, self._right
        columns = rows.take(left, 2) * near.astype(np.uint32) + rows.take(right, 2) * far.astype(np.uint32)
        return ((columns + 2**15) >> 16).astype(np.uint8)


def _neighbors(size: int, wanted: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The two rows next to the center of each new row, and their shares in units of 1/256, uint16 [wanted]."""
    center = np.clip((np.arange(wanted) + 0.5) * size / wanted - 0.5, 0, size - 1)
    first = np.minimum(center.astype(int), size - 2)
    share = np.rint((center - first) * 256).astype(np.uint16)
    return (first, 256 - share), (first + 1, share)


def maps_in(path: Path) -> list[str]:
    """Names of the maps in a WAD file; empty if it is not a WAD file."""
    data = path.read_bytes()
    if len(data) < 12 or data[:4] not in (b"IWAD", b"PWAD"):
        return []
    count, start = struct.unpack("<ii", data[4:12])
    names = [data[start + 16 * i + 8 : start + 16 * i + 16].rstrip(b"\0").decode("latin-1") for i in range(count)]
    return [name.lower() for name, content in pairwise(names) if content in ("THINGS", "TEXTMAP")]
