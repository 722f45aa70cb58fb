"""Multi-head attention (Vaswani et al. 2017): self-attention, full or in a window, and attention over the encoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightconv_plugin.modules.convolutions import DepthwiseConv, DynamicConv, LightweightConv
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.ops.backends import on_gpu

PROJECTIONS = ("q", "k", "v")
CONV_KINDS = ("depthwise", "lightweight", "dynamic")

State = tuple[Tensor, ...]

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class AttentionConv:
    """Which projections of an attention layer have a short convolution along the sequence, and of which kind.

    So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling": a depthwise convolution of a
    few taps after each of self-attention's three projections, before the heads attend.

    projections: some of PROJECTIONS, in this order.
    kernel_size: K ≥ 2.
    kind: "depthwise": one filter per channel, not normalised. It is initialised to the current token's tap alone, so a
        new model computes the same as without it. "lightweight" and "dynamic": one filter per attention head,
        normalised by softmax.
    """

    projections: tuple[str, ...]
    kernel_size: int = 4
    kind: str = "depthwise"

    def __post_init__(self) -> None:
        if not self.projections or [name for name in PROJECTIONS if name in self.projections] != [*self.projections]:
            given = ",".join(map(str, self.projections))
            raise ValueError(f"projections must be some of {','.join(PROJECTIONS)}, in this order: got {given!r}")
        if self.kind not in CONV_KINDS:
            raise ValueError(f"kind must be one of {', '.join(CONV_KINDS)}, got {self.kind!r}")
        if self.kernel_size < 2:
            raise ValueError(f"kernel_size must be at least 2, got {self.kernel_size}")

    def build(self, embed_dim: int, num_heads: int, *, causal: bool) -> dict[str, nn.Module]:
        """A convolution over d channels for each of the projections, by the projection's name.

        causal: the last tap is the current token. Otherwise centred; an even kernel has one more tap after it than
            before it.
        """
        padding_l = self.kernel_size - 1 if causal else (self.kernel_size - 1) // 2
        return {name: self._build(embed_dim, num_heads, padding_l) for name in self.projections}

    def _build(self, embed_dim: int, num_heads: int, padding_l: int) -> nn.Module:
        if self.kind == "lightweight":
            return LightweightConv(embed_dim, self.kernel_size, padding_l, num_heads)
        if self.kind == "dynamic":
            return DynamicConv(embed_dim, self.kernel_size, padding_l, num_heads)
        conv = DepthwiseConv(embed_dim, self.kernel_size, padding_l)
        with torch.no_grad():
            conv.weight.zero_()
            conv.weight[:, :, padding_l] = 1
        return conv


class _Attention(nn.Module):
    """The four projections, under fairseq's names, the convolutions of the first three, and the heads."""

    # Each a convolution (convolutions.py), or None.
    q_conv: Any
    k_conv: Any
    v_conv: Any

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        source_dim: int,
        dropout: float,
        convolved: AttentionConv | None,
        *,
        causal: bool,
    ):
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim: got {num_heads=} for {embed_dim=}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout_module = Dropout(dropout, module_name=type(self).__name__)
        self.k_proj = Linear(source_dim, embed_dim)
        self.v_proj = Linear(source_dim, embed_dim)
        self.q_proj = Linear(embed_dim, embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)
        if source_dim == embed_dim:
            # As fairseq initialises them: as if they were one matrix, from d to 3d.
            for projection in (self.k_proj, self.v_proj, self.q_proj):
                nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
        self.convolved = convolved
        convs = {} if convolved is None else convolved.build(embed_dim, num_heads, causal=causal)
        for name in PROJECTIONS:
            setattr(self, f"{name}_conv", convs.get(name))

    def convolutions(self) -> dict[str, Any]:
        """The existing convolutions, by the names of their projections."""
        convs = {name: getattr(self, f"{name}_conv") for name in PROJECTIONS}
        return {name: conv for name, conv in convs.items() if conv is not None}

    def _project(self, name: str, x: Tensor, pads: Tensor | None) -> Tensor:
        """The projection "q", "k" or "v" of a whole sequence, with its convolution: x (T,B,d), pads (B,T)."""
        x, conv = getattr(self, f"{name}_proj")(x), getattr(self, f"{name}_conv")
        return x if conv is None else conv(_without(x, pads))

    def _project_next(self, name: str, x: Tensor, pads: Tensor | None, states: dict[str, Tensor]) -> Tensor:
        """The same for the next n tokens; `states` holds the convolutions' states by name and is updated."""
        x, conv = getattr(self, f"{name}_proj")(x), getattr(self, f"{name}_conv")
        if conv is not None:
            x, states[name] = conv.step(_without(x, pads), states.get(name))
        return x

    def _heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.num_heads)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
        """queries (n,B,d), keys and values (B,H,S,d/H), seen (B or 1, 1, n or 1, S) bool → (n,B,d)."""
        return self.out_proj(attend(self._heads(queries), keys, values, seen, self.dropout_module.rate))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(T,B,d) → (B,H,T,d/H), a view."""
    return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Attention in the fastest way that torch has (Vaswani et al. 2017, equation 1), the heads side by side.

    Args:
        queries, keys, values: (B,H,n,d/H), and (B,H,S,d/H) each.
        mask: (B or 1, 1, n or 1, S), true where a query sees a key, or numbers to add to the products; None for all.
        dropout: of the attention weights.

    Returns:
        (n,B,d).
    """
    return dot_product_attention(queries, keys, values, mask, dropout).permute(2, 0, 1, 3).flatten(2)


def dot_product_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """torch's scaled_dot_product_attention, by any of its kernels but cuDNN's.

    torch 2.11 to 2.13 prefer cuDNN's on some GPUs, an H100 among them, where results or gradients have been found to be
    wrong without an error: https://github.com/pytorch/pytorch/issues/196678, 193893, 150700.

    A kernel that is turned off in torch.backends.cuda stays off, except in a function that torch.compile compiles.
    """
    if on_gpu(queries) and (torch.compiler.is_compiling() or cudnn_is_chosen()):  # torch.compile cannot trace a query
        with sdpa_kernel(_KERNELS if torch.compiler.is_compiling() else _enabled_kernels()):
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)


def _enabled_kernels() -> list[SDPBackend]:
    cuda = torch.backends.cuda
    enabled = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    return [kernel for kernel, on in zip(_KERNELS, enabled, strict=True) if on] or [SDPBackend.MATH]


def cudnn_is_chosen() -> bool:
    """Whether torch may take cuDNN's attention. Not in a process with fairseq, where compat/layers.py turns it off."""
    return getattr(torch.backends.cuda, "cudnn_sdp_enabled", bool)()


def _without(x: Tensor, pads: Tensor | None) -> Tensor:
    """x (T,B,d) with zeros at pads (B,T), so that a convolution reads them as outside the sentence."""
    return x if pads is None else x.masked_fill(pads.transpose(0, 1).unsqueeze(-1), 0)


class SelfAttention(_Attention):
    """Multi-head self-attention in which a token sees `left` tokens before it, itself and `right` tokens after it.

    A pad sees itself too, so that no row of the softmax is empty. Its output is never read, but a NaN would spread.

    Args:
        embed_dim, num_heads: d, and H, which must divide d.
        left, right: how many tokens are seen on either side, None for all; right = 0 is causal.
        dropout: dropout of the attention weights.
        convolved: the convolutions of queries, keys and values. A window limits the keys; with convolutions, each key
            depends on K − 1 more tokens.
        causal: the convolutions are causal, otherwise centred; default: as right = 0. An encoder's window of one token
            has right = 0, too.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        left: int | None,
        right: int | None,
        dropout: float = 0.0,
        convolved: AttentionConv | None = None,
        causal: bool | None = None,
    ):
        causal = right == 0 if causal is None else causal
        super().__init__(embed_dim, num_heads, embed_dim, dropout, convolved, causal=causal)
        self.left = left
        self.right = right

    def forward(self, x: Tensor, pads: Tensor | None = None) -> Tensor:
        """The whole sequence at once: x (T,B,d), pads (B,T) bool and true at pads, on either side → (T,B,d)."""
        queries, keys, values = (self._project(name, x, pads) for name in PROJECTIONS)
        seen = None
        if pads is not None or (self.left, self.right) != (None, None):
            if pads is None:
                pads = torch.zeros(1, x.shape[0], dtype=torch.bool, device=x.device)
            seen = self._seen(x.shape[0], pads)
        return self._attend(queries, self._heads(keys), self._heads(values), seen)

    def step(self, x: Tensor, state: State | None, pads: Tensor | None = None) -> tuple[Tensor, State]:
        """The next n ≥ 1 tokens of a causal sequence, x (n,B,d) and pads (B,n) → ((n,B,d), state).

        state: None before the first token, then what the previous call returned: keys and values (B,H,S,d/H) and pads
            (B,S) of the last S = min(seen, left) tokens, and the states of `convolutions()`, in their order.
        """
        if self.right != 0:
            raise ValueError(f"step needs causal attention, right = 0: got right={self.right}")
        convs = {} if state is None else dict(zip(self.convolutions(), state[3:], strict=True))
        queries, keys, values = (self._project_next(name, x, pads, convs) for name in PROJECTIONS)
        keys, values = self._heads(keys), self._heads(values)
        if pads is None:
            pads = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool, device=x.device)
        if state is not None:
            keys, values = torch.cat([state[0], keys], dim=2), torch.cat([state[1], values], dim=2)
            pads = torch.cat([state[2], pads], dim=1)
        else:
            pads = pads.clone()  # the caller may change its own
        out = self._attend(queries, keys, values, self._seen(x.shape[0], pads))
        if self.left is not None:
            kept = slice(max(0, keys.shape[2] - self.left), None)
            keys, values, pads = keys[:, :, kept], values[:, :, kept], pads[:, kept]
        return out, (keys, values, pads, *convs.values())

    @staticmethod
    def reorder(state: State | None, order: Tensor) -> State | None:
        """For beam search: a state whose batch row n is row order[n] of the given state; order (B',) int64."""
        if state is None:
            return None
        return tuple(part.index_select(0 if i < 3 else 1, order) for i, part in enumerate(state))

    def _seen(self, new: int, pads: Tensor) -> Tensor:
        """(B,1,n or 1,S): which of the S keys each of the last n tokens sees; pads (B,S)."""
        if (self.left, self.right) == (None, None):  # no softmax may be over nothing
            return (~pads | pads.all(dim=1, keepdim=True))[:, None, None]
        keys = torch.arange(pads.shape[1], device=pads.device)
        distance = keys - keys[pads.shape[1] - new :].unsqueeze(1)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (distance >= -self.left)
        if self.right is not None:
            seen = seen & (distance <= self.right)
        return (seen & (~pads.unsqueeze(1) | (distance == 0))).unsqueeze(1)

    def extra_repr(self) -> str:
        return f"left={self.left}, right={self.right}"


class EncoderAttention(_Attention):
    """Multi-head attention of a decoder over the encoder's output.

    Args:
        embed_dim, num_heads, dropout: see SelfAttention.
        encoder_dim: channels of the encoder's output.
        convolved: a causal convolution of the queries; keys and values come from a sequence that is already mixed.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        encoder_dim: int,
        dropout: float = 0.0,
        convolved: AttentionConv | None = None,
    ):
        if convolved is not None and convolved.projections != ("q",):
            raise ValueError(f"convolved must be of the queries alone, got {','.join(convolved.projections)}")
        super().__init__(embed_dim, num_heads, encoder_dim, dropout, convolved, causal=True)

    def project(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output (S,B,e) → its keys and values, (B,H,S,d/H) each: the same for all tokens."""
        return self._heads(self.k_proj(encoded)), self._heads(self.v_proj(encoded))

    def forward(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        pads: Tensor | None = None,
        query_pads: Tensor | None = None,
    ) -> Tensor:
        """x (T,B,d), keys and values of `project`, pads (B,S) of the source and (B,T) of x → (T,B,d)."""
        return self._attend(self._project("q", x, query_pads), keys, values, _not(pads))

    def step(
        self,
        x: Tensor,
        state: Tensor | None,
        keys: Tensor,
        values: Tensor,
        pads: Tensor | None = None,
        query_pads: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The next n tokens, x (n,B,d); the state is that of the queries' convolution, None without one."""
        states = {} if state is None else {"q": state}
        queries = self._project_next("q", x, query_pads, states)
        return self._attend(queries, keys, values, _not(pads)), states.get("q")


def _not(pads: Tensor | None) -> Tensor | None:
    return None if pads is None else ~pads[:, None, None]
