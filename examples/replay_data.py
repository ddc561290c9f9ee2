"""Write transitions of CartPole to an .npz file that fills the replay memory before training:

python examples/replay_data.py cartpole.npz
lockstep train dqn-cartpole --algorithm.replay.data cartpole.npz --algorithm.warmup 0
"""

from __future__ import annotations

import sys

import gymnasium
import numpy as np

NAMES = ("observations", "actions", "rewards", "next_observations", "terminations", "truncations")


def collect(file: str, episodes: int = 100) -> None:
    """Play with a simple rule that balances the pole for a while: push to the side to which it falls."""
    env, rows = gymnasium.make("CartPole-v1"), []
    for seed in range(episodes):
        obs, ended = env.reset(seed=seed)[0], False
        while not ended:
            action = int(obs[2] + obs[3] > 0)
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((obs, action, reward, after, terminated, truncated))
            obs, ended = after, terminated or truncated
    np.savez(file, allow_pickle=False, **dict(zip(NAMES, map(np.array, zip(*rows, strict=True)), strict=True)))
    print(f"{len(rows)} transitions in {file}")


if __name__ == "__main__":
    collect(sys.argv[1] if len(sys.argv) > 1 else "cartpole.npz")
