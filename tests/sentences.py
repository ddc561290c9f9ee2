"""What messages say, however they say it: tests name the settings, values and flags in one, and not its prose."""

from __future__ import annotations

from collections.abc import Iterable


def explained(error: BaseException, printed: str) -> str:
    """The notes of an error, which Python has from 3.11 on, or what was printed instead."""
    return "".join(getattr(error, "__notes__", [])) + printed


def says(messages: str | Iterable[str], *words: str) -> bool:
    """Whether one message, or one line of a text, has all these words."""
    lines = messages.splitlines() if isinstance(messages, str) else messages
    return any(all(word in line for word in words) for line in lines)
