"""BLEU and chrF of translations: tokenised BLEU as the papers report it, sacreBLEU and chrF on detokenised text.

Tokenised BLEU is that of multi-bleu.perl on the tokens as they are; `fairseq-score` computes it too. Where the two
differ, this follows multi-bleu.perl: an empty line has no token (fairseq-score counts one), and <unk> is a token like
any other (fairseq-score never matches it in a reference; fairseq-generate prints it there as <<unk>>, so that it
matches nowhere). A line is split at any Unicode space, as in fairseq; multi-bleu.perl reads bytes and does not split at
a no-break space and similar characters. Text is UTF-8, one sentence per line.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.text.recipe import Recipe, Tokeniser, moses_rules
from lightconv_plugin.text.subwords import join

# How a compound is written whose hyphen is a token already: by Moses' tokeniser with -a, and by `split_compounds`.
SPLIT_HYPHENS = ("@-@", "##AT##-##AT##")
# On bytes, like the Perl code in fairseq's compound_split_bleu.sh: "a-ö-b" is split twice, "a-o-b" once. Unlike there,
# a hyphen that is a token already is not split again.
COMPOUND = re.compile(rf"(?<!\S)(?:{'|'.join(SPLIT_HYPHENS)})(?!\S)|(\S)-(\S)".encode())
WHOLE_COMPOUND = re.compile(r"[^\W_]-[^\W_]")
LEFT_OVER = re.compile(r"@@(?: |$)|\u2581")
CODE = re.compile("[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]+)?")  # of a language, as in the names of binarised data


@dataclass(frozen=True)
class BleuReport:
    """The result of `lightconv score`. Scores and precisions are on a scale of 0 to 100."""

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
        """Readable lines, the first one in the format of fairseq-score."""
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


def remove_bpe(line: str, mark: str) -> str:
    """Join subwords into words, like fairseq's --remove-bpe: `mark` is "@@" (subword-nmt) or "sentencepiece"."""
    return join([line], "sentencepiece" if mark == "sentencepiece" else "bpe")


def join_subwords(line: str) -> str:
    """A line as words, if it is in subwords of subword-nmt or sentencepiece."""
    if LEFT_OVER.search(line):
        return remove_bpe(line, "sentencepiece" if "\u2581" in line else "@@")
    return line


def split_compounds(line: str) -> str:
    """ "a-b" becomes "a ##AT##-##AT## b": the parts of a hyphenated compound count as words.

    In text that is split already, as "a @-@ b" or "a ##AT##-##AT## b", nothing changes.
    """
    return COMPOUND.sub(lambda m: m[0] if m[1] is None else m[1] + b" ##AT##-##AT## " + m[2], line.encode()).decode()


def detokenise(lines: Sequence[str], lang: str, tokeniser: Tokeniser = "moses") -> list[str]:
    """Turn tokens into plain text, by the rules of their tokeniser for this language."""
    return list(map(Recipe(tokeniser, lang).detokenise(), lines))


def sacre_bleu(lang: str | None, lowercase: bool = False) -> Any:
    """sacreBLEU's metric, with its tokeniser for this target language. InputError if a library of that is missing."""
    from sacrebleu.metrics import BLEU

    try:
        return BLEU(lowercase=lowercase, trg_lang=re.split("[-_]", lang or "")[0].lower())
    except (ImportError, RuntimeError) as error:  # its tokenisers for ja and ko need extra packages
        raise InputError(f"sacreBLEU cannot score language {lang!r}: {error}") from error


@dataclass(frozen=True)
class Measure:
    """One of sacrebleu's metrics with both sides in the form that it needs."""

    metric: Any
    hypotheses: list[str]
    references: list[str]

    def score(self):
        """sacrebleu's score object of the corpus."""
        return self.metric.corpus_score(self.hypotheses, [self.references])


def measures(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lang: str | None = None,
    detok: Tokeniser = "moses",
    raw_references: Sequence[str] | None = None,
    bpe: str | None = None,
    lowercase: bool = False,
    compound_split: bool = False,
) -> dict[str, Measure]:
    """The measures bleu_tok, sacrebleu and chrf of translations, one for each reference, in the same order.

    hypotheses, references: tokenised sentences (plain text with detok="none").
    lang: target language; `detok` needs it unless it is "none", and sacreBLEU chooses its tokeniser for zh, ja and ko
        by it.
    detok: the tokeniser of the tokens, as in text/recipe.py.
    raw_references: raw references for sacreBLEU and chrF instead of the detokenised `references`.
    bpe: "@@" or "sentencepiece" if the text is still in subwords. lowercase: score without case.
    compound_split: for tokenised BLEU, split hyphenated compounds that the tokeniser has not split.

    Raises InputError if the numbers of sentences differ or are 0, if the language is unknown or missing, or if
    compounds are to be split and only one side was tokenised so that they are split already.
    """
    from sacrebleu.metrics import BLEU, CHRF

    _check(hypotheses, references, raw_references, lang, detok)
    if bpe:
        hypotheses, references = ([remove_bpe(line, bpe) for line in side] for side in (hypotheses, references))
    plain, plain_references = hypotheses, references if raw_references is None else raw_references
    if detok != "none" and lang:  # `_check` has ensured that there is a language
        plain = detokenise(hypotheses, lang, detok)
        plain_references = detokenise(references, lang, detok) if raw_references is None else raw_references
    if compound_split:
        _check_hyphens(hypotheses, references)
        hypotheses, references = ([split_compounds(line) for line in side] for side in (hypotheses, references))
    if lowercase:  # last: SPLIT_HYPHENS have capitals
        hypotheses, references = ([line.lower() for line in side] for side in (hypotheses, references))
    bleu = sacre_bleu(lang, lowercase)
    # The tokens as they are, without smoothing: the number of multi-bleu.perl.
    tokenised = BLEU(tokenize="none", smooth_method="none", force=True)
    plain_sides = list(plain), list(plain_references)
    return {
        "bleu_tok": Measure(tokenised, list(hypotheses), list(references)),
        "sacrebleu": Measure(bleu, *plain_sides),
        "chrf": Measure(CHRF(lowercase=lowercase), *plain_sides),
    }


def score(hypotheses: Sequence[str], references: Sequence[str], **options) -> BleuReport:
    """Score translations against references in the same order; `options` are those of `measures`."""
    by_name = measures(hypotheses, references, **options)
    tokenised, sacre, chrf = (by_name[name].score() for name in ("bleu_tok", "sacrebleu", "chrf"))
    return BleuReport(
        bleu_tok=tokenised.score,
        precisions=list(tokenised.precisions),
        bp=tokenised.bp,
        ratio=tokenised.ratio,
        sys_len=tokenised.sys_len,
        ref_len=tokenised.ref_len,
        sacrebleu=sacre.score,
        signature=str(by_name["sacrebleu"].metric.get_signature()),
        chrf=chrf.score,
        chrf_signature=str(by_name["chrf"].metric.get_signature()),
        n=len(hypotheses),
        lang=options.get("lang"),
        detok=options.get("detok", "moses"),
        lowercase=options.get("lowercase", False),
        compound_split=options.get("compound_split", False),
    )


def _check(hypotheses, references, raw_references, lang, detok) -> None:
    if not hypotheses:
        raise InputError("there are no sentences to score")
    if len(hypotheses) != len(references):
        raise InputError(f"{len(hypotheses)} translations, but {len(references)} references: each needs one")
    if raw_references is not None and len(raw_references) != len(hypotheses):
        raise InputError(f"{len(hypotheses)} translations, but {len(raw_references)} raw references")
    if detok != "none" and lang is None:
        raise InputError("`lang` is missing: detokenising needs the target language (for plain text: `detok` none)")
    if detok == "moses":
        check_language(lang)
    elif lang is not None and not CODE.fullmatch(lang):
        raise InputError(f"`lang` must be the code of a language, such as de or pt_BR, got {lang!r}")


def _check_hyphens(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise InputError if the sides write all of their hyphenated compounds in different ways."""
    ours, theirs = map(_hyphens, (hypotheses, references))
    if ours and theirs and not ours & theirs:
        raise InputError(
            f"`compound_split`: the translations write hyphenated compounds as {', '.join(sorted(ours))}, the "
            f"references as {', '.join(sorted(theirs))}: tokenise both in the same way"
        )


def _hyphens(lines: Sequence[str]) -> set[str]:
    """The ways in which hyphenated compounds are written in a text, as examples."""
    examples = {f"a {token} b" for line in lines for token in line.split() if token in SPLIT_HYPHENS}
    return examples | {"a-b" for line in lines if WHOLE_COMPOUND.search(line)}


def check_language(lang: str | None) -> None:
    """Raise InputError for a language without Moses rules; None is allowed."""
    if lang is not None:
        try:
            moses_rules(lang)
        except ValueError as error:
            raise InputError(f"`lang`: {error}") from None
