"""The command of scripts/dev/torture.sh."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.robustness.kill_targets import WORKS, check_here
from tests.robustness.torture import ODD_NAMES, Result, Torture, table


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def torture(name: str, args: argparse.Namespace, folder: Path) -> Result | None:
    """The trials of one work; None where it could not even be done undisturbed."""
    say(f"{name} ...")
    trials = None
    try:
        trials = Torture(WORKS[name], folder, args.seed)
        if args.names:
            result = trials.run_in_odd_places(ODD_NAMES)
        elif args.full_disk:
            result = trials.run_on_full_disks()
        else:
            result = trials.run(args.kills, args.minutes)
    except (RuntimeError, OSError) as error:
        say(f"{name}: error: {error}")
        return None
    finally:
        if trials is not None:
            trials.end()
    for line in result.differences:
        say(f"  {line}")
    lost = len(result.differences) or "nothing"
    say(f"{name}: {result.kills} kills, {result.failed} full disks, {result.trials} completed runs, {lost} lost")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture.sh", description="Kill work at random moments; see the header.")
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"of {', '.join(WORKS)} (default: all)")
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=60, metavar="M", help="at most, of each (default: %(default)s)"
    )
    parser.add_argument("--names", action="store_true", help="no kills: each once in folders with odd names")
    parser.add_argument("--full-disk", action="store_true", help="no kills: each on file systems that are too small")
    args = parser.parse_args()
    if unknown := [name for name in args.what if name not in WORKS]:
        parser.error(f"no {', '.join(unknown)}; there are: {', '.join(WORKS)}")
    for option in ("kills", "minutes"):
        if getattr(args, option) <= 0:
            parser.error(f"--{option} must be above 0, got {getattr(args, option)}")
    try:
        check_here()
    except RuntimeError as error:
        say(f"torture.sh: error: {error}")
        return 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # not without ending what was started
    folder = Path(tempfile.mkdtemp(prefix="torture."))
    try:
        names = [name for name in args.what or WORKS if WORKS[name].any_name or not args.names]
        results = [torture(name, args, folder / name) for name in names]
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    done = [result for result in results if result is not None]
    print(f"seed {args.seed}\n\n{table(done)}")
    return 0 if len(done) == len(results) and not any(result.differences for result in done) else 1


if __name__ == "__main__":
    sys.exit(main())
