"""fairseq's Transformer layers with another token mixer in place of self-attention."""

from collections.abc import Callable
from functools import cache

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.quant_noise import quant_noise
from fairseq.modules.quantization.scalar.modules import IntLinear
from fairseq.modules.quantization.scalar.utils import MAPPING
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import nn

from lightconv_plugin.models.token_mixers import build_encoder_attention, build_mixer
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.modules.mixers import MixerSpec

# --quant-noise-scalar finds the quantised form of a layer by its exact class.
MAPPING[Linear] = IntLinear
# How many graphs may be compiled in a process: there is one for each mixer, kernel size, dtype …
_GRAPHS = 64


@cache
def _compiled(forward: Callable) -> Callable:
    """fairseq's forward pass of a layer under torch.compile, for batches of any size; shared by all layers."""
    config = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # torch < 2.7
    setattr(config, limit, max(getattr(config, limit), _GRAPHS))
    return torch.compile(forward, dynamic=True)


class _MixerLayer(nn.Module):
    """What the layers of both sides override: self-attention, and the initialisation of the FFN (the paper's).

    With cfg.compile_blocks the forward pass is compiled in training. The module itself is not wrapped, so parameter
    names, copies and checkpoints stay the same.
    """

    quant_noise: float  # fairseq's layers have both
    quant_noise_block_size: int

    def __init__(self, cfg, mixer: MixerSpec, **kwargs):
        self.mixer = mixer  # before the base class, which builds the self-attention
        super().__init__(cfg, **kwargs)
        self.compile_block = getattr(cfg, "compile_blocks", False)

    def build_self_attention(self, embed_dim, cfg, **kwargs):
        attention = super().build_self_attention  # type: ignore[misc]  # fairseq's
        return build_mixer(
            self.mixer,
            embed_dim,
            lambda: attention(embed_dim, cfg, **kwargs),
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )

    def build_fc1(self, input_dim, output_dim, q_noise, qn_block_size):
        return quant_noise(Linear(input_dim, output_dim), q_noise, qn_block_size)

    def build_fc2(self, input_dim, output_dim, q_noise, qn_block_size):
        return quant_noise(Linear(input_dim, output_dim), q_noise, qn_block_size)


class MixerEncoderLayer(_MixerLayer, TransformerEncoderLayerBase):
    """Encoder layer: mixer, FFN; pre- or post-norm, depending on the configuration."""

    def __init__(self, cfg, mixer: MixerSpec):
        super().__init__(cfg, mixer)
        move_to_end(self, "self_attn_layer_norm", "final_layer_norm")

    def forward(self, *args, **kwargs):
        """As fairseq's layer: x (T,B,d) and the padding mask (B,T) → (T,B,d)."""
        if self.compile_block and self.training:
            return _compiled(TransformerEncoderLayerBase.forward)(self, *args, **kwargs)
        return super().forward(*args, **kwargs)


class MixerDecoderLayer(_MixerLayer, TransformerDecoderLayerBase):
    """Decoder layer: mixer, attention over the encoder, FFN; pre- or post-norm, depending on the configuration."""

    def build_encoder_attention(self, embed_dim, cfg):
        convolved = getattr(cfg.decoder, "convolved", None)
        return build_encoder_attention(
            cfg, embed_dim, convolved, q_noise=self.quant_noise, qn_block_size=self.quant_noise_block_size
        )

    def forward(self, x, encoder_out=None, encoder_padding_mask=None, incremental_state=None, *args, **kwargs):
        """As fairseq's layer: x (T,B,d), the encoder's output (S,B,d) and pads (B,S) → ((T,B,d), weights, None).

        A step with an incremental state is never compiled: the state changes its keys and sizes with every token.
        """
        arguments = (x, encoder_out, encoder_padding_mask, incremental_state, *args)
        if self.compile_block and self.training and incremental_state is None:
            return _compiled(TransformerDecoderLayerBase.forward)(self, *arguments, **kwargs)
        return super().forward(*arguments, **kwargs)


def move_to_end(module: nn.Module, *names: str) -> None:
    """Move submodules to the end, which gives the parameters the order they have in fairseq's own LightConv.

    A saved optimizer state depends on this order: with another, a training started with fairseq could not be resumed.
    """
    for name in names:
        module._modules[name] = module._modules.pop(name)


def wrap_layer(layer: nn.Module, cfg) -> nn.Module:
    """Wrap a layer in activation checkpointing and FSDP if the configuration asks for them."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # A checkpointed layer is always its own FSDP unit: recomputing it must not gather its neighbours.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)
