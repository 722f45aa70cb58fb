"""The filter of an operator: its weight after normalisation and dropout, and the gradient back to the weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from lightconv_plugin.ops.philox import dropout_scale

from .normalize import normalize as normalize_taps
from .normalize import normalize_backward

R = TypeVar("R")


def with_shared_filter(function: Callable[..., R]) -> Callable[..., R]:
    """What lightconv does, given what dynamicconv does: a filter (H, K) without T and B has no `renorm_padding`."""
    at = list(inspect.signature(function).parameters).index("renorm_padding")
    return lambda *args: function(*args[:at], False, *args[at:])


def widen(tensor: Tensor) -> Tensor:
    """The tensor in the precision of the sums: float32, or float64 as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Filter:
    """A weight that is widened, normalised and has dropout applied; `backward` takes the gradient back through this.

    `taps` has the taps first: (K, H) or (K, T, B, H), contiguous. `inside` (K, T, B or 1, 1) limits the normalisation
    to those taps (renorm_padding); the others get weight 0.
    """

    def __init__(
        self, weight: Tensor, seed: Tensor | None, normalize: str, dropout: float, inside: Tensor | None
    ) -> None:
        self.kind = normalize
        self.outside: Tensor | None = None if inside is None else ~inside
        self.scale: Tensor | None = None
        self.weight = widen(weight).movedim(-1, 0).contiguous()
        if self.outside is not None:
            self.weight = self.weight.masked_fill(self.outside, float("-inf") if normalize == "softmax" else 0)
        self.normalized = normalize_taps(self.weight, normalize)
        if self.outside is not None:
            # sigmoid(0) is not 0, and a softmax over nothing is NaN.
            self.normalized = self.normalized.masked_fill(self.outside, 0)
        self.taps = self.normalized
        if dropout > 0 and seed is not None:
            self.scale = dropout_scale(seed, weight.shape, dropout, self.weight.dtype).movedim(-1, 0)
            self.taps = self.normalized * self.scale

    def backward(self, dtaps: Tensor) -> Tensor:
        """The gradient for the weight, (H, K) or (T, B, H, K), given that for the taps (which is overwritten)."""
        if self.scale is not None:
            dtaps *= self.scale
        if self.outside is not None:
            dtaps.masked_fill_(self.outside, 0)
        grad = normalize_backward(dtaps, self.weight, self.normalized, self.kind)
        if self.outside is not None:
            grad = grad.masked_fill(self.outside, 0)
        return grad.movedim(0, -1)
