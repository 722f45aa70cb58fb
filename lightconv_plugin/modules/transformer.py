"""Whole models in plain torch: the encoder-decoder and the language model, with any mixer in each layer.

    model = EncoderDecoder(config)
    logits, loss = model(source, target_input, labels)      # training: loss.backward()
    state = model.start(model.encode(source))               # decoding
    logits, state = model.step(tokens, state)

Tokens and logits are batch first, (B,T). Everything inside is time first, (T,B,C), as in the operators.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightconv_plugin.modules.attention import SelfAttention
from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.config import ModelConfig, StackConfig
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.eager import eager
from lightconv_plugin.modules.embeddings import (
    AdaptiveInput,
    LearnedPositions,
    SinusoidalPositions,
    positions_of,
    word_embedding,
)
from lightconv_plugin.modules.layer import Encoded, Layer, Source
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.modules.outputs import AdaptiveSoftmax
from lightconv_plugin.ops.filters import widen


class Output(NamedTuple):
    """logits: (B,T,V); log-probabilities from an adaptive softmax, or None in its training (`Decoder.score`).

    loss: a scalar if labels were given.
    """

    logits: Tensor | None
    loss: Tensor | None = None


@dataclass
class DecoderState:
    """What a decoder keeps between the steps of B sequences.

    mixers: the state of each layer's mixer; None before the first step.
    sources: each layer's keys and values of the encoder's output; None without an encoder.
    queries: for each layer, the last inputs of the convolution of the encoder attention's queries; None without one.
    seen: (B,) number of words so far, not counting pads.
    """

    seen: Tensor
    mixers: list[Any] = field(default_factory=list)
    sources: list[Source | None] = field(default_factory=list)
    queries: list[Tensor | None] = field(default_factory=list)

    def reorder(self, order: Tensor) -> DecoderState:
        """For beam search: a state whose sequence n is this one's sequence order[n]; order (B',) int64."""
        return DecoderState(
            self.seen.index_select(0, order),
            [(SelfAttention if isinstance(mixer, tuple) else ConvBlock).reorder(mixer, order) for mixer in self.mixers],
            [source and source.reorder(order) for source in self.sources],
            [None if query is None else query.index_select(1, order) for query in self.queries],
        )


class _Stack(nn.Module):
    """The parts that both sides share: embeddings, layers and the final norm.

    `gradient_checkpointing`: recompute the layers in the backward pass instead of storing their activations.
    """

    def __init__(self, config: StackConfig, pad: int, embed_tokens: nn.Module | None = None):
        super().__init__()
        self.config = config
        self.pad = pad
        self.embed_tokens: Any
        dim, words = config.embed_dim, config.word_dim
        if embed_tokens is not None:
            self.embed_tokens = embed_tokens
        elif config.adaptive_input is not None:
            self.embed_tokens = AdaptiveInput(config.vocab_size, words, dim, pad, config.adaptive_input)
        else:
            self.embed_tokens = word_embedding(config.vocab_size, words, pad)
        needs_projection = words != dim and config.adaptive_input is None
        self.project_in_dim = Linear(words, dim, bias=False) if needs_projection else None
        self.embed_positions: SinusoidalPositions | LearnedPositions | None = None
        if config.positions == "sinusoidal":
            self.embed_positions = SinusoidalPositions(dim, pad)
        elif config.positions == "learned":
            self.embed_positions = LearnedPositions(config.max_positions, dim, pad)
        self.layernorm_embedding = nn.LayerNorm(dim) if config.embedding_norm else None
        self.dropout_module = Dropout(config.dropout, type(self).__name__)
        self.layers: Any = nn.ModuleList(Layer(config, mixer) for mixer in config.mixers)
        self.layer_norm = nn.LayerNorm(dim) if config.final_norm else None
        self.gradient_checkpointing = False
        # Hugging Face's transformers replaces this attribute with its own function.
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def embed(self, tokens: Tensor | None, pads: Tensor, seen: Tensor | None = None, vectors: Tensor | None = None):
        """tokens (B,T), or word vectors (B,T,d) instead, pads (B,T) → (T,B,d); `seen` (B,) words came before them."""
        x = self.embed_tokens(tokens) if vectors is None else vectors
        x = x * self.config.embed_scale
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if self.embed_positions is not None:
            positions = positions_of(pads, seen)
            if self.config.positions == "learned" and eager(positions):
                # On a GPU reading it would wait for the device, and an index out of range raises an error there anyway.
                known = seen is not None and seen.device.type == "cpu"
                if known or positions.shape[1] > self.config.max_positions:
                    self.check_positions(positions)
            x = x + self.embed_positions(positions, x.dtype, positions.shape[1] if seen is None else None)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x).transpose(0, 1)

    def run(self, layer: nn.Module, x: Tensor, pads: Tensor, encoded: Encoded | None = None) -> Tensor:
        """The layer's forward pass; in training it may be skipped (LayerDrop) or recomputed later (checkpointing)."""
        if self.training:
            if self.config.layerdrop and float(torch.rand(())) < self.config.layerdrop:
                return x
            if self.gradient_checkpointing:
                # Reentrant checkpointing finds only tensors that are arguments themselves, not those in a tuple.
                return self._gradient_checkpointing_func(partial(_call, layer), x, pads, *(encoded or ()))
        return layer(x, pads, encoded)

    def check_positions(self, positions: Tensor) -> None:
        """ValueError if a word has none of the learned positions; (B,T) of `positions_of`. It waits for a GPU."""
        assert isinstance(self.embed_positions, LearnedPositions)
        self.embed_positions.check(int(positions.max()))


class Encoder(_Stack):
    """Encodes tokens as vectors."""

    def forward(
        self,
        tokens: Tensor | None,
        pads: Tensor | None = None,
        vectors: Tensor | None = None,
        kept: list[Tensor] | None = None,
    ) -> Encoded:
        """tokens (B,S), or their word vectors (B,S,d), pads (B,S) bool (default: where tokens are the pad).

        kept: a list to which each layer's input (S,B,d) is appended.
        """
        pads = pads_in(tokens, pads, vectors, self.pad)
        x = self.embed(tokens, pads, vectors=vectors).masked_fill(pads.t().unsqueeze(-1), 0)
        for layer in self.layers:
            _keep(kept, x)
            x = self.run(layer, x, pads)
        return Encoded(x if self.layer_norm is None else self.layer_norm(x), pads)


class Decoder(_Stack):
    """Decodes tokens, given an encoder's output if there is one, to vectors and to logits of the next words."""

    def __init__(self, config: StackConfig, pad: int, embed_tokens: nn.Module | None = None):
        super().__init__(config, pad, embed_tokens)
        dim, last = config.embed_dim, config.last_dim
        bands = config.adaptive_softmax
        tied = bands is not None and bands.tie_weights
        self.project_out_dim = Linear(dim, last, bias=False) if last != dim and not tied else None
        self.adaptive_softmax: AdaptiveSoftmax | None = None
        self.output_projection: nn.Linear | None = None
        self.output_bias: nn.Parameter | None = None
        if bands is not None:
            self.adaptive_softmax = AdaptiveSoftmax(config.vocab_size, last, bands, config.word_dim)
        elif config.share_input_output:
            # The embedding table is the weight.
            self.output_bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.output_bias else None
        else:
            self.output_projection = nn.Linear(last, config.vocab_size, bias=config.output_bias)
            nn.init.normal_(self.output_projection.weight, std=last**-0.5)

    def forward(
        self,
        tokens: Tensor | None,
        encoded: Encoded | None = None,
        pads: Tensor | None = None,
        vectors: Tensor | None = None,
        kept: list[Tensor] | None = None,
    ) -> Tensor:
        """Whole sequences, tokens (B,T) or their word vectors (B,T,d) → (T,B,d); pads and `kept` as for the encoder."""
        pads = pads_in(tokens, pads, vectors, self.pad)
        x = self.embed(tokens, pads, vectors=vectors)
        for layer in self.layers:
            _keep(kept, x)
            x = self.run(layer, x, pads, encoded)
        return x if self.layer_norm is None else self.layer_norm(x)

    def start(self, batch: int, encoded: Encoded | None = None) -> DecoderState:
        """The state before the first token of `batch` sequences."""
        sources = [layer.source(encoded) for layer in self.layers]
        seen = torch.zeros(batch, dtype=torch.int64, device=next(self.parameters()).device)
        return DecoderState(seen, [None] * len(self.layers), sources, [None] * len(self.layers))

    def step(
        self,
        tokens: Tensor | None,
        state: DecoderState,
        pads: Tensor | None = None,
        vectors: Tensor | None = None,
        kept: list[Tensor] | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """The next n ≥ 1 tokens (B,n) → ((n,B,d), the state after them); the given state is not modified."""
        pads = pads_in(tokens, pads, vectors, self.pad)
        x = self.embed(tokens, pads, state.seen, vectors)
        mixers, queries = [], []
        parts = zip(self.layers, state.mixers, state.sources, state.queries, strict=True)
        for layer, mixer, source, query in parts:
            _keep(kept, x)
            x, mixer, query = layer.step(x, mixer, pads, source, query)
            mixers.append(mixer)
            queries.append(query)
        x = x if self.layer_norm is None else self.layer_norm(x)
        return x, DecoderState(state.seen + (~pads).sum(dim=1), mixers, state.sources, queries)

    def logits(self, x: Tensor) -> Tensor:
        """(T,B,d) → (B,T,V); log-probabilities if there is an adaptive softmax."""
        x = self._outputs(x)
        if self.adaptive_softmax is not None:
            return self.adaptive_softmax(x, self._tied())
        if self.output_projection is not None:
            return self.output_projection(x)
        return F.linear(x, self.embed_tokens.weight, self.output_bias)

    def score(self, x: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor | None, Tensor, Tensor]:
        """(T,B,d), labels (B,T) → (logits, the sum of the labels' cross-entropies in nats, their number).

        Pads and −100 are not counted. In training with an adaptive softmax and without label smoothing, logits are
        None: the loss needs each band of words only where one of them is the label. A graph that is traced or captured
        computes the logits there too.
        """
        wanted = labels.masked_fill(labels.eq(self.pad), -100).flatten()
        count = wanted.ne(-100).sum()
        softmax = None if label_smoothing else self.adaptive_softmax
        if softmax is not None and softmax.by_band(x):
            return None, softmax.losses(self._outputs(x).flatten(0, 1), wanted, self._tied()).sum(), count
        logits = self.logits(x)
        rows = logits.flatten(0, 1)
        if softmax is not None:
            return logits, widen(F.nll_loss(rows, wanted, reduction="none")).sum(), count
        return logits, F.cross_entropy(widen(rows), wanted, reduction="sum", label_smoothing=label_smoothing), count

    def _outputs(self, x: Tensor) -> Tensor:
        """(T,B,d) → (B,T,last_dim)"""
        return (x if self.project_out_dim is None else self.project_out_dim(x)).transpose(0, 1)

    def _tied(self) -> AdaptiveInput | None:
        return self.embed_tokens if isinstance(self.embed_tokens, AdaptiveInput) else None

    def output(self, x: Tensor, labels: Tensor | None, label_smoothing: float) -> Output:
        """(T,B,d) → the output; its loss is the mean over the labels (B,T)."""
        if labels is None:
            return Output(self.logits(x))
        logits, loss, count = self.score(x, labels, label_smoothing)
        return Output(logits, loss / count)


class EncoderDecoder(nn.Module):
    """An encoder-decoder: LightConv, DynamicConv (Wu et al. 2019), TaLK (Lioutas & Guo 2020), the Transformer, or a
    mixture with a different mixer in each layer. The parameters have the names of fairseq's models.

    Raises:
        ValueError: `config` has no encoder.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.encoder is None:
            raise ValueError("config.encoder is missing: use LanguageModel for a model without an encoder")
        self.config = config
        self.encoder = Encoder(config.encoder, config.pad)
        shared = self.encoder.embed_tokens if config.share_embeddings else None
        self.decoder = Decoder(config.decoder, config.pad, shared)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        labels: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        source_pads: Tensor | None = None,
        target_pads: Tensor | None = None,
    ) -> Output:
        """For training, or for scoring given translations.

        Args:
            source: (B,S) words and the end symbol; pads on either side.
            target: (B,T) the decoder's input: the end symbol, then the words (fairseq's prev_output_tokens).
            labels: (B,T) the words and the end symbol. The loss is the mean over all labels but pads and −100.
            label_smoothing: share of the probability that is spread over all words.
            source_pads, target_pads: (B,S), (B,T) bool; default: where the tokens are pads.
        """
        x = self.decoder(target, self.encoder(source, source_pads), target_pads)
        return self.decoder.output(x, labels, label_smoothing)

    def encode(self, source: Tensor, pads: Tensor | None = None) -> Encoded:
        """source (B,S) → the encoder's output."""
        return self.encoder(source, pads)

    def start(self, encoded: Encoded) -> DecoderState:
        """The decoder's state before the first token."""
        return self.decoder.start(encoded.output.shape[1], encoded)

    def step(self, tokens: Tensor, state: DecoderState, pads: Tensor | None = None) -> tuple[Tensor, DecoderState]:
        """The next n ≥ 1 tokens (B,n) → logits (B,n,V) of those after them, and the state."""
        x, state = self.decoder.step(tokens, state, pads)
        return self.decoder.logits(x), state


class LanguageModel(nn.Module):
    """A language model: a decoder without an encoder. The parameters have the names of fairseq's models.

    Raises:
        ValueError: `config` has an encoder.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.encoder is not None:
            raise ValueError("config.encoder must be None: use EncoderDecoder for a model with an encoder")
        self.config = config
        self.decoder = Decoder(config.decoder, config.pad)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        pads: Tensor | None = None,
    ) -> Output:
        """tokens (B,T) → logits of the words after them; labels (B,T) are these words. See EncoderDecoder.forward."""
        return self.decoder.output(self.decoder(tokens, pads=pads), labels, label_smoothing)

    def start(self, batch: int) -> DecoderState:
        """The state before the first token of `batch` sequences."""
        return self.decoder.start(batch)

    def step(self, tokens: Tensor, state: DecoderState, pads: Tensor | None = None) -> tuple[Tensor, DecoderState]:
        """The next n ≥ 1 tokens (B,n) → logits (B,n,V) of those after them, and the state."""
        x, state = self.decoder.step(tokens, state, pads)
        return self.decoder.logits(x), state


def build_model(config: ModelConfig) -> EncoderDecoder | LanguageModel:
    """The model that a configuration describes, with fresh weights."""
    return LanguageModel(config) if config.encoder is None else EncoderDecoder(config)


def _call(layer: nn.Module, x: Tensor, pads: Tensor, *encoded: Any) -> Tensor:
    return layer(x, pads, Encoded(*encoded) if encoded else None)


def _keep(kept: list[Tensor] | None, x: Tensor) -> None:
    if kept is not None:
        kept.append(x)


def pads_in(tokens: Tensor | None, pads: Tensor | None, vectors: Tensor | None, pad: int) -> Tensor:
    """Where the pads are: as given, or where the tokens are pads; none for vectors."""
    if pads is not None:
        return pads
    if tokens is not None:
        return tokens.eq(pad)
    if vectors is None:
        raise ValueError("tokens or vectors must be given, got neither")
    return torch.zeros(vectors.shape[:2], dtype=torch.bool, device=vectors.device)
