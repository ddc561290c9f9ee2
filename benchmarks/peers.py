"""lockstep beside other systems, on the cases that the tables in benchmarks/speed.md show, or on a recipe.

    python benchmarks/peers.py ppo-breakout --rounds 3 --cleanrl downloads/ppo_atari_envpool.py
    python benchmarks/peers.py appo-breakout           # every case whose name begins so
    python benchmarks/peers.py --list
    python benchmarks/peers.py ppo-atari --env.num-envs 64 --layout processes:2 --peers sample-factory torchrl

Each case is written to benchmarks/peers/CASE.json and CASE.md. A recipe takes the flags of `lockstep train`, and its
table is printed. The other systems are installed on first use.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from other_systems.compare import compare

from lockstep import recipes
from lockstep.algorithms import PPOConfig
from lockstep.cli.common import clean_end, parse, progress_to_stderr
from lockstep.cli.doctor import examine
from lockstep.cli.recipe import load_recipe
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.scheme import Scheme

FOLDER = Path(__file__).parent / "peers"
_APPO_BATCH = 2048
"""Samples of a minibatch in Sample Factory's paper, as far as there are so many."""


@dataclass(frozen=True)
class Case:
    """What to train, how lockstep spreads it over two cores, and whom to compare with."""

    experiment: Callable[[], Experiment]
    layout: str
    peers: tuple[str, ...]
    files: bool = False
    """Whether CleanRL's and LeanRL's files can train it, if they are given."""


def ppo_breakout(num_envs: int, scheme: Scheme) -> Experiment:
    """CleanRL's settings: 4 epochs of 4 minibatches, lives are episodes, rewards are clipped."""
    experiment = recipes.ppo_atari("Breakout")
    return experiment.replace(env=EnvConfig("Breakout", num_envs, "envpool", "classic"), scheme=scheme)


def appo_breakout(num_envs: int) -> Experiment:
    """Sample Factory's simplified network: three convolutions, 512 features, LSTM of 512."""
    experiment = recipes.appo_atari("Breakout")
    minibatches = max(1, num_envs * experiment.algorithm.rollout // _APPO_BATCH)
    return experiment.replace(
        env=EnvConfig("Breakout", num_envs, "envpool", "classic"),
        algorithm=dataclasses.replace(experiment.algorithm, minibatches=minibatches),
        scheme=dataclasses.replace(experiment.scheme, shards=2, acting_batch=num_envs // 2),
    )


def appo_battle(num_envs: int) -> Experiment:
    """Sample Factory's full network on Doom's Battle: pixels and measurements, GRU of 512, seven action heads."""
    experiment = recipes.appo_vizdoom("Battle")
    scheme = dataclasses.replace(experiment.scheme, shards=2, acting_batch=num_envs // 2)
    return experiment.replace(env=dataclasses.replace(experiment.env, num_envs=num_envs), scheme=scheme)


def appo_simple_battle(num_envs: int) -> Experiment:
    """The battle of Sample Factory's benchmark (appendix A.1.2): pixels alone, one action head, the simplified
    network."""
    simple, full = recipes.appo_atari(), appo_battle(num_envs)
    minibatches = max(1, num_envs * full.algorithm.rollout // _APPO_BATCH)
    return full.replace(
        env=dataclasses.replace(full.env, options={"actions": "single", "measurements": False}),
        model=simple.model,
        algorithm=dataclasses.replace(full.algorithm, minibatches=minibatches, value_clip=10.0),
        normalize=simple.normalize,
    )


def ppo_cartpole(adapter: Literal["envpool", "gymnasium"], scheme: Scheme) -> Experiment:
    """32 environments, 32 steps, one epoch of one minibatch, networks of 64 and 64."""
    return Experiment(
        env=EnvConfig("CartPole-v1", 32, adapter),
        model=StandardModelConfig(encoder="mlp", hidden_sizes=(64, 64), separate_value_network=True),
        algorithm=PPOConfig(rollout=32, epochs=1, minibatches=1, clip=0.2),
        scheme=scheme,
        precision="fp32",
    )


_ALL = ("sample-factory", "stable-baselines3", "torchrl")
CASES = {
    "ppo-breakout-64": Case(
        lambda: ppo_breakout(64, Scheme(shards=4, acting_batch=32)), "processes:2", _ALL, files=True
    ),
    "ppo-breakout-8": Case(lambda: ppo_breakout(8, Scheme(shards=4, acting_batch=4)), "processes:2", (), files=True),
    **{
        f"appo-breakout-{count}": Case(lambda count=count: appo_breakout(count), "processes:2", ("sample-factory",))
        for count in (16, 32, 64, 128, 320, 640)
    },
    "appo-battle-32": Case(lambda: appo_battle(32), "processes:2,pin=1", ("sample-factory",)),
    "ppo-cartpole-32": Case(lambda: ppo_cartpole("envpool", Scheme(shards=1, lag=1)), "cpu:a1-l1,pin=1", _ALL),
    "ppo-cartpole-32-lag-0": Case(lambda: ppo_cartpole("envpool", Scheme(shards=1)), "inline", _ALL),
    "ppo-cartpole-32-gymnasium": Case(lambda: ppo_cartpole("gymnasium", Scheme(shards=1)), "inline", _ALL),
}


def run(name: str, layout: str | None, files: list[str], rounds: int, seconds: float) -> None:
    """Measure one case and write its files."""
    case = CASES[name]
    peers = [*case.peers, *(files if case.files else [])]
    if not peers:
        print(f"{name}: left out, since it needs --cleanrl or --leanrl", flush=True)
        return
    chosen = Layout.parse(layout or case.layout)

    def say(text: str) -> None:
        print(f"{name}: {text}", flush=True)

    found = compare(case.experiment(), chosen, peers, rounds=rounds, seconds=seconds, say=say)
    facts = examine()["machine"]
    machine = {key: facts[key] for key in ("cpu", "cores", "gpus", "python")}
    date = time.strftime("%Y-%m-%d")
    FOLDER.mkdir(exist_ok=True)
    report = {"case": name, "date": date, "machine": machine, "rounds": rounds, **found.to_json()}
    (FOLDER / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    head = f"`{name}`, {machine['cpu']}, {machine['cores']} cores, load of others {found.load:.1f}, {date}:\n\n"
    (FOLDER / f"{name}.md").write_text(f"{head}{found.table()}\n", encoding="utf-8")
    print(f"\n{head}{found.table()}\n", flush=True)


@dataclass(frozen=True)
class RecipeFlags:
    """What a recipe's flags change."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]


def run_recipe(recipe: str, words: list[str]) -> None:
    """Compare a recipe, with the flags of `lockstep train`, and print the table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--peers", nargs="*")
    parser.add_argument("--layout", default="inline")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    given, flags = parser.parse_known_args(words)
    experiment = parse(RecipeFlags, f"train {recipe}", flags, RecipeFlags(load_recipe(recipe))).experiment
    with progress_to_stderr(given.json), clean_end():
        found = compare(
            experiment,
            Layout.parse(given.layout),
            given.peers,
            rounds=given.rounds,
            seconds=given.seconds,
            say=lambda text: print(text, flush=True),
        )
    if given.json:
        print(json.dumps({**found.to_json(), "experiment": experiment.identity()}, indent=2))
    else:
        print(found.table())
    if found.skipped or len(found.systems) == 1:
        raise SystemExit(1)


def main(words: list[str]) -> None:
    if "--peers" in words:
        return run_recipe(words[0], words[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases, or how they begin")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each system in each round")
    parser.add_argument("--layout", help="lockstep's, instead of the case's own, which is for two cores")
    parser.add_argument("--cleanrl", metavar="FILE", help="your copy of CleanRL's ppo_atari_envpool.py")
    parser.add_argument("--leanrl", metavar="FILE", help="your copy of LeanRL's ppo_atari_envpool_torchcompile.py")
    arguments = parser.parse_args(words)
    names = [name for name in CASES if any(name.startswith(text) for text in arguments.cases)]
    if arguments.list or not names:
        print("\n".join(CASES))
    files = [f"{name}={path}" for name in ("cleanrl", "leanrl") if (path := getattr(arguments, name))]
    for name in names:
        run(name, arguments.layout, files, arguments.rounds, arguments.seconds)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SettingsError as error:
        sys.exit(f"error: {error}")
