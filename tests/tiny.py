"""Experiments of every kind, cut to seconds: what the tests of layouts, of resuming and of golden digests run."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import recipes
from lockstep.algorithms import A2CConfig, APPOConfig, IMPALAConfig, OnPolicyConfig, PPOConfig
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.buffers.batches import CollectedRollout
from lockstep.config.options import RunOptions
from lockstep.core.rollout import Rollout, RolloutInfo
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.models.normalize import NormalizeConfig, Normalizers
from lockstep.models.rnd import RNDConfig
from lockstep.scheme import Scheme

ITERATIONS = 3


def cut(
    recipe: Callable[[], Experiment],
    *,
    rollout: int = 8,
    epochs: int = 2,
    env: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    scheme: dict[str, Any] | None = None,
    precision: str = "fp32",
) -> Experiment:
    """A recipe with 8 environments in 4 shards, short rollouts and three iterations."""
    full = recipe()
    env = {"num_envs": 8, **(env or {})}  # ALE takes a tenth of a second to make each, so some have fewer
    algorithm = {"rollout": rollout, "epochs": epochs, "minibatches": 2, **(algorithm or {})}
    model = {"dense_size": 32, "core_size": 16, "hidden_sizes": (16,), **(model or {})}
    scheme = {"shards": 4, "acting_batch": 0, **(scheme or {})}
    return full.replace(
        env=dataclasses.replace(full.env, **env),
        algorithm=dataclasses.replace(full.algorithm, **algorithm),
        model=dataclasses.replace(full.model, **model),
        scheme=dataclasses.replace(full.scheme, **scheme),
        total_steps=ITERATIONS * rollout * env["num_envs"],
        precision=precision,
    )


def replaying(
    recipe: Callable[[], Experiment],
    *,
    replay: dict[str, Any],
    scheme: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    **changes: Any,
) -> Experiment:
    """A recipe that learns from replay, with 4 environments in 4 shards and three iterations of 8 steps, of which the
    first only collects and the last overwrites what it did."""
    full = recipe()
    assert isinstance(full.algorithm, OffPolicyConfig)
    memory = dataclasses.replace(full.algorithm.replay, **{"capacity": 4 * 20, **replay})
    learning = dataclasses.replace(
        full.algorithm,
        rollout=8,
        batch_size=8,
        updates=3,
        warmup=32,
        n_step=3,
        target_period=2,
        replay=memory,
        **(algorithm or {}),
    )
    small = {"dense_size": 32, "core_size": 16, "hidden_sizes": (16,), **changes}
    return full.replace(
        env=dataclasses.replace(full.env, num_envs=4, reseed_every=24),
        algorithm=learning,
        model=dataclasses.replace(full.model, **small),
        scheme=dataclasses.replace(full.scheme, **{"shards": 4, "acting_batch": 0, **(scheme or {})}),
        total_steps=ITERATIONS * 8 * 4,
        precision="fp32",
    )


def compiled(experiment: Experiment) -> Experiment:
    """The same in portable arithmetic, with compiled environments."""
    return experiment.replace(precision="portable", env=dataclasses.replace(experiment.env, adapter="compiled"))


def rnd(experiment: Experiment) -> Experiment:
    """The same with random network distillation."""
    assert isinstance(experiment.algorithm, OnPolicyConfig)
    algorithm = dataclasses.replace(experiment.algorithm, rnd=RNDConfig(coef=0.5, features=8))
    return experiment.replace(algorithm=algorithm)


def single_steps(experiment: Experiment) -> Experiment:
    """The same with returns of one step."""
    assert isinstance(experiment.algorithm, OffPolicyConfig)
    return experiment.replace(algorithm=dataclasses.replace(experiment.algorithm, n_step=1))


def planning() -> Experiment:
    """Short plans with a small model, in three iterations of which the first only collects."""
    full = recipes.mpc_pendulum()
    assert isinstance(full.algorithm, OffPolicyConfig)
    memory = dataclasses.replace(full.algorithm.replay, capacity=4 * 20)
    algorithm = dataclasses.replace(full.algorithm, rollout=8, batch_size=8, updates=3, warmup=32, replay=memory)
    small = {"members": 2, "hidden_sizes": (16,), "horizon": 3, "population": 8, "elites": 2, "rounds": 2}
    return full.replace(
        env=dataclasses.replace(full.env, reseed_every=24),
        algorithm=algorithm,
        model=dataclasses.replace(full.model, **small),
        scheme=dataclasses.replace(full.scheme, lag=1, acting_batch=2),
        total_steps=ITERATIONS * 8 * 4,
    )


def tuple_bandit() -> Experiment:
    """Image and vector to see, an arm and a point to choose, arms that are forbidden."""
    return Experiment(
        env=EnvConfig(id="lockstep/TupleBandit-v0", options={"mask": True}),
        model=StandardModelConfig(),
        algorithm=PPOConfig(),
        scheme=Scheme(),
    )


def discrete_sac() -> Experiment:
    """SAC with a list of actions."""
    full = recipes.sac_mujoco()
    return full.replace(env=dataclasses.replace(full.env, id="CartPole-v1"))


def talking() -> Experiment:
    """Three agents with two policies, whose spaces differ, and critics that see all of them."""
    full = recipes.mappo_mpe()
    env = dataclasses.replace(full.env, id="pettingzoo/talk:Talk", policies="talk:roles")
    return full.replace(env=env, precision="fp32")


EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    "ppo": lambda: cut(recipes.ppo_atari),
    "ppo-lag-1": lambda: cut(recipes.ppo_atari, env={"num_envs": 4}, scheme={"lag": 1}),
    "ppo-bf16": lambda: cut(recipes.ppo_atari, env={"num_envs": 4}, precision="bf16"),
    "ppo-lstm": lambda: cut(recipes.ppo_atari, model={"core": "lstm", "previous_action_reward": True}),
    "ppo-acting-batch-of-two-shards": lambda: cut(recipes.ppo_atari, env={"num_envs": 4}, scheme={"acting_batch": 2}),
    "a2c": lambda: cut(recipes.a2c_atari, epochs=1, env={"num_envs": 4}).replace(
        # As when its digests were recorded.
        **{"algorithm.value_coef": 0.5, "algorithm.optimizer.name": "rmsprop", "algorithm.optimizer.eps": 1e-5}
    ),
    "impala-bf16": lambda: cut(recipes.impala_atari, epochs=1, precision="bf16"),
    "impala-lstm-lag-2": lambda: cut(recipes.impala_atari, epochs=1, model={"core": "lstm"}, scheme={"lag": 2}),
    "appo": lambda: cut(recipes.appo_atari).replace(**{"algorithm.value_coef": 0.5}),  # likewise
    "mujoco-normalized": lambda: cut(recipes.ppo_mujoco, rollout=16),
    "tuple-dict-mask": lambda: cut(tuple_bandit),
    "memory-gru-lag-2": lambda: cut(recipes.ppo_memory, rollout=16, model={"core": "gru"}, scheme={"lag": 2}),
    "cartpole-lag-1": lambda: cut(recipes.ppo_cartpole, env={"adapter": "gymnasium"}, scheme={"lag": 1}),
    "cartpole-8-shards": lambda: cut(
        recipes.ppo_cartpole, rollout=32, env={"num_envs": 16, "adapter": "gymnasium"}, scheme={"shards": 8}
    ),
    "cartpole-gradient-lag-3": lambda: cut(
        recipes.ppo_cartpole, env={"adapter": "gymnasium"}, scheme={"lag": 1, "gradient_lag": 3}
    ),
    "dqn-prioritized-frames": lambda: replaying(recipes.dqn_atari, replay={"prioritized": True}),
    "hindsight": lambda: single_steps(replaying(recipes.her_bitflip, replay={"recency": 0.996, "recency_least": 24})),
    "rainbow-lag-1": lambda: replaying(
        recipes.dqn_cartpole,
        replay={"prioritized": True},
        scheme={"lag": 1},
        **{"dueling": True, "noisy": True, "returns": "categorical", "numbers": 11, "stream_size": 8},
    ),
    "iqn": lambda: replaying(
        recipes.dqn_cartpole, replay={}, algorithm={"samples": 3, "target_samples": 5}, returns="implicit", numbers=4
    ),
    "r2d2-prioritized-frames": lambda: replaying(
        recipes.r2d2_atari, replay={"capacity": 4 * 24}, algorithm={"burn_in": 2, "unroll": 4}, stream_size=8
    ),
    "r2d2-uniform-lag-1": lambda: replaying(
        recipes.r2d2_memory,
        replay={"capacity": 4 * 24, "prioritized": False},
        scheme={"lag": 1},
        algorithm={"burn_in": 0, "unroll": 6},
        core="gru",
    ),
    "apex-lag-1": lambda: replaying(recipes.apex_atari, replay={}, scheme={"lag": 1}, stream_size=8),
    "ppo-rnd": lambda: rnd(cut(recipes.ppo_cartpole, rollout=16, env={"adapter": "gymnasium"})),
    "impala-rnd-lag-1": lambda: rnd(cut(recipes.impala_atari, epochs=1, scheme={"lag": 1})),
    "sac-prioritized-lag-1": lambda: replaying(
        recipes.sac_mujoco, replay={"prioritized": True}, scheme={"lag": 1, "acting_batch": 2}
    ),
    "sac-discrete": lambda: replaying(discrete_sac, replay={}),
    "td3": lambda: replaying(recipes.td3_mujoco, replay={}),
    "td3-gradient-lag-2": lambda: replaying(recipes.td3_mujoco, replay={}, scheme={"gradient_lag": 2}),
    "ddpg-drifting-noise": lambda: replaying(recipes.ddpg_mujoco, replay={}, algorithm={"noise_theta": 0.15}),
    "mpo": lambda: replaying(recipes.mpo_mujoco, replay={}),
    "mpc-lag-1": planning,
    "policies-lag-1": lambda: cut(talking, env={"num_envs": 12}, scheme={"lag": 1}),
}
"""By what is special about them."""
if importlib.util.find_spec("envpool"):  # which has no release for Python 3.10
    EXPERIMENTS["vizdoom"] = lambda: cut(recipes.appo_vizdoom).replace(
        **{"algorithm.value_coef": 0.5, "algorithm.value_clip": 0.0}  # as when its digests were recorded
    )
if importlib.util.find_spec("minatar"):
    EXPERIMENTS["minatar"] = lambda: replaying(recipes.dqn_minatar, replay={})
    EXPERIMENTS["minatar-ppo"] = lambda: cut(recipes.ppo_minatar, algorithm={"learning_rate": 1e-3})
EXPERIMENTS["portable-mujoco"] = lambda: cut(recipes.ppo_mujoco, rollout=16, precision="portable")
EXPERIMENTS["portable-pendulum"] = lambda: cut(
    recipes.ppo_mujoco,
    rollout=16,
    env={"id": "Pendulum-v1", "adapter": "compiled"},
    model={"std": "state", "activation": "elu"},
    precision="portable",
)
EXPERIMENTS["portable-cartpole-lags"] = lambda: cut(
    recipes.ppo_cartpole,
    env={"adapter": "compiled"},
    model={"separate_value_network": False, "activation": "relu"},
    scheme={"lag": 1, "gradient_lag": 2},
    precision="portable",
)
EXPERIMENTS["portable-spread-lag-1"] = lambda: cut(
    recipes.mappo_mpe, rollout=30, env={"num_envs": 12}, scheme={"lag": 1}, precision="portable"
)
EXPERIMENTS["portable-minatar-ppo"] = lambda: compiled(cut(recipes.ppo_minatar, algorithm={"learning_rate": 1e-3}))
EXPERIMENTS["portable-minatar-dqn"] = lambda: compiled(replaying(recipes.dqn_minatar, replay={}))
if importlib.util.find_spec("gymnasium_robotics"):
    EXPERIMENTS["fetch"] = lambda: single_steps(replaying(recipes.her_fetch, replay={}))


def seeing_more() -> Experiment:
    """SAC whose critics alone see which bits are to be flipped."""
    full = recipes.sac_mujoco()
    return full.replace(env=recipes.her_bitflip().env)


EXPERIMENTS["critic-only-lstm"] = lambda: cut(
    tuple_bandit, model={"core": "lstm", "critic_only": ("vector",)}, scheme={"lag": 1}
).replace(normalize=NormalizeConfig(observations=True))
EXPERIMENTS["critic-only-sac"] = lambda: replaying(seeing_more, replay={}, critic_only=("desired_goal",))
EXPERIMENTS["transformer-lag-1"] = lambda: cut(
    recipes.ppo_memory, model={"core": "transformer", "core_memory": 3, "core_layers": 2}, scheme={"lag": 1}
)
EXPERIMENTS["mingru"] = lambda: cut(recipes.ppo_memory, model={"core": "mingru"})


def following_kl() -> Experiment:
    """A learning rate that follows the divergence, weights that decay, and an annealed clip range."""
    full = cut(recipes.ppo_cartpole, env={"adapter": "gymnasium"}, scheme={"lag": 1})
    changes = {"desired_kl": 1e-4, "anneal": {"clip": "0:0.3,128:0.1"}, "optimizer.name": "adamw"}
    return full.replace(**{f"algorithm.{name}": value for name, value in changes.items()})


EXPERIMENTS["cartpole-desired-kl"] = following_kl


def longer(metrics: dict[str, float], options: dict[str, Any]) -> dict[str, Any]:
    """A curriculum that changes with every iteration and with what was learned in it."""
    return {"length": 2 + (int(1e4 * metrics["policy/entropy"]) + int(metrics["iteration"])) % 4}


def with_curriculum() -> Experiment:
    full = cut(recipes.ppo_memory, rollout=16, scheme={"lag": 1})
    return full.replace(curriculum="tiny:longer", **{"env.curriculum": {"length": 3}})


EXPERIMENTS["curriculum-lag-1"] = with_curriculum


EXPERIMENTS["crossq"] = lambda: replaying(
    recipes.crossq_mujoco, replay={}, critic_sizes=(24, 24), algorithm={"renorm_warmup": 4}
).replace(**{"algorithm.target_period": 1})


def squashed() -> Experiment:
    """PPO with actions that tanh squashes, whose entropy has no kernel."""
    return cut(recipes.ppo_mujoco, rollout=16, env={"id": "Pendulum-v1"}, model={"squash": True})


def portable(name: str) -> Experiment:
    """An experiment in portable arithmetic. Environments whose libraries compute otherwise on other CPUs are
    replaced by compiled ones."""
    experiment = squashed() if name == "squashed" else EXPERIMENTS[name]()
    env = experiment.env
    compiled = {"CartPole-v1": "CartPole-v1", "Pendulum-v1": "Pendulum-v1", "HalfCheetah-v4": "Pendulum-v1"}
    compiled["lockstep/Hidden-v0"] = "Pendulum-v1"
    if env.id in compiled:
        env = dataclasses.replace(env, id=compiled[env.id], adapter="compiled")
    return experiment.replace(precision="portable", env=env)


def options(run: Path, checkpoint_every: int = 1000) -> RunOptions:
    """Nothing shown or checked; checkpoints at the end alone, unless asked for."""
    return RunOptions(
        run=str(run), checkpoint_every=checkpoint_every, display="none", tensorboard=False, check_env=False
    )


def collected(rollout: Rollout, normalizers: Normalizers, shard: int = 0) -> CollectedRollout:
    """A rollout as collectors hand it over, of which nothing else is known."""
    info = RolloutInfo(shard, 0, 0, ((0, 0),), np.zeros(0), {}, [])
    return CollectedRollout(info, rollout, normalizers)


EXPERIMENTS["der"] = lambda: replaying(recipes.der_atari100k, replay={}, stream_size=8)
EXPERIMENTS["drq"] = lambda: replaying(
    recipes.drq_atari100k, replay={}, algorithm={"copies": 2, "target_copies": 2}, scheme={"lag": 1}
)
EXPERIMENTS["spr-lag-1"] = lambda: replaying(
    recipes.spr_atari100k,
    replay={},
    algorithm={"predicted_steps": 2},
    scheme={"lag": 1},
    encoder="der",
    dense_size=-1,
    stream_size=8,
)


def in_torch() -> Experiment:
    """Pictures, bounded actions and cut episodes of an environment in torch, whose rollouts stay on a GPU."""
    env = {"id": "wind:Wind", "adapter": "auto", "reward_clip": True, "decorrelate": 5, "reseed_every": 6}
    model = {"encoder": "minatar", "separate_value_network": False, "core": "gru", "previous_action_reward": True}
    return cut(recipes.ppo_cartpole, env=env, model=model, scheme={"acting_batch": 4, "lag": 1})


EXPERIMENTS["torch-env-gru-lag-1"] = in_torch
EXPERIMENTS["pqn"] = lambda: cut(recipes.pqn_minatar)
EXPERIMENTS["pqn-gru-lag-1"] = lambda: cut(
    recipes.pqn_cartpole,
    rollout=16,
    env={"adapter": "gymnasium"},
    model={"core": "gru", "previous_action_reward": True, "dueling": True},
    scheme={"lag": 1},
)

EXPERIMENTS["sac-gru-lag-1"] = lambda: replaying(
    recipes.sac_hidden, replay={"capacity": 4 * 24}, algorithm={"burn_in": 2, "unroll": 4}, scheme={"lag": 1}
)
EXPERIMENTS["td3-lstm-prioritized"] = lambda: replaying(
    recipes.td3_hidden,
    replay={"capacity": 4 * 24, "prioritized": True},
    algorithm={"burn_in": 2, "unroll": 4},
    core="lstm",
)

EXPERIMENTS["portable-cartpole-a2c"] = lambda: compiled(
    cut(recipes.ppo_cartpole, scheme={"acting_batch": 4}).replace(
        algorithm=A2CConfig(rollout=8, normalize_advantages=True)
    )
)
EXPERIMENTS["portable-minatar-impala-lag-1"] = lambda: compiled(
    cut(recipes.ppo_minatar, scheme={"lag": 1}).replace(algorithm=IMPALAConfig(rollout=8, minibatches=2, rho_clip=1.2))
)
EXPERIMENTS["portable-pendulum-appo-lag-2"] = lambda: compiled(
    cut(recipes.ppo_mujoco, env={"id": "Pendulum-v1"}, model={"std": "state"}, scheme={"lag": 2}).replace(
        algorithm=APPOConfig(rollout=8, epochs=2, minibatches=2, value_clip=0.1, learning_rate=1e-2)
    )
)

ALIKE = {
    **dict.fromkeys(("ppo", "ppo-lag-1", "ppo-acting-batch-of-two-shards"), "ppo-bf16"),
    **dict.fromkeys(("ppo-lstm", "impala-bf16"), "impala-lstm-lag-2"),
    "impala-rnd-lag-1": "ppo-rnd",
    "der": "rainbow-lag-1",
    "vizdoom": "appo",
}
"""Experiments whose environments take long to make, and whose model, loss and memory are parts of the one named here,
or of it and CartPole's, which have every kind of lag. Where only these parts matter, `make test` runs the others."""


def with_popart() -> Experiment:
    """A value for each of two games with equal spaces, whose returns are of different sizes."""
    games = "mixed/MinAtar/Breakout-v0@compiled+MinAtar/Asterix-v0@compiled*3"
    env = {"id": games, "num_envs": 16, "options": {"task_input": "value"}}
    full = cut(recipes.ppo_minatar, env=env, algorithm={"learning_rate": 1e-3})
    return full.replace(**{"model.popart.rate": 0.1, "scheme.lag": 1})


EXPERIMENTS["popart-lag-1"] = with_popart
EXPERIMENTS["popart-impala-one-task"] = lambda: cut(
    recipes.ppo_cartpole, rollout=16, env={"adapter": "gymnasium"}, model={"core": "gru"}
).replace(algorithm=IMPALAConfig(rollout=16, minibatches=2), **{"model.popart.rate": 0.1})
