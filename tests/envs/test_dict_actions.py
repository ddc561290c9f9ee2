"""Actions that are a Dict of parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces
from tiny import EXPERIMENTS, options

from lockstep import train
from lockstep.envs.tasks import TupleBandit
from lockstep.evaluation.scores import evaluate
from lockstep.models.action_spaces import action_parts


class NamedBandit(TupleBandit):
    """TupleBandit whose actions have names."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        arm, point = action_parts(self.action_space)
        self.action_space = spaces.Dict(arm=arm, point=point)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return super().step((action["arm"], action["point"]))


@pytest.mark.parametrize("layout", ["inline", "processes:2,env_processes=2"])
def test_a_dict_of_actions_learns_as_a_tuple_of_them_does(layout: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS["tuple-dict-mask"]()
    named = experiment.replace(env=dataclasses.replace(experiment.env, id=f"{__file__}:NamedBandit"))
    expected = train(experiment, options=options(tmp_path / "tuple"))
    found = train(named, layout, options(tmp_path / "dict"))
    assert found.digest == expected.digest
    assert evaluate(tmp_path / "dict", episodes=3).scores == evaluate(tmp_path / "tuple", episodes=3).scores
