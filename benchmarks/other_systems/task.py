"""What an experiment asks of another system, in plain values that its script reads."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import gymnasium

from lockstep import envs
from lockstep.algorithms import APPOConfig, DQNConfig, PPOConfig, SACConfig
from lockstep.algorithms.offpolicy import ReplayConfig, off_policy
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.models import ActorCriticConfig, QModelConfig, StandardModelConfig
from lockstep.models.trunk import TrunkConfig

_DOOM = "vizdoom/"
_IMAGE_ENCODERS = {"nature": "relu", "convnet_simple": "elu"}
"""The networks for images that others have too, with their nonlinearities."""
_MODELS: dict[type, type] = {
    PPOConfig: StandardModelConfig,
    APPOConfig: StandardModelConfig,
    DQNConfig: QModelConfig,
    SACConfig: ActorCriticConfig,
}
"""The algorithms that others have too, with the models that they learn."""


def comparable(experiment: Experiment) -> Experiment:
    """The experiment with the environments that every system can step: EnvPool's, wherever it has them.

    Raises:
        SettingsError: no other system here can train this.
    """
    atari = experiment.env.protocol != "none"
    adapter = "envpool" if atari else experiment.env.adapter
    experiment = experiment.replace(env=envs.resolve(dataclasses.replace(experiment.env, adapter=adapter)))
    if unlike := _unlike(experiment):
        raise SettingsError(
            f"--peers cannot compare this experiment: the other systems' scripts do not know {', '.join(unlike)}. They "
            "know PPO, APPO and plain DQN on environments with discrete actions and on Doom, SAC where actions are "
            "continuous, the encoders nature and convnet_simple, MLPs, GRU and LSTM: ppo-atari, ppo-cartpole, "
            "appo-atari, appo-vizdoom, dqn-atari and sac-mujoco, for example."
        )
    return experiment


def _unlike(experiment: Experiment) -> list[str]:
    """What other systems' scripts do not know of an experiment."""
    algorithm, model, doom = experiment.algorithm, experiment.model, _doom(experiment)
    if type(algorithm) not in _MODELS:
        return [f"the algorithm {algorithm.name}"]
    if type(model) is not _MODELS[type(algorithm)]:
        return [f"the model {type(model).__name__}"]
    assert isinstance(model, TrunkConfig)
    space, normalized = (
        envs.spaces(experiment.env)[1],
        experiment.normalize.observations or experiment.normalize.returns,
    )
    unlike = {
        f"actions of the kind {type(space).__name__}": not doom
        and isinstance(space, gymnasium.spaces.Discrete) == isinstance(algorithm, SACConfig),
        "normalization": normalized and not doom,
        "random actions": experiment.env.random_actions,
        "a curriculum": bool(experiment.env.curriculum),
        "a set of levels": bool(experiment.env.num_levels),
        f"the encoder {model.encoder}": _image(experiment) and model.encoder not in (*_IMAGE_ENCODERS, "auto"),
        "model.previous_action_reward and model.dense_size": model.previous_action_reward
        or model.dense_size not in (0, 512),
    }
    if algorithm.replays:
        algorithm = off_policy(algorithm)
        shared = {name: getattr(model, name) for name in ("encoder", "hidden_sizes", "activation", "dense_size")}
        memory = {"capacity": algorithm.replay.capacity, "checkpoint": algorithm.replay.checkpoint}
        unlike["what was added to the network"] = model != type(model)(**shared)
        unlike["what was added to replay, and n_step"] = algorithm.n_step > 1 or algorithm.replay != ReplayConfig(
            **memory
        )
        unlike["algorithm.double"] = isinstance(algorithm, DQNConfig) and algorithm.double
    return [what for what, differs in unlike.items() if differs]


def task_of(experiment: Experiment, *, threads: int) -> dict[str, Any]:
    """The task of a comparable experiment: JSON values.

    Args:
        threads: cores that a system may use.
    """
    model = experiment.model
    assert isinstance(model, TrunkConfig)
    encoder = "nature" if model.encoder == "auto" else model.encoder
    return {
        "env": _environment(experiment),
        "num_envs": experiment.env.num_envs,
        "threads": threads,
        "algorithm": _algorithm(experiment),
        "model": {
            "encoder": encoder if _image(experiment) else "mlp",
            "core": model.core,
            "core_size": model.core_size,
            "activation": _IMAGE_ENCODERS[encoder] if _image(experiment) else model.activation,
            "separate_value_network": isinstance(model, StandardModelConfig) and model.separate_value_network,
            "mlp_sizes": list(model.hidden_sizes),
        },
        "normalize": dataclasses.asdict(experiment.normalize),
    }


def _algorithm(experiment: Experiment) -> dict[str, Any]:
    algorithm = experiment.algorithm
    common = ("rollout", "learning_rate", "discount", "max_grad_norm")
    settings: dict[str, Any] = {"name": algorithm.name, **{name: getattr(algorithm, name) for name in common}}
    if isinstance(algorithm, (PPOConfig, APPOConfig)):
        names = ("epochs", "minibatches", "clip", "entropy_coef", "value_coef")
        settings["gae_lambda"] = algorithm.gae_lambda if isinstance(algorithm, PPOConfig) else 0.95
    else:
        assert isinstance(algorithm, (DQNConfig, SACConfig))
        names = ("batch_size", "updates", "target_period", "target_rate")
        settings["capacity"] = algorithm.replay.capacity
    return {**settings, **{name: getattr(algorithm, name) for name in names}}


def _environment(experiment: Experiment) -> dict[str, Any]:
    config = experiment.env
    if _doom(experiment):
        scenario = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", config.id.removeprefix(_DOOM)).lower()
        return {"library": "vizdoom", "id": scenario, "atari": False, "image": True, "options": {}}
    options: dict[str, Any] = dict(config.options)
    atari = config.protocol != "none"
    if atari:
        from lockstep.envs.envpool_shard import settings_of

        episodic = config.protocol == "classic"
        options = {**settings_of(config), **options, "reward_clip": True, "episodic_life": episodic}
    return {
        "library": config.adapter,
        "id": f"{config.id}-v5" if atari else config.id,
        "atari": atari,
        "image": _image(experiment),
        "options": options,
    }


def _doom(experiment: Experiment) -> bool:
    return experiment.env.id.startswith(_DOOM)


def _image(experiment: Experiment) -> bool:
    if _doom(experiment):
        return True
    shape = envs.spaces(experiment.env)[0].shape
    return shape is not None and len(shape) == 3
