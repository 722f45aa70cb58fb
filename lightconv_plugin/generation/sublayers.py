"""The parts of a decoder's layers: linear layers, the FFN, and the order of norm and residual."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.modules.layer import ACTIVATIONS, Layer
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.modules.transformer import Encoder

# The other activations need more memory than their input.
_IN_PLACE = {"relu": torch.relu_, "tanh": torch.tanh_}


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

    def select(self, outputs: Tensor) -> PackedLinear:
        """The layer with only these outputs, (n,) int64."""
        some = copy.copy(self)
        some._weight, some._bias = self._weight[outputs], None if self._bias is None else self._bias[outputs]
        return some


def pack(*linears: nn.Module, dtype: str) -> PackedLinear:
    """One product for several layers with the same input; UnsupportedModelError unless they are plain linear layers."""
    return PackedLinear(*side_by_side(*linears), dtype)


class _Bfloat16Linear(Linear):
    """A linear layer that computes as PackedLinear with this dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.to(self.weight.dtype), self.weight, self.bias).to(input.dtype)


def in_bfloat16(encoder: Encoder) -> Encoder:
    """A copy whose linear layers compute in bfloat16. TaLK's offsets, which are few, stay as they are."""
    embeddings = encoder.embed_tokens  # which can be large, and stay as they are
    encoder = copy.deepcopy(encoder, {id(embeddings): embeddings})
    for module in encoder.modules():
        if type(module) is Linear:
            module.to(torch.bfloat16).__class__ = _Bfloat16Linear
    return encoder


class Residual:
    """y = f(norm(x)) + x, or norm(f(x) + x)."""

    def __init__(self, norm: nn.LayerNorm, before: bool):
        self.norm, self.before = norm, before

    def enter(self, x: Tensor) -> Tensor:
        """The input of f."""
        return self.norm(x) if self.before else x

    def leave(self, y: Tensor, x: Tensor) -> Tensor:
        """y, from the output of f, which is overwritten, and the layer's input."""
        y += x
        return y if self.before else self.norm(y)


class FeedForward:
    """The FFN of a layer with its norm and residual, (N,d) → (N,d)."""

    def __init__(self, layer: Layer, dtype: str):
        self.fc1, self.fc2 = pack(layer.fc1, dtype=dtype), pack(layer.fc2, dtype=dtype)
        self.activation = _IN_PLACE.get(layer.activation, ACTIVATIONS[layer.activation])
        self.residual = Residual(layer.final_layer_norm, layer.normalize_before)

    def __call__(self, x: Tensor) -> Tensor:
        return self.residual.leave(self.fc2(self.activation(self.fc1(self.residual.enter(x)))), x)
