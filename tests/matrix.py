"""Every layout with every kind of experiment, which takes too long for each change: equal digests and ledgers.

python tests/matrix.py      PPO and IMPALA with LSTM, Atari and gymnasium, fp32 and bf16, lags 0, 1 and 2
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tiny import cut, options
from workers import Workers, ran_of

import lockstep
from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.run.folder import RunFolder
from lockstep.training.job import Job
from lockstep.training.prepare import prepare

LAYOUTS = (
    *("processes:2", "processes:3", "processes:4"),
    *("cpu:a1-l1", "cpu:a2-l1", "cpu:a1-l2", "cpu:a2-l2", "cpu:a3-l1", "cpu:a1-l3"),
)
SUBPROCESSES = tuple(f"cpu:a1-l1,env_processes={n}" for n in (1, 2, 3))


def experiments() -> dict[str, Experiment]:
    """By what is special about them."""
    found = {}
    for algorithm, task, precision, lag in itertools.product(
        ("ppo", "impala-lstm"), ("atari", "cartpole"), ("fp32", "bf16"), (0, 1, 2)
    ):
        scheme, model = {"lag": lag}, {"core": "lstm" if algorithm == "impala-lstm" else "none"}
        if task == "atari":
            recipe = recipes.ppo_atari if algorithm == "ppo" else recipes.impala_atari
            experiment = cut(recipe, epochs=1, model=model, scheme=scheme, precision=precision)
        else:
            env = {"adapter": "gymnasium"}
            experiment = cut(recipes.ppo_cartpole, env=env, model=model, scheme=scheme, precision=precision)
            if algorithm != "ppo":
                settings = replace(recipes.impala_atari().algorithm, rollout=8, minibatches=2)
                experiment = experiment.replace(algorithm=settings)
        found[f"{algorithm}, {task}, {precision}, lag {lag}"] = experiment
    return found


def main() -> int:
    """Returns how many experiments differed somewhere."""
    workers, wrong = Workers(), 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, (name, experiment) in enumerate(experiments().items()):
                texts = LAYOUTS + (SUBPROCESSES if "cartpole" in name and "lag 1" in name else ())
                orders = {}
                for text in texts:
                    layout, run = Layout.parse(text), options(Path(f"{number}-{text}"))
                    created = RunFolder.create(prepare(experiment, layout), layout, run)
                    orders[text] = workers.start(Job(created, prepare(experiment, layout), layout, run))
                alone = ran_of(lockstep.train(experiment, Layout(), options(Path(f"{number}-inline"))))
                differing = [text for text, order in orders.items() if workers.ran(order) != alone]
                wrong += bool(differing)
                verdict = (
                    f"DIFFERS on {', '.join(differing)}" if differing else f"equal on inline and {len(texts)} more"
                )
                print(f"{name}: {verdict}, {alone.digest[:16]}…", flush=True)
        finally:
            workers.close()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
