"""Segments Chinese text into words by jieba and Japanese text by SudachiPy, and joins them again."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import regex

# Chinese and Japanese characters, their punctuation, full-width letters and digits, half-width katakana.
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\u3000-\u303f\u30fb\u30fc\uff01-\uff9f]"
_BETWEEN = regex.compile(rf"(?<={_UNSPACED})\s+(?={_UNSPACED})")
# What jieba separates and Chinese text does not. Quotation marks, ellipses, dashes and interpuncts count as Chinese,
# except beside a Latin word or a number. jieba takes letters with accents out of words: lower-case letters that follow
# one belong to its word.
_FULL_WIDTH = r"[\u3001-\u301f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]"  # punctuation
_SHARED = "[“”‘’…—·]"
_WIDE = rf"(?:{_UNSPACED}|{_SHARED})"
_ACCENTED = r"(?:(?![A-Za-z])\p{Latin})"
_CHINESE = regex.compile(
    rf"(?<={_WIDE})\s+(?={_WIDE})|(?<={_FULL_WIDTH})\s+|\s+(?={_FULL_WIDTH})"
    r"|(?<=\d)\s+(?=[,:.]\s+\d)|(?<=\d\s+[,:.])\s+(?=\d)|(?<=\w)\s+(?=-\s+\w)|(?<=\w\s+-)\s+(?=\w)"
    rf"|(?<=[A-Za-z])\s+(?={_ACCENTED})|(?<={_ACCENTED})\s+(?=[a-z])"
)
_BESIDE = regex.compile(rf"(?<={_UNSPACED})\s+|\s+(?={_UNSPACED})")
_LONGEST = 12_000  # characters that SudachiPy segments at once: it takes at most 49,149 bytes
_NON_PRINTING = regex.compile(r"\p{C}")


def _jieba() -> Callable[[str], str]:
    import jieba

    jieba.setLogLevel("WARNING")
    jieba.initialize()
    return lambda line: " ".join(jieba.cut(line))


def _sudachi() -> Callable[[str], str]:
    """Short units (mode A), which inflections and compounds have in common, as merges need."""
    import sudachidict_core  # noqa: F401 (the dictionary: SudachiPy's own error does not say what to install)
    from sudachipy import Dictionary, SplitMode

    tokenizer = Dictionary(dict="core").tokenizer(mode=SplitMode.A)
    turn = threading.Lock()  # it refuses to be used by two threads at once

    def words(line: str) -> str:
        parts = [line[start : start + _LONGEST] for start in range(0, len(line), _LONGEST)]
        with turn:
            return " ".join(word.surface() for part in parts for word in tokenizer.tokenize(part))

    return words


@dataclass(frozen=True)
class Segmenter:
    """A library that finds words.

    language: as in "Japanese is segmented by …". packages: to install.
    make: returns a function that puts spaces between the words of a line. It imports the library.
    spaces: what `join` removes. Around Latin words and numbers, Chinese text often has spaces, Japanese text has none.
    """

    language: str
    packages: tuple[str, ...]
    make: Callable[[], Callable[[str], str]]
    spaces: regex.Pattern[str]

    def segment(self) -> Callable[[str], str]:
        """A function that segments a line into words separated by single spaces.

        Spaces between two characters of the language are removed first: a part of CWMT is already segmented by another
        program. RuntimeError if the library is not installed.
        """
        try:
            words = self.make()
        except ModuleNotFoundError as error:
            names = " ".join(self.packages)
            raise RuntimeError(
                f"{self.language} is segmented by {error.name}, which is not installed: pip install {names}"
            ) from error

        def segment(line: str) -> str:
            return " ".join(words(_BETWEEN.sub("", _NON_PRINTING.sub(" ", line))).split())

        return segment

    def versions(self) -> dict[str, str]:
        """What the words depend on."""
        return {package: version(package) for package in self.packages}

    def join(self, line: str) -> str:
        """A line without the spaces between words."""
        return self.spaces.sub("", line)


Segmented = Literal["jieba", "sudachi"]
SEGMENTERS: dict[str, Segmenter] = {
    "jieba": Segmenter("Chinese", ("jieba",), _jieba, _CHINESE),
    "sudachi": Segmenter("Japanese", ("sudachipy", "sudachidict-core"), _sudachi, _BESIDE),
}
_BY_LANGUAGE: dict[str, Segmented] = {"zh": "jieba", "ja": "sudachi"}


def segmented(lang: str) -> Segmented | None:
    """The tokeniser for a language that is written without spaces; a region, as in zh_TW, does not matter."""
    return _BY_LANGUAGE.get(re.split("[-_]", lang)[0])
