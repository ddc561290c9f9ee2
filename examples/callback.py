"""Follow a run: record the size of the parameters, and end the run once the task is solved.

    lockstep train ppo-cartpole --callback examples/callback.py:UntilSolved --run runs/solved

On any layout, the process that records the run calls this class. It does not change what is learned.
"""

from __future__ import annotations

from pathlib import Path

from lockstep import Callback
from lockstep.training.callbacks import Progress

SOLVED = 475.0
"""The mean score of 100 episodes at which gymnasium calls CartPole-v1 solved."""


class UntilSolved(Callback):
    def on_iteration(self, progress: Progress) -> None:
        if progress.iteration % 10 == 0:  # each copy of the policy takes a little time
            squares = sum(float(x.square().sum()) for x in progress.policy().model.parameters())
            with (progress.run / "norm.csv").open("a") as file:
                file.write(f"{progress.iteration},{squares**0.5}\n")
        if progress.metrics.get("score/mean", 0.0) >= SOLVED:
            progress.stop()

    def on_checkpoint(self, progress: Progress, path: Path) -> None:
        print(f"{path} has learned from {progress.metrics['samples']:,} samples")
