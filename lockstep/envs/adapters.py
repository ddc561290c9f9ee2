"""The table of environment adapters. Each is a class in a separate file, which is imported on first use."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.extras import EXTRAS, install_command
from lockstep.config.settings import SettingsError

AUTO = "auto"
"""The value of env.adapter that leaves the choice to lockstep."""
MIXED = "mixed/"
"""The prefix of ids of several tasks that one policy plays; the ids of the tasks follow."""
OF_TASK = "score_"
"""The prefix of the metrics with these tasks' scores; the task follows."""


@dataclass(frozen=True)
class Entry:
    """An adapter, and facts about it that need no import."""

    reference: str
    """`module:Class` or `file.py:Class`, a subclass of lockstep.envs.Adapter."""
    extra: str = ""
    """The extra of lockstep that installs the package that it imports."""
    claims: str = ""
    """A regular expression for ids that probably only this package serves, so that errors can name the extra."""
    callables: bool = False
    """Whether it serves ids that refer to a user's callable, such as file.py:make."""
    batches: bool = False
    """Whether it serves callables that make many environments at once."""
    prefix: str = ""
    """Only this adapter serves ids that begin with this prefix."""
    native: bool = False
    """Whether it steps environments outside Python, so that one process is as fast as several."""

    @property
    def built_in(self) -> bool:
        """Whether it belongs to lockstep."""
        return self in _BUILT_IN

    @property
    def package(self) -> str:
        """The optional package that it imports; "" if it needs none."""
        return EXTRAS[self.extra].module if self.extra else ""

    @property
    def installed(self) -> bool:
        """Whether the adapter can be imported."""
        return not self.extra or EXTRAS[self.extra].installed


ADAPTERS = {
    "ale": Entry("lockstep.envs.ale:Ale", "atari", claims=r"[A-Z][A-Za-z]+(-v5)?"),
    "envpool": Entry("lockstep.envs.envpool:EnvPool", "envpool", claims=r"vizdoom/.+", native=True),
    "gymnasium": Entry("lockstep.envs.gymnasium:Gymnasium", callables=True),
    "compiled": Entry("lockstep.envs.compiled_adapter:Compiled", callables=True, native=True),
    "torch": Entry("lockstep.envs.torch_adapter:Torch", callables=True, batches=True, native=True),
    "vector": Entry("lockstep.envs.vector:Vector", callables=True, batches=True),
    "mixed": Entry("lockstep.envs.mixed:Mixed", prefix=MIXED),
}
"""Adapters by name. env.adapter=auto takes the first that is installed and serves the id. The fastest come first.
`compiled`, `torch` and `vector` were added later and come last, so that ids keep their adapters."""
_BUILT_IN = frozenset(ADAPTERS.values())
CHOICES = (AUTO, *(name for name, entry in ADAPTERS.items() if not entry.prefix))
"""The values of env.adapter. The id alone selects other adapters."""


def register_adapter(name: str, reference: str) -> None:
    """Give your own adapter a name, as in register_adapter("grid", "my_envs.py:GridAdapter").

    The settings of a run keep the reference in place of the name, so worker processes, resume and verify find the
    adapter without this call. env.adapter=auto asks registered adapters last.

    Args:
        name: the value of env.adapter for the adapter.
        reference: `path/to/file.py:Class` or `package.module:Class`, a subclass of lockstep.envs.Adapter.

    Raises:
        SettingsError: the name is taken or not an identifier, or the reference does not have this form.
    """
    if not name.isidentifier() or name == AUTO:
        raise SettingsError(f"register_adapter: {name!r} cannot name an adapter. Use an identifier other than {AUTO}.")
    if not _is_reference(reference):
        raise SettingsError(f"register_adapter: {reference!r} must be path/to/file.py:Class or package.module:Class.")
    if name in ADAPTERS and ADAPTERS[name].reference != reference:
        raise SettingsError(
            f"register_adapter: {name!r} is already the adapter {ADAPTERS[name].reference}. Use another name."
        )
    ADAPTERS.setdefault(name, Entry(reference))


def check_adapter(name: str) -> None:
    """Raise SettingsError unless env.adapter names an adapter or has the form of a reference."""
    if name != AUTO and name not in ADAPTERS and not _is_reference(name):
        raise SettingsError(
            f"env.adapter={name} is unknown. Use {', '.join(CHOICES)}, or your own adapter as path/to/file.py:Class."
        )


def entry_of(name: str) -> Entry:
    """An adapter by its name or reference."""
    check_adapter(name)
    return ADAPTERS.get(name) or Entry(name)


def recorded_name(name: str) -> str:
    """The value of env.adapter in a run's settings. For an adapter that a user registered, it is the reference."""
    entry = entry_of(name)
    return name if entry.built_in else entry.reference


def not_installed(env_id: str, name: str) -> SettingsError:
    """The error for an adapter whose package is not installed."""
    entry = entry_of(name)
    return SettingsError(
        f"env.id={env_id} needs the adapter {name}, whose package {entry.package} is not installed. Install it with: "
        f"{install_command(entry.extra)}."
    )


def _is_reference(text: str) -> bool:
    source, _, name = text.rpartition(":")
    return bool(source) and name.isidentifier()
