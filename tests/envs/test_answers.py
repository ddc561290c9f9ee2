"""What environments return, and what they are given and may change: the boundary to code that users write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from playing import play, reset

from lockstep import envs
from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, ShardEnv
from lockstep.envs.answers import flag, number
from lockstep.envs.convert import single_action
from lockstep.models.action_spaces import action_parts

OWN = '''
import os
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium import spaces


class Own(gymnasium.Env):
    """Answers as it is told to from its third step on."""

    def __init__(self, ended=False, reward=0.5, obs=None, space=None, action=None):
        self.observation_space = space or spaces.Box(-1.0, 1.0, (3,))
        self.action_space = action or spaces.Discrete(2, start=1)
        self.ended, self.reward, self.obs, self.steps = ended, reward, obs, 0

    def answer(self, late):
        x = self.observation_space.sample() * 0 if self.obs is None or not late else self.obs
        return x

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.answer(False), {}

    def step(self, action):
        self.steps += 1
        late = self.steps > 2
        return self.answer(late), self.reward if late else 0.5, self.ended if late else False, False, {}


class Greedy(Own):
    """Changes what it is given, and notes what that was."""

    def __init__(self, note):
        super().__init__(action=spaces.Box(-2.0, 2.0, (2,)))
        self.note = note

    def step(self, action):
        with open(self.note, "a") as file:
            print(action.dtype, action.tolist(), file=file)
        action *= 0.5
        return super().step(action)


class Messy(Own):
    """Changes the process, and needs it to stay changed."""

    def __init__(self, folder, early=False):
        super().__init__()
        self.folder = folder
        if early:
            self.mess()

    def mess(self):
        os.chdir(self.folder)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        np.seterr(all="raise")
        torch.manual_seed(0)
        np.random.seed(0)

    def reset(self, **given):
        self.mess()
        return super().reset(**given)

    def step(self, action):
        right = torch.zeros(1).dtype == torch.float64 and os.path.samefile(os.curdir, self.folder)
        x = torch.ones(2, requires_grad=True)
        (x * x).sum().backward()
        obs, _, *rest = super().step(action)
        return obs, float(right) + float(x.grad.sum()), *rest


class Goes(Own):
    """Changes the current folder in a step, and stays there."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def step(self, action):
        here = os.path.samefile(os.curdir, self.folder)
        os.chdir(self.folder)
        obs, _, *rest = super().step(action)
        return obs, float(here), *rest


class Wrapper(gymnasium.Wrapper):
    pass


ONE = Own()


def same():
    return Wrapper(ONE)
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def make(env_id: str, num_envs: int = 2, **options: Any) -> ShardEnv:
    config = EnvConfig(id=env_id, adapter="gymnasium", options=options)
    return envs.make(config, seed=3, first_index=4, num_envs=num_envs)


def run(env: ShardEnv, action: float | int = 1, steps: int = 4) -> list[Any]:
    try:
        reset(env)
        return play(env, [np.full((env.num_envs, *(env.action_space.shape or ())), action, np.float32)] * steps)
    finally:
        env.close()


@pytest.mark.parametrize("value", [None, "False", float("nan"), 2, [True, False], 1j])
def test_ends_that_are_no_bools_are_refused(own: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=r"terminated=.*environment 4, .*step 3 "):
        run(make(f"{own}:Own", ended=value))


def test_ends_and_rewards_are_taken_in_every_harmless_form() -> None:
    assert [flag("x", each) for each in (0, 1, np.int64(1), np.array([True]), torch.tensor(False), 1.0)] == [
        *(False, True, True, True, False, True)
    ]
    assert [number(each) for each in ([0.5], np.float32(2), torch.tensor([3]), True)] == [0.5, 2.0, 3.0, 1.0]
    for wrong in ("1.5", None, [1.0, 2.0], 1j, b"1", torch.ones(1, requires_grad=True)):
        with pytest.raises(SettingsError, match=r"reward .*number"):
            number(wrong)


@pytest.mark.parametrize(
    ("space", "obs", "told"),
    [
        (None, np.array(["0.1"] * 3), r"type <U3.*float32.*environment 4, in step 3"),
        (None, np.ones(3, complex), r"type complex128"),
        (None, np.array([None] * 3), r"type object"),
        (None, np.array([0, 1e30, 0]), r"1e\+30 at \[1\], but.*from -1 to 1.*environment 4, in step 3"),
        (spaces.Box(0, 9, (2,), np.int64), np.array([0.5, 1.0]), r"type float64.*int64"),
        (spaces.MultiBinary(2), np.array([0.5, 1.0]), r"type float64"),
        (
            spaces.Box(0, 255, (4, 4), np.uint8),
            np.zeros((4, 4), int),
            r"type int64, .*uint8\), says uint8.*environment 4",
        ),
        (spaces.Discrete(3), 3, r"is 3, which its observation_space .* does not contain.*environment 4, in step 3"),
    ],
)
def test_observations_that_are_none_of_their_space_are_refused(own: str, space: Any, obs: Any, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        run(make(f"{own}:Own", obs=obs, space=space))


def test_numbers_slightly_out_of_bounds_are_told_once_and_other_precisions_are_fine(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    played = run(make(f"{own}:Own", obs=np.array([0.0, 0.5, 1.5], np.float64)))
    assert played[-1].obs[""][0].tolist() == [0.0, 0.5, 1.5]
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and "1.5 at [2]" in told and "environment 4, in step 3" in told
    run(make(f"{own}:Own", obs=np.array([0, 1, 1])))
    assert capsys.readouterr().err == ""


def test_actions_have_the_type_of_their_space_and_belong_to_the_environment() -> None:
    kinds = [
        (spaces.Discrete(3, start=5), np.array([6, 7]), np.int64(7)),
        (spaces.MultiDiscrete([3, 4]), np.array([[0, 1], [2, 3]]), np.array([2, 3])),
        (spaces.MultiBinary(2), np.array([[0, 1], [1, 0]], np.int8), np.array([1, 0], np.int8)),
        (spaces.Box(-1, 1, (2,)), np.array([[0.1, 0.2], [0.3, 0.4]], np.float32), np.array([0.3, 0.4], np.float32)),
        (spaces.Box(-1, 1, ()), np.array([0.1, 0.2], np.float32), np.array(0.2, np.float32)),
    ]
    for space, batch, expected in kinds:
        before, action = batch.copy(), single_action(space, (batch,), 1)
        assert type(action) is type(space.sample()) and action.dtype == space.dtype and action.shape == space.shape
        assert np.array_equal(action, expected) and space.contains(action)
        if isinstance(action, np.ndarray):
            action *= 0
            assert np.array_equal(batch, before)
    both = single_action(spaces.Tuple([kinds[0][0], kinds[3][0]]), (kinds[0][1], kinds[3][1]), 0)
    assert type(both[0]) is np.int64 and not np.shares_memory(both[1], kinds[3][1])
    named = spaces.Dict(speed=kinds[3][0], gear=kinds[0][0])
    assert list(action_parts(named)) == list(named.spaces.values())
    action = single_action(named, (kinds[3][1], kinds[0][1]), 0)
    assert named.contains(action) and list(action) == ["speed", "gear"] and action["gear"] == both[0]


def test_an_action_that_the_environment_changes_stays_what_it_was(own: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    env = make(f"{own}:Greedy", note=str(note))
    reset(env)
    actions = [np.full((2, 2), t + 1, np.float32) for t in range(3)]
    play(env, actions)
    kept = env.state_dict()["actions.0"]
    assert [x.tolist() for x in kept] == [x.tolist() for x in actions] == [[[t] * 2] * 2 for t in (1, 2, 3)]
    env.close()
    assert note.read_text().splitlines() == [f"float32 [{t}.0, {t}.0]" for t in (1, 1, 2, 2, 3, 3)]


@pytest.mark.parametrize("early", [True, False])
def test_an_environment_keeps_its_settings_of_the_process_and_so_does_everybody_else(
    own: str, tmp_path: Path, early: bool
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    before = os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled(), np.geterr()
    try:
        with torch.inference_mode():
            env = make(f"{own}:Messy", folder=str(theirs), early=early)
            reset(env)
            assert (os.getcwd(), torch.get_default_dtype(), np.geterr()) == (*before[:2], before[3])
            played = run(env)
            assert torch.is_inference_mode_enabled()
        assert [moment.step.reward.tolist() for moment in played] == [[5.0, 5.0]] * 4, "4 of gradients"
        assert (os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled(), np.geterr()) == before
    finally:
        ENVIRONMENT_SETTINGS.__init__()


def test_a_folder_that_a_step_changes_to_is_the_environment_s_alone(own: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    before = os.getcwd()
    try:
        env = make(f"{own}:Goes", 1, folder=str(theirs))
        played = run(env)
        assert os.getcwd() == before
        assert [moment.step.reward.tolist() for moment in played] == [[0.0], [1.0], [1.0], [1.0]]
    finally:
        os.chdir(before)
        ENVIRONMENT_SETTINGS.__init__()


def test_one_object_for_two_environments_is_refused(own: str) -> None:
    with pytest.raises(SettingsError, match=r"env\.id=.*own\.py:same .* Own .*make\(\)"):
        make(f"{own}:same")
    alone = make(f"{own}:same", 1)
    with pytest.raises(SettingsError, match=r"env\.id=.*own\.py:same .* Own .*make\(\)"):
        make(f"{own}:same", 1)
    alone.close()
    make(f"{own}:same", 1).close()
    two = make(f"{own}:Own", 2), make(f"{own}:Own", 2)
    for env in two:
        env.close()
