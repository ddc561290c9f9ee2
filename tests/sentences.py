"""What messages say, however they say it: tests name the settings, values and flags in one, and not its prose."""

from __future__ import annotations

from collections.abc import Iterable


def says(messages: str | Iterable[str], *words: str) -> bool:
    """Whether one message, or one line of a text, has all these words."""
    lines = messages.splitlines() if isinstance(messages, str) else messages
    return any(all(word in line for word in words) for line in lines)
