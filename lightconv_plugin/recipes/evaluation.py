"""Scores a checkpoint: by beam search on a subset, or by the perplexity of a language model.

The log and the scores are written next to the checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.layouts import as_mapping
from lightconv_plugin.checkpoints.loading import (
    check_checkpoint,
    count_parameters,
    load_model_checkpoint,
    safe_torch_load,
)
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import check_writable, read_lines, write_text
from lightconv_plugin.generation import fairseq_generate
from lightconv_plugin.progress import say
from lightconv_plugin.scoring.generate_log import FAIRSEQS, parse_gen_log
from lightconv_plugin.scoring.measuring import (
    Languages,
    Measuring,
    Scored,
    check_binarised,
    languages_of,
    score,
    stem_of,
    with_facts,
)
from lightconv_plugin.scoring.perplexity import (
    batches,
    parse_eval_lm_log,
    plain,
    positions,
    samples,
    split_join,
    task_of,
)
from lightconv_plugin.scoring.significance import check_number, translations_in

# Options of fairseq's commands that are set here, or that would suppress output that is parsed here.
OWN = ("--path", "--gen-subset", "--user-dir", "--nbest", "--quiet", "--results-path", "--log-format")

DECODING = {"moses", "sentencepiece"}  # tokenisers and subwords of fairseq's that turn tokens into plain text


def check_options(options: Sequence[str], own: Sequence[str] = OWN, command: str = "fairseq-generate") -> None:
    """Raise InputError for options of fairseq's `command` that the caller cannot pass on: `own`."""
    for option in options:
        if (name := option.split("=")[0]) in own:
            raise InputError(f"{name} is set by this command: remove it from the options of {command}")
        if name == "--score-reference":
            raise InputError(f"{name} translates nothing: the BLEU of the references with themselves is 100")
        if name == "--num-shards":
            raise InputError(f"{name} takes a part of the subset alone: remove it from the options of {command}")


def languages_in(options: Sequence[str]) -> Languages:
    """(source, target) in options of fairseq-generate, None for those that are not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-s", "--source-lang")
    parser.add_argument("-t", "--target-lang")
    known, _ = parser.parse_known_args(list(options))
    return known.source_lang, known.target_lang


def direction(languages: tuple[str, str]) -> tuple[str, ...]:
    """The options for fairseq-generate to translate in this direction; without them, it takes any that the data has."""
    return ("--source-lang", languages[0], "--target-lang", languages[1])


def check_search(data: Path, options: Sequence[str], how: Measuring, warn: Callable[[str], None]) -> None:
    """Raise InputError for options of fairseq-generate that are wrong, or whose text it is unclear how to score.

    `warn` is called if words of the references are given to the search.
    """
    config = fairseq_generate.parse_options([str(data), *fairseq_generate.DEFAULTS, *options])
    names = {chosen._name for chosen in (config.bpe, config.tokenizer) if chosen is not None}
    how.check_decoded(bool(names & DECODING), "the text")
    fairseq_generate.check_strategy(config.generation)
    if config.generation.sampling and config.generation.beam != 1:
        raise InputError("--sampling draws as many translations as --beam, of which one is scored: give --beam 1")
    if given := config.generation.prefix_size:
        warn(
            f"--prefix-size {given}: each translation begins with as many words of its reference, which are scored too"
        )


def check_eval_lm(data: Path, options: Sequence[str]) -> None:
    """Raise InputError for options of fairseq-eval-lm that are wrong."""
    fairseq_generate.parse_options([str(data), *split_join(options)[1]], "eval_lm")


def results_of(checkpoint: Path, subset: str, log: str = "gen", values: str = "score") -> tuple[Path, Path]:
    """Where the log of fairseq's command and the values are written: CHECKPOINT.SUBSET.gen and .score by `evaluate`."""
    name = f"{checkpoint.name.removesuffix('.pt')}.{subset}"
    return checkpoint.with_name(f"{name}.{log}"), checkpoint.with_name(f"{name}.{values}")


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
    """Scores of a checkpoint on a subset of binarised data, with its parameters, sentences per second and search.

    options: for fairseq-generate, added after `fairseq_generate.DEFAULTS`; if one is repeated, the last one counts.
    how: what to measure and how (default: BLEU); missing settings are read from the data folder.
    against, samples: another system's log for a significance test, see `measuring.score`.
    as_json: write the scores as JSON instead of readable lines.
    warn: called with a message about anything that makes the scores unreliable.

    Raises:
        InputError: an argument is wrong (checked before any work), or generating or scoring failed.
    """
    how = how or Measuring()
    languages = languages_of(data, subset, languages_in(options), how.lang)
    how = how.with_data(data, subset, languages)
    check_checkpoint(checkpoint)
    if against is not None and not against.is_file():
        raise InputError(f"no file {against}")
    check_options(options)
    check_references(data, subset, languages)
    check_direction(checkpoint, data, subset, languages, options)
    if against is not None:
        theirs, _ = translations_in(against, how.check_decoded)
        check_number(against, theirs, sentences_of(data, subset, languages))
    if how.raw_ref is not None:
        lines, sentences = len(read_lines(how.raw_ref)), sentences_of(data, subset, languages)
        if lines != sentences:
            raise InputError(f"{how.raw_ref} has {lines} lines, but {subset} has {sentences} sentences")
    how.check_language()
    options = [*options, *direction(languages)]
    check_search(data, options, how, warn)
    log, result = results_of(checkpoint, subset)
    check_writable(log)
    say(f"generating for {subset}: {log}")
    text = fairseq_generate.generate_log(data, checkpoint, subset, options)
    result.unlink(missing_ok=True)  # the scores of another log
    write_text(log, text)
    generated = parse_gen_log(read_lines(log), log)
    how.check_decoded(generated.decoded, log)
    scored = score(how, generated.hypotheses, generated.references, warn=warn, against=against, samples=samples)
    facts: dict[str, float | str | None] = {"parameters": count_parameters(checkpoint)}
    facts |= {"search": FAIRSEQS, **generated.facts()}
    scored = with_facts(scored, facts)
    write_text(result, scored.text(as_json))
    return scored


def sentences_of(data: Path, subset: str, languages: tuple[str, str]) -> int:
    """Number of sentences in a subset of binarised parallel text."""
    from fairseq.data import data_utils

    return len(data_utils.load_indexed_dataset(f"{stem_of(data, subset, *languages)}.{languages[0]}", None))


def check_references(data: Path, subset: str, languages: tuple[str, str]) -> None:
    """Raise InputError if a subset of binarised parallel text has no target side, as after --only-source."""
    if not Path(f"{stem_of(data, subset, *languages)}.{languages[1]}.idx").is_file():
        raise InputError(f"{data} has no references for {subset}: binarise its {languages[1]} side too")


def check_direction(
    checkpoint: Path, data: Path, subset: str, languages: tuple[str, str], options: Sequence[str]
) -> None:
    """Raise InputError if the options name no languages and the model was trained in the opposite direction."""
    if languages_in(options) != (None, None):
        return
    source, target = languages
    state = load_model_checkpoint(checkpoint)
    trained = as_mapping((state.get("cfg") or {}).get("task") or state.get("args"))
    if (trained.get("source_lang"), trained.get("target_lang")) == (target, source):
        raise InputError(
            f"{checkpoint} translates {target} to {source}, but {subset} of {data} is {source}-{target}: give "
            f"--source-lang {target} --target-lang {source}"
        )


def tokens_of(data: Path, subset: str, break_mode: str) -> int:
    """Number of tokens in a binarised text, including the </s> of every line, but not of those between documents."""
    from fairseq.data import data_utils

    dataset = data_utils.load_indexed_dataset(str(data / subset), None)  # keep it: its sizes are views of its open file
    sizes = dataset.sizes
    return int(sizes[sizes > 1].sum() if break_mode == "complete_doc" else sizes.sum())


def pieces_ending_in(end: str, data: Path, subset: str) -> int:
    """How many tokens of a language model's subset are pieces that end so, and belong to a word with the next."""
    import torch
    from fairseq.data import Dictionary, data_utils

    symbols = Dictionary.load(str(data / "dict.txt")).symbols
    ends = torch.tensor([symbol.endswith(end) for symbol in symbols])
    return sum(int(ends[line].sum()) for line in data_utils.load_indexed_dataset(str(data / subset), None))


def check_data(data: Path, subset: str) -> None:
    """Raise InputError if a language model's data folder lacks the dictionary or the subset."""
    check_binarised(data, subset)
    for path, what in ((data / "dict.txt", "a dictionary"), (data / f"{subset}.idx", "a subset")):
        if not path.is_file():
            raise InputError(f"{path} is missing: expected a folder of binarised data for language models, with {what}")


def measure_perplexity(
    data: Path, checkpoint: Path, subset: str = "test", context_window: int = 0, options: Sequence[str] = ()
) -> dict[str, Any]:
    """The perplexity of a language model, measured by fairseq-eval-lm; `options` are passed on to it.

    Two files are written next to the checkpoint: the log, CHECKPOINT.SUBSET.eval_lm, and the returned values,
    CHECKPOINT.SUBSET.ppl: perplexity, loss (bits), tokens, unit (see `Perplexity`), subset, context_window,
    tokens_per_sample, sample_break_mode and parameters.

    Raises:
        InputError: an argument is wrong, fairseq-eval-lm failed, or it left tokens out.
    """
    check_data(data, subset)
    check_checkpoint(checkpoint)
    with (data / "dict.txt").open(encoding="utf-8") as file:
        words = sum(1 for _ in file)
    task = task_of(safe_torch_load(checkpoint, mapped=True))
    if "tokens_per_sample" not in task:
        raise InputError(f"{checkpoint} is not a language model: its task has no tokens_per_sample")
    check_options(options, command="fairseq-eval-lm")
    join, options = split_join(options)
    own = samples(task)
    config = fairseq_generate.parse_options([str(data), *own, *options], "eval_lm")
    own += batches(config.task, positions(task), words, context_window)
    if context_window and config.dataset.num_workers > 1:
        raise InputError(
            "--num-workers must be 0 or 1 with `context_window`: each process would have a context of its own"
        )
    log, values = results_of(checkpoint, subset, "eval_lm", "ppl")
    check_writable(log)
    text = fairseq_generate.eval_lm_log(data, checkpoint, subset, [*own, *options])
    values.unlink(missing_ok=True)  # of another log
    write_text(log, text)
    scored = parse_eval_lm_log(read_lines(log), log)
    break_mode = plain(config.task.sample_break_mode)
    tokens = tokens_of(data, subset, break_mode)
    if scored.tokens < tokens:
        raise InputError(f"fairseq-eval-lm scored {scored.tokens} of the {tokens} tokens of {subset}, see {log}")
    if join:
        loss = scored.loss * tokens / (tokens - pieces_ending_in(join, data, subset))
        scored = replace(scored, loss=round(loss, 4), perplexity=round(2**loss, 2), unit="word")
    result = {
        "perplexity": scored.perplexity,
        "loss": scored.loss,
        "tokens": tokens,
        "unit": scored.unit,
        "subset": subset,
        "context_window": context_window,
        "tokens_per_sample": int(config.task.tokens_per_sample),
        "sample_break_mode": break_mode,
        "parameters": count_parameters(checkpoint),
    }
    write_text(values, json.dumps(result) + "\n")
    return result
