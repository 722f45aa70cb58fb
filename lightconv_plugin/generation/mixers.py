"""The mixers of a decoder, one token per step: what each stores, and how it reads that through the table of ancestors.

A mixer here is built from the module of the same name in modules/ and has this interface:

    memory = mixer.memory(beams, like)  a Memory for one search, with the dtype and device of `like`
    y = mixer(x, memory, beams)         x (N,d), one row per hypothesis, after beams.begin() → (N,d), a new tensor

It writes the step's inputs at the rows' current places and never moves them; `Beams` knows which rows a hypothesis
descends from.

The call reads no tensor's values on the host, and depends on the time only through `beams.now` and `beams.steps` (Beams
says why).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin import ops
from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation.beams import Beams, move
from lightconv_plugin.generation.sublayers import PackedLinear, pack
from lightconv_plugin.modules.attention import PROJECTIONS, dot_product_attention
from lightconv_plugin.modules.attention import EncoderAttention as PlainEncoderAttention
from lightconv_plugin.modules.attention import SelfAttention as PlainSelfAttention
from lightconv_plugin.modules.block import ConvBlock, gated, split_parts
from lightconv_plugin.modules.convolutions import DynamicConv, StaticConv, is_static
from lightconv_plugin.modules.full_convolution import FullConv
from lightconv_plugin.modules.talk import TaLKConv
from lightconv_plugin.ops.normalize import normalize


class Memory(ABC):
    """What a layer stores in one search."""

    @abstractmethod
    def parts(self) -> list[tuple[Tensor, int]]:
        """Its tensors, each with the dimension of the sentences."""

    def keep(self, sources: Tensor, targets: Tensor) -> None:
        """Move sentences, see Beams.keep."""
        for tensor, dim in self.parts():
            move(tensor, dim, sources, targets)

    def copy_(self, other: Memory) -> None:
        """Copy the content of `other`, of the same sizes."""
        for (mine, _), (theirs, _) in zip(self.parts(), other.parts(), strict=True):
            mine.copy_(theirs)


class Ring(Memory):
    """The last `slots` inputs of each row, (slots, capacity, width, channels); step t's input is in slot t mod slots.

    In the model's type, so that nothing is converted.
    """

    def __init__(self, beams: Beams, slots: int, channels: int, like: Tensor):
        # Rows not yet written read as zero.
        self.rows = like.new_zeros(slots, beams.capacity, beams.width, channels)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        beams: Beams,
        bias: Tensor | None = None,
        *,
        softmax: bool = False,
    ) -> Tensor:
        """x (N,C) is the current step's input, which is stored; weight (N,H,K) or (H,K) → (N,C), see ops.ring_step."""
        return ops.ring_step(x, self.rows, weight, beams.ancestors, beams.now, bias=bias, softmax=softmax)

    def gather(self, x: Tensor, taps: int, beams: Beams) -> Tensor:
        """x (N,C) is the current step's input, which is stored → (N, taps, C), the last inputs, this one first."""
        rows = self.rows[:, : beams.live, : beams.active]
        rows.index_copy_(0, beams.slot(self.rows.shape[0]), x.view(1, *rows.shape[1:]))
        addresses = beams.addresses(taps, self.rows.shape[0])
        return self.rows.view(-1, self.rows.shape[-1]).index_select(0, addresses.view(-1)).view(beams.rows, taps, -1)

    def parts(self) -> list[tuple[Tensor, int]]:
        return [(self.rows, 1)]


class _Static:
    """Lightweight and depthwise convolutions: one filter for the channels of a head."""

    def __init__(self, conv: StaticConv, dtype: str):
        self.slots, self.channels = conv.kernel_size, conv.channels
        self.bias = None if conv.conv_bias is None else conv.conv_bias.detach()
        # (H, K), the current token's tap first. Neighbouring channels' taps lie side by side.
        self.filters = conv.filters().flip(1).t().contiguous().t()

    def __call__(self, x: Tensor, memory: Ring, beams: Beams) -> Tensor:
        return memory.convolve(x, self.filters, beams, self.bias)


class _Dynamic:
    """A dynamic convolution: each step predicts its filters."""

    def __init__(self, conv: DynamicConv, dtype: str):
        if conv.renorm_padding or conv.query_size != conv.channels:
            raise UnsupportedModelError("a dynamic convolution with renorm_padding or another query")
        self.slots, self.channels, self.heads = conv.kernel_size, conv.channels, conv.num_heads
        self.bias = None if conv.conv_bias is None else conv.conv_bias.detach()
        self.normalize = conv.normalize

        def current_first(parameter: Tensor) -> Tensor:
            return parameter.detach().unflatten(0, (self.heads, self.slots)).flip(1).flatten(0, 1)

        self.reduce = None if conv.rank_linear is None else pack(conv.rank_linear, dtype=dtype)
        linear = conv.weight_linear
        bias = None if linear.bias is None else current_first(linear.bias)
        self.predict = PackedLinear(current_first(linear.weight), bias, dtype)

    def __call__(self, x: Tensor, memory: Ring, beams: Beams) -> Tensor:
        weight = self.predict(x if self.reduce is None else self.reduce(x)).view(-1, self.heads, self.slots)
        if self.normalize == "softmax":
            return memory.convolve(x, weight, beams, self.bias, softmax=True)
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32)).movedim(-1, 0)
        return memory.convolve(x, normalize(wide, self.normalize).movedim(0, -1), beams, self.bias)


class _TaLK:
    """A window's weights are 1 for the rows inside it and a fraction for the last, as in ops.talkconv."""

    def __init__(self, conv: TaLKConv, dtype: str):
        if conv.max_right:
            raise UnsupportedModelError("a TaLK convolution in the decoder that looks ahead")
        self.slots = conv.max_left + 1
        self.channels = conv.channels
        # There are few offsets, and they decide how far the windows reach: full precision costs nothing.
        self.offsets = pack(conv.offsets, dtype="float32")
        wide = torch.promote_types(conv.offsets.weight.dtype, torch.float32)
        self.nearer = 1 - torch.arange(self.slots, dtype=wide, device=conv.offsets.weight.device)

    def __call__(self, x: Tensor, memory: Ring, beams: Beams) -> Tensor:
        reach = torch.sigmoid(self.offsets(x.to(self.nearer.dtype))).unsqueeze(-1)
        parts = torch.add(self.nearer, reach, alpha=self.slots - 1).clamp_(0, 1)
        return memory.convolve(x, parts.div_(self.slots), beams)


class _Full:
    """A full convolution: one product over all taps and channels."""

    def __init__(self, conv: FullConv, dtype: str):
        self.slots = conv.kernel_size
        self.channels = conv.channels
        self.glu = conv.glu
        weight = conv.weight.detach().flip(2).transpose(1, 2)  # (O, K, C), the current token's tap first
        self.product = PackedLinear(weight.flatten(1), conv.bias, dtype)

    def __call__(self, x: Tensor, memory: Ring, beams: Beams) -> Tensor:
        y = self.product(memory.gather(x, self.slots, beams).flatten(1))
        return F.glu(y, dim=1) if self.glu else y


_CONVOLUTIONS = {DynamicConv: _Dynamic, TaLKConv: _TaLK, FullConv: _Full}


def _step_of(conv: Any, dtype: str) -> Any:
    """A convolution's step; UnsupportedModelError if there is none."""
    if is_static(conv):
        return _Static(conv, dtype)
    if type(conv) not in _CONVOLUTIONS:
        raise UnsupportedModelError(f"a convolution of type {type(conv).__name__}")
    return _CONVOLUTIONS[type(conv)](conv, dtype)


class ConvMixer:
    """A ConvBlock: Linear, gates, convolution, Linear."""

    def __init__(self, block: ConvBlock, dtype: str):
        conv = block.conv
        self.conv = _step_of(conv, dtype)
        if getattr(conv, "padding_l", 0) != getattr(conv, "kernel_size", 1) - 1 and not isinstance(conv, TaLKConv):
            raise UnsupportedModelError("a convolution in the decoder that looks ahead")
        self.parts = block.parts
        project = isinstance(block.linear1, nn.Linear)
        self.linear1 = pack(block.linear1, dtype=dtype) if project else None
        self.linear2 = pack(block.linear2, dtype=dtype) if project else None

    def memory(self, beams: Beams, like: Tensor) -> Ring:
        return Ring(beams, self.conv.slots, self.conv.channels, like)

    def __call__(self, x: Tensor, memory: Ring, beams: Beams) -> Tensor:
        if self.linear1 is not None:
            x = self.linear1(x)
        x, gate = split_parts(x, self.parts)
        x = gated(self.conv(x, memory, beams), gate)
        return x if self.linear2 is None else self.linear2(x)


class _Projections:
    """The short convolutions that follow attention's projections, each with its own Ring."""

    def __init__(self, attention: PlainSelfAttention | PlainEncoderAttention, dtype: str):
        self.convs = {name: _step_of(conv, dtype) for name, conv in attention.convolutions().items()}

    def rings(self, beams: Beams, like: Tensor) -> dict[str, Ring]:
        return {name: Ring(beams, conv.slots, conv.channels, like) for name, conv in self.convs.items()}

    def __call__(self, name: str, x: Tensor, rings: dict[str, Ring], beams: Beams) -> Tensor:
        """x (live, active, d), the projection "q", "k" or "v" of the current step → the input of attention."""
        if name not in self.convs:
            return x
        rows = x.reshape(beams.rows, -1)
        return self.convs[name](rows, rings[name], beams).view(x.shape)


def _parts(rings: dict[str, Ring]) -> list[tuple[Tensor, int]]:
    return [part for ring in rings.values() for part in ring.parts()]


class Cache(Memory):
    """Keys and values of all hypotheses, (capacity, heads, slots, width, head_dim), step t's in slot t mod slots.

    slots: the size of a window, or None for as many slots as there are steps; these grow with the room of `beams`.
    rings: the Rings of the projections' convolutions.
    """

    def __init__(
        self, beams: Beams, slots: int | None, heads: int, head_dim: int, like: Tensor, rings: dict[str, Ring]
    ):
        self.rings = rings
        # Zeros, because cells that no hypothesis has written are multiplied by 0 and must not be NaN.
        shape = (beams.capacity, heads, slots or beams.room, beams.width, head_dim)
        self.grows = slots is None
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def append(self, keys: Tensor, values: Tensor, beams: Beams) -> None:
        """keys, values (live, heads, active, head_dim) are the current step's."""
        if self.grows and self.keys.shape[2] < beams.room:
            self.keys = torch.cat([self.keys, torch.zeros_like(self.keys)], dim=2)
            self.values = torch.cat([self.values, torch.zeros_like(self.values)], dim=2)
        slot = beams.slot(self.keys.shape[2])
        for kept, new in ((self.keys, keys), (self.values, values)):
            kept[: beams.live, :, :, : beams.active].index_copy_(2, slot, new.unsqueeze(2))

    def read(self, beams: Beams) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values, each (live, heads, slots · width, head_dim), and the mask of Beams; no copy."""
        slots = self.keys.shape[2]
        taken = min(slots, beams.steps)
        keys, values = (kept[: beams.live, :, :taken].flatten(2, 3) for kept in (self.keys, self.values))
        return keys, values, beams.mask(taken, slots, keys.dtype)

    def parts(self) -> list[tuple[Tensor, int]]:
        return [(self.keys, 0), (self.values, 0), *_parts(self.rings)]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of a sentence's queries: query (S,Q,H·D), keys and values (S,H,T,D) → (S,Q,H·D).

    mask: (S,1,1 or Q,T), 0 or −∞, added to the scores; no query may be left without a key.
    """
    heads = query.unflatten(2, (keys.shape[1], keys.shape[3])).transpose(1, 2)
    if mask is not None:
        mask = mask.expand(-1, -1, query.shape[1], -1)
    return dot_product_attention(heads, keys, values, mask).transpose(1, 2).flatten(2)


class SelfAttention:
    """Self-attention over all previous tokens, or in a window.

    The hypotheses of a sentence share their past, so a sentence's queries are multiplied with all its keys at once, and
    a mask restricts each query to its ancestors. Nothing is copied when hypotheses are reordered. The wasted products
    are few compared with those of the linear layers.
    """

    def __init__(self, attention: PlainSelfAttention, dtype: str):
        if attention.right != 0:
            raise UnsupportedModelError("attention in the decoder that looks ahead")
        self.heads, self.head_dim = attention.num_heads, attention.head_dim
        self.window = None if attention.left is None else attention.left + 1
        self.project = pack(attention.q_proj, attention.k_proj, attention.v_proj, dtype=dtype)
        self.convolve = _Projections(attention, dtype)
        self.out_proj = pack(attention.out_proj, dtype=dtype)

    def memory(self, beams: Beams, like: Tensor) -> Cache:
        return Cache(beams, self.window, self.heads, self.head_dim, like, self.convolve.rings(beams, like))

    def __call__(self, x: Tensor, memory: Cache, beams: Beams) -> Tensor:
        projected = zip(PROJECTIONS, self.project(x).view(beams.live, beams.active, 3, -1).unbind(2), strict=True)
        query, *new = (self.convolve(name, part, memory.rings, beams) for name, part in projected)
        keys, values = (part.unflatten(2, (self.heads, self.head_dim)).transpose(1, 2) for part in new)
        memory.append(keys, values, beams)
        return self.out_proj(_attend(query, *memory.read(beams)).flatten(0, 1))


class Source(Memory):
    """Keys and values of the encoder's output, each (capacity, heads, source, head_dim), and its pads.

    mask: (capacity, 1, 1, source), −∞ at pads; None if there are no pads.
    rings: the Ring of the queries' convolution, if there is one.
    """

    def __init__(self, keys: Tensor, values: Tensor, mask: Tensor | None, rings: dict[str, Ring]):
        self.keys, self.values, self.mask, self.rings = keys, values, mask, rings

    def parts(self) -> list[tuple[Tensor, int]]:
        return [(self.keys, 0), (self.values, 0), *_parts(self.rings)]


class EncoderAttention:
    """Attention over the encoder's output: the hypotheses of a sentence are the queries of one product."""

    def __init__(self, attention: PlainEncoderAttention, dtype: str):
        self.heads, self.head_dim = attention.num_heads, attention.head_dim
        self.query = pack(attention.q_proj, dtype=dtype)
        self.convolve = _Projections(attention, dtype)
        self.keys_values = pack(attention.k_proj, attention.v_proj, dtype=dtype)
        self.out_proj = pack(attention.out_proj, dtype=dtype)

    def memory(self, encoded: Tensor, mask: Tensor | None, beams: Beams) -> Source:
        """encoded (T,S,d) → keys and values of its S sentences."""
        steps, sentences, _ = encoded.shape
        projected = self.keys_values(encoded.flatten(0, 1)).view(steps, sentences, 2, self.heads, self.head_dim)
        keys, values = projected.permute(2, 1, 3, 0, 4).contiguous().unbind()
        return Source(keys, values, mask, self.convolve.rings(beams, encoded))

    def __call__(self, x: Tensor, memory: Source, beams: Beams) -> Tensor:
        live = beams.live
        query = self.convolve("q", self.query(x).view(live, beams.active, -1), memory.rings, beams)
        mask = None if memory.mask is None else memory.mask[:live]
        return self.out_proj(_attend(query, memory.keys[:live], memory.values[:live], mask).flatten(0, 1))


def build_mixer(module: nn.Module, dtype: str) -> ConvMixer | SelfAttention:
    """The step mixer for a decoder layer's `self_attn`; UnsupportedModelError if there is none."""
    if isinstance(module, ConvBlock):
        return ConvMixer(module, dtype)
    if isinstance(module, PlainSelfAttention):
        return SelfAttention(module, dtype)
    raise UnsupportedModelError(f"a decoder layer with {type(module).__name__}")
