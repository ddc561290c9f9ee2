"""Trains in separate processes that can be paused and continued, so that several layouts are timed in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from lockstep.algorithms.offpolicy import off_policy
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.run.folder import RunFolder
from lockstep.system import children
from lockstep.system.supervision import WorkerError, unattended

_POLL = 0.005
"""Seconds between checks for finished iterations."""
_ENDLESS = 10**15
"""total_steps of a trial, which never ends by itself."""


class OutOfTime(Exception):
    """The deadline passed first."""


@dataclass(frozen=True)
class Slot:
    """A period of training between the ends of two iterations."""

    samples: int
    seconds: float
    lines: list[tuple[float, dict[str, float]]]
    """When each iteration's metrics were seen (time.perf_counter), and the metrics."""

    @property
    def rate(self) -> float:
        """Samples per second of wall time, everything included."""
        return self.samples / self.seconds

    def shares(self) -> dict[str, float]:
        """Average shares of the wall time by activity; `recording` is the work of learner 0 after an iteration. The
        slot's first iteration is left out, since it includes the pause of the trial. Empty if there are no others."""
        (begin, before), (end, after) = self.lines[0], self.lines[-1]
        if len(self.lines) < 2:
            return {}
        spent = after["seconds"] - before["seconds"]
        measured = min(1.0, spent / (end - begin)) if end > begin else 1.0
        names = [name for name in after if name.startswith("time/")]
        lines = [line for _, line in self.lines[1:]]
        shares = {name[len("time/") :]: measured * statistics.fmean(line[name] for line in lines) for name in names}
        return {**shares, "recording": 1.0 - measured}


class Trial:
    """Trains an experiment under a layout, without end and, with replay, without warm-up.

    The trial's processes end with the calling process, however it ends. The trial begins to run at once; run one at a
    time, or they compete for cores.
    """

    def __init__(self, experiment: Experiment, layout: Layout) -> None:
        self.layout = layout
        self._samples = 0
        """Samples collected so far."""
        self.settling = experiment.scheme.buffers
        """First iterations that are not typical: buffers fill, or nothing is learned yet."""
        if experiment.algorithm.replays:
            algorithm = dataclasses.replace(off_policy(experiment.algorithm), warmup=0)
            experiment = experiment.replace(algorithm=algorithm)
            self.settling += algorithm.build().warm_iterations(experiment.samples_per_iteration)
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-trial-")
        folder = Path(self._folder.name)
        self._output, self._failure = folder / "output", folder / "failure"
        self._metrics = RunFolder(folder / "run").metrics
        self._read = 0
        experiment = dataclasses.replace(experiment, total_steps=_ENDLESS)
        self._process = children.start(_train, (experiment, layout, folder), f"lockstep-trial-{layout}")

    def run(self, seconds: float, iterations: int = 1, deadline: float = float("inf")) -> Slot:
        """Let it train for at least this many seconds and iterations, then pause it.

        Raises:
            OutOfTime: the deadline (time.perf_counter) passed first.
            SettingsError, WorkerError: the error that ended the training.
        """
        self._signal(signal.SIGCONT)
        begin = time.perf_counter()
        lines: list[tuple[float, dict[str, float]]] = []
        while not lines or lines[-1][0] - begin < seconds or len(lines) < iterations:
            ended = wait([self._process.sentinel], timeout=_POLL)
            now = time.perf_counter()
            lines += [(now, line) for line in self._new_lines()]
            if ended:
                raise self._error()
            if now > deadline:
                raise OutOfTime
        self._signal(signal.SIGSTOP)
        before, self._samples = self._samples, int(lines[-1][1]["samples"])
        return Slot(self._samples - before, lines[-1][0] - begin, lines)

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)
        self._process.kill()  # it has a process group only once it runs
        self._process.join()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _new_lines(self) -> list[dict[str, float]]:
        """The metrics of iterations that have ended since the last call."""
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        return [json.loads(line) for line in text.splitlines()]

    def _error(self) -> Exception:
        if self._failure.exists():
            kind, text = json.loads(self._failure.read_text(encoding="utf-8"))
            return SettingsError(text) if kind == "mistake" else WorkerError(text)
        printed = self._output.read_text(encoding="utf-8", errors="replace") if self._output.exists() else ""
        last = "\n".join(printed.splitlines()[-20:])
        return WorkerError(f"Training with --layout {self.layout} {children.death_report(self._process)}\n{last}")


def _train(experiment: Experiment, layout: Layout, folder: Path) -> None:
    """The main function of the trial's process."""
    os.setpgrp()  # so that all its processes can be paused together
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    never = 10**12
    options = RunOptions(run=str(folder / "run"), checkpoint_every=never, display="none", tensorboard=False)

    def failed(kind: str, text: str) -> None:
        (folder / "failure").write_text(json.dumps([kind, text]), encoding="utf-8")

    def stands(text: str) -> None:
        failed("error", text)
        os._exit(1)

    try:
        with unattended(stands):
            train(experiment, layout, options)
    except SettingsError as error:
        failed("mistake", str(error))
    except WorkerError as error:
        failed("error", str(error))
    except BaseException as error:
        failed("error", f"{type(error).__name__}: {error}")
        raise
