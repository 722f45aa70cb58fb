"""Options that several commands share: for BLEU and ROUGE, and for commands that run one of fairseq's."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.scoring.measuring import Measuring

BPE_MARKS = ("@@", "sentencepiece")
BLEU_OPTIONS = ("lang", "detok", "raw_ref", "lowercase", "compound_split")
ROUGE_OPTIONS = ("no_stem", "sentence_end")


def add_evaluation(commands, name: str, rest: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of a command that runs one of fairseq's on a subset of DATA_BIN; `rest` is the end of its usage."""
    parser = commands.add_parser(
        name,
        usage=f"lightconv {name} DATA_BIN CHECKPOINT [options] {rest}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
    )
    parser.add_argument("data", type=Path, metavar="DATA_BIN", help="folder of binarised data")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the model")
    parser.add_argument("--subset", "--gen-subset", default="test", metavar="NAME", help="default: %(default)s")
    return parser


def add_bleu_options(parser: argparse.ArgumentParser) -> None:
    bleu = parser.add_argument_group("BLEU and chrF")
    bleu.add_argument("--lang", metavar="CODE", help="target language, such as de")
    bleu.add_argument(
        "--detok", choices=("moses", "none"),
        help="how to detokenise for sacreBLEU: Moses rules of --lang (default), or none for plain text",
    )  # fmt: skip
    bleu.add_argument("--raw-ref", type=Path, metavar="FILE", help="raw references for sacreBLEU and chrF")
    bleu.add_argument("--lowercase", action="store_true", help="ignore case")
    bleu.add_argument(
        "--compound-split", action="store_true",
        help="split a-b on both sides for tokenised BLEU (wmt16_en_de); a @-@ b stays as it is",
    )  # fmt: skip


def add_rouge_options(parser: argparse.ArgumentParser) -> None:
    summaries = parser.add_argument_group("ROUGE")
    summaries.add_argument("--no-stem", action="store_true", help="compare words, not their Porter stems")
    summaries.add_argument(
        "--sentence-end", metavar="TOKEN", help="the token that ends a sentence, for ROUGE-Lsum (default: '.')"
    )


def measuring(args: argparse.Namespace, metric: str) -> Measuring:
    """The settings from the parsed options."""
    return Measuring(
        metric=metric,
        bpe=getattr(args, "remove_bpe", None),
        lang=args.lang,
        detok=args.detok,
        raw_ref=args.raw_ref,
        lowercase=args.lowercase,
        compound_split=args.compound_split,
        stem=not args.no_stem,
        sentence_end="." if args.sentence_end is None else args.sentence_end,
    )


def bpe_mark(text: str) -> str:
    """The argument of --remove-bpe, in the form that `remove_bpe` expects."""
    mark = {"@@ ": "@@", "subword_nmt": "@@"}.get(text, text)
    if mark not in BPE_MARKS:
        raise argparse.ArgumentTypeError(f"must be '@@ ', subword_nmt or sentencepiece, got {text!r}")
    return mark


def refuse(args: argparse.Namespace, names: Sequence[str], chosen: str) -> None:
    """Raise InputError for the first of these options given together with `chosen`, such as "--metric rouge"."""
    for name in names:
        if getattr(args, name):
            raise InputError(f"--{name.replace('_', '-')} is not valid with {chosen}")


def warner(command: str) -> Callable[[str], None]:
    """A function that prints a warning of `lightconv COMMAND` to standard error."""
    return lambda text: print(f"lightconv {command}: {text}", file=sys.stderr)
