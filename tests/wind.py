"""An environment in torch for tests, with everything that can be in one."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep.envs.torch_env import State, TorchEnv, uniform


class Wind(TorchEnv):
    """A picture and a place, actions with bounds, rewards beyond 1, and wind."""

    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 255, (3, 10, 10), np.uint8), "vector": spaces.Box(-5, 5, (2,), np.float32)}
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, num_envs: int, device: torch.device, wrong: str = "") -> None:
        super().__init__(num_envs, device)
        self.wrong = wrong

    def reset(self, seeds: Tensor) -> State:
        return {"place": uniform(seeds, 2, -1.0, 1.0), "seed": seeds, "steps": torch.zeros_like(seeds)}

    def step(self, state: State, actions: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
        wind = uniform(state["seed"], 2, -0.1, 0.1, draw=state["steps"] + 1)
        place, steps = state["place"] + 0.5 * actions + wind, state["steps"] + 1
        far = place.abs().amax(-1)
        if self.wrong == "item" and far.max().item() > 100:
            place = place * 0
        if self.wrong == "tolist":
            place = place * len(far.tolist()) / len(far)
        return {**state, "place": place, "steps": steps}, 3 - 2 * far, far > 2, steps >= 7

    def observe(self, state: State) -> dict[str, Tensor]:
        bright = (state["place"].abs() * 50).clamp(max=255).to(torch.uint8)
        image = torch.cat([bright, bright.amax(-1, keepdim=True)], -1)
        return {"image": image[:, :, None, None].expand(-1, -1, 10, 10), "vector": state["place"].clamp(-5, 5)}


class Careless(TorchEnv):
    """Changes the actions that it is given."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, seeds: Tensor) -> State:
        return {"place": uniform(seeds, 1, -1.0, 1.0)}

    def step(self, state: State, actions: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
        place = state["place"] + actions.mul_(2).sub_(1).unsqueeze(-1)
        out = place.abs()[:, 0] > 4
        return {"place": place}, place[:, 0], out, torch.zeros_like(out)

    def observe(self, state: State) -> Tensor:
        return state["place"]
