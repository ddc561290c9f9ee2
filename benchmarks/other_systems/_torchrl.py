"""torchrl's samples a second: its collector, ClipPPOLoss, GAE and buffer. Runs in its virtual environment."""
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from _script import Meter, end_with, make_pool, read_task, use_threads
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Composite, LazyTensorStorage, OneHot, TensorDictReplayBuffer, Unbounded
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import EnvBase
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    ConvNet,
    OneHotCategorical,
    ProbabilisticActor,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


class Pool(EnvBase):
    """A batch of environments, as EnvPool and gymnasium's vector environments step them: each starts its next
    episode by itself."""

    def __init__(self, envs: Any, num_envs: int, actions: int, space: Any) -> None:
        super().__init__(device="cpu", batch_size=[num_envs])
        self._envs = envs
        shape = (num_envs, *space.shape)
        if space.dtype == np.uint8:
            spec = Bounded(0, 255, shape, dtype=torch.uint8)
        else:
            spec = Unbounded(shape, dtype=torch.float32)
        self.observation_spec = Composite(observation=spec, shape=[num_envs])
        self.action_spec = OneHot(actions, shape=(num_envs, actions), dtype=torch.int64)
        self.reward_spec = Unbounded((num_envs, 1))
        self.done_spec = Composite(
            {name: Binary(1, (num_envs, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")},
            shape=[num_envs],
        )
        self._last: torch.Tensor | None = None

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        if self._last is None:
            self._last = torch.from_numpy(self._envs.reset()[0])
        # Later, what ended has begun again by itself: nothing is to be reset but the flags.
        return TensorDict({"observation": self._last}, [*self.batch_size])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        obs, reward, terminated, truncated, _ = self._envs.step(tensordict["action"].argmax(-1).numpy())
        self._last = torch.from_numpy(obs)
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        values = {"observation": self._last, "reward": torch.as_tensor(reward, dtype=torch.float32).unsqueeze(-1)}
        values |= {name: torch.from_numpy(np.asarray(flag)).unsqueeze(-1) for name, flag in flags.items()}
        return TensorDict(values, [*self.batch_size])

    def _set_seed(self, seed: int | None) -> None:
        pass


class Scale(nn.Module):
    """uint8 pictures to [0, 1]."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.float() / 255.0


def make_modules(task: dict[str, Any], actions: int, inputs: int) -> tuple[Any, Any]:
    """Actor and critic: they share the Nature CNN, or have an MLP each."""
    distribution = {"distribution_class": OneHotCategorical, "return_log_prob": True}
    model = task["model"]
    if task["env"]["image"]:
        convolutions = ConvNet(
            in_features=4, num_cells=[32, 64, 64], kernel_sizes=[8, 4, 3], strides=[4, 2, 1], activation_class=nn.ReLU
        )
        dense = MLP(
            in_features=3136, out_features=512, num_cells=[], activate_last_layer=True, activation_class=nn.ReLU
        )
        common = TensorDictModule(nn.Sequential(Scale(), convolutions, dense), ["observation"], ["hidden"])
        policy = TensorDictModule(nn.Linear(512, actions), ["hidden"], ["logits"])
        actor = ProbabilisticActor(policy, in_keys=["logits"], out_keys=["action"], **distribution)
        operator = ActorValueOperator(common, actor, ValueOperator(nn.Linear(512, 1), in_keys=["hidden"]))
        return operator.get_policy_operator(), operator.get_value_operator()
    activation = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}[model["activation"]]
    cells = {"in_features": inputs, "num_cells": model["mlp_sizes"], "activation_class": activation}
    policy = TensorDictModule(MLP(out_features=actions, **cells), ["observation"], ["logits"])
    actor = ProbabilisticActor(policy, in_keys=["logits"], out_keys=["action"], **distribution)
    return actor, ValueOperator(MLP(out_features=1, **cells), in_keys=["observation"])


def main() -> None:
    task = read_task()
    end_with(task["parent"])
    use_threads(task["layout"]["torch_threads"])
    env, algorithm, count = task["env"], task["algorithm"], task["num_envs"]
    if env["library"] == "envpool":
        envs = make_pool(env, count, task["threads"])
        space, actions = envs.observation_space, int(envs.action_space.n)
    else:
        import gymnasium

        envs: Any = gymnasium.make_vec(
            env["id"],
            count,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
        )
        space, actions = envs.single_observation_space, int(envs.single_action_space.n)
    actor, critic = make_modules(task, actions, space.shape[0])
    samples = count * algorithm["rollout"]
    collector = Collector(
        Pool(envs, count, actions, space), actor, frames_per_batch=samples, total_frames=-1, device="cpu"
    )
    minibatch = samples // algorithm["minibatches"]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(samples), sampler=SamplerWithoutReplacement(), batch_size=minibatch
    )
    advantage = GAE(gamma=algorithm["discount"], lmbda=algorithm["gae_lambda"], value_network=critic)
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=algorithm["clip"],
        entropy_coeff=algorithm["entropy_coef"],
        critic_coeff=algorithm["value_coef"],
        normalize_advantage=True,
    )
    parameters = [*loss_module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=algorithm["learning_rate"], eps=1e-5)
    meter, seen = Meter(task), 0
    for data in collector:
        with torch.no_grad():
            data = advantage(data)
        flat = data.reshape(-1)
        for _ in range(algorithm["epochs"]):
            buffer.extend(flat)
            for _ in range(algorithm["minibatches"]):
                loss = loss_module(buffer.sample())
                (loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(parameters, algorithm["max_grad_norm"])
                optimizer.step()
                optimizer.zero_grad()
        seen += samples
        if meter.mark(seen):
            break
    collector.shutdown()


if __name__ == "__main__":
    main()
