"""The models of a `Translator`, their dictionaries, text and batches, and how exported directories are opened as such.

Fairseq checkpoints are opened in loading.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightconv_plugin.checkpoints.exported import Exported, SearchDefaults, load_model, open_exported
from lightconv_plugin.errors import InputError, TranslationError
from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.generation.shortlist import Shortlist, read_shortlist
from lightconv_plugin.generation.translations import Hypothesis
from lightconv_plugin.modules.transformer import EncoderDecoder
from lightconv_plugin.text.shortlist import NO_SHORTLIST
from lightconv_plugin.text.sides import TextSide

Encode = Callable[[str], list[str]]


@dataclass(frozen=True)
class Pipeline:
    """encode: raw line → pieces of the source dictionary. decode: pieces of the target dictionary → text.

    notes: assumptions that the user should know about.
    target: makes what splits given translations into pieces (`encode_later`); None if that is unknown.
    """

    encode: Encode
    decode: Callable[[list[str]], str]
    notes: tuple[str, ...]
    target: Callable[[], Encode] | None = None


class Encoded(NamedTuple):
    """A sentence as the models read it.

    indices: with its end symbol; [] if no pieces are left, or if `problem` says what is wrong with it.
    cut: it is too long and was truncated, as in the models' training.
    """

    indices: list[int]
    problem: str | None = None
    cut: bool = False


@dataclass(frozen=True)
class TranslationModels:
    """An ensemble with its dictionaries and its text pipeline.

    source, target: dictionaries with fairseq's methods (index, pad, eos …).
    positions: maximum length of a sentence with its end symbol. truncates: whether the models were trained on truncated
    sentences. search: the default options. dtype: the type of the weights in the files. own_shortlist: the file of the
    shortlist that an exported directory has.
    """

    models: list[EncoderDecoder]
    source: Any
    target: Any
    source_lang: str
    target_lang: str
    positions: int
    truncates: bool
    pipeline: Pipeline
    search: SearchOptions
    dtype: str = "float32"
    own_shortlist: Path | None = None

    def encode(self, line: str) -> Encoded:
        return self.indices(self.pipeline.encode(line))

    def indices(self, pieces: Iterable[str]) -> Encoded:
        """As `encode`, for a sentence that is split into pieces already."""
        indices = word_indices(self.source, pieces)
        longest = self.positions - 1
        cut = len(indices) > longest
        if cut and not self.truncates:
            return Encoded([], f"too long: {len(indices)} pieces, the model takes {longest}")
        return Encoded([*indices[:longest], self.source.eos()] if indices else [], cut=cut)

    def shortlist_file(self, given: Path | None) -> Path | None:
        """The file of the shortlist to use: the given one (NO_SHORTLIST: none), or the models' own."""
        if given is None:
            return self.own_shortlist
        return None if given == NO_SHORTLIST else given

    def shortlist(self, path: Path, beam: int) -> Shortlist:
        """The shortlist in a file, for searches with this beam. Raises TranslationError for the errors of
        `read_shortlist`."""
        try:
            return read_shortlist(path, self.source, self.target, beam)
        except InputError as error:
            raise TranslationError(str(error)) from error

    def is_too_long(self, line: str) -> bool:
        """Whether it has more pieces than the models take, whether or not `encode` truncates it."""
        return len(self.pipeline.encode(line)) >= self.positions

    def hypothesis(self, indices: Iterable[int], score: float, unk: str) -> Hypothesis:
        """Text for the words that the search found; unk: what to write for an unknown word."""
        words = self.target
        left_out = {words.eos(), words.bos(), words.pad()}
        indices = [i for i in indices if i not in left_out]
        tokens = tuple(words[i] for i in indices)
        written = [unk if i == words.unk() else piece for i, piece in zip(indices, tokens, strict=True)]
        return Hypothesis(self.pipeline.decode([piece for piece in written if piece]), score, tokens)


def encode_later(side: TextSide) -> Callable[[], Encode]:
    """Makes `side.encode` at the first call, from the file as it is now: an exported directory may be replaced."""
    content = None if side.file is None else side.file.read_bytes()
    return functools.cache(lambda: side.encode(content))


def word_indices(dictionary: Any, pieces: Iterable[str]) -> list[int]:
    """The indices of pieces of text. A word such as </s> in the text is unknown: it is not fairseq's symbol of that
    name."""
    symbols = {dictionary.pad(), dictionary.bos(), dictionary.eos()}
    return [dictionary.unk() if i in symbols else i for i in map(dictionary.index, pieces)]


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


def collate(sentences: Sequence[Sequence[int]], pad: int) -> Tensor:
    """The words (S,T) int64, padded on the left as in fairseq-interactive."""
    width = max(map(len, sentences))
    return torch.tensor([[pad] * (width - len(sentence)) + list(sentence) for sentence in sentences])


def open_exported_models(paths: Sequence[Path], source_lang: str | None, target_lang: str | None) -> TranslationModels:
    """An ensemble of exported models. Text, search and shortlist are those of the first one; all must have its
    dictionaries.

    Raises TranslationError (or its base, InputError) if a directory is damaged, is a language model's, or does not
    match the others or the languages.
    """
    opened = [open_exported(path) for path in paths]
    first = opened[0]
    for exported in opened:
        _check(exported, first, source_lang, target_lang)
    assert first.source is not None and first.source_text is not None
    assert first.settings.source_lang is not None and first.settings.target_lang is not None
    encode, decode = first.source_text.encode(), first.target_text.decode()
    # Text that is already split is so on both sides.
    unknown = first.target_text.is_split and not first.source_text.is_split
    models = []
    for exported in opened:
        model = load_model(exported, "float32")
        assert isinstance(model, EncoderDecoder)
        models.append(model)
    return TranslationModels(
        models,
        first.source,
        first.target,
        first.settings.source_lang,
        first.settings.target_lang,
        min(_positions(exported) for exported in opened),
        first.settings.truncate_source,
        Pipeline(encode, decode, first.notes, None if unknown else encode_later(first.target_text)),
        default_search(
            first.target,
            beam_size=first.search.num_beams,
            len_penalty=first.search.length_penalty,
            no_repeat_ngram_size=first.search.no_repeat_ngram_size,
            **_lengths(first.search),
        ),
        dtype="int8" if any(exported.settings.weights == "int8" for exported in opened) else "float32",
        own_shortlist=first.shortlist,
    )


def default_search(target: Any, **options: Any) -> SearchOptions:
    """The options of a search for words of this dictionary."""
    return SearchOptions(pad=target.pad(), unk=target.unk(), eos=target.eos(), **options)


def _lengths(search: SearchDefaults) -> dict[str, int]:
    """The lengths as numbers of pieces. Those of transformers count the start symbol, and max_length also </s>."""
    lengths = {}
    if search.min_length is not None:
        lengths["min_len"] = max(search.min_length - 1, 0)
    if search.max_length is not None:
        lengths["max_len_b"] = search.max_length - 2
    return lengths


def _positions(exported: Exported) -> int:
    """The maximum length of a source."""
    positions = exported.settings.max_source_positions
    if positions is None:
        raise InputError(f"{exported.directory} has no max_source_positions")
    return positions


def _check(exported: Exported, first: Exported, source_lang: str | None, target_lang: str | None) -> None:
    if exported.source is None:
        raise TranslationError(f"{exported.directory} is a language model: only encoder-decoders translate")
    settings = exported.settings
    for name, asked, has in (
        ("source_lang", source_lang, settings.source_lang),
        ("target_lang", target_lang, settings.target_lang),
    ):
        if asked is not None and asked != has:
            raise TranslationError(f"`{name}` is {asked}, but {exported.directory} translates with {name} {has}")
        if (other := getattr(first.settings, name)) != has:
            raise TranslationError(
                f"{first.directory} translates with {name} {other}, {exported.directory} with {has}: they cannot "
                "form an ensemble"
            )
    if (exported.source, exported.target) != (first.source, first.target):
        raise TranslationError(
            f"{exported.directory} and {first.directory} have different dictionaries: they cannot form an ensemble"
        )
