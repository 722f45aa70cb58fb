"""Beam search in one native call per batch (cpu/search): the encoder, all steps and the bookkeeping without Python.

The rules and results are those of beam_search.py, which is still used for models on a GPU, and as the definition.
batch_search.py chooses between the two.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightconv_plugin.cgroups import cpu_limit
from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.generation.finished import Hypotheses, in_fairseqs_format
from lightconv_plugin.generation.sublayers import side_by_side
from lightconv_plugin.modules.attention import SelfAttention
from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.convolutions import DynamicConv, is_static
from lightconv_plugin.modules.embeddings import LearnedPositions
from lightconv_plugin.modules.full_convolution import FullConv
from lightconv_plugin.modules.layer import Layer
from lightconv_plugin.modules.talk import TaLKConv
from lightconv_plugin.modules.transformer import Decoder, Encoder, EncoderDecoder
from lightconv_plugin.ops import backends
from lightconv_plugin.ops.instructions import instruction_set

_SHARED, _PREDICTED, _TALK, _FULL, _ATTENTION = "shared", "predicted", "talk", "full", "attention"


def describe(models: Sequence[EncoderDecoder]) -> list[Description] | ValueError:
    """The models as the native search reads them.

    If it cannot run them, the error that says why, returned because other searches may run them: an
    UnsupportedModelError names a part of a model; any other ValueError says what the native search needs (float32
    models on a CPU, and the CPU kernels).
    """
    for model in models:
        weight = next(model.parameters())
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return ValueError(f"a model is {str(weight.dtype).removeprefix('torch.')} on {weight.device}")
    kernels = backends.decision("cpu")
    if kernels.backend != "cpu":
        return ValueError(kernels.reason)
    try:
        return [Description(model) for model in models]
    except UnsupportedModelError as error:
        return error


class NativeSearch:
    """Searches with the models' current weights, which it copies (except the embedding tables).

    Args:
        ensemble: from `describe`.
        options: options of the search; dtype is the arithmetic of the linear layers, for which the CPU need not have
            instructions.
            "float32": unchanged.
            "bfloat16": the weight is rounded to bfloat16, and so is the input if the CPU can multiply bfloat16.
            "int8": 8-bit weights, each output channel with its own scale, and 8-bit inputs, each row with its own.
            threads share the sentences or, for few sentences, the products.

    Raises ValueError for an unknown dtype.
    """

    def __init__(self, ensemble: Sequence[Description], options: SearchOptions):
        self._eos, self._threads = options.eos, options.threads
        self._quota = cpu_limit() or sys.maxsize  # torch knows none, and waiting threads would use it up
        numbers = {name: float(value) for name, value in vars(options).items() if isinstance(value, (int, float))}
        self._search = torch.classes.lightconv.BeamSearch(
            numbers, list(options.suppress), options.dtype, _has_instructions(options.dtype)
        )
        for model in ensemble:
            words = {name: value for name, value in model.numbers.items() if isinstance(value, str)}
            numbers = {name: float(value) for name, value in model.numbers.items() if name not in words}
            self._search.add_model(model.tensors, numbers, words)

    def search(
        self,
        source: Tensor,
        lengths: Tensor,
        max_len: int,
        *,
        prefix: Tensor | None = None,
        begin: int | None = None,
        words: Tensor | None = None,
    ) -> Hypotheses:
        """The finished hypotheses of each sentence, best first; arguments and results are those of `Search`.

        Raises:
            ValueError: words that a model or the shortlist does not have, an empty sentence, or a beam that is too
                large.
            NoHypothesisError: a sentence without a single possible hypothesis.
            torch.OutOfMemoryError: too little memory.
            RuntimeError: more threads than the system can start.
        """
        tokens, positional, sizes, scores, counts = self._search.search(
            source.to(torch.int64).contiguous(),
            lengths.to(torch.int64).contiguous(),
            None if prefix is None else prefix.to(torch.int64).contiguous(),
            None if words is None else words.to(torch.int64).contiguous(),
            max_len,
            self._eos if begin is None else begin,
            min(torch.get_num_threads(), self._quota) if self._threads is None else self._threads,
        )
        return in_fairseqs_format(tokens, positional, sizes, scores, counts)


def _has_instructions(dtype: str) -> bool:
    """Whether this CPU has instructions for products of the type beyond what the kernels are compiled for."""
    instructions = instruction_set() or ""
    return {"bfloat16": "BF16", "int8": "VNNI"}.get(dtype, "") in instructions


class Description:
    """A model as the named tensors and numbers that cpu/search/model.cpp reads.

    A kind, an activation and the like is a word among the numbers; model.cpp knows their values.
    """

    def __init__(self, model: EncoderDecoder):
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, float | str] = {}
        decoder = model.decoder
        if decoder.adaptive_softmax is not None:
            raise UnsupportedModelError("an adaptive softmax (adaptive_softmax_cutoff)")
        self._stack("encoder", model.encoder)
        self._stack("decoder", decoder)
        if decoder.project_out_dim is not None:
            self._linear("project_out", decoder.project_out_dim)
        if decoder.output_projection is not None:
            self._linear("output", decoder.output_projection)
        else:
            self._tensor("output.weight", decoder.embed_tokens.weight)
            self._tensor("output.bias", decoder.output_bias)

    def _tensor(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.tensors[name] = tensor.detach().contiguous()

    def _linear(self, name: str, *linears: nn.Module) -> None:
        """Add one layer for several with the same input, with their outputs side by side."""
        weight, bias = side_by_side(*linears)
        self._tensor(f"{name}.weight", weight)
        self._tensor(f"{name}.bias", bias)

    def _norm(self, name: str, norm: nn.LayerNorm | None) -> None:
        if norm is not None:
            self._tensor(f"{name}.weight", norm.weight)
            self._tensor(f"{name}.bias", norm.bias)
            self.numbers[f"{name}.eps"] = norm.eps

    def _stack(self, name: str, stack: Encoder | Decoder) -> None:
        config = stack.config
        if config.adaptive_input is not None:
            raise UnsupportedModelError("embeddings that are not a plain table (adaptive_input)")
        self._tensor(f"{name}.embed_tokens", stack.embed_tokens.weight)
        if isinstance(stack.embed_positions, LearnedPositions):
            self._tensor(f"{name}.embed_positions", stack.embed_positions.weight)
        if stack.project_in_dim is not None:
            self._linear(f"{name}.project_in", stack.project_in_dim)
        self._norm(f"{name}.embedding_norm", stack.layernorm_embedding)
        self._norm(f"{name}.final_norm", stack.layer_norm)
        self.numbers |= {
            f"{name}.dim": config.embed_dim,
            f"{name}.scale": config.embed_scale,
            f"{name}.positions": config.positions,
            f"{name}.pad": stack.pad,
            f"{name}.layers": len(stack.layers),
        }
        for i, layer in enumerate(stack.layers):
            self._layer(f"{name}.layers.{i}", layer, causal=name == "decoder")

    def _layer(self, name: str, layer: Layer, *, causal: bool) -> None:
        self.numbers[f"{name}.before"] = float(layer.normalize_before)
        self.numbers[f"{name}.activation"] = layer.activation
        self._norm(f"{name}.mixer_norm", layer.self_attn_layer_norm)
        self._norm(f"{name}.final_norm", layer.final_layer_norm)
        self._linear(f"{name}.fc1", layer.fc1)
        self._linear(f"{name}.fc2", layer.fc2)
        if (attention := layer.encoder_attn) is not None:
            self._norm(f"{name}.attention_norm", layer.encoder_attn_layer_norm)
            self._linear(f"{name}.query", attention.q_proj)
            self._linear(f"{name}.keys_values", attention.k_proj, attention.v_proj)
            self._linear(f"{name}.attention_out", attention.out_proj)
            self.numbers[f"{name}.attention_heads"] = attention.num_heads
            if attention.q_conv is not None:
                self._convolution(f"{name}.query_conv", attention.q_conv)
        mixer = f"{name}.mixer"
        if isinstance(layer.self_attn, SelfAttention):
            self._attention(mixer, layer.self_attn)
        elif isinstance(layer.self_attn, ConvBlock):
            self._block(mixer, layer.self_attn)
        else:
            raise UnsupportedModelError(f"a layer with {type(layer.self_attn).__name__}")
        if causal and self.numbers[f"{mixer}.right"] != 0:
            raise UnsupportedModelError("a decoder that looks ahead")

    def _attention(self, name: str, attention: SelfAttention) -> None:
        self._linear(f"{name}.product", attention.q_proj, attention.k_proj, attention.v_proj)
        self._linear(f"{name}.leave", attention.out_proj)
        self.numbers |= {
            f"{name}.kind": _ATTENTION,
            f"{name}.left": -1 if attention.left is None else attention.left,
            f"{name}.right": -1 if attention.right is None else attention.right,
            f"{name}.channels": attention.embed_dim,
            f"{name}.heads": attention.num_heads,
            f"{name}.parts": 1,
            f"{name}.normalize": "none",
        }
        for part, conv in attention.convolutions().items():
            self._convolution(f"{name}.{part}_conv", conv)

    def _block(self, name: str, block: ConvBlock) -> None:
        if isinstance(block.linear1, nn.Linear):
            self._linear(f"{name}.enter", block.linear1)
            self._linear(f"{name}.leave", block.linear2)
        self._convolution(name, block.conv)
        self.numbers[f"{name}.parts"] = block.parts

    def _convolution(self, name: str, conv: Any) -> None:
        self.numbers |= {
            f"{name}.channels": conv.channels,
            f"{name}.heads": conv.num_heads,
            f"{name}.parts": 1,
            f"{name}.normalize": "none",
        }
        if isinstance(conv, TaLKConv):
            self._linear(f"{name}.product", conv.offsets)
            self.numbers |= {f"{name}.kind": _TALK, f"{name}.left": conv.max_left, f"{name}.right": conv.max_right}
            return
        self.numbers |= {
            f"{name}.left": conv.padding_l,
            f"{name}.right": conv.kernel_size - 1 - conv.padding_l,
        }
        if type(conv) is FullConv:
            self.numbers[f"{name}.kind"] = _FULL
            self._tensor(f"{name}.product.weight", conv.weight.transpose(1, 2).flatten(1))
            self._tensor(f"{name}.product.bias", conv.bias)
        elif type(conv) is DynamicConv:
            if conv.renorm_padding or conv.query_size != conv.channels:
                raise UnsupportedModelError("a dynamic convolution with renorm_padding or another query")
            self.numbers |= {f"{name}.kind": _PREDICTED, f"{name}.normalize": conv.normalize}
            if conv.rank_linear is not None:
                self._linear(f"{name}.reduce", conv.rank_linear)
            self._linear(f"{name}.product", conv.weight_linear)
            self._tensor(f"{name}.conv_bias", conv.conv_bias)
        elif is_static(conv):
            self.numbers[f"{name}.kind"] = _SHARED
            self._tensor(f"{name}.filters", conv.filters())
            self._tensor(f"{name}.conv_bias", conv.conv_bias)
        else:
            raise UnsupportedModelError(f"a convolution of type {type(conv).__name__}")
