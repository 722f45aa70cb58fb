"""One layer: a token mixer, attention over the encoder (in a decoder), and the feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.modules.config import StackConfig
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.modules.mixers import MixerSpec, build_mixer
from lightconv_plugin.modules.residual import dropped_added_normed, unchanged
from lightconv_plugin.ops.filters import widen

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": lambda x: F.gelu(widen(x)).type_as(x),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}
"""Activation functions under fairseq's names."""


class Encoded(NamedTuple):
    """An encoder's output (S,B,d), and the pads (B,S) bool of its input."""

    output: Tensor
    pads: Tensor


class Source(NamedTuple):
    """The encoder's output as a decoder layer's attention reads it: keys and values (B,H,S,d/H), pads (B,S) or None."""

    keys: Tensor
    values: Tensor
    pads: Tensor | None

    def reorder(self, order: Tensor) -> Source:
        """For beam search: sequence n is the former sequence order[n]; order (B',) int64."""
        return Source(*(None if part is None else part.index_select(0, order) for part in self))  # type: ignore[arg-type]


class Layer(nn.Module):
    """Mixer, attention over the encoder (if `config` has an encoder_dim) and FFN, each with a residual connection and a
    layer norm before or after it. The parameters have the names of fairseq's Transformer.

    Args:
        config: the side of the model that the layer belongs to.
        mixer: the layer's token mixer.
    """

    def __init__(self, config: StackConfig, mixer: MixerSpec):
        super().__init__()
        dim = config.embed_dim
        self.normalize_before = config.normalize_before
        self.activation = config.activation
        self.dropout_module = Dropout(config.dropout, type(self).__name__)
        self.activation_dropout_module = Dropout(config.activation_dropout, type(self).__name__)
        self.self_attn: Any = build_mixer(mixer, dim)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.encoder_attn = config.build_encoder_attention()
        if self.encoder_attn is not None:
            self.encoder_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = Linear(dim, config.ffn_dim)
        self.fc2 = Linear(config.ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, pads: Tensor | None = None, encoded: Encoded | None = None) -> Tensor:
        """The whole sequence at once: x (T,B,d), pads (B,T) bool, `encoded` for a decoder's layer → (T,B,d).

        Everything that reads the layer's parameters is within this call, as sharding (FSDP) needs it.
        """
        x = self._residual(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, pads))
        if self.encoder_attn is not None:
            attention, source = self.encoder_attn, _given(self.source(encoded))
            x = self._residual(x, self.encoder_attn_layer_norm, lambda y: attention(y, *source, pads))
        return self._residual(x, self.final_layer_norm, self._feed_forward)

    def source(self, encoded: Encoded | None) -> Source | None:
        """The encoder's output as `step` reads it; None if the layer does not attend to one."""
        if self.encoder_attn is None:
            return None
        if encoded is None:
            raise ValueError("encoded is missing: the layer attends to an encoder's output")
        return Source(*self.encoder_attn.project(encoded.output), encoded.pads)

    def step(
        self,
        x: Tensor,
        state: Any,
        pads: Tensor | None = None,
        source: Source | None = None,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, Any, Tensor | None]:
        """The next n ≥ 1 tokens: x (n,B,d), the mixer's state → ((n,B,d), state, queries).

        queries: the state of the attention over the encoder; None before the first token, and without a convolution.
        """

        def mix(y: Tensor) -> Tensor:
            nonlocal state
            out, state = self.self_attn.step(y, state, pads)
            return out

        def attend(y: Tensor) -> Tensor:
            nonlocal queries
            out, queries = self.encoder_attn.step(y, queries, *_given(source), pads)  # type: ignore[union-attr]
            return out

        x = self._residual(x, self.self_attn_layer_norm, mix)
        if self.encoder_attn is not None:
            x = self._residual(x, self.encoder_attn_layer_norm, attend)
        return self._residual(x, self.final_layer_norm, self._feed_forward), state, queries

    def _residual(self, x: Tensor, norm: nn.LayerNorm, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.normalize_before:
            return x + self.dropout_module(sublayer(norm(x)))
        out, joined = sublayer(x), None
        if unchanged(norm, nn.LayerNorm) and unchanged(self.dropout_module, Dropout):
            joined = dropped_added_normed(out, x, norm, self.dropout_module)
        return norm(x + self.dropout_module(out)) if joined is None else joined

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_dropout_module(ACTIVATIONS[self.activation](self.fc1(x))))


def _given(source: Source | None) -> Source:
    if source is None:
        raise ValueError("source is missing: the layer attends to an encoder's output")
    return source
