"""Small tasks that test memory, mixed observations and actions, and goals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Memory(gymnasium.Env[np.ndarray, np.int64]):
    """Remember a symbol through random distractors.

    The first observation shows the cue, one of `symbols` equally likely symbols. `length` observations with independent
    random symbols follow. The last observation shows no symbol and asks for the answer: the reward is 1 if the action
    equals the cue and -1 otherwise, and the episode ends. Earlier actions have no effect and earn 0.

    Observation: float32 [3 + symbols], the phase (cue, distractor, question) and the symbol, both one-hot.

    No memoryless policy scores above 2 / symbols - 1 on average. Proof: the question's observation is a constant, and
    neither the observations nor the end of the episode depend on the actions; so the distribution of a memoryless
    policy's answer is independent of the cue, it equals the cue with probability 1 / symbols, and the expected reward
    is 1 / symbols - (1 - 1 / symbols). One that remembers the cue scores 1. (A policy that is given its previous action
    as an input is not memoryless: it can carry the cue through its actions.)
    """

    def __init__(self, length: int = 8, symbols: int = 4) -> None:
        if length < 0 or symbols < 2:
            raise ValueError(f"length={length} must be at least 0 and symbols={symbols} at least 2")
        self.length, self.symbols = length, symbols
        self.observation_space = spaces.Box(0.0, 1.0, (3 + symbols,), np.float32)
        self.action_space = spaces.Discrete(symbols)
        self._time = 0
        self._cue = 0

    def _observe(self, phase: int, symbol: int | None) -> np.ndarray:
        obs = np.zeros(3 + self.symbols, np.float32)
        obs[phase] = 1.0
        if symbol is not None:
            obs[3 + symbol] = 1.0
        return obs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        self._cue = int(self.np_random.integers(self.symbols))
        return self._observe(0, self._cue), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._time += 1
        if self._time <= self.length:
            return self._observe(1, int(self.np_random.integers(self.symbols))), 0.0, False, False, {}
        if self._time == self.length + 1:
            return self._observe(2, None), 0.0, False, False, {}
        return self._observe(2, None), 1.0 if action == self._cue else -1.0, True, False, {}


class TupleBandit(gymnasium.Env[Any, Any]):
    """A contextual bandit of `steps` rounds. The agent sees an image and a vector, and chooses an arm and a point.

    Observation: "image" uint8 [1, 36, 36], one of `arms` horizontal bands lit (36 is the least that a Nature CNN
    takes); "vector" float32 [2], uniform in [-1, 1]; with `mask`, "action_mask" int8 [arms], where half of the arms,
    never the lit one, are forbidden. Action: (arm, point in [-1, 1]^2). Reward: 1 if the arm is the lit one, -1 if it
    is forbidden, less the mean squared distance between point and vector. Best: 1 a round.
    """

    def __init__(self, arms: int = 4, steps: int = 8, mask: bool = False) -> None:
        if not 1 <= arms <= 36:
            raise ValueError(f"arms={arms} must be between 1 and 36, the columns of the image that shows them")
        self.arms, self.steps, self.mask = arms, steps, mask
        observation: dict[str, spaces.Space[Any]] = {
            "image": spaces.Box(0, 255, (1, 36, 36), np.uint8),
            "vector": spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
        if mask:
            observation["action_mask"] = spaces.MultiBinary(arms)
        self.observation_space = spaces.Dict(observation)
        self.action_space = spaces.Tuple((spaces.Discrete(arms), spaces.Box(-1.0, 1.0, (2,), np.float32)))
        self._time = 0
        self._arm = 0
        self._point = np.zeros(2, np.float32)
        self._allowed = np.ones(arms, np.int8)

    def _draw(self) -> dict[str, np.ndarray]:
        self._arm = int(self.np_random.integers(self.arms))
        self._point = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        image = np.zeros((1, 36, 36), np.uint8)
        band = 36 // self.arms
        image[0, self._arm * band : (self._arm + 1) * band] = 255
        obs: dict[str, np.ndarray] = {"image": image, "vector": self._point}
        if self.mask:
            others = np.delete(np.arange(self.arms), self._arm)
            self._allowed = np.ones(self.arms, np.int8)
            self._allowed[self.np_random.choice(others, self.arms // 2, replace=False)] = 0
            obs["action_mask"] = self._allowed
        return obs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        return self._draw(), {}

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        arm, point = action
        reward = float(arm == self._arm) - float(not self._allowed[arm])
        reward -= float(np.mean((np.asarray(point) - self._point) ** 2))
        self._time += 1
        return self._draw(), reward, False, self._time >= self.steps, {}


class Hidden(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """A gymnasium task with some numbers of its observations hidden, so that a policy needs memory. By default it is
    Pendulum without its velocity.

    Args:
        task: the id of a task that observes a vector.
        seen: indices of the numbers that remain, from 0.
        options: options of the task.
    """

    def __init__(self, task: str = "Pendulum-v1", seen: Sequence[int] | int = (0, 1), **options: Any) -> None:
        super().__init__(gymnasium.make(task, **options))
        space = self.env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"task={task} observes {space}, but only numbers of a vector, Box [N], can be hidden")
        size, seen = space.shape[0], (seen,) if isinstance(seen, int) else seen
        if not seen or len(set(seen)) < len(seen) or not all(0 <= place < size for place in seen):
            raise ValueError(f"seen={list(seen)} must name some of the places 0 to {size - 1} of {task}, each once")
        self._seen = list(seen)
        self.observation_space = spaces.Box(space.low[self._seen], space.high[self._seen], dtype=space.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self._seen]


class BitFlip(gymnasium.Env[Any, np.int64]):
    """Flip one bit at a time until all equal the goal (Andrychowicz et al. 2017, section 3.1).

    Observation: "observation" and "achieved_goal", the bits, and "desired_goal", each float32 [bits]. Action: the bit
    to flip. Reward: -1 per step, 0 for the step that reaches the goal, which ends the episode. Otherwise the episode is
    truncated after `bits` steps. The best mean score is 1 - bits / 2; a policy that never reaches the goal scores
    -bits. Random actions reach the goal so rarely (about once in 2^bits) that with 13 bits or more nothing can be
    learned from it.
    """

    def __init__(self, bits: int = 13) -> None:
        if not 1 <= bits <= 62:
            raise ValueError(f"bits={bits} must be between 1 and 62")
        self.bits = bits
        entry = spaces.Box(0.0, 1.0, (bits,), np.float32)
        self.observation_space = spaces.Dict({"observation": entry, "achieved_goal": entry, "desired_goal": entry})
        self.action_space = spaces.Discrete(bits)
        self._state = self._goal = np.zeros(bits, np.float32)
        self._time = 0

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """float32 [...]: goals are [..., bits]"""
        return (achieved_goal == desired_goal).all(-1).astype(np.float32) - 1

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """bool [...]"""
        return (achieved_goal == desired_goal).all(-1)

    def _observe(self) -> dict[str, np.ndarray]:
        bits = {"observation": self._state, "achieved_goal": self._state, "desired_goal": self._goal}
        return {name: x.copy() for name, x in bits.items()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        self._state = self.np_random.integers(0, 2, self.bits).astype(np.float32)
        wrong = self.np_random.integers(1, 2**self.bits)  # at least one of them
        self._goal = np.abs(self._state - (wrong >> np.arange(self.bits) & 1)).astype(np.float32)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self._time += 1
        self._state[action] = 1 - self._state[action]
        reward = float(self.compute_reward(self._state, self._goal, {}))
        return self._observe(), reward, reward == 0, self._time >= self.bits, {}


gymnasium.register("lockstep/BitFlip-v0", entry_point="lockstep.envs.tasks:BitFlip")
gymnasium.register("lockstep/Memory-v0", entry_point="lockstep.envs.tasks:Memory")
gymnasium.register("lockstep/Hidden-v0", entry_point="lockstep.envs.tasks:Hidden")
gymnasium.register("lockstep/TupleBandit-v0", entry_point="lockstep.envs.tasks:TupleBandit")
