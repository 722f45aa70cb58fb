"""Translating for people: lines of text in, lines of text out.

from lightconv_plugin.generation import Translator

translator = Translator("runs/iwslt14_de_en/dynamicconv/average10.pt")
print(translator.translate(["Ein kleiner Hund läuft durch das Gras."])[0].text)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightconv_plugin.generation.loading import TranslationError, open_first
from lightconv_plugin.generation.searcher import Found, Searcher, SearchSettings, check_device
from lightconv_plugin.generation.text_pipeline import build_pipeline


@dataclass(frozen=True)
class Hypothesis:
    """text: detokenised. tokens: the pieces of the target dictionary. score: as `searching.Found`."""

    text: str
    score: float
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Translation:
    """A line and what was found for it, best first.

    source: the line as it came; where it is not text, with what could be read of it.
    hypotheses: none for an empty line, and where `problem` says why the line was not translated.
    """

    source: str
    hypotheses: tuple[Hypothesis, ...] = ()
    problem: str | None = None

    @property
    def text(self) -> str:
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def score(self) -> float | None:
        return self.hypotheses[0].score if self.hypotheses else None

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.hypotheses[0].tokens if self.hypotheses else ()


class Translator:
    """Beam search with one checkpoint of a translation model, or an ensemble of several, on raw text.

    What is not given is found: dictionaries where the training had them or beside the checkpoint; merges, tokeniser and
    case in the folder that scripts/prepare_*.sh made.

    Args:
        path: a checkpoint, or several
        data: the folder of the dictionaries (data-bin)
        source_lang, target_lang: as the dictionaries' names have them
        bpe_codes: merges of subword-nmt; "none" for text that is in pieces already
        sentencepiece: its model
        tokenizer: "moses" or "none"
        lowercase: the source text also where nothing says that the training's was
        beam, lenpen, unkpen, min_len, max_len_a, max_len_b, temperature, no_repeat_ngram_size: of the search, as
            fairseq-generate has them. A translation has at most max_len_a·T + max_len_b pieces, where T is the length
            of the longest sentence in its batch
        batch_tokens: of a batch's sentences, all as long as the longest; a longer sentence is a batch of its own
        batch_size: sentences of a batch at most
        threads: cores to use; None for as many as torch has threads
        dtype: "float32", "bfloat16" or "int8"
        device: "cpu", "cuda", "cuda:1" …
        unk: what an unknown word in a translation is written as; "" leaves it out

    Raises:
        TranslationError: (a ValueError) something is not allowed, not there, or does not fit; it says what.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        data: str | Path | None = None,
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        bpe_codes: str | Path | None = None,
        sentencepiece: str | Path | None = None,
        tokenizer: str | None = None,
        lowercase: bool = False,
        beam: int = 5,
        lenpen: float = 1.0,
        unkpen: float = 0.0,
        min_len: int = 1,
        max_len_a: float = 0.0,
        max_len_b: int = 200,
        temperature: float = 1.0,
        no_repeat_ngram_size: int = 0,
        batch_tokens: int = 4096,
        batch_size: int | None = None,
        threads: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        unk: str = "<unk>",
    ) -> None:
        self._searcher: Searcher | None = None
        paths = tuple(Path(p) for p in ([path] if isinstance(path, (str, os.PathLike)) else path))
        if not paths:
            raise TranslationError("`path` must name a checkpoint, got none")
        for missing in (p for p in paths if not p.is_file()):  # all of them, before any is loaded
            raise TranslationError(f"no such checkpoint: {missing}")
        _at_least(1, beam=beam, batch_tokens=batch_tokens)
        _at_least(0, min_len=min_len, max_len_b=max_len_b, no_repeat_ngram_size=no_repeat_ngram_size)
        _at_least(1, **{name: n for name, n in (("batch_size", batch_size), ("threads", threads)) if n is not None})
        for name, number in {"lenpen": lenpen, "unkpen": unkpen, "max_len_a": max_len_a}.items():
            if not math.isfinite(number) or (name == "max_len_a" and number < 0):
                least = " from 0 on" if name == "max_len_a" else ""
                raise TranslationError(f"`{name}` must be a number{least}, got {number}")
        if not (math.isfinite(temperature) and temperature > 0):
            raise TranslationError(f"`temperature` must be positive, got {temperature}")
        if max_len_a == 0 and min_len > max_len_b:
            raise TranslationError(f"`min_len` must be at most `max_len_b` = {max_len_b}, got {min_len}")
        check_device(device, dtype)

        opened = open_first(paths[0], None if data is None else Path(data), source_lang, target_lang)
        self.source_lang, self.target_lang, self.beam = opened.source, opened.target, beam
        task = opened.task
        pipeline = build_pipeline(
            task,
            opened.data,
            bpe_codes=bpe_codes,
            sentencepiece=None if sentencepiece is None else Path(sentencepiece),
            tokenizer=tokenizer,
            lowercase=lowercase,
        )
        self._encode, self._decode, self.notes = pipeline.encode, pipeline.decode, pipeline.notes
        self._source, self._target, self._unk = task.source_dictionary, task.target_dictionary, unk
        self._batch_tokens, self._batch_size = batch_tokens, batch_size
        generator = {
            "beam_size": beam,
            "len_penalty": lenpen,
            "unk_penalty": unkpen,
            "min_len": min_len,
            "max_len_a": max_len_a,
            "max_len_b": max_len_b,
            "temperature": temperature,
            "no_repeat_ngram_size": no_repeat_ngram_size,
        }
        settings = SearchSettings(
            tuple(p.absolute() for p in paths), opened.data.absolute(), opened.source, opened.target, generator,
            dtype, device, threads,
        )  # fmt: skip
        self._searcher = Searcher(settings, opened)
        self._limits = self._searcher.limits

    def translate(
        self, lines: Iterable[str | bytes], nbest: int = 1, progress: Callable[[int], object] | None = None
    ) -> list[Translation]:
        """Translate lines, each by itself; as many translations, in the same order.

        Args:
            lines: sentences; bytes are UTF-8. A line end at the end of a line is taken off
            nbest: hypotheses of each
            progress: called with the number of lines that are done besides those before

        Raises:
            TranslationError: nbest is not in 1 … beam, or a process of the search ended. A line that cannot be
                translated raises nothing: its Translation has the `problem`.
        """
        if isinstance(lines, (str, bytes)):
            raise TypeError(f"lines must be a list of lines, got one {type(lines).__name__}")
        if not 1 <= nbest <= self.beam:
            raise TranslationError(f"`nbest` must be in 1 … `beam` = {self.beam}, got {nbest}")
        results: list[Translation] = []
        sentences: dict[int, list[int]] = {}
        for number, line in enumerate(lines):
            source, problem = _read(line)
            indices: list[int] = []
            if problem is None and source.strip():
                indices, problem = self._indices(source)
            if indices:
                sentences[number] = indices
            results.append(Translation(source, problem=problem))
        if progress is not None and len(results) > len(sentences):
            progress(len(results) - len(sentences))
        for numbers, found in self._search(sentences, nbest):
            for number, ranked in zip(numbers, found, strict=True):
                hypotheses = tuple(map(self._hypothesis, ranked))
                results[number] = Translation(results[number].source, hypotheses)
            if progress is not None:
                progress(len(numbers))
        return results

    def _indices(self, line: str) -> tuple[list[int], str | None]:
        """A sentence as the model reads it, and what is wrong with it; [] for one of which nothing is left."""
        unknown, end = self._source.unk(), self._source.eos()
        # A word such as </s> in the text is not what fairseq means by it.
        own = {self._source.pad(), self._source.bos(), end}
        indices = [unknown if i in own else i for i in map(self._source.index, self._encode(line))]
        if not indices:
            return [], None
        longest = self._limits.positions
        if len(indices) >= longest:
            if not self._limits.truncates:
                return [], f"too long: {len(indices)} pieces, the model takes {longest - 1}"
            indices = indices[: longest - 1]
        return [*indices, end], None

    def _search(self, sentences: dict[int, list[int]], nbest: int) -> Iterator[tuple[list[int], list[list[Found]]]]:
        if self._searcher is None:
            raise TranslationError("the Translator is closed")
        for batch in make_batches(sentences, self._batch_tokens, self._batch_size):
            yield batch, self._searcher.search([sentences[number] for number in batch], nbest)

    def _hypothesis(self, found: Found) -> Hypothesis:
        dictionary = self._target
        left_out = {dictionary.eos(), dictionary.bos(), dictionary.pad()}
        indices = [i for i in found.tokens if i not in left_out]
        tokens = [dictionary[i] for i in indices]
        written = [self._unk if i == dictionary.unk() else piece for i, piece in zip(indices, tokens, strict=True)]
        return Hypothesis(self._decode([piece for piece in written if piece]), found.score, tuple(tokens))

    def close(self) -> None:
        """End the processes, and let the models go; `with Translator(…) as translator:` does."""
        if self._searcher is not None:
            self._searcher.close()
        self._searcher = None

    def __enter__(self) -> Translator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def make_batches(sentences: dict[int, Sequence[int]], tokens: int, size: int | None) -> list[list[int]]:
    """The keys of sentences in batches of like lengths, the longest first.

    A batch has at most `tokens` tokens, counting each sentence as its longest, and `size` sentences, but at least one.
    The longest come first: if memory is too small, that is said at once.
    """
    batches: list[list[int]] = []
    width = 0
    for number in sorted(sentences, key=lambda number: -len(sentences[number])):
        full = not batches or (len(batches[-1]) + 1) * width > tokens or len(batches[-1]) == size
        if full:
            batches.append([])
            width = len(sentences[number])
        batches[-1].append(number)
    return batches


def _read(line: str | bytes) -> tuple[str, str | None]:
    """The text of a line, and what is wrong with it."""
    if not isinstance(line, (str, bytes)):
        raise TypeError(f"lines must be str or bytes, got {type(line).__name__}")
    problem = None
    if isinstance(line, bytes):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            text = line.decode(errors="replace")
            problem = f"not UTF-8: byte {line[error.start]:#04x} at {error.start + 1}"
    else:
        text = line
        if any("\ud800" <= character <= "\udfff" for character in line):
            problem = "not text: it has a half of a surrogate pair"
    text = text.removesuffix("\n").removesuffix("\r")
    if problem is None and "\0" in text:
        problem = "not text: it has a NUL"
    return text, problem


def _at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise TranslationError(f"`{name}` must be a whole number of at least {least}, got {number!r}")
