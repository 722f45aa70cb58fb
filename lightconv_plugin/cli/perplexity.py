"""`scripts/perplexity.sh` in Python: its arguments, and the result on standard output and beside the checkpoint."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.steps import write_text
from lightconv_plugin.scoring.perplexity import measure


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path, metavar="DATA_BIN")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--subset", "--gen-subset", default="test")
    parser.add_argument("--context-window", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true")
    args, options = parser.parse_known_args()
    if args.context_window < 0:
        parser.error(f"--context-window must be at least 0, got {args.context_window}")
    return args, options


def main() -> int:
    args, options = parse()
    logging.disable(logging.INFO)  # what fairseq says while it is imported
    try:
        result = measure(args.data, args.checkpoint, args.subset, args.context_window, options)
    except (InputError, OSError) as error:
        print(f"perplexity.sh: error: {error}", file=sys.stderr)
        return 1
    write_text(args.checkpoint.with_suffix(f".{args.subset}.ppl"), json.dumps(result) + "\n")
    line = (
        "{subset}: perplexity {perplexity:.2f} over {tokens:,} tokens, each with at least {context_window} before it "
        "where the text has them; {parameters:,} parameters"
    )
    print(json.dumps(result) if args.json else line.format(**result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
