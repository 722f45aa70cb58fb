"""Dropout as one operator with what is computed beside it: a residual connection and its layer norm, or a ReLU."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad

from lightconv_plugin.ops import checks, seeds
from lightconv_plugin.ops.transforms import call


def dropout_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float = 0.0, eps: float = 1e-5
) -> Tensor:
    """What follows a sublayer of a post-norm Transformer (Vaswani et al. 2017, sections 3.1 and 5.4).

        s = residual + dropout(x),    out = (s − mean(s)) / √(var(s) + eps) · weight + bias

    Mean and variance (not the unbiased one) are over the last dimension. Sums are in float32, or float64 for float64,
    and s is never rounded or stored: s and the mask (philox.py) are computed again for the gradient.

    Args:
        x, residual: (…, C), C ≥ 1, in one of the convolutions' types; on a GPU C ≤ 4096.
        weight, bias: (C,) of the same type.
        p: probability of dropping an element of x, 0 ≤ p < 1. There is no evaluation mode: pass 0 there. A dropped
            element counts as 0 only if it is finite.
        eps: > 0.

    Returns:
        (…, C), contiguous. All tensors have first-order gradients.
    """
    checks.residual(x, residual, weight, bias, p, eps)
    if forward_ad._current_level >= 0:
        checks.no_tangents(x, residual, weight, bias)
    return call("dropout_add_norm", x, residual, weight, bias, seeds.draw(p, x), float(p), float(eps))


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """dropout(max(x, 0)), for the feed-forward network; the gradient needs nothing but the output.

    Args:
        x: any shape, in one of the convolutions' types. NaN remains, unless it is dropped.
        p: probability of dropping an element, 0 ≤ p < 1. There is no evaluation mode: pass 0 there.

    Returns:
        A contiguous tensor of x's shape and type. It must not be changed in place: its zeros are where x has no
        gradient.
    """
    checks.floating(("x",), (x,))
    checks.probability("p", p)
    if forward_ad._current_level >= 0:
        checks.no_tangents(x)
    seed = seeds.draw(p, x)
    return x.contiguous().relu() if seed is None else call("relu_dropout", x, seed, float(p))
