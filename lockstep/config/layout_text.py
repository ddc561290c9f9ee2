"""The text of a layout, as in `--layout processes:2,env_threads=2`, and the fields that it sets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from lockstep.config.launchers import LAUNCHERS, PROCESSES, REFERENCE, launcher_named
from lockstep.config.resources import Resources, is_resource, resource_of
from lockstep.config.settings import SettingsError, did_you_mean

AUTO = "auto"
"""The launcher's name in a layout that lockstep.launchers.auto has yet to choose."""
HELP = (
    "Use auto (lockstep chooses for this machine), inline (one process), processes:N (N processes that collect and "
    "learn), cpu:aC-lL (C collectors and L learners on the CPU), a0-l1,2,3-d2 (a collector on GPU 0 and learners on "
    "GPUs 1, 2 and 3, twice), ray:N or ray:aC-lL (the same on a Ray cluster), ray:aC+-lL (C collectors and as many "
    "more as fit), torchrun (under torchrun or srun), or file.py:NAME (a launcher of yours)."
)
"""Advice for errors about a layout."""
OPTIONS = {
    "device": str,
    "env_threads": int,
    "env_processes": int,
    "pin": int,
    "nice": int,
    "graphs": int,
    "ipc": int,
    "replay": str,
    "stall_timeout": float,
    "jitter": float,
    "learner_delay": float,
    "restarts": int,
    "compress": int,
}
"""The options that follow the processes, as in `,pin=1`: fields of Layout and their types."""
_EXAMPLES = {str: "GPU", int: "N", float: "SECONDS"}
_MOST = 100_000
"""The most processes of a layout. More are a mistake, and their list might not fit into memory."""
_SEVERAL = re.compile(r"device=(?P<first>\d+)(?P<more>(,\d+)+)(,|$)")
"""Several devices separated by commas, as in a0-l1,2,3. The right separator here is +."""
_SPLIT = re.compile(r"a(?P<collectors>[a-z0-9,]+)(?P<growing>\+?)-l(?P<learners>[a-z0-9,]+)(-d(?P<copies>\d+))?")


def fields_of(text: str) -> dict[str, Any]:
    """The fields of Layout that a text sets, by name.

    Raises:
        SettingsError: the text has none of the forms in HELP.
    """
    parts = text.strip().split(",")
    options = [part for part in parts if "=" in part]
    if "" in parts[1:]:
        raise SettingsError(f"Layout {text!r} has an empty option: leave out the comma.")
    head = ",".join(part for part in parts if "=" not in part)
    if found := _SEVERAL.search(text):
        several = "+".join([found["first"], *found["more"].strip(",").split(",")])
        raise SettingsError(f"Layout {text!r}: for several GPUs, write device={several}.")
    settings: dict[str, str | int | float] = {}
    resources: Resources = ()
    for option in options:
        name, _, value = option.partition("=")
        if name in settings:
            raise SettingsError(f"Layout {text!r} names {name} twice: leave one out.")
        try:
            if is_resource(name):
                resources += (resource_of(name, value),)
            else:
                settings[name] = OPTIONS[name](value)
        except KeyError:
            raise _unknown_option(text, option) from None
        except ValueError:
            kind = "whole number" if OPTIONS.get(name) is int else "number"
            raise SettingsError(f"Layout {text!r}: {option} must be a {kind}.") from None
    return _head(head, text) | settings | {"resources": resources}


def text_of(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The inverse of fields_of: the text that gives these fields of Layout."""
    name, workers, copies, growing = (fields[each] for each in ("launcher_name", "workers", "copies", "growing"))
    collectors, learners = (fields[role][: len(fields[role]) // copies] for role in ("collectors", "learners"))
    text = name
    if collectors and set(collectors + learners) == {"cpu"}:
        text = f"{'cpu' if name == PROCESSES else name}:a{len(collectors)}{'+' * growing}-l{len(learners)}"
    elif collectors:
        text = f"a{','.join(collectors)}{'+' * growing}-l{','.join(learners)}"
    elif name != AUTO and launcher_named(name).starts_processes:
        text = f"{name}:{workers}"
    if copies > 1:
        text += f"-d{copies}"
    for option in OPTIONS:
        value = fields[option]
        if value != defaults[option]:
            text += f",{option}={value}" if isinstance(value, str) else f",{option}={value:.15g}"
    return text + "".join(f",{resource}={amount:.15g}" for resource, amount in fields["resources"])


def _head(head: str, text: str) -> dict[str, Any]:
    """The part before the options: a launcher and its processes, or devices."""
    if head == AUTO:
        return {"launcher_name": AUTO}
    own = REFERENCE.fullmatch(head)
    name, processes = (own["name"], own["processes"] or "") if own else head.partition(":")[::2]
    known = bool(own) or name in LAUNCHERS
    if known:
        launcher = launcher_named(name)
        if launcher.starts_processes and processes.isdecimal() and (workers := _number(processes, text)):
            return {"launcher_name": name, "workers": workers}
        if not (launcher.starts_processes or processes):
            return {"launcher_name": name}
    counted = name == "cpu" or (known and name != PROCESSES and launcher_named(name).starts_processes)
    split = _SPLIT.fullmatch(processes if counted else head)
    if split is None:
        if known or name == "cpu":
            raise SettingsError(f"Layout {text!r}: {processes_of(name)}")
        raise SettingsError(f"Unknown layout {text!r}. {_guess(text, name, processes)}{HELP}")
    collectors, learners = (_devices(split[role], counted, text) for role in ("collectors", "learners"))
    copies = _number(split["copies"] or "1", text)
    if copies < 1:
        raise SettingsError(f"Layout {text!r} asks for -d{copies}: at least one copy is needed.")
    _check_number((len(collectors) + len(learners)) * copies, text)
    gpus = [int(device) for device in collectors + learners if device != "cpu"]
    step = max(gpus) + 1 if gpus else 0
    name = name if counted and name != "cpu" else PROCESSES
    return {
        "launcher_name": name,
        "collectors": tuple(_shifted(device, step * copy) for copy in range(copies) for device in collectors),
        "learners": tuple(_shifted(device, step * copy) for copy in range(copies) for device in learners),
        "growing": bool(split["growing"]),
        "copies": copies if name == PROCESSES else 1,
    }


def processes_of(name: str) -> str:
    """How a layout states the processes of a launcher, or those after cpu:, as advice."""
    if name == "cpu":
        return (
            "give numbers of collectors and learners, 1 or more each, as in cpu:a2-l1. In processes:2, both processes "
            "do both."
        )
    if launcher_named(name).starts_processes:
        split = "" if name == PROCESSES else f" or {name}:a2-l1"
        return f"give a number of processes, 1 or more, as in {name}:2{split}. inline is one process."
    if launcher_named(name).started_externally:
        return f"{name} takes no number of processes, since the command that starts them decides it."
    return f"{name} takes no number of processes. For several on this machine, use processes:2 or cpu:a2-l1."


def _guess(text: str, name: str, processes: str) -> str:
    """What an unknown layout may mean, as a sentence."""
    if name.isdecimal() and not processes:
        return f"Did you mean processes:{name}? "
    if name in ("gpu", "cuda"):
        return "GPUs have numbers, as in inline,device=0 or a0-l0. "
    if name == AUTO:
        return f"{AUTO} chooses the number of processes itself, so write it alone. "
    if not name and text.strip():
        return f"Did you mean inline,{text.strip()}? "
    close = difflib.get_close_matches(name, [AUTO, "cpu", *LAUNCHERS], 1)
    return f"Did you mean {':'.join(filter(None, (close[0], processes)))}? " if close else ""


def _unknown_option(text: str, option: str) -> SettingsError:
    """The error about an option of a layout that does not exist."""
    name = option.partition("=")[0]
    if found := re.fullmatch(r"(\S+)\s+(\S+)", option):
        return SettingsError(f"Layout {text!r}: separate options by commas, as in {found[1]},{found[2]}.")
    allowed = ", ".join(f"{name}={_EXAMPLES[kind]}" for name, kind in OPTIONS.items())
    allowed += "; and on Ray, collector.gpus=N, learner.cpus=N and the like"
    guess = did_you_mean(name, OPTIONS)
    return SettingsError(f"Layout {text!r} has an unknown option {option!r}. {guess}Allowed are {allowed}.")


def _devices(listed: str, counted: bool, text: str) -> tuple[str, ...]:
    """The devices of a role. After `cpu:` or a launcher's name, `2` is a number of processes; otherwise `0,1,cpu` lists
    devices."""
    if counted:
        if not listed.isdecimal() or not (count := _number(listed, text)):
            raise SettingsError(
                f"Layout {text!r}: numbers of processes, 1 or more, follow cpu: and a launcher's name, as in cpu:a2-l2."
            )
        return ("cpu",) * count
    devices = tuple(listed.split(","))
    if not all(device == "cpu" or device.isdecimal() for device in devices):
        raise SettingsError(
            f"Layout {text!r}: devices are numbers of GPUs, or cpu, separated by commas, as in a0-l1,2."
        )
    return devices


def _number(digits: str, text: str) -> int:
    """A number of processes or copies.

    Raises:
        SettingsError: there are too many.
    """
    number = int(digits.lstrip("0")[:20] or 0)  # Python refuses to read thousands of digits
    _check_number(number, text)
    return number


def _check_number(processes: int, text: str) -> None:
    if processes > _MOST:
        raise SettingsError(f"Layout {text[:80]!r} has more than {_MOST:,} processes. Use fewer.")


def _shifted(device: str, by: int) -> str:
    """The corresponding device of another copy, which has other GPUs."""
    return device if device == "cpu" else str(int(device) + by)
