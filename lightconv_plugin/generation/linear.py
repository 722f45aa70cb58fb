"""The arithmetic of linear layers in a search, and such layers in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = ("float32", "bfloat16", "int8")


def check_dtype(dtype: str) -> str:
    """`dtype` itself; ValueError unless it is one of DTYPES."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


class PackedLinear:
    """y = x · weightᵀ + bias, without gradients.

    Args:
        weight: (outputs, inputs), floating.
        bias: (outputs,) or None.
        dtype: the arithmetic of the product.
            "float32": that of the weight as it is (so also float64, or the half precision of a model on a GPU).
            "bfloat16": weight, bias, input and result are rounded to bfloat16, sums are float32.

    Raises:
        ValueError: another dtype. Only the native search multiplies in "int8".
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: str = "float32"):
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16 in torch, got {dtype!r}")
        kind = torch.bfloat16 if dtype == "bfloat16" else weight.dtype
        self._weight, self._bias = weight.detach().to(kind), None if bias is None else bias.detach().to(kind)

    @classmethod
    def of(cls, *linears: nn.Linear, dtype: str = "float32") -> PackedLinear:
        """One product for several layers with the same input: their outputs side by side."""
        if len(linears) == 1:
            return cls(linears[0].weight, linears[0].bias, dtype)
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat(
                [
                    linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
                    for linear in linears
                ]
            )
        return cls(torch.cat([linear.weight for linear in linears]), bias, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) → (rows, outputs), a new tensor in x's dtype."""
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).to(x.dtype)
