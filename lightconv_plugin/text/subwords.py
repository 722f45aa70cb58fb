"""From words to subwords and back: byte-pair encoding by subword-nmt, or sentencepiece."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, cast

Subwords = Literal["bpe", "sentencepiece", "words"]
MARKS = {"bpe": "@@", "sentencepiece": "\u2581"}
"""The marks that show a dictionary's kind of subwords: at the end of a non-final piece, or at the start of a word."""

NO_MERGES = "#version: 0.2\n"  # what subword-nmt writes where no pair of symbols occurs twice

_CACHED_WORDS = 1_000_000  # in each process; subword-nmt itself would cache every different word


def kind_of(pieces: Iterable[str]) -> Subwords:
    """The kind of entries in a dictionary: "bpe", "sentencepiece" or "words".

    Any dictionary may have a few entries with a mark, such as words from web text: one in a hundred is required.
    """
    total = 0
    marked = dict.fromkeys(MARKS, 0)
    for total, piece in enumerate(pieces, 1):  # noqa: B007
        marked["bpe"] += piece.endswith(MARKS["bpe"]) and len(piece) > len(MARKS["bpe"])
        marked["sentencepiece"] += piece.startswith(MARKS["sentencepiece"])
    kind = max(marked, key=marked.__getitem__)
    return cast(Subwords, kind) if marked[kind] * 100 >= max(total, 1) else "words"


def read_merges(codes: Path) -> Any:
    """subword-nmt's encoder (`apply_bpe.BPE`) with the merges of `codes`, which may be none.

    Raises:
        ValueError: it is not a file of merges. OSError: it cannot be read.
    """
    from subword_nmt.apply_bpe import BPE

    try:
        text = Path(codes).read_text(encoding="utf-8")
        if text == NO_MERGES:
            bpe = BPE(io.StringIO(f"{text}a b\n"))  # it fails without a merge
            bpe.bpe_codes = {}
            return bpe
        return BPE(io.StringIO(text))
    except (SystemExit, ValueError, IndexError) as error:  # subword-nmt exits at a line that is not a merge
        raise ValueError(f"{codes} is not a file of merges as `subword-nmt learn-bpe` writes it") from error


def bpe_encoder(codes: Path) -> Callable[[str], str]:
    """A function that encodes a tokenised line with the merges of `codes`, like `subword-nmt apply-bpe -c codes`.

    Raises:
        ValueError: it is not a file of merges. OSError: it cannot be read.
    """
    bpe = read_merges(codes)

    def encode(line: str) -> str:
        if len(bpe.cache) > _CACHED_WORDS:
            bpe.cache.clear()
        return bpe.process_line(line)

    return encode


def sentencepiece_encoder(model: Path) -> Callable[[str], str]:
    """A function that encodes a line by a sentencepiece model; spaces separate the pieces.

    Raises:
        ValueError: the file is not a sentencepiece model. OSError: it cannot be read.
    """
    import sentencepiece

    content = Path(model).read_bytes()
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise ValueError(f"{model} is not a model of sentencepiece") from error
    if not processor.GetPieceSize():  # what some versions return for an empty file
        raise ValueError(f"{model} is not a model of sentencepiece")
    return lambda line: " ".join(processor.EncodeAsPieces(line))


def join(pieces: Iterable[str], kind: str) -> str:
    """Join pieces into space-separated words; `kind` is as returned by `kind_of`.

    A non-final BPE piece is joined to the next one, whatever that is; at the end of the sentence, only its mark is
    removed.
    """
    line = " ".join(pieces)
    if kind == "sentencepiece":
        return line.replace(" ", "").replace(MARKS[kind], " ").strip()
    if kind == "bpe":
        return f"{line} ".replace("@@ ", "").rstrip()
    return line
