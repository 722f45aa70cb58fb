"""From words to subwords and back: byte-pair encoding by subword-nmt, or sentencepiece."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, cast

Subwords = Literal["bpe", "sentencepiece", "words"]
MARKS = {"bpe": "@@", "sentencepiece": "\u2581"}
"""The marks that show a dictionary's kind of subwords: at the end of a non-final piece, or at the start of a word."""

NO_MERGES = "#version: 0.2\n"  # what subword-nmt writes where no pair of symbols occurs twice

# Pieces of a sentencepiece model with byte_fallback: the bytes of characters that are not in its vocabulary.
_BYTES = re.compile(r"(?<!\S)(<0x[0-9A-F]{2}>(?: <0x[0-9A-F]{2}>)*)(?!\S)")
_NO_BYTES = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of bytes that are not UTF-8

_FITS = 0.95  # of a dictionary's pieces: a few may be from elsewhere, such as tags or words that had a mark in the text
_CACHED_WORDS = 1_000_000  # in each process; subword-nmt itself would cache every different word


def kind_of(pieces: Iterable[str]) -> Subwords:
    """The kind of entries in a dictionary: "bpe", "sentencepiece" or "words".

    Any dictionary may have a few entries with a mark, such as words from web text: one in a hundred is required.
    """
    total = 0
    marked = dict.fromkeys(MARKS, 0)
    for total, piece in enumerate(pieces, 1):  # noqa: B007
        marked["bpe"] += piece.endswith(MARKS["bpe"])
        marked["sentencepiece"] += piece.startswith(MARKS["sentencepiece"])
    kind = max(marked, key=marked.__getitem__)
    return cast(Subwords, kind) if marked[kind] * 100 >= max(total, 1) else "words"


def read_merges(codes: Path, content: bytes | None = None) -> Any:
    """subword-nmt's encoder (`apply_bpe.BPE`) with the merges of `codes`, which may be none. content: of that file, if
    it has been read before.

    Raises:
        ValueError: it is not a file of merges. OSError: it cannot be read.
    """
    from subword_nmt.apply_bpe import BPE

    try:
        content = Path(codes).read_bytes() if content is None else content
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
        if text == NO_MERGES:
            bpe = BPE(io.StringIO(f"{text}a b\n"))  # it fails without a merge
            bpe.bpe_codes = {}
            return bpe
        return BPE(io.StringIO(text))
    except (SystemExit, ValueError, IndexError) as error:  # subword-nmt exits at a line that is not a merge
        raise ValueError(f"{codes} is not a file of merges as `subword-nmt learn-bpe` writes it") from error


def bpe_encoder(codes: Path, content: bytes | None = None) -> Callable[[str], str]:
    """A function that encodes a tokenised line with the merges of `codes`, like `subword-nmt apply-bpe -c codes`.
    content: of that file, if it has been read before.

    Raises:
        ValueError: it is not a file of merges. OSError: it cannot be read.
    """
    bpe = read_merges(codes, content)

    def encode(line: str) -> str:
        if len(bpe.cache) > _CACHED_WORDS:
            bpe.cache = {}  # another thread may be reading the old one
        return bpe.process_line(line)

    return encode


def sentencepiece_encoder(model: Path, content: bytes | None = None) -> Callable[[str], str]:
    """A function that encodes a line by a sentencepiece model; spaces separate the pieces. content: of that file, if it
    has been read before.

    Raises:
        ValueError: the file is not a sentencepiece model. OSError: it cannot be read.
    """
    processor = _processor(model, content)
    return lambda line: " ".join(processor.EncodeAsPieces(line))


def _processor(model: Path, content: bytes | None = None) -> Any:
    import sentencepiece

    content = Path(model).read_bytes() if content is None else content
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise ValueError(f"{model} is not a model of sentencepiece") from error
    if not processor.GetPieceSize():  # what some versions return for an empty file
        raise ValueError(f"{model} is not a model of sentencepiece")
    return processor


def fits(file: Path, kind: Subwords, entries: Iterable[str]) -> bool:
    """Whether merges or a sentencepiece model make (nearly) all pieces of a dictionary, which may have fewer than they
    make. Only marked pieces count: others may be characters that the file does not know.

    Raises:
        ValueError: the file is not of this kind. OSError: it cannot be read.
    """
    mark = MARKS[kind]
    if kind == "bpe":
        made = {f"{first}{second}{mark}" for first, second in read_merges(file).bpe_codes}
        marked = [entry for entry in entries if entry.endswith(mark) and len(entry) > len(mark) + 1]
    else:
        processor = _processor(file)
        made = {processor.IdToPiece(number) for number in range(processor.GetPieceSize())}
        marked = [entry for entry in entries if entry.startswith(mark)]
    return sum(entry in made for entry in marked) >= _FITS * len(marked)


def join(pieces: Iterable[str], kind: str) -> str:
    """Join pieces into space-separated words; `kind` is as returned by `kind_of`.

    A non-final BPE piece is joined to the next one, whatever that is; at the end of the sentence, only its mark is
    removed. Bytes of sentencepiece become characters, and U+FFFD where they are not UTF-8, as in sentencepiece, but a
    byte that would end the line becomes a space.
    """
    line = " ".join(pieces)
    if kind == "sentencepiece":
        parts = _BYTES.split(line)  # every second one is of bytes
        parts[::2] = [part.replace(" ", "").replace(MARKS[kind], " ") for part in parts[::2]]
        parts[1::2] = map(_characters, parts[1::2])
        return "".join(parts).strip()
    if kind == "bpe":
        return f"{line} ".replace("@@ ", "").rstrip()
    return line


def _characters(pieces: str) -> str:
    """ "<0xC3> <0xA9>" → "é"."""
    text = bytes(int(piece[3:5], 16) for piece in pieces.split()).decode("utf-8", "surrogateescape")
    return _NO_BYTES.sub("\ufffd", text).replace("\n", " ").replace("\r", " ")
