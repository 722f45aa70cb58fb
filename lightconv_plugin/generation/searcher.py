"""Beam search on batches of sentences, given as indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation import DTYPES
from lightconv_plugin.generation.batch_search import BatchSearch
from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.modules.transformer import EncoderDecoder


@dataclass(frozen=True)
class Found:
    """One translation of a sentence.

    tokens: indices in the target dictionary, including the end of the sentence.
    score: the sum of the tokens' log-probabilities to base 2, divided by their number to the power of the length
        penalty (what fairseq prints on its H- lines).
    """

    tokens: list[int]
    score: float


@dataclass(frozen=True)
class SearchSettings:
    """Everything that a search needs besides the models.

    options: options of the search. max_len_a, max_len_b: a translation has at most max_len_a·T + max_len_b words,
        where T is the longest source of the batch. threads, cuda_graphs: see BatchSearch.
    """

    options: SearchOptions
    max_len_a: float = 0.0
    max_len_b: int = 200
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    cuda_graphs: bool = False


class Searcher:
    """An ensemble of models, ready to search.

    Raises TranslationError if the search does not support a model.
    """

    def __init__(self, models: Sequence[EncoderDecoder], settings: SearchSettings) -> None:
        self._settings, self._device = settings, torch.device(settings.device)
        models = [model.eval().to(self._device) for model in models]
        self._longest = min(model.config.decoder.max_positions for model in models)
        try:
            self._search = BatchSearch(
                models,
                settings.options,
                dtype=settings.dtype,
                threads=settings.threads,
                cuda_graphs=settings.cuda_graphs,
            )
        except ValueError as error:
            raise TranslationError(str(error)) from error

    @torch.no_grad()
    def search(self, sentences: Sequence[Sequence[int]], nbest: int) -> list[list[Found]]:
        """The `nbest` best translations of each sentence, best first; a sentence ends with its end symbol.

        Raises TranslationError if the options do not fit these sentences, if no translation has a probability above 0
        (weights with NaN), or if memory runs out.
        """
        source, lengths = collate(sentences, self._settings.options.pad, self._device)
        most = int(self._settings.max_len_a * source.shape[1] + self._settings.max_len_b)
        try:
            results = self._search.search(source, lengths, min(most, self._longest - 1))
        except ValueError as error:  # such as a min_len above the max_len of this batch
            raise TranslationError(str(error)) from error
        except (MemoryError, RuntimeError) as error:
            if "has a probability above 0" in str(error):
                raise TranslationError("the model gives no translation a probability: are its weights NaN?") from error
            if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "alloc" not in str(error):
                raise
            size = " × ".join(map(str, source.shape))
            raise TranslationError(f"out of memory on a batch of {size} pieces: reduce `batch_tokens`") from error
        return [
            [Found(found["tokens"].tolist(), float(found["score"]) / math.log(2)) for found in ranked[:nbest]]
            for ranked in results
        ]


def collate(sentences: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Words (B, T), padded on the left as in fairseq-interactive, and the lengths of the sentences (B,)."""
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    tokens = torch.full((len(sentences), int(lengths.max())), pad)
    for row, sentence in zip(tokens, sentences, strict=True):
        row[len(row) - len(sentence) :] = torch.tensor(sentence)
    return tokens.to(device), lengths.to(device)


def check_device(device: str, dtype: str, cuda_graphs: bool = False) -> None:
    """Raise TranslationError unless the device is available and supports this type, and CUDA graphs if requested."""
    if dtype not in DTYPES:
        raise TranslationError(f"`dtype` must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise TranslationError(f"`device` must be cpu, cuda or cuda:N, got {device!r}") from None
    if wanted.type not in ("cpu", "cuda"):
        raise TranslationError(f"`device` must be cpu, cuda or cuda:N, got {device!r}")
    if cuda_graphs and wanted.type != "cuda":
        raise TranslationError(f"`cuda_graphs` needs a GPU, such as `device` 'cuda': got `device` {device!r}")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise TranslationError(f"`device` {device!r} is not available: torch sees {torch.cuda.device_count()} GPUs")
    if wanted.type == "cuda" and dtype == "int8":
        raise TranslationError("`dtype` 'int8' runs on the CPU only: use 'bfloat16' or 'float32' on a GPU")
