"""The training loop, assembled by hand from the parts that the command line uses.

One process holds all shards here, and records and saves nothing. What remains is the structure of training:
collect with one version, learn, publish the next. `lockstep/training/loops.py` is the same loop with workers, ledger,
checkpoints and display.

python examples/script.py
"""

from __future__ import annotations

import torch

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.collectors.collectors import Collector
from lockstep.core.digests import state_digest
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.learners.learner import Learner
from lockstep.models.versions import Versions


def run(experiment: Experiment) -> str:
    """Train, print a line an iteration, and return the digest that `lockstep train` would print too."""
    torch.set_num_threads(experiment.torch_threads)  # bits depend on it
    shards = range(experiment.scheme.shards)
    agent = Agent(experiment)
    buffers = RolloutBuffers(agent, shards, 1, PrivateArena())
    collector = Collector(agent, buffers)
    tree = TreeSum(experiment.scheme.shards, Group())
    learner = Learner(agent, shards, tree)

    schedule = experiment.schedule()
    versions = Versions(schedule)

    collector.reset()
    versions.publish(agent.version(0))
    for iteration in schedule.iterations_from(0):
        acting = versions[schedule.collects_with(iteration)]
        rollouts = collector.collect(iteration, lambda _, acting=acting: acting)
        infos = [each.info for each in rollouts]
        learned = learner.learn(iteration, {each.info.shard: [each] for each in rollouts})
        moments = tree.sum({info.shard: torch.from_numpy(info.moments) for info in infos})
        agent.normalizers = agent.normalizers.merged(moments)
        versions.publish(agent.version(iteration + 1))
        scores = [episode.score for info in infos for episode in info.episodes]
        if scores:
            loss = learned.metrics["loss/value"]
            print(f"iteration {iteration:3d}  score {sum(scores) / len(scores):6.1f}  value loss {loss:8.3f}")
    collector.close()
    return state_digest(agent.state() | learner.state())


if __name__ == "__main__":
    print("digest:", run(recipes.ppo_cartpole().replace(total_steps=20_000)))
