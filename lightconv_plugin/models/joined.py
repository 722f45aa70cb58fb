"""Layers that compute what surrounds their matrix products in fewer passes over memory, for training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models.transformer import TransformerDecoder, TransformerDecoderBase, TransformerModelBase
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayer,
    TransformerDecoderLayerBase,
    TransformerEncoderLayer,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from lightconv_plugin import ops
from lightconv_plugin.models.encoder_decoder import MixerDecoder
from lightconv_plugin.models.layers import MixerDecoderLayer, MixerEncoderLayer
from lightconv_plugin.models.token_mixers import FusedEncoderAttention, RetainableDropout
from lightconv_plugin.modules.residual import dropped_added_normed, native

_DECODERS = (TransformerDecoderBase, TransformerDecoder, MixerDecoder)
_DROPOUTS = (FairseqDropout, RetainableDropout)
# Criterions that read the logits and nothing else; ours say so themselves.
_OUTPUT_ALONE = (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)
# Others may have forward passes of their own.
_LAYERS = (
    *(TransformerEncoderLayerBase, TransformerEncoderLayer, MixerEncoderLayer),
    *(TransformerDecoderLayerBase, TransformerDecoderLayer, MixerDecoderLayer),
)


def join_passes(model: nn.Module, criterion: nn.Module | None = None) -> None:
    """Change the Transformer layers of a model, in place. Parameters, their names and all results remain.

    Classes of modules and functions of layers are changed, so hooks, buffers and copies stay what they are. With a
    `criterion` that reads the model's output alone, and a model whose forward pass is fairseq's, training computes no
    attention weights.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) in _LAYERS]
    for layer in layers:
        if layer.normalize_before is False and "residual_connection" not in vars(layer):
            _join_norms(layer)
        dropout = layer.activation_dropout_module
        if layer.activation_fn is F.relu and type(dropout) in _DROPOUTS and dropout.p > 0:
            layer.activation_fn = _linear
            dropout.__class__ = _ReluDropout
        attention = getattr(layer, "encoder_attn", None)
        if type(attention) is MultiheadAttention and not getattr(attention, "use_xformers", False):
            attention.__class__ = FusedEncoderAttention
    read = not (
        _reads_output_alone(criterion) and getattr(type(model), "forward", None) is TransformerModelBase.forward
    )
    for decoder in (module for module in model.modules() if type(module) in _DECODERS):
        for attention in (module for module in decoder.modules() if type(module) is FusedEncoderAttention):
            attention.weights_are_read = read


def _reads_output_alone(criterion: nn.Module | None) -> bool:
    return type(criterion) in _OUTPUT_ALONE or getattr(criterion, "reads_output_alone", False)


def _join_norms(layer: Any) -> None:
    norms = [getattr(layer, f"{name}_layer_norm", None) for name in ("self_attn", "encoder_attn", "final")]
    norms = [norm for norm in norms if norm is not None]
    if type(layer.dropout_module) not in _DROPOUTS or any(type(norm) is not nn.LayerNorm for norm in norms):
        return
    layer.dropout_module.__class__ = _DeferredDropout
    layer.residual_connection = _connect
    for norm in norms:
        norm.__class__ = _ResidualNorm


class _Pending(NamedTuple):
    """A sublayer's output on its way through fairseq's layer: to be dropped from, added to `residual`, normalised."""

    x: Tensor
    dropout: Any
    residual: Tensor | None = None


def _connect(x: Tensor | _Pending, residual: Tensor) -> Tensor | _Pending:
    return x._replace(residual=residual) if isinstance(x, _Pending) else residual + x


class _ResidualNorm(nn.LayerNorm):
    """A layer norm that also does what is pending."""

    def forward(self, x: Tensor | _Pending) -> Tensor:
        if not isinstance(x, _Pending):
            return super().forward(x)
        if x.residual is None:
            raise TypeError("the layer has a norm between dropout and the residual connection")
        joined = dropped_added_normed(x.x, x.residual, self, x.dropout)
        if joined is not None:
            return joined
        return super().forward(x.residual + RetainableDropout.forward(x.dropout, x.x))


def _linear(x: Tensor) -> Tensor:
    return x


class _DeferredDropout(RetainableDropout):
    """Dropout that is left to the norm."""

    def forward(self, x: Tensor, inplace: bool = False) -> Any:
        if self.training and not torch.compiler.is_compiling():
            return _Pending(x, self)
        return super().forward(x, inplace)


class _ReluDropout(RetainableDropout):
    """Dropout that computes the ReLU before it."""

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        on_cpu = x.device.type == "cpu"
        if self.training and self.p < 1 and native(x) and (on_cpu or x.dtype != torch.float64):
            return ops.relu_dropout(x, self.p)
        return super().forward(F.relu(x), inplace)
