"""From logits to the best continuations of each sentence, without a tensor of all log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def log_normalisers(logits: Tensor) -> Tensor:
    """log Σ_v exp(logits[n, v]), (N,V) → (N,); +∞ where a logit is NaN or +∞, or all are −∞.

    All probabilities of such a row are then 0, if its normalised logits are taken as −∞ where they are NaN
    (`without_nan`). fairseq's search treats such rows in the same way.
    """
    normalisers = torch.logsumexp(logits, dim=1)
    return normalisers.masked_fill_(~normalisers.isfinite(), torch.inf)


def without_nan(log_probabilities: Tensor) -> Tensor:
    """Replace NaN with −∞, in place."""
    return log_probabilities.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def best_continuations(
    logits: Tensor, normalisers: Tensor, scores: Tensor | None, sentences: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best pairs of a hypothesis and a next word, for each sentence.

    Args:
        logits: (sentences · hypotheses, V), −∞ for forbidden words.
        normalisers: (sentences · hypotheses,), subtracted to give log-probabilities; may be +∞ (`log_normalisers`).
        scores: (sentences, hypotheses), log-probabilities of the hypotheses so far; None for 0.
        count: at most hypotheses · V.

    Returns:
        (scores, words, hypotheses), each (sentences, count), best first.
    """
    values, words = logits.topk(min(count, logits.shape[1]), dim=1)
    values = without_nan(values - normalisers.unsqueeze(1)).view(sentences, -1, values.shape[1])
    if scores is not None:
        values = values + scores.unsqueeze(2)
    best, at = values.flatten(1).topk(count, dim=1)
    return best, words.view(sentences, -1).gather(1, at), at.div(values.shape[2], rounding_mode="floor")
