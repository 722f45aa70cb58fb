"""What a step of beam search does between the linear layers, in plain PyTorch: the definition of cpu/search/."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def log_normalisers(logits: Tensor) -> Tensor:
    """log Σ_v exp(logits[n, v]): (N,V) → (N,); not finite where a logit is NaN or +∞, or all are −∞."""
    return torch.logsumexp(logits, dim=1)


def best_of_rows(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, in descending order: (N,V), no NaN → values and indices, each (N,count)."""
    return logits.topk(count, dim=1)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of a sentence's queries: query (S,Q,H·D), keys and values (S,H,T,D) → (S,Q,H·D).

    mask: (S,1,1 or Q,T), 0 or −∞, added to the scores; no query may be left without a key.
    """
    heads = query.unflatten(2, (keys.shape[1], keys.shape[3])).transpose(1, 2)
    if mask is not None:
        mask = mask.expand(-1, -1, query.shape[1], -1)
    y = F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask)
    return y.transpose(1, 2).flatten(2)
