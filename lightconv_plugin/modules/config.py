"""The architecture of a model as data: the classes are built from it, and an exported model's config.json holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lightconv_plugin.modules.attention import AttentionConv, EncoderAttention
from lightconv_plugin.modules.mixers import MixerSpec
from lightconv_plugin.validation import read

Activation = Literal["relu", "relu_squared", "gelu", "gelu_fast", "gelu_accurate", "swish", "tanh", "linear"]
Positions = Literal["sinusoidal", "learned", "none"]
# The fields of a decoder that only its attention over the encoder reads.
OF_ENCODER_ATTENTION = ("num_heads", "attention_dropout", "cross_attention_conv")
_DERIVED = ("causal", "zero_pads")  # fields of a mixer that follow from the side it is on


@dataclass(frozen=True)
class AdaptiveInputConfig:
    """Embeddings in bands of words (Baevski & Auli 2019): band i has dimension input_dim / factor^i.

    cutoff: the word ranks at which the next band begins.
    """

    cutoff: tuple[int, ...]
    factor: float = 4.0

    def __post_init__(self) -> None:
        _check_bands(self.cutoff, self.factor)

    def widths(self, vocab_size: int, dim: int) -> list[int]:
        """The dimension of each band's word vectors; `dim` is the input_dim."""
        return [int(dim // self.factor**i) for i in range(len(bands(self.cutoff, vocab_size)))]


@dataclass(frozen=True)
class AdaptiveSoftmaxConfig:
    """Outputs in bands of words (Grave et al. 2017): tail i has dimension output_dim / factor^(i+1).

    tie_weights: use the adaptive input's word vectors; tie_proj: use its projections for the tails, too.
    dropout: dropout of the input, and again of the tails' projections.
    """

    cutoff: tuple[int, ...]
    factor: float = 4.0
    dropout: float = 0.0
    tie_weights: bool = False
    tie_proj: bool = False

    def __post_init__(self) -> None:
        _check_bands(self.cutoff, self.factor)
        _check_probability("dropout", self.dropout)
        if self.tie_proj and not self.tie_weights:
            raise ValueError("tie_proj needs tie_weights")

    def widths(self, vocab_size: int, dim: int) -> list[int]:
        """The dimension of each tail; `dim` is the output_dim."""
        return [int(dim // self.factor**i) for i in range(1, len(bands(self.cutoff, vocab_size)))]


@dataclass(frozen=True)
class StackConfig:
    """One side of a model: embeddings, layers and, for a decoder, outputs.

    vocab_size: number of entries in the dictionary.
    embed_dim: d, the channels between the layers.
    ffn_dim: hidden dimension of the feed-forward networks.
    num_heads: heads of the attention over the encoder.
    mixers: the token mixer of each layer.
    normalize_before: layer norms before the sublayers, otherwise after the residuals.
    final_norm: add a layer norm after the last layer.
    positions, max_positions: how positions are embedded, and the longest sequence.
    embedding_norm: add a layer norm after the embeddings.
    embed_scale: factor of the word embeddings.
    dropout, attention_dropout, activation_dropout, layerdrop: probabilities in training. attention_dropout is for the
        attention over the encoder; each mixer has its own.
    input_dim: dimension of the word embeddings (default d); if it is not d, a Linear maps it to d.
    output_dim: dimension of the output layer's input (default d); if it is not d, a Linear maps d to it.
    encoder_dim: channels of the encoder's output that the layers attend to; None without this attention.
    cross_attention_conv: the convolution of the queries in the attention over the encoder.
    share_input_output: use the embedding table as the output layer's weight.
    output_bias: add a bias to the output layer.
    adaptive_input, adaptive_softmax: None for a single table and for a single softmax over all words.
    """

    vocab_size: int
    embed_dim: int
    ffn_dim: int
    num_heads: int
    mixers: tuple[MixerSpec, ...]
    normalize_before: bool = False
    final_norm: bool = False
    positions: Positions = "sinusoidal"
    max_positions: int = 1024
    embedding_norm: bool = False
    embed_scale: float = 1.0
    activation: Activation = "relu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    layerdrop: float = 0.0
    input_dim: int | None = None
    output_dim: int | None = None
    encoder_dim: int | None = None
    cross_attention_conv: AttentionConv | None = None
    share_input_output: bool = False
    output_bias: bool = False
    adaptive_input: AdaptiveInputConfig | None = None
    adaptive_softmax: AdaptiveSoftmaxConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "ffn_dim", "num_heads", "max_positions"):
            _check_at_least(1, name, getattr(self, name))
        for name in ("input_dim", "output_dim", "encoder_dim"):
            if getattr(self, name) is not None:
                _check_at_least(1, name, getattr(self, name))
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            _check_probability(name, getattr(self, name))
        if not math.isfinite(self.embed_scale):
            raise ValueError(f"embed_scale must be a number, got {self.embed_scale}")
        if self.encoder_dim is not None and self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads must divide embed_dim = {self.embed_dim}, got {self.num_heads}")
        if (conv := self.cross_attention_conv) is not None:
            if conv.projections != ("q",):
                raise ValueError(f"cross_attention_conv.projections must be q alone, got {','.join(conv.projections)}")
            if self.encoder_dim is None:
                raise ValueError("cross_attention_conv needs an encoder_dim: there is no attention over an encoder")
        for i, mixer in enumerate(self.mixers):
            heads = mixer.num_heads
            if mixer.attends and self.embed_dim % heads:
                raise ValueError(f"mixers[{i}].num_heads must divide embed_dim = {self.embed_dim}, got {heads}")
            if mixer.kind == "conv" and mixer.conv_dim != self.embed_dim:
                raise ValueError(f"mixers[{i}].conv_dim must be embed_dim = {self.embed_dim}, got {mixer.conv_dim}")
        self._check_adaptive()
        if self.share_input_output and (self.adaptive_input or self.adaptive_softmax):
            raise ValueError("share_input_output needs one table of embeddings and one softmax, not adaptive ones")
        if self.share_input_output and self.word_dim != self.last_dim:
            raise ValueError(
                f"share_input_output needs output_dim = input_dim = {self.word_dim}, got output_dim = {self.last_dim}"
            )

    def _check_adaptive(self) -> None:
        words, softmax, size = self.adaptive_input, self.adaptive_softmax, self.vocab_size
        for name, banded in (("adaptive_input", words), ("adaptive_softmax", softmax)):
            if banded is not None and banded.cutoff[-1] > size:
                raise ValueError(f"{name}.cutoff must not exceed vocab_size = {size}, got {banded.cutoff}")
        if words is not None:
            _check_widths("adaptive_input", words, size, "input_dim", self.word_dim)
        if softmax is not None:
            _check_widths("adaptive_softmax", softmax, size, "output_dim", self.last_dim)
        if softmax is None or not softmax.tie_weights:
            return
        if words is None or words.cutoff != softmax.cutoff:
            raise ValueError("adaptive_softmax.tie_weights needs an adaptive_input with the same cutoff")
        if self.last_dim != self.embed_dim:
            raise ValueError(
                f"adaptive_softmax.tie_weights needs output_dim = embed_dim = {self.embed_dim}, got {self.last_dim}"
            )
        mine, theirs = softmax.widths(size, self.last_dim), words.widths(size, self.word_dim)[1:]
        if mine != theirs and not softmax.tie_proj:
            raise ValueError(
                f"adaptive_softmax.tie_weights needs tails as wide as the adaptive_input's bands {theirs}, got {mine}: "
                "both need the same factor, and input_dim = output_dim"
            )

    def build_encoder_attention(self) -> EncoderAttention | None:
        """A layer's attention over the encoder; None without an encoder_dim."""
        if self.encoder_dim is None:
            return None
        return EncoderAttention(
            self.embed_dim,
            self.num_heads,
            encoder_dim=self.encoder_dim,
            dropout=self.attention_dropout,
            convolved=self.cross_attention_conv,
        )

    @property
    def kept_queries(self) -> int:
        """How many past queries a layer's attention over the encoder keeps for its convolution; 0 without one."""
        return 0 if self.cross_attention_conv is None else self.cross_attention_conv.kernel_size - 1

    @property
    def word_dim(self) -> int:
        """Dimension of the word embeddings."""
        return self.embed_dim if self.input_dim is None else self.input_dim

    @property
    def last_dim(self) -> int:
        """Dimension of the output layer's input."""
        return self.embed_dim if self.output_dim is None else self.output_dim


@dataclass(frozen=True)
class ModelConfig:
    """A whole model: an encoder-decoder, or a language model if there is no encoder.

    share_embeddings: encoder and decoder share one table of word embeddings.
    pad, bos, eos, unk: indices of fairseq's special symbols in the dictionaries.
    """

    decoder: StackConfig
    encoder: StackConfig | None = None
    share_embeddings: bool = False
    pad: int = 1
    bos: int = 0
    eos: int = 2
    unk: int = 3

    def __post_init__(self) -> None:
        decoder, encoder = self.decoder, self.encoder
        sizes = [("decoder", decoder)] + ([] if encoder is None else [("encoder", encoder)])
        for name, side in sizes:
            for symbol in ("pad", "bos", "eos", "unk"):
                if not 0 <= getattr(self, symbol) < side.vocab_size:
                    size, index = side.vocab_size, getattr(self, symbol)
                    raise ValueError(f"{symbol} must be an index of the {name}'s {size} words, got {index}")
        if encoder is None:
            if decoder.encoder_dim is not None or self.share_embeddings:
                raise ValueError("decoder.encoder_dim and share_embeddings need an encoder")
            return
        if encoder.adaptive_input or encoder.adaptive_softmax or encoder.share_input_output:
            raise ValueError("encoder must have one table of embeddings and no outputs")
        if encoder.encoder_dim is not None or encoder.word_dim != encoder.embed_dim:
            raise ValueError("encoder.encoder_dim and encoder.input_dim are valid for a decoder only")
        if decoder.encoder_dim not in (None, encoder.embed_dim):
            raise ValueError(f"decoder.encoder_dim must be {encoder.embed_dim} or null, got {decoder.encoder_dim}")
        if self.share_embeddings and (
            (encoder.vocab_size, encoder.word_dim) != (decoder.vocab_size, decoder.word_dim) or decoder.adaptive_input
        ):
            raise ValueError("share_embeddings needs tables of the same size on both sides")

    def as_json(self) -> dict[str, Any]:
        """For config.json."""
        return {
            "encoder_stack": None if self.encoder is None else _stack_as_json(self.encoder),
            "decoder_stack": _stack_as_json(self.decoder),
            "share_embeddings": self.share_embeddings,
            "pad_token_id": self.pad,
            "bos_token_id": self.bos,
            "eos_token_id": self.eos,
            "unk_token_id": self.unk,
        }

    @classmethod
    def of_json(cls, known: Mapping[str, Any]) -> ModelConfig:
        """Read the configuration that `as_json` wrote; other keys of the mapping are ignored.

        Raises:
            ValueError: it is not such a configuration; the message says what is wrong.
        """
        encoder = known.get("encoder_stack")
        symbols: dict[str, Any] = {}
        for name in ("pad", "bos", "eos", "unk"):
            symbols[name] = index = known.get(f"{name}_token_id")
            if not isinstance(index, int) or isinstance(index, bool):
                raise ValueError(f"{name}_token_id must be a whole number, got {index!r}")
        if not isinstance(shared := known.get("share_embeddings"), bool):
            raise ValueError(f"share_embeddings must be true or false, got {shared!r}")
        return cls(
            decoder=_stack_of_json(known.get("decoder_stack"), "decoder_stack", causal=True),
            encoder=None if encoder is None else _stack_of_json(encoder, "encoder_stack", causal=False),
            share_embeddings=shared,
            **symbols,
        )


def _stack_as_json(stack: StackConfig) -> dict[str, Any]:
    values = asdict(stack)
    values["mixers"] = [{k: v for k, v in mixer.items() if k not in _DERIVED} for mixer in values["mixers"]]
    return _with_lists(values)


def _with_lists(value: Any) -> Any:
    """`value` with lists in place of tuples, as JSON gives it back."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [*map(_with_lists, value)] if isinstance(value, (list, tuple)) else value


def _stack_of_json(known: object, name: str, *, causal: bool) -> StackConfig:
    mixers = known.get("mixers") if isinstance(known, Mapping) else None
    if isinstance(mixers, list) and not mixers:
        raise ValueError(f"{name}.mixers must have an entry for each layer, got none")
    for mixer in mixers if isinstance(mixers, list) else ():
        for key in _DERIVED:
            if isinstance(mixer, Mapping) and key in mixer:
                raise ValueError(f"unknown key {name}.mixers.{key}")
    stack = read(StackConfig, known, name)
    return replace(stack, mixers=tuple(replace(mixer, causal=causal, zero_pads=True) for mixer in stack.mixers))


def bands(cutoff: tuple[int, ...], vocab_size: int) -> list[int]:
    """Where each band of words ends."""
    return [*cutoff] if cutoff[-1] == vocab_size else [*cutoff, vocab_size]


def _check_widths(
    name: str, banded: AdaptiveInputConfig | AdaptiveSoftmaxConfig, vocab_size: int, dim_name: str, dim: int
) -> None:
    try:
        possible = all(width >= 1 for width in banded.widths(vocab_size, dim))
    except ArithmeticError:  # no number is that large, or that small
        possible = False
    if not possible:
        raise ValueError(
            f"{name}.factor = {banded.factor:g} leaves no dimension of {dim_name} = {dim} for the last band of "
            f"the cutoff {list(banded.cutoff)}"
        )


def _check_at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def _check_bands(cutoff: tuple[int, ...], factor: float) -> None:
    if not cutoff or cutoff[0] < 1 or sorted(set(cutoff)) != list(cutoff):
        raise ValueError(f"cutoff must be increasing word ranks, got {list(cutoff)}")
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"factor must be positive, got {factor}")
