"""Sentences, given as indices, in batches of similar lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def make_batches(sentences: Mapping[int, Sequence[int]], tokens: int, size: int | None) -> list[list[int]]:
    """The keys of sentences in batches of similar lengths, the longest first.

    A batch has at most `tokens` tokens, counting each sentence as its longest, and `size` sentences, but at least one.
    The longest come first, so that running out of memory shows at once.
    """
    batches: list[list[int]] = []
    width = 0
    for number in sorted(sentences, key=lambda number: -len(sentences[number])):
        full = not batches or (len(batches[-1]) + 1) * width > tokens or len(batches[-1]) == size
        if full:
            batches.append([])
            width = len(sentences[number])
        batches[-1].append(number)
    return batches


def collate(sentences: Sequence[Sequence[int]], pad: int) -> Tensor:
    """The words (S,T), padded on the left as in fairseq-interactive."""
    rows = [torch.tensor(sentence) for sentence in sentences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
