"""Trials of what may go wrong with a run. Each ends with an outcome, which says whether a user may see it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from children import Child
from tiny import cut

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.config.options import RunOptions
from lockstep.launchers.launch import train

LIMIT = 180.0
"""Seconds after which a trial hangs."""
SOON = 30.0
"""Seconds in which everything of a run must be gone once its main process is."""
ITERATIONS = 120
RUN = (
    *("train", "ppo-cartpole", "--env.adapter", "gymnasium", "--env.num-envs", "8", "--env.reseed-every", "20"),
    *("--scheme.acting-batch", "0", "--scheme.lag", "1", "--algorithm.rollout", "8", "--algorithm.epochs", "1"),
    *("--algorithm.minibatches", "1", "--total-steps", str(8 * 8 * ITERATIONS), "--checkpoint-every", "2"),
    *("--display", "plain", "--no-tensorboard", "--run", "run"),
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "lockstep")
LAYOUTS = {
    "inline": "inline,learner_delay=0.01",
    "processes:2": "processes:2,learner_delay=0.01",
    "processes:2,env_processes=2": "processes:2,env_processes=2",
    "cpu:a1-l1": "cpu:a1-l1,learner_delay=0.01",
    "cpu:a2-l2": "cpu:a2-l2,learner_delay=0.01",
    "torchrun": "torchrun,learner_delay=0.01",
    "ray:2": "ray:2",
}
"""By their names here; the delays make runs last long enough to be killed."""
if importlib.util.find_spec("ray") is None:
    del LAYOUTS["ray:2"]


@dataclass(frozen=True)
class Outcome:
    """How one trial ended."""

    trial: str
    ended: str
    ok: bool
    output: str = ""
    """The end of what the run printed."""

    def __str__(self) -> str:
        return f"{'ok   ' if self.ok else 'FAULT'} {self.trial}: {self.ended}"


class Run:
    """A run in a folder of its own, started and resumed as commands."""

    def __init__(self, folder: Path, layout: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self.layout = folder, layout
        self.child: Child | None = None
        self.output = ""

    def begin(self, **popen: Any) -> Child:
        """Train, or go on with what is there."""
        exists = (self.folder / "run" / "experiment.json").exists()
        verb = ("resume", "run", "--checkpoint-every", "2") if exists else RUN
        launcher = TORCHRUN if self.layout == "torchrun" else ("-m", "lockstep")
        self.child = Child((*verb, "--layout", LAYOUTS[self.layout]), self.folder, launcher, **popen)
        return self.child

    def iterations(self) -> int:
        """That the ledger records."""
        path = self.folder / "run" / "ledger.jsonl"
        return max(0, path.read_bytes().count(b"\n") - 1) if path.is_file() else 0

    def wait(self, until: Callable[[], bool] = lambda: False, seconds: float = LIMIT) -> int | None:
        """The exit code; None if the condition was met first.

        Raises:
            TimeoutError: neither happened in time.
        """
        assert self.child is not None
        deadline = time.monotonic() + seconds
        while self.child.process.poll() is None:
            if until():
                return None
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)
        return self.child.process.returncode

    def left(self) -> str:
        """What the ended command left behind, in words; "" if nothing."""
        assert self.child is not None
        deadline = time.monotonic() + SOON
        while self.child.members() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [f"process {number}" for number in self.child.members()]
        found += [path.name for path in self.child.temporary.iterdir() if path.name.startswith(("lockstep", "pym"))]
        return f"left behind: {', '.join(found)}" if found else ""

    def end(self) -> str:
        """End what is left; returns all that was printed."""
        if self.child is not None:
            self.output = self.child.output()
            self.child.close()
            self.child = None
        return self.output

    def digest(self) -> str:
        found = re.findall(r"digest: ([0-9a-f]{64})", self.output)
        return found[-1] if found else ""


def reference(folder: Path) -> tuple[str, bytes]:
    """Digest and ledger of the run that nothing happens to."""
    run = Run(folder / "reference", "inline")
    run.begin()
    code = run.wait()
    run.end()
    assert code == 0, run.output
    return run.digest(), (run.folder / "run" / "ledger.jsonl").read_bytes()


def finished(run: Run, trial: str, expected: tuple[str, bytes]) -> Outcome:
    """Resume until the end, and compare."""
    try:
        run.begin()
        code = run.wait()
        left = run.left()
    except TimeoutError:
        return Outcome(trial, "hangs", False, run.end()[-2000:])
    run.end()
    if code != 0 or left:
        return Outcome(trial, left or f"exit {code}", False, run.output[-2000:])
    equal = (run.digest(), (run.folder / "run" / "ledger.jsonl").read_bytes()) == expected
    return Outcome(trial, "equal digest and ledger" if equal else "another digest", equal, run.output[-2000:])


# ------------------------------------------------------------------------------------------------------- kills


def kills(folder: Path, layouts: Sequence[str], count: int, seed: int) -> Iterator[Outcome]:
    """SIGKILL at random moments, start-up included: of the main process alone, or of all processes at once."""
    expected = reference(folder)
    for place, layout in enumerate(layouts):
        draw = random.Random(f"{seed} {layout}")
        run, lives = Run(folder / f"{place}", layout), 0
        for number in range(count // len(layouts) + (place < count % len(layouts))):
            alone = draw.random() < 0.5 and layout not in ("torchrun", "ray:2")  # whose programs start the processes
            yield kill(run, f"{layout}, kill {number + 1}", draw, alone)
            if run.iterations() >= ITERATIONS - 1:  # the next life begins a new run
                yield finished(run, f"{layout}, after the kills", expected)
                lives += 1
                run = Run(folder / f"{place}-{lives}", layout)
        yield finished(run, f"{layout}, after the kills", expected)


def kill(run: Run, trial: str, draw: random.Random, alone: bool) -> Outcome:
    child = run.begin()
    moment = run.iterations() + draw.randint(1, 25)
    try:
        if draw.random() < 0.3:  # while it starts
            time.sleep(draw.uniform(0, 6))
        else:
            run.wait(lambda: run.iterations() >= moment)
            time.sleep(draw.uniform(0, 0.02))
        for process in [child.process.pid] if alone else [child.process.pid, *child.members()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        code = run.wait(seconds=SOON)
        left = run.left()
    except TimeoutError:
        return Outcome(trial, "hangs", False, run.end()[-2000:])
    run.end()
    ok = not left and code in (0, -signal.SIGKILL)
    return Outcome(trial, left or f"killed after {run.iterations()} iterations", ok, run.output[-2000:])


# ----------------------------------------------------------------------------------------------------- signals

SIGNALS = {"TERM": [signal.SIGTERM], "INT": [signal.SIGINT], "HUP": [signal.SIGHUP], "TERM twice": [signal.SIGTERM] * 2}


def signals(folder: Path, layouts: Sequence[str], count: int, seed: int) -> Iterator[Outcome]:
    """Each ends the run soon, with an exit code of its own, and nothing is lost."""
    expected = reference(folder)
    for place, layout in enumerate(layouts):
        for name, numbers in SIGNALS.items():
            run = Run(folder / f"{place}-{name.replace(' ', '-')}", layout)
            yield signalled(run, f"{layout}, SIG{name}", numbers)
            yield finished(run, f"{layout}, resumed after SIG{name}", expected)


def signalled(run: Run, trial: str, numbers: list[signal.Signals]) -> Outcome:
    child = run.begin()
    try:
        run.wait(lambda: run.iterations() >= 3)
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, number)
            time.sleep(0.05)
        code = run.wait(seconds=SOON)
        left = run.left()
    except TimeoutError:
        return Outcome(trial, "hangs", False, run.end()[-2000:])
    run.end()
    ok = not left and code != 0 and ("Traceback" not in run.output or run.layout == "torchrun")  # which prints its own
    return Outcome(trial, left or f"exit {code} after {run.iterations()} iterations", ok, run.output[-2000:])


# -------------------------------------------------------------------------------------------------- full disks


def disks(folder: Path, layouts: Sequence[str], count: int, seed: int) -> Iterator[Outcome]:
    """A full file system, where root may mount one, and files that may not grow: both end the run with a sentence."""
    expected = reference(folder)
    for place, layout in enumerate(layouts):
        for name in ("a full disk", "a limit of file sizes"):
            if layout.startswith("ray") and name != "a full disk":
                continue  # a local cluster of Ray writes larger files before the run begins, and does not start
            run = Run(folder / f"{place}-{name.replace(' ', '-')}", layout)
            (run.folder / "run").mkdir()
            with contextlib.ExitStack() as stack:
                popen: dict[str, Any] = {}
                if name == "a full disk":
                    if not mounted(run.folder / "run", stack):
                        continue
                else:
                    popen["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
                yield full(run, f"{layout}, {name}", popen)
                kept = shutil.copytree(run.folder / "run", run.folder / "kept")
            shutil.rmtree(run.folder / "run")
            kept.rename(run.folder / "run")
            yield finished(run, f"{layout}, resumed after {name}", expected)


def mounted(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Whether a small file system could be mounted there."""
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        return False
    stack.callback(subprocess.run, ["umount", str(folder)], check=True)
    return True


def full(run: Run, trial: str, popen: dict[str, Any]) -> Outcome:
    run.begin(**popen)
    try:
        code = run.wait()
        left = run.left()
    except TimeoutError:
        return Outcome(trial, "hangs", False, run.end()[-2000:])
    run.end()
    told = "The disk is full" in run.output
    return Outcome(trial, left or f"exit {code}", not left and code == 1 and told, run.output[-3000:])


# ----------------------------------------------------------------------------------------------- damaged files


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(7)
    path.write_bytes(data)


def double(path: Path, draw: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    place = draw.randrange(len(lines))
    path.write_bytes(b"".join([*lines[: place + 1], *lines[place:]]))


def folder_instead(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, random.Random], Any]] = {
    "emptied": lambda path, draw: path.write_bytes(b""),
    "deleted": lambda path, draw: path.unlink(),
    "with a line doubled": double,
    "with a bit flipped": flip,
    "replaced by a folder": folder_instead,
}
PROVED = ("experiment.json", "ledger.jsonl", "metrics.jsonl", "checkpoints")
"""What verify and resume may not find damaged and keep silent: the newest checkpoint, of all of them."""


def files(folder: Path, layouts: Sequence[str], count: int, seed: int, *, few: bool = False) -> Iterator[Outcome]:
    """Each file of a run's folder, damaged in each way: verify and resume say so, or end with the same bits.

    few: only the files that are proved, one of each kind.
    """
    experiment = cut(recipes.ppo_cartpole, env={"adapter": "gymnasium"})
    whole = train(experiment, "inline", options(folder / "whole")).digest
    train(experiment, "inline", options(folder / "part"), stop_after=2)
    draw = random.Random(seed)
    names = sorted(str(p.relative_to(folder / "part")) for p in (folder / "part").rglob("*") if p.is_file())
    if few:
        newest = (f"checkpoints/00000002/{name}" for name in ("manifest.json", "shard-001.safetensors"))
        names = [*PROVED[:3], "run.json", *newest]
    for name in names:
        for damage, change in DAMAGES.items():
            if not (folder / "part" / name).stat().st_size and damage not in ("deleted", "replaced by a folder"):
                continue
            for verb in ("verify", "resume"):
                run = folder / "damaged"
                shutil.copytree(folder / "part", run)
                change(run / name, draw)
                yield damaged(run, name, f"{verb}, {name} {damage}", verb, whole)
                shutil.rmtree(run)


def options(run: Path) -> RunOptions:
    return RunOptions(run=str(run), checkpoint_every=1, display="none", tensorboard=False)


def damaged(run: Path, name: str, trial: str, verb: str, whole: str) -> Outcome:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, output = command([verb, str(run), *(["--iterations", "1"] if verb == "verify" else ["--layout", "inline"])])
    if code is None:
        return Outcome(trial, output.strip().rpartition("\n")[2], False, output[-2000:])
    newest = "00000002" if name.startswith("checkpoints/00000002") else "" if "checkpoints" in name else name
    must = bool(newest) and name.startswith(PROVED) and not harmless(run, name, verb, before)
    told = Path(name).name in output or newest in output.split() or (name == "experiment.json" and "settings" in output)
    if verb == "verify" and {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} != before:
        return Outcome(trial, "verify changed the folder", False, output[-2000:])
    if code == 0:
        silent = must and not told
        if verb == "resume":
            digest = re.findall(r"digest: ([0-9a-f]{64})", output)
            if digest != [whole]:
                return Outcome(trial, "another digest", False, output[-2000:])
        elif must:
            return Outcome(trial, "verified", False, output[-2000:])
        return Outcome(trial, "silent" if silent else "equal digest", not silent, output[-2000:])
    told |= "Cannot write" in output or (bool(newest) and newest in output)
    return Outcome(trial, f"exit {code}", told, output[-2000:])


def harmless(run: Path, name: str, verb: str, before: dict[Path, bytes]) -> bool:
    """Whether nothing is lost by the damage: settings that say the same, twice; rows that resume repeats anyway."""
    if name == "experiment.json":
        with contextlib.suppress(ValueError):
            return json.loads(before.get(run / name, b"")) == json.loads((run.parent / "part" / name).read_bytes())
    if name == "metrics.jsonl" and verb == "resume" and (run / name).is_file():
        with contextlib.suppress(ValueError, KeyError):
            known = [json.loads(line)["iteration"] for line in (run / name).read_text().splitlines()]
            first = (run.parent / "part" / name).read_bytes()
            return known == [1, 2, 3] and (run / name).read_bytes().startswith(first)
    return False


def command(arguments: list[str]) -> tuple[int | None, str]:
    """Exit code and output of a command in this process; None if it raised or hung."""

    def late(*_: Any) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(int(LIMIT))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return main(arguments), printed.getvalue()
    except Exception as error:
        return None, f"{printed.getvalue()}\nraised {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -------------------------------------------------------------------------------------------------- bad values

ENVIRONMENT = """
import gymnasium, numpy as np

class Env(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.steps += 1
        if self.steps == 13:
            {fault}
        return obs, reward, terminated, truncated, info

def make():
    return Env(gymnasium.make("CartPole-v1"))
"""
VALUES = {
    "NaN in an observation": "obs[1] = np.nan",
    "infinity in an observation": "obs[1] = np.inf",
    "NaN as reward": "reward = float('nan')",
    "infinity as reward": "reward = float('inf')",
    "None as reward": "reward = None",
    "a text as reward": "reward = '1.0'",
    "None as terminated": "terminated = None",
    "a text as terminated": "terminated = 'False'",
    "NaN as truncated": "truncated = float('nan')",
    "texts as observation": "obs = np.array(['1', '2', '3', '4'])",
    "complex numbers as observation": "obs = obs + 1j",
    "an observation of another shape": "obs = obs[:3]",
    "None as observation": "obs = None",
    "a step that returns four values": "return obs, reward, terminated, info",
    "an error": "raise OverflowError('it fell off')",
}
FAILURES = {"NaN in an observation", "infinity in an observation", "NaN as reward", "infinity as reward", "an error"}
"""What may happen to an environment that is written correctly."""


def values(folder: Path, layouts: Sequence[str], count: int, seed: int) -> Iterator[Outcome]:
    """What environments return that none may: the run ends with an error that names the environment."""
    for place, layout in enumerate(layout for layout in layouts if layout in ("inline", "cpu:a1-l1")):
        for number, (name, fault) in enumerate(VALUES.items()):
            run = folder / f"{place}-{number}"
            run.mkdir()
            (run / "env.py").write_text(ENVIRONMENT.format(fault=fault))
            flags = [*RUN, "--env.id", "env.py:make", "--env.adapter", "auto", "--layout", LAYOUTS[layout]]
            child = Child(flags, run)
            started = Run.__new__(Run)
            started.folder, started.layout, started.child, started.output = run, layout, child, ""
            trial = f"{layout}, {name}"
            try:
                code = started.wait()
                left = started.left()
            except TimeoutError:
                yield Outcome(trial, "hangs", False, started.end()[-2000:])
                continue
            started.end()
            expected = 1 if name in FAILURES else 2  # which says that the environment must be mended
            told = "environment" in started.output.lower() and code == expected
            yield Outcome(trial, left or f"exit {code}", told and not left, started.output[-1500:])


KINDS: dict[str, Callable[[Path, Sequence[str], int, int], Iterator[Outcome]]] = {
    "kills": kills,
    "signals": signals,
    "disks": disks,
    "files": files,
    "values": values,
}
