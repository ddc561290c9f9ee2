"""How fast it is learned: settings that may never change one bit of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.settings import SettingsError

_HELP = "Use inline, processes:N (N from 1 to scheme.shards), or torchrun (under torchrun only)."


@dataclass(frozen=True)
class Layout:
    """Which process holds which shards. Any layout gives the same bits."""

    backend: Literal["inline", "processes", "torchrun"] = "inline"
    workers: int = 1
    """Processes, each collecting and learning for a contiguous block of shards."""
    env_threads: int = 1
    """Threads that step the environments of one shard (native adapters only)."""
    stall_timeout: float = 300.0
    """Seconds without any progress after which a run is ended with an error instead of waiting on."""

    @staticmethod
    def parse(text: str) -> Layout:
        """Read `inline`, `processes:N` or `torchrun`, each with options as in `processes:2,env_threads=2`.

        Raises:
            SettingsError: the text is none of these.
        """
        head, *options = text.strip().split(",")
        backend, _, count = head.partition(":")
        if backend not in ("inline", "processes", "torchrun"):
            raise SettingsError(f"Unknown layout {text!r}. {_HELP}")
        if bool(count) != (backend == "processes") or (count and not count.isdigit()) or count == "0":
            raise SettingsError(f"Layout {text!r} does not state its processes correctly. {_HELP}")
        settings: dict[str, float] = {}
        for option in options:
            name, _, value = option.partition("=")
            kinds = {"env_threads": int, "stall_timeout": float}
            try:
                settings[name] = kinds[name](value)
            except (KeyError, ValueError):
                raise SettingsError(
                    f"Layout {text!r} has the option {option!r}. Allowed are env_threads=N and stall_timeout=SECONDS."
                ) from None
        if settings.get("env_threads", 1) < 1 or settings.get("stall_timeout", 1) <= 0:
            raise SettingsError(f"Layout {text!r}: env_threads and stall_timeout must be positive.")
        return Layout(backend=backend, workers=int(count or 1), **settings)  # type: ignore[arg-type]

    def __str__(self) -> str:
        text = f"{self.backend}:{self.workers}" if self.backend == "processes" else self.backend
        default = Layout()
        for name in ("env_threads", "stall_timeout"):
            if getattr(self, name) != getattr(default, name):
                text += f",{name}={getattr(self, name):g}"
        return text

    def validate(self, shards: int) -> None:
        """Raise SettingsError if this layout cannot hold an experiment of that many shards."""
        if self.workers > shards:
            raise SettingsError(
                f"Layout {self} has {self.workers} processes for scheme.shards={shards}. Every process needs at "
                f"least one shard: use processes:{shards} or fewer, or more --scheme.shards (another result)."
            )
