"""Recipes for algorithms that learn continuous actions from replay, and for planning."""

from __future__ import annotations

from dataclasses import replace

from lockstep.algorithms import CrossQConfig, DDPGConfig, MPOConfig, SACConfig, TD3Config
from lockstep.algorithms.mpc import MPCConfig
from lockstep.algorithms.offpolicy import ReplayConfig
from lockstep.algorithms.qpg import QPGConfig
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import ActorCriticConfig
from lockstep.models.dynamics import DynamicsConfig
from lockstep.models.normalize import NormalizeConfig
from lockstep.scheme import Scheme


def _replayed_mujoco(model: ActorCriticConfig, algorithm: QPGConfig) -> Experiment:
    """Four environments, with as many gradient steps per collected step as in the papers."""
    return Experiment(
        env=EnvConfig(id="HalfCheetah-v4", num_envs=4),
        model=model,
        algorithm=algorithm,
        scheme=Scheme(shards=4, acting_batch=4),
        total_steps=1_000_000,
        precision="portable",
    )


def ddpg_mujoco() -> Experiment:
    """DDPG on MuJoCo (settings of OurDDPG.py in the code of TD3's authors, since April 2021)."""
    return _replayed_mujoco(ActorCriticConfig(policy="deterministic", critics=1), DDPGConfig(warmup=25_000))


def td3_mujoco() -> Experiment:
    """TD3 on MuJoCo (settings of the authors' code for Fujimoto et al. 2018, arXiv:1802.09477)."""
    return _replayed_mujoco(ActorCriticConfig(policy="deterministic"), TD3Config(warmup=25_000))


def sac_mujoco() -> Experiment:
    """SAC with a learned temperature on MuJoCo (Haarnoja et al. 2018, arXiv:1812.05905, table 1)."""
    return _replayed_mujoco(ActorCriticConfig(), SACConfig(warmup=10_000))


def _hidden(model: ActorCriticConfig, algorithm: QPGConfig) -> Experiment:
    """Pendulum without its velocity in observations."""
    return Experiment(
        env=EnvConfig(id="lockstep/Hidden-v0", num_envs=4),
        model=replace(model, core="gru", core_size=64, hidden_sizes=(128, 128), previous_action_reward=True),
        algorithm=replace(
            algorithm,
            updates=16,
            batch_size=32,
            unroll=16,
            burn_in=8,
            warmup=1_000,
            discount=0.9,
            target_rate=0.02,
            learning_rate=1e-3,
            actor_learning_rate=1e-3,
            replay=ReplayConfig(capacity=100_000),
        ),
        scheme=Scheme(shards=4, acting_batch=4),
        total_steps=20_000,
        precision="fp32",
    )


def sac_hidden() -> Experiment:
    """Recurrent SAC on Pendulum without its velocity (tuned here; the networks of Ni et al. 2022, arXiv:2110.05038).

    `--model.core none --model.no-previous-action-reward` has no memory.
    """
    return _hidden(ActorCriticConfig(), SACConfig(temperature_learning_rate=1e-3))


def td3_hidden() -> Experiment:
    """Recurrent TD3 on Pendulum without its velocity (tuned here; the networks of Ni et al. 2022, arXiv:2110.05038).

    `--model.core none --model.no-previous-action-reward` has no memory.
    """
    return _hidden(ActorCriticConfig(policy="deterministic"), TD3Config())


def crossq_mujoco() -> Experiment:
    """CrossQ on MuJoCo (Bhatt et al. 2024, arXiv:1902.05605, and its authors' code).

    Its critics are wide. `--model.critic-sizes 256 256` is several times as fast, and learns less well.
    """
    model = ActorCriticConfig(batch_renorm=True, critic_sizes=(2048, 2048))
    return _replayed_mujoco(model, CrossQConfig(warmup=5_000)).replace(precision="fp32")


def sac_pybullet_style() -> Experiment:
    """SAC with one environment, on MuJoCo (settings of the PyTorchRL paper for PyBullet, arXiv:2007.02622, table 2)."""
    return sac_mujoco().replace(
        env=EnvConfig(id="HalfCheetah-v4", num_envs=1),
        algorithm=SACConfig(
            rollout=128,
            updates=32,
            warmup=10_000,
            learning_rate=1e-3,
            actor_learning_rate=1e-4,
            temperature_learning_rate=1e-5,
            initial_temperature=0.2,
            discount=0.98,
            replay=ReplayConfig(capacity=1_500_000),
        ),
        scheme=Scheme(shards=1),
    )


def mpo_mujoco() -> Experiment:
    """MPO on MuJoCo (settings of Acme's example for Gym; Hoffman et al. 2020, arXiv:2006.00979)."""
    model = ActorCriticConfig(
        policy="gaussian",
        initial_std=0.5,
        critics=1,
        hidden_sizes=(256, 256, 256),
        layer_norm=True,
        activation="elu",
    )
    algorithm = MPOConfig(
        updates=16, warmup=1_000, n_step=4, learning_rate=3e-4, actor_learning_rate=3e-4, epsilon_mean=0.01
    )
    return _replayed_mujoco(model, algorithm)


def mpc_pendulum() -> Experiment:
    """Planning by CEM with an ensemble of learned dynamics, on Pendulum (tuned here; Chua et al. 2018).

    `--model.planner mppi` plans with MPPI.
    """
    return Experiment(
        env=EnvConfig(id="Pendulum-v1", num_envs=4),
        model=DynamicsConfig(members=4, hidden_sizes=(64, 64), horizon=20, population=100, elites=10, rounds=3),
        algorithm=MPCConfig(updates=150, warmup=400, replay=ReplayConfig(capacity=20_000)),
        scheme=Scheme(shards=4, acting_batch=4),
        normalize=NormalizeConfig(observations=True),
        total_steps=5_000,
        precision="fp32",
    )


def her_fetch(task: str = "FetchReach-v4") -> Experiment:
    """DDPG with hindsight on FetchReach (settings of OpenAI Baselines for Andrychowicz et al. 2017, arXiv:1707.01495).

    Needs the extra robotics. `--algorithm.replay.hindsight 0` trains with DDPG alone.
    """
    return Experiment(
        env=EnvConfig(id=f"gymnasium_robotics:{task}", num_envs=4),
        model=ActorCriticConfig(policy="deterministic", critics=1, hidden_sizes=(256, 256, 256)),
        algorithm=DDPGConfig(
            rollout=25,
            batch_size=256,
            updates=40,
            warmup=1_000,
            learning_rate=1e-3,
            actor_learning_rate=1e-3,
            discount=0.98,
            target_period=40,
            target_rate=0.05,
            noise_std=0.2,
            replay=ReplayConfig(capacity=100_000, hindsight=4),
        ),
        scheme=Scheme(shards=4, acting_batch=4),
        normalize=NormalizeConfig(observations=True),
        total_steps=20_000,
        precision="fp32",
    )
