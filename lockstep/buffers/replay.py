"""Replay: the latest steps of a shard's environments, from which minibatches are drawn.

Shape legend: C steps of the ring, T steps of a rollout, B environments of a shard, n items of a slice.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import below
from lockstep.algorithms.offpolicy import off_policy
from lockstep.buffers.arrivals import Arrivals, write
from lockstep.buffers.estimates import Estimates
from lockstep.buffers.frames import ring_for, ring_like
from lockstep.buffers.returns import replayed_returns
from lockstep.buffers.sum_tree import SumTree
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.core.transitions import Drawn, Future, Transitions
from lockstep.experiment import Experiment
from lockstep.models.observations import PLAIN, entries
from lockstep.portable.numbers import power

_LEAST_PRIORITY = 1e-6
"""Added to every priority, so that every item can still be drawn (Schaul et al. 2016, section 3.3)."""
_BY_STEP = ("action", "reward", "terminated", "truncated", "valid")
"""The fields that are stored of every step, besides observations."""


class Replay:
    """One shard's steps, in a ring over time that all its environments share.

    Steps are numbered from the beginning of the run, and step t is at place t mod C. The observation after step t is
    that of step t + 1. If step t ended an episode, this is the true last observation, since an environment's reset
    steps are stored, too. Reset steps are never drawn.

    The host draws items, and a GPU may read them (see move_to). Then only the GPU has the observations, and both have
    everything else.

    Args:
        experiment: gives the settings.
        rollout: an example of the rollouts to be inserted.
    """

    single_steps: ClassVar[bool] = True
    """Whether batch returns Transitions."""
    reads_on_gpu: ClassVar[bool] = True
    """Whether a GPU may read items. A subclass says so for itself: class Mine(Replay, reads_on_gpu=True). Otherwise its
    memory stays on the CPU, which gives the same bits, since its methods may read observations that only the GPU would
    have."""

    def __init_subclass__(cls, *, reads_on_gpu: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.reads_on_gpu = reads_on_gpu

    def __init__(self, experiment: Experiment, rollout: Rollout) -> None:
        config = self._config = off_policy(experiment.algorithm)
        self._discounts = torch.tensor([config.discount**k for k in range(config.n_step + 1)])
        """fp32 [N+1]: the discount after each number of steps of a return."""
        self.size = experiment.envs_per_shard
        self.item_bytes = 2 * sum(leaf[0, 0].nbytes for leaf in entries(rollout.obs).values())
        """Bytes of an item's first and last observation."""
        self.steps = ring_steps(experiment)
        shape = (self.steps, self.size)
        self._rings = {
            name: ring_for(self.steps, leaf, config.replay.store_frames) for name, leaf in entries(rollout.obs).items()
        }
        frames = max(ring.before for ring in self._rings.values())
        least = frames + config.rollout + config.item_steps + 1
        if self.steps < least:
            raise SettingsError(
                f"algorithm.replay.capacity={config.replay.capacity} is too small for stacks of {frames + 1} frames: "
                f"it needs at least {least * experiment.env.num_envs}. Or use --algorithm.replay.no-store-frames."
            )
        self._action = torch.zeros(*shape, *rollout.action.shape[2:], dtype=rollout.action.dtype)
        self._reward = torch.zeros(shape)
        self._terminated, self._truncated, self._valid = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
        self._last: dict[str, Tensor] = {}
        """The newest observations. The next rollout begins with them unless environments were reset."""
        self._tree = SumTree(self._places() * self.size) if config.replay.prioritized else None
        self._largest = 1.0
        """The largest priority so far."""
        self._estimates = Estimates(*shape) if config.keeps_policy else None
        """If new items get the priority of their error."""
        self.count = 0
        """Steps inserted so far."""
        self._device = torch.device("cpu")
        self._on_device: dict[str, Tensor] = {}
        """If a GPU reads items: its copies of the result of _mirrored."""

    def move_to(self, device: torch.device) -> None:
        """Move this memory, which must be empty, to a GPU, which then reads items."""
        assert not self.count
        self._device = device
        self._rings = {name: ring.on(device) for name, ring in self._rings.items()}
        self._on_device = {name: x.to(device) for name, x in self._mirrored().items()}

    @property
    def moves(self) -> int:
        """How often memory that items are read from has been reallocated. Graphs that read it must then be captured
        again."""
        return sum(ring.moves for ring in self._rings.values())

    def insert(self, rollout: Rollout, on_device: Rollout | None = None) -> None:
        """Store a rollout in place of the oldest steps.

        Args:
            on_device: the same rollout on a GPU, which is read instead if this memory is on that GPU.
        """
        if on_device is not None and on_device.reward.device != self._device:
            on_device = None
        arrivals, obs_on_device = Arrivals(self._device), {} if on_device is None else entries(on_device.obs)
        steps, before, obs = len(rollout.reward), self.count, entries(rollout.obs)
        continues = bool(self._last) and all(
            np.array_equal(leaf.numpy()[0], self._last[name].numpy(), equal_nan=leaf.is_floating_point())
            for name, leaf in obs.items()
        )
        if self._last and not continues:
            # The environments were reset between the rollouts, which cut off unfinished episodes. Their last
            # observations are stored where this rollout would begin, so it begins one step later.
            at = before % self.steps
            self._valid[at] = False
            self._truncated[at - 1] |= self._valid[at - 1] & ~self._terminated[at - 1]
            self.count += 1
        place, known = self.count % self.steps, int(continues)
        for name, leaf in obs.items():
            from_device = None if on_device is None else obs_on_device[name][known:]
            self._rings[name].put((place + known) % self.steps, leaf[known:], arrivals, from_device)
        self._last = {name: leaf[-1].clone() for name, leaf in obs.items()}
        for name in _BY_STEP:  # as arrays, whose small operations take a fraction of the time that torch's take
            write(getattr(self, f"_{name}").numpy(), place, getattr(rollout, name).numpy())
        if self._estimates is not None:
            self._estimates.write(place, rollout)
        self.count += steps
        self._renew(before, rollout)
        if self._on_device:
            self._mirror(before, arrivals)
        arrivals.arrive()

    def _mirror(self, before: int, arrivals: Arrivals) -> None:
        """Copy the host's fields of new steps to the GPU. `before` is the first of these. The step before it, which a
        reset may have cut, and the step after the last one are copied, too."""
        numbers = torch.arange(before - 1, self.count + 1)[-self.steps :] % self.steps
        for name, x in self._by_step().items():
            arrivals.write(self._on_device[name], int(numbers[0]), x[numbers])

    def _places(self) -> int:
        """How many items of each environment can be stored."""
        return self.steps

    def _renew(self, before: int, rollout: Rollout) -> None:
        """Make steps drawable that now have n_step successors, and forbid those that were overwritten."""
        tree = self._tree
        if tree is None:
            return
        oldest, newest = self._oldest(), self._newest()
        overwritten = np.arange(max(0, self.count - self.steps + 1), oldest)
        unfinished = np.arange(max(0, newest + 1), self.count + 1)
        ready = np.arange(max(oldest, before - self._config.n_step + 1), newest + 1)
        changed = self._items(np.concatenate([overwritten, unfinished, ready]))
        priorities = np.zeros(len(changed))
        valid = self._valid.numpy()[ready % self.steps].reshape(-1)
        first: Any = self._largest
        if self._estimates is not None:
            times, environments = np.repeat(ready, self.size), np.tile(np.arange(self.size), len(ready))
            first = self._by_error(self._estimates, times[None], environments[None])
        priorities[len(changed) - len(valid) :] = np.where(valid, first, 0.0)
        tree.set(changed, priorities)

    def _by_error(self, estimates: Estimates, times: np.ndarray, environments: np.ndarray) -> np.ndarray:
        """In proportion to which new items are drawn: float64 [n].

        Args:
            estimates: values that tell their errors.
            times: [M, n], the numbers of the steps that an item learns from.
            environments: [M, n]
        """
        found = replayed_returns(self._mirrored(), torch.from_numpy(times), torch.from_numpy(environments))
        reward, discount, ahead = (x.numpy() for x in found)
        value, next_value = estimates.at(times, times + ahead, environments)
        valid = self._valid.numpy()[times % self.steps, environments]
        with np.errstate(invalid="ignore", over="ignore"):
            errors = self._config.first_errors(value, reward, discount, next_value, valid)
        known = np.isfinite(errors)  # rewards may be infinite
        return np.where(known, self._weights(np.where(known, errors, 0.0)), self._largest)

    def _items(self, times: np.ndarray) -> np.ndarray:
        """The tree's items for these steps of all environments."""
        return ((times % self.steps)[:, None] * self.size + np.arange(self.size)).reshape(-1)

    def _oldest(self) -> int:
        """The number of the oldest step whose observation is complete, including the earlier frames that it needs."""
        return max(0, self.count - self.steps + 1 + max(ring.before for ring in self._rings.values()))

    def _newest(self) -> int:
        """The number of the newest step that has n_step successors."""
        return self.count - self._config.n_step

    def draw(
        self, items: int, generator: np.random.Generator, newest: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw items.

        Args:
            items: the number of items.
            generator: draws them.
            newest: draw uniformly from this many of the newest steps of every environment.

        Returns:
            The numbers of their steps [n], their environments [n], and the probability [n] of each.
        """
        low, high = self._oldest(), self._newest()
        if newest is not None:
            low = max(low, high + 1 - newest)
        assert high >= low, "learning began before there was anything to learn from"
        if self._tree is not None:
            place, environment, probability = self._by_priority(self._tree, items, generator)
            return low + (place - low) % self.steps, environment, probability
        times = generator.integers(low, high + 1, items)
        environments = generator.integers(0, self.size, items)
        missing, drawn = np.flatnonzero(~self._can_be_drawn(times, environments)), 0
        while len(missing):
            times[missing] = generator.integers(low, high + 1, len(missing))
            environments[missing] = generator.integers(0, self.size, len(missing))
            missing = missing[~self._can_be_drawn(times[missing], environments[missing])]
            drawn += 1
            assert drawn < 10_000, "nearly all stored steps are resets"
        return times, environments, np.full(items, 1.0 / ((high - low + 1) * self.size))

    def _by_priority(
        self, tree: SumTree, items: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places [n], environments [n], and the probability [n] of each."""
        total = tree.total
        # Draw one item from each of n equal parts of the sum, which spreads a minibatch over all priorities.
        sums = (np.arange(items) + generator.random(items)) * (total / items)
        found = tree.find(np.minimum(sums, np.nextafter(total, 0.0)))
        return found // self.size, found % self.size, tree[found] / total

    def observed(self, name: str, times: np.ndarray, environments: np.ndarray) -> Tensor:
        """An entry of the observations at these steps: [n, ...] in the host's memory."""
        ring = self._rings[name]
        at, environment = torch.from_numpy(times % self.steps), torch.from_numpy(environments)
        return ring.take(at.to(ring.device), environment.to(ring.device)).cpu()

    def episode_ends(self) -> tuple[int, np.ndarray]:
        """The number of the oldest step that can be drawn, and for each step from there on, the number of its episode's
        last step [steps, B]. While an episode continues, this is the newest step."""
        numbers = np.arange(self._oldest(), self.count)
        at = torch.from_numpy(numbers % self.steps)
        ended = (self._terminated[at] | self._truncated[at]).numpy()
        ends = np.where(ended, numbers[:, None], self.count - 1)
        return self._oldest(), np.minimum.accumulate(ends[::-1])[::-1]

    def _can_be_drawn(self, times: np.ndarray, environments: np.ndarray) -> np.ndarray:
        return self._valid.numpy()[times % self.steps, environments]

    def _kept(self) -> dict[str, Tensor]:
        """The tensors of _mirrored on the device that reads items."""
        return self._on_device or self._mirrored()

    def to_read(self, times: np.ndarray, environments: np.ndarray, weight: np.ndarray) -> Drawn:
        """The argument of `items`, on the host."""
        return Drawn(
            time=torch.from_numpy(times),
            environment=torch.from_numpy(environments),
            rollout=None,
            weight=torch.from_numpy(weight).to(torch.float32),
            noise=None,
            deviation=None,
        )

    def batch(self, times: np.ndarray, environments: np.ndarray, weight: np.ndarray) -> Any:
        """The minibatch of drawn items, from a memory on the host."""
        return self.items(self.to_read(times, environments, weight))

    def items(self, drawn: Drawn) -> Any:
        """The minibatch of drawn items. `drawn` must be on the device of this memory, which the host does not wait
        for."""
        time, environment = drawn.time, drawn.environment
        reward, discount, ahead = replayed_returns(self._kept(), time, environment)
        at, then = time % self.steps, (time + ahead) % self.steps

        # All observations at once, since small minibatches take little more time than single items.
        both = torch.cat([at, then]), torch.cat([environment, environment])
        read = {name: ring.take(*both).unflatten(0, (2, 1, len(time))) for name, ring in self._rings.items()}

        def part(index: int) -> Any:
            taken = {name: x[index] for name, x in read.items()}
            return taken.get(PLAIN, taken)

        return Transitions(
            obs=part(0),
            action=self._kept()["action"][at, environment].unsqueeze(0),
            reward=reward.unsqueeze(0),
            discount=discount.unsqueeze(0),
            next_obs=part(1),
            weight=drawn.weight,
            valid=torch.ones(1, len(time), dtype=torch.bool, device=time.device),
            noise=drawn.noise,
            future=self._future(time, environment, ahead),
        )

    def _future(self, time: Tensor, environment: Tensor, ahead: Tensor) -> Future | None:
        """What followed items, if losses predict it.

        Args:
            time, environment: int64 [n], the numbers of their steps and their environments.
            ahead: int64 [n], for how many steps their episodes went on, at most n_step.
        """
        return None

    def prioritize(self, times: np.ndarray, environments: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of drawn items, except those that have been overwritten since."""
        assert self._tree is not None
        present = self._present(times)
        items = (times % self._places() * self.size + environments)[present]
        weights = self._weights(priorities[present])
        self._tree.set(items, weights)
        self._largest = max(self._largest, float(weights.max(initial=0.0)))

    def _weights(self, priorities: np.ndarray) -> np.ndarray:
        """In proportion to which items with these priorities [n] are drawn: float64 [n]."""
        return power(np.abs(priorities.astype(np.float64)) + _LEAST_PRIORITY, self._config.replay.alpha)

    def _present(self, times: np.ndarray) -> np.ndarray:
        """bool [n]: whether items have not been overwritten."""
        return times >= self._oldest()

    def between(self, first: int, end: int) -> dict[str, Tensor]:
        """The steps first to end - 1, by name."""
        at = torch.arange(first, end) % self.steps
        rings = {
            f"obs.{name}.{key}": x for name, ring in self._rings.items() for key, x in ring.between(first, end).items()
        }
        return {**rings, **{name: tensor[at] for name, tensor in self._of_checkpoints().items()}}

    def put_back(self, first: int, tensors: dict[str, Tensor]) -> None:
        """Restore the result of between."""
        for name, ring in self._rings.items():
            kept = below(f"obs.{name}.", tensors)
            self._rings[name] = ring_like(ring, kept)
            self._rings[name].put_back(first, kept)
        for name, tensor in self._of_checkpoints().items():
            tensor[(first + torch.arange(len(tensors[name]))) % self.steps] = tensors[name]

    def _mirrored(self) -> dict[str, Tensor]:
        """The host's tensors that items are made from, without observations. A GPU that reads items has copies."""
        return {**self._by_step(), "discounts": self._discounts}

    def _by_step(self) -> dict[str, Tensor]:
        """The tensors [C, B, ...] that items are made from."""
        return {name: getattr(self, f"_{name}") for name in _BY_STEP}

    def _of_checkpoints(self) -> dict[str, Tensor]:
        """All tensors [C, B, ...]."""
        return {**self._by_step(), **({} if self._estimates is None else self._estimates.by_step())}

    def state(self) -> dict[str, Tensor]:
        """The state that is not per step, by name."""
        rings = {f"obs.{name}.{key}": x for name, ring in self._rings.items() for key, x in ring.state().items()}
        tree = {} if self._tree is None else {"priorities": torch.from_numpy(self._tree.priorities)}
        if self._estimates is not None:
            tree["next_best"] = self._estimates.best[self.count % self.steps].clone()
        return {
            **rings,
            **tree,
            **{f"last.{name}": leaf for name, leaf in self._last.items()},
            "largest": torch.tensor(self._largest, dtype=torch.float64),
            "count": torch.tensor(self.count),
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of `state`. The steps must have been restored before."""
        for name, ring in self._rings.items():
            ring.load(below(f"obs.{name}.", tensors))
        if self._tree is not None:
            self._tree.set(np.arange(self._tree.size), tensors["priorities"].numpy())
        self._last = {name: x.clone() for name, x in below("last.", tensors).items()}
        self._largest, self.count = float(tensors["largest"]), int(tensors["count"])
        if self._estimates is not None:
            self._estimates.best[self.count % self.steps] = tensors["next_best"]
        self._refresh()

    def _refresh(self) -> None:
        """Copy the result of _mirrored to the GPU, if one reads items."""
        mirrored = self._mirrored()
        for name, on_device in self._on_device.items():
            on_device.copy_(mirrored[name])

    @property
    def nbytes(self) -> int:
        """The memory's size in bytes."""
        rings = sum(ring.nbytes for ring in self._rings.values())
        tree = 0 if self._tree is None else self._tree.nbytes
        return rings + tree + sum(tensor.nbytes for tensor in self._of_checkpoints().values())


def ring_steps(experiment: Experiment) -> int:
    """How many steps of each environment replay stores."""
    return off_policy(experiment.algorithm).replay.capacity // experiment.env.num_envs
