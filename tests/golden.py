"""Digests of small experiments that a change must not alter.

python tests/golden.py                 record this platform's digests, or replace them after an intended change
python tests/golden.py --base COMMIT   run the experiments of a commit and of this working tree, and compare them

Recorded digests guard a change on machines of the same kind. A comparison guards it on any machine: it exits 1 if an
experiment has one digest in the commit and another one in the working tree.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tiny import EXPERIMENTS, options

from lockstep import train
from lockstep.run import ledger
from lockstep.run.platform import this_platform

FILE = Path(__file__).with_name("golden.json")
ROOT = FILE.parents[1]

_RUN_ALL = """
import json, sys, tempfile
from pathlib import Path
from lockstep import train
from tiny import EXPERIMENTS, options
digests = {}
for name in sys.argv[2:] or EXPERIMENTS:
    if name in EXPERIMENTS:
        with tempfile.TemporaryDirectory() as folder:
            digests[name] = train(EXPERIMENTS[name](), options=options(Path(folder) / "run")).digest
Path(sys.argv[1]).write_text(json.dumps(digests))
"""
"""It uses only what every commit has, so that the same program runs in each tree."""


def read() -> list[dict[str, Any]]:
    """Platforms, and the digests by experiment that were recorded on each."""
    return json.loads(FILE.read_text())


def here(entry: dict[str, Any]) -> bool:
    """Whether an entry is of this platform; libraries that only one of the two has make no difference."""
    return not ledger.differing_platform(entry["platform"], this_platform())


@functools.cache
def known() -> dict[str, str]:
    """This platform's digests by experiment. Where nobody recorded them, CI computes those of the commit that last
    recorded any; elsewhere the result is empty."""
    recorded = next((entry["digests"] for entry in read() if here(entry)), {})
    base = None if recorded or "CI" not in os.environ else recording_commit()
    if base is None:
        return recorded
    with checked_out(base) as tree:
        return digests_in(tree)


def recording_commit() -> str | None:
    """The commit that last changed golden.json; None without a history."""
    log = ["git", "-C", str(ROOT), "log", "-1", "--format=%H", "--", str(FILE)]
    return subprocess.run(log, capture_output=True, text=True, check=False).stdout.strip() or None


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A copy of the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=False)
        if archive.returncode:  # git has said why
            sys.exit(f"{commit} is not a commit that git has here")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def digests_in(tree: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """Run the experiments of a source tree, all or the named ones, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "digests.json"
        path = os.pathsep.join((str(tree), str(tree / "tests")))
        command = [sys.executable, "-c", _RUN_ALL, str(out), *names]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True)
        return json.loads(out.read_text())


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The experiments that both have, with two digests."""
    return [name for name, digest in before.items() if after.get(name, digest) != digest]


def compare(commit: str, names: Sequence[str] = ()) -> int:
    """Compare a commit with this working tree; the exit status."""
    with checked_out(commit) as tree:
        before = digests_in(tree, names)
    after = digests_in(ROOT, names)
    changed = differing(before, after)
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            print(f"{name}: only in {'this working tree' if name in after else commit}")
        elif name in changed:
            print(f"{name}: {before[name]} in {commit}, {after[name]} in this working tree")
    both = len({*before} & {*after})
    print(f"{both - len(changed)} of {both} experiments have the digest that they have in {commit}")
    return 1 if changed or not both else 0


def record() -> None:
    """Write this platform's digests."""
    with tempfile.TemporaryDirectory() as folder:
        digests = {
            name: train(make(), options=options(Path(folder) / name)).digest for name, make in EXPERIMENTS.items()
        }
    entries = [entry for entry in read() if not here(entry)]
    entries.append({"platform": this_platform(), "digests": digests})
    FILE.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{FILE}: {len(digests)} digests")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="COMMIT", help="compare with this commit, and record nothing")
    parser.add_argument("--only", nargs="+", default=(), choices=EXPERIMENTS, metavar="NAME", help="not all of them")
    arguments = parser.parse_args()
    if arguments.base:
        return compare(arguments.base, arguments.only)
    record()
    return 0


if __name__ == "__main__":
    sys.exit(main())
