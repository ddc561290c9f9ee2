from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lockstep import envs
from lockstep.cli.main import main
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.envs.base import ShardEnv
from lockstep.envs.goals import Goals
from lockstep.envs.settings import EnvConfig

ROOT = Path(__file__).parents[2]
TASK = "lockstep/Memory-v0"


def lengths(env: ShardEnv, steps: int = 200) -> set[int]:
    """Of the episodes that environments play when they are sent zeros."""
    out = envs.allocate_observation(env.observation_space, (env.num_envs,))
    rows = out.numpy()
    env.reset(rows)
    found, length = set(), np.zeros(env.num_envs, np.int64)
    for _ in range(steps):
        env.send(np.zeros(env.num_envs, np.int64))
        step = env.recv(rows)
        length += ~step.first
        over = step.terminated | step.truncated
        found |= set(length[over].tolist())
        length[over] = 0
    env.close()
    return found


def test_only_training_follows_the_curriculum() -> None:
    config = EnvConfig(id=TASK, options={"length": 12}, curriculum={"length": 3})
    made = {
        purpose: envs.make(config, seed=1, first_index=0, num_envs=2, purpose=purpose)
        for purpose in ("train", "eval", "test", "video")
    }
    found = {purpose: lengths(env) for purpose, env in made.items()}
    plain = lengths(envs.make(EnvConfig(id=TASK, options={"length": 12}), seed=1, first_index=0, num_envs=2))
    assert found["eval"] == found["test"] == found["video"] == plain
    assert max(found["train"]) < min(plain)


@pytest.mark.slow
def test_a_run_is_trained_on_easy_starts_and_scored_on_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n# my_file.py\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)
    (tmp_path / "my_file.py").write_text(code)
    flags = "--env.id my_file.py:AnyLength --env.options longest=32 --env.curriculum ease=3 --total-steps 2k"
    assert main(["train", "ppo-memory", *flags.split(), "--run", "run", "--display", "none", "--no-tensorboard"]) == 0
    trained = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    mean = [line["score/length"] for line in trained if line.get("score/length") is not None]
    capsys.readouterr()
    assert main(["eval", "run", "--episodes", "4", "--json"]) == 0
    played = json.loads(capsys.readouterr().out)["lengths"]
    assert mean and max(mean) < min(played) and len(set(played)) == 1


def test_a_curriculum_must_leave_the_spaces_alone() -> None:
    with pytest.raises(SettingsError, match=r"env.curriculum=.*symbols.*observation"):
        envs.spaces(EnvConfig(id=TASK, curriculum={"symbols": 7}))
    with pytest.raises(SettingsError, match=r"'steps'.*steps came from env.curriculum"):
        envs.spaces(EnvConfig(id=TASK, curriculum={"steps": 7}))


GOALS = """
import gymnasium
import numpy as np

class Near(gymnasium.Env):
    def __init__(self, tolerance=0.1):
        self.tolerance = tolerance
        point = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            {"observation": point, "achieved_goal": point, "desired_goal": point}
        )
        self.action_space = point

    def compute_reward(self, achieved, desired, info):
        return (np.abs(achieved - desired) < self.tolerance).all(-1).astype(np.float32)
"""


def test_hindsight_rewards_as_training_does(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text(GOALS)
    config = EnvConfig(id=f"{tmp_path}/near.py:Near", adapter="gymnasium", curriculum={"tolerance": 0.5})
    goals = Goals(config)
    assert goals.reward(np.zeros((1, 1)), np.full((1, 1), 0.3)) == [1.0]
    goals.close()


def test_experiments_without_one_are_what_they_were() -> None:
    assert "curriculum" not in to_json(EnvConfig())
    config = EnvConfig(curriculum={"length": 3})
    assert from_json(to_json(config)) == config
