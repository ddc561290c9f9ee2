"""The table of learners that compute gradients with kernels."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.algorithms import kernel_table as table
from lockstep.learners.kernel_learner import KernelLearner
from lockstep.learners.off_policy_kernels import (
    DiscreteSACLearner,
    DrQLearner,
    MPOLearner,
    QLearner,
    ReturnsLearner,
    SACLearner,
    TD3Learner,
)
from lockstep.learners.on_policy_kernels import LossLearner, ValueLearner
from lockstep.learners.policies_kernels import PoliciesLearner
from lockstep.learners.ppo_kernels import PPOLearner
from lockstep.learners.sequence_kernels import SequenceLearner

LEARNERS: Mapping[type[table.Kernels], type[KernelLearner]] = {
    table.PPOKernels: PPOLearner,
    table.LossKernels: LossLearner,
    table.PoliciesKernels: PoliciesLearner,
    table.ValueKernels: ValueLearner,
    table.DQNKernels: QLearner,
    table.ReturnsKernels: ReturnsLearner,
    table.DrQKernels: DrQLearner,
    table.SequenceKernels: SequenceLearner,
    table.SACKernels: SACLearner,
    table.DiscreteSACKernels: DiscreteSACLearner,
    table.TD3Kernels: TD3Learner,
    table.MPOKernels: MPOLearner,
}
