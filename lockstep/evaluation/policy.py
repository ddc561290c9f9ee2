"""Loads trained policies and plays them outside training.

Shape legend: B environments, K core state.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lockstep import envs
from lockstep.agent import below
from lockstep.config.options import EvaluationSettings
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.rng import stream
from lockstep.envs.base import ShardEnv, StepResult
from lockstep.envs.finite import FiniteCheck, all_finite, floats, wrong_numbers
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models.base import DescribesActing, ModelOutput, PolicyModel, Precision
from lockstep.models.capture import MakesInference, inference_of
from lockstep.models.normalize import Normalizers
from lockstep.models.policies import Part, Policies, PoliciesSpace, first_normalizers
from lockstep.run.checkpoint import Checkpoint, find, open_checkpoint
from lockstep.run.folder import RunFolder


@dataclass(frozen=True)
class Policy:
    """A model after some iteration of a run."""

    model: PolicyModel
    """Its parameters are loaded and its observation statistics set."""
    experiment: Experiment
    iteration: int
    samples: int
    """The number of samples on which the policy was trained."""
    frames: int
    name: str | None = None
    """The name of one of several policies. None means all of them, or the only one."""
    kernels: MakesInference | None = None
    """The kernels that evaluate the model in training, if any."""

    @property
    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """The observation space of training and the action space."""
        seen, acted = envs.spaces(self.experiment.env)
        return (seen, acted) if self.name is None else _part(seen, self.name)

    def of(self, name: str) -> Policy:
        """One of several policies, by its name.

        Raises:
            SettingsError: the run has no policy of this name.
        """
        _part(self.spaces[0], name)
        assert isinstance(self.model, Policies)
        return dataclasses.replace(self, model=self.model[name], name=name, kernels=None)


def _part(seen: gymnasium.Space[Any], name: str) -> Part:
    """The spaces of one of several policies."""
    names = list(seen.parts) if isinstance(seen, PoliciesSpace) else []
    if not isinstance(seen, PoliciesSpace) or name not in names:
        has = f"its policies are {', '.join(names)}" if names else "it has one policy, without a name (env.policies)"
        raise SettingsError(f"The run has no policy {name!r}: {has}.")
    return seen.parts[name]


def acting_of(model: PolicyModel, *, greedy: bool) -> str:
    """How a policy's actions are chosen: greedy, sampled, deterministic, …"""
    if greedy:
        return "greedy"
    return model.distribution.acting if isinstance(model.distribution, DescribesActing) else "sampled"


def find_checkpoint(run: Path | str, checkpoint: str | int | None = None) -> Checkpoint:
    """A run's checkpoint by name: latest (also None), best, or an iteration.

    Raises:
        SettingsError: the checkpoint does not exist or is damaged.
    """
    return open_checkpoint(find(RunFolder.open(run).checkpoints, checkpoint))


def load_policy(run: Path | str, checkpoint: str | int | None = None, *, precision: Precision | None = None) -> Policy:
    """Rebuild a run's model from a checkpoint.

    Args:
        run: folder of the run.
        checkpoint: latest (also None), best, or an iteration.
        precision: the precision of the model's computation; None takes the experiment's.

    Raises:
        SettingsError: the run or checkpoint does not exist, is damaged, or belongs to another model.
    """
    experiment = RunFolder.open(run).experiment()
    found = open_checkpoint(find(RunFolder.open(run).checkpoints, checkpoint), only=("learner",))
    tensors, _ = found.part("learner")
    observation_space, action_space = envs.spaces(experiment.env)
    model = experiment.build_model(observation_space, action_space, precision)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kept = tensors.get(f"parameter.{name}")
            if kept is None or kept.shape != parameter.shape:
                raise SettingsError(
                    f"{found.path} has no parameter {name} of the shape {list(parameter.shape)}, but the model that "
                    "the run's settings make now needs one: a user's file or a library has changed. Restore the "
                    "version used in training."
                )
            parameter.copy_(kept)
    empty = first_normalizers(experiment.normalize, experiment.algorithm.discount, observation_space)
    empty.loaded(below("normalizer.", tensors)).apply(model)
    seen = found.meta["recorder"]
    kernels = experiment.kernels(observation_space, action_space) if precision in (None, experiment.precision) else None
    return Policy(model, experiment, found.iteration, seen["samples"], seen["frames"], kernels=kernels)


def _played(env: EnvConfig, settings: EvaluationSettings) -> EnvConfig:
    """The environments of an evaluation, given those of training."""
    # Some metrics belong to a policy. With other opponents, other policies play, so resolve finds theirs anew.
    metrics, opponents = settings.metrics or envs.asked_metrics(env), settings.opponents or env.opponents
    env = envs.resolve(dataclasses.replace(env, metrics=metrics, opponents=opponents))
    if settings.levels == "test" or (settings.levels is None and env.num_levels):
        env = env.held_out()
    num_envs, longest = envs.whole_matches(env, settings.num_envs or 1), settings.max_steps or sys.maxsize
    return dataclasses.replace(env, num_envs=num_envs, decorrelate=0, reseed_every=longest)


class Player:
    """Plays a policy in new environments. It does not touch training's random streams, environments or state.

    The environments are those of the experiment without its curriculum. No episode is cut before `max_steps`, neither
    for decorrelation nor for reseeding.

    Args:
        model: chooses the actions; it is copied to the CPU, so later training does not change the player.
        settings: num_envs, 1 by default, is B, rounded up to whole matches if a match takes several environments. Each
        environment's episodes depend on its index, the purpose and the seed alone. `max_steps` is none by default, and
        has no effect where the environment's library has its own limit. The number of episodes has no effect.
        purpose: separates these random streams from other uses of the same seed.
        threads: the number of threads that step the environments. It does not change results.
        kernels: those of the experiment, which may evaluate the copy faster.
        normalizers: the statistics for the copy; None keeps the model's.
        render: prepare for render, which needs B = 1.
        stop: whether non-finite numbers from environments are an error; otherwise they cause one warning.
    """

    def __init__(
        self,
        model: PolicyModel,
        experiment: Experiment,
        settings: EvaluationSettings,
        *,
        purpose: str,
        threads: int = 1,
        kernels: MakesInference | None = None,
        normalizers: Normalizers | None = None,
        render: bool = False,
        stop: bool = True,
    ) -> None:
        self.config = config = _played(experiment.env, settings)
        """The settings of its environments."""
        self.seed = seed = experiment.seed if settings.seed is None else settings.seed
        num_envs = config.num_envs
        self.env: ShardEnv = envs.make(
            config, seed=seed, first_index=0, num_envs=num_envs, threads=threads, purpose=purpose, render=render
        )
        actor = model.for_playing().cpu()
        if normalizers is not None:
            normalizers.apply(actor)
        if isinstance(actor, Policies):
            assert isinstance(self.env.observation_space, PoliciesSpace)
            actor = actor.playing(self.env.observation_space, self.env.action_space)
        self._actor = inference_of(kernels, actor)
        self._distribution = actor.distribution
        self._greedy = settings.greedy
        self._reward_clip = config.reward_clip
        self._noise = stream(seed, f"action-{purpose}")
        self._obs = envs.allocate_observation(self.env.observation_space, (1, num_envs))
        self._rows = map_structure(lambda leaf: leaf[0].numpy(), self._obs)
        self._start = torch.ones(1, num_envs, dtype=torch.bool)
        self._state = torch.zeros(num_envs, actor.state_size)
        previous = experiment.model.uses_previous
        shape, dtype = self._distribution.action_shape, self._distribution.action_dtype
        self._previous_action = torch.zeros(1, num_envs, *shape, dtype=dtype) if previous else None
        self._previous_reward = torch.zeros(1, num_envs) if previous else None
        self.output: ModelOutput | None = None
        """The model's output at the last step, [1, B, ...]."""
        self._finite_check, self._floats = FiniteCheck(f"{config.id} ({purpose})", stop=stop), floats(self._rows)
        self._steps = np.zeros(num_envs, np.int64)
        """Steps so far in each environment's episode."""
        self.env.reset(self._rows)
        self._check_finite(None)

    @property
    def inputs(self) -> tuple[Any, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The model's inputs at the next step, in the form of PolicyModel.forward; the next step overwrites them."""
        return self._obs, self._start, self._state, self._previous_action, self._previous_reward

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Choose one action for every environment, step, and return the results."""
        with self._actor.arithmetic():
            action = self._act()
            of_env = self._distribution.to_env(action.numpy())
        self.env.send(of_env)
        step = self.env.recv(self._rows)
        self._steps = np.where(step.first, 0, self._steps + 1)
        self._check_finite(step.reward, action)
        # For the agent, a lost life starts an episode, as in training.
        self._start[0] = torch.from_numpy(step.first | step.life_lost)
        if self._previous_action is not None and self._previous_reward is not None:
            self._previous_action[0] = action
            reward = np.clip(step.reward, -1.0, 1.0) if self._reward_clip else step.reward
            self._previous_reward[0] = torch.from_numpy(reward)
        return step

    def _check_finite(self, reward: np.ndarray | None, action: Tensor | None = None) -> None:
        """Check environments' results for numbers that are not finite, unless the action was not finite either."""
        answers = [*self._floats.values(), *([] if reward is None else [reward])]
        if self._finite_check.found or all(map(all_finite, answers)):
            return
        if action is not None and not action.isfinite().all():
            return
        j, what = next(wrong_numbers(self._floats, reward))
        n = self._steps[j]
        self._finite_check.report(j, what, f"in step {n} of its episode" if n else "at the start of an episode")

    def _act(self) -> Tensor:
        out, self._state = self._actor(*self.inputs)
        self.output = out
        if self._greedy:
            return self._distribution.mode(out.policy[0])
        size = (self._start.shape[1], self._distribution.noise_size)
        noise = torch.from_numpy(self._noise.random(size, np.float32))
        return self._distribution.sample(out.policy[0], noise)

    def close(self) -> None:
        """Release the environments."""
        self.env.close()
