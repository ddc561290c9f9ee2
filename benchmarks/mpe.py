"""The particle worlds of MPE: the policies of simple_tag, and what a run's policies reach.

python benchmarks/mpe.py RUN …      after `lockstep train mappo-mpe`, prints JSON
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from lockstep import load_policy
from lockstep.config.options import EvaluationSettings
from lockstep.evaluation.policy import Policy
from lockstep.evaluation.scores import evaluate_policy
from lockstep.models.policies import Policies, PoliciesSpace

EPISODES = 600
"""Of agents, in an evaluation."""
PUBLISHED = {"simple_spread_v3": (6.0, -75.0), "simple_speaker_listener_v4": (2.0, 0.0)}
"""By environment: what turns a mean score of agents into the return of Papoudakis et al. 2021, arXiv:2006.07869.

They add up the rewards of all agents. In simple_spread of their version of MPE, rewards are twice those of mpe2, and
each of three agents also loses 1 in each of 25 steps for colliding with itself, which mpe2 does not count."""


def role(agent: str) -> str:
    """The policy of an agent of simple_tag: adversary or agent."""
    return agent.rpartition("_")[0]


def measure(run: Path) -> dict[str, Any]:
    """A run's score, by itself and as a published return; with several policies also where some are untrained."""
    policy = load_policy(run)
    result: dict[str, Any] = {"run": run.name, "samples": policy.samples, **played(policy, policy.model)}
    for name, (factor, offset) in PUBLISHED.items():
        if name in policy.experiment.env.id:
            result["as_published"] = [factor * x + offset for x in (result["score"], *result["interval95"])]
    space, actions = policy.spaces
    if isinstance(space, PoliciesSpace) and isinstance(trained := policy.model, Policies):
        first = policy.experiment.build_model(space, actions)
        assert isinstance(first, Policies)
        names = list(space.parts)
        for chosen in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names))):
            mixed = Policies(space, {name: (trained if name in chosen else first)[name] for name in names}, actions)
            result[f"trained: {', '.join(chosen) or 'none'}"] = played(policy, mixed)
    return result


def played(policy: Policy, model: Any) -> dict[str, Any]:
    """The scores of EPISODES episodes of agents."""
    found = evaluate_policy(model, policy.experiment, EvaluationSettings(episodes=EPISODES), seed_purpose="test")
    each = {name: [metric.mean, *(metric.interval or ())] for name, metric in found.metrics.items()}
    return {"score": found.mean, "interval95": list(found.interval or ()), "median": found.median, **each}


if __name__ == "__main__":
    print(json.dumps([measure(Path(run)) for run in sys.argv[1:]], indent=1))
