"""Beam search on batches of encoded sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightconv_plugin.generation.forks import ForkError
from lightconv_plugin.generation.generator import FastGenerator
from lightconv_plugin.generation.linear import DTYPES
from lightconv_plugin.generation.loading import (
    Opened,
    TranslationError,
    build_model,
    check_sizes,
    open_first,
    read_checkpoint,
)


@dataclass(frozen=True)
class Found:
    """One translation of a sentence.

    tokens: indices in the target dictionary, the end of the sentence among them.
    score: the sum of the tokens' log-probabilities to base 2, divided by their number to the power of the length
        penalty (what fairseq prints on its H- lines).
    """

    tokens: list[int]
    score: float


@dataclass(frozen=True)
class SearchSettings:
    """Everything that a search needs.

    paths: checkpoints, several of them an ensemble. data, source, target: the dictionaries' folder and their languages.
    generator: arguments of FastGenerator beyond models and dictionary.
    threads: of torch, None to leave them as they are.
    """

    paths: tuple[Path, ...]
    data: Path
    source: str
    target: str
    generator: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class Limits:
    """What a model can take. positions: of a sentence with its end. truncates: whether it was trained on cut ones."""

    positions: int
    truncates: bool


def build_generator(models: Sequence[torch.nn.Module], dictionary, dtype: str, options: dict[str, Any]):
    """The one place that says which generator translates."""
    return FastGenerator(models, dictionary, dtype=dtype, **options)


class Searcher:
    """Models and a generator in this process.

    opened: the first checkpoint, where it has been read before.

    Raises TranslationError where the checkpoints or their data are not right.
    """

    def __init__(self, settings: SearchSettings, opened: Opened | None = None) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        first, *others = settings.paths
        if opened is None:
            opened = open_first(first, settings.data, settings.source, settings.target)
        task, models = opened.task, [build_model(opened.state, first, opened.task)]
        for path in others:
            state = read_checkpoint(path)
            check_sizes(state, path, task, settings.data)
            models.append(build_model(state, path, task))
        for model in models:
            model.to(settings.device)
        self._models, self._device, self._dictionary = models, torch.device(settings.device), task.source_dictionary
        self.limits = limits(task, models)
        self._generator = build_generator(models, task.target_dictionary, settings.dtype, settings.generator)

    @torch.no_grad()
    def search(self, sentences: Sequence[Sequence[int]], nbest: int) -> list[list[Found]]:
        """The `nbest` best translations of each sentence, best first; a sentence ends with its end symbol.

        Raises TranslationError where the options do not fit these sentences, or memory runs out.
        """
        sample = {"net_input": collate(sentences, self._dictionary.pad(), self._device)}
        try:
            results = self._generator.generate(self._models, sample)
        except ValueError as error:  # such as a min_len above the max_len of this batch
            raise TranslationError(str(error)) from error
        except ForkError as error:
            raise TranslationError(str(error)) from error
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "alloc" not in str(error):
                raise
            size = " × ".join(map(str, sample["net_input"]["src_tokens"].shape))
            raise TranslationError(f"out of memory on a batch of {size} pieces: reduce `batch_tokens`") from error
        return [
            [Found(found["tokens"].tolist(), float(found["score"]) / math.log(2)) for found in ranked[:nbest]]
            for ranked in results
        ]

    def close(self) -> None:
        """Ends the processes of the search, if there are any."""
        self._generator.close()


def collate(sentences: Sequence[Sequence[int]], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """src_tokens (B, T), padded on the left as by fairseq-interactive, and src_lengths (B,)."""
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    tokens = torch.full((len(sentences), int(lengths.max())), pad)
    for row, sentence in zip(tokens, sentences, strict=True):
        row[len(row) - len(sentence) :] = torch.tensor(sentence)
    return {"src_tokens": tokens.to(device), "src_lengths": lengths.to(device)}


def limits(task, models: Sequence[torch.nn.Module]) -> Limits:
    """The smallest limits of all models and of the task."""
    sizes = [task.max_positions(), *(model.max_positions() for model in models)]
    positions = min(int(size[0] if isinstance(size, (tuple, list)) else size) for size in sizes)
    return Limits(positions, bool(getattr(task.cfg, "truncate_source", False)))


def check_device(device: str, dtype: str) -> None:
    """TranslationError unless the device is available and supports this type."""
    if dtype not in DTYPES:
        raise TranslationError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise TranslationError(f"`device` must be cpu, cuda or cuda:N, got {device!r}") from None
    if wanted.type not in ("cpu", "cuda"):
        raise TranslationError(f"`device` must be cpu, cuda or cuda:N, got {device!r}")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise TranslationError(f"`device` {device!r} is not available: torch sees {torch.cuda.device_count()} GPUs")
    if wanted.type == "cuda" and dtype == "int8":
        raise TranslationError("`dtype` 'int8' runs on the CPU only: use 'bfloat16' or 'float32' on a GPU")
