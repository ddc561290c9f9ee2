"""The global random generators of torch, NumPy and Python. lockstep never draws from them, but users' code may."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator

import numpy as np
import torch
from numpy.random import mtrand

from lockstep.config.settings import SettingsError


class GlobalGenerators:
    """Seeds the global generators of torch and NumPy for users' code.

    Args:
        device: the device on which the code computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_numpy = np.random.MT19937(0)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the generators at the end of the block, so that other code does not notice their seeds."""
        of_torch, of_numpy = _of_torch(self._device), mtrand.get_bit_generator()
        states = [each.get_state() for each in of_torch]
        mtrand.set_bit_generator(self._of_numpy)  # reading NumPy's state takes a hundred times as long
        try:
            yield
        finally:
            mtrand.set_bit_generator(of_numpy)
            for generator, state in zip(of_torch, states, strict=True):
                generator.set_state(state)

    def seed(self, number: int) -> None:
        """Let all further draws follow from this number of 31 bits. Takes 2 µs."""
        for each in _of_torch(self._device):
            each.manual_seed(number)
        np.random.seed(number)


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Let all draws from the global generators of torch (on the CPU) and NumPy in the block follow from this number."""
    generators = GlobalGenerators(torch.device("cpu"))
    with generators.restored():
        generators.seed(number)
        yield


def states(device: torch.device) -> dict[str, bytes]:
    """The state of the global generator of each owner: torch, NumPy and Python. Reading them takes half a
    millisecond."""
    of_torch = b"".join(each.get_state().numpy().tobytes() for each in _of_torch(device))
    return {"torch": of_torch, "NumPy": pickle.dumps(np.random.get_state()), "Python": pickle.dumps(random.getstate())}


def drawn(before: dict[str, bytes], device: torch.device) -> list[str]:
    """The owners of the global generators whose states differ from earlier ones."""
    return [name for name, state in states(device).items() if state != before[name]]


def generators(owners: list[str]) -> str:
    """The global generators of these owners, in words."""
    names = " and ".join(f"{owner}'s" for owner in owners)
    return f"{names} global random generator{'s' if len(owners) > 1 else ''}"


@contextlib.contextmanager
def no_draws(who: str, device: torch.device, advice: str) -> Iterator[None]:
    """Check that users' code that acts draws nothing from global generators.

    Args:
        who: the function that runs in the block.
        device: the device on which it computes.
        advice: what to do instead, as sentences.

    Raises:
        SettingsError: it drew numbers.
    """
    before = states(device)
    yield
    if owners := drawn(before, device):
        raise SettingsError(
            f"{who} drew from {generators(owners)} while acting, so actions would depend on the layout. {advice}"
        )


def _of_torch(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    index = device.index or 0
    return [torch.default_generator, *torch.cuda.default_generators[index : index + 1]]  # a simulated GPU has none
