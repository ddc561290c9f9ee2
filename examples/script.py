"""The training loop put together by hand, out of the parts that the command line uses.

One process holds all shards here, records nothing and saves nothing; what remains is the algorithm's own structure:
collect with one version, learn, publish the next. `lockstep/train.py` is the same loop with workers, ledger,
checkpoints and display.

python examples/script.py
"""

from __future__ import annotations

import torch

from lockstep import envs, recipes
from lockstep.clock import Clock, Versions
from lockstep.collect import Collector, Version
from lockstep.experiment import Experiment
from lockstep.learn import Learner
from lockstep.ledger import state_digest
from lockstep.normalize import Normalizers
from lockstep.parameters import FlatParameters
from lockstep.runtime.group import Group
from lockstep.tree import TreeSum


def run(experiment: Experiment) -> str:
    """Train, print a line an iteration, and return the digest that `lockstep train` would print too."""
    torch.set_num_threads(experiment.torch_threads)  # bits depend on it
    shards = range(experiment.scheme.shards)
    algorithm = experiment.algorithm.build()
    model = experiment.model.build(
        *envs.spaces(experiment.env),
        precision=experiment.precision,
        normalize_observations=experiment.normalize.observations,
        observation_clip=experiment.normalize.clip,
        seed=experiment.seed,
    )
    flat = FlatParameters(model, tail=1 + len(algorithm.metric_names))
    normalizers = Normalizers.initial(experiment, model)
    tree = TreeSum(experiment.scheme.shards, Group())
    collector = Collector(experiment, shards, model, flat, bootstrap=algorithm.needs_targets)
    learner = Learner(experiment, shards, model, algorithm, flat, tree)

    clock = Clock(experiment.scheme.lag, experiment.iterations)
    versions: Versions[Version] = Versions(clock)

    def publish(number: int) -> None:
        versions.publish(number, Version(number, flat.vector.detach().clone(), normalizers))

    collector.reset()
    publish(0)
    for iteration in clock.ticks(0):
        acting = versions[clock.collects_with(iteration)]
        rollouts = collector.collect(iteration, acting)
        learned = learner.learn(iteration, rollouts, acting.normalizers)
        seats = collector.seats()
        sums = {shard: normalizers.rollout_sums(rollouts[shard], seats[shard][1]) for shard in shards}
        normalizers = normalizers.merged(tree.sum(sums))
        publish(iteration + 1)
        scores = [score for episodes in collector.episodes().values() for score, _ in episodes]
        if scores:
            loss = learned.metrics["loss/value"]
            print(f"iteration {iteration:3d}  score {sum(scores) / len(scores):6.1f}  value loss {loss:8.3f}")
    collector.close()
    state = {f"parameter.{name}": tensor for name, tensor in flat.named().items()}
    state |= {f"optimizer.{name}": tensor for name, tensor in learner.update.state().items()}
    state |= {f"normalizer.{name}": tensor for name, tensor in normalizers.state().items()}
    return state_digest(state)


if __name__ == "__main__":
    print("digest:", run(recipes.ppo_cartpole().replace(total_steps=20_000)))
