"""Environments stepped by child processes: what GymShard gives, bit for bit, and a clear end whatever happens."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from children import ROOT, TIMEOUT, until
from playing import Moment, assert_same, buffers, play, random_actions, reset, snapshot, user_file

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.pool.pool import SteppingPool

CASES = {
    "cartpole": EnvConfig(id="CartPole-v1", adapter="gymnasium", reseed_every=25, decorrelate=9),
    "endless": EnvConfig(id="Pendulum-v1", adapter="gymnasium", reseed_every=7, options={"max_episode_steps": -1}),
    "tuple": EnvConfig(id="lockstep/TupleBandit-v0", decorrelate=5, options={"mask": True}),
    "user": EnvConfig(id="user_pool.py:Where"),
}

USER = """
import os, signal, time
import gymnasium, numpy as np

class Where(gymnasium.Env):
    "Episodes of 11 steps, or as long as the action is 3; shows in which process it is stepped, and fails on demand."
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, fault="", show=False):
        self.fault, self.show, self.time = fault, show, 0
        if fault == "constructor":
            raise ValueError("the user's own mistake")

    def observe(self):
        return np.array([self.time, os.getpid() if self.show else 0], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fault == "reset":
            raise ValueError("the user's own mistake")
        if self.fault == "slow":
            time.sleep(1.0)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        if self.fault in ("step", "both", "close") and action == 1:
            raise ValueError("the user's own mistake")
        if self.fault == "death" and action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault in ("death", "both") and action == 3:
            time.sleep(600)
        self.time += 1
        return self.observe(), float(self.np_random.normal()), self.time >= 11 and action != 3, False, {}

    def close(self):
        if self.fault == "close":
            time.sleep(0.6)  # together longer than an end of the pool takes
            print("closed", file=open("closed.txt", "a"))
"""


@pytest.fixture(scope="module")
def user_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with user_file(tmp_path_factory, "user_pool.py", USER):
        yield


@pytest.fixture(scope="module")
def pools(user_files: None) -> Iterator[dict[int, SteppingPool]]:
    """By number of processes."""
    pools = {}
    with pytest.MonkeyPatch.context() as patch:
        for n, cores in ((1, 64), (2, 64), (3, 1)):  # both ways of waiting, however many cores there are
            patch.setattr("lockstep.envs.pool.pool.cores", lambda cores=cores: cores)
            pools[n] = SteppingPool(n, jitter=0.002 if n == 3 else 0.0)
    yield pools
    for pool in pools.values():
        pool.close()


def make(config: EnvConfig, pool: SteppingPool | None = None, first_index: int = 0, num_envs: int = 5) -> ShardEnv:
    return envs.make(config, seed=7, first_index=first_index, num_envs=num_envs, pool=pool)


def assert_equal_states(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]), name


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_gives_what_stepping_in_process_gives(
    name: str, processes: int, pools: dict[int, SteppingPool]
) -> None:
    local, pooled = make(CASES[name]), make(CASES[name], pools[processes])
    assert local.observation_space == pooled.observation_space and local.action_space == pooled.action_space
    first, first_pooled = reset(local), reset(pooled)
    assert all(np.array_equal(first[key], first_pooled[key]) for key in first)
    actions = random_actions(local, 220)
    played = play(local, actions)
    assert sum(moment.step.first.sum() for moment in played) > 10
    assert_same(played, play(pooled, actions))
    assert_equal_states(local.state_dict(), pooled.state_dict())
    again = reset(pooled)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert_same(played[:40], play(pooled, actions[:40]))
    pooled.close()


@pytest.mark.parametrize("name", CASES)
def test_states_move_between_both_kinds(name: str, pools: dict[int, SteppingPool]) -> None:
    config = CASES[name]
    kinds = [make(config), make(config, pools[2]), make(config), make(config, pools[3])]
    reset(kinds[0])
    actions = random_actions(kinds[0], 80)
    expected = play(kinds[0], actions)
    reset(kinds[1])
    begin = 0
    current = play(kinds[1], actions[:20])[-1].obs
    for before, after in itertools.pairwise(kinds[1:]):
        begin += 20
        state, out, signs = before.state_dict(), buffers(after), []
        replayed = after.load_state_dict(state, out, lambda signs=signs: signs.append(None))
        assert replayed == len(signs) == state["steps"].sum()
        assert all(np.array_equal(current[key], value) for key, value in snapshot(out).items())
        assert_equal_states(state, after.state_dict())
        assert_same(expected[begin:], play(after, actions[begin:]))
        after.load_state_dict(state, out)
        current = play(after, actions[begin : begin + 20])[-1].obs
    for env in kinds:
        env.close()


def test_the_log_of_actions_reaches_back_for_the_longest_episode_of_all_processes(
    pools: dict[int, SteppingPool],
) -> None:
    config = EnvConfig(id="user_pool.py:Where", reseed_every=1200)
    pooled, restored = make(config, pools[2], num_envs=2), make(config, num_envs=2)
    reset(pooled)
    actions = [np.array([0, 3])] * 1100  # the first has an episode every eleven steps, the second a long one
    play(pooled, actions)
    state = pooled.state_dict()
    assert state["steps"][0] <= 11 and state["steps"][1] == 1100
    restored.load_state_dict(state, buffers(restored))
    assert_same(play(pooled, actions[:150]), play(restored, actions[:150]))
    assert_equal_states(pooled.state_dict(), restored.state_dict())
    pooled.close()


def test_several_shards_step_at_once_and_are_received_in_any_order(pools: dict[int, SteppingPool]) -> None:
    config = CASES["cartpole"]
    sizes = {0: 3, 3: 1, 4: 2}
    local = {first: make(config, first_index=first, num_envs=size) for first, size in sizes.items()}
    pooled = {first: make(config, pools[2], first_index=first, num_envs=size) for first, size in sizes.items()}
    actions = {first: random_actions(env, 60, first) for first, env in local.items()}
    for env in (*local.values(), *pooled.values()):
        reset(env)
    played: dict[int, list[Moment]] = {first: [] for first in sizes}
    for t in range(60):
        for first, env in pooled.items():
            env.send(actions[first][t])
        for first, env in sorted(pooled.items(), reverse=t % 2 == 0):
            out = buffers(env)
            step = env.recv(out)
            played[first].append(Moment(snapshot(out), step))
    for first, env in local.items():
        assert_same(play(env, actions[first]), played[first])
    for env in pooled.values():
        env.close()


def test_work_is_spread_and_processes_leave_signals_to_their_parent(pools: dict[int, SteppingPool]) -> None:
    config = EnvConfig(id="user_pool.py:Where", options={"show": True})

    def stepped_by(env: ShardEnv) -> list[int]:
        return reset(env)[""][:, 1].astype(int).tolist()

    single = [make(config, pools[3], num_envs=1) for _ in range(3)]
    where = {stepped_by(env)[0] for env in single}
    assert len(where) == 3 and os.getpid() not in where
    five = make(config, pools[3], num_envs=5)
    blocks = stepped_by(five)
    assert sorted(map(blocks.count, where)) == [1, 2, 2] and blocks == sorted(blocks, key=blocks.index)
    six = make(config, pools[3], num_envs=1)
    assert blocks.count(stepped_by(six)[0]) == 1, "the process with the least to do takes it"
    for process in where:
        os.kill(process, signal.SIGINT)
        os.kill(process, signal.SIGTERM)
    play(five, random_actions(five, 3))
    assert set(stepped_by(five)) == where
    for env in (*single, five, six):
        env.close()


def test_an_error_does_not_wait_for_a_step_that_stands(user_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.envs.pool.shard._PATIENCE", 0.1)
    pool = SteppingPool(2)
    env = make(EnvConfig(id="user_pool.py:Where", options={"fault": "both"}), pool, num_envs=2)
    reset(env)
    env.send(np.array([1, 3]))  # the second sleeps for ten minutes
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        env.recv(buffers(env))
    env.close()
    pool.close()


@pytest.mark.parametrize("fault", ["constructor", "reset", "step"])
def test_an_exception_arrives_with_its_traceback_and_the_pool_serves_on(
    fault: str, pools: dict[int, SteppingPool]
) -> None:
    other = make(CASES["user"], pools[2])
    reset(other)
    other.send(np.zeros(5, np.int64))
    with pytest.raises(RuntimeError, match=r"(?s)environment process failed.*user_pool.py.*the user's own mistake"):
        env = make(EnvConfig(id="user_pool.py:Where", options={"fault": fault}), pools[2])
        reset(env)
        play(env, [np.array([0, 0, 0, 0, 1])])
    other.recv(buffers(other))
    other.close()


def test_all_environments_are_closed_after_the_error_of_one(
    user_files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = SteppingPool(2)
    shards = [make(EnvConfig(id="user_pool.py:Where", options={"fault": "close"}), pool) for _ in range(2)]
    for env in shards:
        reset(env)
        env.send(np.array([1, 0, 0, 0, 0]))
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        shards[0].recv(buffers(shards[0]))
    for env in shards:
        env.close()
    pool.close()
    assert (tmp_path / "closed.txt").read_text().split() == ["closed"] * 10


def test_until_environments_are_stepped_they_may_take_longer(
    user_files: None, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = SteppingPool(1, stall_timeout=0.5)
    env = make(EnvConfig(id="user_pool.py:Where", options={"fault": "slow"}), pool, num_envs=1)
    reset(env)  # which takes longer than the timeout
    reset(env)  # others may still have to be made
    play(env, [np.zeros(1, np.int64)])
    with pytest.raises(RuntimeError, match=r"not answered for 0\.5 seconds"):
        reset(env)
    assert "in reset" in capfd.readouterr().err
    pool.close()


def test_mistakes_of_the_user_stay_such(pools: dict[int, SteppingPool]) -> None:
    with pytest.raises(SettingsError, match=r"^env\.options names 'lenght'"):
        make(EnvConfig(id="CartPole-v1", adapter="gymnasium", options={"lenght": 2}), pools[2])
    with pytest.raises(SettingsError, match=r"env_processes.*Breakout.*env\.adapter=ale"):
        make(EnvConfig(id="Breakout"), pools[1])


def test_the_death_of_any_process_ends_the_wait_for_another(user_files: None) -> None:
    pool = SteppingPool(2)
    env = make(EnvConfig(id="user_pool.py:Where", options={"fault": "death"}), pool, num_envs=2)
    idle = make(CASES["user"], pool, num_envs=2)
    reset(env)
    env.send(np.array([3, 2]))  # the first sleeps for ten minutes, the second is killed
    with pytest.raises(RuntimeError, match=r"environment process .*SIGKILL"):
        env.recv(buffers(env))
    with pytest.raises(RuntimeError, match=r"environment process .*SIGKILL"):
        reset(idle)
    started = {process.pid for process in multiprocessing.active_children()}
    env.close()
    idle.close()
    pool.close()
    assert len(started - {process.pid for process in multiprocessing.active_children()}) == 1, "the one that slept"


SCRIPT = """
import multiprocessing, sys, time
import gymnasium, numpy as np
from lockstep import envs
from lockstep.envs import EnvConfig
from lockstep.envs.pool.pool import SteppingPool

class Asleep(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def step(self, action):
        time.sleep(600)

if __name__ == "__main__":
    pool = SteppingPool(1)
    env = envs.make(EnvConfig("script.py:Asleep"), seed=0, first_index=0, num_envs=1, pool=pool)
    env.send(np.array([0]))
    (process,) = multiprocessing.active_children()
    print(process.pid, flush=True)
    if "wait" in sys.argv:
        time.sleep(600)
"""


@pytest.mark.parametrize("end", ["wait", "forget"])
def test_nothing_outlives_a_parent_that_is_killed_or_forgets_to_close(end: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "script.py", end],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:
        assert parent.stdout is not None
        process = parent.stdout.readline().strip()
        assert process and _runs(process)
        if end == "wait":
            parent.kill()
        assert parent.wait(TIMEOUT) == (-signal.SIGKILL if end == "wait" else 0)
    until(lambda: not _runs(process), "the stepping process to end", 0.05)


def _runs(process: str) -> bool:
    try:
        return bool(Path("/proc", process, "cmdline").read_bytes())  # empty once it has ended
    except OSError:
        return False
