"""Recording of a run by all its learners. Learner 0 writes, and the others report to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lockstep.buffers.batches import CollectedRollout
from lockstep.learners.process import LearnerProcess
from lockstep.learners.steps import LearningReport
from lockstep.training import agreement
from lockstep.training.job import Job
from lockstep.training.writer import Resumed, RunWriter, report_of


class Recording:
    """Records a run. All learners call its methods at the same points of their loops.

    Args:
        heartbeat: called at every step of an evaluation.
    """

    def __init__(self, job: Job, process: LearnerProcess, heartbeat: Callable[[], None], resumed: Resumed) -> None:
        self._job, self._process, self._group = job, process, process.group
        self._has_callback = self._group.broadcast(job.callback is not None)
        # With torchrun, commands of other machines may have other options, and learner 0's hold.
        self.checkpoint_every = self._group.broadcast(job.options.checkpoint_every)
        self._eval_every = self._group.broadcast(job.options.eval_every)
        self._writer = RunWriter(job, process, heartbeat, resumed) if self._group.rank == 0 else None

    def record(
        self,
        iteration: int,
        taken: dict[int, list[CollectedRollout]],
        learned: LearningReport,
        count: int,
        not_finite: Sequence[str],
        begin: float,
    ) -> None:
        """Write an iteration's metrics and its line of the ledger, and let a curriculum choose the next options.

        Args:
            count: how many rollouts all learners took.
            not_finite: names of parameters and statistics that are NaN or infinite.
            begin: when the iteration began (time.perf_counter).

        Raises:
            NotFinite: learning has diverged, and the run should stop then.
        """
        reports = self._group.gather(report_of(self._process, taken, learned, begin))
        if self._writer is not None and reports is not None:
            self._writer.record(iteration, count, learned, reports, time.perf_counter() - begin, not_finite)
        if self._job.experiment.curriculum:
            options = None if self._writer is None else self._writer.next_options()
            self._process.agent.options = self._group.broadcast(options)

    def evaluate(self, iterations: int, stop_requested: Callable[[], bool]) -> bool:
        """Evaluate if an evaluation is due after this many iterations. Returns whether it was abandoned because a stop
        was requested; a run that is resumed there evaluates first."""
        if not self._eval_every or iterations % self._eval_every:
            return False
        abandoned = self._writer is not None and not self._writer.evaluate(iterations, stop_requested)
        return self._group.broadcast(abandoned)

    def asked_to_stop(self, iterations: int) -> bool:
        """Whether the callback, if there is one, ends the run after this many iterations."""
        if not self._has_callback:
            return False
        return self._group.broadcast(self._writer is not None and self._writer.asked_to_stop(iterations))

    def save(self, iterations: int) -> None:
        """Write a checkpoint, to which every learner contributes its parts.

        Raises:
            LearnersDiffer: the learners have different parameters.
        """
        held = agreement.held(self._process.agent) if self._group.size > 1 else None
        every = self._group.gather((self._process.save(self._job.folder.checkpoints, iterations), held))
        if self._writer is not None and every is not None:
            agreement.require_agreement([each for _, each in every if each], self._job.layout, iterations)
            self._writer.finish_checkpoint(iterations, [part for parts, _ in every for part in parts])

    def score(self) -> float | None:
        """Mean raw score of the last 100 training episodes, in learner 0. None before the first episode ends, and in
        other learners."""
        return None if self._writer is None else self._writer.score()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
