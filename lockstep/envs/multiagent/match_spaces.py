"""The observation and action spaces of a match's agents, with a turn and an action mask if agents take turns."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.envs.multiagent.opponents import AgentSpaces
from lockstep.envs.settings import EnvConfig
from lockstep.models.action_spaces import choices_of
from lockstep.models.observations import ACTION_MASK

TURN = "turn"
"""The entry of an observation that says whether it is the agent's turn."""


def takes_turns(env: Any) -> bool:
    import pettingzoo

    return isinstance(env, pettingzoo.AECEnv)


def match_spaces(env: Any, config: EnvConfig) -> AgentSpaces:
    """The observation and action space of each agent of a match. Raises SettingsError like Match."""
    observed = {name: env.observation_space(name) for name in env.possible_agents}
    acted = {name: env.action_space(name) for name in env.possible_agents}
    turns = takes_turns(env)
    if turns or not config.several_policies:
        _require_equal(observed, "observation", config.id)
        _require_equal(acted, "action", config.id)
    return {
        name: (_of_turns(seen, acted[name], config.id) if turns else seen, acted[name])
        for name, seen in observed.items()
    }


def _of_turns(seen: spaces.Space[Any], acted: spaces.Space[Any], name: str) -> spaces.Dict:
    """The observation space of an agent that takes turns."""
    entries: dict[str, Any] = dict(seen.spaces) if isinstance(seen, spaces.Dict) else {"observation": seen}
    if not isinstance(acted, (spaces.Discrete, spaces.MultiDiscrete)):
        raise SettingsError(
            f"The agents of env.id={name} take turns, but their actions {acted} are not discrete and "
            "cannot be masked, so agents that wait would learn from actions that do nothing. Use the parallel form "
            "of the environment, such as its parallel_env or pettingzoo.utils.aec_to_parallel."
        )
    if TURN in entries:
        raise SettingsError(
            f"The agents of env.id={name} take turns and observe an entry {TURN!r}, a name that lockstep needs to say "
            "whose turn it is. Rename it in a wrapper."
        )
    if ACTION_MASK not in entries:
        entries = {**entries, ACTION_MASK: spaces.MultiBinary(sum(choices_of(acted)))}
    # A board may look the same to the agent to move and, with colors exchanged, to the waiting one. Without the entry
    # `turn`, both would have the same value.
    return spaces.Dict({**entries, TURN: spaces.MultiBinary(1)})


def _require_equal(found: dict[Any, spaces.Space[Any]], kind: str, name: str) -> None:
    """Raise SettingsError unless all agents have the same space."""
    first, *others = found
    for agent in others:
        if found[agent] != found[first]:
            raise SettingsError(
                f"The agents of env.id={name} differ in their {kind} spaces: {first} has {found[first]}, and {agent} "
                f"{found[agent]}. One policy plays all of them. Use --env.policies separate if agents act at the same "
                f"time, or wrap the environment, such as with SuperSuit's "
                f"pad_{kind}{'s' if kind == 'observation' else '_space'}_v0 does, and give that as --env.id "
                "file.py:make."
            )


def blank(seen: spaces.Space[Any], acted: spaces.Space[Any]) -> Any:
    """The observation of an agent that has terminated. A mask in it allows the first action."""
    blank = _zeros(seen)
    if isinstance(blank, dict) and ACTION_MASK in blank:
        sizes = choices_of(acted)
        blank[ACTION_MASK].flat[np.cumsum(sizes) - sizes if sizes else slice(None)] = 1
    return blank


def _zeros(space: spaces.Space[Any]) -> Any:
    """An observation of zeros, or of the numbers nearest to them that the space contains."""
    if isinstance(space, spaces.Dict):
        return {key: _zeros(entry) for key, entry in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_zeros(entry) for entry in space.spaces)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return np.array(space.start)
    zeros = np.zeros(space.shape or (), space.dtype)
    return np.clip(zeros, space.low, space.high) if isinstance(space, spaces.Box) else zeros
