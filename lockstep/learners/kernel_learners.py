"""Which learner computes gradients with which kernels."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.algorithms import kernel_table as table
from lockstep.learners.kernels import KernelLearner
from lockstep.learners.portable import PortableLearner
from lockstep.learners.portable_losses import LossLearner
from lockstep.learners.portable_replay import QLearner, ReturnsLearner, SACLearner, TD3Learner

LEARNERS: Mapping[type[table.Kernels], type[KernelLearner]] = {
    table.PPOKernels: PortableLearner,
    table.LossKernels: LossLearner,
    table.DQNKernels: QLearner,
    table.ReturnsKernels: ReturnsLearner,
    table.SACKernels: SACLearner,
    table.TD3Kernels: TD3Learner,
}
