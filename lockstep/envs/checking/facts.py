"""Facts about an environment that help before training."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.envs.checking.games import Game, Played, Trace
from lockstep.envs.goals import ACHIEVED, DESIRED, check_goals
from lockstep.envs.settings import EnvConfig
from lockstep.models.action_spaces import make_distribution
from lockstep.models.observations import ObservationLayout, precision_warning, unused_mask


def facts_of(game: Game, played: Played) -> dict[str, str]:
    """Facts about an environment that help before training."""
    space, actions, emulator = played.env
    shapes = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
    trace, seen = played.trace, played.numbers.ranges
    reward = trace.reward[1:][~trace.reset[1:]]
    return {
        **({"protocol": emulator} if emulator else {}),
        **({"seeds": "one for each shard, so its environments depend on each other"} if played.share_seeds else {}),
        "observation": "; ".join(
            f"{name} {x.dtype} {list(x.shape or ())}, {seen[name][0]:.4g} to {seen[name][1]:.4g}".lstrip()
            for name, x in shapes.items()
        ),
        "scaling": _scaling(space),
        "action": str(actions),
        "reward": f"{reward.min():.4g} to {reward.max():.4g}, {np.mean(reward != 0):.1%} of them not 0",
        "episodes": _episodes(trace, played.restarts, game.config.reseed_every),
        **({"note": " ".join(notes)} if (notes := _notes(game.config, played)) else {}),
        "speed": f"about {trace.reward[1:].size / played.seconds:,.0f} steps a second here, in one process",
    }


def _scaling(space: gymnasium.Space[Any]) -> str:
    """How lockstep's models scale each entry."""
    layout = ObservationLayout.of(space)
    images = zip(layout.images, layout.brightest, strict=True)
    told = {key: f"pixels, divided by {brightest}" for (key, _), brightest in images}
    told |= {key: "numbers as they are, unless --normalize.observations standardizes them" for key, _ in layout.vectors}
    for key, _ in layout.flattened:
        told[key] += ", flattened (pictures are of uint8)"
    return "; ".join(f"{key}: {how}" if key else how for key, how in told.items())


def _notes(config: EnvConfig, played: Played) -> list[str]:
    """Warnings about probable mistakes, and about properties that make learning hard."""
    space, actions, _ = played.env
    distribution = make_distribution(actions)
    notes = [unused_mask(space, distribution.num_logits)]
    if isinstance(space, spaces.Dict) and {ACHIEVED, DESIRED} <= set(space.spaces):
        try:
            check_goals(config)
        except SettingsError as error:
            notes.append(str(error))
    notes += [
        f"The observation{f' {name!r}' if name else ''} {said}"
        for name, (low, high) in played.numbers.ends.items()
        if low.dtype == np.float32 and (said := precision_warning(low, high))
    ]
    if warning := distribution.warning_at_start(1.0):
        notes.append(f"With PPO, A2C, IMPALA and APPO: {warning}")
    return [note for note in notes if note]


def _episodes(trace: Trace, restarts: list[int], longest: int) -> str:
    """A description of how episodes ended, and how many were cut by this check or by env.reseed_every."""
    lengths, returns, cut, terminations = [], [], 0, 0
    for j in range(trace.reward.shape[1]):
        begin = 0
        ended = trace.termination[:, j] | trace.truncation[:, j]
        for t in sorted({*np.flatnonzero(ended).tolist(), *restarts}):
            if not ended[t] or (trace.truncation[t, j] and t - begin == longest):
                cut += 1
            else:
                terminations += int(trace.termination[t, j])
                lengths.append(t - begin)
                returns.append(float(trace.reward[begin + 1 : t + 1, j].sum()))
            begin = t if t in restarts else t + 1  # the next step resets
    shortened = f"; {cut} cut after up to {longest:,} steps" if cut else ""
    if not lengths:
        return f"none ended by itself{shortened}"
    return (
        f"{len(lengths)} ended by themselves, {terminations} of them by termination: {min(lengths):,} to "
        f"{max(lengths):,} steps, scores {min(returns):.4g} to {max(returns):.4g}, {np.mean(returns):.4g} on average"
        f"{shortened}"
    )
