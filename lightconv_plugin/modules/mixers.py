"""Token mixers by name: which one a layer has, with what geometry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.convolutions import DepthwiseConv, DynamicConv, LightweightConv
from lightconv_plugin.modules.full_convolution import FullConv
from lightconv_plugin.modules.talk import TaLKConv
from lightconv_plugin.modules.window_attention import WindowAttention


@dataclass(frozen=True)
class MixerSpec:
    """One layer's token mixer.

    kind: a name of MIXERS.
    kernel_size: K of a convolution; the window of "window_attention"; for "talk" the longest reach L (and R).
    conv_dim, glu, input_dropout: see ConvBlock; attention reads none of them.
    num_heads: heads that share a filter or an offset ("lightweight", "dynamic", "talk"), or of attention.
    weight_dropout: DropConnect of the filter; for "talk" the dropout of the offsets.
    normalize: how the filters of "lightweight" and "dynamic" are normalised, one of ops.NORMALIZATIONS.
    attention_dropout: of "window_attention"'s weights ("attention" takes fairseq's configuration).
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
    normalize: str
    attention_dropout: float
    causal: bool
    zero_pads: bool

    @property
    def padding_l(self) -> int:
        return self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2


def _with_heads(spec: MixerSpec) -> nn.Module:
    kind = {"lightweight": LightweightConv, "dynamic": DynamicConv}[spec.kind]
    return kind(
        spec.conv_dim,
        spec.kernel_size,
        spec.padding_l,
        spec.num_heads,
        weight_dropout=spec.weight_dropout,
        normalize=spec.normalize,
    )


def _talk(spec: MixerSpec) -> nn.Module:
    reach = spec.kernel_size
    return TaLKConv(
        spec.conv_dim, reach, 0 if spec.causal else reach, spec.num_heads, weight_dropout=spec.weight_dropout
    )


def _depthwise(spec: MixerSpec) -> nn.Module:
    return DepthwiseConv(spec.conv_dim, spec.kernel_size, spec.padding_l, weight_dropout=spec.weight_dropout)


def _conv(spec: MixerSpec) -> nn.Module:
    return FullConv(spec.conv_dim, spec.kernel_size, spec.padding_l, glu=spec.glu, weight_dropout=spec.weight_dropout)


_CONVOLUTIONS = {
    "lightweight": _with_heads,
    "dynamic": _with_heads,
    "talk": _talk,
    "depthwise": _depthwise,
    "conv": _conv,
}
MIXERS = (*_CONVOLUTIONS, "attention", "window_attention")
# Mixers in which the heads divide the convolution's channels.
HEADED = ("lightweight", "dynamic", "talk")


def build_mixer(
    spec: MixerSpec, embed_dim: int, build_attention: Callable[[], nn.Module], *, q_noise: float, qn_block_size: int
) -> nn.Module:
    """The module a fairseq Transformer layer takes as its `self_attn`; `build_attention` makes fairseq's own."""
    if spec.kind == "attention":
        return build_attention()
    noise: dict[str, Any] = {"q_noise": q_noise, "qn_block_size": qn_block_size}
    if spec.kind == "window_attention":
        return WindowAttention(
            embed_dim,
            spec.num_heads,
            left=spec.padding_l,
            right=spec.kernel_size - 1 - spec.padding_l,
            dropout=spec.attention_dropout,
            **noise,
        )
    return ConvBlock(
        embed_dim,
        _CONVOLUTIONS[spec.kind](spec),
        glu=spec.glu,
        project=spec.kind != "conv",
        input_dropout=spec.input_dropout,
        zero_pads=spec.zero_pads,
        **noise,
    )
