"""Opens fairseq checkpoints (checkpoints/opening.py) for translation. Importing this imports fairseq."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.opening import (
    build_model,
    check_dictionaries,
    check_direction,
    check_sizes,
    open_first,
    read_checkpoint,
    task_settings,
)
from lightconv_plugin.checkpoints.training_text import NO_CODES, find_text
from lightconv_plugin.errors import InputError, TranslationError, UnsupportedModelError
from lightconv_plugin.generation.translation_models import Pipeline, TranslationModels, default_search, encode_later
from lightconv_plugin.models.plain import plain_encoder_decoder
from lightconv_plugin.text.sides import TokeniserError


def open_checkpoints(
    paths: Sequence[Path], data: Path | None, source: str | None, target: str | None, text: dict[str, Any]
) -> TranslationModels:
    """An ensemble of checkpoints, with the files of the text pipeline that are found beside their training data.

    text: the arguments of `build_pipeline` except task and data. Raises the TranslationErrors of opening.py, and one if
    a model has a part that only fairseq can run.
    """
    opened = open_first(paths[0], data, source, target)
    # Before the models are built, because most mistakes are found here.
    pipeline = build_pipeline(opened.task, opened.data, **text)
    task, models, sizes = opened.task, [], [opened.task.max_positions()]
    for number, path in enumerate(paths):
        state = read_checkpoint(path) if number else opened.state
        if number:
            check_direction(task_settings(state), path, paths[0], opened.trained)
            check_sizes(state, path, task, opened.data)
            if data is None:
                check_dictionaries(task_settings(state), path, paths[0], opened)
        model = build_model(state, path, task)
        sizes.append(model.max_positions())
        try:
            models.append(plain_encoder_decoder(model))
        except UnsupportedModelError as error:
            raise TranslationError(f"{path} can only be run by fairseq-generate: {error} is not supported") from error
    return TranslationModels(
        models,
        task.source_dictionary,
        task.target_dictionary,
        opened.source,
        opened.target,
        min(int(size[0] if isinstance(size, (tuple, list)) else size) for size in sizes),
        bool(getattr(task.cfg, "truncate_source", False)),
        pipeline,
        default_search(task.target_dictionary),
    )


def build_pipeline(task, data: Path, **options: Any) -> Pipeline:
    """The Pipeline for what `find_text` finds; see there for the arguments and errors."""
    text = find_text(task, data, **options)
    try:
        unknown = text.target.is_split and options.get("bpe_codes") != NO_CODES
        target = None if unknown else encode_later(text.target)
        return Pipeline(text.source.encode(), text.target.decode(), text.notes, target)
    except TokeniserError as error:
        raise TranslationError(f"{error}; or set `tokenizer` to none, for tokenised text") from error
    except InputError as error:
        raise TranslationError(str(error)) from error
