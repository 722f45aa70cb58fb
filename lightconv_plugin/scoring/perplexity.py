"""The perplexity of a language model: derives fairseq-eval-lm's options from the checkpoint, and parses its log.

fairseq-eval-lm does not read the sample length and the break mode from the checkpoint. With values other than those of
the training, it skips what it cannot score and still reports a number.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightconv_plugin.errors import InputError

# Limit for the probabilities of all words in one batch: half a gigabyte, unless one sample needs more.
BATCH_OF_PROBABILITIES = 1 << 27
SCORED = re.compile(r"Evaluated ([\d,]+) tokens in ")
SAMPLES = re.compile(r" ([\d,]+) examples$")
SKIPPED = re.compile(r" ([\d,]+) samples have invalid sizes and will be skipped")
# In fairseq's configuration, a line of the log.
WITH_BOS = "'add_bos_token': True"
JOINED = "'post_process': '@@ '"  # for "subword_nmt" fairseq joins nothing
RESULT = re.compile(r"Loss \(base 2\): (\d+\.\d{4}|nan|inf), Perplexity: (\d+\.\d\d|nan|inf)$")


@dataclass(frozen=True)
class Perplexity:
    """The result of fairseq-eval-lm.

    loss: bits per unit. tokens: number of scored tokens, including </s>. unit: what the mean is over, "token", or
    "word" with --post-process '@@ ', which joins BPE. (In fairseq-eval-lm's log, a word cut by a sample's end counts
    twice.)
    """

    perplexity: float
    loss: float
    tokens: int
    unit: str = "token"

    def lines(self) -> str:
        """One readable line."""
        return f"perplexity = {self.perplexity:.2f} (loss {self.loss:.4f} bits a {self.unit}, {self.tokens:,} tokens)\n"


def is_eval_lm_log(lines: Sequence[str]) -> bool:
    """Whether this is output of fairseq-eval-lm, complete or not."""
    return any(SCORED.search(line) or RESULT.search(line) for line in lines)


def parse_eval_lm_log(lines: Sequence[str], name) -> Perplexity:
    """Parse the log of one run of fairseq-eval-lm; `name` identifies it in errors.

    Raises InputError if the log is not from fairseq-eval-lm, truncated, from several runs, has no finite result, or if
    no token was scored (fairseq then reports a perplexity of 1).
    """
    scored = [match[1] for line in lines if (match := SCORED.search(line))]
    results = [match for line in lines if (match := RESULT.search(line))]
    if max(len(scored), len(results)) > 1:
        raise InputError(f"{name} has the results of several runs of fairseq-eval-lm: keep one run in a file")
    if not scored or not results:
        raise InputError(
            f"{name} is cut off or not from fairseq-eval-lm: it lacks the line "
            + ("'Evaluated … tokens in …'" if not scored else "'Loss (base 2): …, Perplexity: …'")
        )
    tokens = _number(scored[0])
    if any(WITH_BOS in line for line in lines):  # fairseq counts the <s> of each sample too
        tokens -= _sum(SAMPLES, lines) - _sum(SKIPPED, lines)
    unit = "word" if any(JOINED in line for line in lines) else "token"
    result = Perplexity(float(results[0][2]), float(results[0][1]), tokens, unit)
    if not result.tokens:
        raise InputError(f"{name}: no token was scored: the text has none, or every sample was skipped")
    if not result.perplexity < float("inf"):  # nan too
        raise InputError(f"{name}: the perplexity is {results[0][2]}: the model gives some word no probability")
    return result


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _sum(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    return sum(_number(match[1]) for line in lines if (match := pattern.search(line)))


def task_of(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's task settings: from cfg, or in checkpoints of 2019 from the arguments."""
    cfg = state.get("cfg")
    if cfg:
        model = cfg["model"]
        if isinstance(model, argparse.Namespace):  # of fairseq's older architectures
            model = vars(model)
        options = ("max_target_positions", "decoder_learned_pos")
        return {**cfg["task"], **{name: model.get(name) for name in options}}
    return vars(state["args"])


def plain(value: Any) -> str:
    """A choice as a command-line value: an enum's value, or the string itself."""
    return str(getattr(value, "value", value))


def positions(task: dict[str, Any]) -> int:
    """The longest sample that a model trained on `task` scores. fairseq-eval-lm skips longer ones."""
    longest = int(task.get("max_target_positions") or task["tokens_per_sample"])
    # As in models/language_model.py: fairseq does not count the <s> of a sample.
    return longest - 1 if task.get("decoder_learned_pos") and task.get("add_bos_token") else longest


def samples(task: dict[str, Any]) -> list[str]:
    """fairseq-eval-lm's options for samples like those of a model trained on `task`."""
    length = min(positions(task), int(task["tokens_per_sample"]))
    options = ["--task", "language_modeling", "--tokens-per-sample", str(length)]
    options += ["--sample-break-mode", plain(task.get("sample_break_mode") or "none")]
    if int(task.get("output_dictionary_size", -1)) >= 0:
        options += ["--output-dictionary-size", str(task["output_dictionary_size"])]
    return options + (["--add-bos-token"] if task.get("add_bos_token") else [])


def batches(task: Any, longest: int, words: int, context_window: int) -> list[str]:
    """fairseq-eval-lm's options for the context window and batches that have room for it.

    task: fairseq-eval-lm's own. longest: the model's `positions`. words: the size of its dictionary.

    Raises:
        InputError: a sample has no token, or the context window leaves none of them to be scored.
    """
    length = int(task.tokens_per_sample)
    if length < 1:
        raise InputError(f"--tokens-per-sample must be at least 1, got {length}")
    limit = min(length, longest)
    if not 0 <= context_window < limit:
        raise InputError(
            f"`context_window` must be in 0 … {limit - 1}, below the {limit} tokens of a sample, got {context_window}"
        )
    window, room = ["--context-window", str(context_window)], BATCH_OF_PROBABILITIES // words
    # A row of a batch has the window's tokens in addition to those that are scored, which alone fairseq counts.
    if plain(task.sample_break_mode) == "none":
        scored = length - context_window
        return [*window, "--max-tokens", str(max(scored, room * scored // length))]
    # Whole sentences may be longer, and fairseq fails for a batch that cannot hold one.
    rows = ["--batch-size", str(max(1, room // length))] if context_window else []
    return [*window, "--max-tokens", str(max(longest, room)), *rows]


def split_context_window(options: Sequence[str]) -> tuple[int, list[str]]:
    """(the context window in options for fairseq-eval-lm, 0 without one; the other options)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--context-window", type=int, default=0)
    try:
        known, others = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise InputError(f"in the options for fairseq-eval-lm: {error}") from None
    return known.context_window, others


def split_join(options: Sequence[str]) -> tuple[str, list[str]]:
    """(the end of pieces that --post-process joins, "" without it; the other options), in options for fairseq-eval-lm.

    fairseq joins within the scored part of a sample alone, so that words that its ends cut count as two; and nothing
    for --remove-bpe without a value.

    Raises InputError for what fairseq-eval-lm cannot join, or if it is to list the words.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--post-process", "--remove-bpe", nargs="?", const="@@ ")
    known, others = parser.parse_known_args(list(options))
    if known.post_process is None:
        return "", others
    if known.post_process.rstrip() not in ("@@", "subword_nmt"):
        raise InputError(f"--post-process must be '@@ ' for fairseq-eval-lm, got {known.post_process!r}")
    if listing := [option for option in others if option.startswith("--output-word-")]:
        raise InputError(f"{listing[0]} is not valid with --post-process: it lists pieces, call fairseq-eval-lm itself")
    return "@@", others
