"""Levels that are kept in files: equal results with and without them, in one process and in several."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playing import play_legally, user_file

from lockstep import envs, recipes, train
from lockstep.cli.main import main
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig
from lockstep.envs.gymnasium_shard import GymShard
from lockstep.envs.level_cache import FOLDER, SIZE, LevelCache, kept

USER = """
import threading

import gymnasium
import numpy as np

class Field(gymnasium.Env):
    "A walk over a field that reset draws; steps draw, too."
    resets = 0

    def __init__(self, size=64):
        self.size = size
        self.observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        type(self).resets += 1
        self.field = self.np_random.random((self.size, 4), np.float32)
        self.place = 0
        return self.field[0], {}

    def step(self, action):
        self.place += 1 + int(action)
        self.field[self.place % self.size] *= self.np_random.random(dtype=np.float32)
        seen = self.field[self.place % self.size]
        return seen, float(seen[0]), self.place > 12, False, {}

class Choosy(Field):
    "At each step, only one of its two actions is allowed."

    def __init__(self):
        super().__init__()
        self.observation_space = gymnasium.spaces.Dict(
            seen=self.observation_space, action_mask=gymnasium.spaces.MultiBinary(2)
        )

    def reset(self, **given):
        return self.shown(super().reset(**given)[0]), {}

    def step(self, action):
        assert self.mask[action], "a forbidden action"
        seen, *others = super().step(action)
        return self.shown(seen), *others

    def shown(self, seen):
        self.mask = np.eye(2, dtype=np.int8)[self.np_random.integers(2)]
        return {"seen": seen, "action_mask": self.mask}

class Part:
    def __init__(self, whole):
        self.whole = whole

class Referring(Field):
    "One of its parts changes it, long after the reset."

    def __init__(self):
        super().__init__()
        self.part = Part(self)

    def reset(self, **given):
        self.time = self.late = 0
        return super().reset(**given)

    def step(self, action):
        self.time += 1
        self.part.whole.late += self.time > 20
        seen, reward, *_ = super().step(action)
        return seen, reward + self.late, self.time > 24, False, {}

class Named(Field):
    spec = "a word"

class Telling(Field):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def get_state(self):
        return self.field.copy(), self.place, self.np_random.bit_generator.state

    def set_state(self, state):
        self.field, self.place = state[0].copy(), state[1]
        self.np_random.bit_generator.state = state[2]

class Locked(Field):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

class Forgetful(Field, gymnasium.utils.EzPickle):
    def __init__(self):
        Field.__init__(self)
        gymnasium.utils.EzPickle.__init__(self)
"""


@pytest.fixture(scope="module", autouse=True)
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with user_file(tmp_path_factory, "fields.py", USER):
        yield


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "levels"))
    return tmp_path / "levels"


def shard(name: str, **options: Any) -> GymShard:
    config = EnvConfig(f"fields.py:{name}", num_levels=6, options=options)
    made = envs.make(config, seed=1, first_index=0, num_envs=3)
    assert isinstance(made, GymShard)
    return made


def played(name: str, steps: int = 60) -> list[Any]:
    """What three environments return, as bytes."""
    env, random = shard(name), np.random.default_rng(0)
    out = np.zeros((3, 4), np.float32)
    env.reset(out)
    found: list[Any] = [out.tobytes()]
    for _ in range(steps):
        env.send(random.integers(0, 2, 3))
        step = env.recv(out)
        found.append((out.tobytes(), step.reward.tobytes(), step.terminated.tobytes()))
    env.close()
    return found


def resets(name: str) -> int:
    return type(shard(name)._envs[0]).resets


@pytest.mark.parametrize("name", ["Field", "Telling", "Referring"])
def test_results_are_equal_with_and_without(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER)
    expected = played(name)
    assert not root.exists()
    monkeypatch.setenv(FOLDER, str(root))
    before = resets(name)
    assert played(name) == expected, "all levels are new"
    assert 6 >= len(kept(root)) > 2
    made = resets(name)
    assert made - before == len(kept(root)), "each level was made once"
    assert played(name) == expected, "all are known"
    assert resets(name) == made


def test_a_new_level_is_tried_with_allowed_actions(root: Path) -> None:
    env = shard("Choosy")
    play_legally(env, 30)
    assert kept(root)
    env.close()


def test_wrapped_environments_are_kept_with_their_wrappers(root: Path) -> None:
    env = envs.make(EnvConfig("lockstep/Memory-v0", num_levels=3), seed=1, first_index=0, num_envs=2)
    assert isinstance(env, GymShard)
    out = np.zeros((2, *(env.observation_space.shape or ())), np.float32)
    env.reset(out)
    first = out.copy()
    env.reset(out)
    assert np.array_equal(first, out) and len(kept(root)) in (1, 2)
    env.close()


def test_digests_are_equal_on_every_layout(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiment = recipes.ppo_cartpole().replace(
        **{"env.id": "fields.py:Field", "env.adapter": "gymnasium", "env.num_levels": 20, "env.num_envs": 4}
    )
    experiment = experiment.replace(
        **{"scheme.shards": 2, "scheme.acting_batch": 0, "algorithm.rollout": 32, "total_steps": 384}
    )

    def digest(name: str, layout: str) -> str:
        options = RunOptions(run=str(tmp_path / name), display="none", tensorboard=False, check_env=False)
        return train(experiment, layout, options).digest

    monkeypatch.delenv(FOLDER)
    expected = digest("without", "inline")
    monkeypatch.setenv(FOLDER, str(root))
    assert digest("new", "processes:2") == expected
    assert kept(root)
    assert digest("known", "inline") == expected


def test_a_damaged_file_is_made_anew(root: Path) -> None:
    expected = played("Field")
    (_, _, cut), (_, _, changed), *_ = kept(root)
    whole = {path: path.read_bytes() for path in (cut, changed)}
    cut.write_bytes(whole[cut][:100])
    changed.write_bytes(whole[changed][:-9] + b"x" + whole[changed][-8:])
    assert played("Field") == expected
    assert {path: path.read_bytes() for path in whole} == whole


def test_a_folder_that_cannot_be_written_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied")

    expected, levels = played("Field"), kept(root)
    monkeypatch.setenv(SIZE, "1e-6")  # too small, so that levels should be removed
    for owner, name in ((os, "utime"), (os, "replace"), (Path, "unlink"), (Path, "write_bytes")):
        monkeypatch.setattr(owner, name, refuse)
    before = resets("Field")
    assert played("Field") == expected and resets("Field") == before, "all levels were read"
    small = shard("Field", size=32)
    small.reset(np.zeros((3, 4), np.float32))
    assert small._envs[0].field.shape == (32, 4) and kept(root) == levels, "a new one is made and not stored"


def test_several_processes_share_levels(root: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(played, ["Field"] * 4, chunksize=1)
    assert found == [played("Field")] * 4
    assert len(kept(root)) == len(list(root.glob("*/*"))), "no half-written files"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Locked", r"fields\.py:Locked .*lock.*set_state\(state\)"),
        ("Forgetful", r"fields\.py:Forgetful .*set_state\(state\)"),
    ],
)
def test_what_cannot_be_kept_is_an_error(name: str, message: str, root: Path) -> None:
    with pytest.raises(SettingsError, match=f"{FOLDER}.*{message}.*unset {FOLDER}"):
        played(name)
    assert not kept(root)


def test_the_oldest_levels_make_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played("Field")
    size, count = kept(root)[0][1], len(kept(root))
    for place, (_, _, path) in enumerate(kept(root)):
        os.utime(path, (place, place))
    left = {path for _, _, path in kept(root)[count - 2 :]}
    monkeypatch.setenv(SIZE, str(2.5 * size / 1e9))
    cache = LevelCache.of(EnvConfig("fields.py:Field"), env := shard("Field")._envs[0])
    assert cache is not None
    cache.reset(env, 12345, {})
    now = {path for _, _, path in kept(root)}
    assert len(now) == 2 and len(now & left) == 1, "the new one, and the last that was used"


def test_other_options_are_other_levels(root: Path) -> None:
    played("Field")
    before = len(kept(root))
    small = shard("Field", size=32)
    small.reset(np.zeros((3, 4), np.float32))
    assert len(kept(root)) > before
    assert small._envs[0].field.shape == (32, 4)


def length_of_memory(env_id: str) -> int:
    """The steps of an episode of lockstep/Memory-v0."""
    env = envs.make(EnvConfig(env_id, num_levels=1), seed=1, first_index=0, num_envs=1)
    out = np.zeros((1, *(env.observation_space.shape or ())), np.float32)
    env.reset(out)
    for steps in range(1, 100):
        env.send(np.zeros(1, np.int64))
        if env.recv(out).terminated[0]:
            return steps
    raise AssertionError("the episode did not end")


def test_a_changed_callable_makes_other_levels(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "maker.py"
    found = []
    for length in (2, 2, 9):
        file.write_text(f"import gymnasium\ndef make(): return gymnasium.make('lockstep/Memory-v0', length={length})\n")
        with multiprocessing.get_context("fork").Pool(1) as pool:  # imports the file anew
            found.append((pool.apply(length_of_memory, [f"{file}:make"]), len(kept(root))))
    assert found == [(4, 1), (4, 1), (11, 2)]


def test_other_forms_of_ids_and_of_spec_are_taken(root: Path) -> None:
    env = shard("Named")._envs[0]
    for env_id in ("fields.py:Named", "pettingzoo/fields.py:Named"):
        assert LevelCache.of(EnvConfig(env_id), env) is not None


def test_settings_are_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.write_text("a file")
    with pytest.raises(SettingsError, match=f"{FOLDER}={root} "):
        shard("Field")
    monkeypatch.setenv(SIZE, "many")
    with pytest.raises(SettingsError, match=f"{SIZE}=many "):
        shard("Field")


def test_doctor_says_where_levels_lie(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played("Field")
    assert main(["doctor", "--seconds", "0"]) == 0
    assert f"{root}: {len(kept(root))} levels" in capsys.readouterr().out
