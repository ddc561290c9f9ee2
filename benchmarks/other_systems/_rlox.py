"""rlox's PPO on its own CartPole, written in Rust, for benchmarks/small_environments.py.

Its networks are two of tanh with 64 and 64 units.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys

import torch
from _serve import serve
from rlox.algorithms.ppo import PPO


def main() -> None:
    """The task is on the command line."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    samples = task["num_envs"] * task["rollout"]
    agent = PPO(
        "CartPole-v1",
        n_envs=task["num_envs"],
        seed=1,
        n_steps=task["rollout"],
        n_epochs=task["epochs"],
        batch_size=samples // task["minibatches"],
        learning_rate=task["learning_rate"],
        gamma=task["discount"],
        gae_lambda=task["gae_lambda"],
        clip_eps=task["clip"],
        ent_coef=task["entropy_coef"],
        vf_coef=task["value_coef"],
        max_grad_norm=task["max_grad_norm"],
    )

    several = max(1, 8192 // samples) * samples

    def train() -> int:
        agent.train(several)
        return several

    serve(train)


if __name__ == "__main__":
    main()
