"""Token mixers by name: which one a layer has, with what geometry."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.convolutions import DynamicConv, LightweightConv


@dataclass(frozen=True)
class MixerSpec:
    """One layer's token mixer.

    kind: "lightweight", "dynamic" or "attention" (fairseq's own multi-head attention, which reads none of the rest).
    kernel_size, conv_dim, num_heads, glu, input_dropout, weight_dropout: see ConvBlock and LightweightConv.
    weight_softmax: normalise the filter by softmax, else not at all.
    causal: a decoder's: the last tap is the current token. Else centred; an even kernel reaches one token further to
        the right than to the left.
    zero_pads: see ConvBlock.
    """

    kind: str
    kernel_size: int
    conv_dim: int
    num_heads: int
    glu: bool
    input_dropout: float
    weight_dropout: float
    weight_softmax: bool
    causal: bool
    zero_pads: bool

    @property
    def padding_l(self) -> int:
        return self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2


_CONVOLUTIONS = {"lightweight": LightweightConv, "dynamic": DynamicConv}
MIXERS = (*_CONVOLUTIONS, "attention")


def build_mixer(
    spec: MixerSpec, embed_dim: int, build_attention: Callable[[], nn.Module], *, q_noise: float, qn_block_size: int
) -> nn.Module:
    """The module a fairseq Transformer layer takes as its `self_attn`; `build_attention` makes fairseq's own."""
    if spec.kind == "attention":
        return build_attention()
    conv = _CONVOLUTIONS[spec.kind](
        spec.conv_dim,
        spec.kernel_size,
        spec.padding_l,
        spec.num_heads,
        weight_dropout=spec.weight_dropout,
        normalize="softmax" if spec.weight_softmax else "none",
    )
    return ConvBlock(
        embed_dim,
        conv,
        glu=spec.glu,
        input_dropout=spec.input_dropout,
        zero_pads=spec.zero_pads,
        q_noise=q_noise,
        qn_block_size=qn_block_size,
    )
