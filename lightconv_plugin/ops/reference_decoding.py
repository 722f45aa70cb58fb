"""A step of beam search in plain PyTorch; reference.py says what that is for. The formulas are in decoding.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .filters import widen


def ring_step(
    x: Tensor,
    ring: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ancestors: Tensor,
    now: Tensor,
    softmax: bool,
) -> Tensor:
    """x (N,C), ring (slots,S₁,B₁,C), changed in place, weight (N,H,K) or (H,K), ancestors (S,B,steps) → (N,C)."""
    (slots, capacity, width, channels), (sentences, beams, _) = ring.shape, ancestors.shape
    heads, taps = weight.shape[-2:]
    ring[:, :sentences, :beams].index_copy_(0, now % slots, x.reshape(1, sentences, beams, channels))
    times = now - torch.arange(taps, device=x.device)
    before, times = times < 0, times.clamp_min(0)
    filters = widen(weight)
    if softmax:
        filters = torch.softmax(filters, dim=-1)
    # A tap before the first step meets its input with weight 0: another tap meets it in any case.
    filters = filters.masked_fill(before, 0).expand(len(x), heads, taps).reshape(-1)
    first = torch.arange(0, sentences * width, width, device=x.device).view(-1, 1, 1)
    rows = ancestors.index_select(2, times) + first + times % slots * (capacity * width)
    addresses = rows.unsqueeze(2) * heads + torch.arange(heads, device=x.device).unsqueeze(1)
    begins = torch.arange(0, len(x) * heads * taps, taps, device=x.device)
    table = widen(ring).view(-1, channels // heads)
    sums = F.embedding_bag(addresses.view(-1), table, begins, mode="sum", per_sample_weights=filters).view(x.shape)
    return (sums if bias is None else sums.add_(bias)).to(x.dtype)


def best_words(
    logits: Tensor,
    normalisers: Tensor | None,
    scores: Tensor | None,
    count: int,
    penalised: list[int],
    penalties: list[float],
) -> tuple[Tensor, Tensor]:
    """logits (N,V) → log-probabilities and words, (N,count) each."""
    wide = widen(logits)
    if normalisers is None:
        normalisers = log_normalisers(wide)
    if penalised:
        wide = wide.clone()
    for word, penalty in zip(penalised, penalties, strict=True):
        wide[:, word] -= penalty
    values, words = wide.topk(count, dim=1)
    found = without_nan(values - normalisers.unsqueeze(1))
    return (found if scores is None else found + scores.unsqueeze(1)), words


def log_normalisers(logits: Tensor) -> Tensor:
    """log Σ_v exp(logits[n, v]), (N,V) → (N,); +∞ where a logit is NaN or +∞, or all are −∞.

    All probabilities of such a row are then 0, if its normalised logits are taken as −∞ where they are NaN
    (`without_nan`). fairseq's search treats such rows in the same way.
    """
    return torch.logsumexp(logits, dim=1).nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def without_nan(log_probabilities: Tensor) -> Tensor:
    """Replace NaN with −∞, in place."""
    return log_probabilities.nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
