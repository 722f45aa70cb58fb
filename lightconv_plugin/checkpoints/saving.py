"""Writes the directory of an exported model, which is also a model directory for Hugging Face's transformers.

exported.py reads it; docs/exported.md describes each file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints import exported
from lightconv_plugin.checkpoints.exported import FORMAT_VERSION, SearchDefaults, Settings, dictionary_name
from lightconv_plugin.checkpoints.model_card import ModelCard
from lightconv_plugin.checkpoints.untrusted import shown
from lightconv_plugin.checkpoints.weights import PlainModel, tensors_of, write
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import DirectoryKind, atomic_directory, check_new_directory
from lightconv_plugin.modules import ModelConfig
from lightconv_plugin.text.dictionary import BOS, EOS, PAD, UNK, Dictionary
from lightconv_plugin.text.shortlist import read_lists
from lightconv_plugin.text.sides import TextSide

TOKENIZER = "tokenizer_config.json"
_LONGEST_TARGET = 200  # pieces, fairseq-generate's --max-len-b
_FILES = {"bpe": "{}.bpe", "sentencepiece": "sentencepiece.model"}
# Files that transformers writes when it saves a model or a tokeniser; they may be replaced with the model.
_OF_TRANSFORMERS = (
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
    "training_args.bin",
    ".gitattributes",
)
EXPORTED_MODEL = DirectoryKind(
    "an exported model",
    exported.is_exported,
    (
        exported.CONFIG,
        exported.GENERATION,
        exported.WEIGHTS_FILE,
        exported.SHORTLIST,
        TOKENIZER,
        "README.md",
        *exported.TEXT_FILES,
        *_OF_TRANSFORMERS,
    ),
)


@dataclass(frozen=True)
class Side:
    """One side of a model to save.

    lang: None for a language model.
    dictionary: the content of fairseq's file.
    text: how text becomes pieces; its file is copied.
    """

    lang: str | None
    dictionary: bytes
    text: TextSide


def save_exported(
    directory: Path | str,
    model: PlainModel,
    *,
    target: Side,
    source: Side | None = None,
    max_target_positions: int,
    max_source_positions: int | None = None,
    truncate_source: bool = False,
    weights: str = "float32",
    search: SearchDefaults | None = None,
    shortlist: Path | None = None,
    card: ModelCard | None = None,
    force: bool = False,
) -> None:
    """Write a directory that `open_exported` reads, atomically: a killed process leaves all of it or nothing.

    Args:
        directory: created; it may exist if it is empty.
        model: with parameters of any floating type.
        target, source: the sides; a language model has no source.
        max_target_positions, max_source_positions, truncate_source, weights: see `Settings`.
        search: the defaults for generation_config.json; without max_length, it gets that of fairseq-generate.
        shortlist: a file of text/shortlist.py with words of the dictionaries, which is copied.
        card: additional facts for README.md.
        force: replace an exported directory.

    Raises:
        InputError: the directory holds something else, or a model and `force` is not set; parameters are not finite or
            too large for `weights`; a dictionary does not match the model, or `shortlist` the dictionaries; its
            configuration or `search` cannot be written.
        OSError: the directory cannot be written.
    """
    directory = Path(directory)
    check_new_directory(directory, force, EXPORTED_MODEL)
    tensors = tensors_of(model, weights)
    config = model.config
    if ModelConfig.of_json(config.as_json()) != config:
        raise InputError("mixers of a decoder must be causal, those of an encoder not, and all must zero the pads")
    if (source is None) != (config.encoder is None):
        raise InputError("`source` is required for a model with an encoder, and not allowed for others")
    if shortlist is not None and source is None:
        raise InputError("`shortlist` is not valid for a language model: only translations can have one")
    try:
        settings = Settings(
            weights=weights,  # type: ignore[arg-type]
            source_lang=None if source is None else source.lang,
            target_lang=target.lang,
            truncate_source=truncate_source,
            max_source_positions=max_source_positions,
            max_target_positions=max_target_positions,
            shortlist=shortlist is not None,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    search = search or SearchDefaults(num_beams=1 if source is None else 5)
    if search.num_beams == 1 and search.length_penalty != 1:
        raise InputError(
            f"length penalty {search.length_penalty:g} needs a beam of at least 2: it chooses between hypotheses, and "
            "transformers refuses a generation_config.json with it"
        )
    files = _text_files(source, target, config, shortlist)
    about = {
        exported.CONFIG: exported.as_json(config, settings),
        exported.GENERATION: generation(config, max_target_positions, search),
        TOKENIZER: _tokenizer(settings),
    }
    files |= {name: _json(value) for name, value in about.items()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = shown(Path(os.path.realpath(directory)).name)
    files["README.md"] = (card or ModelCard()).text(name, config, settings, search, parameters).encode()
    with atomic_directory(directory, replace=force) as new:
        for name, content in files.items():
            (new / name).write_bytes(content)
        path = new / exported.WEIGHTS_FILE
        write(tensors, path)
        path.chmod((new / exported.CONFIG).stat().st_mode & 0o777)  # safetensors creates it readable by the owner only
        # Nothing is kept that cannot be opened again.
        exported.open_exported(new)


def _text_files(source: Side | None, target: Side, config: ModelConfig, shortlist: Path | None) -> dict[str, bytes]:
    """Dictionaries, merges or models, text.json and the shortlist, by name."""
    files: dict[str, bytes] = {}
    dictionaries: list[Dictionary] = []
    about: dict[str, Any] = {}
    for which, side, stack in (("source", source, config.encoder), ("target", target, config.decoder)):
        if side is None or stack is None:
            about[which] = None
            continue
        name = dictionary_name(side.lang)
        dictionary = Dictionary.of_bytes(side.dictionary, name)
        if len(dictionary) != stack.vocab_size:
            raise InputError(
                f"the dictionary of the {which} has {len(dictionary):,} entries with fairseq's own, but the model's "
                f"{stack.vocab_size:,}: it does not match the model"
            )
        dictionaries.append(dictionary)
        files[name] = side.dictionary
        file = None
        if side.text.file is not None and side.text.subwords in _FILES:
            file = _add(files, which, side.text.subwords, side.text.file.read_bytes())
        about[which] = {"recipe": side.text.recipe.as_json(), "subwords": side.text.subwords, "file": file}
    if shortlist is not None:
        read_lists(shortlist, *dictionaries)
        files[exported.SHORTLIST] = shortlist.read_bytes()
    return {**files, exported.TEXT: _json(about)}


def _add(files: dict[str, bytes], which: str, subwords: str, content: bytes) -> str:
    """Add merges or a sentencepiece model to the files; returns its name, that of an identical file if there is one."""
    for name, other in files.items():
        if other == content:
            return name
    name = _FILES[subwords].format(which)
    if name in files:
        name = f"{which}.{name}"
    files[name] = content
    return name


def generation(config: ModelConfig, max_target_positions: int, search: SearchDefaults) -> dict[str, Any]:
    """generation_config.json, which makes transformers search like fairseq-generate."""
    # max_length counts the start symbol and the end as well. The decoder reads everything except the end.
    longest = min(_LONGEST_TARGET + 2, max_target_positions + 1)
    search = replace(
        search,
        max_length=longest if search.max_length is None else search.max_length,
        min_length=2 if search.min_length is None and config.encoder is not None else search.min_length,
    )
    known: dict[str, Any] = {
        "num_beams": search.num_beams,
        "max_length": search.max_length,
        "min_length": search.min_length,
        "no_repeat_ngram_size": search.no_repeat_ngram_size or None,
        "decoder_start_token_id": config.eos,
        # Without a prompt, a language model begins with this: in fairseq, the </s> of the preceding text.
        "bos_token_id": config.eos if config.encoder is None else config.bos,
        "eos_token_id": config.eos,
        "pad_token_id": config.pad,
        "forced_eos_token_id": config.eos if config.encoder is not None else None,
        "suppress_tokens": [config.pad],
    }
    if search.num_beams > 1:  # with one beam, transformers warns about these
        known |= {"length_penalty": search.length_penalty, "early_stopping": True}
    return {name: value for name, value in known.items() if value is not None}


def _tokenizer(settings: Settings) -> dict[str, Any]:
    """tokenizer_config.json."""
    longest = settings.max_target_positions if settings.max_source_positions is None else settings.max_source_positions
    return {
        "tokenizer_class": "LightConvTokenizer",
        "source_lang": settings.source_lang,
        "target_lang": settings.target_lang,
        "bos_token": EOS if settings.target_lang is None else BOS,  # a language model's text begins with it
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "model_max_length": longest,
        "format_version": FORMAT_VERSION,
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
