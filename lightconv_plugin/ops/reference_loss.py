"""Label smoothing in plain PyTorch; reference.py says what that is for. The formula is in loss.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .filters import widen


def label_smoothed_nll(
    logits: Tensor, target: Tensor, epsilon: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """logits (N,V), target (N,) → the loss, −log p of the target, and log Σ exp(logits), (N,) each."""
    wide, share = widen(logits), epsilon / (logits.shape[1] - 1)
    normaliser = wide.logsumexp(dim=-1)
    losses = normaliser[:, None] - wide
    nll = losses.gather(1, _inside(target, ignore_index)[:, None])[:, 0]
    loss = (1 - epsilon - share) * nll + share * losses.sum(dim=-1)
    ignored = target == ignore_index
    return tuple(numbers.masked_fill(ignored, 0) for numbers in (loss, nll, normaliser))  # type: ignore[return-value]


def label_smoothed_nll_backward(
    grad_loss: Tensor | None,
    grad_nll: Tensor | None,
    logits: Tensor,
    target: Tensor,
    normaliser: Tensor,
    epsilon: float,
    ignore_index: int,
) -> Tensor:
    """The gradient of the logits, (N,V) in their type."""
    share = epsilon / (logits.shape[1] - 1)
    of_loss, of_nll = (torch.zeros_like(normaliser) if grad is None else grad for grad in (grad_loss, grad_nll))
    gradient = (widen(logits) - normaliser[:, None]).exp() * (of_loss + of_nll)[:, None] - share * of_loss[:, None]
    at_target = (1 - epsilon - share) * of_loss + of_nll
    gradient.scatter_add_(1, _inside(target, ignore_index)[:, None], -at_target[:, None])
    gradient.masked_fill_((target == ignore_index)[:, None], 0)
    return torch.empty_like(logits).copy_(gradient)


def _inside(target: Tensor, ignore_index: int) -> Tensor:
    return target.masked_fill(target == ignore_index, 0)
