"""The batches of an update, divided over processes.

The configuration sets the tokens per update: max_tokens × update_freq of one process. With N processes, each takes
1/N of them, so that a recipe gives the same updates on any machine. A language model's text is cut into samples of
tokens_per_sample (unless sample_break_mode says otherwise); its batches consist of whole ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightconv_plugin.progress import say
from lightconv_plugin.recipes.training.overrides import get, setting

MAX_TOKENS = "dataset.max_tokens"
BATCH_SIZE = "dataset.batch_size"
_UPDATE_FREQ = "optimization.update_freq"
_SAMPLE = "task.tokens_per_sample"
_MULTIPLE = "dataset.required_batch_size_multiple"
LANGUAGE_MODELLING = ("language_modeling", "masked_lm", "multilingual_language_modeling")


def whole_number(key: str, value: Any) -> int:
    """The value of an option that must be a positive integer, given as a number or as an override's text.

    Raises:
        ValueError: it is not a positive integer.
    """
    text = str(value).strip("'\"")
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"{key} must be a whole number from 1, got: {value}")
    return int(text)


def samples_in(max_tokens: int, sample: int, multiple: int) -> int:
    """The samples in a batch of fairseq's: fewer than `multiple`, or a multiple of it."""
    count = max_tokens // sample
    return count if count < multiple else count - count % multiple


@dataclass(frozen=True)
class Batch:
    """The batches of an update.

    tokens      of an update, in an epoch whose ratio is 1
    max_tokens  the most in one batch
    processes   that share an update
    ratios      of the updates of each epoch: update_freq may change with the epoch, max_tokens may not
    sample      tokens of a sample, if all have equally many: batches hold whole ones
    multiple    batches of more samples hold a multiple of it

    Raises:
        ValueError: a batch, or the share of a process, is less than a sample.
    """

    tokens: int
    max_tokens: int
    processes: int
    ratios: tuple[int, ...] = (1,)
    sample: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        if not self.most:
            raise ValueError(f"{MAX_TOKENS} must be at least {_SAMPLE}, {self.sample}, got: {self.max_tokens}")
        if not self.share:
            unit = f"a sample of {_SAMPLE}={self.sample}" if self.sample > 1 else "one"
            raise ValueError(
                f"{self.tokens} tokens per update cannot be divided over {self.processes} processes: each takes at "
                f"least {unit}"
            )

    @classmethod
    def of(cls, config: dict[str, Any], given: dict[str, str], processes: int) -> Batch | None:
        """That of a configuration and overrides; None if they do not count tokens, or give update_freq themselves.

        Raises:
            ValueError: a value is not a whole number, or not a list of them; or see `Batch`.
        """
        configured = get(config, MAX_TOKENS)
        if _UPDATE_FREQ in given or not configured or setting(config, given, MAX_TOKENS) is None:
            return None
        steps = get(config, _UPDATE_FREQ) or [1]
        if not isinstance(steps, list):
            raise ValueError(f"{_UPDATE_FREQ} must be a list such as [2], got: {steps}")
        numbers = [whole_number(f"{_UPDATE_FREQ}[{i}]", value) for i, value in enumerate(steps)]
        common = math.gcd(*numbers)
        sample, multiple = samples_of(config, given)
        configured = whole_number(MAX_TOKENS, configured)
        tokens = (sample * samples_in(configured, sample, multiple) or configured) * common
        most = whole_number(MAX_TOKENS, given.get(MAX_TOKENS, configured))
        return cls(tokens, most, processes, tuple(number // common for number in numbers), sample, multiple)

    @property
    def most(self) -> int:
        """The most samples in one batch."""
        return samples_in(self.max_tokens, self.sample, self.multiple)

    @property
    def share(self) -> int:
        """The samples of each process in an update."""
        return self.tokens // self.sample // self.processes

    def divides(self, parts: int) -> bool:
        """Whether so many batches can take the share of a process, but for a hundredth that is lost by rounding."""
        size = self.share // parts
        return self.share % parts <= self.share // 100 and (size < self.multiple or size % self.multiple == 0)

    def divided(self) -> tuple[int, int]:
        """(max_tokens, update_freq) of a process: the fewest batches of at most `max_tokens`, what fits into memory."""
        fewest = math.ceil(self.share / self.most)
        parts = next(parts for parts in range(fewest, self.share + 1) if self.divides(parts))
        return self.share // parts * self.sample, parts

    def overrides(self) -> list[str]:
        """What each process is told; the tokens per update are said."""
        max_tokens, factor = self.divided()
        frequencies = [factor * ratio for ratio in self.ratios]
        totals = [self.processes * max_tokens * each for each in frequencies]
        shown = ", ".join(map(str, frequencies))
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        said = f"tokens per update: {processes} × {max_tokens} × update_freq {shown} = {', '.join(map(str, totals))}"
        configured = [self.tokens * ratio for ratio in self.ratios]
        if self.sample > 1 and totals != configured:
            said += f" instead of {', '.join(map(str, configured))}: each takes whole samples of {self.sample}"
        say(said)
        return [f"{MAX_TOKENS}={max_tokens}", f"{_UPDATE_FREQ}={frequencies}"]


def samples_of(config: Mapping[str, Any], given: Mapping[str, str]) -> tuple[int, int]:
    """(tokens of a sample, what their number in a batch is a multiple of); (1, 1) if samples differ in length."""
    # fairseq's defaults
    sample = setting(config, given, _SAMPLE)
    if sample is None and setting(config, given, "task._name") in LANGUAGE_MODELLING:
        sample = 1024
    if sample is None or setting(config, given, "task.sample_break_mode") is not None:
        return 1, 1
    return whole_number(_SAMPLE, sample), whole_number(_MULTIPLE, setting(config, given, _MULTIPLE) or 8)
