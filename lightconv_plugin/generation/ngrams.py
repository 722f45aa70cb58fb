"""Blocked n-grams: none occurs twice in a hypothesis (Paulus et al. 2018)."""

import torch
from torch import Tensor


def block_repeated(tokens: Tensor, scores: Tensor, step: int, n: int) -> None:
    """Sets to −∞, in place, the scores of words that would complete an n-gram for the second time.

    Args:
        tokens: (N,L) hypotheses; words 1 … step are chosen, the one before is the beginning.
        scores: (N,V) of the next word.
        n: at least 1.
    """
    if step < n:
        return
    ngrams = tokens[:, 1 : step + 1].unfold(1, n, 1)
    repeats = (ngrams[:, :, :-1] == tokens[:, step + 2 - n : step + 1].unsqueeze(1)).all(dim=2)
    rows, begins = repeats.nonzero(as_tuple=True)
    scores[rows, ngrams[rows, begins, -1]] = -torch.inf
