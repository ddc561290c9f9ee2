"""PureJaxRL's PPO on gymnax's CartPole, for benchmarks/small_environments.py.

Its repository has no package, so its folder goes on the path. It trains in one compiled function: the first call
compiles it, and later ones train anew.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from unittest import mock

from _serve import serve


def main() -> None:
    """The task is on the command line."""
    task = json.loads(sys.argv[1])
    # Its module of wrappers imports the environments of these packages, which CartPole does not need.
    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules[name] = mock.MagicMock()
    sys.path.insert(0, task["folder"])
    import jax
    import ppo

    config = {
        "ENV_NAME": "CartPole-v1",
        "NUM_ENVS": task["num_envs"],
        "NUM_STEPS": task["rollout"],
        "TOTAL_TIMESTEPS": task["samples"],
        "UPDATE_EPOCHS": task["epochs"],
        "NUM_MINIBATCHES": task["minibatches"],
        "LR": task["learning_rate"],
        "ANNEAL_LR": True,
        "GAMMA": task["discount"],
        "GAE_LAMBDA": task["gae_lambda"],
        "CLIP_EPS": task["clip"],
        "ENT_COEF": task["entropy_coef"],
        "VF_COEF": task["value_coef"],
        "MAX_GRAD_NORM": task["max_grad_norm"],
        "ACTIVATION": "tanh",
        "DEBUG": False,
    }
    train, keys, seeds = ppo.make_train(config), jax.random.PRNGKey(1), task["seeds"]
    if seeds > 1:
        train, keys = jax.vmap(train), jax.random.split(keys, seeds)
    train = jax.jit(train)

    def call() -> int:
        jax.block_until_ready(train(keys))
        return seeds * config["NUM_UPDATES"] * task["num_envs"] * task["rollout"]  # make_train adds NUM_UPDATES

    serve(call)


if __name__ == "__main__":
    main()
