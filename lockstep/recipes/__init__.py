"""Recipes: functions that return an Experiment. Each names the source of its settings.

Every field can be overridden, from Python with `experiment.replace` and on the command line with flags. `lockstep
recipes` shows the first line of each recipe's docstring.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.experiment import Experiment
from lockstep.recipes.atari100k import der_atari100k, drq_atari100k, spr_atari100k
from lockstep.recipes.continuous import (
    crossq_mujoco,
    ddpg_mujoco,
    her_fetch,
    mpc_pendulum,
    mpo_mujoco,
    sac_hidden,
    sac_mujoco,
    sac_pybullet_style,
    td3_hidden,
    td3_mujoco,
)
from lockstep.recipes.deep_q import (
    apex_atari,
    c51_atari,
    dqn_atari,
    dqn_cartpole,
    dqn_minatar,
    her_bitflip,
    iqn_atari,
    qrdqn_atari,
    r2d2_atari,
    r2d2_memory,
    rainbow_atari,
)
from lockstep.recipes.doom import appo_vizdoom, appo_vizdoom_deathmatch, appo_vizdoom_duel
from lockstep.recipes.on_policy import (
    a2c_atari,
    appo_atari,
    impala_atari,
    mappo_mpe,
    ppo_atari,
    ppo_atari_small,
    ppo_cartpole,
    ppo_memory,
    ppo_minatar,
    ppo_mujoco,
    ppo_procgen,
    ppo_procgen_memory,
    ppo_rnd_minigrid,
    ppo_self_play,
    pqn_atari,
    pqn_cartpole,
    pqn_minatar,
)

RECIPES: dict[str, Callable[[], Experiment]] = {
    "ppo-cartpole": ppo_cartpole,
    "ppo-atari": ppo_atari,
    "ppo-atari-small": ppo_atari_small,
    "a2c-atari": a2c_atari,
    "impala-atari": impala_atari,
    "appo-atari": appo_atari,
    "appo-vizdoom": appo_vizdoom,
    "appo-vizdoom-deathmatch": appo_vizdoom_deathmatch,
    "appo-vizdoom-duel": appo_vizdoom_duel,
    "ppo-mujoco": ppo_mujoco,
    "ppo-procgen": ppo_procgen,
    "ppo-procgen-memory": ppo_procgen_memory,
    "ppo-memory": ppo_memory,
    "ppo-rnd-minigrid": ppo_rnd_minigrid,
    "ppo-minatar": ppo_minatar,
    "ppo-self-play": ppo_self_play,
    "mappo-mpe": mappo_mpe,
    "pqn-cartpole": pqn_cartpole,
    "pqn-minatar": pqn_minatar,
    "pqn-atari": pqn_atari,
    "mpc-pendulum": mpc_pendulum,
    "dqn-cartpole": dqn_cartpole,
    "dqn-minatar": dqn_minatar,
    "her-bitflip": her_bitflip,
    "her-fetch": her_fetch,
    "dqn-atari": dqn_atari,
    "c51-atari": c51_atari,
    "qrdqn-atari": qrdqn_atari,
    "iqn-atari": iqn_atari,
    "rainbow-atari": rainbow_atari,
    "apex-atari": apex_atari,
    "der-atari100k": der_atari100k,
    "drq-atari100k": drq_atari100k,
    "spr-atari100k": spr_atari100k,
    "r2d2-atari": r2d2_atari,
    "r2d2-memory": r2d2_memory,
    "ddpg-mujoco": ddpg_mujoco,
    "td3-mujoco": td3_mujoco,
    "sac-mujoco": sac_mujoco,
    "sac-hidden": sac_hidden,
    "td3-hidden": td3_hidden,
    "sac-pybullet-style": sac_pybullet_style,
    "mpo-mujoco": mpo_mujoco,
    "crossq-mujoco": crossq_mujoco,
}
"""All recipes, by their names on the command line."""
