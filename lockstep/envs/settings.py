"""The settings of environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import tyro

from lockstep.config.settings import Names, Options, SettingsError, check_free
from lockstep.config.user_code import checked_reference_to
from lockstep.envs.adapters import AUTO, CHOICES, check_adapter
from lockstep.envs.info import labels

MAX_LEVELS = 2**31 - 1
"""Levels are numbered from 0 to MAX_LEVELS - 1."""

SHARED, SEPARATE = "shared", "separate"
"""Values of EnvConfig.policies: one policy plays all agents, or each agent has its own policy."""

RANDOM = "random"
"""The opponent that draws each action from the allowed ones, uniformly if the action space has bounds."""

AdapterName = Annotated[
    str,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join((*CHOICES, "FILE.py:CLASS")),
        instance_from_str=lambda args: args[0],
        is_instance=lambda instance: isinstance(instance, str),
        str_from_instance=lambda instance: [instance],
    ),
]
"""The name of an adapter, or the reference of a user's adapter. The command line's help lists the names."""


@dataclass(frozen=True)
class EnvConfig:
    """The environments, and the protocol under which they are played."""

    id: str = "CartPole-v1"
    """A game ("Breakout"), a gymnasium or EnvPool id ("HalfCheetah-v4"), or a callable ("file.py:make")."""
    num_envs: int = 8
    """Environments in all shards together. More collect faster, but make batches larger, so that each sample counts for
    less."""
    adapter: AdapterName = AUTO
    """Library that steps the environments. auto takes the fastest installed one that has the id. For a library that is
    not listed, name your own adapter ("file.py:Class")."""
    protocol: Literal["none", "machado", "classic", "baselines"] = "none"
    """Atari protocol. machado: sticky actions with probability 0.25, the full action set, no life-loss signal, at most
    108,000 frames. classic: 0 to 29 no-ops at the start, and a lost life ends the episode for the agent. baselines:
    like classic, but presses FIRE after a lost life, as CleanRL and Stable-Baselines3 do. All clip training rewards."""
    reward_clip: bool = False
    """Clip training rewards to [-1, 1]. Scores are always raw. Atari protocols switch it on."""
    raw_rewards: bool = False
    """Do not clip training rewards, although an Atari protocol would. Games with larger rewards then count for more,
    unless values are normalized (model.popart)."""
    reseed_every: int = 4096
    """Steps after which an environment starts from a new seed. EnvPool cannot reseed single environments: it restarts
    all of them, and truncates and bootstraps the episodes in progress. gymnasium truncates an episode that lasts this
    long. ALE reseeds at the first end of an episode after this many steps, or after 4,096 if that is less. Lower makes
    resuming faster; higher disturbs long episodes less."""
    decorrelate: int = 0
    """Cut the first episode of each environment at a random length of up to this many steps, so that episodes of equal
    length do not end together. Higher spreads ends over a longer time; 0 switches it off."""
    random_actions: bool = False
    """Send uniformly random actions to training environments instead of the policy's. The policy runs and trains as
    usual, but learns nothing useful. Use it to measure throughput without the policy's influence on environments."""
    options: Options = field(default_factory=dict)
    """Further keyword arguments for the environment's constructor, as in repeat_action_probability=0.1. Values are
    numbers, true, false, None, and lists, tuples, dicts and quoted texts in Python's syntax, as in 'sizes=[1,2]'.
    Anything else is a text."""
    curriculum: Options = field(default_factory=dict)
    """Options that only training environments get, such as easier starts. They take precedence over `options`.
    Evaluations and videos play the task without them."""
    num_levels: int = 0
    """Number of levels from which training episodes are drawn, so that the other levels can test the policy; 0 sets no
    limit. Fewer are learned sooner, but generalize less. A level is a Procgen level, or with gymnasium the episode that
    reset(seed=level) begins."""
    start_level: int = 0
    """The first of the num_levels levels; the others follow it."""
    opponents: tuple[str, ...] = ()
    """Players of the other agents of a match: random, another run (RUN or RUN@ITERATION), or your own function
    (file.py:play). By default the policy plays all agents. With several opponents, each match draws one of them, which
    makes them harder to exploit. If env.policies makes several policies, NAME=PLAYER names the player of the policy
    NAME's agents; this policy then does not learn."""
    policies: str = SHARED
    """The policy of each agent of a match: shared (one policy plays all), separate (each agent has its own), or your
    own function (file.py:NAME) that maps an agent's name to its policy's name. More policies suit agents with different
    tasks or spaces, but each learns only from its own agents' samples."""
    central_state: Literal["none", "observations", "state"] = "none"
    """What critics see of the whole match, in the observation's entry `state`: the observations of all agents, or the
    environment's state(). Hide it from the policy with --model.critic-only state. With it, critics estimate returns
    that depend on other agents better."""
    metrics: Names = ()
    """Numbers in the environment's info that become metrics (env/…), as in success,height:mean: the last number of an
    episode, or the mean, sum, max or min over its steps. Each agent of a match has its own info. Metrics do not change
    what is learned."""

    later: ClassVar[frozenset[str]] = frozenset(
        {"curriculum", "num_levels", "start_level", "opponents", "metrics", "policies", "central_state"}
        | {"raw_rewards"}
    )
    free: ClassVar[frozenset[str]] = frozenset({"options", "curriculum"})

    @staticmethod
    def of(make: Callable[..., Any], **settings: Any) -> EnvConfig:
        """The settings of environments that your class or function makes: EnvConfig.of(MyEnv, num_envs=16). The id
        refers to it by name, as in id="my_env.py:MyEnv".

        Raises:
            SettingsError: other processes cannot import the class or function.
        """
        return EnvConfig(id=checked_reference_to(make), **settings)

    @property
    def several_policies(self) -> bool:
        """Whether the agents of a match may have different policies."""
        return self.policies != SHARED

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        check_adapter(self.adapter)
        for name, least in (("num_envs", 1), ("reseed_every", 1), ("decorrelate", 0)):
            if getattr(self, name) < least:
                raise SettingsError(f"env.{name}={getattr(self, name)} must be at least {least}.")
            if getattr(self, name) >= 2**31:
                raise SettingsError(f"env.{name}={getattr(self, name)} must be below {2**31:,}.")
        if self.raw_rewards and self.reward_clip:
            raise SettingsError(
                "env.raw_rewards leaves rewards unchanged, but env.reward_clip clips them. Leave one of them out."
            )
        if min(self.start_level, self.num_levels) < 0 or self.start_level + self.num_levels >= MAX_LEVELS:
            raise SettingsError(
                f"env.num_levels={self.num_levels} and env.start_level={self.start_level} must be at least 0, and "
                f"their sum below {MAX_LEVELS:,}, the number of all levels."
            )
        if self.start_level and not self.num_levels:
            raise SettingsError(
                f"env.start_level={self.start_level} is the first of a set of levels, but env.num_levels=0 sets no "
                "limit. Give their number, as in --env.num-levels 200."
            )
        self.players()
        labels(self.metrics)
        for kind in ("options", "curriculum"):
            for name, value in getattr(self, kind).items():
                check_free(value, f"env.{kind}.{name}")

    def player(self, opponent: str) -> tuple[str, str]:
        """The policy whose agents an opponent plays, and the player: ("adversary", "runs/a") for adversary=runs/a.

        With one policy, an opponent plays all agents except the policy's, and the first text is empty.

        Raises:
            SettingsError: there are several policies, and the opponent does not name one.
        """
        if not self.several_policies:
            return "", opponent
        policy, _, name = opponent.partition("=")
        if not (policy and name):
            raise SettingsError(
                f"env.policies={self.policies} makes several policies, so the opponent {opponent!r} must say whose "
                f"agents it plays: use NAME={name or opponent}, where NAME is that policy."
            )
        return policy, name

    def players(self) -> dict[str, tuple[str, ...]]:
        """The opponents by the policy whose agents they play; see player."""
        found: dict[str, tuple[str, ...]] = {}
        for opponent in self.opponents:
            policy, name = self.player(opponent)
            found[policy] = (*found.get(policy, ()), name)
        return found

    def training(self) -> EnvConfig:
        """The settings of training environments, with the curriculum applied."""
        return replace(self, options={**self.options, **self.curriculum}, curriculum={})

    def held_out(self) -> EnvConfig:
        """The same environments, on all levels above the training levels.

        Raises:
            SettingsError: training was not limited to a set of levels.
        """
        if not self.num_levels:
            raise SettingsError(
                "This run was trained on an unlimited number of levels (env.num_levels=0), so none is left to test on. "
                "Train on a set of levels, as in --env.num-levels 200, or evaluate without --levels test."
            )
        end = self.start_level + self.num_levels
        return replace(self, start_level=end, num_levels=MAX_LEVELS - end)
