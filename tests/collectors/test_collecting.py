"""What collectors make of environments' answers, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from sentences import says

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms.base import Exploration
from lockstep.collectors.collectors import Collector, Collectors, RolloutInfo
from lockstep.collectors.explorer import Explorer
from lockstep.collectors.stepping import ActingShard
from lockstep.config.layout import Layout
from lockstep.config.settings import NotFinite, SettingsError
from lockstep.core.rollout import Episode, Rollout
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.envs.base import ShardEnv, StepResult
from lockstep.envs.finite import FiniteCheck, wrong_numbers
from lockstep.envs.settings import EnvConfig
from lockstep.models.normalize import NormalizeConfig
from lockstep.scheme import Scheme
from lockstep.transport.rollouts import buffers_of


class Scripted(ShardEnv):
    """Two environments that answer as written.

    Args:
        told: by step, the rewards and what happened: `d`ied, `o`ut of time, `f`irst of an episode, `l`ost a life.
        due: steps after which they are started afresh.
    """

    num_envs, frames_per_step = 2, 1
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, told: list[tuple[list[float], str]], due: int = -1) -> None:
        self.told, self.due, self.steps = told, due, 0

    def reset(self, out: Any) -> None:
        out[:] = 0

    def send(self, action: Any) -> None: ...

    def recv(self, out: Any) -> StepResult:
        reward, happened = self.told[self.steps]
        self.steps += 1
        out[:] = self.steps
        flags = (np.array([each == kind for each in happened]) for kind in "dofl")
        return StepResult(np.array(reward, np.float32), *flags)

    def reseed_due(self) -> bool:
        return self.steps == self.due

    def reseed(self, out: Any) -> None:
        out[:] = -1

    def state_dict(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def load_state_dict(self, state: Any, out: Any, heartbeat: Callable[[], None] = lambda: None) -> int:
        raise NotImplementedError

    def close(self) -> None: ...


def collected(
    env: Scripted, monkeypatch: pytest.MonkeyPatch, finite_check: FiniteCheck | None = None
) -> list[tuple[RolloutInfo, Rollout]]:
    """Rollouts of four steps, with rewards clipped and returns normalized."""
    base = recipes.ppo_cartpole()
    experiment = base.replace(
        env=replace(base.env, num_envs=2, reward_clip=True),
        algorithm=replace(base.algorithm, rollout=4, minibatches=1, discount=0.5),
        normalize=NormalizeConfig(returns=True),
        scheme=Scheme(shards=1),
    )
    agent = Agent(experiment)
    monkeypatch.setattr("lockstep.envs.make", lambda *_, **__: env)
    (buffers,) = buffers_of(agent, range(1), experiment.schedule(), PrivateArena(), ahead=False)
    collector, version, found = Collector(agent, buffers, finite_check=finite_check), agent.version(0), []
    collector.reset()
    for lap in range(len(env.told) // 4):
        (only,) = collector.collect(lap, lambda t: version)
        found.append((only.info, only.rollout.map(lambda leaf: leaf.clone())))
    return found


def test_a_lost_life_is_an_end_to_the_agent_and_none_to_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        *(([3.0, 2.0], ".o"), ([-5.0, 0.0], "lf"), ([0.5, 7.0], ".."), ([2.0, 1.0], "d.")),
        *(([0.0, 1.0], "f."), ([4.0, 1.0], "dd"), ([0.0, 0.0], "ff"), ([1.0, 1.0], "..")),
    ]
    (first, rollout), (second, other) = collected(Scripted(told), monkeypatch)
    yes, no = True, False
    assert rollout.reward.tolist() == [[1.0, 1.0], [-1.0, 0.0], [0.5, 1.0], [1.0, 1.0]]
    assert rollout.terminated.tolist() == [[no, no], [yes, no], [no, no], [yes, no]]
    assert rollout.truncated.tolist() == [[no, yes], [no, no], [no, no], [no, no]]
    assert rollout.valid.tolist() == [[yes, yes], [yes, no], [yes, yes], [yes, yes]]
    assert rollout.start.tolist() == [[yes, yes], [no, no], [yes, yes], [no, no], [no, no]]
    assert other.start.tolist() == [[no, no], [yes, no], [no, no], [yes, yes], [no, no]]
    assert first.episodes == [Episode(2.0, 1), Episode(0.5, 4)], "with raw rewards"
    assert second.episodes == [Episode(4.0, 1), Episode(10.0, 4)], "of which the second began in the rollout before"


def test_environments_that_start_afresh_count_nothing_of_what_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        *[([1.0, 1.0], "..")] * 4,
        *(([0.5, 1.0], ".."), ([0.5, 1.0], "dd"), ([0.0, 0.0], "ff"), ([1.0, 1.0], "..")),
    ]
    _, (info, rollout) = collected(Scripted(told, due=4), monkeypatch)
    assert rollout.start.tolist() == [[True, True], [False, False], [False, False], [True, True], [False, False]]
    assert (rollout.obs[0] == -1).all()
    assert info.episodes == [Episode(1.0, 2), Episode(2.0, 2)]
    # Returns of the first environment: 1/2, 1/2 + 1/4, 1. Of the second: 1, 1 + 1/2, 1.
    assert info.moments.tolist() == [6, 2.25 + 3.5, 1.8125 + 4.25]


def test_a_policy_is_sampled_again_after_rollouts_that_explored() -> None:
    agent, member = Agent(recipes.ppo_cartpole().replace(precision="fp32")), ActingShard(0, 2, slice(0, 2))
    explorer = Explorer(agent, [member], 2)
    each = agent.experiment.samples_per_iteration
    told = {0: Exploration(True, torch.zeros(2, 1)), each: Exploration(False, torch.zeros(2, 1)), 2 * each: None}
    agent.algorithm.exploration = lambda progress, samples, *_: told[samples]  # type: ignore[method-assign]
    choices = []
    for rollout in (2, 0, 1, 2):
        explorer.begin(member, rollout)
        choices.append(explorer.choose)
    sampled, uniform, by_numbers, again = choices
    assert sampled == again == agent.model.distribution.sample, "as in a run that is resumed here"
    assert len({sampled, uniform, by_numbers}) == 3


def test_a_distribution_that_cannot_explore_is_named() -> None:
    agent, member = Agent(recipes.ppo_cartpole().replace(precision="fp32")), ActingShard(0, 2, slice(0, 2))
    sample = agent.model.distribution.sample
    agent.model.distribution = SimpleNamespace(sample=sample, noise_size=1)  # type: ignore[assignment]
    agent.algorithm.exploration = lambda *_: Exploration(True, torch.zeros(2, 1))  # type: ignore[method-assign]
    with pytest.raises(SettingsError, match=r"PPO\.exploration .* SimpleNamespace has no methods explore and uniform"):
        Explorer(agent, [member], 2).begin(member, 0)


@pytest.mark.parametrize("shape", [(2,), (1, 3), (2, 1, 1)])
def test_numbers_of_exploration_have_a_row_for_each_environment(shape: tuple[int, ...]) -> None:
    agent, member = Agent(recipes.ppo_cartpole().replace(precision="fp32")), ActingShard(0, 2, slice(0, 2))
    agent.algorithm.exploration = lambda *_: Exploration(True, torch.zeros(shape))  # type: ignore[method-assign]
    with pytest.raises(SettingsError, match=r"numbers of shape \[.*each of the 2 environments"):
        Explorer(agent, [member], 2).begin(member, 0)


def test_times_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(agent: Agent, shard: Any, **_: Any) -> Any:
        return SimpleNamespace(times={"env": 1.0, "inference": 2.0}, members=lambda: {shard: None}, frames_per_step=1)

    monkeypatch.setattr("lockstep.collectors.collectors.Collector", busy)
    agent, shards = SimpleNamespace(experiment=recipes.sac_mujoco()), [0, 1]
    collectors = Collectors(agent, shards, Layout())  # type: ignore[arg-type]
    assert collectors.take_times() == {"env": 2.0, "inference": 4.0}
    assert collectors.take_times() == {"env": 0.0, "inference": 0.0}


def test_an_environment_is_not_blamed_for_answers_to_actions_that_are_no_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = recipes.sac_mujoco()
    settings = base.replace(env=EnvConfig("Pendulum-v1", num_envs=2, adapter="gymnasium"), scheme=Scheme(shards=1))
    agent = Agent(settings)
    monkeypatch.setattr("lockstep.envs.make", lambda *_, **__: Scripted([([np.nan, 1.0], "..")] * 100))
    (buffers,) = buffers_of(agent, range(1), settings.schedule(), PrivateArena(), ahead=False)

    def found(lost: float) -> str:
        collector = Collector(agent, buffers, finite_check=(finite_check := FiniteCheck("Own-v0", stop=False)))
        version = agent.version(0)
        collector.reset()
        distribution = type(agent.model.distribution)
        monkeypatch.setattr(distribution, "to_env", lambda _, action: action)
        for name in ("uniform", "explore"):
            monkeypatch.setattr(distribution, name, lambda *_, **__: torch.full((2, 1), lost))
        collector.collect(0, lambda t: version)
        return finite_check.found

    assert found(torch.nan) == ""
    assert says(found(0.0), "environment 0 of env.id=Own-v0", "reward nan", "step 1")


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_found_with_its_place(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    still, ended, again = ([0.0, 0.0], ".."), ([0.0, 0.0], ".d"), ([0.0, 0.0], ".f")
    bad = ([0.0, wrong], "..")
    place = "Environment 1 of env.id=CartPole-v1 returned the reward"
    with pytest.raises(NotFinite, match=f"{place} {wrong} .*step 7 .*step 7") as raised:
        collected(Scripted([still] * 6 + [bad, still]), monkeypatch)
    assert raised.value.exit_code == 1
    with pytest.raises(NotFinite, match=r"step 2 of its episode.*step 7 of the run"):
        collected(Scripted([*[still] * 3, ended, again, still, bad, still]), monkeypatch)
    goes_on = FiniteCheck("Own-v0", stop=False)
    (first, _), (second, _) = collected(Scripted([still] * 6 + [bad, bad]), monkeypatch, goes_on)
    assert not first.not_finite and "environment 1 of env.id=Own-v0" in second.not_finite == goes_on.found


def test_an_observation_that_is_not_finite_is_found_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Scripted):
        def recv(self, out: Any) -> StepResult:
            answer = super().recv(out)
            out[1, 2] = np.nan if self.steps == 3 else 0
            return answer

        def reset(self, out: Any) -> None:
            out[0, 1] = self.due

    with pytest.raises(NotFinite, match=r"Environment 1 .* observation nan at \[2\] .*step 3 "):
        collected(Wrong([([0.0, 0.0], "..")] * 4), monkeypatch)
    with pytest.raises(NotFinite, match=r"Environment 0 .* observation inf at \[1\] .*first episode"):
        collected(Wrong([], due=np.inf), monkeypatch)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
    entries = {"a": np.zeros((2, 3)), "b": np.array([[0.0], [-np.inf]])}
    assert list(wrong_numbers(entries, np.zeros(2))) == [(1, "the observation 'b' -inf at [0]")]


def test_an_error_that_follows_from_a_number_that_is_not_finite_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Choking(Scripted):
        def send(self, action: np.ndarray) -> None:
            if self.steps == 2:
                raise RuntimeError("such an action cannot be taken")

    still = [([0.0, 0.0], "..")] * 4
    with pytest.raises(RuntimeError, match="cannot be taken"):
        collected(Choking(still), monkeypatch)
    with pytest.raises(NotFinite, match=r"reward nan .*step 1 "):
        collected(Choking([([np.nan, 0.0], ".."), *still]), monkeypatch)
