"""The arithmetic of linear layers in a search, and the layers that use it in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.modules.linear import Linear


def side_by_side(*linears: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one product for several layers with the same input, their outputs side by side.

    Raises UnsupportedModelError for anything but plain linear layers (quantised, adapted …).
    """
    plain = [_plain(linear) for linear in linears]
    weights: list[Tensor] = [linear.weight for linear in plain]
    biases: list[Tensor | None] = [linear.bias for linear in plain]
    if len(linears) == 1:
        return weights[0], biases[0]
    if all(bias is None for bias in biases):
        return torch.cat(weights), None
    parts = zip(weights, biases, strict=True)
    return torch.cat(weights), torch.cat([weight.new_zeros(len(weight)) if b is None else b for weight, b in parts])


def _plain(linear: nn.Module) -> nn.Linear:
    if type(linear) is nn.Linear or type(linear) is Linear:
        return linear
    raise UnsupportedModelError(f"a linear layer of type {type(linear).__name__}")


class PackedLinear:
    """y = x · weightᵀ + bias, without gradients.

    Args:
        weight: (outputs, inputs), floating.
        bias: (outputs,) or None.
        dtype: the arithmetic of the product.
            "float32": that of the weight's own type (which may be float64, or half precision on a GPU).
            "bfloat16": weight, bias, input and result are rounded to bfloat16, sums are float32.

    Raises:
        ValueError: any other dtype. Only the native search supports "int8".
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: str = "float32"):
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16 in torch, got {dtype!r}")
        kind = torch.bfloat16 if dtype == "bfloat16" else weight.dtype
        self._weight, self._bias = weight.detach().to(kind), None if bias is None else bias.detach().to(kind)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) → (rows, outputs), a new tensor in x's dtype."""
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).to(x.dtype)
