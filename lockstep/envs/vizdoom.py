"""Doom scenarios with images, measurements and several action heads, stepped by EnvPool (extra `vizdoom`)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from envpool.registration import registry as _registry
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.envs.base import Observation
from lockstep.envs.doom.actions import COMPACT, FULL, SINGLE, Actions
from lockstep.envs.doom.shaping import SUPPLIES, Weights, supplies, switch, weight
from lockstep.envs.doom.starting import check_room, starter, unlink
from lockstep.envs.envpool_shard import EnvPoolShard
from lockstep.envs.episodes import Seeds
from lockstep.envs.settings import EnvConfig

PREFIX = "vizdoom/"
_LIBRARY_ID = "Basic-v1"
"""The EnvPool environment that is started with the map and configuration of a scenario."""

MEASUREMENTS = (
    *("HEALTH", "ARMOR", "SELECTED_WEAPON", "SELECTED_WEAPON_AMMO"),
    *("AMMO2", "AMMO3", "AMMO4", "AMMO5", "AMMO6", "AMMO7", "KILLCOUNT"),
)
"""Game variables in the order of the observation's `measurements`, as raw numbers."""


@dataclass(frozen=True)
class Scenario:
    """A map that EnvPool ships, and its rules. EnvPool does not return the scenario's rewards, so they are computed
    from game variables."""

    map: str
    actions: dict[str, Actions]
    """Action spaces by name; the first is the default."""
    skill: int
    """Doom's difficulty, 1 to 5."""
    timeout: int
    """Tics (35 a second) after which an episode is truncated."""
    start: int = 1
    """Tics before an episode starts."""
    per_tic: float = 0.0
    """Reward of every tic."""
    per_kill: float = 0.0
    """Reward of every kill."""
    per_shot: float = 0.0
    """Reward of every shot."""
    at_end: float = 0.0
    """Reward of the step that terminates an episode."""
    supplies: bool = False
    """Whether the option `shaping` also rewards health and ammunition."""


_BATTLE: dict[str, Any] = {
    "actions": {"full": FULL, "compact": COMPACT, "single": SINGLE},
    "skill": 2,
    "timeout": 2100,
    "per_kill": 1.0,
    "supplies": True,
}
SCENARIOS = {
    "Basic": Scenario(
        map="basic",
        actions={"full": Actions((("MOVE_LEFT", "MOVE_RIGHT"), ("ATTACK",)))},
        skill=5,
        timeout=300,
        start=14,
        per_tic=-1.0,
        per_shot=-5.0,
        at_end=108.0,  # 106 for the monster, and 2 for the tics that the last step lacks on average
    ),
    "HealthGathering": Scenario(
        map="health_gathering",
        actions={"full": Actions((("TURN_LEFT", "TURN_RIGHT"), ("MOVE_FORWARD",)))},
        skill=3,
        timeout=2100,
        per_tic=1.0,
        at_end=-100.0,
    ),
    "DefendTheCenter": Scenario(
        map="defend_the_center",
        actions={"full": Actions((("TURN_LEFT", "TURN_RIGHT"), ("ATTACK",)))},
        skill=3,
        timeout=2100,
        start=10,
        per_kill=1.0,
        at_end=-1.0,
    ),
    "Battle": Scenario(map="D3_battle", **_BATTLE),
    "Battle2": Scenario(map="D4_battle2", **_BATTLE),
}
"""ViZDoom's scenarios (Kempka et al. 2016, arXiv:1605.02097), and the two battles of Dosovitskiy and Koltun 2017
(arXiv:1611.01779). The battles' action spaces are Sample Factory's: `full`, with weapons and use, has 12,096 actions,
`compact` has the 396 that matter, and `single` presses one of eight buttons."""


def ids() -> list[str]:
    """Every id that this adapter serves."""
    return [PREFIX + name for name in SCENARIOS]


class VizdoomShard(EnvPoolShard):
    """B games of one scenario. Observations have the entries `image`, RGB uint8 [3, 72, 128], and `measurements`,
    float32 [11] (see MEASUREMENTS). With the option measurements=False, they consist of the image alone.

    Other options are `actions`; for battles, `shaping` and its weights (lockstep.envs.doom.shaping.SUPPLIES); and
    EnvPool's (`frame_skip`, `stack_num`, `img_width`, `max_episode_steps`, …).
    """

    def __init__(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> None:
        if render:
            raise SettingsError(f"{config.id} cannot render images for videos: EnvPool does not support that for Doom.")
        self._scenario = scenario = SCENARIOS[config.id.removeprefix(PREFIX)]
        options: dict[str, Any] = dict(config.options)
        self._measured = bool(options.pop("measurements", True))
        self._actions = _choose(config.id, scenario, options.pop("actions", None))
        self._shaping = _shaping(config.id, scenario, options)
        skip = options.get("frame_skip", 4)
        if not isinstance(skip, int) or not 1 <= skip <= scenario.timeout:
            raise SettingsError(
                f"env.options.frame_skip={skip!r} must be a whole number from 1 to {scenario.timeout}: the tics that "
                "an action lasts."
            )
        ours = {
            "stack_num": 1,
            "img_height": 72,
            "img_width": 128,
            "max_episode_steps": scenario.timeout // skip,
            "use_inter_area_resize": False,  # bilinear, at a third of the cost
            "reward_config": {},
            "selected_weapon_reward_config": {},
        }
        super().__init__(
            replace(config, id=_LIBRARY_ID, options={**ours, **options}),
            seeds=seeds,
            num_envs=num_envs,
            threads=threads,
        )
        self.frames_per_step = skip
        self.emulator = f"{skip} tics an action"
        sizes = self._actions.sizes
        self.action_space = spaces.MultiDiscrete(sizes) if len(sizes) > 1 else spaces.Discrete(sizes[0])
        if self._measured:
            vector = spaces.Box(-np.inf, np.inf, (len(MEASUREMENTS),), np.float32)
            self.observation_space = spaces.Dict({"image": self._writer.space, "measurements": vector})

    def _make_spec(self) -> Any:
        with self._files() as files:
            self._settings |= files
            return super()._make_spec()

    def _make_pool(self) -> Any:
        check_room(self.num_envs)
        with self._files() as files:
            self._settings |= files
            try:
                return super()._make_pool()
            finally:
                unlink(Path(files["cfg_path"]).parent)

    @contextlib.contextmanager
    def _files(self) -> Iterator[dict[str, str]]:
        """The files that EnvPool reads while it starts the engines, as settings with their paths."""
        library = _registry.specs[_LIBRARY_ID][2]
        maps = Path(library["cfg_path"]).parent
        wad = str(maps / f"{self._scenario.map}.wad")
        with tempfile.TemporaryDirectory(prefix="lockstep-vizdoom-") as folder:
            config = Path(folder, "scenario.cfg")
            config.write_text(self._config(wad), encoding="utf-8")
            yield {"cfg_path": str(config), "wad_path": wad, "vzd_path": starter(Path(folder), library["vzd_path"])}

    def _config(self, wad: str) -> str:
        """The scenario in ViZDoom's format."""
        settings = {
            "doom_scenario_path": wad,
            "doom_map": "map01",
            "doom_skill": self._scenario.skill,
            "episode_start_time": self._scenario.start,
            "screen_resolution": "RES_160X120",
            "screen_format": "CRCGCB",
            "render_hud": "false",
            "render_crosshair": "true",
            "render_weapon": "true",
            "render_decals": "false",
            "render_particles": "false",
            "window_visible": "false",
            "mode": "PLAYER",
            "available_buttons": f"{{ {' '.join(button for head in self._actions.heads for button in head)} }}",
        }
        return "".join(f"{name} = {value}\n" for name, value in settings.items())

    def _write(self, obs: Any, out: Observation) -> None:
        if not self._measured:
            return super()._write(obs, out)
        super()._write(obs, out["image"])
        for column, name in enumerate(MEASUREMENTS):
            out["measurements"][:, column] = self._info[name]

    def _to_library(self, action: np.ndarray) -> np.ndarray:
        return self._actions.buttons(action.reshape(self.num_envs, -1))

    def _rewards(self, reward: np.ndarray, terminated: np.ndarray, before: dict[str, np.ndarray]) -> np.ndarray:
        scenario, now = self._scenario, self._info
        kills = np.maximum(now["KILLCOUNT"] - before["KILLCOUNT"], 0)
        shots = np.maximum(before["SELECTED_WEAPON_AMMO"] - now["SELECTED_WEAPON_AMMO"], 0)
        reward = (
            reward
            + scenario.per_tic * self.frames_per_step
            + scenario.per_kill * kills
            + scenario.per_shot * shots
            + scenario.at_end * terminated
        )
        return reward if self._shaping is None else reward + supplies(self._shaping, before, now)


def _choose(env_id: str, scenario: Scenario, name: Any) -> Actions:
    known = list(scenario.actions)
    if name is None:
        name = known[0]
    if name not in known:
        raise SettingsError(f"env.options.actions={name!r} is unknown for {env_id}. Use {' or '.join(known)}.")
    return scenario.actions[name]


def _shaping(env_id: str, scenario: Scenario, options: dict[str, Any]) -> Weights | None:
    """Remove the weights of a battle's shaped reward from the options, and return them; None if it is not shaped."""
    own = {name: options.pop(name) for name in ("shaping", *SUPPLIES) if name in options}
    if own and not scenario.supplies:
        raise SettingsError(f"env.options.{next(iter(own))} is for battles and matches, and {env_id} is neither.")
    shaped = switch("shaping", own.pop("shaping", False))
    weights = replace(Weights(), **{name: weight(name, value) for name, value in own.items()})
    return weights if shaped else None
