"""Samples a second of a user's copy of CleanRL's ppo_atari_envpool.py, or of a file derived from it (LeanRL's).

The file runs unchanged. What it finds as envpool.make is wrapped: it plays under the task's options, speaks the old
interface of gym that these files were written for, and the calls of step tell where an iteration ends.
"""
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import envpool
import gym
from _script import Meter, end_with, make_pool, read_task, use_threads


class OldInterface:
    """A pool whose reset returns observations alone and whose step returns four values."""

    def __init__(self, task: dict[str, Any], pool: Any) -> None:
        self._pool, self._meter, self._steps = pool, Meter(task), 0
        self._num_envs, self._rollout = task["num_envs"], task["algorithm"]["rollout"]
        self.action_space = gym.spaces.Discrete(int(pool.action_space.n))
        space = pool.observation_space
        self.observation_space = gym.spaces.Box(0, 255, space.shape, space.dtype)
        self.reward_range, self.metadata = (-1.0, 1.0), {}

    def reset(self) -> Any:
        return self._pool.reset()[0]

    def step(self, action: Any) -> Any:
        # Before the first step of an iteration, everything of the ones before it is done.
        if self._steps and self._steps % self._rollout == 0 and self._meter.mark(self._steps * self._num_envs):
            os._exit(0)
        self._steps += 1
        obs, reward, terminated, truncated, info = self._pool.step(action)
        return obs, reward, terminated | truncated, info

    def close(self) -> None:
        self._pool.close()


def keep_frozen() -> None:
    """Have tensordict put parameters without gradients into a module as such, as it did when LeanRL was written:
    today's makes parameters of them that ask for gradients, so that the policy's graph outlives its first minibatch."""
    from tensordict import TensorDict

    plain = TensorDict.to_module

    def to_module(self: TensorDict, module: Any, *args: Any, **kwargs: Any) -> Any:
        replaced = plain(self, module, *args, **kwargs)
        if not any(leaf.requires_grad for leaf in self.values(True, True)):
            module.requires_grad_(False)
        return replaced

    TensorDict.to_module = to_module


def main() -> None:
    task = read_task()
    end_with(task["parent"])
    layout, algorithm = task["layout"], task["algorithm"]
    use_threads(layout["torch_threads"])

    def make(*_: Any, **__: Any) -> OldInterface:
        return OldInterface(task, make_pool(task["env"], task["num_envs"], task["threads"]))

    envpool.make = make
    keep_frozen()
    os.environ["WANDB_MODE"] = "disabled"
    settings = {
        "env-id": task["env"]["id"],
        "num-envs": task["num_envs"],
        "num-steps": algorithm["rollout"],
        "num-minibatches": algorithm["minibatches"],
        "update-epochs": algorithm["epochs"],
        "total-timesteps": 10**9,
    }
    sys.argv[0] = layout["file"]
    texts = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    sys.argv[1:] = texts + layout["flags"]
    runpy.run_path(layout["file"], run_name="__main__")
    sys.exit(f"{layout['file']} ended before enough was measured")


if __name__ == "__main__":
    main()
