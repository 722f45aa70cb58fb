"""The options of the language models, how they are resolved, and the named architectures.

Numbers: Wu et al. 2019 and fairseq's `lightconv_lm` (the paper's own code); Lioutas & Guo 2020 and its code.
"""

from argparse import Namespace
from ast import literal_eval
from copy import copy
from dataclasses import dataclass, fields, make_dataclass
from itertools import pairwise
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from omegaconf import II

from lightconv_plugin.mixers import WU_FAMILIES
from lightconv_plugin.models.checks import check, check_bands, check_cutoff, cutoff
from lightconv_plugin.models.config import ConvTransformerConfig, fill_shared, mixers, options_of
from lightconv_plugin.models.options import flag, option
from lightconv_plugin.models.pruning import keep_layers

# A language model has all options of an encoder-decoder except these, those of the encoder and those of the attention
# over it.
_ENCODER_DECODER_ONLY = {
    "decoder_embed_path",
    "share_all_embeddings",
    "no_cross_attention",
    "max_source_positions",
    "max_target_positions",
}
_SHARED = [
    (f.name, f.type, copy(f))
    for f in fields(ConvTransformerConfig)
    if not f.name.startswith(("_", "encoder_", "decoder_cross_")) and f.name not in _ENCODER_DECODER_ONLY
]
_SharedConfig = make_dataclass("_SharedConfig", _SHARED, bases=(FairseqDataclass,), namespace={"__module__": __name__})


@dataclass
class ConvLanguageModelConfig(_SharedConfig):  # type: ignore[misc, valid-type]  # made above
    """Options of a `ConvLanguageModel`; the defaults are upstream's base model (architecture `dynamicconv_lm`).

    Only the differences from the decoder of ConvTransformerConfig are listed here; the other options come from there.
    """

    decoder_embed_dim: int = option(512, "decoder embedding dimension")
    decoder_ffn_embed_dim: int = option(2048, "decoder FFN dimension")
    decoder_input_dim: Optional[int] = option(
        None, "dimension of the input embeddings, of an adaptive input's first band (default: --decoder-embed-dim)"
    )
    decoder_normalize_before: bool = option(False, "no effect: a language model always normalises before each block")

    character_embeddings: bool = option(False, "compute the token embeddings from characters, with convolutions")
    character_filters: str = option(
        "[(1, 64), (2, 128), (3, 192), (4, 256), (5, 256), (6, 256), (7, 256)]",
        "filters of the character convolutions, (width, channels) each",
    )
    character_embedding_dim: int = option(4, "dimension of a character's embedding")
    char_embedder_highway_layers: int = option(2, "highway layers after the character convolutions")

    adaptive_input: bool = option(False, "adaptive input: rarer words have smaller embeddings")
    adaptive_input_factor: float = option(4.0, "factor by which each adaptive input band's dimension shrinks")
    # Of any type: the string 20000,60000 (in old checkpoints), a list, or a number (fairseq's reading of 20000).
    adaptive_input_cutoff: Any = option(
        None, "comma separated list of adaptive input cutoff points, the word ranks at which the next band begins"
    )
    adaptive_softmax_cutoff: Any = option(
        None, "comma separated list of adaptive softmax cutoff points; use with --criterion adaptive_loss"
    )
    tie_adaptive_weights: bool = option(False, "tie the word vectors of adaptive softmax and adaptive input")
    tie_adaptive_proj: bool = option(False, "also tie their projections; needs --tie-adaptive-weights")

    # These are the task's options: without a help text, fairseq's command line leaves them to the task. A checkpoint
    # keeps the values of its training: scoring with a --context-window changes the task's.
    tokens_per_sample: int = II("task.tokens_per_sample")
    max_target_positions: Optional[int] = II("task.max_target_positions")


def language_model_config(config, defaults: ConvLanguageModelConfig | None = None) -> TransformerConfig:
    """Resolve and check `config`, a ConvLanguageModelConfig as dataclass, DictConfig or Namespace.

    `defaults`, the architecture's own, are used for options missing in `config`: an old checkpoint has only the options
    that existed when it was written.

    The result is the configuration that MixerDecoder and its base class in fairseq read, with the options of the
    embeddings; character_filters is a list of pairs. Raises ValueError naming the invalid option.
    """
    c = options_of(config, defaults or ConvLanguageModelConfig())
    for name in ("decoder_conv_dim", "decoder_input_dim", "decoder_output_dim"):
        if getattr(c, name) is None:
            setattr(c, name, c.decoder_embed_dim)
    fill_shared(c)
    if c.max_target_positions is None:
        c.max_target_positions = c.tokens_per_sample
    c.character_filters = _character_filters(c.character_filters)
    c.adaptive_input_cutoff = cutoff(c, "adaptive_input_cutoff")
    keep_layers(c, "decoder")
    check(c, sides=("decoder",))
    _check_embeddings(c)
    # Upstream: "the model training is not stable without this".
    c.decoder_normalize_before, c.no_decoder_final_norm = True, True
    decoder_mixers = mixers(c, "decoder", causal=True, zero_pads=False)
    resolved = TransformerConfig.from_namespace(c)
    resolved.decoder.mixers = decoder_mixers
    resolved.compile_blocks = bool(c.compile_blocks)
    return resolved


def check_dictionaries(c: TransformerConfig, inputs: int, outputs: int) -> None:
    """Raise ValueError if the embeddings do not fit the sizes of the two dictionaries."""
    for name, used, size in (
        ("adaptive_input_cutoff", c.adaptive_input, inputs),
        ("adaptive_softmax_cutoff", c.adaptive_softmax_cutoff is not None, outputs),
    ):
        if used:
            check_cutoff(c, name, size)
    if c.adaptive_input:
        # fairseq's AdaptiveInput zeroes the second word of every band.
        ends = sorted({0, *c.adaptive_input_cutoff, inputs})
        if any(end - begin < 2 for begin, end in pairwise(ends)):
            raise ValueError(
                f"--adaptive-input-cutoff must leave at least two words to each band, got {c.adaptive_input_cutoff} of "
                f"{inputs} entries"
            )
    for name in ("tie_adaptive_weights", "share_decoder_input_output_embed"):
        if getattr(c, name) and inputs != outputs:
            raise ValueError(
                f"{flag(name)} needs one dictionary for input and output, without --output-dictionary-size: "
                f"got {inputs} and {outputs} entries"
            )


def _character_filters(text: str) -> list[tuple[int, int]]:
    try:
        filters = [(int(width), int(channels)) for width, channels in literal_eval(text)]
    except (SyntaxError, TypeError, ValueError):
        filters = []
    if not filters or min(min(pair) for pair in filters) < 1:
        raise ValueError(
            f"--character-filters must be a list of positive (width, channels), as in [(1, 64), (2, 128)]: got {text!r}"
        )
    return filters


def _check_embeddings(c: Namespace) -> None:
    if c.character_embedding_dim < 1:
        raise ValueError(f"--character-embedding-dim must be at least 1, got {c.character_embedding_dim}")
    if c.adaptive_input and c.adaptive_input_cutoff is None:
        raise ValueError("--adaptive-input needs --adaptive-input-cutoff, as in 20000,60000")
    if c.adaptive_input and c.character_embeddings:
        raise ValueError("--adaptive-input cannot be used with --character-embeddings")
    if c.adaptive_input:
        check_bands(c, "input", c.decoder_input_dim)
    if c.tie_adaptive_proj and not c.tie_adaptive_weights:
        raise ValueError("--tie-adaptive-proj needs --tie-adaptive-weights")
    if c.tie_adaptive_weights:
        _check_tied_adaptive(c)
    if c.share_decoder_input_output_embed:
        _check_shared(c)


def _check_tied_adaptive(c: Namespace) -> None:
    if not c.adaptive_input or c.adaptive_softmax_cutoff is None:
        raise ValueError("--tie-adaptive-weights needs --adaptive-input and --adaptive-softmax-cutoff")
    for name in ("cutoff", "factor"):
        of_input, of_softmax = (getattr(c, f"adaptive_{side}_{name}") for side in ("input", "softmax"))
        if of_input != of_softmax:
            raise ValueError(
                f"--tie-adaptive-weights needs --adaptive-input-{name} equal to --adaptive-softmax-{name}: "
                f"got {of_input} and {of_softmax}"
            )
    dims = c.decoder_embed_dim, c.decoder_input_dim, c.decoder_output_dim
    if len(set(dims)) > 1:
        raise ValueError(
            "--tie-adaptive-weights needs --decoder-embed-dim, --decoder-input-dim and --decoder-output-dim to be "
            f"equal: got {', '.join(map(str, dims))}"
        )


def _check_shared(c: Namespace) -> None:
    for name in ("adaptive_input", "character_embeddings", "adaptive_softmax_cutoff"):
        if getattr(c, name):
            raise ValueError(
                f"--share-decoder-input-output-embed cannot be used with {flag(name)}"
                + ("" if name == "character_embeddings" else "; use --tie-adaptive-weights to tie adaptive embeddings")
            )
    if c.decoder_input_dim != c.decoder_output_dim:
        raise ValueError(
            "--share-decoder-input-output-embed needs --decoder-input-dim equal to --decoder-output-dim: "
            f"got {c.decoder_input_dim} and {c.decoder_output_dim}"
        )


def _tied_adaptive(cutoff: str) -> dict:
    # As a string: with hydra 1.0 a list would be lost, because the base class has None.
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoff,
        "adaptive_softmax_cutoff": cutoff,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
    }


_BIG = {"decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 16}
# TaLK's model for WikiText-103, with the dropout of upstream's architecture. Upstream's command line gives 0.1, and
# relu dropout 0, unless told otherwise: its parser sets them before the architecture can. LightConv's authors did not
# train such a model; giving theirs the same shape is our choice.
_WIKI103 = {
    **_BIG,
    **_tied_adaptive("20000,60000"),
    "decoder_layers": 17,
    "decoder_kernel_size_list": [3, 5, 7, 15, 31] + [63] * 12,
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "weight_dropout": 0.2,
    "relu_dropout": 0.1,
    "adaptive_softmax_dropout": 0.2,
}

LANGUAGE_MODELS = {
    "_lm": {},
    "_lm_gbw": {"decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 16, "attention_dropout": 0.1},
    # The paper's: 17 blocks with these kernels, and bands of 60k, 100k and 640k words (dimensions 1024, 256, 64), hence
    # the cutoffs 60k and 160k. We found FFN, heads, GLU and tying in no source; with these, DynamicConv has the 339M
    # parameters that it reports (configs/gbw/dynamicconv.yaml adds them up).
    "_lm_billion_word": {
        **_BIG,
        **_tied_adaptive("60000,160000"),
        "decoder_layers": 17,
        "decoder_kernel_size_list": [15] * 2 + [31] * 4 + [63] * 11,
        "attention_dropout": 0.1,
    },
    "_lm_wiki103": _WIKI103,
}

TALK_LANGUAGE_MODELS = {
    "_lm": {},
    # Published with the base model's list of 6 windows for its 12 layers, which cannot be built. Repeating the last
    # value is our choice.
    "_lm_big": {**_BIG, "decoder_layers": 12, "decoder_kernel_size_list": [3, 7, 15] + [31] * 9},
    "_lm_wiki103": _WIKI103,
}

_FAMILIES = {
    **{family: ({"decoder_conv_type": mixer}, LANGUAGE_MODELS) for family, mixer in WU_FAMILIES.items()},
    "talkconv": ({"decoder_conv_type": "talk", "activation_fn": "swish"}, TALK_LANGUAGE_MODELS),
}


def language_model_architectures() -> dict[str, dict]:
    """Name of each architecture → the options in which it differs from ConvLanguageModelConfig."""
    architectures = {
        family + suffix: {**common, **options}
        for family, (common, suffixes) in _FAMILIES.items()
        for suffix, options in suffixes.items()
    }
    # Upstream's architecture asks for 0.1, but upstream's parser has set 0.0 before: its commands train with 0.0.
    architectures["lightconv_lm_gbw"]["attention_dropout"] = 0.0
    return architectures
