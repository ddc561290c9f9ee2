"""The training loop put together by hand, out of the parts that the command line uses.

One process holds all shards here, records nothing and saves nothing; what remains is the algorithm's own structure:
collect with one version, learn, publish the next. `lockstep/train.py` is the same loop with workers, ledger,
checkpoints and display.

python examples/script.py
"""

from __future__ import annotations

import torch

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.clock import Clock, Versions
from lockstep.collecting.collectors import Collector
from lockstep.digests import state_digest
from lockstep.experiment import Experiment
from lockstep.learning.learner import Learner
from lockstep.runtime.group import Group
from lockstep.runtime.shared import PrivateArena
from lockstep.storage.batches import Filled
from lockstep.storage.slabs import Slabs
from lockstep.tree import TreeSum


def run(experiment: Experiment) -> str:
    """Train, print a line an iteration, and return the digest that `lockstep train` would print too."""
    torch.set_num_threads(experiment.torch_threads)  # bits depend on it
    shards = range(experiment.scheme.shards)
    agent = Agent(experiment)
    slabs = Slabs(agent, shards, 1, PrivateArena())
    collector = Collector(agent, slabs)
    tree = TreeSum(experiment.scheme.shards, Group())
    learner = Learner(agent, shards, tree)

    clock = Clock.of(experiment)
    versions = Versions(clock)

    collector.reset()
    versions.publish(agent.version(0))
    for iteration in clock.ticks(0):
        acting = versions[clock.collects_with(iteration)]
        deliveries = collector.collect(iteration, lambda _, acting=acting: acting)
        filled = {shard: [Filled(slabs.rollout(shard, iteration), acting.normalizers)] for shard in shards}
        learned = learner.learn(iteration, filled)
        moments = tree.sum({delivery.shard: torch.from_numpy(delivery.moments) for delivery in deliveries})
        agent.normalizers = agent.normalizers.merged(moments)
        versions.publish(agent.version(iteration + 1))
        scores = [score for delivery in deliveries for score, _ in delivery.episodes]
        if scores:
            loss = learned.metrics["loss/value"]
            print(f"iteration {iteration:3d}  score {sum(scores) / len(scores):6.1f}  value loss {loss:8.3f}")
    collector.close()
    return state_digest(agent.state() | learner.state())


if __name__ == "__main__":
    print("digest:", run(recipes.ppo_cartpole().replace(total_steps=20_000)))
