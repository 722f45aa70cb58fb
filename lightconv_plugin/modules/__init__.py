"""Token mixers as nn.Modules, and the block that makes one of them a drop-in for self-attention."""

import fairseq  # noqa: F401 (first of all: it registers the models, which import the modules below)

from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.convolutions import DepthwiseConv, DynamicConv, LightweightConv
from lightconv_plugin.modules.full_convolution import FullConv
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.modules.mixers import MIXERS, MixerSpec, build_mixer
from lightconv_plugin.modules.talk import TaLKConv
from lightconv_plugin.modules.window_attention import WindowAttention

__all__ = [
    "MIXERS",
    "ConvBlock",
    "DepthwiseConv",
    "DynamicConv",
    "FullConv",
    "LightweightConv",
    "Linear",
    "MixerSpec",
    "TaLKConv",
    "WindowAttention",
    "build_mixer",
]
