"""Goals in hindsight, against a slow walk through what happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EXPERIMENTS
from torch import Tensor

from lockstep import envs, recipes, train
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.buffers.hindsight import Hindsight
from lockstep.buffers.replay import Replay
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.core.rollout import Rollout
from lockstep.core.transitions import Transitions
from lockstep.envs.goals import Goals
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.training.prepare import prepare_run

BITS, ENVS, ROLLOUT, GAMMA = 4, 3, 5, 0.9


def experiment(capacity: int) -> Experiment:
    base = recipes.her_bitflip()
    algorithm = base.algorithm
    assert isinstance(algorithm, OffPolicyConfig)
    memory = replace(algorithm.replay, capacity=capacity)
    return base.replace(
        env=EnvConfig(
            id="lockstep/BitFlip-v0", adapter="gymnasium", num_envs=ENVS, reseed_every=1000, options={"bits": BITS}
        ),
        algorithm=replace(algorithm, rollout=ROLLOUT, batch_size=64, discount=GAMMA, replay=memory),
        scheme=replace(base.scheme, shards=1, acting_batch=0),
    )


class Past:
    """All that happened to a few environments whose bits are flipped at random."""

    def __init__(self, settings: Experiment) -> None:
        self.env = envs.make(settings.env, seed=1, first_index=0, num_envs=ENVS)
        self.draw = np.random.default_rng(1)
        self.steps: list[dict[str, Any]] = []

    def rollouts(self, count: int) -> Iterator[Rollout]:
        obs = envs.allocate_observation(self.env.observation_space, (ROLLOUT + 1, ENVS))
        for number in range(count):
            if number == 0:
                self.env.reset({name: x[0].numpy() for name, x in obs.items()})
            else:
                obs = {name: torch.cat([x[-1:], torch.zeros_like(x[1:])]) for name, x in obs.items()}
            fields: dict[str, list[np.ndarray]] = {}
            for t in range(ROLLOUT):
                action = self.draw.integers(0, BITS, ENVS)
                self.env.send(action)
                result = self.env.recv({name: x[t + 1].numpy() for name, x in obs.items()})
                step = {
                    "action": action,
                    "reward": result.reward,
                    "terminated": result.terminated,
                    "truncated": result.truncated,
                    "valid": ~result.first,
                }
                self.steps.append({**step, "obs": {name: x[t].numpy().copy() for name, x in obs.items()}})
                self.newest = {name: x[t + 1].numpy().copy() for name, x in obs.items()}
                for name, value in step.items():
                    fields.setdefault(name, []).append(value.copy())
            zeros = torch.zeros(ROLLOUT + 1, ENVS)
            yield Rollout(
                obs=obs,
                start=zeros.bool(),
                prev_action=None,
                prev_reward=None,
                log_prob=zeros[1:],
                value=zeros,
                core_state=torch.zeros(ENVS, 0),
                **{name: torch.from_numpy(np.stack(value)) for name, value in fields.items()},
            )

    def obs(self, time: int) -> dict[str, np.ndarray]:
        return self.steps[time]["obs"] if time < len(self.steps) else self.newest

    def later_goals(self, time: int, env: int) -> list[np.ndarray]:
        """What was achieved after a step, until its episode ended."""
        goals = []
        for t in range(time, len(self.steps)):
            assert self.steps[t]["valid"][env]
            goals.append(self.obs(t + 1)["achieved_goal"][env])
            if self.steps[t]["terminated"][env] or self.steps[t]["truncated"][env]:
                break
        return goals


@pytest.fixture(scope="module")
def drawn() -> tuple[Past, list[tuple[np.ndarray, np.ndarray, Transitions, int]]]:
    """The past, and what was drawn as it grew: steps, environments, items in hindsight, and how many
    steps there had been."""
    settings = experiment(ENVS * 60)
    past, draw = Past(settings), np.random.default_rng(3)
    memory, hindsight, taken = None, None, []
    for each in past.rollouts(40):
        if memory is None or hindsight is None:
            memory = Replay(settings, each)
            hindsight = Hindsight(memory, Goals(settings.env), 4, GAMMA)
        memory.insert(each)
        hindsight.record_ends()
        times, environments, _ = memory.draw(64, draw)
        plain = memory.batch(times, environments, np.ones(64))
        taken.append(
            (times, environments, hindsight.relabel(plain, times, environments, *draw.random((2, 64))), memory.count)
        )
    return past, taken


def test_every_goal_was_reached_later_or_was_the_wanted_one(drawn: Any) -> None:
    past, taken = drawn
    others = 0
    now = past.steps, past.newest
    for times, environments, items, count in taken:
        past.steps, past.newest = now[0][:count], now[0][count]["obs"] if count < len(now[0]) else now[1]
        for i, (time, env) in enumerate(zip(times.tolist(), environments.tolist(), strict=True)):
            goal = items.obs["desired_goal"][0, i].numpy()
            assert np.array_equal(goal, items.next_obs["desired_goal"][0, i].numpy())
            wanted, step = past.obs(time)["desired_goal"][env], past.steps[time]
            reached = past.obs(time + 1)["achieved_goal"][env]
            later = past.later_goals(time, env)
            assert np.array_equal(goal, wanted) or any(np.array_equal(goal, other) for other in later)
            there = np.array_equal(reached, goal)
            if not np.array_equal(goal, wanted):
                others += 1
                assert float(items.reward[0, i]) == (0.0 if there else -1.0)
                assert float(items.discount[0, i]) == pytest.approx(0.0 if there else GAMMA)
            else:
                assert float(items.reward[0, i]) == step["reward"][env]
                assert float(items.discount[0, i]) == pytest.approx(0.0 if step["terminated"][env] else GAMMA)
            assert items.action[0, i] == step["action"][env]
            for name in ("observation", "achieved_goal"):
                assert np.array_equal(items.obs[name][0, i].numpy(), past.obs(time)[name][env])
                assert np.array_equal(items.next_obs[name][0, i].numpy(), reached)
    past.steps, past.newest = now
    assert others > 1000


def test_four_of_five_items_get_another_goal_and_all_later_ones_are_as_likely() -> None:
    settings = experiment(ENVS * 100)
    past = Past(settings)
    memory: Replay | None = None
    for each in past.rollouts(12):
        memory = memory or Replay(settings, each)
        memory.insert(each)
    assert memory is not None
    hindsight = Hindsight(memory, Goals(settings.env), 4, GAMMA)
    hindsight.record_ends()
    firsts = [t for t in range(1, 50) if past.steps[t]["valid"][0] and not past.steps[t - 1]["valid"][0]]
    # An episode whose four later states differ from each other, and from what was wanted.
    for time in firsts:
        later = {x.tobytes() for x in past.later_goals(time, 0)}
        if len(later) == BITS and past.obs(time)["desired_goal"][0].tobytes() not in later:
            break
    else:
        raise AssertionError("no such episode")
    n = 20_000
    times, environments = np.full(n, time), np.zeros(n, np.int64)
    plain = memory.batch(times, environments, np.ones(n))
    items = hindsight.relabel(plain, times, environments, *np.random.default_rng(5).random((2, n)))
    goals: Tensor = items.obs["desired_goal"][0]
    counts = {goal: 0 for goal in later}
    for row in goals.numpy():
        if row.tobytes() in counts:
            counts[row.tobytes()] += 1
    assert sum(counts.values()) / n == pytest.approx(4 / 5, abs=0.01)
    for count in counts.values():
        assert count / n == pytest.approx(4 / 5 / BITS, abs=0.01)


def test_environments_without_goals_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"hindsight.*CartPole-v1 has none"):
        Goals(EnvConfig(id="CartPole-v1", adapter="gymnasium"))
    settings = recipes.her_bitflip()
    with pytest.raises(SettingsError, match="n-step 1"):
        settings.replace(algorithm=replace(settings.algorithm, n_step=3)).validate()  # type: ignore[call-arg]


def test_rewards_are_the_environments_own() -> None:
    goals = Goals(EnvConfig(id="lockstep/BitFlip-v0", adapter="gymnasium", options={"bits": 2}))
    a, b = np.array([[0, 1], [1, 1]], np.float32), np.array([[0, 1], [0, 1]], np.float32)
    assert goals.reward(a, b).tolist() == [0.0, -1.0]
    assert goals.terminated(a, b, b, np.zeros(2, bool)).tolist() == [True, False]
    goals.close()


def test_an_end_that_is_told_of_one_goal_alone_is_asked_for_each(tmp_path: Path) -> None:
    file = tmp_path / "maze.py"
    file.write_text(
        "import numpy as np\n"
        "from lockstep.envs.tasks import BitFlip\n"
        "class Maze(BitFlip):\n"
        "    def compute_terminated(self, achieved, desired, info):\n"
        "        return bool(np.linalg.norm(achieved - desired) <= 0.45)\n"
    )
    goals = Goals(EnvConfig(id=f"{file}:Maze", adapter="gymnasium", options={"bits": 2}))
    desired = np.array([[0, 0], [1, 0], [1, 1]], np.float32)
    achieved = np.array([[0, 0], [0, 0], [1, 1]], np.float32)
    assert goals.terminated(achieved, desired, desired, np.zeros(3, bool)).tolist() == [True, False, True]
    goals.close()


COUNTED = """
from lockstep.envs.tasks import BitFlip

class Counted(BitFlip):
    open = 0

    def __init__(self, bits=2, entry="desired_goal"):
        super().__init__(bits)
        Counted.open += 1
        self.observation_space.spaces = {
            entry if name == "desired_goal" else name: space for name, space in self.observation_space.items()
        }

    def close(self):
        Counted.open -= 1
"""


def test_every_environment_is_closed(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    counted = f"{tmp_path}/counted.py:Counted"
    with pytest.raises(SettingsError, match="hindsight"):
        Goals(EnvConfig(id=counted, adapter="gymnasium", options={"entry": "other"}))
    assert load_object(counted).open == 0
    options = RunOptions(run=str(tmp_path / "run"), display="none", tensorboard=False, check_env=False)
    small = EXPERIMENTS["hindsight"]()
    train(small.replace(env=replace(small.env, id=counted, options={})), options=options)
    assert load_object(counted).open == 0


LINE = """
import gymnasium
import numpy as np

class Line(gymnasium.Env):
    \"""Goals are points of a line; whoever goes too far falls.\"""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape=(1,)):
        goal = gymnasium.spaces.Box(-1.0, 1.0, shape) if shape is not None else gymnasium.spaces.Discrete(3)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = gymnasium.spaces.Dict(dict.fromkeys(names, goal))

    def compute_reward(self, achieved, desired, info):
        return -(np.abs(achieved - desired) > 0.05).astype(np.float32)

class Ending(Line):
    def compute_terminated(self, achieved, desired, info):
        return np.abs(achieved - desired) <= 0.05

def scalars(): return Line(())
def numbers(): return Line(None)
def pairs(): return Line((2,))
"""


@pytest.fixture
def line(tmp_path: Path) -> str:
    (tmp_path / "line.py").write_text(LINE)
    return f"{tmp_path}/line.py"


def test_an_answer_for_each_goal_has_one_number(line: str) -> None:
    """[n, 1] beside [n] would be broadcast to every pair of items."""
    achieved, desired = np.array([[0.1], [0.2], [0.3]], np.float32), np.array([[0.1], [0.5], [0.3]], np.float32)
    goals = Goals(EnvConfig(id=f"{line}:Ending", adapter="gymnasium"))
    assert goals.reward(achieved, desired).tolist() == [0.0, -1.0, 0.0]
    assert goals.terminated(achieved, desired, desired, np.zeros(3, bool)).tolist() == [True, False, True]
    goals = Goals(EnvConfig(id=f"{line}:pairs", adapter="gymnasium"))
    with pytest.raises(SettingsError, match=r"compute_reward .*\[.*\] .*number"):
        goals.reward(np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32))


@pytest.mark.parametrize(("name", "expected"), [("Line", [True, True, False]), ("Ending", [True, False, True])])
def test_an_end_for_another_reason_stays_one(line: str, name: str, expected: list[bool]) -> None:
    """Whoever fell; whoever came where he wanted, which is not where the other goal is; and who came to the other."""
    goals = Goals(EnvConfig(id=f"{line}:{name}", adapter="gymnasium"))
    achieved = np.array([[0.9], [0.2], [0.3]], np.float32)
    desired = np.array([[0.5], [0.5], [0.3]], np.float32)
    wanted = np.array([[-0.4], [0.2], [0.7]], np.float32)
    assert goals.terminated(achieved, desired, wanted, np.array([True, True, False])).tolist() == expected


@pytest.mark.parametrize("name", ["scalars", "numbers"])
def test_goals_that_policies_see_in_another_form_are_refused(line: str, name: str) -> None:
    with pytest.raises(SettingsError, match=r"achieved_goal, .* Box"):
        Goals(EnvConfig(id=f"{line}:{name}", adapter="gymnasium"))


WRAPPED = """
import gymnasium
from gymnasium.wrappers import FlattenObservation
from lockstep.envs.tasks import BitFlip

class Scaled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 0.1 * reward

class Knowing(Scaled):
    def compute_reward(self, achieved, desired, info):
        return self.reward(self.env.compute_reward(achieved, desired, info))

class Larger(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        goal = gymnasium.spaces.Box(0.0, 2.0, (2,))
        self.observation_space = gymnasium.spaces.Dict({**env.observation_space, "desired_goal": goal})

    def observation(self, observation):
        return {**observation, "desired_goal": 2 * observation["desired_goal"]}

class Again(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        more = {"again": env.observation_space["observation"]}
        self.observation_space = gymnasium.spaces.Dict({**env.observation_space, **more})

    def observation(self, observation):
        return {**observation, "again": observation["observation"]}

def scaled(): return Scaled(BitFlip(2))
def flat(): return FlattenObservation(BitFlip(2))
def scaled_goals(): return Larger(BitFlip(2))
def shown_again(): return Again(BitFlip(2))
def normalized(): return gymnasium.wrappers.NormalizeReward(BitFlip(2))
def limited(): return gymnasium.wrappers.TimeLimit(Knowing(BitFlip(2)), 5)
"""


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        ("scaled", "Scaled"),
        ("flat", "FlattenObservation"),
        ("scaled_goals", "Larger"),
        ("normalized", "NormalizeReward"),
    ],
)
def test_what_a_wrapper_makes_of_rewards_and_goals_must_be_known(tmp_path: Path, name: str, wrapper: str) -> None:
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    with pytest.raises(SettingsError, match=f"{wrapper} .*env.id=.*compute_reward"):
        Goals(EnvConfig(id=f"{tmp_path}/wrapped.py:{name}", adapter="gymnasium"))


def test_a_wrapper_may_change_what_is_no_goal(tmp_path: Path) -> None:
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    Goals(EnvConfig(id=f"{tmp_path}/wrapped.py:shown_again", adapter="gymnasium")).close()


def test_a_wrapper_may_say_what_goals_earn(tmp_path: Path) -> None:
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    goals = Goals(EnvConfig(id=f"{tmp_path}/wrapped.py:limited", adapter="gymnasium"))
    a, b = np.array([[0, 1], [1, 1]], np.float32), np.array([[0, 1], [0, 1]], np.float32)
    assert goals.reward(a, b).tolist() == [0.0, np.float32(-0.1)]
    assert goals.terminated(a, b, b, np.zeros(2, bool)).tolist() == [True, False]
    goals.close()


def test_rewards_in_hindsight_are_clipped_as_those_of_training(tmp_path: Path) -> None:
    (tmp_path / "far.py").write_text(
        "from lockstep.envs.tasks import BitFlip\n"
        "class Far(BitFlip):\n"
        "    def compute_reward(self, achieved_goal, desired_goal, info):\n"
        "        return -abs(achieved_goal - desired_goal).sum(-1)\n"
    )
    a, b = np.array([[0, 1], [1, 1]], np.float32), np.array([[0, 1], [0, 0]], np.float32)
    for clip, expected in ((False, [0.0, -2.0]), (True, [0.0, -1.0])):
        config = EnvConfig(id=f"{tmp_path}/far.py:Far", adapter="gymnasium", options={"bits": 2}, reward_clip=clip)
        goals = Goals(config)
        assert goals.reward(a, b).tolist() == expected
        goals.close()


ASKING = """
import gymnasium

from lockstep.envs.tasks import BitFlip


class Asking(gymnasium.Wrapper):
    info = {"bonus": 1.0}

    def __init__(self, **options):
        super().__init__(BitFlip(**options))

    def step(self, action):
        *answer, _ = super().step(action)
        return *answer, dict(self.info)

    def compute_reward(self, achieved, desired, info):
        return self.env.compute_reward(achieved, desired, info) + self.bonus(info)

    def bonus(self, info):
        return info["bonus"] * 0


class Different(Asking):
    def bonus(self, info):
        return len(info)


class Careless(Asking):
    def compute_reward(self, achieved, desired, info):
        achieved -= desired
        return (achieved == 0).all(-1) - 1.0
"""


def test_rewards_that_need_the_info_of_their_step_are_refused_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "asking.py"
    file.write_text(ASKING)
    for name, told in (("Asking", "KeyError"), ("Different", "returned something else")):
        settings = recipes.her_bitflip()
        settings = settings.replace(env=replace(settings.env, id=f"{file}:{name}"))
        with pytest.raises(SettingsError, match=rf"hindsight.*info.*compute_reward.*{told}"):
            prepare_run(settings, Layout(), RunOptions())
        config = EnvConfig(f"{file}:{name}", adapter="gymnasium", options={"bits": 2})
    goals = Goals(config)
    with pytest.raises(SettingsError, match="compute_reward raised"):
        Goals(replace(config, id=f"{file}:Asking")).reward(np.zeros((2, 2)), np.zeros((2, 2)))
    goals.close()
    goals, achieved = Goals(replace(config, id=f"{file}:Careless")), np.ones((2, 2), np.float32)
    goals.check()
    assert goals.reward(achieved, achieved).tolist() == [0.0, 0.0] and (achieved == 1).all()
    goals.close()
