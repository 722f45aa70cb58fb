"""The parts that layers of both sides share: norms, the FFN, and the order of norm and residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.generation.linear import PackedLinear, side_by_side
from lightconv_plugin.modules.layer import ACTIVATIONS, Layer

# The other activations need more memory than their input.
_IN_PLACE = {"relu": torch.relu_, "tanh": torch.tanh_}


def pack(*linears: nn.Module, dtype: str) -> PackedLinear:
    """One product for several layers with the same input; UnsupportedModelError unless they are plain linear layers."""
    return PackedLinear(*side_by_side(*linears), dtype)


class Norm:
    """Layer normalisation (N,d) → (N,d), a new tensor."""

    def __init__(self, norm: nn.LayerNorm):
        self.shape, self.eps = norm.normalized_shape, norm.eps
        self.weight, self.bias = norm.weight.detach(), norm.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def optional_norm(norm: nn.LayerNorm | None) -> Norm | None:
    return None if norm is None else Norm(norm)


class Residual:
    """y = f(norm(x)) + x, or norm(f(x) + x)."""

    def __init__(self, norm: nn.LayerNorm, before: bool):
        self.norm, self.before = Norm(norm), before

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
