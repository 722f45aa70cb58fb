"""What to score by and how: the options that `lightconv score` and `lightconv tune` share, and what they do."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.scoring.bleu import Report, remove_bpe, score
from lightconv_plugin.scoring.generate_log import Generated
from lightconv_plugin.scoring.rouge import RougeReport, rouge

BPE_MARKS = ("@@", "sentencepiece")
BLEU_OPTIONS = ("lang", "detok", "raw_ref", "lowercase", "compound_split")
ROUGE_OPTIONS = ("no_stem", "sentence_end")


def add_bleu_options(parser: argparse.ArgumentParser) -> None:
    bleu = parser.add_argument_group("of BLEU and chrF")
    bleu.add_argument("--lang", metavar="CODE", help="target language, such as de")
    bleu.add_argument(
        "--detok", choices=("moses", "none"),
        help="how to detokenise for sacreBLEU: Moses rules of --lang (default), or none for text that is plain already",
    )  # fmt: skip
    bleu.add_argument("--raw-ref", type=Path, metavar="FILE", help="untouched references for sacreBLEU and chrF")
    bleu.add_argument("--lowercase", action="store_true", help="score without regard to case")
    bleu.add_argument(
        "--compound-split", action="store_true", help="take a-b apart on both sides for tokenised BLEU (WMT En-De)"
    )


def add_rouge_options(parser: argparse.ArgumentParser) -> None:
    summaries = parser.add_argument_group("of ROUGE")
    summaries.add_argument("--no-stem", action="store_true", help="compare words, not their Porter stems")
    summaries.add_argument(
        "--sentence-end", metavar="TOKEN", help="the token that ends a sentence, for ROUGE-Lsum (default: '.')"
    )


def bpe_mark(text: str) -> str:
    """The argument of --remove-bpe, as `remove_bpe` wants it."""
    mark = {"@@ ": "@@", "subword_nmt": "@@"}.get(text, text)
    if mark not in BPE_MARKS:
        raise argparse.ArgumentTypeError(f"must be '@@ ', subword_nmt or sentencepiece, got {text!r}")
    return mark


def refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raises InputError for the first of these options that was given."""
    for name in names:
        if getattr(args, name):
            raise InputError(f"--{name.replace('_', '-')} {why}: leave it out")


def check_languages(data: Path, subset: str) -> tuple[str, str]:
    """(source, target) of a folder of binarised data, by the names in it.

    Raises InputError when there is no such folder or subset.
    """
    if not data.is_dir():
        raise InputError(f"no folder {data} with binarised data")
    found = {}
    for path in data.glob("*.*-*.*.idx"):
        if match := re.fullmatch(r"(.+)\.([^.-]+)-([^.-]+)\.[^.]+\.idx", path.name):
            found.setdefault(match[1], (match[2], match[3]))
    if subset not in found:
        raise InputError(f"{data} has no subset {subset}; it has {', '.join(sorted(found)) or 'none'}")
    return found[subset]


def take_from_data(args: argparse.Namespace, data: Path, subset: str) -> None:
    """Fills in the BLEU options that were not given from a folder that scripts/prepare_*.sh made.

    The target language is in the file names. The folder above has raw/SUBSET.LANG, the untouched references, and
    corpus.json, which says whether the text was lower-cased: then it is scored so. Where they are not there, no option
    changes.
    """
    _, target = check_languages(data, subset)
    args.lang = args.lang or target
    corpus = data.resolve().parent
    raw = corpus / "raw" / f"{subset}.{target}"
    if args.raw_ref is None and raw.is_file():
        args.raw_ref = raw
    about = corpus / "corpus.json"
    if about.is_file():
        try:
            known = json.loads(about.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{about} is not the JSON that scripts/prepare_*.sh write: {error}") from error
        args.lowercase = args.lowercase or bool(isinstance(known, dict) and known.get("lowercase"))


def check_decoded(args: argparse.Namespace, log: Generated, name) -> None:
    """Raises InputError where it is not known if a log's sentences are tokens or plain text."""
    if log.decoded and args.detok is None:
        raise InputError(
            f"{name} was written with --bpe or --tokenizer: say --detok none if its D- lines are plain text, "
            "--detok moses if they still are tokens"
        )


def bleu_options(args: argparse.Namespace) -> dict:
    """The parsed options as the arguments of `bleu.score`."""
    return {
        "lang": args.lang,
        "detok": args.detok or "moses",
        "raw_references": read_lines(args.raw_ref) if args.raw_ref else None,
        "bpe": getattr(args, "remove_bpe", None),
        "lowercase": args.lowercase,
        "compound_split": args.compound_split,
    }


def bleu_report(args: argparse.Namespace, hypotheses: list[str], references: list[str]) -> Report:
    return score(hypotheses, references, **bleu_options(args))


def rouge_report(args: argparse.Namespace, summaries: list[str], references: list[str]) -> RougeReport:
    """ROUGE by the parsed options; what makes a score doubtful is said on standard error."""
    mark = getattr(args, "remove_bpe", None)
    if mark:
        summaries = [remove_bpe(line, mark) for line in summaries]
        references = [remove_bpe(line, mark) for line in references]
    sentence_end = args.sentence_end or "."
    report = rouge(summaries, references, stem=not args.no_stem, sentence_end=sentence_end)
    say = f"lightconv {args.command}:"
    if report.empty:
        print(f"{say} {report.empty} of {report.n} summaries have no word; they score 0", file=sys.stderr)
    if not any(sentence_end in line.split() for line in references):
        print(
            f"{say} no reference has {sentence_end!r} as a token of its own, so each is one sentence for "
            "ROUGE-Lsum: see --sentence-end",
            file=sys.stderr,
        )
    return report
