"""Rings of observations. A ring of stacked images can store each frame once.

An environment that shows its last K frames repeats K - 1 of them at every step. Only the newest frame is stored, and
stacks are rebuilt exactly when they are drawn. A stack that does not continue the previous one began an episode. Its
older frames (copies of the newest, zeros, or frames from before the agent could act) are in no other step, so they are
kept aside.

A GPU holds observations and a copy of the tables that locate frames. The host needs these tables, too.

Shape legend: C steps of the ring, B environments, K frames of a stack, E stacks kept aside, n items.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lockstep.buffers.arrivals import Arrivals, write
from lockstep.buffers.on_demand import zeros_on_demand
from lockstep.config.settings import SettingsError
from lockstep.system.memory import available_bytes

_ASIDE = 32
"""Steps of the ring per stack that can be kept aside. The memory grows if episodes are shorter on average."""


class Ring:
    """Observations of C steps of B environments, kept unchanged."""

    before = 0
    """How many earlier steps an observation needs."""
    moves = 0
    """How often the memory that observations are read from has been reallocated."""

    def __init__(self, steps: int, example: Tensor, device: torch.device | None = None) -> None:
        self._obs = zeros_on_demand(steps, *example.shape, dtype=example.dtype, device=device)

    @property
    def device(self) -> torch.device:
        """The device of the observations."""
        return self._obs.device

    def on(self, device: torch.device) -> Ring:
        """An empty ring like this one on a device."""
        return Ring(len(self._obs), self._obs[0], device)

    def put(self, place: int, obs: Tensor, arrivals: Arrivals, on_device: Tensor | None = None) -> None:
        """Write the observations [T, B, ...] of the next steps, from this place on. on_device: the same observations on
        this ring's device, if available."""
        arrivals.write(self._obs, place, obs if on_device is None else on_device)

    def take(self, at: Tensor, environment: Tensor) -> Tensor:
        """The observations [n, ...] at places [n] of environments [n]."""
        return self._obs.flatten(0, 1).index_select(0, at * self._obs.shape[1] + environment)

    def between(self, first: int, end: int) -> dict[str, Tensor]:
        """The steps first to end - 1, by name."""
        return {"obs": part_of(self._obs, first, end)}

    def put_back(self, first: int, tensors: dict[str, Tensor]) -> None:
        """Restore the result of between."""
        write(self._obs, first % len(self._obs), tensors["obs"].to(self.device))

    def state(self) -> dict[str, Tensor]:
        """The state that is not per step, by name."""
        return {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of state."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._obs.nbytes


class StackedFrames(Ring):
    """Images uint8 [K, H, W]. Within an episode, their first K - 1 frames are the last frames of the previous step."""

    def __init__(self, steps: int, example: Tensor, device: torch.device | None = None) -> None:
        environments, self._stack, *image = example.shape
        self.before = self._stack - 1
        self._frames = zeros_on_demand(steps, environments, *image, dtype=torch.uint8, device=device)
        self._age = torch.zeros(steps, environments, dtype=torch.int64)
        """Steps since the episode began, at most K - 1: this many frames of the stack come from previous steps."""
        self._beginning = torch.zeros(steps, environments, dtype=torch.int64)
        """Where the stack that began the episode is kept."""
        aside = max(16 * environments, steps * environments // _ASIDE)
        self._aside = zeros_on_demand(aside, self.before, *image, dtype=torch.uint8, device=device)
        self._aside_step = torch.full((aside,), -steps, dtype=torch.int64)
        """For each kept stack, the number of the step whose observation it was."""
        self._newest = torch.zeros(example.shape, dtype=example.dtype)
        self._counts = torch.zeros(2, dtype=torch.int64)
        """Steps stored, and where the next stack is kept aside."""
        self._on_device: tuple[Tensor, ...] = ()
        """Copies of _mirrored on the GPU that holds the frames, if one does."""
        if device is not None and device.type != "cpu":
            self._on_device = tuple(torch.zeros_like(x, device=device) for x in self._mirrored())

    @property
    def device(self) -> torch.device:
        return self._frames.device

    def on(self, device: torch.device) -> Ring:
        return StackedFrames(len(self._frames), self._newest, device)

    def put(self, place: int, obs: Tensor, arrivals: Arrivals, on_device: Tensor | None = None) -> None:
        # Small operations on arrays take a fraction of the time that torch's take.
        source, stacks, steps = obs if on_device is None else on_device, obs.numpy(), len(obs)
        newest, counts, ages, beginnings = (x.numpy() for x in (self._newest, self._counts, *self._mirrored()))
        continues = np.empty(stacks.shape[:2], bool)
        continues[:1] = _equal(stacks[:1, :, :-1], newest[None, :, 1:]) & (counts[0] > 0)
        continues[1:] = _equal(stacks[1:, :, :-1], stacks[:-1, :, 1:])
        newest[:] = stacks[-1]
        arrivals.write(self._frames, place, source[:, :, -1])
        age = ages[place - 1] + 1 + np.arange(steps)[:, None]
        beginning = beginnings[place - 1 : place or None].repeat(steps, 0)
        if not continues.all():  # which is rare, and takes many operations
            age, beginning = self._begin(continues, age, beginning, stacks, source, arrivals)
        age = np.minimum(age, self.before)
        write(ages, place, age)
        write(beginnings, place, beginning)
        for copy, x in zip(self._on_device, (age, beginning), strict=False):
            arrivals.write(copy, place, torch.from_numpy(x))
        counts[0] += steps

    def _begin(
        self,
        continues: np.ndarray,
        age: np.ndarray,
        beginning: np.ndarray,
        stacks: np.ndarray,
        source: Tensor,
        arrivals: Arrivals,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keep aside the stacks with which episodes begin, where continues [T, B] is false. Takes ages and beginnings
        [T, B] that ignore these stacks, and returns correct ones."""
        steps, (puts, next_place) = len(self._frames), self._counts.tolist()
        t, environment = (~continues).nonzero()
        of_aside = self._aside_step.numpy()
        places = (next_place + np.arange(len(t))) % len(self._aside)
        if len(t) > len(self._aside) or (of_aside[places] > puts + t - steps).any():
            free = np.flatnonzero(of_aside <= puts - steps)
            if len(free) < len(t):
                self._grow(min(2 * len(self._aside), self._age.numel()) + len(t))
                of_aside = self._aside_step.numpy()
                free = np.flatnonzero(of_aside <= puts - steps)
            places = free[: len(t)]
            next_place = int(places[-1]) + 1 - len(t)
        of_aside[places] = puts + t
        if self.device.type == "cpu":
            self._aside.numpy()[places] = stacks[t, environment, :-1]
        else:
            for place, step, column in zip(places.tolist(), t.tolist(), environment.tolist(), strict=True):
                arrivals.write(self._aside, place, source[step : step + 1, column, :-1])
        began, where = np.full(continues.shape, -1), np.zeros(continues.shape, np.int64)
        began[t, environment], where[t, environment] = t, places
        began = np.maximum.accumulate(began)  # the step of this call at which each episode began, -1 if before
        age = np.where(began < 0, age, np.arange(len(stacks))[:, None] - began)
        beginning = np.where(began < 0, beginning, np.take_along_axis(where, np.maximum(began, 0), 0))
        self._counts[1] = next_place + len(t)
        return age, beginning

    def _grow(self, aside: int) -> None:
        """Make room for this many stacks that are kept aside. The existing ones keep their indices.

        Raises:
            SettingsError: there is not enough memory.
        """
        more = aside - len(self._aside)
        # The memory of the old stacks is only freed after the copy, so all of the new memory is needed in addition.
        device, on_gpu = self._aside.device, self._aside.is_cuda
        needed = aside * self._aside[0].nbytes
        available = torch.cuda.mem_get_info(device)[0] if on_gpu else available_bytes()
        if available is not None and needed > available:
            raise SettingsError(
                f"Episodes are so short that {aside:,} first stacks must be kept, which takes {needed / 1e9:.1f} GB, "
                f"but only {available / 1e9:.1f} GB of {'the GPU' if on_gpu else ''}memory are available. "
                f"{'Resume with replay=cpu in --layout' if on_gpu else 'Free some and resume'}, or train again "
                "with a smaller --algorithm.replay.capacity, or with --algorithm.replay.no-store-frames if "
                "observations are not stacks of frames."
            )
        self._aside = torch.cat([self._aside, self._aside.new_zeros(more, *self._aside.shape[1:])])
        self._aside_step = torch.cat([self._aside_step, self._aside_step.new_full((more,), -len(self._frames))])
        self.moves += 1

    def take(self, at: Tensor, environment: Tensor) -> Tensor:
        steps, environments, *image = self._frames.shape
        age, beginning = (x[at, environment] for x in self._on_device or self._mirrored())
        frame = torch.arange(self._stack, device=at.device)
        back = self.before - frame  # for each frame of a stack: how many steps ago it was the newest
        rows = ((at.unsqueeze(1) - back) % steps) * environments + environment.unsqueeze(1)
        stacks = self._frames.flatten(0, 1).index_select(0, rows.flatten()).view(len(at), self._stack, *image)
        older = back > age.unsqueeze(1)  # frames that are kept aside
        if at.device.type != "cpu":  # does not wait to know their number
            kept = beginning.unsqueeze(1) * self.before + (frame + age.unsqueeze(1)).clamp(max=self.before - 1)
            aside = self._aside.flatten(0, 1).index_select(0, kept.flatten()).view_as(stacks)
            return torch.where(older.view(*older.shape, *[1] * len(image)), aside, stacks)
        item, place = older.nonzero(as_tuple=True)
        if len(item):
            stacks[item, place] = self._aside[beginning[item], place + age[item]]
        return stacks

    def between(self, first: int, end: int) -> dict[str, Tensor]:
        aside = ((self._aside_step >= first) & (self._aside_step < end)).nonzero()[:, 0]
        return {
            **{name: part_of(tensor, first, end) for name, tensor in self._by_step().items()},
            "aside_at": aside,
            "aside_step": self._aside_step[aside],
            "aside": self._aside[aside.to(self.device)].cpu(),
        }

    def put_back(self, first: int, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self._by_step().items():
            write(tensor, first % len(tensor), tensors[name].to(tensor.device))
        if len(tensors["aside_at"]) and int(tensors["aside_at"].max()) >= len(self._aside):
            self._grow(int(tensors["aside_at"].max()) + 1)
        self._aside_step[tensors["aside_at"]] = tensors["aside_step"]
        self._aside[tensors["aside_at"].to(self.device)] = tensors["aside"].to(self.device)

    def _mirrored(self) -> tuple[Tensor, Tensor]:
        return self._age, self._beginning

    def _by_step(self) -> dict[str, Tensor]:
        return {"frames": self._frames, "age": self._age, "beginning": self._beginning}

    def state(self) -> dict[str, Tensor]:
        return {"newest": self._newest, "counts": self._counts, "aside": torch.tensor(len(self._aside))}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._newest.copy_(tensors["newest"])
        self._counts.copy_(tensors["counts"])
        for on_device, x in zip(self._on_device, self._mirrored(), strict=False):
            on_device.copy_(x)
        if int(tensors["aside"]) > len(self._aside):
            self._grow(int(tensors["aside"]))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._by_step().values(), self._aside, self._aside_step))


def ring_for(steps: int, obs: Tensor, once: bool) -> Ring:
    """A ring for observations like obs [T+1, B, ...]. once: whether to store each frame of a stack once."""
    if once and obs.dtype == torch.uint8 and obs.ndim == 5 and obs.shape[2] > 1 and len(obs) > 1:
        stacks = obs.numpy()
        if _equal(stacks[1:, :, :-1], stacks[:-1, :, 1:]).mean() > 0.5:
            return StackedFrames(steps, obs[0])
    return Ring(steps, obs[0])


def ring_like(ring: Ring, kept: dict[str, Tensor]) -> Ring:
    """The ring, or an empty one of the other kind if `kept`, a result of `between`, is of that kind. The kind of `ring`
    may be wrong, since a rollout of mostly resets does not show which kind fits."""
    if isinstance(ring, StackedFrames):
        return Ring(len(ring._frames), ring._newest, ring.device) if "obs" in kept else ring
    return ring if "obs" in kept else StackedFrames(len(ring._obs), ring._obs[0], ring.device)


def part_of(ring: Tensor, first: int, end: int) -> Tensor:
    """The steps first to end - 1 of a ring [C, ...], on the host."""
    at = torch.arange(first, end) % len(ring)
    return ring[at.to(ring.device)].cpu()


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [T, B]: whether stacks [T, B, K, H, W] are equal, eight pixels at a time if their number allows it. numpy's
    all is twenty times as fast as torch's."""
    x, y = (stacks.reshape(*stacks.shape[:3], math.prod(stacks.shape[3:])) for stacks in (a, b))
    if x.shape[-1] % 8 == 0 and x.strides[-1] == y.strides[-1] == 1:
        x, y = x.view(np.int64), y.view(np.int64)
    return (x == y).all((2, 3))
