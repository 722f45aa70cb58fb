"""Self-attention limited to a window of tokens (row 2 of the paper's ablation)."""

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor

_KEYS, _VALUES, _PADS = "prev_key", "prev_value", "prev_key_padding_mask"  # fairseq's names, batch first


class WindowAttention(MultiheadAttention):
    """fairseq's multi-head self-attention, its parameters and names, where a token sees `left` tokens before it, itself
    and `right` tokens after it.

    A pad sees itself too, so that no row of the softmax is empty: what it computes is never read, but a NaN would
    spread.

    Args:
        embed_dim, num_heads, dropout, q_noise, qn_block_size: MultiheadAttention's.
        left, right: how many tokens are seen on either side; right = 0 is causal.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, left: int, right: int, **options):
        super().__init__(embed_dim, num_heads, self_attention=True, **options)
        self.left = left
        self.right = right

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """query (T,B,d) → ((T,B,d), None). `key` and `value` are the query again and `attn_mask` is causality, which
        the window has; they are not read.

        Args:
            query: with an incremental state, the n ≥ 1 tokens that come next; else the whole sequence.
            key_padding_mask: (B,T) bool, true at pads.
            incremental_state: fairseq's dictionary of one generation; it keeps the last `left` keys and values.
        """
        new = query.shape[0]
        q, k, v = (self._heads(projection(query)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        pads = key_padding_mask
        if pads is None:
            pads = torch.zeros(query.shape[1], new, dtype=torch.bool, device=query.device)
        if incremental_state is not None:
            before = self._get_input_buffer(incremental_state)
            if before:
                k, v = torch.cat([before[_KEYS], k], dim=2), torch.cat([before[_VALUES], v], dim=2)
                pads = torch.cat([before[_PADS], pads], dim=1)
            kept = slice(max(0, k.shape[2] - self.left), None)
            buffer = {_KEYS: k[:, :, kept], _VALUES: v[:, :, kept], _PADS: pads[:, kept]}
            self._set_input_buffer(incremental_state, buffer)
        dropout = self.dropout_module
        probability = dropout.p if dropout.training or dropout.apply_during_inference else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self._seen(new, pads).unsqueeze(1), dropout_p=probability
        )
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2)), None

    def _heads(self, x: Tensor) -> Tensor:
        """(T,B,d) → (B,H,T,d/H)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)

    def _seen(self, new: int, pads: Tensor) -> Tensor:
        """(B,n,T): which of the T keys each of the last n tokens sees."""
        keys = torch.arange(pads.shape[1], device=pads.device)
        distance = keys - keys[pads.shape[1] - new :].unsqueeze(1)
        window = (distance >= -self.left) & (distance <= self.right)
        return window & (~pads.unsqueeze(1) | (distance == 0))

    def extra_repr(self) -> str:
        return f"left={self.left}, right={self.right}"
