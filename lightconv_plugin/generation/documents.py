"""Translates running text of any length in constant memory: it is cut into sentences, translated and joined again."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lightconv_plugin.generation.translations import Translation
from lightconv_plugin.text.sentences import LONGEST, SentenceStream, halves

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Part:
    """A sentence of a text, or a part of one that is too long for the model; an empty line is one empty part.

    line: the line's number, from 1. source: bytes if they are not UTF-8. first, last: whether it is the first or the
    last part of its line. cut: whether it is the first part of a sentence that was cut.
    """

    line: int
    source: str | bytes
    first: bool
    last: bool
    cut: bool


@dataclass(frozen=True)
class TranslatedPart:
    """written: what this part adds to the translated text, including the space before it or the line end after it."""

    part: Part
    translation: Translation
    written: str


def parts(
    chunks: Iterable[str | bytes],
    segment: Callable[[str], list[str]],
    fit: Callable[[str], list[str]],
    longest: int = LONGEST,
) -> Iterator[Part]:
    """The sentences of a text that comes in chunks of any length, which need not end at a line end.

    segment: from text.sentences.segmenter. longest: see SentenceStream.
    fit: splits a sentence into parts that the model accepts.
    """
    stream, number, first, pending = SentenceStream(segment, longest), 1, True, None

    def taken(sentences: list[str]) -> Iterator[Part]:
        """All parts so far except the last one: only the next part shows whether the line continues."""
        nonlocal pending, first
        for sentence in sentences:
            pieces = [sentence] if _SURROGATE.search(sentence) else fit(sentence)
            for index, piece in enumerate(pieces):
                if pending is not None:
                    yield Part(number, _source(pending[0]), first, False, pending[1])
                    first = False
                pending = piece, index == 0 and len(pieces) > 1

    begun = False  # whether the current line has text
    for text in _decoded(chunks):
        *ended, rest = text.split("\n")
        for line in ended:
            yield from taken(stream.feed(line))
            yield from taken(stream.end())
            yield Part(number, _source(pending[0]) if pending else "", first, True, bool(pending and pending[1]))
            number, first, pending, begun = number + 1, True, None, False
        if rest:
            begun = True
            yield from taken(stream.feed(rest))
    if begun:
        yield from taken(stream.end())
        yield Part(number, _source(pending[0]) if pending else "", first, True, bool(pending and pending[1]))


def translate_document(
    sentences: Iterable[Part], translate: Callable[[Iterator[str | bytes]], Iterable[Translation]], space: str
) -> Iterator[TranslatedPart]:
    """The parts with their translations. translate: as Translator.translate_stream. space: between two sentences."""
    waiting = deque[Part]()

    def sources() -> Iterator[str | bytes]:
        for part in sentences:
            waiting.append(part)
            yield part.source

    empty = True  # nothing of this line has been written yet
    for translation in translate(sources()):
        part = waiting.popleft()
        text = translation.text
        written = ("" if empty or not text else space) + text + ("\n" if part.last else "")
        empty = part.last or (empty and not text)
        yield TranslatedPart(part, translation, written)


def fit(text: str, too_long: Callable[[str], bool]) -> list[str]:
    """Split a text into parts that are not too long, cutting at white space near the middle."""
    if len(text) < 2 or not too_long(text):
        return [text]
    return [part for half in halves(text) for part in fit(half, too_long)]


def _decoded(chunks: Iterable[str | bytes]) -> Iterator[str]:
    """The text without a byte order mark; bytes that are not UTF-8 become lone surrogates."""
    if isinstance(chunks, (str, bytes)):
        raise TypeError(f"chunks must be the parts of a text, such as an open file, got one {type(chunks).__name__}")
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    begun = False
    for chunk in chunks:
        text = decoder.decode(chunk) if isinstance(chunk, bytes) else chunk
        if text:
            yield text if begun else text.removeprefix("\ufeff")
            begun = True
    if rest := decoder.decode(b"", final=True):
        yield rest


def _source(text: str) -> str | bytes:
    """The text, or the original bytes if they are not UTF-8."""
    if not _SURROGATE.search(text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that was in the text itself
        return text
