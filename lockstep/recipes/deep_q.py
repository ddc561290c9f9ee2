"""Recipes for algorithms that learn action values from replay."""

from __future__ import annotations

import dataclasses

from lockstep.algorithms import DQNConfig, R2D2Config
from lockstep.algorithms.base import OptimizerConfig
from lockstep.algorithms.offpolicy import ReplayConfig
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import QModelConfig
from lockstep.scheme import Scheme


def dqn_cartpole() -> Experiment:
    """Double DQN on CartPole, with 3-step returns (tuned here)."""
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
        precision="portable",
    )


def her_bitflip() -> Experiment:
    """DQN with hindsight on flipping 13 bits, which DQN alone cannot learn (Andrychowicz et al. 2017; chosen here).

    `--algorithm.replay.hindsight 0` trains with DQN alone. `--env.options bits=8` uses another length.
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
        precision="portable",
    )


def dqn_atari(game: str = "Breakout") -> Experiment:
    """DQN on Atari, classic protocol, Nature CNN (CleanRL's settings: Mnih et al. 2015 with Adam).

    Unlike CleanRL, it uses the Huber loss, clips the gradient's norm at 10, and sets Adam's eps to 1e-5. CleanRL's
    environment presses FIRE after a lost life: `--env.protocol baselines`.
    """
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
        precision="portable",
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
    """The common settings of DQN Zoo's agents with distributions of returns: a batch of 32 for every 4 steps, and an ε
    that falls over 1M steps (https://github.com/google-deepmind/dqn_zoo)."""
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
        precision="portable",
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
        precision="portable",
    )


def apex_atari(game: str = "Breakout") -> Experiment:
    """Ape-X on Atari, classic protocol, Nature CNN, dueling (settings of Horgan et al. 2018, arXiv:1803.00933).

    It is deterministic; `--scheme.lag async` lets actors and learner run freely, as published.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=64, protocol="classic"),
        model=QModelConfig(encoder="nature", dueling=True, stream_size=512),
        algorithm=DQNConfig(
            rollout=20,
            batch_size=512,
            updates=2,
            warmup=50_000,
            n_step=3,
            learning_rate=2.5e-4 / 4,
            optimizer=OptimizerConfig("rmsprop", eps=4e-4, decay=0.95),
            max_grad_norm=40.0,
            double=True,
            target_period=2_500,
            epsilon_end=0.4,
            epsilon_fraction=0.0,
            epsilon_spread=7.0,
            replay=ReplayConfig(
                capacity=2_000_000, prioritized=True, alpha=0.6, beta=0.4, beta_end=0.4, first_priority="error"
            ),
        ),
        scheme=Scheme(shards=8, lag=1, acting_batch=16),
    )


def r2d2_atari(game: str = "Breakout") -> Experiment:
    """R2D2 on Atari, raw rewards, CNN and LSTM (single-machine settings of rlpyt's R2D1, arXiv:1909.01500).

    Exploration, and episodes that continue after a lost life, follow Kapturowski et al. 2019.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=32),
        model=QModelConfig(
            encoder="nature", core="lstm", core_size=512, previous_action_reward=True, dueling=True, stream_size=512
        ),
        algorithm=R2D2Config(
            optimizer=OptimizerConfig(eps=1e-3),
            huber_delta=1e9,
            replay=ReplayConfig(
                capacity=1_000_000, prioritized=True, alpha=0.9, beta=0.6, beta_end=0.6, first_priority="error"
            ),
        ),
        scheme=Scheme(shards=4, acting_batch=32),
    )


def r2d2_memory() -> Experiment:
    """R2D2 on a task that no policy without memory can solve (tuned here). --model.core none shows this.

    Few steps have a reward, so gradients are small, and Adam needs a small eps.
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
        precision="portable",
    )


def dqn_minatar(game: str = "Breakout") -> Experiment:
    """DQN on MinAtar (the network of Young and Tian 2019, arXiv:1903.03176; Obando-Ceron and Castro 2021's settings).

    The latter (arXiv:2011.14826) replace centered RMSProp with Adam, and learn a batch of 32 for every 4 steps. This
    recipe learns a batch of 128 for every 16 steps at twice the learning rate. It learns from as many samples and takes
    a fraction of the time. The Huber loss is Young and Tian's; the latter have squared errors, except on Asterix.
    """
    return Experiment(
        env=EnvConfig(id=f"MinAtar/{game}-v1", num_envs=8),
        model=QModelConfig(encoder="minatar"),
        algorithm=DQNConfig(
            rollout=16,
            batch_size=128,
            updates=8,
            warmup=1_000,
            learning_rate=5e-4,
            optimizer=OptimizerConfig(eps=0.01 / 128),
            target_period=62,
            epsilon_fraction=0.025,
            replay=ReplayConfig(capacity=100_000),
        ),
        scheme=Scheme(shards=4, acting_batch=8),
        precision="portable",
    )
