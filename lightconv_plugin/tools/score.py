"""`lightconv score`: tokenised BLEU as the papers report it, and sacreBLEU and chrF on detokenised text.

    lightconv score --gen checkpoints/dynamicconv/gen.out --lang de --remove-bpe
    lightconv score --sys hypotheses.tok --ref references.tok --lang de --raw-ref references.de --json

Tokenised BLEU is that of multi-bleu.perl, which `fairseq-score` computes too, on the tokens as they are. Where the two
part, this follows multi-bleu.perl: an empty line has no token (fairseq-score counts one), and <unk> is a token like any
other (fairseq-score never matches one in a reference; fairseq-generate prints it there as <<unk>>, so that it matches
nowhere). A line is split at any Unicode space, as fairseq does. Text is UTF-8, one sentence to a line.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightconv_plugin.tools.common import CommandError, atomic_write
from lightconv_plugin.tools.gen_log import parse_gen_log

# On bytes, as the Perl of fairseq's compound_split_bleu.sh: "a-ö-b" is split twice, "a-o-b" once.
COMPOUND = re.compile(rb"(\S)-(\S)")
BPE_MARKS = ("@@", "sentencepiece")
LEFT_OVER = re.compile(r"@@(?: |$)|\u2581")


@dataclass(frozen=True)
class Report:
    """What `lightconv score` found. Scores and precisions are on the scale 0 to 100."""

    bleu_tok: float
    precisions: list[float]
    bp: float
    ratio: float
    sys_len: int
    ref_len: int
    sacrebleu: float
    signature: str
    chrf: float
    chrf_signature: str
    n: int
    lang: str | None
    detok: str
    lowercase: bool
    compound_split: bool

    def lines(self) -> str:
        """For people: the first line in fairseq-score's own form."""
        precisions = "/".join(f"{p:.1f}" for p in self.precisions)
        how = "".join(
            f", {word}"
            for word, on in (("lower-cased", self.lowercase), ("compounds split", self.compound_split))
            if on
        )
        return (
            f"BLEU4 = {self.bleu_tok:.2f}, {precisions} (BP={self.bp:.3f}, ratio={self.ratio:.3f}, "
            f"syslen={self.sys_len}, reflen={self.ref_len})  tokenised{how}, {self.n} sentences\n"
            f"sacreBLEU = {self.sacrebleu:.2f}  {self.signature}\n"
            f"chrF2 = {self.chrf:.2f}  {self.chrf_signature}\n"
        )


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file without their ends; only "\\n" and "\\r\\n" end a line, as for `wc -l`."""
    if not path.is_file():
        raise CommandError(f"no such file: {path}")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CommandError(f"{path} is not UTF-8: byte {content[error.start]:#04x} in line {line}") from error
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise CommandError(f"{path} is empty")
    return [line.removesuffix("\r") for line in lines]


def remove_bpe(line: str, mark: str) -> str:
    """Words from subwords, as fairseq's --remove-bpe: `mark` is "@@" (subword-nmt) or "sentencepiece"."""
    if mark == "sentencepiece":
        return line.replace(" ", "").replace("\u2581", " ").strip()
    return f"{line} ".replace("@@ ", "").rstrip()


def split_compounds(line: str) -> str:
    """ "a-b" becomes "a ##AT##-##AT## b": the parts of a hyphenated compound count as words."""
    return COMPOUND.sub(rb"\1 ##AT##-##AT## \2", line.encode()).decode()


def tokenised_bleu(hypotheses: Sequence[str], references: Sequence[str]):
    """sacrebleu's BLEUScore of the tokens as they are, without smoothing: multi-bleu.perl's number."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    return metric.corpus_score(list(hypotheses), [list(references)])


def detokenise(lines: Sequence[str], lang: str) -> list[str]:
    """Plain text from Moses tokens, by the rules for this language."""
    from sacremoses import MosesDetokenizer

    moses = MosesDetokenizer(lang=lang)
    return [moses.detokenize(line.split()) for line in lines]


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lang: str | None = None,
    detok: str = "moses",
    raw_references: Sequence[str] | None = None,
    bpe: str | None = None,
    lowercase: bool = False,
    compound_split: bool = False,
) -> Report:
    """Score translations against references, sentence by sentence the same.

    hypotheses, references: tokenised sentences (plain ones with detok="none").
    lang: target language; detok "moses" needs it, and sacreBLEU takes its tokeniser for zh, ja and ko by it.
    raw_references: untouched references for sacreBLEU and chrF instead of the detokenised `references`.
    bpe: "@@" or "sentencepiece" where the text still is in subwords. lowercase: score without case.
    compound_split: for tokenised BLEU, take hyphenated compounds apart.

    Raises CommandError for unequal numbers of sentences, none, an unknown language, or a missing one.
    """
    from sacrebleu.metrics import BLEU, CHRF

    _check(hypotheses, references, raw_references, lang, detok)
    if bpe:
        hypotheses, references = ([remove_bpe(line, bpe) for line in side] for side in (hypotheses, references))
    plain, plain_references = hypotheses, references if raw_references is None else raw_references
    if detok == "moses":
        plain = detokenise(hypotheses, lang)
        plain_references = detokenise(references, lang) if raw_references is None else raw_references
    if lowercase:
        hypotheses, references = ([line.lower() for line in side] for side in (hypotheses, references))
    if compound_split:
        hypotheses, references = ([split_compounds(line) for line in side] for side in (hypotheses, references))

    tokenised = tokenised_bleu(hypotheses, references)
    try:
        bleu = BLEU(lowercase=lowercase, trg_lang=lang or "")
    except (ImportError, RuntimeError) as error:  # its tokenisers for ja and ko are extra packages
        raise CommandError(f"sacreBLEU cannot score language {lang!r}: {error}") from error
    chrf = CHRF(lowercase=lowercase)
    sacre, chrf_score = (m.corpus_score(list(plain), [list(plain_references)]) for m in (bleu, chrf))
    return Report(
        bleu_tok=tokenised.score,
        precisions=list(tokenised.precisions),
        bp=tokenised.bp,
        ratio=tokenised.ratio,
        sys_len=tokenised.sys_len,
        ref_len=tokenised.ref_len,
        sacrebleu=sacre.score,
        signature=str(bleu.get_signature()),
        chrf=chrf_score.score,
        chrf_signature=str(chrf.get_signature()),
        n=len(hypotheses),
        lang=lang,
        detok=detok,
        lowercase=lowercase,
        compound_split=compound_split,
    )


def _check(hypotheses, references, raw_references, lang, detok) -> None:
    if not hypotheses:
        raise CommandError("there are no sentences to score")
    if len(hypotheses) != len(references):
        raise CommandError(f"{len(hypotheses)} translations, but {len(references)} references: each needs one")
    if raw_references is not None and len(raw_references) != len(hypotheses):
        raise CommandError(f"{len(hypotheses)} translations, but {len(raw_references)} lines in --raw-ref")
    if detok == "moses" and lang is None:
        raise CommandError(
            "--lang (the target language) is needed to detokenise; for text that is plain, give --detok none"
        )
    if lang is not None and lang not in known_languages():
        raise CommandError(f"--lang {lang!r} is not known; allowed: {', '.join(sorted(known_languages()))}")


def known_languages() -> set[str]:
    """The codes of the languages that sacremoses has rules for: for any other it would use its English ones unasked."""
    from sacremoses.corpus import NonbreakingPrefixes

    return set(NonbreakingPrefixes().available_langs.values()) | {"ja", "ko"}


def run(args: argparse.Namespace) -> int:
    detok = args.detok
    if args.gen:
        if args.sys or args.ref:
            raise CommandError("--gen has both sides: give either --gen or --sys with --ref")
        log = parse_gen_log(read_lines(args.gen), args.gen)
        hypotheses, references = log.hypotheses, log.references
        if log.decoded and detok is None:
            raise CommandError(
                f"{args.gen} was written with --bpe or --tokenizer: say --detok none if its D- lines are plain text, "
                "--detok moses if they still are tokens"
            )
    elif args.sys and args.ref:
        hypotheses, references = read_lines(args.sys), read_lines(args.ref)
    else:
        raise CommandError("give either --gen FILE or both --sys FILE and --ref FILE")
    if not args.remove_bpe and any(LEFT_OVER.search(line) for line in hypotheses):
        print("lightconv score: the translations look like subwords: was --remove-bpe forgotten?", file=sys.stderr)
    report = score(
        hypotheses,
        references,
        lang=args.lang,
        detok=detok or "moses",
        raw_references=read_lines(args.raw_ref) if args.raw_ref else None,
        bpe=args.remove_bpe,
        lowercase=args.lowercase,
        compound_split=args.compound_split,
    )
    text = json.dumps(asdict(report), ensure_ascii=False) + "\n" if args.json else report.lines()
    if args.output:
        with atomic_write(args.output) as file:
            file.write(text)
    sys.stdout.write(text)
    return 0


def _bpe_mark(text: str) -> str:
    mark = {"@@ ": "@@", "subword_nmt": "@@"}.get(text, text)
    if mark not in BPE_MARKS:
        raise argparse.ArgumentTypeError(f"must be '@@ ', subword_nmt or sentencepiece, got {text!r}")
    return mark


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "score",
        help="score translations: tokenised BLEU, sacreBLEU, chrF",
        description="Tokenised BLEU (multi-bleu.perl's and fairseq-score's); sacreBLEU and chrF on detokenised text.",
    )
    parser.add_argument(
        "--gen", type=Path, metavar="FILE", help="the whole output of fairseq-generate, with references"
    )
    parser.add_argument("--sys", type=Path, metavar="FILE", help="translations, one to a line (with --ref)")
    parser.add_argument("--ref", type=Path, metavar="FILE", help="references, one to a line (with --sys)")
    parser.add_argument("--lang", metavar="CODE", help="target language, such as de")
    parser.add_argument(
        "--remove-bpe", nargs="?", const="@@", type=_bpe_mark, metavar="MARK",
        help="join subwords first: '@@ ' (the default of the option) or sentencepiece",
    )  # fmt: skip
    parser.add_argument(
        "--detok", choices=("moses", "none"),
        help="how to detokenise for sacreBLEU: Moses rules of --lang (default), or none for text that is plain already",
    )  # fmt: skip
    parser.add_argument("--raw-ref", type=Path, metavar="FILE", help="untouched references for sacreBLEU and chrF")
    parser.add_argument("--lowercase", action="store_true", help="score without regard to case")
    parser.add_argument(
        "--compound-split", action="store_true", help="take a-b apart on both sides for tokenised BLEU (WMT En-De)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write what is printed to this file")
    parser.set_defaults(run=run)
