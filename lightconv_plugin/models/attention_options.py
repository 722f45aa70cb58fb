"""The models' options for convolutions in attention: how they are declared, checked, resolved and written back."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from lightconv_plugin.mixers import readers
from lightconv_plugin.models.options import choice, flag, option
from lightconv_plugin.modules.attention import CONV_KINDS, PROJECTIONS, AttentionConv
from lightconv_plugin.modules.config import ModelConfig, StackConfig

_HELP = (
    "comma separated list of the projections (q, k, v) in the {side}'s self-attention that are followed by a short "
    "convolution; {how} (default: none)"
)


@dataclass
class AttentionConvOptions(FairseqDataclass):
    """See modules.AttentionConv."""

    encoder_attention_conv: Optional[str] = option(
        None, _HELP.format(side="encoder", how="centred, with one more tap to the right if the size is even")
    )
    decoder_attention_conv: Optional[str] = option(None, _HELP.format(side="decoder", how="causal"))
    decoder_cross_attention_conv: Optional[str] = option(
        None, "q for a short causal convolution of the queries in the attention over the encoder (default: none)"
    )
    attention_conv_kernel_size: int = option(4, "kernel size of the convolutions in attention")
    # fairseq reads the choices from the annotation.
    attention_conv_type: ChoiceEnum(CONV_KINDS) = option(  # type: ignore[valid-type]
        "depthwise",
        "type of the convolutions in attention: depthwise (one filter per channel, not normalised, initialised to the "
        "identity), or lightweight or dynamic (one softmax-normalised filter per attention head)",
    )


def self_attention_fields(c: Namespace, side: str, types: list[str]) -> list[dict[str, Any]]:
    """The fields of MixerSpec that these options set in the layers of one side, which have these types.

    Raises ValueError naming the invalid option.
    """
    _check(c)
    convolved = _selected(c, f"{side}_attention_conv", PROJECTIONS)
    having = readers("attention_conv")
    if convolved is not None and not set(having) & set(types):
        raise ValueError(
            f"--{side}-attention-conv needs a layer of type {' or '.join(having)}: got --{side}-conv-type "
            + ",".join(types)
        )
    return [{"attention_conv": convolved} if kind in having else {} for kind in types]


def convolved_queries(c: Namespace, left_pad_target: bool) -> AttentionConv | None:
    """The convolution of the queries in the attention over the encoder; None if there is none."""
    convolved = _selected(c, "decoder_cross_attention_conv", ("q",))
    if convolved is not None and c.no_cross_attention:
        raise ValueError("--decoder-cross-attention-conv cannot be used with --no-cross-attention")
    if convolved is not None and left_pad_target:
        raise ValueError("--decoder-cross-attention-conv cannot be used with --left-pad-target")
    return convolved


def _check(c: Namespace) -> None:
    c.attention_conv_type = choice(c.attention_conv_type)
    if c.attention_conv_type not in CONV_KINDS:
        raise ValueError(f"--attention-conv-type: got {c.attention_conv_type!r}, allowed are {', '.join(CONV_KINDS)}")
    if c.attention_conv_kernel_size < 2:
        raise ValueError(f"--attention-conv-kernel-size must be at least 2, got {c.attention_conv_kernel_size}")


def _selected(c: Namespace, name: str, allowed: tuple[str, ...]) -> AttentionConv | None:
    if getattr(c, name) is None:
        return None
    given = [part.strip() for part in str(getattr(c, name)).split(",")]
    if not set(given) <= set(allowed) or len(set(given)) < len(given):
        raise ValueError(
            f"{flag(name)}: got {getattr(c, name)!r}, allowed {'are some of' if allowed[1:] else 'is'} "
            f"{', '.join(allowed)}, each once"
        )
    # The quantisation noise does not find the Linear of a dynamic convolution (checks.py).
    if c.quant_noise_scalar and c.attention_conv_type == "dynamic":
        raise ValueError("--quant-noise-scalar cannot be used with --attention-conv-type dynamic")
    projections = tuple(part for part in allowed if part in given)
    return AttentionConv(projections, c.attention_conv_kernel_size, c.attention_conv_type)


def attention_options(config: ModelConfig) -> dict[str, Any]:
    """The options of an architecture with such convolutions, the inverse of the functions above."""
    sides = {"decoder": config.decoder} | ({"encoder": config.encoder} if config.encoder is not None else {})
    options: dict[str, Any] = {}
    for side, stack in sides.items():
        for name, conv in (("attention_conv", _first(stack)), ("cross_attention_conv", stack.cross_attention_conv)):
            if conv is not None:
                options |= {
                    f"{side}_{name}": ",".join(conv.projections),
                    "attention_conv_kernel_size": conv.kernel_size,
                    "attention_conv_type": conv.kind,
                }
    return options


def _first(stack: StackConfig) -> AttentionConv | None:
    convs = (mixer.attention_conv for mixer in stack.mixers)
    return next((conv for conv in convs if conv is not None), None)
