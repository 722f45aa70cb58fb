"""Translates (or summarises) a subset by beam search and scores it, and leaves log and scores beside the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lightconv_plugin.checkpoints.parameters import count_parameters
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write, read_lines
from lightconv_plugin.generation import fairseq_generate
from lightconv_plugin.recipes.steps import say
from lightconv_plugin.scoring.bleu import check_language
from lightconv_plugin.scoring.generate_log import parse_gen_log
from lightconv_plugin.scoring.measuring import Measuring, Scored, languages_of, score, with_facts


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
