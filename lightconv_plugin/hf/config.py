"""The configuration: config.json of an exported directory as a transformers configuration."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from transformers import PretrainedConfig

from lightconv_plugin.checkpoints.exported import FORMAT_VERSION, MODEL_TYPE
from lightconv_plugin.mixers import OUR_OPTIONS, readers
from lightconv_plugin.modules.attention import AttentionConv
from lightconv_plugin.modules.config import ModelConfig, StackConfig
from lightconv_plugin.modules.mixers import MixerSpec
from lightconv_plugin.validation import read

KERNEL_SIZES = (3, 7, 15, 31)
"""The kernel sizes of the first layers in the paper's models; later layers have the last one."""
_LENGTH = 1024  # the longest source and target, unless given

# What only some mixers have, and the values that leave it out.
_OF_MIXERS = {
    field.name: field.default for field in fields(MixerSpec) if field.default is not MISSING and readers(field.name)
}
_OPTIONS = {
    "d_model": 256,
    "ffn_dim": None,
    "num_heads": 4,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "mixer": "dynamic",
    "encoder_kernel_sizes": KERNEL_SIZES,
    "decoder_kernel_sizes": KERNEL_SIZES,
    "glu": True,
    "normalize": "softmax",
    **_OF_MIXERS,
    "cross_attention_conv": None,
    "normalize_before": False,
    "positions": "sinusoidal",
    "dropout": 0.1,
    "weight_dropout": 0.1,
    "attention_dropout": 0.1,
    "source_vocab_size": None,
    "share_input_output": True,
}
# Those that can be changed later, as in transformers' own models.
_DROPOUTS = ("dropout", "weight_dropout", "attention_dropout")
# What looks like an option: transformers would keep it as an attribute that has no effect.
_NO_OPTIONS = {*(field.name for kind in (StackConfig, MixerSpec) for field in fields(kind)), *OUR_OPTIONS}
_STACKS = ("encoder_stack", "decoder_stack")
_SYMBOLS = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")
_FORMAT_KEYS = (
    *_STACKS, "share_embeddings", "format_version", "is_encoder_decoder",
    "decoder_start_token_id", "vocab_size", "tie_word_embeddings", "weights", "source_lang", "target_lang",
    "truncate_source", "max_source_positions", "max_target_positions",
)  # fmt: skip
_FOLLOWS = {
    **dict.fromkeys(({*_OPTIONS} | _NO_OPTIONS) - {*_DROPOUTS, "vocab_size"}, "the stacks"),
    "hidden_size": "d_model or the stacks",
    "num_hidden_layers": "encoder_layers and decoder_layers or the stacks",
    "num_attention_heads": "num_heads or the stacks",
    "max_position_embeddings": "max_target_positions",
}
"""What cannot be set, and what determines each."""
_FIXED = ("vocab_size", "is_encoder_decoder", "tie_word_embeddings", "share_embeddings")


def _probability(name: str) -> property:
    """A dropout probability: the highest of the layers that have it; a new value is that of all of them."""

    def highest(config: LightConvConfig) -> float:
        return max(part[name] for part in _parts(config.__dict__) if name in part)

    def set_all(config: LightConvConfig, value: float) -> None:
        stacks = copy.deepcopy({side: config.__dict__[side] for side in _STACKS})
        for part in _parts(stacks):
            if name in part:
                part[name] = value
        ModelConfig.of_json(config.__dict__ | config._symbols | stacks)  # checks the value
        config.__dict__.update(stacks)

    return property(highest, set_all)


class LightConvConfig(PretrainedConfig):
    """The architecture of a model, and the other settings of its directory.

    Pass either whole stacks, as in config.json, or options from which they are built:

        LightConvConfig(vocab_size=8000, d_model=512, encoder_layers=7, decoder_layers=6, mixer="lightweight")
        LightConvConfig(vocab_size=8000, is_encoder_decoder=False, decoder_layers=12)   # a language model

    Args:
        encoder_stack, decoder_stack: as written by modules.config; encoder_stack is None for a language model.
        share_embeddings: encoder and decoder share their embeddings.
        vocab_size: number of entries in the target dictionary.
        is_encoder_decoder: False for a language model; determined by the stacks if they are given.
        pad_token_id, bos_token_id, eos_token_id, unk_token_id: fairseq's. The architecture and what is saved keep these
            values if the attributes are changed later.
        decoder_start_token_id: the first input of the decoder; in fairseq it is `</s>`, and `lightconv translate` knows
            no other.
        format_version, weights, source_lang, target_lang, truncate_source, max_source_positions, max_target_positions:
            of an exported directory. The positions default to 1024. With stacks, they are at most the number of learned
            positions, if positions are learned; without stacks, they are that number.
        use_cache: return a LightConvCache, except in training or with labels.
        tie_word_embeddings: as share_input_output.
        options: only without stacks, except for the dropouts: they replace what the stacks have, and can be set later
            for models that are built then. d_model; ffn_dim (default: 4 · d_model); num_heads (of convolutions and of
            attention); encoder_layers, decoder_layers; mixer (a name of modules.MIXERS, or one for each layer of the
            model, the encoder's first); encoder_kernel_sizes, decoder_kernel_sizes (the last is repeated); glu;
            normalize; dynamic_rank, dynamic_residual, as in MixerSpec, and attention_conv, as in config.json, for the
            layers whose mixer has them, at least one; cross_attention_conv, as in config.json; normalize_before;
            positions; dropout, weight_dropout, attention_dropout; source_vocab_size (default: vocab_size);
            share_input_output.

    Raises:
        ValueError: an option or a stack is not allowed; the message says which one and why.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  (required by transformers)

    def __init__(
        self,
        encoder_stack: dict[str, Any] | None = None,
        decoder_stack: dict[str, Any] | None = None,
        share_embeddings: bool = False,
        vocab_size: int | None = None,
        is_encoder_decoder: bool | None = None,
        pad_token_id: int = 1,
        bos_token_id: int = 0,
        eos_token_id: int = 2,
        unk_token_id: int = 3,
        decoder_start_token_id: int | None = None,
        tie_word_embeddings: bool | None = None,
        format_version: int = FORMAT_VERSION,
        weights: str = "float32",
        source_lang: str | None = None,
        target_lang: str | None = None,
        truncate_source: bool = False,
        max_source_positions: int | None = None,
        max_target_positions: int | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ):
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        kwargs.pop("shortlist", None)  # `generate` uses none, and `save_pretrained` does not copy its file
        kwargs.pop("custom_pipelines", None)  # once written with a pipeline: code that nothing needs
        if format_version != FORMAT_VERSION:
            raise ValueError(
                f"format_version must be {FORMAT_VERSION}, got {format_version!r}: a newer version wrote it"
            )
        lengths = {"max_source_positions": max_source_positions, "max_target_positions": max_target_positions}
        for name, length in lengths.items():
            if length is not None:
                _check_size(name, length)
        if decoder_stack is None:
            if encoder_stack is not None:
                raise ValueError("decoder_stack is required with encoder_stack")
            if tie_word_embeddings is not None:
                options.setdefault("share_input_output", tie_word_embeddings)
            if unknown := [name for name in kwargs if name in _NO_OPTIONS]:
                raise ValueError(f"{', '.join(unknown)}: not allowed; the options are {', '.join(_OPTIONS)}")
            words = 1000 if vocab_size is None else vocab_size
            known = _build(options | lengths, words, is_encoder_decoder is not False, share_embeddings)
        elif refused := [name for name in options if name not in _DROPOUTS]:
            raise ValueError(f"{', '.join(refused)}: not allowed with decoder_stack, which already determines it")
        else:
            known = {"encoder_stack": encoder_stack, "decoder_stack": decoder_stack}
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.unk_token_id = unk_token_id
        # Trainers change the attributes to the tokenizer's symbols, but a model is built for those of its dictionaries.
        self._symbols = {name: getattr(self, name) for name in _SYMBOLS}
        self.share_embeddings = share_embeddings
        self.encoder_stack, self.decoder_stack = known["encoder_stack"], known["decoder_stack"]
        model = self.model_config()
        written = model.as_json()
        self.encoder_stack, self.decoder_stack = written["encoder_stack"], written["decoder_stack"]
        for name in _DROPOUTS:
            if name in options:
                setattr(self, name, options[name])
        has_encoder = model.encoder is not None
        for name, value, wanted in (
            ("vocab_size", vocab_size, model.decoder.vocab_size),
            ("is_encoder_decoder", is_encoder_decoder, has_encoder),
        ):
            if value not in (None, wanted):
                raise ValueError(f"{name} must be {wanted} as in the stacks, got {value!r}")
        tied = model.decoder.share_input_output
        if tie_word_embeddings not in (None, tied):
            raise ValueError(f"tie_word_embeddings must be {tied} as share_input_output, got {tie_word_embeddings!r}")
        self.vocab_size = model.decoder.vocab_size
        self.decoder_start_token_id = eos_token_id if decoder_start_token_id is None else decoder_start_token_id
        self.tie_word_embeddings = tied
        self.format_version = format_version
        self.weights = weights
        self.source_lang = source_lang
        self.target_lang = target_lang
        self.truncate_source = truncate_source
        self.max_source_positions = max_source_positions
        if model.encoder is not None:
            self.max_source_positions = _longest("max_source_positions", max_source_positions, model.encoder)
        self.max_target_positions = _longest("max_target_positions", max_target_positions, model.decoder)
        self.use_cache = use_cache
        super().__init__(is_encoder_decoder=has_encoder, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FOLLOWS:
            raise ValueError(f"{name} cannot be set, got {value!r}: it follows from {_FOLLOWS[name]}")
        if name in _FIXED and (fixed := self.__dict__.get(name, value)) != value:
            raise ValueError(f"{name} must stay {fixed}, got {value!r}: the weights depend on it")
        super().__setattr__(name, value)

    def model_config(self) -> ModelConfig:
        """The architecture for the classes of modules/. ValueError: the stacks are not valid."""
        return ModelConfig.of_json(self.__dict__ | self._symbols)

    dropout, weight_dropout, attention_dropout = map(_probability, _DROPOUTS)

    @property
    def hidden_size(self) -> int:
        return self.decoder_stack["embed_dim"]

    d_model = hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return len((self.encoder_stack or self.decoder_stack)["mixers"])

    @property
    def encoder_layers(self) -> int:
        return 0 if self.encoder_stack is None else len(self.encoder_stack["mixers"])

    @property
    def decoder_layers(self) -> int:
        return len(self.decoder_stack["mixers"])

    @property
    def num_attention_heads(self) -> int:
        return self.decoder_stack["num_heads"]

    @property
    def max_position_embeddings(self) -> int:
        """The longest output; transformers' `generate` limits its default length by it."""
        return self.max_target_positions

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> LightConvConfig:
        """Returns self: both sides share one configuration (transformers would rename the decoder's keys)."""
        return self

    def to_dict(self) -> dict[str, Any]:
        written = super().to_dict()
        return written | written.pop("_symbols")

    def to_diff_dict(self) -> dict[str, Any]:
        """The content of config.json: all keys of the format, even those that equal transformers' defaults."""
        written = super().to_diff_dict()
        written.update({name: self.__dict__[name] for name in _FORMAT_KEYS})
        return written | self._symbols


def _parts(stacks: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The stacks, and the mixers of their layers."""
    for stack in filter(None, map(stacks.get, _STACKS)):
        yield from (stack, *stack["mixers"])


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")


def _longest(name: str, given: int | None, stack: StackConfig) -> int:
    """The longest text of a side. ValueError if it has more words than there are learned positions."""
    learned = stack.max_positions if stack.positions == "learned" else None
    if given is None:
        return _LENGTH if learned is None else min(_LENGTH, learned)
    if learned is not None and given > learned:
        raise ValueError(f"{name} must be at most the {learned} learned positions, got {given}")
    return given


def _build(options: dict[str, Any], vocab_size: int, has_encoder: bool, share_embeddings: bool) -> dict[str, Any]:
    """The stacks described by options and the longest source and target, as in config.json."""
    if not has_encoder:
        unwanted = [name for name in ("encoder_layers", "encoder_kernel_sizes", "source_vocab_size") if name in options]
        if unwanted:
            raise ValueError(f"{', '.join(unwanted)}: not allowed for a language model (is_encoder_decoder=False)")
    chosen = {**_OPTIONS, **options}
    _check_size("vocab_size", vocab_size)
    _check_size("d_model", chosen["d_model"])
    for name, default in (("ffn_dim", 4 * chosen["d_model"]), ("source_vocab_size", vocab_size)):
        chosen[name] = default if chosen[name] is None else chosen[name]
        _check_size(name, chosen[name])
    counts = [chosen["encoder_layers"] if has_encoder else 0, chosen["decoder_layers"]]
    for name, count in zip(("encoder_layers", "decoder_layers"), counts, strict=True):
        if (has_encoder or name != "encoder_layers") and not (isinstance(count, int) and count >= 1):
            raise ValueError(f"{name} must be at least 1, got {count!r}")
    kinds = chosen["mixer"]
    kinds = [kinds] * sum(counts) if isinstance(kinds, str) else list(kinds)
    if len(kinds) != sum(counts):
        raise ValueError(f"mixer must be one name, or one for each of the {sum(counts)} layers, got {len(kinds)}")
    for name, usual in _OF_MIXERS.items():
        having = readers(name)
        if chosen[name] != usual and not set(having) & set(kinds):
            raise ValueError(f"{name} needs a layer of type {' or '.join(having)}: got mixer={chosen['mixer']!r}")
    encoder = None
    if has_encoder:
        sizes = _sizes("encoder_kernel_sizes", chosen["encoder_kernel_sizes"], counts[0])
        words, longest = chosen["source_vocab_size"], chosen["max_source_positions"]
        encoder = _stack(chosen, words, kinds[: counts[0]], sizes, longest)
    conv = chosen["cross_attention_conv"]
    sizes = _sizes("decoder_kernel_sizes", chosen["decoder_kernel_sizes"], counts[1])
    decoder = _stack(
        chosen,
        vocab_size,
        kinds[counts[0] :],
        sizes,
        chosen["max_target_positions"],
        encoder_dim=chosen["d_model"] if has_encoder else None,
        share_input_output=chosen["share_input_output"],
        cross_attention_conv=None if conv is None else read(AttentionConv, conv, "cross_attention_conv"),
    )
    return ModelConfig(decoder, encoder, share_embeddings).as_json()


def _sizes(name: str, sizes: Sequence[int], count: int) -> list[int]:
    if isinstance(sizes, (str, int)) or not sizes:
        raise ValueError(f"{name} must be a list of sizes, got {sizes!r}")
    return [*sizes, *[sizes[-1]] * count][:count]


def _stack(
    options: dict[str, Any], vocab_size: int, kinds: list[str], sizes: list[int], longest: int | None, **more: Any
) -> StackConfig:
    dim, heads = options["d_model"], options["num_heads"]
    mixers = tuple(
        read(
            MixerSpec,
            {
                "kind": kind,
                "kernel_size": size,
                "conv_dim": dim,
                "num_heads": heads if kind in readers("num_heads") else 1,
                "input_dropout": 0.0,
                **{name: options[name] for name in ("glu", "weight_dropout", "normalize", "attention_dropout")},
                **{name: options[name] for name in _OF_MIXERS if kind in readers(name)},
            },
        )
        for kind, size in zip(kinds, sizes, strict=True)
    )
    return StackConfig(
        vocab_size=vocab_size,
        embed_dim=dim,
        ffn_dim=options["ffn_dim"],
        num_heads=heads,
        mixers=mixers,
        normalize_before=options["normalize_before"],
        final_norm=options["normalize_before"],
        positions=options["positions"],
        max_positions=_LENGTH if longest is None else longest,
        embed_scale=math.sqrt(dim),
        dropout=options["dropout"],
        attention_dropout=options["attention_dropout"],
        **more,
    )
