"""Whether binarised data are whole: fairseq itself notices a file that was cut short in the middle of a training."""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"MMIDIDX\0\0"  # of the one format that fairseq-preprocess writes unless it is told otherwise
_HEADER = struct.Struct("<9sQBQ")  # the magic, a version, the code of the type, the number of sentences
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2, 9: 4, 10: 8}  # of a token, by fairseq's codes of types


def check_data(data: Path) -> None:
    """Compare the sizes of all texts in a folder with what their indices say; a few bytes of each are read.

    Raises:
        ValueError: a file is cut short or missing; the text names it.
    """
    for index in sorted(data.glob("*.idx")):
        if problem := _problem(index):
            raise ValueError(f"{problem}: remove {data} and run the preparation again")


def _problem(index: Path) -> str:
    """What is wrong with a text; empty where nothing is, or where its format is another one."""
    size, text = index.stat().st_size, index.with_suffix(".bin")
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
        if not header.startswith(_MAGIC[: len(header)]):
            return ""
        if len(header) < _HEADER.size:
            return f"{index} is cut short"
        _, _, code, sentences = _HEADER.unpack(header)
        # The lengths of all sentences, then where each begins in the text.
        if size != _HEADER.size + 12 * sentences:
            return f"{index} is cut short: {size:,} bytes, with {sentences:,} sentences it has more"
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
