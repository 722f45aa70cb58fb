"""Segments Chinese text into words by jieba, and joins them again."""

from __future__ import annotations

from collections.abc import Callable

import regex

# Chinese characters, their punctuation, full-width letters and digits.
_CHINESE = r"[\p{Han}\u3000-\u303f\uff01-\uff5e]"
_BETWEEN = regex.compile(rf"(?<={_CHINESE})\s+(?={_CHINESE})")
_NON_PRINTING = regex.compile(r"\p{C}")


def segmenter() -> Callable[[str], str]:
    """A function that segments a Chinese line into words.

    Spaces between Chinese characters are removed first: a part of CWMT is already segmented by another program.
    """
    import jieba

    jieba.setLogLevel("WARNING")
    jieba.initialize()

    def segment(line: str) -> str:
        line = _BETWEEN.sub("", _NON_PRINTING.sub(" ", line))
        return " ".join(" ".join(jieba.cut(line)).split())

    return segment


def join(line: str) -> str:
    """Join the words of a line: no space between two Chinese characters."""
    return _BETWEEN.sub("", line)
