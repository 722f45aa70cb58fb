"""Patches for decoding, and for the batches that fairseq makes for it."""

import math
from typing import Any

import numpy as np
import torch

from lightconv_plugin.compat.registry import patch


def _last_batch_is_dropped() -> bool:
    from fairseq.data import data_utils

    three = data_utils.batch_by_size(np.arange(3), None, np.ones(3, dtype=np.int64), None, 2, 2)
    return sum(map(len, three)) < 3


@patch(versions="fairseq's main branch since December 2022, fairseq-fixed", needed=_last_batch_is_dropped)
def last_batch() -> None:
    """fairseq drops the last batch unless its size is a multiple of --required-batch-size-multiple, 8 by default.

    `fairseq-generate` then translates fewer sentences than the test set has, and computes BLEU over these, without a
    warning. Validation and training lose the same batch, which has the longest sentences.
    """
    from fairseq.data import data_utils

    original = data_utils.batch_by_size

    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
        indices = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, dtype=np.int64)
        batches = list(original(indices, *args, **kwargs))
        kept = sum(map(len, batches))  # batches are consecutive slices of `indices`
        return [*batches, indices[kept:]] if kept < len(indices) else batches

    data_utils.batch_by_size = batch_by_size


def _repeats_are_not_blocked() -> bool:
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    words = torch.tensor([[2, 4, 5, 6, 4, 5, 1, 1]])  # after "4 5 6 4 5", in a buffer for two more words
    return NGramRepeatBlock(3, use_extension=False)(words, torch.zeros(1, 8), 1, 1, 5)[0, 6] != -math.inf


@patch(versions="all versions of fairseq, without its CUDA extension", needed=_repeats_are_not_blocked)
def repeated_ngrams() -> None:
    """fairseq compares padding instead of words for --no-repeat-ngram-size, so nothing is blocked.

    This happens on the CPU, and on a GPU if fairseq was installed from a wheel (fairseq issues 4709 and 5206).
    """
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    # torch.jit.script compiles this method with SequenceGenerator, so it uses only what TorchScript supports.
    def _no_repeat_ngram(
        self: torch.nn.Module, tokens: torch.Tensor, lprobs: torch.Tensor, bsz: int, beam_size: int, step: int
    ) -> torch.Tensor:
        # tokens (hypotheses, length): words 1 … step are chosen; lprobs (hypotheses, vocabulary) are for the next one.
        n = self.no_repeat_ngram_size
        if step >= n:
            ngrams = tokens[:, 1 : step + 1].unfold(1, n, 1)
            repeats = (ngrams[:, :, :-1] == tokens[:, step + 2 - n : step + 1].unsqueeze(1)).all(dim=2)
            rows, begins = repeats.nonzero().unbind(dim=1)
            lprobs[rows, ngrams[rows, begins, -1]] = -math.inf
        return lprobs

    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram
