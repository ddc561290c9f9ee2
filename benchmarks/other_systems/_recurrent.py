"""sb3-contrib's RecurrentPPO on Pendulum; prints the processor time of each iteration but the first, as JSON.

benchmarks/recurrent.py starts it with the size of the LSTM.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import torch
from sb3_contrib import RecurrentPPO  # type: ignore[reportMissingImports]
from stable_baselines3.common.callbacks import BaseCallback  # type: ignore[reportMissingImports]
from stable_baselines3.common.env_util import make_vec_env  # type: ignore[reportMissingImports]

ENVIRONMENTS, STEPS, ITERATIONS = 8, 128, 6


class Marks(BaseCallback):
    """Notes when iterations begin."""

    begins: list[float]

    def _on_training_start(self) -> None:
        self.begins = []

    def _on_rollout_start(self) -> None:
        self.begins.append(time.process_time())

    def _on_step(self) -> bool:
        return True


def main() -> None:
    """Train, and print the times."""
    torch.set_num_threads(1)
    core = {"lstm_hidden_size": int(sys.argv[1]), "enable_critic_lstm": False, "shared_lstm": True}
    environment = make_vec_env("Pendulum-v1", n_envs=ENVIRONMENTS)
    batch = ENVIRONMENTS * STEPS // 2
    settings = {"n_steps": STEPS, "batch_size": batch, "n_epochs": 10, "device": "cpu"}
    model = RecurrentPPO("MlpLstmPolicy", environment, policy_kwargs={**core, "net_arch": [64, 64]}, **settings)
    marks = Marks()
    model.learn(ITERATIONS * ENVIRONMENTS * STEPS, callback=marks)
    times = [*marks.begins, time.process_time()]
    print(json.dumps([b - a for a, b in itertools.pairwise(times[1:])]))


if __name__ == "__main__":
    main()
