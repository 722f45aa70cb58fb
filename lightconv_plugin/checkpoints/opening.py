"""Opens fairseq checkpoints: reads them safely, finds their dictionaries, and builds task and model.

Importing this imports fairseq. Errors say what to do.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, tasks
from fairseq.data.data_utils import infer_language_pair
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask
from omegaconf import OmegaConf

from lightconv_plugin.checkpoints.contents import check_contents
from lightconv_plugin.checkpoints.loading import check_checkpoint, safe_torch_load
from lightconv_plugin.errors import EnsembleError, InputError, TranslationError
from lightconv_plugin.models.architectures import check_architecture
from lightconv_plugin.quiet import quietly
from lightconv_plugin.text.dictionary import Dictionary

_TABLE = "{}.embed_tokens.weight"


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of an encoder-decoder; see `read_any_checkpoint`.

    Also raises TranslationError if it is the checkpoint of a language model.
    """
    state = read_any_checkpoint(path)
    if not has_encoder(state):
        raise TranslationError(f"{path} has no encoder: it is a checkpoint of a language model, which cannot translate")
    return state


def has_encoder(state: dict[str, Any]) -> bool:
    """Whether a checkpoint is of an encoder-decoder, judging by its parameters."""
    return any(name.startswith("encoder.") for name in state["model"])


def read_any_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, converted to the current layout by fairseq; only tensors and settings are loaded.

    Raises InputError if there is no such file, and it or its subclass TranslationError if it is not a checkpoint.
    """
    check_checkpoint(path)
    try:
        with quietly(user_warnings=False):
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    except Exception as error:
        content = safe_torch_load(path)  # raises a precise error if the file is the problem
        try:
            check_contents(path, content)
        except InputError as wrong:
            raise TranslationError(str(wrong)) from error
        if isinstance(error, InputError):
            raise TranslationError(f"{path}: {error}") from error
        raise TranslationError(
            f"{path} is not a checkpoint of fairseq: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    if not isinstance(state.get("model"), dict) or not (state.get("cfg") or state.get("args")):
        raise TranslationError(f"{path} is not a checkpoint of fairseq: it has no parameters or no settings")
    try:
        check_architecture(state)
    except InputError as error:
        raise TranslationError(f"{path}: {error}") from error
    return state


def task_settings(state: dict[str, Any]):
    """The task's part of a checkpoint's configuration; its items can be read and changed."""
    if state.get("args"):  # a checkpoint from before 2021
        state["cfg"], state["args"] = state.get("cfg") or convert_namespace_to_omegaconf(state["args"]), None
    task = state["cfg"].task
    if isinstance(task, Namespace):  # of a task without a dataclass
        return vars(task)
    OmegaConf.set_struct(task, False)
    return task


def set_up_task(settings):
    """fairseq's task with these settings, changed or not."""
    with quietly(user_warnings=False):
        namespace = Namespace(**settings) if isinstance(settings, dict) else settings
        return tasks.setup_task(namespace, from_checkpoint=True)


def find_data(settings, checkpoint: Path, data: Path | None, dictionaries: str = "dict.*.txt") -> Path:
    """The folder with the dictionaries: `data`, or the one in the training's settings, or the checkpoint's own.

    dictionaries: the pattern of their names. Raises TranslationError if none of these folders has dictionaries.
    """
    named = [Path(part) for part in str(settings.get("data") or "").split(":")[:1] if part]
    if data is not None and ":" in str(data):
        raise TranslationError(f"`data` {data} has a colon, which separates folders in fairseq: name it by a link")
    tried = [data] if data is not None else [*named, checkpoint.absolute().parent]
    inner = None
    for folder in tried:
        with contextlib.suppress(OSError):  # such as a folder of another user that may not be entered
            if any(folder.glob(dictionaries)):
                return folder
            if any(folder.glob(f"data-bin/{dictionaries}")):
                inner = inner or folder / "data-bin"
    places, names = " nor in ".join(map(str, tried)), dictionaries.replace("*", "XX")
    raise TranslationError(f"no dictionaries ({names}) in {places}: give {inner or 'their folder'} as `data`")


def languages(settings, data: Path, source: str | None, target: str | None) -> tuple[str, str]:
    """(source, target): as given, or as in the training's settings, or from the names of the files in `data`.

    Raises TranslationError if they cannot be determined, or have no dictionary.
    """
    there = sorted(path.name.removeprefix("dict.").removesuffix(".txt") for path in data.glob("dict.*.txt"))
    source, target = source or settings.get("source_lang"), target or settings.get("target_lang")
    if source is None or target is None:
        inferred = infer_language_pair(str(data))  # from the names of the binarised texts, if there are any
        source, target = source or inferred[0], target or inferred[1]
    if source is None or target is None:
        raise TranslationError(
            f"neither the checkpoint nor {data} names the languages: give `source_lang` and `target_lang`, "
            f"each one of {', '.join(there)}"
        )
    for option, lang in (("source_lang", source), ("target_lang", target)):
        if lang not in there:
            raise TranslationError(f"`{option}` {lang}: {data} has no dict.{lang}.txt; it has {', '.join(there)}")
    return source, target


def build_task(settings, data: Path, source: str, target: str):
    """The training's fairseq task, with the dictionaries in `data`.

    Raises TranslationError unless the task is translation from one language to another with beam search.
    """
    name = settings.get("_name") or settings.get("task")
    kind = tasks.TASK_REGISTRY.get(name, object)
    if not issubclass(kind, TranslationTask):
        raise TranslationError(f"the checkpoint's task is {name!r}: only tasks derived from translation are supported")
    fast = tasks.TASK_REGISTRY["translation_fast"]
    if kind.build_generator not in (TranslationTask.build_generator, fast.build_generator):
        raise TranslationError(f"the checkpoint's task {name!r} uses its own search instead of beam search")
    settings["data"], settings["source_lang"], settings["target_lang"] = str(data), source, target
    settings["eval_bleu"] = False  # it would build a generator that only validation needs
    try:
        return set_up_task(settings)
    except Exception as error:  # fairseq raises a bare one for text that is not UTF-8
        raise TranslationError(
            f"the dictionaries of {data} cannot be read, or the task not be set up: {type(error).__name__}: {error}"
        ) from error


def check_sizes(state: dict[str, Any], checkpoint: Path, task, data: Path) -> None:
    """Raise TranslationError if the sizes of a dictionary and of the embeddings differ.

    Embeddings that are not a single table, such as adaptive ones, are left to `build_model`.
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
    """The first checkpoint of an ensemble with its task. `state` may be handed over to a model.

    trained: the languages in the training's settings, None if it is not named there.
    """

    state: dict[str, Any]
    task: Any
    data: Path
    source: str
    target: str
    trained: tuple[str | None, str | None]


def open_first(
    path: Path, data: Path | None, source: str | None, target: str | None, state: dict[str, Any] | None = None
) -> Opened:
    """Read a checkpoint and its dictionaries, and check that they match.

    state: the result of `read_checkpoint`, if it was already read. Raises the TranslationErrors of the functions above.
    """
    state = read_checkpoint(path) if state is None else state
    settings = task_settings(state)
    trained = settings.get("source_lang"), settings.get("target_lang")
    data = find_data(settings, path, data)
    source, target = languages(settings, data, source, target)
    task = build_task(settings, data, source, target)
    check_sizes(state, path, task, data)
    return Opened(state, task, data, source, target, trained)


def check_direction(settings, checkpoint: Path, first: Path, trained: tuple[str | None, str | None]) -> None:
    """Raise EnsembleError if a training's settings name other languages than those of the ensemble's first model."""
    for name, expected in zip(("source_lang", "target_lang"), trained, strict=True):
        if None not in (expected, found := settings.get(name)) and found != expected:
            raise EnsembleError(
                f"{first} was trained with {name} {expected}, {checkpoint} with {found}: they cannot form an ensemble"
            )


def check_dictionaries(settings, checkpoint: Path, first: Path, opened: Opened) -> None:
    """Raise EnsembleError if a training had other dictionaries than the ensemble's first model, as far as both are
    there: of the same size, they would not be noticed. InputError if one cannot be read."""
    try:
        data = find_data(settings, checkpoint, None)
    except TranslationError:
        return
    for name in (f"dict.{lang}.txt" for lang in (opened.source, opened.target)):
        if (data / name).is_file():
            theirs, ours = (Dictionary.load(folder / name) for folder in (data, opened.data))
            if theirs.symbols != ours.symbols:
                raise EnsembleError(
                    f"{first} and {checkpoint} have different dictionaries ({opened.data / name}, {data / name}): they "
                    "cannot form an ensemble"
                )


def build_model(state: dict[str, Any], checkpoint: Path, task):
    """The model of a checkpoint in evaluation mode, on the CPU, float32; raises TranslationError if that fails."""
    task_settings(state)["eval_bleu"] = False
    try:
        with quietly(user_warnings=False):
            models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], task=task, state=state)
    except Exception as error:
        # The configuration may ask for anything that is missing: an architecture, a module, parameters of other shapes.
        raise TranslationError(
            f"{checkpoint} cannot be built: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    return models[0].float().eval()
