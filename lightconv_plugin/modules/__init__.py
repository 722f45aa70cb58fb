"""Plain torch: token mixers, the block and layers around them, and whole models (no fairseq).

from lightconv_plugin.modules import EncoderDecoder, ModelConfig
"""

from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules.attention import AttentionConv, EncoderAttention, SelfAttention
from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.config import AdaptiveInputConfig, AdaptiveSoftmaxConfig, ModelConfig, StackConfig
from lightconv_plugin.modules.convolutions import DepthwiseConv, DynamicConv, LightweightConv
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.full_convolution import FullConv
from lightconv_plugin.modules.layer import Layer
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.modules.mixers import MixerSpec, build_mixer
from lightconv_plugin.modules.talk import TaLKConv
from lightconv_plugin.modules.transformer import (
    Decoder,
    DecoderState,
    Encoded,
    Encoder,
    EncoderDecoder,
    LanguageModel,
    build_model,
)

__all__ = [
    "MIXERS",
    "AdaptiveInputConfig",
    "AdaptiveSoftmaxConfig",
    "AttentionConv",
    "ConvBlock",
    "Decoder",
    "DecoderState",
    "DepthwiseConv",
    "Dropout",
    "DynamicConv",
    "Encoded",
    "Encoder",
    "EncoderAttention",
    "EncoderDecoder",
    "FullConv",
    "LanguageModel",
    "Layer",
    "LightweightConv",
    "Linear",
    "MixerSpec",
    "ModelConfig",
    "SelfAttention",
    "StackConfig",
    "TaLKConv",
    "build_mixer",
    "build_model",
]
