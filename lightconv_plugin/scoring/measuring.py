"""Scoring texts: what to measure and how, what a prepared corpus says about it, and the report with all its parts."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.scoring import bleu
from lightconv_plugin.scoring.generate_log import Generated
from lightconv_plugin.scoring.rouge import RougeReport, rouge
from lightconv_plugin.scoring.significance import SAMPLES, compare, read_other

_FACTS = {"parameters": "parameters = {:,}", "sentences_per_second": "speed = {:.2f} sentences/s"}


@dataclass(frozen=True)
class Measuring:
    """What to measure by and how.

    metric: "bleu" (with chrF) or "rouge".
    bpe: "@@" or "sentencepiece" where the text is still in subwords.
    lang, detok, lowercase, compound_split: as for `bleu.measures`; detok None is "moses", but see `check_decoded`.
    raw_ref: a file of untouched references for sacreBLEU and chrF.
    stem, sentence_end: as for `rouge.rouge`.
    """

    metric: str = "bleu"
    bpe: str | None = None
    lang: str | None = None
    detok: str | None = None
    raw_ref: Path | None = None
    lowercase: bool = False
    compound_split: bool = False
    stem: bool = True
    sentence_end: str = "."

    def with_data(self, data: Path, subset: str) -> "Measuring":
        """These settings, completed for BLEU by what a folder of binarised data and the one above it say.

        The target language is in the names of the files. raw/SUBSET.LANG has the untouched references, and corpus.json
        says whether the text was lower-cased, which is then scored without case. Whatever is missing changes nothing.

        Raises:
            InputError: there is no such folder or subset, or corpus.json is broken.
        """
        _, target = languages_of(data, subset)
        if self.metric != "bleu":
            return self
        corpus = data.resolve().parent
        raw, about = corpus / "raw" / f"{subset}.{target}", corpus / "corpus.json"
        known = None
        if about.is_file():
            try:
                known = json.loads(about.read_text(encoding="utf-8"))
            except ValueError as error:
                raise InputError(f"{about} is not JSON: prepare the data again ({error})") from error
        return replace(
            self,
            lang=self.lang or target,
            raw_ref=raw if self.raw_ref is None and raw.is_file() else self.raw_ref,
            lowercase=self.lowercase or bool(isinstance(known, dict) and known.get("lowercase")),
        )

    def check_decoded(self, log: Generated, name: object) -> None:
        """Raises InputError where nobody knows whether the sentences of a log are tokens or plain text."""
        if self.metric == "bleu" and log.decoded and self.detok is None:
            raise InputError(
                f"`detok` is missing: {name} was written by fairseq-generate with --bpe or --tokenizer. Give none if "
                "its D- lines are plain text, moses if they are still tokens",
            )

    def measures(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, bleu.Measure]:
        """The measures of metric "bleu", for a test of significance."""
        return bleu.measures(hypotheses, references, **self._bleu_options())

    def report(
        self, hypotheses: Sequence[str], references: Sequence[str], warn: Callable[[str], None]
    ) -> bleu.Report | RougeReport:
        """The scores of a text against its references, one string for each sentence or summary, in the same order.

        `warn` is called with whatever makes the scores doubtful.
        """
        if self.metric == "bleu":
            return bleu.score(hypotheses, references, **self._bleu_options())
        if self.bpe:
            hypotheses, references = (
                [bleu.remove_bpe(line, self.bpe) for line in side] for side in (hypotheses, references)
            )
        report = rouge(hypotheses, references, stem=self.stem, sentence_end=self.sentence_end)
        if report.empty:
            warn(f"{report.empty} of {report.n} summaries have no word; they score 0")
        if not any(self.sentence_end in line.split() for line in references):
            warn(
                f"no reference has {self.sentence_end!r}, the token that ends a sentence: ROUGE-Lsum takes each "
                "reference as one sentence"
            )
        return report

    def _bleu_options(self) -> dict[str, Any]:
        return {
            "lang": self.lang,
            "detok": self.detok or "moses",
            "raw_references": read_lines(self.raw_ref) if self.raw_ref else None,
            "bpe": self.bpe,
            "lowercase": self.lowercase,
            "compound_split": self.compound_split,
        }


@dataclass(frozen=True)
class Scored:
    """Scores as values for JSON, and as lines for people."""

    values: dict[str, Any]
    lines: str

    def text(self, as_json: bool) -> str:
        """What a command prints: one line of JSON, or the lines."""
        return json.dumps(self.values, ensure_ascii=False) + "\n" if as_json else self.lines


def score(
    how: Measuring,
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    warn: Callable[[str], None],
    against: Path | None = None,
    samples: int | None = None,
) -> Scored:
    """Scores of a text; with `against`, the file of another system, the significance of the difference in BLEU too.

    samples: of the bootstrap test, None for the default number.

    Raises:
        InputError: the two sides do not belong together, a language is unknown, a library is missing.
    """
    report = how.report(hypotheses, references, warn)
    values, lines = asdict(report), report.lines()
    if against:
        ours, other = (how.measures(side, references) for side in (hypotheses, read_other(against, references)))
        significance = compare(ours, other, str(against), samples or SAMPLES)
        values["against"] = significance.as_json()
        lines += significance.lines()
    return Scored(values, lines)


def with_facts(scored: Scored, facts: Mapping[str, float | None]) -> Scored:
    """Scores with `parameters` and `sentences_per_second` of the model behind them, where they are given."""
    known = {name: facts[name] for name in _FACTS if name in facts}
    return Scored(
        scored.values | known, scored.lines + "".join(f"{_FACTS[name].format(known[name])}\n" for name in known)
    )


def languages_of(data: Path, subset: str) -> tuple[str, str]:
    """(source, target) of a folder of binarised data, by the names of its files.

    Raises:
        InputError: there is no such folder or subset.
    """
    if not data.is_dir():
        raise InputError(f"no folder {data} with binarised data")
    found: dict[str, tuple[str, str]] = {}
    for path in data.glob("*.*-*.*.idx"):
        if match := re.fullmatch(r"(.+)\.([^.-]+)-([^.-]+)\.[^.]+\.idx", path.name):
            found.setdefault(match[1], (match[2], match[3]))
    if subset not in found:
        raise InputError(f"{data} has no subset {subset}; it has {', '.join(sorted(found)) or 'none'}")
    return found[subset]
