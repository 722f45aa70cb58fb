"""From checkpoints of fairseq's translation models to models that search, safely, with errors that say what to do."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation.searcher import TranslationError
from lightconv_plugin.generation.text_pipeline import build_pipeline
from lightconv_plugin.generation.translation_models import TranslationModels

_TABLE = "{}.embed_tokens.weight"


@contextlib.contextmanager
def without_progress() -> Iterator[None]:
    """Without fairseq's messages about each thing that it loads and hydra's about fairseq; logged warnings stay."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logging.disable(before)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of an encoder-decoder; see `read_any_checkpoint`.

    Raises TranslationError too where it is one of a language model.
    """
    state = read_any_checkpoint(path)
    if not has_encoder(state):
        raise TranslationError(
            f"{path} has no encoder: it is a checkpoint of a language model, and only translation models translate"
        )
    return state


def has_encoder(state: dict[str, Any]) -> bool:
    """Whether a checkpoint is of an encoder-decoder, by its parameters."""
    return any(name.startswith("encoder.") for name in state["model"])


def read_any_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, brought to today's layout by fairseq; only tensors and settings are loaded.

    Raises TranslationError (or its base, InputError) where there is no such file, or it is not a checkpoint.
    """
    if not path.is_file():
        raise TranslationError(f"no such checkpoint: {path}")
    from fairseq import checkpoint_utils

    try:
        with without_progress():
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    except Exception as error:
        safe_torch_load(path)  # says what is wrong with the file, if it is the file
        raise TranslationError(
            f"{path} is not a checkpoint of fairseq: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    if not isinstance(state.get("model"), dict) or not (state.get("cfg") or state.get("args")):
        raise TranslationError(f"{path} is not a checkpoint of fairseq: it has no parameters, or no settings with them")
    return state


def task_settings(state: dict[str, Any]):
    """The task's part of a checkpoint's configuration; its fields can be read and changed."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    if state.get("args"):  # a checkpoint of before 2021
        state["cfg"], state["args"] = state.get("cfg") or convert_namespace_to_omegaconf(state["args"]), None
    OmegaConf.set_struct(state["cfg"].task, False)
    return state["cfg"].task


def find_data(settings, checkpoint: Path, data: Path | None, dictionaries: str = "dict.*.txt") -> Path:
    """The folder with the dictionaries: `data`, or the one that the training names, or the checkpoint's own.

    dictionaries: the pattern of their names. Raises TranslationError where none of them has dictionaries.
    """
    named = [Path(part) for part in str(settings.get("data") or "").split(":")[:1] if part]
    tried = [data] if data is not None else [*named, checkpoint.absolute().parent]
    for folder in tried:
        if any(folder.glob(dictionaries)):
            return folder
    places, names = " nor in ".join(map(str, tried)), dictionaries.replace("*", "XX")
    raise TranslationError(f"no dictionaries ({names}) in {places}: give their folder as `data`")


def languages(settings, data: Path, source: str | None, target: str | None) -> tuple[str, str]:
    """(source, target): as given, or as the training has it, or by the names of the dictionaries in `data`.

    Raises TranslationError where they cannot be told, or have no dictionary.
    """
    there = sorted(path.name.removeprefix("dict.").removesuffix(".txt") for path in data.glob("dict.*.txt"))
    source, target = source or settings.get("source_lang"), target or settings.get("target_lang")
    if source is None or target is None:
        from fairseq.data.data_utils import infer_language_pair

        inferred = infer_language_pair(str(data))  # from the names of the binarised texts, if there are any
        source, target = source or inferred[0], target or inferred[1]
    if source is None or target is None:
        raise TranslationError(
            f"neither the checkpoint nor {data} tells the languages: give `source_lang` and `target_lang`, "
            f"of {', '.join(there)}"
        )
    for option, lang in (("source_lang", source), ("target_lang", target)):
        if lang not in there:
            raise TranslationError(f"`{option}` {lang}: {data} has no dict.{lang}.txt; it has {', '.join(there)}")
    return source, target


def build_task(settings, data: Path, source: str, target: str):
    """fairseq's task of the training with the dictionaries of `data`.

    Raises TranslationError where the task is not one of translation from one language to another by beam search.
    """
    from fairseq import tasks
    from fairseq.tasks.translation import TranslationTask

    from lightconv_plugin.generation.task import TranslationFastTask

    name = settings.get("_name") or settings.get("task")
    kind = tasks.TASK_REGISTRY.get(name, object)
    if not issubclass(kind, TranslationTask):
        raise TranslationError(f"the checkpoint's task is {name!r}: only translation and tasks built on it are known")
    if kind.build_generator not in (TranslationTask.build_generator, TranslationFastTask.build_generator):
        raise TranslationError(f"the checkpoint's task {name!r} uses its own search instead of beam search")
    settings.data, settings.source_lang, settings.target_lang = str(data), source, target
    settings.eval_bleu = False  # what it would build is for the validation
    try:
        with without_progress():
            return tasks.setup_task(settings, from_checkpoint=True)
    except (OSError, ValueError) as error:
        raise TranslationError(f"the dictionaries of {data} cannot be read: {error}") from error


def check_sizes(state: dict[str, Any], checkpoint: Path, task, data: Path) -> None:
    """TranslationError where a dictionary has another number of entries than the embeddings have rows.

    Embeddings that are not one table, such as adaptive ones, are left to `build_model`.
    """
    cfg = task.cfg
    sides = (("encoder", cfg.source_lang, task.source_dictionary), ("decoder", cfg.target_lang, task.target_dictionary))
    for side, lang, dictionary in sides:
        table = state["model"].get(_TABLE.format(side))
        if table is not None and len(table) != len(dictionary):
            raise TranslationError(
                f"{checkpoint} has {len(table):,} embeddings in its {side}, but {data / f'dict.{lang}.txt'} has "
                f"{len(dictionary):,} entries: the dictionary does not match the checkpoint; check `data`, "
                "`source_lang` and `target_lang`"
            )


@dataclass
class Opened:
    """The first checkpoint of an ensemble with its task. `state` may be given away to a model."""

    state: dict[str, Any]
    task: Any
    data: Path
    source: str
    target: str


def open_first(
    path: Path, data: Path | None, source: str | None, target: str | None, state: dict[str, Any] | None = None
) -> Opened:
    """Read a checkpoint and the dictionaries that belong to it, and check that they fit.

    state: of `read_checkpoint`, if it was read already. Raises TranslationError as the functions above.
    """
    state = read_checkpoint(path) if state is None else state
    settings = task_settings(state)
    data = find_data(settings, path, data)
    source, target = languages(settings, data, source, target)
    task = build_task(settings, data, source, target)
    check_sizes(state, path, task, data)
    return Opened(state, task, data, source, target)


def build_model(state: dict[str, Any], checkpoint: Path, task):
    """The model of a checkpoint in evaluation mode, on the CPU, float32. TranslationError where it does not fit."""
    from fairseq import checkpoint_utils

    task_settings(state).eval_bleu = False
    try:
        with without_progress():
            models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], task=task, state=state)
    except Exception as error:
        # Whatever its configuration asks for and is not there: an architecture, a module, parameters of other shapes.
        raise TranslationError(
            f"{checkpoint} cannot be built: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    return models[0].float().eval()


def open_checkpoints(
    paths: Sequence[Path], data: Path | None, source: str | None, target: str | None, text: dict[str, Any]
) -> TranslationModels:
    """An ensemble of checkpoints, with what is found beside the data of their training.

    text: the arguments of `build_pipeline` beyond task and data. Raises TranslationError as the functions above, and
    where a model has something that only fairseq can run.
    """
    opened = open_first(paths[0], data, source, target)
    # Before the models are built: this is where most mistakes are.
    pipeline = build_pipeline(opened.task, opened.data, **text)
    from lightconv_plugin.models.plain import plain_model

    task, models, sizes = opened.task, [], [opened.task.max_positions()]
    for number, path in enumerate(paths):
        state = read_checkpoint(path) if number else opened.state
        if number:
            check_sizes(state, path, task, opened.data)
        model = build_model(state, path, task)
        sizes.append(model.max_positions())
        try:
            models.append(plain_model(model))
        except UnsupportedModelError as error:
            raise TranslationError(f"{path} cannot be run here, only by fairseq-generate: it has {error}") from error
    return TranslationModels(
        models,
        task.source_dictionary,
        task.target_dictionary,
        opened.source,
        opened.target,
        min(int(size[0] if isinstance(size, (tuple, list)) else size) for size in sizes),
        bool(getattr(task.cfg, "truncate_source", False)),
        pipeline,
    )
