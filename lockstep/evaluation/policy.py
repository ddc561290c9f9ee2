"""Trained policies, and playing with them outside training.

Shape legend: B environments, K core state.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import envs
from lockstep.agent import below
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.rng import stream
from lockstep.envs.base import ShardEnv, StepResult
from lockstep.envs.finite import FiniteCheck, all_finite, floats, wrong_numbers
from lockstep.experiment import Experiment
from lockstep.models.base import ModelOutput, PolicyModel, Precision
from lockstep.models.capture import Inference
from lockstep.models.normalize import Normalizers
from lockstep.run.checkpoint import Checkpoint, find, open_checkpoint
from lockstep.run.folder import RunFolder


@dataclass(frozen=True)
class Policy:
    """A model as it was after some iteration of a run."""

    model: PolicyModel
    """Parameters loaded, observation statistics set."""
    experiment: Experiment
    iteration: int
    samples: int
    """Samples that the policy was trained on."""
    frames: int


def acting_of(model: PolicyModel, *, greedy: bool) -> str:
    """How actions come from a policy: greedy, sampled, deterministic, …"""
    return "greedy" if greedy else getattr(getattr(model, "distribution", None), "acting", "sampled")


def find_checkpoint(run: Path | str, checkpoint: str | int | None = None) -> Checkpoint:
    """The checkpoint of a run that is called latest (also None), best, or by its iteration.

    Raises:
        SettingsError: there is no such checkpoint, or it is damaged.
    """
    return open_checkpoint(find(RunFolder.open(run).checkpoints, checkpoint))


def load_policy(run: Path | str, checkpoint: str | int | None = None, *, precision: Precision | None = None) -> Policy:
    """Rebuild a run's model as it was at a checkpoint.

    Args:
        run: folder of the run.
        checkpoint: latest (also None), best, or an iteration.
        precision: that the model computes with; None takes the experiment's.

    Raises:
        SettingsError: there is no such run or checkpoint, it is damaged, or of another model.
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
                    f"{found.path} has no parameter {name} of the shape {list(parameter.shape)}, as the model has that "
                    "the run's settings make now: a file that they name, or a library, has changed. Restore it as "
                    "it was in training."
                )
            parameter.copy_(kept)
    empty = Normalizers.initial(experiment.normalize, experiment.algorithm.discount, observation_space)
    empty.loaded(below("normalizer.", tensors)).apply(model)
    seen = found.meta["recorder"]
    return Policy(model, experiment, found.iteration, seen["samples"], seen["frames"])


class Player:
    """Plays a policy in new environments. It touches no random stream, environment or state of training.

    The environments are those of the experiment without its curriculum, except that no episode is cut, be it for
    decorrelation or to reseed, before `max_steps`.

    Args:
        model: what acts; it is copied to the CPU, so that later training does not change the player.
        num_envs: B, which is rounded up to whole matches where these take several environments. Each environment's
            episodes depend on its index, the purpose and the seed alone.
        greedy: take the most likely action instead of sampling.
        seed: of environments and action noise.
        purpose: sets these streams apart from those of other uses of the same seed.
        threads: that step the environments; changes no result.
        max_steps: after which an episode is cut, for gymnasium alone; other libraries have limits of their own.
        normalizers: whose statistics the copy takes; None leaves it the model's own.
        render: prepare for render, for which B must be 1.
        stop: whether numbers of environments that are not finite are an error, rather than warned of once.
    """

    def __init__(
        self,
        model: PolicyModel,
        experiment: Experiment,
        *,
        num_envs: int,
        greedy: bool,
        seed: int,
        purpose: str,
        threads: int = 1,
        max_steps: int = sys.maxsize,
        normalizers: Normalizers | None = None,
        render: bool = False,
        stop: bool = True,
    ) -> None:
        num_envs = envs.whole_matches(experiment.env, num_envs)
        config = dataclasses.replace(experiment.env, num_envs=num_envs, decorrelate=0, reseed_every=max_steps)
        self.env: ShardEnv = envs.make(
            config, seed=seed, first_index=0, num_envs=num_envs, threads=threads, purpose=purpose, render=render
        )
        actor = model.for_acting().cpu()
        if normalizers is not None:
            normalizers.apply(actor)
        self._actor = Inference(actor)
        self._distribution = model.distribution
        self._greedy = greedy
        self._reward_clip = config.reward_clip
        self._noise = stream(seed, f"action-{purpose}")
        self._obs = envs.allocate_observation(self.env.observation_space, (1, num_envs))
        self._rows = map_structure(lambda leaf: leaf[0].numpy(), self._obs)
        self._start = torch.ones(1, num_envs, dtype=torch.bool)
        self._state = torch.zeros(num_envs, model.state_size)
        previous = experiment.model.uses_previous
        shape, dtype = self._distribution.action_shape, self._distribution.action_dtype
        self._previous_action = torch.zeros(1, num_envs, *shape, dtype=dtype) if previous else None
        self._previous_reward = torch.zeros(1, num_envs) if previous else None
        self.output: ModelOutput | None = None
        """What the model said at the last step, [1, B, ...]."""
        self._finite_check, self._floats = FiniteCheck(f"{config.id} ({purpose})", stop=stop), floats(self._rows)
        self._steps = np.zeros(num_envs, np.int64)
        """Steps so far in each environment's episode."""
        self.env.reset(self._rows)
        self._check_finite(None)

    @property
    def inputs(self) -> tuple[Any, Tensor, Tensor, Tensor | None, Tensor | None]:
        """What the model will see at the next step, as PolicyModel.forward takes it; the next step overwrites it."""
        return self._obs, self._start, self._state, self._previous_action, self._previous_reward

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Choose one action for every environment, and return what they answered."""
        action = self._act()
        self.env.send(self._distribution.to_env(action.numpy()))
        step = self.env.recv(self._rows)
        self._steps = np.where(step.first, 0, self._steps + 1)
        self._check_finite(step.reward, action)
        # For the agent a lost life starts an episode, just as in training.
        self._start[0] = torch.from_numpy(step.first | step.life_lost)
        if self._previous_action is not None and self._previous_reward is not None:
            self._previous_action[0] = action
            reward = np.clip(step.reward, -1.0, 1.0) if self._reward_clip else step.reward
            self._previous_reward[0] = torch.from_numpy(reward)
        return step

    def _check_finite(self, reward: np.ndarray | None, action: Tensor | None = None) -> None:
        """Look for numbers that are not finite in what environments returned, unless they were given such an action."""
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
