"""Scores a released model on the test set that upstream released, or on sacreBLEU's: one row of the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightconv_plugin.cgroups import cores
from lightconv_plugin.checkpoints.exported import open_exported
from lightconv_plugin.checkpoints.loading import count_parameters
from lightconv_plugin.checkpoints.training_text import TOKENIZERS
from lightconv_plugin.errors import InputError
from lightconv_plugin.ops.instructions import cpu_name
from lightconv_plugin.paths import configs_dir
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.environment import compute_here
from lightconv_plugin.recipes.evaluation import evaluate
from lightconv_plugin.recipes.reproduce.rows import read_rows, write_row
from lightconv_plugin.recipes.reproduce.run import Reproduced, versions
from lightconv_plugin.recipes.reproduce.table import (
    RELEASED,
    check_table,
    default_results,
    default_table,
    render_released,
    write_table,
)
from lightconv_plugin.released import cache, fetch
from lightconv_plugin.released.models import Model, find
from lightconv_plugin.scoring import bleu
from lightconv_plugin.scoring.measuring import Measuring
from lightconv_plugin.text.recipe import Lowercase, Recipe
from lightconv_plugin.text.segmenters import SEGMENTERS, segmented

SCORES = ("bleu_tok", "sacrebleu", "chrf")


def reproduce_released(
    name: str, *, place: str | None = None, from_text: bool = False, results: Path | None = None
) -> Reproduced:
    """Make the row of a released model and rewrite the table; what the cache lacks is downloaded.

    Args:
        place: as for `fetch.get`
        from_text: translate sacreBLEU's raw test set, prepared as the exported model says, instead of the binarised one
        results: folder of rows and table; by default those of all reproductions

    Raises:
        InputError: the model or the test set cannot be had, or they do not belong together; or the exported model
            cannot prepare raw text as the training text was, or has other weights than the released ones.
    """
    model = find(name)
    if from_text and not model.task.sacrebleu:
        raise InputError(f"sacreBLEU has no test set of {model.task.name}: leave out `from_text`")
    if from_text and (kind := segmented(model.task.pair[0])):
        language = SEGMENTERS[kind].language
        raise InputError(f"how the {language} text was segmented is not known: leave out `from_text`")
    table = results.resolve() / "RESULTS.md" if results else default_table()
    check_table(table)
    compute_here()
    folder = fetch.get(model, place=place)
    began = time.perf_counter()
    if from_text:
        scores = _score_text(model)
    else:
        data = fetch.get_test_set(model, place=place)
        scores = _score_binarised(model, folder, data)
    seconds = time.perf_counter() - began
    where = (results or default_results()).resolve()
    path = write_row(where, _row(model, scores, seconds, from_text))
    write_table(where, table, configs_dir(), not_run=results is None)
    return Reproduced(path, table, render_released(read_rows(where)[RELEASED]))


def _score_binarised(model: Model, folder: Path, data: Path) -> dict[str, Any]:
    for lang in model.task.pair:
        name = f"dict.{lang}.txt"
        if not (data / name).is_file() or (data / name).read_bytes() != (folder / name).read_bytes():
            raise InputError(f"{data / name} is not the dictionary of {model.name}")
    how = Measuring(compound_split=model.task.compound_split, lowercase=model.task.lowercase)
    search = ["--beam", str(model.beam), "--lenpen", f"{model.lenpen:g}"]
    return evaluate(data, cache.checkpoint(model), options=search, how=how).values


def _score_text(model: Model) -> dict[str, Any]:
    from lightconv_plugin.generation.translator import Translator

    _check_exported(model)
    parameters = count_parameters(cache.checkpoint(model))
    source, references = _sacrebleu_text(model.task.sacrebleu, model.task.pair)
    say(f"translating {len(source):,} lines")
    with Translator(cache.exported(model), beam=model.beam, lenpen=model.lenpen, dtype="float32") as translator:
        began = time.perf_counter()
        translations = translator.translate(source)
        speed = len(source) / (time.perf_counter() - began)
    if problem := next((one.problem for one in translations if one.problem), None):
        raise InputError(f"a line of {model.task.sacrebleu} cannot be translated: {problem}")
    texts = [one.text for one in translations]
    report = bleu.score(texts, references, lang=model.task.pair[1], detok="none", lowercase=model.task.lowercase)
    scores = {name: getattr(report, name) for name in ("sacrebleu", "chrf", "signature", "chrf_signature")}
    return {**scores, "parameters": parameters, "sentences_per_second": speed}


def _check_exported(model: Model) -> None:
    """InputError unless the exported directory prepares raw text as in training and has the released weights."""
    exported = open_exported(cache.exported(model))
    text, weights = exported.source_text, exported.settings.weights
    again = f"run lightconv released {model.name} --dtype float32 first"
    if text is not None and text.is_split:
        raise InputError(
            f"{model.name} came without merges, so raw text cannot be split into its subwords: leave out `from_text`"
        )
    if weights != "float32":
        raise InputError(f"the weights in {exported.directory} are {weights}, not the released ones: {again}")
    steps = TOKENIZERS[model.task.tokenizer]
    lowercase: Lowercase = "last" if model.task.lowercase else ""
    for lang, side in zip(model.task.pair, (text, exported.target_text), strict=True):
        if side is not None and side.recipe != Recipe(lang=lang, lowercase=lowercase, **steps):
            raise InputError(f"{exported.directory} does not prepare text as {model.name} needs it: {again}")


def _sacrebleu_text(name: str, pair: Sequence[str]) -> tuple[list[str], list[str]]:
    """(source, reference) of a test set of sacreBLEU, which downloads it unless it has it."""
    from sacrebleu.utils import SACREBLEU_DIR, get_reference_files, get_source_file

    langs = "-".join(pair)
    try:
        files = get_source_file(name, langs), get_reference_files(name, langs)[0]
    except (OSError, SystemExit) as error:
        raise InputError(
            f"sacreBLEU cannot download {name} ({error}): run sacrebleu --download {name} -l {langs} where "
            f"there is a network, and copy its ~/.sacrebleu to {SACREBLEU_DIR}"
        ) from None
    source, reference = (Path(file).read_text(encoding="utf-8").split("\n")[:-1] for file in files)
    return source, reference


def _row(model: Model, scores: dict[str, Any], seconds: float, from_text: bool) -> dict[str, Any]:
    signatures = [scores[key] for key in ("signature", "chrf_signature") if key in scores]
    return {
        "task": RELEASED,
        "system": f"{model.name}{'.from_text' if from_text else ''}",
        "model": model.name,
        "title": model.task.name,
        "test": f"sacreBLEU's {model.task.sacrebleu}" if from_text else f"upstream's {model.test_folder}",
        "from_text": from_text,
        "scores": {name: scores[name] for name in SCORES if name in scores},
        "paper": model.bleu,
        "beam": model.beam,
        "lenpen": model.lenpen,
        "compound_split": model.task.compound_split and not from_text,
        "parameters": scores["parameters"],
        "seconds": round(seconds, 1),
        "sentences_per_second": round(scores["sentences_per_second"], 2),
        "machine": f"{cpu_name()}, {cores()} core{'s' if cores() > 1 else ''}",
        "signatures": signatures,
        "versions": [versions()],
    }
