"""The token mixers by name, and what can be said of each without building one. modules/mixers.py builds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WU = "Wu et al. 2019, Pay Less Attention with Lightweight and Dynamic Convolutions"
LFM2 = "Liquid AI 2025, LFM2 Technical Report"
TALK = "Lioutas & Guo 2020, Time-aware Large Kernel Convolutions"

_CONVOLUTION = ("kernel_size", "conv_dim", "glu", "input_dropout", "weight_dropout")
_ATTENTION = ("num_heads", "attention_dropout", "attention_conv")


@dataclass(frozen=True)
class Mixer:
    """What the layers with one kind of mixer have in common.

    reads: the fields of MixerSpec that they use.
    fixed: their kernels do not depend on the text.
    family: the first word of the architectures whose layers are all of this kind; "" if there are none.
    system: what the papers' tables call such a model; "" if they have none. paper: where it was published; url: there.
    """

    reads: tuple[str, ...]
    fixed: bool = False
    family: str = ""
    system: str = ""
    paper: str = ""
    url: str = ""

    @property
    def attends(self) -> bool:
        """Whether it is attention; otherwise it is a convolution in a ConvBlock."""
        return "attention_dropout" in self.reads

    @property
    def headed(self) -> bool:
        """Whether heads divide the channels of the convolution, not those of the layer."""
        return not self.attends and "num_heads" in self.reads


MIXERS = {
    "lightweight": Mixer(
        (*_CONVOLUTION, "num_heads", "normalize"),
        fixed=True,
        family="lightweightconv",
        system="LightConv",
        paper=WU,
        url="https://arxiv.org/abs/1901.10430",
    ),
    "dynamic": Mixer(
        (*_CONVOLUTION, "num_heads", "normalize", "dynamic_rank", "dynamic_residual"),
        family="dynamicconv",
        system="DynamicConv",
        paper=WU,
        url="https://arxiv.org/abs/1901.10430",
    ),
    "talk": Mixer(
        (*_CONVOLUTION, "num_heads"),
        family="talkconv",
        system="TaLK",
        paper=TALK,
        url="https://arxiv.org/abs/2002.03184",
    ),
    "gated_short": Mixer(
        ("kernel_size", "conv_dim", "input_dropout", "weight_dropout"),
        fixed=True,
        paper=LFM2,
        url="https://arxiv.org/abs/2511.23404",
    ),
    "depthwise": Mixer(_CONVOLUTION, fixed=True),
    "conv": Mixer(_CONVOLUTION, fixed=True),
    "attention": Mixer(_ATTENTION, family="transformer", system="self-attention"),
    "window_attention": Mixer(("kernel_size", *_ATTENTION)),
}
# Upstream's architectures, which the plugin takes over: their default is DynamicConv.
UPSTREAM_FAMILY = {"lightconv": "dynamic"}
FAMILIES = {each.family: name for name, each in MIXERS.items() if each.family} | UPSTREAM_FAMILY
# Those of the first paper.
WU_FAMILIES = {family: kind for family, kind in FAMILIES.items() if MIXERS[kind].paper == WU}


@dataclass(frozen=True)
class LayerOption:
    """An option of some mixers that neither upstream nor the papers have: a field of MixerSpec, and of the models'.

    field: its name in MixerSpec. The models call it FIELD; if it is `per_layer`, they have encoder_FIELD and
        decoder_FIELD, each with an entry for each layer.
    usual: the value that leaves it out.
    help: for the command line.
    least, allowed: the smallest value, and what values may be, for errors.
    """

    field: str
    usual: Any
    help: str
    per_layer: bool = False
    least: int | None = None
    allowed: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        """The models' options and their defaults."""
        if not self.per_layer:
            return {self.field: self.usual}
        return {f"{side}_{self.field}": [self.usual] for side in ("encoder", "decoder")}

    def check(self, value: Any, name: str) -> None:
        """Raise ValueError, which calls the option `name`, if this is no value of it."""
        if self.least is not None and value < self.least:
            raise ValueError(f"{name} must be {self.allowed}, got {value}")


LAYER_OPTIONS = (
    LayerOption(
        "dynamic_rank",
        0,
        "rank at which dynamic layers predict their filters, with two matrices instead of one; 0 for a single matrix; "
        "one entry is repeated for all layers",
        per_layer=True,
        least=0,
        allowed="at least 1, or 0 for one matrix",
    ),
    LayerOption(
        "dynamic_residual",
        False,
        "add a static filter for each head to the predicted one of dynamic layers, before the normalisation",
    ),
)

# The models' options that neither upstream nor the papers have, each with the value that leaves it out.
OUR_OPTIONS = {
    **{name: value for option in LAYER_OPTIONS for name, value in option.defaults.items()},
    "encoder_attention_conv": None,
    "decoder_attention_conv": None,
    "decoder_cross_attention_conv": None,
}
# Further ones that have no effect while all of those are left out.
OUR_DETAILS = ("attention_conv_kernel_size", "attention_conv_type")


def mixer(kind: str) -> Mixer:
    """The mixer of this name; ValueError if there is none."""
    if kind not in MIXERS:
        raise ValueError(f"kind must be one of {', '.join(MIXERS)}, got {kind!r}")
    return MIXERS[kind]


def readers(field: str) -> list[str]:
    """The mixers that use this field of MixerSpec."""
    return [kind for kind, known in MIXERS.items() if field in known.reads]


def system_of(names: Iterable[str]) -> str | None:
    """The papers' name for a model whose layers have these mixers; None for mixtures and other mixers."""
    kinds = set(names)
    return MIXERS[kinds.pop()].system or None if len(kinds) == 1 and kinds <= MIXERS.keys() else None


def mixer_of(architecture: str) -> str | None:
    """The mixer of an architecture's layers, judging by its name; None for other architectures."""
    return FAMILIES.get(architecture.split("_")[0])
