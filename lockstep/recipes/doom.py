"""Recipes for Doom: scenarios for one player, and matches."""

from __future__ import annotations

import dataclasses

from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.models.normalize import NormalizeConfig
from lockstep.recipes.on_policy import appo_of_sample_factory
from lockstep.scheme import Scheme

_VALUE_CLIP = 0.2
"""Sample Factory's for Doom: in units of normalized returns there, of returns divided by their deviation here."""


def appo_vizdoom(scenario: str = "Battle") -> Experiment:
    """APPO on Doom from pixels and measurements, CNN and GRU, one version behind (Petrenko et al. 2020).

    The network is the paper's full network, and the hyperparameters are those of its Table A.5. Rewards are divided by
    the deviation of returns; Sample Factory 2 standardizes value targets instead. For other scenarios:
    `--env.id vizdoom/Basic`, ….
    """
    return Experiment(
        # A new seed needs new engines, and starting them takes as long as some hundred steps.
        env=EnvConfig(id=f"vizdoom/{scenario}", num_envs=64, reseed_every=8192),
        model=StandardModelConfig(
            encoder="convnet_simple", hidden_sizes=(128, 128), activation="elu", core="gru", core_size=512
        ),
        algorithm=appo_of_sample_factory(minibatches=1, value_clip=_VALUE_CLIP),
        scheme=Scheme(shards=4, lag=1, acting_batch=32),
        normalize=NormalizeConfig(observations=True, returns=True),
        total_steps=125_000_000,
    )


def appo_vizdoom_deathmatch() -> Experiment:
    """APPO on Doom's deathmatch, one player against seven bots (Petrenko et al. 2020, arXiv:2006.11751).

    Like `appo-vizdoom`, with the paper's changes for matches: actions of two tics, a discount of 0.995, and shaped
    rewards. Only training has shaped rewards. Evaluations count frags; in training, the metric env/frags does.
    """
    full = appo_vizdoom()
    env = EnvConfig(
        id="vizdoom/Deathmatch",
        num_envs=64,
        reseed_every=8192,  # longer than a match, which has 4,200 steps
        decorrelate=4200,
        curriculum={"shaping": True},
        metrics=("frags", "deaths", "damage", "place"),
    )
    algorithm = dataclasses.replace(appo_of_sample_factory(minibatches=1, value_clip=_VALUE_CLIP), discount=0.995)
    return full.replace(env=env, algorithm=algorithm)


def appo_vizdoom_duel() -> Experiment:
    """APPO on Doom's duel, where one policy plays both sides (Petrenko et al. 2020, arXiv:2006.11751).

    Like `appo-vizdoom-deathmatch`. Evaluations count 1 for a match won and -1 for one lost, so name an opponent:
    `--eval-opponents random`.
    """
    full = appo_vizdoom_deathmatch()
    return full.replace(env=dataclasses.replace(full.env, id="vizdoom/Duel", metrics=()))
