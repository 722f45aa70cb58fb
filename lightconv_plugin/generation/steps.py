"""An encoder-decoder made ready for beam search: its encoder as it is, its decoder one token a step.

fairseq's decoders run a step through modules that serve training too: tensors with a time dimension, masks, dropout
modules, dictionaries of states that are copied whenever hypotheses change places, encoder output repeated for every
hypothesis. Here a step is the arithmetic and nothing else, on rows (hypotheses, channels).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fairseq.models.transformer import (
    TransformerDecoder,
    TransformerDecoderBase,
    TransformerModelBase,
)
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.transformer_layer import TransformerDecoderLayer, TransformerDecoderLayerBase
from torch import Tensor, nn

from lightconv_plugin.generation.beams import Beams, move
from lightconv_plugin.generation.encoder import PackedEncoder
from lightconv_plugin.generation.linear import check_dtype
from lightconv_plugin.generation.mixers import Cache, EncoderAttention, Ring, Source, build_mixer
from lightconv_plugin.generation.sublayers import FeedForward, Residual, UnsupportedModelError, optional_norm, pack
from lightconv_plugin.models.encoder_decoder import MixerDecoder
from lightconv_plugin.models.layers import MixerDecoderLayer

_DECODERS = (MixerDecoder, TransformerDecoder, TransformerDecoderBase)
_LAYERS = (MixerDecoderLayer, TransformerDecoderLayer, TransformerDecoderLayerBase)


@dataclass
class State:
    """One search of one model: who is alive, and what each layer keeps."""

    beams: Beams
    mixers: list[Ring | Cache]
    sources: list[Source | None]
    source_mask: Tensor | None


class StepModel:
    """A trained encoder-decoder, as beam search uses it.

    Covered are ConvTransformerModel with every mixer and fairseq's Transformer. The weights are those that the model
    has now: make another StepModel when they have changed.

    Args:
        model: in evaluation mode.
        dtype: the arithmetic of the linear layers, see PackedLinear.

    Raises:
        UnsupportedModelError: a model that cannot be stepped here; the text says what is in its way.
        ValueError: an unknown dtype, or one that this device has not.
    """

    def __init__(self, model: nn.Module, dtype: str = "float32"):
        check_dtype(dtype)
        self._check(model)
        self.model = model
        decoder = model.decoder
        self.embedding = decoder.embed_tokens.weight.detach()
        self.embed_scale = float(decoder.embed_scale)
        self.embed_positions = decoder.embed_positions
        self.project_in = None if decoder.project_in_dim is None else pack(decoder.project_in_dim, dtype=dtype)
        self.project_out = None if decoder.project_out_dim is None else pack(decoder.project_out_dim, dtype=dtype)
        self.embedding_norm = optional_norm(decoder.layernorm_embedding)
        self.layers = [_Layer(layer, dtype) for layer in decoder.layers]
        self.final_norm = optional_norm(decoder.layer_norm)
        self.output = pack(decoder.output_projection, dtype=dtype)
        try:
            self.encoder = PackedEncoder(model.encoder, dtype)
        except UnsupportedModelError:
            self.encoder = None  # it runs as it is

    @staticmethod
    def _check(model: nn.Module) -> None:
        if not isinstance(model, TransformerModelBase):
            raise UnsupportedModelError(f"a model of type {type(model).__name__}")
        decoder = model.decoder
        if type(decoder) not in _DECODERS:
            raise UnsupportedModelError(f"a decoder of type {type(decoder).__name__}")
        if type(model).get_normalized_probs is not TransformerModelBase.get_normalized_probs:
            raise UnsupportedModelError(f"{type(model).__name__} normalises its outputs in a way of its own")
        if decoder.adaptive_softmax is not None:
            raise UnsupportedModelError("an adaptive softmax")
        if type(decoder.embed_tokens) is not nn.Embedding or decoder.quant_noise is not None:
            raise UnsupportedModelError("embeddings that are not a plain table")
        for name, module in model.named_modules():
            if isinstance(module, FairseqDropout) and module.apply_during_inference and module.p > 0:
                raise UnsupportedModelError(f"dropout at inference (retain_dropout) in {name}")

    @torch.no_grad()
    def start(self, src_tokens: Tensor, src_lengths: Tensor, beam: int, **others: Tensor) -> State:
        """Encodes src_tokens (S,T), once a sentence; the state of a search with `beam` hypotheses each.

        src_lengths (S,) and `others`, what else the batch's net_input holds, are for encoders that read them.
        """
        others.pop("prev_output_tokens", None)
        if self.encoder is not None and not others:
            return self._begin(*self.encoder(src_tokens), beam)
        encoded = self.model.encoder.forward_torchscript(
            {"src_tokens": src_tokens, "src_lengths": src_lengths, **others}
        )
        pads = encoded["encoder_padding_mask"]
        return self._begin(
            encoded["encoder_out"][0], pads[0] if pads else src_tokens.new_zeros(1, dtype=torch.bool), beam
        )

    def _begin(self, output: Tensor, pads: Tensor, beam: int) -> State:
        """output (T,S,d), pads (S,T) or any False."""
        beams = Beams(output.shape[1], beam, output.device)
        mask = None
        if bool(pads.any()):
            mask = output.new_zeros(beams.capacity, 1, 1, output.shape[0])
            mask[: beams.count, 0, 0].masked_fill_(pads, -torch.inf)
        mixers = [layer.mixer.memory(beams, output.new_empty(0)) for layer in self.layers]
        sources = [layer.attention and layer.attention.memory(output, mask, beams) for layer in self.layers]
        return State(beams, mixers, sources, mask)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> Tensor:
        """tokens (N,) int64, the last of each hypothesis → logits (N,V) of the next, a new tensor.

        Row n is hypothesis n mod beam of live sentence n div beam. The first step may instead be given one token a
        sentence: all hypotheses are the same until there are words to differ in.
        """
        beams = state.beams
        given = tokens.shape[0]
        beams.advance(given)
        if beams.rows > given:
            tokens = torch.cat([tokens, tokens.new_zeros(beams.rows - given)])
        x = F.embedding(tokens, self.embedding)
        if self.embed_scale != 1:
            x.mul_(self.embed_scale)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embed_positions is not None:
            # fairseq's modules look only at how many tokens there are, and see that none is a pad.
            x += self.embed_positions(tokens.new_zeros((1, beams.time + 1)), incremental_state={})[:, -1]
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for layer, memory, source in zip(self.layers, state.mixers, state.sources, strict=True):
            x = layer(x, memory, source, beams)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        return self.output(x)[:given]

    def reorder(self, state: State, parents: Tensor) -> None:
        """Row n goes on from what was row parents[n]: (count · beam,) int64, each of n's own sentence.

        Rows count sentence · beam + hypothesis, after a first step with one token a sentence too.
        """
        state.beams.reorder(parents)

    def keep(self, state: State, sentences: Tensor) -> None:
        """Sentence i becomes what sentence sentences[i] was; (count',) int64. All others are forgotten.

        Only sentences that change their place are copied: leave as many as possible where they are.
        """
        sources, targets = state.beams.keep(sentences)
        for memory in (*state.mixers, *state.sources):
            if memory is not None:
                memory.keep(sources, targets)
        if state.source_mask is not None:
            move(state.source_mask, 0, sources, targets)


class _Layer:
    """Mixer, attention over the encoder's output, FFN; each with its residual and its norm before or after it."""

    def __init__(self, layer: nn.Module, dtype: str):
        if type(layer) not in _LAYERS:
            raise UnsupportedModelError(f"a decoder layer of type {type(layer).__name__}")
        if layer.cross_self_attention:
            raise UnsupportedModelError("attention over source and target together (cross_self_attention)")
        before = layer.normalize_before
        self.mixer, self.mixer_residual = (
            build_mixer(layer.self_attn, dtype),
            Residual(layer.self_attn_layer_norm, before),
        )
        self.attention, self.attention_residual = None, None
        if layer.encoder_attn is not None:
            self.attention = EncoderAttention(layer.encoder_attn, dtype)
            self.attention_residual = Residual(layer.encoder_attn_layer_norm, before)
        self.feed_forward = FeedForward(layer, dtype)

    def __call__(self, x: Tensor, memory: Ring | Cache, source: Source | None, beams: Beams) -> Tensor:
        """(N,d) → (N,d)."""
        residual = self.mixer_residual
        x = residual.leave(self.mixer(residual.enter(x), memory, beams), x)
        if self.attention is not None:
            residual = self.attention_residual
            x = residual.leave(self.attention(residual.enter(x), source, beams), x)
        return self.feed_forward(x)
