"""Rollouts in one compiled call have the bits of rollouts that are collected step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sentences import says
from tiny import options

from lockstep import recipes, train
from lockstep.agent import Agent
from lockstep.collectors.collectors import Collector
from lockstep.collectors.compiled_actor import CompiledActor
from lockstep.collectors.compiled_rollout import CompiledRolloutActor
from lockstep.collectors.preemption import RecordedPreemption
from lockstep.collectors.torch_actor import TorchActor
from lockstep.config.settings import NotFinite
from lockstep.core.arrays import named_leaves
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.envs.compiled_shard import CompiledShard
from lockstep.experiment import Experiment
from lockstep.models.kernel_policy import kernel_distribution
from lockstep.models.normalize import NormalizeConfig
from lockstep.models.policies import Policies
from lockstep.transport.rollouts import buffers_of

LAPS = 3
SPACES = [
    spaces.Discrete(3, start=5),
    *(
        spaces.Box(np.array([[-1, 0], [0.5, -9]], kind), np.array([[1, 0.1], [9, 0]], kind), dtype=kind)
        for kind in (np.float32, np.float64)
    ),
]


def experiment(recipe: Callable[[], Experiment], steps: int, **env: Any) -> Experiment:
    """Six environments in two shards, which act together, with episodes of at most 20 steps."""
    base = recipe()
    options = {"max_episode_steps": 20, **env.pop("options", {})}
    return base.replace(
        env=dataclasses.replace(base.env, num_envs=6, adapter="compiled", options=options, **env),
        algorithm=dataclasses.replace(base.algorithm, rollout=steps, minibatches=1),
        model=dataclasses.replace(base.model, hidden_sizes=(8,)),
        scheme=dataclasses.replace(base.scheme, shards=2, acting_batch=6),
        precision="portable",
    )


def cartpole(**env: Any) -> Experiment:
    return experiment(recipes.ppo_cartpole, 32, decorrelate=10, **env)


def pendulum(**env: Any) -> Experiment:
    found = experiment(recipes.ppo_mujoco, 32, id="Pendulum-v1", reward_clip=True, **env)
    return found.replace(normalize=NormalizeConfig(observations=True, returns=True))


def spread(**env: Any) -> Experiment:
    """Matches of three agents, with a critic that sees all of them."""
    return experiment(recipes.mappo_mpe, 32, decorrelate=10, **env)


def role(agent: str) -> str:
    return "first" if agent == "agent_0" else "others"


def roles(**changes: Any) -> Experiment:
    """The same with a policy of one agent, and a policy of two."""
    return spread(policies=f"{__file__}:role", metrics=("score_first", "score_others")).replace(**changes)


def recurrent_roles() -> Experiment:
    """The same with a core, which also sees actions and rewards."""
    model = {"model.core": "gru", "model.core_size": 4, "model.previous_action_reward": True}
    return roles(**model, **{"env.central_state": "none", "model.critic_only": ()})


def collector(settings: Experiment, **how: Any) -> tuple[Agent, Collector]:
    agent = Agent(settings)
    (buffers,) = buffers_of(agent, range(2), settings.schedule(), PrivateArena(), ahead=False)
    return agent, Collector(agent, buffers, **how)


def kinds(collecting: Collector) -> set[type]:
    """Those of the actors."""
    return {type(actor) for actor in collecting._actors}


def play(settings: Experiment, **how: Any) -> tuple[Collector, list[dict[str, Any]]]:
    """What LAPS rollouts hold, and what is known of them, with weights and statistics that change in between."""
    agent, collecting = collector(settings, **how)
    collecting.reset()
    found: list[dict[str, Any]] = []
    for lap in range(LAPS):
        version = agent.version(lap)
        for each in collecting.collect(lap, lambda t, version=version: version):
            state = collecting.state(each.info.shard)
            leaves = {name: leaf.numpy().copy() for name, leaf in named_leaves(each.rollout)}
            leaves |= {f"state.{name}": tensor.numpy().copy() for name, tensor in state.items()}
            info = repr((each.info.episodes, each.info.digests))  # text, in which NaN is equal to NaN
            found.append({**leaves, "moments": each.info.moments, "info": info})
            agent.normalizers = agent.normalizers.merged(torch.from_numpy(each.info.moments))
        agent.flat.vector.data += 0.1 * torch.sin(torch.arange(agent.flat.vector.numel(), dtype=torch.float32))
    return collecting, found


@pytest.mark.parametrize(
    "settings", [cartpole, spread, roles, recurrent_roles, pytest.param(pendulum, marks=pytest.mark.slow)]
)
def test_every_array_is_the_same_as_step_by_step(
    settings: Callable[[], Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting, found = play(settings())
    assert kinds(collecting) == {CompiledRolloutActor}
    monkeypatch.setattr(CompiledShard, "kernel", lambda _: None)
    collecting, acting = play(settings())
    assert kinds(collecting) == {CompiledActor}
    monkeypatch.setattr(type(collecting._model), "kernels", lambda _: None)
    collecting, expected = play(settings())
    assert kinds(collecting) == {TorchActor}
    assert len(found) == len(acting) == len(expected) == 2 * LAPS
    for ours, theirs in zip((*found, *acting), (*expected, *expected), strict=True):
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            y = ours[name]
            same = x == y if name == "info" else (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
            assert same, name
    names = {"start", "action", "reward", "log_prob", "value", "terminated", "truncated", "valid"}
    entries = {spread: ["observation", "state"], roles: ["observation", "policy", "state"]}
    entries[recurrent_roles] = ["observation", "policy"]
    names |= {f"obs.{entry}" for entry in entries[settings]} if settings in entries else {"obs"}
    assert names < expected[0].keys()
    constant = {name for name in names if all((each[name] == each[name].flat[0]).all() for each in expected)}
    assert constant == (set() if settings is cartpole else {"terminated"}), "what never varies was hardly compared"
    assert all("Episode(" in each["info"] for each in expected), "episodes end in every rollout"


def test_a_run_with_several_policies_has_the_same_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = roles(total_steps=LAPS * 32 * 6)

    def ledger(name: str, layout: str) -> bytes:
        train(settings, layout, options=options(tmp_path / name))
        return (tmp_path / name / "ledger.jsonl").read_bytes()

    found = [ledger("inline", "inline"), ledger("processes", "processes:2")]
    monkeypatch.setattr(Policies, "kernels", lambda _: None)
    assert found == [ledger("torch", "inline")] * 2


@pytest.mark.parametrize("space", SPACES)
def test_environments_receive_the_same_actions(space: Any) -> None:
    distribution = kernel_distribution(space)
    kernels = distribution.kernels()
    assert kernels is not None
    numbers = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    numbers[0] = np.nan, np.inf, -np.inf, -0.0
    action = np.arange(8) % 3 if isinstance(space, spaces.Discrete) else numbers
    sent = np.zeros((8, *(space.shape or ())), space.dtype)
    kernels.send(action, kernels.limits, sent)
    expected = distribution.to_env(action)
    assert (sent.dtype, sent.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(sent, expected, equal_nan=True) and not np.array_equal(sent, action.reshape(sent.shape))


def test_numba_is_not_given_what_it_does_not_know() -> None:
    assert kernel_distribution(spaces.Box(-1, 1, (2,), np.float16)).kernels() is None


def test_what_runs_in_python_at_every_step_is_not_skipped() -> None:
    def chosen(settings: Experiment, **how: Any) -> type:
        collecting = collector(settings, **how)[1]
        collecting.reset()
        (found,) = kinds(collecting)
        return found

    base = cartpole()
    assert chosen(base) is CompiledRolloutActor
    assert chosen(cartpole(random_actions=True)) is CompiledActor
    assert chosen(base.replace(precision="fp32")) is TorchActor
    python = dataclasses.replace(base.env, adapter="gymnasium", options={}, decorrelate=0)
    assert chosen(base.replace(env=python)) is CompiledActor
    assert chosen(base, preemption=RecordedPreemption({})) is TorchActor
    free = dataclasses.replace(base.scheme, lag="async", refresh="step")
    assert chosen(base.replace(scheme=free)) is CompiledActor


def test_every_rollout_is_a_sign_of_life() -> None:
    signs: list[None] = []
    play(cartpole(), heartbeat=lambda: signs.append(None))
    assert len(signs) == (2 + 1) * LAPS, "each shard's call, and all of them"


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from lockstep.envs.classic import CartPole",
        "class Wrong(CartPole):",
        "    @staticmethod",
        "    def observe(state, out):",
        "        out[0], out[1], out[2], out[3] = state.x, state.x_speed, state.angle, state.angle_speed",
        "        if state.episode == 1 and state.steps == 3:",
        "            out[2] = 1.0 / (state.steps - 3)",
    ]
    (tmp_path / "wrong.py").write_text("\n".join(lines))
    messages = []
    for way in (CompiledShard.kernel, lambda _: None):
        monkeypatch.setattr(CompiledShard, "kernel", way)
        with pytest.raises(NotFinite) as raised:
            play(cartpole(id=f"{tmp_path}/wrong.py:Wrong"))
        messages.append(str(raised.value))
    assert says(messages[0], "observation inf at [2]", "step 3 of its episode")
    assert messages[0] == messages[1]
