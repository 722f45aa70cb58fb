"""The normalisations of a filter's K weights, and their gradients.

`softmax` is the default of Wu et al. 2019 ("Pay Less Attention with Lightweight and Dynamic Convolutions", section 3);
the others are those of the paper's appendix A. All run in the precision of their argument (the operators pass float32
or float64). The gradients are written by hand instead of with autograd, because the operators save only their inputs
and recompute the rest in the backward pass.

Filters have their taps in the first dimension, (K, …), and sums over taps add one tap after the other. A softmax over
few taps is then a handful of passes over long rows, up to ten times faster than over a short last dimension. It also
makes the results for one sentence independent of the batch it is in: torch's own reductions, softmax and sigmoid round
the elements that do not fill a SIMD vector differently from those that do.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORMALIZATIONS = ("softmax", "none", "l2", "abs_l2", "sigmoid", "tanh", "l1", "abs", "square")
"""The normalisations of a filter, over its K taps; "softmax" is the papers', "none" leaves the filter as it is."""

EPSILON = 1e-6
"""ε of W / (‖W‖ + ε) in `l2`, `abs_l2` and `l1`; we found its value in no source."""


def normalize(weight: Tensor, kind: str) -> Tensor:
    """Return `weight` (K, …) normalised over its first dimension. A new tensor, except for `none`."""
    if kind == "softmax":
        exponentials = (weight - weight.amax(0)).exp_()
        return exponentials.div_(_sum(exponentials))
    if kind == "none":
        return weight
    if kind == "l2":
        return weight / (_l2_norm(weight) + EPSILON)
    if kind == "abs_l2":
        return weight.abs() / (_l2_norm(weight) + EPSILON)
    if kind == "sigmoid":
        return sigmoid(weight)
    if kind == "tanh":
        return weight.tanh()
    if kind == "l1":
        return weight / (_l1_norm(weight) + EPSILON)
    if kind == "abs":
        return weight.abs()
    if kind == "square":
        return weight.square()
    raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {kind!r}")


def normalize_backward(grad: Tensor, weight: Tensor, normalized: Tensor, kind: str) -> Tensor:
    """Return the gradient for `weight`, given `grad` for `normalized = normalize(weight, kind)`. All (K, …)."""
    if kind == "softmax":
        return (grad - _sum_of_products(grad, normalized)).mul_(normalized)
    if kind == "none":
        return grad
    if kind == "l2":
        return _over_l2_norm_backward(grad, weight, weight)
    if kind == "abs_l2":
        # d|w| = sign(w)·dw; the norm's part is the same function of w, with |w| as the numerator.
        return _over_l2_norm_backward(grad, weight, weight.abs(), sign=weight.sign())
    if kind == "sigmoid":
        return grad * (normalized * (1 - normalized))
    if kind == "tanh":
        return grad * (1 - normalized.square())
    if kind == "l1":
        scale = 1 / (_l1_norm(weight) + EPSILON)
        along = _sum_of_products(grad, weight) * scale.square()
        return grad * scale - weight.sign() * along
    if kind == "abs":
        return grad * weight.sign()
    if kind == "square":
        return grad * weight * 2
    raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {kind!r}")


def sigmoid(tensor: Tensor) -> Tensor:
    """1 / (1 + exp(−x)); exp's overflow at very negative x gives the right limit, 0."""
    return tensor.neg().exp_().add_(1).reciprocal_()


def _sum(values: Tensor) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    total = left[0] * right[0]
    for k in range(1, left.shape[0]):
        total.addcmul_(left[k], right[k])
    return total


def _l2_norm(weight: Tensor) -> Tensor:
    return _sum_of_products(weight, weight).sqrt_()


def _l1_norm(weight: Tensor) -> Tensor:
    return _sum(weight.abs())


def _over_l2_norm_backward(grad: Tensor, weight: Tensor, numerator: Tensor, sign: Tensor | None = None) -> Tensor:
    """Gradient of numerator / (‖weight‖₂ + ε); `sign` is d numerator / d weight, None for 1."""
    norm = _l2_norm(weight)
    scale = 1 / (norm + EPSILON)
    # ∂‖w‖/∂w = w/‖w‖, taken as 0 at w = 0 (torch's own subgradient there).
    direction = torch.where(norm > 0, weight / norm, 0)
    along = _sum_of_products(grad, numerator) * scale.square()
    direct = grad if sign is None else grad * sign
    return direct * scale - direction * along
