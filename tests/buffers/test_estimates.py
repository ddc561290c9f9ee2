"""First priorities from the values by which actions were chosen, against walks through the plain history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_replay_buffer import GAMMA, World, experiment
from test_sequences import Remembered
from tiny import EXPERIMENTS, options

from lockstep import recipes, train
from lockstep.algorithms import R2D2Config
from lockstep.algorithms.r2d2 import rescale, unscale
from lockstep.buffers.replay import Replay
from lockstep.buffers.sequences import SequenceReplay
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.experiment import Experiment

ENVS, ACTIONS = 3, 4


class Valued:
    """Rollouts whose actions were chosen by random values."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(2)
        self.values: dict[int, np.ndarray] = {}
        """By step: the values [B, A] by which the newest version that saw its observation chose."""

    def of(self, rollout: Rollout, first: int) -> Rollout:
        """The rollout, whose first step has this number, with values."""
        steps = len(rollout.reward)
        values = self.draw.normal(size=(steps + 1, ENVS, ACTIONS)).astype(np.float32)
        self.values.update(zip(range(first, first + steps + 1), values, strict=True))
        best, policy = torch.from_numpy(values.max(-1)), torch.from_numpy(values[:-1])
        return rollout.replace(value=best, policy=policy)


def by_error(settings: Experiment) -> Experiment:
    return settings.replace(**{"algorithm.replay.first_priority": "error"})


def weight(error: float, settings: Experiment) -> float:
    return (abs(error) + 1e-6) ** settings.algorithm.replay.alpha  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rollout", "n_step", "steps", "afresh"), [(5, 1, 40, 10**9), (4, 3, 64, 7), (7, 5, 50, 3), (1, 2, 41, 11)]
)
def test_a_new_step_begins_with_the_error_of_acting(rollout: int, n_step: int, steps: int, afresh: int) -> None:
    settings = by_error(experiment(steps=steps, envs=ENVS, n_step=n_step, rollout=rollout, prioritized=True))
    world, valued, known, compared = World(ENVS, 5, "noise", reset=0.1), Valued(), 0, 0
    replay: Replay | None = None
    for each in world.rollouts(rollout, 40, afresh):
        count = len(world.history)
        told = valued.of(each, count - rollout)
        if replay is None:
            replay = Replay(settings, told)
        replay.insert(told)
        weights = replay.state()["priorities"].view(steps, ENVS)
        for time in range(known, count - n_step + 1):
            for env in range(ENVS):
                found = float(weights[time % steps, env])
                if not world.history[time]["valid"][env]:
                    assert found == 0
                    continue
                expected, then = world.transition(time, env, n_step), time
                for then in range(time + 1, time + n_step + 1):
                    last = world.history[then - 1]
                    if last["terminated"][env] or last["truncated"][env]:
                        break
                best = float(valued.values[then][env].max())
                taken = float(valued.values[time][env, world.history[time]["action"][env]])
                error = expected["reward"] + expected["discount"] * best - taken
                assert found == pytest.approx(weight(error, settings), rel=1e-4)
                compared += 1
        known = count - n_step + 1
    assert compared > 80


def test_a_restored_memory_goes_on_with_the_same_priorities() -> None:
    """Also if environments are reset right after, so that returns end at the observation after the newest step."""
    settings = by_error(experiment(steps=40, envs=ENVS, n_step=3, rollout=4, prioritized=True))
    world, valued = World(ENVS, 5, "noise", reset=0.1), Valued()
    rollouts = [valued.of(each, 0) for each in world.rollouts(4, 15, 5)]
    for restored_after in (4, 5, 12):
        whole, parts = Replay(settings, rollouts[0]), Replay(settings, rollouts[0])
        for each in rollouts[:restored_after]:
            whole.insert(each)
        parts.put_back(max(0, whole.count - 40), whole.between(max(0, whole.count - 40), whole.count))
        parts.load(whole.state())
        for each in rollouts[restored_after:]:
            whole.insert(each)
            parts.insert(each)
            assert torch.equal(whole.state()["priorities"], parts.state()["priorities"])


def test_an_error_that_is_not_a_number_counts_as_the_largest() -> None:
    settings = by_error(experiment(steps=40, envs=ENVS, n_step=1, rollout=4, prioritized=True))
    (rollout,) = (Valued().of(each, 0) for each in World(ENVS, 5, "noise", reset=0.0).rollouts(4, 1))
    rollout.reward[0, 0], rollout.reward[1, 1], rollout.value[1, 2] = torch.nan, torch.inf, torch.nan
    replay = Replay(settings, rollout)
    replay.insert(rollout)
    priorities = replay.state()["priorities"].view(40, ENVS)
    assert priorities[0, 0] == priorities[1, 1] == priorities[0, 2] == 1
    assert priorities.isfinite().all() and 0 < priorities[0, 1] != 1


@pytest.mark.parametrize("returns", ["quantiles", "implicit"])
def test_errors_of_other_means_are_known_too(returns: str) -> None:
    by_error(
        recipes.RECIPES["dqn-atari"]().replace(**{"algorithm.replay.prioritized": True, "model.returns": returns})
    ).validate()


@pytest.mark.parametrize(("burn_in", "unroll", "n_step", "rollout"), [(0, 4, 2, 4), (2, 6, 3, 4)])
def test_a_new_sequence_begins_with_the_mixed_error_of_acting(
    burn_in: int, unroll: int, n_step: int, rollout: int
) -> None:
    steps = 80
    world = Remembered(burn_in, unroll, n_step, steps, rollout, afresh=10**9, prioritized=True)
    before = world.settings.algorithm
    algorithm = R2D2Config(
        rollout=rollout,
        n_step=n_step,
        discount=GAMMA,
        burn_in=burn_in,
        unroll=unroll,
        replay=before.replay,  # type: ignore[attr-defined]
    )
    settings = by_error(world.settings.replace(algorithm=algorithm))
    memory: SequenceReplay | None = None
    valued, known, compared = Valued(), set[int](), 0
    for each in world.rollouts(40):
        count = len(world.world.history)
        told = valued.of(each, count - rollout)
        if memory is None:
            memory = SequenceReplay(settings, told, burn_in, unroll)
        memory.insert(told)
        weights = memory.state()["priorities"].view(-1, ENVS)
        ready = world.complete(steps)
        for number in ready - known:
            for env in range(ENVS):
                errors = list(_errors(world, valued, world.first[number] + burn_in, unroll, n_step, env, algorithm))
                mixed = 0.9 * max(errors, default=0.0) + 0.1 * sum(errors) / max(1, len(errors))
                found = float(weights[number % len(weights), env])
                assert found == pytest.approx(weight(mixed, settings), rel=1e-4)
                compared += 1
        known |= ready
    assert compared > 80


def _errors(
    world: Remembered, valued: Valued, first: int, unroll: int, n_step: int, env: int, config: R2D2Config
) -> Iterator[float]:
    history = world.world.history
    for time in range(first, first + unroll):
        if not history[time]["valid"][env]:
            continue
        expected, then = world.world.transition(time, env, n_step), time
        for then in range(time + 1, time + n_step + 1):
            if history[then - 1]["terminated"][env] or history[then - 1]["truncated"][env]:
                break
        best = float(unscale(torch.tensor(float(valued.values[then][env].max())), config.rescaling))
        target = float(rescale(torch.tensor(expected["reward"] + expected["discount"] * best), config.rescaling))
        yield abs(target - float(valued.values[time][env, history[time]["action"][env]]))


@pytest.mark.parametrize("name", ["apex-lag-1", "r2d2-prioritized-frames"])
def test_it_is_the_error_of_the_loss_as_long_as_nothing_was_learned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[float] = []
    prioritize = Replay.prioritize

    def noting(self: Replay, times: np.ndarray, environments: np.ndarray, priorities: np.ndarray) -> None:
        settings = self._config
        if len(compared) < settings.batch_size:  # before the first gradient step was taken
            before = self.state()["priorities"].numpy()[times % self._places() * self.size + environments]
            wanted = (np.abs(priorities) + 1e-6) ** settings.replay.alpha
            assert before == pytest.approx(wanted, rel=1e-3, abs=1e-4)
            compared.extend(before)
        prioritize(self, times, environments, priorities)

    monkeypatch.setattr(Replay, "prioritize", noting)
    train(by_error(EXPERIMENTS[name]()), options=options(tmp_path))
    assert len(set(np.round(compared, 5))) > 1


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("sac-mujoco", {"algorithm.replay.prioritized": True}, "which algorithm=sac does not"),
        ("rainbow-atari", {}, "model.returns=categorical are cross-entropies"),
        ("apex-atari", {"normalize.returns": True}, "normalize.returns scales them"),
        ("apex-atari", {"algorithm.replay.data": "some.npz"}, "algorithm.replay.data does not contain"),
    ],
)
def test_where_no_such_error_is_known_it_is_refused(recipe: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        by_error(recipes.RECIPES[recipe]().replace(**changes)).validate()
