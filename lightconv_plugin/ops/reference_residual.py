"""Dropout with what is computed beside it, in plain PyTorch; reference.py says what that is for. The formulas are in
residual.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .filters import widen
from .philox import dropout_scale


def relu_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x of any shape → the same, contiguous."""
    wide = widen(x)
    kept = dropout_scale(seed, x.shape, p, wide.dtype)
    return torch.where((wide <= 0) | (kept == 0), 0, wide * kept).to(x.dtype).contiguous()


def relu_dropout_backward(grad: Tensor, out: Tensor, seed: Tensor, p: float) -> Tensor:
    """The gradient of x, contiguous; `out` is relu_dropout's, the seed is not needed any more."""
    return torch.where(out <= 0, 0, widen(grad) * (1 / (1 - p))).to(out.dtype).contiguous()


def dropout_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, p: float, epsilon: float
) -> Tensor:
    """x and residual (…,C), weight and bias (C,) → (…,C), contiguous."""
    normed, _, _ = _normed(x, residual, seed, p, epsilon)
    return (normed * widen(weight) + widen(bias)).to(x.dtype).contiguous()


def dropout_add_norm_backward(
    grad: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    p: float,
    epsilon: float,
    need_x: bool,
    need_residual: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, weight and bias, in their layouts; those not needed are empty tensors."""
    normed, scale, kept = _normed(x, residual, seed, p, epsilon)
    wide = widen(grad)
    along = wide * widen(weight)
    of_sum = scale * (along - along.mean(-1, True) - normed * (along * normed).mean(-1, True))
    channels = x.shape[-1]
    found = (
        (x, need_x, lambda: of_sum if kept is None else of_sum * kept),
        (residual, need_residual, lambda: of_sum),
        (weight, need_weight, lambda: (wide * normed).reshape(-1, channels).sum(0)),
        (bias, need_bias, lambda: wide.reshape(-1, channels).sum(0)),
    )
    return tuple(  # type: ignore[return-value]
        torch.empty_like(like).copy_(compute()) if needed else like.new_empty(0) for like, needed, compute in found
    )


def _normed(
    x: Tensor, residual: Tensor, seed: Tensor | None, p: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The sum after its norm, 1/deviation of each row (…,1), and the factors of dropout if there is any."""
    wide = widen(x)
    kept = None if seed is None else dropout_scale(seed, x.shape, p, wide.dtype)
    total = widen(residual) + (wide if kept is None else wide * kept)
    centred = total - total.mean(-1, True)
    scale = (centred.square().mean(-1, True) + epsilon).rsqrt()
    return centred * scale, scale, kept
