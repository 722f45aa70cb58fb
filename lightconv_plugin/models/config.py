"""The options of the encoder-decoders, under the names of upstream's LightConv, and how they are resolved."""

from argparse import SUPPRESS, ArgumentTypeError, Namespace
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, List, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DEFAULT_MIN_PARAMS_TO_WRAP
from omegaconf import OmegaConf

from lightconv_plugin import ops
from lightconv_plugin.expressions import evaluate
from lightconv_plugin.mixers import LAYER_OPTIONS, MIXERS, readers
from lightconv_plugin.models.attention_options import AttentionConvOptions, convolved_queries, self_attention_fields
from lightconv_plugin.models.checks import SIDES, check, check_heads, check_shared, cutoff, kinds
from lightconv_plugin.models.options import choice, flag, option
from lightconv_plugin.models.pruning import keep_layers
from lightconv_plugin.modules.mixers import MixerSpec

ENCODER_KERNELS = [3, 7, 15, 31, 31, 31, 31]
DECODER_KERNELS = [3, 7, 15, 31, 31, 31]
# "swish" is the FFN's activation in the TaLK models; fairseq supports it but does not list it.
ACTIVATIONS = [*utils.get_available_activation_fns(), "swish"]
_CONV_TYPE_HELP = f"token mixer: one of {', '.join(MIXERS)} for all layers, or a comma separated list, one per layer"
_KEEP_HELP = "comma separated list of the layers to keep of a model trained with LayerDrop, from 0 (default: all)"

_LayerOptions = make_dataclass(
    "_LayerOptions",
    [
        (name, List[type(each.usual)] if each.per_layer else type(each.usual), option(default, each.help))  # type: ignore[misc]
        for each in LAYER_OPTIONS
        for name, default in each.defaults.items()
    ],
    bases=(FairseqDataclass,),
    namespace={"__module__": __name__},
)


@dataclass
class ConvTransformerConfig(_LayerOptions, AttentionConvOptions):  # type: ignore[misc, valid-type]  # made above
    """Options of a `ConvTransformerModel`; the defaults are the paper's base model (architecture `dynamicconv`).

    `None` stands for the default in its help text, so that changing one option (say --encoder-embed-dim) also changes
    the defaults that depend on it.
    """

    dropout: float = option(0.1, "dropout probability")
    attention_dropout: float = option(0.0, "dropout probability of attention weights")
    relu_dropout: float = option(
        0.0, "dropout probability after the FFN's activation", argparse_alias="--activation-dropout"
    )
    input_dropout: float = option(0.1, "dropout probability of the input of a convolution block")
    weight_dropout: Optional[float] = option(
        None, "DropConnect: dropout probability of normalised convolution weights (default: --attention-dropout)"
    )
    # fairseq reads the choices from the annotation.
    activation_fn: ChoiceEnum(ACTIVATIONS) = option(  # type: ignore[valid-type]
        "relu", "activation function of the FFN"
    )

    encoder_embed_path: Optional[str] = option(None, "path to pre-trained encoder embedding")
    encoder_embed_dim: int = option(512, "encoder embedding dimension")
    encoder_conv_dim: Optional[int] = option(None, "channels the encoder mixes (default: --encoder-embed-dim)")
    encoder_ffn_embed_dim: int = option(2048, "encoder FFN dimension")
    encoder_layers: int = option(7, "number of encoder layers")
    encoder_attention_heads: int = option(8, "number of encoder heads, of attention and of convolutions")
    encoder_normalize_before: bool = option(False, "apply layernorm before each encoder block")
    encoder_learned_pos: bool = option(False, "learn the encoder's positional embeddings")
    encoder_kernel_size_list: List[int] = option(
        ENCODER_KERNELS, "kernel sizes of the encoder layers; one entry is repeated for all layers"
    )
    encoder_glu: bool = option(True, "gated linear unit before the encoder's convolutions")
    encoder_conv_type: str = option("dynamic", _CONV_TYPE_HELP)
    encoder_layerdrop: float = option(0.0, "LayerDrop probability in the encoder")
    encoder_layers_to_keep: Optional[str] = option(None, _KEEP_HELP)

    decoder_embed_path: Optional[str] = option(None, "path to pre-trained decoder embedding")
    decoder_embed_dim: Optional[int] = option(None, "decoder embedding dimension (default: --encoder-embed-dim)")
    decoder_conv_dim: Optional[int] = option(None, "channels the decoder mixes (default: --decoder-embed-dim)")
    decoder_ffn_embed_dim: Optional[int] = option(None, "decoder FFN dimension (default: --encoder-ffn-embed-dim)")
    decoder_output_dim: Optional[int] = option(None, "decoder output dimension (default: --decoder-embed-dim)")
    decoder_layers: int = option(6, "number of decoder layers")
    decoder_attention_heads: int = option(8, "number of decoder heads, of attention and of convolutions")
    decoder_normalize_before: bool = option(False, "apply layernorm before each decoder block")
    decoder_learned_pos: bool = option(False, "learn the decoder's positional embeddings")
    decoder_kernel_size_list: List[int] = option(
        DECODER_KERNELS, "kernel sizes of the decoder layers; one entry is repeated for all layers"
    )
    decoder_glu: bool = option(True, "gated linear unit before the decoder's convolutions")
    decoder_conv_type: str = option("dynamic", _CONV_TYPE_HELP)
    decoder_layerdrop: float = option(0.0, "LayerDrop probability in the decoder")
    decoder_layers_to_keep: Optional[str] = option(None, _KEEP_HELP)

    weight_softmax: bool = option(True, "normalise the convolution weights by softmax")
    weight_normalization: Optional[ChoiceEnum(ops.NORMALIZATIONS)] = option(  # type: ignore[valid-type]
        None,
        "normalisation of the filters of lightweight and dynamic layers (default: softmax, or none with "
        "--weight-softmax 0). BLEU in the paper's appendix (from a secondary source), dynamic filters, newstest2013: "
        "softmax 26.9, l2 26.8, abs_l2 26.7, sigmoid 26.6, tanh 25.6; with none, l1, square and abs training diverged",
    )
    share_decoder_input_output_embed: bool = option(False, "share decoder input and output embeddings")
    share_all_embeddings: bool = option(
        False, "share encoder, decoder and output embeddings (requires shared dictionary and embed dim)"
    )
    adaptive_softmax_cutoff: Optional[List[int]] = option(
        None, "comma separated list of adaptive softmax cutoff points; use with --criterion adaptive_loss"
    )
    adaptive_softmax_dropout: float = option(
        0.0, "dropout of the adaptive softmax's input, and again of its tail projections"
    )
    adaptive_softmax_factor: float = option(4.0, "factor by which each adaptive softmax cluster's dimension shrinks")
    no_token_positional_embeddings: bool = option(False, "no positional embeddings")
    layernorm_embedding: bool = option(False, "add layernorm to the embedding")
    no_scale_embedding: bool = option(False, "don't scale embeddings by the square root of their dimension")
    no_cross_attention: bool = option(False, "do not attend to the encoder")
    max_source_positions: int = option(1024, "longest source sentence, in tokens")
    max_target_positions: int = option(1024, "longest target sentence, in tokens")
    checkpoint_activations: bool = option(False, "recompute activations in the backward pass instead of keeping them")
    offload_activations: bool = option(False, "as --checkpoint-activations, and keep the layers' inputs on the CPU")
    compile_blocks: bool = option(
        False, "run each layer through torch.compile in training (evaluation and generation are not compiled)"
    )
    min_params_to_wrap: int = option(DEFAULT_MIN_PARAMS_TO_WRAP, "smallest layer that FSDP wraps by itself")
    quant_noise_pq: float = option(0.0, "iterative PQ quantization noise at training time")
    quant_noise_pq_block_size: int = option(8, "block size of quantization noise at training time")
    quant_noise_scalar: float = option(0.0, "scalar quantization noise at training time")


# Upstream takes a value for these (`--encoder-glu 0`); fairseq's parser would make them flags without a value.
VALUED_BOOLEANS = ("encoder_glu", "decoder_glu", "weight_softmax")


def _integers(text: str) -> list[int]:
    """The integers in an option's text: 3,7 or [3]*7 or 3. Upstream evaluates it as Python; here it cannot be code."""
    try:
        value = evaluate(text)
        integers = list(value) if isinstance(value, (list, tuple)) else [value]
    except (SyntaxError, ValueError):
        integers = []
    if not integers or any(type(item) is not int for item in integers):
        raise ArgumentTypeError(f"must be integers, as in 3,7,15 or [31]*3: got {text!r}")
    return integers


def add_arguments(parser, config: ConvTransformerConfig, with_defaults: tuple[str, ...] = ()) -> None:
    """Add `config`'s options; `parser` is an argparse parser or argument group.

    Only the options in `with_defaults` get their defaults. An architecture that is registered on top of a model sets
    what the command line has left unset, and what is unset after it gets the defaults of the model's configuration.
    """
    for f in fields(config):
        is_list = f.type in (List[int], Optional[List[int]])
        if f.name in VALUED_BOOLEANS or is_list:
            parser.add_argument(
                "--" + f.name.replace("_", "-"),
                type=_integers if is_list else utils.eval_bool,
                default=SUPPRESS,
                metavar="LIST" if is_list else "BOOL",
                help=f.metadata["help"],
            )
    # This skips the options that have already been added.
    gen_parser_from_dataclass(parser, config, delete_default=True)
    parser.set_defaults(**{name: getattr(config, name) for name in with_defaults})


class Configured:
    """A fairseq model whose options are a dataclass of this package; before the model's class in its bases."""

    parsed_defaults: tuple[str, ...] = ()  # of these options the parser sets the defaults (add_arguments)

    @classmethod
    def defaults(cls) -> Any:
        """The architecture's options; fairseq's register_model stores their dataclass."""
        return getattr(cls, "__dataclass")()

    @classmethod
    def add_args(cls, parser) -> None:
        """Add the options; called by fairseq's command line."""
        add_arguments(parser, cls.defaults(), cls.parsed_defaults)


def transformer_config(
    config, *, defaults: ConvTransformerConfig | None = None, left_pad_target: bool = False
) -> TransformerConfig:
    """Resolve and check `config`, a ConvTransformerConfig as dataclass, DictConfig or Namespace.

    `defaults`, the architecture's own, are used for options missing in `config`: an old checkpoint has only the options
    that existed when it was written.

    The result is the configuration that fairseq's own Transformer classes read, with `encoder.mixers` and
    `decoder.mixers` added: one MixerSpec per layer. Raises ValueError naming the invalid option.
    """
    c = options_of(config, defaults or ConvTransformerConfig())
    _fill(c)
    for side in SIDES:
        keep_layers(c, side)
    check(c)
    check_shared(c)
    if not c.no_cross_attention:
        check_heads(c, "decoder", "attention over the encoder")
    encoder_mixers = mixers(c, "encoder", causal=False, zero_pads=True)
    decoder_mixers = mixers(c, "decoder", causal=True, zero_pads=left_pad_target)
    resolved = TransformerConfig.from_namespace(c)
    resolved.encoder.mixers, resolved.decoder.mixers = encoder_mixers, decoder_mixers
    resolved.decoder.convolved = convolved_queries(c, left_pad_target)
    resolved.compile_blocks = bool(c.compile_blocks)
    return resolved


def options_of(config, defaults: FairseqDataclass) -> Namespace:
    """The options of the dataclass `defaults`, with the values of `config` where it has them.

    Lists are plain lists: a ListConfig in a model would hold fairseq's whole configuration, which cannot be pickled.
    """
    names = [f.name for f in fields(defaults) if not f.name.startswith("_")]
    given = {name: getattr(config, name, getattr(defaults, name)) for name in names}
    return Namespace(**{name: OmegaConf.to_container(v) if OmegaConf.is_list(v) else v for name, v in given.items()})


def _fill(c: Namespace) -> None:
    """Replace each None with the value it stands for."""

    def default(name: str, value) -> None:
        if getattr(c, name) is None:
            setattr(c, name, value)

    default("encoder_conv_dim", c.encoder_embed_dim)
    default("decoder_embed_dim", c.encoder_embed_dim)
    default("decoder_conv_dim", c.decoder_embed_dim)
    default("decoder_ffn_embed_dim", c.encoder_ffn_embed_dim)
    default("decoder_output_dim", c.decoder_embed_dim)
    c.decoder_input_dim = c.decoder_embed_dim
    fill_shared(c)


def fill_shared(c: Namespace) -> None:
    """Resolve the options that encoder-decoders and language models share."""
    if c.weight_dropout is None:
        c.weight_dropout = c.attention_dropout
    if c.weight_normalization is None:
        c.weight_normalization = "softmax" if c.weight_softmax else "none"
    c.weight_normalization, c.activation_fn = choice(c.weight_normalization), choice(c.activation_fn)
    c.activation_dropout = c.relu_dropout
    c.checkpoint_activations = c.checkpoint_activations or c.offload_activations
    c.adaptive_softmax_cutoff = cutoff(c, "adaptive_softmax_cutoff")


def _per_layer(values: list, layers: int, option: str, layers_option: str) -> list:
    if len(values) == 1:
        return values * layers
    if len(values) != layers:
        raise ValueError(
            f"{option} needs one entry, or one for each of the {layers} layers ({layers_option}): got {len(values)} in "
            f"{','.join(map(str, values))}"
        )
    return values


def _layer_options(c: Namespace, side: str, types: list[str]) -> list[dict[str, Any]]:
    """The options in LAYER_OPTIONS of each layer that its mixer has."""
    layers: list[dict[str, Any]] = [{} for _ in types]
    for ours in LAYER_OPTIONS:
        name = f"{side}_{ours.field}" if ours.per_layer else ours.field
        given = getattr(c, name) if ours.per_layer else [getattr(c, name)]
        values = _per_layer(list(given), len(types), flag(name), f"--{side}-layers")
        for layer, kind, value in zip(layers, types, values, strict=True):
            if kind in readers(ours.field):
                layer[ours.field] = type(ours.usual)(value)
    return layers


def mixers(c: Namespace, side: str, *, causal: bool, zero_pads: bool) -> list[MixerSpec]:
    """The token mixers of one side's layers; `c` must be filled."""
    layers, heads, conv_dim = (getattr(c, f"{side}_{name}") for name in ("layers", "attention_heads", "conv_dim"))
    types = kinds(c, side)
    for name in types:
        if name not in MIXERS:
            raise ValueError(f"--{side}-conv-type: got {name!r}, allowed are {', '.join(MIXERS)}")
    types = _per_layer(types, layers, f"--{side}-conv-type", f"--{side}-layers")
    # Full attention does not use kernel sizes, so defaults for another number of layers do not matter.
    kernels = [1] if set(types) == {"attention"} else [int(k) for k in getattr(c, f"{side}_kernel_size_list")]
    kernels = _per_layer(kernels, layers, f"--{side}-kernel-size-list", f"--{side}-layers")
    if min(kernels) < 1:
        raise ValueError(f"--{side}-kernel-size-list: kernel sizes must be at least 1, got {kernels}")
    embed_dim = getattr(c, f"{side}_embed_dim")
    if "conv" in types and conv_dim != embed_dim:
        raise ValueError(
            f"--{side}-conv-dim must be --{side}-embed-dim = {embed_dim} with --{side}-conv-type conv, which has no "
            f"Linears around it: got {conv_dim}"
        )
    if any(MIXERS[kind].attends for kind in types):
        check_heads(c, side, "self-attention")
    of_attention = self_attention_fields(c, side, types)
    if conv_dim % heads and any(MIXERS[kind].headed for kind in types):
        raise ValueError(
            f"--{side}-attention-heads must divide --{side}-conv-dim (the channels): "
            f"got {heads} heads, {conv_dim} channels"
        )
    return [
        MixerSpec(
            kind=kind,
            kernel_size=kernel_size,
            conv_dim=conv_dim,
            num_heads=heads,
            glu=bool(getattr(c, f"{side}_glu")),
            input_dropout=c.input_dropout,
            weight_dropout=c.weight_dropout,
            normalize=c.weight_normalization,
            attention_dropout=c.attention_dropout,
            causal=causal,
            zero_pads=zero_pads,
            **ours,
            **attention,
        )
        for kind, kernel_size, ours, attention in zip(
            types, kernels, _layer_options(c, side, types), of_attention, strict=True
        )
    ]
