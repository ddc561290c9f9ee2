"""One command for the day when a GPU is at hand: is everything right on it (stage 1), and how fast is it (stage 2)?

    python benchmarks/gpu.py --out DIR --stage 1            # correctness, in at most nine minutes
    python benchmarks/gpu.py --out DIR --stage 2            # speed, likewise
    python benchmarks/gpu.py --out DIR --stage 1 --only facts losses --seconds 120
    python benchmarks/gpu.py --out DIR --stage 1 --rehearse # everything tiny, on a simulated GPU

Run it from a checkout; nothing needs to be installed but what lockstep imports. Every step runs in its own
process, the most important first, for its share of the stage's time; one that fails, crashes or hangs does not stop the
others, and what there is no time for is named. Results are added to DIR/report.json as they come, and what the steps
print to DIR/log.txt. The exit code is 1 if any step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LOG_BYTES = 200_000
"""Of one step's output; the middle of a longer one is left out."""
_LEAST = 5.0
"""Seconds below which no step is begun."""
_REHEARSING = 5
"""Times the limit that a step has on a simulated GPU."""
_DYING = 1.0
"""Seconds that stopped processes have to print their stacks."""


@dataclass(frozen=True)
class Step:
    name: str
    function: str
    """module:function, called with a Context."""
    limit: float
    """The most seconds that it may take. Steps share the stage's time in proportion."""
    stage: int


STEPS = (
    Step("facts", "gpu_steps.facts:facts", 60, 1),
    Step("primitives", "gpu_steps.correctness:primitives", 40, 1),
    Step("exchange", "gpu_steps.exchange:exchange", 60, 1),
    Step("losses", "gpu_steps.correctness:losses", 90, 1),
    Step("experiments", "gpu_steps.correctness:experiments", 240, 1),
    Step("real-shapes", "gpu_steps.correctness:real_shapes", 200, 1),
    Step("gpu-tests", "gpu_steps.correctness:gpu_tests", 150, 1),
    Step("throughput-ppo", "gpu_steps.speed:throughput_ppo", 120, 2),
    Step("throughput-impala", "gpu_steps.speed:throughput_impala", 120, 2),
    Step("gpu-env", "gpu_steps.device_envs:gpu_env", 60, 2),
    Step("profile-ppo", "gpu_steps.profiles:profile_ppo", 60, 2),
    Step("profile-impala", "gpu_steps.profiles:profile_impala", 60, 2),
    Step("gradients", "gpu_steps.learners:gradients", 140, 2),
    Step("replay", "gpu_steps.profiles:replaying", 110, 2),
    Step("mujoco", "gpu_steps.speed:mujoco", 70, 2),
    Step("peers", "gpu_steps.speed:peers", 90, 2),
    Step("learning", "gpu_steps.speed:learning", 300, 2),
)


def run(
    steps: Sequence[Step],
    out: Path,
    seconds: float,
    *,
    rehearse: bool = False,
    limited: bool = True,
    peers: Sequence[str] = (),
    names: Sequence[str] = (),
) -> bool:
    """Run steps one after the other, and report.

    Args:
        out: the folder of report.json, to whose steps these are added, and log.txt.
        seconds: for all steps together.
        limited: whether no step may take longer than its own limit.
        peers: commands of other libraries that some steps measure.
        names: of the small experiments to train, in place of all.

    Returns:
        whether none failed.
    """
    from gpu_steps.step import write

    out.mkdir(parents=True, exist_ok=True)
    report = json.loads((out / "report.json").read_text()) if (out / "report.json").exists() else {}
    report |= {"rehearsed": rehearse, "commit": _commit(), "begun": time.strftime("%Y-%m-%d %H:%M:%S")}
    entries = report.setdefault("steps", {})
    end, rows, good = time.monotonic() + seconds, [], True
    for number, step in enumerate(steps):
        # A share of what is left, in which what faster steps did not need is included.
        share = step.limit / sum(each.limit for each in steps[number:])
        limit = share * (end - time.monotonic())
        if limited:
            limit = min(step.limit * (_REHEARSING if rehearse else 1), limit)
        if limit < _LEAST:
            entry = {"status": "skipped", "seconds": 0.0, "summary": "no time was left", "data": {}}
        else:
            entry = _run(step, limit, out, rehearse, peers, names)
        good = good and entry["status"] in ("ok", "skipped")
        entries[step.name] = entry
        write(out / "report.json", report)
        rows.append((step.name, entry["status"], f"{entry['seconds']:.0f} s", entry["summary"]))
        print(" | ".join(rows[-1]), flush=True)
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    lines = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3][:160])) for row in rows]
    print("\n" + "\n".join(lines), flush=True)
    return good


def _run(
    step: Step, limit: float, out: Path, rehearse: bool, peers: Sequence[str], names: Sequence[str]
) -> dict[str, Any]:
    """Run a step in its own process. Returns its entry in the report."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-", ignore_cleanup_errors=True) as folder:
        given = {
            "function": step.function,
            "seconds": limit,
            "folder": folder,
            "rehearse": rehearse,
            "report": str(out / "report.json"),
            "peers": list(peers),
            "names": list(names),
            "result": f"{folder}.json",
        }
        path = os.pathsep.join(
            (str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", ""))
        )
        environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
        with (out / "log.txt").open("ab") as log:
            log.write(f"\n===== {step.name}, {time.strftime('%H:%M:%S')}, at most {limit:.0f} s\n".encode())
            log.flush()
            size = log.tell()
            process = subprocess.Popen(
                [sys.executable, __file__, "--step", json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
                cwd=ROOT,
            )
            stopped = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                stopped = True
                _signal(process, signal.SIGUSR1)  # prints stacks
                time.sleep(_DYING)
            finally:
                _signal(process, signal.SIGKILL)
                process.wait()
        _shorten(out / "log.txt", size)
        result = Path(given["result"])
        entry = json.loads(result.read_text()) if result.exists() else None
        result.unlink(missing_ok=True)
    if stopped:
        status, told = "too long", f"stopped after {limit:.0f} s; stacks are in the log"
    elif process.returncode or entry is None:
        status, told = "crashed", f"ended with code {process.returncode}; {_last_line(out / 'log.txt')}"
    else:
        status, told = "ok" if entry["ok"] else "failed", ""
    known = entry or {"summary": "", "data": {}}
    summary = "; ".join(text for text in (told, known["summary"]) if text)
    return {"status": status, "seconds": time.monotonic() - begin, "summary": summary, "data": known["data"]}


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _shorten(log: Path, begin: int) -> None:
    """Leave out the middle of what was printed since, if it is long."""
    with log.open("rb+") as file:
        file.seek(begin)
        text = file.read()
        if len(text) > _LOG_BYTES:
            half = _LOG_BYTES // 2
            file.truncate(begin)
            file.seek(begin)
            file.write(text[:half] + b"\n... left out ...\n" + text[-half:])


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def _step(given: dict[str, Any]) -> None:
    """The main function of a step's process."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from gpu_steps.step import Context, Outcome, last_lines

    from lockstep.system import children

    children.die_with_parent(os.getppid())
    simulated = importlib.import_module("simulated_gpu") if given["rehearse"] else None  # of tests/
    if simulated is not None:
        simulated.install()
    report = json.loads(Path(given["report"]).read_text())["steps"] if Path(given["report"]).exists() else {}
    folder, result = Path(given["folder"]), Path(given["result"])
    peers, names = tuple(given["peers"]), tuple(given["names"])
    context = Context(given["seconds"], folder, given["rehearse"], report, peers, result, names)
    module, _, name = given["function"].partition(":")
    try:
        outcome = getattr(importlib.import_module(module), name)(context)
    except Exception as error:
        traceback.print_exc()
        known = json.loads(result.read_text())["data"] if result.exists() else {}
        outcome = Outcome(False, last_lines(error).replace("\n", " ")[-400:], known)
    context.save(outcome)
    if simulated is not None:
        simulated.uninstall()  # which deletes its files
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what ending takes with a GPU, or after an error of it, is no part of the step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the report")
    parser.add_argument("--stage", type=int, choices=(1, 2))
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="for all steps together; a single step may use them all"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help=", ".join(step.name for step in STEPS))
    parser.add_argument("--experiments", nargs="+", default=[], metavar="NAME", help="for the step of that name")
    parser.add_argument("--peer", action="append", default=[], help="a script of another library with its arguments")
    parser.add_argument("--rehearse", action="store_true", help="run everything tiny, on a simulated GPU")
    parser.add_argument("--step", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        _step(given.step)
        return
    if given.out is None or (given.stage is None and not given.only):
        parser.error("--out and --stage (or --only) are needed")
    chosen = [
        step for step in STEPS if (not given.only and step.stage == given.stage) or step.name in (given.only or ())
    ]
    chosen = [step for step in chosen if step.name != "peers" or given.peer]
    if unknown := {*(given.only or ())} - {step.name for step in STEPS}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the step that runs is ended, too
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    out = given.out.absolute()
    peers = []
    for command in given.peer:  # steps run in other folders
        script, *arguments = shlex.split(command)
        peers.append(shlex.join([os.path.abspath(script), *arguments]))
    limited = len(chosen) > 1
    good = run(
        chosen, out, given.seconds, rehearse=given.rehearse, limited=limited, peers=peers, names=given.experiments
    )
    sys.exit(not good)


if __name__ == "__main__":
    main()
