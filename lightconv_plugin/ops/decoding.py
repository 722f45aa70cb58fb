"""A step of beam search: the convolution over each hypothesis's ancestors, and its best next words. No gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightconv_plugin.ops import checks


def ring_step(
    x: Tensor,
    ring: Tensor,
    weight: Tensor,
    ancestors: Tensor,
    now: Tensor,
    *,
    bias: Tensor | None = None,
    softmax: bool = False,
) -> Tensor:
    """A causal lightweight or dynamic convolution of the hypotheses of a beam search, whose ancestors' inputs are in a
    ring: step t's in slot t mod `slots`, each where its hypothesis was in that step.

        out[n, c] = bias[c] + Σ_k w[n, h, k] · input of n's ancestor k steps ago [c],      h = c div (C/H)

    Row n is hypothesis n mod B of sentence n div B. Taps that reach before the first step meet zeros. The current
    input x is written to the ring; hypotheses are reordered by changing `ancestors` alone.

    Args:
        x: (S·B, C), the inputs of this step, in one of the convolutions' types.
        ring: (slots, S₁, B₁, C), contiguous, of x's type, with slots ≥ K, S₁ ≥ S and B₁ ≥ B; changed in place.
        weight: (H, K), or (S·B, H, K) for a filter of each row, the current input's tap first; of x's type or float32.
        ancestors: (S, B, steps) int64: the hypothesis of n's sentence, in 0 … B₁ − 1, that was n's ancestor in each
            step, with n itself in this one. Not checked.
        now: (1,) int64, the current step, at least 0 and below `steps`; on the device, where the host does not read it.
        bias: (C,) of x's type.
        softmax: normalise the weight over its K taps.

    Returns:
        (S·B, C), contiguous, in x's type; sums are in float32, or float64 for float64.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices. RuntimeError: a gradient would be needed.
    """
    checks.ring_step(x, ring, weight, ancestors, now, bias)
    return torch.ops.lightconv.ring_step.default(x, ring, weight, bias, ancestors, now, softmax)


def best_words(
    logits: Tensor,
    count: int,
    *,
    normalisers: Tensor | None = None,
    scores: Tensor | None = None,
    penalties: Mapping[int, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """The words with the highest log-probabilities of each row, in one pass over the logits.

        log p[n, v] = logits[n, v] − penalties[v] − log Σ_w exp(logits[n, w]) + scores[n]

    A row with a logit that is NaN or +∞, or with nothing but −∞, has no probabilities: all are −∞.

    Args:
        logits: (N, V) in float32, bfloat16 or float16; sums are in float32.
        count: k, the number of words, 1 ≤ k ≤ V.
        normalisers: (N,) float32, subtracted in place of log Σ exp.
        scores: (N,) float32, of what precedes the words.
        penalties: by word, at most 4; math.inf forbids it.

    Returns:
        Their log-probabilities (N, k) in float32, best first, and the words (N, k) int64. On a GPU, of equally good
        words the first comes first.

    Raises:
        TypeError, ValueError: wrong types, shapes, devices or numbers. RuntimeError: a gradient would be needed.
    """
    penalties = penalties or {}
    checks.best_words(logits, count, normalisers, scores, penalties)
    return torch.ops.lightconv.best_words.default(
        logits, normalisers, scores, count, list(penalties), [float(penalty) for penalty in penalties.values()]
    )
