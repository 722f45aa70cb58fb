"""Converts fairseq's models to the plain models of modules/, which share their parameters (no copies)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fairseq.models import FairseqLanguageModel
from fairseq.models.transformer import (
    TransformerDecoder,
    TransformerDecoderBase,
    TransformerEncoder,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules import AdaptiveInput, MultiheadAttention, SinusoidalPositionalEmbedding
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayer,
    TransformerDecoderLayerBase,
    TransformerEncoderLayer,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.models.encoder_decoder import MixerDecoder, MixerEncoder
from lightconv_plugin.models.layers import MixerDecoderLayer, MixerEncoderLayer
from lightconv_plugin.models.token_mixers import (
    ConvolvedEncoderAttention,
    FairseqConvBlock,
    FusedEncoderAttention,
    WindowAttention,
)
from lightconv_plugin.modules.config import (
    AdaptiveInputConfig,
    AdaptiveSoftmaxConfig,
    ModelConfig,
    Positions,
    StackConfig,
)
from lightconv_plugin.modules.convolutions import DynamicConv
from lightconv_plugin.modules.layer import ACTIVATIONS
from lightconv_plugin.modules.mixers import MixerSpec
from lightconv_plugin.modules.transformer import EncoderDecoder, LanguageModel, build_model

_STACKS = (
    MixerEncoder,
    MixerDecoder,
    TransformerEncoder,
    TransformerEncoderBase,
    TransformerDecoder,
    TransformerDecoderBase,
)
_LAYERS = (
    MixerEncoderLayer,
    MixerDecoderLayer,
    TransformerEncoderLayer,
    TransformerEncoderLayerBase,
    TransformerDecoderLayer,
    TransformerDecoderLayerBase,
)
_MIXERS = (FairseqConvBlock, WindowAttention, ConvolvedEncoderAttention)
# What fairseq saves besides the parameters.
_MARKERS = ("version", "_float_tensor")


def plain_model(model: nn.Module) -> EncoderDecoder | LanguageModel:
    """The same model without fairseq, in the same mode (training or evaluation) as `model`.

    Supported are this package's encoder-decoders and language models with every mixer, and fairseq's Transformer. The
    parameters are shared with `model`: training one changes the other. Frozen parameters stay frozen.

    Raises:
        UnsupportedModelError: it names the unsupported part and, if there is one, its option.
    """
    config = plain_config(model)
    with torch.device("meta"):
        plain = build_model(config)
    state = _parameters(model, config)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    missing, unexpected = plain.load_state_dict(_fitting(plain, state), strict=False, assign=True)
    for parameter in frozen:  # load_state_dict has set every parameter's flag to the new model's
        parameter.requires_grad_(False)
    if missing or unexpected:
        raise UnsupportedModelError(f"a model with {', '.join((*unexpected, *missing)[:3])}")
    return plain.train(model.training)


def plain_encoder_decoder(model: nn.Module) -> EncoderDecoder:
    """`plain_model` for what needs an encoder; it raises UnsupportedModelError for a language model too."""
    plain = plain_model(model)
    if not isinstance(plain, EncoderDecoder):
        raise UnsupportedModelError("a language model")
    return plain


def plain_config(model: nn.Module) -> ModelConfig:
    """The architecture of a fairseq model as data; raises the same errors as `plain_model`."""
    if isinstance(model, TransformerModelBase):
        if type(model).get_normalized_probs is not TransformerModelBase.get_normalized_probs:
            raise UnsupportedModelError(f"the output normalisation of {type(model).__name__}")
        encoder = _stack(model.encoder)
    elif isinstance(model, FairseqLanguageModel):
        encoder = None
    else:
        raise UnsupportedModelError(f"a model of type {type(model).__name__}")
    for name, module in model.named_modules():
        if getattr(module, "apply_during_inference", False) and module.p > 0:
            raise UnsupportedModelError(f"dropout at inference (retain_dropout) in {name}")
    decoder, words = model.decoder, model.decoder.dictionary
    try:
        return ModelConfig(
            decoder=_stack(decoder),
            encoder=encoder,
            share_embeddings=encoder is not None and model.encoder.embed_tokens is decoder.embed_tokens,
            pad=words.pad(),
            bos=words.bos(),
            eos=words.eos(),
            unk=words.unk(),
        )
    except UnsupportedModelError:  # a ValueError too
        raise
    except ValueError as error:
        raise UnsupportedModelError(f"a model with an unexpected configuration ({error})") from error


def _stack(stack: Any) -> StackConfig:
    """One side of the model."""
    side = "an encoder" if isinstance(stack, TransformerEncoderBase) else "a decoder"
    if type(stack) not in _STACKS:
        raise UnsupportedModelError(f"{side} of type {type(stack).__name__}")
    if getattr(stack, "quant_noise", None) is not None:
        raise UnsupportedModelError(f"quant_noise_pq with {side} that has a layer for it")
    layers = [stack.layers[i] for i in range(len(stack.layers))]  # LayerDrop's list skips some in training
    for layer in layers:
        _check_layer(layer, side)
    if not layers:
        raise UnsupportedModelError(f"{side} without layers")
    cfg, first = stack.cfg, layers[0]
    dim = first.fc1.in_features
    positions = stack.embed_positions
    longest = stack.max_source_positions if side == "an encoder" else stack.max_target_positions
    kind: Positions
    if positions is None:
        kind = "none"
    elif type(positions) is SinusoidalPositionalEmbedding:
        kind = "sinusoidal"
    else:
        kind, longest = "learned", positions.num_embeddings - stack.padding_idx - 1
    # The layers hold only the function; its name is in the training's configuration.
    activation: Any = str(getattr(cfg.activation_fn, "value", cfg.activation_fn))
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation_fn {activation}")
    return StackConfig(
        vocab_size=len(stack.dictionary),
        embed_dim=dim,
        ffn_dim=first.fc1.out_features,
        mixers=tuple(_mixer(layer, causal=side == "a decoder") for layer in layers),
        normalize_before=first.normalize_before,
        final_norm=stack.layer_norm is not None,
        positions=kind,
        max_positions=int(longest),
        embedding_norm=stack.layernorm_embedding is not None,
        embed_scale=float(stack.embed_scale),
        activation=activation,
        dropout=stack.dropout_module.p,
        activation_dropout=first.activation_dropout_module.p,
        **(_of_encoder(stack) if side == "an encoder" else _of_decoder(stack)),
    )


def _of_encoder(stack: Any) -> dict[str, Any]:
    if type(stack.embed_tokens) is not nn.Embedding:
        raise UnsupportedModelError(f"embeddings of type {type(stack.embed_tokens).__name__}")
    return {"num_heads": 1, "layerdrop": stack.encoder_layerdrop}


def _of_decoder(stack: Any) -> dict[str, Any]:
    """The part of the configuration that an encoder does not have."""
    cfg, attention, softmax = stack.cfg, stack.layers[0].encoder_attn, stack.adaptive_softmax
    table = stack.embed_tokens
    adaptive = type(table) is AdaptiveInput
    if not adaptive and type(table) is not nn.Embedding:
        option = "character_embeddings True: " if type(table).__name__ == "CharacterTokenEmbedder" else ""
        raise UnsupportedModelError(f"{option}embeddings of type {type(table).__name__}")
    fields: dict[str, Any] = {
        "num_heads": 1 if attention is None else attention.num_heads,
        "attention_dropout": 0.0 if attention is None else attention.dropout_module.p,
        "encoder_dim": None if attention is None else attention.k_proj.in_features,
        "cross_attention_conv": getattr(attention, "convolved", None),
        "layerdrop": stack.decoder_layerdrop,
        "input_dim": table.embeddings[0][0].embedding_dim if adaptive else table.embedding_dim,
        "output_dim": stack.output_embed_dim,
    }
    if adaptive:
        options = getattr(stack, "args", cfg)  # fairseq's own language model has no more than its options
        fields["adaptive_input"] = AdaptiveInputConfig(
            _cutoff(table.cutoff, len(stack.dictionary)), options.adaptive_input_factor
        )
    if softmax is not None:
        fields["adaptive_softmax"] = AdaptiveSoftmaxConfig(
            _cutoff(softmax.cutoff, len(stack.dictionary)),
            softmax.factor,
            dropout=softmax.dropout_module.p,
            tie_weights=bool(cfg.tie_adaptive_weights),
            tie_proj=bool(cfg.tie_adaptive_weights and cfg.tie_adaptive_proj),
        )
    else:
        product = stack.output_projection
        if not isinstance(product, nn.Linear):
            raise UnsupportedModelError(f"a linear layer of type {type(product).__name__}")
        fields["share_input_output"] = not adaptive and product.weight is table.weight
        fields["output_bias"] = product.bias is not None
        fields["output_dim"] = product.in_features
    return fields


def _cutoff(cutoff: Any, size: int) -> tuple[int, ...]:
    return tuple(int(rank) for rank in cutoff if int(rank) < size) or (size,)


def _check_layer(layer: Any, side: str) -> None:
    if type(layer) not in _LAYERS:
        raise UnsupportedModelError(f"{side} layer of type {type(layer).__name__}")
    if getattr(layer, "cross_self_attention", False):
        raise UnsupportedModelError("attention over source and target together (cross_self_attention)")
    for name in ("fc1", "fc2"):
        if not isinstance(getattr(layer, name), nn.Linear):
            raise UnsupportedModelError(f"a linear layer of type {type(getattr(layer, name)).__name__}")
    for attention in (layer.self_attn, getattr(layer, "encoder_attn", None)):
        if type(attention) in (MultiheadAttention, FusedEncoderAttention):
            _check_attention(attention)
        elif attention is not None and type(attention) not in _MIXERS:
            raise UnsupportedModelError(f"{side} layer with {type(attention).__name__}")


def _check_attention(attention: Any) -> None:
    if attention.add_zero_attn:
        raise UnsupportedModelError("attention with an added key (add_zero_attn)")
    if getattr(attention, "use_xformers", False):
        raise UnsupportedModelError("attention with xformers")
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        if not isinstance(getattr(attention, name), nn.Linear):
            raise UnsupportedModelError(f"a linear layer of type {type(getattr(attention, name)).__name__}")


def _mixer(layer: Any, *, causal: bool) -> MixerSpec:
    mixer = layer.self_attn
    if type(mixer) is MultiheadAttention:
        return MixerSpec(
            kind="attention",
            kernel_size=1,
            conv_dim=mixer.embed_dim,
            num_heads=mixer.num_heads,
            glu=False,
            input_dropout=0.0,
            weight_dropout=0.0,
            normalize="softmax",
            attention_dropout=mixer.dropout_module.p,
            causal=causal,
        )
    conv = getattr(mixer, "conv", None)
    if type(conv) is DynamicConv and (conv.renorm_padding or conv.query_size != conv.channels):
        raise UnsupportedModelError("a dynamic convolution with renorm_padding or query_size")
    return dataclasses.replace(layer.mixer, causal=causal, zero_pads=True)


def _parameters(model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """The parameters under the plain model's names, without those that are tied there."""
    state = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if name.rpartition(".")[2] not in _MARKERS
    }
    if config.decoder.share_input_output:
        del state["decoder.output_projection.weight"]
        if config.decoder.output_bias:
            state["decoder.output_bias"] = state.pop("decoder.output_projection.bias")
    softmax = config.decoder.adaptive_softmax
    if softmax is not None and softmax.tie_weights:
        head = "decoder.adaptive_softmax.head.word_proj."
        for name in (head + "weight", head + "1.weight"):
            state.pop(name, None)
        for name in [name for name in state if name.startswith("decoder.adaptive_softmax.tail.")]:
            if name.endswith(".2.weight") or (softmax.tie_proj and name.endswith(".0.weight")):
                del state[name]
    return state


def _fitting(plain: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `state`; raises UnsupportedModelError if a shape differs from the plain model's."""
    for name, parameter in plain.named_parameters():
        if name in state and state[name].shape != parameter.shape:
            raise UnsupportedModelError(
                f"a model whose {name} has shape {tuple(state[name].shape)} instead of {tuple(parameter.shape)}"
            )
    return state
