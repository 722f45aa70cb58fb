"""`lightconv score`: tokenised BLEU as the papers report it, and sacreBLEU and chrF on detokenised text; or ROUGE.

    lightconv score --gen checkpoints/dynamicconv/gen.out --lang de --remove-bpe
    lightconv score --sys hypotheses.tok --ref references.tok --lang de --raw-ref references.de --json
    lightconv score --metric rouge --gen gen.out --remove-bpe          of summaries: see rouge.py
    lightconv score --gen gen.out --lang de --remove-bpe --speed --checkpoint average10.pt --json

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
from lightconv_plugin.tools.parameters import count_parameters
from lightconv_plugin.tools.rouge import RougeReport, rouge

# On bytes, as the Perl of fairseq's compound_split_bleu.sh: "a-ö-b" is split twice, "a-o-b" once.
COMPOUND = re.compile(rb"(\S)-(\S)")
BPE_MARKS = ("@@", "sentencepiece")
LEFT_OVER = re.compile(r"@@(?: |$)|\u2581")
BLEU_OPTIONS = ("lang", "detok", "raw_ref", "lowercase", "compound_split")
ROUGE_OPTIONS = ("no_stem", "sentence_end")
FACTS = {"parameters": "parameters = {:,}", "sentences_per_second": "speed = {:.2f} sentences/s"}


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
    _check_options(args)
    speed = None
    if args.gen:
        log = parse_gen_log(read_lines(args.gen), args.gen)
        hypotheses, references, speed = log.hypotheses, log.references, log.sentences_per_second
        if log.decoded and args.detok is None and args.metric == "bleu":
            raise CommandError(
                f"{args.gen} was written with --bpe or --tokenizer: say --detok none if its D- lines are plain text, "
                "--detok moses if they still are tokens"
            )
        if args.speed and speed is None:
            raise CommandError(
                f"--speed: {args.gen} has no line 'Translated … sentences (…) in …s (… sentences/s, …': "
                "fairseq-generate may write it to standard error; append that to the log (2> messages)"
            )
    else:
        hypotheses, references = read_lines(args.sys), read_lines(args.ref)
    if not args.remove_bpe and any(LEFT_OVER.search(line) for line in hypotheses):
        print("lightconv score: the text looks like subwords: was --remove-bpe forgotten?", file=sys.stderr)
    report = (_rouge_report if args.metric == "rouge" else _bleu_report)(args, hypotheses, references)
    facts = {}
    if args.checkpoint:
        facts["parameters"] = count_parameters(args.checkpoint)
    if args.speed:
        facts["sentences_per_second"] = speed
    if args.json:
        text = json.dumps(asdict(report) | facts, ensure_ascii=False) + "\n"
    else:
        text = report.lines() + "".join(f"{FACTS[name].format(value)}\n" for name, value in facts.items())
    if args.output:
        with atomic_write(args.output) as file:
            file.write(text)
    sys.stdout.write(text)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if args.gen and (args.sys or args.ref):
        raise CommandError("--gen has both sides: give either --gen or --sys with --ref")
    if not args.gen and not (args.sys and args.ref):
        raise CommandError("give either --gen FILE or both --sys FILE and --ref FILE")
    if args.speed and not args.gen:
        raise CommandError("--speed is read from the log of fairseq-generate: give it by --gen FILE")
    others = {"bleu": ROUGE_OPTIONS, "rouge": BLEU_OPTIONS}[args.metric]
    for name in others:
        if getattr(args, name):
            raise CommandError(f"--{name.replace('_', '-')} means nothing to --metric {args.metric}: leave it out")


def _bleu_report(args: argparse.Namespace, hypotheses: list[str], references: list[str]) -> Report:
    return score(
        hypotheses,
        references,
        lang=args.lang,
        detok=args.detok or "moses",
        raw_references=read_lines(args.raw_ref) if args.raw_ref else None,
        bpe=args.remove_bpe,
        lowercase=args.lowercase,
        compound_split=args.compound_split,
    )


def _rouge_report(args: argparse.Namespace, summaries: list[str], references: list[str]) -> RougeReport:
    if args.remove_bpe:
        summaries = [remove_bpe(line, args.remove_bpe) for line in summaries]
        references = [remove_bpe(line, args.remove_bpe) for line in references]
    sentence_end = args.sentence_end or "."
    report = rouge(summaries, references, stem=not args.no_stem, sentence_end=sentence_end)
    if report.empty:
        print(f"lightconv score: {report.empty} of {report.n} summaries have no word; they score 0", file=sys.stderr)
    if not any(sentence_end in line.split() for line in references):
        print(
            f"lightconv score: no reference has {sentence_end!r} as a token of its own, so each is one sentence for "
            "ROUGE-Lsum: see --sentence-end",
            file=sys.stderr,
        )
    return report


def _bpe_mark(text: str) -> str:
    mark = {"@@ ": "@@", "subword_nmt": "@@"}.get(text, text)
    if mark not in BPE_MARKS:
        raise argparse.ArgumentTypeError(f"must be '@@ ', subword_nmt or sentencepiece, got {text!r}")
    return mark


DESCRIPTION = """\
--metric bleu: tokenised BLEU (multi-bleu.perl's and fairseq-score's); sacreBLEU and chrF on detokenised text.

--metric rouge: ROUGE-1, -2, -L and -Lsum by the library rouge-score: F1 with its 95% bootstrap interval, precision
and recall. ROUGE-L takes each text as one sentence; ROUGE-Lsum, which papers on CNN/Daily Mail call ROUGE-L, goes
sentence by sentence. Words are what rouge-score takes for them, a-z and 0-9 in a row, without case; any other character
parts two words. The usual protocol runs PTBTokenizer (Stanford CoreNLP) over both sides: it makes "do n't" of "don't",
so words "do", "n", "t" instead of "don", "t", and -lrb- of a bracket, a word "lrb". Give the tokens to compare with."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "score",
        help="score translations: tokenised BLEU, sacreBLEU, chrF; summaries: ROUGE",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--metric", choices=("bleu", "rouge"), default="bleu", help="default: %(default)s")
    parser.add_argument(
        "--gen", type=Path, metavar="FILE", help="the whole output of fairseq-generate, with references"
    )
    parser.add_argument(
        "--sys", type=Path, metavar="FILE", help="translations or summaries, one to a line (with --ref)"
    )
    parser.add_argument("--ref", type=Path, metavar="FILE", help="references, one to a line (with --sys)")
    parser.add_argument(
        "--remove-bpe", nargs="?", const="@@", type=_bpe_mark, metavar="MARK",
        help="join subwords first: '@@ ' (the default of the option) or sentencepiece",
    )  # fmt: skip
    parser.add_argument("--speed", action="store_true", help="also the sentences/s that the log of --gen states")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="also the number of this model's parameters")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in one line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write what is printed to this file")
    bleu = parser.add_argument_group("of --metric bleu")
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
    summaries = parser.add_argument_group("of --metric rouge")
    summaries.add_argument("--no-stem", action="store_true", help="compare words, not their Porter stems")
    summaries.add_argument(
        "--sentence-end", metavar="TOKEN", help="the token that ends a sentence, for ROUGE-Lsum (default: '.')"
    )
    parser.set_defaults(run=run)
