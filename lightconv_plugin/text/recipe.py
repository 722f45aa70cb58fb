"""How the text of a corpus was tokenised, stored with the corpus so that it can be repeated on any other text.

`lightconv prepare` puts a recipe for each language into corpus.json (key "text"). It is the recipe of the test set, as
users' text is like a test set. Training text may have had more steps, such as punctuation normalisation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

from lightconv_plugin.validation import read

Tokeniser = Literal["moses", "sacremoses", "jieba", "sudachi", "none"]
Lowercase = Literal["", "first", "last"]


@dataclass(frozen=True)
class Recipe:
    """The steps from raw text of one language to space-separated tokens, and back.

    tokeniser: "moses" (text/moses.py), "sacremoses" (that library's, without escaping), "jieba" (Chinese words),
        "sudachi" (Japanese words) or "none" (the text is unchanged except for runs of white space)
    lang: language of the text, such as "de" or "pt_BR"; Moses' rules depend on it (see `moses_rules`)
    lowercase: "" to keep the case, "first" before anything else, "last" after the tokeniser
    normalise, aggressive, keep_last: see `moses.tokeniser`
    plain_apostrophe: replace ’ by ' first, like fairseq's scripts do with test sets

    Raises ValueError for an unknown tokeniser, or if a language is missing.
    """

    tokeniser: Tokeniser
    lang: str
    lowercase: Lowercase = ""
    normalise: bool = False
    aggressive: bool = False
    keep_last: bool = False
    plain_apostrophe: bool = False

    def __post_init__(self) -> None:
        if self.tokeniser not in (known := get_args(Tokeniser)):
            raise ValueError(f"tokeniser must be one of {', '.join(known)}, got {self.tokeniser!r}")
        if self.tokeniser != "none" and not self.lang:
            raise ValueError(f"lang must be the code of a language, got {self.lang!r}")

    def as_json(self) -> dict[str, object]:
        """For corpus.json: the fields that differ from the defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @classmethod
    def of_json(cls, known: object) -> Recipe:
        """The recipe written by `as_json`. ValueError explains what is wrong with anything else."""
        return read(cls, known)

    def tokenise(self) -> Callable[[str], str]:
        """A function that turns a raw line into tokens separated by single spaces.

        Raises:
            ValueError: the tokeniser has no rules for the language. RuntimeError: its library is not installed.
        """
        steps: list[Callable[[str], str]] = []
        if self.plain_apostrophe:
            steps.append(lambda line: line.replace("’", "'"))
        # What is tokenised already is mostly Moses' work.
        case = lower if self.tokeniser in ("moses", "none") else str.lower
        if self.lowercase == "first":
            steps.append(case)
        steps.append(self._tokens())
        if self.lowercase == "last":
            steps.append(case)

        def through(line: str) -> str:
            for step in steps:
                line = step(line)
            return line

        return through

    def _tokens(self) -> Callable[[str], str]:
        if self.tokeniser == "moses":
            from lightconv_plugin.text import moses as rules

            options = {"normalise": self.normalise, "aggressive": self.aggressive, "keep_last": self.keep_last}
            return rules.tokeniser(moses_rules(self.lang), **options)
        if self.tokeniser == "sacremoses":
            from sacremoses import MosesTokenizer

            moses = MosesTokenizer(lang=moses_rules(self.lang))

            def tokens(line: str) -> str:
                """Tabs separate paragraphs: the full stop at the end of each is a token."""
                parts = (" ".join(moses.tokenize(paragraph, escape=False)) for paragraph in line.split("\t"))
                return " ".join(" ".join(parts).split())

            return tokens
        if self.tokeniser != "none":
            from lightconv_plugin.text.segmenters import SEGMENTERS

            return SEGMENTERS[self.tokeniser].segment()
        return lambda line: " ".join(line.split())

    def detokenise(self) -> Callable[[str], str]:
        """A function that turns space-separated tokens into normal text; case is kept.

        Raises:
            ValueError: Moses has no rules for the language.
        """
        if self.tokeniser in ("moses", "sacremoses"):
            from sacremoses import MosesDetokenizer

            from lightconv_plugin.text.moses import join_marks

            moses = MosesDetokenizer(lang=moses_rules(self.lang))
            join = join_marks if self.tokeniser == "moses" else str  # sacremoses' tokeniser keeps them in their words
            return lambda line: moses.detokenize(join(" ".join(line.split())).split())
        if self.tokeniser != "none":
            from lightconv_plugin.text.segmenters import SEGMENTERS

            return SEGMENTERS[self.tokeniser].join
        return lambda line: line


def moses_rules(lang: str) -> str:
    """The language whose Moses rules a text of this language has: a region, as in pt_BR, has those of its language.

    Raises:
        ValueError: Moses has rules for neither.
    """
    known = moses_languages()
    for rules in (lang, re.split("[-_]", lang)[0]):
        if rules in known:
            return rules
    raise ValueError(f"Moses has no rules for the language {lang!r}; it has {', '.join(sorted(known))}")


def moses_languages() -> set[str]:
    """The codes of the languages with rules in sacremoses; for any other, it would silently use its English rules."""
    from sacremoses.corpus import NonbreakingPrefixes

    return set(NonbreakingPrefixes().available_langs.values()) | {"ja", "ko"}


def lower(line: str) -> str:
    """lowercase.perl: like str.lower, but Σ becomes σ even at the end of a word."""
    return line.replace("Σ", "σ").lower()
