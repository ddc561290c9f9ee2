"""Several policies with kernels have the bits of torch's replaced operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replaced import compare_ledgers
from tiny import portable

from lockstep.agent import Agent
from lockstep.algorithms.impala import IMPALAConfig
from lockstep.algorithms.kernel_table import PoliciesKernels
from lockstep.learners.policies_kernels import PoliciesLearner

NAME = "policies-lag-1"
"""Policies with 2 and 4 actions, observations of other lengths, and critics that see all of them."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm.minibatches": 1, "env.central_state": "none", "model.critic_only": ()},
        {
            "algorithm.normalize_advantages": False,
            "model.separate_value_network": False,
            "env.central_state": "none",
            "model.critic_only": (),
        },
        {"algorithm": IMPALAConfig(rollout=8, minibatches=3)},
        {"algorithm.minibatches": 3, "model.core": "gru", "model.core_size": 8, "model.previous_action_reward": True},
    ],
)
def test_runs_with_kernels_are_those_of_torchs_replaced_operations(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_ledgers(portable(NAME).replace(**changes), tmp_path, monkeypatch, PoliciesKernels)


def test_so_are_those_of_slices_in_which_a_policy_plays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice has one or two samples of each shard, and half of the shards' samples are of one policy."""
    sizes, compute = set(), PoliciesLearner.compute

    def noted(self: PoliciesLearner, step: int, hyper: Any, out: Any, **others: Any) -> None:
        compute(self, step, hyper, out, **others)
        first = self._parameters.size + self._each
        sizes.update(int(samples) for row in out for samples in row[first :: self._each])

    monkeypatch.setattr(PoliciesLearner, "compute", noted)
    changes = {"algorithm.rollout": 4, "algorithm.minibatches": 6, "total_steps": 3 * 4 * 12}
    compare_ledgers(portable(NAME).replace(**changes), tmp_path, monkeypatch, PoliciesKernels)
    assert {0, 1, 2} <= sizes


def test_without_normalization_torchs_operations_compute_them() -> None:
    """The order of their sums depends on whether observations are copied, which normalizing does."""
    assert Agent(portable(NAME).replace(**{"normalize.observations": False})).kernels is None
