"""Checks of what users' algorithms return and do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lockstep.algorithms.base import Algorithm, LossOutput
from lockstep.algorithms.onpolicy import Targets
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import named_leaves


@contextlib.contextmanager
def unchanged(who: str, given: Any) -> Iterator[None]:
    """Check that a user's method does not change its argument in place: the argument may be a view of a rollout that
    other code reads, too.

    Args:
        who: the method.
        given: its batch or rollout. Only those of lockstep's types are checked.

    Raises:
        SettingsError: it changed one of the tensors.
    """
    tensors = [(name, x) for name, x in named_leaves(given) if isinstance(x, Tensor) and not x.is_inference()]
    leaves = [(name, x, x._version) for name, x in tensors]
    yield
    if changed := [name for name, x, version in leaves if x._version != version]:
        kind = type(given).__name__.lower()
        raise SettingsError(
            f"{who} changed {' and '.join(f'{kind}.{name}' for name in changed)} in place. These numbers are read "
            f"again, so it must make new ones: x = {kind}.{changed[0]} * 2 in place of {kind}.{changed[0]}.mul_(2) or "
            f"*=. {kind}.replace(…) returns a copy with a change."
        )


def check_targets(algorithm: Algorithm[Any], targets: Targets, reward: Tensor) -> None:
    """Check the targets of an algorithm for these rewards, [T, B].

    Raises:
        SettingsError: they are not Targets, or have another shape than the rewards.
    """
    who = f"{type(algorithm).__name__}.targets"
    if not isinstance(targets, Targets):
        raise SettingsError(
            f"{who} returned a {type(targets).__name__}. Return a lockstep.algorithms.onpolicy.Targets: the advantages "
            "and the value targets."
        )
    for name, x in targets._asdict().items():
        if not isinstance(x, Tensor) or x.shape != reward.shape or x.requires_grad:
            raise SettingsError(
                f"{who} returned {_described(x)} as {name}. It must be a tensor [T, B] without gradients, here "
                f"{list(reward.shape)}: one number for each reward."
            )


def check_loss(algorithm: Algorithm[Any], loss: Any, batch: Any = None) -> None:
    """Check an algorithm's loss of a batch.

    Raises:
        SettingsError: the loss is not a LossOutput of scalars, its metrics are not those in metric_names, or it lacks
            the priorities of the batch's items.
    """
    who = f"{type(algorithm).__name__}.loss"
    if not isinstance(loss, LossOutput):
        raise SettingsError(
            f"{who} returned a {type(loss).__name__}. Return a lockstep.algorithms.base.LossOutput: the loss to "
            "differentiate, summed over valid samples, and the metrics."
        )
    if not isinstance(loss.total, Tensor) or loss.total.numel() != 1 or not loss.total.requires_grad:
        raise SettingsError(
            f"{who} returned {_described(loss.total)} as its total. It must be a scalar with gradients."
        )
    for name in algorithm.metric_names:
        if name not in loss.metrics:
            raise SettingsError(
                f"{who} returned no metric {name!r}, which its metric_names list. Return it, or unlist it."
            )
    for name, value in loss.metrics.items():
        if name not in algorithm.metric_names:
            raise SettingsError(
                f"{who} returned the metric {name!r}, which its metric_names do not list. Add it to them."
            )
        if not isinstance(value, Tensor) or value.shape != () or value.requires_grad:
            raise SettingsError(
                f"{who} returned {_described(value)} as the metric {name!r}. Metrics must be detached scalars, each a "
                "sum over valid samples, for example value.detach().sum()."
            )
    if algorithm.weighted:
        items, found = list(batch.weight.shape), loss.priorities
        if not isinstance(found, Tensor) or list(found.shape) != items or found.requires_grad:
            raise SettingsError(
                f"{who} returned {_described(found)} as priorities. With prioritized replay, it must be a detached "
                f"tensor of shape {items}: the new priority of each item, such as its absolute error."
            )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {list(value.shape)} {'with' if value.requires_grad else 'without'} gradients"
