"""Trained policies in environments of the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tiny import EXPERIMENTS, options
from torch import Tensor

from lockstep import envs, recipes
from lockstep.config.settings import SettingsError
from lockstep.envs.construct import construct
from lockstep.envs.convert import ObservationWriter
from lockstep.evaluation.actor import Actor
from lockstep.evaluation.policy import Policy, load_policy
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.models.arithmetic import portable_operations
from lockstep.models.capture import Inference

NAMES = ["memory-gru-lag-2", "tuple-dict-mask", "mujoco-normalized", "r2d2-uniform-lag-1"]


@pytest.fixture(scope="module", params=NAMES)
def policy(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(EXPERIMENTS[request.param](), options=options(path))
    return load_policy(path)


def played(policy: Policy, steps: int, **how: Any) -> tuple[list[Any], list[Any], list[float]]:
    """What an actor did, upon which observations, and what came of it; None begins an episode."""
    env = construct(policy.experiment.env)
    actor = Actor(policy, env, **how)
    observation, _ = env.reset(seed=1)
    seen, actions, rewards, reward = [None, observation], [], [], 0.0
    for _ in range(steps):
        action = actor.act(observation, reward)
        assert env.action_space.contains(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        rewards.append(float(reward))
        if terminated or truncated:
            observation, _ = env.reset()
            actor.reset()
            seen.append(None)
        seen.append(observation)
    env.close()
    return seen, actions, rewards


@torch.inference_mode()
def by_hand(policy: Policy, seen: list[Any], actions: list[Any], rewards: list[float]) -> list[Any]:
    """The most likely actions upon the same observations, of the model itself."""
    model, env = policy.model.for_acting(), construct(policy.experiment.env)
    writer, distribution = ObservationWriter(env.observation_space), model.distribution
    state, start, chosen = torch.zeros(1, model.state_size), torch.ones(1, 1, dtype=torch.bool), []
    before: list[Any] = [None, None]
    for observation in seen:
        if observation is None:
            start = torch.ones_like(start)
            continue
        if len(chosen) == len(actions):
            break
        out = envs.allocate_observation(writer.space, (1, 1))
        rows = {k: v[0].numpy() for k, v in out.items()} if isinstance(out, dict) else out[0].numpy()
        writer.write_list([observation], rows)
        if policy.experiment.model.uses_previous and chosen:
            before = [before[0], torch.tensor([[rewards[len(chosen) - 1]]])]
        elif policy.experiment.model.uses_previous:
            before = [torch.zeros(1, 1, *distribution.action_shape, dtype=distribution.action_dtype), torch.zeros(1, 1)]
        output, state = model(out, start, state, *before)
        start = torch.zeros_like(start)
        action = distribution.mode(output.policy[0])
        before[0] = action[None]
        parts = distribution.to_env(action.numpy())
        chosen.append(tuple(part[0] for part in parts) if isinstance(parts, tuple) else parts[0])
    env.close()
    return chosen


def test_an_actor_computes_in_the_arithmetic_of_the_run() -> None:
    experiment = recipes.ppo_cartpole().replace(**{"model.core": "mingru"})
    model, env = experiment.build_model(*envs.spaces(experiment.env)), gymnasium.make("CartPole-v1")
    assert model.portable_operations
    actor, (observation, _) = Actor(Policy(model, experiment, 0, 0, 0), env), env.reset(seed=1)
    actor.act(observation)
    first, nothing = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, model.state_size)
    with torch.inference_mode(), portable_operations():
        _, state = model(torch.from_numpy(observation)[None, None], first, nothing)
    assert torch.equal(actor._state, state)


@pytest.mark.slow
def test_an_actor_does_what_the_model_says(policy: Policy) -> None:
    seen, actions, rewards = played(policy, 40, greedy=True)
    expected = by_hand(policy, seen, actions, rewards)
    assert len(expected) == 40
    for ours, theirs in zip(actions, expected, strict=True):
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        for one, other in pairs:
            np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), atol=1e-6)


@pytest.mark.slow
def test_sampled_actions_follow_from_the_seed(policy: Policy) -> None:
    first, again, other = (repr(played(policy, 40, seed=seed)[1]) for seed in (1, 1, 2))
    assert first == again
    if policy.experiment.algorithm.name != "r2d2":  # which takes the best action, but for ε = 0.001
        assert first != other


@pytest.mark.slow
def test_another_environment_is_refused(policy: Policy) -> None:
    with pytest.raises(SettingsError, match=rf"act in Discrete\(3\).*env\.id={policy.experiment.env.id}"):
        Actor(policy, gymnasium.make("Acrobot-v1"))
    with pytest.raises(SettingsError, match=r"'Acrobot-v1' has no observation_space .* gymnasium\.make"):
        Actor(policy, "Acrobot-v1")  # type: ignore[arg-type]
    env = construct(policy.experiment.env)
    if isinstance(env.action_space, gymnasium.spaces.Box):
        env.action_space = gymnasium.spaces.Box(-0.4, 0.4, env.action_space.shape)
        with pytest.raises(SettingsError, match=r"act in Box.-0.4, 0.4"):
            Actor(policy, env)


def untrained(**changes: Any) -> Policy:
    """Of a model that sees what it did last, and what that has earned."""
    base = recipes.ppo_memory()
    model = dataclasses.replace(base.model, core_size=8, previous_action_reward=True)
    experiment = base.replace(model=model, env=dataclasses.replace(base.env, **changes), seed=4)
    built = model.build(*envs.spaces(experiment.env), precision="fp32", normalize_observations=False, seed=1)
    return Policy(built, experiment, 0, 0, 0)


@pytest.mark.parametrize(("clip", "expected"), [(True, 1.0), (False, 2.5)])
def test_an_actor_tells_the_model_what_it_did_last_and_where_episodes_start(
    monkeypatch: pytest.MonkeyPatch, clip: bool, expected: float
) -> None:
    told = list[Any]()

    class Recorded(Inference):
        def __call__(self, obs: Any, start: Tensor, *rest: Tensor) -> Any:  # type: ignore[override]
            told.append((bool(start), *(x.item() for x in rest[1:])))
            return super().__call__(obs, start, *rest)  # type: ignore[call-arg]

    monkeypatch.setattr("lockstep.evaluation.actor.inference_of", lambda kernels, model: Recorded(model))
    policy = untrained(reward_clip=clip)
    env = construct(policy.experiment.env)
    actor = Actor(policy, env)
    observation, _ = env.reset(seed=1)
    actions = [actor.act(observation), actor.act(observation, 2.5)]
    actor.reset()
    actor.act(observation, -0.5)
    assert told == [(True, 0, 0.0), (False, actions[0], expected), (True, actions[1], -0.5)]


def test_an_actor_samples_by_the_seed_of_the_experiment_unless_another_is_given() -> None:
    policy = untrained()
    default, same, other = (repr(played(policy, 12, **seed)[1]) for seed in ({}, {"seed": 4}, {"seed": 0}))
    assert default == same != other


def test_an_actor_takes_the_folder_of_a_run(tmp_path: Path) -> None:
    train(EXPERIMENTS["mujoco-normalized"](), options=options(tmp_path / "run"))
    environment = construct(load_policy(tmp_path / "run").experiment.env)
    observation, _ = environment.reset(seed=1)
    policies = (tmp_path / "run", str(tmp_path / "run"), load_policy(tmp_path / "run"))
    first, *others = [Actor(each, environment, seed=1).act(observation) for each in policies]
    assert all(np.array_equal(first, other) for other in others)
    environment.close()


@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        (recipes.ppo_cartpole, "CartPole-v1"),
        (recipes.dqn_cartpole, "CartPole-v1"),
        (recipes.sac_mujoco, "Pendulum-v1"),
        (recipes.td3_mujoco, "Pendulum-v1"),
        (recipes.mpc_pendulum, "Pendulum-v1"),
    ],
)
def test_what_tells_the_task_to_values_alone_is_not_needed_to_play(
    recipe: Callable[[], Experiment], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = "CartPole" if task == "CartPole-v1" else "Pendulum"
    (tmp_path / "tasks.py").write_text(
        f"from lockstep.envs.classic import {base}\nclass First({base}): ...\nclass Second({base}): ...\n"
    )
    changes = {"env.id": "mixed/tasks.py:First+tasks.py:Second", "env.options": {"task_input": "value"}}
    experiment = recipe().replace(**changes)
    built = experiment.model.build(*envs.spaces(experiment.env), precision="fp32", normalize_observations=False, seed=1)
    env = gymnasium.make(task)
    actor = Actor(Policy(built, experiment, 0, 0, 0), env, seed=1)
    assert env.action_space.contains(actor.act(env.reset(seed=1)[0]))
    env.close()
