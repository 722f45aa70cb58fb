"""Run the CPU extension under gcc's sanitizers: `scripts/dev/sanitize.sh`.

For each sanitizer: compile cpu/ (build.py), then make the fuzzer's calls, and those of the tests of what it does not
call, with the native kernels in processes of their own, whose results are held against float64 as well; then search
with random models (searches.py). A report ends that process, and this with status 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from lightconv_plugin.ops import artifacts
from tests import ROOT
from tests.robustness.sanitize import build

PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-k")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sanitize.sh", description=__doc__.splitlines()[0])
    # No `choices`: argparse would hold the default itself against them.
    parser.add_argument("kinds", nargs="*", metavar="address|undefined|thread", help="default: all three")
    parser.add_argument(
        "--cases", type=int, default=2000, help="of the fuzzer, and a tenth as many searches, for each (default: 2000)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for kind in options.kinds:
        if kind not in build.FLAGS:
            parser.error(f"a sanitizer must be one of {', '.join(build.FLAGS)}, got {kind}")
    if options.cases < 1:
        parser.error(f"--cases must be at least 1, got {options.cases}")
    failed = [kind for kind in options.kinds or build.FLAGS if not sanitized(kind, options.cases, options.seed)]
    print(f"reports: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def sanitized(kind: str, cases: int, seed: int) -> bool:
    """Whether all calls went without a report, which is printed."""
    folder = artifacts.cache_folder() / "lightconv_sanitized" / kind
    began = time.monotonic()
    library = build.build(kind, folder)
    print(f"{kind}: {library}, compiled in {time.monotonic() - began:.0f} s", flush=True)
    environment = build.environment(kind) | {
        "TORCH_EXTENSIONS_DIR": str(folder),
        "LIGHTCONV_BACKEND": "cpu",
        "OMP_NUM_THREADS": "1",  # under the thread sanitizer the kernels start threads of their own (threads/)
    }
    programs = (
        ["tests.robustness.fuzz.run", "1e9", "--cases", str(cases), "--seed", str(seed), "--backends", "cpu"],
        # What the fuzzer does not call: dropout, and beam search, which has no gradients.
        [*PYTEST, "native", "tests/ops/test_dropout.py"],
        ["tests.robustness.sanitize.searches", "--cases", str(max(cases // 10, 1)), "--seed", str(seed)],
        # Wrong input, and weights with NaN and infinities. A process of limited memory would not start here.
        [*PYTEST, "not than_the_system", "tests/generation/test_native_errors.py"],
    )
    root = ROOT
    for program in programs:
        status = subprocess.run([sys.executable, "-m", *program], cwd=root, env=environment, check=False).returncode
        print(f"{kind}: {program[0]}: exit status {status}, {time.monotonic() - began:.0f} s", flush=True)
        if status != 0:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
