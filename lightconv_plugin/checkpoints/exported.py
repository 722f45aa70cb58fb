"""Exported models: a directory with everything needed for translation or further training, without fairseq.

    exported = open_exported("model")
    model = load_model(exported)

The directory holds only data and may be untrusted: nothing in it is executed, and anything damaged or inconsistent
raises InputError. saving.py writes it; docs/exported.md describes each file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightconv_plugin.checkpoints.untrusted import file_in, naming, read_bytes, read_json, shown
from lightconv_plugin.checkpoints.weights import DTYPES, Int8, PlainModel, Weights, read_kinds
from lightconv_plugin.errors import InputError
from lightconv_plugin.modules import ModelConfig, StackConfig, build_model
from lightconv_plugin.text.dictionary import SPECIAL, Dictionary
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide
from lightconv_plugin.text.subwords import Subwords
from lightconv_plugin.validation import read

FORMAT_VERSION = 1
MODEL_TYPE = "lightconv"
CONFIG, GENERATION, TEXT, WEIGHTS_FILE = "config.json", "generation_config.json", "text.json", "model.safetensors"
SHORTLIST = "shortlist.txt"
# Patterns of the text files of any model, whatever its languages and subwords are.
TEXT_FILES = (TEXT, "dict.txt", "dict.*.txt", "*.bpe", "sentencepiece.model", "*.sentencepiece.model")
ARCHITECTURES = ("LightConvForConditionalGeneration", "LightConvForCausalLM")
_LARGEST = 2**31 - 1  # limit for every size in config.json
_TEXT_FILE = 2**28  # maximum bytes of a dictionary, of merges, of a sentencepiece model, of a shortlist
_TENSORS = 2**40
# Settings that change a search of transformers and that ours lacks, with the values that have no effect.
_UNSUPPORTED: Mapping[str, Any] = {
    "do_sample": False,
    "num_beam_groups": 1,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    **dict.fromkeys(("exponential_decay_length_penalty", "penalty_alpha", "sequence_bias", "bad_words_ids")),
    **dict.fromkeys(("force_words_ids", "forced_bos_token_id", "begin_suppress_tokens", "stop_strings", "max_time")),
}


@dataclass(frozen=True)
class Settings:
    """The contents of config.json besides the architecture.

    weights: the type in which the parameters are stored.
    source_lang, target_lang: None for a language model.
    truncate_source: sources that are too long were truncated in training.
    max_source_positions, max_target_positions: the longest source and target, including </s>.
    shortlist: the directory has a shortlist, which translations use.
    """

    weights: Literal["float32", "bfloat16", "float16", "int8"]
    source_lang: str | None
    target_lang: str | None
    truncate_source: bool
    max_source_positions: int | None
    max_target_positions: int
    shortlist: bool = False

    def __post_init__(self) -> None:
        for name in ("source_lang", "target_lang"):
            lang = getattr(self, name)
            if lang is not None and not is_language(lang):
                raise ValueError(f"{name} must be the name of a language as in dict.NAME.txt, got {lang!r}")
        if (self.source_lang is None) != (self.target_lang is None) or (
            self.source_lang is not None and self.source_lang == self.target_lang
        ):
            raise ValueError("source_lang and target_lang must be two different names, or both null")
        for name in ("max_source_positions", "max_target_positions"):
            number = getattr(self, name)
            if number is not None and not 1 <= number <= _LARGEST:
                raise ValueError(f"{name} must be in 1 … {_LARGEST}, got {number}")


@dataclass(frozen=True)
class SearchDefaults:
    """The default search settings in generation_config.json, under the names of transformers.

    max_length, min_length: of the target, with the start symbol; max_length counts </s> too. None if the file has none.
    """

    num_beams: int = 5
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    max_length: int | None = None
    min_length: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_beams", 1), ("no_repeat_ngram_size", 0), ("max_length", 2), ("min_length", 0)):
            number = getattr(self, name)
            if number is not None and not least <= number <= _LARGEST:
                raise ValueError(f"{name} must be in {least} … {_LARGEST}, got {number}")
        if self.min_length is not None and self.max_length is not None and self.min_length >= self.max_length:
            raise ValueError(f"min_length must be below max_length = {self.max_length}, got {self.min_length}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be a number, got {self.length_penalty}")


@dataclass(frozen=True)
class Exported:
    """An exported model whose files have been read and checked for consistency, except for the parameters' values.

    source, source_text: dictionary and text of the source; None for a language model.
    shortlist: the file of the shortlist, which is checked when it is read (text/shortlist.py); None if there is none.
    notes: what of generation_config.json the search does not have.
    """

    directory: Path
    config: ModelConfig
    settings: Settings
    search: SearchDefaults
    source: Dictionary | None
    target: Dictionary
    source_text: TextSide | None
    target_text: TextSide
    weights: Weights
    shortlist: Path | None = None
    notes: tuple[str, ...] = ()


def open_exported(directory: Path | str) -> Exported:
    """Read the files of an exported directory; of the parameters, only names, shapes and types, and no shortlist.

    Raises:
        InputError: the directory does not exist, was not written by `save_exported` or by a newer version of it, or is
            damaged or tampered with. The message names the file.
    """
    directory = Path(directory)
    try:
        mode = directory.stat().st_mode
        checkpoints = not (directory / CONFIG).exists() and any(directory.glob("*.pt"))
    except OSError as error:
        raise InputError(f"{directory} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in its name
        raise InputError(f"{shown(directory)} cannot be read: {error}") from error
    if not S_ISDIR(mode):
        raise InputError(f"{directory} is not a directory of an exported model but a file")
    if checkpoints:
        raise InputError(f"{directory} is a folder of checkpoints: name one of them")
    config, settings = _read_config(directory)
    with naming(directory / GENERATION):
        search, notes = _read_search(directory, config)
    weights = _read_weights(directory, config, settings)
    source_text, target_text = read_text(directory, config.encoder is not None)
    source = None
    if config.encoder is not None:
        source = _read_dictionary(directory, dictionary_name(settings.source_lang), config.encoder, config)
    target = _read_dictionary(directory, dictionary_name(settings.target_lang), config.decoder, config)
    shortlist = file_in(directory, SHORTLIST, _TEXT_FILE) if settings.shortlist else None
    texts = source_text, target_text
    return Exported(directory, config, settings, search, source, target, *texts, weights, shortlist, notes)


def load_model(exported: Exported, dtype: torch.dtype | str | None = None) -> PlainModel:
    """The model with its parameters, in evaluation mode, on the CPU; it can be trained further.

    Parameters that need no conversion are memory-mapped: they are neither copied nor read before they are used.

    Args:
        exported: from `open_exported`.
        dtype: "float32", "bfloat16" or "float16", as text or as torch's type; None for the type of the file, or float32
            if the parameters are 8-bit.

    Raises:
        InputError: another dtype, or the parameters are not finite or have changed since the directory was opened.
    """
    if dtype is None:
        dtype = DTYPES.get(exported.settings.weights, torch.float32)
    kind = DTYPES.get(str(dtype).removeprefix("torch."))
    if kind is None:
        raise InputError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype}")
    model = skeleton(exported.config, exported.directory / CONFIG)
    for name, stored in load_tensors(exported).items():
        tensor = stored.dequantise() if isinstance(stored, Int8) else stored
        _assign(model, name, tensor.to(kind))
    return model.eval()


def load_tensors(exported: Exported) -> dict[str, Tensor | Int8]:
    """The parameters as stored in the file, by name, each once: tied ones under the first of their names.

    Raises:
        InputError: they are not finite, or have changed since the directory was opened.
    """
    return exported.weights.read()


def is_exported(directory: Path) -> bool:
    """Whether `save_exported` wrote this directory, judged by its config.json."""
    try:
        return read_json(directory, CONFIG).get("model_type") == MODEL_TYPE
    except InputError:
        return False


def is_language(name: str) -> bool:
    """Whether a language can have this name, which becomes part of file names."""
    return name.isprintable() and 0 < len(name) <= 64 and name[0] != "." and not set(name) & set("/\\")


def dictionary_name(lang: str | None) -> str:
    return "dict.txt" if lang is None else f"dict.{lang}.txt"


def skeleton(config: ModelConfig, path: Path | str = CONFIG) -> PlainModel:
    """The model with its parameters on torch's meta device, which need no memory. InputError if it cannot be built.

    `path` names the configuration in the error.
    """
    try:
        with torch.device("meta"), _WithoutInitialising():
            return build_model(config)
    except (ValueError, TypeError, ArithmeticError, RuntimeError, IndexError) as error:
        raise InputError(f"{path} does not describe a valid model: {shown(error)}") from error


class _WithoutInitialising(TorchFunctionMode):
    """Skips parameter initialisation: on the meta device it does nothing but make torch import modules for a second."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "zero_", "fill_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    place, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(place), attribute, nn.Parameter(tensor))


def _read_config(directory: Path) -> tuple[ModelConfig, Settings]:
    known, path = read_json(directory, CONFIG), directory / CONFIG
    if known.get("model_type") != MODEL_TYPE:
        kind = shown(repr(known.get("model_type")))
        raise InputError(f"{path} is not from an exported model: model_type must be {MODEL_TYPE}, got {kind}")
    version = known.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise InputError(
            f"{path}: format_version {shown(repr(version))} is not supported: this version reads {FORMAT_VERSION}; "
            "update lightconv-plugin, or export the checkpoint again with this version"
        )
    with naming(path):
        _check_sizes(known.get("encoder_stack"), known.get("decoder_stack"))
        config = ModelConfig.of_json(known)
        names = Settings.__dataclass_fields__
        settings = read(Settings, {name: known[name] for name in names if name in known})
        is_pair = config.encoder is not None
        for name in ("source_lang", "max_source_positions"):
            if is_pair == (getattr(settings, name) is None):
                which = "missing for a model with" if is_pair else "not valid for a model without"
                raise ValueError(f"{name} is {which} an encoder_stack")
        if settings.shortlist and not is_pair:
            raise ValueError("shortlist must be false for a model without an encoder_stack, got true")
        for name, stack in (("source", config.encoder), ("target", config.decoder)):
            most = getattr(settings, f"max_{name}_positions")
            if stack is not None and stack.positions == "learned" and most > stack.max_positions:
                raise ValueError(f"max_{name}_positions is {most}, more than the {stack.max_positions} learned ones")
        stated = {"vocab_size": config.decoder.vocab_size, "is_encoder_decoder": is_pair}
        stated |= {"decoder_start_token_id": config.eos} if is_pair else {}
        for name, value in stated.items():
            if known.get(name, value) != value:
                raise ValueError(f"{name} must be {value} as in the rest of the file, got {known[name]!r}")
        if (config.bos, config.pad, config.eos, config.unk) != tuple(range(len(SPECIAL))):
            raise ValueError("bos, pad, eos and unk_token_id must be 0, 1, 2 and 3, as in the dictionaries")
    return config, settings


def _check_sizes(*stacks: object) -> None:
    """ValueError for an integer that is too large for a size."""
    rest = [*stacks]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping):
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"sizes must be at most {_LARGEST}, got {value}")


@dataclass(frozen=True)
class _NewTokens:
    """Lengths without the start symbol. transformers prefers them to max_length and min_length."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0)):
            number = getattr(self, name)
            if number is not None and not least <= number < _LARGEST:
                raise ValueError(f"{name} must be in {least} … {_LARGEST - 1}, got {number}")


def _read_search(directory: Path, config: ModelConfig) -> tuple[SearchDefaults, tuple[str, ...]]:
    """The search settings in generation_config.json, and notes about those that `_UNSUPPORTED` names.

    Null values are ignored, and so are other keys.
    """
    if not (directory / GENERATION).exists():
        return SearchDefaults(), ()
    known = {name: value for name, value in read_json(directory, GENERATION).items() if value is not None}
    new = read(_NewTokens, {name: known[name] for name in _NewTokens.__dataclass_fields__ if name in known})
    for name, number in (("max_length", new.max_new_tokens), ("min_length", new.min_new_tokens)):
        if number is not None:
            known[name] = number + 1
    names = SearchDefaults.__dataclass_fields__
    search = read(SearchDefaults, {name: known[name] for name in names if name in known})
    ends = dict.fromkeys(("eos_token_id", "decoder_start_token_id"), config.eos)
    neutral = {**_UNSUPPORTED, "suppress_tokens": config.pad, **ends}
    lacking = [name for name, value in neutral.items() if known.get(name, value) not in (value, [value], [])]
    if search.num_beams > 1 and known.get("early_stopping", True) is not True:
        lacking.append("early_stopping other than true")
    return search, tuple(f"{GENERATION} has {name}, which the search of `Translator` lacks" for name in lacking)


@dataclass(frozen=True)
class _StoredSide:
    """A side in text.json."""

    recipe: Recipe
    subwords: Subwords
    file: str | None


@dataclass(frozen=True)
class _Text:
    target: _StoredSide
    source: _StoredSide | None = None


def read_text(directory: Path, has_source: bool) -> tuple[TextSide | None, TextSide]:
    """text.json: the text of source and target. InputError if it is damaged or a file that it names is missing."""
    with naming(directory / TEXT):
        text = read(_Text, read_json(directory, TEXT))
        if (text.source is None) == has_source:
            raise ValueError("source is required if config.json has a source_lang, and must be null otherwise")
    source = None if text.source is None else _text_side(directory, text.source)
    return source, _text_side(directory, text.target)


def _text_side(directory: Path, side: _StoredSide) -> TextSide:
    path = None if side.file is None else file_in(directory, side.file, _TEXT_FILE)
    return TextSide(side.recipe, side.subwords, path)


def _read_weights(directory: Path, config: ModelConfig, settings: Settings) -> Weights:
    """The parameters' names, shapes and types, checked against the configuration."""
    path = file_in(directory, WEIGHTS_FILE, _TENSORS)
    kinds = read_kinds(path)
    # Checked before the model is built, which takes a millisecond per layer: each part has at least one tensor.
    parts = 0
    for stack in (config.encoder, config.decoder):
        if stack is not None:
            parts += len(stack.mixers)
            parts += sum(len(bands.cutoff) for bands in (stack.adaptive_input, stack.adaptive_softmax) if bands)
    if parts > len(kinds):
        raise InputError(f"{path} has {len(kinds)} tensors, but config.json has {parts} layers and bands")
    return Weights.check(path, kinds, skeleton(config, directory / CONFIG), settings.weights)


def _read_dictionary(directory: Path, name: str, stack: StackConfig, config: ModelConfig) -> Dictionary:
    dictionary = Dictionary.of_bytes(read_bytes(directory, name, _TEXT_FILE), directory / name)
    if len(dictionary) != stack.vocab_size:
        raise InputError(
            f"{directory / name} has {len(dictionary):,} entries with fairseq's four special symbols, but config.json "
            f"has vocab_size {stack.vocab_size:,}: the dictionary does not match the model"
        )
    return dictionary


def as_json(config: ModelConfig, settings: Settings) -> dict[str, Any]:
    """config.json of a model."""
    is_pair = config.encoder is not None
    known = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    if not settings.shortlist:
        del known["shortlist"]  # the file is then that of older versions, byte for byte
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURES[0 if is_pair else 1]],
        "format_version": FORMAT_VERSION,
        "is_encoder_decoder": is_pair,
        "decoder_start_token_id": config.eos,  # the first input of fairseq's decoders
        "vocab_size": config.decoder.vocab_size,
        "tie_word_embeddings": config.decoder.share_input_output,
        "dtype": settings.weights if settings.weights in DTYPES else "float32",
        **known,
        **config.as_json(),
    }
