"""The resources that processes take from a cluster's nodes: cores, GPUs and others, as in
`ray:a4-l2,learner.gpus=1`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lockstep.config.settings import SettingsError

Resources = tuple[tuple[str, float], ...]
"""Amounts by name: `learner.gpus`, `collector.cpus`, or `worker.NAME` for a resource that the cluster defines."""
ROLES = ("collector", "learner", "worker")
"""worker: a process that collects and learns."""
_RESERVED = ("CPU", "GPU", "memory", "object_store_memory", "node")


def is_resource(option: str) -> bool:
    """Whether an option of a layout names a resource, such as `learner.gpus`."""
    return "." in option


def resource_of(option: str, amount: str) -> tuple[str, float]:
    """An option of a layout as a name and an amount.

    Raises:
        KeyError: the role is unknown.
        ValueError: the amount is not a number.
    """
    role, _, what = option.partition(".")
    if role not in ROLES or not what:
        raise KeyError(option)
    return option, float(amount)


def of_role(resources: Resources, role: str) -> dict[str, float]:
    """Amounts by the names of a role's resources."""
    found = ((*name.partition("."), amount) for name, amount in resources)
    return {what: amount for named, _, what, amount in found if named == role}


def validate_resources(resources: Resources, roles: Iterable[str], layout: str) -> None:
    """Check amounts, and that the layout has the roles.

    Raises:
        SettingsError: an option does not fit.
    """
    roles, names = list(roles), [name for name, _ in resources]
    for name, amount in resources:
        role, _, what = name.partition(".")
        if role not in roles:
            instead = " and ".join(f"{each}.{what}" for each in roles)
            raise SettingsError(f"Layout {layout} has no {role} processes for {name}. Use {instead}.")
        if what in _RESERVED:
            raise SettingsError(
                f"Layout {layout}: {name} is a resource that Ray manages itself. Use {role}.cpus or {role}.gpus, or "
                "another name."
            )
        if names.count(name) > 1:
            raise SettingsError(f"Layout {layout} names {name} twice: leave one out.")
        if not 0 < amount < math.inf or (amount > 1 and not amount.is_integer()):
            raise SettingsError(
                f"Layout {layout}: {name} must be a positive number, and whole if it is above 1, as Ray requires."
            )
        if what == "cpus" and not amount.is_integer():
            raise SettingsError(f"Layout {layout}: {name} must be a whole number of cores.")
    if "collector.gpus" in names and "learner.gpus" not in names:
        raise SettingsError(
            f"Layout {layout}: if collectors compute on GPUs, learners must, too, since learner 0 records which GPUs a "
            "run's bits depend on. Add learner.gpus."
        )
