"""From logits to the best continuations of each sentence, without a tensor of all log-probabilities, and without words
that would repeat an n-gram."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightconv_plugin.ops import best_words


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
        logits: (sentences · hypotheses, V), −∞ for forbidden words.
        normalisers: (sentences · hypotheses,), subtracted to give log-probabilities; may be +∞ (`log_normalisers`).
            None for those of the logits.
        penalties: by word, see ops.best_words.
        scores: (sentences, hypotheses), log-probabilities of the hypotheses so far; None for 0.
        count: at most hypotheses · V.

    Returns:
        (scores, words, hypotheses), each (sentences, count), best first.
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


def block_repeated(tokens: Tensor, scores: Tensor, now: Tensor, n: int, forbidden: int) -> None:
    """Set the scores of words that would complete an n-gram for the second time to −∞, in place (Paulus et al. 2018).

    Args:
        tokens: (N,L) hypotheses; words 1 … now are chosen, word 0 is the beginning symbol, later ones are ignored.
        scores: (N,V) scores of the next word.
        now: (1,) int64, on the device; the host does not read it.
        n: at least 1.
        forbidden: a word that is forbidden in any case.
    """
    if tokens.shape[1] <= n:
        return
    ngrams = tokens[:, 1:].unfold(1, n, 1)
    last = tokens.index_select(1, (now + torch.arange(2 - n, 1, device=now.device)).clamp_min_(0))
    repeats = (ngrams[:, :, :-1] == last.unsqueeze(1)).all(dim=2)
    repeats &= torch.arange(n, tokens.shape[1], device=now.device) <= now
    scores.scatter_(1, ngrams[:, :, -1].masked_fill(~repeats, forbidden), -torch.inf)
