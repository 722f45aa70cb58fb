"""An encoder-decoder prepared for beam search: the encoder for whole batches, the decoder one token per step.

fairseq's decoders run a step through modules made for training: tensors with a time dimension, masks, dropout modules,
states that are copied whenever hypotheses are reordered, encoder output repeated for every hypothesis. Here a step is
the arithmetic and nothing else, on rows (hypotheses, channels).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation.beams import Beams, move
from lightconv_plugin.generation.encoder import PackedEncoder
from lightconv_plugin.generation.linear import PackedLinear
from lightconv_plugin.generation.mixers import Cache, EncoderAttention, Ring, Source, build_mixer
from lightconv_plugin.generation.sublayers import FeedForward, Residual, optional_norm, pack
from lightconv_plugin.modules.embeddings import LearnedPositions
from lightconv_plugin.modules.layer import Layer
from lightconv_plugin.modules.transformer import EncoderDecoder

_FIRST_POSITIONS = 64


@dataclass
class State:
    """One search of one model: the live hypotheses, and what each layer keeps."""

    beams: Beams
    mixers: list[Ring | Cache]
    sources: list[Source | None]
    source_mask: Tensor | None


class StepModel:
    """A trained encoder-decoder, as beam search uses it.

    The weights are those that the model has now: make another StepModel when they have changed.

    Args:
        model: in evaluation mode.
        dtype: the arithmetic of the linear layers, see PackedLinear.

    Raises:
        UnsupportedModelError: a model that cannot be stepped here; the text says what is in its way.
        ValueError: another dtype than PackedLinear's.
    """

    def __init__(self, model: EncoderDecoder, dtype: str = "float32"):
        decoder = model.decoder
        if decoder.adaptive_softmax is not None:
            raise UnsupportedModelError("an adaptive softmax (adaptive_softmax_cutoff)")
        if decoder.config.adaptive_input is not None:
            raise UnsupportedModelError("embeddings that are not a plain table (adaptive_input)")
        self.embedding = decoder.embed_tokens.weight.detach()
        self.embed_scale = decoder.config.embed_scale
        self.embed_positions = decoder.embed_positions
        self.project_in = None if decoder.project_in_dim is None else pack(decoder.project_in_dim, dtype=dtype)
        self.project_out = None if decoder.project_out_dim is None else pack(decoder.project_out_dim, dtype=dtype)
        self.embedding_norm = optional_norm(decoder.layernorm_embedding)
        self.layers = [_Layer(layer, dtype) for layer in decoder.layers]
        self.final_norm = optional_norm(decoder.layer_norm)
        if decoder.output_projection is None:
            self.output = PackedLinear(self.embedding, decoder.output_bias, dtype)
        else:
            self.output = pack(decoder.output_projection, dtype=dtype)
        self.encoder = PackedEncoder(model.encoder, dtype)
        self._positions: Tensor | None = None

    @torch.no_grad()
    def start(self, src_tokens: Tensor, beam: int) -> State:
        """Encodes src_tokens (S,T), with pads on either side, once a sentence: the state of a search with `beam`
        hypotheses each."""
        return self._begin(*self.encoder(src_tokens), beam)

    def _position(self, time: int) -> Tensor:
        """(d,): the vector of step `time`, from a table that grows by doubling."""
        table = self._positions
        if table is None or time + 1 >= len(table):
            longest = _FIRST_POSITIONS if table is None else 2 * len(table)
            if isinstance(self.embed_positions, LearnedPositions):
                longest = self.embed_positions.length
            table = self.embed_positions.table(longest, self.embedding.device, self.embedding.dtype)
            self._positions = table
        return table[time + 1]

    def _begin(self, output: Tensor, pads: Tensor, beam: int) -> State:
        """output (T,S,d), pads (S,T) or any False."""
        beams = Beams(output.shape[1], beam, output.device)
        mask = None
        if bool(pads.any()):
            mask = output.new_zeros(beams.capacity, 1, 1, output.shape[0])
            mask[:, 0, 0].masked_fill_(pads, -torch.inf)
        mixers = [layer.mixer.memory(beams, output.new_empty(0)) for layer in self.layers]
        sources = [layer.attention and layer.attention.memory(output, mask) for layer in self.layers]
        return State(beams, mixers, sources, mask)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> Tensor:
        """tokens (N,) int64, the last of each hypothesis → logits (N,V) of the next, a new tensor.

        Row n is hypothesis n mod beam of live sentence n div beam. The first step may instead be given one token a
        sentence: all hypotheses are the same until there are words to differ in.
        """
        beams = state.beams
        beams.advance(tokens.shape[0])
        x = F.embedding(tokens, self.embedding)
        if self.embed_scale != 1:
            x.mul_(self.embed_scale)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embed_positions is not None:
            x += self._position(beams.time)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for layer, memory, source in zip(self.layers, state.mixers, state.sources, strict=True):
            x = layer(x, memory, source, beams)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        return self.output(x)

    def reorder(self, state: State, parents: Tensor) -> None:
        """Row n goes on from what was row parents[n]: (live · beam,) int64, each of n's own sentence.

        Rows count sentence · beam + hypothesis, after a first step with one token a sentence too.
        """
        state.beams.reorder(parents)

    def keep(self, state: State, sentences: Tensor) -> None:
        """Sentence i becomes what sentence sentences[i] was; (live',) int64. All others are forgotten.

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

    def __init__(self, layer: Layer, dtype: str):
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
