"""`lockstep COMMAND …`: runs the command, and turns users' mistakes into one paragraph and an exit code.

Exit codes: 0 success; 1 a check or the program failed; 2 a mistake in the command; 130 interrupted.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import sys
import time
import traceback
from collections.abc import Sequence

import lockstep

BEGAN = time.perf_counter()
"""The time at which this process began, before the slow imports."""
VERBS = {
    "train": ("lockstep.cli.train", "train an agent from a recipe: lockstep train ppo-cartpole"),
    "resume": ("lockstep.cli.train", "continue a stopped or killed run exactly"),
    "sweep": ("lockstep.cli.sweep", "run many experiments or a search for settings as a durable queue"),
    "submit": ("lockstep.cli.submit", "submit one run to Slurm, on one node or several"),
    "eval": ("lockstep.cli.evaluate", "play episodes with a trained policy and report raw scores"),
    "record": ("lockstep.cli.evaluate", "record a video of a trained policy"),
    "export": ("lockstep.cli.share", "write a trained policy to one file: PyTorch, TorchScript or ONNX"),
    "push": ("lockstep.cli.share", "upload a run to the Hugging Face Hub, with a model card"),
    "pull": ("lockstep.cli.share", "download a run from the Hugging Face Hub"),
    "plot": ("lockstep.cli.evaluate", "draw the learning curves of one or more runs"),
    "report": ("lockstep.cli.report", "write a web page about runs"),
    "compare": ("lockstep.cli.report", "compare two sets of runs: lockstep compare A ... -- B ..."),
    "verify": ("lockstep.cli.check", "repeat the beginning of a run and compare every bit"),
    "replay": ("lockstep.cli.check", "repeat a run with every recorded timing decision"),
    "diff": ("lockstep.cli.check", "find the first iteration and tensor in which two runs differ"),
    "check-env": ("lockstep.cli.check", "test whether an environment repeats bit for bit"),
    "bench": ("lockstep.cli.speed", "measure how close training comes to this machine's limit"),
    "tune": ("lockstep.cli.speed", "find the fastest layout for an experiment on this machine"),
    "envs": ("lockstep.cli.catalog", "list environments that this installation can run"),
    "recipes": ("lockstep.cli.catalog", "list recipes"),
    "schemes": ("lockstep.cli.catalog", "list presets of schemes, and draw which processes wait"),
    "doctor": ("lockstep.cli.doctor", "check this machine and installation, and measure its speed"),
}
"""Each command's module and description. The module's function of that name (`eval`: `evaluate`) runs it."""

_NO_SPACE = (
    "The disk is full. Make room and repeat the command; a run that has begun continues from its newest checkpoint "
    "with lockstep resume."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    atexit.register(gc.freeze)  # with torch loaded, the garbage collection at exit takes half a second
    from lockstep.system.output import Explained, own_streams, print_line, reader_gone, reserve_streams, silence

    reserve_streams()
    own_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a character that the encoding lacks must not end the program
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        _show_cursor()
        return 130
    except BrokenPipeError:
        if not reader_gone():
            raise  # another pipe broke, for example that of a user's simulator
        silence(sys.stdout)  # the reader of the output, for example head, has closed the pipe
        return 1
    except Explained as done:
        return int(done.code or 0)
    except SystemExit:
        print_line(traceback.format_exc(), sys.stderr)  # a user's file called exit, so the run is not finished
        return 1


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and arguments[1:]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"lockstep {lockstep.__version__}")
        return 0
    from lockstep.cli.common import complain, unknown
    from lockstep.config.settings import SettingsError

    verb, *rest = arguments
    try:
        if verb not in VERBS:
            raise unknown("command", verb, VERBS, "lockstep --help describes them.")
        module = importlib.import_module(VERBS[verb][0])
        return getattr(module, "evaluate" if verb == "eval" else verb.replace("-", "_"))(rest)
    except SettingsError as error:
        complain(error)
        return error.exit_code
    except (OSError, RuntimeError) as error:
        from lockstep.run.files import is_full
        from lockstep.system.supervision import WorkerError

        if not isinstance(error, WorkerError) and not is_full(error):
            raise
        _show_cursor()
        complain(f"{_NO_SPACE} {error}" if is_full(error) else error)
        return 1


def _show_cursor() -> None:
    """Show the cursor again. A killed live display leaves it hidden."""
    from lockstep.system.output import print_line

    if sys.stdout is not None and sys.stdout.isatty():
        print_line("\x1b[?25h", sys.stdout)


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items())
    return (
        "usage: lockstep COMMAND ...\n\n"
        "Distributed deep reinforcement learning: the same bits in one process, in many,\nor on a cluster.\n\n"
        f"{verbs}\n\n"
        "To begin:  lockstep recipes                what can be trained\n"
        "           lockstep train ppo-cartpole     an agent that learns within a minute\n"
        "           lockstep COMMAND --help         what a command does, and its flags\n\n"
        "--json makes any command's output machine-readable."
    )
