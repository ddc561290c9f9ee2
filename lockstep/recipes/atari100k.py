"""Recipes for Atari 100k: 26 games, 100,000 steps each (Kaiser et al. 2019, arXiv:1903.00374)."""

from __future__ import annotations

from lockstep.algorithms import DQNConfig, DrQConfig, SPRConfig
from lockstep.algorithms.base import OptimizerConfig
from lockstep.algorithms.offpolicy import OffPolicyConfig, ReplayConfig
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import QModelConfig, SPRModelConfig
from lockstep.scheme import Scheme


def der_atari100k(game: str = "Pong") -> Experiment:
    """Data-efficient Rainbow on Atari 100k, classic protocol (van Hasselt et al. 2019, arXiv:1906.05243)."""
    return _hundred_thousand(
        game,
        QModelConfig(
            encoder="der",
            initialization="pytorch",
            dueling=True,
            noisy=True,
            noisy_sigma=0.1,
            stream_size=256,
            returns="categorical",
        ),
        DQNConfig(
            rollout=1,
            warmup=1_600,
            n_step=20,
            optimizer=OptimizerConfig(eps=1.5e-4),
            double=True,
            target_period=2_000,
            epsilon_start=0.0,
            epsilon_end=0.0,
            replay=ReplayConfig(capacity=100_000, prioritized=True, alpha=0.5, beta=0.4),
        ),
    ).replace(precision="portable")


def drq_atari100k(game: str = "Pong") -> Experiment:
    """DrQ(ε) on Atari 100k, classic protocol, Nature CNN (settings of Agarwal et al. 2021, arXiv:2108.13264)."""
    return _hundred_thousand(
        game,
        QModelConfig(encoder="nature", dueling=True),
        DrQConfig(
            warmup=1_600,
            max_grad_norm=1e9,
            optimizer=OptimizerConfig(eps=1.5e-4),
            epsilon_fraction=0.066,
            replay=ReplayConfig(capacity=100_000),
        ),
    ).replace(precision="portable")


def spr_atari100k(game: str = "Pong") -> Experiment:
    """SPR on Atari 100k, classic protocol, Nature CNN (Schwarzer et al. 2021, arXiv:2007.05929)."""
    return _hundred_thousand(
        game,
        SPRModelConfig(),
        SPRConfig(
            warmup=2_000,
            optimizer=OptimizerConfig(eps=1.5e-4),
            epsilon_start=0.0,
            epsilon_end=0.0,
            replay=ReplayConfig(capacity=100_000, prioritized=True, alpha=0.5, beta=0.4),
        ),
    )


def _hundred_thousand(game: str, model: QModelConfig, algorithm: OffPolicyConfig) -> Experiment:
    """The benchmark: one environment, and gradient steps of 32 items after each of 100,000 steps but the warm-up."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=1, protocol="classic"),
        model=model,
        algorithm=algorithm,
        scheme=Scheme(shards=1),
        total_steps=100_000,
        precision="fp32",
    )
