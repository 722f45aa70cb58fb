"""Scores of a checkpoint: by beam search of a subset, or the perplexity of a language model.

Log and scores are left beside the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.checkpoints.parameters import count_parameters
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write, read_lines
from lightconv_plugin.recipes.steps import say
from lightconv_plugin.scoring.bleu import check_language
from lightconv_plugin.scoring.generate_log import parse_gen_log
from lightconv_plugin.scoring.measuring import Measuring, Scored, languages_of, score, with_facts
from lightconv_plugin.scoring.perplexity import evaluation, parse_eval_lm_log, task_of


def results_of(checkpoint: Path, subset: str) -> tuple[Path, Path]:
    """Where `evaluate` leaves the log of fairseq-generate and the scores: CHECKPOINT.SUBSET.gen and .score."""
    name = f"{checkpoint.name.removesuffix('.pt')}.{subset}"
    return checkpoint.with_name(f"{name}.gen"), checkpoint.with_name(f"{name}.score")


def evaluate(
    data: Path,
    checkpoint: Path,
    *,
    subset: str = "test",
    options: Sequence[str] = (),
    how: Measuring | None = None,
    against: Path | None = None,
    samples: int | None = None,
    as_json: bool = True,
    warn: Callable[[str], None] = say,
) -> Scored:
    """Scores of a checkpoint on a subset of binarised data, with its number of parameters and sentences a second.

    options: of fairseq-generate, after `fairseq_generate.DEFAULTS`; the last of several equal ones counts.
    how: what to measure and how (default: BLEU), completed by what the data folder says.
    against, samples: another system's log for a test of significance, see `measuring.score`.
    as_json: the file of scores is JSON, otherwise the lines for people.
    warn: is called with whatever makes the scores doubtful.

    Raises:
        InputError: an argument is wrong, which is found before any work; generating or scoring failed.
    """
    from lightconv_plugin.generation import fairseq_generate  # takes the seconds of importing fairseq

    languages_of(data, subset)
    for path, what in (checkpoint, "checkpoint"), (against, "file"):
        if path is not None and not path.is_file():
            raise InputError(f"no {what} {path}")
    how = (how or Measuring()).with_data(data, subset)
    if how.metric == "bleu" and how.detok != "none":
        check_language(how.lang)
    log, result = results_of(checkpoint, subset)
    say(f"generating for {subset}: {log}")
    text = fairseq_generate.generate_log(data, checkpoint, subset, options)
    with atomic_write(log) as file:
        file.write(text)
    generated = parse_gen_log(read_lines(log), log)
    how.check_decoded(generated, log)
    scored = score(how, generated.hypotheses, generated.references, warn=warn, against=against, samples=samples)
    facts = {"parameters": count_parameters(checkpoint)}
    if generated.sentences_per_second is not None:
        facts["sentences_per_second"] = generated.sentences_per_second
    scored = with_facts(scored, facts)
    with atomic_write(result) as file:
        file.write(scored.text(as_json))
    return scored


def tokens_of(data: Path, subset: str) -> int:
    """Tokens of a binarised text, </s> of every line included."""
    from fairseq.data import data_utils

    dataset = data_utils.load_indexed_dataset(str(data / subset), None)  # its sizes live in the file it keeps open
    return int(dataset.sizes.sum())


def check_data(data: Path, subset: str) -> None:
    """Raises InputError where a folder lacks the dictionary or the subset of a language model's data."""
    for path, what in ((data / "dict.txt", "a dictionary"), (data / f"{subset}.idx", "a subset")):
        if not path.is_file():
            raise InputError(f"{path} is missing: expected a folder of binarised data for language models, with {what}")


def measure_perplexity(
    data: Path, checkpoint: Path, subset: str = "test", context_window: int = 0, options: Sequence[str] = ()
) -> dict[str, Any]:
    """The perplexity of a language model, by fairseq-eval-lm; `options` are further ones of its own.

    Its log is left beside the checkpoint, as CHECKPOINT.SUBSET.eval_lm, and what is returned as CHECKPOINT.SUBSET.ppl:
    perplexity, loss (bits), tokens, subset, context_window, tokens_per_sample and parameters.

    Raises:
        InputError: an argument is wrong, fairseq-eval-lm failed, or it left tokens out.
    """
    from lightconv_plugin.generation import fairseq_generate

    check_data(data, subset)
    if not checkpoint.is_file():
        raise InputError(f"no checkpoint {checkpoint}")
    with (data / "dict.txt").open(encoding="utf-8") as file:
        words = sum(1 for _ in file)
    task = task_of(safe_torch_load(checkpoint))
    if "tokens_per_sample" not in task:
        raise InputError(f"{checkpoint} is not of a language model: its task has no tokens_per_sample")
    own = evaluation(task, words, context_window)
    text = fairseq_generate.eval_lm_log(data, checkpoint, subset, [*own, *options])
    with atomic_write(log := checkpoint.with_suffix(f".{subset}.eval_lm")) as file:
        file.write(text)
    found = parse_eval_lm_log(read_lines(log), log)
    tokens = tokens_of(data, subset)
    if found.tokens < tokens:
        raise InputError(f"fairseq-eval-lm scored {found.tokens} of the {tokens} tokens of {subset}, see {log}")
    result = {
        "perplexity": found.perplexity,
        "loss": found.loss,
        "tokens": tokens,
        "subset": subset,
        "context_window": context_window,
        "tokens_per_sample": int(task["tokens_per_sample"]),
        "parameters": count_parameters(checkpoint),
    }
    with atomic_write(checkpoint.with_suffix(f".{subset}.ppl")) as file:
        file.write(json.dumps(result) + "\n")
    return result
