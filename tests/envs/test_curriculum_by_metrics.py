"""Options of training environments that follow from metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from sentences import says
from tiny import EXPERIMENTS, options, with_curriculum

from lockstep import envs, recipes
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs.base import ShardEnv
from lockstep.envs.curriculum import check_curriculum, first_options, pack, unpack
from lockstep.envs.settings import EnvConfig
from lockstep.export.hub import foreign_code
from lockstep.launchers.launch import train
from lockstep.reproducibility.verify import verify
from lockstep.run import ledger
from lockstep.run.folder import RunFolder
from lockstep.training.curriculum import Curriculum
from lockstep.training.prepare import prepare


class Count(gymnasium.Env[Any, Any]):
    """Episodes of `steps` steps, whose observations are the step and `steps`. `wide` changes the space."""

    def __init__(self, steps: int = 2, wide: bool = False) -> None:
        self.steps = steps
        self.observation_space = gymnasium.spaces.Box(0, 99, (3 if wide else 2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.closed = False

    def _seen(self) -> np.ndarray:
        assert not self.closed
        return np.array([self.step_of, self.steps], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.step_of = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.step_of += 1
        return self._seen(), 1.0, self.step_of >= self.steps, False, {}

    def close(self) -> None:
        self.closed = True


CONFIG = EnvConfig(f"{__file__}:Count", adapter="gymnasium", curriculum={"steps": 2, "wide": False, "name": "x"})


def shard() -> ShardEnv:
    made = envs.make(EnvConfig(CONFIG.id, adapter="gymnasium"), seed=1, first_index=0, num_envs=2)
    made.offer({"steps": 2, "wide": False})
    return made


def play(env: ShardEnv, steps: int, out: np.ndarray) -> list[list[list[float]]]:
    seen = []
    for _ in range(steps):
        env.send(np.zeros(2, np.int64))
        env.recv(out)
        seen.append(out.tolist())
    return seen


def test_episodes_that_begin_get_the_new_options() -> None:
    env, out = shard(), np.zeros((2, 2), np.float32)
    env.reset(out)
    first = play(env, 1, out)
    env.offer({"steps": 3, "wide": False})
    rest = play(env, 6, out)
    each = [rows[0] for rows in first + rest]
    assert each == [[1, 2], [2, 2], [0, 3], [1, 3], [2, 3], [3, 3], [0, 3]], "the episode that runs keeps its own"
    again, copy = shard(), np.zeros((2, 2), np.float32)
    env.offer({"steps": 1, "wide": False})
    play(env, 1, out)
    assert again.load_state_dict(env.state_dict(), copy) == 2 and np.array_equal(copy, out), "of 3 steps, not of 2"
    for restored, buffer in ((env, out), (again, copy)):
        restored.offer({"steps": 1, "wide": False})
        assert [rows[0] for rows in play(restored, 5, buffer)] == [[2, 3], [3, 3], [0, 1], [1, 1], [0, 1]]
    env.offer({"steps": 1, "wide": True})
    with pytest.raises(SettingsError, match=r"wide.*change the observation"):
        play(env, 3, out)
    env.close()
    again.close()


def test_options_keep_their_types_as_numbers() -> None:
    assert first_options(CONFIG) == {"steps": 2, "wide": False}
    packed = pack({"steps": 5, "wide": True})
    assert packed.tolist() == [5.0, 1.0] and unpack(CONFIG, packed) == {"steps": 5, "wide": True}
    assert [type(x) for x in unpack(CONFIG, packed).values()] == [int, bool]


def harder(metrics: dict[str, float], options: dict[str, Any]) -> Any:
    return metrics.get("answer", {"steps": options["steps"] + 1})


def alone(metrics: dict[str, float]) -> dict[str, Any]:
    return {}


def test_the_function_s_answers_are_checked() -> None:
    experiment = recipes.ppo_cartpole().replace(env=CONFIG, curriculum=f"{__file__}:harder")
    curriculum, packed = Curriculum(experiment), pack({"steps": 2, "wide": False})
    assert curriculum.next({"score/mean": 1.0, "time/env": 0.5}, packed).tolist() == [3, 0]
    wrong: list[tuple[Any, tuple[str, ...]]] = [
        (None, ("harder", "None", "dict")),
        ({"stepps": 3}, ("'stepps'", "steps, wide")),
        ({"steps": "3"}, ("steps='3'", "numbers")),
        ({"steps": float("nan")}, ("steps=nan", "finite")),
        ({"steps": 2.5}, ("steps=2.5", "begins with 2", "int", "2.0")),
        ({"wide": 0.3}, ("wide=0.3", "bool")),
    ]
    for right in (np.int64(4), np.float32(4), 4.0):
        answers: dict[str, Any] = {"answer": {"steps": right}}
        assert curriculum.next(answers, packed).tolist() == [4, 0]
    for answer, words in wrong:
        with pytest.raises(SettingsError) as error:
            curriculum.next({"answer": answer}, packed)
        assert says([str(error.value)], *words)
    with pytest.raises(SettingsError, match=r"curriculum=\S*:alone .*metrics.*options"):
        Curriculum(experiment.replace(curriculum=f"{__file__}:alone"))


def test_what_does_not_go_with_it_is_refused() -> None:
    experiment = with_curriculum()
    compiled = EnvConfig("CartPole-v1", adapter="compiled", curriculum={"steps": 2})
    for config, words in (
        (EnvConfig("CartPole-v1"), "no numbers.*--env.curriculum"),
        (compiled, "env.adapter=compiled"),
    ):
        with pytest.raises(SettingsError, match=f"curriculum=f.*{words}"):
            check_curriculum(config, "f")
    with pytest.raises(SettingsError, match=r"env_processes.*curriculum=tiny:longer"):
        prepare(experiment, Layout.parse("processes:2,env_processes=1"))
    her = recipes.her_bitflip().replace(curriculum="f", **{"env.curriculum": {"bits": 4}})
    with pytest.raises(SettingsError, match="hindsight"):
        her.validate()
    assert "curriculum" not in to_json(recipes.ppo_cartpole())
    assert foreign_code(to_json(experiment)) == ["tiny:longer"], "is not pulled"


@pytest.mark.slow
def test_a_run_records_it_and_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(EXPERIMENTS["curriculum-lag-1"](), options=options(tmp_path / "run"))
    folder = RunFolder(result.run)
    _, lines = ledger.read(folder.ledger)
    lengths = [line["curriculum"]["length"] for line in lines]
    records: Any = folder.records()
    assert [record["curriculum/length"] for record in records] == lengths and lengths[0] == 3
    after = [2 + (int(1e4 * each["policy/entropy"]) + each["iteration"]) % 4 for each in records]
    assert lengths[1:] == after[:-1], "an iteration's metrics decide on the options of the version after the next"
    assert verify(result.run, iterations="all").ok
    again = EXPERIMENTS["curriculum-lag-1"]().replace(**{"warm_start.run": str(result.run)})
    after = RunFolder(train(again, options=options(tmp_path / "after")).run)
    assert after.records()[0]["curriculum/length"] == 3, "a warm start takes weights, not the curriculum's options"
    assert main(["train", "ppo-memory", "--curriculum", "tiny:longer", "--run", str(tmp_path / "no")]) == 2
    assert says(capsys.readouterr().err, "curriculum=tiny:longer", "--env.curriculum")


TOWER = f"{Path(__file__).parents[2]}/examples/tower.py"


def test_the_highest_floor_only_rises() -> None:
    higher = load_object(f"{TOWER}:higher")
    assert higher({}, {"highest": 2}) == {"highest": 2}
    assert higher({"env/passed": 3.0}, {"highest": 2}) == {"highest": 3}
    assert higher({"env/passed": 3.5}, {"highest": 3}) == {"highest": 4}, "some episodes reached 3, and some at least 4"
    assert higher({"env/passed": 3.0}, {"highest": 5}) == {"highest": 5}


def test_floors_of_the_tower() -> None:
    env = load_object(f"{TOWER}:Tower")(highest=1)
    starts = []
    for level in range(40):
        env.reset(seed=level)
        starts.append(env.floor)
        for floor in range(starts[-1], 3):  # the way to the door of each floor, first along x and then along y
            (x, y), (to_x, to_y) = env.place, env.doors[floor]
            moves = [2 if to_x > x else 3] * abs(to_x - x) + [0 if to_y > y else 1] * abs(to_y - y)
            steps = [env.step(move) for move in moves]
            assert [step[1] for step in steps] == [0.0] * (len(moves) - 1) + [1.0]
            assert steps[-1][4] == ({"passed": floor + 1.0} if floor + 1 > 1 else {})
            assert not any(step[2] for step in steps)
    assert set(starts) == {0, 1}
    env = load_object(f"{TOWER}:Tower")()
    env.reset(seed=1)
    into_the_wall = 3 if env.place[0] == 0 else 2
    assert [env.step(into_the_wall)[2] for _ in range(12)] == [False] * 11 + [True]
