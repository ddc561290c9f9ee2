"""The folder of a run, which contains all of its files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep import envs
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import look_for_files_in
from lockstep.envs.mixed import shares
from lockstep.experiment import Experiment
from lockstep.run.files import reading, set_aside, write_whole, writing
from lockstep.run.finding import REPLAY, WEIGHTS, is_run, is_unfinished, new_folder, not_a_run, require_empty
from lockstep.run.lock import run_lock
from lockstep.run.platform import code_of, version
from lockstep.run.rows import read_rows
from lockstep.system.machine import cores
from lockstep.system.output import print_warning

_FACTS: dict[str, type] = {
    "layout": str,
    "auto": str,
    "command": str,
    "started": str,
    "versions": dict,
    "code": dict,
    "python": str,
    "platform": str,
    "cores": int,
    "iteration": int,
    "options": dict,
    "directory": str,
}
"""The entries of run.json and their types."""


@dataclass(frozen=True)
class RunFolder:
    """All files of one run."""

    path: Path

    @property
    def ledger(self) -> Path:
        """One line per iteration: the digests that prove the results."""
        return self.path / "ledger.jsonl"

    @property
    def quoted(self) -> str:
        """The folder as an argument of a command for a shell."""
        return shlex.quote(str(self.path))

    @property
    def metrics(self) -> Path:
        """One line per iteration: the metrics of docs/metrics.md."""
        return self.path / "metrics.jsonl"

    @property
    def weights(self) -> Path:
        """The initial weights of a run with a warm start."""
        return self.path / WEIGHTS

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints (lockstep.run.checkpoint)."""
        return self.path / "checkpoints"

    @property
    def checkpointed(self) -> Path:
        """An empty file that exists after the first checkpoint, even if all checkpoints have been deleted."""
        return self.path / ".checkpointed"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's files."""
        return self.path / "tensorboard"

    @staticmethod
    def create(
        experiment: Experiment,
        layout: Layout,
        options: RunOptions,
        weights: bytes = b"",
        repeats: str | None = None,
        asked: Layout | None = None,
    ) -> RunFolder:
        """Make a new folder, and write experiment.json and run.json. Also write the initial weights of a warm start,
        and the run that this one repeats, if any. A folder whose creation was interrupted is reused.

        Args:
            weights: the content of the file with initial weights.
            repeats: the folder of the run that this one repeats.
            asked: the layout that the user gave. It is recorded if it is auto.

        Raises:
            SettingsError: the folder that the options name exists and is not empty.
        """
        if not layout.launcher.leads:
            return RunFolder(Path(options.run or "runs"))  # until rank 0 sends its folder's path
        seeds = envs.first_seeds(experiment.env, experiment.seed)
        settings = to_json(experiment)  # before the folder exists, so that an error leaves none behind
        facts = {
            **_here_and_now(layout),
            **({"auto": str(asked)} if asked is not None and asked.is_auto else {}),
            "code": code_of(settings),
            "options": {**dataclasses.asdict(options), "run": None if options.run is None else str(options.run)},
            "directory": os.getcwd(),
            "id": uuid.uuid4().hex,
            "first_env_seeds": seeds,
            **({"shares_of_samples": found} if (found := shares(experiment.env.id)) else {}),
        }
        with writing(options.run or "runs"):
            folder = RunFolder(new_folder(options.run, experiment.env.id, experiment.algorithm.name, experiment.seed))
            with folder.locked(warn=False):
                require_empty(str(folder.path))  # another process may have begun a run in it meanwhile
                folder.checkpoints.mkdir(exist_ok=True)
                try:
                    replayed = b"" if repeats is None else _json({"of": repeats})
                    for name, known in ((WEIGHTS, weights), (REPLAY, replayed)):
                        (folder.path / name).unlink(missing_ok=True)  # from a run that was never started
                        if known:
                            write_whole(folder.path / name, known)
                    _write_json(folder.path / "run.json", facts)
                    _write_json(folder.path / "experiment.json", settings)  # last: it marks the folder as a run
                except OSError:
                    folder.checkpoints.rmdir()  # otherwise the folder could be neither resumed nor reused
                    for name in ("run.json", WEIGHTS, REPLAY):
                        (folder.path / name).unlink(missing_ok=True)
                    raise
        return folder

    @staticmethod
    def open(path: str | Path) -> RunFolder:
        """The folder of an existing run.

        Raises:
            SettingsError: there is no run at that path, or it cannot be read.
        """
        path = Path(path)
        with reading(path):
            complete, unfinished = is_run(path), is_unfinished(path)
        if unfinished:
            command = None
            with contextlib.suppress(SettingsError):
                command = RunFolder(path).facts().get("command")
            again = f": {command}" if command else "."
            raise SettingsError(
                f"{path} is the folder of a run that stopped before it began, so it cannot be resumed. Repeat the "
                f"command that started it, which reuses this folder{again}"
            )
        if not complete:
            raise not_a_run(path)
        return RunFolder(path)

    def experiment(self) -> Experiment:
        """The experiment that this run was started with.

        Raises:
            SettingsError: experiment.json is damaged or names code that does not exist.
        """
        look_for_files_in(self.facts().get("directory", ""))
        try:
            experiment = from_json(self.read("experiment.json"))
        except SettingsError as error:
            name = str(self.path / "experiment.json")
            raise error if name in str(error) else SettingsError(f"{name}: {error}") from error
        if not isinstance(experiment, Experiment):
            raise self.damaged("experiment.json", "it does not contain an experiment")
        return experiment

    def layout(self) -> Layout:
        """The layout that this run was started with."""
        return Layout.parse(self._fact("layout"))

    def asked_layout(self) -> Layout:
        """The layout that the user gave, which may be auto. If timing decides, the layout that was chosen."""
        asked = self.facts().get("auto")
        return self.layout() if asked is None or self.experiment().scheme.timing_decides else Layout.parse(asked)

    def options(self) -> RunOptions:
        """The options that this run was started with, with run set to this folder."""
        known = dataclasses.asdict(RunOptions())
        noted = self._fact("options")
        options = {name: value for name, value in noted.items() if name in known}
        if unknown := sorted(noted.keys() - known):
            print_warning(
                f"run.json of {self.path} has options that this version of lockstep does not know and "
                f"ignores: {', '.join(unknown)}. Use flags to set what you need."
            )
        for name, value in options.items():
            default = known[name]
            kind = str if default is None else list if isinstance(default, tuple) else type(default)
            if not (value is default or isinstance(value, kind)):
                raise self.damaged("run.json", f"its option {name!r} is {value!r}")
        return RunOptions(**{**options, "run": str(self.path)})

    def locked(self, *, warn: bool = True) -> contextlib.AbstractContextManager[None]:
        """Prevent other processes from writing this run at the same time. See lockstep.run.lock."""
        return run_lock(self.path, warn=warn)

    def facts(self) -> dict[str, Any]:
        """run.json: layout, options, command, versions and machine at the start and after each resume."""
        facts = self.read("run.json")
        for name in ("resumed", "nodes"):
            if not isinstance(facts.get(name, []), list) or not all(isinstance(e, dict) for e in facts.get(name, [])):
                raise self.damaged("run.json", f"its {name!r} is not a list of objects")
        for each in (facts, *facts.get("resumed", [])):
            wrong = [name for name, kind in _FACTS.items() if not isinstance(each.get(name, kind()), kind)]
            if wrong:
                raise self.damaged("run.json", f"its {wrong[0]!r} is {each[wrong[0]]!r}")
        return facts

    def note_resumption(self, iteration: int, layout: Layout, options: RunOptions, differs: Sequence[str]) -> None:
        """Record in run.json how the run continues after this many iterations. Entries about iterations that the run
        repeats are removed. differs: the entries of the platform that differ from the ledger's head."""
        facts = self.facts()
        before = [each for each in facts.get("resumed", []) if each.get("iteration", 0) < iteration]
        again = {"iteration": iteration, "checkpoint_every": options.checkpoint_every, **_here_and_now(layout)}
        again["options"] = {name: x for name, x in dataclasses.asdict(options).items() if name.startswith("eval_")}
        if differs:
            again["differs"] = list(differs)
        _write_json(self.path / "run.json", {**facts, "resumed": [*before, again]})

    def note_difference(self, differs: Sequence[str]) -> None:
        """Record in run.json that these entries of the platform on which the run was last resumed differ from the
        ledger's head."""
        facts = self.facts()
        *before, last = facts["resumed"]
        _write_json(self.path / "run.json", {**facts, "resumed": [*before, {**last, "differs": list(differs)}]})

    def note_node(self, process: str, host: str, differs: Sequence[str]) -> None:
        """Record in run.json the host of a process, and the entries of its platform that differ from learner 0's."""
        facts, entry = self.facts(), {"process": process, "host": host, "differs": list(differs)}
        if entry not in facts.get("nodes", []):
            _write_json(self.path / "run.json", {**facts, "nodes": [*facts.get("nodes", []), entry]})

    def begin_again(self, experiment: Experiment) -> None:
        """Set aside the records of a run that ended before its first checkpoint. experiment: the run's experiment,
        which is written again.

        Raises:
            SettingsError: the run had a checkpoint.
        """
        recorded = self.ledger.read_bytes().count(b"\n") - 1 if self.ledger.is_file() else 0
        every = self._fact("options").get("checkpoint_every", 0)
        resumed = [each.get("checkpoint_every", 0) for each in self.facts().get("resumed", [])]
        if not self.checkpoints.is_dir() or self.checkpointed.exists() or recorded > max(every, *resumed, 0):
            raise SettingsError(
                f"{self.path} has lost its checkpoints: its ledger records {recorded} iterations. Restore its folder "
                f"{self.checkpoints.name} from a copy, or train it again in another folder."
            )
        for written in (self.ledger, self.metrics):
            if written.is_file():
                written.replace(written.with_name(f"{written.name}.superseded"))
            elif written.exists():
                set_aside(written, "superseded")
        _write_json(self.path / "experiment.json", to_json(experiment))  # since an earlier version may have written it

    def remove_unbegun(self) -> None:
        """Remove the folder of a run that recorded nothing, unless it contains other files."""
        if self.ledger.exists() or self.metrics.exists():
            return
        for name in (".lock", "run.json", "experiment.json", REPLAY, WEIGHTS):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it contains other files
            self.checkpoints.rmdir()
            self.path.rmdir()

    def records(self) -> list[dict[str, float | None]]:
        """The complete rows of metrics.jsonl."""
        return read_rows(self.metrics)

    def read(self, name: str) -> dict[str, Any]:
        """Read the JSON object in one of the folder's files.

        Raises:
            SettingsError: the file is missing or damaged.
        """
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.damaged(name, error) from error
        if not isinstance(found, dict):
            raise self.damaged(name, "it does not contain a JSON object")
        return found

    def _fact(self, name: str) -> Any:
        facts = self.facts()
        if name not in facts:
            raise self.damaged("run.json", f"it has no {name!r}")
        return facts[name]

    def damaged(self, name: str, why: object) -> SettingsError:
        """The error for a damaged file of the folder."""
        return SettingsError(
            f"{self.path / name} cannot be read: {why}. The run's folder is damaged: restore this file from a copy, or "
            "start a new run."
        )


def _here_and_now(layout: Layout) -> dict[str, Any]:
    """The layout, command, versions and machine of this process."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # for python -m lockstep
    return {
        "layout": str(layout),
        "command": shlex.join([name, *sys.argv[1:]]),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("lockstep", "torch", "numpy", "gymnasium")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": cores(),
    }


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, _json(value))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
