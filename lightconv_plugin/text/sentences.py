"""Where sentences end in running text of any length, by sentencex, which has rules for some 300 languages."""

from __future__ import annotations

import re
from collections.abc import Callable

# Characters that are waited for before sentences are cut from a line that has not ended; a sentence that is longer
# is cut. Far above the length of any sentence, so that where text is cut depends on the text alone.
LONGEST = 20_000
# The last sentences of what was read so far may end elsewhere once more is known.
_UNCERTAIN = 2
_SURROGATES = re.compile("[\ud800-\udfff]")
# Languages that put no space between sentences.
_NO_SPACE = {"zh", "ja", "yue", "wuu", "lzh", "th", "lo", "km", "my", "bo", "dz"}


def segmenter(lang: str) -> Callable[[str], list[str]]:
    """What cuts a text into sentences, white space after each one included: joined they are the text.

    lang: a code such as "de" or "de_DE"; without rules of its own, those of a related language or of English.

    Raises ModuleNotFoundError: sentencex is not installed.
    """
    import sentencex

    base = base_language(lang)

    def segment(text: str) -> list[str]:
        # Halves of surrogate pairs (bytes that are not UTF-8) cannot travel; their places are what counts.
        sentences = sentencex.segment(base, _SURROGATES.sub("\ufffd", text))
        found, begin = [], 0
        for sentence in sentences:
            found.append(text[begin : begin + len(sentence)])
            begin += len(sentence)
        if begin < len(text):
            found.append(text[begin:])
        return found

    return segment


def base_language(lang: str) -> str:
    """The language of a code with a country or a script: "zh_CN", "sr-Latn" and "pt_BR" are zh, sr and pt."""
    return re.split("[-_]", lang)[0].lower()


def separator(lang: str) -> str:
    """What stands between two sentences in this language: a space, or nothing."""
    return "" if base_language(lang) in _NO_SPACE else " "


class SentenceStream:
    """One line of text that comes in parts of any length; its sentences come out, stripped, none of them empty.

    At most about 2 · `longest` characters are kept, beside the part that was given last.

    Args:
        segment: of `segmenter`.
        longest: characters of a sentence at the most; a longer one is cut at white space, or where there is none.
    """

    def __init__(self, segment: Callable[[str], list[str]], longest: int = LONGEST):
        if longest < 1:
            raise ValueError(f"longest must be at least 1, got {longest}")
        self._segment, self._longest = segment, longest
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """The sentences that are known to have ended with this part."""
        found: list[str] = []
        self._rest += text
        while len(self._rest) >= 2 * self._longest:
            found += self._cut()
        return found

    def end(self) -> list[str]:
        """The sentences that are left at the end of the line; the next part begins another one."""
        rest, self._rest = self._rest, ""
        return [part for sentence in self._segment(rest) for part in self._short(sentence)] if rest.strip() else []

    def _cut(self) -> list[str]:
        """Take sentences, at least one, from the first 2 · longest characters.

        Never from more, so that the sentences are the same however the line comes in parts.
        """
        window = self._rest[: 2 * self._longest]
        sentences = self._segment(window)
        certain = sentences[:-_UNCERTAIN]
        if not certain:  # two or fewer sentences in all this: the first one or its beginning
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
    """A text cut at the white space nearest to its middle, or in the middle where it has none."""
    middle = len(text) // 2
    after = next((i for i in range(middle, len(text)) if text[i].isspace()), None)
    before = next((i for i in range(middle, 0, -1) if text[i].isspace()), None)
    places = [place for place in (before, after) if place is not None]
    place = min(places, key=lambda place: abs(place - middle), default=middle)
    return text[:place].strip(), text[place:].strip()


def _beginning(text: str, longest: int) -> str:
    """The first `longest` characters at the most, up to white space and with it where there is any."""
    place = next((i for i in range(longest - 1, 0, -1) if text[i].isspace()), longest - 1)
    return text[: place + 1]
