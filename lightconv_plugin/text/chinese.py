"""Chinese text divided into words by jieba, and put together again."""

from __future__ import annotations

from collections.abc import Callable

import regex

# Characters, their punctuation, full-width letters and digits.
_CHINESE = r"[\p{Han}\u3000-\u303f\uff01-\uff5e]"
_BETWEEN = regex.compile(rf"(?<={_CHINESE})\s+(?={_CHINESE})")
_NON_PRINTING = regex.compile(r"\p{C}")


def segmenter() -> Callable[[str], str]:
    """What divides a Chinese line into words.

    Spaces between Chinese characters go first: a part of CWMT comes divided already, by another program.
    """
    import jieba

    jieba.setLogLevel("WARNING")
    jieba.initialize()

    def segment(line: str) -> str:
        line = _BETWEEN.sub("", _NON_PRINTING.sub(" ", line))
        return " ".join(" ".join(jieba.cut(line)).split())

    return segment


def join(line: str) -> str:
    """The words of a line as Chinese is written: no space between two Chinese characters."""
    return _BETWEEN.sub("", line)
