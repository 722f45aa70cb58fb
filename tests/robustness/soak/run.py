"""Run for long and watch the memory: `scripts/dev/soak.sh`.

Fails, with status 1, if the resident memory grows by more than --allowed MiB from the middle of a run to its end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.robustness.soak import loads
from tests.robustness.soak.memory import ALLOWED, GrowthError

COUNTS = {"operators": 10_000, "training": 1_000, "translation": 100_000}
UNITS = {"operators": "calls", "training": "updates", "translation": "lines"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="|".join(COUNTS), help="default: all three")
    parser.add_argument("--count", type=int, help=f"of each (default: {', '.join(map(str, COUNTS.values()))})")
    parser.add_argument("--allowed", type=float, default=ALLOWED, help=f"MiB (default: {ALLOWED:g})")
    options = parser.parse_args(arguments)
    for what in options.what:
        if what not in COUNTS:
            parser.error(f"what to run must be one of {', '.join(COUNTS)}, got {what}")
    if options.count is not None and options.count < 20:
        parser.error(f"--count must be at least 20, got {options.count}")
    failed = 0
    for what in options.what or COUNTS:
        count, began = options.count or COUNTS[what], time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            memory = getattr(loads, what)(count, *[Path(folder)] * (what != "operators"))
        try:
            line = memory.check(f"{count} {UNITS[what]}", options.allowed)
        except GrowthError as error:
            line, failed = f"GREW: {error}", 1
        print(f"{line} ({time.monotonic() - began:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
