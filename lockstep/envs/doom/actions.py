"""Converts choices of independent action heads to buttons of Doom.

Shape legend: B environments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Heads = tuple[tuple[str, ...], ...]
"""Buttons by head. Choice 0 of a head presses none of its buttons, and choice i presses the i-th."""

TURN = "TURN_LEFT_RIGHT_DELTA"
"""A button that turns by an angle. Its head has one choice for each angle; the middle angle is 0."""
_WALK: Heads = (("MOVE_FORWARD", "MOVE_BACKWARD"), ("MOVE_RIGHT", "MOVE_LEFT"), ("ATTACK",), ("SPEED",))
_WEAPONS = tuple(f"SELECT_WEAPON{n}" for n in range(1, 8))


@dataclass(frozen=True)
class Actions:
    """An action space: independent heads over the buttons."""

    heads: Heads
    angles: tuple[float, ...] = ()
    """Degrees per tic of each choice of the last head, if it turns."""

    @property
    def sizes(self) -> list[int]:
        """Choices of each head."""
        return [len(self.angles) if head == (TURN,) else len(head) + 1 for head in self.heads]

    def buttons(self, choices: np.ndarray) -> np.ndarray:
        """Choices [B, heads] -> how far each button is pressed, float64 [B, buttons]"""
        pressed = []
        for head, choice in zip(self.heads, choices.T, strict=True):
            if head == (TURN,):
                pressed.append(np.array(self.angles)[choice, None])
            else:
                pressed.append((choice[:, None] == np.arange(1, len(head) + 1)).astype(np.float64))
        return np.concatenate(pressed, 1)


FULL = Actions((*_WALK, ("USE",), _WEAPONS, (TURN,)), tuple(np.linspace(-12.5, 12.5, 21)))
COMPACT = Actions((*_WALK, (TURN,)), tuple(np.linspace(-10.0, 10.0, 11)))
"""Sample Factory's action spaces for battles and matches (Petrenko et al. 2020, arXiv:2006.11751, table A.4), and for
battles without weapons and use."""
SINGLE = Actions(
    (("MOVE_FORWARD", "MOVE_BACKWARD", "MOVE_RIGHT", "MOVE_LEFT", "TURN_RIGHT", "TURN_LEFT", "ATTACK", "SPEED"),)
)
"""One head that presses one button, as in the simplified battle of Sample Factory's benchmark (appendix A.1.2)."""
