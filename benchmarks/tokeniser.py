"""Lines per second of Moses' tokeniser on one core, here and by tokenizer.perl.

python -m benchmarks.tokeniser FILE --lang de [--perl tokenizer.perl]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import time
from pathlib import Path

from lightconv_plugin.recipes.data.text_pool import iter_lines
from lightconv_plugin.text.moses import tokeniser


def measure(text: Path, lang: str, perl: Path | None) -> None:
    """Print lines per second of processor time of one process here and of tokenizer.perl, and how many lines differ."""
    lines = list(iter_lines(text))
    tokenise = tokeniser(lang)
    for state in ("first", "again"):  # with no word known; with all of them known, as far into a large text
        start = time.process_time()
        tokenised = [tokenise(line) for line in lines]
        print(f"{state}: {len(lines) / (time.process_time() - start):,.0f} lines/s")
    if perl:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = ["perl", str(perl), "-q", "-l", lang]
        done = subprocess.run(command, input="\n".join([*lines, ""]).encode(), capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"perl:  {len(lines) / seconds:,.0f} lines/s")
        theirs = [" ".join(line.split()) for line in done.stdout.decode().split("\n")]
        print(f"lines that differ: {sum(a != b for a, b in zip(tokenised, theirs, strict=False))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, metavar="FILE", help="one sentence a line, plain or .gz")
    parser.add_argument("--lang", required=True, metavar="XX")
    parser.add_argument("--perl", type=Path, metavar="tokenizer.perl", help="Moses' script, to compare with")
    args = parser.parse_args()
    measure(args.text, args.lang, args.perl)


if __name__ == "__main__":
    main()
