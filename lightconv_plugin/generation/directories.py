"""Opens exported models (checkpoints/exported.py) for translation, without fairseq."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightconv_plugin.checkpoints.exported import Exported, SearchDefaults, load_model, open_exported
from lightconv_plugin.errors import InputError, TranslationError
from lightconv_plugin.generation.translation_models import Pipeline, TranslationModels
from lightconv_plugin.modules.transformer import EncoderDecoder


def open_directories(paths: Sequence[Path], source_lang: str | None, target_lang: str | None) -> TranslationModels:
    """An ensemble of exported models. Text is processed as for the first one; all must have its dictionaries.

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
        Pipeline(encode, decode, (), first.target_text),
        dtype="int8" if any(exported.settings.weights == "int8" for exported in opened) else "float32",
        beam=first.search.num_beams,
        lenpen=first.search.length_penalty,
        no_repeat_ngram_size=first.search.no_repeat_ngram_size,
        **_lengths(first.search),
    )


def _lengths(search: SearchDefaults) -> dict[str, int]:
    """The lengths as numbers of pieces. Those of transformers count the start symbol, and max_length also </s>."""
    found = {}
    if search.min_length is not None:
        found["min_len"] = max(search.min_length - 1, 0)
    if search.max_length is not None:
        found["max_len_b"] = search.max_length - 2
    return found


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
