"""How fast the members of a population train side by side, beside one policy with as many environments.

    python benchmarks/members.py [RECIPE] [--members 1 2 4] [--rounds 3] [--seconds 20] [SETTING=VALUE …]
    python benchmarks/members.py appo-vizdoom --members 1 2 4

Every row has as many environments in total. One policy trains on the layout that `auto` chooses; members train as the
runs of `lockstep sweep --population` do, each in a single process. A row's rate is the sum over its members, which
begin and end together. Sample Factory's Table A.3 (Petrenko et al. 2020, arXiv:2006.11751) is the same measurement on
72 cores and four GPUs, where members share the processes of environments.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from other_systems.rounds import interleave, table

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError, parse_options
from lockstep.experiment import Experiment
from lockstep.launchers.auto import chosen
from lockstep.recipes import RECIPES
from lockstep.speed.trial import Trial


def member(experiment: Experiment, members: int) -> Experiment:
    """One of so many, which divide the environments and the batch among themselves.

    Raises:
        SettingsError: the environments do not divide among them.
    """
    num_envs = experiment.env.num_envs // members
    if members * num_envs != experiment.env.num_envs:
        raise SettingsError(f"{experiment.env.num_envs} environments do not divide among {members} members.")
    shards = min(experiment.scheme.shards, num_envs)
    settings = {"env.num_envs": num_envs, "scheme.shards": shards, "scheme.acting_batch": 0}
    return experiment if members == 1 else experiment.replace(**settings)


def together(trials: list[Trial], seconds: float) -> float:
    """Samples per second of trials that run at the same time, all together."""
    with ThreadPoolExecutor(len(trials)) as threads:
        slots = list(threads.map(lambda trial: trial.run(seconds), trials))
    return sum(slot.samples for slot in slots) / max(slot.seconds for slot in slots)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="appo-vizdoom", choices=RECIPES)
    parser.add_argument("settings", nargs="*", help="of the experiment, such as env.num_envs=32")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row in each round")
    given = parser.parse_args()
    try:
        experiment = RECIPES[given.recipe]().replace(**parse_options(given.settings))
        each_of = {members: member(experiment, members) for members in given.members}
    except SettingsError as error:
        parser.error(str(error))
    rows: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:
        for members, each in each_of.items():
            layout = chosen(Layout.parse("auto"), each, say=False) if members == 1 else Layout.parse("inline")
            name = f"one policy, `{layout}`" if members == 1 else f"{members} members"
            print(f"starting {name} …", flush=True)
            trials = [stack.enter_context(contextlib.closing(Trial(each, layout))) for _ in range(members)]
            for trial in trials:
                trial.run(0.0, iterations=2 + trial.settling)
            rows[name] = functools.partial(together, trials, given.seconds)
        found = interleave(rows, given.rounds, functools.partial(print, flush=True))
    print(f"\n{table(found, ('one policy',))}")


if __name__ == "__main__":
    main()
