"""An encoder-decoder prepared for beam search: the encoder for whole batches, the decoder one token per step.

fairseq's decoders run a step through modules made for training: tensors with a time dimension, masks, dropout modules,
states that are copied whenever hypotheses are reordered, encoder output repeated for every hypothesis. Here a step is
only the arithmetic, on rows (hypotheses, channels).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation.beams import Beams, move, power_of_two
from lightconv_plugin.generation.mixers import EncoderAttention, Memory, Source, build_mixer
from lightconv_plugin.generation.sublayers import FeedForward, PackedLinear, Residual, in_bfloat16, pack
from lightconv_plugin.modules.embeddings import LearnedPositions
from lightconv_plugin.modules.layer import Layer
from lightconv_plugin.modules.talk import TaLKConv
from lightconv_plugin.modules.transformer import Encoder, EncoderDecoder
from lightconv_plugin.ops.backends import on_gpu

_FIRST_POSITIONS = 64
_LEAST_SOURCE = 16


@dataclass
class State:
    """One search of one model: the live hypotheses, what each layer stores, the vectors of the positions (n,d), and the
    output layer.

    source_length: T of the encoder's output.
    """

    beams: Beams
    source_length: int
    mixers: list[Memory]
    sources: list[Source | None]
    source_mask: Tensor | None
    positions: Tensor | None
    output: PackedLinear

    def memories(self) -> list[Memory]:
        return [memory for memory in (*self.mixers, *self.sources) if memory is not None]

    def copy_(self, other: State) -> None:
        """Copy the state of `other`, of the same sizes, into these tensors."""
        self.beams.copy_(other.beams)
        for mine, theirs in zip(self.memories(), other.memories(), strict=True):
            mine.copy_(theirs)
        if self.source_mask is not None:
            assert other.source_mask is not None  # there is one in every search with a given room
            self.source_mask.copy_(other.source_mask)


class StepModel:
    """A trained encoder-decoder, as beam search uses it.

    It has the model's current weights: create a new StepModel when they have changed.

    Args:
        model: in evaluation mode.
        dtype: the arithmetic of the linear layers, see PackedLinear. On a GPU "bfloat16" and "float16" are that of the
            whole model: there, converting the inputs and results of each linear layer would take longer than it saves.

    Raises:
        UnsupportedModelError: the model is not supported; the message names the unsupported part.
        ValueError: PackedLinear does not support the dtype.
    """

    def __init__(self, model: EncoderDecoder, dtype: str = "float32"):
        if dtype in ("bfloat16", "float16") and on_gpu(model.decoder.embed_tokens.weight):
            model, dtype = _converted(model, getattr(torch, dtype)), "float32"  # which stands for each weight's own
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
        self.embedding_norm = decoder.layernorm_embedding
        self.layers = [_Layer(layer, dtype) for layer in decoder.layers]
        self.final_norm = decoder.layer_norm
        if decoder.output_projection is None:
            self.output = PackedLinear(self.embedding, decoder.output_bias, dtype)
        else:
            self.output = pack(decoder.output_projection, dtype=dtype)
        self.encoder = partial(encode, in_bfloat16(model.encoder) if dtype == "bfloat16" else model.encoder)
        self._positions: Tensor | None = None

    @torch.no_grad()
    def start(self, src_tokens: Tensor, beam: int, room: int | None = None, *, words: Tensor | None = None) -> State:
        """Encode src_tokens (S,T), with pads on either side, once per sentence. Returns the state of a search with
        `beam` hypotheses per sentence.

        room: the maximum number of steps. If it is given, S and T are those of `rounded`; the results for the added
        sentences are meaningless.
        words: (W,) int64, the words of which `logits` has columns; None for all.
        """
        output, pads = self.encoder(src_tokens)
        if room is not None:
            more = [size - given for size, given in zip(rounded(src_tokens), pads.shape, strict=True)]
            output = F.pad(output, (0, 0, 0, more[0], 0, more[1]))
            # The added sentences have no pads at all, because no softmax may be over nothing.
            pads = F.pad(F.pad(pads, (0, more[1]), value=True), (0, 0, 0, more[0]), value=False)
        beams = Beams(output.shape[1], beam, output.device, room)
        mask = None
        if room is not None or bool(pads.any()):
            mask = output.new_zeros(beams.capacity, 1, 1, output.shape[0])
            mask[:, 0, 0].masked_fill_(pads, -torch.inf)
        mixers: list[Memory] = [layer.mixer.memory(beams, output.new_empty(0)) for layer in self.layers]
        sources = [layer.source(output, mask, beams) for layer in self.layers]
        layer = self.output if words is None else self.output.select(words)
        return State(beams, output.shape[0], mixers, sources, mask, self._position_table(beams.room), layer)

    def _position_table(self, longest: int) -> Tensor | None:
        """(n,d): the vectors of positions, n > longest if there are that many; shared by all searches, doubled."""
        if self.embed_positions is None:
            return None
        if self._positions is None or longest >= len(self._positions):
            rows = max(_FIRST_POSITIONS, power_of_two(longest + 1))
            if isinstance(self.embed_positions, LearnedPositions):
                rows = self.embed_positions.length
            self._positions = self.embed_positions.table(rows, self.embedding.device, self.embedding.dtype)
        return self._positions

    def step(self, state: State, tokens: Tensor) -> Tensor:
        """`advance` and `logits`."""
        self.advance(state, tokens.shape[0])
        return self.logits(state, tokens)

    def advance(self, state: State, rows: int) -> None:
        """Begin the next step, with `rows` hypotheses: live · beam, or in the first step one for each sentence."""
        state.beams.advance(rows)
        number = state.beams.time + 1
        if state.positions is not None and number >= len(state.positions):
            if isinstance(self.embed_positions, LearnedPositions):
                self.embed_positions.check(number)
            state.positions = self._position_table(number)

    @torch.no_grad()
    def logits(self, state: State, tokens: Tensor) -> Tensor:
        """tokens (N,) int64, the last of each hypothesis → logits (N,W) of the next, a new tensor. Call `advance`
        first.

        Row n is hypothesis n mod beam of live sentence n div beam. The first step may instead be given one token per
        sentence, because all hypotheses are still the same.

        With a given room, many steps run the same operations on the same tensors (Beams), and the host reads no values.
        """
        beams = state.beams
        beams.begin()
        x = F.embedding(tokens, self.embedding)
        if self.embed_scale != 1:
            x.mul_(self.embed_scale)
        if self.project_in is not None:
            x = self.project_in(x)
        if state.positions is not None:
            x += state.positions[1:].index_select(0, beams.now)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for layer, memory, source in zip(self.layers, state.mixers, state.sources, strict=True):
            x = layer(x, memory, source, beams)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        beams.forget()
        return state.output(x)

    def reorder(self, state: State, parents: Tensor) -> None:
        """Let row n continue the former row parents[n]; (live · beam,) int64, each from n's own sentence.

        Rows are numbered sentence · beam + hypothesis, even after a first step with one token per sentence.
        """
        state.beams.reorder(parents)

    def keep(self, state: State, sentences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Replace sentence i with the former sentence sentences[i]. All others are dropped. Returns what `Beams.keep`
        does.

        Only sentences that change places are copied: leave as many as possible where they are.
        """
        sources, targets = state.beams.keep(sentences)
        for memory in state.memories():
            memory.keep(sources, targets)
        if state.source_mask is not None:
            move(state.source_mask, 0, sources, targets)
        return sources, targets


def encode(encoder: Encoder, src_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """src_tokens (S,T) → encoded (T,S,d), and pads (S,T) bool; the encoding at pads is meaningless."""
    pads = src_tokens.eq(encoder.pad)
    x = encoder.embed(src_tokens, pads).masked_fill(pads.t().unsqueeze(-1), 0)
    some = pads if bool(pads.any()) else None  # attention without a mask is faster
    for layer in encoder.layers:
        x = layer(x, some)
    return x if encoder.layer_norm is None else encoder.layer_norm(x), pads


def rounded(src_tokens: Tensor) -> tuple[int, int]:
    """Shape (S,T) of a batch rounded up to powers of two, so that few sizes occur."""
    sentences, steps = src_tokens.shape
    return power_of_two(sentences), max(_LEAST_SOURCE, power_of_two(steps))


def _converted(model: EncoderDecoder, dtype: torch.dtype) -> EncoderDecoder:
    """A copy in half precision.

    TaLK's offsets of the decoder stay in float32: there are few, and they decide how far the windows reach. The
    encoder's operator takes them in the type of its input.
    """
    model = copy.deepcopy(model).to(dtype)
    for module in model.decoder.modules():
        if isinstance(module, TaLKConv):
            module.offsets.float()
    return model


class _Layer:
    """Mixer, attention over the encoder's output, FFN; each with its residual and its norm before or after it."""

    def __init__(self, layer: Layer, dtype: str):
        before = layer.normalize_before
        self.mixer = build_mixer(layer.self_attn, dtype)
        self.mixer_residual = Residual(layer.self_attn_layer_norm, before)
        self.attention: EncoderAttention | None = None
        if layer.encoder_attn is not None:
            self.attention = EncoderAttention(layer.encoder_attn, dtype)
            self.attention_residual = Residual(layer.encoder_attn_layer_norm, before)
        self.feed_forward = FeedForward(layer, dtype)

    def source(self, encoded: Tensor, mask: Tensor | None, beams: Beams) -> Source | None:
        """What the attention reads of the encoder's output; None without this attention."""
        return None if self.attention is None else self.attention.memory(encoded, mask, beams)

    def __call__(self, x: Tensor, memory: Any, source: Source | None, beams: Beams) -> Tensor:
        """(N,d) → (N,d)."""
        residual = self.mixer_residual
        x = residual.leave(self.mixer(residual.enter(x), memory, beams), x)
        if self.attention is not None:
            assert source is not None  # `source` made it
            residual = self.attention_residual
            x = residual.leave(self.attention(residual.enter(x), source, beams), x)
        return self.feed_forward(x)
