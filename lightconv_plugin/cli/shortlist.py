"""`lightconv shortlist`: learn which target words are likely for each source word, for `translate --shortlist`."""

import argparse
from pathlib import Path

from lightconv_plugin.arguments import add_force, natural, positive
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import check_new_file
from lightconv_plugin.quiet import quietly

DESCRIPTION = """\
Writes a lexical table for `--shortlist` of `lightconv translate` and `lightconv export`: for each source word of the
dictionary, the likeliest target words, learned from the training text with IBM Model 1. It also lists target words that
are always allowed: the most frequent ones, and all without a letter (digits, punctuation)."""
EPILOG = """\
FILE is text, in the format of Marian's lexical tables: a target word, a source word and the target word's probability
in each line. Words that are always allowed have the source word NULL, which Marian ignores. The words are those of the
dictionaries in DATA_BIN, so FILE is valid for models trained on that data.

example:
  lightconv shortlist data/iwslt14_de_en/data-bin --output shortlist.txt
  lightconv translate dynamicconv-de-en --shortlist shortlist.txt < in.txt > out.txt"""


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.min_probability <= 1:
        raise InputError(f"--min-probability must be in 0 … 1, got {args.min_probability}")
    check_new_file(args.output, args.force)
    with quietly():
        from lightconv_plugin.recipes import lexicon

        text = lexicon.read_text(args.data, args.source_lang, args.target_lang, args.sentences)
    lists = lexicon.Model1(text, args.iterations).best(args.best, args.min_probability)
    always = lexicon.always_allowed(text, args.frequent)
    lexicon.write_table(args.output, text, lists, always)
    print(
        f"written to {args.output}: {len(lists[0]):,} target words for {len(lists[0].unique()):,} source words, and "
        f"{len(always):,} that are always allowed, from {len(text.pairs):,} sentences"
    )
    return 0


def add_parser(commands) -> None:
    parser = commands.add_parser("shortlist", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("data", type=Path, metavar="DATA_BIN", help="folder of the binarised training text")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file to write")
    add_force(parser, "FILE, if it exists")
    parser.add_argument("-s", "--source-lang", metavar="XX", help="default: as in the names of the files in DATA_BIN")
    parser.add_argument("-t", "--target-lang", metavar="XX")
    size = parser.add_argument_group("size of the lists")
    size.add_argument(
        "--best", type=positive, default=50, metavar="N", help="most target words of a source word (default: 50)"
    )
    size.add_argument(
        "--min-probability", type=float, default=0.001, metavar="P", help="of a target word (default: 0.001)"
    )
    size.add_argument(
        "--frequent", type=natural, default=100, metavar="N",
        help="how many of the most frequent target words are always allowed (default: 100)",
    )  # fmt: skip
    learning = parser.add_argument_group("learning")
    learning.add_argument(
        "--sentences", type=positive, default=200_000, metavar="N",
        help="most sentence pairs to learn from, spread over the text; memory grows with them (default: 200,000)",
    )  # fmt: skip
    learning.add_argument(
        "--iterations", type=positive, default=5, metavar="N", help="of expectation-maximisation (default: 5)"
    )
