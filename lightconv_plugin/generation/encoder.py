"""An encoder prepared for the search in torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightconv_plugin import ops
from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation.sublayers import FeedForward, PackedLinear, Residual, optional_norm, pack
from lightconv_plugin.modules.attention import PROJECTIONS, SelfAttention, dot_product_attention
from lightconv_plugin.modules.block import ConvBlock, gated, split_parts
from lightconv_plugin.modules.convolutions import DynamicConv
from lightconv_plugin.modules.layer import Layer
from lightconv_plugin.modules.transformer import Encoder


class PackedEncoder:
    """A trained encoder, for batches of words.

    Args:
        encoder: an EncoderDecoder's encoder, in evaluation mode.
        dtype: arithmetic of the linear layers, see PackedLinear.
    """

    def __init__(self, encoder: Encoder, dtype: str = "float32"):
        self._encoder = encoder
        self.layers = [_Layer(layer, dtype) for layer in encoder.layers]
        self.final_norm = optional_norm(encoder.layer_norm)

    @torch.no_grad()
    def __call__(self, src_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """src_tokens (S,T) → encoded (T,S,d), and pads (S,T) bool; the encoding at pads is meaningless."""
        pads = src_tokens.eq(self._encoder.pad)
        x = self._encoder.embed(src_tokens, pads).masked_fill(pads.t().unsqueeze(-1), 0)
        batch = _Batch(pads)
        rows = x.flatten(0, 1)
        for layer in self.layers:
            rows = layer(rows, batch)
        if self.final_norm is not None:
            rows = self.final_norm(rows)
        return batch.grid(rows), pads


class _Batch:
    """The shape of a batch: T · S rows, time first."""

    def __init__(self, pads: Tensor):
        self.sentences, self.steps = pads.shape
        self.device = pads.device
        self.pads = pads if bool(pads.any()) else None
        self._masks: dict[tuple, Tensor | None] = {}

    def grid(self, rows: Tensor) -> Tensor:
        """(T · S, C) → (T, S, C), a view."""
        return rows.view(self.steps, self.sentences, -1)

    def without_pads(self, x: Tensor) -> Tensor:
        """(T,S,C) with zeros at pads; x is overwritten."""
        return x if self.pads is None else x.masked_fill_(self.pads.t().unsqueeze(-1), 0)

    def seen(self, left: int | None, right: int | None) -> Tensor | None:
        """Which keys each query sees, (S or 1, 1, T or 1, T) bool; None for all.

        In a window of `left` and `right` steps to either side, a pad also sees itself, so that no row is empty.
        """
        key = (left, right)
        if key not in self._masks:
            seen = None if self.pads is None else ~self.pads[:, None, None]
            if left is not None and right is not None:
                times = torch.arange(self.steps, device=self.device)
                distance = times - times.unsqueeze(1)
                window = (distance >= -left) & (distance <= right)
                seen = window[None, None] if seen is None else window & (seen | (distance == 0))
            self._masks[key] = seen
        return self._masks[key]


class _Layer:
    """Mixer and FFN, (T · S, d) → (T · S, d)."""

    def __init__(self, layer: Layer, dtype: str):
        self.mixer = _build_mixer(layer.self_attn, dtype)
        self.residual = Residual(layer.self_attn_layer_norm, layer.normalize_before)
        self.feed_forward = FeedForward(layer, dtype)

    def __call__(self, x: Tensor, batch: _Batch) -> Tensor:
        x = self.residual.leave(self.mixer(self.residual.enter(x), batch), x)
        return self.feed_forward(x)


class _ConvMixer:
    """A ConvBlock. The layers that predict dynamic filters are packed too."""

    def __init__(self, block: ConvBlock, dtype: str):
        self.conv, self.parts, self.zero_pads = block.conv, block.parts, block.zero_pads
        project = isinstance(block.linear1, nn.Linear)
        self.linear1 = pack(block.linear1, dtype=dtype) if project else None
        self.linear2 = pack(block.linear2, dtype=dtype) if project else None
        self.predict: list[PackedLinear] = []
        if type(block.conv) is DynamicConv:
            linears = (block.conv.rank_linear, block.conv.weight_linear)
            self.predict = [pack(linear, dtype=dtype) for linear in linears if linear is not None]

    def __call__(self, x: Tensor, batch: _Batch) -> Tensor:
        x, gate = split_parts(x.clone() if self.linear1 is None else self.linear1(x), self.parts)
        if self.zero_pads:
            batch.without_pads(batch.grid(x))
        grid = batch.grid(x)
        if not self.predict:
            y = self.conv(grid)
        else:
            conv = self.conv
            for linear in self.predict:
                x = linear(x)
            filters = batch.grid(x).unflatten(2, (conv.num_heads, conv.kernel_size))
            y = ops.dynamicconv(
                grid,
                filters,
                conv.padding_l,
                normalize=conv.normalize,
                bias=conv.conv_bias,
                renorm_padding=conv.renorm_padding,
            )
        y = gated(y.flatten(0, 1), gate)
        return y if self.linear2 is None else self.linear2(y)


class _Attention:
    """Self-attention, over the whole sequence or in a window."""

    def __init__(self, attention: SelfAttention, dtype: str):
        self.heads, self.head_dim = attention.num_heads, attention.head_dim
        self.left, self.right = attention.left, attention.right
        self.project = pack(attention.q_proj, attention.k_proj, attention.v_proj, dtype=dtype)
        self.out_proj = pack(attention.out_proj, dtype=dtype)
        self.convs = [(PROJECTIONS.index(name), conv) for name, conv in attention.convolutions().items()]

    def __call__(self, x: Tensor, batch: _Batch) -> Tensor:
        parts = batch.grid(self.project(x)).unflatten(2, (3, -1))
        for i, conv in self.convs:
            parts[:, :, i] = conv(batch.without_pads(parts[:, :, i].contiguous()))
        query, keys, values = parts.unflatten(3, (self.heads, self.head_dim)).permute(2, 1, 3, 0, 4).unbind()
        y = dot_product_attention(query, keys, values, batch.seen(self.left, self.right))
        return self.out_proj(y.permute(2, 0, 1, 3).reshape(-1, self.heads * self.head_dim))


def _build_mixer(module: nn.Module, dtype: str) -> _ConvMixer | _Attention:
    if isinstance(module, ConvBlock):
        return _ConvMixer(module, dtype)
    if isinstance(module, SelfAttention):
        return _Attention(module, dtype)
    raise UnsupportedModelError(f"an encoder layer with {type(module).__name__}")
