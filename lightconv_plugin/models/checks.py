"""Checks of the options that encoder-decoders and language models share; every error names the option."""

from argparse import Namespace
from ast import literal_eval
from collections.abc import Iterable

from lightconv_plugin import ops
from lightconv_plugin.mixers import LAYER_OPTIONS, readers
from lightconv_plugin.models.options import flag

SIDES = ("encoder", "decoder")


def kinds(c: Namespace, side: str) -> list[str]:
    """The mixer types of one side: a single entry for all layers, or one per layer."""
    return [name.strip() for name in str(getattr(c, f"{side}_conv_type")).split(",")]


def check(c: Namespace, sides: tuple[str, ...] = SIDES) -> None:
    """Raise ValueError naming the option that is invalid; `c` must be filled."""
    dropouts = ("dropout", "attention_dropout", "relu_dropout", "input_dropout", "weight_dropout")
    for name in (*dropouts, "adaptive_softmax_dropout", *(f"{side}_layerdrop" for side in sides)):
        if not 0 <= getattr(c, name) < 1:
            raise ValueError(f"{flag(name)} must be in [0, 1), got {getattr(c, name)}")
    if c.weight_normalization not in ops.NORMALIZATIONS:
        raise ValueError(
            f"--weight-normalization: got {c.weight_normalization!r}, allowed are {', '.join(ops.NORMALIZATIONS)}"
        )
    if not c.weight_softmax and c.weight_normalization == "softmax":
        raise ValueError("--weight-softmax 0 contradicts --weight-normalization softmax: leave one of them out")
    _check_layer_options(c, sides)
    sizes = [f"{side}_{n}" for side in sides for n in ("embed_dim", "conv_dim", "ffn_embed_dim", "layers")]
    for name in (*sizes, *(f"{side}_attention_heads" for side in sides), "decoder_input_dim", "decoder_output_dim"):
        if getattr(c, name) < 1:
            raise ValueError(f"{flag(name)} must be at least 1, got {getattr(c, name)}")
    if c.adaptive_softmax_cutoff is not None:
        check_bands(c, "softmax", c.decoder_output_dim)
    if c.quant_noise_scalar:
        _check_scalar_noise(c, sides)


def _check_layer_options(c: Namespace, sides: tuple[str, ...]) -> None:
    for option in LAYER_OPTIONS:
        groups = {f"{side}_{option.field}": (side,) for side in sides} if option.per_layer else {option.field: sides}
        for name, of in groups.items():
            values = getattr(c, name) if option.per_layer else [getattr(c, name)]
            for value in values:
                option.check(value, flag(name))
            having = readers(option.field)
            has_one = any(kind in having for side in of for kind in kinds(c, side))
            if any(value != option.usual for value in values) and not has_one:
                types = ", ".join(f"--{side}-conv-type {getattr(c, f'{side}_conv_type')}" for side in of)
                raise ValueError(f"{flag(name)} needs a layer of type {' or '.join(having)}: got {types}")


def _check_scalar_noise(c: Namespace, sides: tuple[str, ...]) -> None:
    # fairseq replaces layers by their exact class, and finds them by removing ".weight" from the parameters' names,
    # wherever it stands: `weight_linear` of a dynamic convolution has no such name left.
    for side in sides:
        if "dynamic" in kinds(c, side):
            raise ValueError(
                f"--quant-noise-scalar is not supported for layers of type dynamic: got --{side}-conv-type "
                f"{getattr(c, f'{side}_conv_type')}; --quant-noise-pq is"
            )
        if getattr(c, f"{side}_learned_pos") and not c.no_token_positional_embeddings:
            raise ValueError(f"--quant-noise-scalar cannot be used with --{side}-learned-pos")


def cutoff(c: Namespace, name: str) -> list[int] | None:
    """The cutoff points in the option of this name, which may be text (20000,60000), a list or a number."""
    given = getattr(c, name)
    if given is None:
        return None
    try:
        read = literal_eval(given) if isinstance(given, str) else given
        values = [int(value) for value in (read if isinstance(read, Iterable) else [read])]
    except (SyntaxError, TypeError, ValueError):
        values = []
    if not values or values[0] < 1 or sorted(set(values)) != values:
        raise ValueError(f"{flag(name)} must be increasing word ranks, as in 20000,60000: got {given}")
    return values


def check_bands(c: Namespace, side: str, dim: int) -> None:
    """Raise ValueError if a band of the adaptive `side`, "input" or "softmax" over `dim` features, has none left."""
    factor, ranks = getattr(c, f"adaptive_{side}_factor"), getattr(c, f"adaptive_{side}_cutoff")
    if factor <= 0 or dim // factor ** len(ranks) < 1:
        raise ValueError(
            f"--adaptive-{side}-factor: {factor:g} leaves no dimension of {dim} for the last band of "
            f"--adaptive-{side}-cutoff {ranks}"
        )


def check_cutoff(c, name: str, size: int) -> None:
    """Raise ValueError if the cutoff points in the option of this name exceed a dictionary of `size` entries."""
    if getattr(c, name)[-1] > size:
        raise ValueError(f"{flag(name)} must not exceed the dictionary's {size} entries, got {getattr(c, name)}")


def check_heads(c: Namespace, side: str, what: str) -> None:
    """Raise ValueError if the heads of one side do not divide its features; `what` has attention over them."""
    heads, dim = getattr(c, f"{side}_attention_heads"), getattr(c, f"{side}_embed_dim")
    if dim % heads:
        raise ValueError(
            f"--{side}-attention-heads must divide --{side}-embed-dim ({what}): got {heads} heads, {dim} features"
        )


def check_shared(c: Namespace) -> None:
    """Raise ValueError if an encoder-decoder's output layer cannot be its table of embeddings."""
    for name in ("share_all_embeddings", "share_decoder_input_output_embed"):
        # An adaptive softmax has its own parameters, whatever is shared.
        if getattr(c, name) and c.adaptive_softmax_cutoff is None and c.decoder_output_dim != c.decoder_embed_dim:
            raise ValueError(
                f"{flag(name)} needs --decoder-output-dim equal to --decoder-embed-dim: "
                f"got {c.decoder_output_dim} and {c.decoder_embed_dim}"
            )
