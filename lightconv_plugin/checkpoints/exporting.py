"""Exports a fairseq checkpoint as a directory, with the dictionaries and merges next to its training data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq import tasks
from fairseq.tasks.language_modeling import LanguageModelingTask

from lightconv_plugin.arguments import MOST
from lightconv_plugin.checkpoints.exported import SearchDefaults, dictionary_name, is_language
from lightconv_plugin.checkpoints.model_card import ModelCard, Score
from lightconv_plugin.checkpoints.opening import (
    build_model,
    find_data,
    has_encoder,
    open_first,
    read_any_checkpoint,
    set_up_task,
    task_settings,
)
from lightconv_plugin.checkpoints.saving import EXPORTED_MODEL, Side, save_exported
from lightconv_plugin.checkpoints.training_text import entries, find_subwords, find_text, read_corpus
from lightconv_plugin.checkpoints.untrusted import shown
from lightconv_plugin.checkpoints.weights import WEIGHTS, PlainModel
from lightconv_plugin.errors import InputError, UnsupportedModelError
from lightconv_plugin.files import check_new_directory
from lightconv_plugin.models.plain import plain_model
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide, TokeniserError
from lightconv_plugin.text.subwords import kind_of

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Export:
    """Options of `export_checkpoint` besides files; by default they are determined automatically.

    dtype: "float32", "bfloat16", "float16" or "int8".
    source_lang, target_lang, bpe_codes, sentencepiece, tokenizer, lowercase: as for `Translator`.
    beam, lenpen: the directory's default search; None for 5 (1 for language models) and 1.
    shortlist: a file of a shortlist (text/shortlist.py), which translations with the directory use by default.
    bleu, bleu_signature: from sacreBLEU, for the model card.
    """

    dtype: str = "float32"
    source_lang: str | None = None
    target_lang: str | None = None
    bpe_codes: str | None = None
    sentencepiece: Path | None = None
    tokenizer: str | None = None
    lowercase: bool = False
    beam: int | None = None
    lenpen: float | None = None
    shortlist: Path | None = None
    bleu: float | None = None
    bleu_signature: str | None = None

    def check(self) -> None:
        """InputError for options that are invalid in themselves."""
        if self.dtype not in WEIGHTS:
            raise InputError(f"`dtype` must be one of {', '.join(WEIGHTS)}, got {self.dtype!r}")
        if self.beam is not None and not 1 <= self.beam <= MOST:
            raise InputError(f"`beam` must be in 1 … {MOST:,}, got {self.beam}")
        if self.lenpen is not None and not math.isfinite(self.lenpen):
            raise InputError(f"`lenpen` must be a number, got {self.lenpen}")
        if self.shortlist is not None and not self.shortlist.is_file():
            raise InputError(f"`shortlist`: no such file: {self.shortlist}")
        if (self.bleu is None) != (self.bleu_signature is None):
            raise InputError("`bleu` and `bleu_signature` belong together: give both or neither")
        if self.bleu is not None and not 0 <= self.bleu <= 100:
            raise InputError(f"`bleu` must be in 0 … 100, got {self.bleu}")
        for name in ("source_lang", "target_lang"):
            lang = getattr(self, name)
            if lang is not None and not is_language(lang):
                raise InputError(f"`{name}` must be a name as in dict.NAME.txt, got {lang!r}")


@dataclass(frozen=True)
class _Found:
    """A model and everything that is exported with it."""

    model: PlainModel
    source: Side | None
    target: Side
    positions: tuple[int | None, int]
    truncate_source: bool
    corpus: str | None
    notes: tuple[str, ...]


def export_checkpoint(
    checkpoint: Path,
    directory: Path,
    data: Path | None = None,
    wanted: Export | None = None,
    *,
    score: Score | None = None,
    force: bool = False,
) -> tuple[str, ...]:
    """Write the model of a checkpoint to a directory. Returns notes for the user about what was assumed.

    Nothing is written before it is certain that the model can be exported.

    Args:
        checkpoint: of a translation or language model of this package, or of fairseq's Transformer or LightConv.
        directory: the directory to create.
        data: the folder of the dictionaries; by default that of the training, or the checkpoint's own.
        wanted: all other options.
        score: for the model card, if `wanted` has no BLEU.
        force: replace an exported model.

    Raises:
        InputError: the checkpoint cannot be read or exported, something is missing, or the directory is in use.
        OSError: the directory cannot be written.
    """
    wanted = wanted or Export()
    wanted.check()
    check_new_directory(directory, force, EXPORTED_MODEL)
    found = _open(checkpoint, data, wanted)
    if wanted.bleu is not None:
        score = Score("BLEU", wanted.bleu, wanted.bleu_signature)
    card = ModelCard(found.corpus, shown(checkpoint.name), score)
    beam = wanted.beam or (1 if found.source is None else 5)
    save_exported(
        directory,
        found.model,
        source=found.source,
        target=found.target,
        max_source_positions=found.positions[0],
        max_target_positions=found.positions[1],
        truncate_source=found.truncate_source,
        weights=wanted.dtype,
        search=SearchDefaults(num_beams=beam, length_penalty=1.0 if wanted.lenpen is None else wanted.lenpen),
        shortlist=wanted.shortlist,
        card=card,
        force=force,
    )
    return found.notes


def _open(checkpoint: Path, data: Path | None, wanted: Export) -> _Found:
    state = read_any_checkpoint(checkpoint)
    opened = (_open_translation if has_encoder(state) else _open_language_model)(state, checkpoint, data, wanted)
    for which, side in (("source", opened.source), ("target", opened.target)):
        if side is not None:
            _check_text(side.text, which)
    return opened


def _open_translation(state: dict[str, Any], checkpoint: Path, data: Path | None, wanted: Export) -> _Found:
    opened = open_first(checkpoint, data, wanted.source_lang, wanted.target_lang, state)
    task, data = opened.task, opened.data
    text = find_text(
        task,
        data,
        bpe_codes=wanted.bpe_codes,
        sentencepiece=wanted.sentencepiece,
        tokenizer=wanted.tokenizer,
        lowercase=wanted.lowercase,
    )
    notes = text.notes
    if text.target.is_split and not text.source.is_split:
        name = dictionary_name(opened.target)
        notes += (f"no BPE merges and no sentencepiece model fit {name}: given translations cannot be scored",)
    corpus = _describe(data, read_corpus(data))
    model, longest = _plain(state, checkpoint, task)
    sizes = [_sizes(size) for size in (task.max_positions(), longest)]
    return _Found(
        model,
        _side(data, opened.source, text.source),
        _side(data, opened.target, text.target),
        (min(size[0] for size in sizes), min(size[1] for size in sizes)),
        bool(getattr(task.cfg, "truncate_source", False)),
        corpus,
        notes,
    )


def _open_language_model(state: dict[str, Any], checkpoint: Path, data: Path | None, wanted: Export) -> _Found:
    for name in ("source_lang", "target_lang", "tokenizer", "lowercase"):
        if getattr(wanted, name):
            raise InputError(f"`{name}` is not valid for a language model: its text is used as it is")
    settings = task_settings(state)
    data = find_data(settings, checkpoint, data, "dict.txt")
    task = _language_task(settings, data)
    _check_size(state, checkpoint, len(task.dictionary), data / "dict.txt")
    kind = kind_of(entries(task.dictionary))
    subwords, file = find_subwords(kind, data, "", wanted.bpe_codes, wanted.sentencepiece)
    model, longest = _plain(state, checkpoint, task)
    text = TextSide(Recipe("none", ""), subwords, file)
    corpus = _describe(data, read_corpus(data))
    return _Found(model, None, _side(data, None, text), (None, _sizes(longest)[-1]), False, corpus, ())


def _language_task(settings, data: Path):
    """fairseq's task of a language model's training. InputError if its models are not plain language models."""
    name = settings.get("_name") or settings.get("task")
    kind = tasks.TASK_REGISTRY.get(name, object)
    if not issubclass(kind, LanguageModelingTask):
        raise InputError(f"the checkpoint's task is {name!r}: only language_modeling and translation can be exported")
    for option, usual in (("self_target", False), ("past_target", False), ("add_bos_token", False)):
        if (value := settings.get(option)) not in (usual, None):
            raise InputError(f"the training's {option} {value} cannot be exported")
    size = settings.get("output_dictionary_size")
    if size is not None and size >= 0:
        raise InputError(f"the training's output_dictionary_size {size} cannot be exported")
    settings["data"] = str(data)
    try:
        return set_up_task(settings)
    except Exception as error:  # fairseq raises a bare one for text that is not UTF-8
        raise InputError(
            f"the dictionary of {data} cannot be read, or the task not be set up: {type(error).__name__}: {error}"
        ) from error


def _check_size(state: dict[str, Any], checkpoint: Path, entries: int, dictionary: Path) -> None:
    """InputError if a language model has embeddings for a different number of words."""
    table = re.compile(r"decoder\.embed_tokens\.(embeddings\.\d+\.0\.)?weight")
    rows = sum(len(value) for name, value in state["model"].items() if table.fullmatch(name))
    if rows and rows != entries:
        raise InputError(
            f"{checkpoint} has {rows:,} embeddings, but {dictionary} has {entries:,} entries: the dictionary does not "
            "match the checkpoint; check `data`"
        )


def _plain(state: dict[str, Any], checkpoint: Path, task) -> tuple[PlainModel, Any]:
    """(the plain model of a checkpoint, the maximum sequence lengths of fairseq's model)."""
    model = build_model(state, checkpoint, task)
    try:
        return plain_model(model), model.max_positions()
    except UnsupportedModelError as error:
        raise InputError(f"{checkpoint} cannot be exported: it has {error}") from error


def _sizes(size: Any) -> tuple[int, ...]:
    return tuple(min(int(one), _LARGEST) for one in (size if isinstance(size, tuple | list) else (size,)))


def _side(data: Path, lang: str | None, text: TextSide) -> Side:
    path = data / dictionary_name(lang)
    try:
        return Side(lang, path.read_bytes(), text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _check_text(text: TextSide, which: str) -> None:
    """InputError if the text cannot be encoded or decoded: report it now rather than at translation time."""
    actions: list[Callable[[], object]] = [text.encode, text.decode]
    for act in actions:
        try:
            act()
        except TokeniserError as error:
            raise InputError(f"{which}: {error}; or set `tokenizer` to none, for tokenised text") from error


def _describe(data: Path, corpus: dict[str, Any]) -> str | None:
    """A description of the corpus for the model card; None if nothing is known."""
    if not corpus:
        return None
    parts = [f"The corpus `{data.resolve().parent.name}` as `lightconv prepare` makes it"]
    splits = corpus.get("splits")
    if isinstance(splits, dict) and all(isinstance(name, str) for name in splits.values()):
        parts.append(", ".join(f"{split}: {name}" for split, name in splits.items()))
    return "; ".join(parts).replace("\n", " ") + "."
