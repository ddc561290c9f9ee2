"""Digests of small experiments that a change must not alter, for every platform where somebody recorded them.

python tests/golden.py      records this platform's in golden.json, or replaces them after an intended change
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tiny import EXPERIMENTS, options

from lockstep import ledger, train

FILE = Path(__file__).with_name("golden.json")
NAMES = ("ppo", "impala-bf16", "tuple-dict-mask")


def platform_key() -> str:
    """SHA-256 over what bits depend on beside the experiment."""
    return hashlib.sha256(json.dumps(ledger.platform(), sort_keys=True).encode()).hexdigest()


def read() -> dict[str, Any]:
    """Platform and digests by platform key."""
    return json.loads(FILE.read_text())


def digest(name: str, run: Path) -> str:
    """Run one of the experiments in this process."""
    return train(EXPERIMENTS[name](), options=options(run)).digest


def record() -> None:
    """Write this platform's digests."""
    with tempfile.TemporaryDirectory() as folder:
        digests = {name: digest(name, Path(folder) / name) for name in NAMES}
    entries = read() if FILE.exists() else {}
    entries[platform_key()] = {"platform": ledger.platform(), "digests": digests}
    FILE.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{FILE}: {digests}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    record()
