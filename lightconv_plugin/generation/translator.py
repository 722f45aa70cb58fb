"""Translates raw text: lines of text in, lines of text out.

from lightconv_plugin.generation import Translator

translator = Translator("exported/iwslt14_de_en")                           # from lightconv export
translator = Translator("runs/iwslt14_de_en/dynamicconv/average10.pt")       # with fairseq
print(translator.translate(["Ein kleiner Hund läuft durch das Gras."])[0].text)
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation import AUTO
from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.generation.directories import open_directories
from lightconv_plugin.generation.documents import TranslatedPart, fit, parts, translate_document
from lightconv_plugin.generation.dtypes import fastest_type, slow_type
from lightconv_plugin.generation.given import GivenScorer, score_given
from lightconv_plugin.generation.native import not_covered, why_not
from lightconv_plugin.generation.searcher import Found, Searcher, SearchSettings, check_device
from lightconv_plugin.generation.threads import torch_threads
from lightconv_plugin.generation.translation_models import TranslationModels
from lightconv_plugin.generation.translations import Hypothesis, Translation, read_line
from lightconv_plugin.text.sentences import segmenter, separator

WINDOW = 2000  # lines of a stream that are read before any is translated: enough for batches of similar lengths
_TOO_LONG = "too long"


class Translator:
    """Beam search with one translation model, or an ensemble of several, on raw text.

    A directory made by `lightconv export` contains everything, and fairseq is not imported. For fairseq checkpoints,
    what is not given is searched for: dictionaries where the training had them or beside the checkpoint; merges,
    tokeniser and case in the folder that `lightconv prepare` made.

    Args:
        path: an exported directory or a checkpoint, or several of the same kind
        data: the folder of a checkpoint's dictionaries (data-bin)
        source_lang, target_lang: as in the names of the dictionaries
        bpe_codes: merges of subword-nmt; "none" for text that is already split. This and the next three are for
            checkpoints only: an exported directory defines how its text is prepared
        sentencepiece: a sentencepiece model
        tokenizer: "moses" or "none"
        lowercase: lower-case the source text even if nothing says that the training text was
        beam, lenpen, unkpen, min_len, max_len_a, max_len_b, temperature, no_repeat_ngram_size: options of the search,
            as in fairseq-generate. A translation has at most max_len_a·T + max_len_b pieces, where T is the length of
            the longest sentence in its batch. For beam, lenpen, min_len, max_len_b and no_repeat_ngram_size, None means
            the value in the exported directory, or 5, 1, 1, 200 and 0 for checkpoints
        batch_tokens: maximum tokens of a batch, counting each sentence as the longest; a longer sentence is a batch of
            its own
        batch_size: maximum number of sentences in a batch
        threads: cores to use; None for as many as torch has threads. Torch's own number is the same again after a
            call
        dtype: "float32", "bfloat16", "int8", or "auto" (also None): int8 for a directory with 8-bit weights, otherwise
            the fastest on this CPU for models of this size, see generation/dtypes.py
        device: "cpu", "cuda", "cuda:1" …
        cuda_graphs: capture the steps of the search in CUDA graphs; for a GPU
        unk: what to write for an unknown word in a translation; "" omits it

    Raises:
        TranslationError: (a ValueError) something is not valid, is missing, or does not match; the message says what.
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
        beam: int | None = None,
        lenpen: float | None = None,
        unkpen: float = 0.0,
        min_len: int | None = None,
        max_len_a: float = 0.0,
        max_len_b: int | None = None,
        temperature: float = 1.0,
        no_repeat_ngram_size: int | None = None,
        batch_tokens: int = 4096,
        batch_size: int | None = None,
        threads: int | None = None,
        dtype: str | None = "auto",
        device: str = "cpu",
        cuda_graphs: bool = False,
        unk: str = "<unk>",
    ) -> None:
        self._searcher: Searcher | None = None
        paths = tuple(Path(p) for p in ([path] if isinstance(path, (str, os.PathLike)) else path))
        if not paths:
            raise TranslationError("`path` must name a model, got none")
        for missing in (p for p in paths if not p.exists()):  # check all of them before loading any
            raise TranslationError(f"no such checkpoint or exported directory: {missing}")
        _at_least(1, batch_tokens=batch_tokens, **_given(beam=beam, batch_size=batch_size, threads=threads))
        lengths = _given(min_len=min_len, max_len_b=max_len_b)
        _at_least(0, **lengths, **_given(no_repeat_ngram_size=no_repeat_ngram_size))
        for name, number in _given(lenpen=lenpen, unkpen=unkpen, max_len_a=max_len_a).items():
            if not math.isfinite(number) or (name == "max_len_a" and number < 0):
                least = " of at least 0" if name == "max_len_a" else ""
                raise TranslationError(f"`{name}` must be a number{least}, got {number}")
        if not (math.isfinite(temperature) and temperature > 0):
            raise TranslationError(f"`temperature` must be positive, got {temperature}")
        named = None if dtype == AUTO else dtype
        check_device(device, named or "float32", cuda_graphs)

        about_checkpoints = _given(data=data, bpe_codes=bpe_codes, sentencepiece=sentencepiece, tokenizer=tokenizer)
        if lowercase:
            about_checkpoints["lowercase"] = True
        opened = _open(paths, source_lang, target_lang, about_checkpoints)
        min_len, max_len_b = lengths.get("min_len", opened.min_len), lengths.get("max_len_b", opened.max_len_b)
        if max_len_a == 0 and min_len > max_len_b:
            raise TranslationError(f"`min_len` must be at most `max_len_b` = {max_len_b}, got {min_len}")
        self.source_lang, self.target_lang = opened.source_lang, opened.target_lang
        self.beam = opened.beam if beam is None else beam
        self._opened, self.notes, self._unk = opened, opened.pipeline.notes, unk
        self._batch_tokens, self._batch_size = batch_tokens, batch_size
        words = opened.target
        options = SearchOptions(
            pad=words.pad(),
            unk=words.unk(),
            eos=words.eos(),
            beam_size=self.beam,
            min_len=min_len,
            len_penalty=opened.lenpen if lenpen is None else lenpen,
            unk_penalty=unkpen,
            temperature=temperature,
            no_repeat_ngram_size=opened.no_repeat_ngram_size if no_repeat_ngram_size is None else no_repeat_ngram_size,
        )
        self._options, self._device, self._threads = options, device, threads
        self.dtype, self.dtype_reason = named or "", "as requested"
        if named is None:
            self.dtype, self.dtype_reason = _automatic(opened, device)
        elif (warning := slow_type(named, device)) is not None:
            self.notes = (*self.notes, warning)
        settings = SearchSettings(options, max_len_a, max_len_b, self.dtype, device, threads, cuda_graphs)
        self._searcher = Searcher(opened.models, settings)

    def translate(
        self,
        lines: Iterable[str | bytes],
        nbest: int = 1,
        progress: Callable[[int], object] | None = None,
        finished: Callable[[int, Translation], object] | None = None,
    ) -> list[Translation]:
        """Translate each line separately. Returns one translation per line, in the same order.

        Args:
            lines: sentences; bytes are UTF-8. A line end at the end of a line is removed
            nbest: number of hypotheses per line
            progress: called with the number of lines that were finished since the previous call
            finished: called with the number of each line, from 0, and its translation, as soon as it is found

        Raises:
            TranslationError: nbest is not in 1 … beam. A line that cannot be translated raises nothing: its Translation
                has the `problem`.
        """
        self._check_lines(lines, nbest)
        results: dict[int, Translation] = {}
        for group in self._translated(lines, nbest):
            results.update(group)
            if finished is not None:
                for number, translation in group.items():
                    finished(number, translation)
            if progress is not None and group:
                progress(len(group))
        return [results[number] for number in range(len(results))]

    def translate_stream(
        self, lines: Iterable[str | bytes], nbest: int = 1, *, window: int = WINDOW
    ) -> Iterator[Translation]:
        """Translate any number of lines. Yields their translations, in the same order.

        lines: as for `translate`; `window` of them are read at a time and divided into batches. Raises the errors of
        `translate`; for wrong arguments immediately.
        """
        self._check_lines(lines, nbest)
        _at_least(1, window=window)
        return self._stream(iter(lines), nbest, window)

    def _stream(self, lines: Iterator[str | bytes], nbest: int, window: int) -> Iterator[Translation]:
        while some := list(islice(lines, window)):
            ready: dict[int, Translation] = {}
            following = 0
            for group in self._translated(some, nbest):
                ready.update(group)
                while following in ready:
                    yield ready.pop(following)
                    following += 1

    def translate_document(self, chunks: Iterable[str | bytes], *, window: int = WINDOW) -> Iterator[TranslatedPart]:
        """Translate running text of any length in constant memory: each line is cut into sentences (with sentencex, in
        the extra `sentences`), which are translated and joined into one line again.

        `"".join(part.written for part in translator.translate_document(chunks))` is the translated text.

        Args:
            chunks: the text in parts of any length, such as an open file. A sentence of more than 20,000 characters is
                cut, and one that is too long for the model is cut into halves until they fit
            window: number of sentences that are read at a time

        Raises the errors of `translate`. A sentence that cannot be translated is left out; its Translation has the
        `problem`.
        """
        _at_least(1, window=window)
        found = parts(chunks, segmenter(self.source_lang), self.fit)
        stream = functools.partial(self.translate_stream, window=window)
        return translate_document(found, stream, separator(self.target_lang))

    def fit(self, sentence: str) -> list[str]:
        """Split a sentence into parts that the model accepts: itself, or halves, cut at white space, of any depth."""
        return fit(sentence, lambda text: (self._indices(text)[1] or "").startswith(_TOO_LONG))

    def score(
        self,
        lines: Iterable[str | bytes],
        references: Iterable[str | bytes],
        progress: Callable[[int], object] | None = None,
    ) -> list[Translation]:
        """Score given translations, in float32 regardless of `dtype`.

        Args:
            lines: as for `translate`
            references: the translation of each, as text
            progress: as for `translate`

        Returns:
            For each line, its reference as the only hypothesis, with the score that the search gives it. There is no
            hypothesis for an empty line with an empty reference, or for a line that cannot be scored; the latter has
            a `problem`.

        Raises:
            TranslationError: the numbers of references and lines differ, or the target language cannot be split into
                pieces.
        """
        for some in (lines, references):
            self._check_lines(some, 1)
        batches = functools.partial(make_batches, tokens=self._batch_tokens, size=self._batch_size)
        scorer = GivenScorer(self._opened, self._options, self._device)
        with torch_threads(self._threads):
            return score_given(scorer, self._indices, batches, list(lines), list(references), progress)

    def _check_lines(self, lines: Iterable[str | bytes], nbest: int) -> None:
        if isinstance(lines, (str, bytes)):
            raise TypeError(f"lines must be a list of lines, got one {type(lines).__name__}")
        self._open_searcher()
        if not 1 <= nbest <= self.beam:
            raise TranslationError(f"`nbest` must be in 1 … `beam` = {self.beam}, got {nbest}")

    def _translated(self, lines: Iterable[str | bytes], nbest: int) -> Iterator[dict[int, Translation]]:
        """Translations by line number: first those that need no search, then batch by batch."""
        done: dict[int, Translation] = {}
        sentences: dict[int, list[int]] = {}
        sources: dict[int, str] = {}
        for number, line in enumerate(lines):
            source, problem = read_line(line)
            indices: list[int] = []
            if problem is None and source.strip():
                indices, problem = self._indices(source)
            if indices:
                sentences[number], sources[number] = indices, source
            else:
                done[number] = Translation(source, problem=problem)
        yield done
        for numbers, found in self._search(sentences, nbest):
            yield {
                number: Translation(sources[number], tuple(map(self._hypothesis, ranked)))
                for number, ranked in zip(numbers, found, strict=True)
            }

    def _indices(self, line: str) -> tuple[list[int], str | None]:
        """A sentence as the model reads it, and what is wrong with it, if anything; [] if no pieces are left."""
        words = self._opened.source
        unknown, end = words.unk(), words.eos()
        # A word such as </s> in the text is not fairseq's symbol of that name.
        own = {words.pad(), words.bos(), end}
        indices = [unknown if i in own else i for i in map(words.index, self._opened.pipeline.encode(line))]
        if not indices:
            return [], None
        longest = self._opened.positions
        if len(indices) >= longest:
            if not self._opened.truncates:
                return [], f"{_TOO_LONG}: {len(indices)} pieces, the model takes {longest - 1}"
            indices = indices[: longest - 1]
        return [*indices, end], None

    def _search(self, sentences: dict[int, list[int]], nbest: int) -> Iterator[tuple[list[int], list[list[Found]]]]:
        for batch in make_batches(sentences, self._batch_tokens, self._batch_size):
            yield batch, self._open_searcher().search([sentences[number] for number in batch], nbest)

    def _hypothesis(self, found: Found) -> Hypothesis:
        dictionary = self._opened.target
        left_out = {dictionary.eos(), dictionary.bos(), dictionary.pad()}
        indices = [i for i in found.tokens if i not in left_out]
        tokens = [dictionary[i] for i in indices]
        written = [self._unk if i == dictionary.unk() else piece for i, piece in zip(indices, tokens, strict=True)]
        return Hypothesis(
            self._opened.pipeline.decode([piece for piece in written if piece]), found.score, tuple(tokens)
        )

    def close(self) -> None:
        """Release the models; `with Translator(…) as translator:` does this at its end."""
        self._searcher = None
        self._opened.models.clear()

    def _open_searcher(self) -> Searcher:
        if self._searcher is None:
            raise TranslationError("the Translator is closed")
        return self._searcher

    def __enter__(self) -> Translator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open(
    paths: tuple[Path, ...], source_lang: str | None, target_lang: str | None, about_checkpoints: dict
) -> TranslationModels:
    """Open exported directories, or checkpoints with the arguments about them."""
    directories = [path.is_dir() for path in paths]
    if not any(directories):
        from lightconv_plugin.generation.loading import open_checkpoints  # which imports fairseq

        data = about_checkpoints.pop("data", None)
        if (model := about_checkpoints.get("sentencepiece")) is not None:
            about_checkpoints["sentencepiece"] = Path(model)
        data = None if data is None else Path(data)
        return open_checkpoints(paths, data, source_lang, target_lang, about_checkpoints)
    if not all(directories):
        names = [str(paths[directories.index(kind)]) for kind in (True, False)]
        raise TranslationError(f"`path` must be directories or checkpoints, not both: got {' and '.join(names)}")
    for name in about_checkpoints:
        raise TranslationError(f"`{name}` is for checkpoints only: {paths[0]} is exported and defines its text itself")
    return open_directories(paths, source_lang, target_lang)


def _automatic(opened: TranslationModels, device: str) -> tuple[str, str]:
    """The type if none is named, and why. Weights that were exported in 8 bits stay in 8 bits if possible."""
    native = device == "cpu" and (why_not(opened.models) or not_covered(opened.models)) is None
    if opened.dtype != "float32" and native:
        return opened.dtype, "as the model was exported"
    return fastest_type(opened.models, device)


def make_batches(sentences: Mapping[int, Sequence[int]], tokens: int, size: int | None) -> list[list[int]]:
    """The keys of sentences in batches of similar lengths, the longest first.

    A batch has at most `tokens` tokens, counting each sentence as its longest, and `size` sentences, but at least one.
    The longest come first, so that running out of memory shows at once.
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


def _given(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise TranslationError(f"`{name}` must be a whole number of at least {least}, got {number!r}")
