"""The newest versions, which the first learner of a machine makes available to the machine's collectors.

They are in memory that both sides map. If all of them compute on GPUs and can open each other's memory, the learner
lends the parameters instead: the message of a new version contains a handle, by which a collector copies the parameters
at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.distributed.channels import Channels
from lockstep.distributed.device_memory import Attempt, copy_of, lend, opening_from
from lockstep.distributed.shared_memory import Arena
from lockstep.models.versions import Version

_TRIAL = 1024
"""How many numbers a learner lends for a trial."""


class VersionBoard:
    """One process's view of the versions. The learner calls offer() and write(), and a collector calls the other
    methods.

    Args:
        count: how many versions are kept.
    """

    def __init__(self, agent: Agent, channels: Channels, count: int) -> None:
        self._channels, self._device, self._initial = channels, agent.device, agent.normalizers
        self._names = {name: len(sums) for name, sums in agent.normalizers.state().items()}
        size, sums, options = agent.flat.vector.numel(), sum(self._names.values()), len(agent.options)

        def layout(arena: Arena) -> list[tuple[Tensor, Tensor, Tensor]]:
            f64 = torch.float64
            return [
                (arena.zeros((size,)), arena.zeros((sums,), f64), arena.zeros((options,), f64)) for _ in range(count)
            ]

        self._places = channels.versions.map(layout)
        self.lends = False
        """Whether collectors copy parameters from this learner's GPU."""
        self._lent: dict[int, Tensor] = {}
        """By version: a collector's copies of lent parameters; empty if parameters are in shared memory."""

    def offer(self, attempt: Attempt) -> list[Any]:
        """A trial for each collector's try_out(); None if it cannot be made."""
        numbers = attempt(torch.arange, _TRIAL, device=self._device)
        return [attempt(lend, numbers) for _ in range(self._channels.collectors)]

    def write(self, version: Version) -> list[Any]:
        """Make a version available. Returns each collector's argument for receive()."""
        parameters, sums, options = self._places[version.number % len(self._places)]
        options.copy_(version.options)
        if self._names:
            sums.copy_(torch.cat([version.normalizers.state()[name] for name in self._names]))
        if not self.lends:
            parameters.copy_(version.parameters)
            return [None] * self._channels.collectors
        lent = version.parameters.to(self._device)
        return [lend(lent) for _ in range(self._channels.collectors)]

    def try_out(self, trial: Any) -> str | None:
        """Try to copy memory that the learner lends. Returns why this failed, or None."""
        attempt = Attempt()
        attempt(self._try, trial)
        return attempt.problem

    def _try(self, trial: Any) -> None:
        if not torch.equal(copy_of(trial, self._device).cpu(), torch.arange(_TRIAL)):
            raise RuntimeError("the numbers that arrived are not those that the learner lent")

    def receive(self, number: int, lent: Any) -> None:
        """Copy the parameters of a version if they are lent.

        Raises:
            ConnectionError: the learner has ended.
        """
        if lent is not None:
            with opening_from(self._channels.peers[0]):
                self._lent[number] = copy_of(lent, self._device)
            self._lent.pop(number - len(self._places), None)

    def has(self, number: int) -> bool:
        """Whether a written version can be read. If parameters are lent, its message comes later."""
        return not self._lent or number in self._lent

    def read(self, number: int) -> Version:
        """A version. Its parameters are views of the shared memory, unless they were lent."""
        parameters, sums, options = self._places[number % len(self._places)]
        state = dict(zip(self._names, sums.clone().split(list(self._names.values())), strict=True))
        parameters = self._lent[number] if self._lent else parameters
        return Version(number, parameters, self._initial.loaded(state), options.clone(), lasts=False)
