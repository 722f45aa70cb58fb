"""Multi-head attention (Vaswani et al. 2017): over the sequence itself, all of it or a window, and over the encoder."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.linear import Linear

State = tuple[Tensor, Tensor, Tensor]


class _Attention(nn.Module):
    """The four projections, under fairseq's names, and the heads."""

    def __init__(self, embed_dim: int, num_heads: int, source_dim: int, dropout: float):
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

    def _heads(self, x: Tensor) -> Tensor:
        """(T,B,d) → (B,H,T,d/H)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
        """query (n,B,d), keys and values (B,H,S,d/H), seen (B or 1, 1, n or 1, S) bool → (n,B,d)."""
        out = F.scaled_dot_product_attention(
            self._heads(self.q_proj(query)), keys, values, attn_mask=seen, dropout_p=self.dropout_module.rate
        )
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2))


class SelfAttention(_Attention):
    """Multi-head self-attention in which a token sees `left` tokens before it, itself and `right` tokens after it.

    A pad sees itself too, so that no row of the softmax is empty: what it computes is never read, but a NaN would
    spread.

    Args:
        embed_dim, num_heads: d, and H that divides it.
        left, right: how many tokens are seen on either side, None for all; right = 0 is causal.
        dropout: of the attention weights.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, left: int | None, right: int | None, dropout: float = 0.0):
        super().__init__(embed_dim, num_heads, embed_dim, dropout)
        self.left = left
        self.right = right

    def forward(self, x: Tensor, pads: Tensor | None = None) -> Tensor:
        """The whole sequence at once: x (T,B,d), pads (B,T) bool and true at pads, on either side → (T,B,d)."""
        seen = None
        if pads is not None or (self.left, self.right) != (None, None):
            if pads is None:
                pads = torch.zeros(1, x.shape[0], dtype=torch.bool, device=x.device)
            seen = self._seen(x.shape[0], pads)
        return self._attend(x, self._heads(self.k_proj(x)), self._heads(self.v_proj(x)), seen)

    def step(self, x: Tensor, state: State | None, pads: Tensor | None = None) -> tuple[Tensor, State]:
        """The next n ≥ 1 tokens of a causal sequence, x (n,B,d) and pads (B,n) → ((n,B,d), state).

        state: None to begin with, then what the call before returned: keys and values (B,H,S,d/H) and pads (B,S) of
            the last S tokens, min(seen, left) of them.
        """
        if self.right != 0:
            raise ValueError(f"step needs causal attention, right = 0: got right={self.right}")
        keys, values = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        if pads is None:
            pads = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool, device=x.device)
        if state is not None:
            keys, values = torch.cat([state[0], keys], dim=2), torch.cat([state[1], values], dim=2)
            pads = torch.cat([state[2], pads], dim=1)
        out = self._attend(x, keys, values, self._seen(x.shape[0], pads))
        if self.left is not None:
            kept = slice(max(0, keys.shape[2] - self.left), None)
            keys, values, pads = keys[:, :, kept], values[:, :, kept], pads[:, kept]
        return out, (keys, values, pads)

    @staticmethod
    def reorder(state: State | None, order: Tensor) -> State | None:
        """Beam search: the state in which row n of the batch is what row order[n] was; order (B',) int64."""
        return None if state is None else tuple(part.index_select(0, order) for part in state)  # type: ignore[return-value]

    def _seen(self, new: int, pads: Tensor) -> Tensor:
        """(B,1,n,S): which of the S keys each of the last n tokens sees; pads (B,S)."""
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
    """

    def __init__(self, embed_dim: int, num_heads: int, *, encoder_dim: int, dropout: float = 0.0):
        super().__init__(embed_dim, num_heads, encoder_dim, dropout)

    def project(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output (S,B,e) → its keys and values, (B,H,S,d/H) each: the same for all tokens."""
        return self._heads(self.k_proj(encoded)), self._heads(self.v_proj(encoded))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, pads: Tensor | None = None) -> Tensor:
        """x (n,B,d), keys and values of `project`, pads (B,S) of the source → (n,B,d)."""
        seen = None if pads is None else ~pads[:, None, None]
        return self._attend(x, keys, values, seen)
