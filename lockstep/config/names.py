"""Names of settings' classes in files and identities. A class may move to another module, but its name stays."""

from __future__ import annotations

from lockstep.config.user_code import reference_to

_CLASSES = {
    "Experiment": "lockstep.experiment:Experiment",
    "Normalize": "lockstep.models.normalize:NormalizeConfig",
    "WarmStart": "lockstep.experiment:WarmStart",
    "Scheme": "lockstep.scheme:Scheme",
    "Env": "lockstep.envs.settings:EnvConfig",
    "StandardModel": "lockstep.models.policy:StandardModelConfig",
    "QModel": "lockstep.models.q:QModelConfig",
    "ActorCritic": "lockstep.models.actor_critic:ActorCriticConfig",
    "Dynamics": "lockstep.models.dynamics:DynamicsConfig",
    "RND": "lockstep.models.rnd:RNDConfig",
    "PopArt": "lockstep.models.popart:PopArtConfig",
    "Optimizer": "lockstep.algorithms.base:OptimizerConfig",
    "Replay": "lockstep.algorithms.offpolicy:ReplayConfig",
    "A2C": "lockstep.algorithms.a2c:A2CConfig",
    "PPO": "lockstep.algorithms.ppo:PPOConfig",
    "IMPALA": "lockstep.algorithms.impala:IMPALAConfig",
    "APPO": "lockstep.algorithms.appo:APPOConfig",
    "DQN": "lockstep.algorithms.dqn:DQNConfig",
    "R2D2": "lockstep.algorithms.r2d2:R2D2Config",
    "DDPG": "lockstep.algorithms.ddpg:DDPGConfig",
    "TD3": "lockstep.algorithms.td3:TD3Config",
    "SAC": "lockstep.algorithms.sac:SACConfig",
    "MPO": "lockstep.algorithms.mpo:MPOConfig",
    "MPC": "lockstep.algorithms.mpc:MPCConfig",
    "CrossQ": "lockstep.algorithms.crossq:CrossQConfig",
    "DrQ": "lockstep.algorithms.drq:DrQConfig",
    "PQN": "lockstep.algorithms.pqn:PQNConfig",
    "SPR": "lockstep.algorithms.spr:SPRConfig",
    "SPRModel": "lockstep.models.spr:SPRModelConfig",
}
"""The current module of each class. Names are hashed into identities, so none may change."""
_MOVED = {"Normalize": "lockstep.experiment:NormalizeConfig", "Env": "lockstep.envs.base:EnvConfig"}
"""The modules of classes when files and identities still named classes by their modules. If a class of FORMER moves,
its old module must be added here."""
FORMER = {
    name: _MOVED.get(name, _CLASSES[name])
    for name in (
        *("Experiment", "Normalize", "WarmStart", "Scheme", "Env", "StandardModel", "QModel", "ActorCritic"),
        *("Dynamics", "RND", "Optimizer", "Replay", "A2C", "PPO", "IMPALA", "APPO", "DQN", "R2D2", "DDPG", "TD3"),
        *("SAC", "MPO", "MPC"),
    )
}
"""The names of these classes at that time. No value may ever change, and new classes do not belong here."""
_NAMES = {where: name for name, where in _CLASSES.items()}
_SINCE = {where: name for name, where in FORMER.items()}


def name_of(cls: type) -> str:
    """The name of a settings class in files: a short name, or for a user's class `file.py:Name` or `module:Name`."""
    reference = reference_to(cls)
    return _NAMES.get(reference, reference)


def current_name(name: str) -> str:
    """The current name of the class that a file of any version names so."""
    return _SINCE.get(name, name)


def is_registered(name: str) -> bool:
    """Whether this is a current or earlier name of one of lockstep's own classes."""
    return current_name(name) in _CLASSES


def reference_of(name: str) -> str:
    """The location of the class with this name, as `module:Name` or `file.py:Name`."""
    return _CLASSES.get(current_name(name), name)
