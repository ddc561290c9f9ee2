"""The trackers that a run's metrics go to: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import importlib
import time
from typing import Any, Protocol

from lockstep.config.options import RunOptions
from lockstep.config.serialization import to_json
from lockstep.experiment import Experiment
from lockstep.run.folder import RunFolder


class Tracker(Protocol):
    """Receives the lines of metrics.jsonl."""

    def log(self, values: dict[str, float], samples: int) -> None:
        """Take the numbers of a line, and how many samples had been collected."""
        ...

    def close(self) -> None:
        """Send everything that is left."""
        ...


class _TensorBoard:
    def __init__(self, folder: RunFolder, samples: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[reportAttributeAccessIssue]
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run writes the output after its checkpoint again, and TensorBoard must not show both. It reads files
        # in the order of their names, which are only ordered by the second in which they were begun.
        while list(folder.tensorboard.glob(f"events.out.tfevents.{int(time.time()):010d}*")):
            time.sleep(0.1)
        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=samples + 1)
        self._summary = Summary

    def log(self, values: dict[str, float], samples: int) -> None:
        # One event for all values: one event each took a tenth of the time of an iteration of a single step.
        named = {name if "/" in name else f"progress/{name}": value for name, value in values.items()}
        listed = [self._summary.Value(tag=name, simple_value=value) for name, value in named.items()]
        self._writer._get_file_writer().add_summary(self._summary(value=listed), samples)

    def close(self) -> None:
        self._writer.close()


class _Hosted:
    """W&B or trackio, which has the same interface. Both plot everything over samples."""

    def __init__(self, module: str, **settings: Any) -> None:
        self._module: Any = importlib.import_module(module)
        self._module.init(**settings)
        self._step = module == "trackio"
        if not self._step:  # W&B's default step counts calls, and would drop the lines that a resumed run repeats
            self._module.define_metric("*", step_metric="samples")

    def log(self, values: dict[str, float], samples: int) -> None:
        self._module.log({**values, "samples": samples}, **({"step": samples} if self._step else {}))

    def close(self) -> None:
        self._module.finish()


def trackers_of(folder: RunFolder, experiment: Experiment, options: RunOptions, samples: int) -> list[Tracker]:
    """The trackers that the options name. samples: how many were collected before this start; 0 in a new run."""
    options.validate()
    name = folder.path.resolve().name
    trackers: list[Tracker] = []
    if options.tensorboard:
        trackers.append(_TensorBoard(folder, samples))
    if options.wandb:
        # W&B finds the run by its id, which is unique; trackio by its name.
        kept = {"id": folder.facts().get("id", name[-64:]), "dir": str(folder.path), "resume": "allow"}
        trackers.append(_Hosted("wandb", project=options.wandb, name=name, config=to_json(experiment), **kept))
    if options.trackio:
        resume = "allow" if samples else "never"
        trackers.append(
            _Hosted("trackio", project=options.trackio, name=name, config=to_json(experiment), resume=resume)
        )
    return trackers
