"""Random numbers that users' models and losses draw from the global generators of torch and NumPy.

They are seeded before each loss, so such draws (torch.rand, Dropout, np.random) have the same bits on every layout, in
replays and after resuming.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lockstep.agent import Agent
from lockstep.algorithms.wrapper import Wrapper
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import is_users
from lockstep.core.rng import derive_seed
from lockstep.system.generators import GlobalGenerators, drawn, generators, states


class UsersDraws:
    """Seeds the global generators for an agent with a user's model or algorithm. lockstep's own draw from none."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._seed = agent, agent.experiment.seed
        self._generators = GlobalGenerators(agent.device)
        self._iteration = 0

    def of_iteration(self, iteration: int) -> contextlib.AbstractContextManager[None]:
        """Begin an iteration. At the end of the block, the generators are restored."""
        self._iteration = iteration
        return self._generators.restored()

    def seed(self, step: int, *slot: int) -> None:
        """Let further draws follow from a gradient step and, for a loss, the batch slot."""
        self._generators.seed(derive_seed(self._seed, "global loss", self._iteration, step, *slot))

    @contextlib.contextmanager
    def checked_beginning(self) -> Iterator[None]:
        """Check that what happens before the first loss draws nothing, since its draws would not be repeatable.

        Raises:
            SettingsError: it drew numbers.
        """
        before = states(self._agent.device)
        yield
        if owners := drawn(before, self._agent.device):
            raise SettingsError(
                f"{self._name}.targets, or a storage of yours, drew from {generators(owners)} before the loss. Such "
                "numbers depend on the layout. Draw in the loss, for which lockstep seeds the generators of torch and "
                "NumPy, or from lockstep.core.rng.stream(seed, name, slot, iteration)."
            )

    @contextlib.contextmanager
    def checked_loss(self, *, graphs: bool) -> Iterator[None]:
        """Check that the first loss draws only from generators that are seeded.

        Args:
            graphs: whether CUDA graphs will replace later calls of the loss.

        Raises:
            SettingsError: it drew from others.
        """
        before = states(self._agent.device)
        yield
        owners = drawn(before, self._agent.device)
        if "Python" in owners:
            raise SettingsError(
                f"{self._name}.loss or the model drew from {generators(['Python'])}, which lockstep does not seed, so "
                "the run could be neither verified nor resumed exactly. Draw from torch's or NumPy's, with torch.rand "
                "or np.random, for example."
            )
        if owners and graphs:
            raise SettingsError(
                f"{self._name}.loss or the model drew from {generators(owners)}, but graphs=1 captures the losses of "
                "several shards in one graph, so the numbers would depend on the layout. Use graphs=0 in the layout."
            )

    @property
    def _name(self) -> str:
        algorithm = self._agent.algorithm
        return type(algorithm.inner if isinstance(algorithm, Wrapper) else algorithm).__name__


def users_draws(agent: Agent) -> UsersDraws | None:
    """UsersDraws if the agent's model or algorithm is a user's class."""
    parts = agent.experiment.algorithm, agent.experiment.model
    return UsersDraws(agent) if any(map(is_users, parts)) else None
