"""What layers of both sides share: norms, the FFN, and the order of norm and residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from lightconv_plugin.generation.linear import PackedLinear
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.modules.window_attention import WindowAttention
from lightconv_plugin.ops import reference_search

# Of the activations that fairseq's Transformer knows; the others take more memory than their input.
_IN_PLACE = {F.relu: torch.relu_, torch.tanh: torch.tanh_}
# What newer versions of fairseq can add to a layer ("NormFormer"), each None where it is not asked for.
_EXTRAS = ("attn_ln", "c_attn", "ffn_layernorm", "w_resid")


class UnsupportedModelError(ValueError):
    """A model, or a part of it, that cannot be run by this package; the text says which."""


def pack(*linears: nn.Module, dtype: str) -> PackedLinear:
    """PackedLinear.of them; UnsupportedModelError for what is not a plain linear layer (quantised, adapted …)."""
    for linear in linears:
        if type(linear) not in (nn.Linear, Linear):
            raise UnsupportedModelError(f"a linear layer of type {type(linear).__name__}")
    return PackedLinear.of(*linears, dtype=dtype)


def check_attention(attention: nn.Module) -> None:
    """UnsupportedModelError unless it is fairseq's attention, or WindowAttention, without its rarer options."""
    if type(attention) not in (MultiheadAttention, WindowAttention):
        raise UnsupportedModelError(f"attention of type {type(attention).__name__}")
    if attention.bias_k is not None or attention.add_zero_attn:
        raise UnsupportedModelError("attention with added keys (bias_k, add_zero_attn)")
    if getattr(attention, "use_xformers", False):
        raise UnsupportedModelError("attention by xformers")


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """ops.reference_search.attend: by its kernel where that computes such tensors."""
    native = query.device.type == "cpu" and query.dtype == torch.float32 and keys.shape[3] % 16 == 0
    return (torch.ops.lightconv if native else reference_search).attend(query, keys, values, mask)


class Norm:
    """Layer normalisation (N,d) → (N,d), a new tensor."""

    def __init__(self, norm: nn.Module):
        self.shape, self.eps = tuple(norm.normalized_shape), norm.eps
        self.weight, self.bias = norm.weight.detach(), norm.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def optional_norm(norm: nn.Module | None) -> Norm | None:
    return None if norm is None else Norm(norm)


class Residual:
    """y = f(norm(x)) + x, or norm(f(x) + x)."""

    def __init__(self, norm: nn.Module, before: bool):
        self.norm, self.before = Norm(norm), before

    def enter(self, x: Tensor) -> Tensor:
        """What f takes."""
        return self.norm(x) if self.before else x

    def leave(self, y: Tensor, x: Tensor) -> Tensor:
        """From what f gave, which is overwritten, and the layer's input."""
        y += x
        return y if self.before else self.norm(y)


class FeedForward:
    """The FFN of a layer with its norm and residual, (N,d) → (N,d)."""

    def __init__(self, layer: nn.Module, dtype: str):
        extras = [name for name in _EXTRAS if getattr(layer, name, None) is not None]
        if extras:
            raise UnsupportedModelError(f"layers with {', '.join(extras)}")
        self.fc1, self.fc2 = pack(layer.fc1, dtype=dtype), pack(layer.fc2, dtype=dtype)
        self.activation = _IN_PLACE.get(layer.activation_fn, layer.activation_fn)
        self.residual = Residual(layer.final_layer_norm, layer.normalize_before)

    def __call__(self, x: Tensor) -> Tensor:
        return self.residual.leave(self.fc2(self.activation(self.fc1(self.residual.enter(x)))), x)
