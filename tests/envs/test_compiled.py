"""The adapter `compiled`: gymnasium's tasks step by step, states, seeds, and a user's environment."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from lockstep import check_env, envs
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig
from lockstep.envs.compiled_shard import CompiledShard
from tests.envs.playing import assert_same, play, random_actions, reset

CLASSIC = ("Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1")
every_task = pytest.mark.parametrize("env_id", CLASSIC)


def make(env_id: str, num_envs: int = 3, first_index: int = 0, **settings: Any) -> CompiledShard:
    config = EnvConfig(id=env_id, adapter="compiled", num_envs=num_envs, **settings)
    env = envs.make(config, seed=1, first_index=first_index, num_envs=num_envs)
    assert isinstance(env, CompiledShard)
    return env


def digest() -> str:
    """Of what random actions meet in all environments."""
    result = hashlib.sha256()
    for env_id in CLASSIC:
        env = make(env_id)
        reset(env)
        for obs, step in play(env, random_actions(env, 300)):
            result.update(b"".join(part.tobytes() for part in (obs[""], *step[:5])))
    return result.hexdigest()


@every_task
def test_steps_are_gymnasiums(env_id: str) -> None:
    theirs: Any = gymnasium.make(env_id, disable_env_checker=True)
    ours = make(env_id, num_envs=1)
    fields = list(ours._class.fields)
    rtol, atol = (3e-7, 0.0) if env_id == "MountainCarContinuous-v0" else (1e-12, 1e-15)
    kind = ours._states[fields[0]].dtype
    assert (ours.observation_space, ours.action_space) == (
        envs.spaces(EnvConfig(id=env_id, adapter="gymnasium"))[0],
        theirs.action_space,
    )
    out = np.zeros((1, *(ours.observation_space.shape or ())), np.float32)
    ours.reset(out)
    theirs.reset(seed=0)
    ends = 0
    for action in random_actions(ours, 5_000):
        theirs.unwrapped.state = np.array([ours._states[name][0] for name in fields], kind)
        theirs.unwrapped.steps_beyond_terminated = None
        ours.send(action)
        step = ours.recv(out)
        if step.first[0]:
            assert step.reward[0] == 0
            theirs.reset(seed=0)
            continue
        obs, reward, terminated, truncated, _ = theirs.step(action[0])
        state = np.array([ours._states[name][0] for name in fields])
        np.testing.assert_allclose(state, np.array(theirs.unwrapped.state), rtol=rtol, atol=atol)
        np.testing.assert_allclose(out[0], obs, rtol=2e-7, atol=1e-15)
        np.testing.assert_allclose(step.reward[0], np.float32(reward), rtol=2e-7)
        assert (step.terminated[0], step.truncated[0]) == (terminated, truncated and not terminated)
        ends += terminated or truncated
    assert ends > 4


def test_what_needs_no_sine_is_exact() -> None:
    theirs: Any = gymnasium.make("CartPole-v1").unwrapped
    ours = make("CartPole-v1", num_envs=1, options={"sutton_barto_reward": True})
    theirs._sutton_barto_reward = True
    theirs.reset(seed=0)
    out = reset(ours)[""]
    for action in random_actions(ours, 500):
        theirs.state = np.array([ours._states[name][0] for name in ours._class.fields])
        theirs.steps_beyond_terminated = None
        ours.send(action)
        step = ours.recv(out)
        if not step.first[0]:
            _, reward, *_ = theirs.step(action[0])
            assert step.reward[0] == reward
            assert ours._states["x"][0] == theirs.state[0] and ours._states["angle"][0] == theirs.state[2]


@every_task
def test_environments_depend_on_their_global_index_alone(env_id: str) -> None:
    together = make(env_id, num_envs=4)
    actions = random_actions(together, 400)
    reset(together)
    expected = play(together, actions)
    for first, count in ((0, 1), (1, 3)):
        part = make(env_id, num_envs=count, first_index=first)
        rows = slice(first, first + count)
        reset(part)
        assert_same(expected, play(part, [action[rows] for action in actions]), rows)


@every_task
def test_a_restored_state_goes_on_with_equal_bits_and_replays_nothing(env_id: str) -> None:
    env = make(env_id)
    actions = random_actions(env, 700)
    reset(env)
    play(env, actions[:350])
    state = {name: array.copy() for name, array in env.state_dict().items()}
    out = reset(other := make(env_id))
    assert other.load_state_dict(state, out[""]) == 0
    expected = play(env, actions[350:])
    assert_same(expected, play(other, actions[350:]))


def test_episodes_differ_and_levels_repeat() -> None:
    env = make("CartPole-v1", num_envs=8, num_levels=2)
    starts = {tuple(row) for row in reset(env)[""]}
    for obs, step in play(env, random_actions(env, 300)):
        starts |= {tuple(row) for row in obs[""][step.first]}
    assert len(starts) == 2
    env = make("CartPole-v1", num_envs=8)
    starts = {tuple(row) for row in reset(env)[""]}
    resets = 8
    for obs, step in play(env, random_actions(env, 300)):
        starts |= {tuple(row) for row in obs[""][step.first]}
        resets += int(step.first.sum())
    assert len(starts) == resets > 50


def test_episodes_are_cut() -> None:
    env = make("Pendulum-v1", num_envs=4, reseed_every=30, decorrelate=20, options={"max_episode_steps": 25})
    reset(env)
    moments = play(env, random_actions(env, 100))
    lengths = [int(np.flatnonzero([moment.step.truncated[j] for moment in moments])[0]) + 1 for j in range(4)]
    assert max(lengths) <= 20 and len(set(lengths)) > 1
    later = [t for t, moment in enumerate(moments) if moment.step.truncated[0]]
    assert set(np.diff(later)) == {26}  # with the step that resets


def test_buffers_need_not_be_contiguous() -> None:
    env, other = make("CartPole-v1"), make("CartPole-v1")
    wide = np.zeros((3, 8), np.float32)
    env.reset(wide[:, ::2])
    assert np.array_equal(wide[:, ::2], reset(other)[""])


def test_the_adapter_is_never_chosen_by_itself() -> None:
    for env_id in CLASSIC:
        assert envs.resolve(EnvConfig(id=env_id)).adapter != "compiled"
        assert "compiled" in envs.list_envs()[env_id][1:]


def test_lockstep_does_not_import_numba() -> None:
    code = "import sys, lockstep.envs; lockstep.envs.list_envs(); sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"gravity": 1.0}}, "gravity.*does not have. It has max_episode_steps, g"),
        ({"options": {"g": "high"}}, "g='high' must be of the type float"),
        ({"options": {"max_episode_steps": 2.5}}, "must be of the type int"),
    ],
)
def test_wrong_options_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make("Pendulum-v1", **settings)


def test_a_users_environment_passes_all_checks() -> None:
    found = check_env(EnvConfig(id="examples/compiled_env.py:Reach", num_envs=4), steps=400)
    assert (found.ok, found.adapter) == (True, "compiled"), found.message


def test_gymnasiums_tasks_pass_all_checks() -> None:
    found = check_env(EnvConfig(id="CartPole-v1", adapter="compiled", num_envs=2), steps=200)
    assert found.ok, found.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Broken(Reach):\n    step = staticmethod(lambda state, action: state.nothing)\n", "Numba cannot"),
        (
            "class Broken(Reach):\n    @staticmethod\n    def reset(state):\n        state.nothing = 0\n",
            "uses state.nothing, but the state has only thrust, position, velocity. Name it in `fields`",
        ),
        (
            "from lockstep.envs.compiled import CompiledEnv\nclass Broken(CompiledEnv): ...\n",
            "lacks .* and fields. A Com",
        ),
        (
            "class Broken(Reach):\n    observation_space = spaces.Dict({'a': Reach.observation_space})\n",
            "observes Dict.* takes a Box of float32",
        ),
        (
            "class Broken(Reach):\n    step = staticmethod(lambda state, action: (1.0, False, False))\n",
            "step must return two values",
        ),
        ("Broken = 3\n", "cannot serve .* Use --env.adapter gymnasium"),
        (
            "class Broken(Reach):\n    observation_space = spaces.Box(0, 1, (2,), np.float64)\n",
            "takes a Box of float32",
        ),
    ],
)
def test_mistakes_of_a_users_environment_are_named(tmp_path: Any, text: str, message: str) -> None:
    lines = ["import numpy as np", "from gymnasium import spaces", "from examples.compiled_env import Reach", text]
    path = tmp_path / "broken.py"
    path.write_text("\n".join(lines))
    with pytest.raises(SettingsError, match=message):
        reset(make(f"{path}:Broken"))


def test_randomness_of_its_own_is_told_where_to_come_from(tmp_path: Path) -> None:
    lines = ["import numpy as np", "from examples.compiled_env import Reach", "class Drawn(Reach):"]
    lines += ["    @staticmethod", "    def step(state, action):", "        return np.random.random(), False"]
    path = tmp_path / "drawn.py"
    path.write_text("\n".join(lines))
    found = check_env(EnvConfig(id=f"{path}:Drawn", num_envs=2), steps=20)
    assert found.failed == "again" and "lockstep.kernels.random" in found.message, found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a CPU of this architecture")
def test_bits_are_the_same_on_other_cpus() -> None:
    environment = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "PYTHONPATH": os.getcwd()}
    found = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [digest()]


if __name__ == "__main__":
    print(digest())
