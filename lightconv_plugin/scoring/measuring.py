"""Scores texts: what to measure and how, the settings that a prepared corpus determines, and the complete report."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.paths import beside
from lightconv_plugin.scoring import bleu
from lightconv_plugin.scoring.rouge import RougeReport, rouge
from lightconv_plugin.scoring.significance import SAMPLES, compare, read_other
from lightconv_plugin.text.recipe import Tokeniser

Languages = tuple[str | None, str | None]
# Those whose tokens are not joined by Moses' rules.
OTHER_TOKENISERS: tuple[Tokeniser, ...] = tuple(name for name in get_args(Tokeniser) if "moses" not in name)
_FACTS = {
    "parameters": "parameters = {:,}",
    "sentences_per_second": "speed = {:.2f} sentences/s",
    "search": "search = {}",
}


@dataclass(frozen=True)
class Measuring:
    """What to measure and how.

    metric: "bleu" (with chrF) or "rouge".
    bpe: "@@" or "sentencepiece" if the text is still in subwords.
    lang, detok, lowercase, compound_split: as for `bleu.measures`; detok None is "moses", but see `check_decoded`.
    raw_ref: a file of raw references for sacreBLEU and chrF. raw_rules: the language by whose Moses rules to detokenise
        them, if they are tokens after all.
    stem, sentence_end: as for `rouge.rouge`.
    """

    metric: str = "bleu"
    bpe: str | None = None
    lang: str | None = None
    detok: Tokeniser | None = None
    raw_ref: Path | None = None
    raw_rules: str | None = None
    lowercase: bool = False
    compound_split: bool = False
    stem: bool = True
    sentence_end: str = "."

    def with_data(self, data: Path, subset: str, languages: Languages = (None, None)) -> "Measuring":
        """These settings, completed for BLEU from a folder of binarised data and the folder above it.

        The target language comes from the file names, or from corpus.json if the text has the rules of another one
        (English for a language that Moses does not know), and the raw references from raw/SUBSET.LANG, except for the
        training text, of which a preparation leaves out pairs. If corpus.json says that the text was lower-cased, it is
        scored without case; if it names another tokeniser than Moses', or none, the text is detokenised accordingly.
        References in raw/ that Moses' script has tokenised already are detokenised. Missing files change nothing.

        languages: (source, target), to choose among several directions; None for whatever the folder has.

        Raises:
            InputError: the folder, subset or direction does not exist, there are several, or corpus.json is damaged.
        """
        if self.metric != "bleu":
            languages_of(data, subset, languages)
            return self
        _, target = languages_of(data, subset, languages, self.lang)
        raw, about = beside(data, f"raw/{subset}.{target}"), beside(data, "corpus.json")
        known = None
        if about.is_file():
            try:
                known = json.loads(about.read_text(encoding="utf-8"))
            except ValueError as error:
                raise InputError(f"{about} is not JSON: prepare the data again ({error})") from error
        known = known if isinstance(known, dict) else {}
        recipe = _recipe(known.get("text"), target)
        rules = recipe["lang"] if isinstance(recipe.get("lang"), str) else None
        other = next((name for name in OTHER_TOKENISERS if name == recipe.get("tokeniser")), None)
        found = self.raw_ref is None and subset != "train" and raw.is_file()
        moses = recipe.get("tokeniser") == "moses"
        tokens = found and moses and _same_words(raw, beside(data, f"tok/{subset}.{target}"))
        return replace(
            self,
            lang=self.lang or rules or target,
            detok=self.detok or other,
            raw_ref=raw if found else self.raw_ref,
            raw_rules=rules if tokens else self.raw_rules,
            lowercase=self.lowercase or bool(known.get("lowercase")),
        )

    def check_decoded(self, decoded: bool, name: object) -> None:
        """Raise InputError if it is unclear whether sentences are tokens or plain text. decoded: as of `Generated`."""
        if self.metric == "bleu" and decoded and self.detok is None:
            raise InputError(
                f"`detok` is missing: {name} is from fairseq-generate with --bpe or --tokenizer. Give none if its D- "
                "lines are plain text, moses if they are still tokens",
            )

    def check_language(self) -> None:
        """Raise InputError, before any work, if texts in this language cannot be scored."""
        if self.metric == "bleu":
            if self.detok in (None, "moses"):
                bleu.check_language(self.lang)
            bleu.sacre_bleu(self.lang)

    def joined(self, line: str) -> str:
        """A line whose subwords, if it has any, are joined to words."""
        return bleu.remove_bpe(line, self.bpe) if self.bpe else line

    def measures(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, bleu.Measure]:
        """The measures of metric "bleu", for a significance test."""
        return bleu.measures(hypotheses, references, **self._bleu_options())

    def report(
        self, hypotheses: Sequence[str], references: Sequence[str], warn: Callable[[str], None]
    ) -> bleu.BleuReport | RougeReport:
        """The scores of a text against its references, one string per sentence or summary, in the same order.

        `warn` is called with a message about anything that makes the scores unreliable.
        """
        sides = {"hypotheses": hypotheses, "references": references}
        unjoined = [name for name, side in sides.items() if any(map(bleu.LEFT_OVER.search, map(self.joined, side)))]
        if unjoined:
            names = " and ".join(unjoined)
            warn(f"{names} look like subwords: give --remove-bpe, or --remove-bpe sentencepiece for \u2581")
        if self.metric == "bleu":
            return bleu.score(hypotheses, references, **self._bleu_options())
        hypotheses, references = ([self.joined(line) for line in side] for side in (hypotheses, references))
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
        raw = read_lines(self.raw_ref) if self.raw_ref else None
        if raw is not None and self.raw_rules is not None:
            raw = bleu.detokenise(raw, self.raw_rules)
        return {
            "lang": self.lang,
            "detok": self.detok or "moses",
            "raw_references": raw,
            "bpe": self.bpe,
            "lowercase": self.lowercase,
            "compound_split": self.compound_split,
        }


@dataclass(frozen=True)
class Scored:
    """Scores as values for JSON, and as readable lines."""

    values: dict[str, Any]
    lines: str

    def text(self, as_json: bool) -> str:
        """The output of a command: one line of JSON, or the readable lines."""
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
    """Scores of a text; with `against`, the file of another system, also the significance of the difference in BLEU.

    samples: number of bootstrap samples, None for the default.

    Raises:
        InputError: the two sides do not match, a language is unknown, or a library is missing.
    """
    report = how.report(hypotheses, references, warn)
    values, lines = asdict(report), report.lines()
    if against:
        theirs = read_other(against, references, how.check_decoded)
        words = [[bleu.join_subwords(how.joined(line)) for line in lines] for lines in (hypotheses, references)]
        plain = replace(how, bpe=None)  # the other system's subwords are joined, whatever they are
        ours, other = plain.measures(*words), plain.measures(theirs, words[1])
        significance = compare(ours, other, str(against), samples or SAMPLES)
        values["against"] = significance.as_json()
        lines += significance.lines()
    return Scored(values, lines)


def with_facts(scored: Scored, facts: Mapping[str, float | str | None]) -> Scored:
    """The scores, with the model's `parameters`, `sentences_per_second` and `search` if they are given."""
    present = {name: facts[name] for name in _FACTS if name in facts}
    return Scored(
        scored.values | present, scored.lines + "".join(f"{_FACTS[name].format(present[name])}\n" for name in present)
    )


def check_binarised(data: Path, subset: str) -> None:
    """Raise InputError if a folder has a subset only as raw text (--dataset-impl raw), or in its data-bin.

    A folder with neither passes.
    """
    raw = re.compile(re.escape(subset) + r"\.([^.-]+)-([^.-]+)(\.(\1|\2))?")  # of one language: train.None-None
    names = [path.name for path in data.glob("*")]
    binary = any(name.startswith(f"{subset}.") and name.endswith(".idx") for name in names)
    if not binary and any(map(raw.fullmatch, names)):
        raise InputError(f"{data} has {subset} as raw text: make binary data without --dataset-impl raw")
    inner = data / "data-bin"
    if not binary and any(path.name.startswith(f"{subset}.") for path in inner.glob("*")):
        raise InputError(f"{data} has its binarised data in a folder of its own: name {inner}")


def languages_of(
    data: Path, subset: str, languages: Languages = (None, None), likely: str | None = None
) -> tuple[str, str]:
    """(source, target) of a folder of binarised data, determined by its file names.

    languages: (source, target), to choose among several directions; None for whatever the folder has. If no direction
        fits, the opposite of one does: see `stem_of`.
    likely: the target to choose if there are still several. It need not be the name that the files have.

    Raises:
        InputError: there is no such folder, subset or direction, or there are several.
    """
    if not data.is_dir():
        raise InputError(f"no folder {data} with binarised data")
    directions: dict[str, set[tuple[str, str]]] = {}
    for path in data.glob("*.*-*.*.idx"):
        if match := re.fullmatch(r"(.+)\.([^.-]+)-([^.-]+)\.[^.]+\.idx", path.name):
            directions.setdefault(match[1], set()).add((match[2], match[3]))
    if subset not in directions:
        check_binarised(data, subset)
        if (data / f"{subset}.idx").is_file():
            raise InputError(
                f"{data} has {subset} as text of a language model, without pairs of sentences: lightconv perplexity "
                "and tune --by perplexity take it"
            )
        raise InputError(f"{data} has no subset {subset}; it has {', '.join(sorted(directions)) or 'none'}")

    def fitting(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return [pair for pair in pairs if all(a in (None, b) for a, b in zip(languages, pair, strict=True))]

    pairs = fitting(directions[subset]) or fitting((target, source) for source, target in directions[subset])
    pairs = [pair for pair in pairs if pair[1] == likely] or pairs
    if len(pairs) != 1:
        wanted = "-".join(language or "*" for language in languages)
        known = ", ".join("-".join(pair) for pair in sorted(directions[subset]))
        problem = "several directions: name the languages" if pairs else f"no direction {wanted}"
        raise InputError(f"{data} has {problem}; {subset} is there as {known}")
    return pairs[0]


def stem_of(data: Path, subset: str, source: str, target: str) -> str:
    """What the paths of a direction's files begin with: fairseq reads those of the opposite one if it has none."""
    stem = f"{data}/{subset}.{source}-{target}"
    return stem if Path(f"{stem}.{source}.idx").is_file() else f"{data}/{subset}.{target}-{source}"


def _same_words(raw: Path, tokens: Path) -> bool:
    """Whether text was tokenised before `lightconv prepare` had it, which then changes no more than its case."""
    if not tokens.is_file():
        return False
    ours, theirs = ([line.casefold().split() for line in read_lines(path)] for path in (raw, tokens))
    return ours == theirs


def _recipe(text: object, lang: str) -> dict[str, Any]:
    """How the text of a language was prepared, by `text` of corpus.json (text/recipe.py); {} if it does not say."""
    recipe = text.get(lang) if isinstance(text, dict) else None
    return recipe if isinstance(recipe, dict) else {}
