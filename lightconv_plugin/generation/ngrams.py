"""Blocked n-grams: none occurs twice in a hypothesis (Paulus et al. 2018)."""

import torch
from torch import Tensor


def block_repeated(tokens: Tensor, scores: Tensor, now: Tensor, n: int, forbidden: int) -> None:
    """Set the scores of words that would complete an n-gram for the second time to −∞, in place.

    Args:
        tokens: (N,L) hypotheses; words 1 … now are chosen, word 0 is the beginning symbol, later ones are ignored.
        scores: (N,V) scores of the next word.
        now: (1,) int64, on the device; the host does not read it.
        n: at least 1.
        forbidden: a word whose scores are already −∞.
    """
    if tokens.shape[1] <= n:
        return
    ngrams = tokens[:, 1:].unfold(1, n, 1)
    last = tokens.index_select(1, (now + torch.arange(2 - n, 1, device=now.device)).clamp_min_(0))
    repeats = (ngrams[:, :, :-1] == last.unsqueeze(1)).all(dim=2)
    repeats &= torch.arange(n, tokens.shape[1], device=now.device) <= now
    scores.scatter_(1, ngrams[:, :, -1].masked_fill(~repeats, forbidden), -torch.inf)
