"""HalfCheetah with Stable-Baselines3 or SBX, which has the same interface, for benchmarks/small_networks.py.

SBX's off-policy algorithms take gradient_steps and net_arch as Stable-Baselines3's do; its networks of PPO are those
of Stable-Baselines3, two of tanh.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import json
import sys

import torch
from _serve import serve
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

_OFF_POLICY = {"learning_starts": 200, "train_freq": 1, "gradient_steps": 1, "batch_size": 256}


def main() -> None:
    """The task is on the command line: the package, the algorithm and torch's threads."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    kind = getattr(importlib.import_module(task["package"]), task["algorithm"])
    if task["algorithm"] == "PPO":
        samples = 2048
        env = VecNormalize(make_vec_env("HalfCheetah-v4", n_envs=8))
        settings = {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "clip_range": 0.2, "ent_coef": 0.0}
        network = {"net_arch": [64, 64]}
    else:
        samples, env, settings, network = 200, "HalfCheetah-v4", _OFF_POLICY, {"net_arch": [256, 256]}
    agent = kind("MlpPolicy", env, **settings, policy_kwargs=network, device="cpu")
    agent.learn(2 * samples)  # compiles, and collects what learning starts with

    def train() -> int:
        before = agent.num_timesteps
        agent.learn(samples, reset_num_timesteps=False)
        return agent.num_timesteps - before

    serve(train)


if __name__ == "__main__":
    main()
