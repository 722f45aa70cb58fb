"""fairseq's own tests on the installed fairseq, without and with the plugin (scripts/dev/fairseq_tests.sh).

fairseq has tests that fail on today's torch, so the plugin is not asked to make them pass: a test that passes only
without it is a failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
NAMES = (
    "train", "sequence_generator", "checkpoint_utils", "export", "inference_dropout", "transformer",
    "lm_context_window", "constraints", "label_smoothing", "iterators", "reproducibility", "binaries",
)  # fmt: skip
_WORST_FIRST = ("failed", "skipped", "passed")


def outcomes(report: Path) -> dict[str, str]:
    """Test -> "passed", "failed" or "skipped", from pytest's --junit-xml; a test of several entries has the worst."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        name = f"{case.get('classname')}.{case.get('name')}"
        found[name] = min(outcome, found.get(name, outcome), key=_WORST_FIRST.index)
    return found


def passed(found: dict[str, str]) -> set[str]:
    return {name for name, outcome in found.items() if outcome == "passed"}


def run(folder: Path, names: list[str], title: str, *options: str) -> dict[str, str]:
    """The outcomes of these tests in one pytest process; its output is left in `folder`.

    Raises:
        RuntimeError: pytest wrote no report, as when it was killed or could not start.
    """
    report, log = folder / f"{title}.xml", folder / f"{title}.log"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *options]
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w", encoding="utf-8") as output:
        subprocess.run(
            [*command, f"--junit-xml={report}", *(f"tests/test_{name}.py" for name in names)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not report.exists():
        raise RuntimeError(f"pytest stopped without a report: {log}")
    return outcomes(report)


def compare(stock: dict[str, str], plugin: dict[str, str]) -> tuple[str, list[str]]:
    """(a text for people, the tests that pass without the plugin only)."""
    lines = []
    for title, found in ("stock fairseq", stock), ("with the plugin", plugin):
        counts = Counter(found.values())
        lines.append(f"{title}: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in reversed(_WORST_FIRST)))
    lines.append(f"pass only with the plugin: {len(passed(plugin) - passed(stock))}")
    lost = sorted(passed(stock) - passed(plugin))
    lines.append(f"pass only on stock fairseq: {len(lost)}")
    lines += [f"    {name} ({plugin.get(name, 'not run')} with the plugin)" for name in lost]
    return "\n".join(lines), lost


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fairseq_tests.sh")
    parser.add_argument("checkout", type=Path, metavar="FAIRSEQ_CHECKOUT")
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of: " + " ".join(NAMES))
    options = parser.parse_args(arguments)
    names = options.names or list(NAMES)
    missing = [name for name in names if not (options.checkout / "tests" / f"test_{name}.py").is_file()]
    if missing:
        parser.error(f"{options.checkout} has no tests/test_{missing[0]}.py: is it a checkout of fairseq?")
    folder = Path(tempfile.mkdtemp(prefix="fairseq-tests-"))
    # Without the checkout's fairseq/ beside them, the tests import the installed one.
    shutil.copytree(options.checkout / "tests", folder / "tests")
    if (options.checkout / "examples").is_dir():
        (folder / "examples").symlink_to(options.checkout / "examples")
    print(f"running {len(names)} test files twice; output in {folder}", file=sys.stderr)
    stock = run(folder, names, "stock")
    if not passed(stock):
        print(f"fairseq_tests.sh: error: no test passes on stock fairseq: {folder / 'stock.log'}", file=sys.stderr)
        return 1
    text, lost = compare(stock, run(folder, names, "plugin", "-p", "lightconv_plugin"))
    print(text)
    if lost:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
