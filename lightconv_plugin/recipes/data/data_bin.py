"""Checks that binarised data are complete: fairseq itself only notices a truncated file in the middle of a training.

And what the indices tell: numbers of sentences, and their lengths.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Set
from pathlib import Path

_MAGIC = b"MMIDIDX\0\0"  # of fairseq-preprocess's default format
_HEADER = struct.Struct("<9sQBQ")  # magic, version, dtype code, number of sentences
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2, 9: 4, 10: 8}  # bytes per token, by fairseq's dtype codes


def check_data(data: Path) -> None:
    """Compare the file sizes of all texts in a folder with their indices; only a few bytes of each are read.

    Raises:
        ValueError: a file is truncated or missing; the message names it.
    """
    for index in sorted(data.glob("*.idx")):
        if problem := _problem(index):
            raise ValueError(f"{problem}: remove {data} and run the preparation again")


def count_sentences(index: Path) -> int | None:
    """The number of sentences of a text; None if it is missing, truncated or in another format."""
    if not index.is_file():
        return None
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    return _HEADER.unpack(header)[3] if header.startswith(_MAGIC) and len(header) == _HEADER.size else None


def count_longer(data: Path, subset: str, languages: Set[str | None], fewest: int, most: int) -> tuple[int, int]:
    """(how many pairs have more than `fewest` tokens on their longer side and at most `most`, all pairs) of a subset.

    The end of a sentence is a token, as in fairseq. A text without pairs, or in another format, has none.

    languages: of the pairs; with None among them, pairs of all languages.
    """
    import numpy as np

    sides = defaultdict(list)
    for index in sorted(data.glob(f"{subset}.*-*.*.idx")):
        pair = index.name.removeprefix(f"{subset}.").partition(".")[0]
        if (None in languages or languages == set(pair.split("-"))) and (sentences := count_sentences(index)):
            lengths = np.fromfile(index, "<i4", sentences, offset=_HEADER.size)
            sides[index.name.rsplit(".", 2)[0]].append(lengths)
    longer = [np.maximum(*texts) for texts in sides.values() if len(texts) == 2 and len({*map(len, texts)}) == 1]
    return sum(int(((fewest < pairs) & (pairs <= most)).sum()) for pairs in longer), sum(map(len, longer))


def _problem(index: Path) -> str:
    """What is wrong with a text; empty if it is complete or in another format."""
    size, text = index.stat().st_size, index.with_suffix(".bin")
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
        if not header.startswith(_MAGIC[: len(header)]):
            return ""
        if len(header) < _HEADER.size:
            return f"{index} is cut short"
        _, _, code, sentences = _HEADER.unpack(header)
        # The lengths of all sentences, then their offsets in the text.
        if size != _HEADER.size + 12 * sentences:
            return f"{index} is cut short: {size:,} bytes, too few for {sentences:,} sentences"
        if not text.is_file():
            return f"{text} is missing"
        if not sentences or code not in _BYTES:
            return ""
        file.seek(_HEADER.size + 4 * (sentences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(size - 8)
        (begin,) = struct.unpack("<q", file.read(8))
    expected, found = begin + length * _BYTES[code], text.stat().st_size
    return f"{text} is cut short: {found:,} bytes of {expected:,}" if found < expected else ""
