"""PureJaxRL's PPO on gymnax's environments, for benchmarks/small_environments.py.

Its repository has no package, so its folder goes on the path. It trains in one compiled function: the first call
compiles it, and later ones train anew.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from _serve import serve


def with_convolution() -> Any:
    """Its network with the parts of lockstep's for MinAtar: 16 filters of 3x3, a dense layer of 128, two heads."""
    import distrax
    import flax.linen as nn
    import jax.numpy as jnp

    class ActorCritic(nn.Module):
        action_dim: int
        activation: str = "relu"

        @nn.compact
        def __call__(self, x: Any) -> tuple[Any, Any]:
            cells = x.reshape((*x.shape[:-1], 10, 10, x.shape[-1] // 100))
            image = nn.relu(nn.Conv(16, (3, 3), padding="VALID")(cells))
            features = nn.relu(nn.Dense(128)(image.reshape((*x.shape[:-1], 1024))))
            policy = distrax.Categorical(logits=nn.Dense(self.action_dim)(features))
            return policy, jnp.squeeze(nn.Dense(1)(features), axis=-1)

    return ActorCritic


def main() -> None:
    """The task is on the command line."""
    task = json.loads(sys.argv[1])
    # Its module of wrappers imports the environments of these packages, which nobody needs here.
    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules[name] = mock.MagicMock()
    sys.path.insert(0, task["folder"])
    import jax
    import ppo

    if task["convolution"]:
        ppo.ActorCritic = with_convolution()
    config = {
        "ENV_NAME": task["environment"],
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
