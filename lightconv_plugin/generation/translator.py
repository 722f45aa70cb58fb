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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from lightconv_plugin.cgroups import cpu_limit
from lightconv_plugin.errors import InputError, TranslationError, UnsupportedModelError
from lightconv_plugin.generation import AUTO
from lightconv_plugin.generation.arguments import check_device, check_numbers
from lightconv_plugin.generation.batch_search import BatchSearch, enough_memory, torch_threads
from lightconv_plugin.generation.documents import TranslatedPart, fit, parts, translate_document
from lightconv_plugin.generation.finished import Hypotheses, NoHypothesisError
from lightconv_plugin.generation.scorer import WHY_NAN, Scorer
from lightconv_plugin.generation.translation_models import (
    Encoded,
    TranslationModels,
    collate,
    make_batches,
    open_exported_models,
)
from lightconv_plugin.generation.translations import Translation, read_line
from lightconv_plugin.released.cache import resolve
from lightconv_plugin.text.sentences import segmenter, separator
from lightconv_plugin.text.shortlist import NO_SHORTLIST

WINDOW = 2000  # lines of a stream that are read before any is translated: enough for batches of similar lengths
_NAMES = {"beam": "beam_size", "lenpen": "len_penalty", "unkpen": "unk_penalty"}  # in SearchOptions


class Translator:
    """Beam search with one translation model, or an ensemble of several, on raw text.

    A directory made by `lightconv export` contains everything, and fairseq is not imported. For fairseq checkpoints,
    what is not given is searched for: dictionaries where the training had them or beside the checkpoint; merges,
    tokeniser and case in the folder that `lightconv prepare` made. Threads may share a Translator.

    Args:
        path: an exported directory, a checkpoint, or the name of a released model in the cache (`lightconv released`);
            or several of the same kind
        data: the folder of a checkpoint's dictionaries (data-bin)
        source_lang, target_lang: as in the names of the dictionaries
        bpe_codes: merges of subword-nmt; "none" for text that is already tokenised and split, of a dictionary of
            subwords (`tokenizer` "none" is for one of words). This and the next three are for checkpoints only: an
            exported directory defines how its text is prepared
        sentencepiece: a sentencepiece model; like merges, of both languages, or else references cannot be scored
        tokenizer: "moses", "moses-a" (which also splits a-b into a @-@ b: tokenizer.perl -a, and fairseq's "moses") or
            "none"
        lowercase: lower-case the text of both sides even if nothing says that the training text was
        beam, lenpen, unkpen, min_len, max_len_a, max_len_b, temperature, no_repeat_ngram_size: options of the search,
            as in fairseq-generate. A translation has at most max_len_a·T + max_len_b pieces, where T is the length of
            the longest sentence in its batch. For beam, lenpen, min_len, max_len_b and no_repeat_ngram_size, None means
            the value in the exported directory, or 5, 1, 1, 200 and 0 for checkpoints
        batch_tokens: maximum tokens of a batch, counting each sentence as the longest; a longer sentence is a batch of
            its own
        batch_size: maximum number of sentences in a batch
        threads: cores to use; None for as many as torch has threads, but no more than a container's quota. Torch's own
            number is the same again after a call
        dtype: "float32", "bfloat16", "int8" (on a CPU), "float16" (on a GPU), or "auto" (also None): the fastest on
            this machine for models of this size, see generation/dtypes.py; on a CPU, int8 for a directory with 8-bit
            weights
        device: "cpu", "cuda", "cuda:1" …
        cuda_graphs: capture the steps of the search in CUDA graphs, for a GPU: True for every batch, False for none,
            None from the second batch of a size
        unk: what to write for an unknown word in a translation; "" omits it
        shortlist: a lexical table or a vocabulary map (`lightconv shortlist` writes one): for each source word, the
            target words that it allows. The search chooses among those of its batch, not the whole vocabulary. None
            means that of the exported directory, if it has one; "none" means the whole vocabulary

    Attributes: `source_lang`, `target_lang` and `dictionaries` of both, source first; `options` of the search, and of
    these `beam` and the `dtype` that was chosen, with the reason; the file of the `shortlist` that is used, or None;
    `notes`, assumptions that the user should know about.

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
        cuda_graphs: bool | None = None,
        unk: str = "<unk>",
        shortlist: str | Path | None = None,
    ) -> None:
        self._search: BatchSearch | None = None
        paths = tuple(Path(resolve(p)) for p in ([path] if isinstance(path, (str, os.PathLike)) else path))
        if not paths:
            raise TranslationError("`path` must name a model, got none")
        for missing in (p for p in paths if not p.exists()):  # check all of them before loading any
            raise TranslationError(f"no such checkpoint or exported directory: {missing}")
        listed = None if shortlist is None else Path(shortlist)
        if listed is not None and listed != NO_SHORTLIST and not listed.exists():
            raise TranslationError(f"`shortlist`: no such file: {listed}")
        numbers = {
            "beam": beam,
            "lenpen": lenpen,
            "unkpen": unkpen,
            "min_len": min_len,
            "max_len_a": max_len_a,
            "max_len_b": max_len_b,
            "temperature": temperature,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "threads": threads,
        }
        check_numbers(**numbers, batch_tokens=batch_tokens, batch_size=batch_size)
        if any(character in "\0\r\n" or "\ud800" <= character <= "\udfff" for character in unk):
            raise TranslationError(f"`unk` must be text of one line in UTF-8, got {unk!a}")
        dtype = AUTO if dtype is None else dtype
        check_device(device, dtype, cuda_graphs)
        text = {"bpe_codes": bpe_codes, "sentencepiece": sentencepiece, "tokenizer": tokenizer}
        try:
            opened = _open(paths, source_lang, target_lang, _given(data=data, **text, lowercase=lowercase or None))
        except TranslationError:  # or a subclass
            raise
        except InputError as error:
            raise TranslationError(str(error)) from error
        chosen = {_NAMES.get(name, name): number for name, number in _given(**numbers).items()}
        options = replace(opened.search, **chosen, dtype=dtype, cuda_graphs=cuda_graphs)
        if max_len_a == 0 and options.min_len > options.max_len_b:
            most = options.max_len_b
            raise TranslationError(f"`min_len` must be at most `max_len_b` = {most}, got {options.min_len}")
        self.shortlist = opened.shortlist_file(listed)
        if self.shortlist is not None and cuda_graphs:
            raise TranslationError(f"`cuda_graphs` excludes the shortlist {self.shortlist}: set `shortlist` to none")
        words = None if self.shortlist is None else opened.shortlist(self.shortlist, options.beam_size)
        with enough_memory(f"for the model on `device` {device!r}: give another `device` or `dtype`"):
            for model in opened.models:
                model.eval().to(device)
            try:
                search = BatchSearch(opened.models, options, exported=opened.dtype, shortlist=words)
            except UnsupportedModelError as error:
                how = f"translate{' with int8' if dtype == 'int8' else ''}"
                raise TranslationError(f"{paths[0]} cannot be used to {how}: {error} is not supported") from error
            except ValueError as error:
                raise TranslationError(str(error)) from error
        self.source_lang, self.target_lang, self.beam = opened.source_lang, opened.target_lang, options.beam_size
        self.options, self.dictionaries = options, (opened.source, opened.target)
        self.dtype, self.dtype_reason = search.options.dtype, search.dtype_reason
        warnings = () if search.dtype_warning is None else (search.dtype_warning,)
        self.notes = (*opened.pipeline.notes, *warnings)
        self._opened, self._search, self._device, self._unk = opened, search, device, unk
        self._lists_given = listed not in (None, NO_SHORTLIST)
        self._make_batches = functools.partial(make_batches, tokens=batch_tokens, size=batch_size)

    def translate(
        self,
        lines: Iterable[str | bytes],
        nbest: int = 1,
        progress: Callable[[int], object] | None = None,
        finished: Callable[[int, Translation], object] | None = None,
        pieces: bool = False,
    ) -> list[Translation]:
        """Translate each line separately. Returns one translation per line, in the same order.

        Args:
            lines: sentences; bytes are UTF-8. A line end at the end of a line is removed
            nbest: number of hypotheses per line
            progress: called with the number of lines that were finished since the previous call
            finished: called with the number of each line, from 0, and its translation, as soon as it is found
            pieces: the lines are pieces of the source dictionary, separated by spaces, as in the folder bpe/ of
                `lightconv prepare`

        Raises:
            TranslationError: nbest is not in 1 … beam. A line that cannot be translated raises nothing: its Translation
                has the `problem`.
        """
        self._check_lines(lines, nbest)
        results: dict[int, Translation] = {}
        for group in self._translated(lines, nbest, pieces):
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
        check_numbers(window=window)
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
        check_numbers(window=window)
        sentences = parts(chunks, segmenter(self.source_lang), self.fit)
        stream = functools.partial(self.translate_stream, window=window)
        return translate_document(sentences, stream, separator(self.target_lang))

    def fit(self, sentence: str) -> list[str]:
        """Split a sentence into parts that the model accepts: itself, or halves, cut at white space, of any depth."""
        return fit(sentence, self._opened.is_too_long)

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
            TranslationError: the numbers of references and lines differ, the target language cannot be split into
                pieces, a score is NaN, or a `shortlist` was given, which gives words outside it no score. That of an
                exported directory is not used.
        """
        if self._lists_given:
            raise TranslationError("references are scored with the whole vocabulary: `shortlist` is not valid")
        for some in (lines, references):
            self._check_lines(some, 1)
        options = self._open_search().options
        scorer = Scorer(self._opened, options)
        with torch_threads(options.threads, cpu_limit()):
            return scorer.score(list(lines), list(references), self._make_batches, progress)

    def _check_lines(self, lines: Iterable[str | bytes], nbest: int) -> None:
        if isinstance(lines, (str, bytes)):
            raise TypeError(f"lines must be a list of lines, got one {type(lines).__name__}")
        self._open_search()
        if not isinstance(nbest, int) or isinstance(nbest, bool):
            raise TranslationError(f"`nbest` must be a whole number, got {nbest!r}")
        if not 1 <= nbest <= self.beam:
            raise TranslationError(f"`nbest` must be in 1 … `beam` = {self.beam}, got {nbest}")

    def _translated(
        self, lines: Iterable[str | bytes], nbest: int, pieces: bool = False
    ) -> Iterator[dict[int, Translation]]:
        """Translations by line number: first those that need no search, then batch by batch."""
        done: dict[int, Translation] = {}
        sentences: dict[int, list[int]] = {}
        searched: dict[int, Translation] = {}
        for number, line in enumerate(lines):
            source, problem = read_line(line)
            read = Encoded([], problem)
            if problem is None and source.strip():
                opened = self._opened
                read = opened.indices(source.split()) if pieces else opened.encode(source)
            translation = Translation(source, problem=read.problem, cut=read.cut)
            if read.indices:
                sentences[number], searched[number] = read.indices, translation
            else:
                done[number] = translation
        yield done
        for batch in self._make_batches(sentences):
            hypotheses = self._hypotheses([sentences[number] for number in batch])
            yield {
                number: replace(
                    searched[number],
                    hypotheses=tuple(
                        self._opened.hypothesis(one["tokens"].tolist(), float(one["score"]) / math.log(2), self._unk)
                        for one in ranked[:nbest]
                    ),
                )
                for number, ranked in zip(batch, hypotheses, strict=True)
            }

    def _hypotheses(self, sentences: Sequence[Sequence[int]]) -> Hypotheses:
        search = self._open_search()
        source = collate(sentences, search.options.pad)
        size = " × ".join(map(str, source.shape))
        with enough_memory(f"on a batch of {size} pieces: reduce `batch_tokens`"):
            try:
                return search.search(source.to(self._device))
            except ValueError as error:  # such as a min_len above the maximum length of this batch
                raise TranslationError(_with_own_names(str(error))) from error
            except NoHypothesisError as error:
                raise TranslationError(self._why_nothing()) from error
            except RuntimeError as error:
                if "cannot start" in str(error):
                    raise TranslationError(f"`threads`: {error}") from error
                raise

    def _why_nothing(self) -> str:
        """What may have left a sentence without a translation."""
        options, why = self.options, WHY_NAN
        if options.no_repeat_ngram_size:
            limits = [f"`no_repeat_ngram_size` = {options.no_repeat_ngram_size}"]
            limits += [f"`min_len` = {options.min_len}"] if options.min_len > 1 else []
            limits += ["the shortlist"] if self.shortlist else []
            why += f", or is no word left with {' and '.join(limits)}"
        return f"the model gives no translation a probability: {why}?"

    def close(self) -> None:
        """Release the models; `with Translator(…) as translator:` does this at its end."""
        self._search = None
        self._opened.models.clear()

    def _open_search(self) -> BatchSearch:
        if self._search is None:
            raise TranslationError("the Translator is closed")
        return self._search

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
    return open_exported_models(paths, source_lang, target_lang)


def _given(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _with_own_names(message: str) -> str:
    """The message with the Translator's names for the options of the search."""
    for ours, theirs in _NAMES.items():
        message = message.replace(theirs, f"`{ours}`")
    return message
