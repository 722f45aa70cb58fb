"""From logits to the best continuations of each sentence, without a tensor of all log-probabilities, and without words
that would repeat an n-gram."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightconv_plugin.ops import best_words


class Columns:
    """Which column of the logits belongs to which word.

    Args:
        words: (W,) int64 in ascending order, the words that have columns; None if all have, in their own order.
        suppress: (n,) words that are never chosen; some may have no column.
        pad, unk, eos: symbols, which have columns.

    Attributes:
        suppress, pad, unk, eos: the columns of these words.
    """

    def __init__(self, words: Tensor | None, suppress: Tensor, *, pad: int, unk: int, eos: int):
        self._words = words
        self.pad, self.unk, self.eos, self.suppress = pad, unk, eos, suppress
        if words is not None:
            symbols = torch.tensor([pad, unk, eos], device=words.device)
            self.pad, self.unk, self.eos = torch.searchsorted(words, symbols).tolist()
            self.suppress = torch.searchsorted(words, suppress[torch.isin(suppress, words)])

    def of(self, words: Tensor) -> Tensor:
        """The columns of words that have one."""
        return words if self._words is None else torch.searchsorted(self._words, words.contiguous())

    def words(self, columns: Tensor) -> Tensor:
        return columns if self._words is None else self._words[columns]


def best_continuations(
    logits: Tensor,
    normalisers: Tensor | None,
    penalties: Mapping[int, float],
    scores: Tensor | None,
    sentences: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best pairs of a hypothesis and a next word, for each sentence.

    Args:
        logits: (sentences · hypotheses, W), −∞ for forbidden words.
        normalisers: (sentences · hypotheses,), subtracted to give log-probabilities; may be +∞ (`log_normalisers`).
            None for those of the logits.
        penalties: by column, see ops.best_words.
        scores: (sentences, hypotheses), log-probabilities of the hypotheses so far; None for 0.
        count: at most hypotheses · W.

    Returns:
        (scores, columns, hypotheses), each (sentences, count), best first.
    """
    each = min(count, logits.shape[1])
    totals, words = best_words(
        logits,
        each,
        normalisers=normalisers,
        scores=None if scores is None else scores.flatten(),
        penalties=penalties,
    )
    best, at = totals.view(sentences, -1).topk(count, dim=1)
    return best, words.view(sentences, -1).gather(1, at), at.div(each, rounding_mode="floor")


def block_repeated(tokens: Tensor, scores: Tensor, now: Tensor, n: int, columns: Columns) -> None:
    """Set the scores of words that would complete an n-gram for the second time to −∞, in place (Paulus et al. 2018).

    Args:
        tokens: (N,L) hypotheses; words 1 … now are chosen, word 0 is the beginning symbol, later ones are ignored.
        scores: (N,W) scores of the next word.
        now: (1,) int64, on the device; the host does not read it.
        n: at least 1.
        columns: those of the scores; a pad is forbidden in any case.
    """
    if tokens.shape[1] <= n:
        return
    ngrams = tokens[:, 1:].unfold(1, n, 1)
    last = tokens.index_select(1, (now + torch.arange(2 - n, 1, device=now.device)).clamp_min_(0))
    repeats = (ngrams[:, :, :-1] == last.unsqueeze(1)).all(dim=2)
    repeats &= torch.arange(n, tokens.shape[1], device=now.device) <= now
    scores.scatter_(1, columns.of(ngrams[:, :, -1]).masked_fill(~repeats, columns.pad), -torch.inf)
