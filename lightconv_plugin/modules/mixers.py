"""Token mixers by name, and the options of one layer's mixer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from lightconv_plugin.mixers import LAYER_OPTIONS, mixer
from lightconv_plugin.modules.attention import AttentionConv, SelfAttention
from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.convolutions import DepthwiseConv, DynamicConv, LightweightConv
from lightconv_plugin.modules.full_convolution import FullConv
from lightconv_plugin.modules.talk import TaLKConv
from lightconv_plugin.ops import NORMALIZATIONS


@dataclass(frozen=True)
class MixerSpec:
    """One layer's token mixer.

    kind: a name of MIXERS.
    kernel_size: K of a convolution; the window of "window_attention"; for "talk" the longest reach L (and R).
    conv_dim, glu, input_dropout: see ConvBlock; attention does not use them, and "gated_short" not the GLU.
    num_heads: heads that share a filter or an offset ("lightweight", "dynamic", "talk"), or of attention.
    weight_dropout: DropConnect of the filter; for "talk" the dropout of the offsets.
    normalize: how the filters of "lightweight" and "dynamic" are normalised, one of ops.NORMALIZATIONS.
    attention_dropout: dropout of the attention weights of "attention" and "window_attention".
    causal: for a decoder: the last tap is the current token. Otherwise centred; an even kernel reaches one token
        further to the right than to the left.
    zero_pads: see ConvBlock.
    dynamic_rank: the rank at which "dynamic" predicts its filters, 0 for one matrix.
    dynamic_residual: "dynamic" adds a static filter to the predicted one, before the normalisation.
    attention_conv: the convolutions of queries, keys and values of "attention" and "window_attention".
    """

    kind: str
    kernel_size: int
    conv_dim: int
    num_heads: int
    glu: bool
    input_dropout: float
    weight_dropout: float
    normalize: str
    attention_dropout: float
    causal: bool = False
    zero_pads: bool = True
    dynamic_rank: int = 0
    dynamic_residual: bool = False
    attention_conv: AttentionConv | None = None

    def __post_init__(self) -> None:
        known = mixer(self.kind)
        if self.normalize not in NORMALIZATIONS:
            raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {self.normalize!r}")
        for name in ("kernel_size", "conv_dim", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for option in LAYER_OPTIONS:
            option.check(getattr(self, option.field), option.field)
        if self.attention_conv is not None and not self.attends:
            raise ValueError(f"attention_conv must be null for a layer of {self.kind}")
        for name in ("input_dropout", "weight_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if known.headed and self.conv_dim % self.num_heads:
            raise ValueError(f"num_heads must divide conv_dim = {self.conv_dim}, got {self.num_heads}")

    @property
    def attends(self) -> bool:
        """Whether it is attention; otherwise it is a convolution in a ConvBlock."""
        return mixer(self.kind).attends

    @property
    def is_plain_attention(self) -> bool:
        """Whether it is the Transformer's self-attention: of the whole sequence, and without convolutions."""
        return self.kind == "attention" and self.attention_conv is None

    @property
    def padding_l(self) -> int:
        return self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2

    def step_state(self, embed_dim: int) -> dict[str, tuple[int | str, ...]]:
        """What a decoder's layer keeps between steps: the shape of each tensor by its name, {} for nothing.

        "batch", and "seen" for the number of tokens read, depend on the call. Names that end in "inputs" are those of
        convolutions; the modules have their tensors with the batch second.
        """
        if not self.attends:
            rows = self.kernel_size if self.kind == "talk" else self.kernel_size - 1
            return {"inputs": ("batch", rows, self.conv_dim)} if rows else {}
        seen: int | str = "seen" if self.kind == "attention" else self.kernel_size - 1
        conv = self.attention_conv
        if not seen and conv is None:
            return {}
        keys = ("batch", self.num_heads, seen, embed_dim // self.num_heads)
        state: dict[str, tuple[int | str, ...]] = {"keys": keys, "values": keys, "pads": ("batch", seen)}
        if conv is not None:
            inputs = ("batch", conv.kernel_size - 1, embed_dim)
            state |= {f"{part}_inputs": inputs for part in conv.projections}
        return state


def _with_heads(kind: type[nn.Module], spec: MixerSpec, **more) -> nn.Module:
    sizes = spec.conv_dim, spec.kernel_size, spec.padding_l, spec.num_heads
    return kind(*sizes, weight_dropout=spec.weight_dropout, normalize=spec.normalize, **more)


def _dynamic(spec: MixerSpec) -> nn.Module:
    return _with_heads(DynamicConv, spec, rank=spec.dynamic_rank, bias=spec.dynamic_residual)


def _talk(spec: MixerSpec) -> nn.Module:
    reach = spec.kernel_size
    return TaLKConv(
        spec.conv_dim, reach, 0 if spec.causal else reach, spec.num_heads, weight_dropout=spec.weight_dropout
    )


def _depthwise(spec: MixerSpec) -> nn.Module:
    return DepthwiseConv(spec.conv_dim, spec.kernel_size, spec.padding_l, weight_dropout=spec.weight_dropout)


def _conv(spec: MixerSpec) -> nn.Module:
    return FullConv(spec.conv_dim, spec.kernel_size, spec.padding_l, glu=spec.glu, weight_dropout=spec.weight_dropout)


_CONVOLUTIONS: dict[str, Callable[[MixerSpec], nn.Module]] = {
    "lightweight": partial(_with_heads, LightweightConv),
    "dynamic": _dynamic,
    "gated_short": _depthwise,
    "talk": _talk,
    "depthwise": _depthwise,
    "conv": _conv,
}


def build_mixer(
    spec: MixerSpec,
    embed_dim: int,
    *,
    block: type[ConvBlock] = ConvBlock,
    attention: type[SelfAttention] = SelfAttention,
) -> nn.Module:
    """The token mixer of a layer over `embed_dim` channels.

    `block` and `attention` are the classes to make: those of this package, or fairseq's side's that answer its calls.
    """
    if spec.attends:
        windowed = spec.kind == "window_attention"
        return attention(
            embed_dim,
            spec.num_heads,
            left=spec.padding_l if windowed else None,
            right=spec.kernel_size - 1 - spec.padding_l if windowed else 0 if spec.causal else None,
            dropout=spec.attention_dropout,
            convolved=spec.attention_conv,
            causal=spec.causal,
        )
    return block(
        embed_dim,
        _CONVOLUTIONS[spec.kind](spec),
        glu=spec.glu,
        gates_output=spec.kind == "gated_short",
        project=spec.kind != "conv",
        input_dropout=spec.input_dropout,
        zero_pads=spec.zero_pads,
    )
