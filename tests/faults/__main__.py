"""Repeat what goes wrong with runs, and see that nothing is silent, hangs, is left behind or is lost.

    python tests/faults                      # all kinds on seven layouts, with 100 kills: half an hour on two cores
    python tests/faults --only files,values  # some kinds
    python tests/faults --kills 7 --seed 3   # fewer kills, at other moments

Prints each trial as it ends and a table of outcomes; exits with 1 if a trial ended as none may.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from fault_trials import KINDS, LAYOUTS, Outcome  # noqa: E402 - found by what was just added


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills, spread evenly over the layouts (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of what is damaged (0)")
    parser.add_argument("--only", default=",".join(KINDS), help=f"kinds of faults: {','.join(KINDS)}")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS), help="default: all")
    parser.add_argument("--folder", type=Path, help="where runs are kept; default: a temporary folder")
    given = parser.parse_args()
    unknown = set(given.only.split(",")) - set(KINDS)
    if unknown:
        parser.error(f"there is no kind {', '.join(sorted(unknown))}: use {', '.join(KINDS)}")
    outcomes: list[tuple[str, Outcome]] = []
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="lockstep-faults-") as scratch:
        for kind in given.only.split(","):
            folder = Path(scratch) / kind
            folder.mkdir()
            for outcome in KINDS[kind](folder, given.layouts, given.kills, given.seed):
                outcomes.append((kind, outcome))
                print(f"{len(outcomes):4} {kind:<8} {outcome}", flush=True)
    print(f"\n{'kind':<10}{'trials':>8}{'as they may':>14}{'as none may':>14}")
    count = Counter((kind, outcome.ok) for kind, outcome in outcomes)
    for kind in dict.fromkeys(kind for kind, _ in outcomes):
        good, bad = count[kind, True], count[kind, False]
        print(f"{kind:<10}{good + bad:>8}{good:>14}{bad:>14}")
    wrong = [(kind, outcome) for kind, outcome in outcomes if not outcome.ok]
    for kind, outcome in wrong:
        print(f"\n{kind}: {outcome}\n{outcome.output.strip()}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
