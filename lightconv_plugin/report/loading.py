"""Builds a run's model from its checkpoint, by safe loading, and reads sentences for it with fairseq."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightconv_plugin  # noqa: F401  (registers the models with fairseq)
from lightconv_plugin.checkpoints.loading import search_settings
from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import short
from lightconv_plugin.quiet import quietly
from lightconv_plugin.report.kernels import LONGEST_SHOWN
from lightconv_plugin.scoring.measuring import stem_of

# How many positions kernels are gathered from: enough for a stable mean; takes seconds for a small model on a CPU.
MOST_SENTENCES, MOST_TOKENS = 64, 3000
LONGEST = 256  # a language model's blocks are cut to this
SHOWN = 2


@dataclass
class Sentence:
    """One sentence: the model's arguments (a batch of one), and the token at each position by side."""

    inputs: dict
    tokens: dict[str, list[str]]


@dataclass
class Opened:
    """A model in evaluation mode. task: with the dictionaries from `folder`; if it is None, `missing` says why.

    checkpoint: the name of its file.
    """

    model: nn.Module
    checkpoint: str
    task: Any
    folder: Path
    missing: str = ""


def open_model(checkpoint: Path, data_bin: Path | None) -> Opened:
    """Build and load the checkpoint's model.

    data_bin: a folder of binarised data to use instead of the one named in the checkpoint. Without dictionaries, the
    vocabulary sizes are taken from the embeddings.

    Raises:
        InputError: the model does not match the data, or the checkpoint has no model.
    """
    from lightconv_plugin.checkpoints import opening  # which imports fairseq

    state = opening.read_any_checkpoint(checkpoint)
    settings = opening.task_settings(state)
    for name in search_settings(settings):  # those of its validation; the page searches by the defaults
        del settings[name]
    _choose_direction(settings)
    if data_bin is not None:
        settings["data"] = str(data_bin)
    # A single sentence needs no padding.
    for name, value in (("num_batch_buckets", 0), ("required_seq_len_multiple", 1)):
        if name in settings:
            settings[name] = value
    missing = find_missing(settings)
    task = _task_without_data(settings, state["model"]) if missing else opening.set_up_task(settings)
    try:
        model = opening.build_model(state, checkpoint, task)
    except InputError as error:
        where = "" if missing else f" with the dictionaries of {_folder(settings)}"
        why = " ".join(str(error.__cause__).split())[:300]
        raise InputError(f"{checkpoint.name} cannot be loaded{where}: {why}") from error
    return Opened(model, checkpoint.name, None if missing else task, _folder(settings), missing)


def _choose_direction(settings) -> None:
    """Choose the first direction of a multilingual model. With one, fairseq's task is that of a translation."""
    pairs = settings.get("lang_pairs")
    if pairs and not (settings.get("source_lang") or settings.get("target_lang")):
        first = pairs.split(",")[0] if isinstance(pairs, str) else pairs[0]
        settings["source_lang"], settings["target_lang"] = first.split("-")


def _folder(settings) -> Path:
    return short(Path(str(settings.get("data")).split(":")[0]))  # fairseq accepts several, used in turn by epoch


def find_missing(settings) -> str:
    """What is missing from the binarised data named in the task's settings, as a sentence; "" if nothing is."""
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.translation import TranslationTask

    folder = _folder(settings)
    if not settings.get("data") or not folder.is_dir():
        return f"the binarised data are not found: there is no folder {folder if settings.get('data') else 'named'}"
    languages = [settings.get("source_lang"), settings.get("target_lang")]
    names = [f"dict.{lang}.txt" for lang in languages if lang] or ["dict.txt"]
    if issubclass(TASK_REGISTRY.get(settings.get("_name", settings.get("task")), object), TranslationTask):
        names = names if all(languages) else []  # fairseq infers the languages from the file names
    lacking = [name for name in names if not (folder / name).is_file()]
    return f"{folder} does not hold the run's binarised data: no {' and no '.join(lacking)}" if lacking else ""


def _task_without_data(settings, parameters: dict[str, torch.Tensor]):
    from fairseq.tasks.language_modeling import LanguageModelingTask
    from fairseq.tasks.translation import TranslationTask

    cfg = Namespace(**settings)
    target = _dictionary(parameters, "decoder")
    if any(key.startswith("encoder.") for key in parameters):
        return TranslationTask(cfg, _dictionary(parameters, "encoder"), target)
    return LanguageModelingTask(cfg, target, target)


def _dictionary(parameters: dict[str, torch.Tensor], side: str):
    """A dictionary with one symbol per row of the side's embeddings."""
    from fairseq.data import Dictionary

    prefix = f"{side}.embed_tokens."
    # An adaptive input keeps the rows of each band in embeddings.N.0.weight.
    tables = [v for k, v in parameters.items() if k == f"{prefix}weight" or (k.startswith(prefix) and ".0.weight" in k)]
    if not tables or any("char" in key for key in parameters if key.startswith(prefix)):
        raise InputError(f"the model's {side} cannot be built without its dictionary")
    dictionary = Dictionary()
    for i in range(sum(len(table) for table in tables) - len(dictionary)):
        dictionary.add_symbol(f"symbol{i}")
    return dictionary


def split_of(folder: Path, task) -> str:
    """The subset that sentences are taken from: test if the binarised data have it, with references; or else valid."""
    settings = getattr(task, "cfg", None) or getattr(task, "args", None)
    source, target = (getattr(settings, name, None) for name in ("source_lang", "target_lang"))
    if source and target:
        there = Path(f"{stem_of(folder, 'test', source, target)}.{target}.idx").is_file()
    else:
        there = any(folder.glob("test.*idx"))
    return "test" if there else "valid"


def load_dataset(task, split: str):
    if split not in task.datasets:
        with quietly():
            task.load_dataset(split)
    return task.dataset(split)


def spread(total: int, number: int) -> list[int]:
    """`number` evenly spaced integers in 0 … total − 1 (all, if there are fewer)."""
    number = min(number, total)
    return [(2 * i + 1) * total // (2 * number) for i in range(number)]


def sentences(task, dataset) -> list[Sentence]:
    """Evenly spaced sentences of a dataset, up to MOST_TOKENS positions."""
    found, total = [], 0
    for index in spread(len(dataset), MOST_SENTENCES):
        sample = dataset.collater([dataset[index]])
        inputs = {k: v for k, v in sample["net_input"].items() if v is not None}
        if "prev_output_tokens" not in inputs:
            inputs["src_tokens"] = inputs["src_tokens"][:, :LONGEST]
            inputs["src_lengths"] = inputs["src_lengths"].clamp(max=LONGEST)
        found.append(Sentence(inputs, _tokens(task, inputs)))
        total += max(tokens.shape[1] for name, tokens in inputs.items() if name.endswith("tokens"))
        if total >= MOST_TOKENS:
            break
    return found


def _tokens(task, inputs: dict) -> dict[str, list[str]]:
    if "prev_output_tokens" in inputs:
        sides = {
            "encoder": (inputs["src_tokens"], task.source_dictionary),
            "decoder": (inputs["prev_output_tokens"], task.target_dictionary),
        }
    else:
        sides = {"decoder": (inputs["src_tokens"], task.source_dictionary)}
    return {side: [words[int(i)] for i in tokens[0]] for side, (tokens, words) in sides.items()}


def choose_shown(found: Sequence[Sentence]) -> list[int]:
    """The two sentences to draw over time: preferably of medium length, and short enough to be drawn completely."""
    lengths = [max(map(len, sentence.tokens.values())) for sentence in found]

    def rank(i: int) -> tuple:
        return lengths[i] > LONGEST_SHOWN, -min(lengths[i], 18), i

    return sorted(sorted(range(len(found)), key=rank)[:SHOWN])
