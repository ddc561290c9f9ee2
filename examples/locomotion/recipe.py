"""Train crawling bodies: a critic that observes the friction, attention over legs, and a target speed that rises with
success.

lockstep train examples/locomotion/recipe.py:recipe --layout processes:2 --run runs/crawl
lockstep eval runs/crawl --episodes 100
lockstep export runs/crawl --format onnx
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lockstep import recipes
from lockstep.envs import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.scheme import Scheme

HERE, FASTEST = Path(__file__).parent, 2.0


class LegAttention(nn.Module):
    """Each leg attends to all legs; what they find, and the other entries, pass through a layer."""

    out_features = 64

    def __init__(self, others: list[str], count: int) -> None:
        super().__init__()
        self.others = others
        self.query_key_value = nn.Linear(3, 3 * 16)
        self.joined = nn.Linear(4 * 16 + count, self.out_features)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        """[T, B, …] -> [T, B, F]"""
        query, key, value = self.query_key_value(obs["legs"].float()).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) / 4.0, -1)
        found = torch.tanh(weights @ value).flatten(-2)
        return torch.tanh(self.joined(torch.cat([found, *(obs[name].float() for name in self.others)], -1)))


@dataclass(frozen=True)
class CrawlModelConfig(StandardModelConfig):
    """Attention over legs in place of the MLP."""

    def build_encoder(self, observation_space: gymnasium.Space[Any], **_: Any) -> nn.Module:
        assert isinstance(observation_space, spaces.Dict)
        others = {name: spaces.flatdim(space) for name, space in observation_space.spaces.items() if name != "legs"}
        return LegAttention(list(others), sum(others.values()))


def faster(metrics: dict[str, float], options: dict[str, Any]) -> dict[str, Any]:
    """Ask for a tenth more speed once four of five episodes succeed."""
    return {"speed": min(FASTEST, 1.1 * options["speed"])} if metrics.get("env/success", 0.0) > 0.8 else options


def recipe() -> Experiment:
    """PPO on bodies that crawl (tuned here)."""
    base = recipes.ppo_mujoco()
    return base.replace(
        env=EnvConfig(f"{HERE}/crawl.py:Crawl", 256, metrics=("success", "distance"), curriculum={"speed": 0.5}),
        model=CrawlModelConfig(critic_only=("ground",)),
        algorithm=dataclasses.replace(base.algorithm, rollout=32, epochs=5, minibatches=8, learning_rate=1e-3),
        normalize=dataclasses.replace(base.normalize, observations=False),
        scheme=Scheme(shards=4),
        curriculum=f"{HERE}/recipe.py:faster",
        total_steps=1_000_000,
        precision="fp32",
    )
