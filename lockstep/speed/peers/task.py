"""What an experiment asks of another system, in plain values that its script reads."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import gymnasium

from lockstep import envs
from lockstep.algorithms import APPOConfig, PPOConfig
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.settings import SettingsError

_DOOM = "vizdoom/"
_IMAGE_ENCODERS = {"nature": "relu", "convnet_simple": "elu"}
"""The networks for images that others have too, with their nonlinearities."""


def comparable(experiment: Experiment) -> Experiment:
    """The experiment with the environments that every system can step: EnvPool's, wherever it has them.

    Raises:
        SettingsError: no other system here can train this.
    """
    atari = experiment.env.protocol != "none"
    adapter = "envpool" if atari else experiment.env.adapter
    experiment = experiment.replace(env=envs.resolve(dataclasses.replace(experiment.env, adapter=adapter)))
    model, action_space = experiment.model, envs.spaces(experiment.env)[1]
    unlike = [
        what
        for what, differs in {
            f"the algorithm {experiment.algorithm.name}": not isinstance(experiment.algorithm, (PPOConfig, APPOConfig)),
            f"the model {type(model).__name__}": type(model) is not StandardModelConfig,
            f"actions of the kind {type(action_space).__name__}": not _doom(experiment)
            and not isinstance(action_space, gymnasium.spaces.Discrete),
            "normalization": not _doom(experiment)
            and (experiment.normalize.observations or experiment.normalize.returns),
            "random actions": experiment.env.random_actions,
        }.items()
        if differs
    ]
    if isinstance(model, StandardModelConfig):
        if _image(experiment) and model.encoder not in (*_IMAGE_ENCODERS, "auto"):
            unlike.append(f"the encoder {model.encoder}")
        if model.previous_action_reward or model.dense_size not in (0, 512):
            unlike.append("model.previous_action_reward and model.dense_size")
    if unlike:
        raise SettingsError(
            f"--peers cannot compare this experiment: the other systems' scripts do not know {', '.join(unlike)}. They "
            "know PPO and APPO, the encoders nature and convnet_simple, MLPs, GRU and LSTM, on environments with "
            "discrete actions and on Doom: ppo-atari, ppo-cartpole, appo-atari and appo-vizdoom, for example."
        )
    return experiment


def task_of(experiment: Experiment, *, threads: int) -> dict[str, Any]:
    """The task of a comparable experiment: JSON values.

    Args:
        threads: cores that a system may use.
    """
    algorithm, model = experiment.algorithm, experiment.model
    assert isinstance(algorithm, (PPOConfig, APPOConfig)) and isinstance(model, StandardModelConfig)
    encoder = "nature" if model.encoder == "auto" else model.encoder
    return {
        "env": _environment(experiment),
        "num_envs": experiment.env.num_envs,
        "threads": threads,
        "algorithm": {
            "name": algorithm.name,
            "rollout": algorithm.rollout,
            "epochs": algorithm.epochs,
            "minibatches": algorithm.minibatches,
            "learning_rate": algorithm.learning_rate,
            "discount": algorithm.discount,
            "gae_lambda": algorithm.gae_lambda if isinstance(algorithm, PPOConfig) else 0.95,
            "clip": algorithm.clip,
            "entropy_coef": algorithm.entropy_coef,
            "value_coef": algorithm.value_coef,
            "max_grad_norm": algorithm.max_grad_norm,
        },
        "model": {
            "encoder": encoder if _image(experiment) else "mlp",
            "core": model.core,
            "core_size": model.core_size,
            "activation": _IMAGE_ENCODERS[encoder] if _image(experiment) else model.activation,
            "separate_value_network": model.separate_value_network,
            "mlp_sizes": list(model.hidden_sizes),
        },
        "normalize": dataclasses.asdict(experiment.normalize),
    }


def _environment(experiment: Experiment) -> dict[str, Any]:
    config = experiment.env
    if _doom(experiment):
        scenario = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", config.id.removeprefix(_DOOM)).lower()
        return {"library": "vizdoom", "id": scenario, "atari": False, "image": True, "options": {}}
    options: dict[str, Any] = dict(config.options)
    atari = config.protocol != "none"
    if atari:
        from lockstep.envs.envpool import PROTOCOLS

        episodic = config.protocol == "classic"
        options = {**PROTOCOLS[config.protocol], **options, "reward_clip": True, "episodic_life": episodic}
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
