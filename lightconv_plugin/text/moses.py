"""Moses' text preparation, for corpora and for text to translate: the same results as its Perl scripts, but faster.

The rules are those of normalize-punctuation.perl, remove-non-printing-char.perl and tokenizer.perl at
moses-smt/mosesdecoder 3445289, the newest; tests/text/test_moses.py has their output for hard cases. (lowercase.perl is
in recipe.py.) The punctuation table and the lists of abbreviations come from sacremoses. Its tokeniser is not used,
since it differs from Perl:

  - A full stop at the end of a line stays with an abbreviation, as in Perl before November 2018 (`keep_last`).
  - Its letters lack Chinese, Japanese and Korean (in a line of another language, each becomes a token) and recent
    additions to Unicode; signs of Indian scripts that Perl splits off count as letters.
  - It does not handle colons inside Finnish and Swedish words, the glottal stop of Somali, or Irish apostrophes.
  - List entries that end with a space match, which they never do in Perl; U+001C … U+001F are white space.
  - It applies every rule to every line. But a rule sees nothing beyond the word, with the exceptions listed in
    `_Tokeniser`, so this module applies the rules once to each different word.

Corrections to sacremoses' punctuation table (`perl_parity=True`): \\d and \\s mean ASCII, since the script reads bytes;
`."` becomes `".` also at the end of a line, since Perl sees the line feed after it; the rule for quotation marks that
it has for German, Spanish and French applies to all languages except English and Czech.

Remaining differences from Perl:

  - Runs of white space become one space, and lines are stripped.
  - The word DOTMULTI, which tokenizer.perl uses internally and turns into a full stop, is kept.
  - Characters that are newer than Perl's Unicode may be letters here.
  - Catalan and Tetun, which have special rules in Perl, are refused.

Speed: 4 to 5 times that of tokenizer.perl on one core; `python -m benchmarks.tokeniser FILE --lang de` measures it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from itertools import zip_longest
from typing import cast

import regex

_CACHED_WORDS = 500_000  # in each process: about 100 MB

# Entries that end with a space in Moses' lists, so that no word ever equals them.
_NEVER = {
    "as": ["ভি"],
    "bn": ["ভি"],
    "es": ["gr", "Fil", "pÃ¡g"],
    "it": ["Arch", "es", "Amn", "all", "a.c"],
    "ml": ["പി"],
    "mni": ["ভি"],
    "nl": ["Nrs"],
    "sk": ["Pf"],
    "sv": ["Ö"],
}
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")  # deleted by tokenizer.perl; \t … \r count as white space before that
_NON_PRINTING = regex.compile(r"\p{C}")
_ALPHA, _ALNUM, _NUMBER = r"\p{Alphabetic}", r"\p{Alphabetic}\p{Nd}", r"\p{N}"
_LOWER = regex.compile(r"\p{Lowercase}")
_HAS_ALPHA = regex.compile(f"[{_ALPHA}]")
_DOTS = re.compile(r"\.{2,}")
_MARK = "\x00"  # replaces each full stop in a run of several; the text does not contain it
_ENTITIES = {"&": "amp", "|": "#124", "<": "lt", ">": "gt", "'": "apos", '"': "quot", "[": "#91", "]": "#93"}
_ESCAPES = str.maketrans({character: f"&{name};" for character, name in _ENTITIES.items()})
# The space after a combining mark that is a token, where a word goes on more often than one ends: not before a vowel of
# its own (Indian scripts), nor from a lower-case to an upper-case letter. A Tamil pulli often ends a word; it is inside
# one before letters that begin none, and between two that are equal.
_AFTER_MARK = regex.compile(
    r"(?<=\p{L}\p{M}*(?!\p{Alphabetic})\p{M}) (?=\p{L})(?!\p{InSC=Vowel_Independent})(?!(?<=\p{Ll}\p{M}+ )\p{Lu})"
    r"(?:(?<!\u0bcd )|(?=[டணறனழளலர])|(?<=(.)\u0bcd )(?=\1))"
)


def versions() -> dict[str, str]:
    """The versions that the results depend on, for the parameters of a step."""
    return {"sacremoses": version("sacremoses"), "moses": "2"}  # "moses" counts changes in this module's results


def _normaliser(lang: str) -> Callable[[str], str]:
    from sacremoses import MosesPunctNormalizer

    # In Perl, the rule that sacremoses has for German, Spanish and French applies to every language except English and
    # Czech. Those three have a different last rule, for numbers.
    quotes = MosesPunctNormalizer.DE_ES_FR_QUOTATION_FOLLOWED_BY_COMMA
    table = MosesPunctNormalizer(lang=lang, perl_parity=True)
    rules = table.substitutions
    if lang not in ("en", "cs", "cz", "de", "es", "fr"):
        rules = [*rules[:-1], *quotes, rules[-1]]
    steps: list[tuple[str | re.Pattern[str], str]] = []
    for pattern, replacement in rules:
        literal = re.escape(pattern) == pattern or pattern in {"''", '"', ' "'}
        steps.append((pattern if literal else re.compile(pattern, re.ASCII), replacement))
    # Lines without any of these are not changed.
    touched = re.compile("[\r()`´„“”–—‘’‚…«»\u00a0]|  | [:;]|''|\\d %|\"[,.]|[,.]\"").search

    def normalise(line: str) -> str:
        if not touched(line):
            return line
        line += "\n"  # as in the script
        for pattern, replacement in steps:
            if not isinstance(pattern, str):
                line = pattern.sub(replacement, line)
            elif pattern in line:
                line = line.replace(pattern, replacement)
        return line.removesuffix("\n")

    return normalise


class _Words(dict):
    """A cache of words and their results, each computed when the word first occurs."""

    def __init__(self, work: Callable[[str], object]) -> None:
        self._work = work

    def __missing__(self, word: str) -> object:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        result = self[word] = self._work(word)
        return result


def _rules(lang: str, aggressive: bool) -> list[tuple[Callable[..., str], str]]:
    """(substitute, replacement) in tokenizer.perl's order: from text to space-separated tokens, except for full stops.

    Runs of full stops have already been replaced by `_MARK`s.
    """
    colon = ":" if lang in ("fi", "sv") else ""
    rules = [(rf"([^{_ALNUM}\s.'`,\-{colon}{_MARK}])", r" \1 ")]
    if colon:  # inside words only, as in USA:n
        rules.append((r":(?!\p{Ll})", " : "))
    if aggressive:
        rules.append((rf"(?<=[{_ALNUM}])-(?=[{_ALNUM}])", " @-@ "))
    rules.append((rf"({_MARK}+)", r" \1 "))
    # A comma is a token, except between numbers: 5,300
    rules += [(rf"([^{_NUMBER}]),", r"\1 , "), (rf",([^{_NUMBER}])", r" , \1"), (rf"([{_NUMBER}]),$", r"\1 ,")]
    apart, left, right = r"\1 ' \2", r"\1 '\2", r"\1' \2"
    alpha, other = f"([{_ALPHA}])", f"([^{_ALPHA}])"
    if lang == "en":  # it 's
        rules += [(f"{other}'{other}", apart), (f"([^{_ALPHA}{_NUMBER}])'{alpha}", apart), (f"{alpha}'{other}", apart)]
        rules += [(f"{alpha}'{alpha}", left), (f"([{_NUMBER}])'(s)", left)]
    elif lang in ("fr", "it", "ga", "so"):  # l' eau; not in Somali, where it is a glottal stop
        rules += [(f"{other}'{other}", apart), (f"{other}'{alpha}", apart), (f"{alpha}'{other}", apart)]
        rules += [(f"{alpha}'{alpha}", right)] if lang != "so" else []
    else:
        rules.append(("'", " ' "))
    return [(regex.compile(pattern).sub, new) for pattern, new in rules]


def join_marks(line: str) -> str:
    """Tokens with the combining marks inside words, such as a virama, which tokenizer.perl splits off, in their words.

    A space after a word that ends with such a mark is lost if it could be one of tokenizer.perl's.
    """
    return line if line.isascii() else _AFTER_MARK.sub("", regex.sub(r" (?=\p{M})", "", line))


class _Tokeniser:
    """tokenizer.perl -l LANG [-a].

    A word here is the text between two spaces. The rules see nothing beyond it, with three exceptions: the first and
    the last word have nothing before or after them; whether a full stop at the end of a word is part of it depends on
    the next word; and if an apostrophe ends a word and another one begins the next, both rules need the space between
    them, so such a line is processed as a whole.
    """

    def __init__(self, lang: str, aggressive: bool = False, keep_last: bool = False) -> None:
        from sacremoses.corpus import NonbreakingPrefixes

        if lang in ("ca", "tdt"):
            raise ValueError(f"no tokenising of {lang!r}: tokenizer.perl has rules for it that are not here")
        # abbreviation → whether it is one only before a number
        self._prefixes = {
            line.split()[0]: line.endswith("#NUMERIC_ONLY#")
            for line in NonbreakingPrefixes().words(lang)
            if line not in _NEVER.get(lang, ())
        }
        self._rules = _rules(lang, aggressive)
        self._keep_last = keep_last
        self._first = _Words(lambda word: self._tokens(f"{word} "))
        self._inner = _Words(lambda word: self._tokens(f" {word} "))
        self._last = _Words(lambda word: self._tokens(f" {word}"))

    def __call__(self, line: str) -> str:
        if not line.isprintable():  # all white space except the space is not printable
            line = " ".join(_CONTROL.sub("", line).split())
        words = line.split()
        if len(words) < 2 or ("'" in line and "' '" in " ".join(words)):
            return cast(str, self._tokens(" ".join(words)))  # a whole line: it does not end with a space
        tokens = [self._first[words[0]], *map(self._inner.__getitem__, words[1:-1]), self._last[words[-1]]]
        if ". " in line:
            for number, token in enumerate(tokens):
                if isinstance(token, tuple):
                    together, apart, numeric = token
                    following = words[number + 1][0]
                    joined = _LOWER.match(following) or (numeric and following in "0123456789")
                    tokens[number] = together if joined else apart
        return " ".join(tokens)

    def _tokens(self, text: str) -> str | tuple[str, str, bool]:
        """The tokens of a text, escaped. If the text ends with a space, more follows, and a last full stop may be open.

        The result then has three parts: the tokens with the full stop attached to the last one, the tokens with it
        split off, and whether a following number requires the former (a following lower-case letter always does).
        """
        goes_on = text.endswith(" ")
        word = text.strip(" ")
        if word.isalpha():  # most words: no rule changes letters
            return word
        if word[:-1].isalpha() and (word[-1] == "," or (word[-1] == "." and not goes_on and not self._keep_last)):
            return f"{word[:-1]} {word[-1]}"
        text = _DOTS.sub(lambda dots: _MARK * len(dots[0]), text)
        for substitute, new in self._rules:
            text = substitute(new, text)
        words = text.split(" ")
        words = [word for word in words if word]
        tokens, numeric, still_open = [], None, False
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            tokens.append(word)
            if word[-1] != "." or word == ".":
                continue
            stem = word[:-1]
            numeric = self._prefixes.get(stem)
            known = numeric is False or ("." in stem and _HAS_ALPHA.search(stem))
            if following:
                part_of_it = known or _LOWER.match(following) or (numeric and following[0] in "0123456789")
            elif goes_on:
                part_of_it, still_open = True, not known
            else:
                part_of_it = known and self._keep_last
            if not part_of_it:
                tokens[-1] = f"{stem} ."
        if not goes_on and words and words[-1].endswith(".'"):
            tokens[-1] = f"{words[-1][:-2]} . '".lstrip()
        result = " ".join(tokens).replace(_MARK, ".").translate(_ESCAPES)
        return (result, f"{result[:-1]} .", bool(numeric)) if still_open else result


def tokeniser(
    lang: str,
    normalise: bool = False,
    remove_non_printing: bool = False,
    aggressive: bool = False,
    keep_last: bool = False,
) -> Callable[[str], str]:
    """A function that tokenises a raw line, with the requested steps in this order:

    Args:
        lang: language of the text, such as "de"
        normalise: normalize-punctuation.perl -l LANG
        remove_non_printing: remove-non-printing-char.perl
        aggressive: run tokenizer.perl -l LANG, which is always run, with -a: a-b becomes a @-@ b
        keep_last: a full stop at the end of the line stays with an abbreviation ("the U.S."), as in tokenizer.perl
            before November 2018; since then it is a separate token ("the U.S .")

    Raises:
        ValueError: the language is Catalan or Tetun.
    """
    steps: list[Callable[[str], str]] = []
    if normalise:
        steps.append(_normaliser(lang))
    if remove_non_printing:
        steps.append(lambda line: line if line.isprintable() else _NON_PRINTING.sub(" ", line))
    steps.append(_Tokeniser(lang, aggressive, keep_last))

    def prepare(line: str) -> str:
        for step in steps:
            line = step(line)
        return line

    return prepare
