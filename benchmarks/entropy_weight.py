"""How much APPO's entropy bonus weighs beside the policy's gradient, with and without standardized advantages.

    python benchmarks/entropy_weight.py Breakout Pong --total-steps 130k
    python benchmarks/entropy_weight.py MinAtar/Breakout-v1 --total-steps 300k

Trains `appo-atari`, or `minatar-appo-plain-0.01` of proof.py, in one process. At some points, both gradients of one
minibatch are computed: that of the clipped surrogate, with advantages as they are and standardized in each shard's
slice, and that of the entropy bonus. Standardizing changes the first alone, so the factor between the two is how much
less the bonus weighs with it. Writes benchmarks/agents/entropy-weight.json and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from proof import PARTS
from torch import Tensor

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms import APPOConfig
from lockstep.algorithms.appo import APPO
from lockstep.algorithms.base import LossOutput
from lockstep.algorithms.onpolicy import Batch
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.collectors.collectors import Collector
from lockstep.config.settings import parse_count
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.learners.learner import Learner
from lockstep.models.base import PolicyModel
from lockstep.models.versions import Versions

RESULTS = Path(__file__).parent / "agents" / "entropy-weight.json"
POINTS = 8
"""Iterations, spread evenly over the training, in which gradients are compared."""


class Compared(APPO):
    """APPO that adds up the gradients of the slices of a minibatch, part by part, while it is asked to."""

    def __init__(self, config: APPOConfig) -> None:
        super().__init__(config)
        self.wanted = 0
        """Slices that are still to be added up."""
        self._sums: dict[str, Tensor] = {}

    def loss(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> LossOutput:
        if self.wanted:
            self.wanted -= 1
            self._add(model, batch, hyper)
        return super().loss(model, batch, hyper)

    def _add(self, model: PolicyModel, batch: Batch, hyper: dict[str, float]) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]

        def gradient(algorithm: APPO, entropy_coef: float) -> Tensor:
            wanted = {**hyper, "value_coef": 0.0, "entropy_coef": entropy_coef}
            total = APPO.loss(algorithm, model, batch, wanted).total
            found = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
            return torch.cat([each.flatten() for each in found])

        standardizing = APPO(dataclasses.replace(self.config, standardize_advantages=True))
        plain = gradient(self, 0.0)
        found = {
            "plain": plain,
            "standardized": gradient(standardizing, 0.0),
            "entropy": gradient(self, hyper["entropy_coef"]) - plain,
        }
        for name, each in found.items():
            self._sums[name] = self._sums[name] + each if name in self._sums else each

    def norms(self) -> dict[str, float]:
        """Of the gradients added up since the last call."""
        sums, self._sums = self._sums, {}
        return {name: float(each.norm()) for name, each in sums.items()}


@dataclasses.dataclass(frozen=True)
class ComparedConfig(APPOConfig):
    name = "appo-compared"

    def build(self) -> Compared:
        return Compared(self)


def measure(experiment: Experiment) -> list[dict[str, Any]]:
    """Train, and compare the gradients at POINTS iterations."""
    torch.set_num_threads(experiment.torch_threads)
    shards = range(experiment.scheme.shards)
    agent = Agent(experiment)
    algorithm = agent.algorithm
    assert isinstance(algorithm, Compared)
    buffers = RolloutBuffers(agent, shards, 1, PrivateArena())
    collector, tree = Collector(agent, buffers), TreeSum(len(shards), Group())
    learner, schedule = Learner(agent, shards, tree), experiment.schedule()
    versions = Versions(schedule)
    every = max(1, (experiment.iterations - 1) // (POINTS - 1))
    found: list[dict[str, Any]] = []
    scores: list[float] = []

    collector.reset()
    versions.publish(agent.version(0))
    for iteration in schedule.iterations_from(0):
        acting = versions[schedule.collects_with(iteration)]
        rollouts = collector.collect(iteration, lambda _, acting=acting: acting)
        scores += [episode.score for each in rollouts for episode in each.info.episodes]
        compares = iteration % every == 0
        algorithm.wanted = len(shards) if compares else 0
        learned = learner.learn(iteration, {each.info.shard: [each] for each in rollouts})
        if compares:
            norms = algorithm.norms()
            found.append(
                {
                    "samples": (iteration + 1) * experiment.samples_per_iteration,
                    "score": round(sum(scores[-100:]) / len(scores[-100:]), 2) if scores else None,
                    "entropy": round(learned.metrics["policy/entropy"], 3),
                    "plain": norms["plain"] / norms["entropy"],
                    "standardized": norms["standardized"] / norms["entropy"],
                    "factor": norms["standardized"] / norms["plain"],
                }
            )
            scores = scores[-100:]
            print(found[-1], flush=True)
        versions.publish(agent.version(iteration + 1))
    collector.close()
    return found


def _experiment(game: str) -> Experiment:
    """APPO on the game, with an algorithm that compares gradients. Kernels have no gradients to compare."""
    if game.startswith("MinAtar/"):
        known = PARTS["standardized"]["minatar-appo-plain-0.01"].experiment
        experiment = known.replace(env=dataclasses.replace(known.env, id=game), precision="fp32")
    else:
        experiment = recipes.appo_atari(game).replace(**{"algorithm.value_coef": 0.5})  # as in the published figures
    names = [field.name for field in dataclasses.fields(experiment.algorithm)]
    return experiment.replace(algorithm=ComparedConfig(**{name: getattr(experiment.algorithm, name) for name in names}))


def table(games: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each point."""
    rows = ["| game | samples | score | policy ÷ entropy | standardized | factor |", "|" + "---|" * 6]
    for game, points in games.items():
        for p in points:
            ratios = f"{p['plain']:.3g} | {p['standardized']:.3g} | {p['factor']:.1f}"
            rows.append(f"| {game} | {p['samples']:,} | {p['score']} | {ratios} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="+")
    parser.add_argument("--total-steps", type=parse_count, default=160_000)
    given = parser.parse_args()
    games = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for game in given.games:
        games[game] = measure(_experiment(game).replace(total_steps=given.total_steps))
        RESULTS.write_text(json.dumps(games, indent=1) + "\n")
    print(table(games))


if __name__ == "__main__":
    main()
