"""The particle worlds of MPE: the policies of simple_tag, and a run's score in the unit of published returns.

python benchmarks/mpe.py RUN …      after `lockstep train mappo-mpe`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep import evaluate

EPISODES = 600
"""Of agents, in an evaluation."""
PUBLISHED = {"simple_spread_v3": (6.0, -75.0), "simple_speaker_listener_v4": (2.0, 0.0)}
"""By environment: what turns a mean score of agents into the return of Papoudakis et al. 2021, arXiv:2006.07869.

They add up the rewards of all agents. In simple_spread of their version of MPE, rewards are twice those of mpe2, and
each of three agents also loses 1 in each of 25 steps for colliding with itself, which mpe2 does not count."""


def role(agent: str) -> str:
    """The policy of an agent of simple_tag: adversary or agent."""
    return agent.rpartition("_")[0]


def measure(run: Path) -> dict[str, object]:
    """A run's score over EPISODES episodes of agents, and the same as a published return."""
    found = evaluate(run, episodes=EPISODES)
    result: dict[str, object] = {"run": run.name, **found.to_json()}
    del result["scores"], result["lengths"]
    result["metrics"] = {name: {"mean": x.mean, "interval95": x.interval} for name, x in found.metrics.items()}
    experiment = json.loads((run / "experiment.json").read_text())
    for name, (factor, offset) in PUBLISHED.items():
        if name in experiment["env"]["id"]:
            low, high = found.interval or (found.mean, found.mean)
            result["as_published"] = [factor * x + offset for x in (found.mean, low, high)]
    return result


if __name__ == "__main__":
    print(json.dumps([measure(Path(run)) for run in sys.argv[1:]], indent=1))
