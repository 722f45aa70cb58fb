"""Moses' tokeniser for `text_pool.map_file`, and its speed: lightconv_plugin/text/moses.py has the rules."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.data.text_pool import iter_lines
from lightconv_plugin.recipes.steps import exit_status
from lightconv_plugin.text import moses
from lightconv_plugin.text.moses import lower, versions

__all__ = ["lower", "tokeniser", "versions"]


def tokeniser(lang: str, **steps: bool) -> Callable[[str], str]:
    """As in lightconv_plugin/text/moses.py; a language without rules is an error of the corpus."""
    try:
        return moses.tokeniser(lang, **steps)
    except ValueError as error:
        raise CorpusError(str(error)) from None


def measure(text: Path, lang: str, perl: Path | None) -> None:
    """Print lines a second of processor time of one process here and of tokenizer.perl, and how many lines differ."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the tokeniser.")
    parser.add_argument("text", type=Path, metavar="FILE", help="one sentence a line, plain or .gz")
    parser.add_argument("--lang", required=True, metavar="XX")
    parser.add_argument("--perl", type=Path, metavar="tokenizer.perl", help="Moses' script, to compare with")
    args = parser.parse_args()
    return exit_status("moses.py", lambda: measure(args.text, args.lang, args.perl))


if __name__ == "__main__":
    sys.exit(main())
