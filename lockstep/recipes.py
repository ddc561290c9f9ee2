"""Recipes: functions that return an Experiment, each with the source of its settings.

Every field can be overridden, from Python with `experiment.replace` and on the command line with flags. The first
line of a recipe's docstring is what `lockstep recipes` shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lockstep.algorithms import (
    A2CConfig,
    APPOConfig,
    DDPGConfig,
    DQNConfig,
    IMPALAConfig,
    MPOConfig,
    PPOConfig,
    R2D2Config,
    SACConfig,
    TD3Config,
)
from lockstep.algorithms.base import OptimizerConfig
from lockstep.algorithms.mpc import MPCConfig
from lockstep.algorithms.offpolicy import ReplayConfig
from lockstep.algorithms.qpg import QPGConfig
from lockstep.envs.base import EnvConfig
from lockstep.experiment import Experiment, NormalizeConfig
from lockstep.models import ActorCriticConfig, QModelConfig, StandardModelConfig
from lockstep.models.dynamics import DynamicsConfig
from lockstep.models.rnd import RNDConfig
from lockstep.scheme import Scheme


def ppo_cartpole() -> Experiment:
    """PPO on CartPole: solved within 60k steps, a minute on one core (tuned here on five seeds)."""
    return Experiment(
        env=EnvConfig(id="CartPole-v1", num_envs=8),
        model=StandardModelConfig(encoder="mlp", separate_value_network=True),
        algorithm=PPOConfig(
            rollout=64,
            epochs=10,
            minibatches=4,
            learning_rate=1e-3,
            clip=0.2,
            discount=0.98,
            gae_lambda=0.9,
            entropy_coef=0.0,
        ),
        scheme=Scheme(shards=4, acting_batch=8),
        total_steps=100_000,
        precision="fp32",
    )


def ppo_atari(game: str = "Breakout") -> Experiment:
    """PPO on Atari, Machado protocol, Nature CNN (settings of the Cleanba paper, arXiv:2310.00036).

    The paper's arms use the IMPALA ResNet: `--model.encoder impala`. The Nature CNN is
    the default because a CPU trains it about five times faster.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=128, protocol="machado"),
        model=StandardModelConfig(encoder="nature"),
        algorithm=PPOConfig(rollout=128, epochs=4, minibatches=4, learning_rate=2.5e-4, clip=0.1),
        scheme=Scheme(shards=8, acting_batch=32),
    )


def a2c_atari(game: str = "Breakout") -> Experiment:
    """A2C on Atari, Machado protocol, Nature CNN (settings of OpenAI Baselines; Mnih et al. 2016, arXiv:1602.01783)."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=16, protocol="machado"),
        model=StandardModelConfig(encoder="nature"),
        algorithm=A2CConfig(),
        scheme=Scheme(shards=4, acting_batch=8),
    )


def impala_atari(game: str = "Breakout") -> Experiment:
    """IMPALA on Atari, Machado protocol, Nature CNN, one version behind (settings of the Cleanba paper).

    The paper's arms use the IMPALA ResNet: `--model.encoder impala`.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=128, protocol="machado"),
        model=StandardModelConfig(encoder="nature"),
        algorithm=IMPALAConfig(),
        scheme=Scheme(shards=4, lag=1),
    )


def appo_atari(game: str = "Breakout") -> Experiment:
    """APPO on Atari, Machado protocol, CNN and LSTM, one version behind (Petrenko et al. 2020, arXiv:2006.11751).

    The network is the paper's simplified one, the hyperparameters are those of its Table A.5.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=128, protocol="machado"),
        model=StandardModelConfig(encoder="convnet_simple", core="lstm", core_size=512),
        algorithm=_appo(minibatches=2),
        scheme=Scheme(shards=4, lag=1),
    )


def appo_vizdoom(scenario: str = "Battle") -> Experiment:
    """APPO on Doom from pixels and measurements, CNN and GRU, one version behind (Petrenko et al. 2020).

    The network is the paper's full one, the hyperparameters are those of its Table A.5; rewards are scaled by the
    deviation of returns, as Sample Factory 2 does for Doom. Other scenarios: `--env.id vizdoom/Basic`, ….
    """
    return Experiment(
        # A new seed needs new engines, which take as long to start as some hundred steps.
        env=EnvConfig(id=f"vizdoom/{scenario}", num_envs=64, reseed_every=8192),
        model=StandardModelConfig(
            encoder="convnet_simple", hidden_sizes=(128, 128), activation="elu", core="gru", core_size=512
        ),
        algorithm=_appo(minibatches=1),
        scheme=Scheme(shards=4, lag=1, acting_batch=32),
        normalize=NormalizeConfig(observations=True, returns=True),
        total_steps=125_000_000,
    )


def _appo(minibatches: int) -> APPOConfig:
    """Table A.5 of Petrenko et al. 2020; minibatches are to hold 2,048 samples."""
    return APPOConfig(
        rollout=32,
        epochs=1,
        minibatches=minibatches,
        learning_rate=1e-4,
        anneal_learning_rate=False,
        optimizer=OptimizerConfig(eps=1e-6),
        max_grad_norm=4.0,
        discount=0.99,
        clip=0.1,
        entropy_coef=0.003,
        value_coef=0.5,
    )


def ppo_mujoco(task: str = "HalfCheetah-v4") -> Experiment:
    """PPO on MuJoCo, observations and returns normalized (CleanRL's continuous-action settings)."""
    return Experiment(
        env=EnvConfig(id=task, num_envs=8),
        model=StandardModelConfig(encoder="mlp", separate_value_network=True),
        algorithm=PPOConfig(
            rollout=256,
            epochs=10,
            minibatches=16,
            learning_rate=3e-4,
            clip=0.2,
            value_clip=0.2,
            entropy_coef=0.0,
        ),
        scheme=Scheme(shards=4, acting_batch=8),
        normalize=NormalizeConfig(observations=True, returns=True),
        total_steps=1_000_000,
        precision="fp32",
    )


def ppo_procgen(game: str = "StarpilotEasy-v0") -> Experiment:
    """PPO on Procgen, easy levels, IMPALA ResNet (Cobbe et al. 2020, arXiv:1912.01588; CleanRL's settings)."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=64),
        model=StandardModelConfig(encoder="impala"),
        algorithm=PPOConfig(
            rollout=256,
            epochs=3,
            minibatches=8,
            learning_rate=5e-4,
            anneal_learning_rate=False,
            discount=0.999,
            clip=0.2,
            value_clip=0.2,
        ),
        scheme=Scheme(shards=4),
        normalize=NormalizeConfig(returns=True),
        total_steps=25_000_000,
    )


def ppo_memory() -> Experiment:
    """PPO with an LSTM on a task that no memoryless policy can solve (tuned here); --model.core none shows it.

    Only the last action of an episode matters, so advantages look ahead less far than usual.
    """
    return Experiment(
        env=EnvConfig(id="lockstep/Memory-v0", num_envs=128),
        model=StandardModelConfig(encoder="mlp", core="lstm", core_size=64),
        algorithm=PPOConfig(
            rollout=32,
            epochs=4,
            minibatches=4,
            learning_rate=3e-3,
            clip=0.2,
            discount=0.9,
            gae_lambda=0.5,
        ),
        scheme=Scheme(shards=4),
        total_steps=300_000,
        precision="fp32",
    )


def ppo_rnd_minigrid(task: str = "Empty-16x16-v0") -> Experiment:
    """PPO with random network distillation on a MiniGrid task of one late reward (tuned here; Burda et al. 2018).

    Episodes end after 100 steps, of which the goal takes at least 27, so that chance alone hardly ever finds it.
    `--algorithm.rnd.coef 0` is PPO alone.
    """
    return Experiment(
        env=EnvConfig(id=f"MiniGrid-{task}", num_envs=32, options={"max_episode_steps": 100}),
        model=StandardModelConfig(encoder="symbols"),
        algorithm=PPOConfig(
            rollout=128,
            epochs=4,
            minibatches=4,
            learning_rate=5e-4,
            anneal_learning_rate=False,
            clip=0.2,
            entropy_coef=0.001,
            rnd=RNDConfig(coef=0.5, features=64),
        ),
        scheme=Scheme(shards=4),
        normalize=NormalizeConfig(observations=True),
        total_steps=160_000,
        precision="fp32",
    )


def dqn_cartpole() -> Experiment:
    """DQN on CartPole, double, with 3-step returns (tuned here)."""
    return Experiment(
        env=EnvConfig(id="CartPole-v1", num_envs=8),
        model=QModelConfig(encoder="mlp", hidden_sizes=(128, 128), activation="relu"),
        algorithm=DQNConfig(
            rollout=16,
            batch_size=128,
            updates=16,
            warmup=2_000,
            n_step=3,
            learning_rate=1e-3,
            double=True,
            discount=0.98,
            target_period=64,
            epsilon_end=0.04,
            epsilon_fraction=0.2,
            replay=ReplayConfig(capacity=50_000),
        ),
        scheme=Scheme(shards=4, acting_batch=8),
        total_steps=100_000,
        precision="fp32",
    )


def her_bitflip() -> Experiment:
    """DQN with hindsight on 13 bits to flip, which DQN alone cannot learn (Andrychowicz et al. 2017; chosen here).

    `--algorithm.replay.hindsight 0` is DQN alone, `--env.options bits=8` another length.
    """
    return Experiment(
        env=EnvConfig(id="lockstep/BitFlip-v0", num_envs=16, options={"bits": 13}),
        model=QModelConfig(encoder="mlp", hidden_sizes=(256, 256), activation="relu"),
        algorithm=DQNConfig(
            rollout=16,
            batch_size=128,
            updates=16,
            warmup=2_000,
            learning_rate=1e-3,
            double=True,
            discount=0.98,
            target_period=100,
            epsilon_end=0.1,
            replay=ReplayConfig(capacity=200_000, hindsight=4),
        ),
        scheme=Scheme(shards=4, acting_batch=16),
        total_steps=200_000,
        precision="fp32",
    )


def dqn_atari(game: str = "Breakout") -> Experiment:
    """DQN on Atari, classic protocol, Nature CNN (CleanRL's settings: Mnih et al. 2015 with Adam)."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=8, protocol="classic"),
        model=QModelConfig(encoder="nature"),
        algorithm=DQNConfig(
            rollout=16,
            batch_size=32,
            updates=32,
            warmup=80_000,
            target_period=250,
            replay=ReplayConfig(capacity=1_000_000),
        ),
        scheme=Scheme(shards=4, acting_batch=8),
    )


def c51_atari(game: str = "Breakout") -> Experiment:
    """C51 on Atari, classic protocol, Nature CNN (DQN Zoo's settings: Bellemare et al. 2017, arXiv:1707.06887)."""
    return _distributional(game, QModelConfig(encoder="nature", returns="categorical", numbers=51), 2.5e-4)


def qrdqn_atari(game: str = "Breakout") -> Experiment:
    """QR-DQN on Atari, classic protocol, Nature CNN (DQN Zoo's settings: Dabney et al. 2018, arXiv:1710.10044)."""
    return _distributional(game, QModelConfig(encoder="nature", returns="quantiles", numbers=201), 5e-5)


def iqn_atari(game: str = "Breakout") -> Experiment:
    """IQN on Atari, classic protocol, Nature CNN (DQN Zoo's settings: Dabney et al. 2018, arXiv:1806.06923)."""
    model = QModelConfig(encoder="nature", stream_size=512, returns="implicit", numbers=64)
    full = _distributional(game, model, 5e-5)
    return full.replace(algorithm=dataclasses.replace(full.algorithm, warmup=20_000, max_grad_norm=1e9))


def _distributional(game: str, model: QModelConfig, learning_rate: float) -> Experiment:
    """What DQN Zoo (https://github.com/google-deepmind/dqn_zoo) has in common for agents with distributions of returns:
    an update of 32 for every 4 steps, and 1M steps over which ε falls."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=8, protocol="classic"),
        model=model,
        algorithm=DQNConfig(
            rollout=16,
            batch_size=32,
            updates=32,
            warmup=50_000,
            learning_rate=learning_rate,
            optimizer=OptimizerConfig(eps=0.01 / 32),
            target_period=2_500,
            replay=ReplayConfig(capacity=1_000_000),
        ),
        scheme=Scheme(shards=4, acting_batch=8),
    )


def rainbow_atari(game: str = "Breakout") -> Experiment:
    """Rainbow on Atari, classic protocol, Nature CNN (settings of Hessel et al. 2018, arXiv:1710.02298)."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=8, protocol="classic"),
        model=QModelConfig(encoder="nature", dueling=True, noisy=True, stream_size=512, returns="categorical"),
        algorithm=DQNConfig(
            rollout=16,
            batch_size=32,
            updates=32,
            warmup=20_000,
            n_step=3,
            learning_rate=6.25e-5,
            optimizer=OptimizerConfig(eps=1.5e-4),
            double=True,
            target_period=2_000,
            epsilon_start=0.0,
            epsilon_end=0.0,
            replay=ReplayConfig(capacity=1_000_000, prioritized=True, alpha=0.5, beta=0.4),
        ),
        scheme=Scheme(shards=4, acting_batch=8),
    )


def r2d2_atari(game: str = "Breakout") -> Experiment:
    """R2D2 on Atari, raw rewards, CNN and LSTM (single-machine settings of rlpyt's R2D1, arXiv:1909.01500).

    Exploration, and priorities that no error bounds, are those of Kapturowski et al. 2019.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=32),
        model=QModelConfig(
            encoder="nature", core="lstm", core_size=512, previous_action_reward=True, dueling=True, stream_size=512
        ),
        algorithm=R2D2Config(
            optimizer=OptimizerConfig(eps=1e-3),
            replay=ReplayConfig(capacity=1_000_000, prioritized=True, alpha=0.9, beta=0.6, beta_end=0.6),
        ),
        scheme=Scheme(shards=4, acting_batch=32),
    )


def r2d2_memory() -> Experiment:
    """R2D2 on a task that no memoryless policy can solve (tuned here); --model.core none shows it.

    Gradients are small, since few steps have a reward: so is Adam's eps.
    """
    return Experiment(
        env=EnvConfig(id="lockstep/Memory-v0", num_envs=32),
        model=QModelConfig(encoder="mlp", core="lstm", core_size=64),
        algorithm=R2D2Config(
            rollout=16,
            batch_size=128,
            updates=8,
            warmup=2_000,
            burn_in=4,
            unroll=16,
            n_step=1,
            learning_rate=3e-3,
            optimizer=OptimizerConfig(eps=1e-8),
            discount=0.9,
            target_period=50,
            replay=ReplayConfig(capacity=100_000, prioritized=True, alpha=0.6),
        ),
        scheme=Scheme(shards=4, acting_batch=32),
        total_steps=60_000,
        precision="fp32",
    )


def _replayed_mujoco(model: ActorCriticConfig, algorithm: QPGConfig) -> Experiment:
    """Four environments, and a gradient step for every step of one, as with one environment in the papers."""
    return Experiment(
        env=EnvConfig(id="HalfCheetah-v4", num_envs=4),
        model=model,
        algorithm=algorithm,
        scheme=Scheme(shards=4, acting_batch=4),
        total_steps=1_000_000,
        precision="fp32",
    )


def ddpg_mujoco() -> Experiment:
    """DDPG on MuJoCo, with the settings of TD3's paper (its "our DDPG": TD3 without its three additions)."""
    return _replayed_mujoco(ActorCriticConfig(policy="deterministic", critics=1), DDPGConfig(warmup=25_000))


def td3_mujoco() -> Experiment:
    """TD3 on MuJoCo (settings of the authors' code for Fujimoto et al. 2018, arXiv:1802.09477)."""
    return _replayed_mujoco(ActorCriticConfig(policy="deterministic"), TD3Config(warmup=25_000))


def sac_mujoco() -> Experiment:
    """SAC on MuJoCo, its temperature learned (Haarnoja et al. 2018, arXiv:1812.05905, table 1)."""
    return _replayed_mujoco(ActorCriticConfig(), SACConfig(warmup=10_000))


def sac_pybullet_style() -> Experiment:
    """SAC with one environment in one shard, on MuJoCo (settings of PyTorchRL's example for PyBullet)."""
    return sac_mujoco().replace(
        env=EnvConfig(id="HalfCheetah-v4", num_envs=1),
        algorithm=SACConfig(updates=16, warmup=1_000),
        scheme=Scheme(shards=1),
    )


def mpo_mujoco() -> Experiment:
    """MPO on MuJoCo (settings of Acme, Hoffman et al. 2020, arXiv:2006.00979, with one critic of two layers)."""
    return _replayed_mujoco(
        ActorCriticConfig(policy="gaussian", critics=1, layer_norm=True, activation="elu"),
        MPOConfig(updates=8, warmup=1_000),
    )


def mpc_pendulum() -> Experiment:
    """Planning with learned dynamics on Pendulum, an ensemble and CEM (tuned here; Chua et al. 2018, arXiv:1805.12114).

    `--model.planner mppi` plans by MPPI.
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


RECIPES: dict[str, Callable[[], Experiment]] = {
    "ppo-cartpole": ppo_cartpole,
    "ppo-atari": ppo_atari,
    "a2c-atari": a2c_atari,
    "impala-atari": impala_atari,
    "appo-atari": appo_atari,
    "appo-vizdoom": appo_vizdoom,
    "ppo-mujoco": ppo_mujoco,
    "ppo-procgen": ppo_procgen,
    "ppo-memory": ppo_memory,
    "ppo-rnd-minigrid": ppo_rnd_minigrid,
    "mpc-pendulum": mpc_pendulum,
    "dqn-cartpole": dqn_cartpole,
    "her-bitflip": her_bitflip,
    "dqn-atari": dqn_atari,
    "c51-atari": c51_atari,
    "qrdqn-atari": qrdqn_atari,
    "iqn-atari": iqn_atari,
    "rainbow-atari": rainbow_atari,
    "r2d2-atari": r2d2_atari,
    "r2d2-memory": r2d2_memory,
    "ddpg-mujoco": ddpg_mujoco,
    "td3-mujoco": td3_mujoco,
    "sac-mujoco": sac_mujoco,
    "sac-pybullet-style": sac_pybullet_style,
    "mpo-mujoco": mpo_mujoco,
}
"""By the names that the command line knows them by."""
