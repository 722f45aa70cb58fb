"""From the candidates of all steps to the finished hypotheses, on the host and in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

Hypotheses = list[list[dict[str, Tensor]]]


class NoHypothesisError(RuntimeError):
    """A sentence without a single possible hypothesis: weights with NaN, or forbidden words."""


class End(NamedTuple):
    """A finished hypothesis: the candidate `slot` of a sentence in a step."""

    sentence: int
    step: int
    slot: int


class History:
    """The candidates of each step, by the index of their sentence in the batch, and which of them were continued.

    Hypotheses are read from their ends to their beginnings, so nothing is moved when they are reordered.

    candidates: (steps, S, 2, n), words and the hypotheses of the previous step that they continue.
    totals: (steps, S, n), their scores.
    chosen: (steps, S, beam), the candidate that became each hypothesis.
    """

    def __init__(self, candidates: Tensor, totals: Tensor, chosen: Tensor):
        self.candidates, self.totals, self.chosen = candidates, totals, chosen

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.candidates, self.totals, self.chosen

    def write(self, step: Tensor, sentences: Tensor, candidates: Tensor, totals: Tensor, chosen: Tensor) -> None:
        """Store a step, (1,) int64, of these sentences, (n,) int64."""
        for table, new in zip(self._tensors(), (candidates, totals, chosen), strict=True):
            table.index_put_((step, sentences), new)

    def become_the_first(self, step: int, sentences: Tensor) -> None:
        """Let all hypotheses that were chosen in a step be the first one, in these sentences, (n,) int64."""
        chosen = self.chosen[step]
        chosen[sentences] = chosen[sentences, :1].expand(-1, chosen.shape[1])

    def on_host(self, steps: int) -> History:
        """The first `steps` steps, copied at once: the host waits for each copy."""
        some = [table[:steps] for table in self._tensors()]
        if some[0].device.type == "cpu":
            return History(*some)
        sizes = [table.numel() * table.itemsize for table in some]
        parts = torch.cat([table.view(-1).view(torch.uint8) for table in some]).cpu().split(sizes)
        return History(*(part.view(table.dtype).view_as(table) for part, table in zip(parts, some, strict=True)))

    def read(self, ends: Sequence[End]) -> tuple[Tensor, Tensor]:
        """(n, steps) words and cumulative scores of n hypotheses; those after a hypothesis's end are meaningless."""
        sentences, last, ending = torch.tensor(ends, dtype=torch.int64).view(-1, 3).unbind(1)
        words = torch.zeros(len(ends), len(self.chosen), dtype=torch.int64)
        scores = torch.zeros(words.shape, dtype=torch.float32)
        hypotheses = torch.zeros_like(sentences)
        for step in range(len(self.chosen) - 1, -1, -1):
            slots = torch.where(last == step, ending, self.chosen[step, sentences, hypotheses])
            words[:, step], hypotheses = self.candidates[step][sentences, :, slots].unbind(1)
            scores[:, step] = self.totals[step, sentences, slots]
        return words, scores


def in_fairseqs_format(tokens: Tensor, positional: Tensor, sizes: Tensor, scores: Tensor, counts: Tensor) -> Hypotheses:
    """The hypotheses of each sentence, best first, as fairseq's generator returns them.

    tokens, positional: of all hypotheses, one after the other. sizes, scores: the number of tokens, and the score, of
    each. counts: the number of hypotheses of each sentence.

    Raises NoHypothesisError if a sentence has none; it may have fewer than beam_size.
    """
    if lost := counts.eq(0).nonzero()[:, 0].tolist():
        raise NoHypothesisError(f"no hypothesis of sentences {lost} of the batch has a probability above 0")
    parts = zip(tokens.split(sizes.tolist()), scores, positional.split(sizes.tolist()), strict=True)
    empty = torch.empty(0, dtype=torch.float32)
    return [
        [
            {"tokens": words, "score": score, "attention": empty, "alignment": empty, "positional_scores": each}
            for words, score, each in islice(parts, count)
        ]
        for count in counts.tolist()
    ]
