"""Stable-Baselines3's samples a second. Runs in its virtual environment."""
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from _script import Meter, end_with, make_pool, read_task, use_threads
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecMonitor


class PoolVecEnv(VecEnv):
    """An EnvPool behind Stable-Baselines3's interface."""

    def __init__(self, pool: Any, num_envs: int) -> None:
        self._pool = pool
        super().__init__(num_envs, pool.observation_space, pool.action_space)
        self._action: Any = None

    def reset(self) -> Any:
        return self._pool.reset()[0]

    def step_async(self, actions: Any) -> None:
        self._pool.send(actions.astype(np.int32 if actions.dtype.kind == "i" else self.action_space.dtype))

    def step_wait(self) -> Any:
        obs, reward, terminated, truncated, _ = self._pool.recv()
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for index in done.nonzero()[0]:
            infos[index] = {"terminal_observation": obs[index], "TimeLimit.truncated": bool(truncated[index])}
        return obs, reward, done, infos

    def close(self) -> None:
        self._pool.close()

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self._pool, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError


class Count(BaseCallback):
    """Ends the training when enough has been measured."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__()
        self._meter = Meter(task)
        self._enough = False

    def _on_rollout_start(self) -> None:
        learned = self.num_timesteps > 0 and self.model._n_updates > 0  # off-policy, the first rollouts only collect
        self._enough = self._enough or (learned and self._meter.mark(self.num_timesteps))

    def _on_step(self) -> bool:
        return not self._enough


def make_ppo(task: dict[str, Any], common: dict[str, Any]) -> PPO:
    algorithm = task["algorithm"]
    return PPO(
        **common,
        n_steps=algorithm["rollout"],
        batch_size=task["num_envs"] * algorithm["rollout"] // algorithm["minibatches"],
        n_epochs=algorithm["epochs"],
        gae_lambda=algorithm["gae_lambda"],
        clip_range=algorithm["clip"],
        ent_coef=algorithm["entropy_coef"],
        vf_coef=algorithm["value_coef"],
        max_grad_norm=algorithm["max_grad_norm"],
    )


def make_off_policy(task: dict[str, Any], common: dict[str, Any]) -> DQN | SAC:
    """As many steps, and then as many gradient steps, as an iteration of the task has. Images are remembered once."""
    algorithm = task["algorithm"]
    once = task["env"]["image"]
    common |= {
        "buffer_size": algorithm["capacity"],
        "learning_starts": algorithm["batch_size"],
        "batch_size": algorithm["batch_size"],
        "train_freq": algorithm["rollout"],
        "gradient_steps": algorithm["updates"],
        "tau": algorithm["target_rate"],
        "optimize_memory_usage": once,
        "replay_buffer_kwargs": {"handle_timeout_termination": not once},
    }
    if algorithm["name"] == "sac":
        return SAC(**common, target_update_interval=algorithm["target_period"])
    samples = algorithm["rollout"] * task["num_envs"] // algorithm["updates"]  # DQN counts those, not gradient steps
    return DQN(
        **common,
        target_update_interval=algorithm["target_period"] * samples,
        max_grad_norm=algorithm["max_grad_norm"],
    )


def main() -> None:
    task = read_task()
    end_with(task["parent"])
    use_threads(task["layout"]["torch_threads"])
    env, algorithm, model, count = task["env"], task["algorithm"], task["model"], task["num_envs"]
    envs: VecEnv
    if env["library"] == "envpool":
        envs = VecMonitor(PoolVecEnv(make_pool(env, count, task["threads"]), count))
    else:
        envs = make_vec_env(env["id"], n_envs=count, seed=1)
    settings: dict[str, Any] = {}
    if not env["image"]:
        activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "elu": torch.nn.ELU}[model["activation"]]
        settings = {"net_arch": model["mlp_sizes"], "activation_fn": activation}
    common: dict[str, Any] = {
        "policy": "CnnPolicy" if env["image"] else "MlpPolicy",
        "env": envs,
        "policy_kwargs": settings,
        "learning_rate": algorithm["learning_rate"],
        "gamma": algorithm["discount"],
        "device": "cpu",
        "seed": 1,
    }
    agent = make_ppo(task, common) if algorithm["name"] == "ppo" else make_off_policy(task, common)
    agent.learn(10**12, callback=Count(task))


if __name__ == "__main__":
    main()
