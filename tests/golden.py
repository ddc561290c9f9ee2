"""Digests of small experiments that a change must not alter, for every platform where somebody recorded them.

python tests/golden.py      records this platform's in golden.json, or replaces them after an intended change
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tiny import EXPERIMENTS, options

from lockstep import ledger, train
from lockstep.runtime.platform import this_platform

FILE = Path(__file__).with_name("golden.json")


def read() -> list[dict[str, Any]]:
    """Platforms, and the digests by experiment that were recorded on each."""
    return json.loads(FILE.read_text())


def here(entry: dict[str, Any]) -> bool:
    """Whether an entry is of this platform; libraries that it does not have, or had not, make no difference."""
    return not ledger.differing_platform(entry["platform"], this_platform())


@functools.cache
def known() -> dict[str, str]:
    """This platform's digests by experiment; empty if nobody recorded them."""
    return next((entry["digests"] for entry in read() if here(entry)), {})


def digest(name: str, run: Path) -> str:
    """Run one of the experiments in this process."""
    return train(EXPERIMENTS[name](), options=options(run)).digest


def record() -> None:
    """Write this platform's digests."""
    with tempfile.TemporaryDirectory() as folder:
        digests = {name: digest(name, Path(folder) / name) for name in EXPERIMENTS}
    entries = [entry for entry in read() if not here(entry)]
    entries.append({"platform": this_platform(), "digests": digests})
    FILE.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{FILE}: {len(digests)} digests")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    record()
