"""Splits running text of any length into sentences by sentencex, which has rules for about 300 languages."""

from __future__ import annotations

import re
from collections.abc import Callable

# The longest sentence in characters; a longer one is cut. Twice as many are read before an unfinished line is split.
# This is far more than any real sentence, so that the places of cuts depend only on the text.
LONGEST = 20_000
# More text may change where the last sentences end.
_UNCERTAIN = 2
_SURROGATES = re.compile("[\ud800-\udfff]")
# Languages without a space between sentences.
_NO_SPACE = {"zh", "ja", "yue", "wuu", "lzh", "th", "lo", "km", "my", "bo", "dz"}


def segmenter(lang: str) -> Callable[[str], list[str]]:
    """A function that splits a text into sentences, each with the white space after it: joined, they are the text.

    lang: a code such as "de" or "de_DE"; a language without rules uses those of a related language or of English.

    Raises ModuleNotFoundError: sentencex is not installed.
    """
    import sentencex

    base = base_language(lang)

    def segment(text: str) -> list[str]:
        # Lone surrogates (bytes that are not UTF-8) cannot be passed to sentencex, so they are replaced. Only the
        # positions of the cuts matter.
        sentences = sentencex.segment(base, _SURROGATES.sub("\ufffd", text))
        complete, begin = [], 0
        for sentence in sentences:
            complete.append(text[begin : begin + len(sentence)])
            begin += len(sentence)
        if begin < len(text):
            complete.append(text[begin:])
        return complete

    return segment


def base_language(lang: str) -> str:
    """The language of a code with a country or a script: "zh_CN", "sr-Latn" and "pt_BR" are zh, sr and pt."""
    return re.split("[-_]", lang)[0].lower()


def separator(lang: str) -> str:
    """The separator between sentences in this language: a space, or nothing."""
    return "" if base_language(lang) in _NO_SPACE else " "


class SentenceStream:
    """Splits one line of text, given in parts of any length, into stripped, non-empty sentences.

    At most about 2 · `longest` characters are kept, in addition to the last part.

    Args:
        segment: from `segmenter`.
        longest: maximum number of characters of a sentence; a longer one is cut, at white space if there is any.
    """

    def __init__(self, segment: Callable[[str], list[str]], longest: int = LONGEST):
        if longest < 1:
            raise ValueError(f"longest must be at least 1, got {longest}")
        self._segment, self._longest = segment, longest
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Add a part; returns the sentences that are now complete."""
        complete: list[str] = []
        self._rest += text
        while len(self._rest) >= 2 * self._longest:
            complete += self._cut()
        return complete

    def end(self) -> list[str]:
        """End the line; returns its remaining sentences. The next part begins a new line."""
        rest, self._rest = self._rest, ""
        return [part for sentence in self._segment(rest) for part in self._short(sentence)]

    def _cut(self) -> list[str]:
        """Take at least one sentence from the first 2 · longest characters.

        Never more are used, so that the sentences do not depend on how the line is divided into parts.
        """
        window = self._rest[: 2 * self._longest]
        sentences = self._segment(window)
        certain = sentences[:-_UNCERTAIN]
        if not certain:  # at most two sentences in the window: take the first one or its beginning
            certain = sentences[:1] if len(sentences) > 1 else [_beginning(window, self._longest)]
        self._rest = self._rest[sum(map(len, certain)) :]
        return [part for sentence in certain for part in self._short(sentence)]

    def _short(self, sentence: str) -> list[str]:
        parts = []
        while len(sentence) > self._longest:
            part = _beginning(sentence, self._longest)
            parts.append(part)
            sentence = sentence[len(part) :]
        return [stripped for part in (*parts, sentence) if (stripped := part.strip())]


def halves(text: str) -> tuple[str, str]:
    """A text cut at the white space nearest to its middle, or in the middle if it has none."""
    middle = len(text) // 2
    after = next((i for i in range(middle, len(text)) if text[i].isspace()), None)
    before = next((i for i in range(middle, 0, -1) if text[i].isspace()), None)
    places = [place for place in (before, after) if place is not None]
    place = min(places, key=lambda place: abs(place - middle), default=middle)
    return text[:place].strip(), text[place:].strip()


def _beginning(text: str, longest: int) -> str:
    """At most the first `longest` characters, up to and including the last white space if there is any."""
    place = next((i for i in range(longest - 1, 0, -1) if text[i].isspace()), longest - 1)
    return text[: place + 1]
