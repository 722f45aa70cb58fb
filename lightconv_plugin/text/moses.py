"""Moses' preparation of text, equal to its Perl scripts and faster: for corpora and for what is to be translated.

The rules are those of normalize-punctuation.perl, remove-non-printing-char.perl, tokenizer.perl and lowercase.perl at
moses-smt/mosesdecoder 3445289, the newest; tests/text/test_moses.py holds what they give for hard cases. sacremoses
has the table of the punctuation and the lists of abbreviations. Its tokeniser is not used:

  - The full stop that ends a line stays with an abbreviation there, as in Perl before November 2018 (`keep_last`).
  - Its letters lack Chinese, Japanese and Korean (in a line of another language each becomes a token) and what is new
    in Unicode; signs of Indian scripts that Perl splits off are letters.
  - It does not know colons inside Finnish and Swedish words, the glottal stop of Somali, the apostrophes of Irish.
  - Entries of the lists that end with a space, which match nothing in Perl, match; U+001C … U+001F are white space.
  - It applies every rule to every line. But a rule sees nothing beyond the word, with exceptions that `_Tokeniser`
    names: here rules are applied to each different word, once.

In its table of the punctuation (`perl_parity=True`) this is corrected: \\d and \\s mean ASCII, as the script reads
bytes; `."` becomes `".` at the end of a line too, as Perl sees the line feed after it; the rule for quotation marks
that it has for German, Spanish and French is that of all languages but English and Czech.

What remains different from Perl:

  - Runs of white space become one space, and none is left at the ends of a line.
  - The word DOTMULTI, which tokenizer.perl uses inside and gives back as a full stop, stays.
  - Characters that are newer than Perl's Unicode may be letters here.
  - Catalan and Tetun, which have rules of their own there, are refused.

Speed: `python -m benchmarks.tokeniser FILE --lang de [--perl tokenizer.perl]` measures one process.
Lines a second on a core with no word known yet, with all words known (as far into a large text), and by tokenizer.perl:
217,000, 285,000, 57,500 for Multi30k's German (29,000 lines); 41,000, 48,600, 9,000 for WikiText-2's long paragraphs.
That is 4 to 5 times one
Perl process on each core, so ten times one Perl process on two or three cores, forty times on eight to ten.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from itertools import zip_longest
from typing import cast

import regex

_CACHED_WORDS = 500_000  # in each process: some 100 MB

# Lines of Moses' lists that end with a space there, so that no word is ever equal to them.
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
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")  # what tokenizer.perl deletes; \t … \r are white space before that
_NON_PRINTING = regex.compile(r"\p{C}")
_ALPHA, _ALNUM, _NUMBER = r"\p{Alphabetic}", r"\p{Alphabetic}\p{Nd}", r"\p{N}"
_LOWER = regex.compile(r"\p{Lowercase}")
_HAS_ALPHA = regex.compile(f"[{_ALPHA}]")
_DOTS = re.compile(r"\.{2,}")
_MARK = "\x00"  # stands for a full stop in a run of several; the text has none
_ENTITIES = {"&": "amp", "|": "#124", "<": "lt", ">": "gt", "'": "apos", '"': "quot", "[": "#91", "]": "#93"}
_ESCAPES = str.maketrans({character: f"&{name};" for character, name in _ENTITIES.items()})


def versions() -> dict[str, str]:
    """What the results depend on besides the texts, for the parameters of a step."""
    return {"sacremoses": version("sacremoses"), "moses": "2"}  # the latter counts changes of this file's results


def lower(line: str) -> str:
    """lowercase.perl: as str.lower, but Σ is σ also at the end of a word."""
    return line.replace("Σ", "σ").lower()


def _normaliser(lang: str) -> Callable[[str], str]:
    from sacremoses import MosesPunctNormalizer

    # Every language but English and Czech has the rule that sacremoses has for German, Spanish and French; of these the
    # last rule, for numbers, is another one.
    quotes = MosesPunctNormalizer.DE_ES_FR_QUOTATION_FOLLOWED_BY_COMMA
    table = MosesPunctNormalizer(lang=lang, perl_parity=True)
    rules = table.substitutions
    if lang not in ("en", "cs", "cz", "de", "es", "fr"):
        rules = [*rules[:-1], *quotes, rules[-1]]
    steps: list[tuple[str | re.Pattern[str], str]] = []
    for pattern, replacement in rules:
        literal = re.escape(pattern) == pattern or pattern in {"''", '"', ' "'}
        steps.append((pattern if literal else re.compile(pattern, re.ASCII), replacement))
    # Nothing happens to a line without any of these.
    touched = re.compile("[\r()`´„“”–—‘’‚…«»\u00a0]|  | [:;]|''|\\d %|\"[,.]|[,.]\"").search

    def normalise(line: str) -> str:
        if not touched(line):
            return line
        line += "\n"  # the script has it there
        for pattern, replacement in steps:
            if not isinstance(pattern, str):
                line = pattern.sub(replacement, line)
            elif pattern in line:
                line = line.replace(pattern, replacement)
        return line.removesuffix("\n")

    return normalise


class _Words(dict):
    """The words of a text with what becomes of them, worked out when a word is first met."""

    def __init__(self, work: Callable[[str], object]) -> None:
        self._work = work

    def __missing__(self, word: str) -> object:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        result = self[word] = self._work(word)
        return result


def _rules(lang: str, aggressive: bool) -> list[tuple[Callable[..., str], str]]:
    """(substitute, by what) in tokenizer.perl's order: from a text to tokens between spaces; the full stops come later.

    A run of full stops is `_MARK`s already.
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


class _Tokeniser:
    """tokenizer.perl -l LANG [-a].

    A word here is what is between two spaces. The rules see nothing beyond it, with three exceptions: the first and the
    last word have nothing before or behind them; whether the full stop that ends a word is part of it depends on what
    comes next; and where an apostrophe ends a word and another one begins the next, both want the one space between
    them, so that such a line is done as a whole.
    """

    def __init__(self, lang: str, aggressive: bool = False, keep_last: bool = False) -> None:
        from sacremoses.corpus import NonbreakingPrefixes

        if lang in ("ca", "tdt"):
            raise ValueError(f"no tokenising of {lang!r}: tokenizer.perl has rules for it that are not here")
        # abbreviation: whether it is one before a number only
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
        if not line.isprintable():  # so is all white space but the space
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
        """The tokens of a text, escaped. A text that ends with a space goes on: there the last full stop may be open.

        Then the result has three parts: the tokens with the full stop at the last one, those with it apart, and whether
        a number next makes it the former (a lower-case letter always does).
        """
        goes_on = text.endswith(" ")
        word = text.strip(" ")
        if word.isalpha():  # most of the different words: no rule touches letters
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
    lowercase: bool = False,
    normalise: bool = False,
    remove_non_printing: bool = False,
    aggressive: bool = False,
    lowercase_first: bool = False,
    keep_last: bool = False,
) -> Callable[[str], str]:
    """What turns a raw line into a tokenised one, by the steps that are asked for, in this order:

    Args:
        lang: of the text, such as "de"
        lowercase_first: lowercase.perl before anything else, as Multi30k's authors do
        normalise: normalize-punctuation.perl -l LANG
        remove_non_printing: remove-non-printing-char.perl
        aggressive: tokenizer.perl -l LANG, which is always done, with -a: a-b becomes a @-@ b
        lowercase: lowercase.perl at the end, as fairseq's IWSLT script does
        keep_last: as tokenizer.perl did before November 2018, a full stop at the end of the line stays with a word that
            is an abbreviation ("the U.S."); it is a token of its own since then ("the U.S .")

    Raises:
        ValueError: the language is Catalan or Tetun.
    """
    steps: list[Callable[[str], str]] = []
    if lowercase_first:
        steps.append(lower)
    if normalise:
        steps.append(_normaliser(lang))
    if remove_non_printing:
        steps.append(lambda line: line if line.isprintable() else _NON_PRINTING.sub(" ", line))
    steps.append(_Tokeniser(lang, aggressive, keep_last))
    if lowercase:
        steps.append(lower)

    def prepare(line: str) -> str:
        for step in steps:
            line = step(line)
        return line

    return prepare
