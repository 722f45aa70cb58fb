"""An encoder as the search in torch runs it: the model's own, or its copy with packed linear layers."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation.sublayers import pack
from lightconv_plugin.modules.attention import SelfAttention
from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.transformer import Encoder


class _Packed(nn.Module):
    def __init__(self, linear: nn.Linear, dtype: str):
        super().__init__()
        self.linear = pack(linear, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def prepare_encoder(encoder: Encoder, dtype: str = "float32") -> Encoder:
    """The encoder with this arithmetic of its layers' linear layers (see PackedLinear), which shares its parameters.

    Raises UnsupportedModelError for a layer with anything but a block or self-attention and, unless dtype is float32,
    for a linear layer that is not a plain one.
    """
    for layer in encoder.layers:
        if not isinstance(layer.self_attn, (ConvBlock, SelfAttention)):
            raise UnsupportedModelError(f"an encoder layer with {type(layer.self_attn).__name__}")
    if dtype == "float32":
        return encoder
    packed = copy.deepcopy(encoder, {id(parameter): parameter for parameter in encoder.parameters()})
    for layer in packed.layers:
        for parent in list(layer.modules()):
            for name, child in parent.named_children():
                # TaLK's offsets decide how far the windows reach, and are few: full precision costs nothing.
                if isinstance(child, nn.Linear) and name != "offsets":
                    setattr(parent, name, _Packed(child, dtype))
    return packed
