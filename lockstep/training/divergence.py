"""Detects that learning diverges, stops the run, and names the last finite checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.config.settings import Diverged, NotFinite
from lockstep.run import checkpoint
from lockstep.run.folder import RunFolder

PATIENCE = 5
"""Maximum number of consecutive iterations with NaN or infinite losses while parameters are finite. Parameters that are
not finite never become finite again."""


def losses_not_finite(metrics: Mapping[str, float]) -> list[str]:
    """Names of the losses that are NaN or infinite."""
    return sorted(name for name, x in metrics.items() if name.startswith("loss/") and not math.isfinite(x))


class Divergence:
    """Detects in learner 0 that learning has diverged.

    Args:
        stop: whether to stop the run on divergence.
    """

    def __init__(self, folder: RunFolder, *, stop: bool) -> None:
        self._folder, self._stop = folder, stop
        self._since = 0
        """Consecutive iterations with losses that were not finite."""

    def check(self, iterations: int, metrics: Mapping[str, float], lost: Sequence[str], fault: str) -> None:
        """Check the results of an iteration.

        Args:
            iterations: how many iterations are done, including this one.
            metrics: the iteration's metrics.
            lost: names of parameters and statistics that are not finite.
            fault: which non-finite values environments returned, if any.

        Raises:
            NotFinite: learning has diverged, and stop is on.
        """
        losses = losses_not_finite(metrics)
        self._since = self._since + 1 if losses else 0
        if not self._stop or not (lost or self._since >= PATIENCE):
            return
        what = (
            f"parameters are not finite ({_some(lost)})"
            if lost
            else f"losses have not been finite for {self._since} iterations"
        )
        shown = f", and neither is {_some(losses)}" if lost and losses else f" ({_some(losses)})" if losses else ""
        cause = (
            f"The cause is probably that {fault}."
            if fault
            else "Everything that environments returned was finite: a lower --algorithm.learning-rate or "
            "--algorithm.max-grad-norm usually helps."
        )
        raise (NotFinite if fault else Diverged)(
            f"Learning has diverged: after iteration {iterations} {what}{shown}. {cause} {self._kept(iterations)} Use "
            "--on-nonfinite continue to train anyway."
        )

    def _kept(self, iterations: int) -> str:
        """A sentence about the newest finite checkpoint."""
        path = checkpoint.newest_finite(self._folder.checkpoints)
        if path is None:
            return "No checkpoint is from before the divergence."
        done = checkpoint.iteration_of(path)
        return (
            f"The checkpoint {path} is from before: lockstep eval {self._folder.quoted} --checkpoint {done} plays it. "
            f"lockstep resume would repeat the {iterations - done} iterations since then."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
