"""The user's own parallel text: the steps of parallel_text.py; missing validation and test sets can be held out."""

from __future__ import annotations

import argparse
import re

from lightconv_plugin.arguments import natural, positive
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data import parallel_text
from lightconv_plugin.recipes.data.request import Request

ABOUT = """Your own parallel text, of any two languages

--data is a folder with plain text or .gz, one sentence per line, one file per language:
train.XX, valid.XX (or val.XX, dev.XX), test*.XX, or other names given by --train-prefix,
--valid-prefix and --test-prefix. --valid-lines and --test-lines hold out pairs of the training
text instead. Written: raw/ tok/ bpe/ data-bin/ and corpus.json, which records the text steps for
`lightconv translate` and `lightconv export`.

Punctuation is normalised, text tokenised by Moses' rules, case kept; joint BPE, one dictionary;
training pairs of 1 to 250 pieces with a ratio of at most 9 are kept.

example:
  lightconv prepare parallel --data my_files --src de --tgt en --name mine --test-lines 2000
  lightconv train multi30k_en_de/dynamicconv task.data=data/mine/data-bin \\
      task.source_lang=de task.target_lang=en checkpoint.save_dir=runs/mine
"""
MERGES = 10_000
_PLAIN_NAME = re.compile(r"\w[\w.-]*")


def _name(text: str) -> str:
    if not _PLAIN_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be letters, digits, . _ and -, got {text!r}; --out names any folder")
    return text


def add_options(parser: argparse.ArgumentParser) -> None:
    parallel_text.add_options(parser, bpe=MERGES, langs=(None, None), lowercase=False)
    parser.add_argument(
        "--name", dest="variant", type=_name, default="parallel", metavar="NAME", help="fill data/NAME instead"
    )
    parser.add_argument("--valid-lines", type=positive, metavar="N", help="hold out N training pairs for validation")
    parser.add_argument("--test-lines", type=positive, metavar="N", help="hold out N training pairs as test set")
    parser.add_argument(
        "--split-seed", type=natural, default=1, metavar="N", help="which pairs are held out (default: %(default)s)"
    )
    parser.add_argument(
        "--separate-bpe", action="store_true", help="--bpe merges and a dictionary for each language on its own"
    )
    parser.add_argument(
        "--tokenizer",
        choices=("moses", "none"),
        default="moses",
        help="none: the text is already tokenised, with spaces between tokens (default: %(default)s)",
    )


def run(request: Request) -> None:
    """Run all steps.

    Raises:
        InputError: options contradict each other, or the files do not form a corpus.
    """
    args = request.options
    held_out = {}
    for split, lines, prefix in (
        ("valid", args.valid_lines, args.valid_prefix),
        ("test", args.test_lines, args.test_prefix),
    ):
        if lines and prefix:
            raise InputError(f"--{split}-prefix {prefix} is not valid with --{split}-lines {lines}: give one of them")
        if lines:
            held_out[split] = lines
    settings = parallel_text.settings_of(
        request,
        joined=args.joined and not args.separate_bpe,
        joint_bpe=not args.separate_bpe,
        tokenizer=args.tokenizer,
        held_out=held_out,
        seed=args.split_seed,
    )
    parallel_text.run(request, settings)
